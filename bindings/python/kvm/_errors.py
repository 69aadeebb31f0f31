# SPDX-License-Identifier: Apache-2.0
"""Failures of kvm as exceptions."""

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
