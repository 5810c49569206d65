"""Tiny models of transformers, by name, each with the collator that its documentation uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.lazy import LazyModule

tf = LazyModule("transformers")

WORDS, CLASSES = 25, 3
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = SPECIAL + [f"w{number}" for number in range(WORDS - len(SPECIAL))]
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    names = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)
    )
    return tf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **names)


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    """Sentences of 3 to 9 words, with a class or with another sentence."""

    def __init__(self, labels: str) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(i)

        def words(count: int) -> list[int]:
            return torch.randint(5, WORDS, (count,), generator=generator).tolist()

        item: dict[str, Any] = {"input_ids": words(3 + i * 5 % 7)}
        item["attention_mask"] = [1] * len(item["input_ids"])
        if self.labels == "class":
            item["labels"] = i % CLASSES
        elif self.labels == "sentence":
            item["labels"] = words(2 + i * 3 % 5)
        return item


_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
_D = {"vocab_size": WORDS, "d_model": 16, "pad_token_id": 0, "decoder_start_token_id": 2}
_NEW = {
    **_SIZES,
    "num_key_value_heads": 1,
    "attention_dropout": 0.1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_DROPS = {"attention_dropout": 0.1, "hidden_dropout": 0.1}


class TextCase(NamedTuple):
    kind: str
    name: str
    options: dict[str, Any]

    def model(self) -> nn.Module:
        name = {"class": "ForSequenceClassification", "sentence": "ForConditionalGeneration"}
        config = getattr(tf, f"{self.name}Config")(**self.options)
        model = self.name.replace("GPT2", "GPT2LMHead" if self.kind == "next" else "GPT2")
        suffix = "Model" if "LMHead" in model else name.get(self.kind, "ForCausalLM")
        found: nn.Module = getattr(tf, model + suffix)(config)
        return found

    def collate(self) -> Callable[[Any], Any]:
        made: Callable[[Any], Any]
        if self.kind == "class":
            made = tf.DataCollatorWithPadding(tokenizer())
        elif self.kind == "next":
            made = tf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
        else:
            made = tf.DataCollatorForSeq2Seq(tokenizer())
        return made


_CLASSES = {"num_labels": CLASSES}
TEXT_CASES = [
    TextCase("class", "Bert", {**_SIZES, **_CLASSES}),
    TextCase("class", "Roberta", {**_SIZES, **_CLASSES}),
    TextCase(
        "class", "Albert", {**_SIZES, **_CLASSES, "embedding_size": 8, "hidden_dropout_prob": 0.1}
    ),
    TextCase("class", "Electra", {**_SIZES, **_CLASSES, "embedding_size": 8}),
    TextCase("class", "MPNet", {**_SIZES, **_CLASSES}),
    TextCase(
        "class",
        "DebertaV2",
        {**_SIZES, **_CLASSES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    TextCase(
        "class",
        "DistilBert",
        {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, **_CLASSES},
    ),
    TextCase(
        "class",
        "Funnel",
        {
            "vocab_size": WORDS,
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 24,
            "block_sizes": [1, 1],
        }
        | _CLASSES,
    ),
    TextCase(
        "next",
        "GPT2",
        {"vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2},
    ),
    TextCase("next", "GPTNeoX", {**_SIZES, **_DROPS}),
    TextCase(
        "next",
        "OPT",
        {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.1, "attention_dropout": 0.1},
    ),
    TextCase("next", "Llama", _NEW),
    TextCase("next", "Mistral", _NEW),
    TextCase("next", "Qwen2", _NEW),
    TextCase("next", "Qwen3", {**_NEW, "head_dim": 8}),
    TextCase("next", "Gemma", {**_NEW, "head_dim": 8}),
    TextCase("next", "Phi", {**_NEW, "num_key_value_heads": 2, "embd_pdrop": 0.1, "resid_pdrop": 0.1}),
    TextCase(
        "next", "Bloom", {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2, **_DROPS}
    ),
    TextCase("sentence", "T5", {**_D, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}),
    TextCase(
        "sentence",
        "Bart",
        {**_D, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.1},
    ),
]


def text_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    """Return the sum of the cross entropies, and the number of targets."""
    logits, labels = output.logits, batch["labels"]
    if labels.ndim == 1:
        return F.cross_entropy(logits, labels, reduction="sum"), len(labels)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return total, int((labels != -100).sum())


def next_word_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    """Return the sum of the cross entropies of the next words, and their number."""
    logits, labels = output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    return total, int((labels != -100).sum())
