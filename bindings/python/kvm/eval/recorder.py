# SPDX-License-Identifier: Apache-2.0
"""Records the queries, keys and values of a model of transformers while it reads a text.

    from kvm.eval.recorder import record
    record(model, token_ids, "text.kvrec")

`kvm-eval tensors` and models/house/geometry.py in kvm's sources read such files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from . import _kvrec

_IMPLEMENTATION = "kvm_record"


def record(model: Any, tokens: Iterable[int], path: str | Path, *, pairs: int = 128,
           layers: Iterable[int] | None = None, answers: Iterable[tuple[int, int]] = (),
           dtype: str = "bf16", name: str = "text", kind: str = "text") -> list[int]:
    """Runs the model over the tokens at once and writes what its attention was given.

    pairs:    of neighbouring steps over the last three quarters whose queries are kept.
    layers:   that are kept; None: all.
    answers:  [begin, end) of tokens; the queries of the steps that predict them are kept, too.
    dtype:    of stored numbers: "bf16" or "fp16".
    name, kind: of the prompt, as FORMAT.md has them.
    Returns the layers that were left out because a window hides tokens from their queries. Refuses
    what a record cannot say: a soft cap, sink logits, values of another size than keys.
    """
    ids = [int(token) for token in tokens]
    steps = _choose_steps(len(ids), pairs, answers)
    capture = _Capture(steps, None if layers is None else set(layers))
    with capturing(model, capture), torch.no_grad():
        model.base_model(torch.tensor([ids], device=model.device), use_cache=False)
    if not capture.layers:
        raise ValueError("no layer was recorded" if not capture.windowed else
                         f"all layers have windows of less than {len(ids)} tokens")
    arrays: dict[str, tuple[str, Any]] = {
        "positions": ("i32", np.arange(len(ids))), "tokens": ("i32", np.array(ids)),
        "query_steps": ("i32", steps)}
    groups = []
    shapes = set()
    for layer, kept in sorted(capture.layers.items()):
        n_kv_heads, n_tokens, head_dim = kept["k"].shape
        group = kept["q"].shape[0] // n_kv_heads
        shapes.add((kept["q"].shape[0], n_kv_heads, head_dim))
        for head in range(n_kv_heads):
            q_heads = list(range(head * group, (head + 1) * group))
            entry: dict[str, Any] = {"layer": layer, "kv_head": head, "q_heads": q_heads}
            for key, values in kept.items():
                entry[key] = f"{layer}.{head}.{key}"
                part = (values[q_heads].transpose(1, 0, 2) if key == "q" else values[head])
                arrays[entry[key]] = (dtype, part)
            groups.append(entry)
    if len(shapes) > 1 or len(capture.scales) > 1:
        raise ValueError("layers differ in their heads or scales; record them by themselves")
    config = model.config.get_text_config(decoder=True)
    n_q_heads, n_kv_heads, head_dim = shapes.pop()
    rope = getattr(config, "rope_parameters", None) or {}
    described = {"name": model.config.name_or_path or config.model_type,
                 "layers": config.num_hidden_layers, "q_heads": n_q_heads,
                 "kv_heads": n_kv_heads, "head_dim": head_dim,
                 "rope_theta": rope.get("rope_theta", 0.0), "rope_layout": capture.rope_layout}
    _kvrec.write(path, {
        "n_tokens": len(ids), "n_queries": len(steps), "head_dim": head_dim,
        "softmax_scale": capture.scales.pop(), "model": described, "groups": groups,
        "prompt": {"name": name, "kind": kind, "seed": 0,
                   "answers": [[begin, end] for begin, end in answers]}}, arrays)
    return sorted(capture.windowed)


def _choose_steps(n_tokens: int, pairs: int, answers: Iterable[tuple[int, int]]
                  ) -> np.ndarray[Any, np.dtype[np.int64]]:
    if n_tokens < 8 or pairs < 1:
        raise ValueError(f"{n_tokens} tokens and {pairs} pairs; at least 8 and 1 are recorded")
    first = np.linspace(n_tokens // 4, n_tokens - 2, pairs).astype(np.int64)
    predicting = [np.arange(max(begin - 1, 0), end - 1) for begin, end in answers]
    return np.unique(np.concatenate([first, first + 1, *predicting]))


class _Capture:
    """What the attention of each layer was given: q of some steps, k and v of all."""

    def __init__(self, steps: np.ndarray[Any, np.dtype[np.int64]], chosen: set[int] | None) -> None:
        self.layers: dict[int, dict[str, Any]] = {}  # [head, token, channel] by name
        self.windowed: set[int] = set()
        self.scales: set[float] = set()
        self.rope_layout = "none"
        self._steps = torch.from_numpy(steps)
        self._chosen = chosen
        self._unrotated: torch.Tensor | None = None

    def take_unrotated(self, key: torch.Tensor) -> None:
        self._unrotated = key

    def take(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
             scaling: float | None, window: int | None) -> None:
        unrotated, self._unrotated = self._unrotated, None
        layer = int(module.layer_idx)
        if self._chosen is not None and layer not in self._chosen:
            return
        if window is not None and window < key.shape[2]:
            self.windowed.add(layer)
            return
        if value.shape[3] != key.shape[3]:
            raise ValueError(f"layer {layer} has keys of {key.shape[3]} channels and values of "
                             f"{value.shape[3]}; a record has one number")
        self.scales.add(key.shape[3] ** -0.5 if scaling is None else float(scaling))
        kept = {"q": query[0, :, self._steps], "k": key[0], "v": value[0]}
        # Some models rotate a part of the channels and pass no more than that.
        if unrotated is not None and unrotated.shape == key.shape:
            kept["k_pre"] = unrotated[0]
            self.rope_layout = "rotate_half"
        self.layers[layer] = {name: tensor.detach().float().cpu().numpy()
                              for name, tensor in kept.items()}


class Listener(Protocol):
    """Is told what the attention of each layer is given."""

    def take_unrotated(self, key: torch.Tensor) -> None: ...

    def take(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
             scaling: float | None, window: int | None) -> None: ...


_captures: list[Listener] = []  # at most one


def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None, scaling: float | None = None,
               **kwargs: Any) -> Any:
    for unknown in ("softcap", "s_aux"):
        if kwargs.get(unknown) is not None:
            raise ValueError(f"{unknown}: a record cannot say what it does to logits")
    _captures[-1].take(module, query, key, value, scaling, kwargs.get("sliding_window"))
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling,
                                  **kwargs)


@contextlib.contextmanager
def capturing(model: Any, capture: Listener) -> Iterator[None]:
    """While it lasts, `capture` is told what the model's attention is given."""
    transformers.AttentionInterface.register(_IMPLEMENTATION, _attention)
    transformers.AttentionMaskInterface.register(_IMPLEMENTATION, sdpa_mask)
    before = model.config._attn_implementation
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    rotating: dict[Any, Any] = {module: module.apply_rotary_pos_emb for module in modules
                                if hasattr(module, "apply_rotary_pos_emb")}

    def wrapped(rotate: Any) -> Any:
        def function(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            capture.take_unrotated(k)
            return rotate(q, k, *args, **kwargs)
        return function

    _captures.append(capture)
    try:
        model.set_attn_implementation(_IMPLEMENTATION)
        for module, rotate in rotating.items():
            module.apply_rotary_pos_emb = wrapped(rotate)
        yield
    finally:
        for module, rotate in rotating.items():
            module.apply_rotary_pos_emb = rotate
        model.set_attn_implementation(before)
        _captures.pop()
