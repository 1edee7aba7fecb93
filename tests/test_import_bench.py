"""Results of `vllm bench serve` become records: small made-up files in its layout, and one that it really wrote."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from latency_lab import figures, import_bench, metrics, records, style, summary, tables, token_gaps
from latency_lab.__main__ import main

TOTALS = {
    "date": "20260102-030405",
    "endpoint_type": "openai",
    "backend": "openai",
    "label": None,
    "model_id": "Qwen/Qwen3-4B-Instruct-2507",
    "tokenizer_id": "Qwen/Qwen3-4B-Instruct-2507",
    "num_prompts": 3,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 2,
    "duration": 2.0,
    "completed": 3,
    "failed": 0,
    "total_input_tokens": 24,
    "total_output_tokens": 9,
    "request_throughput": 1.5,
}
DETAILS = {
    "input_lens": [8, 8, 8],
    "output_lens": [3, 3, 3],
    "ttfts": [0.1, 0.2, 0.1],
    "itls": [[0.01, 0.02], [0.02, 0.02], [0.05, 0.01]],
    "start_times": [100.0, 100.001, 100.5],
    "generated_texts": ["a b c", "d e f", "g h i"],
    "errors": ["", "", ""],
}


def write(folder: Path, name: str = "result.json", **changed) -> Path:
    """A result in the layout of vLLM 0.24; a value of None takes the key out."""
    result = {key: value for key, value in (TOTALS | DETAILS | changed).items() if value is not None or key == "label"}
    path = folder / name
    path.write_text(json.dumps(result | ({"max_concurrency": None} if "max_concurrency" not in result else {})))
    return path


def imported(folder: Path, *paths: Path, **options) -> records.Records:
    for path in paths:
        import_bench.import_file(path, folder / "runs" / "mine", **options)
    return records.load(folder / "runs" / "mine")


def test_token_times_follow_from_ttft_and_gaps(tmp_path):
    study = imported(tmp_path, write(tmp_path))
    first, _, third = study.requests.to_dict("records")
    assert first["token_times_s"] == pytest.approx([0.1, 0.11, 0.13])
    assert first["token_counts"] == [1, 1, 1]
    assert first["scheduled_s"] == first["sent_s"] == 0.0
    assert third["sent_s"] == pytest.approx(0.5)
    assert third["first_token_s"] == pytest.approx(0.6)
    assert third["last_token_s"] == pytest.approx(0.66)
    table = metrics.latencies(study.requests)
    assert table["tpot_s"].tolist() == pytest.approx([0.015, 0.02, 0.03])
    assert table["e2e_s"].tolist() == pytest.approx([0.13, 0.24, 0.16])


def test_what_the_file_does_not_say_is_null(tmp_path):
    study = imported(tmp_path, write(tmp_path))
    (cell,) = study.cells.to_dict("records")
    for name in ("vllm_version", "device", "weights", "seed", "git_commit", "kv_cache_blocks", "max_num_seqs"):
        assert pd.isna(cell[name]), name
    assert cell["imported_from"].startswith("vllm bench serve: result.json")
    assert cell["model"] == "Qwen/Qwen3-4B-Instruct-2507"
    assert study.requests["queue_s"].isna().all() and study.requests["target_output_tokens"].isna().all()
    assert set(study.requests["via"]) == {"openai"}


@pytest.mark.parametrize(
    ("changed", "load", "label"),
    [
        ({}, "closed", "in=8 out=3 c=2"),
        ({"max_concurrency": None}, "burst", "in=8 out=3 n=3"),
        ({"max_concurrency": None, "request_rate": 4.0}, "poisson", "in=8 out=3 rate=4/s"),
        ({"request_rate": 4.0, "burstiness": 0.5}, "gamma", "in=8 out=3 rate=4/s b=0.5 c<=2"),
        ({"max_concurrency": None, "request_rate": 0.5, "burstiness": math.inf}, "constant", "in=8 out=3 rate=0.5/s"),
        ({"input_lens": [4, 8, 9], "max_concurrency": 1}, "closed", "in=~7 out=3 c=1"),
    ],
)
def test_arrivals_are_named_as_a_study_names_them(tmp_path, changed, load, label):
    (cell,) = imported(tmp_path, write(tmp_path, **changed)).cells.to_dict("records")
    assert (cell["load"], cell["workload"]) == (load, label)


def test_an_open_loop_counts_from_when_a_request_was_due(tmp_path):
    """vLLM 0.32 notes how long --max-concurrency held a request back; the wait belongs to its latency."""
    path = write(tmp_path, request_rate=4.0, queue_times=[0.0, 0.0, 0.2])
    study = imported(tmp_path, path)
    assert study.requests["scheduled_s"].tolist() == pytest.approx([0.0, 0.001, 0.3])
    assert metrics.latencies(study.requests)["ttft_s"].tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_a_closed_loops_own_wait_is_not_latency(tmp_path):
    study = imported(tmp_path, write(tmp_path, queue_times=[0.0, 0.0, 0.5]))
    assert study.requests["scheduled_s"].tolist() == study.requests["sent_s"].tolist()


def test_failed_requests_are_rows(tmp_path):
    trace = "Traceback (most recent call last):\n  File x\nClientOSError: [Errno 104] Connection reset by peer\n"
    path = write(
        tmp_path,
        output_lens=[3, 0, 0],
        ttfts=[0.1, 0.2, 0.0],
        itls=[[0.01, 0.02], [0.02], []],
        errors=["", trace, ""],
    )
    study = imported(tmp_path, path)
    good, reset, refused = study.requests.to_dict("records")
    assert pd.isna(good["error"])
    assert reset["error"] == "ClientOSError: [Errno 104] Connection reset by peer"
    assert reset["token_times_s"] == pytest.approx([0.2, 0.22]) and pd.isna(reset["output_tokens"])
    assert refused["error"] == "failed without a reason: no token came" and refused["output_tokens"] == 0
    (cell,) = study.cells.to_dict("records")
    assert (cell["status"], cell["requests"], cell["requests_failed"]) == ("done", 3, 2)


def test_a_run_without_one_answer_is_a_failed_cell(tmp_path):
    path = write(tmp_path, output_lens=[0] * 3, ttfts=[0.0] * 3, itls=[[]] * 3, errors=["Not Found"] * 3)
    (cell,) = imported(tmp_path, path).cells.to_dict("records")
    assert (cell["status"], cell["error"]) == ("failed", "all 3 requests failed: Not Found")


def test_chunks_of_several_tokens_keep_their_times_alone(tmp_path):
    """vLLM notes when chunks came, not what they held: TPOT and ITL are whole, a chunk's tokens are not known."""
    path = write(tmp_path, output_lens=[5, 3, 3])
    (cell,) = import_bench.import_file(path, tmp_path / "runs" / "mine")
    assert "1 came in other than a token a chunk" in str(cell)
    study = records.load(tmp_path / "runs" / "mine")
    assert study.requests["token_counts"].isna().tolist() == [True, False, False]
    row, itl_s = token_gaps.itl(study.requests)
    assert sorted(itl_s[row == 0]) == pytest.approx([0, 0, 0.01, 0.02])
    assert metrics.latencies(study.requests)["tpot_s"].iloc[0] == pytest.approx(0.03 / 4)


def test_a_label_that_names_arguments_fills_their_columns(tmp_path):
    path = write(tmp_path, vllm_version="0.24.0", max_num_seqs="4", color="blue")
    study = imported(tmp_path, path, setting="budget=2048 seqs=32", facts=["enforce_eager=on"])
    (cell,) = study.cells.to_dict("records")
    assert cell["setting"] == "budget=2048 seqs=32"
    assert (cell["max_num_batched_tokens"], cell["max_num_seqs"], cell["enforce_eager"]) == (2048, 32, True)
    assert cell["vllm_version"] == "0.24.0"
    assert study.requests["max_num_seqs"].tolist() == [32] * 3


def test_a_setting_without_a_label_is_made_of_the_files_metadata(tmp_path):
    (cell,) = imported(tmp_path, write(tmp_path, seqs="4", label="fast")).cells.to_dict("records")
    assert cell["setting"] == "seqs=4"
    (cell,) = imported(tmp_path / "b", write(tmp_path, label="fast")).cells.to_dict("records")
    assert cell["setting"] == "fast"


def test_runs_of_one_workload_are_repeats_and_none_is_counted_twice(tmp_path):
    both = [write(tmp_path, f"{n}.json", duration=2.0 + n) for n in range(2)]
    study = imported(tmp_path, *both, both[0])
    assert sorted(study.cells["repeat"]) == [0, 1]
    assert len(study.requests) == 6


def test_appended_results_are_cells_of_their_own(tmp_path):
    path = write(tmp_path)
    path.write_text(path.read_text() + "\n" + path.read_text().replace('"duration": 2.0', '"duration": 3.0'))
    assert sorted(imported(tmp_path, path).cells["duration_s"]) == [2.0, 3.0]


def test_a_file_that_is_wrong_is_named_with_its_key(tmp_path):
    def problem(path: Path, **options) -> str:
        with pytest.raises(import_bench.BenchFileError) as error:
            import_bench.import_file(path, tmp_path / "runs" / "mine", **options)
        assert "\n" not in str(error.value)
        return str(error.value).replace(f"{path}", "FILE")

    nothing = tmp_path / "nothing.json"
    assert problem(nothing).startswith("FILE: cannot be read")
    nothing.write_text("")
    assert problem(nothing) == "FILE: not JSON (line 1: Expecting value)"
    nothing.write_text("[1, 2]")
    assert problem(nothing) == "FILE: holds a JSON list, not a result of `vllm bench serve`"
    nothing.write_text('{"elapsed_time": 3.0, "num_requests": 8}')  # vllm bench throughput
    assert problem(nothing) == "FILE: not a result of `vllm bench serve` on text: no key 'backend'"
    totals = write(tmp_path, "totals.json", **dict.fromkeys(DETAILS))
    assert problem(totals).endswith("holds totals, not requests; run it again with --save-detailed")
    assert problem(write(tmp_path, itls=[[0.1], ["x"], []])).startswith("FILE: itls[1][0]: Input should be")
    assert problem(write(tmp_path, errors=[""])) == "FILE: errors: 1 entries, but input_lens has 3"
    assert "ramp_up_strategy: 'linear'" in problem(write(tmp_path, ramp_up_strategy="linear"))
    good = write(tmp_path)
    assert problem(good, facts=["gpu=L4"]).startswith("--fact: 'gpu=L4'; allowed: NAME=VALUE with NAME one of device")
    assert problem(good, facts=["weights=fake"]) == "--fact: weights: 'fake'; allowed: real or random"
    assert problem(good, setting="budget=2k") == "--setting: max_num_batched_tokens: '2k'; allowed: a whole number"
    assert not (tmp_path / "runs").exists()


def test_the_command_says_what_it_did_and_errors_in_one_line(tmp_path, capsys):
    def command(*words):
        return main(["import-bench", "--runs", str(tmp_path / "runs"), *words])

    assert command(str(write(tmp_path)), "--study", "mine", "--setting", "base") == 0
    assert "setting 'base', workload 'in=8 out=3 c=2', repeat 0: 3 requests" in capsys.readouterr().out
    assert command(str(tmp_path / "none.json"), "--study", "a/b") == 2
    assert capsys.readouterr().err == "--study: 'a/b'; allowed: letters, digits and . _ + - behind a letter or digit\n"


def test_the_report_reads_an_imported_study(tmp_path):
    many = {key: value * 5 for key, value in DETAILS.items()} | {"start_times": [100 + n / 10 for n in range(15)]}
    for seqs in (4, 32):
        for concurrency in (1, 2):
            changed = many | {"max_concurrency": concurrency, "duration": 2.0 + seqs}
            path = write(tmp_path, f"{seqs}-{concurrency}.json", **changed)
            study = imported(tmp_path, path, setting=f"seqs={seqs}", facts=["device=NVIDIA L4"])
    facts = tables.facts(study)
    assert facts["Machine"] == "NVIDIA L4" and facts["vLLM"] == "unknown"
    assert "32-1.json" in facts["Imported from"]
    assert "seqs=32" in tables.settings(study.cells)
    found = summary.of_study(study)
    assert "4 of 4 cells are valid" in tables.validity(study.cells, found.cells)
    assert figures.tradeoff(found.points, style.context(study.cells)).reason == ""
