"""Writes the raw declarations of kvm-sys from include/kvm.h.

Usage: generate.py HEADER CRATE [--check]
CRATE/src/bindings.rs gets types, constants and functions; CRATE/tests/layout/table.rs the list of
structures, fields and constants that the layout test prints. --check writes nothing and fails when
the files are not what the header asks for. Python standard library only."""

import difflib
import os
import re
import sys

SCALARS = {
    "uint8_t": "u8", "uint32_t": "u32", "uint64_t": "u64", "int32_t": "i32", "float": "f32",
    "double": "f64",
    "size_t": "usize", "int": "c_int", "char": "c_char", "void": "c_void",
}
WRITTEN = ("// SPDX-License-Identifier: Apache-2.0\n"
           "// Written by bindings/rust/generate.py from include/kvm.h.\n")


KEYWORDS = {"where", "type", "match", "ref", "use", "in"}


def rust_name(name):
    return "r#" + name if name in KEYWORDS else name


def bare_code(text):
    """The header without comments; a string literal never holds one there."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)


def base_type(name):
    if name in SCALARS:
        return SCALARS[name]
    if name.startswith("kvm_"):
        return name
    raise ValueError(f"no Rust type is known for '{name}'")


def split_declaration(text):
    """'const char *name' -> (Rust type, 'name', array length or None)."""
    text = " ".join(text.split())
    callback = re.fullmatch(r"(\w+) \( ?\* ?(\w+) ?\) ?\((.*)\)", text)
    if callback:
        arguments = ", ".join(f"{name}: {kind}" for kind, name, _ in
                              map(split_declaration, callback.group(3).split(",")))
        result = "" if callback.group(1) == "void" else f" -> {base_type(callback.group(1))}"
        return f'Option<unsafe extern "C" fn({arguments}){result}>', callback.group(2), None
    match = re.fullmatch(r"(const )?(?:struct )?(\w+) ?((?:\* ?)*)(\w+)(?:\[(\d+)\])?", text)
    if not match:
        raise ValueError(f"not understood: '{text}'")
    const, base, stars, name, length = match.groups()
    kind = base_type(base)
    for depth in range(stars.count("*")):
        kind = ("*const " if const and depth == 0 else "*mut ") + kind
    return kind, name, length


class Header:
    """structs: [(name, [(field, Rust type)])]. handles, aliases, constants and functions alike, in
    the order of the header."""

    def __init__(self, text):
        bare = bare_code(text)
        macros = re.findall(r"^[ \t]*#define\s+(KVM_\w+)\s+\(?([-\w]+)", bare, re.M)
        code = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", "", bare, flags=re.M)
        self.structs = [(name, self._fields(body)) for name, body in re.findall(
            r"typedef\s+struct\s+(kvm_\w+)\s*\{(.*?)\}\s*\1\s*;", code, re.S)]
        self.handles = re.findall(r"typedef\s+struct\s+(kvm_\w+)\s+\1\s*;", code)
        self.aliases = [(name, base_type(base)) for base, name in
                        re.findall(r"typedef\s+(u?int\d+_t)\s+(kvm_\w+)\s*;", code)]
        self.constants = []
        for body in re.findall(r"\benum\s*\{(.*?)\}", code, re.S):
            self.constants += re.findall(r"(?:^|,)\s*(KVM_\w+)\s*=\s*([^,]+?)\s*(?=,|$)", body)
        self.constants += [(name, value) for name, value in macros if name != "KVM_API"]
        self.functions = [self._function(*found) for found in re.findall(
            r"\bKVM_API\s+([\w\s*]*?[\s*])(kvm_\w+)\s*\(((?:[^();]|\([^()]*\))*)\)\s*;", code)]
        if code.count("KVM_API") != len(self.functions):
            raise ValueError("some functions of the header were not understood")
        if code.count("typedef") != len(self.structs) + len(self.handles) + len(self.aliases):
            raise ValueError("some types of the header were not understood")

    @staticmethod
    def _fields(body):
        fields = []
        for declaration in filter(str.strip, body.split(";")):
            kind, name, length = split_declaration(declaration)
            fields.append((rust_name(name), f"[{kind}; {length}]" if length else kind))
        return fields

    @staticmethod
    def _function(result, name, arguments):
        kind = split_declaration(f"{result} result")[0]
        parts, depth = [""], 0
        for letter in arguments:
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if letter == "," and depth == 0:
                parts.append("")
            else:
                parts[-1] += letter
        if " ".join(parts[0].split()) == "void":
            parts = []
        return name, [split_declaration(part)[:2] for part in parts], kind


def constant_line(name, value):
    if name == "KVM_OK" or name.startswith("KVM_ERR_"):
        kind = "kvm_status"
    elif name.startswith("KVM_LOG_"):
        kind = "c_int"
    elif value == "UINT64_MAX":
        kind, value = "u64", "u64::MAX"
    else:
        kind = "u32"
    value = re.sub(r"\b(\d+)u\b", r"\1", value)
    return f"pub const {name}: {kind} = {value};"


def bindings(header):
    lines = [WRITTEN, "use std::os::raw::{c_char, c_int, c_void};", ""]
    lines += [f"pub type {name} = {kind};" for name, kind in header.aliases] + [""]
    lines += [constant_line(*constant) for constant in header.constants] + [""]
    for name in header.handles:
        lines += ["#[repr(C)]", "#[derive(Debug)]", f"pub struct {name} {{",
                  "    _opaque: [u8; 0],", "    _not_ours: crate::NotOurs,", "}", ""]
    for name, fields in header.structs:
        lines += ["#[repr(C)]", "#[derive(Clone, Copy, Debug)]", f"pub struct {name} {{"]
        lines += [f"    pub {field}: {kind}," for field, kind in fields]
        lines += ["}", "", f"impl Default for {name} {{"]
        if fields[0][0] == "struct_size":
            lines += ["    /// Zeros, and `struct_size`.", "    fn default() -> Self {",
                      "        // SAFETY: numbers and raw pointers; zero is a value of each.",
                      "        let mut zeros: Self = unsafe { std::mem::zeroed() };",
                      "        zeros.struct_size = std::mem::size_of::<Self>() as u32;",
                      "        zeros"]
        else:
            lines += ["    /// Zeros.", "    fn default() -> Self {",
                      "        // SAFETY: numbers and raw pointers; zero is a value of each.",
                      "        unsafe { std::mem::zeroed() }"]
        lines += ["    }", "}", ""]
    lines += ['extern "C" {']
    for name, arguments, kind in header.functions:
        result = "" if kind == "c_void" else f" -> {kind}"
        one = ", ".join(f"{argument}: {of}" for of, argument in arguments)
        line = f"    pub fn {name}({one}){result};"
        if len(line) < 100:
            lines.append(line)
        elif len(line) == 100:  # As rustfmt would have it.
            lines += [f"    pub fn {name}({one})", f"       {result};"]
        else:
            lines.append(f"    pub fn {name}(")
            for of, argument in arguments:
                line = f"        {argument}: {of},"
                if len(line) > 100:  # Only the callback is; as rustfmt would have it.
                    inner = of[len("Option<"):-1]
                    line = f"        {argument}: Option<\n            {inner},\n        >,"
                lines.append(line)
            lines.append(f"    ){result};")
    return "\n".join(lines + ["}", ""])


def layout_table(header):
    lines = [WRITTEN, "structures! {"]
    for name, fields in header.structs:
        lines.append(f"    {name} {{")
        lines += [f"        {field}," for field, _ in fields]
        lines.append("    }")
    lines += ["}", "", "constants! {"]
    return "\n".join(lines + [f"    {name}," for name, _ in header.constants] + ["}", ""])


def main(header_path, crate, mode=""):
    with open(header_path, encoding="utf-8") as file:
        header = Header(file.read())
    status = 0
    for path, text in ((os.path.join(crate, "src", "bindings.rs"), bindings(header)),
                       (os.path.join(crate, "tests", "layout", "table.rs"), layout_table(header))):
        if mode != "--check":
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            continue
        with open(path, encoding="utf-8") as file:
            written = file.read()
        diff = list(difflib.unified_diff(written.splitlines(), text.splitlines(), path,
                                         "what kvm.h asks for", lineterm=""))
        if diff:
            print("\n".join(diff))
            status = 1
    print(f"{len(header.structs)} structures, {len(header.constants)} constants, "
          f"{len(header.functions)} functions"
          + ("; run bindings/rust/generate.py (docs/rust.md)" if status else ""))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
