"""Lightning Trainer: ModelCheckpoint(save_last) every few steps, fit(ckpt_path="last")."""

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from task import BATCH, CHECKPOINTS, EPOCHS, EVERY, RANKS, Samples, StepRecord, build_model


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """The model and its step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()
        self.record = StepRecord()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        inputs, labels, indices = batch
        self.record.begin(self.global_step + 1, indices)
        return F.cross_entropy(self.model(inputs), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
saving = ModelCheckpoint(CHECKPOINTS, every_n_train_steps=EVERY, save_top_k=-1, save_last=True)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=RANKS,
    strategy="ddp",
    max_epochs=EPOCHS,
    callbacks=[saving],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Classifier()
trainer.fit(module, StatefulDataLoader(Samples(), BATCH // RANKS, shuffle=True), ckpt_path="last")
module.record.end(module.model)
