"""Tests of the ABI tests: the reader of kvm.h understands it, and the checks find faults.
Usage: abi_tools_test.py CC"""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import unittest

import layout_test
import symbols_test
from abi_header import Header

CC = sys.argv[1] if len(sys.argv) > 1 else "cc"

TEXT = """
#define KVM_API __attribute__((x))
#define KVM_POSITION_END (UINT64_MAX)
#define KVM_MACRO(x) x
enum { KVM_A = 1, /* KVM_API kvm_status kvm_comment(void); */ KVM_B };
typedef struct kvm_opaque kvm_opaque;
typedef struct kvm_pair {
  uint32_t struct_size; // not, a, field;
  uint64_t reserved[4];
  const char *name, *other;
  void (*callback)(int level, void *user);
} kvm_pair;
KVM_API kvm_status kvm_one(const kvm_pair *p,
                           void (*f)(int));
KVM_API const char *kvm_two(void);
static inline int kvm_inline(void) { return 0; }
"""


class HeaderReaderTest(unittest.TestCase):
    def test_reads_everything_once(self):
        header = Header(TEXT)
        self.assertEqual(header.functions, ["kvm_one", "kvm_two"])
        self.assertEqual(header.structs, [("kvm_pair", ["struct_size", "reserved", "name", "other",
                                                        "callback"])])
        self.assertEqual(header.constants, ["KVM_A", "KVM_B", "KVM_POSITION_END"])

    def test_refuses_what_it_does_not_understand(self):
        with self.assertRaises(ValueError):
            Header("typedef struct kvm_x { union { int a; } u; } kvm_x;")


class CheckTest(unittest.TestCase):
    """Each case runs a check over a made-up header and library in a folder of its own."""

    NAMES = [f"kvm_f{i}" for i in range(12)]
    MAP = "KVM_0 { global: kvm_*; local: *; };"

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def quiet(self, function, *arguments):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            status = function(*arguments)
        return status, out.getvalue()

    def symbols(self, defined, version_map=MAP, soname="libkvm.so.0"):
        header = self.write("kvm.h", "".join(f"KVM_API int {n}(void);\n" for n in self.NAMES))
        source = self.write("a.c", "".join(f"int {n}(void) {{ return 0; }}\n" for n in defined))
        library = os.path.join(self.folder, "libkvm.so")
        subprocess.run([CC, "-shared", "-fPIC", source, "-o", library, f"-Wl,-soname,{soname}",
                        f"-Wl,--version-script={self.write('a.map', version_map)}"], check=True)
        return self.quiet(symbols_test.main, library, "libkvm.so.0", header)

    def test_symbols(self):
        self.assertEqual(self.symbols(self.NAMES)[0], 0)
        for change, finding in [
                (dict(defined=self.NAMES + ["kvm_extra"]), "not in kvm.h: kvm_extra"),
                (dict(defined=self.NAMES[1:]), "not exported: kvm_f0"),
                (dict(defined=self.NAMES, soname="libkvm.so.1"), "soname is libkvm.so.1"),
                (dict(defined=self.NAMES + ["other"], version_map="KVM_0 { global: *; };"),
                 "not in kvm.h: other"),
                (dict(defined=self.NAMES, version_map="KVM_9 { global: kvm_*; local: *; };"),
                 "version 'KVM_9'")]:
            with self.subTest(finding=finding):
                status, out = self.symbols(**change)
                self.assertEqual(status, 1)
                self.assertIn(finding, out)

    def test_layout(self):
        def header(field, value):
            structs = "".join(f"typedef struct kvm_s{i} {{ int a; {field} b; }} kvm_s{i};\n"
                              for i in range(12))
            names = ", ".join(f"KVM_C{i} = {value} + {i}" for i in range(12))
            self.write("kvm.h", f"enum {{ {names} }};\n{structs}")

        record = self.write("record.txt", "")
        header("int", 1)
        check = [layout_test.main, CC, os.path.join(self.folder, "kvm.h"), record]
        self.assertEqual(self.quiet(*check)[0], 1)
        self.assertEqual(self.quiet(*check, "--update")[0], 0)
        self.assertEqual(self.quiet(*check)[0], 0)
        header("long", 1)
        self.assertIn("+kvm_s0 16", self.quiet(*check)[1])
        header("int", 2)
        self.assertEqual(self.quiet(*check)[0], 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
