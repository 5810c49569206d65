"""Hugging Face Trainer: save_steps, and resume_from_checkpoint=True if there is a checkpoint.

With --jit, enable_jit_checkpoint=True: a checkpoint some seconds after SIGTERM.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from task import BATCH, CHECKPOINTS, EPOCHS, EVERY, RANKS, Samples, StepRecord, build_model


class Classifier(nn.Module):
    """The model, with the loss that Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.model(inputs)
        return {"loss": F.cross_entropy(output, labels), "logits": output}


class RecordedTrainer(Trainer):  # type: ignore[misc]
    """Trainer that records its samples."""

    record: StepRecord

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        self.record.begin(self.state.global_step + 1, inputs.pop("indices"))
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss


def collate(samples: list[tuple[Tensor, Tensor, int]]) -> dict[str, Tensor]:
    inputs, labels, indices = zip(*samples, strict=True)
    return {
        "inputs": torch.stack(inputs),
        "labels": torch.stack(labels),
        "indices": torch.tensor(indices),
    }


arguments = TrainingArguments(
    str(CHECKPOINTS),
    per_device_train_batch_size=BATCH // RANKS,
    num_train_epochs=EPOCHS,
    learning_rate=1e-2,
    save_steps=EVERY,
    save_total_limit=2,
    use_cpu=True,
    seed=0,
    report_to=[],
    disable_tqdm=True,
    remove_unused_columns=False,
    dataloader_pin_memory=False,
    enable_jit_checkpoint="--jit" in sys.argv,
)
classifier = Classifier()
trainer = RecordedTrainer(classifier, arguments, train_dataset=Samples(), data_collator=collate)
trainer.record = StepRecord()
last = get_last_checkpoint(str(CHECKPOINTS)) if CHECKPOINTS.is_dir() else None
trainer.train(resume_from_checkpoint=last is not None)
trainer.record.end(classifier)
