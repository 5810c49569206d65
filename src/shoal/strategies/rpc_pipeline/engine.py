"""The engine of `RPCPipeline`: stages on several ranks that send each other messages through torch RPC.

All ranks run the same micro-batches in a turn, which is a step or an inference. In its main thread,
each rank runs the passes of its stage whose values have arrived: the forward pass of a micro-batch on
the outputs of the stage before, the backward pass on the gradients from the stage after. The threads of
RPC only pass messages.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal._torch.dispatch import tree_leaves, tree_map_only
from shoal.data.batch import Batch
from shoal.data.micro import Drawing, Draws, MicroBatch
from shoal.distributed.world import World
from shoal.strategies.contracts import no_gradient
from shoal.strategies.correction import AnyTotals
from shoal.strategies.engine import ReducerEngine
from shoal.strategies.held_parameters import HeldParameters
from shoal.strategies.local import mixed
from shoal.strategies.mesh_reducer import MeshReducer
from shoal.strategies.partition.assignment import StageAssignment
from shoal.strategies.partition.inputs import Inputs, by_name, evaluating, hold
from shoal.strategies.partition.own_stages import DrawCounts, OwnStages
from shoal.strategies.partition.stages import OuterGraph, Stage
from shoal.strategies.rpc import RPCAgent
from shoal.strategies.rpc_pipeline.messages import Inbox, Message, PassQueue, StagePass, TurnDone
from shoal.strategies.task import Task
from shoal.telemetry.step_timer import BACKWARD, COMMUNICATION, FORWARD, UPDATE
from shoal.util.errors import ShoalError, StepError

Answer: TypeAlias = tuple[ShoalError | None, Any]
"""The answer of a rank: an error or a value. torch would turn a raised error into RuntimeError."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class TurnWork:
    """The micro-batches of a turn. `factor` multiplies the losses; None means inference."""

    task: Task
    micros: Sequence[MicroBatch]
    seed: int
    autocast: torch.dtype | None
    factor: float | None


class RPCPipelineEngine(ReducerEngine):
    """Engine of this rank's stage. The driver, the first rank of the last stage, reports the loss."""

    reducer: MeshReducer

    def __init__(
        self,
        module: nn.Module,
        world: World,
        outer: OuterGraph,
        stages: Sequence[Stage],
        crew: StageAssignment,
    ) -> None:
        rank = world.rank
        self._crew = crew
        self._number = crew.stage(rank)
        self._stage = stages[self._number]
        self._calls = world.service(RPCAgent)
        self._counts = DrawCounts(stages, _CPU)
        owners = [world.layout.coordinate(ranks[0], "pipeline") for ranks in crew.ranks]
        self._own = OwnStages(outer, stages, [self._number], owners, world, self._compute_alone)
        hold(module, self._own.kept, world.device)
        peers, group = _peers_of(world, crew)
        first = rank == peers[0]
        reducer = MeshReducer(
            HeldParameters(module, world, may_be_empty=True),
            reports_loss=self._number == crew.last,  # each rank of that stage that of its micro-batches
            gradient_group=group,
            buffer_group=group,
            norm=lambda held: held.norm() if first else torch.zeros(()),
        )
        super().__init__(reducer)
        self.reports_loss = rank == crew.driver
        self._others = [other for other in crew.everyone if other != rank]
        replica = crew.ranks[self._number].index(rank)
        self.noise_stream = f"noise of replica {replica}" if replica else "noise"
        self._inbox = Inbox(lambda: self._calls.look(self._others))
        self._graphs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        """The received and the computed values of the micro-batches between their two passes."""
        self._calling = threading.Lock()
        self._key = world.broadcast(secrets.token_hex(16))
        self._calls.serve(self._key, self)
        world.barrier()  # an earlier call would not find the object
        module.forward = partial(_call_from_here, ref(self))

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> AnyTotals:
        """Run the passes through all stages, and sum over replicas; see the contract."""
        timeline = self.world.timeline
        timeline.enter(FORWARD)
        factor = scale / batch.size
        work = TurnWork(
            task=task, micros=batch.micros, seed=batch.seed, autocast=autocast, factor=factor
        )
        self._prove(work)
        self._take_part(work)
        with self._calls.explained(self._others):
            self.reducer.reduce()
            timeline.enter(UPDATE)
            return self.reducer.totals()

    def infer(self, task: Task, micro: MicroBatch, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the output on the driver, None on other ranks. Collective."""
        work = TurnWork(task=task, micros=[micro], seed=seed, autocast=autocast, factor=None)
        self._prove(work)
        return self._take_part(work)

    def compile(self, how: str) -> None:
        """Compile this rank's stage, or its blocks."""
        if how == "script":
            raise StepError(
                given="compile='script' with shoal.RPCPipeline(…)",
                found="TorchScript cannot call a traced part of a model",
                fix="compile='inductor'",
            )
        self._own.compile(how, [self._stage.body])

    def _prove(self, work: TurnWork) -> None:
        """Compare the stages with the original model, for micro-batches of a new structure."""
        for micro in work.micros:
            inputs = partial(self._own.inputs, work.task, micro, work.seed)
            flow = partial(self._take_part, replace(work, micros=[micro], factor=None))
            self._own.prove(micro, work.seed, inputs, flow, work.autocast, structure=micro.value)

    def _compute_alone(self, _: int, name: str, args: Any, kwargs: Any) -> Any:
        """Call one module of this rank's stage."""
        return self._stage.body.get_submodule(name)(*args, **kwargs)

    def _take_part(self, work: TurnWork) -> Any:
        """Do this rank's part of a turn; return an inference's output on the driver. Collective."""
        rank, turn, output = self.world.rank, self._inbox.begin(), None
        mine = self._crew.micros(rank, len(work.micros))
        ahead = -(-(len(self._crew.everyone) + 1) // len(self._crew.ranks[self._number]))
        queue = PassQueue(mine, ahead=ahead, backward=work.factor is not None)
        for micro in mine if self._number == 0 else ():
            queue.add(StagePass("F", micro, ()))
        absent = {*self._others}
        before = self.world.timeline.enter(COMMUNICATION)
        try:
            self.held.check_converted()
            while not queue.over:
                if not self._receive(queue, absent) and (taken := queue.take()) is not None:
                    output = self._run(work, turn, taken, queue)
            self._calls.tell(self._others, self._key, "post", turn, TurnDone(rank, None))
            while absent:
                self._receive(queue, absent)
            return output
        except BaseException as error:  # interrupts too: the others would wait
            over = TurnDone(rank, self._described(error))
            for other in self._others:
                with suppress(ShoalError, RuntimeError):  # gone: the original error says more
                    self._calls.ask(other, self._key, "post", turn, over)
            raise
        finally:
            self._graphs.clear()
            self._inbox.end()
            self.world.timeline.enter(before)

    def _receive(self, queue: PassQueue, absent: set[int]) -> bool:
        """Receive a message, for which this rank waits if no pass is ready. Return whether it came.

        Raises the error of a rank whose part of the turn failed; removes others from `absent`.
        """
        self.world.timeline.enter(COMMUNICATION)
        message = self._inbox.receive(wait=not queue.ready)
        if isinstance(message, StagePass):
            queue.add(message)
        elif message is not None:
            if message.error is not None:
                raise message.error
            absent.discard(message.rank)
        return message is not None

    def _run(self, work: TurnWork, turn: int, given: StagePass, queue: PassQueue) -> Any:
        """Run a pass, and send its results. Return the output of an inference on the driver."""
        if given.kind == "B":
            self.world.timeline.enter(BACKWARD)
            received, roots = self._graphs.pop(given.micro)
            self._run_backward(received, roots, given.values)
            if received:
                gradients = [leaf.grad for leaf in received]
                self._send(turn, self._number - 1, StagePass("B", given.micro, gradients))
            return None
        self.world.timeline.enter(FORWARD)
        output = self._run_forward(work, work.micros[given.micro], given.values)
        last = self._number == self._crew.last
        if not last:
            self._send(turn, self._number + 1, StagePass("F", given.micro, _on(_CPU, output)))
        if work.factor is None:
            return output if last else None
        roots = _learning(output)
        self._graphs[given.micro] = _learning(given.values), roots
        if last or not roots:  # no later stage sends gradients
            queue.add(StagePass("B", given.micro, [torch.ones_like(root) for root in roots]))
        return None

    def _run_forward(self, work: TurnWork, micro: MicroBatch, received: Sequence[Any]) -> Any:
        """Return the output of this rank's stage; in a step, that of the last one is its loss."""
        inputs = self._own.inputs(work.task, micro, work.seed) if self._stage.needed else {}
        with mixed(self.world.device, work.autocast):
            with Drawing(None if self._own.compiled else Draws(micro, work.seed)):
                output = self._compute(self._stage.body, received, inputs)
            if self._number < self._crew.last or work.factor is None:
                return output
            loss, count = work.task.reduce(output, micro, work.seed)
        if not loss.requires_grad:
            raise no_gradient()
        self.held.losses.append((loss.detach(), count, micro.weight))
        return loss * (work.factor * micro.weight)

    def _run_backward(
        self, received: Sequence[Tensor], roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        """Run backward to the parameters of this rank and to the received tensors."""
        inputs = self.held.leaves(*roots)  # and the received tensors
        pairs = zip(roots, gradients, strict=True)
        known = [(root, each.to(root.device)) for root, each in pairs if each is not None]
        if known and inputs != []:
            tensors, seeds = zip(*known, strict=True)
            torch.autograd.backward(tensors, seeds, inputs=inputs)

    def _send(self, turn: int, stage: int, message: StagePass) -> None:
        """Send a pass to the rank that runs it through a stage."""
        self._calls.send(self._crew.worker(stage, message.micro), self._key, "post", turn, message)

    def post(self, turn: int, message: Message) -> None:
        """Post a message of another rank to the main thread."""
        self._inbox.post(turn, message)

    def _compute(self, body: nn.Module, received: Sequence[Any], inputs: Inputs) -> Any:
        """Run a stage on values that it may change in place."""
        values = _on(self.world.device, self._counts.taken_from(received), copy=True)
        output = body(*values, *(inputs[name] for name in self._stage.needed))
        return output if self._number == self._crew.last else self._counts.added_to(output)

    def call(self, args: Any, kwargs: Any) -> Any:
        """Return the output of the model on the calling rank. Not collective."""
        inputs = by_name(self._own.signature, args, kwargs, type(self.module).__name__)
        error, output = self.called(inputs, self._crew.last, self.module.training)
        if error is not None:
            raise error
        return _on(self.world.device, output)

    def called(self, inputs: Inputs, stage: int, training: bool) -> Answer:
        """Return the output of `stage` for the model's inputs, computed on its rank.

        `training` is the mode of the caller. A rank that is training keeps its mode if another rank
        calls the model in eval mode.
        """
        if stage != self._number:
            answer: Answer = self._calls.ask(
                self._crew.ranks[stage][0], self._key, "called", _on(_CPU, inputs), stage, training
            )
            return answer
        error, received = self.called(inputs, stage - 1, training) if stage else (None, ())
        if error is not None:
            return error, None
        try:
            with self._calling, torch.no_grad():
                evaluates = self.module.training and not training
                body = evaluating(self._stage.body) if evaluates else self._stage.body
                return None, _on(_CPU, self._compute(body, received, _on(self.world.device, inputs)))
        except Exception as caught:
            return self._described(caught), None

    def _described(self, error: BaseException) -> ShoalError:
        """Return the description of an error for other ranks."""
        if isinstance(error, ShoalError):
            return error
        # `failure.is_by_peer` recognizes this fix.
        return StepError(
            given=f"{self._crew.title(self.world.rank)} of a {type(self.module).__name__}, on "
            f"{self._calls.hosts[self.world.rank]}",
            found=f"{type(error).__name__}: {error}",
            fix="see that rank's own error; python train.py in one process may show more",
        )


def _peers_of(world: World, crew: StageAssignment) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
    """Return the ranks that run this rank's stage, and their group if there are several. Collective."""
    lines = list(world.layout.groups("pipeline"))
    mine = world.layout.group(world.rank, "pipeline")
    found: tuple[tuple[int, ...], dist.ProcessGroup | None] = ((), None)
    for ranks in crew.ranks:
        places = [mine.index(rank) for rank in ranks]
        members = tuple(line[place] for line in lines for place in places)
        group = dist.new_group(list(members)) if len(members) > 1 else None
        if world.rank in members:
            found = members, group
    world.watchdog.extend_torch_timeouts()
    return found


def _call_from_here(engine: ref[RPCPipelineEngine], *args: Any, **kwargs: Any) -> Any:
    """Run the model from this rank: the `forward` of the user's module."""
    here = engine()
    if here is None:
        raise RuntimeError("the world of this model is closed")
    if torch.is_grad_enabled():
        raise StepError(
            given=f"a direct call of {type(here.module).__name__}, whose stages are on different ranks",
            found="gradients cannot flow back through such a call",
            fix="step = shoal.Step(model, optimizer, task); step(batch) trains; for the output only: "
            "with torch.no_grad(): model(inputs)",
        )
    return here.call(args, kwargs)


def _on(device: torch.device, tree: Any, *, copy: bool = False) -> Any:
    """Move the tensors of a tree to a device. Tensors are sent between ranks from CPU memory."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=copy), tree)


def _learning(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree through which gradients flow."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
