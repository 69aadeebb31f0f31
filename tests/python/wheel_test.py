#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The wheel as its users get it: what is in it, what it needs of the system, and that a virtual
environment alone is enough to import kvm and to run kvmd.

KVM_WHEEL names the wheel (`./dev nightly wheel`: that of `./dev wheel`). Where it is not set, one
is put together of what this build has compiled, KVM_BUILD_DIR, with the metadata, the layout and
the repair of the true one: compiling the engine for speed would take as long as many tests.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import zipfile

SOURCE = pathlib.Path(os.environ["KVM_SOURCE_DIR"])
VERSION = re.search(r"project\(kvm VERSION ([\d.]+)", (SOURCE / "CMakeLists.txt").read_text())[1]
SANITIZERS = ["libasan.so.*", "libubsan.so.*"]
# What every Linux of the manylinux platforms has (PEP 600), as far as anything of ours may need it.
OF_THE_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux-x86-64\.so\.2")
# A user's environment: nothing that leads into the tree or names libraries.
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if name in ("PATH", "HOME", "TMPDIR", "LANG")}


def run(*command, **options):
    options.setdefault("env", ENVIRONMENT)
    result = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL,
                            capture_output=True, text=True, timeout=280, **options)
    assert result.returncode == 0, f"{command}:\n{result.stdout}{result.stderr}"
    return result.stdout


def assemble(folder):
    """The wheel of what this build has compiled."""
    project = folder / "project"
    run(os.environ["KVM_CMAKE"], "--install", os.environ["KVM_BUILD_DIR"], "--component", "python",
        "--prefix", project)
    # The repair does it anyway; before, there is ten times as much to compress.
    run("strip", *(path for path in project.rglob("*") if path.is_file() and is_elf(path)))
    shutil.copytree(SOURCE / "bindings/python/kvm", project / "kvm", dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (project / "bindings/python").mkdir(parents=True)
    for name in ("pyproject.toml", "CMakeLists.txt", "LICENSE", "bindings/python/README.md"):
        shutil.copy(SOURCE / name, project / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "raw",
        "-Cwheel.cmake=false", "-Cwheel.platlib=true", "-Cwheel.packages=kvm", project)
    [raw] = (folder / "raw").glob("*.whl")
    excluded = [word for library in SANITIZERS for word in ("--exclude", library)]
    run(sys.executable, SOURCE / "bindings/python/finish_wheel.py", raw, folder, *excluded,
        env={**ENVIRONMENT, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"})
    [wheel] = folder.glob("*.whl")
    return wheel


def is_elf(path):
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="kvm-wheel-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        named = os.environ.get("KVM_WHEEL")
        cls.is_released = named is not None
        cls.wheel = pathlib.Path(named) if named else assemble(cls.folder)
        run(sys.executable, "-m", "venv", cls.folder / "venv")
        cls.bin = cls.folder / "venv/bin"
        run(cls.bin / "python", "-m", "pip", "install", "--no-index", "--no-deps", "-q", cls.wheel,
            cwd="/")
        [cls.site] = (cls.folder / "venv/lib").glob("python*/site-packages")
        cls.info = cls.site / f"kvm-{VERSION}.dist-info"
        cls.elfs = [path for folder in ("kvm", "kvm.libs")
                    for path in (cls.site / folder).rglob("*") if path.is_file() and is_elf(path)]

    def python(self, code):
        environment = dict(ENVIRONMENT)
        if os.environ.get("KVM_PRELOAD") and not self.is_released:
            environment["LD_PRELOAD"] = os.environ["KVM_PRELOAD"]
            environment["ASAN_OPTIONS"] = "detect_leaks=0"
        return run(self.bin / "python", "-c", code, cwd="/", env=environment)

    def test_tag_and_metadata(self):
        tag = "cp311-cp311" if sys.version_info < (3, 12) else "cp312-abi3"
        self.assertRegex(self.wheel.name,
                         rf"^kvm-{re.escape(VERSION)}-{tag}-manylinux_2_\d+_x86_64\.whl$")
        metadata = (self.info / "METADATA").read_text(encoding="utf-8")
        for line in (f"Version: {VERSION}", "License-Expression: Apache-2.0",
                     "License-File: LICENSE", "Requires-Python: >=3.11"):
            self.assertIn(f"\n{line}\n", metadata)
        for line in re.findall(r"(?m)^Requires-Dist: .*", metadata):
            self.assertIn("extra ==", line, "the package needs no other one")
        self.assertIn("A KV-cache service", metadata)

    def test_file_list(self):
        with zipfile.ZipFile(self.wheel) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
            tops = {name.split("/")[0] for name in names}
            modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
            self.assertIsNone(archive.testzip())
        self.assertEqual(tops, {"kvm", "kvm.libs", self.info.name})
        expected = {"kvm/bin/kvmctl", "kvm/bin/kvmd", "kvm/include/kvm.h", "kvm/lib/libkvm.so",
                    "kvm/lib/libkvm.so.0", "kvm/lib/libkvm_embedded.so",
                    "kvm/lib/libkvm_embedded.so.0", "kvm/__main__.py", "kvm/py.typed"}
        source = SOURCE / "bindings/python/kvm"
        expected |= {f"kvm/{path.relative_to(source)}" for path in source.rglob("*")
                     if path.is_file() and path.suffix not in (".so", ".pyc")}
        found = {name for name in names if name.startswith("kvm/")}
        natives = {name for name in found if re.fullmatch(r"kvm/_native\.[\w.-]+\.so", name)}
        self.assertEqual(len(natives), 1, natives)
        self.assertEqual(found - natives, expected)
        for name in ("kvm/bin/kvmctl", "kvm/bin/kvmd"):
            self.assertEqual(modes[name] & 0o111, 0o111, name)

    def test_what_it_carries_is_there_with_its_licence(self):
        licences = self.info / "licenses"
        self.assertEqual((licences / "LICENSE").read_text(), (SOURCE / "LICENSE").read_text())
        grafted = [path.name for path in (self.site / "kvm.libs").iterdir()]
        self.assertTrue(grafted)
        texts = "".join(path.name for path in (licences / "third_party").iterdir())
        for name in grafted:
            stem = re.match(r"lib[a-z]+", name.replace("+", "p"))[0]
            self.assertIn(stem, texts)
        record = (self.info / "RECORD").read_text()
        self.assertIn("licenses/third_party/", record)
        run(self.bin / "python", "-m", "pip", "check", cwd="/")

    def test_nothing_is_needed_of_the_system_that_not_every_linux_has(self):
        own = {path.name for path in self.elfs}
        allowed = OF_THE_SYSTEM
        if not self.is_released:
            allowed = re.compile(allowed.pattern + r"|lib(a|ub)san\.so\.\d+")
        self.assertGreater(len(self.elfs), 5)
        for path in self.elfs:
            dynamic = run("readelf", "-dW", path)
            for name in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
                self.assertTrue(name in own or allowed.fullmatch(name), f"{path.name}: {name}")
            for search in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic):
                for entry in search.split(":"):
                    self.assertRegex(entry, r"^\$ORIGIN(/|$)", path.name)
            for line in run("ldd", path).splitlines():
                self.assertNotIn("not found", line, path.name)
                name, _, place = line.strip().partition(" => ")
                self.assertTrue(str(self.site) in place or allowed.fullmatch(name) or not place,
                                f"{path.name}: {line}")

    def test_import_and_daemon(self):
        said = self.python(
            "import kvm, subprocess\n"
            "from kvm import _programs\n"
            "assert kvm.__file__.startswith('" + str(self.site) + "'), kvm.__file__\n"
            "print(kvm.__version__)\n"
            "with kvm.start_daemon(capacity='64MiB', threads=1) as daemon:\n"
            "    kvmctl = _programs.program_path('kvmctl')\n"
            "    subprocess.run([kvmctl, '--socket', daemon.socket, 'ping'], check=True,\n"
            "                   stdout=subprocess.DEVNULL)\n"
            "print(daemon.process.returncode)\n")
        self.assertEqual(said.split(), [VERSION, "0"])

    def test_console_scripts_are_the_programs_themselves(self):
        environment = dict(ENVIRONMENT)
        if os.environ.get("KVM_PRELOAD") and not self.is_released:
            environment["LD_PRELOAD"] = os.environ["KVM_PRELOAD"]
            environment["ASAN_OPTIONS"] = "detect_leaks=0"
        socket = self.folder / "kvmd.sock"
        arguments = ["--socket", socket, "--host-capacity", "64MiB", "--threads", "1"]
        with open(self.folder / "log", "wb") as log:
            daemon = subprocess.Popen([self.bin / "kvmd", *arguments], stdin=subprocess.DEVNULL,
                                      stderr=log, cwd="/", env=environment)
        try:
            deadline = time.monotonic() + 60
            while not socket.exists() and daemon.poll() is None:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.02)
            self.assertIsNone(daemon.poll(), (self.folder / "log").read_text())
            # No Python stays in memory.
            self.assertEqual(os.readlink(f"/proc/{daemon.pid}/exe"),
                             os.path.realpath(self.site / "kvm/bin/kvmd"))
            run(self.bin / "kvmctl", "--socket", socket, "ping", cwd="/", env=environment)
            daemon.send_signal(signal.SIGTERM)
            self.assertEqual(daemon.wait(60), 0)
        finally:
            daemon.kill()
            daemon.wait()

    def test_a_c_program_can_be_linked(self):
        if not self.is_released:
            self.skipTest("the libraries of this build want their sanitizers in the program")
        package = self.site / "kvm"
        run("cc", "-I", package / "include", SOURCE / "examples/quickstart/quickstart.c", "-o",
            self.folder / "quickstart", "-L", package / "lib", "-lkvm_embedded", "-lm",
            f"-Wl,-rpath,{package / 'lib'}")
        self.assertIn("libkvm_embedded.so.0", run("ldd", self.folder / "quickstart"))


if __name__ == "__main__":
    missing = [name for name in ("auditwheel", "build", "nanobind", "scikit_build_core")
               if importlib.util.find_spec(name) is None]
    if missing and "KVM_WHEEL" not in os.environ:
        print(f"skipped: build/venv has no {', '.join(missing)} (packages/python.txt, set wheel)")
        sys.exit(77)
    unittest.main()
