"""Two models, two Steps and one loss through both: the same on one rank and on two, and in one Run."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.killed_training import same
from helpers.ranks import Ranks
from helpers.small_training import events_of, saved
from shoal.strategies.dtensor import whole

pytestmark = pytest.mark.processes

LATENT, WIDTH, SAMPLES, BATCH, STEPS = 3, 4, 22, 8, 9
STRATEGIES: dict[str, list[shoal.DDP | shoal.FSDP]] = {
    "replicate=-1": [shoal.DDP()],
    "shard=-1": [shoal.FSDP(), shoal.FSDP(reshard_after_forward=False)],
}


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(LATENT, 8), nn.Tanh(), nn.Linear(8, WIDTH))
    critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
    return generator.double(), critic.double()


def data() -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def judged(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        scores, torch.full_like(scores, float(real)), reduction="sum"
    )


def latent(batch: Tensor, noise: shoal.Noise) -> Tensor:
    return noise.normal(LATENT, dtype=torch.float64)


class Losses:
    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        self.generator, self.critic = generator, critic

    def of_generator(self, output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return judged(self.critic(output), True), len(batch)

    def of_critic(self, output: Tensor, batch: Tensor, noise: shoal.Noise) -> tuple[Tensor, int]:
        with torch.no_grad():
            invented = self.generator(latent(batch, noise))
        return judged(output, True) + judged(self.critic(invented), False), len(batch)


def train(world: shoal.World, raw: bool, strategy: shoal.DDP | shoal.FSDP) -> list[Tensor]:
    gc.collect()
    generator, critic = (shoal.parallelize(network, world, strategy) for network in networks())
    losses = Losses(generator, critic)
    first = torch.optim.Adam(generator.parameters(), lr=1e-2)
    second = torch.optim.Adam(critic.parameters(), lr=1e-2)
    judge = shoal.Task(losses.of_critic, lambda batch: batch)
    step_critic = shoal.Step(critic, second, judge, clip=None if raw else 1.0)
    step_generator = shoal.Step(generator, first, shoal.Task(losses.of_generator, latent))
    loader = shoal.Loader(data(), world, batch_size=BATCH, micro_batches=2)
    for _, batch in zip(range(STEPS), loader.epochs(9), strict=False):
        if not raw:
            step_critic(batch)
            step_generator(batch)
            continue
        for micro in batch:
            here = batch.micro
            noise = shoal.Noise(batch.seed, here.first, here.samples, stream=1)
            total, count = losses.of_critic(critic(micro), micro, noise)
            batch.backward(total=total, count=count, model=critic)
        batch.finish(critic, clip=1.0)
        second.step()
        second.zero_grad()
        for micro in batch:
            invented = generator(latent(micro, batch.noise))
            total, count = losses.of_generator(invented, micro)
            batch.backward(total=total, count=count, model=generator)
        batch.finish(generator)
        first.step()
        first.zero_grad()
    return [whole(p.detach()).clone() for network in (generator, critic) for p in network.parameters()]


def specification() -> list[Tensor]:
    """The same in plain torch: whole batches, means, one process."""
    generator, critic = networks()
    losses = Losses(generator, critic)
    first = torch.optim.Adam(generator.parameters(), lr=1e-2)
    second = torch.optim.Adam(critic.parameters(), lr=1e-2)
    position = 0
    for _ in range(STEPS):
        epoch, offset = divmod(position, SAMPLES)
        stop = min(offset + BATCH, SAMPLES)
        indices = shoal.Permutation(SAMPLES, seed=0, epoch=epoch).indices(offset, stop)
        batch = data()[torch.from_numpy(indices)]
        noise = shoal.Noise(0, position, len(batch), stream=1)
        (losses.of_critic(critic(batch), batch, noise)[0] / len(batch)).backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        second.step()
        invented = generator(latent(batch, shoal.Noise(0, position, len(batch))))
        first.zero_grad()
        (losses.of_generator(invented, batch)[0] / len(batch)).backward()
        first.step()
        second.zero_grad()  # of the generator's loss through the critic
        first.zero_grad()
        position += len(batch)
    return [p.detach() for network in (generator, critic) for p in network.parameters()]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("raw", [True, False])
def test_a_gan_trains_like_one_process(world: shoal.World, two: Ranks, raw: bool) -> None:
    expected = specification()
    for layout, strategies in STRATEGIES.items():
        two.divide(layout)
        for strategy in strategies:
            for found in (train(world, raw, strategy), *two.call(train, raw, strategy)):
                assert distance(found, expected) < 1e-9


class Adversaries:
    """Two Steps in one Run. The generator learns at every second batch only."""

    def __init__(self, world: shoal.World) -> None:
        maker, _ = networks()
        # The generator's loss runs through this BatchNorm too, on each rank with other samples.
        layers = (nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
        judge = nn.Sequential(*layers).double()
        losses = Losses(shoal.parallelize(maker, world), shoal.parallelize(judge, world))
        tasks = {
            "judge": (judge, shoal.Task(losses.of_critic, lambda batch: batch)),
            "maker": (maker, shoal.Task(losses.of_generator, latent)),
        }
        self.steps = {
            name: shoal.Step(model, torch.optim.Adam(model.parameters(), lr=1e-2), task)
            for name, (model, task) in tasks.items()
        }
        self.data = shoal.Loader(data(), world, batch_size=BATCH)

    def train(self, run: shoal.Run, batches: int, every: int) -> None:
        judge, maker = self.steps["judge"], self.steps["maker"]
        for batch in self.data.epochs(100):
            judge(batch)
            if judge.number % 2 == 0:
                maker(batch)
            run.tick(every=every)
            if judge.number == batches:
                break


def adversaries(world: shoal.World, directory: Path, stops: list[int]) -> dict[str, Any]:
    """Train up to each of the stops, each time with new objects that restore."""
    for stop in stops:
        gan = Adversaries(world)
        with shoal.Run(directory, gan.steps, gan.data) as run:
            assert (run.restore() is None) == (stop == stops[0])
            gan.train(run, stop, every=10)
    return {name: step.state_dict() for name, step in gan.steps.items()}


def test_two_steps_in_one_run(two: Ranks, tmp_path: Path) -> None:
    two.divide("replicate=-1")
    expected = two.call(adversaries, tmp_path / "whole", [14])
    assert same(two.call(adversaries, tmp_path / "parts", [11, 14]), expected)
    for rank in range(2):
        steps = events_of(tmp_path / "whole", "step", rank)
        made = [(event["step"], event["first"]) for event in steps if event["name"] == "maker"]
        judged = [(event["step"], event["first"]) for event in steps if event["name"] == "judge"]
        assert [step for step, _ in judged] == list(range(1, 15))
        # Each step once, with the batch that it was taken on.
        assert made == [(step // 2, first) for step, first in judged if step % 2 == 0]


def test_the_first_of_several_steps_counts(world: shoal.World, tmp_path: Path) -> None:
    """One that waits at a step, while another goes on, is not saved at each batch of the other."""
    gan = Adversaries(world)
    with shoal.Run(tmp_path, dict(reversed(gan.steps.items())), gan.data, keep=9) as run:
        gan.train(run, 8, every=2)
    assert saved(tmp_path) == [2, 4]
    assert len(events_of(tmp_path, "save")) == 2
