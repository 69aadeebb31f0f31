# SPDX-License-Identifier: Apache-2.0
"""Which kv heads of a model retrieve: by RazorAttention's probe, by a table that DuoAttention has
published, or by the loss that a head's forgetting costs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .. import HeadFile, probe_heads
from ..integrations.transformers import _windows, model_fingerprint, model_geometry
from . import recorder

Table = list[list[float | None]]  # [layer][kv head]; None: not looked at
_IMPLEMENTATION = "kvm_one_head_streams"
N_CUE = 4  # tokens of a needle that are seen before the first that is scored


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model whose heads are asked for."""

    model: Any
    name: str
    vocabulary: list[int]  # what texts are made of
    prefix: list[int]  # what each begins with, such as BOS
    encode: Callable[[str], list[int]] | None = None  # None: it has no tokenizer


def made(subject: Subject, source: str, retrieving: list[list[int]], settings: dict[str, Any],
         scores: dict[str, Table]) -> HeadFile:
    """The file that says so. retrieving: of each layer; a layer with a window has no entry in it
    and keeps what the window keeps."""
    n_layers, n_kv_heads = model_geometry(subject.model)
    windowed = _windowed(subject.model)
    if windowed:
        settings = {**settings, "layers_with_windows": sorted(windowed)}
    heads = tuple(() if layer in windowed else
                  tuple(head for head in range(n_kv_heads) if head not in retrieving[layer])
                  for layer in range(n_layers))
    return HeadFile(heads, n_kv_heads, source, subject.name, model_fingerprint(subject.model),
                    settings, {key: tuple(map(tuple, rows)) for key, rows in scores.items()})


def _windowed(model: Any) -> set[int]:
    config = model.config.get_text_config(decoder=True)
    windows = _windows(config, config.num_hidden_layers)
    return {layer for layer, window in enumerate(windows) if window}


def _chosen(table: Table, n: int, most: bool = True) -> set[tuple[int, int]]:
    """The n heads with the largest (or the least) numbers; of equal ones, those of lower layers."""
    places = [(value, layer, head) for layer, row in enumerate(table)
              for head, value in enumerate(row) if value is not None]
    places.sort(key=lambda place: (-place[0] if most else place[0], place[1:]))
    return {(layer, head) for _, layer, head in places[:n]}


def _n_heads(table: Table) -> int:
    return sum(value is not None for row in table for value in row)


def _by_layer(places: set[tuple[int, int]], n_layers: int) -> list[list[int]]:
    return [sorted(head for at, head in places if at == layer) for layer in range(n_layers)]


# --- The probe ------------------------------------------------------------------------------------


class _Probe:
    """Scores the heads of each layer while the model reads."""

    def __init__(self, n_prefix: int, period: int, n_rows: int, update: Callable[[int], Any]
                 ) -> None:
        self.echo: dict[int, list[float]] = {}
        self.induction: dict[int, list[float]] = {}
        self._arguments = {"n_prefix": n_prefix, "period": period, "n_rows": n_rows}
        self._update = update

    def take_unrotated(self, key: torch.Tensor) -> None:
        """Of no use to it."""

    def take(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
             scaling: float | None, window: int | None) -> None:
        self._update(1)
        if window is not None:
            return
        q, k = (np.ascontiguousarray(x[0].transpose(0, 1).float().cpu().numpy())
                for x in (query, key))
        layer = int(module.layer_idx)
        self.echo[layer], self.induction[layer] = probe_heads(
            q, k, scale=0.0 if scaling is None else float(scaling), **self._arguments)


def probe(subject: Subject, *, period: int, n_copies: int = 4, n_rows: int = 256, seed: int = 0,
          echo_share: float = 0.01, induction_share: float = 0.14,
          update: Callable[[int], Any] = lambda n: None) -> HeadFile:
    """RazorAttention's: random tokens of the vocabulary, n_copies times the same `period` ones; the
    shares of all heads with most echo and induction retrieve."""
    model, prefix = subject.model, subject.prefix
    tokens = _draw(np.random.default_rng(seed), subject.vocabulary, period)
    listener = _Probe(len(prefix), period, n_rows, update)
    with recorder.capturing(model, listener), torch.no_grad():
        model.base_model(torch.tensor([prefix + tokens * n_copies], device=model.device),
                         use_cache=False)
    n_layers, n_kv_heads = model_geometry(model)
    echo, induction = (_filled(found, n_layers, n_kv_heads)
                       for found in (listener.echo, listener.induction))
    n_heads = _n_heads(echo)
    if n_heads == 0:
        raise ValueError("all layers have windows; no head looks back beyond them")
    kept = (_chosen(induction, _share_of(induction_share, n_heads))
            | _chosen(echo, _share_of(echo_share, n_heads)))
    settings = {"n_prefix": len(prefix), "period": period, "n_copies": n_copies, "n_rows": n_rows,
                "seed": seed, "echo_share": echo_share, "induction_share": induction_share}
    return made(subject, "probe", _by_layer(kept, n_layers), settings,
                {"echo": echo, "induction": induction})


def _share_of(share: float, n: int) -> int:
    """At least one, where the share is not 0."""
    return 0 if share == 0 else max(1, round(share * n))


def _filled(found: dict[int, list[float]], n_layers: int, n_kv_heads: int) -> Table:
    return [[round(x, 6) for x in found[layer]] if layer in found else [None] * n_kv_heads
            for layer in range(n_layers)]


def _draw(random: np.random.Generator, vocabulary: list[int], n: int) -> list[int]:
    """Tokens of it, each once where there are enough: what repeats itself is the prompt's doing."""
    drawn = random.choice(vocabulary, n, replace=n > len(vocabulary))
    return [int(token) for token in drawn]


# --- A published table ----------------------------------------------------------------------------


def read_table(path: Path) -> Table:
    """DuoAttention's full_attention_heads.tsv: a row for each layer, a number for each kv head, 1
    for heads that need everything, 0 for those that stream; what is beyond counts as these."""
    table: Table = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row: list[float | None] = [float(text) for text in line.split()]
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; a table has a row of numbers for "
                             "each layer, one for each kv head") from None
        if not all(math.isfinite(value) for value in row if value is not None):
            raise ValueError(f"{path}, line {number} has a number that is not finite")
        if row:
            table.append([min(max(value, 0.0), 1.0) for value in row if value is not None])
    if not table or len({len(row) for row in table}) != 1:
        raise ValueError(f"{path} is no table: its rows have "
                         f"{', '.join(map(str, sorted({len(row) for row in table}))) or 'no'} "
                         "numbers; all have one for each kv head")
    return table


def published(subject: Subject, path: Path, *, sparsity: float | None = None,
              threshold: float | None = None) -> HeadFile:
    """Of a published table: the share `sparsity` of all heads, those with the least numbers,
    streams; or those below `threshold`."""
    table = read_table(path)
    n_layers, n_kv_heads = model_geometry(subject.model)
    if (len(table), len(table[0])) != (n_layers, n_kv_heads):
        raise ValueError(f"{path} has {len(table)} rows of {len(table[0])} numbers; the model has "
                         f"{n_layers} layers of {n_kv_heads} kv heads")
    settings: dict[str, Any] = {"table": path.name}
    if threshold is not None:
        settings["threshold"] = threshold
        streams = {(layer, head) for layer, row in enumerate(table)
                   for head, value in enumerate(row) if value is not None and value < threshold}
    else:
        settings["sparsity"] = (default_sparsity(subject.model) if sparsity is None
                                else sparsity)
        streams = _streaming(table, settings["sparsity"])
    return made(subject, "published", _complement(table, streams), settings,
                {"full_attention": table})


def default_sparsity(model: Any) -> float:
    """What the authors take: half of the heads where kv heads have groups, else three quarters."""
    config = model.config.get_text_config(decoder=True)
    return 0.5 if config.num_attention_heads > model_geometry(model)[1] else 0.75


def _streaming(table: Table, sparsity: float) -> set[tuple[int, int]]:
    """Heads below the quantile of the table. The authors break ties by chance; here the heads of
    lower layers stream first."""
    n_heads = _n_heads(table)
    # So many of n numbers are below their linear quantile. The slack is for products that are
    # whole and come out above.
    n = n_heads if sparsity >= 1 else math.ceil((n_heads - 1) * max(sparsity, 0.0) - 1e-9)
    return _chosen(table, n, most=False)


def _complement(table: Table, streams: set[tuple[int, int]]) -> list[list[int]]:
    return [[head for head in range(len(row)) if (layer, head) not in streams]
            for layer, row in enumerate(table)]


# --- Measured losses ------------------------------------------------------------------------------


class _Streaming:
    """The kv head that streams now, if any."""

    def __init__(self, n_sinks: int, n_recent: int) -> None:
        self.n_sinks = n_sinks
        self.n_recent = n_recent
        self.place: tuple[int, int] | None = None  # layer, kv head


_streams: list[_Streaming] = []  # at most one


def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None, scaling: float | None = None,
               **kwargs: Any) -> Any:
    now = _streams[-1]
    if now.place is None or now.place[0] != module.layer_idx:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling,
                                      **kwargs)
    for unknown in ("softcap", "s_aux"):
        if kwargs.get(unknown) is not None:
            raise ValueError(f"{unknown}: attention of a head that streams does not know it")
    n_heads, n_rows, n_keys = query.shape[1], query.shape[2], key.shape[2]
    group = n_heads // key.shape[1]
    keys = torch.arange(n_keys, device=query.device)
    rows = torch.arange(n_keys - n_rows, n_keys, device=query.device)[:, None]
    mask = (keys <= rows).expand(n_heads, n_rows, n_keys).clone()
    head = now.place[1]
    mask[head * group:(head + 1) * group] &= (keys < now.n_sinks) | (keys > rows - now.n_recent)
    o = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), mask,
        scale=scaling)
    return o.transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def _streaming_in(model: Any, streaming: _Streaming) -> Iterator[None]:
    AttentionInterface.register(_IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(_IMPLEMENTATION, sdpa_mask)
    before = model.config._attn_implementation
    _streams.append(streaming)
    try:
        model.set_attn_implementation(_IMPLEMENTATION)
        yield
    finally:
        model.set_attn_implementation(before)
        _streams.pop()


def measure(subject: Subject, text: list[int] | None, *, n_tokens: int = 2048, n_prompts: int = 4,
            n_needle: int = 32, n_sinks: int = 64, n_recent: int = 256,
            sparsity: float | None = None, seed: int = 0,
            update: Callable[[int], Any] = lambda n: None) -> HeadFile:
    """By the loss that each head's forgetting costs, one head at a time.

    A prompt is n_tokens of the text (None: random tokens), within it a needle of random tokens, and
    at its end the needle again; its tokens from the fifth on are scored. The prompt is read with
    all heads whole; a head streams while the needle at the end is read. The share `sparsity` of
    all heads, those that cost least, streams.
    """
    least = len(subject.prefix) + 2 * n_needle + n_sinks + n_recent
    if n_tokens < least or n_needle <= N_CUE:
        raise ValueError(f"a prompt has {n_tokens} tokens; with {n_sinks} sinks, {n_recent} recent "
                         f"ones and a needle of {n_needle}, twice, it has at least {least}, and a "
                         f"needle more than {N_CUE}")
    model = subject.model
    n_layers, n_kv_heads = model_geometry(model)
    windowed = _windowed(model)
    places = [(layer, head) for layer in range(n_layers) if layer not in windowed
              for head in range(n_kv_heads)]
    sums = dict.fromkeys(places, 0.0)
    whole = 0.0
    streaming = _Streaming(n_sinks, n_recent)
    with _streaming_in(model, streaming), torch.no_grad():
        for number in range(n_prompts):
            random = np.random.default_rng([seed, number])
            prompt, needle = _prompt(random, subject, text, n_tokens, n_needle, n_sinks, n_recent)
            cache = DynamicCache()
            streaming.place = None
            for part in torch.split(torch.tensor([prompt], device=model.device), 512, dim=1):
                model.base_model(part, past_key_values=cache)
            dense = _loss(model, cache, needle)
            whole += dense / n_prompts
            for streaming.place in places:
                sums[streaming.place] += (_loss(model, cache, needle) - dense) / n_prompts
                update(1)
    table: Table = [[round(sums[layer, head], 6) if layer not in windowed else None
                     for head in range(n_kv_heads)] for layer in range(n_layers)]
    share = default_sparsity(model) if sparsity is None else sparsity
    settings = {"n_tokens": n_tokens, "n_prompts": n_prompts, "n_needle": n_needle,
                "n_sinks": n_sinks, "n_recent": n_recent, "seed": seed, "sparsity": share,
                "text": "random tokens" if text is None else "text", "loss": round(whole, 6),
                "heads_at_a_time": 1, "prefill": "whole"}
    return made(subject, "measured", _complement(table, _streaming(table, share)), settings,
                {"loss_increase": table})


def _prompt(random: np.random.Generator, subject: Subject, text: list[int] | None, n_tokens: int,
            n_needle: int, n_sinks: int, n_recent: int) -> tuple[list[int], list[int]]:
    """A prompt, and the needle that is in it and follows it. The needle lies where a head that
    streams does not see it."""
    vocabulary, prefix = subject.vocabulary, subject.prefix
    n_text = n_tokens - 2 * n_needle - len(prefix)
    if text is None:
        # Half of the vocabulary, so that the needle has words of its own.
        words = random.permutation(vocabulary)[:max(1, len(vocabulary) // 2)]
        ground = [int(token) for token in random.choice(words, n_text)]
    else:
        if len(text) < n_text:
            raise ValueError(f"the text has {len(text)} tokens; {n_text} are wanted")
        begin = int(random.integers(len(text) - n_text + 1))
        ground = text[begin:begin + n_text]
    there = set(ground)
    others = [token for token in vocabulary if token not in there]
    needle = _draw(random, others if len(others) >= n_needle else vocabulary, n_needle)
    place = int(random.integers(n_sinks, n_text - n_recent + 1))
    return [*prefix, *ground[:place], *needle, *ground[place:]], needle


def _loss(model: Any, cache: Any, needle: list[int]) -> float:
    """Mean over its scored tokens, in nats. The cache is left as it was."""
    row = torch.tensor([needle[:-1]], device=model.device)
    logits = model(row, past_key_values=cache).logits[0, N_CUE - 1:]
    cache.crop(1 - len(needle))
    targets = torch.tensor(needle[N_CUE:], device=model.device)
    return float(torch.nn.functional.cross_entropy(logits.float(), targets))
