"""Predicted against measured on a made-up GPU that does exactly, or not quite, what its costs say."""

from __future__ import annotations

import pandas as pd
import pytest
from synthetic import cell, cells, frame, request
from synthetic_gpu import COSTS, KNOWN, answered, made_up

from latency_lab import observations, predictions, records


@pytest.fixture(scope="module")
def slower():
    """All latencies are a quarter longer than the simulator has them."""
    return predictions.cells([answered(1.25)], KNOWN)


def test_cells_that_took_what_the_simulator_says_have_no_error():
    points = predictions.points(predictions.cells([answered()], KNOWN))
    assert len(points) == 3 * 2 * 3  # settings, concurrencies, metrics
    assert points["error"].abs().max() < 1e-5


def test_an_error_is_of_the_measured_value(slower):
    points = predictions.points(slower)
    assert points["error"].to_numpy() == pytest.approx(1 / 1.25 - 1, abs=1e-5)
    table = predictions.summary(slower)
    assert table["median"].to_numpy() == pytest.approx(0.2, abs=1e-5) and (table["within_25"] == 1).all()
    assert list(table["metric"][:3]) == ["ttft", "tpot", "e2e"]


def test_the_fitted_cells_are_told_from_those_held_out(slower):
    """One at a time is fitted on all three settings, twenty at once on none."""
    fitted = slower.drop_duplicates("cell").set_index("cell")["fitted"]
    assert fitted.index[fitted].tolist() == ["budget=8192 seqs=256-1", "fp8-weights-1", "eager-1"] and len(fitted) == 6


def test_the_fitted_cells_are_a_fixed_list_that_new_studies_do_not_enter():
    new = [cell(study="h200-quantization", setting=setting, workload="alone c=1") for setting in ("bf16", "gptq-int4")]
    new.append(cell(study="chunked-prefill-gpu", setting="budget=512", workload="streams"))
    assert observations.fitted(cells(new)).tolist() == [True, False, False]


def test_what_was_not_predicted_says_why():
    study = answered()
    study.cells.loc[0, "scheduling_policy"] = "priority"
    study.cells.loc[1, "kv_cache_tokens"] = 100
    study.requests["logprob_gaps"] = study.requests["logprob_gaps"].astype(object)
    last = study.requests["cell"] == study.cells["cell"].iloc[-1]
    study.requests.loc[last, "logprob_gaps"] = 0.5
    table = predictions.cells([study], KNOWN)
    problems = table.drop_duplicates("cell")["problem"].tolist()
    assert problems[0] == "priority scheduling" and "outgrow the KV cache of 100 tokens" in problems[1]
    assert problems[2:5] == [""] * 3 and problems[5].startswith("log probabilities are asked for")
    assert len(predictions.points(table)) == 3 * 3


def test_a_repeat_is_predicted_by_the_others():
    """Medians of 1, 1 and 2 s: the first two miss the median of the rest by a third, the last by 100 %."""
    keys = {"study": "s", "device": "d", "setting": "a", "workload": "w", "class_name": "all", "metric": "e2e"}
    rows = [keys | {"cell": i, "fitted": False, "problem": "", "measured_s": s} for i, s in enumerate((1.0, 1.0, 2.0))]
    (row,) = predictions.summary(pd.DataFrame(rows).assign(predicted_s=1.0)).to_dict("records")
    assert row["repeats_median"] == pytest.approx(1 / 3) and row["median"] == 0


def test_step_by_step_the_rows_that_were_fitted_back_have_no_error():
    table = predictions.steps([made_up(COSTS)], KNOWN)
    assert set(table["kind"]) == {"decode", "prefill"} and set(table["weights"]) == {"bf16", "fp8"}
    assert table["error"].abs().max() < 0.01 and table["fitted"].all()


def test_machines_that_can_be_fitted_have_a_fit_and_the_others_none():
    known = predictions.fits([made_up(COSTS)])
    assert list(known) == ["NVIDIA H200"] and known["NVIDIA H200"].cells == 4
    assert predictions.fits([unknown()]) == {}


def test_without_a_fit_there_is_nothing_and_no_error():
    for table in (predictions.cells([unknown()], {}), predictions.steps([unknown()], {})):
        assert table.empty
    empty = predictions.cells([unknown()], {})
    assert predictions.points(empty).empty and predictions.summary(empty).empty


def unknown() -> records.Records:
    """A study of a machine that no table knows."""
    study = answered()
    own = records.Records(study.path, cells([cell(device="made-up CPU")]))
    own.__dict__["requests"] = frame([request(token_times_s=[0.1, 0.2])])
    own.__dict__["steps"] = study.steps
    return own
