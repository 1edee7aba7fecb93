"""Whether weights that were to be quantized are: told by the bytes that were loaded.

vLLM may take a quantization config, name its method, and load unquantized weights all the same, for example where it
cannot tell which layers of a checkpoint are quantized. The numbers would then be bfloat16's under another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from latency_lab import shapes
from latency_lab.models import ModelError

UNAPPLIED_SHARE = 0.8
"""Linear weights of 8 bits take half the bytes of 16 bits, and their scales a few hundredths: 0.8 lies well between."""


def unapplied(method: str | None, weight_bytes: int | None, config: Mapping[str, Any], bytes_each: int) -> str | None:
    """A sentence where the weights loaded are too many bytes for quantized ones; None where all is well, or unknown.

    method : what was asked for; None where nothing was
    config : the model's config.json; of some kinds of models the sizes are not known (see shapes.py)
    bytes_each : of an unquantized weight. Embeddings and the LM head are not quantized
    """
    if method is None or weight_bytes is None:
        return None
    try:
        shape = shapes.from_config("", config)
    except ModelError:
        return None
    wide = shape.parameters - shape.linear_parameters
    if weight_bytes <= (wide + UNAPPLIED_SHARE * shape.linear_parameters) * bytes_each:
        return None
    return (
        f"quantization not applied: {method} was asked for, and {weight_bytes / 1e9:.2f} GB of weights were loaded, "
        f"where unquantized ones take {shape.parameters * bytes_each / 1e9:.2f} GB"
    )
