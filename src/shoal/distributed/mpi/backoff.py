"""How a thread waits that can only look again and again."""

from __future__ import annotations

import os
import time

_AT_ONCE = 0.002
"""For so many seconds it only lets others run in between: most waits are shorter."""
_SHARE = 100
"""Then it sleeps a hundredth of the time it has waited: by so much the wait gets longer at most."""
_LONGEST = 0.001


class Patience:
    """Pauses between looks, ever longer. `least` is how long the first ones are, in seconds."""

    def __init__(self, least: float = 0.0) -> None:
        self._begun = time.monotonic()
        self._least = least

    def pause(self) -> None:
        """Until it is time to look again. Handlers of signals run meanwhile."""
        waited = time.monotonic() - self._begun
        if not self._least and waited < _AT_ONCE:
            os.sched_yield()
        else:
            time.sleep(min(max(waited / _SHARE, self._least), _LONGEST))
