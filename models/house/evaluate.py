# SPDX-License-Identifier: Apache-2.0
"""Evaluates the house model, with attention over everything (dense).

    python3 models/house/evaluate.py [--weights FILE] [--lengths 1024:60,...] [--out DIR]

Writes evaluation.json, evaluation.md, and passkey.svg: the share of single needles found, by
length and by where the needle stands. An answer counts when every one of its tokens is the
likeliest; where the order is free, when greedy decoding gives the same words. For streams the share
of the asked words that greedy decoding names, in any order, stands beside it: RULER's measure
(Hsieh et al., arXiv 2404.06654) of its aggregation tasks. Intervals are Wilson's at 95 %. Samples
are seeded and sums run in a fixed order: the same machine gives the same figures again. Results are
kept in --out for each task and length while it runs, so an interrupted
evaluation continues.
"""
import argparse
import hashlib
import json
import math
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F

import curve
import data
import model as house
import tasks

HERE = os.path.dirname(os.path.abspath(__file__))
LENGTHS = "1024:100,4096:100,8192:100,16384:40,32768:20"
DEPTHS = 5
STREAMS = ("frequent_words", "common_words")
TEXT_WINDOW = 2048


def wilson(right, n, z=1.959964):
    """(low, high) of the share right/n."""
    share, scale = right / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def is_right(model, sample, device):
    """(whether greedy decoding after the question gives the answer, the share of its words that it
    names or None where that is not asked for)."""
    begin, answer = sample.answer_begin, sample.tokens[sample.answer_begin:].tolist()
    if sample.name in STREAMS:
        found = model.generate(sample.tokens[:begin].tolist(), len(answer))
        right = sorted(found) == sorted(answer) if sample.unordered else found == answer
        return right, len(set(found) & set(answer)) / len(answer)
    # Each step is right after a right start exactly when decoding gives the whole answer.
    tokens = torch.from_numpy(sample.tokens[None, :-1]).long().to(device)
    select = torch.zeros_like(tokens, dtype=torch.bool)
    select[0, begin - 1:] = True
    with torch.inference_mode():
        found = model(tokens, select=select).argmax(-1).tolist()
    return found == answer, None


def bits_per_byte(model, texts, tokenizer, device):
    """Every token once, with TEXT_WINDOW / 2 to TEXT_WINDOW tokens of its document before it (fewer
    at its start). Returns (bits, bytes) of texts [(title, text)]."""
    bits, size, stride = 0.0, 0, TEXT_WINDOW // 2
    for _, text in texts:
        tokens = torch.tensor([tasks.DOCUMENT_START] + tokenizer.encode(text), device=device)
        size += len(text.encode())
        for begin in range(0, max(1, len(tokens) - 1 - stride), stride):
            window = tokens[begin:begin + TEXT_WINDOW + 1]
            select = torch.ones(1, len(window) - 1, dtype=torch.bool, device=device)
            if begin:
                select[0, :TEXT_WINDOW - stride] = False
            with torch.inference_mode():
                logits = model(window[None, :-1], select=select)
                losses = F.cross_entropy(logits, window[1:][select[0]], reduction="none")
            bits += losses.double().sum().item() / math.log(2)
    return bits, size


class Evaluation:
    """Figures by name; each is computed once and kept in the file."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.path = os.path.join(arguments.out, "evaluation.json")
        with open(arguments.weights, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        self.model, self.tokenizer = house.load(arguments.weights)
        self.model.to(arguments.device)
        self.figures = {"weights_sha256": digest, "parameters":
                        sum(p.numel() for p in self.model.parameters())}
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                saved = json.load(file)
            if saved.get("weights_sha256") == digest:
                self.figures = saved

    def keep(self, key, compute):
        if key not in self.figures:
            self.figures[key] = compute()
            with open(self.path + ".new", "w", encoding="utf-8") as file:
                json.dump(self.figures, file, indent=1, sort_keys=True)
                file.write("\n")
            os.replace(self.path + ".new", self.path)
            print(key, self.figures[key], flush=True)
        return self.figures[key]

    def accuracy(self, name, n_tokens, count, **options):
        """{"right", "n", "low", "high"} over seeds 0 ... count - 1; of streams also "named", the
        mean share of the words."""
        def compute():
            answers = [is_right(self.model, tasks.make(name, n_tokens, seed, self.tokenizer,
                                                       **options), self.arguments.device)
                       for seed in range(count)]
            right = sum(each for each, _ in answers)
            low, high = wilson(right, count)
            found = {"right": right, "n": count, "low": round(low, 4), "high": round(high, 4)}
            if name in STREAMS:
                found["named"] = round(sum(share for _, share in answers) / count, 4)
            return found
        tag = "".join(f" {key}={value:.2f}" for key, value in options.items())
        return self.keep(f"{name} {n_tokens}{tag} n={count}", compute)

    def text(self):
        kinds = {}
        for title, text in data.held_out_text():
            kinds.setdefault(title.split("/")[0], []).append((title, text))
        found = {kind: self.keep(f"text {kind}", lambda texts=texts: bits_per_byte(
            self.model, texts, self.tokenizer, self.arguments.device))
            for kind, texts in kinds.items()}
        found["all"] = [sum(column) for column in zip(*found.values())]
        return {kind: bits / size for kind, (bits, size) in found.items()}

    def passkey(self, lengths):
        """Shares of single needles found [depth][length]."""
        depths = [(each + 0.5) / DEPTHS for each in range(DEPTHS)]
        values = []
        for depth in depths:
            row = [self.accuracy("needle_single", n, max(4, count // DEPTHS), depth=depth)
                   for n, count in lengths]
            values.append([each["right"] / each["n"] for each in row])
        curve.heat_map(os.path.join(self.arguments.out, "passkey.svg"),
                       "Single needles found, percent", [f"{n // 1024}K" for n, _ in lengths],
                       [f"{depth:.0%}" for depth in depths], values, "tokens",
                       "depth of the needle")


def report(evaluation, lengths, names):
    """evaluation.md: percent right, the interval, for each task and length."""
    lines = [f"Weights: {evaluation.figures['parameters']} parameters, SHA-256 "
             f"`{evaluation.figures['weights_sha256'][:16]}`. Percent right (95 % interval).", "",
             "| task | " + " | ".join(f"{n // 1024}K (n = {count})" for n, count in lengths) + " |",
             "|---|" + "---|" * len(lengths)]
    for name in names:
        cells = []
        for n, count in lengths:
            each = evaluation.accuracy(name, n, count)
            cells.append(f"{100 * each['right'] / each['n']:.0f} "
                         f"({100 * each['low']:.0f}-{100 * each['high']:.0f})"
                         + (f", words {100 * each['named']:.0f}" if "named" in each else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if not evaluation.arguments.no_text:
        lines += ["", "| held-out text | bits per byte |", "|---|---|"]
        lines += [f"| {kind} | {value:.3f} |" for kind, value in evaluation.text().items()]
    with open(os.path.join(evaluation.arguments.out, "evaluation.md"), "w",
              encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--weights", default=house.default_weights())
    parser.add_argument("--lengths", default=LENGTHS, help="tokens:samples, ...")
    parser.add_argument("--tasks", default=",".join(tasks.TASKS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default=os.path.join(data.BUILD, "evaluation"))
    parser.add_argument("--no-text", action="store_true")
    parser.add_argument("--no-passkey", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.makedirs(arguments.out, exist_ok=True)
    lengths = [tuple(int(part) for part in each.split(":"))
               for each in arguments.lengths.split(",")]
    evaluation = Evaluation(arguments)
    with house.compute_type(arguments.device):
        report(evaluation, lengths, arguments.tasks.split(","))
        if not arguments.no_passkey:
            evaluation.passkey(lengths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
