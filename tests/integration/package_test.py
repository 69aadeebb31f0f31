#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Debian packages: made of the programs that are built, looked into, installed into a folder,
removed and purged. Arguments: cpack, the build folder."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from deb import PACKAGES, make_debs

CPACK, BUILD = sys.argv[-2:]
del sys.argv[-2:]
LIB = "/usr/lib/" + subprocess.run(["dpkg-architecture", "-qDEB_HOST_MULTIARCH"], text=True,
                                   capture_output=True, check=True).stdout.strip()
FILES = {
    "kvm": (
        "/etc/kvm/kvmd.toml", "/usr/bin/kvmd", "/usr/bin/kvmctl",
        "/usr/lib/systemd/system/kvmd.service", "/usr/lib/sysusers.d/kvmd.conf",
        "/usr/share/man/man8/kvmd.8.gz", "/usr/share/man/man1/kvmctl.1.gz",
        "/usr/share/man/man5/kvmd.toml.5.gz", "/usr/share/bash-completion/completions/kvmctl",
        "/usr/share/zsh/vendor-completions/_kvmctl",
        "/usr/share/fish/vendor_completions.d/kvmctl.fish", "/usr/share/doc/kvm/README.md",
        "/usr/share/doc/kvm/operations.md"),
    "libkvm0": (f"{LIB}/libkvm.so.0", f"{LIB}/libkvm_embedded.so.0"),
    "libkvm-dev": (
        "/usr/include/kvm.h", f"{LIB}/libkvm.so", f"{LIB}/libkvm_embedded.so",
        f"{LIB}/pkgconfig/kvm.pc", f"{LIB}/cmake/kvm/kvm-config.cmake",
        "/usr/share/doc/libkvm-dev/examples/quickstart.c")}
ALL_FILES = [name for names in FILES.values() for name in names]
DEPENDS = {"kvm": (r"libc6", r"systemd", r"libkvm0 \(= "), "libkvm0": (r"libc6",),
           "libkvm-dev": (r"libkvm0 \(= ",)}
# systemd-analyze's scale is 0 (safe) to 10; 2.0 is its "OK" at the very best.
MAX_EXPOSURE = 2.0


def run(*command, check=True, **more):
    result = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if check and result.returncode != 0:
        raise AssertionError(f"{command}: {result.returncode}\n{result.stdout}{result.stderr}")
    return result


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="kvm-package-")
        cls.debs = make_debs(CPACK, BUILD, cls.folder)
        cls.root = os.path.join(cls.folder, "root")
        os.makedirs(f"{cls.root}/var/lib/dpkg/updates")
        os.makedirs(f"{cls.root}/var/lib/dpkg/info")
        os.makedirs(f"{cls.root}/etc")
        for name in ("status", "available"):
            with open(f"{cls.root}/var/lib/dpkg/{name}", "w", encoding="utf-8"):
                pass

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def dpkg(self, *arguments):
        """dpkg on a system of its own below a folder. Scripts run here and find it in DPKG_ROOT;
        packages that kvm needs are not there."""
        return run("dpkg", f"--root={self.root}", "--force-not-root", "--force-depends",
                   "--force-script-chrootless", f"--log={self.folder}/log", *arguments,
                   env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})

    def path(self, name):
        return self.root + name

    def test_1_contents(self):
        for package, deb in zip(PACKAGES, self.debs):
            with self.subTest(package=package):
                self.check_contents(package, deb)

    def check_contents(self, package, deb):
        listing = run("dpkg-deb", "--contents", deb).stdout
        names = {line.split()[5].lstrip("."): line.split()[:2] for line in listing.splitlines()}
        doc = f"/usr/share/doc/{package}"
        for name in FILES[package] + (f"{doc}/copyright", f"{doc}/changelog.gz"):
            self.assertIn(name, names)
            self.assertEqual(names[name][1], "root/root", name)
        for other in set(FILES) - {package}:
            for name in FILES[other]:
                self.assertNotIn(name, names)
        for name, (mode, _) in names.items():
            self.assertNotRegex(mode, r"\A[^l].{7}w", f"{name}: everybody may write")
            self.assertNotIn("s", mode, f"{name}: setuid")
        for name in names:
            self.assertNotRegex(name, r"test|bench|\A/(home|root|tmp|work)")
        info = run("dpkg-deb", "--info", deb).stdout
        self.assertRegex(info, rf"Package: {package}\n")
        for depends in DEPENDS[package]:
            self.assertRegex(info, rf"Depends: .*{depends}")
        self.assertEqual("conffiles" in info, package == "kvm")
        self.assertEqual("shlibs" in info, package == "libkvm0")
        self.assertRegex(info, r"\n Description: .*\n  A daemon ")

    @unittest.skipUnless(shutil.which("lintian"), "needs lintian")
    def test_1_lintian(self):
        result = run("lintian", "--allow-root", "--no-cfg", *self.debs, check=False)
        errors = [line for line in result.stdout.splitlines() if line.startswith("E: ")]
        # CPack 4.4 writes the trigger of a library itself, and as a program; dpkg does not mind.
        known = "E: libkvm0: control-file-has-bad-permissions 0755 != 0644 [triggers]"
        self.assertEqual([line for line in errors if line != known], [], result.stderr)
        self.assertIn(result.returncode, (0, 2), result.stderr)

    def test_2_install_use_remove_purge(self):
        self.dpkg("--install", *self.debs)
        for package in PACKAGES:
            status = run("dpkg", f"--root={self.root}", "--status", package).stdout
            self.assertIn("Status: install ok installed", status)
        for name in ALL_FILES:
            self.assertTrue(os.path.exists(self.path(name)), name)
        with open(self.path("/etc/passwd"), encoding="utf-8") as file:
            self.assertRegex(file.read(), r"(?m)^kvmd:.*nologin$")
        self.use()
        config = self.path("/etc/kvm/kvmd.toml")
        with open(config, "a", encoding="utf-8") as file:
            file.write("# Changed by the operator.\n")
        self.dpkg("--install", "--force-confold", *self.debs)
        self.dpkg("--remove", *reversed(PACKAGES))
        for name in ALL_FILES:
            self.assertEqual(os.path.exists(self.path(name)), name == "/etc/kvm/kvmd.toml", name)
        self.dpkg("--purge", *reversed(PACKAGES))
        self.assertFalse(os.path.exists(config))
        left = [os.path.join(folder, name) for folder, _, names in os.walk(self.root)
                for name in names if "/var/lib/dpkg" not in folder]
        for name in left:
            self.assertRegex(name, r"/etc/(passwd|group|shadow|gshadow|\.pwd\.lock)-?\Z")

    def use(self):
        """The installed programs take the installed library, which lies where the loader looks in a
        whole system and not below a folder, and the installed configuration."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVM_")}
        clean["LD_LIBRARY_PATH"] = self.path(LIB)
        self.assertRegex(run(self.path("/usr/bin/kvmctl"), "--version", env=clean).stdout,
                         r"\d+\.\d+\.\d+")
        for program in ("kvmd", "kvmctl"):
            dynamic = run("readelf", "-d", self.path(f"/usr/bin/{program}")).stdout
            self.assertNotRegex(dynamic, r"R(UN)?PATH", program)
        pc = run("pkg-config", "--cflags", "--libs", "kvm",
                 env={**clean, "PKG_CONFIG_PATH": self.path(f"{LIB}/pkgconfig")}).stdout
        for flag in re.findall(r"-[LI](\S+)", pc):
            self.assertTrue(os.path.isdir(flag), pc)
        printed = run(self.path("/usr/bin/kvmd"), "--config", self.path("/etc/kvm/kvmd.toml"),
                      "--print-config", env=clean).stdout
        self.assertNotIn("# file", printed)
        checked = run(self.path("/usr/bin/kvmctl"), "config", "check",
                      self.path("/etc/kvm/kvmd.toml"), env=clean).stdout
        self.assertIn("is right", checked)

    def test_3_unit(self):
        unit = os.path.join(self.folder, "kvmd.service")
        with open(os.path.join(os.environ["KVM_SOURCE_DIR"], "packaging/kvmd.service"),
                  encoding="utf-8") as file:
            text = file.read()
        with open(unit, "w", encoding="utf-8") as file:
            # What is verified is the unit; the program lies elsewhere here, the pages nowhere.
            text = text.replace("/usr/bin/kvmd", f"{BUILD}/bin/kvmd")
            file.write(re.sub(r"^Documentation=.*\n", "", text, flags=re.M))
        result = run("systemd-analyze", "verify", unit, check=False)
        about = [line for line in (result.stdout + result.stderr).splitlines() if "kvmd" in line]
        self.assertEqual(about, [])
        result = run("systemd-analyze", "security", "--offline=true",
                     f"--threshold={int(10 * MAX_EXPOSURE)}", "--no-pager", unit, check=False)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("Overall exposure level", result.stdout)


if __name__ == "__main__":
    missing = [name for name in ("dpkg", "dpkg-shlibdeps", "readelf", "file", "systemd-sysusers",
                                 "systemd-analyze") if not shutil.which(name)]
    if missing:
        print(f"not here: {', '.join(missing)}")
        sys.exit(77)
    unittest.main()
