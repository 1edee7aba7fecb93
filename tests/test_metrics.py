"""Metrics against cases one can work out by hand."""

import numpy as np
import pandas as pd
import pytest
import synthetic

from latency_lab import bootstrap, metrics, records, summary, token_gaps, validity


def one(**values):
    return metrics.latencies(synthetic.frame([synthetic.request(**values)])).iloc[0]


def test_latencies_of_one_request():
    row = one(scheduled_s=1.0, sent_s=1.5, token_times_s=[0.5, 0.75, 1.0], queue_s=0.125, prefill_s=0.25)
    assert row["ttft_s"] == 1.0  # from when it was due, though it was sent 0.5 s late
    assert row["e2e_s"] == 1.5
    assert row["tpot_s"] == 0.25
    assert row["frontend_s"] == 1.0 - 0.125 - 0.25


def test_several_tokens_in_a_chunk_count_as_tokens():
    # 1 + 3 + 1 tokens: 4 after the first, in 1 s
    row = one(token_times_s=[1.0, 1.5, 2.0], token_counts=[1, 3, 1])
    assert row["tpot_s"] == 0.25
    requests = synthetic.frame([synthetic.request(token_times_s=[1.0, 1.5, 2.0], token_counts=[1, 3, 1])])
    itl = token_gaps.itl(requests)[1]
    assert sorted(itl) == [0.0, 0.0, 0.5, 0.5]
    assert itl.mean() == row["tpot_s"]


def test_several_tokens_in_the_first_chunk():
    requests = synthetic.frame([synthetic.request(token_times_s=[1.0, 1.5], token_counts=[2, 1])])
    assert sorted(token_gaps.itl(requests)[1]) == [0.0, 0.5]


def test_one_token_has_no_tpot_and_no_itl():
    row = one(token_times_s=[0.5])
    assert row["ttft_s"] == row["e2e_s"] == 0.5
    assert pd.isna(row["tpot_s"])
    point = summary.of_requests(synthetic.frame([synthetic.request(token_times_s=[0.5])])).iloc[0]
    assert (point["n"], point["failed"], point["tpot_undefined"], point["itl_n"]) == (1, 0, 1, 0)
    assert pd.isna(point["tpot_p50_s"]) and pd.isna(point["itl_p50_s"])


def test_no_token_at_all_is_null_not_zero():
    row = one(output_tokens=0, token_times_s=[], token_counts=[], finished_s=0.3)
    assert row["ok"]
    assert row[["ttft_s", "tpot_s", "e2e_s"]].isna().all()


def test_failed_request_has_no_latency():
    row = one(token_times_s=[0.5, 1.0], error="timed out after 60 s")
    assert not row["ok"] and row["timed_out"]
    assert row[["ttft_s", "tpot_s", "e2e_s", "queue_s"]].isna().all()
    assert not one(error="EngineDeadError")["timed_out"]


def test_engine_times_may_be_missing():
    row = one(token_times_s=[0.5, 1.0])
    assert row["ttft_s"] == 0.5
    assert row[["queue_s", "prefill_s", "frontend_s"]].isna().all()
    assert metrics.ttft_parts(metrics.latencies(synthetic.frame([synthetic.request(token_times_s=[0.5, 1.0])]))).empty


def test_without_streaming_only_e2e_is_known():
    row = one(token_times_s=[2.0], token_counts=[9], streaming=False)
    assert row["e2e_s"] == 2.0
    assert row[["ttft_s", "tpot_s"]].isna().all()
    assert token_gaps.gaps(synthetic.frame([synthetic.request(token_times_s=[2.0], streaming=False)])).empty


def test_gaps_are_placed_on_the_cells_clock():
    rows = [
        synthetic.request(request=0, sent_s=10.0, token_times_s=[1.0, 1.5]),
        synthetic.request(request=1, token_times_s=None),
        synthetic.request(request=2, sent_s=20.0, token_times_s=[0.5]),
    ]
    chunks = token_gaps.gaps(synthetic.frame(rows))
    assert chunks["row"].tolist() == [0, 0, 2]
    assert chunks["at_s"].tolist() == [11.0, 11.5, 20.5]
    assert chunks["gap_s"].isna().tolist() == [True, False, True]


def test_throughput_over_first_sent_to_last_token():
    rows = [
        synthetic.request(request=0, sent_s=1.0, token_times_s=[1.0, 2.0], prompt_tokens=10),
        synthetic.request(request=1, sent_s=2.0, token_times_s=[1.0, 2.0, 3.0], prompt_tokens=10),
        synthetic.request(request=2, sent_s=2.0, token_times_s=[1.0], error="aborted"),
    ]
    row = metrics.throughput(synthetic.frame(rows)).iloc[0]
    assert row["span_s"] == 4.0
    assert row["output_tokens_per_s"] == 5 / 4  # the failed request's token is not counted here ...
    assert row["failed_output_tokens"] == 1  # ... but here
    assert row["total_tokens_per_s"] == 25 / 4
    assert row["requests_per_s"] == 2 / 4


def test_no_token_no_rate():
    row = metrics.throughput(synthetic.frame([synthetic.request(error="refused")])).iloc[0]
    assert pd.isna(row["span_s"]) and pd.isna(row["output_tokens_per_s"])


def chats(latencies, repeat=0, **values):
    return [
        synthetic.request(request=i, repeat=repeat, cell=f"cell{repeat}", token_times_s=[t, t + 0.1], **values)
        for i, t in enumerate(latencies)
    ]


def test_percentiles_are_numpys():
    ttft = np.random.default_rng(0).lognormal(size=40)
    row = summary.of_requests(synthetic.frame(chats(ttft)), draws=10).iloc[0]
    for p in metrics.PERCENTILES:
        assert row[f"ttft_p{p}_s"] == pytest.approx(np.percentile(ttft, p), rel=1e-6)
    assert row["ttft_mean_s"] == pytest.approx(ttft.mean(), rel=1e-6)


def test_failures_make_high_percentiles_null_not_low():
    rows = chats(np.arange(1.0, 20.0)) + [synthetic.request(request=19, error="timed out")]
    row = summary.of_requests(synthetic.frame(rows), draws=50).iloc[0]
    assert (row["n"], row["failed"], row["timeouts"], row["failed_share"]) == (20, 1, 1, 0.05)
    assert row["e2e_p50_s"] == pytest.approx(10.6)  # halfway between the 10th and 11th of 20, not of 19
    assert pd.isna(row["e2e_p95_s"]) and pd.isna(row["e2e_mean_s"])


def test_all_failed_is_all_null():
    row = summary.of_requests(synthetic.frame([synthetic.request(error="boom")] * 3), draws=10).iloc[0]
    assert row["failed_share"] == 1
    assert pd.isna(row["ttft_p50_s"]) and pd.isna(row["output_tokens_per_s"])


def test_classes_of_a_mix_are_apart():
    rows = chats([1.0], class_name="chat") + chats([9.0], class_name="long")
    table = summary.of_requests(synthetic.frame(rows), draws=10).set_index("class_name")
    assert table.loc["chat", "ttft_p50_s"] == 1.0
    assert table.loc["long", "ttft_p50_s"] == 9.0


def test_one_repeat_says_that_repeats_are_unknown():
    row = summary.of_requests(synthetic.frame(chats([1.0, 2.0, 3.0])), draws=20).iloc[0]
    assert row["interval_over"] == "requests of one repeat only"
    assert pd.isna(row["output_tokens_per_s_low"])
    rows = chats([1.0, 2.0, 3.0]) + chats([1.0, 2.0, 4.0], repeat=1)
    row = summary.of_requests(synthetic.frame(rows), draws=20).iloc[0]
    assert row["interval_over"] == "repeats and requests"
    assert row["output_tokens_per_s_low"] < row["output_tokens_per_s_high"]


def test_intervals_are_seeded_and_do_not_depend_on_other_rows():
    rows = chats(np.random.default_rng(1).lognormal(size=30))
    other = chats([5.0, 6.0], setting="b")
    alone = summary.of_requests(synthetic.frame(rows), draws=100, seed=3)
    again = summary.of_requests(synthetic.frame(rows), draws=100, seed=3)
    beside = summary.of_requests(synthetic.frame(rows + other), draws=100, seed=3)
    pd.testing.assert_frame_equal(alone, again)
    assert alone.iloc[0]["ttft_p95_s_high"] == beside.set_index("setting").loc["a", "ttft_p95_s_high"]
    assert (
        alone.iloc[0]["ttft_p50_s_low"]
        != summary.of_requests(synthetic.frame(rows), draws=100, seed=4).iloc[0]["ttft_p50_s_low"]
    )


def test_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(5)
    hits, trials = 0, 200
    for _ in range(trials):
        repeats = [rng.lognormal(sigma=0.5, size=30) for _ in range(3)]
        values = np.concatenate(repeats)
        drawn = bootstrap.resample(np.repeat([0, 1, 2], 30), np.array([0, 1, 2]), 200, rng)
        order = np.argsort(values)
        low, high = bootstrap.ends(bootstrap.percentiles(values[order], drawn.requests[:, order], [50]), 0.95)
        hits += low[0] <= 1.0 <= high[0]
    assert 0.90 <= hits / trials <= 1.0


def test_a_draw_of_repeats_draws_their_requests():
    drawn = bootstrap.resample(np.array([0, 0, 0, 1, 1]), np.array([0, 1]), 500, np.random.default_rng(0))
    assert (drawn.requests[:, :3].sum(axis=1) == 3 * drawn.cells[:, 0]).all()
    assert (drawn.requests[:, 3:].sum(axis=1) == 2 * drawn.cells[:, 1]).all()
    assert (drawn.cells.sum(axis=1) == 2).all()


def test_bins_hardly_move_percentiles():
    rng = np.random.default_rng(2)
    samples = [rng.lognormal(size=2000) for _ in range(20)]
    values, unit = np.concatenate(samples), np.repeat(np.arange(20), 2000)
    exact, drawn = bootstrap.estimates(values, unit, np.ones((1, 20), np.float32), metrics.PERCENTILES)
    assert exact == pytest.approx([*np.percentile(values, metrics.PERCENTILES), values.mean()])
    assert drawn[0] == pytest.approx(exact, rel=0.02)


def test_verdicts_give_reasons():
    rows = [
        synthetic.cell(cell="good", workload="w1", loop_lag_p99_s=0.04),  # little beside 0.2 s a token
        synthetic.cell(cell="slow client", workload="w2", client_share=0.08, loop_lag_p99_s=0.05, requests=120),
        synthetic.cell(cell="failures", workload="w3", requests_failed=2),
        synthetic.cell(cell="few", workload="w4", requests=3),
        synthetic.cell(cell="dead", workload="w5", status="failed", error="engine died", requests=0),
    ]
    requests = synthetic.frame(
        [
            synthetic.request(cell="good", workload="w1", token_times_s=[1.0, 1.2]),
            synthetic.request(cell="few", workload="w4", token_times_s=[0.1, 0.2]),
        ]
    )
    measured = metrics.per_cell(requests, metrics.latencies(requests))
    table = validity.verdicts(synthetic.cells(rows), measured).set_index("cell")
    assert table["valid"].tolist() == [True, False, False, False, False]
    assert "client took 8% of the time, over 5%" in table.loc["slow client", "reasons"]
    assert "50 ms late (p99), over 10 ms" in table.loc["slow client", "reasons"]
    assert table.loc["failures", "reasons"] == "2 of 20 requests failed"
    assert table.loc["few", "reasons"] == "only 3 requests in all repeats, a median needs 5; lasted 0.20 s, under 1 s"
    assert table.loc["dead", "reasons"] == "failed: engine died"
    assert table["percentile_max"].tolist() == [95, 99, 95, 0, 0]


def test_repeats_together_support_a_percentile():
    rows = [synthetic.cell(cell=f"c{i}", repeat=i, requests=40) for i in range(3)]
    none = synthetic.frame([])
    measured = metrics.per_cell(none, metrics.latencies(none))
    assert validity.verdicts(synthetic.cells(rows), measured)["percentile_max"].tolist() == [99] * 3


def test_two_labels_of_one_configuration_are_flagged():
    rows = [
        synthetic.cell(cell="1", setting="default", resolved_id="x"),
        synthetic.cell(cell="2", setting="budget=2048", resolved_id="x"),
        synthetic.cell(cell="3", setting="budget=512", resolved_id="y"),
        synthetic.cell(cell="4", setting="refused", resolved_id=None),
    ]
    table = validity.label_conflicts(synthetic.cells(rows))
    assert table["labels"].tolist() == [["budget=2048", "default"]]
    assert validity.label_conflicts(synthetic.cells(rows[1:])).empty


def test_pareto():
    throughput = [100, 200, 300, 200, np.nan, 300]
    latency = [1.0, 2.0, 3.0, 2.5, 0.1, 3.0]
    assert metrics.pareto(throughput, latency).tolist() == [True, True, True, False, False, True]


def test_labels_sort_by_their_numbers():
    labels = pd.Series(["b=2048", "b=512", "b=128 s=32", "b=128 s=4"])
    assert labels.sort_values(key=metrics.natural).tolist() == ["b=128 s=4", "b=128 s=32", "b=512", "b=2048"]


def test_summary_of_a_study(tmp_path):
    study = records.load(synthetic.write_study(tmp_path / "made-up", repeats=2))
    table = summary.of_study(study, draws=50).points
    pd.testing.assert_frame_equal(table, summary.of_requests(study.requests, draws=50))
    assert len(table) == 6 * (3 + 2)
    for name in ("ttft_p50_s", "tpot_p50_s", "itl_p99_s", "output_tokens_per_s"):
        known = table[name].notna()
        assert known.all()
        assert (table[f"{name}_low"] <= table[name])[known].all()
        assert (table[f"{name}_high"] >= table[name])[known].all()
