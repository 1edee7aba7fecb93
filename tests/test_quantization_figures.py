"""Energy per token from made-up cells, and the figure that compares ways to quantize."""

import numpy as np
import pandas as pd
import pytest
from synthetic import cell, cells, frame, request

from latency_lab import energy, labels, metrics, quantization_figures, style, summary, tables

WAYS = {
    "bf16": (None, 0.010),
    "fp8": ("fp8", 0.008),
    "awq-int4": ("auto_awq", 0.011),
    "gptq-int4": ("auto_gptq", 0.0111),
}


def made(concurrency=(1, 8, 64), energy_j=400.0, repeats=2):
    """Three concurrencies on four ways to quantize, and one setting with another budget beside them."""
    requests, rows = [], []
    for setting, (quantization, per_token_s) in [*WAYS.items(), ("budget=512", (None, 0.010))]:
        values = {"quantization": quantization, "max_num_batched_tokens": 512 if "budget" in setting else 8192}
        for level in concurrency:
            for repeat in range(repeats):
                times = [0.05 + level * per_token_s / 8 * (n + 1) for n in range(20)]
                keys = {"setting": setting, "workload": f"chat c={level}", "repeat": repeat, "concurrency": level}
                keys |= {"cell": f"{setting}-{level}-{repeat}", **values}
                requests += [
                    request(request=i, token_times_s=times, prompt_tokens=32, **keys) for i in range(level * 5)
                ]
                rows.append(cell(**keys, energy_j=energy_j, requests=level * 5))
    return frame(requests), cells(rows)


@pytest.fixture(scope="module")
def drawn():
    requests, table = made()
    return figure_of(requests, table)


def figure_of(requests, table):
    rates = metrics.throughput(requests)
    points = energy.beside(summary.of_requests(requests, draws=50), table, rates)
    return quantization_figures.quantization(points, rates, table, style.context(table))


def test_joules_over_tokens_with_an_interval_over_repeats():
    rates = pd.DataFrame(
        {"cell": ["a", "b", "c"], "setting": "s", "workload": "w", "repeat": [0, 1, 2], "output_tokens": [100, 100, 0]}
    )
    table = pd.DataFrame({"cell": ["a", "b", "c"], "energy_j": [50.0, 70.0, 9.0]})
    (row,) = energy.per_token(table, rates).to_dict("records")
    assert row["energy_j"] == pytest.approx(0.6) and row["repeats"] == 2, "a cell without tokens has no such number"
    assert (row["energy_j_low"], row["energy_j_high"]) == pytest.approx((0.5, 0.7))
    (row,) = energy.per_token(table.iloc[:1], rates).to_dict("records")
    assert row["energy_j"] == 0.5 and np.isnan(row["energy_j_low"])
    assert energy.per_token(table.assign(energy_j=np.nan), rates).empty


def test_settings_that_differ_in_quantization_alone_are_compared(drawn):
    assert sorted(drawn.data["setting"].unique()) == sorted(WAYS)
    row = drawn.data[(drawn.data["setting"] == "fp8") & (drawn.data["concurrency"] == 8)].iloc[0]
    assert row["tpot_p50_s"] == pytest.approx(0.008, rel=1e-5)
    assert row["energy_j"] == pytest.approx(2 * 400 / (2 * 40 * 20))
    texts = " ".join(text.get_text() for text in drawn.figure.texts).replace("\n", " ")
    assert texts.startswith("At concurrency 1 a token takes 1 ms with fp8, 1.39 ms with gptq-int4")
    assert "prompts of 32 and outputs of 20 tokens" in texts and "random weights" in texts


def test_lines_are_named_beside_their_ends_and_names_do_not_overlap(drawn):
    drawn.figure.draw_without_rendering()
    for ax in drawn.figure.axes:
        names = [text for text in ax.texts if text.get_gid() == "line"]
        assert sorted(text.get_text() for text in names) == sorted(WAYS)
        boxes = sorted((labels.Text.get_window_extent(text) for text in names), key=lambda box: box.y0)
        assert all(low.y1 <= high.y0 + 0.5 for low, high in zip(boxes[:-1], boxes[1:], strict=True))
        assert "(" in ax.get_ylabel()


def test_without_energy_or_a_second_way_to_quantize():
    requests, table = made(concurrency=(1, 8), energy_j=None)
    figure = figure_of(requests, table)
    assert len([ax for ax in figure.figure.axes if ax.get_visible()]) == 3 and "energy_j" not in figure.data
    nothing = figure_of(requests, table.assign(quantization=None))
    assert nothing.figure is None and "differ in quantization alone" in nothing.reason


@pytest.mark.parametrize("energy_j", [400.0, None])
def test_the_table_of_all_numbers_has_the_energy_where_it_is_known(energy_j):
    requests, table = made(concurrency=(1,), energy_j=energy_j)
    points = energy.beside(summary.of_requests(requests, draws=50), table, metrics.throughput(requests))
    assert ("J/output token" in tables.summary(points)) == (energy_j is not None)
