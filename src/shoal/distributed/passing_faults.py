"""Faults that may pass, such as those of a file server that is away, known by their exceptions.

Only the structure of an exception counts, not its text: the number of an error of the system, the
status of an HTTP response where clients of object stores keep it, or else the name of its class. No
client is imported.
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

RENDEZVOUS = "a rendezvous time-out"
"""The cause if ranks have waited for others that did not join."""

_PASSING = {
    **{
        number: errno.errorcode[number]
        for number in (
            *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.EBUSY, errno.EAGAIN),
            *(errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE),
            *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        )
    },
    socket.EAI_AGAIN: "EAI_AGAIN",
}
_OF_OUTPUT = (errno.EPIPE, errno.EIO)
"""Errors of a write to a pipe without a reader, or to a terminal that has hung up."""
_PASSING_STATUS = (408, 429, *range(500, 600))
"""Statuses of HTTP: a time-out, too many requests, and errors of the server."""
_CUT_OFF = (
    *("IncompleteRead", "IncompleteReadError"),  # the standard library, urllib3, botocore
    *("RemoteProtocolError", "ServerDisconnectedError", "ClientPayloadError"),  # httpx, aiohttp
    "ResponseError",  # urllib3, whose retries after such statuses are used up
)
"""Names of the errors of HTTP clients whose server ended the connection, which have no number."""

_CAUSE = "_shoal_passing"
"""The attribute of an exception for a cause that its structure does not have."""

_Error = TypeVar("_Error", bound=BaseException)


def note_cause(error: _Error, cause: str) -> _Error:
    """Keep in an exception that `cause` may pass, or with "" that it lasts; return the exception."""
    setattr(error, _CAUSE, cause)
    return error


def passing_cause(error: BaseException) -> str:
    """Return the fault that ended in this error and may pass, such as EIO; empty for others.

    Of an error with causes, the last one that is a fault of a system or a server counts: a file that is
    missing on the server that answers again will still be missing later.
    """
    return next((found for each in chain(error) if (found := _judge(each)) is not None), "")


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause or else the one that was handled or that it holds, and so on."""
    seen: BaseException | None = error
    passed: set[int] = set()
    # `raise error from error` is its own cause.
    while seen is not None and id(seen) not in passed:
        passed.add(id(seen))
        yield seen
        below = (seen.__cause__, seen.__context__, *seen.args)
        seen = next((each for each in below if isinstance(each, BaseException)), None)


def _judge(error: BaseException) -> str | None:
    """Return the cause if this one may pass, "" if it lasts; None if that depends on its cause."""
    noted: str | None = getattr(error, _CAUSE, None)
    if noted is not None:
        return noted
    if isinstance(error, BaseExceptionGroup):
        causes = [passing_cause(each) for each in error.exceptions]
        return causes[0] if all(causes) else ""
    status = _status(error) if isinstance(error, Exception) else None
    if status is not None:
        return f"HTTP {status}" if status in _PASSING_STATUS else ""
    if isinstance(error, OSError) and isinstance(error.errno, int):
        return "" if error.errno in _OF_OUTPUT and _output_ended() else _PASSING.get(error.errno, "")
    if isinstance(error, TimeoutError | ConnectionError):
        return type(error).__name__
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _CUT_OFF), None)


def _output_ended() -> bool:
    """Return whether stdout or stderr, which the next attempt inherits, has lost its reader."""
    outputs = select.poll()
    for file in (1, 2):
        outputs.register(file, 0)
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in outputs.poll(0))


def _status(error: BaseException) -> int | None:
    """Return the status of the HTTP response that an exception reports, if any."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        metadata = response.get("ResponseMetadata")
        found = [metadata.get("HTTPStatusCode")] if isinstance(metadata, Mapping) else []
    else:
        found = [_read(each, name) for each in (response, error) for name in _STATUS_NAMES]
    return next((each for each in found if type(each) is not bool and _is_status(each)), None)


_STATUS_NAMES = ("status_code", "status", "code")


def _read(holder: Any, name: str) -> Any:
    with suppress(Exception):  # a property may raise
        return getattr(holder, name, None)
    return None


def _is_status(value: Any) -> bool:
    return isinstance(value, int) and 100 <= value < 600
