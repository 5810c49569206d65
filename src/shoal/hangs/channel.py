"""The side channel: a socket per rank that answers whatever the rank itself is stuck in.

A question and its answer are a line of JSON each, and every question bears the world's token.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_LONGEST_QUESTION = 1 << 20
_PATIENCE = 5.0
"""Seconds that whoever connects has for asking."""
_REACH_SECONDS = 1.5
"""Seconds in which a machine must have answered; its kernel does, whatever its processes are doing."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Where a rank answers, and which process it is."""

    host: str
    pid: int
    born: float
    address: str
    port: int


class UnreachableError(OSError):
    """Nothing comes back from a machine: not the process is silent, but the network."""


async def answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    token: str,
    reply: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Answer one question; whoever lacks the token gets nothing."""
    with suppress(OSError, TimeoutError, ValueError, KeyError):
        line = await asyncio.wait_for(reader.readline(), _PATIENCE)
        question = json.loads(line)
        if hmac.compare_digest(str(question["token"]).encode(), token.encode()):
            writer.write(json.dumps(reply(question)).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), _PATIENCE)
    writer.close()


async def ask(peer: Peer, question: dict[str, Any]) -> dict[str, Any]:
    """The answer of a rank. Raises ConnectionError where nobody listens any more, or OSError."""
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
        writer.write(json.dumps(question).encode() + b"\n")
        await writer.drain()
        answered = await reader.read()
    finally:
        writer.close()
    if not answered:
        raise ConnectionResetError(f"{peer.host} hung up")
    found: dict[str, Any] = json.loads(answered)
    return found
