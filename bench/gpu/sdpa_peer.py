#!/usr/bin/env python3
"""Compares the decode times of kvm_gpu_check with torch's scaled_dot_product_attention.

Usage: sdpa_peer.py BENCH.jsonl

For each case of `kvm_gpu_check bench` with equal lengths, one query and pages of 64: the same
shape, contiguous, with the fastest of torch's backends and two ways to say grouped heads, as a CUDA
graph that rotates over more than 1 GiB. Prints a bar per case: our time must be below torch's.
"""

import json
import re
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

CASE = re.compile(r"(bf16|fp16) d(\d+) g(\d+) kv(\d+) n(\d+) b(\d+) page64$")
ROTATE_BYTES = 1 << 30
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION]


def graph_us(call, n_sets):
    """Microseconds of one call(i), the median over replays of a graph of several."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call(0)
    end.record()
    torch.cuda.synchronize()
    us = begin.elapsed_time(end) * 1000
    calls = int(min(20, max(1, 6000 / us)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % n_sets)
    times = []
    for i in range(int(min(33, max(8, 250000 / (us * calls))))):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def torch_us(dtype, dim, group, n_kv, tokens, batch):
    dtype = torch.bfloat16 if dtype == "bf16" else torch.float16
    set_bytes = 4 * batch * n_kv * tokens * dim
    n_sets = max(1, -(-ROTATE_BYTES // set_bytes))
    k, v = ([torch.empty(batch, n_kv, tokens, dim, dtype=dtype, device="cuda").uniform_(-1, 1)
             for _ in range(n_sets)] for _ in range(2))
    q = torch.randn(batch, n_kv * group, 1, dim, dtype=dtype, device="cuda")
    rows = q.reshape(batch, n_kv, group, dim)
    best = None
    for backend in BACKENDS:
        ways = {"rows": lambda i: scaled_dot_product_attention(rows, k[i], v[i])}
        if group > 1:
            ways["gqa"] = lambda i: scaled_dot_product_attention(q, k[i], v[i], enable_gqa=True)
        for name, call in ways.items():
            try:
                with sdpa_kernel(backend), torch.inference_mode():
                    us = graph_us(call, n_sets)
            except RuntimeError:
                torch.cuda.synchronize()
                continue
            if best is None or us < best[0]:
                best = (us, f"{backend.name} {name}")
    return best


def main():
    missed = 0
    with open(sys.argv[1], encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.startswith("{")]
    done = set()
    for line in lines:
        match = CASE.match(line.get("case", "")) if line.get("probe") == "decode" else None
        if not match or line["case"] in done:
            continue
        done.add(line["case"])
        dtype, *numbers = match.groups()
        try:
            best = torch_us(dtype, *(int(n) for n in numbers))
        except torch.cuda.OutOfMemoryError:
            best = None
        torch.cuda.empty_cache()
        if best is None:
            continue
        passed = line["measured"] < best[0]
        missed += not passed
        print(json.dumps({"bar": "faster than torch", "case": line["case"], "unit": "us",
                          "measured": line["measured"], "ceiling": None,
                          "limit": round(best[0], 3), "pass": passed, "variant": best[1]}),
              flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
