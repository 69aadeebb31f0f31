# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden.safetensors: a text, its tokens, and the logits PyTorch computes for them.

  .venv/bin/python examples/llama/make_golden.py

To be run after the weights have changed. All in fp32, from the weight file.
"""
import json
import os
import struct

import torch

import bpe
import model as model_file

TEXT = ("And when they were come unto the city, behold, a great multitude; and they said, "
        "Who art thou? (1611)\n\nNow therefore arise, 'let us go': for the LORD hath spoken.\n")
N_TOKENS = 40


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    model, merges = model_file.load(os.path.join(here, "model.safetensors"))
    encoded = bpe.Tokenizer(merges).encode(TEXT)
    tokens = torch.tensor(([bpe.DOCUMENT_START] + encoded)[:N_TOKENS])
    model.eval()
    with torch.no_grad():
        logits = model(tokens[None])[0].float().contiguous()
    header = {"__metadata__": {"text": TEXT}}
    blob = b""
    for name, dtype, tensor in (("encoded", "I32", torch.tensor(encoded).int()),
                                ("tokens", "I32", tokens.int()), ("logits", "F32", logits)):
        data = tensor.numpy().tobytes()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape),
                        "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    path = os.path.join(here, "tests", "golden.safetensors")
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + blob)
    print(f"wrote {path}: {len(encoded)} tokens of text, logits {list(logits.shape)}")


if __name__ == "__main__":
    main()
