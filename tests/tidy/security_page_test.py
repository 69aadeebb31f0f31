#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/security.md names the test of each rule: every test that it names is there, and every rule
names one."""
import pathlib
import re
import sys

RULES = 16
TEST = re.compile(r"^TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", re.MULTILINE)


def findings(page, tests):
    """What is wrong with the page, given the names of all tests."""
    rows = re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", page, re.MULTILINE)
    numbers = [int(number) for number, _ in rows]
    if numbers != list(range(1, RULES + 1)):
        yield f"the rules are numbered {numbers}"
    for number, cell in rows:
        named = re.findall(r"`(\w+\.\w+)`", cell)
        if not named:
            yield f"rule {number} names no test"
        for name in named:
            if name not in tests:
                yield f"rule {number} names {name}, which is no test"


def main(root):
    tests = set()
    for path in root.glob("tests/**/*.cc"):
        tests.update(".".join(found) for found in TEST.findall(path.read_text()))
    page = (root / "docs/security.md").read_text()
    # The check itself can fail.
    broken = page.replace("`Validate.GoodStep`", "`Validate.NoSuchTest`")
    if not any("NoSuchTest" in finding for finding in findings(broken, tests)):
        print("a test that is not there was not noticed")
        return 1
    found = list(findings(page, tests))
    print("\n".join(found) or f"security page: {RULES} rules, each with its tests")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
