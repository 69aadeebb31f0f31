# SPDX-License-Identifier: Apache-2.0
"""Held-out bits per byte of a weight file.

Every token of the held-out books is predicted once, with between half a context and a whole
context of its own book before it (less at a book's start). The sum of the code lengths in bits is
divided by the number of bytes of the books.

  python3 examples/llama/evaluate.py [--weights FILE]
"""
import argparse
import math
import os

import torch
import torch.nn.functional as F

import bpe
import corpus
import model as model_file


def bits_per_byte(model, tokenizer, texts):
    context = model.config.context
    stride = context // 2
    bits = 0.0
    total_bytes = 0
    model.eval()
    with torch.no_grad():
        for text in texts:
            tokens = torch.tensor([bpe.DOCUMENT_START] + tokenizer.encode(text))
            total_bytes += len(text.encode())
            windows = []
            for begin in range(0, max(1, len(tokens) - 1 - stride), stride):
                windows.append(tokens[begin:begin + context + 1])
            for index, window in enumerate(windows):
                logits = model(window[None, :-1])[0].float()
                loss = F.cross_entropy(logits, window[1:], reduction="none")
                scored = loss if index == 0 else loss[context - stride:]
                bits += scored.double().sum().item() / math.log(2)
    return bits / total_bytes, total_bytes


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", default=os.path.join(here, "model.safetensors"))
    parser.add_argument("--build-dir", default=os.path.join(root, "build", "llama"))
    arguments = parser.parse_args()
    model, merges = model_file.load(arguments.weights)
    _, held_out = corpus.split(corpus.load_books(arguments.build_dir))
    value, size = bits_per_byte(model, bpe.Tokenizer(merges), held_out)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"held_out_bits_per_byte={value:.4f} bytes={size} books={len(held_out)} "
          f"parameters={parameters} file_bytes={os.path.getsize(arguments.weights)}")


if __name__ == "__main__":
    main()
