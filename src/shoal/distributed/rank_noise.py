"""When the global random generators of ranks begin to differ."""

from __future__ import annotations

from shoal.distributed.world import World


class RankNoise:
    """The global generators of the ranks of a World, which draw the same until the first step.

    From then on, those of ranks with other samples draw other numbers. Those of a single data-parallel
    rank continue.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.purpose = ""
        """The purpose for which the next step seeds them, if any."""

    def begin(self) -> None:
        """Seed them before a step, if a model has been parallelized since the last one."""
        purpose, self.purpose = self.purpose, ""
        if purpose and self._world.data_size > 1:
            self._world.reseed(purpose)

    def close(self) -> None:
        """Forget the purpose."""
        self.purpose = ""
