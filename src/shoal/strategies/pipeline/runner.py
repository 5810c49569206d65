"""The runner of a pipeline: torch's schedules over this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from shoal._torch.dispatch import tree_flatten, tree_map
from shoal._torch.pipelining import step_micro_batches
from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.distributed import objects
from shoal.distributed.world import World
from shoal.strategies.activation_checkpoint import runs_again
from shoal.strategies.compiled import RepeatedBlocks, compile_parts, recomputed_refused
from shoal.strategies.contracts import no_gradient
from shoal.strategies.correction import AnyTotals
from shoal.strategies.engine import Runner
from shoal.strategies.eval_mode import untouched
from shoal.strategies.fsdp.options import FSDP
from shoal.strategies.fsdp.precision import GatheredPrecision
from shoal.strategies.held_parameters import HeldParameters
from shoal.strategies.local import mixed
from shoal.strategies.mesh_reducer import (
    MeshReducer,
    data_group,
    first_along,
    norm_of_parts,
    other_gradients_kept,
    summing_group,
)
from shoal.strategies.module_patterns import find_units
from shoal.strategies.partition.check import SplitCheck
from shoal.strategies.partition.inputs import Inputs, bring, by_name, hold
from shoal.strategies.partition.members import StageRanks
from shoal.strategies.partition.stages import OuterGraph, Stage, keep_only, tied
from shoal.strategies.partition.unsplit import UnsplitModel
from shoal.strategies.pipeline.schedules import SCHEDULES, micro_batches_refused
from shoal.strategies.pipeline.stage import StageModule, learns
from shoal.strategies.pipeline.timed_stage import MarkedStage, schedule_marked
from shoal.strategies.task import Task
from shoal.strategies.tensor_parallel.sharded_modules import ShardedLayers, division_of
from shoal.telemetry.step_timer import BACKWARD, FORWARD, UPDATE
from shoal.util.errors import ShoalError, StepError

Form = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shapes and dtypes of tensors."""


class PipelineRunner(Runner):
    """Runner of the stages of this rank in the order of the schedule. The last stage reports the loss.

    `owners` are the ranks of the stages within the pipeline. `stage_strategy` defines how FSDP shards
    the parameters of stages if the layout has an axis for it.

    All micro-batches of a batch get one shape: shorter ones are padded with copies of their last
    sample, and the loss gets only the outputs of the real samples. torch must know the shapes of the
    tensors between stages. A forward pass of one micro-batch finds them for each new shape of the
    inputs.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        outer: OuterGraph,
        stages: Sequence[Stage],
        owners: Sequence[int],
        *,
        schedule: str,
        stage_strategy: FSDP,
    ) -> None:
        self._module = module
        self._world = world
        self._division = division_of(module)
        _check_sharded_activations(self._division)
        self._kind = SCHEDULES[schedule]
        self._name = schedule
        self._signature = outer.signature
        self._owners = list(owners)
        self._place = world.layout.coordinate(world.rank, "pipeline")
        self._group = world.mesh["pipeline"].get_group()
        mine = [number for number, owner in enumerate(owners) if owner == self._place]
        last = len(stages) - 1
        self._parts = {
            number: StageModule(stages[number], world, last=number == last) for number in mine
        }
        self._sharded = world.layout.degree("shard") > 1
        self._precisions: list[GatheredPrecision] = []
        """Those of the sharded stages of this rank."""
        kept = [stages[number] for number in mine]
        units = find_units(module, stage_strategy.modules) if self._sharded else []
        members = StageRanks(self._group, self._place, self._owners, world.device)
        uncut = UnsplitModel(outer, stages, members, self._compute_alone)
        self._proof = SplitCheck(uncut, module, world, outer.given)
        self._recomputed = runs_again(module)
        self._blocks = RepeatedBlocks(module)
        self._blocks.keep_in(self._parts.values())
        keep_only(module, kept, [stage for number, stage in enumerate(stages) if number not in mine])
        self._place_parameters(stage_strategy, kept, units)
        self._held = HeldParameters(module, world)
        self.reducer = self._reducer = MeshReducer(
            self._held,
            reports_loss=last in mine and first_along(world, "context", "tensor"),
            gradient_group=None if self._sharded else summing_group(world),
            buffer_group=data_group(world),
            norm=norm_of_parts,
        )
        self._forms: dict[object, dict[int, tuple[Form, Form]]] = {}
        self._built: tuple[object, Any, list[PipelineStage]] | None = None
        self._compiled = False
        self._current: tuple[Sequence[MicroBatch], int] = ((), 0)
        """The micro-batches of the batch, and the number of rows to which they are padded."""
        self._sums_up = False
        """Whether the model returned a sum over the samples of a padded micro-batch."""
        self._loss_of: Callable[[Any, int], Tensor]
        """The loss of an output, given the number of its micro-batch."""
        _forbid_calls(module)

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> AnyTotals:
        """Run the schedule, then sum gradients over replicas; see the contract."""
        timeline = self._world.timeline
        timeline.enter(FORWARD)
        self._held.check_converted()
        self._compute_in(autocast)
        inputs = [self._inputs(task, micro, batch.seed) for micro in batch.micros]
        for one, micro in zip(inputs, batch.micros, strict=True):
            self._prove(one, micro, autocast)
        # Of this batch only: a run that resumes here does not know the batches before.
        rows = max(micro.samples for micro in batch.micros)
        for one, micro in zip(inputs, batch.micros, strict=True):
            one.update(_filled_up(one, micro.samples, rows))
        schedule, stages = self._schedule(inputs, autocast)
        for part in self._parts.values():
            part.inputs = inputs
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        self._sums_up = False
        self._loss_of = partial(self._loss, task, batch, scale, rows)
        self._current = batch.micros, rows
        timeline.enter(BACKWARD)
        tensors = self._division is not None and not self._compiled
        with other_gradients_kept(self._held), schedule_marked(timeline, tensors=tensors):
            try:
                numbers = list(range(len(inputs)))
                named = [{"micro": number} for number in numbers]
                step_micro_batches(schedule, named, numbers)
            except Exception as error:
                self._built = None  # the schedule was interrupted
                if isinstance(error.__cause__, ShoalError):
                    raise error.__cause__ from None
                if self._kind.splits and isinstance(error, RuntimeError):
                    raise self._not_split(error) from error
                raise
        self._check_sums(batch)
        self._reducer.reduce()
        timeline.enter(UPDATE)
        return self._reducer.totals()

    def _not_split(self, error: RuntimeError) -> StepError:
        return StepError(
            given=f"shoal.Pipeline(schedule={self._name!r}) around {type(self._module).__name__}",
            found="torch failed to run backward in two parts, which only some models support: "
            f"{str(error.__cause__ or error).strip().partition(chr(10))[0]}",
            fix="use schedule='interleaved', which does not split the backward pass",
        )

    def infer(self, task: Task, micro: MicroBatch, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the output on the rank of the last stage, None on others. Collective."""
        self._compute_in(autocast)
        inputs = self._inputs(task, micro, seed)
        if self._division is not None and not self._division.proved:
            self._division.prove(self._module, self._world, lambda: self._flow(inputs)[0], inputs)
        self._prove(inputs, micro, autocast)
        output, _ = self._flow(inputs)
        return output

    def compile(self, how: str) -> None:
        """Compile each stage, or each block. The communication between stages is not compiled."""
        if how == "script" or self._kind.splits:
            found = (
                "TorchScript cannot call a traced part of a model"
                if how == "script"
                else "the schedule runs backward in two parts, which compiled code does not support"
            )
            raise StepError(
                given=f"compile={how!r} with shoal.Pipeline(schedule={self._name!r})",
                found=found,
                fix="use compile='inductor' with schedule='1f1b' or 'interleaved'",
            )
        if how == "blocks":
            self._blocks.compile()
        else:
            if self._recomputed:
                raise recomputed_refused(f"compile={how!r}")
            compile_parts(self._parts.values())
        self._compiled = True

    def _place_parameters(
        self,
        stage_strategy: FSDP,
        kept: Sequence[Stage],
        units: Sequence[nn.Module],
    ) -> None:
        """Allocate the stages on the device, sharded if needed, with the same tensors as the module."""
        module, world = self._module, self._world
        if self._sharded:
            if tied(kept, range(len(kept))) is not None:
                raise StepError(
                    given=f"shoal.Pipeline(…) around {type(module).__name__} with '{world.layout}'",
                    found="a parameter of two stages on one rank cannot be sharded twice",
                    fix="use layout='replicate=…,pipeline=…', or separate the parameters",
                )
            meta = any(p.is_meta for p in module.parameters())
            for part in self._parts.values():
                inside = {id(one) for one in part.modules()}
                own = [unit for unit in units if id(unit) in inside]
                self._precisions.append(stage_strategy.divide(part, own, world))
                if meta:
                    part.to_empty(device=world.device)
            bring(module, kept, world.device)
        else:
            hold(module, kept, world.device)

    def _prove(self, inputs: Inputs, micro: MicroBatch, autocast: torch.dtype | None) -> None:
        """Compare the stages with the original model, for the first inputs of this structure."""
        if self._compiled and self._module.training:
            return  # compiled code draws other random numbers
        # Ranks with other samples gather sharded stages too, and may have compared them already.
        structure = None if self._sharded else inputs
        self._proof.check(
            structure, micro.value, lambda: inputs, lambda: self._flow(inputs)[0], autocast
        )

    def _compute_alone(self, number: int, name: str, args: Any, kwargs: Any) -> Any:
        """Call one module of a stage as the stage does."""
        part = self._parts[number]
        call = partial(part.body.get_submodule(name), *args, **kwargs)
        return part.run_alone(call) if self._sharded else call()

    def _compute_in(self, autocast: torch.dtype | None) -> None:
        for part in self._parts.values():
            part.autocast = autocast
        for precision in self._precisions:
            precision.use(autocast)

    def _inputs(self, task: Task, micro: MicroBatch, seed: int) -> Inputs:
        return by_name(self._signature, *task.arguments(micro, seed), type(self._module).__name__)

    def _schedule(
        self, inputs: Sequence[Inputs], autocast: torch.dtype | None
    ) -> tuple[Any, list[PipelineStage]]:
        """Return the schedule for inputs of this form, and build it if the form has changed."""
        forms = {_form_of(one) for one in inputs}
        if len(forms) > 1:
            shapes = sorted({str([tuple(size) for _, size, _ in form]) for form in forms})
            raise StepError(
                given=f"{len(inputs)} micro-batches of one batch in a pipeline",
                found=f"inputs of different shapes: {' and '.join(shapes[:2])}",
                fix="collate them to the same length, or use shoal.Loader(…, micro_batches=1)",
            )
        key = (forms.pop(), autocast, len(inputs))
        if self._built is None or self._built[0] != key:
            if key not in self._forms:
                self._forms[key] = self._learned(inputs[0])
            self._built = (key, *self._build(self._forms[key], len(inputs)))
        return self._built[1], self._built[2]

    @torch.no_grad()
    def _learned(self, inputs: Inputs) -> dict[int, tuple[Form, Form]]:
        """Return the forms of the tensors between stages, from a forward pass without side effects.

        Uses the current mode, because layers may compute in another dtype in the other mode.
        """
        with untouched(self._module, inputs):
            _, forms = self._flow(inputs)
        return forms

    def _build(
        self, forms: Mapping[int, tuple[Form, Form]], micro_batches: int
    ) -> tuple[Any, list[PipelineStage]]:
        stages: list[PipelineStage] = [
            MarkedStage(
                self._world,
                lambda: self._current,
                part,
                number,
                len(self._owners),
                self._world.device,
                input_args=_examples(forms[number][0]),
                output_args=_examples(forms[number][1]),
                group=self._group,
            )
            for number, part in self._parts.items()
        ]
        kind: Any = get_schedule_class(self._kind.torchs)
        single = issubclass(kind, PipelineScheduleSingle)
        try:
            schedule = kind(
                stages[0] if single else stages,
                micro_batches,
                loss_fn=self._timed_loss,
                scale_grads=False,
            )
        except ValueError as error:
            ranks = self._world.layout.degree("pipeline")
            raise micro_batches_refused(self._name, ranks, micro_batches, error) from None
        return schedule, stages

    def _timed_loss(self, output: Any, number: int) -> Tensor:
        with self._world.timeline.within(FORWARD):
            return self._loss_of(output, number)

    def _loss(
        self, task: Task, batch: Batch, scale: float, rows: int, output: Any, number: int
    ) -> Tensor:
        micro = batch.micros[number]
        part = self._parts[len(self._owners) - 1]
        with mixed(self._world.device, part.autocast):
            found = part.whole(output)
            if micro.samples < rows:
                self._sums_up = self._sums_up or any(map(_is_sum, tree_flatten(found)[0]))
                found = tree_map(lambda leaf: _real(leaf, micro.samples, rows), found)
            loss, count = task.reduce(found, micro, batch.seed)
        if not loss.requires_grad:
            raise no_gradient()
        self._held.losses.append((loss.detach(), count, micro.weight))
        return loss * (scale * micro.weight / batch.size)

    def _check_sums(self, batch: Batch) -> None:
        """Raise StepError if the model sums over samples of padded micro-batches, which is wrong."""
        even = batch.size % (self._world.data_size * len(batch.micros)) == 0
        if even or not any(self._world.gather(self._sums_up)):
            return
        raise StepError(
            given=f"a number among the outputs of a {type(self._module).__name__} in a pipeline",
            found="it was computed over samples some of which are padding of a short micro-batch",
            fix="compute it in the loss, from outputs with a row for each sample; or use "
            "shoal.Loader(…, drop_last=True) with equal micro-batches",
        )

    def _flow(self, inputs: Inputs) -> tuple[Any, dict[int, tuple[Form, Form]]]:
        """Run all stages forward once. Return the output and the forms of this rank's stages."""
        forms: dict[int, tuple[Form, Form]] = {}
        handed: tuple[Tensor, ...] = ()
        result = None
        failure: Exception | None = None
        for number, part in self._parts.items():
            before = self._owners[number - 1] if number else self._place
            part.inputs = [inputs]
            try:
                if before == self._place and failure is not None:
                    raise failure
                received = handed if before == self._place else self._receive(before)
                output = part(*received, micro=0)
            except Exception as error:  # later stages of this rank get it too, and pass it on
                failure = failure or error
                if number < len(self._owners) - 1 and self._owners[number + 1] != self._place:
                    self._send_failure(error, self._owners[number + 1])
                continue
            forms[number] = (_form(received), _form(output))
            if number == len(self._owners) - 1:
                result = part.whole(output)
            elif self._owners[number + 1] == self._place:
                handed = output
            else:
                self._send(output, self._owners[number + 1])
        if failure is not None:
            raise failure
        return result, forms

    def _send_failure(self, error: Exception, to: int) -> None:
        """Make later stages fail too, so that they do not wait."""
        if not isinstance(error, ShoalError):
            # `watchdog.peer_errors` recognizes this fix.
            error = StepError(
                given=f"a stage of a {type(self._module).__name__} on rank {self._world.rank}",
                found=f"{type(error).__name__}: {error}",
                fix="see that rank's own error; python train.py in one process may show more",
            )
        objects.send(error, self._group, to)

    def _send(self, tensors: Sequence[Tensor], to: int) -> None:
        objects.send(_form(tensors), self._group, to)
        self._exchange(dist.isend, tensors, to)

    def _receive(self, source: int) -> tuple[Tensor, ...]:
        found: ShoalError | Form = objects.receive(self._group, source)
        if isinstance(found, ShoalError):
            raise found
        tensors = tuple(
            torch.empty(size, dtype=dtype, device=self._world.device) for size, dtype in found
        )
        self._exchange(dist.irecv, tensors, source)
        return tensors

    def _exchange(self, operation: Any, tensors: Sequence[Tensor], peer: int) -> None:
        """Send tensors to a rank of the pipeline, or receive them from it.

        At once, as schedules do: for a single send, NCCL would make a communicator of two ranks.
        """
        pairs = [dist.P2POp(operation, each, group=self._group, group_peer=peer) for each in tensors]
        for work in dist.batch_isend_irecv(pairs) if pairs else ():
            work.wait()


def _check_sharded_activations(division: ShardedLayers | None) -> None:
    slices = set() if division is None else {"sequence", "logits"} & division.ways
    if slices:
        raise StepError(
            given=f"[shoal.TensorParallel(plan={{…: {min(slices)!r}}}), shoal.Pipeline(…)]",
            found="stages send each other full activations, and this plan leaves them sharded",
            fix='use "head" instead of "logits" in the plan, and leave the norm layers out of it',
        )


def _form(tensors: Sequence[Tensor]) -> Form:
    return tuple((tensor.size(), tensor.dtype) for tensor in tensors)


def _form_of(inputs: Inputs) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    leaves = ((name, leaf) for name, value in inputs.items() for leaf in tree_flatten(value)[0])
    return tuple((name, leaf.size(), leaf.dtype) for name, leaf in leaves if isinstance(leaf, Tensor))


def _examples(form: Form) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(size, dtype=dtype, device="meta", requires_grad=learns(dtype))
        for size, dtype in form
    )


def _filled_up(inputs: Inputs, samples: int, rows: int) -> Inputs:
    """Return the inputs with tensors of `samples` rows padded to `rows` by copies of the last row."""

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != samples or samples == rows:
            return leaf
        return torch.cat((leaf, leaf[-1:].expand(rows - samples, *leaf.shape[1:])))

    return {name: tree_map(fill, value) for name, value in inputs.items()}


def _real(leaf: Any, samples: int, rows: int) -> Any:
    """Return the rows of an output that belong to real samples."""
    full = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows
    return leaf[:samples] if full else leaf


def _is_sum(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.requires_grad


def _forbid_calls(module: nn.Module) -> None:
    kind = type(module).__name__

    def forward(*_: Any, **__: Any) -> NoReturn:
        raise StepError(
            given=f"a call of the {kind} itself, which is split into a pipeline",
            found="each rank has only some of the stages of the model",
            fix="step = shoal.Step(model, optimizer, task); step(batch) and shoal.evaluate(step, data) "
            "run all of them",
        )

    module.forward = forward
