"""Detection of errors that look like another rank's death, from the messages of the libraries."""

from __future__ import annotations

import re
from contextlib import suppress

# The errors of ranks whose peer has died (Gloo, NCCL, TCPStore), and of ranks to which it sent
# its own error.
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
"""The fix if a rank leaves while others still need it."""


def is_by_peer(error: BaseException) -> bool:
    """Return whether an error, or its cause, looks like the result of another rank's death."""
    seen: BaseException | None = error
    passed: set[int] = set()
    # `raise error from error` is its own cause.
    while seen is not None and id(seen) not in passed:
        passed.add(id(seen))
        with suppress(Exception):  # `str(error)` itself may raise
            if _BY_PEER.search(str(seen)):
                return True
        seen = seen.__context__ if seen.__cause__ is None else seen.__cause__
    return False
