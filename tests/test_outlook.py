"""What a GPU that was not measured would do: numbers against a step's time by hand, tables and figures that say so."""

from __future__ import annotations

import dataclasses
import html
import re

import pandas as pd
import pytest
from synthetic_gpu import COSTS, FIT, KNOWN, MODEL, QWEN, answered, made_up

from latency_lab import fitting, goodput, gpus, outlook, prediction_tables, predictions, published
from latency_lab import roofline_figures as draw
from latency_lab.fitting import Fit
from latency_lab.recommend import Oracle, Question
from latency_lab.roofline import Costs, Engine, StepTime

BANDS = {"ttft": (0.8, 1.5), "tpot": (0.9, 1.2), "e2e": (0.9, 1.2)}
L4 = Oracle(gpus.find("L4"), QWEN, FIT, BANDS, "made up.")
H200 = Oracle(FIT.gpu, QWEN, FIT, BANDS, "made up.")
CPU = Fit("made-up CPU", gpus.CPU, Costs({"float32": 0.0}, 0.0, 1.0, {"float32": 1.0}, {}), pd.DataFrame(), 1, 1)


def step(weights: str = "bf16") -> StepTime:
    return StepTime(QWEN, L4.gpu, FIT.costs_of(weights), Engine(256, 8192, weights))


def text(found: str) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found)))


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_there_is_an_oracle_once_a_gpu_was_measured():
    found = outlook.oracle("L4", MODEL, [], KNOWN)
    assert found is not None and found.gpu.name == "L4" and found.fit is FIT
    assert outlook.oracle("L4", MODEL, [], {"made-up CPU": CPU}) is None


def test_only_formats_that_fit_are_spoken_of():
    assert outlook.formats(L4) == ["bf16", "fp8", "int4"]
    small = dataclasses.replace(L4.gpu, memory=8e9)
    assert outlook.formats(dataclasses.replace(L4, gpu=small)) == ["fp8", "int4"]


def test_nothing_decodes_faster_than_its_bytes():
    table = outlook.floors(L4).set_index("weights")
    assert table.loc["bf16", "bytes_tpot_s"] == pytest.approx(QWEN.step_bytes("bf16") / 300e9)
    assert (table["tpot_s"] > table["bytes_tpot_s"]).all() and table["tpot_s"].is_monotonic_decreasing
    # A step in the middle of 64 tokens after a prompt of 32; the context differs little.
    assert table.loc["bf16", "tpot_s"] == pytest.approx(step().gpu_s(1, 1, 64, 64), rel=1e-3)
    ends = table[["tpot_s_low", "tpot_s_high"]].div(table["tpot_s"], axis=0)
    assert ends.to_numpy() == pytest.approx(pd.DataFrame([BANDS["tpot"]] * 3).to_numpy())


def test_e2e_grows_with_concurrency_and_with_the_output():
    table = outlook.e2e(L4, (16, 64), (1, 20)).set_index(["weights", "output_tokens", "concurrency"])["e2e_s"]
    for weights in ("bf16", "fp8", "int4"):
        assert table[weights, 16, 1] < table[weights, 16, 20] < table[weights, 64, 20]


def test_the_longest_output_shrinks_with_concurrency_and_with_the_bands_upper_end():
    table = outlook.longest(L4, concurrency=(1, 64))
    assert (table["sure"] < table["tokens"]).all()
    assert all(own["tokens"].is_monotonic_decreasing for _, own in table.groupby("weights"))
    assert table["tokens"].iloc[0] == pytest.approx(1 / step().gpu_s(1, 1, 48, 48), abs=2)


def test_the_threads_load_takes_its_first_tokens_and_255_steps_of_twenty():
    row = outlook.thread(L4).iloc[0]
    assert row["weights"] == "bf16"
    assert row["e2e_s"] - row["ttft_s"] == pytest.approx(255 * step().gpu_s(24, 20, 20 * 160, 20 * 160), rel=0.01)
    assert row["tokens_per_s"] == pytest.approx(20 * 256 / row["e2e_s"], rel=0.01)


def test_the_parts_of_a_step_add_up():
    table = outlook.bounds(L4, batches=(8,))
    assert table["seconds"].sum() == pytest.approx(step().gpu_s(8, 8, 8 * 160, 8 * 160))
    assert set(table["part"]) == set(draw.PARTS)


def test_goodput_follows_the_load_and_falls_when_it_is_too_much():
    table = outlook.goodput_over_rate(L4, goodput.parse("e2e_p95<1s"), 16, (4, 400))
    calm, busy = (table[table["rate_per_s"] == rate] for rate in (4, 400))
    assert (calm["goodput_per_s"] == 4).all() and (busy["goodput_per_s"] < 100).all()
    assert (table["low"] <= table["goodput_per_s"]).all() and (table["goodput_per_s"] <= table["high"]).all()


def test_what_eager_mode_costs_is_of_the_same_workload_without_it():
    """The host takes 36 * 0.6 ms for each of 16 steps, against about 3.8 ms of the GPU's time."""
    table = outlook.eager_factors([answered()]).set_index("workload")["factor"]
    assert list(table.index) == ["chat c=1", "chat c=20"]
    assert table["chat c=1"] == pytest.approx(36 * 0.6e-3 / 3.8e-3, rel=0.2)
    assert outlook.eager_factors([made_up(COSTS, (1,))]).empty


# --- tables -----------------------------------------------------------------------------------------------------------


def test_costs_come_with_intervals_and_units():
    fit = fitting.fit([made_up(COSTS)], "NVIDIA H200", draws=20)
    said = text(prediction_tables.costs({"NVIDIA H200": fit}))
    assert re.search(r"kernels, bf16 weights 50 \[[^]]+\] us a layer", said) and "of 4 cells" in said


def test_errors_stand_beside_those_of_a_repeat():
    cells = predictions.cells([answered(1.25)], KNOWN)
    said = text(prediction_tables.errors(cells))
    assert "NVIDIA H200 held out TTFT 3 20.0 % 20.0 % 100.0 % - -" in said and "Not predicted" not in said
    assert "decode bf16" in text(prediction_tables.step_errors(predictions.steps([made_up(COSTS)], KNOWN)))


def test_published_rates_have_their_sources_and_no_link_that_the_page_would_fetch():
    found = prediction_tables.other_gpus(FIT)
    assert "None of these rates was fitted. Sources: [1] https://" in text(found) and "href" not in found


def test_floors_say_what_they_are():
    said = text(prediction_tables.floors(L4))
    assert (
        "Predicted, not measured: TPOT and TTFT of a request alone" in said and "made up. In brackets: the band" in said
    )
    assert "int4: not measured here, predicted with the costs of unquantized weights." in said


def test_the_threads_numbers_are_set_beside_the_prediction():
    said = text(prediction_tables.thread(L4, [answered()]))
    assert "The thread reports 15.7 s a request streaming" in said and "Eager mode is the first suspect" in said
    assert "Eager mode" not in text(prediction_tables.thread(L4, []))  # measured nowhere


def test_the_recommendation_is_a_table_with_the_line_to_paste():
    asked = Question(MODEL, "L4", goodput.parse("e2e_p95<1s"), 16, concurrency=20)
    found = prediction_tables.recommendation(asked, [], KNOWN)
    said = text(found)
    assert f"{MODEL} on L4: 20 at once, 16 output tokens, e2e p95 < 1 s" in said
    assert '<pre class="command">vllm serve' in found and "No L4 was measured here" in said


def test_fitted_cells_are_said_a_study_and_a_set_of_workloads_at_a_time():
    said = text(prediction_tables.fitted_cells())
    assert "h200-quantization: alone c=1, chat c=128, document c=1 on bf16, fp8, awq-int4, w8a8-int8;" in said
    assert "cpu-smoke: chat c=1, long-prompts on *" in said


def test_machines_are_listed_with_their_sources():
    said = text(prediction_tables.machines())
    assert all(gpu.name in said and gpu.source in said for gpu in gpus.GPUS)


def test_tables_that_have_nothing_to_show_say_why():
    asked = Question(MODEL, "L4", {"e2e_p95": 1.0}, 16, concurrency=1)
    for found in (
        prediction_tables.costs({}),
        prediction_tables.errors(predictions.cells([], {})),
        prediction_tables.step_errors(predictions.steps([], {})),
        prediction_tables.other_gpus(None),
        prediction_tables.floors(None),
        prediction_tables.thread(None, []),
        prediction_tables.recommendation(asked, [], {}),
    ):
        assert found.startswith('<p class="absent">') and "measured here" in found


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "title"),
    [
        (lambda: draw.step_bounds([H200, L4]), "A request alone in bf16: overhead is"),
        (lambda: draw.e2e_curves(L4, (16, 256)), "L4, predicted: 256 tokens, 20 at once, in"),
        (lambda: draw.longest_outputs(L4), "L4, predicted: 20 at once get"),
        (lambda: draw.goodput_over_rate(L4, goodput.parse("e2e_p95<1s")), "L4, predicted: goodput reaches"),
    ],
    ids=["bounds", "e2e", "longest", "goodput"],
)
def test_predictions_are_drawn_as_such(made, title):
    found = made()
    heading, small_print = (one.get_text().replace("\n", " ") for one in found.figure.texts)
    assert heading.startswith(title) and "predicted, not measured" in small_print.lower()
    assert not found.data.empty and len(found.alt) > 20


def test_bounds_are_drawn_in_formats_whose_costs_were_fitted():
    assert set(draw.step_bounds([H200, L4]).data["weights"]) == {"bf16", "fp8"}  # and not int4


def test_measured_and_predicted_are_drawn_with_the_held_out_errors_in_the_title():
    points = predictions.points(predictions.cells([answered(1.25)], KNOWN))
    found = draw.against_measured(points, published.check(FIT))
    assert found.figure.texts[0].get_text().startswith("Held out on the H200, median error: TPOT 20.0 %, E2E 20.0 %")
    assert set(found.data["source"]) == set(draw.SOURCES)
    alone = draw.against_measured(points, None)
    assert set(alone.data["source"]) == {"fitted", "held out"}


def test_figures_that_have_nothing_to_show_say_why():
    for drawn in (
        draw.against_measured(pd.DataFrame(), None),
        draw.step_bounds([None, None]),
        draw.e2e_curves(None),
        draw.longest_outputs(None),
        draw.goodput_over_rate(None, {"e2e_p95": 1.0}),
    ):
        assert drawn.figure is None and "measured" in drawn.reason
