"""Classify random token sequences; see docs/migration/hf-trainer.md."""

import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)


def compute_metrics(prediction):
    classes = prediction.predictions.argmax(-1)
    return {"accuracy": (classes == prediction.label_ids).mean()}


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

arguments = TrainingArguments(
    output_dir="run",
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    num_train_epochs=3,
    learning_rate=5e-3,
    weight_decay=0.0,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=training,
    eval_dataset=validation,
    compute_metrics=compute_metrics,
)
trainer.train()
trainer.save_model("model")
