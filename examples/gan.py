"""A GAN: two models, two optimizers and one Run, which resumes both.

python examples/gan.py
shoal run -n 2 examples/gan.py -- --run runs/gan-2
python examples/gan.py --steps 4000    # resumes runs/gan

It learns the distribution of eight Gaussians on a circle. Latent noise belongs to samples, so any
number of processes draws the same.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

LATENT, MODES, SPREAD = 4, 8, 0.1


def circle(samples: int) -> Tensor:
    """Return points around eight places on the unit circle, shape (samples, 2)."""
    random = torch.Generator().manual_seed(0)
    angles = 2 * math.pi / MODES * torch.randint(MODES, (samples,), generator=random)
    return torch.stack([angles.cos(), angles.sin()], 1) + SPREAD * torch.randn(
        samples, 2, generator=random
    )


def network(inputs: int, outputs: int) -> nn.Module:
    hidden = [nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(128, outputs))


def latent(points: Tensor, noise: shoal.Noise) -> Tensor:
    """Return a row for each sample of the batch, by its position in the training."""
    return noise.normal(LATENT, dtype=points.dtype).to(points.device)


def main(directory: str, steps: int) -> None:
    torch.set_default_dtype(torch.float64)  # the model is small; differences are then rounding only
    points = circle(4_000)
    with shoal.init(seed=0) as world:
        generator = shoal.parallelize(network(LATENT, 2), world)
        critic = shoal.parallelize(network(2, 1), world)

        def critic_loss(scores: Tensor, real: Tensor, noise: shoal.Noise) -> tuple[Tensor, int]:
            with torch.no_grad():
                invented = generator(latent(real, noise))
            total = F.softplus(-scores).sum() + F.softplus(critic(invented)).sum()
            return total, len(real)

        def generator_loss(invented: Tensor, real: Tensor) -> tuple[Tensor, int]:
            return F.softplus(-critic(invented)).sum(), len(real)

        def adam(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.5, 0.99))

        learn = shoal.Task(critic_loss, inputs=lambda real: real)
        imitate = shoal.Task(generator_loss, inputs=latent)
        both = {
            "critic": shoal.Step(critic, adam(critic), learn),
            "generator": shoal.Step(generator, adam(generator), imitate),
        }
        data = shoal.Loader(points, world, batch_size=64)
        with shoal.Run(directory, both, data) as run:
            run.restore()
            for batch in data.epochs(math.ceil(steps / len(data))):
                if run.step == steps:
                    break
                both["critic"](batch)
                both["generator"](batch)
                run.tick(every=500)
            run.save()

        losses = [shoal.evaluate(step, points)["loss"] for step in both.values()]
        with torch.no_grad():
            sample = generator(torch.randn(4000, LATENT, generator=world.generator("sample"))).cpu()
        places = torch.arange(MODES) * 2 * math.pi / MODES
        distance, nearest = torch.cdist(sample, torch.stack([places.cos(), places.sin()], 1)).min(1)
        near = distance < 3 * SPREAD
        found = len(nearest[near].unique())
        world.print(
            f"critic loss {losses[0]:.4f}, generator loss {losses[1]:.4f}; "
            f"{near.double().mean():.0%} of the points lie in {found} of {MODES} modes"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="runs/gan")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    main(options.run, options.steps)
