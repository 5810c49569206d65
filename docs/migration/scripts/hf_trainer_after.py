"""Classify random token sequences; see docs/migration/hf-trainer.md."""

import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    default_data_collator,
    set_seed,
)

import shoal


def inputs(batch):
    return {name: batch[name] for name in batch if name != "labels"}


def loss(output, batch):
    labels = batch["labels"]
    return F.cross_entropy(output.logits, labels, reduction="sum"), len(labels)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)


world = shoal.init()
set_seed(0)
tokens = torch.randint(0, 50, (1200, 12))
columns = {"input_ids": tokens, "labels": tokens[:, 0] % 5}
data = Dataset.from_dict({name: c.tolist() for name, c in columns.items()})
training, validation = data.select(range(960)), data.select(range(960, 1200))
config = BertConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=5,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)

shoal.train(
    model,
    shoal.Task(loss, inputs=inputs),
    training,
    directory="run",
    optimizer=adamw,
    schedule=shoal.LRSchedule(decay="linear"),
    batch_size=64,
    micro_batches=2,
    epochs=3,
    clip=1.0,
    collate_fn=default_data_collator,
    world=world,
    validation=shoal.Validation(
        dataset=validation,
        metrics={"accuracy": shoal.Accuracy()},
        outputs=lambda output: output.logits,
    ),
)
shoal.export(model, "model/model.safetensors")
if world.is_rank_zero:
    model.config.save_pretrained("model")
