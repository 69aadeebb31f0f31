# SPDX-License-Identifier: Apache-2.0
"""What a queue is asked for: items, steps, and requests on their way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Sequence as Series
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from . import _native
from ._constants import ItemFlag, Mode, Proposal, Status, StepFlag
from ._errors import LAST_32, LAST_64, check_names, check_reals, check_wholes

if TYPE_CHECKING:
    from ._objects import Queue, Sequence, Space

T = TypeVar("T")
Layout = Literal["rows", "heads"]


class Item:
    """One sequence's share of a step: `append` tokens appended, `query` rows attended.

    Positions that are not given are the end: tokens are appended behind what is there, and the
    query rows are the last `query` tokens after that. Rows that are not given follow those of
    the item before (layout "rows"), or begin the item's entry (layout "heads").

    ranges:   positions [(begin, end), ...], sorted and disjoint, that alone are seen; with
              `exclude_ranges` those that are not seen.
    causal:   whether a row sees positions up to its own only.
    tree:     a word for each query row; bit i says that it sees the token of row i.
    last_layer: the tokens reach no layer beyond the step's, and are final: for models that skip
              layers.
    prompt_end: the prompt ends with these tokens: policies that wait for it act.
    restore:  the tokens are those at `append_position` that `Sequence.drop_tokens` has dropped:
              whole pages of 64.
    It keeps the sequence alive.
    """

    __slots__ = ("_native", "_seq")

    def __init__(self, seq: Sequence | int, append: int = 0, query: int = 0, *,
                 append_position: int | None = None, query_position: int | None = None,
                 append_row: int | None = None, query_row: int | None = None,
                 ranges: Series[tuple[int, int]] | None = None, exclude_ranges: bool = False,
                 causal: bool = True, tree: Series[int] | None = None,
                 last_layer: bool = False, prompt_end: bool = False,
                 restore: bool = False) -> None:
        flags = 0 if causal else int(ItemFlag.NOT_CAUSAL)
        if last_layer:
            flags |= int(ItemFlag.LAST_LAYER)
        if prompt_end:
            flags |= int(ItemFlag.PROMPT_END)
        if restore:
            flags |= int(ItemFlag.RESTORE)
        if exclude_ranges:
            flags |= int(ItemFlag.EXCLUDE_RANGES)
        self._seq = seq
        try:
            self._native = _native.Item(
                seq if isinstance(seq, int) else seq.id, append, query, append_position,
                query_position, append_row, query_row,
                None if ranges is None else list(ranges), None if tree is None else list(tree),
                flags)
        except (AttributeError, TypeError):
            if not isinstance(seq, int) and not hasattr(seq, "id"):
                raise TypeError(f"seq is {seq!r}; it must be a kvm.Sequence, or the id of one") \
                    from None
            check_wholes(LAST_32, append=append, query=query, append_row=append_row,
                         query_row=query_row)
            check_wholes(LAST_64, append_position=append_position, query_position=query_position)
            for begin, end in ranges or ():
                check_wholes(LAST_64, ranges=begin)
                check_wholes(LAST_64, ranges=end)
            for word in tree or ():
                check_wholes(LAST_64, tree=word)
            raise


def check_space(space: Any) -> None:
    """Says where it is none."""
    if not hasattr(space, "_shape"):
        raise TypeError(f"space is {space!r}; it must be a kvm.Space, which Client.register_space "
                        "gives") from None


def check_step(space: Any, items: Any, layer: int, budget: int, seed: int, deadline_ns: int,
               mode: Mode, proposal: Proposal, **numbers: Any) -> None:
    """Says what of a step that was refused does not fit: all of it but its arrays."""
    check_space(space)
    if not isinstance(items, Iterable):
        raise TypeError(f"items is of the type {type(items).__name__}; it must be a list of "
                        "kvm.Item") from None
    for item in items:
        if not isinstance(item, Item):
            raise TypeError(f"items has {item!r}; it must have a kvm.Item for each sequence, such "
                            "as kvm.Item(seq, append=1)") from None
    check_wholes(LAST_32, layer=layer)
    check_wholes(LAST_64, budget=budget, seed=seed, deadline_ns=deadline_ns)
    check_names(Mode, mode=mode)
    check_names(Proposal, proposal=proposal)
    check_reals(**numbers)


def is_heads(layout: Layout) -> bool:
    """Whether the layout is "heads". Raises ValueError: it is none."""
    if layout not in ("rows", "heads"):
        raise ValueError(f"layout is {layout!r}; it must be 'rows' or 'heads'")
    return layout == "heads"


def step_flags(f32_values: bool, statistics: bool) -> int:
    """The flags of kvm_step_params."""
    flags = int(StepFlag.F32_VALUES) if f32_values else 0
    return flags if statistics else flags | StepFlag.NO_STATISTICS


@dataclasses.dataclass(frozen=True, slots=True)
class StepStats:
    """What a step did. Fields as in kvm_step_stats (include/kvm.h)."""

    mode: Mode
    keys_present: int
    keys_read: int
    bytes_read: int
    service_ns: int
    compute_ns: int
    err_max: float
    n_exact: int
    n_not_finite: int


class StepResult:
    """The outputs of a step, and what it did.

    o: [row, q head, channel]. lse: [row, q head], natural logarithm. err: [row, q head, 2], the
    relative error of o and the absolute one of lse. (In the layout "heads" as q is.) None where the
    step had no such output.
    """

    __slots__ = ("_flight", "err", "lse", "o")

    def __init__(self, flight: _native.Flight, o: Any, lse: Any, err: Any) -> None:
        self._flight = flight
        self.o = o
        self.lse = lse
        self.err = err

    @property
    def stats(self) -> StepStats:
        """Counts of what the step read."""
        f = self._flight
        return StepStats(Mode(f.mode), f.keys_present, f.keys_read, f.bytes_read, f.service_ns,
                         f.compute_ns, f.err_max, f.n_exact, f.n_not_finite)


class Step:
    """A step whose arrays and items are read once, to be run as often as wanted.

    A loop that decodes into the same arrays makes one for each layer, and saves what looking at
    arrays costs. See `Queue.step` for the parameters; outputs must be given. Immutable; it keeps
    its arrays and sequences alive.
    """

    __slots__ = ("_items", "_request", "err", "lse", "o", "space")

    def __init__(self, space: Space, layer: int, items: Iterable[Item], *, k: Any = None,
                 v: Any = None, q: Any = None, o: Any = None, lse: Any = None, err: Any = None,
                 layout: Layout = "rows", mode: Mode = Mode.DEFAULT,
                 proposal: Proposal = Proposal.DEFAULT, scale: float = 0.0, eps: float = 0.0,
                 delta: float = 0.0, budget: int = 0, seed: int = 0, f32_values: bool = False,
                 statistics: bool = True, deadline_ns: int = 0) -> None:
        try:
            self._items = tuple(items)
            n_q_heads, n_kv_heads, dim_k, dim_v = space._shape(layer)
            self._request = _native.make_step(
                space.client._native, space.id, layer, n_q_heads, n_kv_heads, dim_k, dim_v,
                [item._native for item in self._items], k, v, q, o, lse, err, is_heads(layout),
                step_flags(f32_values, statistics), mode, proposal, scale, eps, delta, budget, seed,
                deadline_ns)
        except (AttributeError, TypeError):
            check_step(space, getattr(self, "_items", items), layer, budget, seed, deadline_ns,
                       mode, proposal, scale=scale, eps=eps, delta=delta)
            raise
        self.space = space
        self.o = o
        self.lse = lse
        self.err = err


class Request(Generic[T]):
    """A request on its way. `result()` waits for it, `await` does so in an event loop.

    Its arrays stay alive, and must not be changed, until it is done. Nor can bytearrays,
    memoryviews and their like be released or resized until then (BufferError); that NumPy's and
    PyTorch's arrays are not (`resize_`, refcheck=False) is up to whoever has them.
    """

    __slots__ = ("_flight", "_finish", "_queue", "_values")

    def __init__(self, queue: Queue, flight: _native.Flight,
                 finish: Callable[[_native.Flight], T]) -> None:
        self._queue = queue
        self._flight = flight
        self._finish = finish
        self._values: dict[int, T] = {}  # at most one

    def done(self) -> bool:
        """Whether it has ended, well or not. Looks at nothing: see `Queue.poll`."""
        return self._flight.is_done

    def cancel(self) -> None:
        """Asks that it not be started; one that has begun runs to its end."""
        self._queue._native.cancel(self._flight)

    def status(self) -> Status | None:
        """What became of it; None as long as it is not done."""
        return Status(self._flight.status) if self._flight.is_done else None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is done, or `timeout` seconds have passed: False. What was started with
        submit=False is submitted first."""
        is_done = self._queue._native.wait(self._flight, _timeout_ns(timeout))
        if self._queue.client._orphans:
            self._queue.client._sweep()
        return is_done

    def result(self, timeout: float | None = None) -> T:
        """Waits, and returns what the request gives, or raises its error.

        Raises TimeoutError after `timeout` seconds; the request goes on.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the request was not done within {timeout} s")
        self._flight.check()
        if not self._values:
            value = self._finish(self._flight)
            if self._values.setdefault(0, value) is not value:
                self._drop(value)  # another thread was faster
        return self._values[0]

    def _drop(self, value: T) -> None:
        """Lets go of a second value of the request."""

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait_in_loop().__await__()

    async def _wait_in_loop(self) -> T:
        await self._queue._watch(self._flight)
        return self.result()


def _timeout_ns(timeout: float | None) -> int:
    if timeout is None:
        return 2**64 - 1
    if not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout is {timeout!r}; it must be a number of seconds, or None")
    return min(int(timeout * 1e9), 2**64 - 2)
