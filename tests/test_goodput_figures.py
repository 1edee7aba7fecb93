"""Goodput over load: what is drawn is the table, hollow where most requests are late, and nothing without an SLO."""

from __future__ import annotations

import pandas as pd
import pytest
from synthetic import cell, cells, frame, request

from latency_lab import goodput, goodput_figures, style

SLO = '{"e2e_p95_s": 1.0}'
LATE_S = {"fast": {1: 0.5, 8: 0.6, 64: 0.8}, "slow": {1: 0.5, 8: 1.5, 64: 3.0}}
"""E2E of every request by setting and load level: `slow` meets the limit at the lowest load only."""


def made(load: str = "closed", slo: str | None = SLO, levels: tuple[int, ...] = (1, 8, 64)):
    requests, rows = [], []
    for setting, late_s in LATE_S.items():
        for level in levels:
            for repeat in range(2):
                closed = load == "closed"
                keys = {"setting": setting, "repeat": repeat, "load": load, "cell": f"{setting}-{level}-{repeat}"}
                keys |= {"workload": f"chat c={level}" if closed else f"open rate={level}/s"}
                keys |= {"concurrency": level if closed else None, "rate_per_s": None if closed else float(level)}
                times = [0.1, late_s[level]]
                requests += [request(request=i, token_times_s=times, **keys) for i in range(level)]
                rows.append(cell(**keys, slo=slo, requests=level))
    return frame(requests), cells(rows)


def drawn(**values):
    requests, table = made(**values)
    return goodput_figures.curves(goodput.by_point(requests, table), style.context(table))


def texts(figure) -> str:
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def test_a_curve_is_the_requests_within_the_limits_over_the_time():
    found = drawn()
    rows = found.data.set_index(["setting", "level"])["goodput_per_s"]
    assert rows["fast", 64] == pytest.approx(64 / 0.8) and rows["fast", 1] == pytest.approx(2.0)
    assert rows["slow", 1] == pytest.approx(2.0) and rows["slow", 8] == rows["slow", 64] == 0
    assert texts(found.figure).startswith("chat: goodput reaches 80 requests/s with fast, 2 with slow")
    assert "bootstrap intervals" in texts(found.figure) and "random weights" in texts(found.figure)
    (ax,) = found.figure.axes
    assert ax.get_title(loc="left") == "chat: e2e_p95 < 1 s" and ax.get_ylabel() == "goodput (requests/s)"
    assert ax.get_ylim()[0] == 0


def test_points_whose_requests_are_late_are_hollow():
    found = drawn()
    hollow = [line for line in found.figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert [line.get_xdata().tolist() for line in hollow] == [[8, 64]]
    names = [text.get_text() for text in found.figure.legends[0].get_texts()]
    assert names[:2] == ["fast", "slow"] and "fewer than 95 %" in names[2]


def test_the_axes_keep_their_room():
    found = drawn()
    found.figure.draw_without_rendering()
    (ax,) = found.figure.axes
    assert ax.get_position().height * found.figure.get_figheight() > 1.5


def test_an_open_loop_is_drawn_over_its_rate_with_all_that_is_sent():
    found = drawn(load="poisson")
    assert set(found.data["axis"]) == {"rate_per_s"} and set(found.data["level"]) == {1, 8, 64}
    (ax,) = found.figure.axes
    assert ax.get_xlabel() == "rate (requests/s sent)"
    assert ax.lines[0].get_xydata().tolist() == [[0, 0], [64, 64]]


def test_each_workload_has_its_panel():
    both = [made(), made(load="poisson")]
    for (requests, table), load in zip(both, ("c", "o"), strict=True):
        requests["cell"], table["cell"] = requests["cell"] + load, table["cell"] + load
    requests, table = (pd.concat(parts, ignore_index=True) for parts in zip(*both, strict=True))
    found = goodput_figures.curves(goodput.by_point(requests, table), style.context(table))
    titles = [ax.get_title(loc="left") for ax in found.figure.axes if ax.get_visible()]
    assert titles == ["chat: e2e_p95 < 1 s", "open: e2e_p95 < 1 s"]


@pytest.mark.parametrize("values", [{"slo": None}, {"levels": (8,)}])
def test_without_an_slo_or_a_second_level_it_says_so(values):
    found = drawn(**values)
    assert found.figure is None
    assert found.reason == "no workload with an SLO was measured at two or more load levels."


def test_a_line_of_nothing_has_an_axis_all_the_same():
    requests, table = made(slo='{"e2e_p95_s": 0.001}')
    found = goodput_figures.curves(goodput.by_point(requests, table), style.context(table))
    assert found.data["goodput_per_s"].eq(0).all() and found.figure.axes[0].get_ylim() == (0, 1)
