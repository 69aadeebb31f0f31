# SPDX-License-Identifier: Apache-2.0
"""A decode step of a real model: its own attention against kvm's, embedded and through kvmd.

Prints a table and appends JSON lines {"bench":"python","case":...,"us":...,"ratio":...}: the median
of a step, and over the faster of eager and sdpa at their best number of threads. Cases take turns,
one token each, so that all see the same machine."""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers

import kvm
from kvm.eval import _smollm, _texts
from kvm.integrations.transformers import KvmCache, use_kvm


class Case:
    """A cache that grows by a token at a time."""

    def __init__(self, name, model, implementation, cache, n_threads, ids):
        self.name = name
        self.model = model
        self.implementation = implementation
        self.cache = cache
        self.n_threads = n_threads
        self.times = []
        self.switch()
        for part in ids.split(512, dim=1):
            model.model(part, past_key_values=cache)

    def switch(self):
        torch.set_num_threads(self.n_threads)
        self.model.config._attn_implementation = self.implementation

    def step(self, token):
        self.switch()
        begin = time.perf_counter()
        logits = self.model(token, past_key_values=self.cache).logits
        self.times.append((time.perf_counter() - begin) * 1e6)
        return logits


def measure(model, ids, clients, n_steps, codecs):
    cases = []
    for n_threads in (1, torch.get_num_threads()):
        for implementation in ("eager", "sdpa"):
            cases.append(Case(f"{implementation}, {n_threads} threads", model, implementation,
                              transformers.DynamicCache(), n_threads, ids[:, :-n_steps]))
    use_kvm(model)
    for name, client in clients:
        for codec in codecs:
            cases.append(Case(f"kvm {name}, {codec}", model, "kvm",
                              KvmCache(model, client, codec=codec), torch.get_num_threads(),
                              ids[:, :-n_steps]))
    for i in range(n_steps):
        token = ids[:, ids.shape[1] - n_steps + i:][:, :1]
        for case in cases[i % len(cases):] + cases[:i % len(cases)]:
            case.step(token)
    for case in cases:
        if isinstance(case.cache, KvmCache):
            case.cache.close()
    own = min(statistics.median(c.times) for c in cases if c.implementation != "kvm")
    for case in cases:
        us = statistics.median(case.times)
        yield case.name, us, us / own


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--tokens", type=int, action="append")
    options = parser.parse_args()
    path = options.model or _smollm.fetch(Path.home() / ".cache" / "kvm-eval")
    model, tokenizer = _smollm.load(path)
    text = [model.config.bos_token_id, *tokenizer.encode(_texts.read("reference-s")).ids]
    with torch.no_grad(), kvm.open_embedded(capacity=4 << 30) as embedded, \
            kvm.start_daemon(capacity="4GiB") as daemon, kvm.connect(daemon.socket) as connected:
        for n_tokens in options.tokens or [1024, 8192]:
            ids = torch.tensor([text[:n_tokens]])
            for name, us, ratio in measure(
                    model, ids, [("embedded", embedded), ("kvmd", connected)], options.steps,
                    ["float32", "bfloat16"]):
                print(f"{n_tokens:6} tokens  {name:24} {us / 1e3:8.2f} ms  {ratio:5.2f}")
                if options.json:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({
                            "bench": "python", "case": f"decode, {n_tokens} tokens, {name}",
                            "us": round(us, 1), "ratio": round(ratio, 3)}) + "\n")


if __name__ == "__main__":
    main()
