"""A transformer by its dimensions: parameters, and the shapes of a layer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from shoal.tools.bench.scaling.configurations import SIZES
from shoal.util.errors import ShoalError


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The dimensions of a decoder-only transformer.

    `ffn` is the width inside the MLP; 0 means 4 * hidden. `kv_heads` is the number of key and value
    heads; 0 means `heads`. `gated` is 1 for an MLP with a gate (SwiGLU). `flash` is 1 for fused
    attention, which stores no matrix of scores. `tied` is 1 if the output layer is the embedding.
    `dropout` is 1 if activations and attention have dropout. With `experts`, each layer has this many
    MLPs, of which each token passes `choices`.
    """

    hidden: int
    layers: int
    heads: int
    vocab: int
    seq: int
    ffn: int = 0
    kv_heads: int = 0
    gated: int = 0
    flash: int = 1
    tied: int = 1
    dropout: int = 1
    experts: int = 0
    choices: int = 0

    def __post_init__(self) -> None:
        flags = {"gated", "flash", "tied", "dropout"}
        mistakes = []
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name in flags | {"ffn", "kv_heads", "experts", "choices"} else 1
            most = 1 if each.name in flags else 10**7
            if not least <= value <= most:
                mistakes.append(f"{each.name} is {value}, not between {least} and {most}")
        if not mistakes and self.hidden % self.heads:
            mistakes.append(f"hidden {self.hidden} does not divide by heads {self.heads}")
        if not mistakes and self.heads % self.key_heads:
            mistakes.append(f"heads {self.heads} does not divide by kv_heads {self.key_heads}")
        if bool(self.experts) != bool(self.choices) or self.choices > self.experts:
            mistakes.append(f"{self.choices} choices among {self.experts} experts")
        if mistakes:
            raise ShoalError(
                given=f"a transformer of hidden={self.hidden},layers={self.layers},heads={self.heads}",
                found="; ".join(mistakes),
                fix=_EXAMPLE,
            )

    @property
    def width(self) -> int:
        """The width inside the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def key_heads(self) -> int:
        """The number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def qkv(self) -> int:
        """The columns of the product that makes queries, keys and values."""
        return self.hidden + 2 * self.hidden * self.key_heads // self.heads

    @property
    def token_width(self) -> int:
        """The width inside the MLPs that a token passes."""
        return self.width * max(1, self.choices)

    @property
    def expert_weights(self) -> int:
        """Parameters of the experts of one layer."""
        return self.experts * self.hidden * (2 + self.gated) * self.width

    @property
    def shared_weights(self) -> int:
        """Parameters of the matrices of one layer that every token passes."""
        columns = 0 if self.experts else (2 + self.gated) * self.width
        return self.hidden * (self.qkv + self.hidden + columns)

    @property
    def layer_weights(self) -> int:
        """Parameters of the matrices of one layer."""
        return self.shared_weights + self.expert_weights

    @property
    def head_layers(self) -> float:
        """FLOPs of the output layer relative to those of a layer."""
        return self.embedding / self._multiplied

    @property
    def embedding(self) -> int:
        """Parameters of the embedding table."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters without biases and norms, which are below 0.1 %."""
        return self.layers * self.layer_weights + (2 - self.tied) * self.embedding

    def flops(self, samples: int) -> float:
        """Return the FLOPs of forward and backward of these samples, without recomputation.

        The count is that of model FLOP/s utilization: attention without regard to the causal mask
        (Narayanan et al. 2021, appendix).
        """
        tokens = samples * self.seq
        return 6.0 * tokens * (self.layers * self._multiplied + self.embedding)

    @property
    def _multiplied(self) -> int:
        """Numbers with which a layer multiplies those of a token: weights, keys and values."""
        weights = self.hidden * (self.qkv + self.hidden + (2 + self.gated) * self.token_width)
        return weights + 2 * self.seq * self.hidden


_EXAMPLE = "--model llama-70b, or --model hidden=4096,layers=32,heads=32,vocab=32000,seq=4096"

_LLAMA = Transformer(
    hidden=4096, layers=32, heads=32, vocab=32000, seq=4096, ffn=11008, gated=1, tied=0, dropout=0
)
_GPT = Transformer(hidden=768, layers=12, heads=12, vocab=50257, seq=1024)
MODELS = {
    "gpt2": _GPT,
    "gpt2-xl": replace(_GPT, hidden=1600, layers=48, heads=25),
    "gpt3-175b": replace(_GPT, hidden=12288, layers=96, heads=96, seq=2048),
    "llama-7b": _LLAMA,
    "llama-8b": replace(_LLAMA, ffn=14336, kv_heads=8, vocab=128256, seq=8192),
    "llama-13b": replace(_LLAMA, hidden=5120, layers=40, heads=40, ffn=13824),
    "mixtral-8x7b": replace(_LLAMA, ffn=14336, kv_heads=8, seq=32768, experts=8, choices=2),
    "llama-70b": replace(_LLAMA, hidden=8192, layers=80, heads=64, ffn=28672, kv_heads=8),
}
"""Dimensions as published: GPT-2 and GPT-3 (Radford 2019, Brown 2020), Llama 2 and 3 (Touvron 2023,
Grattafiori 2024), Mixtral (Jiang 2024)."""


def _fix(text: str) -> str:
    if text.endswith(".py"):
        return f"--model {text}:build, with a function that returns (model, task, dataset)"
    return f"--model {text}: for the built-in model" if text in SIZES else _EXAMPLE


def parse_model(text: str) -> Transformer:
    """Return the transformer that a string describes: a name of MODELS and dimensions that replace.

    `"llama-70b"`, `"llama-70b,seq=8192"` and `"hidden=…,layers=…,heads=…,vocab=…,seq=…"` are valid.
    """
    base: Transformer | None = None
    values: dict[str, int] = {}
    names = [each.name for each in fields(Transformer)]
    for position, part in enumerate(piece.strip() for piece in text.split(",")):
        key, equals, value = part.partition("=")
        if not equals and position == 0 and part in MODELS:
            base = MODELS[part]
        elif key in names and value.isascii() and value.isdigit() and key not in values:
            values[key] = int(value)
        else:
            raise ShoalError(
                given=f"--model {text}",
                found=f"{part!r} is neither a model ({', '.join(MODELS)}) nor one NAME=INTEGER of "
                f"{', '.join(names)}",
                fix=_fix(text),
            )
    if base is not None:
        return replace(base, **values)
    missing = [name for name in ("hidden", "layers", "heads", "vocab", "seq") if name not in values]
    if missing:
        raise ShoalError(given=f"--model {text}", found=f"{', '.join(missing)} missing", fix=_EXAMPLE)
    return Transformer(**values)
