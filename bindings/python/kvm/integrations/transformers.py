# SPDX-License-Identifier: Apache-2.0
"""Decoders of Hugging Face transformers that keep their KV in kvm.

    from kvm.integrations.transformers import KvmCache
    with KvmCache(model, client) as cache:
        model.generate(**inputs, past_key_values=cache)

A step of a layer is one request: keys and values are appended, attention is computed where they
are, and nothing is copied back. What a model wants and kvm does not compute is refused with its
name.
docs/transformers.md says what was tested.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import struct
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
import transformers
from transformers import cache_utils
from transformers.cache_utils import Cache

from .. import (Client, Codec, CodecId, HeadFile, Index, InvalidError, Item, Layer, LayerKind, Mode,
                Policy, Positions, Preset, Proposal, Retention, Rope, Sequence, Status)
from .._errors import LAST_64, check_names, check_reals, check_wholes
from .._objects import Space
from .._params import codec_of
from .._presets import preset_of

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sliding_window_overlay
except ImportError:
    raise ImportError(
        f"transformers {transformers.__version__} has no interface for masks "
        "(AttentionMaskInterface); kvm.integrations.transformers works with 4.53 and newer"
    ) from None

IMPLEMENTATION = "kvm"  #: the name under which attention and masks are registered
_MAX_GROUP = 128  # query heads of a kv head
_OBSERVED = 32  # query rows of a prompt: kvm keeps them beside the tokens
# Types of models whose layers all rotate keys, by one set of frequencies, and do nothing to their
# channels behind it; and which channels are a pair. Nothing that a model says tells so.
_ROTATED = {"cohere": Rope.INTERLEAVED, "llama": Rope.HALF, "mistral": Rope.HALF,
            "olmo": Rope.HALF, "phi3": Rope.HALF, "qwen2": Rope.HALF, "qwen3": Rope.HALF}
# Keys whose codes go by what queries ask.
_BALANCED = (CodecId.I4_BALANCED, CodecId.I3_BALANCED, CodecId.I2_BALANCED)
_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class NotSupportedError(NotImplementedError):
    """The model, or the call, wants something that kvm does not compute."""


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Which tokens of a forward pass are none of padding, for each entry of the batch."""

    window: int  # 0: all
    first: tuple[int, ...]  # in the pass
    count: tuple[int, ...]
    before: tuple[int, ...]  # tokens of earlier passes; -1: not known


@dataclasses.dataclass
class CacheStats:
    """Sums over the attends of a cache. keys_* count (sequence, kv head, key)."""

    n_steps: int = 0
    keys_present: int = 0
    keys_read: int = 0
    bytes_read: int = 0
    n_rows: int = 0  #: (query row, q head)
    n_exact_rows: int = 0  #: of approximate modes, those that were answered exactly
    n_approximate_rows: int = 0  #: of steps in which any row was approximated


# 4.53 has no layers of caches.
_LayerBase: Any = getattr(cache_utils, "CacheLayerMixin", object)
# Whether Cache is given its layers; 4.54 and 4.55 make them, of classes.
_TAKES_LAYERS = "layers" in inspect.signature(Cache.__init__).parameters


class _CacheLayer(_LayerBase):  # type: ignore[misc]
    """What transformers asks a layer of a cache; the cache answers."""

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, cache: KvmCache, layer: int) -> None:
        super().__init__()
        self._cache = cache
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: sequences are made with the first tokens."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(key_states, value_states, self._layer)

    def get_seq_length(self, *args: Any) -> int:
        return self._cache.get_seq_length(self._layer)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, self._layer)

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self._cache.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotSupportedError("one layer of a KvmCache cannot be reordered; reorder the cache")

    @property
    def batch_size(self) -> int:
        return self._cache.batch_size


class KvmCache(Cache):
    """The KV cache of a model, in kvmd or an engine in this process.

    model:     a decoder of transformers; its attention is set to kvm's.
    client:    of `kvm.connect` or `kvm.open_embedded`.
    codec:     how keys and values are stored; None: as the model computes. "int8" and "fp8" take
               half of bfloat16.
    mode, eps, delta, budget, seed, proposal: how to attend, as in `Queue.step`. Chunks of a prefill
               are answered exactly. Mode EXACT takes none of the others. None: as `policy` says, or
               EXACT.
    policy, head_file, policies, codecs, indexes: as in `Client.register_space`; a head file of
               other weights than the model's is refused. With an approximate mode and no index
               every kv head gets `Index()`.
    manual_commit: tokens become final by `commit` alone, so that `crop` can take back what a policy
               would have dropped.
    name:      of the space; None: made of the model's type and configuration.

    A sequence for each entry of the batch is made with the first forward pass. Padding is never
    stored. `crop`, `reorder_cache`, `batch_select_indices` and `batch_repeat_interleave` are
    truncate, fork and free; copy.deepcopy forks. One thread at a time.
    """

    def __init__(self, model: Any, client: Client, *, codec: Any = None, mode: Mode | None = None,
                 proposal: Proposal = Proposal.DEFAULT, eps: float = 0.0, delta: float = 0.0,
                 budget: int = 0, seed: int = 0, f32_values: bool = False,
                 policy: Preset | str | None = None,
                 head_file: HeadFile | str | os.PathLike[str] | None = None,
                 policies: Iterable[Policy] = (), codecs: Iterable[Codec] = (),
                 indexes: Iterable[Index] = (), manual_commit: bool = False,
                 name: str | None = None) -> None:
        check_wholes(LAST_64, budget=budget, seed=seed)
        if mode is not None:
            check_names(Mode, mode=mode)
        check_names(Proposal, proposal=proposal)
        check_reals(eps=eps, delta=delta)
        others = {"eps": eps, "delta": delta, "budget": budget, "proposal": proposal}
        for what, value in others.items():
            if mode in (None, Mode.EXACT) and value != 0:
                raise InvalidError(Status.INVALID, f"{what} is {value}, and mode is EXACT, which "
                                   "takes none; name another, such as kvm.Mode.SAMPLED")
        preset = preset_of(policy, head_file)
        if mode is None:  # what the space takes
            mode = Mode.EXACT if preset is None else Mode.DEFAULT
        use_kvm(model)
        self.client = client
        self.space: _ModelSpace = _register(model, client, name, codec, preset, list(policies),
                                            list(codecs), list(indexes),
                                            mode not in (Mode.DEFAULT, Mode.EXACT))
        self.stats = CacheStats()
        self._arguments: dict[str, Any] = {
            "mode": mode, "proposal": proposal, "eps": eps, "delta": delta, "budget": budget,
            "seed": seed, "f32_values": f32_values}
        self._manual_commit = manual_commit
        self._queue = client.create_queue()
        self._max_rows = client.info().max_query_rows
        self._sequences: list[Sequence] = []
        self._lengths = [0] * self.space.n_layers  # columns of the batch, padding included
        self._counts: list[list[int]] = []  # [entry][pass] tokens, and how many columns
        self._columns: list[int] = []  # [pass]
        self._pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        layers: list[Any] = [_CacheLayer(self, i) for i in range(self.space.n_layers)]
        if _TAKES_LAYERS:
            super().__init__(layers=layers)
        else:
            self.layers = layers
            self.cache_processor = None  # 4.55: nothing stands between

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Frees the sequences and gives the queue back."""
        self.reset()
        self._queue.close()

    @property
    def sequences(self) -> list[Sequence]:
        """One for each entry of the batch."""
        return list(self._sequences)

    @property
    def batch_size(self) -> int:
        return len(self._sequences) or -1

    def get_seq_length(self, layer_idx: int | None = 0, *args: Any, **kwargs: Any) -> int:
        """Columns of the batch that a layer has seen, padding included."""
        return self._lengths[layer_idx or 0]

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """How many columns a mask has, and where it begins."""
        n = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self._lengths[layer_idx] + n, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: it grows."""
        return -1

    # --- A forward pass ---------------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int,
               *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps them until the layer's attention asks for them, in one request."""
        if self._pending.get(layer_idx) is not None:
            raise NotSupportedError(
                f"layer {layer_idx} was given keys twice without attention; the model's attention "
                f"is not kvm's (it must be '{IMPLEMENTATION}')")
        n_entries, n_tokens = key_states.shape[0], key_states.shape[2]
        if not self._sequences:
            self._sequences = [self.space.create_sequence(manual_commit=self._manual_commit)
                               for _ in range(n_entries)]
            self._counts = [[] for _ in range(n_entries)]
        if n_entries != len(self._sequences):
            raise ValueError(f"the batch has {n_entries} entries; the cache has "
                             f"{len(self._sequences)} (reset() empties it)")
        self._pending[layer_idx] = (key_states, value_states)
        self._lengths[layer_idx] += n_tokens
        key_states._kvm = (self, layer_idx)  # type: ignore[attr-defined]
        return key_states, value_states

    def _attend(self, layer: int, query: torch.Tensor, tokens: _Tokens | None, scale: float
                ) -> torch.Tensor:
        key, value = self._pending.pop(layer)
        n_entries, n_heads, n_tokens, _ = query.shape
        if tokens is None or not tokens.first:
            tokens = _Tokens(0 if tokens is None else tokens.window, (0,) * n_entries,
                             (n_tokens,) * n_entries, (-1,) * n_entries)
        end = self._lengths[layer]
        if sum(self._columns) < end:  # the first layer of this pass
            for entry, counts in enumerate(self._counts):
                if tokens.before[entry] not in (-1, sum(counts)):
                    raise NotSupportedError(
                        f"entry {entry} of the attention mask shows {tokens.before[entry]} tokens "
                        f"of earlier passes; {sum(counts)} were stored. A mask that changes")
            for entry, counts in enumerate(self._counts):
                counts.append(tokens.count[entry])
            self._columns.append(n_tokens)
        if n_entries > 1 and n_tokens > 1:  # a row number is that of k and v, and of q and o
            key, value, query = key.contiguous(), value.contiguous(), query.contiguous()
        return self._requests(layer, tokens, scale, query, key, value).transpose(1, 2)

    def _requests(self, layer: int, tokens: _Tokens, scale: float, query: torch.Tensor,
                  key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Appends keys and values, and attends. Arrays are [entry, head, token, channel]."""
        n_entries, n_heads, n_tokens, _ = query.shape
        if self.space._kvm_geometry.is_balanced:
            self._observe(layer, tokens, query)
        o = query.new_zeros((n_entries, n_heads, n_tokens, self.space.head_dim_v))
        for begin in range(0, n_tokens, self._max_rows):
            items, n_rows = [], 0
            for entry, seq in enumerate(self._sequences):
                first = max(tokens.first[entry], begin)
                n = min(tokens.first[entry] + tokens.count[entry], begin + self._max_rows) - first
                n_rows += max(n, 0)
                if n <= 0:
                    items.append(Item(seq))
                else:
                    items.append(Item(seq, n, n, append_row=first, query_row=first))
            result = self._queue.step(self.space, layer, items, k=key, v=value, q=query,
                                      o=o, layout="heads", scale=scale,
                                      **self._arguments)
            self._count(result.stats, n_heads * n_rows)
        return o

    def _observe(self, layer: int, tokens: _Tokens, query: torch.Tensor) -> None:
        """Shows the last queries of a prompt, or of its first part, before its keys are stored."""
        for entry, seq in enumerate(self._sequences):
            end = tokens.first[entry] + tokens.count[entry]
            n = min(tokens.count[entry], _OBSERVED)
            counts = self._counts[entry]
            # Looks at few of them: most passes have tokens.
            if n > 0 and not any(counts[i] for i in range(len(counts) - 1)):
                self._queue.observe(seq, layer,
                                    q=query[entry, :, end - n:end].transpose(0, 1).contiguous(),
                                    query_position=tokens.count[entry] - n)

    def _count(self, stats: Any, n_rows: int) -> None:
        mine = self.stats
        mine.n_steps += 1
        mine.keys_present += stats.keys_present
        mine.keys_read += stats.keys_read
        mine.bytes_read += stats.bytes_read
        mine.n_rows += n_rows
        if stats.mode > Mode.EXACT:
            mine.n_approximate_rows += n_rows
            mine.n_exact_rows += stats.n_exact

    # --- What transformers does with a cache ------------------------------------------------------

    def reset(self) -> None:
        """Frees the sequences: the cache is empty, for a batch of any size."""
        for seq in self._sequences:
            seq.free()
        self._sequences = []
        self._counts = []
        self._columns = []
        self._pending = {}
        self._lengths = [0] * self.space.n_layers

    def commit(self) -> None:
        """Makes all tokens final (manual_commit)."""
        for seq in self._sequences:
            seq.commit()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back tokens: -n takes the last n; n >= 0 leaves n (0 and transformers 5: none)."""
        length = self._lengths[0]
        if tokens_to_remove > 0:
            keep = min(tokens_to_remove, length)
        else:
            keep = max(length + tokens_to_remove, 0)
        if keep >= length:
            return
        # Passes are cut from the end; the tokens of a pass are taken to be its last columns.
        left = length - keep
        while left > 0:
            n_columns = self._columns.pop()
            removed = min(left, n_columns)
            for counts in self._counts:
                n = counts.pop()
                if removed < n_columns:
                    counts.append(max(n - removed, 0))
            if removed < n_columns:
                self._columns.append(n_columns - removed)
            left -= removed
        for seq, counts in zip(self._sequences, self._counts, strict=True):
            seq.truncate(sum(counts))
        self._lengths = [min(n, keep) for n in self._lengths]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Entry i becomes what entry beam_idx[i] is (beam search)."""
        self._select([int(i) for i in beam_idx])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these entries, in this order. indices: numbers, or a mask of all entries."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select([int(i) for i in indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each entry becomes `repeats` entries."""
        self._select([i for i in range(len(self._sequences)) for _ in range(repeats)])

    def _select(self, parents: list[int]) -> None:
        for parent in parents:
            if not 0 <= parent < len(self._sequences):
                raise IndexError(f"entry {parent} is asked for; the cache has "
                                 f"{len(self._sequences)}")
        taken: set[int] = set()
        chosen = []
        for parent in parents:
            seq = self._sequences[parent]
            chosen.append(seq.fork() if parent in taken else seq)
            taken.add(parent)
        for entry, seq in enumerate(self._sequences):
            if entry not in taken:
                seq.free()
        self._counts = [list(self._counts[parent]) for parent in parents]
        self._sequences = chosen

    def __deepcopy__(self, memo: dict[int, Any]) -> KvmCache:
        copy: KvmCache = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._queue = self.client.create_queue()
        copy._sequences = [seq.fork() for seq in self._sequences]
        copy._counts = [list(counts) for counts in self._counts]
        copy._columns = list(self._columns)
        copy._lengths = list(self._lengths)
        copy._arguments = dict(self._arguments)
        copy._pending = {}
        copy.stats = CacheStats()
        copy.layers = [_CacheLayer(copy, i) for i in range(self.space.n_layers)]
        return copy

    def __reduce__(self) -> Any:
        raise TypeError("a KvmCache cannot be pickled: its tokens are in the service")


# --- What is registered with transformers ---------------------------------------------------------


def use_kvm(model: Any) -> None:
    """Sets a model's attention to kvm's. `KvmCache` does so too."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    if model.config._attn_implementation == IMPLEMENTATION:
        return
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(IMPLEMENTATION)
    else:  # 4.53
        model.config._attn_implementation = IMPLEMENTATION
        model.config.get_text_config(decoder=True)._attn_implementation = IMPLEMENTATION


def _attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
               value: torch.Tensor, attention_mask: torch.Tensor | None, scaling: float,
               dropout: float = 0.0, softcap: float | None = None,
               s_aux: torch.Tensor | None = None, sliding_window: int | None = None,
               **kwargs: Any) -> tuple[torch.Tensor, None]:
    owner = getattr(key, "_kvm", None)
    if owner is None:
        raise NotSupportedError("attention 'kvm' works with past_key_values=KvmCache(...) alone")
    cache: KvmCache = owner[0]
    layer: int = owner[1]
    if dropout:
        raise NotSupportedError(f"dropout of {dropout} in attention; use model.eval()")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        raise NotSupportedError("gradients through attention; use torch.no_grad()")
    for name in ("output_attentions", "position_bias", "head_mask"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotSupportedError(f"{name}: kvm has no matrix of weights to give or to change")
    if getattr(module, "is_causal", True) is False:
        raise NotSupportedError("attention that is not causal")
    if attention_mask is not None and not hasattr(attention_mask, "_kvm_tokens"):
        raise NotSupportedError(f"an attention mask of the shape {tuple(attention_mask.shape)} "
                                "that was made elsewhere; pass one of [batch, tokens]")
    tokens: _Tokens | None = getattr(attention_mask, "_kvm_tokens", None)
    geometry = cache.space._kvm_geometry
    if (softcap or 0.0) != geometry.softcap:
        raise NotSupportedError(f"a soft cap of {softcap}; the configuration has "
                                f"{geometry.softcap}")
    if (s_aux is not None) != geometry.has_sinks:
        raise NotSupportedError("sink logits that were not found in the model")
    if tokens is not None and tokens.window != geometry.windows[layer]:
        raise NotSupportedError(f"a window of {tokens.window} in layer {layer}; the configuration "
                                f"has {geometry.windows[layer]}")
    # Queries and keys may differ in type where a model computes one of them in float32.
    return cache._attend(layer, query, tokens, scaling), None


def _mask(batch_size: int, q_length: int | torch.Tensor | None = None, kv_length: int = 0,
          q_offset: int = 0, kv_offset: int = 0,
          mask_function: Callable[..., Any] = causal_mask_function,
          attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    if q_length is None:  # transformers 4
        q_length = kwargs["cache_position"]
    n = q_length if isinstance(q_length, int) else int(q_length.shape[0])
    window = _window_of(mask_function)
    made = torch.empty(0, dtype=torch.bool)
    first: tuple[int, ...] = ()
    count: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    if attention_mask is not None and not bool(attention_mask.all()):
        seen = attention_mask.bool()[:, :kv_length]
        now = seen[:, kv_length - n:]
        firsts, counts = [], []
        for entry in range(batch_size):
            places = now[entry].nonzero().flatten()
            n_tokens = int(places.numel())
            if n_tokens and int(places[-1]) - int(places[0]) + 1 != n_tokens:
                raise NotSupportedError(f"entry {entry} of the attention mask has padding between "
                                        "its tokens; it must be on one side")
            firsts.append(int(places[0]) if n_tokens else 0)
            counts.append(n_tokens)
        first, count = tuple(firsts), tuple(counts)
        before = tuple(int(x) for x in seen[:, :kv_length - n].sum(dim=1))
    made._kvm_tokens = _Tokens(window, first, count, before)  # type: ignore[attr-defined]
    return made


def _window_of(function: Callable[..., Any]) -> int:
    """The window of a causal mask, 0 for none."""
    if function is causal_mask_function:
        return 0
    cells = [cell.cell_contents for cell in (getattr(function, "__closure__", None) or ())]
    parts = [part for cell in cells if isinstance(cell, tuple) for part in cell]
    overlay = sliding_window_overlay(1).__code__
    if len(parts) == 2 and causal_mask_function in parts:
        for part in parts:
            if getattr(part, "__code__", None) is overlay:
                return int(part.__closure__[0].cell_contents)
    name = getattr(function, "__qualname__", repr(function))
    raise NotSupportedError(f"a mask of {name}: kvm computes causal masks and causal windows")


# --- The geometry of a model ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Geometry:
    windows: tuple[int, ...]
    softcap: float
    has_sinks: bool
    is_balanced: bool


class _ModelSpace(Space):
    __slots__ = ("_kvm_geometry",)
    _kvm_geometry: _Geometry


def model_fingerprint(model: Any) -> bytes:
    """32 bytes that tell a decoder's weights from others'.

    They are of 64 numbers of each parameter, so that two fine-tunes of a model differ, and of no
    setting, such as how positions are scaled. Those of a checkpoint in bfloat16 are the same
    whatever type it is loaded in.
    """
    digest = hashlib.sha256()
    for parameter in model.base_model.parameters():
        n = parameter.numel()
        if parameter.is_meta or n == 0:
            raise ValueError("the model's weights are not loaded; a fingerprint is of its weights")
        places = torch.tensor([i * (n - 1) // 63 for i in range(64)], device=parameter.device)
        numbers = parameter.detach().reshape(-1)[places].float()
        # What is smaller loses bits as float16, of which there would be other ones as bfloat16.
        numbers = numbers.where(numbers.abs() >= 2.0**-14, numbers.new_zeros(()))
        bits = numbers.bfloat16().view(torch.int16).tolist()
        digest.update(struct.pack(f"<{len(parameter.shape)}Q64h", *parameter.shape, *bits))
    return digest.digest()


def model_geometry(model: Any) -> tuple[int, int]:
    """Layers of a decoder, and kv heads of each."""
    config = model.config.get_text_config(decoder=True)
    n_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(config.num_hidden_layers), int(n_kv_heads)


def check_heads(model: Any, heads: HeadFile) -> None:
    """Raises InvalidError where a head file is for another model."""
    heads.check(*model_geometry(model),
                model_fingerprint(model) if heads.fingerprint else b"")


def _register(model: Any, client: Client, name: str | None, codec: Any, preset: Preset | None,
              policies: list[Policy], codecs: list[Codec], indexes: list[Index],
              needs_index: bool) -> _ModelSpace:
    config = model.config.get_text_config(decoder=True)
    n_layers, n_kv_heads = model_geometry(model)
    n_q_heads = config.num_attention_heads
    layers: list[Layer] = []
    default_mode, default_budget = Mode.DEFAULT, 0
    if preset is not None:
        if isinstance(preset.heads, HeadFile):
            check_heads(model, preset.heads)
        system = preset.resolve(n_layers)
        layers, policies, codecs = (system.layers, system.policies + policies,
                                    system.codecs + codecs)
        indexes = system.indexes + indexes
        default_mode, default_budget = system.default_mode, system.default_budget
    if any(layer.kind == LayerKind.ALIAS for layer in layers):
        raise NotSupportedError("layers that read the keys and values of others: the model "
                                "computes its own in every layer")
    if any(policy.retention == Retention.PROMPT for policy in policies):
        raise NotSupportedError("layers that decoding skips: the model runs all of them")
    if needs_index and not indexes:
        indexes = [Index()]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // n_q_heads
    windows = _windows(config, n_layers)
    softcap = float(getattr(config, "attn_logit_softcapping", None) or 0.0)
    sinks = _sinks(model, n_layers, n_q_heads)
    if codec is None:
        if model.dtype not in _TYPES:
            raise NotSupportedError(f"a model that computes in {model.dtype}")
        codec = _TYPES[model.dtype]
    digest = hashlib.sha256(config.to_json_string().encode()).digest()
    if name is None:
        settings: tuple[Any, ...] = (codec, policies, codecs, indexes)
        if layers:
            settings += (layers,)
        if default_mode != Mode.DEFAULT:
            settings += (default_mode, default_budget)
        settings_digest = hashlib.sha256(repr(settings).encode()).hexdigest()
        name = f"{config.model_type}-{digest.hex()[:12]}-{settings_digest[:12]}"
    if n_q_heads // n_kv_heads > _MAX_GROUP:
        raise NotSupportedError(f"{n_q_heads // n_kv_heads} query heads for a kv head; kvm takes "
                                f"{_MAX_GROUP}")
    own = {layer.begin: layer for layer in layers}  # each of one layer
    rope, inv_freq = Rope.NONE, list[float]()
    if any(policy.positions == Positions.IN_CACHE for policy in policies):
        rope, inv_freq = _rope(model)
    space = client.register_space(
        name, n_layers=n_layers, n_q_heads=n_q_heads, n_kv_heads=n_kv_heads, head_dim=head_dim,
        codec=codec, rope=rope, rope_inv_freq=inv_freq, logit_softcap=softcap, sink_logits=sinks,
        fingerprint=digest,
        layers=layers + [dataclasses.replace(own.get(i, Layer(i)), window=window)
                         for i, window in enumerate(windows) if window],
        policies=policies, codecs=codecs, indexes=indexes, default_mode=default_mode,
        default_budget=default_budget)
    made = _ModelSpace(client, space.id, space._layer_shapes)
    is_balanced = any(codec_of(of) in _BALANCED for of in
                      (codec, *(k for own in codecs for k in (own.codec_k, own.demoted_k))))
    made._kvm_geometry = _Geometry(tuple(windows), softcap, sinks is not None, is_balanced)
    return made


def _rope(model: Any) -> tuple[Rope, list[float]]:
    """How a model rotates queries and keys: which channels are a pair, and their frequencies."""
    family = model.config.get_text_config(decoder=True).model_type
    if family not in _ROTATED:
        raise NotSupportedError(f"positions in the cache with a model of the type {family}; known "
                                f"to rotate keys alike in all layers are {', '.join(_ROTATED)}")
    found = [module for module in model.modules()
             if isinstance(getattr(module, "inv_freq", None), torch.Tensor)]
    if len(found) != 1:
        raise NotSupportedError(f"positions in the cache with a model that has {len(found)} sets "
                                "of rotary frequencies; kvm takes one, of all layers")
    rotary = found[0]
    kind = getattr(rotary, "rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise NotSupportedError(f"positions in the cache with rotary frequencies that change with "
                                f"the length (rope_type {kind})")
    return _ROTATED[family], rotary.inv_freq.float().tolist()


def _windows(config: Any, n_layers: int) -> list[int]:
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window if getattr(config, "use_sliding_window", True) else 0] * n_layers
    known = {"full_attention": 0, "sliding_attention": window}
    for kind in types:
        if kind not in known:
            raise NotSupportedError(f"a layer of the type {kind}; kvm stores full_attention and "
                                    "sliding_attention")
    return [known[kind] for kind in types[:n_layers]]


def _sinks(model: Any, n_layers: int, n_q_heads: int) -> list[float] | None:
    """The extra logits of gpt-oss, [n_layers * n_q_heads]."""
    found: dict[int, list[float]] = {}
    for module in model.modules():
        logits = getattr(module, "sinks", None)
        if isinstance(logits, torch.Tensor) and hasattr(module, "layer_idx"):
            found[module.layer_idx] = logits.detach().float().flatten().tolist()
    if not found:
        return None
    if sorted(found) != list(range(n_layers)) or any(len(x) != n_q_heads for x in found.values()):
        raise NotSupportedError("sink logits in some layers or heads only")
    return [logit for layer in range(n_layers) for logit in found[layer]]
