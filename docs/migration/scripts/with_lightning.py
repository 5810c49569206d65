"""Five classes of random points; how to run it stands in docs/migration/ddp.md."""

import sys

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

    def training_step(self, batch, index):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


devices = int(sys.argv[1]) if len(sys.argv) > 1 else 1
lightning.seed_everything(0)
inputs = torch.randn(1000, 20)
data = torch.utils.data.TensorDataset(inputs, (inputs @ torch.randn(20, 5)).argmax(1))
classifier = Classifier()

trainer = lightning.Trainer(max_epochs=10, devices=devices, strategy="ddp")
trainer.fit(classifier, DataLoader(data, batch_size=64 // devices, shuffle=True))

if trainer.is_global_zero:
    torch.save(classifier.model.state_dict(), "model.pt")
