#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""./dev in a folder of its own, where programs that are not there cannot be built: what it says at
once, and that two commands do not build in one folder together."""

import os
import shutil
import signal
import stat
import subprocess
import tempfile
import unittest

SOURCE = os.environ["KVM_SOURCE_DIR"]
# Stands for CMake, which has nothing to do, and for the bench, which runs until it may end.
CMAKE = "#!/bin/sh\nexit 0\n"
BENCH = '#!/bin/sh\necho begun "$@"\nread -r _ <../may_end\n'


class Dev(unittest.TestCase):
    def setUp(self):
        folder = tempfile.mkdtemp(prefix="dev-")
        self.addCleanup(shutil.rmtree, folder)
        self.root = os.path.join(folder, "tree")
        for name in ("dev", "bench/main.cc"):
            path = os.path.join(self.root, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            shutil.copy(os.path.join(SOURCE, name), path)
        self.write("packages/debian.txt", "")
        self.write("build/release/bin/kvm-bench", BENCH)
        self.write("../bin/cmake", CMAKE)
        self.may_end = os.path.join(folder, "may_end")
        os.mkfifo(self.may_end)
        self.env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}",
                    "KVM_SKIP_INSTALL": "1"}

    def write(self, name, text):
        path = os.path.join(self.root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)

    def dev(self, *arguments):
        return subprocess.Popen([f"{self.root}/dev", *arguments], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, env=self.env,
                                start_new_session=True)

    def let_end(self):
        with open(self.may_end, "w", encoding="utf-8") as end:
            end.write("\n")

    def read_until(self, process, words):
        lines = []
        while not lines or words not in lines[-1]:
            lines.append(process.stdout.readline())
            self.assertTrue(lines[-1], f"no '{words}' in {lines}")
        return lines[-1]

    def test_help_needs_no_build(self):
        for arguments, words in ((["bench", "--help"], "\n  decode        a whole model's"),
                                 (["bench", "-h"], "\n  python        what calls cost"),
                                 (["test", "--help"], "Usage: ./dev COMMAND"),
                                 (["--help"], "Usage: ./dev COMMAND")):
            process = self.dev(*arguments)
            text, _ = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, text)
            self.assertIn(words, text, arguments)
            self.assertNotIn("==> ", text, "what it does")

    @unittest.skipUnless(shutil.which("flock"), "needs flock of util-linux")
    def test_two_commands_do_not_build_in_one_folder_together(self):
        first = self.dev("bench", "ipc", "--repeats", "7")
        self.read_until(first, "begun ipc --repeats 7")
        second = self.dev("bench", "fork")
        said = self.read_until(second, "waiting for")
        self.assertIn("build/release is in use: waiting for "
                      f"./dev bench ipc --repeats 7 (process {first.pid})\n", said)
        self.let_end()
        first.communicate(timeout=60)
        self.read_until(second, "begun fork")
        self.let_end()
        second.communicate(timeout=60)
        self.assertEqual((first.returncode, second.returncode), (0, 0))

    @unittest.skipUnless(shutil.which("flock"), "needs flock of util-linux")
    def test_what_a_killed_command_left_running_is_not_waited_for(self):
        self.write("build/release/bin/kvm-bench", '#!/bin/sh\nsleep 60 &\necho begun\nwait\n')
        first = self.dev("bench", "ipc")
        self.addCleanup(first.stdout.close)
        self.addCleanup(os.killpg, first.pid, signal.SIGKILL)
        self.read_until(first, "begun")
        first.kill()
        first.wait()
        self.write("build/release/bin/kvm-bench", "#!/bin/sh\necho begun\n")
        second = self.dev("bench", "fork")
        text, _ = second.communicate(timeout=30)
        self.assertIn("waiting for ./dev bench ipc", text)
        self.assertIn("\nbegun\n", text)
        self.assertEqual(second.returncode, 0)


if __name__ == "__main__":
    unittest.main()
