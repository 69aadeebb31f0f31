# SPDX-License-Identifier: Apache-2.0
"""Runs torch's scaled_dot_product_attention on one shape whenever a line arrives on stdin.

Answers "<seconds> <variant>" per line: the best of the dtypes and layouts that torch offers here,
chosen once at the start by trying each (median of 3), so that the peer shows its best side.
"""

import statistics
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention


def tensors(n_seqs, n_heads, dim, tokens, dtype, layout):
    if layout == "heads_first":  # [batch][head][token][dim], contiguous
        return torch.randn(n_seqs, n_heads, tokens, dim).to(dtype)
    # [batch][token][head][dim], seen as heads first
    return torch.randn(n_seqs, tokens, n_heads, dim).to(dtype).transpose(1, 2)


def main():
    n_seqs, n_q, n_kv, dim, tokens, threads = (int(a) for a in sys.argv[1:7])
    torch.set_num_threads(threads)

    def timed(call):
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    best = None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for layout in ("heads_first", "tokens_first"):
            q = torch.randn(n_seqs, n_q, 1, dim).to(dtype)
            k = tensors(n_seqs, n_kv, dim, tokens, dtype, layout)
            v = tensors(n_seqs, n_kv, dim, tokens, dtype, layout)

            # GQA two ways: by the flag, and as a group of query rows per kv head.
            def flag(q=q, k=k, v=v):
                return scaled_dot_product_attention(q, k, v, enable_gqa=n_q != n_kv)

            grouped_q = q.reshape(n_seqs, n_kv, n_q // n_kv, dim)

            def grouped(q=grouped_q, k=k, v=v):
                return scaled_dot_product_attention(q, k, v)

            for name, call in (("gqa_flag", flag), ("grouped", grouped)):
                try:
                    with torch.inference_mode():
                        call()
                        seconds = statistics.median(timed(call) for _ in range(3))
                except RuntimeError:
                    continue
                if best is None or seconds < best[0]:
                    label = f"{str(dtype).removeprefix('torch.')}/{layout}/{name}"
                    best = (seconds, label, call)
    _, label, call = best
    with torch.inference_mode():
        for _ in sys.stdin:
            print(f"{timed(call):.9f} {label}", flush=True)


main()
