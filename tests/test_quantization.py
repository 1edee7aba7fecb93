"""Weights that were to be quantized, and what was loaded."""

import json

import pytest

from latency_lab import models, quantization

QWEN = json.loads((models.published_config("qwen3-4b-instruct-2507") / "config.json").read_text())


@pytest.mark.parametrize(
    ("method", "weight_bytes", "applied"),
    [  # as an H200 reported them with vLLM 0.24.0; the third is a GPTQ config whose layers vLLM took for unquantized
        ("fp8", 4_480_000_000, True),
        ("auto_awq", 2_824_000_000, True),
        ("auto_gptq", 8_203_000_000, False),
        (None, 8_110_000_000, True),
        ("auto_gptq", None, True),  # a CPU cannot say
    ],
)
def test_weights_as_large_as_unquantized_ones_are_not_quantized(method, weight_bytes, applied):
    said = quantization.unapplied(method, weight_bytes, QWEN, 2)
    assert (said is None) == applied
    if not applied:
        assert said == (
            "quantization not applied: auto_gptq was asked for, and 8.20 GB of weights were loaded, where unquantized "
            "ones take 8.04 GB"
        )


def test_of_a_model_whose_sizes_are_unknown_nothing_is_said():
    assert quantization.unapplied("fp8", 10**12, QWEN | {"model_type": "qwen3_moe"}, 2) is None
