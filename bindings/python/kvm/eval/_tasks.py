# SPDX-License-Identifier: Apache-2.0
"""The house model's tasks: answers that are right with a mode, and exactly, of the same prompts.

A text is prefilled, which is exact, once for all settings that store alike. Each question is asked
of a fork of it, token by token with the mode under test, and the answer is decoded greedily."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import Client, Index, IndexKind
from ..integrations.transformers import CacheStats, KvmCache
from . import _intervals
from ._house import SINGLE_FACTS, House, Prompts
from ._real import Setting, index_begin, stored_fraction

DENSE = Setting("dense", "float32", "float32")
LEAST_DENSE = 0.9  # accuracy below which nothing is claimed
MARGIN = 0.01  # what a mode may lose
MIXED = 0.05  # share of exact rows above which a line judges both


@dataclasses.dataclass
class Row:
    """One line of the result. Shares of 1; the intervals are at 95 %."""

    eval: str
    task: str
    tokens: int
    prompts: int
    texts: int
    mode: str
    setting: str
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    dense: float
    difference: float  # accuracy - dense
    difference_low: float
    difference_high: float
    won: int  # prompts that only the mode got right
    lost: int  # those that only dense got right
    design_effect: float
    keys_fraction: float
    bytes_fraction: float
    stored_fraction: float  # bytes that the text takes, indexes included, of those in bfloat16
    exact_fraction: float  # of the rows of an approximate mode
    is_mixed: bool
    claim: bool | None  # whether difference_low > -MARGIN; None: dense is too poor to tell


class _Tally:
    """What a setting did over all texts."""

    def __init__(self) -> None:
        self.right: list[list[bool]] = []  # of each text's questions
        self.stats = CacheStats()
        self.keys = 0  # that exact attention reads
        self.stored: list[float] = []  # share of each text

    def add(self, right: list[bool], stats: CacheStats) -> None:
        self.right.append(right)
        for field in dataclasses.fields(CacheStats):
            mine = getattr(self.stats, field.name) + getattr(stats, field.name)
            setattr(self.stats, field.name, mine)


def evaluate(house: House, client: Client, task: str, n_tokens: int, n_prompts: int, n_facts: int,
             settings: list[Setting], update: Callable[[int], Any]) -> Iterator[Row]:
    """Yields a row for each setting. update: is told how many prompts were added."""
    n_questions = n_facts if task == SINGLE_FACTS else 1
    n_texts = -(-n_prompts // n_questions)
    # Prefills before copies of settings that store alike.
    wanted = sorted([DENSE, *settings], key=lambda setting: repr(setting.stored))
    tallies = {(setting.mode, setting.setting): _Tally() for setting in wanted}
    with torch.no_grad():
        for seed in range(n_texts):
            prompts = house.make(task, n_tokens, seed, n_questions)
            for _, alike in itertools.groupby(wanted, lambda setting: setting.stored):
                _run(house.model, client, prompts, list(alike), seed, tallies)
            update(n_questions)
    dense = tallies[DENSE.mode, DENSE.setting]
    for setting in settings:
        yield _row(task, n_tokens, setting, tallies[setting.mode, setting.setting], dense,
                   house.model.config)


def _run(model: Any, client: Client, prompts: Prompts, alike: list[Setting], seed: int,
         tallies: dict[tuple[str, str], _Tally]) -> None:
    """A text and its questions, for settings that store alike."""
    first = alike[0]
    indexes = ([] if first.index == IndexKind.NONE
               else [Index(first.index, min_tokens=index_begin(len(prompts.text)))])
    with KvmCache(model, client, codec=first.store, indexes=indexes,
                  **first.kept(len(prompts.text))) as prefilled:
        for part in torch.split(torch.tensor([prompts.text]), 1024, dim=1):
            model.model(part, past_key_values=prefilled)
        for setting in alike:
            tally = tallies[setting.mode, setting.setting]
            with copy.deepcopy(prefilled) as cache:
                cache.batch_repeat_interleave(len(prompts.questions))
                cache._arguments.update(setting.attend)
                if setting.attend:
                    cache._arguments["seed"] = seed  # no two texts draw the same numbers
                found = _answers(model, cache, prompts)
                tally.add([_is_right(prompts, i, answer) for i, answer in enumerate(found)],
                          cache.stats)
                tally.stored.append(stored_fraction(cache))
                n_steps = len(prompts.questions[0]) + len(prompts.answers[0]) - 1
                tally.keys += len(prompts.questions) * sum(
                    range(len(prompts.text) + 1, len(prompts.text) + n_steps + 1))


def _answers(model: Any, cache: KvmCache, prompts: Prompts) -> list[list[int]]:
    questions = torch.tensor(prompts.questions)
    for column in torch.split(questions, 1, dim=1):
        logits = model(column, past_key_values=cache).logits[:, -1]
    found = [logits.argmax(-1)]
    for _ in range(len(prompts.answers[0]) - 1):
        logits = model(found[-1][:, None], past_key_values=cache).logits[:, -1]
        found.append(logits.argmax(-1))
    answers: list[list[int]] = torch.stack(found, dim=1).tolist()
    return answers


def _is_right(prompts: Prompts, question: int, found: list[int]) -> bool:
    answer = prompts.answers[question]
    return sorted(found) == sorted(answer) if prompts.is_unordered else found == answer


def _row(task: str, n_tokens: int, setting: Setting, tally: _Tally, dense: _Tally, config: Any
         ) -> Row:
    differences = [[int(a) - int(b) for a, b in zip(mine, theirs, strict=True)]
                   for mine, theirs in zip(tally.right, dense.right, strict=True)]
    n = sum(len(group) for group in differences)
    won = sum(x > 0 for group in differences for x in group)
    lost = sum(x < 0 for group in differences for x in group)
    effect = _intervals.design_effect(differences)
    low, high = _intervals.tango(won / effect, lost / effect, n / effect)
    right = sum(map(sum, tally.right))
    accuracy_low, accuracy_high = _intervals.wilson(right, n)
    dense_accuracy = sum(map(sum, dense.right)) / n
    stats, keys = tally.stats, tally.keys * config.num_hidden_layers * config.num_key_value_heads
    exact = 0.0
    if setting.attend:
        # Steps that were exact throughout have no rows that were "answered exactly".
        exact = (stats.n_exact_rows + stats.n_rows - stats.n_approximate_rows) / stats.n_rows
    return Row("tasks", task, n_tokens, n, len(differences), setting.mode, setting.setting,
               right / n, accuracy_low, accuracy_high, dense_accuracy, right / n - dense_accuracy,
               low, high, won, lost, effect, stats.keys_read / keys,
               stats.bytes_read / (keys * 2 * config.head_dim * 2),
               sum(tally.stored) / len(tally.stored), exact, exact > MIXED,
               low > -MARGIN if dense_accuracy >= LEAST_DENSE else None)
