# SPDX-License-Identifier: Apache-2.0
"""Failures of kvm as exceptions, and arguments that are refused before anything is called."""

import enum
import operator
from typing import Any

from ._constants import Status


class Error(Exception):
    """A call failed. `status` is what kvm.h calls it, `message` the sentence that says why."""

    status: Status
    message: str

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(f"{message} ({status.name})" if message else status.name)
        self.status = status
        self.message = message


class InvalidError(Error, ValueError):
    """INVALID, EXISTS, HOLE: a parameter is out of its range, or contradicts what is there."""


class NotFoundError(Error, LookupError):
    """NOT_FOUND, STALE, LOST: no object has this id or name, or it is gone."""


class PartialError(Error):
    """PARTIAL: a policy has dropped tokens that the call needs."""


class FullError(Error, MemoryError):
    """NO_MEMORY, NO_SPACE, QUOTA, LIMIT: there is no room for it."""


class DisconnectedError(Error, ConnectionError):
    """DISCONNECTED, PROTOCOL, VERSION: there is no connection to work with."""


class WaitTimeoutError(Error, TimeoutError):
    """TIMEOUT, DEADLINE: the time given has passed."""


class RefusedError(Error, PermissionError):
    """PERMISSION, FORKED: the object belongs to somebody else."""


class UnsupportedError(Error, NotImplementedError):
    """UNSUPPORTED, DEVICE: this service does not offer it."""


class CancelledError(Error):
    """CANCELLED: the request was cancelled before it began."""


_CLASSES: dict[Status, type[Error]] = {
    Status.INVALID: InvalidError,
    Status.EXISTS: InvalidError,
    Status.HOLE: InvalidError,
    Status.NOT_FOUND: NotFoundError,
    Status.STALE: NotFoundError,
    Status.LOST: NotFoundError,
    Status.PARTIAL: PartialError,
    Status.NO_MEMORY: FullError,
    Status.NO_SPACE: FullError,
    Status.QUOTA: FullError,
    Status.LIMIT: FullError,
    Status.DISCONNECTED: DisconnectedError,
    Status.PROTOCOL: DisconnectedError,
    Status.VERSION: DisconnectedError,
    Status.TIMEOUT: WaitTimeoutError,
    Status.DEADLINE: WaitTimeoutError,
    Status.PERMISSION: RefusedError,
    Status.FORKED: RefusedError,
    Status.UNSUPPORTED: UnsupportedError,
    Status.DEVICE: UnsupportedError,
    Status.CANCELLED: CancelledError,
}


def error_of(status: int, message: str) -> Error:
    """The exception for what a call of kvm.h has answered."""
    try:
        known = Status(status)
    except ValueError:  # of a newer service
        known, message = Status.INTERNAL, f"{message} (status {status})"
    return _CLASSES.get(known, Error)(known, message)


# --- Arguments ------------------------------------------------------------------------------------
# What is not checked here is refused by the module `_native`, by a list of types.


LAST_32 = 2**32 - 1
LAST_64 = 2**64 - 1


def whole(name: str, number: Any, last: int = LAST_64) -> int:
    """The number, where it is a whole one from 0 to `last`."""
    try:
        index = operator.index(number)
    except TypeError:
        raise TypeError(f"{name} is {number!r}; it must be a whole number") from None
    if not 0 <= index <= last:
        end = f"2**{last.bit_length()} - 1" if last in (LAST_32, LAST_64) else last
        raise InvalidError(Status.INVALID, f"{name} is {number}; it must be a whole number from 0 "
                           f"to {end}")
    return index


def check_wholes(last: int, **numbers: Any) -> None:
    """Says which of the numbers does not fit; None fits."""
    for name, number in numbers.items():
        if number is not None:
            whole(name, number, last)


def check_reals(**numbers: Any) -> None:
    """The same for numbers that need not be whole."""
    for name, number in numbers.items():
        if isinstance(number, str) or not hasattr(number, "__float__"):
            raise TypeError(f"{name} is {number!r}; it must be a number")


def check_names(kind: type[enum.IntEnum], **values: Any) -> None:
    """The same for members of an enum."""
    for name, value in values.items():
        if not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; it must be a kvm.{kind.__name__}, such as "
                            f"kvm.{kind.__name__}.{list(kind)[-1].name}")


def text(name: str, value: Any) -> str:
    """The value, where it is a string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a str")
    return value
