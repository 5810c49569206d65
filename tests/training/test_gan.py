"""Two models, two Steps and one loss through both: a GAN is the same on one rank and on two."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from shoal.strategies.dtensor import whole

pytestmark = pytest.mark.processes

LATENT, WIDTH, SAMPLES, BATCH, STEPS = 3, 4, 22, 8, 9


STRATEGIES: dict[str, list[shoal.DDP | shoal.FSDP]] = {
    "replicate=-1": [shoal.DDP()],
    "shard=-1": [shoal.FSDP(), shoal.FSDP(reshard_after_forward=False)],
}


@pytest.fixture(scope="module", params=STRATEGIES)
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, list[shoal.DDP | shoal.FSDP]]]:
    with Ranks(2, layout=request.param) as started:
        yield started, STRATEGIES[request.param]


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


def train(
    world: shoal.World, raw: bool, micro_batches: int, strategy: shoal.DDP | shoal.FSDP
) -> list[Tensor]:
    gc.collect()
    generator, critic = (shoal.parallelize(network, world, strategy) for network in networks())
    losses = Losses(generator, critic)
    first = torch.optim.Adam(generator.parameters(), lr=1e-2)
    second = torch.optim.Adam(critic.parameters(), lr=1e-2)
    judge = shoal.Task(losses.of_critic, lambda batch: batch)
    step_critic = shoal.Step(critic, second, judge, clip=None if raw else 1.0)
    step_generator = shoal.Step(generator, first, shoal.Task(losses.of_generator, latent))
    loader = shoal.Loader(data(), world, batch_size=BATCH, micro_batches=micro_batches)
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


@pytest.fixture(scope="module")
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
@pytest.mark.parametrize("raw", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_gan_trains_like_one_process(
    ranks: tuple[Ranks, list[shoal.DDP | shoal.FSDP]],
    specification: list[Tensor],
    raw: bool,
    micro_batches: int,
) -> None:
    started, strategies = ranks
    for strategy in strategies:
        with shoal.init(device="cpu", seed=0) as world:
            assert distance(train(world, raw, micro_batches, strategy), specification) < 1e-9
        for found in started.call(train, raw, micro_batches, strategy):
            assert distance(found, specification) < 1e-9
