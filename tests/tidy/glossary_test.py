#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/glossary.md agrees with the code: each name of its columns "in code" is an identifier of the
product, and each word has one row."""
import pathlib
import re
import sys

import tidy

IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*\b")


def rows(page):
    """(line, word, names in code) of the tables that have a column "in code"."""
    column = None
    for number, line in enumerate(page.split("\n"), 1):
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else None
        if cells is None:
            column = None
        elif column is None:
            column = cells.index("in code") if "in code" in cells else -1
        elif column > 0 and not set(line) <= set("|-"):
            yield number, cells[0], re.findall(r"`([^`]+)`", cells[column])


def identifiers(root):
    """All identifiers of product code, comments and literals left out."""
    names = set()
    for path in tidy.list_files(str(root)):
        folder = path.split("/", 1)[0]
        if path.endswith(tidy.CODE_SUFFIXES) and folder in tidy.SOURCE_FOLDERS | {"include"}:
            text = (root / path).read_text(encoding="utf-8")
            names.update(IDENTIFIER.findall(tidy.strip_code(text)))
    return names


def findings(page, names):
    words = {}
    for number, word, named in rows(page):
        if not named:
            yield f"docs/glossary.md:{number}: '{word}' names nothing in code"
        for name in named:
            if name not in names:
                yield f"docs/glossary.md:{number}: '{word}': no product code has `{name}`"
        if word in words:
            yield f"docs/glossary.md:{number}: '{word}' is explained in line {words[word]}, too"
        words[word] = number


def main(root):
    page = (root / "docs/glossary.md").read_text(encoding="utf-8")
    names = identifiers(root)
    # The check itself can fail.
    for good, bad in (("`kvm_seq_fork`", "`kvm_seq_clone`"), ("| `kvm_append` |", "| |")):
        if good not in page or len(list(findings(page.replace(good, bad, 1), names))) == len(
                list(findings(page, names))):
            print(f"{bad} in place of {good} was not noticed")
            return 1
    found = list(findings(page, names))
    print("\n".join(found) or f"glossary: {len(list(rows(page)))} words, each with its names")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
