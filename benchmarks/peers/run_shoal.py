"""Shoal, as docs/getting-started/quickstart.md."""

import torch
import torch.nn.functional as F

import shoal
from task import BATCH, EPOCHS, EVERY, Samples, StepRecord, build_model


def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


with shoal.init(seed=0) as world:
    record = StepRecord()
    model = shoal.parallelize(build_model(), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    loader = shoal.Loader(Samples(), world, batch_size=BATCH)
    with shoal.Run(".", step, loader, keep=2) as run:
        run.restore()
        for batch in loader.epochs(EPOCHS):
            record.begin(step.number + 1, batch.micros[0].value[2])
            step(batch)
            run.tick(every=EVERY)
        run.save()
    record.end(model)
