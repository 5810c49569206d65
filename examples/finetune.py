"""A causal language model of Hugging Face transformers, with shoal.train or a custom training loop.

python examples/finetune.py
python examples/finetune.py --own-loop --run runs/finetune-own
python examples/finetune.py --lora --run runs/finetune-lora
shoal run -n 2 examples/finetune.py -- --run runs/finetune-2

The model answers a question of some digits with the same digits sorted. Questions have different
lengths, so batches are padded. Only answers have labels; all other labels are -100. Run it again with
more --epochs to resume from its run directory.

In float32 rounding errors grow: one and two processes agree to 1e-6 for 60 steps and to 1e-4 for 100.
Later they differ as much as after changing a single weight by a millionth.
"""

import argparse
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import shoal

ASK, END, PAD = 10, 11, 12  # tokens after the ten digits
IGNORED = -100


def questions(count: int, longest: int, seed: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    samples = []
    for length in torch.randint(2, longest + 1, (count,), generator=random).tolist():
        digits = torch.randint(10, (length,), generator=random)
        question = torch.cat([digits, torch.tensor([ASK])])
        answer = torch.cat([digits.sort().values, torch.tensor([END])])
        labels = torch.cat([torch.full_like(question, IGNORED), answer])
        samples.append({"input_ids": torch.cat([question, answer]), "labels": labels})
    return samples


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the keyword arguments of the model."""
    tokens = pad_sequence([sample["input_ids"] for sample in samples], True, PAD)
    labels = pad_sequence([sample["labels"] for sample in samples], True, IGNORED)
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "labels": labels}


def loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss sum: transformers returns the mean; token i is predicted from i - 1."""
    counted = (batch["labels"][:, 1:] != IGNORED).sum()
    return output.loss * counted, counted


def correct(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    right = output.logits[:, :-1].argmax(-1) == labels[:, 1:]
    return right.sum(), (labels[:, 1:] != IGNORED).sum()


def make_model(*, lora: bool) -> PreTrainedModel | PeftModel:
    """Return a small random model. Instead: AutoModelForCausalLM.from_pretrained("/path/or/name")."""
    config = LlamaConfig(
        vocab_size=13,
        pad_token_id=PAD,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if not lora:
        return model
    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
    return get_peft_model(model, adapters, autocast_adapter_dtype=False)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def train_own(model: nn.Module, data: Any, options: argparse.Namespace, world: shoal.World) -> None:
    """Train with a custom training loop, as shoal.train does."""
    shoal.parallelize(model, world)
    optimizer = make_optimizer(model)
    loader = shoal.Loader(data, world, batch_size=options.batch_size, collate_fn=collate)
    with shoal.Run(options.run, model, loader, optimizer=optimizer) as run:
        run.restore()
        for batch in loader.epochs(options.epochs):
            for micro in batch:
                total, count = loss(model(**micro), micro)
                batch.backward(total=total, count=count)
            batch.finish(model, clip=1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.tick(every=100)
        run.save()


def main(options: argparse.Namespace) -> None:
    training = questions(options.samples, options.longest, seed=0)
    held_out = questions(500, options.longest, seed=1)
    with shoal.init(seed=0) as world:
        model = make_model(lora=options.lora)
        task = shoal.Task(loss)
        if options.own_loop:
            train_own(model, training, options, world)
        else:
            shoal.train(
                model,
                task,
                training,
                directory=options.run,
                optimizer=make_optimizer,
                batch_size=options.batch_size,
                epochs=options.epochs,
                collate_fn=collate,
                clip=1.0,
                world=world,
            )
        metrics = {"correct": correct}
        result = shoal.evaluate(model, held_out, task=task, metrics=metrics, collate_fn=collate)
        if options.lora and world.is_rank_zero:
            model.save_pretrained(f"{options.run}/adapter")  # PEFT's own format
        world.print(
            f"held-out loss {result['loss']:.4f}, {result['correct']:.1%} of the tokens correct"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="runs/finetune")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--longest", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--own-loop", action="store_true")
    parser.add_argument("--lora", action="store_true", help="train only LoRA adapters")
    main(parser.parse_args())
