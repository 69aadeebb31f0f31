#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Debian package: made of the programs that are built, looked into, installed into a folder,
removed and purged. Arguments: cpack, the build folder."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from deb import make_deb

CPACK, BUILD = sys.argv[-2:]
del sys.argv[-2:]
FILES = (
    "/etc/kvm/kvmd.toml", "/usr/bin/kvmd", "/usr/bin/kvmctl", "/usr/include/kvm.h",
    "/usr/lib/libkvm.so.0", "/usr/lib/libkvm_embedded.so.0", "/usr/lib/pkgconfig/kvm.pc",
    "/usr/lib/cmake/kvm/kvm-config.cmake", "/usr/lib/systemd/system/kvmd.service",
    "/usr/lib/sysusers.d/kvmd.conf", "/usr/share/man/man8/kvmd.8", "/usr/share/man/man1/kvmctl.1",
    "/usr/share/man/man5/kvmd.toml.5", "/usr/share/bash-completion/completions/kvmctl",
    "/usr/share/zsh/vendor-completions/_kvmctl",
    "/usr/share/fish/vendor_completions.d/kvmctl.fish", "/usr/share/doc/kvm/LICENSE",
    "/usr/share/doc/kvm/operations.md")
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
        cls.deb = make_deb(CPACK, BUILD, cls.folder)
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
        listing = run("dpkg-deb", "--contents", self.deb).stdout
        names = {line.split()[5].lstrip("."): line.split()[:2] for line in listing.splitlines()}
        for name in FILES:
            self.assertIn(name, names)
            self.assertEqual(names[name][1], "root/root", name)
        for name, (mode, _) in names.items():
            self.assertNotRegex(mode, r"\A[^l].{7}w", f"{name}: everybody may write")
            self.assertNotIn("s", mode, f"{name}: setuid")
        for name in names:
            self.assertNotRegex(name, r"test|bench|\A/(home|root|tmp|work)")
        info = run("dpkg-deb", "--info", self.deb).stdout
        self.assertRegex(info, r"Package: kvm\n")
        self.assertRegex(info, r"Depends: .*libc6")
        self.assertRegex(info, r"Depends: .*systemd")
        self.assertIn("conffiles", info)
        self.assertRegex(info, r"\n Description: .*\n  A daemon .*\n  The package ")

    def test_2_install_use_remove_purge(self):
        self.dpkg("--install", self.deb)
        status = run("dpkg", f"--root={self.root}", "--status", "kvm").stdout
        self.assertIn("Status: install ok installed", status)
        for name in FILES:
            self.assertTrue(os.path.exists(self.path(name)), name)
        with open(self.path("/etc/passwd"), encoding="utf-8") as file:
            self.assertRegex(file.read(), r"(?m)^kvmd:.*nologin$")
        self.use()
        config = self.path("/etc/kvm/kvmd.toml")
        with open(config, "a", encoding="utf-8") as file:
            file.write("# Changed by the operator.\n")
        self.dpkg("--install", "--force-confold", self.deb)
        self.dpkg("--remove", "kvm")
        for name in FILES:
            self.assertEqual(os.path.exists(self.path(name)), name == "/etc/kvm/kvmd.toml", name)
        self.dpkg("--purge", "kvm")
        self.assertFalse(os.path.exists(config))
        left = [os.path.join(folder, name) for folder, _, names in os.walk(self.root)
                for name in names if "/var/lib/dpkg" not in folder]
        for name in left:
            self.assertRegex(name, r"/etc/(passwd|group|shadow|gshadow|\.pwd\.lock)-?\Z")

    def use(self):
        """The installed programs find their library and take the installed configuration."""
        self.assertRegex(run(self.path("/usr/bin/kvmctl"), "--version").stdout, r"\d+\.\d+\.\d+")
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVM_")}
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
    missing = [name for name in ("dpkg", "dpkg-shlibdeps", "file", "systemd-sysusers",
                                 "systemd-analyze") if not shutil.which(name)]
    if missing:
        print(f"not here: {', '.join(missing)}")
        sys.exit(77)
    unittest.main()
