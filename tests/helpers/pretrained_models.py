"""Tiny models of transformers, saved in several files, with a plan and split points of each."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shoal
from helpers.lazy import LazyModule

tf = LazyModule("transformers")

WORDS, WIDTH = 40, 16
_TEXT = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_T5 = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
_VIT = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_ATTENTION = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "column") | {"o_proj": "row"}


class Pretrained(NamedTuple):
    """The classes of a model, the options of its configuration, and how to parallelize it."""

    kind: str
    config: str
    options: dict[str, Any]
    plan: Mapping[str, str]
    split: str

    def model(self, kind: Any = None) -> Any:
        made = (kind or getattr(tf, self.kind))(getattr(tf, self.config)(**self.options))
        return _in_float64(made).eval()

    def stages(self) -> Any:
        """The model with a forward that pipelines can split."""
        return self.model(decoder(self.kind))

    def reference(self, folder: Path) -> Any:
        """The model as transformers reads it."""
        with contextlib.redirect_stderr(io.StringIO()):
            found = getattr(tf, self.kind).from_pretrained(folder)
        return _in_float64(found).eval()

    def inputs(self) -> dict[str, Any]:
        words = torch.arange(12).reshape(2, 6) * 7 % WORDS
        if self.kind.startswith("ViT"):
            return {
                "pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).double().reshape(2, 3, 16, 16)
            }
        if self.kind.startswith("T5"):
            return {"input_ids": words, "decoder_input_ids": words[:, :3]}
        return {"input_ids": words, "use_cache": False}

    def strategy(self, layout: str) -> list[Any]:
        tensor = [shoal.TensorParallel(plan=self.plan)] if "tensor" in layout else []
        if "pipeline" in layout:
            return [*tensor, shoal.Pipeline(split_points=(self.split,))]
        return [*tensor, *([shoal.FSDP()] if "shard" in layout else [] if tensor else [shoal.DDP()])]


def decoder(kind: str) -> Any:
    """Return a class of transformers with a forward that pipelines can split."""

    def forward(self: Any, input_ids: Tensor) -> Any:
        hidden = self.model.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        cosines, sines = self.model.rotary_emb(hidden, positions)
        for layer in self.model.layers:
            hidden = layer(hidden, position_embeddings=(cosines, sines))
        return self.lm_head(self.model.norm(hidden))

    return type(kind, (getattr(tf, kind),), {"forward": forward})


def _in_float64(model: Any) -> Any:
    if hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("eager")  # the fast one has no float64
    return model.double()


MODELS = {
    "llama": Pretrained(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_TEXT, "tie_word_embeddings": True},
        {f"model.layers.*.self_attn.{name}": way for name, way in _ATTENTION.items()}
        | {"model.layers.*.mlp.gate_proj": "column", "model.layers.*.mlp.up_proj": "column"}
        | {
            "model.layers.*.mlp.down_proj": "row",
            "model.embed_tokens": "vocabulary",
            "lm_head": "head",
        },
        "model.layers.1",
    ),
    "t5": Pretrained(
        "T5ForConditionalGeneration",
        "T5Config",
        _T5,
        {"encoder.block.*.layer.1.DenseReluDense.wi": "column"}
        | {"encoder.block.*.layer.1.DenseReluDense.wo": "row"},
        "decoder.block.0",
    ),
    "mixtral": Pretrained(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_TEXT, "num_local_experts": 3, "num_experts_per_tok": 2},
        {f"model.layers.*.self_attn.{name}": way for name, way in _ATTENTION.items()},
        "model.layers.1",
    ),
    "vit": Pretrained(
        "ViTForImageClassification",
        "ViTConfig",
        {**_VIT, "image_size": 16, "patch_size": 8},
        {f"vit.layers.*.attention.{name}": way for name, way in _ATTENTION.items()},
        "vit.layers.1",
    ),
}


def save(name: str, folder: Path) -> Path:
    """Save a model with random values as transformers does, in at least three files."""
    torch.manual_seed(0)
    with contextlib.redirect_stderr(io.StringIO()):
        MODELS[name].model().save_pretrained(folder / name, max_shard_size="20KB")
    assert len(list((folder / name).glob("*.safetensors"))) >= 3
    return folder / name
