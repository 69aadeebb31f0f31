# SPDX-License-Identifier: Apache-2.0
"""`python -m kvm` tells what is installed and whether a kvmd answers; `python -m kvm start` is
kvmd."""

import argparse
import subprocess
import sys

import kvm
from kvm import _programs


def _answer(socket: str | None) -> tuple[bool, str]:
    """Whether a kvmd answers, and what is to be said about it."""
    command = [str(_programs.program_path("kvmctl"))]
    if socket is not None:
        command += ["--socket", socket]
    try:
        result = subprocess.run([*command, "ping"], stdin=subprocess.DEVNULL, capture_output=True,
                                text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    if result.returncode != 0:
        return False, "none answers: " + " ".join(result.stderr.split())
    return True, result.stdout.strip()


def _show(socket: str | None) -> int:
    """Prints a line for each part. Returns 0 where a kvmd answers, else 1."""
    answers, sentence = _answer(socket)
    rows = [("kvm", kvm.__version__),
            ("library", _programs.library_path("kvm")),
            ("embedded", _programs.library_path("kvm_embedded")),
            ("headers", _programs.include_path()),
            ("kvmd", _programs.program_path("kvmd")),
            ("kvmctl", _programs.program_path("kvmctl")),
            ("service", sentence)]
    for name, value in rows:
        print(f"{name:<10}{value}")
    return 0 if answers else 1


def main(arguments: list[str]) -> int:
    # Everything behind `start` is kvmd's, its --help too.
    if arguments[:1] == ["start"]:
        _programs.become("kvmd", arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m kvm",
        description="Prints the version, where the libraries and programs of this package are, "
                    "and whether a kvmd answers. Exit status 0: it does.",
        epilog="python -m kvm start [OPTIONS] runs kvmd in the foreground with these options of "
               "kvmd.")
    parser.add_argument("--socket", metavar="PATH",
                        help="the socket to ask at (default: where clients look for it)")
    return _show(parser.parse_args(arguments).socket)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
