# SPDX-License-Identifier: Apache-2.0
"""The commands of kvm-eval beside `real`: their options, and what they print.

What needs PyTorch is imported by the commands that do."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvm


def add(commands: Any) -> None:
    """Adds them. Each sets `run`, a function of the options that returns the exit status."""
    tasks = commands.add_parser("tasks", help="tasks of the house model: accuracy of each mode "
                                "beside dense attention's on the same prompts")
    tasks.add_argument("--lengths", default="8192", help="tokens of a prompt: 4096,8192,... "
                       "[%(default)s]")
    tasks.add_argument("--prompts", type=int, default=50, help="of each length; 1,000 or more tell "
                       "a point [%(default)s]")
    tasks.add_argument("--task", action="append", help="single_facts, or a task of models/house; "
                       "may be given more than once [single_facts]")
    tasks.add_argument("--facts", type=int, default=8, help="of a text of single_facts, each asked "
                       "for by a prompt of its own [%(default)s]")
    tasks.add_argument("--house", type=Path, default=Path("models/house"),
                       help="that folder of kvm's sources [%(default)s]")
    _add_common(tasks)
    tasks.set_defaults(run=_tasks)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="append a line for each result to this file")
    parser.add_argument("--only", action="append", metavar="MODE", help="modes to evaluate [all]")
    parser.add_argument("--socket", help="of a kvmd; without, an engine in this process")
    parser.add_argument("--threads", type=int, default=0, help="that compute [one per core]")


@contextlib.contextmanager
def _client(options: argparse.Namespace) -> Iterator[kvm.Client]:
    import torch

    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    with (kvm.connect(options.socket) if options.socket
          else kvm.open_embedded(n_threads=options.threads)) as client:
        yield client


def _settings(options: argparse.Namespace) -> list[Any]:
    from ._real import SETTINGS

    modes = sorted({setting.mode for setting in SETTINGS})
    for mode in options.only or []:
        if mode not in modes:
            raise ValueError(f"there is no mode {mode}; there are {', '.join(modes)}")
    return [setting for setting in SETTINGS if not options.only or setting.mode in options.only]


def _write(options: argparse.Namespace, row: Any) -> None:
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")


def _tasks(options: argparse.Namespace) -> int:
    from . import _house, _progress, _tasks

    settings = _settings(options)
    lengths = [int(part) for part in options.lengths.split(",")]
    house = _house.House(options.house)
    for task in options.task or []:
        if task not in house.names:
            raise ValueError(f"there is no task {task}; there are {', '.join(house.names)}")
    if not all(256 <= length <= house.context for length in lengths):
        raise ValueError(f"--lengths is {options.lengths}; tokens may be 256 to {house.context}")
    if options.prompts < 1 or not 1 <= options.facts <= 64:
        raise ValueError(f"--prompts is {options.prompts} and --facts {options.facts}; there is at "
                         "least one prompt, and a text has 1 to 64 facts")
    print(f"{'task':13} {'tokens':>6} {'prompts':>7} {'mode':10} {'setting':14} {'right':>6} "
          f"{'dense':>6} {'difference (95 %)':>22} {'keys':>6} {'bytes':>6} {'exact':>6}")
    with _client(options) as client:
        for task in options.task or [_house.SINGLE_FACTS]:
            for length in lengths:
                with _progress.bar(options.prompts, "prompt") as bar:
                    bar.set_postfix_str(f"{task}, {length} tokens")
                    rows = list(_tasks.evaluate(house, client, task, length, options.prompts,
                                                options.facts, settings, bar.update))
                for row in rows:
                    _print_task(row)
                    _write(options, row)
    return 0


def _print_task(row: Any) -> None:
    claim = {None: "  no claim", True: "", False: "  not shown"}[row.claim]
    print(f"{row.task:13} {row.tokens:6} {row.prompts:7} {row.mode:10} {row.setting:14} "
          f"{100 * row.accuracy:5.1f}% {100 * row.dense:5.1f}% "
          f"{100 * row.difference:6.2f} ({100 * row.difference_low:6.2f}, "
          f"{100 * row.difference_high:5.2f}) {100 * row.keys_fraction:5.1f}% "
          f"{100 * row.bytes_fraction:5.1f}% {100 * row.exact_fraction:5.1f}%"
          + ("  mixed" if row.is_mixed else "") + claim, flush=True)
