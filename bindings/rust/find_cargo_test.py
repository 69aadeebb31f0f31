#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/find_cargo.sh passes by a cargo that does not run, as rustup's without a toolchain."""

import os
import subprocess
import tempfile
import unittest

SCRIPT = os.path.join(os.environ["KVM_SOURCE_DIR"], "scripts/find_cargo.sh")


class FindCargo(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()

    def tearDown(self):
        self.folder.cleanup()

    def cargo(self, name, text, mode=0o755):
        """A folder with a program `cargo`."""
        folder = os.path.join(self.folder.name, name)
        os.makedirs(folder)
        with open(f"{folder}/cargo", "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\n{text}\n")
        os.chmod(f"{folder}/cargo", mode)
        return folder

    def find(self, *folders):
        result = subprocess.run(["/bin/sh", SCRIPT], capture_output=True, text=True, check=True,
                                env={"PATH": ":".join(folders)})
        self.assertEqual(result.stderr, "")
        return result.stdout.rstrip("\n")

    def test_the_first_that_runs(self):
        fails = self.cargo("fails", "echo 'error: rustup could not choose a version' >&2; exit 1")
        data = self.cargo("data", "exit 0", mode=0o644)
        first = self.cargo("first", "echo cargo 1.63.0")
        second = self.cargo("second", "echo cargo 1.64.0")
        absent = os.path.join(self.folder.name, "absent")
        self.assertEqual(self.find(absent, data, fails, first, second), f"{first}/cargo")
        self.assertEqual(self.find(second, first), f"{second}/cargo")

    def test_debians_is_tried_where_path_has_none(self):
        found = self.find(self.cargo("fails", "exit 1"))
        self.assertIn(found, ("", "/usr/bin/cargo"))
        self.assertEqual(found != "", os.access("/usr/bin/cargo", os.X_OK))


if __name__ == "__main__":
    unittest.main()
