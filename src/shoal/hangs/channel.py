"""The side channel: a socket per rank that answers whatever the rank itself is stuck in.

A question and its answer are a line of JSON each, and every question bears the world's token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shoal.meeting import own_addresses

_CALLERS = 1024
_LONGEST_QUESTION = 1 << 20
_PATIENCE = 5.0
"""Seconds that whoever connects has for asking."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Where a rank answers, and which process it is."""

    host: str
    pid: int
    born: float
    addresses: tuple[str, ...]
    port: int


def listen(*, one_machine: bool) -> tuple[socket.socket, tuple[str, ...]]:
    """A socket at a free port, and the addresses at which others reach it.

    Where all ranks are on one machine nobody else can connect.
    """
    if one_machine:
        return socket.create_server(("127.0.0.1", 0), backlog=_CALLERS), ("127.0.0.1",)
    addresses = tuple(own_addresses())
    if socket.has_dualstack_ipv6():
        everywhere = socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=_CALLERS, dualstack_ipv6=True
        )
        return everywhere, addresses
    return socket.create_server(("", 0), backlog=_CALLERS), addresses


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
    failure: OSError = ConnectionError(f"{peer.host} published no address")
    for address in peer.addresses:
        try:
            reader, writer = await asyncio.open_connection(address, peer.port)
        except OSError as error:
            failure = error
            continue
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
    raise failure
