# SPDX-License-Identifier: Apache-2.0
"""Makes the Debian packages of what is built, for the tests of this folder."""

import glob
import os
import subprocess


PACKAGES = ("libkvm0", "libkvm-dev", "kvm")


def make_debs(cpack, build, folder):
    """The paths of the packages in the folder, in the order of PACKAGES.

    No second build, light compression: it is fast."""
    result = subprocess.run(
        [cpack, "-G", "DEB", "-B", folder, "-D", "CPACK_DEBIAN_COMPRESSION_TYPE=gzip",
         "-D", f"CPACK_OUTPUT_FILE_PREFIX={folder}"], cwd=build, capture_output=True, text=True,
        check=False, env={**os.environ, "GZIP": "-1"})
    assert result.returncode == 0, result.stdout + result.stderr
    debs = [path for name in PACKAGES for path in glob.glob(f"{folder}/{name}_*.deb")]
    assert len(debs) == len(PACKAGES) == len(glob.glob(f"{folder}/*.deb")), debs
    return debs
