# SPDX-License-Identifier: Apache-2.0
"""Clients, spaces, sequences and queues."""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence as Series
from types import TracebackType
from typing import Any, Self, TypeVar

from . import _native
from ._constants import (EVICT_DISCONNECT, POSITION_END, PRIORITY_MAX, CodecId, Dtype, Evict,
                         LayerKind, ListFlag, Mode, Proposal, QuotaOf, Rope, SaveFlag, SequenceFlag,
                         SpaceFlag, Status)
from ._errors import LAST_32, Error, InvalidError, check_names, check_reals, text, whole
from ._heads import HeadFile
from ._params import Codec, Index, Layer, Policy, codec_of, dtype_of
from ._prefixes import PrefixHashes, data_of, keep_ns
from ._presets import Preset, preset_of, resolved
from ._records import (Amounts, ClientEntry, ClientInfo, EvictResult, SequenceInfo, SnapshotInfo,
                       SpaceInfo, Stats, UserEntry)
from ._requests import (Item, Layout, Request, Step, StepResult, check_space, check_step, is_heads,
                        step_flags)

_E = TypeVar("_E")
MAX_SEEDS = 256  # that a space keeps
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for client in list(_clients):
        client.close()


def connect(socket: str | os.PathLike[str] | None = None, *, name: str | None = None,
            timeout: float = 5.0) -> Client:
    """Connects to kvmd.

    socket:   where it listens; None: $KVM_SOCKET, else $XDG_RUNTIME_DIR/kvm/kvmd.sock where that
              exists, else /run/kvm/kvmd.sock.
    name:     what kvmd's log and `kvmctl top` call this client; None: the process's name.
    timeout:  seconds, for the handshake and for each call that is no request.
    """
    path = None if socket is None else os.fspath(socket)
    return Client(_native.Client.connect(path, name, max(1, int(timeout * 1e9))))


def open_embedded(*, n_threads: int = 0, capacity: int = 0) -> Client:
    """Opens an engine in this process: the same calls and results without kvmd.

    n_threads: that compute, the one that waits included; 0: one per core.
    capacity:  most bytes of keys and values; 0: 60 % of the machine's free memory.
    """
    return Client(_native.Client.open_embedded(whole("n_threads", n_threads, LAST_32),
                                               whole("capacity", capacity)))


class Client:
    """A connection to kvmd, or an engine in this process. Made by `connect` and `open_embedded`.

    A context manager: it is closed at the end, and its sequences are freed. Any thread may use it.
    """

    def __init__(self, native: _native.Client) -> None:
        self._native = native
        # Without their Queue, which would keep the client alive.
        self._idle_queues: list[_native.Queue] = []
        self._frees: dict[int, _native.Queue] = {}  # at most one
        self._orphans: collections.deque[
            tuple[weakref.ref[_native.Queue], _native.Flight, Sequence | None]
        ] = collections.deque()
        self._pid = os.getpid()
        _clients.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Frees the client's sequences and closes it. Its queues are closed first: requests that
        have not begun are cancelled. What lies in arrays of `empty` can still be read."""
        self._native.close()
        self._idle_queues = []
        self._frees.clear()
        self._orphans.clear()

    def reconnect(self) -> None:
        """Connects again after kvmd has gone. Close queues and let go of arrays of `empty` first.

        Sequences of the old connection are gone, and spaces must be registered again.
        """
        for queue in [*self._idle_queues, *self._frees.values()]:
            queue.close()
        self._idle_queues = []
        self._frees.clear()
        self._orphans.clear()
        self._native.reconnect()

    @property
    def is_embedded(self) -> bool:
        """Whether it is an engine in this process."""
        return self._native.is_embedded

    @property
    def is_closed(self) -> bool:
        return self._native.is_closed

    @property
    def n_copied_bytes(self) -> int:
        """Bytes of arrays that were copied to kvmd and back, because they are not of `empty`."""
        return self._native.n_copied_bytes

    def info(self) -> ClientInfo:
        """Facts about the connection and its limits."""
        return ClientInfo(**self._native.info())

    def ping(self) -> float:
        """Seconds that an empty request takes, there and back."""
        return self._native.ping() / 1e9

    def stats(self) -> Stats:
        """Counters of the whole service."""
        return Stats(**self._native.stats())

    def stats_text(self) -> str:
        """The same in Prometheus' text format."""
        return self._native.stats_text()

    def empty(self, shape: int | Series[int], dtype: Dtype | str | Any = "float32",
              framework: str = "numpy") -> Any:
        """An array that kvmd reads and writes in place, without a copy. Its contents are undefined.

        dtype:      "float32", "float16" or "bfloat16" (PyTorch only).
        framework:  "numpy" or "torch". Views and slices of the array are in place too. The memory
                    goes back with the last of them.
        """
        code = dtype_of(dtype)
        names = {Dtype.F32: "float32", Dtype.F16: "float16", Dtype.BF16: "bfloat16"}
        if code not in names:
            raise ValueError(f"dtype is {dtype!r}; it must be float32, float16 or bfloat16")
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        n = 1
        for size in sizes:
            if size < 0:
                raise ValueError(f"shape is {sizes}; sizes must not be negative")
            n *= size
        size_bytes = n * (4 if code == Dtype.F32 else 2)
        array = self._native.make_bytes(max(size_bytes, 1))
        if framework == "torch":
            import torch
            flat = torch.utils.dlpack.from_dlpack(array)[:size_bytes]
            return flat.view(getattr(torch, names[Dtype(code)])).reshape(sizes)
        if framework != "numpy":
            raise ValueError(f"framework is {framework!r}; it must be 'numpy' or 'torch'")
        if code == Dtype.BF16:
            raise ValueError("NumPy has no bfloat16; use framework='torch'")
        import numpy
        return numpy.from_dlpack(array)[:size_bytes].view(names[Dtype(code)]).reshape(sizes)

    # --- Spaces and sequences ---------------------------------------------------------------------

    def register_space(
            self, name: str, *, n_layers: int, n_q_heads: int, head_dim: int, n_kv_heads: int = 0,
            head_dim_v: int = 0, codec: CodecId | str | Any = None, softmax_scale: float = 0.0,
            logit_softcap: float = 0.0, rope: Rope = Rope.NONE,
            rope_inv_freq: Iterable[float] = (), sink_logits: Iterable[float] | None = None,
            alibi_slopes: Iterable[float] | None = None, values_in_keys: bool = False,
            layers: Iterable[Layer] = (), policy: Preset | str | None = None,
            head_file: HeadFile | str | os.PathLike[str] | None = None,
            policies: Iterable[Policy] = (), codecs: Iterable[Codec] = (),
            indexes: Iterable[Index] = (), default_mode: Mode = Mode.DEFAULT,
            default_proposal: Proposal = Proposal.DEFAULT,
            default_eps: float = 0.0, default_delta: float = 0.0, default_budget: int = 0,
            fingerprint: bytes = bytes(32), shard_index: int = 0, n_shards: int = 0) -> Space:
        """Registers the geometry of a model's KV, or finds the space of this name that is the same.

        codec:         how keys and values are stored where `codecs`, also those of `policy`, do
                       not say; None: bfloat16. "int8" and "fp8" take half.
        n_kv_heads:    0: n_q_heads. head_dim_v: 0: head_dim.
        rope:          how keys were rotated before they are appended; policies with cache-relative
                       positions need to know.
        sink_logits:   [n_layers * n_q_heads] an extra logit without a value (gpt-oss).
        alibi_slopes:  [n_q_heads] what logits grow by from position to position (BLOOM, MPT).
        values_in_keys:  values are the first head_dim_v channels of keys (DeepSeek's latent form):
                       stored once, and steps append k alone.
        policy:        a published system: "h2o", "h2o:n_tokens=8192,share=0.3", or a `Preset`.
        head_file:     of `kvm-eval heads`, for "duo_attention" and "razor_attention": which heads
                       retrieve. One for another geometry is refused, and where `fingerprint` is
                       given, one for another fingerprint.
        default_*:     what steps without a mode of their own take; DEFAULT: exact.
        fingerprint:   32 bytes of whatever must agree between users of the name (weights, ...).
        Later entries of `layers`, `policies`, `codecs` and `indexes` win, also over those of
        `policy`; so does a `default_mode`.
        """
        check_names(Mode, default_mode=default_mode)
        check_names(Proposal, default_proposal=default_proposal)
        overrides, all_policies = list(layers), list(policies)
        all_codecs, all_indexes = list(codecs), list(indexes)
        preset = preset_of(policy, head_file)
        if preset is not None:
            system = resolved(preset, n_layers, n_kv_heads or n_q_heads,
                              fingerprint if fingerprint != bytes(32) else b"")
            overrides = system.layers + overrides
            all_policies = system.policies + all_policies
            all_codecs = system.codecs + all_codecs
            all_indexes = system.indexes + all_indexes
            if default_mode == Mode.DEFAULT:
                default_mode = system.default_mode
                default_budget = default_budget or system.default_budget
        numbers = {
            "n_layers": n_layers, "n_q_heads": n_q_heads, "n_kv_heads": n_kv_heads,
            "head_dim_k": head_dim, "head_dim_v": head_dim_v, "codec": int(codec_of(codec)),
            "softmax_scale": softmax_scale, "logit_softcap": logit_softcap,
            "rope_layout": int(rope), "shard_index": shard_index, "n_shards": n_shards,
            "fingerprint": fingerprint, "default_mode": int(default_mode),
            "default_proposal": int(default_proposal), "default_eps": default_eps,
            "default_delta": default_delta, "default_budget": default_budget,
            "flags": int(SpaceFlag.V_IN_K) if values_in_keys else 0,
        }
        try:
            space = self._native.register_space(
                text("name", name), numbers, [entry._fields() for entry in overrides],
                [entry._fields() for entry in all_policies],
                [entry._fields() for entry in all_codecs],
                [entry._fields() for entry in all_indexes], list(rope_inv_freq),
                None if sink_logits is None else list(sink_logits),
                None if alibi_slopes is None else list(alibi_slopes))
        except InvalidError as error:
            if rope != Rope.NONE or "no rope_layout" not in error.message:
                raise
            # Who named a policy may not know that it counts positions within the cache.
            raise InvalidError(error.status, f"{error.message}; pass rope=kvm.Rope.HALF or "
                               "kvm.Rope.INTERLEAVED, as the model rotates, and rope_inv_freq, the "
                               "frequency of each pair of channels") from None
        of_space = (n_q_heads, n_kv_heads or n_q_heads, head_dim, head_dim_v or head_dim)
        return Space(self, space, _layer_shapes(of_space, n_layers, overrides))

    def find_space(self, name: str) -> Space:
        """The space of this name.

        Its arrays are checked less: kvm.h does not tell what layers have of their own. Numbers of
        heads are not checked, and dims are taken to be those of the space; who uses layers with
        other dims calls `register_space`, which finds it too.
        """
        return Space(self, self._native.find_space(text("name", name)), None)

    def spaces(self) -> list[SpaceInfo]:
        """All spaces of the service."""
        return [SpaceInfo(**info) for info in self._native.spaces()]

    def sequences(self, space: Space | None = None, *, all_clients: bool = False
                  ) -> list[SequenceInfo]:
        """The sequences of a space (None: of all); those of other clients for operators only."""
        flags = ListFlag.ALL_CLIENTS if all_clients else 0
        found = self._native.sequences(0 if space is None else space.id, int(flags))
        return [SequenceInfo(**info) for info in found]

    def snapshots(self, *, all_users: bool = False) -> list[SnapshotInfo]:
        """What was saved (`Sequence.save`) by this user; by all of them for operators only."""
        flags = ListFlag.ALL_CLIENTS if all_users else 0
        return [SnapshotInfo(**info) for info in self._native.snapshots(int(flags))]

    def delete_snapshot(self, name: str) -> None:
        """Deletes a snapshot of this user. Sequences that were loaded from it stay."""
        self._native.delete_snapshot(text("name", name))

    def sequence(self, space: Space, id: int) -> Sequence:
        """A handle of a sequence that exists; it is not freed with the handle."""
        return Sequence(space, id, owns=False)

    # --- Requests ---------------------------------------------------------------------------------

    def create_queue(self, *, n_entries: int = 0, spin: float = 0.0) -> Queue:
        """Makes a queue: requests of one queue that touch the same sequence keep their order.

        n_entries: requests on their way at a time; 0: 256. spin: seconds that a wait spins before
        it sleeps; 0: 50 us; infinite: for ever.
        """
        spin_ns = 2**64 - 1 if spin == float("inf") else int(spin * 1e9)
        native = _native.Queue(self._native, whole("n_entries", n_entries, LAST_32), spin_ns)
        return Queue(self, native)

    @contextlib.contextmanager
    def _borrow(self) -> Iterator[Queue]:
        """A queue for one call; each thread gets its own."""
        try:
            native = self._idle_queues.pop()
        except IndexError:
            native = _native.Queue(self._native, 0, 0)
        try:
            yield Queue(self, native)
        finally:
            self._idle_queues.append(native)

    def step(self, space: Space, layer: int, items: Iterable[Item], **arguments: Any) -> StepResult:
        """`Queue.step` on a queue that the client keeps."""
        with self._borrow() as queue:
            return queue.step(space, layer, items, **arguments)

    def _free_later(self, seq: int) -> None:
        """Frees a sequence whose handle is gone, without waiting for it."""
        self._sweep(looks=True)
        self._free(seq)

    def _free(self, seq: int) -> None:
        if self._pid != os.getpid() or self._native.is_closed:
            return
        with contextlib.suppress(Error):
            if not self._frees:
                self._frees.setdefault(0, _native.Queue(self._native, 0, 0))
            queue = self._frees[0]
            queue.start(_native.make_verb(self._native, _native.Verb.FREE, seq, 0, 0, 0), True)
            queue.poll()

    def _abandon(self, queue: _native.Queue, flight: _native.Flight,
                 given: Sequence | None = None) -> None:
        """Frees the sequence that nobody will ask a request for, once it is there. given: what the
        request took its handle's sequence from; the handle owns it again where that has failed."""
        self._orphans.append((weakref.ref(queue), flight, given))
        self._sweep()

    def _sweep(self, *, looks: bool = False) -> None:
        """Frees what such requests have made by now. For whoever has taken completions.

        looks: at their queues too, which nobody else may ever do again.
        """
        returned = []  # They go at the end, each with a sweep of its own.
        for _ in range(len(self._orphans)):
            try:
                orphan = self._orphans.popleft()  # each goes to one thread
            except IndexError:
                return
            queue, flight = orphan[0](), orphan[1]
            if looks and queue is not None:
                with contextlib.suppress(Error):  # in a child
                    queue.wait(flight, 0)
                looks = flight.is_done
            if not flight.is_done:
                self._orphans.append(orphan)
            elif flight.status == Status.OK and flight.seq != 0:
                self._free(flight.seq)
            elif flight.status != Status.OK and orphan[2] is not None:
                orphan[2]._owns = True
                returned.append(orphan[2])

    # --- Administration ---------------------------------------------------------------------------

    def config_text(self) -> str:
        """The options with which kvmd runs, as JSON. For operators."""
        return self._native.config_text()

    def clients(self) -> list[ClientEntry]:
        """The clients of the service. For operators."""
        return [_entry(ClientEntry, fields) for fields in self._native.clients()]

    def users(self) -> list[UserEntry]:
        """The users behind them. For operators."""
        return [_entry(UserEntry, fields) for fields in self._native.users()]

    def set_quota(self, whose: QuotaOf, id: int, **limits: int) -> None:
        """Sets limits of a client or user (fields of `Amounts`); 0 leaves one as it is."""
        names = {field.name for field in dataclasses.fields(Amounts)}
        for name in limits:
            if name not in names:
                raise TypeError(f"{name} is no limit; there are {', '.join(sorted(names))}")
        check_names(QuotaOf, whose=whose)
        self._native.set_quota({"whose": int(whose), "id": id, "limits": limits})

    def evict(self, what: Evict, id: int, *, disconnect: bool = False) -> EvictResult:
        """Frees sequences, whoever owns them. For operators."""
        check_names(Evict, what=what)
        flags = EVICT_DISCONNECT if disconnect else 0
        return EvictResult(**self._native.evict({"what": int(what), "id": id, "flags": flags}))


#: Q heads and kv heads of a layer, dims of keys and of values. 0 heads: not known.
_Shape = tuple[int, int, int, int]


def _layer_shapes(of_space: _Shape, n_layers: int, overrides: list[Layer]) -> list[_Shape]:
    """What each layer has, as the service resolves it: a later entry replaces earlier ones."""
    shapes = [of_space] * n_layers
    aliases = {}
    for entry in overrides:
        own = (entry.n_q_heads, entry.n_kv_heads, entry.head_dim, entry.head_dim_v)
        for layer in range(entry.begin, entry.begin + entry.n_layers):
            q, kv, k, v = (given or other for given, other in zip(own, of_space, strict=True))
            shapes[layer] = (q, kv, k, v)
            aliases[layer] = entry if entry.kind == LayerKind.ALIAS else None
    for layer, alias in aliases.items():
        if alias is not None:
            shapes[layer] = (*shapes[layer][:2], *shapes[alias.target][2:])
    return shapes


def _entry(cls: Callable[..., _E], fields: dict[str, Any]) -> _E:
    fields["used"] = Amounts(**fields["used"])
    fields["limits"] = Amounts(**fields["limits"])
    return cls(**fields)


class Space:
    """The geometry of a model's KV. Made by `Client.register_space` and `Client.find_space`."""

    __slots__ = ("__weakref__", "_layer_shapes", "_seeds", "client", "head_dim_k", "head_dim_v",
                 "id", "n_layers", "name")

    def __init__(self, client: Client, id: int, layer_shapes: list[_Shape] | None) -> None:
        self.client = client
        self.id = id
        info = self.info()
        self.name = info.name
        self.n_layers = info.n_layers
        self.head_dim_k = info.head_dim_k
        self.head_dim_v = info.head_dim_v
        self._layer_shapes = layer_shapes
        self._seeds: dict[bytes, bytes] = {}  # by salt

    def __repr__(self) -> str:
        return f"<kvm.Space {self.name!r} {self.id:#x}>"

    def _shape(self, layer: int) -> _Shape:
        """Of a layer; of a space that was found, what is not known: kvm.h does not tell overrides.
        """
        try:
            if self._layer_shapes is not None and 0 <= layer < len(self._layer_shapes):
                return self._layer_shapes[layer]
        except TypeError:
            whole("layer", layer)
            raise
        return 0, 0, self.head_dim_k, self.head_dim_v

    def info(self) -> SpaceInfo:
        """The space as it is registered."""
        return SpaceInfo(**self.client._native.space_info(self.id))

    def drop(self) -> None:
        """Removes it from the service. It must have no sequences."""
        self.client._native.drop_space(self.id)

    def create_sequence(self, *, reserve: int = 0, manual_commit: bool = False) -> Sequence:
        """Makes an empty sequence.

        reserve:        tokens to expect.
        manual_commit:  tokens become final by `Sequence.commit` only, so that policies drop nothing
                        that may be taken back.
        """
        flags = int(SequenceFlag.MANUAL_COMMIT) if manual_commit else 0
        id = self.client._native.create_sequence(self.id, flags, whole("reserve", reserve))
        return Sequence(self, id)

    def fork_published(self, id: int, n_tokens: int | None = None) -> Sequence:
        """A fork of a sequence that a client of the same user has published (`Sequence.publish`).

        It pays for no page that it has from there. Costs the same at any length.
        """
        at = _position(n_tokens)
        return Sequence(self, self.client._native.fork_sequence(whole("id", id), at))

    def prefix_hashes(self, tokens: Iterable[int] | Any, *, salt: bytes = b"") -> PrefixHashes:
        """The hashes of a prompt's tokens, by which `fork_prefix` finds what others have published.

        tokens:  ids, in an array with one axis or any iterable. `PrefixHashes.extend` goes on.
        salt:    at most 64 bytes: who has another one finds nothing, and so does not learn what
                 prompts there were.
        """
        if not isinstance(salt, bytes):  # its value is a secret
            raise TypeError(f"salt is a {type(salt).__name__}; it must be bytes, at most 64 of "
                            "them")
        seed = self._seeds.get(salt)
        if seed is None:
            seed = _native.prefix_seed(self.client._native, self.id, salt)
            if len(self._seeds) >= MAX_SEEDS:
                self._seeds.clear()
            self._seeds[salt] = seed
        hashes = PrefixHashes(seed)
        hashes.extend(tokens)
        return hashes

    def find_prefix(self, hashes: PrefixHashes | bytes, *,
                    prefill_rate: float = 0) -> tuple[int, int] | None:
        """The longest prefix that is there (`Sequence.publish_prefix`): the id of a sequence, for
        `fork_published`, and how many of its tokens are meant. None: there is none.

        prefill_rate: tokens of a prompt that the caller computes in a second. One that lies on
                      disk, and is sooner computed than read, is as good as none then. 0: whatever
                      is there is taken.

        Asks nobody but the first time, and where something is found and a rate is given. What was
        found may be gone before it is forked; `fork_prefix` looks after that.
        """
        if not isinstance(prefill_rate, (int, float)):
            check_reals(prefill_rate=prefill_rate)
        seq, n_tokens = _native.find_prefix(self.client._native, self.id, data_of(hashes),
                                            float(prefill_rate))
        return (seq, n_tokens) if n_tokens != 0 else None

    def fork_prefix(self, hashes: PrefixHashes | bytes, *,
                    prefill_rate: float = 0) -> tuple[Sequence, int]:
        """A fork of the longest prefix that is there, and its length: what follows is yet to be
        computed. Where there is none, a new sequence and 0. prefill_rate: as `find_prefix` has it.

        It pays for no page that it has from there. `hashes.up_to(n)` leaves tokens to compute.
        """
        found = self.find_prefix(hashes, prefill_rate=prefill_rate)
        if found is not None:
            try:
                return self.fork_published(*found), found[1]
            except Error as error:
                if error.status not in (Status.NOT_FOUND, Status.STALE, Status.PERMISSION):
                    raise
        return self.create_sequence(), 0

    def load(self, name: str) -> Sequence:
        """A sequence that holds what was saved under the name (`Sequence.save`), by any client of
        the user, in a space of the same layout, policies and fingerprint.

        It is there at once; its pages are read from disk as they are needed.
        """
        return Sequence(self, self.client._native.load_sequence(self.id, text("name", name)))

    def take_sequence(self, id: int) -> Sequence:
        """Takes a published sequence out of the library: it is this client's from now on.

        Raises FullError where it does not fit into the client's limits; it stays published then.
        """
        self.client._native.take_sequence(whole("id", id))
        return Sequence(self, id)


class Sequence:
    """A run of tokens with keys and values in every layer.

    It is freed by `free`, at the end of a `with` block, or when the last reference goes (without a
    wait). Forks share what they have in common.
    """

    __slots__ = ("__weakref__", "_owns", "id", "space")

    def __init__(self, space: Space, id: int, *, owns: bool = True) -> None:
        self.space = space
        self.id = id
        self._owns = owns

    def __repr__(self) -> str:
        return f"<kvm.Sequence {self.id:#x} in {self.space.name!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.free()

    def __del__(self) -> None:
        if getattr(self, "_owns", False):
            self._owns = False
            self.space.client._free_later(self.id)

    def fork(self, n_tokens: int | None = None) -> Sequence:
        """A sequence that shares the first n_tokens (None: all). Costs the same at any length."""
        at = _position(n_tokens)
        return Sequence(self.space, self.space.client._native.fork_sequence(self.id, at))

    def truncate(self, n_tokens: int) -> None:
        """Rolls every layer back to at most n_tokens."""
        self.space.client._native.truncate_sequence(self.id, whole("n_tokens", n_tokens))

    def commit(self, n_tokens: int | None = None) -> None:
        """Makes the first n_tokens (None: all) final: policies may act on them."""
        at = _position(n_tokens)
        self.space.client._native.commit_sequence(self.id, at)

    def free(self) -> None:
        """Frees it; pages that forks share stay with them. A second time does nothing."""
        if self._owns:
            self._owns = False
            if not self.space.client.is_closed:
                self.space.client._native.free_sequence(self.id)

    def publish(self) -> int:
        """Gives it to the library of the user, and returns its id: it outlives the client.

        Clients of the same user may fork it (`Space.fork_published`), attend to it, read it, take
        it (`Space.take_sequence`) and free it; none may change it.
        """
        self.space.client._native.publish_sequence(self.id)
        return self.detach()

    def publish_prefix(self, hashes: PrefixHashes | bytes, *, keep: float | None = None) -> int:
        """Publishes it as `publish` does, so that it is found by the tokens that it begins with
        (`Space.fork_prefix`). It may have more tokens than there are hashes of.

        keep:  it is freed when nobody has forked it for so many seconds; None: it stays.

        Raises InvalidError (EXISTS) where the same prefix is there already, and UnsupportedError
        where heads keep tokens by what queries asked (HEAVY). It stays this client's then.
        """
        _native.publish_prefix(self.space.client._native, self.id, data_of(hashes), keep_ns(keep))
        return self.detach()

    def save(self, name: str, *, replace: bool = False) -> None:
        """Saves what it holds under a name, in the disk tier of kvmd: no crash takes it any more.

        name:     1 to 127 of the characters A-Z a-z 0-9 . _ / -
        replace:  in the place of a snapshot of that name, in one step.

        Requests that follow go on meanwhile. Raises TimeoutError where it takes longer than the
        client's calls may; it goes on then. `Queue.save_async` has no such limit.
        """
        flags = int(SaveFlag.REPLACE) if replace else 0
        self.space.client._native.save_sequence(self.id, text("name", name), flags)

    def prefetch(self) -> None:
        """Begins to bring what lies on disk back into memory, as far as there is room."""
        self.space.client._native.prefetch_sequence(self.id)

    def drop_tokens(self, begin: int = 0, end: int | None = None) -> None:
        """Gives up K and V of its tokens [begin, end): of the full pages of 64 that are final.

        end:  None: all that is final.

        Attends that would see one raise PartialError, until `Item(restore=True)` brings them back:
        leave them out with `Item(ranges=..., exclude_ranges=True)`. Heads with a policy that drops
        tokens go on by that alone.
        """
        self.space.client._native.drop_tokens(self.id, whole("begin", begin),
                                              _position(end, "end"))

    def set_priority(self, priority: int, *, begin: int = 0, end: int | None = None,
                     keep: float | None = None) -> None:
        """Says how much its tokens [begin, end) are worth in memory, from 0 to 100; 50 is what
        those have of which nobody said anything. Where memory fills up, the lowest leave first.

        end:   None: whatever it comes to hold.
        keep:  seconds, after which they are worth 50 again. None: for good.

        Whole pages of 64 tokens have one priority: those that the range touches. A fork has that
        of what it shares.
        """
        self.space.client._native.set_priority(self.id, *_priority(priority, begin, end, keep))

    def detach(self) -> int:
        """Its id; the sequence is no longer freed with this handle, but with the client."""
        self._owns = False
        return self.id

    def info(self) -> SequenceInfo:
        """What it holds."""
        return SequenceInfo(**self.space.client._native.sequence_info(self.id))

    def __len__(self) -> int:
        return self.info().n_tokens_max


class Queue:
    """Takes requests. `step` waits for its result, `start` and the *_async calls give a `Request`.

    Any thread may use it, but calls of several take turns: a queue for each is faster. In an event
    loop `await` the requests; the loop must be that of one thread.
    """

    def __init__(self, client: Client, native: _native.Queue) -> None:
        self.client = client
        self._native = native
        self._watchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watcher] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what was not begun, waits for the rest, and gives the queue back."""
        self._native.close()
        for watcher in [] if self._watchers is None else list(self._watchers.values()):
            watcher.look_soon()

    def fileno(self) -> int:
        """A descriptor that polls readable when something is done; -1: the service has none."""
        return self._native.fd()

    def poll(self) -> None:
        """Takes what is done, without waiting: then `Request.done` tells."""
        self._native.poll()
        if self.client._orphans:
            self.client._sweep()

    def submit(self) -> None:
        """Lets the service see what was started with submit=False. So does whatever waits for a
        request of the queue, and the start of one without submit=False."""
        self._native.submit()

    @property
    def n_outstanding(self) -> int:
        """Requests that are not done, or were not looked at since."""
        return self._native.n_outstanding

    # --- Steps ------------------------------------------------------------------------------------

    def run(self, step: Step) -> StepResult:
        """Runs a prepared step and waits."""
        flight = self._native.run(step._request)
        if self.client._orphans:
            self.client._sweep()
        return StepResult(flight, step.o, step.lse, step.err)

    def start(self, step: Step, *, submit: bool = True) -> Request[StepResult]:
        """Starts a prepared step. submit=False: the service sees it with the next `submit`, wait
        or start."""
        o, lse, err = step.o, step.lse, step.err

        # Keeps the sequences, and not the step, which would keep buffers from being released.
        def finish(flight: _native.Flight, _items: object = step._items) -> StepResult:
            return StepResult(flight, o, lse, err)
        return Request(self, self._native.start(step._request, submit), finish)

    def step(self, space: Space, layer: int, items: Iterable[Item], *, k: Any = None,
             v: Any = None, q: Any = None, o: Any = None, lse: Any = None, err: Any = None,
             layout: Layout = "rows", mode: Mode = Mode.DEFAULT,
             proposal: Proposal = Proposal.DEFAULT, scale: float = 0.0, eps: float = 0.0,
             delta: float = 0.0, budget: int = 0, seed: int = 0, f32_values: bool = False,
             statistics: bool = True, deadline_ns: int = 0) -> StepResult:
        """Appends k and v, attends with q, or both, for the sequences of all items; waits.

        k, v:     [row, kv head, channel]; appends alone also take [layer, row, kv head, channel].
                  No v where the space has values_in_keys.
        q, o:     [row, q head, channel]. o: where the output goes; None: a new array like q.
        lse, err: [row, q head] and [row, q head, 2], float32, True for new ones. None: not wanted.
        layout:   "rows", or "heads" for [item, head, token, channel]: entry i belongs to item i.
        Arrays are of NumPy, PyTorch or whatever speaks DLPack, float32, float16 or bfloat16, with
        any strides as long as channels lie next to each other.

        mode:     how to attend; DEFAULT: as the space says.
        eps, delta, budget, seed, proposal, scale: see kvm_step_params in kvm.h; 0: the default.
        f32_values:  weights times values in float32.
        statistics:  False: the attend leaves no trace with policies (HEAVY).
        deadline_ns: of time.monotonic_ns(); a step that has not begun by then fails.
        """
        try:
            if q is not None and (o is None or lse is True or err is True):
                q, o, lse, err = _outputs(space, layer, q, o, lse, err, layout)
            n_q_heads, n_kv_heads, dim_k, dim_v = space._shape(layer)
            if type(items) is not list:
                items = list(items)  # stay alive, and so do their sequences
            # As Step does; here every microsecond counts.
            flight = self._native.step(
                space.client._native, space.id, layer, n_q_heads, n_kv_heads, dim_k, dim_v,
                [item._native for item in items], k, v, q, o, lse, err,
                layout != "rows" and is_heads(layout),
                step_flags(f32_values, statistics) if f32_values or not statistics else 0,
                mode or 0, proposal or 0, scale, eps, delta, budget, seed, deadline_ns)
        except (AttributeError, TypeError):
            check_step(space, items, layer, budget, seed, deadline_ns, mode, proposal, scale=scale,
                       eps=eps, delta=delta)
            raise
        if self.client._orphans:
            self.client._sweep()
        return StepResult(flight, o, lse, err)

    def step_async(self, space: Space, layer: int, items: Iterable[Item], *, k: Any = None,
                   v: Any = None, q: Any = None, o: Any = None, lse: Any = None, err: Any = None,
                   layout: Layout = "rows", submit: bool = True, **arguments: Any
                   ) -> Request[StepResult]:
        """Starts what `step` waits for. submit: see `start`."""
        if q is not None and (o is None or lse is True or err is True):
            check_space(space)
            q, o, lse, err = _outputs(space, layer, q, o, lse, err, layout)
        return self.start(Step(space, layer, items, k=k, v=v, q=q, o=o, lse=lse, err=err,
                               layout=layout, **arguments), submit=submit)

    # --- Other requests ---------------------------------------------------------------------------

    def read(self, seq: Sequence, layer: int, position: int, n_tokens: int, *, k: Any = None,
             v: Any = None) -> None:
        """Copies stored keys and values out, into [token, kv head, channel]. Waits."""
        self._native.run(self._read(seq, layer, position, n_tokens, k, v))

    def read_async(self, seq: Sequence, layer: int, position: int, n_tokens: int, *, k: Any = None,
                   v: Any = None) -> Request[None]:
        """Starts what `read` waits for."""
        return Request(self, self._native.start(
            self._read(seq, layer, position, n_tokens, k, v), True), _nothing)

    def _read(self, seq: Sequence, layer: int, position: int, n_tokens: int, k: Any, v: Any
              ) -> _native.Request:
        return _native.make_read(self.client._native, seq.id, whole("layer", layer, LAST_32),
                                 *seq.space._shape(layer)[1:], whole("position", position),
                                 whole("n_tokens", n_tokens), k, v)

    def observe(self, seq: Sequence, layer: int, *, q: Any = None, query_position: int = 0,
                column_sums: Any = None, column_begin: int = 0) -> None:
        """Hands over what a prefill saw: queries [row, q head, channel], or attention mass
        [token, kv head] float32 from position column_begin on. Waits."""
        self._native.run(self._observe(seq, layer, q, query_position, column_sums, column_begin))

    def observe_async(self, seq: Sequence, layer: int, *, q: Any = None, query_position: int = 0,
                      column_sums: Any = None, column_begin: int = 0) -> Request[None]:
        """Starts what `observe` waits for."""
        request = self._observe(seq, layer, q, query_position, column_sums, column_begin)
        return Request(self, self._native.start(request, True), _nothing)

    def _observe(self, seq: Sequence, layer: int, q: Any, query_position: int, column_sums: Any,
                 column_begin: int) -> _native.Request:
        return _native.make_observe(self.client._native, seq.id, whole("layer", layer, LAST_32),
                                    *seq.space._shape(layer)[:3],
                                    whole("query_position", query_position),
                                    whole("column_begin", column_begin), q, column_sums)

    def create_sequence_async(self, space: Space, *, reserve: int = 0, manual_commit: bool = False
                              ) -> Request[Sequence]:
        """Starts what `Space.create_sequence` waits for."""
        flags = int(SequenceFlag.MANUAL_COMMIT) if manual_commit else 0
        request = _native.make_verb(self.client._native, _native.Verb.CREATE, space.id, 0, flags,
                                    whole("reserve", reserve))
        return _SequenceRequest(self, self._native.start(request, True), _sequence_in(space))

    def fork_async(self, seq: Sequence, n_tokens: int | None = None) -> Request[Sequence]:
        """Starts what `Sequence.fork` waits for."""
        at = _position(n_tokens)
        request = _native.make_verb(self.client._native, _native.Verb.FORK, seq.id, at, 0, 0)
        return _SequenceRequest(self, self._native.start(request, True), _sequence_in(seq.space))

    def truncate_async(self, seq: Sequence, n_tokens: int) -> Request[None]:
        """Starts what `Sequence.truncate` waits for."""
        return self._verb(_native.Verb.TRUNCATE, seq.id, whole("n_tokens", n_tokens))

    def commit_async(self, seq: Sequence, n_tokens: int | None = None) -> Request[None]:
        """Starts what `Sequence.commit` waits for."""
        at = _position(n_tokens)
        return self._verb(_native.Verb.COMMIT, seq.id, at)

    def free_async(self, seq: Sequence) -> Request[None]:
        """Starts what `Sequence.free` waits for."""
        return self._verb(_native.Verb.FREE, seq.detach())

    def publish_async(self, seq: Sequence) -> Request[None]:
        """Starts what `Sequence.publish` waits for."""
        return self._verb(_native.Verb.PUBLISH, seq.detach())

    def publish_prefix_async(self, seq: Sequence, hashes: PrefixHashes | bytes, *,
                             keep: float | None = None) -> Request[int]:
        """Starts what `Sequence.publish_prefix` waits for. Where it fails, `seq` owns its sequence
        again."""
        request = _native.make_prefix_verb(self.client._native, seq.id, data_of(hashes),
                                           keep_ns(keep))
        flight = self._native.start(request, True)
        return _PublishRequest(self, flight, seq)

    def take_sequence_async(self, id: int) -> Request[None]:
        """Starts what `Space.take_sequence` waits for; `Sequence(space, id)` then owns it."""
        return self._verb(_native.Verb.TAKE, whole("id", id))

    def prefetch_async(self, seq: Sequence) -> Request[None]:
        """Starts what `Sequence.prefetch` does."""
        return self._verb(_native.Verb.PREFETCH, seq.id)

    def drop_tokens_async(self, seq: Sequence, begin: int = 0, end: int | None = None
                          ) -> Request[None]:
        """Starts what `Sequence.drop_tokens` does."""
        request = _native.make_drop_verb(self.client._native, seq.id, whole("begin", begin),
                                         _position(end, "end"))
        return Request(self, self._native.start(request, True), _nothing)

    def set_priority_async(self, seq: Sequence, priority: int, *, begin: int = 0,
                           end: int | None = None, keep: float | None = None) -> Request[None]:
        """Starts what `Sequence.set_priority` does."""
        request = _native.make_priority_verb(self.client._native, seq.id,
                                             *_priority(priority, begin, end, keep))
        return Request(self, self._native.start(request, True), _nothing)

    def save_async(self, seq: Sequence, name: str, *, replace: bool = False) -> Request[None]:
        """Starts what `Sequence.save` waits for."""
        flags = int(SaveFlag.REPLACE) if replace else 0
        request = _native.make_snapshot_verb(self.client._native, _native.Verb.SAVE, seq.id,
                                             text("name", name), flags)
        return Request(self, self._native.start(request, True), _nothing)

    def load_async(self, space: Space, name: str) -> Request[Sequence]:
        """Starts what `Space.load` waits for."""
        request = _native.make_snapshot_verb(self.client._native, _native.Verb.LOAD, space.id,
                                             text("name", name), 0)
        return _SequenceRequest(self, self._native.start(request, True), _sequence_in(space))

    def delete_snapshot_async(self, name: str) -> Request[None]:
        """Starts what `Client.delete_snapshot` waits for."""
        request = _native.make_snapshot_verb(self.client._native, _native.Verb.DELETE_SNAPSHOT, 0,
                                             text("name", name), 0)
        return Request(self, self._native.start(request, True), _nothing)

    def nop_async(self) -> Request[None]:
        """Does nothing, and completes."""
        return self._verb(_native.Verb.NOP, 0)

    def _verb(self, verb: _native.Verb, id: int, n_tokens: int = 0) -> Request[None]:
        request = _native.make_verb(self.client._native, verb, id, n_tokens, 0, 0)
        return Request(self, self._native.start(request, True), _nothing)

    # --- Event loops ------------------------------------------------------------------------------

    async def _watch(self, flight: _native.Flight) -> None:
        """Returns when the request is done."""
        if flight.is_done:
            return
        self._native.submit()
        loop = asyncio.get_running_loop()
        fd = self.fileno()
        if fd < 0:
            await loop.run_in_executor(None, self._native.wait, flight, 2**64 - 1)
            return
        if self._watchers is None:
            self._watchers = weakref.WeakKeyDictionary()
        watcher = self._watchers.get(loop)
        if watcher is None:
            watcher = self._watchers[loop] = _Watcher(self._native, loop)
        await watcher.wait(flight, fd)


class _Watcher:
    """What lets the tasks of one event loop wait for requests of one queue."""

    # Another thread, or another loop, may take the completion: then nothing makes this loop look.
    LOOK_AGAIN = 0.1

    def __init__(self, queue: _native.Queue, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = queue
        self._loop = weakref.ref(loop)
        self._futures: dict[_native.Flight, list[asyncio.Future[None]]] = {}
        self._fd = -1
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, flight: _native.Flight, fd: int) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if not self._futures:
            # Its own descriptor: that of the queue may be closed, and its number used again.
            self._fd = os.dup(fd)
            loop.add_reader(self._fd, self._look)
            self._timer = loop.call_later(self.LOOK_AGAIN, self._look_again)
        self._futures.setdefault(flight, []).append(future)
        try:
            if len(self._futures) == 1:
                self._look()
            await future
        finally:
            waiting = self._futures[flight]
            waiting.remove(future)
            if not waiting:
                del self._futures[flight]
            if not self._futures:
                loop.remove_reader(self._fd)
                os.close(self._fd)
                if self._timer is not None:
                    self._timer.cancel()

    def look_soon(self) -> None:
        """From any thread."""
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._look)

    def _look_again(self) -> None:
        loop = self._loop()
        if self._futures and loop is not None:
            self._timer = loop.call_later(self.LOOK_AGAIN, self._look_again)
            self._look()

    def _look(self) -> None:
        self._queue.poll()
        for flight, futures in self._futures.items():
            if flight.is_done:
                for future in futures:
                    if not future.done():
                        future.set_result(None)


class _SequenceRequest(Request[Sequence]):
    """A request that makes a sequence: it is freed where nobody asks for it."""

    __slots__ = ()

    def __del__(self) -> None:
        if not getattr(self, "_values", True):
            self._queue.client._abandon(self._queue._native, self._flight)

    def _drop(self, value: Sequence) -> None:
        value.detach()


class _PublishRequest(Request[int]):
    """A request that publishes a sequence: its handle owns it again where it was not published."""

    __slots__ = ("_given",)

    def __init__(self, queue: Queue, flight: _native.Flight, seq: Sequence) -> None:
        self._given = seq if seq._owns else None
        id = seq.detach()
        super().__init__(queue, flight, lambda _: id)

    def wait(self, timeout: float | None = None) -> bool:
        is_done = super().wait(timeout)
        given = self._given
        if is_done and given is not None:
            self._given = None
            if self._flight.status != Status.OK:
                given._owns = True
        return is_done

    def __del__(self) -> None:
        given = getattr(self, "_given", None)
        if given is not None:
            self._queue.client._abandon(self._queue._native, self._flight, given)


def _nothing(flight: _native.Flight) -> None:
    return None


def _position(at: int | None, name: str = "n_tokens") -> int:
    """As kvm.h has it; None: the end."""
    return POSITION_END if at is None else whole(name, at)


def _priority(priority: int, begin: int, end: int | None, keep: float | None
              ) -> tuple[int, int, int, int]:
    """The fields of kvm_priority_params."""
    return (whole("priority", priority, PRIORITY_MAX), whole("begin", begin),
            _position(end, "end"), keep_ns(keep))


def _sequence_in(space: Space) -> Callable[[_native.Flight], Sequence]:
    return lambda flight: Sequence(space, flight.seq)


def _token_order(array: Any) -> tuple[bool, bool]:
    """Of [item, head, token, channel]: whether it lies as a contiguous [item, token, head, channel]
    that was transposed; and whether items are so far apart as in neither that nor the packed order.
    """
    strides = array.stride() if callable(getattr(array, "stride", None)) else array.strides
    _, n_heads, n_tokens, _ = array.shape
    per_item = strides[0] / strides[2] if strides[2] else 0
    tokens_first = n_heads > 1 and per_item == n_tokens
    return tokens_first, not tokens_first and per_item != n_heads * n_tokens


# What makes arrays of a type, by (shape, dtype): those that were seen, so that none is imported.
_makers: dict[type, Callable[..., Any]] = {}


def _outputs(space: Space, layer: int, q: Any, o: Any, lse: Any, err: Any, layout: Layout
             ) -> tuple[Any, Any, Any, Any]:
    """q and the outputs of a step, with new arrays for those that are asked for and not given."""
    dim_v = space._shape(layer)[3]
    maker = _makers.get(type(q))
    if maker is not None and layout == "rows" and lse is not True and err is not True:
        return q, maker((*q.shape[:-1], dim_v), dtype=q.dtype), lse, err
    shape = tuple(getattr(q, "shape", ()))
    tokens_first = False
    if layout == "heads" and len(shape) == 4 and shape[0] > 1 and shape[2] > 1:
        tokens_first, is_other = _token_order(q if o is None else o)
        if is_other:  # rows of new arrays could not be counted as q's
            q = q.contiguous() if hasattr(q, "contiguous") else q.copy()
    if o is None:
        o = _new_like(q, (*shape[:-1], dim_v), None, tokens_first)
    if lse is True:
        lse = _new_like(q, shape[:-1], "float32", tokens_first)
    if err is True:
        err = _new_like(q, (*shape[:-1], 2), "float32", tokens_first)
    return q, o, lse, err


def _new_like(array: Any, shape: tuple[int, ...], dtype: str | None,
              tokens_first: bool = False) -> Any:
    """A new array of the framework of `array`; tokens_first: in the order of `_token_order`."""
    if tokens_first:
        turned = (shape[0], shape[2], shape[1], *shape[3:])
        return _new_like(array, turned, dtype).swapaxes(1, 2)
    if type(array).__module__.partition(".")[0] == "torch" or hasattr(array, "requires_grad"):
        import torch
        _makers[torch.Tensor] = torch.empty
        return torch.empty(shape, dtype=getattr(torch, dtype) if dtype else array.dtype)
    import numpy
    if isinstance(array, numpy.ndarray):
        _makers[numpy.ndarray] = numpy.empty
        return numpy.empty(shape, dtype=dtype or array.dtype)
    raise TypeError(f"q is of {type(array)}; pass the outputs too, or use NumPy or PyTorch")


def merge(states: Iterable[tuple[Any, Any]], *, out: Any = None, out_lse: Any = None
          ) -> tuple[Any, Any]:
    """Merges attention states (o [row, head, channel], lse [row, head]) over disjoint keys.

    Returns o and lse of all keys together, in `out` and `out_lse` where these are given.
    """
    pairs = list(states)
    if not pairs:
        raise ValueError("there are no states to merge")
    outputs, sums = [o for o, _ in pairs], [lse for _, lse in pairs]
    shape = tuple(outputs[0].shape)
    if len(shape) != 3:
        raise ValueError(f"o has the shape {shape}; it must be [row, head, channel]")
    out = _new_like(outputs[0], shape, None) if out is None else out
    out_lse = _new_like(outputs[0], shape[:2], "float32") if out_lse is None else out_lse
    _native.merge(outputs, sums, out, out_lse, shape[1], shape[2])
    return out, out_lse


def probe_heads(q: Any, k: Any, *, period: int, n_prefix: int = 0, n_rows: int = 0,
                scale: float = 0.0) -> tuple[list[float], list[float]]:
    """Finds the heads of a layer that look back (kvm_probe_heads).

    The prompt repeats itself every `period` tokens behind `n_prefix` ones. q: [token, q head,
    channel], k: [token, kv head, channel], rotated. Returns the ECHO and the INDUCTION score of
    each kv head, 0 to 1.
    """
    if len(q.shape) != 3 or len(k.shape) != 3:
        raise ValueError("q and k must be [token, head, channel]")
    echo, induction = _native.probe_heads(q, k, q.shape[1], k.shape[1], q.shape[2], n_prefix,
                                          period, n_rows, scale)
    return echo, induction
