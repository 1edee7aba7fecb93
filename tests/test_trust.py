"""What is said of the method itself comes from the data that is there, and of that alone."""

import pandas as pd
import pytest

from latency_lab import ROOT, effects, records, trust

REFERENCE = ROOT / "data" / "reference"


@pytest.fixture(scope="module")
def weights():
    return records.load(REFERENCE / trust.WEIGHTS)


def test_nothing_is_said_without_data(tmp_path):
    assert trust.bullets(tmp_path, {}) == []


def test_whole_runs_are_named_with_their_ratio(tmp_path):
    (tmp_path / "fidelity").mkdir()
    facts = {"model": "m", "device": "d", "cpu": "d", "vllm_version": "0.32.0", "git_commit": "c", "date": "2026-01-01"}
    rates = {"this study": 110.0, "vllm bench throughput": 100.0}
    rows = [
        {"pair": pair, "client": client, "output_tokens_per_s": rate, **facts}
        for pair in range(6)
        for client, rate in rates.items()
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "fidelity" / "throughput.csv", index=False)
    (said,) = trust.bullets(tmp_path, {})
    assert "110.0 output tokens/s" in said and "1.100 [1.100, 1.100]" in said


def test_random_weights_are_compared_on_each_workload(tmp_path, weights):
    (said,) = trust.bullets(tmp_path, {trust.WEIGHTS: weights})
    for workload, requests in weights.requests.groupby("workload"):
        ratio = effects.effect(requests, "tpot_p50_s", ("random", "real"))
        assert f"TPOT {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] ({workload})" in said
    assert weights.cells["vllm_version"].iloc[0] in said and weights.cells["device"].iloc[0] in said


def test_a_study_through_one_door_says_nothing_of_doors(tmp_path, weights):
    assert trust.bullets(tmp_path, {trust.DOORS: weights}) == []
