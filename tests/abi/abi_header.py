"""Reads include/kvm.h: which functions, structures and constants it declares. The ABI tests compare
this with the compiled library and with the recorded layout."""

import re


def strip_comments(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)


def strip_directives(text):
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.M)


class Header:
    """functions: sorted names marked KVM_API.  structs: [(name, [field])] in order.
    constants: [name] of enumerators and of numeric KVM_ macros, in order."""

    def __init__(self, text):
        bare = strip_comments(text)
        code = strip_directives(bare)
        self.functions = sorted(re.findall(r"\bKVM_API\b[^;()]*?\b(kvm_\w+)\s*\(", code))
        self.structs = []
        for name, body in re.findall(r"typedef\s+struct\s+(kvm_\w+)\s*\{(.*?)\}\s*\1\s*;", code,
                                     re.S):
            self.structs.append((name, self._fields(body)))
        self.constants = []
        for body in re.findall(r"\benum\s*(?:kvm_\w+\s*)?\{(.*?)\}", code, re.S):
            self.constants += re.findall(r"(?:^|,)\s*(KVM_\w+)", body)
        self.constants += re.findall(r"^#define\s+(KVM_\w+)\s+\(?[-(\w]", bare, re.M)
        self.constants = [c for c in self.constants if c not in {"KVM_API", "KVM_H_"}]

    @staticmethod
    def _fields(body):
        if re.search(r"\bunion\b|\{", body):
            raise ValueError("nested structures and unions are not understood here")
        fields = []
        for declaration in body.split(";"):
            if not declaration.strip():
                continue
            pointer = re.search(r"\(\s*\*\s*(\w+)\s*\)", declaration)
            if pointer:
                fields.append(pointer.group(1))
                continue
            first, *more = declaration.split(",")
            for part in [first] + more:
                fields.append(re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*(?::\s*\w+\s*)?$",
                                        part.strip()).group(1))
        return fields
