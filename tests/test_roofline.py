"""Bytes, FLOPs and what remains of a step: by hand, fitted back from made-up steps, and against published rates."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from synthetic_gpu import COSTS, FIT, QWEN, cell, made_up

from latency_lab import fitting, gpus, observations, published, shapes
from latency_lab.gpus import GpuError
from latency_lab.models import ModelError
from latency_lab.roofline import Engine, StepTime, captured, engine_of
from latency_lab.shapes import Shape

TINY = Shape("tiny", 2, 8, 2, 1, 4, 16, 100, tied=True)


# --- shapes and GPUs --------------------------------------------------------------------------------------------------


def test_bytes_and_flops_of_a_model_counted_by_hand():
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8  # query and output, key and value of one head
    assert TINY.linear_parameters == 2 * (attention + 3 * 8 * 16)
    assert TINY.parameters == TINY.linear_parameters + 100 * 8
    assert TINY.step_bytes("bf16") == 2 * TINY.parameters
    assert TINY.step_bytes("fp8") == TINY.linear_parameters + 2 * 800
    assert TINY.kv_bytes("16-bit") == 2 * TINY.kv_bytes("fp8") == 2 * 2 * 4 * 2  # key and value, layers, head, bytes
    assert TINY.attention_flops == 4 * 2 * 2 * 4


def test_the_4b_model_weighs_what_vllm_loaded():
    """weight_bytes of h200-batching less the rotary table, 2 * 128 * 262,144 bytes, in bfloat16 and in FP8."""
    table = 2 * 128 * 262_144
    assert QWEN.memory_bytes("bf16") == pytest.approx(8_112_045_632 - table, rel=1e-3)
    assert QWEN.memory_bytes("fp8") == pytest.approx(4_478_730_368 - table, rel=1e-3)
    assert QWEN.kv_bytes("16-bit") == 147_456


def test_an_untied_head_counts_in_memory_but_an_embedding_is_not_read_whole():
    untied = shapes.from_config("m", {**config(QWEN), "tie_word_embeddings": False})
    assert untied.step_bytes("bf16") == QWEN.step_bytes("bf16")
    assert untied.memory_bytes("bf16") - QWEN.memory_bytes("bf16") == 2 * QWEN.head_parameters


def config(shape: Shape) -> dict[str, object]:
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary")
    keys = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    )
    return {key: getattr(shape, name) for key, name in zip(keys, names, strict=True)} | {"model_type": "qwen3"}


def test_models_that_are_not_known_are_named_with_what_is(tmp_path):
    with pytest.raises(ModelError, match=r"'gpt-5': its sizes are not known; allowed: .*qwen3-4b-instruct-2507"):
        shapes.shape("gpt-5")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ModelError, match="model_type 'mamba' is not modelled; allowed: llama"):
        shapes.shape(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("rtx-4090", "RTX 4090"),
    ],
)
def test_a_gpu_is_found_by_its_name_and_by_the_drivers(name, found):
    assert gpus.find(name).name == found


@pytest.mark.parametrize("name", ["A100", "B200", ""])
def test_a_gpu_that_is_not_known_is_answered_with_those_that_are(name):
    with pytest.raises(GpuError, match=r"is not known; allowed: L4, A10G, .*A100-40GB, A100-80GB"):
        gpus.find(name)


def test_fp8_weights_are_multiplied_as_16_bit_where_the_gpu_has_no_fp8():
    assert gpus.find("A10G").rate("fp8") == gpus.find("A10G").rate("16-bit")
    assert gpus.find("L4").rate("fp8") > 2 * gpus.find("L4").rate("16-bit")


# --- a step -----------------------------------------------------------------------------------------------------------


def test_a_decode_step_adds_up():
    gpu = gpus.find("L4")
    time = StepTime(QWEN, gpu, COSTS, Engine(256, 8192))
    seconds = time.gpu_s(1, 1, 100, 100)
    bytes_s = (QWEN.step_bytes("bf16") + 100 * 147_456) / (0.8 * 300e9)
    flops = 2 * QWEN.parameters + 100 * QWEN.attention_flops
    assert seconds == pytest.approx(36 * 50e-6 + 3e-6 + bytes_s + flops / (0.7 * 121e12))
    assert sum(time.parts_s(1, 1, 100, 100).values()) == pytest.approx(seconds)


def test_steps_are_padded_to_captured_sizes_and_launched_as_their_size_demands():
    time = StepTime(QWEN, gpus.find("L4"), COSTS, Engine(max_num_seqs=16, max_num_batched_tokens=8192))
    assert time.sizes == captured(16) == [1, 2, 4, 8, 16, 24, 32]
    assert [time.padded(tokens) for tokens in (1, 3, 5, 20, 32, 33)] == [1, 4, 8, 24, 32, 33]
    assert [time.launch(*step) for step in ((16, True), (16, False), (33, False))] == ["graph", "pieces", "kernels"]
    eager = StepTime(QWEN, gpus.find("L4"), COSTS, Engine(16, 8192, graphs=False))
    assert (eager.padded(3), eager.launch(3, True), eager.host_s(3, True)) == (3, "eager", pytest.approx(36 * 0.6e-3))
    assert captured(256)[-3:] == [480, 496, 512]


def test_a_measured_setting_as_an_engine():
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "enforce_eager": True,
        "async_scheduling": pd.NA,
        "kv_cache_dtype": "fp8_e4m3",
        "kv_cache_tokens": 1000,
    }
    assert engine_of(values, "fp8") == Engine(4, 512, "fp8", "fp8", False, False, True, 1000)


# --- the fit ----------------------------------------------------------------------------------------------------------


def test_costs_are_fitted_back_from_steps_that_they_made():
    fit = fitting.fit([made_up(COSTS)], "NVIDIA H200", draws=20)
    assert (fit.cells, fit.gpu.name) == (4, "H200")
    assert fit.costs.bandwidth_fraction == pytest.approx(0.8, rel=1e-3)
    assert fit.costs.kernel_s["bf16"] == pytest.approx(50e-6, rel=1e-3)
    assert fit.costs.kernel_s["fp8"] == pytest.approx(60e-6, rel=1e-3)
    assert fit.costs.flops_fraction == pytest.approx(COSTS.flops_fraction, rel=1e-3)
    assert fit.costs.request_s == pytest.approx(3e-6, rel=1e-2)
    row = fit.table.set_index("cost").loc["kernels, bf16 weights"]
    assert row["low"] <= 50.05 and row["high"] >= 49.95 and row["unit"] == "us a layer"


def test_a_fit_is_the_same_every_time():
    study = made_up(COSTS, noise=0.02)
    one, other = (fitting.fit([study], "NVIDIA H200", draws=20) for _ in range(2))
    pd.testing.assert_frame_equal(one.table, other.table)


def test_no_cost_is_lower_than_possible():
    matrix, weight = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.ones(3)
    free = fitting.least_squares(matrix, np.array([2.0, 4.0, 6.0]), weight, np.zeros(2))
    assert free == pytest.approx([0, 2], abs=1e-9)
    held = fitting.least_squares(matrix, np.array([3.0, 2.0, 1.0]), weight, np.array([0.0, 1.0]))
    assert held[1] == 1 and held[0] >= 0


def test_what_can_not_be_fitted_says_what_could():
    with pytest.raises(ValueError, match="NVIDIA L4: no steps to fit; allowed: studies that hold cells of"):
        fitting.fit([made_up(COSTS)], "NVIDIA L4")


def test_a_format_that_was_not_fitted_costs_what_unquantized_weights_cost():
    assert FIT.costs_of("fp8") is COSTS
    assert FIT.costs_of("int4").kernel_s["int4"] == COSTS.kernel_s["bf16"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"status": "failed"}, "failed"),
        ({"scheduling_policy": "priority"}, "priority scheduling"),
        ({"dtype": "float32"}, "float32 on a GPU"),
        ({"tensor_parallel_size": 2}, "more than one GPU"),
        ({"device": "NVIDIA B200"}, "GPU 'NVIDIA B200' is not known"),
        ({"model": "gpt-5"}, "model 'gpt-5'"),
    ],
)
def test_cells_that_the_model_does_not_speak_of_say_why(changed, reason):
    found = observations.unpredictable(cell("a", "b", "c", "bf16") | changed)
    assert found.startswith(reason) and bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("quantization", "dtype", "weights"),
    [
        (None, "bfloat16", "bf16"),
        (None, "float32", "float32"),
        ("fp8", "bfloat16", "fp8"),
        ("awq_marlin", "bfloat16", "int4"),
        ("auto_gptq", "bfloat16", "int4"),
        ("compressed-tensors", "bfloat16", "int8"),
    ],
)
def test_formats_of_weights_by_vllms_names(quantization, dtype, weights):
    assert observations.weights_of({"quantization": quantization, "dtype": dtype}) == weights


def test_the_work_of_a_step_counts_what_attention_reads_and_computes():
    study = made_up(COSTS, concurrency=(1,))
    table = observations.work(study.steps)
    first, long = table.iloc[0], table.iloc[40]
    assert (first["tokens"], first["requests"], first["context"], first["pairs"]) == (1, 1, 32, 32)
    assert np.isnan(first["before_s"]) and table["before_s"].iloc[1] == first["end_s"]
    assert (long["tokens"], long["requests"], long["prefill"]) == (6001, 2, 6000)
    assert long["context"] == 6000 + 72 and long["pairs"] == 72 + 6000 * 6001 / 2


# --- other GPUs -------------------------------------------------------------------------------------------------------


def test_published_rates_are_whole_and_their_models_known():
    rates = published.rates()
    assert set(rates["gpu"]) <= {gpu.name for gpu in gpus.GPUS}
    assert rates["url"].str.startswith("https://").all() and (rates["tpot_ms"] > 0).all()
    checked = published.check(FIT)
    assert len(checked) == rates[["tpot_ms", "ttft_ms", "e2e_ms"]].notna().sum().sum()
    one = checked[(checked["gpu"] == "L4") & (checked["concurrency"] == 1) & (checked["weights"] == "bf16")]
    assert one.set_index("metric")["error"].abs().max() < 0.15
