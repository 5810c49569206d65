"""Deterministic algorithms of torch while a world is open."""

from __future__ import annotations

import torch

from shoal.distributed import env_vars
from shoal.util.decision import GIVEN, Decision


class DeterministicMode:
    """torch's mode of deterministic algorithms, set if `enabled` until `restore`."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._former = torch.get_deterministic_debug_mode()
        if enabled:
            env_vars.write_defaults({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
            torch.use_deterministic_algorithms(True)

    @property
    def decision(self) -> Decision[bool]:
        """The decision about deterministic algorithms."""
        reason = GIVEN if self._enabled else "the default: deterministic algorithms are slower"
        return Decision(what="deterministic", value=self._enabled, reason=reason)

    def restore(self) -> None:
        """Restore torch's previous mode."""
        if self._enabled:
            torch.set_deterministic_debug_mode(self._former)
