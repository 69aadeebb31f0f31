# SPDX-License-Identifier: Apache-2.0
"""Makes the Debian package of what is built, for the tests of this folder."""

import glob
import os
import subprocess


def make_deb(cpack, build, folder):
    """The path of the package in the folder. No second build, light compression: it is fast."""
    result = subprocess.run(
        [cpack, "-G", "DEB", "-B", folder, "-D", "CPACK_DEBIAN_COMPRESSION_TYPE=gzip",
         "-D", f"CPACK_OUTPUT_FILE_PREFIX={folder}"], cwd=build, capture_output=True, text=True,
        check=False, env={**os.environ, "GZIP": "-1"})
    assert result.returncode == 0, result.stdout + result.stderr
    (deb,) = glob.glob(f"{folder}/*.deb")
    return deb
