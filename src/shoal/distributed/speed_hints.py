"""Hints about settings that would make training faster on a GPU and are off. Shoal changes none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shoal.distributed import env_vars
from shoal.distributed.world import World
from shoal.util import accelerator

_TF32 = (8, 0)
"""The first compute capability with TF32."""


@dataclass(frozen=True, kw_only=True)
class SpeedFacts:
    """A GPU, the settings of this process for it, and what is known about the training."""

    capability: tuple[int, int] | None
    """Of an NVIDIA GPU."""
    allocator: str
    """PYTORCH_ALLOC_CONF."""
    products: str
    """The precision of products of float32 matrices: "tf32", "ieee", or "none" if nothing is set."""
    float32: bool = True
    """Whether most products are of float32 matrices."""
    unfused: str = ""
    """The optimizer, if it could be fused and is not."""
    waits: str = ""
    """Why each step waits for its result, if the user has not asked for it."""


def facts_of(device: torch.device) -> SpeedFacts:
    """Return what this process knows about a GPU before training."""
    return SpeedFacts(
        capability=accelerator.cuda_capability(device),
        allocator=env_vars.allocator_settings(),
        products=torch.backends.cuda.matmul.fp32_precision,
    )


def speed_hints(facts: SpeedFacts) -> list[str]:
    """Return what would be faster and is off, each as what to write and what it brings."""
    hints = []
    if facts.unfused:
        hints.append(f"torch.optim.{facts.unfused}(…, fused=True): one kernel for many parameters")
    if facts.waits:
        hints.append(f"the device waits for the host in each step: {facts.waits}")
    if facts.capability is not None:
        if not any(word in facts.allocator for word in ("expandable_segments", "backend:")):
            hints.append("PYTORCH_ALLOC_CONF=expandable_segments:True: less fragmented memory")
        if facts.float32 and facts.products == "none" and facts.capability >= _TF32:
            hints.append('torch.set_float32_matmul_precision("high"): products in TF32, with 3 digits')
    return hints


class SpeedHints:
    """The hints of a World, each printed once, however many models and optimizers it trains."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._said: set[str] = set()

    def tell(self, *, float32: bool, unfused: str, waits: str) -> None:
        """Print on rank 0, in one line, what would be faster on its GPU and is off."""
        device = self._world.device
        if not accelerator.is_accelerator(device):
            return
        facts = replace(facts_of(device), float32=float32, unfused=unfused, waits=waits)
        new = [hint for hint in speed_hints(facts) if hint not in self._said]
        self._said.update(new)
        if new:
            self._world.print(
                f"shoal: settings that are off and would make training faster on {device.type}: "
                f"{'; '.join(new)}"
            )

    def close(self) -> None:
        """Do nothing; see `World.service`."""
