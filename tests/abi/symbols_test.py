"""A shared library exports the functions that its headers mark KVM_API, under version KVM_0, and
nothing else; its soname is the one promised. Usage: symbols_test.py LIBRARY SONAME HEADER..."""

import re
import subprocess
import sys

from abi_header import Header


def main(library, soname, *header_paths):
    declared = set()
    for path in header_paths:
        with open(path, encoding="utf-8") as file:
            declared.update(Header(file.read()).functions)
    out = subprocess.run(["nm", "-D", "--defined-only", "--with-symbol-versions", library],
                         check=True, capture_output=True, text=True).stdout
    findings = []
    exported = set()
    for line in out.splitlines():
        kind, name = line.split()[-2:]
        if kind == "A":
            continue  # The version node itself.
        name, _, version = name.partition("@@")
        exported.add(name)
        if kind != "T" or version != "KVM_0":
            findings.append(f"exported as '{kind}' version '{version}': {name}")
    findings += [f"exported but not in kvm.h: {n}" for n in sorted(exported - set(declared))]
    findings += [f"in kvm.h but not exported: {n}" for n in sorted(set(declared) - exported)]
    if len(declared) < 10:
        findings.append("kvm.h was not understood: too few functions found")
    dynamic = subprocess.run(["readelf", "-d", library], check=True, capture_output=True,
                             text=True).stdout
    found = re.search(r"SONAME.*\[(.*)\]", dynamic)
    if not found or found.group(1) != soname:
        findings.append(f"soname is {found and found.group(1)}, not {soname}")
    print("\n".join(findings) or f"{len(exported)} functions exported, soname {soname}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
