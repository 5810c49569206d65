"""The Trainer of transformers, as its guides show; the samples have different numbers of tokens."""

# mypy: ignore-errors

import os

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Sentences(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 10, (8,), generator=generator)
        labels = torch.where(torch.arange(8) < 1 + index % 8, tokens, -100)
        return {"tokens": tokens, "labels": labels}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))

    def forward(self, tokens, labels):
        logits = self.layers(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())  # line: loss
        return {"loss": loss, "logits": logits}


def main():
    options = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8 // int(os.environ["WORLD_SIZE"]),
        num_train_epochs=4,
        save_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)  # the Trainer seeds after the model is built
    trainer = Trainer(model=Tagger(), args=options, train_dataset=Sentences())
    last = get_last_checkpoint("out") if os.path.isdir("out") else None
    trainer.train(resume_from_checkpoint=last)


main()
