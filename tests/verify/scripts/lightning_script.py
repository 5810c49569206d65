"""Lightning's Trainer, as its guides show."""

# mypy: ignore-errors

import os
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, _number):
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def validation_step(self, batch, _number):
        x, y = batch
        self.log("loss", nn.functional.mse_loss(self.model(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main():
    warnings.simplefilter("ignore")
    size = int(os.environ["WORLD_SIZE"])
    lightning.seed_everything(0)
    inputs = torch.randn(24, 6)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    validation = TensorDataset(*dataset[:11])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy="ddp",
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=1, save_last=True)],
    )
    trainer.fit(
        Regression(),
        DataLoader(dataset, batch_size=8 // size, shuffle=True),
        DataLoader(validation, batch_size=4),
        ckpt_path="checkpoints/last.ckpt" if os.path.exists("checkpoints/last.ckpt") else None,
    )


main()
