"""The contents of a run's checkpoints, and restoring a run from them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from shoal.checkpoint import (
    Agreement,
    AnyPath,
    RestoredCheckpoint,
    differing,
    facts,
    path_of,
    present,
    shapes,
    some,
    take_apart,
)
from shoal.checkpoint.importing import IMPORTED
from shoal.data import Loader
from shoal.distributed.rank_noise import RankNoise
from shoal.distributed.seeds import random_state, set_random_state
from shoal.distributed.world import World
from shoal.strategies.dtensor import divided, is_divided
from shoal.strategies.random_draws.draws import is_registered
from shoal.strategies.random_draws.philox import FORMAT
from shoal.training.imported_state import completed
from shoal.training.running_means import RunningMeans
from shoal.training.state_names import check_parts, owner_of, storable
from shoal.util.clock import CLOCK
from shoal.util.differences import spans
from shoal.util.errors import CheckpointError, DataError
from shoal.util.packages import versions

if TYPE_CHECKING:
    from shoal.training.train_state import TrainState

_MEAN = "run.mean"
"""The means in comparisons of user state over ranks."""


class Stateful(Protocol):
    """User state in a checkpoint: an EMA, a best value, a tokenizer's counters."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, arrays and plain values, nested in dicts, lists and tuples."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state that `state_dict` returned."""
        ...


def check_options(loader: object, state: object, config: object) -> None:
    """Raise DataError or CheckpointError if a Run can't save these options."""
    if not isinstance(loader, Loader):
        raise DataError(
            given=f"shoal.Run(directory, model, {type(loader).__name__})",
            found="it has no global batch and no position",
            fix="loader = shoal.Loader(dataset, world, batch_size=512)",
        )
    for name, given in (("state", state), ("config", config)):
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise CheckpointError(
                given=f"shoal.Run(…, {name}={type(given).__name__})",
                found="not a dict whose keys are names",
                fix=f"{name}={{'ema': ema}}" if name == "state" else f"{name}={{'rate': 0.1}}",
            )
        for key, item in given.items() if name == "state" else ():
            methods = (getattr(item, each, None) for each in ("state_dict", "load_state_dict"))
            if isinstance(item, type) or not all(map(callable, methods)):
                raise CheckpointError(
                    given=f"shoal.Run(…, state={{{key!r}: {type(item).__name__}}})",
                    found="not an object with state_dict and load_state_dict",
                    fix="pass an object that has both, such as a shoal.EMA; for plain values, use "
                    "config=",
                )


def settings(config: Any) -> Any:
    """Return `config` as plain values: mappings of any class become dicts, paths become text."""
    if isinstance(config, Mapping):
        return {key: settings(value) for key, value in config.items()}
    if type(config) in (list, tuple):
        return type(config)(map(settings, config))
    return str(config) if isinstance(config, Path) else config


class RestorePoint(NamedTuple):
    """Where a run continues: optimizer step, position in samples since the start, epoch, directory."""

    step: int
    position: int
    epoch: int
    path: AnyPath


class RunState:
    """Steps, user state and the position in the data, keyed by name; `config` is for people to read."""

    def __init__(
        self,
        world: World,
        steps: Mapping[str, TrainState],
        loader: Loader,
        state: Mapping[str, Stateful],
        config: Mapping[str, Any],
    ) -> None:
        self._world = world
        self._steps = steps
        self._loader = loader
        self._state = state
        self._config = config
        self.means = RunningMeans(steps, loader)
        Agreement(world).together("shoal.Run(…)", self._check_models)

    @property
    def in_parts(self) -> bool:
        """True if ranks hold different modules of a model, and not shards of the same tensors."""
        return self._world.layout.degree("pipeline") > 1

    def take(self, position: int) -> dict[str, Any]:
        """Return the contents of a checkpoint, the arguments of `Checkpoints.start`. Collective."""
        state = {
            "steps": {name: step.state_dict() for name, step in self._steps.items()},
            "state": {name: item.state_dict() for name, item in self._state.items()},
            "loader": {**self._loader.state_dict(), "position": position},
            "means": self.means.state(),
        }
        self._check_same(state["state"] | ({_MEAN: state["means"]} if state["means"] else {}))
        held = self._world.gather(list(shapes(state["state"]))) if self.in_parts else []
        if not self._world.is_rank_zero:
            # Otherwise each tensor would be that of the rank which happens to write it.
            before = {at for paths in held[: self._world.rank] for at in paths}
            state["state"] = some(
                state["state"],
                lambda at, tensor: is_divided(tensor) or (self.in_parts and at not in before),
            )
        info = {"position": position, **self.info()}
        return {
            "state": state,
            "rank_state": random_state(),
            "info": info,
            "join": self.in_parts,
        }

    def info(self) -> dict[str, Any]:
        """Return the information for users in a checkpoint that is saved now."""
        return {
            "epoch": self._loader.epoch,
            "time": CLOCK.wall(),
            "layout": str(self._world.layout),
            "batch_size": self._loader.batch_size,
            "random_format": FORMAT,
            # With its build, such as +cu130, which the metadata of the package lacks.
            "versions": versions() | {"torch": str(torch.__version__)},
            "config": dict(self._config),
        }

    def form(self) -> dict[str, Any]:
        """Return the state to save, to check it, without synchronizing it over ranks. Collective."""
        return {
            "steps": {name: step.form() for name, step in self._steps.items()},
            "state": {name: item.state_dict() for name, item in self._state.items()},
        }

    def template(self) -> dict[str, Any]:
        """Return the tensors to read a state into, of which this rank holds shards."""
        own = {name: item.state_dict() for name, item in self._state.items()}
        return {
            "steps": {name: step.template() for name, step in self._steps.items()},
            "state": divided(own, torch.empty_like),
        }

    def elsewhere(self) -> set[str]:
        """Return the paths of entries that only other ranks hold and read. Collective."""
        if not self.in_parts:
            return set()
        own = list(shapes({name: item.state_dict() for name, item in self._state.items()}))
        others = {at for paths in self._world.gather(own) for at in paths} - set(own)
        models = {
            path_of("state", "steps", name, *keys)
            for name, step in self._steps.items()
            for keys in step.elsewhere()
        }
        return models | {f"state/state/{each}" for each in others}

    def load(self, loaded: RestoredCheckpoint, given: str) -> RestorePoint:
        """Restore a checkpoint, with random states if the number of ranks is the same.

        Raises CheckpointError, before anything changes, if the checkpoint is of other models.
        """
        saved, left = loaded.state, None
        if IMPORTED in saved:
            about = saved[IMPORTED]
            saved, left = completed(saved, self._steps, self._loader, self._state)
        else:
            self._check_names(saved, given)
        # Check all of them before the first one changes.
        for name, step in self._steps.items():
            step.check_state(saved["steps"][name])
        self._loader.check_state(saved["loader"])
        for name, step in self._steps.items():
            step.load_state_dict(saved["steps"][name])
        for name, item in self._state.items() if left is None else ():
            item.load_state_dict(present(saved["state"][name]))
        self._loader.load_state_dict(saved["loader"])
        self.means.load(saved.get("means", {}))
        if (
            left is None
            and loaded.info.get("random_format", 1) != FORMAT
            and any(is_registered(step.model) for step in self._steps.values())
        ):
            self._world.print(
                f"shoal: {loaded.path} was saved by a version of Shoal with other random numbers; "
                "dropout continues with those of this version"
            )
        if left is not None:
            listed = "".join(f"\n  - {each}" for each in left)
            self._world.print(f"imported from {about['tool']}; not carried over:{listed}")
        if loaded.rank_state:
            set_random_state(loaded.rank_state)
        else:
            self._world.reseed(f"noise from step {loaded.step}")
        if loaded.step:
            self._world.service(RankNoise).close()
        return RestorePoint(loaded.step, self._loader.position, self._loader.epoch, loaded.path)

    def _check_models(self) -> None:
        """Raise CheckpointError for an entry of a model's state_dict that a checkpoint can't hold."""
        for step in self._steps.values():
            for name, value in step.model.state_dict().items():
                if isinstance(value, torch.Tensor):
                    continue
                try:
                    take_apart(storable(value), name)
                except CheckpointError as error:
                    raise CheckpointError(
                        given=f"shoal.Run(…) of a model whose state_dict has the entry {name!r}, of "
                        f"{owner_of(step.model, name)}",
                        found=error.found,
                        fix="keep tensors, numbers, strings, classes, functions, and dicts, lists and "
                        "tuples of them in state_dict or get_extra_state; create the rest in __init__",
                    ) from None

    def _check_same(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError, on all ranks, if user state differs: a checkpoint has one for all.

        Collective. Ranks that take independent steps (LocalSGD, Hogwild) also have different averages;
        the checkpoint keeps rank 0's.
        """
        if (
            not state
            or self._world.size == 1
            or any(s.engine.independent_steps for s in self._steps.values())
        ):
            return
        mine = facts(state, in_parts=self.in_parts)
        # One digest is enough if all ranks agree to the last bit, which is the usual case.
        if len(set(self._world.gather(hashlib.sha256(repr(mine).encode()).hexdigest()))) == 1:
            return
        found = differing(self._world.gather(mine))
        if found is None:
            return
        path, odd = found
        name = next(name for name in state if path_of(name) == path.partition("/")[0])
        mean = name == _MEAN
        ranks = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {spans(odd)}"
        raise CheckpointError(
            given=f"{_MEAN}(…), at {path}"
            if mean
            else f"shoal.Run(…, state={{{name!r}: {type(self._state[name]).__name__}}}), at {path}",
            found=f"{ranks} of {self._world.size} would save a different value than the first rank "
            "with this entry, and a checkpoint keeps one value for all ranks",
            fix="pass numbers of the global batch, such as result.loss; reduce others over the ranks"
            if mean
            else "save a dict keyed by parameter name, as shoal.EMA does: the checkpoint then keeps "
            "the entries of all stages"
            if self.in_parts
            else "save the same value on all ranks; or save every rank's value: let state_dict return "
            "{'ranks': world.gather(value)}, and load_state_dict read state['ranks'][world.rank]",
        )

    def _check_names(self, saved: Mapping[str, Any], given: str) -> None:
        check_parts(saved, given)
        for what, here in (("steps", self._steps), ("state", self._state)):
            if set(saved[what]) != set(here):
                raise CheckpointError(
                    given=f"{given} with {what} {sorted(here)}",
                    found=f"a checkpoint with {what} {sorted(saved[what])}",
                    fix="use the same names as before, or choose another directory",
                )
