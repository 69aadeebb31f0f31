#!/usr/bin/env python3
"""The rules of the house that a program can check. Run by ctest as `tidy`; prints one line for each
finding, `path:line: rule: what is wrong and what to do`, and exits 1 when there is one.

Usage: tidy.py [ROOT]. Looks at the files that git knows or would add; without git, at the whole
tree except build/. Python standard library only.
"""

import collections
import os
import re
import subprocess
import sys

MAX_COLUMNS = 100
MAX_FILE_BYTES = 12 << 20
MAX_TREE_BYTES = 48 << 20

# Who may include whom: a row's files may include "<entry>/..." besides "<row>/..." itself.
INCLUDE_RULES = {
    "base": {"kvm.h"},
    "ipc": {"kvm.h", "base"},
    "codecs": {"base"},
    "hash_index": {"base", "codecs"},
    "tiers": {"base", "codecs"},
    "policies": {"base"},
    "attention": {"base", "codecs", "hash_index"},
    "engine": {"kvm.h", "base", "codecs", "hash_index", "attention", "tiers", "policies"},
    "device": {"kvm.h", "base", "ipc", "codecs", "tiers", "attention"},
    "daemon": {"kvm.h", "base", "ipc", "tiers", "device", "engine"},
    "client": {"kvm.h", "base", "codecs", "ipc"},
    "client embedded": {"kvm.h", "base", "attention", "codecs", "engine", "device"},
    "tools": {"kvm.h", "base"},
    "tools offline": {"kvm.h", "base", "tiers", "engine"},
    "bindings": {"kvm.h"},
    "examples": {"kvm.h"},
    "cmake": set(),
}
# The rooms of engine/, in order: the files of each may include its own and those before it, and
# only the last one's include engine/engine.h, whose own includes are values.
ENGINE_ROOMS = ["tasks", "stream", "space", "store", "index", "retention", "image", "attend", "run"]
FREE_FOLDERS = {"tests", "bench"}  # They may include everything; nothing includes them.
PUBLIC_HEADERS = {"kvm.h", "kvm_cuda.h"}
SOURCE_FOLDERS = set(INCLUDE_RULES) - {"client embedded", "tools offline", "cmake", "examples",
                                       "bindings"}
CROSS_PROCESS = {"ipc", "daemon", "client"}

CODE_SUFFIXES = (".h", ".cc", ".c", ".cu", ".cuh")
COLUMN_SUFFIXES = CODE_SUFFIXES + (".py", ".sh", ".cmake", ".rs", ".fbs", ".toml", ".json")
COLUMN_NAMES = {"CMakeLists.txt", "dev", "run"}
BUILD_SUFFIXES = (".cc", ".c", ".cu")

# A file compiled for one instruction set may include only what cannot leave shared symbols behind.
ISA_SOURCE = re.compile(r"_(scalar|f16c|avx2|avx512\w*)\.cc$")
ISA_HEADERS = {"immintrin.h", "stdint.h", "stddef.h", "cstdint", "cstddef"}

# (pattern, folders or None for all C and C++ of ours, what to use)
BANNED = [
    (r"\bstrcpy\s*\(|\bstrcat\s*\(", None, "std::string, or snprintf into a sized buffer"),
    (r"\bv?sprintf\s*\(", None, "snprintf or fmt::format"),
    (r"(?<![\w.>:])gets\s*\(", None, "fgets with a size"),
    (r"\bstrtok\s*\(", None, "std::string_view::find"),
    (r"\bs?rand\s*\(", None, "the seeded generator of base/"),
    (r"\bato[ifl]l?\s*\(", None, "std::from_chars (strtol in C), which report errors"),
    (r"\balloca\s*\(", None, "a sized buffer"),
    (r"\busing\s+namespace\s+std\b", None, "names with std::"),
    (r"\bstd::(counting_semaphore|binary_semaphore)\b", CROSS_PROCESS,
     "an eventfd doorbell, or std::condition_variable between threads"),
    (r"\bstd::(latch|barrier)\b", CROSS_PROCESS, "std::condition_variable"),
    (r"\bstd::atomic(_flag)?_(wait|notify)\w*", CROSS_PROCESS, "the need-wakeup doorbells of ipc/"),
    # But as containers do, where the machine refuses memory.
    (r"\bthrow\b(?! std::bad_alloc\b)", SOURCE_FOLDERS, "a Status (base/status.h)"),
    (r"(?<![\w.])assert\s*\(", SOURCE_FOLDERS, "KVM_ASSERT (base/assert.h), or a Status for input"),
]
MARKER_WORDS = re.compile(r"\b(" + "|".join(["TO" "DO", "FIX" "ME", "X" "XX", "HA" "CK"]) + r")\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:work|root|home/\w+|Users/\w+)/\w")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
ATOMIC_NAME = re.compile(r"\bstd::atomic(?:_ref)?(?:<[^;{}()]*>|_\w+)\s*[&*]?\s*(\w+)")

IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*\b")
# A function where it is declared or defined: a type at the begin of a line, then its name. A name
# with a scope is a definition where the line is not indented, else a call.
NO_TYPE = r"(?!(?:return|else|case|new|delete|throw|goto|using|typedef|co_\w+)\b)"
FUNCTION = re.compile(rf"^[ ]*(?=\w|\[\[){NO_TYPE}[\w:<>,*&\[\] ]+[ *&]([a-z]\w*)\("
                      rf"|^(?=\w){NO_TYPE}[\w:<>,*&\[\] ]+[ *&][\w:<>]+::([a-z]\w*)\(", re.M)
CONSTANT = re.compile(r"\bconstexpr\s[\w:<>,*& ]+ (k[A-Z]\w*)\s*[={\[]")
STRUCTURE = re.compile(r"^[ ]*(?:class|struct|union) (?:alignas\(\w+\) )?([A-Z]\w*)", re.M)


def strip_code(text):
    """The text with comments and the insides of literals blanked; lines stay where they are."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)

    def blank(match):
        token = match.group(0)
        if token[0] == "'" and re.match(r"[0-9a-fA-F]", text[match.start() - 1:match.start()]):
            return token  # A digit separator, 1'000'000.
        keep = re.sub(r"[^\n]", " ", token)
        return keep if token.startswith("/") else token[0] + keep[1:-1] + token[-1]

    return pattern.sub(blank, text)


def list_files(root):
    """Paths, relative to root, of the files that are or would be tracked."""
    try:
        out = subprocess.run(
            ["git", "-c", "safe.directory=*", "-C", root, "ls-files", "-z", "--cached", "--others",
             "--exclude-standard"], capture_output=True, check=True).stdout
        names = [n for n in out.decode().split("\0") if n]
    except (OSError, subprocess.CalledProcessError):
        names = []
        for folder, folders, files in os.walk(root):
            folders[:] = [f for f in folders if f not in {".git", "build", "__pycache__"}]
            names += [os.path.relpath(os.path.join(folder, f), root) for f in files]
    return sorted(n for n in set(names) if os.path.isfile(os.path.join(root, n)))


class Tidy:
    def __init__(self, root):
        self.root = root
        self.findings = []
        self.files = list_files(root)
        self.texts = {}
        self.codes = {}  # of C and C++, without comments and literals
        for path in self.files:
            with open(os.path.join(root, path), "rb") as file:
                data = file.read(MAX_FILE_BYTES)
            if b"\0" not in data[:8192]:
                self.texts[path] = data.decode("utf-8", errors="replace")

    def report(self, path, line, rule, message):
        self.findings.append(f"{path}:{line}: {rule}: {message}")

    def run(self):
        self.check_sizes()
        for path, text in self.texts.items():
            self.check_words(path, text)
            if path.endswith(COLUMN_SUFFIXES) or os.path.basename(path) in COLUMN_NAMES:
                self.check_lines(path, text)
            if path.endswith(CODE_SUFFIXES):
                self.codes[path] = strip_code(text)
                self.check_licence(path, text)
                self.check_includes(path, text)
                self.check_banned(path, text)
            if path.endswith((".h", ".cuh")):
                self.check_guard(path, text)
            if path.endswith(BUILD_SUFFIXES):
                self.check_listed(path)
        self.check_dead()
        return self.findings

    def check_sizes(self):
        total = 0
        for path in self.files:
            size = os.path.getsize(os.path.join(self.root, path))
            total += size
            if size > MAX_FILE_BYTES:
                self.report(path, 0, "size", f"{size} bytes; a file has at most {MAX_FILE_BYTES}")
        if total > MAX_TREE_BYTES:
            self.report(".", 0, "size", f"{total} bytes tracked; at most {MAX_TREE_BYTES}")

    def check_words(self, path, text):
        for number, line in enumerate(text.split("\n"), 1):
            match = MARKER_WORDS.search(line)
            if match:
                self.report(path, number, "marker", f"'{match.group(1)}': finish it, or say in "
                            "prose what the limit is")
            match = MACHINE_PATH.search(line)
            if match:
                self.report(path, number, "machine-path", f"'{match.group(0)}' exists on one "
                            "machine only")

    def check_lines(self, path, text):
        if text and not text.endswith("\n"):
            self.report(path, text.count("\n") + 1, "newline", "the file must end with a newline")
        for number, line in enumerate(text.split("\n"), 1):
            if "\t" in line:
                self.report(path, number, "tab", "indent with spaces")
            if len(line) > MAX_COLUMNS and not (path.endswith(".json") or "http" in line):
                self.report(path, number, "columns", f"{len(line)} columns; at most {MAX_COLUMNS}")
            if line != line.rstrip():
                self.report(path, number, "trailing-space", "remove it")

    def check_licence(self, path, text):
        if "SPDX-License-Identifier: Apache-2.0" not in text.split("\n", 1)[0]:
            self.report(path, 1, "licence", "line 1 must be '// SPDX-License-Identifier: "
                        "Apache-2.0'")

    def check_guard(self, path, text):
        stem = path[len("include/"):] if path.startswith("include/") else path
        guard = re.sub(r"[^A-Za-z0-9]", "_", stem).upper() + "_"
        guard = guard if guard.startswith("KVM_") else "KVM_" + guard
        if not re.search(rf"^#ifndef {guard}\n#define {guard}$", text, re.M):
            self.report(path, 1, "guard", f"the include guard must be {guard}")

    def check_includes(self, path, text):
        folder = path.split("/", 1)[0]
        embedded = folder == "client" and os.path.basename(path).startswith("embedded")
        offline = folder == "tools" and os.path.basename(path).startswith("offline")
        row = "client embedded" if embedded else "tools offline" if offline else folder
        isa = bool(ISA_SOURCE.search(path)) and folder in SOURCE_FOLDERS
        for number, line in enumerate(text.split("\n"), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            name = match.group(2)
            if match.group(1) == "<" and name not in PUBLIC_HEADERS:
                if isa and name not in ISA_HEADERS:
                    self.report(path, number, "isa-include", f"<{name}> in a file for one "
                                f"instruction set; allowed are {', '.join(sorted(ISA_HEADERS))}")
                continue
            self.check_include(path, number, folder, row, name)

    def check_include(self, path, number, folder, row, name):
        if folder in FREE_FOLDERS or folder == "include":
            return
        target = "kvm.h" if name in PUBLIC_HEADERS else name.split("/", 1)[0]
        allowed = INCLUDE_RULES.get(row)
        if allowed is None:
            self.report(path, number, "include", f"folder {folder}/ has no row in the include "
                        "rules of tests/tidy/tidy.py")
        elif "/" not in name and name not in PUBLIC_HEADERS:
            beside = os.path.join(os.path.dirname(path), name)
            if folder not in {"examples", "bindings", "cmake"} or beside not in self.texts:
                self.report(path, number, "include", f'"{name}": write the path from the root of '
                            "the repository")
        elif target != folder and target not in allowed and name not in allowed:
            self.report(path, number, "include", f'"{name}": {row} may include only '
                        f"{', '.join(sorted(allowed | {folder}))}")

        elif folder == "engine" and target == "engine":
            self.check_room(path, number, name)

    def check_room(self, path, number, name):
        def room_of(file):
            parts = file.split("/")
            return parts[1] if len(parts) == 3 else None
        room, included = room_of(path), room_of(name)
        if room is None:
            return
        if room not in ENGINE_ROOMS or (included is not None and included not in ENGINE_ROOMS):
            unknown = room if room not in ENGINE_ROOMS else included
            self.report(path, number, "room", f"engine/{unknown}/ is no room of ENGINE_ROOMS in "
                        "tests/tidy/tidy.py")
        elif included is None and room != ENGINE_ROOMS[-1]:
            self.report(path, number, "room", f'"{name}": only engine/{ENGINE_ROOMS[-1]} knows the '
                        "facade; types that others need belong into base/ or a room")
        elif included is not None and ENGINE_ROOMS.index(included) > ENGINE_ROOMS.index(room):
            self.report(path, number, "room", f'"{name}": engine/{room} may include only '
                        f"{', '.join(ENGINE_ROOMS[:ENGINE_ROOMS.index(room) + 1])}")

    def check_banned(self, path, text):
        folder = path.split("/", 1)[0]
        code = self.codes[path]
        atomics = set(ATOMIC_NAME.findall(code)) if folder in CROSS_PROCESS else set()
        for number, line in enumerate(code.split("\n"), 1):
            if line.lstrip().startswith("#"):
                continue
            for pattern, folders, instead in BANNED:
                match = re.search(pattern, line)
                if match and (folders is None or folder in folders):
                    self.report(path, number, "banned", f"'{match.group(0).strip()}': use "
                                f"{instead}")
            for match in re.finditer(r"\b(\w+)(?:\.|->)(wait|notify_one|notify_all)\s*\(", line):
                if match.group(1) in atomics:
                    self.report(path, number, "banned", f"std::atomic::{match.group(2)}: it does "
                                "not work between processes; use the need-wakeup doorbells of ipc/")

    def check_listed(self, path):
        folder = os.path.dirname(path)
        while True:
            build_file = os.path.join(folder, "CMakeLists.txt")
            if build_file in self.texts:
                name = os.path.relpath(path, folder) if folder else path
                listed = rf"(?<![\w./-]){re.escape(name)}(?![\w.-])"
                if re.search(listed, re.sub(r"#[^\n]*", "", self.texts[build_file])):
                    return
            if not folder:
                break
            folder = os.path.dirname(folder)
        self.report(path, 0, "unlisted", "no CMakeLists.txt above it lists this file")

    def check_dead(self):
        """Finds what a header of the product declares and no code names. A function counts as named
        where its name stands more often than functions of that name are declared and defined; by
        tests and benches, too. Names that two things share hide each other: some are not found."""
        named = collections.Counter()
        declared = collections.Counter()
        for path, code in self.codes.items():
            named.update(IDENTIFIER.findall(code))
            declared.update("".join(names) for names in FUNCTION.findall(code))
        for path, code in self.codes.items():
            if path.split("/", 1)[0] not in SOURCE_FOLDERS or not path.endswith((".h", ".cuh")):
                continue
            for pattern, what in ((FUNCTION, "function"), (CONSTANT, "constant"),
                                  (STRUCTURE, "type")):
                for match in pattern.finditer(code):
                    name = match.group(match.lastindex)
                    if named[name] == (declared[name] if what == "function" else 1):
                        line = code.count("\n", 0, match.start(match.lastindex)) + 1
                        self.report(path, line, "dead", f"the {what} '{name}' is declared here and "
                                    "named nowhere; delete it")


def main(arguments):
    default_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    tidy = Tidy(arguments[0] if arguments else default_root)
    findings = tidy.run()
    for finding in findings:
        print(finding)
    print(f"tidy: {len(tidy.files)} files, {len(findings)} findings")
    return 1 if findings or not tidy.files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
