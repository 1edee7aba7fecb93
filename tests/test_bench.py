"""The benches' own arithmetic and commands; what they measure is not tested but printed."""

import numpy as np
import pandas as pd
import pytest

from latency_lab import bench, fidelity, vllm_bench
from latency_lab.__main__ import main
from latency_lab.fidelity import OURS, THROUGHPUT


def test_an_unknown_part_is_named(capsys):
    assert main(["bench", "tracing"]) == 2
    assert capsys.readouterr().err == f"bench: 'tracing'; allowed: {', '.join(bench.PARTS)}\n"


def test_options_become_words_of_a_command_line():
    options = {"max_num_seqs": 4, "enforce_eager": True, "enable_prefix_caching": False}
    assert vllm_bench.flags(options) == ["--max-num-seqs", "4", "--enforce-eager", "--no-enable-prefix-caching"]


def test_throughput_is_compared_pair_by_pair():
    """The machine was half as fast in the second pair: both sides were, and the ratio does not see it."""
    rows = [(0, 99.0, 100.0), (1, 49.5, 50.0), (2, 99.0, 100.0)]
    table = pd.DataFrame(
        [
            {"pair": pair, "client": name, "output_tokens_per_s": value}
            for pair, ours, theirs in rows
            for name, value in ((OURS, ours), (THROUGHPUT, theirs))
        ]
    )
    assert fidelity.throughput_ratio(table) == pytest.approx((0.99, 0.99, 0.99))


def test_rounds_that_are_no_pairs_are_resampled_apart():
    middle, low, high = fidelity.median_ratio(np.array([2.0, 2.0, 2.0]), np.array([1.0, 1.0, 2.0]), paired=False)
    assert (middle, low, high) == (2.0, 1.0, 2.0)
