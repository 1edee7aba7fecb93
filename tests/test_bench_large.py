"""The bench of large results on a tiny study, and its table."""

import pandas as pd

from latency_lab import bench_large, records

FACTS = {"cpu": "made-up CPU (2 cores)", "cores": 2, "python_version": "3.11.0", "git_commit": "0000000"}


def test_a_study_is_made_reported_on_and_kept_where_it_is_asked_for(tmp_path, capsys):
    bench_large.cost(tmp_path / "large.csv", (144,), studies=tmp_path)
    study = tmp_path / "144" / "data" / "runs" / "made-up"
    cells = records.load(study).cells
    assert (cells["requests"] > 0).sum() == bench_large.CELLS and set(cells["study"]) == {"made-up"}
    assert (tmp_path / "144" / "figures" / "report" / "made-up.html").exists()
    (row,) = pd.read_csv(tmp_path / "large.csv").to_dict("records")
    assert row["requests"] == 144 and row["memory_gb"] > 0.05 and row["disk_gb"] > 0
    assert "| 144 |" in capsys.readouterr().out


def test_what_does_not_fit_on_the_disk_is_left_out(tmp_path, capsys):
    bench_large.cost(tmp_path / "large.csv", (10**15,), studies=tmp_path)
    assert "left out: they need 320000000.0 GB" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_table_says_what_a_million_more_take():
    rows = [
        {"requests": 100_000, "disk_gb": 0.05, "made_s": 1.0, "report_s": 20.0, "memory_gb": 0.9},
        {"requests": 1_100_000, "disk_gb": 0.35, "made_s": 6.0, "report_s": 30.0, "memory_gb": 1.2},
    ]
    lines = bench_large.text(pd.DataFrame(rows).assign(**FACTS, date="2026-01-02")).splitlines()
    assert lines[0].startswith("made-up CPU (2 cores), of which 2 are used, Python 3.11.0, 2026-01-02")
    assert lines[-2:] == [
        "| 100,000 | 0.05 GB | 20 s | - | 0.90 GB |",
        "| 1,100,000 | 0.35 GB | 30 s | 10.0 s | 1.20 GB |",
    ]
