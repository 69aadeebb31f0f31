#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The end of the demo: a real model answers a question about a long text, with its KV in kvmd.

Usage: demo_answer.py MODEL.gguf
Needs the package kvm, PyTorch and transformers."""

import sys
import textwrap
import time

import torch

import kvm
from kvm.eval import _smollm, _texts
from kvm.integrations.transformers import KvmCache

N_TEXT = 4000  # tokens
CHUNK = 256
FACT = ("\n\nA note to whoever keeps the lighthouse: the spare key of the lamp room lies under the "
        "blue pot in the garden.\n\n")
QUESTION = "Where is the spare key of the lamp room?"


def prompt(tokenizer):
    """Chapters of Python's reference with a note of another kind in them, and the question."""
    text = tokenizer.encode(_texts.read("reference-s")).ids[:N_TEXT]
    parts = ["<|im_start|>user\n" + tokenizer.decode(text[:N_TEXT // 3]), FACT,
             tokenizer.decode(text[N_TEXT // 3:]),
             f"\n\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"]
    return torch.tensor([tokenizer.encode("".join(parts)).ids])


def main():
    model, tokenizer = _smollm.load(sys.argv[1])
    ids = prompt(tokenizer)
    print(f"   The text: {ids.shape[1]:,} tokens of Python's reference, and in its midst:")
    print(textwrap.fill(FACT.strip(), 88, initial_indent="     ", subsequent_indent="     "))
    with torch.no_grad(), kvm.start_daemon(capacity="1GiB") as daemon, \
            kvm.connect(daemon.socket) as client, \
            KvmCache(model, client, codec="bfloat16", mode=kvm.Mode.SAMPLED, budget=256,
                     indexes=[kvm.Index(min_tokens=1024)]) as cache:
        begin = time.monotonic()
        for part in ids[:, :-1].split(CHUNK, dim=1):
            model.model(part, past_key_values=cache)
        seconds = time.monotonic() - begin
        print(f"   Read by the model in {seconds:.0f} s; kvmd keeps it in "
              f"{client.stats().host_used_bytes / 1e6:.0f} MB.\n\n   {QUESTION}")
        before = cache.stats.keys_present, cache.stats.keys_read, cache.stats.bytes_read
        begin = time.monotonic()
        found = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
                               max_new_tokens=40, do_sample=False)[0, ids.shape[1]:]
        seconds = time.monotonic() - begin
        print(textwrap.fill(tokenizer.decode(found.tolist()).strip(), 88, initial_indent="   > ",
                            subsequent_indent="     "))
        present, _, read_bytes = (now - then for now, then in zip(
            (cache.stats.keys_present, cache.stats.keys_read, cache.stats.bytes_read), before,
            strict=True))
        exact_bytes = present * 2 * cache.space.head_dim_k * 2  # K and V, bfloat16
        print(f"\n   {len(found)} tokens, {1e3 * seconds / len(found):.0f} ms each; "
              f"{read_bytes / len(found) / 1e6:.1f} MB of the KV read for a token, "
              f"{100 * read_bytes / exact_bytes:.0f} % of what exact attention reads.")


if __name__ == "__main__":
    main()
