#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a wheel that runs anywhere of one that runs here: auditwheel puts the shared libraries into
it that not every Linux has, and their licences go beside ours.

Usage: finish_wheel.py WHEEL OUTPUT_FOLDER [ARGUMENTS OF auditwheel repair]
"""

import base64
import csv
import hashlib
import io
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile


def licences(names):
    """{name in the wheel: text} for grafted libraries, as libfmt-1a2b3c4d.so.9.1.0 is one."""
    files = [re.sub(r"-[0-9a-f]{8}\.so", ".so", pathlib.PurePath(name).name) for name in names]
    owners = subprocess.run(["dpkg-query", "-S", *(f"*/{file}" for file in files)],
                            capture_output=True, text=True).stdout
    packages = {pathlib.PurePath(line.rpartition(": ")[2]).name: line.partition(":")[0]
                for line in owners.splitlines()}
    found = {}
    for file in files:
        package = packages.get(file, "")
        path = pathlib.Path("/usr/share/doc", package, "copyright")
        if not package or not path.exists():
            sys.exit(f"finish_wheel.py: {file} goes into the wheel, but no Debian package tells "
                     "its licence")
        found[f"third_party/{package}.txt"] = path.read_bytes()
    # Linked into libkvm: no file of its own says so.
    for package in ("libsodium-dev",):
        found[f"third_party/{package}.txt"] = pathlib.Path(
            "/usr/share/doc", package, "copyright").read_bytes()
    return found


def record_row(name, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return [name, f"sha256={digest}", str(len(data))]


def add_files(wheel, out, files):
    """Writes the wheel `out`: `wheel` with `files`, {name below *.dist-info/licenses: text}."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        record = next(n for n in old.namelist() if n.endswith(".dist-info/RECORD"))
        licenses = record.removesuffix("RECORD") + "licenses/"
        rows = list(csv.reader(io.StringIO(old.read(record).decode())))
        for info in old.infolist():
            if info.filename != record:
                new.writestr(info, old.read(info), zipfile.ZIP_DEFLATED)
        for name, data in sorted(files.items()):
            info = zipfile.ZipInfo(licenses + name, (1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o100644 << 16
            new.writestr(info, data, zipfile.ZIP_DEFLATED)
            rows.insert(-1, record_row(licenses + name, data))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        new.writestr(old.getinfo(record), text.getvalue(), zipfile.ZIP_DEFLATED)


def main(wheel, folder, *arguments):
    with tempfile.TemporaryDirectory() as repaired:
        subprocess.run([sys.executable, "-m", "auditwheel", "repair", "--strip", "--wheel-dir",
                        repaired, *arguments, wheel], check=True)
        [path] = pathlib.Path(repaired).glob("*.whl")
        with zipfile.ZipFile(path) as archive:
            grafted = [n for n in archive.namelist() if re.match("kvm.libs/.", n)]
        add_files(path, pathlib.Path(folder, path.name), licences(grafted))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
