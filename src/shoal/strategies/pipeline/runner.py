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
from shoal.data.micro import Micro
from shoal.distributed import objects
from shoal.distributed.world import World
from shoal.strategies.contracts import Totals, no_gradient
from shoal.strategies.engine import Runner
from shoal.strategies.eval_mode import untouched
from shoal.strategies.fsdp.options import FSDP
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
from shoal.strategies.partition.check import CutProof
from shoal.strategies.partition.inputs import Inputs, bring, by_name, hold
from shoal.strategies.partition.members import StageRanks
from shoal.strategies.partition.stages import Outer, Stage, keep_only, tied
from shoal.strategies.partition.unsplit import Uncut
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
    """Runs the stages of this rank in the order of the schedule; the last one reports the loss.

    `owners` is the rank within the pipeline of each stage; `stage_strategy` says how FSDP divides the
    parameters of stages where the layout has an axis for it.

    All micro-batches of a batch get one shape: shorter ones are filled up with copies of their last
    sample, and the loss sees the output of the real ones only. torch has to know the shapes of what
    travels; they are learned by one forward of a micro-batch whenever its shape is a new one.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        outer: Outer,
        stages: Sequence[Stage],
        owners: Sequence[int],
        *,
        schedule: str,
        stage_strategy: FSDP,
    ) -> None:
        self._module = module
        self._world = world
        self._division = division_of(module)
        _refuse_slices(self._division)
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
        kept = [stages[number] for number in mine]
        units = find_units(module, stage_strategy.modules) if self._sharded else []
        members = StageRanks(self._group, self._place, self._owners, world.device)
        uncut = Uncut(outer, stages, members, self._compute_alone)
        self._proof = CutProof(uncut, module, world, outer.given)
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
        self._sums_up = False
        """Whether a short micro-batch gave a number that the model itself computed over its samples."""
        self._loss_of: Callable[[Any, int], Tensor]
        """What torch differentiates, of an output and the number of its micro-batch."""
        _refuse_calls(module)

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        """Run the schedule, then sum gradients over replicas; see the contract."""
        timeline = self._world.timeline
        timeline.enter(FORWARD)
        self._held.check_converted()
        self._compute_in(autocast)
        inputs = [self._inputs(task, micro, batch.seed) for micro in batch.micros]
        for one, micro in zip(inputs, batch.micros, strict=True):
            self._prove(one, micro, autocast)
        # Of this batch alone: a run that resumes here must not know of the batches before.
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
        timeline.enter(BACKWARD)
        tensors = self._division is not None and not self._compiled
        with other_gradients_kept(self._held), schedule_marked(timeline, tensors=tensors):
            try:
                numbers = list(range(len(inputs)))
                named = [{"micro": number} for number in numbers]
                step_micro_batches(schedule, named, numbers)
            except Exception as error:
                self._built = None  # it was left in the middle
                if isinstance(error.__cause__, ShoalError):
                    raise error.__cause__ from None
                if self._kind.splits and isinstance(error, RuntimeError):
                    raise self._not_split(error) from error
                raise
        self._refuse_sums(batch)
        self._reducer.reduce()
        timeline.enter(UPDATE)
        return self._reducer.totals()

    def _not_split(self, error: RuntimeError) -> StepError:
        return StepError(
            given=f"shoal.Pipeline(schedule={self._name!r}) around {type(self._module).__name__}",
            found="torch failed where backward runs in two parts, which it can't for all models: "
            f"{str(error.__cause__ or error).strip().partition(chr(10))[0]}",
            fix="schedule='interleaved', whose backward is whole",
        )

    def infer(self, task: Task, micro: Micro, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the output where the last stage is, None elsewhere. Collective."""
        self._compute_in(autocast)
        inputs = self._inputs(task, micro, seed)
        if self._division is not None and not self._division.proved:
            self._division.prove(self._module, self._world, lambda: self._flow(inputs)[0], inputs)
        self._prove(inputs, micro, autocast)
        output, _ = self._flow(inputs)
        return output

    def compile(self, how: str) -> None:
        """Compile each stage; what travels between them stays outside."""
        if how == "script" or self._kind.splits:
            found = (
                "TorchScript can't call a part of a model that was traced"
                if how == "script"
                else "it runs backward in two parts, and compiled code has only one"
            )
            raise StepError(
                given=f"compile={how!r} with shoal.Pipeline(schedule={self._name!r})",
                found=found,
                fix="compile='inductor' with schedule='1f1b' or 'interleaved'",
            )
        for part in self._parts.values():
            part.compile()
        self._compiled = True

    def _place_parameters(
        self,
        stage_strategy: FSDP,
        kept: Sequence[Stage],
        units: Sequence[nn.Module],
    ) -> None:
        """Give stages memory on the device, divide them if asked; stages and module share tensors."""
        module, world = self._module, self._world
        if self._sharded:
            if tied(kept, range(len(kept))) is not None:
                raise StepError(
                    given=f"shoal.Pipeline(…) around {type(module).__name__} with '{world.layout}'",
                    found="a parameter of two stages on one rank can't be divided twice",
                    fix="layout='replicate=…,pipeline=…', or copies of their own",
                )
            meta = any(p.is_meta for p in module.parameters())
            for part in self._parts.values():
                inside = {id(one) for one in part.modules()}
                stage_strategy.divide(part, [unit for unit in units if id(unit) in inside], world)
                if meta:
                    part.to_empty(device=world.device)
            bring(module, kept, world.device)
        else:
            hold(module, kept, world.device)

    def _prove(self, inputs: Inputs, micro: Micro, autocast: torch.dtype | None) -> None:
        """Compare the stages with the uncut model, if inputs like these come for the first time."""
        if self._compiled and self._module.training:
            return  # compiled code draws other numbers than the same code that is not
        # Divided stages are gathered by ranks with other samples, which may have been proved already.
        structure = None if self._sharded else inputs
        self._proof.check(
            structure, micro.value, lambda: inputs, lambda: self._flow(inputs)[0], autocast
        )

    def _compute_alone(self, number: int, name: str, args: Any, kwargs: Any) -> Any:
        """Call one module of a stage, as within the stage."""
        part = self._parts[number]
        call = partial(part.body.get_submodule(name), *args, **kwargs)
        return part.run_alone(call) if self._sharded else call()

    def _compute_in(self, autocast: torch.dtype | None) -> None:
        for part in self._parts.values():
            part.autocast = autocast

    def _inputs(self, task: Task, micro: Micro, seed: int) -> Inputs:
        return by_name(self._signature, *task.arguments(micro, seed), type(self._module).__name__)

    def _schedule(
        self, inputs: Sequence[Inputs], autocast: torch.dtype | None
    ) -> tuple[Any, list[PipelineStage]]:
        """The schedule for inputs of this form, made when the form is another than before."""
        forms = {_form_of(one) for one in inputs}
        if len(forms) > 1:
            shapes = sorted({str([tuple(size) for _, size, _ in form]) for form in forms})
            raise StepError(
                given=f"{len(inputs)} micro-batches of one batch in a pipeline",
                found=f"inputs of different shapes: {' and '.join(shapes[:2])}",
                fix="collate them to one length, or shoal.Loader(…, micro_batches=1)",
            )
        key = (forms.pop(), autocast, len(inputs))
        if self._built is None or self._built[0] != key:
            if key not in self._forms:
                self._forms[key] = self._learned(inputs[0])
            self._built = (key, *self._build(self._forms[key], len(inputs)))
        return self._built[1], self._built[2]

    @torch.no_grad()
    def _learned(self, inputs: Inputs) -> dict[int, tuple[Form, Form]]:
        """The forms of what travels, from a forward that leaves nothing behind.

        In the mode that there is: in the other one layers may compute in another dtype.
        """
        with untouched(self._module, inputs):
            _, forms = self._flow(inputs)
        return forms

    def _build(
        self, forms: Mapping[int, tuple[Form, Form]], micro_batches: int
    ) -> tuple[Any, list[PipelineStage]]:
        stages: list[PipelineStage] = [
            MarkedStage(
                self._world.timeline,
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

    def _refuse_sums(self, batch: Batch) -> None:
        """What the model itself sums up over samples is wrong where micro-batches were filled up."""
        even = batch.size % (self._world.data_size * len(batch.micros)) == 0
        if even or not any(self._world.gather(self._sums_up)):
            return
        raise StepError(
            given=f"a number among the outputs of a {type(self._module).__name__} in a pipeline",
            found="it was computed over samples of which some only fill a short micro-batch up",
            fix="compute it in the loss, from outputs with a row for each sample; or "
            "shoal.Loader(…, drop_last=True) with equal micro-batches",
        )

    def _flow(self, inputs: Inputs) -> tuple[Any, dict[int, tuple[Form, Form]]]:
        """One forward through all stages, of any shape; the forms of what this rank's ones saw."""
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
            except Exception as error:  # later stages of this rank hear of it too, and pass it on
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
        """Let the stages to come fail as well, instead of waiting."""
        if not isinstance(error, ShoalError):
            error = StepError(
                given=f"a stage of a {type(self._module).__name__} on rank {self._world.rank}",
                found=f"{type(error).__name__}: {error}",
                fix="see that rank's own error; python train.py, in one process, may show more",
            )
        objects.send(error, self._group, to)

    def _send(self, tensors: Sequence[Tensor], to: int) -> None:
        objects.send(_form(tensors), self._group, to)
        for tensor in tensors:
            dist.send(tensor, group=self._group, group_dst=to)

    def _receive(self, source: int) -> tuple[Tensor, ...]:
        found: ShoalError | Form = objects.receive(self._group, source)
        if isinstance(found, ShoalError):
            raise found
        tensors = tuple(
            torch.empty(size, dtype=dtype, device=self._world.device) for size, dtype in found
        )
        for tensor in tensors:
            dist.recv(tensor, group=self._group, group_src=source)
        return tensors


def _refuse_slices(division: ShardedLayers | None) -> None:
    slices = set() if division is None else {"sequence", "logits"} & division.ways
    if slices:
        raise StepError(
            given=f"[shoal.TensorParallel(plan={{…: {min(slices)!r}}}), shoal.Pipeline(…)]",
            found="stages send each other whole activations, and this leaves them divided",
            fix='"head" for logits, and norms left out of the plan',
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
    """Tensors of `samples` rows, with copies of the last one up to `rows` of them."""

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != samples or samples == rows:
            return leaf
        return torch.cat((leaf, leaf[-1:].expand(rows - samples, *leaf.shape[1:])))

    return {name: tree_map(fill, value) for name, value in inputs.items()}


def _real(leaf: Any, samples: int, rows: int) -> Any:
    """The rows of an output that belong to samples."""
    full = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows
    return leaf[:samples] if full else leaf


def _is_sum(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.requires_grad


def _refuse_calls(module: nn.Module) -> None:
    kind = type(module).__name__

    def forward(*_: Any, **__: Any) -> NoReturn:
        raise StepError(
            given=f"a call of the {kind} itself, which is cut into a pipeline",
            found="each rank has some of its stages",
            fix="step = shoal.Step(model, optimizer, task); step(batch) and shoal.evaluate(step, data) "
            "run all of them",
        )

    module.forward = forward
