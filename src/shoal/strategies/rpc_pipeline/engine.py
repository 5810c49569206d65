"""The engine of `RPCPipeline`: stages on several ranks that call each other through torch RPC.

All ranks run the same micro-batches in a turn, which is a step or an inference. The rank of the last
stage drives it: for each micro-batch a thread asks the last stage for its output, which asks the stage
before it, and so on, under torch's distributed autograd. Activations and gradients therefore travel
directly between neighbors. The forward runs in the main thread of each rank, in the order of the
micro-batches; that thread waits while a backward pass runs in one of torch's own threads.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias
from weakref import ref

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn

from shoal._torch.dispatch import tree_leaves, tree_map_only
from shoal.data.batch import Batch
from shoal.data.micro import Drawing, Draws, MicroBatch
from shoal.distributed.world import World
from shoal.strategies.compiled import RepeatedBlocks, compile_parts
from shoal.strategies.contracts import no_gradient
from shoal.strategies.correction import AnyTotals
from shoal.strategies.engine import ReducerEngine
from shoal.strategies.held_parameters import HeldParameters
from shoal.strategies.local import mixed
from shoal.strategies.mesh_reducer import MeshReducer
from shoal.strategies.partition.assignment import StageAssignment
from shoal.strategies.partition.check import SplitCheck
from shoal.strategies.partition.draw_counts import DrawCounts
from shoal.strategies.partition.groups import members_of, peers_of
from shoal.strategies.partition.inputs import Inputs, by_name, evaluating, hold
from shoal.strategies.partition.stages import OuterGraph, Stage, keep_only
from shoal.strategies.partition.unsplit import UnsplitModel
from shoal.strategies.rpc import RPCAgent
from shoal.strategies.rpc_pipeline.messages import (
    BackwardMessage,
    ForwardQueue,
    ForwardRequest,
    Inbox,
    MicroBatchDone,
    ReadyMessage,
    TurnDone,
    TurnWork,
)
from shoal.strategies.rpc_pipeline.threads import MicroBatchThreads
from shoal.strategies.task import Task
from shoal.telemetry.step_timer import BACKWARD, COMMUNICATION, FORWARD, UPDATE
from shoal.util.errors import ShoalError, StepError

Answer: TypeAlias = tuple[ShoalError | None, Any]
"""The answer of a rank: an error or a value. torch would turn a raised error into RuntimeError."""

_CPU = torch.device("cpu")


class RPCPipelineEngine(ReducerEngine):
    """Engine of this rank's stage, on request. The driver drives the others and reports the loss."""

    flops_unknown = "backward runs in threads of distributed autograd"

    def __init__(
        self,
        module: nn.Module,
        world: World,
        outer: OuterGraph,
        stages: Sequence[Stage],
        crew: StageAssignment,
    ) -> None:
        rank = world.rank
        self.module = module
        self.world = world
        self._crew = crew
        self._number = crew.stage(rank)
        self._compiled = False
        self._stage = stages[self._number]
        self.signature = outer.signature
        self._calls = world.service(RPCAgent)
        self._counts = DrawCounts(stages, _CPU)
        self._proof = SplitCheck(
            UnsplitModel(outer, stages, members_of(world, crew), self._compute_alone),
            module,
            world,
            outer.given,
        )
        self._blocks = RepeatedBlocks(module)
        self._blocks.keep_in([self._stage.body])
        keep_only(module, [self._stage], [stage for stage in stages if stage is not self._stage])
        hold(module, [self._stage], world.device)
        self._drives = rank == crew.driver
        peers, group = peers_of(world, crew)
        first = rank == peers[0]
        self._reducer = MeshReducer(
            HeldParameters(module, world, may_be_empty=True),
            reports_loss=self._drives,
            gradient_group=group,
            buffer_group=group,
            norm=lambda held: held.norm() if first else torch.zeros(()),
        )
        super().__init__(self._reducer)
        self._others = [other for other in crew.everyone if other != rank]
        replica = crew.ranks[self._number].index(rank)
        self.noise_stream = f"noise of replica {replica}" if replica else "noise"
        self._own = {id(parameter) for parameter in self.held.parameters}
        self._inbox = Inbox(self._look)
        self._error: Exception | None = None
        """The error of this rank's stage in this turn; others get a description of it."""
        self._calling = threading.Lock()
        self._collecting = threading.Lock()
        """Held while gradients are added and while a turn ends, so that none is added after its end."""
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
        losses = self._take_part(work)
        self.held.losses = [
            (loss, count, micro.weight)
            for (loss, count), micro in zip(losses, batch.micros, strict=bool(losses))
        ]
        with self._calls.explained(self._others):
            self._reducer.reduce()
            timeline.enter(UPDATE)
            return self._reducer.totals()

    def infer(self, task: Task, micro: MicroBatch, seed: int, *, autocast: torch.dtype | None) -> Any:
        """Return the output on the driver, None on other ranks. Collective."""
        work = TurnWork(task=task, micros=[micro], seed=seed, autocast=autocast, factor=None)
        self._prove(work)
        return self._output(work)

    def compile(self, how: str) -> None:
        """Compile this rank's stage, or its blocks."""
        if how == "script":
            raise StepError(
                given="compile='script' with shoal.RPCPipeline(…)",
                found="TorchScript cannot call a traced part of a model",
                fix="compile='inductor'",
            )
        if how == "blocks":
            self._blocks.compile()
        else:
            compile_parts([self._stage.body])
        self._compiled = True

    def _prove(self, work: TurnWork) -> None:
        """Compare the stages with the original model, for micro-batches of a new structure."""
        if self._compiled and self.module.training:
            return  # compiled code draws other random numbers
        for micro in work.micros:
            alone, value = replace(work, micros=[micro], factor=None), micro.value
            inputs, flow = partial(self._inputs, work, micro), partial(self._output, alone)
            draws = partial(Draws, micro, work.seed)
            self._proof.check(value, value, inputs, flow, draws, work.autocast)

    def _output(self, work: TurnWork) -> Any:
        """Return the output of a single micro-batch on the driver, None on other ranks."""
        outputs = self._take_part(work)
        return outputs[0] if self._drives else None

    def _inputs(self, work: TurnWork, micro: MicroBatch) -> Inputs:
        """Return the inputs of the model for one micro-batch."""
        arguments = work.task.arguments(micro, work.seed)
        return by_name(self.signature, *arguments, type(self.module).__name__)

    def _compute_alone(self, _: int, name: str, args: Any, kwargs: Any) -> Any:
        """Call one module of this rank's stage."""
        return self._stage.body.get_submodule(name)(*args, **kwargs)

    def _take_part(self, work: TurnWork) -> list[Any]:
        """Do this rank's part of a turn. Return the values of all micro-batches on the driver."""
        turn = self._inbox.begin()
        self._error = None
        line = ForwardQueue(self._crew.micros(self.world.rank, len(work.micros)))
        before = self.world.timeline.enter(COMMUNICATION)
        try:
            if self._drives:
                return self._drive(work, turn, line)
            self._serve(work, turn, line)
            return []
        finally:
            over = StepError(
                given=f"a micro-batch of a {type(self.module).__name__} in a step that is over",
                found=f"{self._crew.title(self.world.rank)} has ended it with an error",
                fix="see that rank's own error",
            )
            with self._collecting:
                left = [each for each in self._inbox.end() if isinstance(each, ForwardRequest)]
            for job in (*left, *line.left()):
                job.reply.set_result((over, None))
            self.world.timeline.enter(before)

    def _serve(self, work: TurnWork, turn: int, line: ForwardQueue) -> None:
        """Run micro-batches through this rank's stage until the driver ends the turn."""
        failed: ShoalError | None = None
        try:
            self.held.check_converted()
        except StepError as error:
            self._error = failed = error
        arrived = ReadyMessage(self.world.rank, failed)
        self._calls.ask(self._crew.driver, self._key, "post", turn, arrived)
        over = self._attend(work, line)  # only the driver gets other messages
        failure = self._error or over.error
        if failure is not None:
            raise failure

    def _drive(self, work: TurnWork, turn: int, line: ForwardQueue) -> list[Any]:
        """Run all micro-batches through the stages, then end the turn on the other ranks."""
        failed: BaseException | None = None
        carriers = MicroBatchThreads(
            len(work.micros),
            lambda micro: self._carry(work, turn, micro, carriers),
            lambda *carried: self._inbox.post(turn, MicroBatchDone(*carried)),
        )
        values: dict[int, Any] = {}
        try:
            self.held.check_converted()
            self._await_others(work, line)
            carriers.start(len(self._crew.everyone) + 1)
            while len(values) < len(work.micros):
                message = self._attend(work, line)
                if isinstance(message, MicroBatchDone):
                    if message.error is not None:
                        raise self._error or message.error
                    values[message.micro] = message.value
        except BaseException as error:  # interrupts too: else the others would assume success
            failed = error
            raise
        finally:
            carriers.stop()
            self._end(turn, failed)
        return [values[number] for number in range(len(work.micros))]

    def _await_others(self, work: TurnWork, line: ForwardQueue) -> None:
        """Wait until all ranks are ready. Raise the error of a rank that is not."""
        absent = {*self._others}
        while absent:
            message = self._attend(work, line)
            if isinstance(message, ReadyMessage):
                absent.discard(message.rank)
                if message.error is not None:
                    raise message.error

    def _end(self, turn: int, failed: BaseException | None) -> None:
        """End the turn on the other ranks, even if some of them are gone."""
        if failed is None:
            self._calls.tell(self._others, self._key, "post", turn, TurnDone(None))
            return
        over = TurnDone(self._described(failed))
        for rank in self._others:
            try:
                self._calls.ask(rank, self._key, "post", turn, over)
            except (ShoalError, RuntimeError):
                continue  # the original error says more

    def _look(self) -> None:
        """Raise StepError if a rank for which this one waits is gone; called after a long wait."""
        self._calls.look(self._others if self._drives else [self._crew.driver])

    def _attend(self, work: TurnWork, line: ForwardQueue) -> ReadyMessage | MicroBatchDone | TurnDone:
        """Run the forward passes of this rank's stage until another message arrives, and return it."""
        timeline = self.world.timeline
        while True:
            timeline.enter(BACKWARD if line.backward else COMMUNICATION)
            message = self._inbox.receive(wait=not line.ready)
            if message is None:
                timeline.enter(FORWARD)
                self._do(work, line)
            elif isinstance(message, ForwardRequest):
                line.add(message)
            elif isinstance(message, BackwardMessage):
                line.mark(message.micro, over=message.over)
            else:
                return message

    def _do(self, work: TurnWork, line: ForwardQueue) -> None:
        """Run one forward pass, and send the answer."""
        job = line.take()
        try:
            answer: Answer = (None, self._compute(work, job))
        except Exception as error:
            self._error = self._error or error
            answer = (self._described(error), None)
        except BaseException as error:
            job.reply.set_result((self._described(error), None))
            raise
        else:
            if self._number == self._crew.last and work.factor is not None:
                line.mark(job.micro, over=False)  # backward of a loss starts at once
        job.reply.set_result(answer)

    def _compute(self, work: TurnWork, job: ForwardRequest) -> Any:
        """Run one micro-batch through this rank's stage and, on the last one, through the loss."""
        device, micro = self.world.device, work.micros[job.micro]
        inputs: Inputs = {}
        if self._stage.needed:
            inputs = self._inputs(work, micro)
        if work.factor is not None:
            self._mark(job.received, job.micro, over=True)
        with mixed(device, work.autocast):
            with Drawing(None if self._compiled else Draws(micro, work.seed)):
                output = self._run(self._stage.body, job.received, inputs)
            if work.factor is not None:
                self._mark(output, job.micro, over=False)
            if self._number < self._crew.last:
                return _on(_CPU, output)
            if work.factor is None:
                return output  # only the driver uses it
            loss, count = work.task.reduce(output, micro, work.seed)
        if not loss.requires_grad:
            raise no_gradient()
        return _on(_CPU, (loss * (work.factor * micro.weight), (loss.detach(), count)))

    def _mark(self, tree: Any, micro: int, *, over: bool) -> None:
        """Post a message when backward reaches these tensors, from the thread that it runs in.

        torch.autograd.grad in a forward pass would also call hooks of tensors.
        """
        message, turn = BackwardMessage(micro, over), self._inbox.turn
        for node in {leaf.grad_fn for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}:
            if node is not None:
                node.register_prehook(lambda _: self.post(turn, message))

    def _run(self, body: nn.Module, received: Sequence[Any], inputs: Inputs) -> Any:
        needed = (inputs[name] for name in self._stage.needed)
        values = self._counts.taken_from(received)
        output = body(*_on(self.world.device, values), *needed)
        return output if self._number == self._crew.last else self._counts.added_to(output)

    def _carry(self, work: TurnWork, turn: int, micro: int, carriers: MicroBatchThreads) -> Any:
        """Run one micro-batch through all stages and back, in a separate thread of the driver."""
        last = self._crew.last
        if work.factor is None:
            return self._asked(last, turn, micro)
        with dist_autograd.context() as context:
            loss, shown = self._asked(last, turn, micro)
            with self._calls.explained(self._others):
                dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
            del loss
            # Always in the same order, so that sums have the same rounding.
            with carriers.turn_of(micro):
                workers = self._crew.workers(micro)
                away = [rank for rank in workers if rank != self.world.rank]
                with self._calls.telling(away, self._key, "collect", context, turn, micro):
                    if self.world.rank in workers:
                        self.collect(context, turn, micro)
        return shown

    def _asked(self, stage: int, turn: int, micro: int) -> Any:
        """Return the output of a stage for a micro-batch. Raise the error of the rank that failed."""
        worker = self._crew.worker(stage, micro)
        if worker == self.world.rank:
            error, value = self.passed(turn, micro)
        else:
            error, value = self._calls.ask(worker, self._key, "passed", turn, micro)
        if error is not None:
            raise error
        return value

    def passed(self, turn: int, micro: int) -> Answer:
        """Return the output of this rank's stage, with input requested from the stage before it."""
        try:
            received = self._asked(self._number - 1, turn, micro) if self._number else ()
        except Exception as error:
            return self._described(error), None
        reply: Future[Answer] = Future()
        if not self._inbox.post(turn, ForwardRequest(micro, received, reply)):
            return self._described(RuntimeError("the step is over")), None
        return reply.result()

    def collect(self, context: int, turn: int, micro: int) -> None:
        """Add the gradients of a micro-batch whose backward has ended to those of this rank.

        Does nothing after the turn: it has failed, and its gradients were dropped.
        """
        gradients = dist_autograd.get_gradients(context)  # type: ignore[attr-defined]
        with self._collecting, torch.no_grad():
            if not self._inbox.lasts(turn):
                return
            for parameter, gradient in gradients.items():
                if id(parameter) not in self._own:  # of another model that the loss used
                    continue
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient
        self.post(turn, BackwardMessage(micro, over=True))

    def post(self, turn: int, message: ReadyMessage | BackwardMessage | TurnDone) -> None:
        """Post a message of another rank or thread to the main thread."""
        self._inbox.post(turn, message)

    def call(self, inputs: Inputs) -> Any:
        """Return the output of the model on the calling rank. Not collective."""
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
                return None, _on(_CPU, self._run(body, received, _on(self.world.device, inputs)))
        except Exception as caught:
            return self._described(caught), None

    def _described(self, error: BaseException) -> ShoalError:
        """Return the description of an error for other ranks."""
        if isinstance(error, ShoalError):
            return error
        # `watchdog.peer_errors` recognizes this fix.
        return StepError(
            given=f"{self._crew.title(self.world.rank)} of a {type(self.module).__name__}, on "
            f"{self._calls.hosts[self.world.rank]}",
            found=f"{type(error).__name__}: {error}",
            fix="see that rank's own error; python train.py in one process may show more",
        )


def _call_from_here(engine: ref[RPCPipelineEngine], *args: Any, **kwargs: Any) -> Any:
    """Run the model from this rank: the `forward` of the user's module."""
    here = engine()
    if here is None:
        raise RuntimeError("the world of this model is closed")
    kind = type(here.module).__name__
    if torch.is_grad_enabled():
        raise StepError(
            given=f"a direct call of {kind}, whose stages are on different ranks",
            found="gradients cannot flow back through such a call",
            fix="step = shoal.Step(model, optimizer, task); step(batch) trains; for the output only: "
            "with torch.no_grad(): model(inputs)",
        )
    return here.call(by_name(here.signature, args, kwargs, kind))


def _on(device: torch.device, tree: Any) -> Any:
    """Move the tensors of a tree to a device. Tensors are sent between ranks from CPU memory."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)
