# SPDX-License-Identifier: Apache-2.0
"""Recorded tensors through kvm: what each mode answers, beside attention in double precision.

A sequence grows to each recorded step, and each setting answers the step's queries there, as in a
decode."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .. import Client, Index, IndexKind, Item, Mode, Retention
from ._kvrec import Array, Reader
from ._real import MIN_TOKENS, Setting


@dataclasses.dataclass
class Row:
    """A setting over a record, over a class of its query heads, or over one. Errors of o are
    relative."""

    eval: str
    mode: str
    setting: str
    record: str
    tokens: int
    rows: int  # (query row, q head)
    error: float
    error_rms: float
    error_p50: float
    error_p95: float
    error_p99: float
    lse_error: float
    bar: float | None  # median over the rows that have one and were not answered exactly
    coverage: float | None  # of these: the error of o is within the bar
    lse_coverage: float | None
    keys_fraction: float | None  # of whole groups only, whose heads read together
    bytes_fraction: float | None  # of exact attention over bfloat16 rows, index included
    exact_fraction: float
    layer: int | None = None
    kv_head: int | None = None
    q_head: int | None = None
    head_class: str | None = None


class _Tally:
    def __init__(self) -> None:
        self.values: dict[str, list[Array]] = collections.defaultdict(list)  # [query, head]
        self.keys_read = 0
        self.bytes_read = 0
        self.keys_present = 0


def chosen_queries(record: Reader, n_queries: int) -> list[int]:
    """At most so many of the recorded queries, evenly spread."""
    every = record.steps.size
    return sorted({int(i) for i in np.linspace(0, every - 1, min(n_queries, every))})


Place = tuple[int, int, int]  # layer, kv head, q head


def read_classes(path: Path) -> dict[str, set[Place]]:
    """The heads of each class, and of none, as geometry.py --lines writes them."""
    classes: dict[str, set[Place]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line.get("eval") == "geometry":
            for name in line["classes"] or ["none"]:
                classes.setdefault(name, set()).add(
                    (line["layer"], line["kv_head"], line["q_head"]))
    if not classes:
        raise ValueError(f"{path} has no lines of models/house/geometry.py --lines")
    return dict(sorted(classes.items()))


def evaluate(record: Reader, client: Client, settings: list[Setting], sketch: Index | None,
             n_queries: int, classes: dict[str, set[Place]], update: Callable[[int], Any]
             ) -> Iterator[Row]:
    """Yields a row for each setting, then those of each class of heads, then those of each head.
    sketch: in place of the settings' sketches. update: is told of each kv head that is done. HEAVY
    policies want every query and are left out."""
    wanted = sorted([s for s in settings if not _needs_every_query(s)],
                    key=lambda setting: repr(setting.stored))
    queries = chosen_queries(record, n_queries)
    tallies: dict[tuple[Setting, int, int], _Tally] = {}
    for group in record.groups:
        q, k, v = (record.array(group.arrays[key]) for key in "qkv")
        truth = _exact(q[queries], k, v, record.scale, record.steps[queries])
        for _, alike in itertools.groupby(wanted, lambda setting: setting.stored):
            of_store = list(alike)
            mine = [_Tally() for _ in of_store]
            for setting, tally in zip(of_store, mine, strict=True):
                tallies[setting, group.layer, group.kv_head] = tally
            _run(client, record, q[queries], k, v, record.steps[queries], of_store, mine,
                 _indexes(of_store[0], sketch), truth)
        update(1)
    name = record.path.stem
    heads = {(group.layer, group.kv_head, q_head): (group, i)
             for group in record.groups for i, q_head in enumerate(group.q_heads)}
    settings = [setting for setting in settings if not _needs_every_query(setting)]

    def parts(setting: Setting, places: Iterable[Place]) -> list[tuple[_Tally, int | None]]:
        return [(tallies[setting, place[0], place[1]], heads[place][1]) for place in places
                if place in heads]

    for setting in settings:
        yield _row(name, record, setting, [(tallies[setting, group.layer, group.kv_head], None)
                                           for group in record.groups])
    for head_class, setting in itertools.product(classes, settings):
        chosen = parts(setting, classes[head_class])
        if chosen:
            row = _row(name, record, setting, chosen)
            yield dataclasses.replace(row, eval="tensors-class", head_class=head_class)
    for setting, place in itertools.product(settings, heads):
        row = _row(name, record, setting, parts(setting, [place]))
        yield dataclasses.replace(row, eval="tensors-head", layer=place[0], kv_head=place[1],
                                  q_head=place[2])


def _needs_every_query(setting: Setting) -> bool:
    return setting.policy is not None and setting.policy.retention == Retention.HEAVY


def _indexes(setting: Setting, sketch: Index | None) -> list[Index]:
    if setting.index == IndexKind.NONE:
        return []
    if sketch is not None and setting.index != IndexKind.LSH:
        return [sketch]
    return [Index(setting.index, min_tokens=MIN_TOKENS)]


def _exact(q: Array, k: Array, v: Array, scale: float, steps: Array) -> tuple[Array, Array]:
    """o [query, head, channel] and lse [query, head] in double precision."""
    k64, v64 = k.astype(np.float64), v.astype(np.float64)
    o = np.empty(q.shape, np.float64)
    lse = np.empty(q.shape[:2], np.float64)
    for i, step in enumerate(steps):
        logits = scale * (q[i].astype(np.float64) @ k64[:step + 1].T)
        most = logits.max(axis=1, keepdims=True)
        weights = np.exp(logits - most)
        total = weights.sum(axis=1, keepdims=True)
        o[i] = weights @ v64[:step + 1] / total
        lse[i] = (most + np.log(total))[:, 0]
    return o, lse


def _run(client: Client, record: Reader, q: Array, k: Array, v: Array, steps: Array,
         settings: list[Setting], tallies: list[_Tally], indexes: list[Index],
         truth: tuple[Array, Array]) -> None:
    """A kv head, for settings that store alike."""
    first = settings[0]
    space = client.register_space(
        f"kvm-eval-{uuid.uuid4().hex}", n_layers=1, n_q_heads=q.shape[1], n_kv_heads=1,
        head_dim=record.head_dim, codec=first.store, softmax_scale=record.scale,
        indexes=indexes, policies=[] if first.policy is None else [first.policy])
    done = 0
    with client.create_queue() as queue, space.create_sequence(reserve=len(k)) as seq:
        for i, step in enumerate(int(step) for step in steps):
            queue.step(space, 0, [Item(seq, append=step + 1 - done)], k=k[done:step + 1, None],
                       v=v[done:step + 1, None])
            done = step + 1
            for setting, tally in zip(settings, tallies, strict=True):
                arguments = dict(setting.attend)
                if arguments:
                    arguments["seed"] = i  # no two steps draw the same numbers
                got = queue.step(space, 0, [Item(seq, query=1)], q=q[i:i + 1], lse=True, err=True,
                                 **arguments)
                _add(tally, got, truth[0][i], truth[1][i], step + 1,
                     setting.attend != () and got.stats.mode <= Mode.EXACT)
    space.drop()


def _add(tally: _Tally, got: Any, o: Array, lse: Array, n_present: int, is_exact: bool) -> None:
    error = np.linalg.norm(got.o[0] - o, axis=1) / np.maximum(np.linalg.norm(o, axis=1), 1e-30)
    bars = got.err[0].astype(np.float64)
    # A row of an approximate mode that was answered exactly has a bar of 0.
    exact = np.full(len(error), True) if is_exact else bars[:, 0] == 0
    new = {"error": error, "lse_error": np.abs(got.lse[0] - lse), "bar": bars[:, 0],
           "lse_bar": bars[:, 1], "exact": exact}
    for name, values in new.items():
        tally.values[name].append(values)
    tally.keys_read += got.stats.keys_read
    tally.bytes_read += got.stats.bytes_read
    tally.keys_present += n_present


def _row(name: str, record: Reader, setting: Setting, parts: list[tuple[_Tally, int | None]]
         ) -> Row:
    """parts: kv heads, each with the number of one of its q heads, or None for all of them."""
    def of(key: str) -> Array:
        return np.concatenate([
            np.stack(tally.values[key])[:, slice(None) if head is None else [head]].ravel()
            for tally, head in parts])

    error, lse_error, bar, exact = of("error"), of("lse_error"), of("bar"), of("exact")
    barred = np.isfinite(bar) & ~exact if setting.attend else np.zeros(len(bar), bool)
    has_bars = bool(barred.any())
    is_whole = all(head is None for _, head in parts)
    keys = sum(tally.keys_present for tally, _ in parts)
    row_bytes = 2 * 2 * record.head_dim
    p50, p95, p99 = (float(x) for x in np.percentile(error, (50, 95, 99)))
    return Row(
        "tensors", setting.mode, setting.setting, name, record.n_tokens, len(error),
        float(error.mean()), float(np.sqrt((error**2).mean())), p50, p95, p99,
        float(lse_error.mean()),
        float(np.median(bar[barred])) if has_bars else None,
        float((error <= bar)[barred].mean()) if has_bars else None,
        float((lse_error <= of("lse_bar"))[barred].mean()) if has_bars else None,
        sum(tally.keys_read for tally, _ in parts) / keys if is_whole else None,
        sum(tally.bytes_read for tally, _ in parts) / keys / row_bytes if is_whole else None,
        float(exact.mean()) if setting.attend else 0.0)
