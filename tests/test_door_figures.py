"""What each door adds, on made-up requests whose differences are known."""

import drawing
import pandas as pd
import pytest
from synthetic import cell, cells, frame, request

from latency_lab import door_figures, records, style

DOORS = {
    "via=engine detokenize=off": ({"via": "engine", "detokenize": False}, 0.0),
    "via=engine detokenize=on": ({"via": "engine"}, 0.001),
    "via=openai stream=on": ({"via": "openai", "api": "chat"}, 0.01),
    "via=openai stream=off": ({"via": "openai", "api": "chat", "streaming": False}, 0.02),
}


def study(tmp_path, doors=DOORS, repeats=3, each=40, workload="thread"):
    """Requests of 11 tokens, 0.1 s and then 0.05 s a token, later or earlier by up to 1 ms; a door adds to each gap."""
    requests, rows = [], []
    for name, (values, added_s) in doors.items():
        for repeat in range(repeats):
            keys = {"workload": f"{workload} {name}".strip(), "repeat": repeat, "cell": f"{name}-{repeat}"}
            for i in range(each):
                gap_s = 0.05 + added_s + i % 10 * 1e-4
                times = [0.1 + added_s + n * gap_s for n in range(11)]
                row = request(request=i, token_times_s=times, **keys, **values)
                requests.append(row | ({} if row["streaming"] else {"first_token_s": None}))
            rows.append(cell(**keys, requests=each))
    found = records.Records(tmp_path, cells(rows))
    found.__dict__["requests"] = frame(requests)
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    found = study(tmp_path_factory.mktemp("doors"))
    return found, door_figures.costs(found)


def added_ms(costs, door, metric):
    own = costs[(costs["door"] == door) & (costs["metric"] == metric)].set_index("percentile")
    return (own["added_s"] * 1e3).round(6).to_dict()


def test_what_a_door_adds_is_counted_from_the_cheapest(made):
    _, costs = made
    assert costs["workload"].unique().tolist() == ["thread"]
    assert added_ms(costs, door_figures.IDS, "ttft") == {50: 0, 90: 0, 95: 0, 99: 0}
    for door, each_ms in ((door_figures.ENGINE, 1), ("chat", 10)):
        assert added_ms(costs, door, "tpot") == pytest.approx({p: each_ms for p in (50, 90, 95, 99)})
        assert added_ms(costs, door, "e2e") == pytest.approx({p: 11 * each_ms for p in (50, 90, 95, 99)})
    row = costs[(costs["door"] == "chat") & (costs["metric"] == "e2e") & (costs["percentile"] == 50)].iloc[0]
    assert row["added_low_s"] < 0.11 < row["added_high_s"]
    assert row["latency_s"] == pytest.approx(0.1 + 0.01 + 10 * (0.05 + 0.01 + 0.00045), rel=1e-3)


def test_an_answer_as_a_whole_has_an_e2e_alone(made):
    _, costs = made
    whole = costs[costs["door"] == "chat, not streamed"]
    assert whole["metric"].unique().tolist() == ["e2e"]
    assert added_ms(costs, "chat, not streamed", "e2e")[50] == pytest.approx(220)


def test_the_figure_shows_each_door_with_units_and_where_it_stands(made):
    found, costs = made
    drawn = door_figures.front_door(costs, style.context(found.cells))
    labels = [ax.get_ylabel() for ax in drawn.figure.axes]
    assert labels == ["added to TTFT (ms)", "added to TPOT (ms)", "added to E2E (ms)"]
    shown = [text.get_text() for text in drawn.figure.legends[0].get_texts()]
    assert shown == ["engine", "chat", "chat, not streamed"]
    assert drawn.figure.axes[0].get_title(loc="left") == "thread: more than engine, token ids"
    title = drawn.figure.texts[0].get_text().replace("\n", " ")
    assert title.startswith("thread: median E2E 714 ms through chat, +18.2% against the engine's 604 ms")
    assert drawn.alt


def test_no_text_is_cut(made):
    found, costs = made
    drawing.assert_readable(door_figures.front_door(costs, style.context(found.cells)).figure)


def test_the_table_has_every_percentile_and_what_was_added(made):
    _, costs = made
    html = door_figures.table(costs)
    assert html.count("<tr>") == 1 + 3 * 3 + 1
    assert "E2E (s)" in html and "TTFT (ms)" in html and "110 (+10 [" in html
    assert ">100<" in html, "the engine's own adds nothing to itself"


def test_a_study_with_one_door_says_so(tmp_path):
    engine = {"": ({"via": "engine"}, 0.0)}
    costs = door_figures.costs(study(tmp_path, engine))
    drawn = door_figures.front_door(costs, style.context(study(tmp_path, engine).cells))
    assert drawn.figure is None and "both the engine and its server" in drawn.reason
    assert door_figures.table(costs) is None


def test_too_few_requests_for_a_percentile_are_no_number(tmp_path):
    costs = door_figures.costs(study(tmp_path, repeats=2, each=10))
    by_percentile = costs[(costs["door"] == "chat") & (costs["metric"] == "e2e")].set_index("percentile")
    assert pd.notna(by_percentile["added_s"]).to_dict() == {50: True, 90: True, 95: True, 99: False}
    assert "too few" in door_figures.table(costs)


def test_a_workload_is_the_same_whatever_its_door():
    assert door_figures.plain("chat c=8 via=openai api=chat stream=off") == "chat c=8"
    assert door_figures.plain("chat c=8") == "chat c=8"
