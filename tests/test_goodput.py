"""SLOs as texts, and which requests are within them."""

from __future__ import annotations

import pandas as pd
import pytest
from synthetic import cell, cells, frame, request

from latency_lab import goodput
from latency_lab.goodput import SloError


def test_limits_are_read_in_seconds_and_milliseconds():
    assert goodput.parse("e2e_p95<1s, ttft_p95 <= 300ms,tpot_mean<.5s") == {
        "e2e_p95": 1.0,
        "ttft_p95": 0.3,
        "tpot_mean": 0.5,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("e2e<1s", r"slo 'e2e<1s' is not a limit; allowed: LATENCY_STATISTIC<NUMBERs or ms, LATENCY one of ttft"),
        ("e2e_p95>1s", "is not a limit"),
        ("itl_p99<10ms", "is not a limit"),
        ("e2e_p95<1", "is not a limit"),
        ("", "slo '' is not a limit"),
        ("e2e_p95<0s", r"slo 'e2e_p95<0s': nothing takes no time; allowed: a limit above 0"),
        ("e2e_p95<1s,e2e_p95<2s", r"e2e_p95 is limited to 1 s and to 2 s; allowed: one limit each"),
    ],
)
def test_what_is_no_slo_is_one_clear_line(text, message):
    with pytest.raises(SloError, match=message) as error:
        goodput.parse(text)
    assert "\n" not in str(error.value)


def test_a_study_s_slo_loses_its_itl():
    assert goodput.of_cell('{"ttft_p95_s": 0.3, "itl_p99_s": 0.05}') == {"ttft_p95": 0.3}
    assert goodput.of_cell(None) == {}


def test_a_request_is_good_if_it_is_within_every_limit():
    rows = pd.DataFrame(
        {
            "ok": [True, True, True, False],
            "ttft_s": [0.1, 0.4, 0.1, 0.1],
            "tpot_s": [0.01, 0.01, None, 0.01],
            "e2e_s": [0.9, 0.9, 0.9, None],
        }
    )
    assert goodput.good(rows, {"ttft_p95": 0.3, "tpot_p50": 0.02, "e2e_p95": 1.0}).tolist() == [
        True,
        False,
        True,
        False,
    ]


def made(repeat: int, number: int, first_s: float, **values: object) -> dict[str, object]:
    return request(cell=f"c{repeat}", repeat=repeat, request=number, token_times_s=[first_s, 1.0], **values)


def test_goodput_counts_good_requests_over_the_time_of_all():
    """Two repeats of 1 s each: 2 of 3 requests are good in the first, 1 of 3 in the second, where another failed."""
    rows = [made(0, 0, 0.1), made(0, 1, 0.1), made(0, 2, 0.5), made(1, 0, 0.1), made(1, 1, 0.5)]
    rows.append(request(cell="c1", repeat=1, request=2, error="timed out"))
    slo = '{"ttft_p95_s": 0.3}'
    table = goodput.by_point(frame(rows), cells([cell(cell=f"c{r}", repeat=r, slo=slo) for r in (0, 1)]))
    row = table.iloc[0]
    assert len(table) == 1 and row["n"] == 6 and row["slo"] == "ttft_p95 < 0.3 s"
    assert row["goodput_per_s"] == pytest.approx(3 / 2) and row["requests_per_s"] == pytest.approx(5 / 2)
    assert row["attained"] == 0.5
    assert (row["goodput_per_s_low"], row["goodput_per_s_high"]) == (1, 2)


def test_points_without_an_slo_have_no_goodput():
    assert goodput.by_point(frame([made(0, 0, 0.1)]), cells([cell(cell="c0", slo=None)])).empty
