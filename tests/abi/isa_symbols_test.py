"""Objects compiled for one instruction set define nothing that the linker could share with generic
code: no weak, unique or indirect symbols, no names outside of kvm, no standard templates. Else the
code of whichever object comes first is used by both, and a program dies on an older processor.

Usage: isa_symbols_test.py CXX --sources NAME... --objects FILE..."""

import os
import re
import subprocess
import sys
import tempfile

# Weak (V, W, v, w), unique (u), indirect (i), common (C): whatever the linker may merge.
SHARED_KINDS = set("VvWwuiC")
DEFINED_KINDS = set("TDBRSG")
OURS = re.compile(r"^_ZN?K?3kvm|^kvm_")
FOREIGN_TEMPLATE = re.compile(r"^_ZN?K?S[a-z]|^_ZNK?9__gnu_cxx")
# What sanitizers and the compiler's own support routines ask for.
# Type names (_ZTI, _ZTS) are data for UBSan, the same whatever the instruction set.
RUNTIME = re.compile(r"^__|^_ZT[IS]|^_GLOBAL_OFFSET_TABLE_|^_Unwind|^DW\.ref\.")


def findings_of(path):
    out = subprocess.run(["nm", path], check=True, capture_output=True, text=True).stdout
    findings = []
    for line in out.splitlines():
        kind, name = line.split()[-2:]
        if RUNTIME.match(name):
            continue
        if kind in SHARED_KINDS:
            findings.append(f"{path}: shared symbol '{kind}' {name}")
        elif kind in DEFINED_KINDS and not OURS.match(name):
            findings.append(f"{path}: defines a name outside of kvm: {name}")
        elif kind == "U" and FOREIGN_TEMPLATE.match(name):
            findings.append(f"{path}: calls a standard template: {name}")
    return findings


def can_fail(cxx):
    """Whether each kind of fault, compiled here, is found: a test of this test."""
    faults = {
        "template": "template <class T> T twice(T x) { return x + x; }\n"
                    "namespace kvm { int f(int x) { return twice(x); } }\n",
        "inline": "namespace kvm { inline int g(int x) { return x; } int f(int x) { return g(x); } "
                  "}\n",
        "foreign": "int f(int x) { return x; }\n",
        "vector": "#include <vector>\n"
                  "namespace kvm { void f(std::vector<int>& v) { v.push_back(1); } }\n",
    }
    clean = ("namespace { int g(int x) { return x; } }\n"
             "namespace kvm { int f(int x) { return g(x); } }\n")
    for name, text in list(faults.items()) + [("clean", clean)]:
        with tempfile.TemporaryDirectory() as folder:
            source, built = os.path.join(folder, "a.cc"), os.path.join(folder, "a.o")
            with open(source, "w", encoding="utf-8") as file:
                file.write(text)
            subprocess.run([cxx, "-std=c++20", "-O0", "-c", source, "-o", built], check=True)
            if bool(findings_of(built)) == (name == "clean"):
                print(f"the check itself is wrong about the case '{name}'")
                return False
    return True


def main(arguments):
    cxx = arguments[0]
    split = arguments.index("--objects")
    sources = arguments[arguments.index("--sources") + 1:split]
    objects = arguments[split + 1:]
    chosen = [o for o in objects if any(o.endswith(f"/{s}.o") for s in sources)]
    findings = [f for path in chosen for f in findings_of(path)]
    print("\n".join(findings) or f"{len(chosen)} objects for one instruction set are clean")
    if len(chosen) != len(sources):
        print(f"{len(sources)} sources but {len(chosen)} objects")
        return 1
    return 1 if findings or not can_fail(cxx) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
