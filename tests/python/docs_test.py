#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the code of the pages about Python, in order, as a reader would, and compares what it prints
with the comments beside `print`."""

import contextlib
import importlib.util
import io
import os
import re
import unittest

import kvm
from rig import ROOT, daemon

PAGES = ("docs/python.md", "README.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
PRINTED = re.compile(r"print\(.*\) {2,}# (.+)$")
FIRST_LINES = 8  # at most, in the first example


def blocks(page):
    path = os.path.join(ROOT, page)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return BLOCK.findall(file.read())


class Docs(unittest.TestCase):
    def run_page(self, page, replace=None):
        found = {}
        for number, code in enumerate(blocks(page)):
            if "torch" in code and not importlib.util.find_spec("torch"):
                continue
            if "transformers" in code:  # has a test of its own: it needs a model
                continue
            wanted = [match.group(1) for line in code.splitlines()
                      if (match := PRINTED.search(line))]
            said = io.StringIO()
            with self.subTest(page=page, block=number), contextlib.redirect_stdout(said):
                exec(compile(code.replace(*replace) if replace else code, f"{page} {number}",
                             "exec"), found)
                if wanted:
                    self.assertEqual(said.getvalue().splitlines(), wanted)

    def test_pages_with_an_engine_in_the_process(self):
        self.assertGreater(sum(len(blocks(page)) for page in PAGES), 5)
        for page in PAGES:
            self.run_page(page)

    def test_pages_with_kvmd(self):
        os.environ["KVM_SOCKET"] = daemon().socket
        for page in PAGES:
            self.run_page(page, ("kvm.open_embedded()", "kvm.connect()"))
            with kvm.connect() as client:
                for space in client.spaces():
                    client.find_space(space.name).drop()

    def test_the_first_example_is_short(self):
        for page in PAGES:
            if "A first example" in "".join(open_page(page)):
                lines = [line for line in blocks(page)[0].splitlines() if line]
                self.assertLessEqual(len(lines), FIRST_LINES)


def open_page(page):
    path = os.path.join(ROOT, page)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return file.readlines()


if __name__ == "__main__":
    unittest.main()
