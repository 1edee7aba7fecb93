"""Figures: what they show is their table, units are on every axis, and a study that lacks the data is told
so.
"""

import drawing
import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
import synthetic

from latency_lab import figures, labels, long_prompts, metrics, records, style, summary


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return records.load(synthetic.write_study(tmp_path_factory.mktemp("data") / "made-up", repeats=2))


@pytest.fixture(scope="module")
def found(study):
    return summary.of_study(study, draws=50)


@pytest.fixture(scope="module")
def points(found):
    return found.points


@pytest.fixture(scope="module")
def context(study):
    return style.context(study.cells)


@pytest.fixture(scope="module")
def drawn(study, found, points, context):
    return {
        "tradeoff": figures.tradeoff(points, context),
        "distributions": figures.distributions(study, context),
        "heat_maps": figures.heat_maps(points, context),
        "stalls": figures.stalls(long_prompts.beside(study), context),
        "ttft_split": figures.ttft_split(found.parts, context),
    }


NAMES = ["tradeoff", "distributions", "heat_maps", "stalls", "ttft_split"]


@pytest.mark.parametrize("name", NAMES)
def test_each_figure_is_drawn_with_units_and_small_print(drawn, name):
    made = drawn[name]
    assert made.figure is not None and made.reason == "" and made.alt
    assert not made.data.empty
    texts = " ".join(text.get_text() for text in made.figure.texts).replace("\n", " ")
    assert "random weights" in texts and "vLLM 0.0.0" in texts
    axis_labels = [a.get_xlabel() for a in made.figure.axes] + [a.get_ylabel() for a in made.figure.axes]
    named = [label for label in axis_labels if label]
    units = ("(s)", "(ms)", "(tokens/s)", "log)", "share", "(tokens a step)", "(requests)")
    assert named and all(any(unit in label for unit in units) for label in named), named


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_cut_or_too_small(drawn, name):
    drawing.assert_readable(drawn[name].figure)


def test_a_setting_has_one_colour_everywhere(drawn, context):
    expected = {name: matplotlib.colors.to_hex(look.colour) for name, look in context.looks.items()}
    for name in ("tradeoff", "distributions"):
        legend = drawn[name].figure.legends[0]
        colours = {
            text.get_text(): matplotlib.colors.to_hex(handle.get_color())
            for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
        }
        for setting in colours.keys() & expected.keys():
            assert colours[setting] == expected[setting]


def test_looks_are_in_numeric_order_and_do_not_repeat():
    cells = pd.DataFrame({"setting": [f"budget={2**i}" for i in range(30)], "requests": 1})
    cells = cells.assign(model="m", weights="real", device="d", vllm_version="1").sample(frac=1, random_state=0)
    looks = style.context(cells).looks
    assert list(looks) == [f"budget={2**i}" for i in range(30)]
    assert len({(look.colour, look.marker) for look in looks.values()}) == 30


def test_tradeoff_draws_what_its_table_says(drawn, points):
    data, made = drawn["tradeoff"].data, drawn["tradeoff"].figure
    panel = data[(data["metric"] == "tpot") & (data["percentile"] == 50)]
    ax = made.axes[4]
    assert ax.get_ylabel() == "p50 TPOT (ms)"
    dots = np.concatenate([line.get_xydata() for line in ax.lines if line.get_marker() != "None"])
    assert sorted(map(tuple, dots)) == sorted(map(tuple, panel[["throughput", "latency"]].to_numpy()))
    row = points[(points["setting"] == "budget=512 seqs=32") & (points["workload"] == "chat c=4")].iloc[0]
    own = panel[(panel["setting"] == "budget=512 seqs=32") & (panel["workload"] == "chat c=4")].iloc[0]
    assert own["latency"] == row["tpot_p50_s"] * 1e3
    assert own["latency_low"] <= own["latency"] <= own["latency_high"]


def test_frontier_labels_do_not_overlap(drawn):
    made = drawn["tradeoff"].figure
    made.draw_without_rendering()
    for ax in made.axes:
        boxes = [labels.Text.get_window_extent(text) for text in ax.texts if text.get_gid() == "label"]
        assert boxes
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_curve_with_failures_does_not_reach_one(drawn):
    data = drawn["distributions"].data
    top = data[data["metric"] == "ttft"].groupby("setting")["share"].max()
    assert top["budget=128 seqs=4"] == pytest.approx(19 / 20)
    assert top["budget=512 seqs=4"] == 1


def test_stalls_show_the_gaps_of_streams_and_the_arrivals(drawn, study):
    data = drawn["stalls"].data
    assert set(data["setting"]) == {"budget=128 seqs=32", "budget=512 seqs=32", "budget=2048 seqs=32"}
    counts = data["what"].value_counts()
    assert counts["long prompt due"] == 3 * 3
    assert counts["gap of a stream"] == 3 * 3 * 149


def test_ttft_split_adds_up(drawn):
    data = drawn["ttft_split"].data
    total = data[["queue_s", "prefill_s", "frontend_s"]].sum(axis=1)
    assert total.to_numpy() == pytest.approx(data["ttft_s"].to_numpy(), rel=0.02)


def test_saving_writes_three_files_and_the_same_bytes_again(drawn, study, context, tmp_path):
    first, second = (
        [
            path.read_bytes()
            for path in style.save(figures.stalls(long_prompts.beside(study), context), "stalls", tmp_path)
        ]
        for _ in range(2)
    )
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stalls.csv", "stalls.png", "stalls.svg"]
    table = pd.read_csv(tmp_path / "stalls.csv")
    assert table["gap_ms"].to_numpy() == pytest.approx(
        drawn["stalls"].data["gap_ms"].to_numpy(float), rel=1e-5, nan_ok=True
    )


def test_many_settings_stay_legible(tmp_path):
    study = records.load(
        synthetic.write_study(tmp_path / "many", budgets=(64, 128, 256, 512, 1024, 2048), seqs=(4, 16), repeats=1)
    )
    context = style.context(study.cells)
    made = figures.tradeoff(summary.of_study(study, draws=10).points, context).figure
    named = {text.get_text() for text in made.legends[0].get_texts()}
    assert "other settings" in named and len(named & set(context.looks)) <= figures.MOST_LOOKS
    assert len(figures.distributions(study, context).figure.axes) == 4  # two rows of at most 7 settings


def absent(made):
    assert made.figure is None and made.data.empty
    assert made.reason.endswith(".")
    return made.reason


def test_missing_data_is_a_sentence_not_a_crash(study, points, context, tmp_path):
    steady = long_prompts.beside(study.part(study.cells[study.cells["load"] != "mix"]))
    assert "mixes streams" in absent(figures.stalls(steady, context))
    one = points[points["workload"] == "chat c=4"]
    assert "two or more load levels" in absent(figures.tradeoff(one, context))
    assert "fewer than two" in absent(figures.heat_maps(points[points["setting"] == "budget=512 seqs=4"], context))
    blind = metrics.ttft_parts(metrics.latencies(study.requests.assign(queue_s=np.nan)))
    assert "queue" in absent(figures.ttft_split(blind, context))
    assert style.save(figures.stalls(steady, context), "stalls", tmp_path) == []


def test_a_study_where_everything_failed(study, context):
    failed = study.requests.assign(
        error="engine died",
        first_token_s=np.nan,
        last_token_s=np.nan,
        token_times_s=None,
        token_counts=None,
        output_tokens=0,
    )
    lost = records.Records(study.path, study.cells)
    lost.__dict__["requests"] = failed
    found = summary.of_study(lost, draws=10)
    for made in (
        figures.tradeoff(found.points, context),
        figures.distributions(lost, context),
        figures.heat_maps(found.points, context),
        figures.stalls(long_prompts.beside(lost), context),
        figures.ttft_split(found.parts, context),
    ):
        absent(made)


def test_no_records_at_all(study, context):
    none = study.part(study.cells[study.cells["status"] == "refused"])
    found = summary.of_study(none)
    absent(figures.distributions(none, context))
    absent(figures.stalls(long_prompts.beside(none), context))
    absent(figures.ttft_split(found.parts, context))
    for make in (figures.tradeoff, figures.heat_maps):
        absent(make(found.points, context))


def test_a_stale_figure_is_removed(drawn, tmp_path):
    style.save(drawn["ttft_split"], "ttft-split", tmp_path)
    style.save(style.Drawn(None, pd.DataFrame(), reason="gone."), "ttft-split", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_families_of_workloads():
    assert figures.family("chat c=20") == "chat"
    assert figures.family("chat rate=2/s b=0.5") == "chat b=0.5"
    assert figures.family("thread n=20") == "thread"
    assert figures.family("thread") == "thread"
