# SPDX-License-Identifier: Apache-2.0
"""A real model over real texts, every layer in the mode under test.

The beginning of a text is prefilled, which is exact; then each of the last tokens is predicted from
those before it, one or a few at a step. What is compared with is the same steps, exact, over
float32 rows: KL(exact || mode) in nats a token, the share of tokens whose likeliest successor is
the same, and the bits that the text's bytes cost."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import Client, HeadFile, Index, IndexKind, Mode, Policy, Preset, Retention, read_heads
from ..integrations import transformers
from ..integrations.transformers import KvmCache

_WITH_HEADS = ("duo_attention", "razor_attention")
MIN_TOKENS = 256  # the least of an index, so that every layer is approximated
ANY_BUDGET = 1 << 20  # more keys than a row has: verified answers are exact where that reads less


def most_tokens(config: Any) -> int:
    """The most tokens of a step that approximate modes answer: of more all are exact (kvm.h)."""
    return int(8 * (16 * config.num_key_value_heads // config.num_attention_heads))


def index_begin(n_tokens: int) -> int:
    """From which length on a text of n_tokens has an index: the default, or half of the text."""
    return max(MIN_TOKENS, min(4096, n_tokens // 2))


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to store and attend."""

    mode: str
    setting: str
    store: str = "bfloat16"  # the codec of rows
    index: IndexKind = IndexKind.NONE
    policy: Policy | None = None
    preset: Preset | None = None  # its shares are of the text
    attend: tuple[tuple[str, Any], ...] = ()

    @property
    def stored(self) -> tuple[Any, ...]:
        """Settings that agree in it share a prefill."""
        return self.store, self.index, self.policy, self.preset

    def kept(self, n_tokens: int) -> dict[str, Any]:
        """What heads keep, as KvmCache and register_space take it, of a text of n_tokens."""
        preset = self.preset
        if preset is not None and preset.n_tokens == 0:
            preset = dataclasses.replace(preset, n_tokens=n_tokens)
        return {"policy": preset, "policies": [] if self.policy is None else [self.policy]}


def _sampled(budget: int, store: str = "bfloat16") -> Setting:
    name = f"{budget}" + ("" if store == "bfloat16" else f" {store}")
    return Setting("sampled", name, store, IndexKind.SKETCH,
                   attend=(("mode", Mode.SAMPLED), ("budget", budget), ("delta", 0.1)))


def _balanced(budget: int, eps: float, store: str = "bfloat16") -> Setting:
    name = f"{budget}, {eps}" + ("" if store == "bfloat16" else f" {store}")
    return Setting("balanced", name, store, IndexKind.SKETCH,
                   attend=(("mode", Mode.SAMPLED), ("budget", budget), ("eps", eps),
                           ("delta", 0.1)))


def _verified(eps: float, store: str = "bfloat16") -> Setting:
    name = f"({eps}, 0.1)" + ("" if store == "bfloat16" else f" {store}")
    return Setting("verified", name, store, IndexKind.SKETCH,
                   attend=(("mode", Mode.VERIFIED), ("eps", eps), ("delta", 0.1),
                           ("budget", ANY_BUDGET)))


def _streaming(n_tokens: int) -> Setting:
    return Setting("streaming", f"4 + {n_tokens - 4}",
                   policy=Policy(Retention.SINKS_RECENT, n_sinks=4, n_recent=n_tokens - 4))


def _h2o(n_tokens: int) -> Setting:
    half = n_tokens // 2
    return Setting("h2o", f"{half} + {half}",
                   policy=Policy(Retention.HEAVY, n_recent=half, n_heavy=half))


def of_presets(words: list[str], head_file: Path | None = None) -> list[Setting]:
    """A setting for each preset, as `Preset.parse` takes it, with the heads of the file where it
    takes any. Raises kvm.Error where there is no such preset, or it needs more of a model."""
    heads = None if head_file is None else read_heads(head_file)
    settings = []
    for word in words:
        preset = Preset.parse(word)
        if preset.name in _WITH_HEADS and heads is not None:
            preset = dataclasses.replace(preset, heads=heads)
        preset.resolve(32 if preset.heads is None or heads is None else heads.n_layers)
        settings.append(Setting("preset", word, preset=preset))
    if heads is not None and all(setting.preset is None or setting.preset.heads is None
                                 for setting in settings):
        raise ValueError("--head-file is given, and no --policy of " + " or ".join(_WITH_HEADS))
    return settings


def check_heads(settings: list[Setting], model: Any) -> None:
    """Refuses head files of other models, before anything is computed."""
    for setting in settings:
        if setting.preset is not None and isinstance(setting.preset.heads, HeadFile):
            transformers.check_heads(model, setting.preset.heads)


def _topk(budget: int) -> Setting:
    return Setting("topk", f"{budget}", index=IndexKind.SKETCH,
                   attend=(("mode", Mode.TOPK), ("budget", budget)))


SETTINGS = [
    Setting("exact", "bfloat16"),
    Setting("exact", "int8", "int8"),
    Setting("exact", "fp8", "fp8"),
    _sampled(100), _sampled(200), _sampled(256), _sampled(512), _sampled(512, "int8"),
    _balanced(128, 0.05), _balanced(192, 0.025), _balanced(256, 0.015),
    _balanced(256, 0.025, "int8"),
    _verified(0.3), _verified(0.1), _verified(0.07), _verified(0.1, "int8"),
    _topk(64), _topk(100), _topk(256),
    Setting("magicpig", "(10, 150)", index=IndexKind.LSH, attend=(("mode", Mode.SAMPLED),)),
    _streaming(1536), _h2o(1536),
]


@dataclasses.dataclass
class Row:
    """One line of the result."""

    eval: str
    mode: str
    setting: str
    text: str
    tokens: int
    scored: int
    chunk: int  # tokens of a step
    bits_per_byte: float
    dense_bits_per_byte: float
    kl: float
    top1: float
    keys_fraction: float
    bytes_fraction: float
    stored_fraction: float  # bytes that the text takes, indexes included, of those in bfloat16
    exact_fraction: float  # of the rows of an approximate mode
    is_mixed: bool  # more than 5 % of them


class _Run:
    """A text's last tokens, predicted with one setting."""

    def __init__(self, model: Any, ids: torch.Tensor, n_scored: int, n_chunk: int) -> None:
        self.model = model
        self.prompt = ids[:, :-n_scored - 1]
        self.steps = torch.split(ids[:, -n_scored - 1:-1], n_chunk, dim=1)

    def prefill(self, cache: KvmCache) -> None:
        for part in torch.split(self.prompt, 512, dim=1):
            self.model.model(part, past_key_values=cache)

    def logits(self, cache: KvmCache) -> Iterator[torch.Tensor]:
        """Log probabilities of what follows each of the scored tokens' predecessors, by steps:
        [tokens of the step, words]."""
        for step in self.steps:
            out = self.model(step, past_key_values=cache).logits[0]
            yield torch.log_softmax(out.float(), dim=-1)

    def n_keys(self) -> int:
        """Keys that a kv head has in all steps; a step reads them once, whatever its tokens."""
        n, total = self.prompt.shape[1], 0
        for step in self.steps:
            n += step.shape[1]
            total += n
        return total


def _cache(model: Any, client: Client, setting: Setting, n_tokens: int) -> KvmCache:
    indexes = []
    if setting.index != IndexKind.NONE:
        indexes = [Index(setting.index, min_tokens=index_begin(n_tokens))]
    return KvmCache(model, client, codec=setting.store, indexes=indexes,
                    **setting.kept(n_tokens))


def stored_fraction(cache: KvmCache) -> float:
    """Bytes that the first entry of a cache takes, with indexes and what policies choose by, of
    those of bfloat16 rows."""
    sequence = cache.sequences[0]
    space, info = sequence.space.info(), sequence.info()
    rows = len(sequence) * space.n_layers * space.n_kv_heads * (space.head_dim_k + space.head_dim_v)
    return (info.bytes + info.bytes_index + info.bytes_observed) / (2 * rows)


def evaluate(model: Any, client: Client, name: str, ids: list[int], n_bytes: int, n_scored: int,
             settings: list[Setting], report: Callable[[str], None],
             n_chunk: int = 1) -> Iterator[Row]:
    """Yields a row for each setting. n_bytes: of the scored tokens' text. n_chunk: tokens of a
    step."""
    run = _Run(model, torch.tensor([ids]), n_scored, n_chunk)
    config = model.config
    row_bytes = 2 * config.head_dim * 2  # of K and V in bfloat16
    all_keys = run.n_keys() * config.num_hidden_layers * config.num_key_value_heads
    targets = torch.tensor(ids[-n_scored:])
    with torch.no_grad():
        report(f"{name}: exact, float32")
        with KvmCache(model, client, codec="float32") as cache:
            run.prefill(cache)
            dense = torch.cat(list(run.logits(cache)))
        dense_bits = _bits(dense, targets) / n_bytes
        best = dense.argmax(dim=1)
        for stored in dict.fromkeys(setting.stored for setting in settings):
            of_store = [setting for setting in settings if setting.stored == stored]
            with _cache(model, client, of_store[0], len(ids)) as prefilled:
                report(f"{name}: prefill for {', '.join(dict.fromkeys(s.mode for s in of_store))}")
                run.prefill(prefilled)
                for setting in of_store:
                    report(f"{name}: {setting.mode} {setting.setting}")
                    with copy.deepcopy(prefilled) as cache:
                        cache._arguments.update(setting.attend)
                        bits, kl, top1 = 0.0, 0.0, 0
                        of_steps = (torch.split(rows, n_chunk) for rows in (dense, best, targets))
                        for got, exact_got, likeliest, target in zip(run.logits(cache), *of_steps,
                                                                     strict=True):
                            kl += float((exact_got.exp() * (exact_got - got)).sum())
                            top1 += int((got.argmax(dim=1) == likeliest).sum())
                            bits += _bits(got, target)
                        stats, stored_share = cache.stats, stored_fraction(cache)
                    exact = stats.n_exact_rows if setting.attend else 0
                    rows = stats.n_rows if setting.attend else 1
                    # Steps that were exact throughout have no rows that were "answered exactly".
                    exact += stats.n_rows - stats.n_approximate_rows if setting.attend else 0
                    yield Row("real", setting.mode, setting.setting, name, len(ids), n_scored,
                              n_chunk, bits / n_bytes, dense_bits, kl / n_scored, top1 / n_scored,
                              stats.keys_read / all_keys,
                              stats.bytes_read / (all_keys * row_bytes), stored_share, exact / rows,
                              exact / rows > 0.05)


def _bits(log_probabilities: torch.Tensor, targets: torch.Tensor) -> float:
    return float(-log_probabilities.gather(1, targets[:, None]).sum()) / math.log(2)
