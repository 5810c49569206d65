"""Models that another tool trains, such as Accelerate, Lightning or DDP: Shoal reads them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shoal._torch.modules import bare
from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.distributed.world import World
from shoal.strategies.contracts import Engine
from shoal.strategies.correction import AnyTotals, Factor
from shoal.strategies.dtensor import is_divided
from shoal.strategies.parallelize import ATTRIBUTE, Attachment, known_engine
from shoal.strategies.task import Task
from shoal.util.errors import StepError


def reading_engine(model: nn.Module, world: World) -> Engine:
    """Return the engine of a parallelized model, or one that reads the model of another tool.

    Raises StepError if the tool keeps the parameters in a form of its own.
    """
    module = unwrapped(model)
    engine = known_engine(module)
    if engine is None or (isinstance(engine, OtherToolEngine) and engine.world is not world):
        engine = OtherToolEngine(module, world)
        object.__setattr__(module, ATTRIBUTE, Attachment(engine))
    return engine


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module from the wrappers of DDP, Fabric and torch.compile."""
    module = bare(model)
    while type(module).__module__.startswith(_WRAPPERS) and isinstance(module.module, nn.Module):
        module = bare(module.module)
    return module


_WRAPPERS = ("torch.nn.parallel", "lightning.fabric", "lightning_fabric")
"""The modules of wrappers that leave parameters as they are."""


class OtherToolEngine(Engine):
    """Reads a model that each rank has completely, or of which each has its shards of DTensors.

    The other tool computes gradients and updates parameters.
    """

    strategy = "of another tool"

    def __init__(self, module: nn.Module, world: World) -> None:
        self.module = module
        self.world = world
        kinds = {type(part).__name__ for part in module.modules()}
        flat = next(
            (name for name in ("FullyShardedDataParallel", "DeepSpeedEngine") if name in kinds), ""
        )
        if not flat and any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
            flat = "DeepSpeed"
        if flat:
            raise StepError(
                given=f"{type(module).__name__}, a model that Shoal did not parallelize",
                found=f"{flat} keeps its parameters in a form of its own",
                fix="use DDP or FSDP2 (fully_shard) in your tool, or shoal.parallelize(model, world)",
            )

    def infer(self, task: Task, micro: MicroBatch, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the output of the module; see the contract."""
        return task.forward(self.module, micro, seed)

    def synchronize(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Give all ranks the buffers of rank 0, as DDP does. Collective; see `check_same`."""
        if self.world.size == 1:
            return
        for buffer in self.module.buffers():
            if not is_divided(buffer):
                torch.distributed.broadcast(buffer, 0, group=self.world.group)
        self.check_same()

    def check_same(self) -> None:
        """Raise StepError if a parameter that each rank has completely differs. Collective."""
        whole = {n: p for n, p in self.module.named_parameters() if not is_divided(p)}
        if not whole:
            return
        everyone = self.world.gather(torch.stack(list(map(_bit_sum, whole.values()))).tolist())
        for name, found in zip(whole, zip(*everyone, strict=True), strict=True):
            if len(set(found)) > 1:
                raise StepError(
                    given=f"{type(self.module).__name__}, a model that Shoal did not parallelize",
                    found=f"its {name} differs between ranks, so no tool keeps them the same",
                    fix="let your tool prepare the model, as in accelerator.prepare(model), or use "
                    "model = shoal.parallelize(model, world)",
                )

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> AnyTotals:
        """Raise StepError: the other tool computes gradients."""
        self._refuse()

    def update(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        """Raise StepError: the other tool updates parameters."""
        self._refuse()

    def discard(self) -> None:
        """Raise StepError: the other tool clears gradients."""
        self._refuse()

    def compile(self, how: str) -> None:
        """Raise StepError: the other tool compiles the model."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StepError(
            given=f"{type(self.module).__name__}, a model that Shoal did not parallelize",
            found="another tool trains it",
            fix="model = shoal.parallelize(model, world)",
        )


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def _bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of all elements, which differs if a bit does, except by chance."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().view(_WORDS[plain.element_size()]).sum(dtype=torch.int64)
