"""Figures of scheduler steps: what they show is their table, and a study that lacks the data is told so."""

import drawing
import numpy as np
import pandas as pd
import pytest
import synthetic
import synthetic_steps

from latency_lab import long_prompts, records, step_figures, style, summary, token_gaps


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return records.load(synthetic_steps.write(tmp_path_factory.mktemp("data") / "made-up"))


def draw(study):
    context, mixed = style.context(study.cells), long_prompts.beside(study)
    return {
        "timeline": step_figures.timeline(mixed, context),
        "life": step_figures.life(mixed, context),
        "stalls_by_prefill": step_figures.stalls_by_prefill(mixed, context),
        "budget_tradeoff": step_figures.budget_tradeoff(mixed, summary.of_study(study, draws=50).points, context),
        "stall_free": step_figures.stall_free(mixed, context),
    }


@pytest.fixture(scope="module")
def drawn(study):
    return draw(study)


NAMES = ["timeline", "life", "stalls_by_prefill", "budget_tradeoff", "stall_free"]


@pytest.mark.parametrize("name", NAMES)
def test_each_figure_is_drawn_with_units_and_small_print(drawn, name):
    made = drawn[name]
    assert made.figure is not None and made.reason == "" and made.alt and not made.data.empty
    texts = " ".join(text.get_text() for text in made.figure.texts).replace("\n", " ")
    assert "random weights" in texts and "vLLM 0.0.0" in texts and "streams" in texts
    named = [label for a in made.figure.axes for label in (a.get_xlabel(), a.get_ylabel()) if label]
    units = ("(s)", "(ms)", "share", "(tokens a step)", "tokens")
    assert named and all(any(unit in label for unit in units) for label in named), named


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_cut_or_too_small(drawn, name):
    drawing.assert_readable(drawn[name].figure)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_data_gives_the_same_files(study, name, tmp_path):
    first = {p.name: p.read_bytes() for p in style.save(draw(study)[name], name, tmp_path / "a")}
    assert {p.split(".")[-1] for p in first} == {"png", "svg", "csv"}
    again = {p.name: p.read_bytes() for p in style.save(draw(study)[name], name, tmp_path / "b")}
    assert first == again


def test_the_timeline_is_what_the_scheduler_did(drawn):
    table = drawn["timeline"].data
    small, off = (table[table["setting"] == setting] for setting in ("budget=128", "chunking-off"))
    held = small[small["prefill"] > 0]
    assert (held["prefill"] + held["decode"]).max() == 128 and held["prefill"].tolist()[:8] == [124] * 8
    assert off.loc[off["prefill"] > 0, "prefill"].tolist() == [1024]
    assert held["at_s"].iloc[0] == pytest.approx(0, abs=0.03)


def test_a_life_has_its_chunks_and_tokens(drawn):
    table = drawn["life"].data
    own = table[table["setting"] == "budget=512"]
    assert own.loc[own["what"] == "chunk", "tokens"].tolist() == [508, 508, 8]
    assert (own["what"] == "token").sum() == 4
    queued = own[own["what"] == "queued"].iloc[0]
    assert queued["from_ms"] == 0 and 0 <= queued["to_ms"] < 50


def test_a_gap_belongs_to_the_step_that_ended_it(study):
    streams = study.requests[(study.requests["workload"] == "streams") & (study.requests["class_name"] == "chat")]
    gaps = long_prompts.gaps_with_steps(study.steps, streams, token_gaps.gaps(streams))
    assert len(gaps) == 59 * len(streams)
    first = gaps[gaps["repeat"] == 0]  # where a step takes 20 ms and 0.8 ms a token, three or four of them decodes
    decodes = (first["gap_ms"] - 20 - 0.8 * first["prefill"]) / 0.8
    assert np.allclose(decodes, decodes.round(), atol=1e-3) and decodes.between(1, 6).all()


def test_the_tradeoff_has_both_sides(drawn):
    table = drawn["budget_tradeoff"].data.pivot(index="setting", columns="metric", values="value")
    assert table.index.size == 4
    assert table.loc["budget=128", "itl_p99_s"] < table.loc["budget=512", "itl_p99_s"] < 500
    assert table.loc["budget=128", "ttft_p50_s"] > table.loc["chunking-off", "ttft_p50_s"]


def test_stall_free_shares_grow_with_the_threshold(drawn):
    table = drawn["stall_free"].data.pivot(index="setting", columns="factor", values="value")
    assert (table[2.0] <= table[4.0]).all() and (table[4.0] <= table[8.0]).all()
    assert table.loc["budget=128", 8.0] == 1 and table.loc["chunking-off", 8.0] < 1


def test_without_steps_or_streams_the_reason_is_given(study, tmp_path):
    bare = records.Records(study.path, study.cells.assign(steps=pd.NA))
    for name, made in draw(bare).items():
        assert (made.figure is None) == (name != "budget_tradeoff")
        assert made.figure is not None or made.reason.startswith("no scheduler steps were recorded")
    closed = records.load(synthetic.write_study(tmp_path / "closed", mix=False, failures=False, repeats=1))
    for made in draw(closed).values():
        assert made.figure is None and made.reason == step_figures._NO_MIX


def test_failed_long_prompts_do_not_break_the_figures(study):
    failed = study.requests.copy()
    long = failed["class_name"] == "long"
    failed.loc[long, "error"] = "timed out"
    failed.loc[long, ["first_token_s", "last_token_s"]] = np.nan
    other = records.Records(study.path, study.cells)
    other.__dict__["requests"] = failed
    for made in draw(other).values():
        assert made.reason or isinstance(made.data, pd.DataFrame)
