"""The sizes and offsets of every structure of a header and the value of every constant are those
recorded for it (kvm_layout.txt, kvm_cuda_layout.txt): a change of the ABI is seen, and is made on
purpose.

Usage: layout_test.py CC HEADER RECORD [--update]"""

import difflib
import os
import subprocess
import sys
import tempfile

from abi_header import Header


def dump(cc, path, header):
    """The layout as text, by a C program that the compiler itself answers."""
    include, name = os.path.split(os.path.abspath(path))
    lines = ["#include <stddef.h>", "#include <stdio.h>", f'#include "{name}"',
             "int main(void) {"]
    for name, fields in header.structs:
        lines.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        for field in fields:
            lines.append(f'  printf("  {field} %zu %zu\\n", offsetof({name}, {field}), '
                         f"sizeof((({name} *)0)->{field}));")
    for name in header.constants:
        lines.append(f'  printf("{name} %lld\\n", (long long){name});')
    lines += ["  return 0;", "}"]
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "dump.c"), os.path.join(folder, "dump")
        with open(source, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        subprocess.run([cc, "-std=c11", "-I", include, source, "-o", program], check=True)
        return subprocess.run([program], check=True, capture_output=True, text=True).stdout


def main(cc, path, record, update=""):
    with open(path, encoding="utf-8") as file:
        header = Header(file.read())
    if not header.structs or not header.constants:
        print(f"{path} was not understood: no structures or no constants found")
        return 1
    now = ("# Structures: size, then offset and size of each field. Constants: value.\n"
           "# After an intended change: tests/abi/layout_test.py with --update (docs/testing.md).\n"
           + dump(cc, path, header))
    if update:
        with open(record, "w", encoding="utf-8") as file:
            file.write(now)
    with open(record, encoding="utf-8") as file:
        recorded = file.read()
    diff = list(difflib.unified_diff(recorded.splitlines(), now.splitlines(), "recorded", path,
                                     lineterm=""))
    print("\n".join(diff) if diff else f"{len(header.structs)} structures, "
          f"{len(header.constants)} constants as recorded")
    return 1 if diff else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
