"""The failures of a run, as far as they decide whether and when the next attempt starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.distributed.failure import Failure

PASSES_WITHIN = 300
"""Seconds that a run without progress waits in all for a fault to pass."""

_LONGEST_WAIT = 60
_MOST_DOUBLED = 32


@dataclass(frozen=True, kw_only=True)
class FailureHistory:
    """The last failure of a run, and the waits for faults that may pass.

    `signature` and `passing` are those of the last failure. `end` is the reason why no attempt may
    follow it, empty if one may, after `wait` seconds. Since the run reached `step`, it has started
    `waits` attempts again, after `waited` seconds in all, because of faults that may pass.
    """

    signature: str = ""
    passing: str = ""
    end: str = ""
    wait: int = 0
    step: int | None = None
    waits: int = 0
    waited: int = 0

    @property
    def resumes(self) -> bool:
        """Whether the next attempt starts after a wait, and resumes a Run."""
        return self.wait > 0 and self.step is not None

    def after(self, failure: Failure, *, restarts: int, ran: float) -> FailureHistory:
        """Return the history with one more failure, of an attempt that ran for `ran` seconds, before
        which `restarts` were left.

        The same failure twice in a row would come again. A fault that may pass is waited for, twice as
        long each time, and long enough that the restarts cover PASSES_WITHIN. A larger step is
        progress; where steps are not known, an attempt that ran for longer than that is.
        """
        if not failure.passing:
            same = bool(failure.signature) and failure.signature == self.signature
            end = f"the same failure twice in a row: {failure.signature}" if same else ""
            return replace(self, signature=failure.signature, passing="", end=end, wait=0)
        if self.step is None or failure.step is None:
            progress = ran > PASSES_WITHIN
        else:
            progress = failure.step > self.step
        waits, waited = (0, 0) if progress else (self.waits, self.waited)
        rest = PASSES_WITHIN - waited
        end, wait = "", 0
        if waits and not (rest and restarts):
            end = f"{failure.passing} has not passed in {waited} s of waits"
        elif restarts:
            share = -(-rest // (2 ** min(restarts, _MOST_DOUBLED) - 1))
            wait = min(rest, max(share, min(2**waits, _LONGEST_WAIT)))
        steps = [step for step in (self.step, failure.step) if step is not None]
        return FailureHistory(
            passing=failure.passing,
            end=end,
            wait=wait,
            step=max(steps, default=None),
            waits=waits + 1,
            waited=waited + wait,
        )

    def tell(self, number: int, most: int) -> str:
        """Return one line about what follows: restart `number` of at most `most`, or none and why;
        empty if the restarts are used up.
        """
        if self.end:
            return f"no restart: {self.end}\n"
        if number > most:
            return ""
        if not self.wait:
            return f"restart {number} of {most}\n"
        limit = f"waits: {self.waited} s of at most {PASSES_WITHIN} s"
        return f"restart {number} of {most} in {self.wait} s: {self.passing} may pass ({limit})\n"
