"""Recommendations: measured where there is data, predicted elsewhere, and what to do where nothing is good enough."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from synthetic import cell, cells, frame, request
from synthetic_gpu import FIT, KNOWN, MODEL, QWEN

from latency_lab import __main__, goodput, gpus, predictions, recommend, records
from latency_lab.gpus import GpuError
from latency_lab.models import ModelError
from latency_lab.recommend import MEETS, Question, QuestionError


def question(gpu: str = "L4", slo: str = "e2e_p95<1s", output: int = 16, **values: object) -> Question:
    load = {"concurrency": 20} | values
    return Question(MODEL, gpu, goodput.parse(slo), output, **load)  # type: ignore[arg-type]


def answer(*args: object, studies: list[records.Records] | None = None, **values: object) -> recommend.Answer:
    return recommend.recommend(question(*args, **values), studies or [], KNOWN)  # type: ignore[arg-type]


# --- where nothing was measured ---------------------------------------------------------------------------------------


def test_a_gpu_that_was_not_measured_is_predicted_with_a_band_and_says_so():
    found = answer()
    assert set(found.candidates["what"]) == {"predicted"}
    row = found.candidates.iloc[0]
    assert row["e2e_p95_low"] < row["e2e_p95_s"] < row["e2e_p95_high"]
    assert found.notes[0].startswith("No L4 was measured here: costs fitted on the H200")
    assert any(note.startswith("int4: not measured here") for note in found.notes)


def test_the_best_is_a_line_to_paste():
    found = answer(slo="e2e_p95<1s,ttft_p95<300ms")
    assert found.candidates["meets"].iloc[0] == "yes"
    assert found.command.startswith(f"vllm serve {MODEL}")
    assert "--max-model-len 2048 --max-num-batched-tokens 8192 --max-num-seqs 256" in found.command
    fp8 = found.candidates[found.candidates["weights"] == "fp8"].iloc[0]
    line = recommend.serve(found.question, fp8, gpus.find("L4"), QWEN)
    assert line.endswith("--quantization fp8") and MODEL in line
    assert recommend.serve(found.question, fp8, gpus.find("T4"), QWEN).endswith("--dtype half")


def test_what_meets_the_slo_comes_first_and_by_goodput_the_rest_by_how_close_it_comes():
    table = answer(output=40).candidates
    rank = table["meets"].map(MEETS.index)
    assert rank.is_monotonic_increasing and rank.nunique() > 2
    good = table[rank <= 1]
    assert all(own["goodput_per_s"].is_monotonic_decreasing for _, own in good.groupby("meets"))
    assert table.loc[rank == 3, "worst"].is_monotonic_increasing
    assert table["pareto"].any() and not table["pareto"].all()


def test_where_nothing_meets_the_slo_what_comes_closest_and_what_would_is_said():
    found = answer(output=256)
    assert found.command == ""
    text = " ".join(found.notes)
    assert "Nothing is likely to meet the SLO. Closest: int4" in text
    assert "outputs of at most so many tokens:" in text and "another GPU: " in text and "H200" in text


def test_an_slo_that_nothing_meets_says_that_too():
    found = answer(slo="e2e_p95<1ms")
    assert found.notes[-1].endswith("nothing among shorter outputs, less load and the GPUs of the table.")


def test_an_open_load_is_predicted_as_well():
    found = answer(concurrency=None, rate_per_s=2.0)
    assert found.candidates["meets"].iloc[0] == "yes"
    assert found.candidates["goodput_per_s"].max() == pytest.approx(2, rel=0.2)


def test_the_longest_output_meets_the_slo_and_one_token_more_does_not():
    oracle = recommend.Oracle.of(gpus.find("L4"), QWEN, [], KNOWN)
    asked, engine = question(), oracle.engine("bf16")
    most = recommend.longest_output(asked, oracle, engine, "value")
    for tokens, inside in ((most, True), (most + 1, False)):
        run = oracle.run(engine, recommend.loads(asked, tokens))
        assert (goodput.statistic(run.requests["e2e_s"], "p95") < 1) == inside
    assert recommend.longest_output(asked, oracle, engine, "high") < most


def test_a_model_that_does_not_fit_leaves_no_engine():
    oracle = recommend.Oracle.of(gpus.find("L4"), QWEN, [], KNOWN)
    assert oracle.engine("bf16").kv_cache_tokens > 50_000
    small = gpus.Gpu("small", 1e9, {"16-bit": 1e12}, 4e9, "made up")
    assert recommend.Oracle(small, QWEN, FIT, {}, "").engine("bf16") is None


# --- where something was ----------------------------------------------------------------------------------------------


def measured(e2e_s: float) -> records.Records:
    """Twenty requests of 16 tokens on an H200, at once, on the default setting, each of `e2e_s`."""
    values = {"concurrency": 20, "load": "closed", "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    rows = [request(**values, request=i, prompt_tokens=32, token_times_s=[0.1, *[e2e_s] * 15]) for i in range(20)]
    own = cell(**values, model="qwen3-4b-instruct-2507", device="NVIDIA H200", dtype="bfloat16", status="done")
    study = records.Records(Path("made-up"), cells([own | {"enforce_eager": False}]))
    study.__dict__["requests"] = frame(rows)
    study.__dict__["steps"] = pd.DataFrame({"cell": []})
    return study


def test_a_measured_setting_stands_in_the_place_of_its_prediction(monkeypatch):
    monkeypatch.setattr(recommend, "held_out_bands", lambda *_: {"e2e": (0.9, 1.1)})
    found = answer("H200", studies=[measured(0.7)]).candidates
    row = found[found["what"] == "measured"].iloc[0]
    assert row["setting"] == "a (made-up)" and row["e2e_p95_s"] == row["e2e_p95_low"] == pytest.approx(0.7)
    assert row["goodput_per_s"] == pytest.approx(20 / 0.7)
    same = found[found["weights"].eq("bf16") & found["max_num_seqs"].eq(256) & found["max_num_batched_tokens"].eq(8192)]
    assert same["what"].tolist() == ["measured"]
    assert "int4" not in set(found["weights"])  # this GPU was measured, and int4 on it was not


def test_other_lengths_and_loads_are_not_taken_for_what_was_asked(monkeypatch):
    monkeypatch.setattr(recommend, "held_out_bands", lambda *_: {})
    for asked in ({"output": 17}, {"concurrency": 19}, {"prompt_tokens": 65}):
        assert "measured" not in set(answer("H200", studies=[measured(0.7)], **asked).candidates["what"])


# --- errors, and the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"concurrency": None}, QuestionError, "load: give one of --concurrency and --rate"),
        ({"rate_per_s": 1.0}, QuestionError, "load: give one of --concurrency and --rate"),
        ({"concurrency": 0}, QuestionError, "concurrency 0: allowed: above 0"),
        ({"output": -1}, QuestionError, "output_tokens -1: allowed: above 0"),
        ({"gpu": "B200"}, GpuError, "GPU 'B200' is not known; allowed: L4"),
    ],
)
def test_questions_without_sense_are_one_clear_line(values, error, message):
    with pytest.raises(error, match=message):
        answer(**values)


def test_an_unknown_model_is_named():
    with pytest.raises(ModelError, match="model 'gpt-5': its sizes are not known"):
        recommend.recommend(Question("gpt-5", "L4", {"e2e_p95": 1.0}, 16, concurrency=1), [], KNOWN)


def test_the_command_prints_the_set_the_line_and_the_notes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(predictions, "fits", lambda studies: KNOWN)
    line = ["recommend", "--model", MODEL, "--gpu", "L4", "--concurrency", "20", "--output-tokens", "16"]
    line += ["--data", str(tmp_path)]
    assert __main__.main([*line, "--slo", "e2e_p95<1s,ttft_p95<300ms"]) == 0
    out = capsys.readouterr().out
    assert "*predicted" in out and "meets the SLO" in out and "vllm serve Qwen" in out and "No L4 was measured" in out
    for slo, message in (("e2e<1s", "slo 'e2e<1s' is not a limit"), ("e2e_p95<0ms", "nothing takes no time")):
        assert __main__.main([*line, "--slo", slo]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
