"""The side channel: a socket per rank that answers while the rank itself is stuck.

A question and its answer are one line of JSON each; the world's token comes before every question.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LONGEST = 1 << 20
"""Largest size of a question in bytes."""
_PATIENCE = 5.0
"""Seconds within which a connection must have asked."""
_MOST_WAITING = 64
"""Largest number of connections that have not asked yet; a rank asks when it connects."""
_REACH_SECONDS = 1.5
"""Seconds within which a machine must reply; its kernel does, independent of its processes."""


@dataclass(frozen=True, kw_only=True)
class PeerAddress:
    """The address of a rank's side channel, and its process."""

    host: str
    pid: int
    born: float
    address: str
    port: int


class UnreachableError(OSError):
    """A machine does not reply: the network is at fault, not a silent process."""


class SideChannelServer:
    """Answers questions that carry the token, and closes all other connections without an answer.

    Other users of the machine may reach the port. No byte before the right token is parsed, and the
    resources are bounded: a connection has `_PATIENCE` seconds to ask, and if more than `_MOST_WAITING`
    have not asked yet, the oldest of these is closed.
    """

    def __init__(self, token: str, reply: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._token = token.encode()
        self._reply = reply
        self._waiting: dict[asyncio.StreamWriter, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one question, in a task.

        asyncio would report the cancellation of a task that it creates itself, at length.
        """
        task = asyncio.create_task(self._answer(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._waiting) >= _MOST_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()
        self._waiting[writer] = None
        try:
            question = await self._hear(reader)
            self._waiting.pop(writer, None)
            if question is not None:
                writer.write(json.dumps(self._reply(question)).encode() + b"\n")
                await asyncio.wait_for(writer.drain(), _PATIENCE)
        except (OSError, TimeoutError):  # the caller has ended, or does not read
            pass
        finally:
            self._waiting.pop(writer, None)
            writer.close()

    def close(self) -> None:
        """Close the connections that have not asked yet."""
        for writer in self._waiting:
            writer.transport.abort()

    async def _hear(self, reader: asyncio.StreamReader) -> dict[str, Any] | None:
        """Return the question; None if the connection does not send the token."""
        try:
            token = await asyncio.wait_for(reader.readexactly(len(self._token)), _PATIENCE)
            if not hmac.compare_digest(token, self._token):
                return None
            line = await asyncio.wait_for(reader.readline(), _PATIENCE)
            question: dict[str, Any] = json.loads(line)
        except (OSError, EOFError, TimeoutError, ValueError, RecursionError):
            return None
        return question


async def ask(peer: PeerAddress, token: str, question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a rank. Raises ConnectionError if no process listens, or OSError."""
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(peer.address, peer.port), _REACH_SECONDS
        )
    except TimeoutError:
        raise UnreachableError(f"{peer.host} does not answer") from None
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN):
            raise UnreachableError(str(error)) from None
        raise
    try:
        writer.write(token.encode() + json.dumps(question).encode() + b"\n")
        await writer.drain()
        answered = await reader.read()
    finally:
        writer.close()
    if not answered:
        raise ConnectionResetError(f"{peer.host} closed the connection")
    found: dict[str, Any] = json.loads(answered)
    return found
