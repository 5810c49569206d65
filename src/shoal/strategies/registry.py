"""The engines of a World: those of the parallelized models that are alive."""

from __future__ import annotations

import weakref

from shoal.distributed.world import World
from shoal.strategies.contracts import Engine


class _Registry:
    def __init__(self, world: World) -> None:
        self.engines: list[weakref.ref[Engine]] = []

    def close(self) -> None:
        self.engines.clear()


def register(engine: Engine) -> None:
    """Add the engine of a parallelized model to its World, while the model is alive."""
    engine.world.service(_Registry).engines.append(weakref.ref(engine))


def engines_of(world: World) -> list[Engine]:
    """Return the engines of the parallelized models that are alive, oldest first."""
    known = world.service(_Registry).engines
    return [engine for reference in known if (engine := reference()) is not None]
