"""What is said of hot cells beside cold ones, on made-up records."""

import numpy as np
import synthetic

from latency_lab import bench_hot, records, reuse


def round_(runs, number, how, slower=1.0, tokens=(7, 8, 9)):
    """One round's study, as a sweep leaves it: a point of 12 requests."""
    rng = np.random.default_rng([number, how == "hot"])
    gaps = rng.normal(0.02, 0.001, (12, 3)) * slower
    rows = [
        synthetic.request(
            cell="c", repeat=0, request=i, request_id=f"c-{i}", token_ids=list(tokens), token_times_s=np.cumsum(one)
        )
        for i, one in enumerate(gaps)
    ]
    hot = {"hot": True, "started_max_num_batched_tokens": 512, "started_max_num_seqs": 32}
    cell = synthetic.cell(cell="c", **(hot if how == "hot" else {"hot": False}), kv_cache_tokens=1024)
    cell = {name: value for name, value in cell.items() if name in records.CELLS.names}
    records.write_cell(runs / f"round-{number}" / how / "s" / "a-1", cell, rows)


def collected(tmp_path, **hot):
    for number in range(4):
        round_(tmp_path, number, "cold")
        round_(tmp_path, number, "hot", **hot)
    bench_hot.collect(tmp_path, "s")
    study = records.load(tmp_path / "records")
    return study, reuse.compare(study)


def test_equal_cells_overlap_in_every_metric(tmp_path):
    study, compared = collected(tmp_path)
    assert len(study.cells) == 8 and study.cells["cell"].nunique() == 8
    assert sorted(study.cells["repeat"]) == sorted([*range(4)] * 2)
    assert compared["overlap"].all() and set(compared["setting"]) == {"a"}
    assert {"ttft_p50_s", "tpot_mean_s", "e2e_p90_s", "output_tokens_per_s"} <= set(compared["metric"])
    assert "ttft_p99_s" not in set(compared["metric"]), "48 requests are too few for a p99"
    text = reuse.text(study, compared)
    assert f"overlap in {len(compared)} of {len(compared)} metrics." in text
    assert "max_num_batched_tokens 512 and max_num_seqs 32" in text
    assert "Resolved configuration: the same; size of the KV cache: the same." in text
    assert "The same tokens in 48 of 48 answers." in text
    assert f"| ttft_p50_s | {compared.set_index('metric').loc['ttft_p50_s', 'ratio']:.3f} [" in text


def test_a_slower_engine_and_other_tokens_are_told(tmp_path):
    study, compared = collected(tmp_path, slower=1.5, tokens=(7, 8, 1))
    apart = compared.set_index("metric")
    assert not apart.loc["ttft_p50_s", "overlap"] and 1.4 < apart.loc["ttft_p50_s", "ratio"] < 1.6
    text = reuse.text(study, compared)
    assert "not in " in text and "ttft_p50_s of chat in chat c=1 on a" in text
    assert "The same tokens in 0 of 48 answers." in text
