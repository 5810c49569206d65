"""Records of a Run of mixtures of experts: how many tokens each expert got."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from shoal.strategies.expert_parallel.routed_tokens import RoutedTokens, routed_tokens
from shoal.strategies.mesh_reducer import first_along
from shoal.telemetry.events import Events, Plain
from shoal.util.accelerator import HostCopy

if TYPE_CHECKING:
    from shoal.training.train_state import TrainState

INTERVAL = 100
"""Ticks between two events, or more:"""
_PER_STEP = 32
"""numbers that an event may have for each step since the last, so that files stay small."""


class ExpertCounts:
    """Writes the tokens of this rank by expert as events, at the same steps on all ranks.

    Counts are added up on the device. The host copies them at these steps, and waits only at the end.
    """

    def __init__(self, steps: Mapping[str, TrainState], events: Events) -> None:
        self._steps = steps
        self._events = events
        self._layers: dict[str, list[RoutedTokens]] = {}
        for name, step in steps.items():
            layers = routed_tokens(step.model)
            if layers and first_along(step.engine.world, "tensor"):  # the others have the same tokens
                self._layers[name] = layers
                for layer in layers:
                    layer.counts.zero_()
        numbers = sum(len(layer.counts) for layers in self._layers.values() for layer in layers)
        self._interval = max(INTERVAL, numbers // _PER_STEP)
        self._ticks = 0
        self._waiting: dict[str, tuple[int, HostCopy]] = {}
        """The step and the counts of a model that are on their way to the host."""

    def tick(self) -> None:
        """Copy the counts if an interval has ended, and write those that have arrived."""
        self._ticks += 1
        if self._layers and self._ticks % self._interval == 0:
            self._copy()
        for name, (_, counts) in list(self._waiting.items()):
            if counts.ready:
                self._write(name)

    def end(self) -> None:
        """Write the counts since the last interval. Waits for the device."""
        for name in list(self._waiting):
            self._write(name)
        self._copy()
        for name in list(self._waiting):
            self._write(name)

    def _copy(self) -> None:
        for name, layers in self._layers.items():
            counts = HostCopy(torch.cat([layer.counts for layer in layers]))
            self._waiting[name] = self._steps[name].number, counts
            for layer in layers:
                layer.counts.zero_()

    def _write(self, name: str) -> None:
        step, counts = self._waiting.pop(name)
        values = [int(value) for value in counts.read()]
        numbers = iter(values)
        layers: dict[str, Plain] = {
            layer.name: [next(numbers) for _ in range(len(layer.counts))]
            for layer in self._layers[name]
        }
        if any(values):
            self._events.write("experts", {"name": name, "step": step, "layers": layers})
