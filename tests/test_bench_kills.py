"""The bench of kills: what it calls lost, what it calls corrupt, and its table. To kill takes half an hour."""

import pandas as pd
import pytest
from test_records import CELL, request

from latency_lab import bench_kills, records
from latency_lab.study import load_study

POINT = {"cell": "c1", "workload": "chat c=1"}
GOOD = [
    {**request(at, output_tokens=12, sent_s=0.0, token_times_s=[0.1], token_counts=[12]), **POINT} for at in range(2)
]


@pytest.fixture
def grid(tmp_path):
    found = bench_kills.Grid(load_study(bench_kills.STUDY), tmp_path)
    records.write_cell(found.folder / "a", {**CELL, **POINT}, GOOD)
    return found


def test_a_whole_cell_is_good_and_stays_so(grid):
    assert grid.look() == (0, 0) and len(grid.good) == 1
    records.write_cell(grid.folder / "a", {**CELL, **POINT, "cell": "c2", "status": "failed", "error": "killed"}, [])
    assert grid.look() == (0, 0) and len(grid.good) == 1


@pytest.mark.parametrize("kind", ["cell", "requests"])
def test_a_finished_cell_that_changes_or_vanishes_is_lost(grid, kind):
    grid.look()
    file = grid.folder / "a" / f"c1.{kind}.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    assert grid.look()[0] == 1
    file.unlink()
    assert grid.look()[0] == 1


@pytest.mark.parametrize(
    "requests", [GOOD[:1], [GOOD[0], {**GOOD[1], "token_counts": [11]}], [GOOD[0], {**GOOD[1], "error": "late"}]]
)
def test_a_cell_that_reads_as_good_without_all_its_requests_and_tokens_is_corrupt(grid, requests):
    records.write_cell(grid.folder / "a", {**CELL, **POINT}, requests)
    assert grid.look() == (0, 1)


def test_the_study_has_enough_to_be_killed_at():
    grid = bench_kills.Grid(load_study(bench_kills.STUDY), None)
    assert grid.cells == 120 and bench_kills.KILLS >= 30


def test_the_table_counts_by_what_was_killed():
    rows = [
        {"victim": "sweep", "moment": "start", "lost": 0, "corrupt": 0, "orphans": 0, "cleared_s": 1.0, "round": 1},
        {"victim": "sweep", "moment": "cells", "lost": 1, "corrupt": 0, "orphans": 2, "cleared_s": 3.0, "round": 1},
        {"victim": "engine", "moment": "cells", "lost": 0, "corrupt": 0, "orphans": 0, "cleared_s": 0.5, "round": 2},
    ]
    facts = {"device": "a CPU", "vllm_version": "0.32.0", "date": "2026-01-02", "seed": 0, "grid_complete": True}
    lines = bench_kills.text(pd.DataFrame(rows).assign(**facts)).splitlines()
    assert lines[0] == "a CPU, vLLM 0.32.0, 2026-01-02, seed 0; 3 kills in 2 grids, in the end complete."
    assert lines[-2:] == [
        "| sweep | 2 | 1 | 1 | 0 | 2 | 2.0 s, at most 3.0 s |",
        "| engine | 1 | 1 | 0 | 0 | 0 | 0.5 s, at most 0.5 s |",
    ]
