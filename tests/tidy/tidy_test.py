"""Shows that tidy.py finds what it is there to find: each rule gets a tree that breaks it once, and
a tree that is clean gives nothing."""

import os
import re
import subprocess
import tempfile
import unittest

import tidy

HEAD = "// SPDX-License-Identifier: Apache-2.0\n"
# Spelled in two pieces so that this file passes its own subject.
MARKER = "TO" + "DO"
MACHINE_PATH = "/wo" + "rk/main"


def header(path, body=""):
    guard = "KVM_" + path.replace("/", "_").replace(".", "_").upper() + "_"
    return f"{HEAD}#ifndef {guard}\n#define {guard}\n{body}\n#endif  // {guard}\n"


class TidyTest(unittest.TestCase):
    def findings(self, files):
        with tempfile.TemporaryDirectory() as root:
            for path, text in files.items():
                os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                    file.write(text)
            return tidy.Tidy(root).run()

    def code(self, path, body, head=HEAD):
        """Findings of one source file whose CMakeLists.txt lists it."""
        folder, name = os.path.split(path)
        return self.findings({path: head + body, f"{folder}/CMakeLists.txt": f"x(y {name})\n"})

    def assert_rule(self, findings, rule, text=""):
        self.assertEqual(len(findings), 1, findings)
        self.assertIn(f": {rule}: ", findings[0])
        self.assertIn(text, findings[0])

    def test_clean_tree_has_no_findings(self):
        self.assertEqual(self.findings({
            "base/a.h": header("base/a.h", '#include "kvm.h"\n'),
            "base/a.cc": HEAD + '#include "base/a.h"\n\n#include <vector>\n',
            "base/CMakeLists.txt": "kvm_add_library(kvm_base\n  SOURCES a.cc)\n",
            "README.md": "x" * 300 + "\n"}), [])

    def test_include_directions(self):
        cases = [("base/a.cc", "engine/b.h"), ("attention/a.cc", "tiers/b.h"),
                 ("engine/a.cc", "ipc/wire.h"), ("tiers/a.cc", "attention/b.h"),
                 ("policies/a.cc", "engine/b.h"), ("client/thin.cc", "engine/b.h"),
                 ("client/embedded.cc", "ipc/wire.h"), ("tools/a.cc", "ipc/wire.h"),
                 ("examples/x/a.c", "base/status.h"), ("daemon/a.cc", "attention/attention.h"),
                 ("codecs/a.cc", "kvm.h"), ("engine/a.cc", "tests/x.h"),
                 ("engine/a.cc", "bench/x.h")]
        for path, name in cases:
            with self.subTest(path=path, name=name):
                self.assert_rule(self.code(path, f'#include "{name}"\n'), "include", name)

    def test_rooms_of_the_engine(self):
        cases = [("engine/store/a.cc", "engine/index/b.h"), ("engine/index/a.cc", "engine/run/b.h"),
                 ("engine/attend/a.cc", "engine/engine.h"), ("engine/cellar/a.cc", "engine/b.h"),
                 ("engine/run/a.cc", "engine/cellar/b.h")]
        for path, name in cases:
            with self.subTest(path=path, name=name):
                self.assert_rule(self.code(path, f'#include "{name}"\n'), "room", "engine/")
        for path, name in [("engine/index/a.cc", "engine/store/b.h"),
                           ("engine/store/a.cc", "engine/store/b.h"),
                           ("engine/run/a.cc", "engine/engine.h"),
                           ("engine/engine.h", "engine/store/b.h")]:
            with self.subTest(path=path, name=name):
                text = "#include \"" + name + "\"\n"
                self.assertNotIn("room", " ".join(self.code(path, text)))

    def test_allowed_includes(self):
        cases = [("engine/a.cc", "attention/attention.h"), ("attention/a.cc", "hash_index/lsh.h"),
                 ("client/thin.cc", "ipc/wire.h"), ("client/embedded.cc", "engine/engine.h"),
                 ("tools/a.cc", "kvm.h"), ("tools/a.cc", "base/status.h"),
                 ("tests/unit/x/a.cc", "ipc/wire.h"),
                 ("bench/a.cc", "engine/engine.h"), ("daemon/a.cc", "engine/engine.h")]
        for path, name in cases:
            with self.subTest(path=path, name=name):
                self.assertEqual(self.code(path, f'#include "{name}"\n'), [])

    def test_public_header_in_angles_obeys_the_directions(self):
        self.assert_rule(self.code("tiers/a.cc", "#include <kvm.h>\n"), "include", "kvm.h")

    def test_include_must_be_rooted(self):
        self.assert_rule(self.code("base/a.cc", '#include "status.h"\n'), "include", "root")

    def test_unknown_folder_has_no_include_row(self):
        self.assert_rule(self.code("novel/a.cc", '#include "base/a.h"\n'), "include", "no row")

    def test_isa_file_includes(self):
        self.assert_rule(self.code("attention/x_avx2.cc", "#include <vector>\n"), "isa-include")
        self.assertEqual(self.code("attention/x_avx2.cc", "#include <immintrin.h>\n"), [])

    def test_columns_tabs_spaces_newline(self):
        self.assertEqual(self.code("base/a.cc", "// " + "x" * 97 + "\n"), [])
        self.assert_rule(self.code("base/a.cc", "// " + "x" * 98 + "\n"), "columns", "101")
        self.assert_rule(self.code("base/a.cc", "\tint a;\n"), "tab")
        self.assert_rule(self.code("base/a.cc", "int a; \n"), "trailing-space")
        self.assert_rule(self.code("base/a.cc", "int a;"), "newline")

    def test_columns_count_characters_not_bytes(self):
        self.assertEqual(self.code("base/a.cc", "// " + "\u00e9" * 97 + "\n"), [])

    def test_guard(self):
        self.assert_rule(self.findings({"base/a.h": header("base/b.h")}), "guard", "KVM_BASE_A_H_")

    def test_guard_of_public_headers(self):
        text = HEAD + "#ifndef KVM_CUDA_H_\n#define KVM_CUDA_H_\n#endif\n"
        self.assertEqual(self.findings({"include/kvm_cuda.h": text}), [])

    def test_licence(self):
        self.assert_rule(self.code("base/a.cc", "int a;\n", head=""), "licence")

    def test_banned_calls_name_the_replacement(self):
        cases = [("base/a.cc", "strcpy(a, b);", "snprintf"), ("base/a.cc", "sprintf(a, b);", "fmt"),
                 ("base/a.cc", "int x = rand();", "generator"),
                 ("base/a.cc", "using namespace std;", "std::"),
                 ("ipc/a.cc", "std::counting_semaphore<4> s(0);", "doorbell"),
                 ("daemon/a.cc", "std::latch l(1);", "condition_variable"),
                 ("client/a.cc", "std::atomic_wait(&x, 1);", "doorbells"),
                 ("ipc/a.cc", "std::atomic<int> x; void f() { x.wait(0); }", "doorbells"),
                 ("ipc/a.cc", "void f(std::atomic<int>& x) { x.notify_one(); }", "doorbells"),
                 ("engine/a.cc", "throw 1;", "Status"), ("engine/a.cc", "assert(x);", "KVM_ASSERT")]
        for path, body, instead in cases:
            with self.subTest(body=body):
                self.assert_rule(self.code(path, body + "\n"), "banned", instead)

    def test_not_banned(self):
        cases = ["// strcpy(a, b)", 'auto s = "sprintf(";', "snprintf(a, 1, b);", "operand(1);",
                 "/* throw\n throw */", "static_assert(true);", "int x = 1'000; int y = 'a';",
                 "std::condition_variable c; void f() { c.notify_one(); c.wait(lock); }"]
        for body in cases:
            with self.subTest(body=body):
                self.assertEqual(self.code("ipc/a.cc", body + "\n"), [])

    def test_contributing_has_the_include_rules(self):
        page = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../CONTRIBUTING.md")
        with open(page, encoding="utf-8") as file:
            text = file.read()
        rules = {}
        table = text[text.index("| folder | may include"):].split("\n\n")[0].split("\n")[2:]
        for row in table:
            folders, allowed = (re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[1:3])
            rules.update({folder: set(allowed) for folder in folders})
        for folder in tidy.FREE_FOLDERS:
            self.assertEqual(rules.pop(folder), set())
        rules["client embedded"] = rules.pop("client/embedded*")
        rules["tools offline"] = rules.pop("tools/kvmctl/offline*")
        self.assertEqual(rules, tidy.INCLUDE_RULES)

    def test_unlisted_source(self):
        files = {"base/a.cc": HEAD, "base/CMakeLists.txt": "kvm_add_library(kvm_base ba.cc)\n"}
        self.assert_rule(self.findings(files), "unlisted")
        files["base/CMakeLists.txt"] = "# a.cc\n"
        self.assert_rule(self.findings(files), "unlisted")
        files["CMakeLists.txt"] = "add_library(x base/a.cc)\n"
        self.assertEqual(self.findings(files), [])

    def dead(self, declared, source="", more=None):
        return [finding for finding in self.findings({
            "base/a.h": header("base/a.h", declared), "base/a.cc": HEAD + source,
            "base/CMakeLists.txt": "kvm_add_library(kvm_base a.cc b.cc)\n", **(more or {})})]

    def test_dead_declarations(self):
        cases = [("int f(int x);", ""), ("int f(int x);", "int f(int x) { return x; }\n"),
                 ("int f(int x);", "// f(1)\nconst char* s = \"f(1)\";\n"),
                 ("struct A {\n  static bool f();\n};", "bool A::f() { return A(); }\n"),
                 ("[[nodiscard]] inline std::span<int> f() { return {}; }", ""),
                 ("inline constexpr int kOne = 1;", ""), ("class B;", ""), ("struct C {};", "")]
        for declared, source in cases:
            with self.subTest(declared=declared, source=source):
                self.assert_rule(self.dead(declared, source), "dead", "'")

    def test_declarations_that_are_used(self):
        self.assertEqual(self.dead("int f(int x);", "int g() { return f(1); }\n"), [])
        self.assertEqual(self.dead("int f(int x);", "int g(bool b) {\n  return b\n    ? 1\n"
                                   "    : f(2);\n}\n"), [])
        self.assertEqual(self.dead("void f();", "void g() {\n  kvm::f();\n}\n"), [])
        self.assertEqual(self.dead("#define F(x) f(x)\nint f(int x);"), [])
        self.assertEqual(self.dead("constexpr int kOne = 1;\nint x[kOne];"), [])
        test = {"tests/b.cc": HEAD + "int x = f(1);\n", "tests/CMakeLists.txt": "x(y b.cc)\n"}
        self.assertEqual(self.dead("int f(int x);", more=test), [])

    def test_marker_words_and_machine_paths(self):
        self.assert_rule(self.findings({"docs/a.md": f"{MARKER}: x\n"}), "marker", MARKER)
        self.assert_rule(self.findings({"docs/a.md": f"see {MACHINE_PATH}\n"}), "machine-path")
        self.assertEqual(self.findings({"docs/a.md": "$HOME/work/x and a/root/b, AUTODOC\n"}), [])

    def test_file_size(self):
        with tempfile.TemporaryDirectory() as root:
            with open(os.path.join(root, "weights.bin"), "wb") as file:
                file.truncate(tidy.MAX_FILE_BYTES + 1)
            self.assert_rule(tidy.Tidy(root).run(), "size")

    def test_tree_size(self):
        with tempfile.TemporaryDirectory() as root:
            for index in range(5):
                with open(os.path.join(root, f"{index}.bin"), "wb") as file:
                    file.truncate(tidy.MAX_FILE_BYTES)
            self.assert_rule(tidy.Tidy(root).run(), "size", "tracked")

    def test_ignored_files_do_not_count(self):
        with tempfile.TemporaryDirectory() as root:
            subprocess.run(["git", "init", "-q", root], check=True)
            for path, text in {".gitignore": "out/\n", "out/a.cc": "\t"}.items():
                os.makedirs(os.path.dirname(os.path.join(root, path)) or root, exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                    file.write(text)
            self.assertEqual(tidy.Tidy(root).run(), [])

    def test_exit_status(self):
        with tempfile.TemporaryDirectory() as root:
            self.assertEqual(tidy.main([root]), 1)  # Nothing looked at is no pass.
            with open(os.path.join(root, "a.md"), "w", encoding="utf-8") as file:
                file.write("fine\n")
            self.assertEqual(tidy.main([root]), 0)


if __name__ == "__main__":
    unittest.main()
