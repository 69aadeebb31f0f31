# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint's weights as the files that the tree holds, and says what they are.

    python3 models/house/export.py [--checkpoint build/house/cpu/checkpoint.pt] [--out FILE]
"""
import argparse
import os
import sys

import torch

import data
import model as house
from tokenizer import Tokenizer

FILE_LIMIT, TOTAL_LIMIT = 12 << 20, 24 << 20


def export(checkpoint, out):
    """Returns the paths written. Refuses weights over the limits of the tree."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=False)
    model = house.Llama(house.Config(**saved["config"]))
    model.load_state_dict(saved["model"])
    state = saved["state"]
    paths = house.save(out, model, Tokenizer(saved["merges"]), {
        "steps": str(state["step"]), "trained_tokens": str(state["tokens"]),
        "license": "Apache-2.0"})
    sizes = [os.path.getsize(path) for path in paths]
    if max(sizes) > FILE_LIMIT or sum(sizes) > TOTAL_LIMIT:
        for path in paths:
            os.remove(path)
        raise ValueError(f"weights of {sum(sizes)} bytes in files of {max(sizes)} are too large")
    return paths


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", default=os.path.join(data.BUILD, "cpu", "checkpoint.pt"))
    parser.add_argument("--out", default=os.path.join(
        os.path.dirname(os.path.abspath(__file__)), "model.safetensors"))
    arguments = parser.parse_args()
    for path in export(arguments.checkpoint, arguments.out):
        print(f"{path}: {os.path.getsize(path)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
