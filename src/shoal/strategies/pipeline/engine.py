"""The engine of a pipeline: torch's schedules over this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from shoal._torch.autograd import leaves_of
from shoal._torch.dispatch import tree_flatten, tree_map
from shoal._torch.pipelining import failed_to_split, step_micro_batches
from shoal.data.batch import Batch
from shoal.data.micro import Draws, MicroBatch
from shoal.distributed.pipeline_schedules import SCHEDULES, micro_batches_refused
from shoal.distributed.world import World
from shoal.strategies.contracts import no_gradient
from shoal.strategies.correction import AnyTotals
from shoal.strategies.coupling.notice import say_draws
from shoal.strategies.deferred_init import allocate
from shoal.strategies.engine import ReducerEngine
from shoal.strategies.eval_mode import untouched
from shoal.strategies.fsdp.engine import GatheredPrecision
from shoal.strategies.fsdp.options import FSDP
from shoal.strategies.held_parameters import HeldParameters, first
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
from shoal.strategies.partition.elsewhere import NOT_HERE, RETURN_IT
from shoal.strategies.partition.inputs import Inputs, bring, hold
from shoal.strategies.partition.own_stages import DrawCounts, OwnStages
from shoal.strategies.partition.stages import OuterGraph, Stage, tied
from shoal.strategies.pipeline.flow import Form, Forms, StageFlow
from shoal.strategies.pipeline.stage import (
    MarkedStage,
    StagedBatch,
    StageModule,
    learns,
    schedule_marked,
    staged,
)
from shoal.strategies.random_draws.draws import slices_of
from shoal.strategies.sharded_layers.sharded_modules import ShardedLayers, division_of
from shoal.strategies.task import Task, place
from shoal.telemetry.step_timer import BACKWARD, FORWARD, UPDATE
from shoal.util.errors import ShoalError, StepError


class PipelineEngine(ReducerEngine):
    """Engine of the stages of this rank in the order of the schedule. The last stage reports the loss.

    `owners` are the ranks of the stages within the pipeline. `stage_strategy` defines how FSDP shards
    the parameters of stages if the layout has an axis for it.

    All micro-batches of a batch get one shape: shorter ones are padded with copies of their last
    sample, and the loss gets only the outputs of the real samples. torch must know the shapes of the
    tensors between stages. A forward pass of one micro-batch finds them for each new shape of the
    inputs.
    """

    reducer: MeshReducer

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
        self._division = division_of(module)
        _check_sharded_activations(self._division)
        self._kind = SCHEDULES[schedule]
        self._name = schedule
        self._owners = list(owners)
        self._place = world.layout.coordinate(world.rank, "pipeline")
        self._group = world.mesh["pipeline"].get_group()
        mine = [number for number, owner in enumerate(owners) if owner == self._place]
        last = len(stages) - 1
        counts = DrawCounts(stages, world.device)
        self._parts = {
            number: StageModule(stages[number], world, counts, last=number == last) for number in mine
        }
        if self._division is not None:
            self._division.run_in_stages()
        self._flow = StageFlow(type(module).__name__, world, self._parts, self._owners)
        self._sharded = world.layout.degree("shard") > 1
        self._precisions: list[GatheredPrecision] = []
        """Those of the sharded stages of this rank."""
        units = find_units(module, stage_strategy.modules) if self._sharded else []
        self._own = OwnStages(outer, stages, mine, self._owners, world, self._compute_alone)
        self._place_parameters(module, world, stage_strategy, units)
        reducer = MeshReducer(
            HeldParameters(module, world),
            reports_loss=last in mine and first_along(world, "context", "tensor"),
            gradient_group=summing_group(world),
            buffer_group=data_group(world),
            norm=norm_of_parts,
            sharded=self._sharded,
        )
        super().__init__(reducer)
        self._forms: dict[object, Forms] = {}
        self._built: tuple[object, Any, list[PipelineStage]] | None = None
        self._current = StagedBatch((), 0, ())
        self._sums_up = False
        """Whether the model returned a sum over the samples of a padded micro-batch."""
        self._in_loss: set[str] = set()
        """The parameters that the loss of the first batch uses directly."""
        self._loss_of: Callable[[Any, int], Tensor]
        """The loss of an output, given the number of its micro-batch."""
        _forbid_calls(module)

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> AnyTotals:
        """Run the schedule, then sum gradients over replicas; see the contract."""
        timeline = self.world.timeline
        timeline.enter(FORWARD)
        self.held.check_converted()
        self._compute_in(autocast)
        inputs = [self._own.inputs(task, micro, batch.seed) for micro in batch.micros]
        self._find_slices(inputs[0], batch.micros[0], batch.seed)
        for one, micro in zip(inputs, batch.micros, strict=True):
            self._prove(one, micro, batch.seed, autocast)
        self._current = _, rows, _ = staged(
            batch, keyed=not self._own.compiled
        )  # stages of compiled code share no counts
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
        timeline.enter(BACKWARD)
        tensors = self._division is not None and not self._own.compiled
        with other_gradients_kept(self.held), schedule_marked(timeline, tensors=tensors):
            try:
                numbers = list(range(len(inputs)))
                named = [{"micro": number} for number in numbers]
                step_micro_batches(schedule, named, numbers)
            except Exception as error:
                self._built = None  # the schedule was interrupted
                if isinstance(error.__cause__, ShoalError):
                    raise error.__cause__ from None
                if failed_to_split(error):
                    raise self._not_split(error) from error
                raise
        self._check_sums(batch)
        self._check_loss(task)
        say_draws(self.module, self.world)
        self.reducer.reduce()
        timeline.enter(UPDATE)
        return self.reducer.totals()

    def _not_split(self, error: Exception) -> StepError:
        return StepError(
            given=f"shoal.Pipeline(schedule={self._name!r}) around {type(self.module).__name__}",
            found="torch failed to run backward in two parts, which only some models support: "
            f"{str(error.__cause__ or error).strip().partition(chr(10))[0]}",
            fix="use schedule='interleaved', which does not split the backward pass",
        )

    def infer(self, task: Task, micro: MicroBatch, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the output on the rank of the last stage, None on others. Collective."""
        self._compute_in(autocast)
        inputs = self._own.inputs(task, micro, seed)
        if self._division is not None and not self._division.proved:
            call = partial(self._output, inputs, micro, seed)
            self._division.prove(self.module, self.world, call, inputs)
        self._find_slices(inputs, micro, seed)
        if not self.module.training:  # in a trial, some layers are in eval mode; a step compares them
            self._prove(inputs, micro, seed, autocast)
        return self._output(inputs, micro, seed)

    def _output(self, inputs: Inputs, micro: MicroBatch, seed: int) -> Any:
        """Return the output on the rank of the last stage, None on others. Collective."""
        output, _ = self._flow.run(inputs, Draws(micro, seed))
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
        self._own.compile(how, self._parts.values())

    def _place_parameters(
        self, module: nn.Module, world: World, stage_strategy: FSDP, units: Sequence[nn.Module]
    ) -> None:
        """Allocate the stages on the device, sharded if needed, with the same tensors as the module."""
        kept = self._own.kept
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
                    allocate(part, world.device)
            bring(module, kept, world.device)
        else:
            hold(module, kept, world.device)

    def _find_slices(self, inputs: Inputs, micro: MicroBatch, seed: int) -> None:
        """Find which slices of activations a rank draws numbers for, once. Collective."""
        slices, training = slices_of(self.module), self.module.training
        if slices is None or self._own.compiled or not training:
            return
        call = partial(self._output, inputs, micro, seed)
        # The mode of the model alone: ranks do not know the modes of the modules of other stages.
        slices.find(self.module, self.world, call, inputs, (training,))

    def _prove(
        self, inputs: Inputs, micro: MicroBatch, seed: int, autocast: torch.dtype | None
    ) -> None:
        """Compare the stages with the original model, for the first inputs of this structure."""
        # Ranks with other samples gather sharded stages too, and may have compared them already.
        structure = None if self._sharded else inputs
        flow = partial(self._output, inputs, micro, seed)
        self._own.prove(micro, seed, lambda: inputs, flow, autocast, structure=structure)

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
    def _learned(self, inputs: Inputs) -> Forms:
        """Return the forms of the tensors between stages, from a forward pass without side effects.

        Uses the current mode, because layers may compute in another dtype in the other mode.
        """
        first = self._current.draws[0]
        with untouched(self.module, inputs):
            _, forms = self._flow.run(inputs, first and Draws(first.micro, first.seed))
        return forms

    def _build(self, forms: Forms, micro_batches: int) -> tuple[Any, list[PipelineStage]]:
        stages: list[PipelineStage] = [
            MarkedStage(
                self.world,
                lambda: self._current,
                part,
                number,
                len(self._owners),
                self.world.device,
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
            ranks = self.world.layout.degree("pipeline")
            raise micro_batches_refused(self._name, ranks, micro_batches, error) from None
        return schedule, stages

    def _timed_loss(self, output: Any, number: int) -> Tensor:
        with self.world.timeline.within(FORWARD):
            return self._loss_of(output, number)

    def _loss(
        self, task: Task, batch: Batch, scale: float, rows: int, output: Any, number: int
    ) -> Tensor:
        micro = batch.micros[number]
        part = self._parts[len(self._owners) - 1]
        with mixed(self.world.device, part.autocast):
            found = part.whole(output)
            if micro.samples < rows:
                self._sums_up = self._sums_up or any(map(_is_sum, tree_flatten(found)[0]))
                found = tree_map(lambda leaf: _real(leaf, micro.samples, rows), found)
            loss, count = task.reduce(found, micro, batch.seed)
        if not self.held.unused_checked:
            outputs = [leaf for leaf in tree_flatten(found)[0] if isinstance(leaf, Tensor)]
            used = set(map(id, leaves_of([loss], outputs)))
            self._in_loss |= {n for n, p in self.module.named_parameters() if id(p) in used}
        if not loss.requires_grad:
            raise no_gradient()
        self.held.losses.append((loss.detach(), count, micro.weight))
        return loss * (scale * micro.weight / batch.size)

    def _check_loss(self, task: Task) -> None:
        """Raise StepError, after the first batch, if the loss uses parameters of the last stage."""
        if self.held.unused_checked:
            return
        used = sorted({name for names in self.world.gather(self._in_loss) for name in names})
        self._in_loss.clear()
        if used:
            self.discard()
            raise StepError(
                given=f"the loss function {place(task.loss)}, which uses {first(used)}",
                found=NOT_HERE,
                fix=RETURN_IT,
            )

    def _check_sums(self, batch: Batch) -> None:
        """Raise StepError if the model sums over samples of padded micro-batches, which is wrong."""
        even = batch.size % (self.world.data_size * len(batch.micros)) == 0
        if even or not any(self.world.gather(self._sums_up)):
            return
        raise StepError(
            given=f"a number among the outputs of a {type(self.module).__name__} in a pipeline",
            found="it was computed over samples that include the padding of a short micro-batch",
            fix="compute it in the loss, from outputs with a row for each sample; or use "
            "shoal.Loader(…, drop_last=True) with equal micro-batches",
        )


def _check_sharded_activations(division: ShardedLayers | None) -> None:
    slices = set() if division is None else {"sequence", "logits"} & division.ways
    if slices:
        raise StepError(
            given=f"[shoal.TensorParallel(plan={{…: {min(slices)!r}}}), shoal.Pipeline(…)]",
            found="stages send each other full activations, and this plan leaves them sharded",
            fix='use "head" instead of "logits" in the plan, and leave the norm layers out of it',
        )


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
            given=f"a direct call of {kind}, whose stages are on different ranks",
            found=NOT_HERE,
            fix="step = shoal.Step(model, optimizer, task); step(batch) and shoal.evaluate(step, data) "
            "run all of them",
        )

    module.forward = forward
