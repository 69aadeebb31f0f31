#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Manual pages, completions and the default configuration say what --help says. Arguments: the
folder with the pages."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from daemon_harness import BIN, kvmctl, run_kvmd

SHARE = sys.argv.pop()


def page(name):
    with open(os.path.join(SHARE, name), encoding="utf-8") as file:
        return file.read()


def plain(roff):
    """A page's words without troff's marks."""
    lines = [re.sub(r"^\.(TP|PP|B|BI|BR|RB|RI|I|IR|SS|SH|TH|nf|fi)\b ?", "", line)
             for line in roff.split("\n") if not line.startswith('.\\"')]
    text = re.sub(r"\\f[BRI]", "", " ".join(lines))
    return text.replace("\\-", "-").replace("\\&", "").replace("\\(aq", "'").replace("\\e", "\\")


def words_of(help_text):
    """Options of a --help page."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", help_text))


def commands(*path):
    """The commands below `path`, as its --help lists them."""
    lines = kvmctl(*path, "--help").stdout.split("Subcommands:")
    return [line.split()[0] for line in lines[1].split("\n") if re.match(r"  [a-z]", line)] \
        if len(lines) > 1 else []


def all_commands(*path):
    for command in commands(*path):
        yield (*path, command)
        yield from all_commands(*path, command)


class ManualPages(unittest.TestCase):
    def test_kvmctl_has_every_command_and_option(self):
        text = plain(page("kvmctl.1"))
        found = list(all_commands())
        self.assertIn(("config", "check"), found)
        self.assertGreater(len(found), 12)
        for path in found:
            if not commands(*path):
                self.assertIn(f"kvmctl {' '.join(path)}", text)
            for option in words_of(kvmctl(*path, "--help").stdout):
                self.assertIn(option, text, path)
        self.assertEqual(set(re.findall(r" --[a-z][a-z-]+", text)) -
                         {f" {o}" for path in [(), *found]
                          for o in words_of(kvmctl(*path, "--help").stdout)}, set())

    def test_exit_statuses_are_those_of_help(self):
        text = plain(page("kvmctl.1"))
        sentence = re.sub(r"\s+", " ", kvmctl("--help").stdout)
        for number, words in re.findall(r"(\d) ([a-z][^,.]+)[,.]",
                                        sentence[sentence.index("Exit status:"):]):
            self.assertIn(f"{number} {words[0].upper()}{words[1:]}.", text)

    def test_kvmd_has_every_option(self):
        text = page("kvmd.8")
        help_text = run_kvmd("--help").stdout
        for option in words_of(help_text):
            self.assertIn(option, plain(text))
        printed = run_kvmd("--print-config").stdout
        for key in re.findall(r"^([a-z_.]+) = ", printed, re.M):
            self.assertIn(f"\n.B {key}\n", page("kvmd.toml.5"))

    def test_pages_are_good_roff(self):
        if not shutil.which("groff"):
            self.skipTest("no groff")
        for name in ("kvmd.8", "kvmctl.1", "kvmd.toml.5"):
            result = subprocess.run(["groff", "-man", "-ww", "-Tutf8", "-z",
                                     os.path.join(SHARE, name)],
                                    capture_output=True, text=True, check=True)
            self.assertEqual(result.stderr, "", name)
            self.assertNotIn("@", page(name).replace("@system", ""), name)


class DefaultConfiguration(unittest.TestCase):
    def test_is_right_and_changes_nothing(self):
        result = kvmctl("config", "check", os.path.join(SHARE, "kvmd.toml"))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("sets 0 options", result.stdout)

    def test_every_line_can_be_used(self):
        text = re.sub(r"^#(\w+ = )", r"\1", page("kvmd.toml"), flags=re.M)
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(text)
            file.flush()
            result = kvmctl("config", "check", file.name)
            self.assertEqual(result.returncode, 0, result.stderr)
            keys = re.findall(r"^([a-z_.]+) = ", run_kvmd("--print-config").stdout, re.M)
            self.assertIn(f"sets {len(keys)} options", result.stdout)


class Completions(unittest.TestCase):
    def complete(self, *words):
        """What bash offers for the last word."""
        script = (f"source {SHARE}/kvmctl.bash; COMP_WORDS=(kvmctl {' '.join(map(repr, words))}); "
                  f"COMP_CWORD={len(words)}; _kvmctl; printf '%s\\n' \"${{COMPREPLY[@]}}\"")
        result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        self.assertEqual(result.stderr, "")
        return set(result.stdout.split())

    def test_bash(self):
        self.assertLessEqual(set(commands()), self.complete(""))
        self.assertEqual(self.complete("pi"), {"ping"})
        self.assertLessEqual({"--count", "--socket", "--json"}, self.complete("ping", "--"))
        self.assertEqual(self.complete("--socket", "/tmp/x", "spa"), {"spaces"})
        self.assertLessEqual({"check", "dump"}, self.complete("config", ""))
        self.assertEqual(self.complete("completion", "f"), {"fish"})
        self.assertEqual(self.complete("ping", "--count", ""), set())
        with tempfile.NamedTemporaryFile(suffix=".toml") as file:
            self.assertEqual(self.complete("config", "check", file.name[:-3]), {file.name})
        for path in all_commands():
            offered = self.complete(*path, "--")
            self.assertLessEqual(words_of(kvmctl(*path, "--help").stdout), offered, path)

    def test_all_shells_have_every_command_and_option(self):
        for name in ("_kvmctl", "kvmctl.fish", "kvmctl.bash"):
            text = page(name)
            for path in all_commands():
                self.assertRegex(text, rf"\b{path[-1]}\b", name)
                for option in words_of(kvmctl(*path, "--help").stdout):
                    self.assertRegex(text, rf"(--|-l ){option[2:]}\b", name)

    def test_shells_read_them(self):
        for shell, name, check in (("bash", "kvmctl.bash", ["-n"]), ("zsh", "_kvmctl", ["-n"]),
                                   ("fish", "kvmctl.fish", ["--no-execute"])):
            if shutil.which(shell):
                subprocess.run([shell, *check, os.path.join(SHARE, name)], check=True)

    def test_the_command_prints_what_is_installed(self):
        for shell, name in (("bash", "kvmctl.bash"), ("zsh", "_kvmctl"), ("fish", "kvmctl.fish")):
            self.assertEqual(kvmctl("completion", shell).stdout, page(name))
        self.assertEqual(kvmctl("completion", "tcsh").returncode, 2)


if __name__ == "__main__":
    assert os.path.isdir(BIN)
    unittest.main()
