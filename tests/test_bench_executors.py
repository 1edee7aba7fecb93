"""What is said of a sweep on Ray beside one without, on made-up records."""

import numpy as np
import pytest
import synthetic

from latency_lab import bench_executors, records
from latency_lab.study import load_study


def rounds(folder, slower=1.0):
    """Two rounds of both ways, each a point of two repeats with 12 requests."""
    for number in range(2):
        for way in bench_executors.WAYS:
            runs = folder / f"round-{number}" / way / "runs" / bench_executors.STUDY.stem / "a-1"
            rng = np.random.default_rng([number, way == "ray"])
            for repeat in range(2):
                name = f"c{repeat}"
                gaps = rng.normal(0.02, 0.001, (12, 3)) * (slower if way == "ray" else 1)
                rows = [
                    synthetic.request(
                        cell=name, repeat=repeat, request=i, request_id=f"{name}-{i}", token_times_s=times
                    )
                    for i, times in enumerate(np.cumsum(gaps, axis=1))
                ]
                cell = synthetic.cell(cell=name, repeat=repeat)
                records.write_cell(
                    runs, {key: value for key, value in cell.items() if key in records.CELLS.names}, rows
                )
    return bench_executors._records(sorted(folder.glob("round-*")))


TIMES = {"wall_s": 100.0, "fixed_s": 10.0, "settings": 2, "starting_s": 60.0, "in_cells_s": 20.0}


def test_equal_executors_agree_and_the_cost_of_a_setting_is_told(tmp_path):
    requests, cells = rounds(tmp_path)
    assert requests.groupby("setting")["repeat"].nunique().to_dict() == {"a local": 4, "a ray": 4}
    times = {"local": TIMES, "ray": {**TIMES, "wall_s": 108.0, "fixed_s": 16.0}}
    text = bench_executors.text([times, times], requests, cells)
    assert "| local | 10.0 s | 45.0 s | 5.0 s |" in text
    assert "| ray | 16.0 s | 46.0 s | 6.0 s |" in text
    assert text.endswith("4 of 4 metrics agree (the interval holds 1).")


def test_an_executor_that_disturbs_is_told(tmp_path):
    requests, cells = rounds(tmp_path, slower=1.5)
    ratio = bench_executors.ratios(requests).set_index("metric").loc["tpot_p50_s"]
    assert ratio["ratio"] == pytest.approx(1.5, abs=0.1) and ratio["low"] > 1.3
    assert "0 of 4 metrics agree" in bench_executors.text(
        [{way: TIMES for way in bench_executors.WAYS}], requests, cells
    )


def test_the_study_has_two_settings_and_repeats_for_an_interval():
    study = load_study(bench_executors.STUDY)
    assert len(study.settings()) == 2 and study.repeats * bench_executors.ROUNDS >= 8
    assert {len(study.together(setting)) for setting in study.settings()} == {1}, "an engine start for each"
