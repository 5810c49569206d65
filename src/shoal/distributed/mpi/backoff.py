"""Pauses of a thread that has to poll."""

from __future__ import annotations

import os

from shoal.util.clock import CLOCK

_AT_ONCE = 0.002
"""Seconds in which it only yields to other threads between polls, since most waits are shorter."""
_SHARE = 100
"""Then it sleeps a hundredth of the time it has waited, so that it overshoots by 1 % at most."""
_LONGEST = 0.001


class PollBackoff:
    """Pauses between polls, of growing length. `least` is the length of the first ones, in seconds."""

    def __init__(self, least: float = 0.0) -> None:
        self._begun = CLOCK.now()
        self._least = least

    def pause(self) -> None:
        """Sleep until the next poll. Signal handlers run during the sleep."""
        waited = CLOCK.now() - self._begun
        if not self._least and waited < _AT_ONCE:
            os.sched_yield()
        else:
            CLOCK.sleep(min(max(waited / _SHARE, self._least), _LONGEST))
