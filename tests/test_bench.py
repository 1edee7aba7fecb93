"""The benches' own arithmetic, source and commands; what they measure is not tested but printed."""

import asyncio
import contextlib
import subprocess
import sys

import numpy as np
import pandas as pd
import psutil
import pytest
import synthetic

from latency_lab import bench, bench_http, client, fidelity, fidelity_report, records, vllm_bench
from latency_lab.__main__ import main
from latency_lab.fidelity import OURS, SERVE, THROUGHPUT
from latency_lab.load import Stream
from latency_lab.openai_source import Address, OpenAISource


def test_an_unknown_part_is_named(capsys):
    assert main(["bench", "tracing"]) == 2
    assert capsys.readouterr().err == f"bench: 'tracing'; allowed: {', '.join(bench.PARTS)}\n"


def test_options_become_words_of_a_command_line():
    options = {"max_num_seqs": 4, "enforce_eager": True, "enable_prefix_caching": False}
    assert vllm_bench.flags(options) == ["--max-num-seqs", "4", "--enforce-eager", "--no-enable-prefix-caching"]


def throughput(*pairs) -> pd.DataFrame:
    rows = [
        {"pair": pair, "client": name, "output_tokens_per_s": value}
        for pair, both in enumerate(pairs)
        for name, value in zip((OURS, THROUGHPUT), both, strict=True)
    ]
    return pd.DataFrame(rows).assign(model="made-up", vllm_version="0", device="made-up CPU", date="2026-01-02")


def test_throughput_is_compared_pair_by_pair():
    """The machine was half as fast in the second pair: both sides were, and the ratio does not see it."""
    table = throughput((99.0, 100.0), (49.5, 50.0), (99.0, 100.0))
    assert fidelity.throughput_ratio(table) == pytest.approx((0.99, 0.99, 0.99))


def test_rounds_that_are_no_pairs_are_resampled_apart():
    middle, low, high = fidelity.median_ratio(np.array([2.0, 2.0, 2.0]), np.array([1.0, 1.0, 2.0]), paired=False)
    assert (middle, low, high) == (2.0, 1.0, 2.0)


def readings() -> pd.DataFrame:
    """All is late while it warms up at 1,000 tokens/s, and the source itself at 16,000; one of three rounds was
    disturbed; the second client is past its limit at 4,000 tokens/s and looks well after.
    """
    added_ms = {
        OURS: {1000: (7.0,), 2000: (0.1, 0.1, 9.0), 4000: (0.2, 0.9, 0.2), 16000: (0.1,)},
        SERVE: {1000: (7.0,), 2000: (0.1,), 4000: (5.0,), 8000: (0.0,)},
    }
    rows = [
        {"client": who, "kind": "tokens", "offered_per_s": rate, "per_s": min(rate, 9000), "added_s": ms / 1e3}
        for who, rates in added_ms.items()
        for rate, rounds in rates.items()
        for ms in rounds
    ]
    rows += [{"client": who, "kind": "requests", "per_s": per_s} for who, per_s in ((OURS, 900.0), (SERVE, 600.0))]
    facts = {"streams": 64, "device": "made-up CPU", "date": "2026-01-02", "request_tokens": 16}
    return pd.DataFrame(rows).assign(**facts)


def test_a_client_sustains_what_lies_below_the_first_rate_that_is_too_much():
    (row,) = fidelity.limits(readings()).to_dict("records")
    assert row[f"tokens_per_s {OURS}"] == 4000 and row[f"requests_per_s {OURS}"] == 900
    assert row[f"tokens_per_s {SERVE}"] == 2000


def compared_runs(folder, slower: float) -> None:
    """Two pairs of runs of 60 requests each on one workload; this study's side takes `slower` times as long."""
    for setting, factor in ((OURS, slower), (SERVE, 1.0)):
        for repeat in range(2):
            keys = {"cell": f"{setting}-{repeat}", "setting": setting, "repeat": repeat, "workload": "closed c=8"}
            times = [np.array([0.1, 0.2, 0.3]) * factor * (1 + n / 1000) for n in range(60)]
            rows = [
                synthetic.request(**keys, request=n, token_times_s=t.tolist(), sent_s=float(n), scheduled_s=float(n))
                for n, t in enumerate(times)
            ]
            records.write_cell(folder / "running" / setting, synthetic.cell(**keys, requests=60), rows)
    records.pack(folder / "running", folder / "serve")


def test_agreement_is_a_ratio_with_an_interval(tmp_path):
    compared_runs(tmp_path, slower=1.1)
    compared = fidelity.agreement(records.load(tmp_path / "serve")).set_index("metric")
    assert compared.loc["TTFT p50", "ratio"] == pytest.approx(1.1)
    assert compared.loc["TPOT p99", "low"] < 1.1 < compared.loc["TPOT p99", "high"]
    assert (compared["problem"] == "").all()


def test_the_report_has_the_section_where_there_is_data(tmp_path):
    assert "make bench" in fidelity_report.section(tmp_path, tmp_path / "figures")
    folder = tmp_path / "reference" / "fidelity"
    compared_runs(folder, slower=1.1)
    throughput((99.0, 100.0), (98.0, 100.0)).to_csv(folder / fidelity.THROUGHPUT_FILE, index=False)
    readings().to_csv(folder / fidelity.HTTP_FILE, index=False)
    page = fidelity_report.section(tmp_path, tmp_path / "figures")
    assert fidelity_report.HEADING in page
    assert "TTFT p50 of closed c=8 1.100 [" in page and "ratio 0.985 [0.980, 0.990]" in page
    assert "2,000" in page and "none of the rates" not in page
    assert (tmp_path / "figures" / "agreement.svg").exists()
    assert records.studies(tmp_path / "reference") == [], "it is not one of the studies"


def test_the_source_keeps_its_timetable():
    """Three streams of four tokens, 30 ms apart, and the times that it says it wrote them at."""
    with bench_http.running(bench_http.cores()[-1]) as source:
        source.plan(3, [0.03] * 4)
        run = asyncio.run(drive(source.port, 3, 4))
        written = source.times().reshape(4, 3)
    assert np.diff(written, axis=0) == pytest.approx(0.03, abs=0.01)
    assert [timing.chunk_tokens for timing in run.timings] == [[1] * 4] * 3
    assert all(timing.error is None and timing.finish_reason == "length" for timing in run.timings)
    first = np.array([timing.chunk_s[0] for timing in run.timings]) + run.zero_s
    assert (first > written[0].min()).all() and first.max() - written[0].min() < 0.5


def test_the_source_without_a_plan_answers_at_once():
    with bench_http.running(bench_http.cores()[-1]) as source:
        source.plan(0, [])
        run = asyncio.run(drive(source.port, 5, 16))
        assert len(source.times()) == 5
    assert [sum(timing.chunk_tokens) for timing in run.timings] == [16] * 5


async def drive(port: int, requests: int, tokens: int) -> client.Run:
    due = (bench_http.request(number, tokens, None) for number in range(requests))
    async with OpenAISource(Address(f"http://127.0.0.1:{port}/v1", "source", "none")) as source:
        return await client.drive(source, [Stream(OURS, requests, None, 0.0, due)], name="bench", timeout_s=20)


def test_the_source_ends_with_the_process_that_started_it():
    code = "import sys; from latency_lab import bench_http as b; print(b.Source().process.pid, flush=True)"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    pid = int(started.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(5)
