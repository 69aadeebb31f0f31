# SPDX-License-Identifier: Apache-2.0
"""Records queries, keys and values of the house model into .kvrec files (FORMAT.md).

    python3 record.py --sample              # the committed sample: models/house/sample/, <= 8 MiB
    python3 record.py --large               # the large set: build/house/large/, all kv heads
    python3 record.py --task NAME --tokens 8192 --layers 2,5 --out build/house/one.kvrec
    python3 record.py --text --tokens 8192 --out build/house/text.kvrec

The model runs once over each prompt, answers included, and the capture hook copies what is chosen.
Recorded queries: pairs of neighbouring steps over the prompt (`--pairs`), and every step that
predicts a token of an answer. The same command writes the same file.
"""
import argparse
import hashlib
import os
import sys

import numpy as np

import kvrec

HERE = os.path.dirname(os.path.abspath(__file__))
SAMPLE_LIMIT = 8 << 20
LARGE_TOKENS = 32768
LARGE_TASK, MIXED_TASK = "needle_multikey", "common_words"   # names of tasks.py
TASK_QUERIES = 32   # questions in a prompt: a head that retrieves does so at these only
SAMPLE_TOKENS, SAMPLE_GROUPS = 4096, 2


def to_numpy(tensor):
    """Tensor or array [1, heads, tokens, dim] of any float type -> float32 [heads, tokens, dim]."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().float().cpu().numpy()
    return np.asarray(tensor, np.float32)[0]


class Capture:
    """The hook of the model: keeps q of some steps, and k_pre, k, v of all, of chosen kv heads.

    chosen: {layer: [kv heads]}. group: query heads for each kv head; those of kv head h are
    h * group ... h * group + group - 1.
    """

    def __init__(self, chosen, group, steps):
        self.chosen, self.group, self.steps = chosen, group, steps
        self.kept = {}     # (layer, kv head, name) -> float32 array

    def __call__(self, layer, name, tensor):
        if layer not in self.chosen or name == "q_pre":
            return
        array = to_numpy(tensor)
        for head in self.chosen[layer]:
            if name == "q":
                mine = array[head * self.group:(head + 1) * self.group, self.steps]
                self.kept[layer, head, name] = mine.transpose(1, 0, 2).copy()
            else:
                self.kept[layer, head, name] = array[head].copy()


def choose_steps(n_tokens, pairs, answers):
    """Ascending: `pairs` pairs of neighbours over the last three quarters, and every step that
    predicts a token of an answer [begin, end)."""
    first = np.linspace(n_tokens // 4, n_tokens - 2, pairs).astype(int)
    predicting = [np.arange(max(begin - 1, 0), end - 1) for begin, end in answers]
    return np.unique(np.concatenate([first, first + 1, *predicting]))


def record_prompt(path, model, tokens, shape, chosen, prompt, pairs=128, dtype="bf16"):
    """Runs `model` over tokens [N] and writes one record.

    model(tokens [1, N], positions [N], capture=hook). shape: what FORMAT.md calls `model`, with
    q_heads and kv_heads. chosen: {layer: [kv heads]}. prompt: what FORMAT.md calls `prompt`.
    """
    n_tokens = len(tokens)
    steps = choose_steps(n_tokens, pairs, prompt["answers"])
    group = shape["q_heads"] // shape["kv_heads"]
    capture = Capture(chosen, group, steps)
    positions = np.arange(n_tokens)
    run_model(model, tokens, positions, capture)
    arrays = {"positions": ("i32", positions), "tokens": ("i32", tokens),
              "query_steps": ("i32", steps)}
    groups = []
    for layer in sorted(chosen):
        for head in chosen[layer]:
            entry = {"layer": layer, "kv_head": head,
                     "q_heads": list(range(head * group, (head + 1) * group))}
            for name in ("q", "k_pre", "k", "v"):
                if (layer, head, name) not in capture.kept:
                    raise RuntimeError(f"the model did not hand over {name} of layer {layer}")
                entry[name] = f"{layer}.{head}.{name}"
                arrays[entry[name]] = (dtype, capture.kept[layer, head, name])
            groups.append(entry)
    head_dim = arrays[groups[0]["k"]][1].shape[1]
    kvrec.write(path, {"n_tokens": n_tokens, "n_queries": len(steps), "head_dim": head_dim,
                       "softmax_scale": float(shape.get("softmax_scale", head_dim**-0.5)),
                       "model": shape, "prompt": prompt, "groups": groups}, arrays)
    print(f"{path}: {n_tokens} tokens, {len(steps)} queries, {len(groups)} kv heads, "
          f"{os.path.getsize(path) / 2**20:.2f} MiB", flush=True)


def run_model(model, tokens, positions, capture):
    """One forward pass without gradients; a model of plain functions needs no torch."""
    if not hasattr(model, "parameters"):
        model(np.asarray(tokens)[None], positions, capture=capture)
        return
    import torch
    with torch.inference_mode():
        model(torch.as_tensor(np.asarray(tokens), dtype=torch.int64)[None],
              torch.as_tensor(positions), capture=capture)


def describe_model(paths, config):
    """FORMAT.md's `model` of a loaded model: its files, and its Config as in model.py."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(file.read())
    names = ("layers", "heads", "kv_heads", "head_dim", "rope_theta", "context")
    found = {name: getattr(config, name) for name in names if hasattr(config, name)}
    found["q_heads"] = found.pop("heads")
    return dict(found, name="house", rope_layout="rotate_half", weights_sha256=digest.hexdigest())


class Recorder:
    """The loaded model with its tokenizer, and where the prompts come from."""

    def __init__(self, path):
        import data
        import model as house
        import tasks
        self.tasks, self.data = tasks, data
        self.model, self.tokenizer = house.load(path)
        self.shape = describe_model(house.shard_paths(path), self.model.config)
        self.text = None

    def every_head(self):
        return {layer: list(range(self.shape["kv_heads"]))
                for layer in range(self.shape["layers"])}

    def task_prompt(self, name, n_tokens, seed):
        """(tokens, FORMAT.md's `prompt`) of an evaluation sample with up to TASK_QUERIES questions;
        with one at the end where the task has no room for more."""
        sample = self.tasks.make(name, n_tokens, seed, self.tokenizer, queries=TASK_QUERIES)
        if not sample.answers:
            sample = self.tasks.make(name, n_tokens, seed, self.tokenizer)
        answers = [[int(begin), int(end)] for begin, end in sample.answers]
        return np.asarray(sample.tokens), {"name": name, "kind": "task", "seed": seed,
                                           "answers": answers}

    def text_prompt(self, n_tokens, seed):
        """The `seed`-th stretch of n_tokens of held-out text; all of it where it is shorter."""
        if self.text is None:
            self.text = self.data.tokens_of(self.data.held_out_text(), self.tokenizer,
                                            self.data.BUILD)
        begin = seed * n_tokens % max(1, len(self.text) - n_tokens + 1)
        tokens = self.text[begin:begin + n_tokens]
        return tokens, {"name": "held-out text", "kind": "text", "seed": seed, "begin": begin,
                        "answers": []}

    def mixed_prompt(self, name, n_tokens, seed):
        """Half text, then a task of half the length."""
        text, _ = self.text_prompt(n_tokens // 2, 2 * seed + 1)
        task, prompt = self.task_prompt(name, n_tokens - len(text), seed)
        prompt.update(name=f"held-out text, then {name}", text_tokens=len(text),
                      answers=[[begin + len(text), end + len(text)]
                               for begin, end in prompt["answers"]])
        return np.concatenate([text, task]), prompt

    def record(self, path, tokens, prompt, chosen, pairs):
        record_prompt(path, self.model, tokens, self.shape, chosen, prompt, pairs)


def make_sample(recorder, options):
    """Two prompts of SAMPLE_TOKENS with two kv heads each: `--layers`, or the two middle layers."""
    folder = options.out or os.path.join(HERE, "sample")
    os.makedirs(folder, exist_ok=True)
    layers = options.layers or [recorder.shape["layers"] // 2, recorder.shape["layers"] - 2]
    chosen = {layer: [0] for layer in layers[:SAMPLE_GROUPS]}
    paths = [os.path.join(folder, name) for name in ("text.kvrec", "task.kvrec")]
    tokens = options.tokens or SAMPLE_TOKENS
    recorder.record(paths[0], *recorder.text_prompt(tokens, 0), chosen, options.pairs)
    recorder.record(paths[1], *recorder.task_prompt(options.task or LARGE_TASK, tokens,
                                                    options.seed), chosen, options.pairs)
    total = sum(os.path.getsize(path) for path in paths)
    if total > SAMPLE_LIMIT:
        sys.exit(f"record: the sample has {total} bytes; at most {SAMPLE_LIMIT}")


def make_large(recorder, options):
    """Text, a task, and a prompt of half text, half task: three prompts, half of it real text."""
    folder = options.out or os.path.join("build", "house", "large")
    os.makedirs(folder, exist_ok=True)
    tokens = options.tokens or min(LARGE_TOKENS, recorder.shape.get("context", LARGE_TOKENS))
    chosen = recorder.every_head()
    if options.layers:
        chosen = {layer: chosen[layer] for layer in options.layers}
    task = options.task or LARGE_TASK
    paths = [os.path.join(folder, f"{name}.kvrec") for name in ("text", "task", "mixed")]
    recorder.record(paths[0], *recorder.text_prompt(tokens, 0), chosen, options.pairs)
    recorder.record(paths[1], *recorder.task_prompt(task, tokens, options.seed), chosen,
                    options.pairs)
    recorder.record(paths[2], *recorder.mixed_prompt(options.mixed_task, tokens, options.seed + 1),
                    chosen, options.pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sample", action="store_true", help="the sample of the tree")
    what.add_argument("--large", action="store_true", help="three prompts, every kv head")
    what.add_argument("--text", action="store_true", help="held-out text")
    parser.add_argument("--task", help="a prompt of this task")
    parser.add_argument("--mixed-task", default=MIXED_TASK, help="--large: the task after text")
    parser.add_argument("--model", default=os.path.join(HERE, "model.safetensors"))
    parser.add_argument("--out", help="file (--text, --task) or folder (--sample, --large)")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=128)
    parser.add_argument("--layers", type=lambda text: [int(part) for part in text.split(",")])
    options = parser.parse_args()
    recorder = Recorder(options.model)
    if options.sample:
        make_sample(recorder, options)
    elif options.large:
        make_large(recorder, options)
    elif options.text or options.task:
        if not options.out:
            parser.error("--out FILE is needed")
        chosen = recorder.every_head()
        if options.layers:
            chosen = {layer: chosen[layer] for layer in options.layers}
        tokens = options.tokens or SAMPLE_TOKENS
        made = (recorder.text_prompt(tokens, options.seed) if options.text
                else recorder.task_prompt(options.task, tokens, options.seed))
        recorder.record(options.out, *made, chosen, options.pairs)
    else:
        parser.error("one of --sample, --large, --text, --task NAME")


if __name__ == "__main__":
    main()
