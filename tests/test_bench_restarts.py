"""The grid that this study and vLLM's own sweep are timed on, and the table of their times."""

import json
import shlex
from types import SimpleNamespace

import pandas as pd

from latency_lab import bench_restarts
from latency_lab.study import load_study


def test_the_grid_has_24_cells_of_one_engine():
    study = load_study(bench_restarts.STUDY)
    cells = [plan for setting in study.settings() for plan in study.cells(setting)]
    assert len(cells) == 24 and {len(study.together(setting)) for setting in study.settings()} == {6}
    assert bench_restarts.STUDY.read_text().count("engine_reuse: hot") == 1, "what the cold way is made from"


def test_vllms_sweep_gets_the_same_grid_on_a_port_of_this_machine_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_restarts.models, "prepare", lambda source, cache: SimpleNamespace(location="/a model"))
    monkeypatch.setattr(bench_restarts.machine, "has_gpu", lambda: False)
    options = bench_restarts._options(load_study(bench_restarts.STUDY), tmp_path)
    server, client = shlex.split(options["serve_cmd"]), shlex.split(options["bench_cmd"])
    given = dict(zip(server, server[1:], strict=False))
    assert given["--host"] == "127.0.0.1" and given["--model"] == "/a model" and given["--dtype"] == "float32"
    assert given["--kv-cache-memory-bytes"] == "536870912" and given["--distributed-executor-backend"] == "uni"
    assert {"--enforce-eager", "--no-enable-prefix-caching"} <= set(server)
    assert client[client.index("--base-url") + 1] == f"http://127.0.0.1:{given['--port']}"
    assert client[client.index("--random-input-len") + 1] == "32" and "--ignore-eos" in client
    served, asked = (json.loads(options[f"{side}_params"].read_text()) for side in ("serve", "bench"))
    assert len(served) * len(asked) * options["num_runs"] == 24
    assert {tuple(one.values()) for one in served} == {(budget, seqs) for budget in (128, 256, 512) for seqs in (4, 32)}
    assert asked == [{"max_concurrency": c, "num_prompts": 2 * c} for c in (1, 2, 4, 8)]


def test_times_are_kept_by_way_and_shown_quickest_first(tmp_path):
    path = tmp_path / "runs" / "restarts.csv"
    bench_restarts._note(path, bench_restarts.COLD, 500.0, 24, 6, 40.0)
    bench_restarts._note(path, bench_restarts.HOT, 99.0, 24, 1, 40.0)
    bench_restarts._note(path, bench_restarts.HOT, 101.2, 24, 1, 41.0)
    lines = bench_restarts.text(pd.read_csv(path)).splitlines()
    assert lines[-2:] == ["| this study, hot | 24 | 1 | 101 s | 41 s |", "| this study, cold | 24 | 6 | 500 s | 40 s |"]
    assert lines[2].startswith("| way | cells | engine starts | wall time")
