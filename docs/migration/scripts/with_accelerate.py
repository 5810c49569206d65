"""Five classes of random points; how to run it stands in docs/migration/ddp.md."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


accelerator = Accelerator()
set_seed(0)
inputs = torch.randn(1000, 20)
data = torch.utils.data.TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(1))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

loader = DataLoader(data, batch_size=64 // accelerator.num_processes, shuffle=True)
parallel, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
for _ in range(10):
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(loss(parallel(batch[0]), batch))
        optimizer.step()

if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(parallel).state_dict(), "model.pt")
accelerator.end_training()
