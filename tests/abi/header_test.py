"""kvm.h compiles as C99, C11 and C++20, alone and beside <linux/kvm.h> in both orders, without a
warning and without padding that nobody wrote down. Usage: header_test.py CC CXX INCLUDE_DIR"""

import os
import subprocess
import sys
import tempfile
import unittest

CC, CXX, INCLUDE = sys.argv[1:4]
FLAGS = ["-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Wpadded", "-Wconversion", "-Wshadow",
         "-Wundef", "-Werror"]
LANGUAGES = [("c99", [CC, "-std=c99", "-Wstrict-prototypes"], ".c"),
             ("c11", [CC, "-std=c11", "-Wstrict-prototypes"], ".c"),
             ("c++20", [CXX, "-std=c++20"], ".cc")]
CASES = {
    "alone": '#include "kvm.h"\n',
    "twice": '#include "kvm.h"\n#include "kvm.h"\n',
    "before linux/kvm.h": '#include "kvm.h"\n#include <linux/kvm.h>\n',
    "the GPU part": '#include "kvm_cuda.h"\n#include "kvm_cuda.h"\n',
    "the GPU part after kvm.h": '#include "kvm.h"\n#include "kvm_cuda.h"\n',
    "after linux/kvm.h": '#include <linux/kvm.h>\n#include "kvm.h"\n',
}


def compile_text(command, suffix, text):
    """What the compiler says about text; empty when it is content."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "case" + suffix)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "int kvm_header_case(void);\n")
        run = subprocess.run(command + FLAGS + ["-I", INCLUDE, path], capture_output=True,
                             text=True)
        return run.stderr if run.returncode else ""


class HeaderTest(unittest.TestCase):
    def test_header_compiles(self):
        for name, command, suffix in LANGUAGES:
            for case, text in CASES.items():
                with self.subTest(language=name, case=case):
                    self.assertEqual(compile_text(command, suffix, text), "")

    def test_the_flags_notice_padding(self):
        text = '\nstruct holed { char a; long b; };\nchar x[sizeof(struct holed)];\n'
        self.assertIn("padded", compile_text(LANGUAGES[0][1], ".c", text))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
