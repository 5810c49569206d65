"""Classify random points; see docs/migration/lightning.md."""

import sys

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)
        )

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        accuracy = (self.model(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


devices = int(sys.argv[1]) if len(sys.argv) > 1 else 1
lightning.seed_everything(0)
inputs = torch.randn(1200, 20)
labels = (inputs @ torch.randn(20, 5)).argmax(1)
training = TensorDataset(inputs[:960], labels[:960])
validation = TensorDataset(inputs[960:], labels[960:])
classifier = Classifier()

trainer = lightning.Trainer(
    max_epochs=10,
    devices=devices,
    strategy="ddp",
    gradient_clip_val=1.0,
    callbacks=[
        ModelCheckpoint(monitor="accuracy", mode="max"),
        EarlyStopping(monitor="accuracy", mode="max", patience=5),
    ],
)
trainer.fit(
    classifier,
    DataLoader(training, 64 // devices, shuffle=True),
    DataLoader(validation, 64 // devices),
)
if trainer.is_global_zero:
    torch.save(classifier.model.state_dict(), "model.pt")
