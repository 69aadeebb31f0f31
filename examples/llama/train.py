# SPDX-License-Identifier: Apache-2.0
"""Trains the example model and writes its weight file.

  python3 -m venv .venv && .venv/bin/pip install torch==2.13.0 numpy
  .venv/bin/python examples/llama/train.py

Needs apt-get and dpkg for the text (see corpus.py). Stops at the given number of steps or after
--cpu-minutes of processor time (all threads together), whichever comes first, and measures the
result; continues from its last checkpoint.
"""
import argparse
import math
import os
import time

# Threads that wait at a barrier sleep: spinning would use up processor time on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F

import bpe
import corpus
import evaluate
import model as model_file


def learning_rate(state, arguments):
    """Linear warmup, then half a cosine that ends where the steps or the processor time end."""
    if state["step"] < arguments.warmup:
        return arguments.lr * (state["step"] + 1) / arguments.warmup
    done = max(state["step"] / arguments.steps, state["cpu_s"] / (60 * arguments.cpu_minutes))
    return arguments.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def epoch_windows(tokens, context, epoch):
    """All windows of one epoch, cut at an offset of its own and shuffled."""
    generator = torch.Generator().manual_seed(1000 + epoch)
    offset = int(torch.randint(0, context, (1,), generator=generator))
    count = (len(tokens) - offset - 1) // context
    order = torch.randperm(count, generator=generator)
    return offset + order * context


def batches(tokens, context, batch, first_step):
    """Yields (inputs, targets) from step first_step on; a step's batch depends on its number."""
    step = 0
    epoch = 0
    while True:
        starts = epoch_windows(tokens, context, epoch)
        for at in range(0, len(starts) - batch + 1, batch):
            if step >= first_step:
                rows = torch.stack([tokens[s:s + context + 1] for s in starts[at:at + batch]])
                yield rows[:, :-1], rows[:, 1:]
            step += 1
        epoch += 1


def make_optimizer(model, arguments):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": arguments.weight_decay},
              {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95), fused=True)


def parse_arguments():
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1350)
    parser.add_argument("--cpu-minutes", type=float, default=28.0)
    parser.add_argument("--batch", type=int, default=8, help="windows of one context each")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--build-dir", default=os.path.join(root, "build", "llama"))
    parser.add_argument("--name", default="checkpoint", help="checkpoint file in the build dir")
    parser.add_argument("--out", default=os.path.join(here, "model.safetensors"))
    return parser.parse_args()


def train(model, optimizer, tokens, merges, state, arguments, checkpoint):
    """Runs the steps that are left. state: {"step", "cpu_s"}, updated in place."""
    started = time.process_time() - state["cpu_s"]
    source = batches(tokens, model.config.context, arguments.batch, state["step"])
    bytes_per_token = arguments.bytes_per_token
    while state["step"] < arguments.steps:
        inputs, targets = next(source)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(state, arguments)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state["step"] += 1
        state["cpu_s"] = time.process_time() - started
        if state["step"] % 20 == 0:
            bpb = loss.item() / math.log(2) / bytes_per_token
            print(f"step {state['step']} loss {loss.item():.4f} bpb {bpb:.4f} "
                  f"cpu_s {state['cpu_s']:.0f}", flush=True)
        if state["step"] % 200 == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "merges": merges, "state": state}, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
        if state["cpu_s"] >= arguments.cpu_minutes * 60:
            print("the processor time is used up", flush=True)
            break


def main():
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    os.makedirs(arguments.build_dir, exist_ok=True)
    checkpoint = os.path.join(arguments.build_dir, arguments.name + ".pt")
    config = model_file.Config()
    train_texts, held_out = corpus.split(corpus.load_books(arguments.build_dir))
    model = model_file.Llama(config)
    optimizer = make_optimizer(model, arguments)
    state = {"step": 0, "cpu_s": 0.0}
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state, merges = saved["state"], saved["merges"]
        print("continuing at step", state["step"], flush=True)
    else:
        merges = bpe.train_merges(train_texts, config.vocabulary)
    tokenizer = bpe.Tokenizer(merges)
    stream = []
    for text in train_texts:
        stream += [bpe.DOCUMENT_START] + tokenizer.encode(text)
    tokens = torch.tensor(stream)
    arguments.bytes_per_token = sum(len(t.encode()) for t in train_texts) / len(tokens)
    print(f"{len(tokens)} tokens, {arguments.bytes_per_token:.3f} bytes each, "
          f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    train(model, optimizer, tokens, merges, state, arguments, checkpoint)
    model_file.save(arguments.out, model, merges, {
        "text": "King James Bible (Debian bible-kjv-text)", "steps": str(state["step"]),
        "license": "Apache-2.0"})
    model, merges = model_file.load(arguments.out)
    value, _ = evaluate.bits_per_byte(model, tokenizer, held_out)
    print(f"held_out_bits_per_byte={value:.4f} cpu_s={state['cpu_s']:.0f} "
          f"wrote {arguments.out}", flush=True)


if __name__ == "__main__":
    main()
