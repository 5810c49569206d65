"""Deterministic algorithms of torch while a world is open."""

from __future__ import annotations

import torch

from shoal.distributed import env_vars
from shoal.util.decision import GIVEN, Decision


class DeterministicMode:
    """torch's mode of deterministic algorithms, set if `enabled` or for `bits` until `restore`.

    With `bits`, for `exact="bits"`, `restore` sets the number of torch's threads to that of now.
    """

    def __init__(self, *, enabled: bool, bits: bool = False) -> None:
        self._enabled = enabled or bits
        self._reason = "the default: deterministic algorithms are slower"
        if self._enabled:
            self._reason = GIVEN if enabled else "exact='bits': algorithms must add up in a fixed order"
        self._threads = torch.get_num_threads() if bits else None
        self._former = torch.get_deterministic_debug_mode()
        if self._enabled:
            env_vars.write_defaults({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
            torch.use_deterministic_algorithms(True)

    @property
    def decision(self) -> Decision[bool]:
        """The decision about deterministic algorithms."""
        return Decision(what="deterministic", value=self._enabled, reason=self._reason)

    def restore(self) -> None:
        """Restore torch's previous mode."""
        if self._enabled:
            torch.set_deterministic_debug_mode(self._former)
        if self._threads is not None:
            torch.set_num_threads(self._threads)
