"""The answer in five sentences is the data's, and refused where the data has turned; the table has a cell a machine."""

import pandas as pd
import pytest

from latency_lab import claims, headline
from latency_lab.proving import REFUTED, SUPPORTED, UNDECIDED

QUEUE, SHORT = claims.CLAIMS[:2]


def points(rows):
    return pd.DataFrame(rows, columns=["workload", "class_name", "setting", "e2e_p50_s", "tpot_p50_s", "itl_p99_s"])


def batching(eager_s=8.0, small_stall_s=0.015):
    settings = {"budget=8192 seqs=256": 1.0, "budget=512 seqs=256": 0.99, "seqs-4": 2.5, "eager": eager_s}
    rows = [("thread", "all", name, e2e, 0.004 if name != "seqs-4" else 0.003, 0.0) for name, e2e in settings.items()]
    stalls = {"budget=8192 seqs=256": 0.060, "budget=512 seqs=256": small_stall_s}
    rows += [("long-prompts", "chat", name, 0.0, 0.0, itl) for name, itl in stalls.items()]
    return points([*rows, ("long-prompts", "long", "budget=8192 seqs=256", 0.0, 0.0, 9.0)])


def quantization(fp8_rate=120.0):
    rates = {"bf16": 100.0, "fp8": fp8_rate, "awq-int4": 90.0}
    tpot = {"bf16": 0.0036, "fp8": 0.0028, "awq-int4": 0.0037}
    return pd.DataFrame(
        [
            {"workload": workload, "setting": name, "tpot_p50_s": tpot[name], "output_tokens_per_s": rates[name]}
            for workload in ("alone c=1", "chat c=20", "chat c=64")
            for name in rates
        ]
    )


def predicted(fastest_s=4.0):
    return pd.DataFrame({"weights": ["bf16", "fp8", "int4"], "e2e_s": [9.0, 5.0, fastest_s]})


TOKENS = pd.DataFrame({"weights": ["bf16", "fp8", "int4"], "tokens": [27, 46, 58]})


def test_the_answer_has_five_sentences_with_the_numbers_of_the_data():
    floor, graphs, limit, budget, weights = headline.answer(batching(), quantization(), predicted(), TOKENS)
    assert "9 s (bf16), 5 s (fp8) and 4 s (int4)" in floor
    assert "27 (bf16), 46 (fp8) and 58 (int4) tokens (predicted)" in floor
    assert graphs.startswith("2. ") and "multiplied its E2E by 8 on an H200" in graphs
    assert "4 in place of 256 multiplied TPOT by 0.75 and E2E by 2.5" in limit
    assert "from 60 to 15 ms" in budget and "E2E by 0.99" in budget
    assert "from 3.6 to 2.8 ms" in weights and "to 1.2 times bf16's" in weights
    assert "3.7 ms and 0.9 times" in weights and "0.444 times bf16's E2E with int4 (predicted)" in weights


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((batching(eager_s=2.0), quantization(), predicted()), "eager mode costs most"),
        ((batching(small_stall_s=0.04), quantization(), predicted()), "a small budget halves the stalls"),
        ((batching(), quantization(fp8_rate=90.0), predicted()), "on the H200 FP8 gains and int4 does not"),
        ((batching(), quantization(), predicted(fastest_s=0.9)), "no format of weights answers the thread"),
    ],
)
def test_a_sentence_that_the_data_has_turned_is_refused(given, said):
    with pytest.raises(headline.NoLongerTrue, match=said):
        headline.answer(*given, TOKENS)


def test_the_table_has_a_column_a_machine_and_says_what_was_only_computed():
    verdicts = [
        claims.Verdict(QUEUE, SUPPORTED, machine="A"),
        claims.Verdict(QUEUE, UNDECIDED, machine="A", study="another"),
        claims.Verdict(QUEUE, REFUTED, machine="B"),
        claims.Verdict(SHORT, UNDECIDED, machine="A"),
        claims.Verdict(SHORT, REFUTED, machine="L4", computed=True),
    ]
    head, line, queue, short = headline.verdict_table(verdicts)
    assert head == "| claim | A | B | L4 (computed) |" and line == "|---|---|---|---|"
    assert queue.endswith("| ✔ supported | ✘ refuted |  |")
    assert short.endswith("| ? not enough data | – not tested | ✘ refuted |")
