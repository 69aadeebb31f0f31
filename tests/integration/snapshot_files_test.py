#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Snapshots while kvmd is stopped: kvmctl fsck, snapshot export and snapshot import on the
directories of real daemons."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
import unittest
import unittest.mock

from daemon_harness import BIN, Daemon, kvmctl

CAPACITY = "64MiB"  # the least; segments have 8 MiB then
# Names, seeds ("-": what was saved before goes on) and tokens, some KiB for each.
SAVES = (("a", "1", "3000"), ("b", "-", "500"), ("c", "2", "4000"), ("d", "3", "500"),
         ("e", "-", "7500"))
LENGTHS = {"a": 3000, "b": 3500, "c": 4000, "d": 500, "e": 8000}
SAVED = []  # directories with these
ROWS = {}  # of each name


def keeper(daemon, *arguments):
    result = subprocess.run([f"{BIN}/snapshot_keeper", *arguments], capture_output=True,
                            check=False, env={**os.environ, "KVM_SOCKET": daemon.socket})
    assert result.returncode == 0, result.stderr
    return result.stdout


def segments_in(*directories):
    return sorted(os.path.join(d, name) for d in directories for name in os.listdir(d)
                  if name.endswith(".segment"))


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def has_table(path):
    with open(path, "rb") as file:
        file.seek(-64, os.SEEK_END)
        return file.read(4) == b"KVMT"


def options(directories):
    return ("--disk-directories", ",".join(directories), "--disk-capacity", CAPACITY)


def setUpModule():
    folder = tempfile.mkdtemp(prefix="files-", dir=os.getcwd())
    unittest.addModuleCleanup(shutil.rmtree, folder)
    for name in ("saved0", "saved1"):
        SAVED.append(os.path.join(folder, name))
        os.mkdir(SAVED[-1])
    with Daemon(*options(SAVED)) as daemon:
        keeper(daemon, "save", *(word for save in SAVES for word in save))
        ROWS.update((name, keeper(daemon, "read", name)) for name in LENGTHS)
        assert daemon.end() == 0
    assert len(set(ROWS.values())) == len(SAVES)


class Files(unittest.TestCase):
    """Copies of the directories, for each test."""

    def setUp(self):
        self.work = tempfile.mkdtemp(dir=os.path.dirname(SAVED[0]))
        self.directories = [os.path.join(self.work, name) for name in ("0", "1")]
        self.dirs = [word for path in self.directories for word in ("--dir", path)]
        for source, path in zip(SAVED, self.directories):
            shutil.copytree(source, path)
        self.file = os.path.join(self.work, "file")

    def tearDown(self):
        shutil.rmtree(self.work)

    def state(self):
        """Of all files that there are, what they hold and when they were written."""
        state = {}
        for directory in self.directories:
            for name in os.listdir(directory):
                path = os.path.join(directory, name)
                with open(path, "rb") as file:
                    state[path] = (os.stat(path).st_mtime_ns,
                                   hashlib.sha256(file.read()).hexdigest())
        return state

    def fsck(self, status, *directories):
        before = self.state()
        result = kvmctl("--json", "fsck", *(directories or self.directories))
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        self.assertEqual(self.state(), before, "fsck changes nothing")
        return json.loads(result.stdout) if result.stdout else result.stderr

    def export(self, name, *more):
        return kvmctl("--json", "snapshot", "export", name, self.file, *self.dirs, *more)

    def bring_in(self, *more, capacity=CAPACITY):
        return kvmctl("--json", "snapshot", "import", self.file, *self.dirs, "--capacity",
                      capacity, *more)

    def assert_loads(self, rows):
        with Daemon(*options(self.directories)) as daemon:
            self.assertEqual([s["name"] for s in daemon.json("snapshot", "list")], sorted(rows))
            for name, expected in rows.items():
                self.assertEqual(keeper(daemon, "read", name), expected, name)
            self.assertEqual(daemon.end(), 0)


class Fsck(Files):
    def test_of_what_is_whole(self):
        found = self.fsck(0)
        self.assertTrue(found["whole"])
        self.assertEqual([s["name"] for s in found["snapshots"]], list(LENGTHS))
        for snapshot in found["snapshots"]:
            self.assertTrue(snapshot["whole"])
            self.assertEqual(snapshot["uid"], os.getuid())
            self.assertEqual(snapshot["space"], "keeper")
            self.assertEqual(snapshot["tokens"], LENGTHS[snapshot["name"]])
        self.assertEqual(found["damages"], [])
        self.assertGreaterEqual(found["segments"], 2)
        self.assertEqual(found["segment_bytes"], found["segments"] * (8 << 20))
        self.assertGreaterEqual(found["read_bytes"], found["segment_bytes"])
        # b shares the full pages of a.
        self.assertLess(found["live_bytes"], sum(s["bytes"] for s in found["snapshots"]))
        result = kvmctl("fsck", *reversed(self.directories))
        self.assertEqual(result.returncode, 0)
        self.assertEqual(result.stdout.count(" whole\n"), 5)
        self.assertIn("5 snapshots, 0 damaged; 0 damaged places.", result.stdout)
        self.assertEqual(result.stderr, "", "no terminal")
        self.assertNotIn("was being written", result.stdout)

    def test_progress(self):
        result = kvmctl("fsck", "--progress", *self.directories)
        self.assertEqual(result.returncode, 0)
        lines = result.stderr.splitlines()
        self.assertTrue(lines)
        for line in lines:
            self.assertRegex(line, r"\Achecking: \d+ % of [0-9.]+ MiB, .*B/s, \d+ s left\Z")
        self.assertLessEqual(len(lines), 10, "one a second")
        self.assertIn("Exit status: 0 ", kvmctl("fsck", "--help").stdout)

    def test_a_page(self):
        path = next(p for p in segments_in(*self.directories) if has_table(p))
        flip(path, 4096 + 64 + 1000)
        found = self.fsck(4)
        (damage,) = found["damages"]
        self.assertEqual((damage["file"], damage["offset"], damage["loss"]), (path, 4096, True))
        self.assertIn("checksum of the page", damage["what"])
        self.assertEqual(found["damaged_records"], 1)
        damaged = [s for s in found["snapshots"] if not s["whole"]]
        self.assertEqual(len(damaged), found["snapshots_damaged"])
        for snapshot in damaged:
            self.assertIn(f"{path}, offset 4096", snapshot["damage"])
            self.assertEqual(self.export(snapshot["name"]).returncode, 1)
            self.assertFalse(os.path.exists(self.file))
        self.assertEqual({"a", "b"}, {s["name"] for s in damaged}, "the first page of both")
        text = kvmctl("fsck", *self.directories).stdout
        self.assertIn("damaged: page 0: ", text)

    def test_the_header_of_a_record(self):
        for wants_table in (True, False):
            path = next(p for p in segments_in(*self.directories) if has_table(p) == wants_table)
            flip(path, 4096 + 9)  # of its name
            flip(path, 4096 + 9)
            flip(path, 4096 + 50)  # of its size
            found = self.fsck(4)
            (damage,) = found["damages"]
            self.assertEqual((damage["file"], damage["offset"]), (path, 4096))
            self.assertIn("header", damage["what"])
            damaged = [s for s in found["snapshots"] if not s["whole"]]
            self.assertTrue(damaged)
            self.assertLess(len(damaged), 5)
            for snapshot in damaged:
                self.assertIn(f"{path}, offset 4096", snapshot["damage"])
            flip(path, 4096 + 50)

    def test_a_table(self):
        path = next(p for p in segments_in(*self.directories) if has_table(p))
        with open(path, "rb") as file:
            file.seek(-40, os.SEEK_END)
            (offset,) = struct.unpack("<Q", file.read(8))
        flip(path, offset + 3)
        found = self.fsck(4)
        (damage,) = found["damages"]
        self.assertIn("table", damage["what"])
        self.assertFalse(damage["loss"])
        self.assertTrue(all(s["whole"] for s in found["snapshots"]), "records tell it all")
        self.assertIn("(nothing is lost by it)", kvmctl("fsck", *self.directories).stdout)
        self.assert_loads(ROWS)

    def test_the_list_of_snapshots(self):
        copies = [os.path.join(self.directories[copy], f"kvm-0-{copy}.manifest")
                  for copy in (0, 1)]
        flip(copies[1], 200)
        found = self.fsck(4)
        (damage,) = found["damages"]
        self.assertEqual(damage["file"], copies[1])
        self.assertIn("the other copy has it", damage["what"])
        self.assertFalse(damage["loss"])
        self.assertEqual(found["snapshots_damaged"], 0)
        flip(copies[0], 200)
        found = self.fsck(4)
        self.assertTrue(found["damages"][0]["loss"])
        os.remove(copies[1])
        flip(copies[0], 200)
        (damage,) = self.fsck(4)["damages"]
        self.assertEqual((damage["file"], damage["offset"]), (copies[1], None))
        self.assertIn(f"\n{copies[1]}: a copy", kvmctl("fsck", *self.directories).stdout)
        # All that tells of it.
        os.remove(copies[0])
        for directory in self.directories:
            os.remove(os.path.join(directory, "kvm.set"))
        (damage,) = self.fsck(4)["damages"]
        self.assertEqual((damage["file"], damage["offset"]), (self.directories[0], None))
        self.assertTrue(damage["loss"])
        self.assertNotIn("offset", kvmctl("fsck", *self.directories).stdout)

    def test_a_segment_that_is_gone(self):
        os.remove(segments_in(*self.directories)[0])
        damaged = [s["damage"] for s in self.fsck(4)["snapshots"] if not s["whole"]]
        self.assertTrue(damaged)
        for damage in damaged:
            self.assertIn(f"{self.directories[0]}/kvm-*.segment", damage)

    def test_what_cannot_be_checked(self):
        self.assertIn("2 directories that belong together", self.fsck(1, self.directories[0]))
        self.assertIn("KVM_ERR_NOT_FOUND", self.fsck(1, self.work))
        self.assertIn("KVM_ERR_NOT_FOUND", self.fsck(1, os.path.join(self.work, "none")))
        self.assertIn("named twice", self.fsck(1, *self.directories, self.directories[0]))
        self.assertEqual(kvmctl("fsck").returncode, 2)
        with Daemon(*options(self.directories)) as daemon:
            result = kvmctl("fsck", *self.directories)
            self.assertEqual(result.returncode, 1)
            self.assertIn(f"directory {self.directories[0]} is in use by the process "
                          f"{daemon.process.pid}", result.stderr)
            self.assertIn("Stop that kvmd first", result.stderr)
            for command in (["export", "a", self.file], ["import", SAVED[0]]):
                self.assertEqual(kvmctl("snapshot", *command, *self.dirs).returncode, 1)


class Log(Files):
    """What a kvmd says of directories in which something is wrong."""

    def test_a_copy_of_the_list(self):
        copy = os.path.join(self.directories[1], "kvm-0-1.manifest")
        os.remove(copy)
        with Daemon(*options(self.directories)) as daemon:
            daemon.wait_until(
                lambda: f"read from its other copy: {copy} is not there" in daemon.log())
            self.assertEqual(len(daemon.json("snapshot", "list")), 5)
            keeper(daemon, "save", "f", "7", "100")
            self.assertEqual(daemon.end(), 0)
        self.fsck(0)
        with Daemon(*options(self.directories)) as daemon:
            daemon.json("ping", "-c", "1")  # it answers after its first lines
            self.assertNotIn("other copy", daemon.log())

    def test_a_page(self):
        path = next(p for p in segments_in(*self.directories) if has_table(p))
        flip(path, 4096 + 64 + 1000)
        with Daemon(*options(self.directories)) as daemon:
            with self.assertRaises(AssertionError) as raised:
                keeper(daemon, "read", "a")
            self.assertIn("KVM_ERR_CORRUPT", str(raised.exception))

            def is_said():
                daemon.json("ping", "-c", "1")
                return "are not what had been written" in daemon.log()

            daemon.wait_until(is_said)
            (line,) = [line for line in daemon.log().splitlines() if "had been written" in line]
            self.assertIn(path, line)
            with self.assertRaises(AssertionError):
                keeper(daemon, "read", "b")
            self.assertEqual(daemon.log().count("had been written"), 1, "not again so soon")

    def test_what_is_lost_has_the_name_that_users_gave_it(self):
        for path in segments_in(*self.directories):
            os.remove(path)
        with Daemon(*options(self.directories)) as daemon:
            with self.assertRaises(AssertionError) as raised:
                keeper(daemon, "read", "e")
            self.assertIn("KVM_ERR_LOST: disk: the snapshot 'e' is not there",
                          str(raised.exception))

    def test_prefixes(self):
        with Daemon(*options(self.directories)) as daemon:
            keeper(daemon, "publish", "20", "256", "21", "640")
            daemon.wait_until(
                lambda: "kvm_prefixes_saved 2\n" in daemon.kvmctl("metrics").stdout)
            snapshots = daemon.json("snapshot", "list")
            self.assertEqual([s["prefix"] for s in snapshots], [True] * 2 + [False] * 5)
            table = daemon.kvmctl("snapshot", "list").stdout
            self.assertNotIn(".prefix/", table)
            self.assertIn("\nand 2 snapshots of kept prefixes; --prefixes shows them\n", table)
            self.assertEqual(len(table.splitlines()), 1 + 5 + 1)
            for option in ("--prefixes", "--all"):
                table = daemon.kvmctl("snapshot", "list", option).stdout
                self.assertEqual(table.count(".prefix/"), 2)
                self.assertNotIn("shows them", table)
            status = daemon.json("status")
            self.assertEqual((status["snapshots"], status["snapshots_of_prefixes"]), (7, 2))
            text = daemon.kvmctl("status").stdout
            self.assertRegex(text, r"\nsnapshots +5 and 2 of kept prefixes, ")
            # Of the space that is registered.
            self.assertGreater(status["ring_bytes"], 0)
            self.assertRegex(text, r"\nhost memory .*; [0-9.]+ MiB more set aside for pages on ")
            self.assertEqual(daemon.end(), 0)
        for path in segments_in(*self.directories):
            os.remove(path)
        with Daemon(*options(self.directories)) as daemon:
            daemon.wait_until(
                lambda: "kept prefixes that could not be loaded: 2; those" in daemon.log())
            daemon.wait_until(lambda: len(daemon.json("snapshot", "list")) == 5)


class ExportAndImport(Files):
    def test_there_and_back(self):
        before = self.state()
        result = self.export("b")
        self.assertEqual(result.returncode, 0, result.stderr)
        said = json.loads(result.stdout)
        self.assertEqual(said["bytes"], os.path.getsize(self.file))
        self.assertEqual(os.stat(self.file).st_mode & 0o777, 0o600)
        self.assertEqual(self.state(), before, "an export changes nothing")
        result = self.export("b")
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"{self.file} is there already: give another FILE, or --replace "
                      "(KVM_ERR_EXISTS)", result.stderr)
        result = kvmctl("snapshot", "export", "b", self.file, *self.dirs, "--replace")
        self.assertEqual(result.returncode, 0)
        self.assertRegex(result.stdout, rf"\Aexported 'b' of user {os.getuid()}( \(\w+\))? to ")
        result = self.bring_in()
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, rf"user {os.getuid()}( \(\w+\))? has a snapshot 'b' there")
        self.assertIn("KVM_ERR_EXISTS", result.stderr)

        # Of the tokens that it shared with a nothing is left but what the file has.
        with Daemon(*options(self.directories)) as daemon:
            self.assertEqual(daemon.kvmctl("snapshot", "delete", "a", "b").returncode, 0)
            self.assertEqual(daemon.end(), 0)
        result = self.bring_in()
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(json.loads(result.stdout)["name"], "b")
        result = kvmctl("snapshot", "import", self.file, *self.dirs, "--capacity", CAPACITY,
                        "--name", "copy/of.b")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, r"\Aimported 'copy/of.b' of user \d+.*: [0-9.]+ MiB\n\Z")
        result = self.bring_in("--name", "d", "--replace")
        self.assertEqual(result.returncode, 0, result.stderr)
        found = self.fsck(0)
        self.assertEqual([s["name"] for s in found["snapshots"]], ["b", "c", "copy/of.b", "d", "e"])
        self.assert_loads({"b": ROWS["b"], "c": ROWS["c"], "copy/of.b": ROWS["b"],
                           "d": ROWS["b"], "e": ROWS["e"]})

    def test_elsewhere_and_for_others(self):
        self.assertEqual(self.export("c").returncode, 0)
        for path in self.directories:
            shutil.rmtree(path)
            os.mkdir(path)
        result = self.bring_in("--user", "12345")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.fsck(0)["snapshots"][0]["uid"], 12345)
        os.rename(self.file, self.file + ".c")
        result = self.export("c")
        self.assertEqual(result.returncode, 1)
        self.assertIn("--user 12345 has one", result.stderr)
        self.assertEqual(self.export("c", "--user", "12345").returncode, 0)
        self.assertEqual(self.bring_in("--user", str(os.getuid())).returncode, 0)
        self.assert_loads({"c": ROWS["c"]})

    @unittest.skipIf(os.getuid() != 0, "only root can act as others")
    def test_files_are_those_of_the_user_of_the_directories(self):
        self.assertEqual(self.export("d").returncode, 0)
        user = 54321
        for path in (os.path.dirname(self.work), self.work):
            os.chmod(path, 0o755)
        for path in self.directories:
            shutil.rmtree(path)
            os.mkdir(path)
            os.chown(path, user, user)
        # Who acts as another user cannot look for leaks in itself.
        sanitizer = f"{os.environ.get('ASAN_OPTIONS', '')}:detect_leaks=0"
        with unittest.mock.patch.dict(os.environ, {"ASAN_OPTIONS": sanitizer}):
            result = self.bring_in()
        self.assertEqual(result.returncode, 0, result.stderr)
        found = [os.stat(os.path.join(path, name)) for path in self.directories
                 for name in os.listdir(path)]
        self.assertGreaterEqual(len(found), 7)
        self.assertEqual({(about.st_uid, about.st_gid) for about in found}, {(user, user)})
        os.chown(self.directories[1], user + 1, user)
        self.assertIn("is of user", self.bring_in("--name", "other").stderr)

    def test_what_is_refused_changes_nothing(self):
        self.assertEqual(self.export("d").returncode, 0)
        with open(self.file, "rb") as file:
            whole = file.read()
        before = self.state()
        spoilt = [whole[:n] for n in (0, 64, 5000, len(whole) - 1)]
        spoilt.append(whole + b"\0")
        for offset in (3, 9, 70, len(whole) // 3, len(whole) - 10):
            spoilt.append(whole[:offset] + bytes([whole[offset] ^ 4]) + whole[offset + 1:])
        for text in spoilt:
            with open(self.file, "wb") as file:
                file.write(text)
            result = self.bring_in("--name", "new")
            self.assertEqual(result.returncode, 1, result.stdout)
            self.assertIn(self.file, result.stderr)
            self.assertRegex(result.stderr, "KVM_ERR_(CORRUPT|INVALID)")
        with open(self.file, "wb") as file:
            file.write(whole)
        for more, status, words in (
                (["--name", "no spaces"], 1, "KVM_ERR_INVALID"),
                (["--name", "new", "--user", "nobody-at-all"], 2,
                 "no user of this machine has that name; it must be a user's name, or a number"),
                (["--name", "new", "--user", str(2**32 - 1)], 2, "from 0 to 4294967294"),
                (["--name", "new", "--config", "/none"], 2, "/none")):
            result = self.bring_in(*more)
            self.assertEqual(result.returncode, status, result.stderr)
            self.assertIn(words, result.stderr)
        result = kvmctl("snapshot", "import", f"{self.file}.none", *self.dirs)
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"{self.file}.none cannot be opened: No such file", result.stderr)
        result = kvmctl("snapshot", "import", self.file, "--dir", f"{self.work}/none")
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"directory {self.work}/none is not there; make it first", result.stderr)
        result = self.bring_in("--name", "new", capacity="7 apples")
        self.assertEqual(result.returncode, 2)
        self.assertIn("7 apples", result.stderr)
        for name, (_, text) in before.items():
            if not name.endswith("kvm.lock"):
                self.assertEqual(self.state()[name][1], text, name)

    def test_never_grows_beyond_the_capacity(self):
        # Whatever is let in, the daemon starts with what is there.
        self.assertEqual(self.export("e").returncode, 0)
        n_there = 0
        while (result := self.bring_in("--name", f"copy{n_there}")).returncode == 0:
            n_there += 1
            self.assertLess(n_there, 7)
        self.assertGreaterEqual(n_there, 3)
        self.assertEqual(result.returncode, 1)
        self.assertIn("KVM_ERR_NO_SPACE", result.stderr)
        self.assertLessEqual(self.fsck(0)["segment_bytes"], 64 << 20)
        self.assert_loads({**ROWS, **{f"copy{i}": ROWS["e"] for i in range(n_there)}})


if __name__ == "__main__":
    unittest.main()
