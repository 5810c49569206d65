"""Whether torch computes with deterministic algorithms, for as long as a world is open."""

from __future__ import annotations

import torch

from shoal.distributed import env_vars
from shoal.util.decision import GIVEN, Decision


class DeterministicMode:
    """Asks torch for deterministic algorithms if `enabled`, until `restore`."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._former = torch.get_deterministic_debug_mode()
        if enabled:
            env_vars.write_defaults({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
            torch.use_deterministic_algorithms(True)

    @property
    def decision(self) -> Decision[bool]:
        """Whether algorithms are deterministic, and why."""
        reason = GIVEN if self._enabled else "the default: deterministic algorithms are slower"
        return Decision(what="deterministic", value=self._enabled, reason=reason)

    def restore(self) -> None:
        """Restore torch's mode of before."""
        if self._enabled:
            torch.set_deterministic_debug_mode(self._former)
