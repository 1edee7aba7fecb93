"""A model's shape, and the bytes and FLOPs that follow from it: of its weights, of its KV cache, of a token.

For decoder-only transformers with grouped-query attention and a gated MLP, which is what most served models of a few
billion parameters are (Llama, Mistral, Qwen2, Qwen3). Norms, biases and rotary tables are left out: below a thousandth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latency_lab.models import ModelError, published_config, shipped_configs

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Format:
    """How the weights of the linear layers are stored and multiplied. The LM head and embeddings stay 16-bit.

    bytes_each : bytes a weight, scales included
    operands : which of a GPU's rates multiplies them: 4-bit weights are unpacked to 16 bits first
    quantization : vLLM's --quantization for it; None where the checkpoint says it
    """

    bytes_each: float
    operands: str
    quantization: str | None = None


FORMATS = {
    "float32": Format(4.0, "float32"),
    "bf16": Format(2.0, "16-bit"),
    "fp8": Format(1.0, "fp8", "fp8"),
    "int8": Format(1.0, "int8"),
    # Groups of 128 weights share a 16-bit scale and a 4-bit zero point (AWQ, GPTQ).
    "int4": Format(0.5 + 2.5 / 128, "16-bit"),
}

KV_BYTES = {"float32": 4, "16-bit": 2, "fp8": 1}
"""Bytes of an element of the KV cache."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, as its config.json names them."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool

    @property
    def linear_parameters(self) -> int:
        """Weights of all layers: query, key, value and output projections, and the MLP's gate, up and down."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Weights of the LM head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights; a tied embedding is the LM head."""
        return self.linear_parameters + self.head_parameters * (1 if self.tied else 2)

    def step_bytes(self, weights: str) -> float:
        """Bytes of weights that one step reads: all layers and the LM head, each once. Of the embedding a step reads
        a row for each token, which is nothing beside the rest.
        """
        wide = FORMATS["float32"] if weights == "float32" else FORMATS["bf16"]
        return self.linear_parameters * FORMATS[weights].bytes_each + self.head_parameters * wide.bytes_each

    def memory_bytes(self, weights: str) -> float:
        """Bytes of weights in memory."""
        return self.step_bytes(weights) + (0 if self.tied else 2 * self.head_parameters)

    def kv_bytes(self, cache: str) -> int:
        """Bytes of one token in the KV cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * KV_BYTES[cache]

    @property
    def attention_flops(self) -> int:
        """FLOPs for a query token and one token that it looks at, over all layers: two products of head_dim."""
        return 4 * self.layers * self.heads * self.head_dim


def shape(model: str) -> Shape:
    """The shape of a model by name: a shipped config, a folder, or the tail of a hub id ("Qwen/Qwen3-4B-...").

    Raises ModelError where there is no such config, or where it is of another kind of model.
    """
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        name = model.rsplit("/", 1)[-1].lower()
        if name not in shipped_configs():
            raise ModelError(
                f"model {model!r}: its sizes are not known; allowed: {', '.join(shipped_configs())}, or a folder with "
                "a config.json"
            )
        folder = published_config(name)
    return from_config(folder.name, json.loads((folder / "config.json").read_text()))


def from_config(name: str, config: Mapping[str, Any]) -> Shape:
    """A config.json as a shape. Raises ModelError for a model of another kind."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ModelError(f"model {name}: model_type {kind!r} is not modelled; allowed: {', '.join(MODEL_TYPES)}")
    heads = int(config["num_attention_heads"])
    return Shape(
        name=name,
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        intermediate=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
    )
