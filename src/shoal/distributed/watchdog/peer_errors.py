"""Errors that read as the death of another rank, in the words of the libraries that raise them."""

from __future__ import annotations

import re
from contextlib import suppress

# How the death of a peer looks from the ranks that were talking to it (Gloo, NCCL, TCPStore), and
# an error of its own that it told them of.
_BY_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|remote process exited"
    r"|communicator was aborted|failed to recv|peer closed"
    r"|see that rank's own error",
    re.IGNORECASE,
)

SAME_STEPS = (
    "let all ranks take the same number of steps: no sys.exit, os._exit, break or return that only "
    "some of them reach"
)
"""What to do where a rank leaves while others still need it."""


def is_by_peer(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, reads as caused by another rank's death."""
    seen: BaseException | None = error
    passed: set[int] = set()
    # `raise error from error` is its own cause.
    while seen is not None and id(seen) not in passed:
        passed.add(id(seen))
        with suppress(Exception):  # a message may be what is broken
            if _BY_PEER.search(str(seen)):
                return True
        seen = seen.__context__ if seen.__cause__ is None else seen.__cause__
    return False
