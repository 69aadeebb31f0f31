# SPDX-License-Identifier: Apache-2.0
"""The model and the tasks of models/house in kvm's sources, as transformers runs them.

The model, its tokenizer and what its tasks are made of are read from that folder: no wheel carries
them."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from . import _texts

SINGLE_FACTS = "single_facts"


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A text, and questions about it, each of which follows the text by itself."""

    text: list[int]
    questions: list[list[int]]  # of the same length
    answers: list[list[int]]  # as well
    is_unordered: bool = False


class House:
    """model: transformers' Llama with the weights. Prompts are made by `make`."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder).resolve()
        if not (folder / "tasks.py").is_file():
            raise ValueError(f"{folder} has no tasks.py; --house names the folder models/house of "
                             "kvm's sources")
        # Its modules name each other without a package.
        sys.path.insert(0, str(folder))
        try:
            source: Any = importlib.import_module("model")
            self._tasks: Any = importlib.import_module("tasks")
        finally:
            sys.path.remove(str(folder))
        weights, tokenizer = source.load(source.default_weights())
        self.model = _converted(weights)
        self.encode: Any = tokenizer.encode
        self.context: int = weights.config.context
        stack = [token for name in _texts.BUILT_IN
                 for token in (0, *tokenizer.encode(_texts.read(name)))]
        self._maker = self._tasks.Maker(self._tasks.Lexicon(tokenizer),
                                        self._tasks.Haystack(stack), evaluation=True)

    @property
    def names(self) -> list[str]:
        return [SINGLE_FACTS, *self._tasks.TASKS]

    def make(self, name: str, n_tokens: int, seed: int, n_questions: int) -> Prompts:
        """The same arguments give the same prompts. Those of SINGLE_FACTS have n_questions about
        as many facts of a text, others have one."""
        order = self.names.index(name)
        random = np.random.default_rng([order, n_tokens, seed])
        if name == SINGLE_FACTS:
            return self._facts(n_tokens, random, n_questions)
        sample = self._maker.make(name, n_tokens, random)
        tokens = sample.tokens.tolist()
        mark = self._maker.lexicon.one("?")
        begin = sample.answer_begin - 1 - tokens[sample.answer_begin - 1::-1].index(mark)
        return Prompts(tokens[:begin], [tokens[begin:sample.answer_begin]],
                       [tokens[sample.answer_begin:]], sample.unordered)

    def _facts(self, n_tokens: int, random: np.random.Generator, n_facts: int) -> Prompts:
        """Facts that share no word, one at a random place in each of n_facts equal parts."""
        lexicon = self._maker.lexicon
        keys = random.choice(lexicon.words, (n_facts, 2), replace=False)
        values = self._maker.complete(random, *keys.T)
        opens, closes, asks = (lexicon.one(mark) for mark in "[]?")
        facts = [[opens, *key, value, closes] for key, value in zip(keys, values, strict=True)]
        questions = [[asks, *(int(word) for word in key)] for key in keys]
        places = (np.arange(n_facts) + random.random(n_facts)) / n_facts
        woven = [(place, fact, None) for place, fact in zip(places, facts, strict=True)]
        # What asks ends the text and is cut off again: each question follows by itself.
        ending = (1.0, [*questions[0], int(values[0])], (3, 4))
        sample = self._maker.weave(random, n_tokens, [*woven, ending])
        return Prompts(sample.tokens[:-4].tolist(), questions, [[int(v)] for v in values])


def _converted(weights: Any) -> Any:
    of = weights.config
    config = transformers.LlamaConfig(
        vocab_size=of.vocabulary, hidden_size=of.d_model, intermediate_size=of.d_ff,
        num_hidden_layers=of.layers, num_attention_heads=of.heads,
        num_key_value_heads=of.kv_heads, head_dim=of.head_dim,
        max_position_embeddings=of.context, rms_norm_eps=of.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": of.rope_theta},
        tie_word_embeddings=True)
    model: Any = transformers.LlamaForCausalLM(config)
    state: dict[str, torch.Tensor] = weights.state_dict()
    missing, unexpected = model.load_state_dict(
        {f"model.{name}": tensor for name, tensor in state.items()}, strict=False)
    if unexpected or missing != ["lm_head.weight"]:
        raise ValueError(f"the house model lacks {missing} or has {unexpected}")
    model.tie_weights()
    return model.eval()
