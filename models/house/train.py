# SPDX-License-Identifier: Apache-2.0
"""Trains the house model. Interruptible, and continues from its last checkpoint.

    python3 models/house/train.py --preset cpu --plan-minutes 90
    python3 models/house/train.py --preset gpu --plan-minutes 25 --minutes 8   # again, until done

--plan-minutes is the training time of the whole schedule (on a CPU: processor time, divided by
--threads), --minutes the time of this call. It begins with a lesson in looking back, short phrases
of ever more words. Then sequences grow from 256 tokens to the longest of the preset; positions
skip, so that far positions are seen while sequences are short. On SIGTERM and SIGINT a checkpoint
is written before leaving. The log is log.csv in --out, the loss curve loss.svg beside it.
"""
import argparse
import collections
import csv
import dataclasses
import json
import math
import os
import signal
import sys
import time

# Threads that wait at a barrier sleep: spinning would use up processor time on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import torch.nn.functional as F

import curve
import data
import model as house
import tasks
from muon import Muon
from tokenizer import Tokenizer, train_merges


@dataclasses.dataclass
class Recipe:
    """batch_tokens: tokens of a step. stages: (end as a share of the plan, {length: weight}), the
    weights being shares of the steps. decay: share of the plan, at its end, in which the learning
    rates fall to a twentieth."""
    batch_tokens: int
    muon_lr: float
    adam_lr: float
    stages: tuple
    span: int                 # positions reach up to here
    early_tokens: int         # of a step of the first lesson
    early_length: int = 128   # of its sequences
    decay: float = 0.3
    warmup: int = 60          # steps
    weight_decay: float = 0.02
    answer_weight: float = 1.0


RECIPES = {
    "cpu": Recipe(8192, 0.006, 0.003, span=32768, early_tokens=4096, stages=(
        (0.35, {256: 0.6, 512: 0.4}),
        (0.60, {256: 0.2, 512: 0.4, 1024: 0.4}),
        (0.80, {512: 0.3, 1024: 0.4, 2048: 0.3}),
        (1.00, {512: 0.3, 1024: 0.3, 2048: 0.2, 4096: 0.1, 8192: 0.1}))),
    "gpu": Recipe(131072, 0.01, 0.003, span=131072, early_tokens=32768, stages=(
        (0.25, {512: 0.5, 1024: 0.5}),
        (0.50, {1024: 0.4, 2048: 0.6}),
        (0.75, {1024: 0.2, 4096: 0.5, 8192: 0.3}),
        (1.00, {1024: 0.2, 8192: 0.3, 16384: 0.2, 32768: 0.3}))),
}


EARLY_LOSS = 1.0   # nats for each word of a phrase


def schedule(recipe, share, step):
    """(factor of the learning rates, {length: weight}) at `share` of the plan."""
    lengths = next((lengths for end, lengths in recipe.stages if share < end),
                   recipe.stages[-1][1])
    factor = min(1.0, (step + 1) / recipe.warmup)
    left = max(0.0, 1 - share) / recipe.decay
    return factor * max(0.05, min(1.0, left)), lengths


def skipped_positions(rng, n_tokens, span):
    """Ascending positions [n_tokens]: half the time 0, 1, 2, ...; otherwise a start and up to
    four gaps of any size, the last position staying below `span` or a shorter span."""
    positions = np.arange(n_tokens)
    if rng.random() < 0.5:
        return positions
    span = max(n_tokens, int(span * 2.0 ** -rng.integers(0, 3)))
    room = int((span - n_tokens) * rng.random())
    cuts = np.sort(rng.integers(0, n_tokens, rng.integers(1, 5)))
    gaps = np.diff(np.sort(rng.integers(0, room + 1, len(cuts))), prepend=0)
    for cut, gap in zip(cuts, gaps):
        positions[cut:] += gap
    return positions


def make_batch(maker, rng, lengths, recipe, early_words, share):
    """Returns (tokens, positions [rows, n], text, answer: bool [rows, n - 1], names of the rows).
    early_words: of the first lesson; 0 after it. share: of the plan."""
    counting = not early_words and share >= tasks.COUNTING_SHARE and rng.random() < 0.5
    if early_words:
        lengths = {recipe.early_length: 1.0}
    elif counting:
        lengths = {length: 1.0 for length in tasks.COUNTING_LENGTHS}
    sizes = list(lengths)
    weights = np.asarray([lengths[size] for size in sizes])
    n_tokens = int(rng.choice(sizes, p=weights / weights.sum()))
    rows = max(1, (recipe.early_tokens if early_words else recipe.batch_tokens) // n_tokens)
    samples = [tasks.counting_sample(maker, n_tokens, rng) if counting
               else tasks.training_sample(maker, n_tokens, rng, early_words, share)
               for _ in range(rows)]
    tokens = np.stack([sample.tokens for sample in samples]).astype(np.int64)
    positions = np.stack([skipped_positions(rng, n_tokens, n_tokens if early_words else recipe.span)
                          for _ in samples])
    text = np.stack([sample.text for sample in samples])
    answer = np.zeros_like(text)
    for row, sample in enumerate(samples):
        for begin, end in sample.answers:
            answer[row, begin:end] = True
    return tokens, positions, text[:, 1:], answer[:, 1:], [sample.name for sample in samples]


class Trainer:
    """The model, its optimizers and generators, and all that a checkpoint holds."""

    def __init__(self, arguments):
        self.arguments, self.recipe = arguments, RECIPES[arguments.preset]
        self.config = house.PRESETS[arguments.preset]
        self.path = os.path.join(arguments.out, "checkpoint.pt")
        self.state = {"step": 0, "trained_s": 0.0, "tokens": 0,
                      "early_words": tasks.FEWEST_WORDS, "early_loss": 10.0}
        torch.manual_seed(arguments.seed)
        self.rng = np.random.default_rng(arguments.seed)
        saved = None
        if os.path.exists(self.path):
            saved = torch.load(self.path, weights_only=False)
            self.tokenizer = Tokenizer(saved["merges"])
        else:
            self.tokenizer = Tokenizer(self._merges())
        self.model = house.Llama(self.config).to(arguments.device)
        matrices = [p for name, p in self.model.named_parameters()
                    if p.dim() == 2 and not name.startswith("embed")]
        others = [p for name, p in self.model.named_parameters()
                  if p.dim() != 2 or name.startswith("embed")]
        self.optimizers = [
            Muon(matrices, lr=self.recipe.muon_lr, weight_decay=self.recipe.weight_decay),
            torch.optim.AdamW(others, lr=self.recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0,
                              fused=True)]
        if saved is not None:
            self._restore(saved)
        self.compute = house.compute_type(arguments.device)
        self.maker = tasks.maker(self.tokenizer, evaluation=False)

    def _merges(self):
        """Of the training text; kept beside the packages, as finding them takes a minute."""
        path = os.path.join(data.BUILD, f"merges-{self.config.vocabulary}.json")
        if not os.path.exists(path):
            texts = [text for _, text in data.training_text()]
            merges = train_merges(texts, self.config.vocabulary)
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(merges, file)
            os.replace(path + ".new", path)
        with open(path, encoding="utf-8") as file:
            return [tuple(pair) for pair in json.load(file)]

    def _restore(self, saved):
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        self.state = saved["state"]
        self.rng.bit_generator.state = saved["rng"]
        torch.set_rng_state(saved["torch_rng"])

    def save(self):
        torch.save({"config": dataclasses.asdict(self.config), "model": self.model.state_dict(),
                    "optimizers": [each.state_dict() for each in self.optimizers],
                    "merges": self.tokenizer.merges, "state": self.state,
                    "rng": self.rng.bit_generator.state, "torch_rng": torch.get_rng_state()},
                   self.path + ".new")
        os.replace(self.path + ".new", self.path)

    def share(self):
        return self.state["trained_s"] / (60 * self.arguments.plan_minutes)

    def step(self):
        """One step; returns {what: (sum of losses in nats, tokens)}."""
        factor, lengths = schedule(self.recipe, self.share(), self.state["step"])
        for optimizer, lr in zip(self.optimizers, (self.recipe.muon_lr, self.recipe.adam_lr)):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
        batch = make_batch(self.maker, self.rng, lengths, self.recipe,
                           self.state["early_words"], self.share())
        device = self.arguments.device
        tokens, positions, text, answer = (torch.from_numpy(each).to(device) for each in batch[:4])
        counted = text | answer
        select = F.pad(counted, (0, 1))
        with self.compute:
            logits = self.model(tokens, positions, select=select)
        losses = F.cross_entropy(logits, tokens[:, 1:][counted], reduction="none")
        of_answer = answer[counted]
        # Every row counts the same: some have a hundred answers, others one.
        row = counted.nonzero()[:, 0][of_answer]
        n_answers = torch.bincount(row, minlength=len(tokens))
        answers = (losses[of_answer] / n_answers[row]).sum() / max(1, int((n_answers > 0).sum()))
        loss = (losses[~of_answer].sum() / max(1, int((~of_answer).sum()))
                + self.recipe.answer_weight * answers)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.state["step"] += 1
        self.state["tokens"] += tokens.numel()
        found = self._tally(losses.detach().float().cpu().numpy(), counted.cpu().numpy(),
                            of_answer.cpu().numpy(), batch[4])
        self._advance(found)
        return found

    def _advance(self, found):
        """The first lesson: phrases of ever more words, and when all are known it is over. Looking
        back is found in a fraction of the steps where few words have to be told apart."""
        state = self.state
        if not state["early_words"] or "phrases" not in found:
            return
        total, count = found["phrases"]
        state["early_loss"] += 0.08 * (total / count - state["early_loss"])
        every = len(self.maker.lexicon.words)
        if state["early_loss"] < EARLY_LOSS:
            if state["early_words"] == every:
                state["early_words"] = 0
            else:
                state["early_words"] = min(every, int(state["early_words"] * 1.25))
                state["early_loss"] = EARLY_LOSS + 0.3    # over the new words, for a while

    @staticmethod
    def _tally(losses, counted, of_answer, names):
        rows = np.nonzero(counted)[0]
        found = {"text": (float(losses[~of_answer].sum()), int((~of_answer).sum()))}
        for row, name in enumerate(names):
            mine = losses[(rows == row) & of_answer]
            if len(mine):
                total, count = found.get(name, (0.0, 0))
                found[name] = (total + float(mine.sum()), count + len(mine))
        return found


class Log:
    """Sums of losses between the lines of the log, and the lines."""

    def __init__(self, directory):
        self.path = os.path.join(directory, "log.csv")
        self.sums = collections.defaultdict(lambda: [0.0, 0])

    def add(self, found):
        for name, (total, count) in found.items():
            self.sums[name][0] += total
            self.sums[name][1] += count

    def write(self, state, tokens_per_s, eta_s):
        means = {name: total / count for name, (total, count) in self.sums.items() if count}
        self.sums.clear()
        names = ["text", "phrases", *tasks.TASKS]
        if not os.path.exists(self.path):
            with open(self.path, "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(["step", "trained_s", "tokens", *names])
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(
                [state["step"], round(state["trained_s"], 1), state["tokens"]]
                + [round(means[name], 4) if name in means else "" for name in names])
        if state["early_words"]:
            means["words"] = state["early_words"]
            names = [*names, "words"]
        line = " ".join(f"{name} {means[name]:.2f}" for name in names if name in means)
        print(f"step {state['step']} {state['trained_s']:.0f} s, {tokens_per_s:.0f} tokens/s, "
              f"{eta_s / 60:.0f} min left | {line}", flush=True)


def run(trainer, arguments, stop):
    log, started = Log(arguments.out), time.monotonic()
    waited = last_save = last_tokens = 0.0
    last_line = trainer.state["trained_s"]
    last_tokens = trainer.state["tokens"]
    while trainer.share() < 1 and not stop:
        before, used = time.monotonic(), time.process_time()
        if arguments.pause_file and os.path.exists(arguments.pause_file):
            time.sleep(0.5)
            waited += time.monotonic() - before
            continue
        if time.monotonic() - started - waited > 60 * arguments.minutes:
            break
        log.add(trainer.step())
        state = trainer.state
        # On a CPU that others use, too, the schedule follows the processor time of this process.
        state["trained_s"] += ((time.process_time() - used) / arguments.threads
                               if arguments.device == "cpu" else time.monotonic() - before)
        if state["trained_s"] - last_line > arguments.line_seconds:
            rate = (state["tokens"] - last_tokens) / (state["trained_s"] - last_line)
            log.write(state, rate, 60 * arguments.plan_minutes - state["trained_s"])
            last_line, last_tokens = state["trained_s"], state["tokens"]
        if time.monotonic() - started - last_save > 60 * arguments.save_minutes:
            trainer.save()
            last_save = time.monotonic() - started
    trainer.save()
    house.save(os.path.join(arguments.out, "model.safetensors"), trainer.model, trainer.tokenizer,
               {"preset": arguments.preset, "steps": str(trainer.state["step"]),
                "trained_tokens": str(trainer.state["tokens"]), "license": "Apache-2.0"})
    curve.draw(log.path, os.path.join(arguments.out, "loss.svg"))
    print(f"{'finished' if trainer.share() >= 1 else 'stopped'} at step {trainer.state['step']}, "
          f"{trainer.state['trained_s']:.0f} s, {trainer.state['tokens']} tokens", flush=True)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset", choices=sorted(RECIPES), default="cpu")
    parser.add_argument("--plan-minutes", type=float, default=90, help="of the whole schedule")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of this call")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="directory; default: build/house/PRESET")
    parser.add_argument("--pause-file", help="training waits while this file exists")
    parser.add_argument("--save-minutes", type=float, default=3)
    parser.add_argument("--line-seconds", type=float, default=20)
    arguments = parser.parse_args()
    arguments.out = arguments.out or os.path.join(data.BUILD, arguments.preset)
    return arguments


def main():
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    os.makedirs(arguments.out, exist_ok=True)
    stop = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.append(True))
    trainer = Trainer(arguments)
    print(f"{house.count_parameters(trainer.config)} parameters, "
          f"{len(trainer.maker.haystack.tokens)} tokens of text, "
          f"{len(trainer.maker.lexicon.words)} task words, step {trainer.state['step']}",
          flush=True)
    run(trainer, arguments, stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
