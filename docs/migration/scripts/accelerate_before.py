"""Classify random points; see docs/migration/accelerate.md."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(0)
inputs = torch.randn(1200, 20)
labels = (inputs @ torch.randn(20, 5)).argmax(1)
training = TensorDataset(inputs[:960], labels[:960])
validation = TensorDataset(inputs[960:], labels[960:])
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

per_device = 32 // accelerator.num_processes
loader = DataLoader(training, per_device, shuffle=True)
validation_loader = DataLoader(validation, per_device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
schedule = CosineAnnealingLR(optimizer, 10 * len(loader) // 2)
model, optimizer, loader, validation_loader, schedule = accelerator.prepare(
    model, optimizer, loader, validation_loader, schedule
)

for epoch in range(10):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    correct = total = 0
    for x, y in validation_loader:
        with torch.no_grad():
            classes = model(x).argmax(1)
        classes, targets = accelerator.gather_for_metrics((classes, y))
        correct += (classes == targets).sum().item()
        total += len(targets)
    accelerator.print(f"epoch {epoch + 1}: accuracy {correct / total:.4f}")

if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
accelerator.end_training()
