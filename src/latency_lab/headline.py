"""The answer to the thread in five sentences, and its claims in one table: how README opens. All of it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from latency_lab.claims import NOT_TESTED, Verdict
from latency_lab.panels import three
from latency_lab.proving import UNDECIDED
from latency_lab.verdicts import marked


def answer(
    batching: pd.DataFrame, quantization: pd.DataFrame, predicted: pd.DataFrame, tokens: pd.DataFrame
) -> list[str]:
    """Five sentences as Markdown lines.

    Parameters
    ----------
    batching, quantization : points of the studies h200-batching and h200-quantization (summary.Summary.points)
    predicted : outlook.thread of the asker's GPU
    tokens : outlook.longest of it at the thread's concurrency
    """
    thread = _rows(batching, "thread")
    chats = _rows(batching[batching["class_name"] == "chat"], "long-prompts")
    base, small = "budget=8192 seqs=256", "budget=512 seqs=256"
    times = {name: thread[name]["e2e_p50_s"] / thread[base]["e2e_p50_s"] for name in ("eager", "seqs-4", small)}
    stalls = [chats[name]["itl_p99_s"] * 1e3 for name in (base, small)]
    alone, twenty, many = (_rows(quantization, name) for name in ("alone c=1", "chat c=20", "chat c=64"))
    tpot = [alone[name]["tpot_p50_s"] * 1e3 for name in ("bf16", "fp8", "awq-int4")]
    gains = [
        rows[name]["output_tokens_per_s"] / rows["bf16"]["output_tokens_per_s"]
        for rows, name in ((twenty, "fp8"), (twenty, "awq-int4"), (many, "awq-int4"))
    ]
    takes = _each(predicted, lambda row: f"{three(row['e2e_s'])} s ({row['weights']})")
    within = _each(tokens, lambda row: f"{row['tokens']} ({row['weights']})")
    return [
        f"1. **No flag brings 20 answers of 256 tokens under a second on an L4**: its bandwidth allows {takes}, "
        f"predicted; what fits into a second are outputs of {within} tokens.",
        f"2. **Keep CUDA graphs**: `enforce_eager` multiplied the thread's E2E by {three(times['eager'])} on an H200, "
        "more than any other setting here, and the thread never names it.",
        f"3. **Don't lower `max_num_seqs`**: 4 multiplied E2E by {three(times['seqs-4'])}, since the wait moves into "
        "the queue.",
        "4. **`max_num_batched_tokens` bounds stalls, not the latency of short prompts**: from 8,192 to 512 it took "
        f"the ITL p99 of streams beside 6,000-token prompts from {three(stalls[0])} to {three(stalls[1])} ms, and "
        f"multiplied the thread's E2E by {three(times[small])}.",
        f"5. **Quantize for what bounds your GPU**: on an H200, FP8 weights took TPOT from {three(tpot[0])} to "
        f"{three(tpot[1])} ms and throughput at 20 requests to {three(gains[0])} times bf16's; AWQ int4 took them to "
        f"{three(tpot[2])} ms and {three(gains[1])} times (at 64: {three(gains[2])}), where an L4, bound by bytes, "
        "would gain from it.",
    ]


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    """Markdown: a row a claim, a column a machine. Where a machine has several, those that decided stand."""
    machines = list(dict.fromkeys(v.machine for v in verdicts if v.machine and not v.computed))
    claims = list(dict.fromkeys(v.claim for v in verdicts))
    lines = [f"| the claim | {' | '.join(machines)} |", "|---" * (len(machines) + 1) + "|"]
    for claim in claims:
        own = [v for v in verdicts if v.claim == claim]
        computed = [f"{marked(v.verdict)} (computed for an {v.machine})" for v in own if v.computed]
        cells = [_of_machine([v for v in own if v.machine == machine], computed) for machine in machines]
        lines.append(f"| **{claim.id}**: {claim.sentence} | {' | '.join(cells)} |")
    return lines


def _of_machine(own: Sequence[Verdict], computed: Sequence[str]) -> str:
    decided = [v for v in own if v.verdict != UNDECIDED]
    shown = [marked(v.verdict) for v in decided or own] or list(computed) or [marked(NOT_TESTED)]
    return ", ".join(dict.fromkeys(shown))


def _rows(points: pd.DataFrame, workload: str) -> dict[str, Mapping[Any, Any]]:
    """Rows of a workload by setting."""
    return {str(row["setting"]): row for row in points[points["workload"] == workload].to_dict("records")}


def _each(table: pd.DataFrame, say: Any) -> str:
    *most, last = [say(row) for row in table.to_dict("records")]
    return f"{', '.join(most)} and {last}" if most else last
