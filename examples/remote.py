"""A model whose stages are on several ranks and send each other messages by torch RPC.

python examples/remote.py
shoal run -n 2 examples/remote.py
shoal run -n 3 examples/remote.py -- --readers 2

It learns whether all brackets of a string are closed in order. The stage "reader" is a recurrent
network, which takes nearly all the time, and may have several ranks. At the end rank 0 alone uses it.
"""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

SIGNS = " ()[]"


class Brackets(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.signs = nn.Embedding(len(SIGNS), width)
        self.read = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.norm, self.judge = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, strings: Tensor) -> Tensor:
        ends = (strings != 0).sum(1) - 1
        states = self.read(self.signs(strings))[0]
        last = states.gather(1, ends[:, None, None].expand(-1, 1, states.size(2)))
        scores: Tensor = self.judge(self.norm(last[:, 0]))
        return scores


def balanced(string: str) -> bool:
    while (shorter := string.replace("()", "").replace("[]", "")) != string:
        string = shorter
    return not string


def grown(pairs: int, draw: random.Random) -> str:
    """Return a balanced string, or one with an error in one place."""
    string = ""
    for _ in range(pairs):
        one, two = draw.choice(("()", "[]"))
        string = draw.choice((f"{one}{string}{two}", f"{string}{one}{two}"))
    place = draw.randrange(len(string))
    spoiled = string[:place] + draw.choice(SIGNS[1:]) + string[place + 1 :]
    return draw.choice((string, spoiled))


def encoded(strings: list[str]) -> Tensor:
    longest = max(map(len, strings))
    return torch.tensor([[SIGNS.index(sign) for sign in s.ljust(longest)] for s in strings])


def collate(some: list[str]) -> tuple[Tensor, Tensor]:
    return encoded(some), torch.tensor([int(balanced(string)) for string in some])


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def main(options: argparse.Namespace) -> None:
    draw = random.Random(0)
    data = [grown(draw.randint(1, 6), draw) for _ in range(options.strings)]
    strategy = shoal.RPCPipeline(
        stages={"reader": ("signs", "read"), "judge": ("norm", "judge")},
        workers={"reader": range(options.readers), "judge": (options.readers,)},
    )
    with shoal.init(layout="pipeline=-1", seed=0) as world:
        model = shoal.parallelize(Brackets(32), world, strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
        loader = shoal.Loader(data, world, batch_size=64, micro_batches=8, collate_fn=collate)
        with shoal.Run(options.run, step, loader) as run:
            run.restore()
            for batch in loader.epochs(options.epochs):
                step(batch)
                run.tick(every=50)
            run.save()
        if world.is_rank_zero:
            with torch.no_grad():
                print("([])[] and ([)]:", model(encoded(["([])[]", "([)]"])).softmax(1)[:, 1].tolist())
        result = shoal.evaluate(step, data, metrics={"right": shoal.Accuracy()}, collate_fn=collate)
        world.print(f"loss {result['loss']:.6f}, right {result['right']:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="runs/remote")
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--strings", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=8)
    main(parser.parse_args())
