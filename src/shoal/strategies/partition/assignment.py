"""Assignment of stages to ranks and of micro-batches to workers, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.util.errors import LayoutError, StepError


@dataclass(frozen=True)
class StageAssignment:
    """The ranks of each stage, by the stage's name, in the order of the stages.

    The first rank of the last stage is the driver: it computes the loss and starts backward.

        >>> crew = StageAssignment(("front", "back"), ((0,), (1, 2)))
        >>> crew.driver, crew.worker(1, micro=3), list(crew.micros(2, 4))
        (1, 2, [1, 3])
    """

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def driver(self) -> int:
        """The rank that drives all others."""
        return self.ranks[-1][0]

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.ranks) - 1

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks, in the order of their stages."""
        return tuple(rank for ranks in self.ranks for rank in ranks)

    def stage(self, rank: int) -> int:
        """Return the stage that `rank` runs."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def worker(self, stage: int, micro: int) -> int:
        """Return the rank that runs a micro-batch through a stage: its ranks take turns."""
        ranks = self.ranks[stage]
        return ranks[micro % len(ranks)]

    def micros(self, rank: int, count: int) -> range:
        """Return which of `count` micro-batches `rank` runs."""
        ranks = self.ranks[self.stage(rank)]
        return range(ranks.index(rank), count, len(ranks))

    def title(self, rank: int) -> str:
        """Return the description of a rank for messages, such as "rank 2 (stage 'back')"."""
        return f"rank {rank} (stage {self.names[self.stage(rank)]!r})"


def crew_of(
    names: Sequence[str],
    workers: Mapping[str, Sequence[int]] | None,
    peers: Sequence[int],
    given: str,
) -> StageAssignment:
    """Return the assignment of stages to the ranks `peers`. `workers` are indices into `peers`; None:
    one per stage.

    Raises LayoutError unless each of the ranks runs one stage.
    """
    places = [tuple(workers[name]) for name in names] if workers else [(i,) for i in range(len(names))]
    taken = [place for some in places for place in some]
    missing = sorted({place for place in taken if not 0 <= place < len(peers)})
    idle = sorted({*range(len(peers))} - {*taken})
    if missing or idle:
        which = "no rank " if missing else "no stage for rank "
        found = f"{which}{', '.join(map(str, missing or idle))} among {len(peers)}"
        raise LayoutError(
            given=given,
            found=f"{found}; each rank runs one of the stages {', '.join(names)}",
            fix=f"start {len(taken)} ranks (shoal run -n {len(taken)} …), or pass workers="
            f"{{{names[0]!r}: (0,), …}} with all ranks from 0 to {len(peers) - 1}, several of them for "
            "a slow stage",
        )
    return StageAssignment(
        tuple(names), tuple(tuple(peers[place] for place in some) for some in places)
    )


def split_points(
    calls: Sequence[str], stages: Mapping[str, Sequence[str]], bare: frozenset[str], given: str
) -> list[str]:
    """Return the first called module of each stage except the first stage.

    `calls` are the modules that the model calls, and `stages` the modules of each stage, or modules
    that contain them. A module in no stage belongs to the stage of the module before it, if it is in
    `bare`: without parameters and buffers. Raises StepError for modules that are not called or in no
    stage, and for stages that do not follow each other.
    """
    for name, modules in stages.items():
        for module in modules:
            if not any(_within(call, module) for call in calls):
                raise StepError(
                    given=given,
                    found=f"stage {name!r} has {module!r}, which the model does not call; it calls "
                    + ", ".join(calls),
                    fix="use names of modules, as in named_modules(), that the forward calls",
                )
    owners = {call: _owner(call, stages, bare, given) for call in calls}
    order, points = list(stages), []
    before = ("the model's inputs", -1)
    for call in calls:
        owner = owners[call]
        if owner is None:
            continue
        number = order.index(owner)
        if number not in (max(0, before[1]), before[1] + 1):
            behind = "the model's inputs" if before[1] < 0 else f"{before[0]} of {order[before[1]]!r}"
            raise StepError(
                given=given,
                found=f"stages out of order: after {behind} the model calls {call} of {owner!r}",
                fix="list the stages in the order in which the forward pass calls their modules: "
                + ", ".join(calls),
            )
        if number > max(0, before[1]):
            points.append(call)
        before = (call, number)
    return points


def _owner(
    call: str, stages: Mapping[str, Sequence[str]], bare: frozenset[str], given: str
) -> str | None:
    """Return the stage of a called module, or None for the stage of the module before it."""
    named = [name for name, some in stages.items() if any(_within(call, module) for module in some)]
    if len(named) > 1:
        raise StepError(
            given=given,
            found=f"{call} is in the stages {named[0]!r} and {named[1]!r}",
            fix="put each module in one stage",
        )
    if not named and call not in bare:
        raise StepError(
            given=given,
            found=f"{call} has parameters or buffers and is in no stage",
            fix=f"put {call!r} in one of the stages {', '.join(map(repr, stages))}",
        )
    return named[0] if named else None


def _within(call: str, module: str) -> bool:
    return f"{call}.".startswith(f"{module}.")
