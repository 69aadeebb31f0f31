#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares two builds of kvm-bench by pairs of runs, A B B A A B B A ...

    bench/paired.py --a OLD/kvm-bench --b NEW/kvm-bench --pairs 30 --keep PAIRS.jsonl \\
        --json FIGURES.jsonl -- decode --max-tokens 16384 --repeats 7

Each pair gives a ratio B / A for each row of the bench's table: of a time, or of the inverse of a
rate, so that more than 1 is slower. The table shows the median of the ratios with an interval that
holds the true median with 95 %, whatever the ratios' distribution: order statistics whose ranks
come from the binomial distribution. A row is a loss where the interval lies wholly above --limit
(1.02), and the exit status is then 1. With fewer than 30 pairs nothing is judged.

--keep names a file of pairs that earlier calls have measured: they count, and new ones are
appended. So a comparison can be made in parts (--seconds), between other work of the machine.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

MIN_PAIRS = 30
LIMIT = 1.02
# What is compared of a row: the first of these that it has, and whether more is better.
MEASURES = {"ms_per_token": False, "p50_ms": False, "p50_us": False, "ms": False, "us": False,
            "gbps": True, "gflops": True, "tokens_per_s": True}
# What names a row, as far as it has it.
NAMES = ("shape", "case", "mode", "data", "where", "beside", "setting", "tokens", "gap_us",
         "n_query", "threads")


def row_name(row):
    return " ".join(f"{name}={row[name]}" for name in NAMES if name in row)


def times_of(rows):
    """Name of each row -> a time, or the inverse of a rate."""
    times = {}
    for row in rows:
        for field, is_rate in MEASURES.items():
            if field in row:
                times[f"{row['bench']} {row_name(row)}"] = 1 / row[field] if is_rate else row[field]
                break
    return times


def steal_ticks():
    """Ticks that the host gave to others, and all ticks."""
    with open("/proc/stat", encoding="ascii") as stat:
        ticks = [int(word) for word in stat.readline().split()[1:9]]
    return ticks[7], sum(ticks)


def run_once(binary, arguments):
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        # A row above its ceiling makes the bench fail; its time counts all the same.
        process = subprocess.run([binary, *arguments, "--json", file.name], check=False,
                                 capture_output=True, text=True)
        lines = file.read().decode().splitlines()
    if process.returncode not in (0, 1) or not lines:
        sys.exit(f"{binary} ended with status {process.returncode}:\n"
                 f"{process.stdout}{process.stderr}")
    return times_of(json.loads(line) for line in lines)


def interval(ratios):
    """Median, and the bounds of an interval that holds the true one with at least 95 %."""
    ordered = sorted(ratios)
    n = len(ordered)
    # The largest k with P(fewer than k of n fall below the median) <= 2.5 %.
    k, below = 0, 0.0
    while k < n // 2 and below + math.comb(n, k) / 2**n <= 0.025:
        below += math.comb(n, k) / 2**n
        k += 1
    if k == 0:
        return statistics.median(ordered), 0.0, math.inf
    return statistics.median(ordered), ordered[k - 1], ordered[n - k]


def judge(pairs, limit=LIMIT):
    """A summary of each row; `loss` is None where there are too few pairs to say."""
    ratios = {}
    for pair in pairs:
        for name in pair["a"].keys() & pair["b"].keys():
            ratios.setdefault(name, []).append(pair["b"][name] / pair["a"][name])
    summaries = []
    for name, values in sorted(ratios.items()):
        median, low, high = interval(values)
        summaries.append({"bench": "paired", "row": name, "pairs": len(values), "ratio": median,
                          "low": low, "high": high,
                          "loss": low > limit if len(values) >= MIN_PAIRS else None})
    return summaries


def read_pairs(path, arguments):
    if not path or not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        pairs = [json.loads(line) for line in file]
    return [pair for pair in pairs if pair["arguments"] == arguments]


def measure(options, pairs):
    end = time.monotonic() + options.seconds if options.seconds else math.inf
    longest = 0.0
    while len(pairs) < options.pairs and time.monotonic() + longest < end:
        begin = time.monotonic()
        order = ("a", "b") if len(pairs) % 2 == 0 else ("b", "a")
        stolen, ticks = steal_ticks()
        pair = {"arguments": options.arguments, "order": "".join(order)}
        for which in order:
            pair[which] = run_once(getattr(options, which), options.arguments)
        now_stolen, now_ticks = steal_ticks()
        pair["steal_share"] = (now_stolen - stolen) / max(1, now_ticks - ticks)
        pairs.append(pair)
        if options.keep:
            with open(options.keep, "a", encoding="utf-8") as file:
                file.write(json.dumps(pair) + "\n")
        longest = max(longest, time.monotonic() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--a", help="the earlier kvm-bench")
    parser.add_argument("--b", help="the later kvm-bench")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    parser.add_argument("--seconds", type=float, help="start no pair that may end after these")
    parser.add_argument("--keep", help="file of pairs, continued")
    parser.add_argument("--json", help="append one JSON object a row to this file")
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("arguments", nargs="+", help="of kvm-bench, behind --")
    options = parser.parse_args()
    pairs = read_pairs(options.keep, options.arguments)
    if len(pairs) < options.pairs:
        if not options.a or not options.b:
            parser.error("--a and --b are needed to measure")
        measure(options, pairs)
    summaries = judge(pairs, options.limit)
    if not summaries:
        sys.exit("no rows in common: nothing is compared")
    steal = statistics.median(pair["steal_share"] for pair in pairs)
    for row in summaries:
        verdict = {None: "too few pairs", True: "LOSS", False: "no loss"}[row["loss"]]
        print(f"{row['row']}: {row['pairs']} pairs, B / A {row['ratio']:.4f} "
              f"({row['low']:.4f} to {row['high']:.4f}): {verdict}")
        row["arguments"] = " ".join(options.arguments)
        row["steal_share"] = steal
    print(f"median share of stolen time: {steal:.1%}")
    if options.json:
        with open(options.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in summaries)
    return 1 if any(row["loss"] for row in summaries) else 0


if __name__ == "__main__":
    sys.exit(main())
