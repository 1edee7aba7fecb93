"""The answer to the thread in five sentences, and its claims in one table: how README opens. All of it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from latency_lab.claims import NOT_TESTED, Verdict
from latency_lab.panels import three
from latency_lab.proving import UNDECIDED
from latency_lab.verdicts import marked

BASE, SMALL, FEW = "budget=8192 seqs=256", "budget=512 seqs=256", "seqs-4"
"""Settings of the study h200-batching."""

Rows = Mapping[str, Mapping[Any, Any]]


class NoLongerTrue(Exception):
    """New data has turned a sentence of the answer around: it has to be written anew."""


def answer(
    batching: pd.DataFrame, quantization: pd.DataFrame, predicted: pd.DataFrame, tokens: pd.DataFrame
) -> list[str]:
    """Five sentences as a Markdown list.

    Parameters
    ----------
    batching, quantization : points of the studies h200-batching and h200-quantization (summary.Summary.points)
    predicted : outlook.thread of the asker's GPU
    tokens : outlook.longest of it at the thread's concurrency

    Raises NoLongerTrue where a number does not bear out what its sentence says.
    """
    thread = _rows(batching, "thread")
    stalled = _rows(batching[batching["class_name"] == "chat"], "long-prompts")
    sentences = (
        _floor(predicted, tokens),
        _graphs(thread),
        _limit(thread),
        _budget(thread, stalled),
        _weights(quantization, predicted),
    )
    return [f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)]


def _floor(predicted: pd.DataFrame, tokens: pd.DataFrame) -> str:
    _check(predicted["e2e_s"].min() > 1, "no format of weights answers the thread within a second")
    takes = _each(predicted, lambda row: f"{three(row['e2e_s'])} s ({row['weights']})")
    within = _each(tokens, lambda row: f"{row['tokens']} ({row['weights']})")
    return (
        "**No flag brings 20 answers of 256 tokens under a second on an L4; short answers do.** Its bandwidth allows "
        f"a mean E2E of {takes}; within a second, 20 at once get {within} tokens (predicted)."
    )


def _graphs(thread: Rows) -> str:
    times = {name: _times(thread, name) for name in thread}
    _check(max(times.values()) == times["eager"], "eager mode costs most")
    return (
        f"**Keep CUDA graphs.** `enforce_eager`, which the thread never names, multiplied its E2E by "
        f"{three(times['eager'])} on an H200, more than any other setting measured."
    )


def _limit(thread: Rows) -> str:
    times, tpot = _times(thread, FEW), _times(thread, FEW, "tpot_p50_s")
    _check(times > 1.1 > 1 > tpot, "a small max_num_seqs makes tokens faster and answers slower")
    return (
        f"**Don't lower `max_num_seqs`.** 4 in place of 256 multiplied TPOT by {three(tpot)} and E2E by "
        f"{three(times)}: the wait moves into the queue."
    )


def _budget(thread: Rows, stalled: Rows) -> str:
    stalls = [stalled[name]["itl_p99_s"] * 1e3 for name in (BASE, SMALL)]
    _check(stalls[1] < 0.5 * stalls[0], "a small budget halves the stalls")
    _check(0.9 < _times(thread, SMALL) < 1.1, "a small budget hardly changes the thread's E2E")
    return (
        "**`max_num_batched_tokens` bounds stalls, not the latency of short prompts.** From 8,192 to 512 it took the "
        f"ITL p99 of streams beside 6,000-token prompts from {three(stalls[0])} to {three(stalls[1])} ms, and "
        f"multiplied the thread's E2E by {three(_times(thread, SMALL))}."
    )


def _weights(points: pd.DataFrame, predicted: pd.DataFrame) -> str:
    alone, twenty, many = (_rows(points, name) for name in ("alone c=1", "chat c=20", "chat c=64"))
    tpot = [alone[name]["tpot_p50_s"] * 1e3 for name in ("bf16", "fp8", "awq-int4")]
    fp8, awq, awq_many = (
        rows[name]["output_tokens_per_s"] / rows["bf16"]["output_tokens_per_s"]
        for rows, name in ((twenty, "fp8"), (twenty, "awq-int4"), (many, "awq-int4"))
    )
    e2e = predicted.set_index("weights")["e2e_s"]
    _check(tpot[1] < tpot[0] and fp8 > 1 and max(awq, awq_many) < 1.05, "on the H200 FP8 gains and int4 does not")
    _check(e2e["int4"] < e2e["bf16"], "int4 gains on the L4")
    return (
        f"**Quantize for what bounds your GPU.** On an H200, FP8 weights took TPOT from {three(tpot[0])} to "
        f"{three(tpot[1])} ms and throughput (20 at once) to {three(fp8)} times bf16's, while AWQ int4 had "
        f"{three(tpot[2])} ms and {three(awq)} times (64 at once: {three(awq_many)}); an L4, bound by the bytes of "
        f"weights, should answer in {three(e2e['int4'] / e2e['bf16'])} times bf16's E2E with int4 (predicted)."
    )


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    """Markdown: a row a claim, a column a machine. Where a machine has several, those that decided stand."""
    machines = list(dict.fromkeys((v.machine, v.computed) for v in verdicts if v.machine))
    machines.sort(key=lambda machine: machine[1])
    names = [f"{name} (computed)" if computed else name for name, computed in machines]
    lines = [f"| claim | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for claim in dict.fromkeys(v.claim for v in verdicts):
        own = [v for v in verdicts if v.claim == claim]
        cells = [_of([v for v in own if (v.machine, v.computed) == machine], machine[1]) for machine in machines]
        lines.append(f"| **{claim.id}**: {claim.sentence} | {' | '.join(cells)} |")
    return lines


def _of(own: Sequence[Verdict], computed: bool) -> str:
    if computed and not own:
        return ""
    decided = [v for v in own if v.verdict != UNDECIDED]
    return ", ".join(dict.fromkeys(marked(v.verdict) for v in decided or own)) or marked(NOT_TESTED)


def _rows(points: pd.DataFrame, workload: str) -> dict[str, Mapping[Any, Any]]:
    """Rows of a workload by setting."""
    return {str(row["setting"]): row for row in points[points["workload"] == workload].to_dict("records")}


def _times(rows: Rows, setting: str, metric: str = "e2e_p50_s") -> float:
    return float(rows[setting][metric] / rows[BASE][metric])


def _check(holds: bool, sentence: str) -> None:
    if not holds:
        raise NoLongerTrue(f"headline.py: the data no longer says that {sentence}: write that sentence anew")


def _each(table: pd.DataFrame, say: Callable[[Mapping[Any, Any]], str]) -> str:
    *most, last = [say(row) for row in table.to_dict("records")]
    return f"{', '.join(most)} and {last}" if most else last
