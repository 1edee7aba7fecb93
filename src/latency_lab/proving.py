"""Findings, which claims are judged by, and those of proofs: from tables of what held for each request or step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd

from latency_lab import proofs
from latency_lab.claim_rules import Proof
from latency_lab.records import Records

SUPPORTED = "supported"
REFUTED = "refuted"
DEPENDS = "depends"
UNDECIDED = "not enough data"


@dataclass(frozen=True)
class Measured:
    """The number that a condition is judged by, its interval, and the threshold that the rule asks for.

    kind : what the number is: 'ratio' or 'difference (s)' of two settings, 'tokens in time', 'share of the bound', or
        the difference of a rate. Numbers of one kind go on one axis
    """

    kind: str
    value: float
    low: float
    high: float
    threshold: float
    at_most: bool


@dataclass(frozen=True)
class Finding:
    """The verdict on one condition of a claim.

    names : metric, workload and settings of the condition, to say what a verdict depends on
    numbers : a sentence with the numbers that decided
    effect : the effect and its interval in short; empty for proofs
    on : what it depends on, or why it is undecided
    measured : the effect as numbers; None for proofs and where there is none
    """

    verdict: str
    condition: str
    names: Mapping[str, str] = field(default_factory=dict)
    numbers: str = ""
    effect: str = ""
    on: str = ""
    proof: bool = False
    measured: Measured | None = None


def findings(rule: Proof, study: Records) -> list[Finding]:
    """The findings of one proof: one for each pair of settings of same-tokens, else one."""
    requests, steps = _chosen(rule, study.requests), _chosen(rule, study.steps)
    if rule.proof == "same-tokens":
        return [_same_tokens(rule, requests, *pair) for pair in rule.compare]
    if steps.empty:
        notes = study.cells["steps_note"].dropna().unique()
        where = ", ".join([*rule.workload, *rule.setting])
        why = f"{where}: no steps of it" if where and len(study.steps) else "no scheduler steps were recorded"
        why += f" ({notes[0]})" if len(notes) else ""
        return [Finding(UNDECIDED, rule.proof, on=why, proof=True)]
    if rule.proof == "prompts-whole":
        return [_prompts_whole(proofs.prompts(steps, requests))]
    if rule.proof == "chunks-alone":
        return [_chunks_alone(proofs.prompts(steps, requests), rule)]
    if rule.proof == "within-limits":
        return [_within_limits(proofs.limits(steps, study.cells))]
    return [_served_in_order(proofs.order(steps, requests), rule)]


def _chosen(rule: Proof, table: pd.DataFrame) -> pd.DataFrame:
    """The rows on the workloads, settings and class that the rule names."""
    for column, labels in (("workload", rule.workload), ("setting", rule.setting)):
        if labels:
            table = table[table[column].isin(labels)]
    if rule.of_class and "class_name" in table:
        table = table[table["class_name"] == rule.of_class]
    return table


def _prompts_whole(table: pd.DataFrame) -> Finding:
    longer = table[table["prompt_tokens"] > table["chunk_tokens"].map(lambda sizes: max(sizes, default=0))]
    preempted = table[table["restarts"] > 0]
    numbers = (
        f"{_share(table)} prompts were computed whole, {len(longer):,} of them in more than one chunk "
        f"({int(longer['prefill_tokens'].sum()):,} tokens in {int(longer['chunks'].sum()):,} chunks)"
    )
    if beside := _beside_others(longer):
        numbers += f"; beside other requests, {'; '.join(beside)}"
    if len(preempted):
        numbers += (
            f"; {len(preempted):,} requests were preempted and computed "
            f"{int(preempted['recomputed_tokens'].sum()):,} tokens again"
        )
    return _of(table, "every prompt token is computed", numbers, "no completed request is in the steps")


def _beside_others(longer: pd.DataFrame, most: int = 4) -> list[str]:
    """For the longest prompts that shared their steps: the chunks that they took, and would have taken alone."""
    shared = longer[~longer["alone"].astype(bool)]
    shared = shared[shared["prompt_tokens"] == shared["prompt_tokens"].max()]
    said = []
    for (setting, tokens), own in shared.groupby(["setting", "prompt_tokens"], sort=False):
        low, high = own["chunks"].min(), own["chunks"].max()
        count = f"{low}" if low == high else f"{low} to {high}"
        said.append(f"{tokens:,} tokens at {setting} took {count} chunks, alone {own['chunks_alone'].iloc[0]}")
    return said[:most]


def _chunks_alone(table: pd.DataFrame, rule: Proof) -> Finding:
    alone = table[table["alone"]]
    expected = alone["chunks_alone"] if rule.chunks is None else rule.chunks
    alone = alone.assign(ok=alone["ok"] & (alone["chunks"] == expected))
    alone["reason"] = [
        f"took {count} chunks: {sizes}" for count, sizes in zip(alone["chunks"], alone["chunk_tokens"], strict=True)
    ]
    shown = alone.drop_duplicates(["setting", "workload", "prompt_tokens"])
    each = [
        f"{row['prompt_tokens']:,} tokens at {row['setting']} in {row['chunks']} ({_sizes(row['chunk_tokens'])})"
        for row in shown.head(6).to_dict("records")
    ]
    condition = "a lone prompt takes as many chunks as the budget asks for"
    numbers = f"{_share(alone)} lone prompts took the chunks that their budget asks for: {'; '.join(each)}"
    return _of(alone, condition, numbers, "no request had its steps to itself")


def _within_limits(table: pd.DataFrame) -> Finding:
    numbers = f"{_share(table)} cells kept budget and max_num_seqs in all of their {int(table['steps'].sum()):,} steps"
    return _of(table, "no step exceeds budget or max_num_seqs", numbers, "no cell has steps")


def _served_in_order(table: pd.DataFrame, rule: Proof) -> Finding:
    queued = table[table["waited"] > 0]
    what = "; ".join(
        f"{policy}: {int(own['requests'].sum()):,} requests, {int(own['waited'].sum()):,} of them queued, "
        f"{int(own['overtaken'].sum()):,} overtaken"
        for policy, own in queued.groupby("policy")
    )
    where = ", ".join(rule.workload) or "all workloads"
    return _of(queued, f"served in order, {where}", f"{where}: {what}", "no request had to wait for a place")


def _same_tokens(rule: Proof, requests: pd.DataFrame, one: str, other: str) -> Finding:
    table = proofs.same_tokens(requests, one, other)
    names = {"metric": "equality of outputs", "settings": f"{one} against {other}"}
    condition = f"equal greedy outputs, {one} against {other}"
    if table.empty:
        return Finding(UNDECIDED, condition, names, on=f"no outputs of {one} and {other} to compare", proof=True)
    numbers = f"{_share(table)} outputs of {one} and {other} are equal, {int(table['tokens'].sum()):,} tokens"
    parted = table[~table["ok"]]
    if parted.empty:
        return Finding(SUPPORTED, condition, names, numbers=numbers, proof=True)
    gap = parted["gap_nats"]
    if gap.isna().any():
        on = f"{len(parted)} outputs part, and log probabilities that could tell a near-tie were not kept"
        return Finding(UNDECIDED, condition, names, numbers=numbers, on=on, proof=True)
    first = parted.iloc[int(gap.to_numpy().argmax())]
    numbers += (
        f"; {len(parted)} part where the best two tokens are at most {gap.max():.2g} nats apart (the widest: request "
        f"{first['request']} of {first['workload']}, at token {first['same']} of {first['tokens']})"
    )
    if (gap <= rule.near_tie_nats).all():
        on = f"rounding: outputs part at near-ties of at most {gap.max():.2g} nats"
        return Finding(DEPENDS, condition, names, numbers=numbers, on=on, proof=True)
    return Finding(REFUTED, condition, names, numbers=numbers, proof=True)


def _of(table: pd.DataFrame, condition: str, numbers: str, empty: str) -> Finding:
    """Supported where `ok` holds in all rows, else refuted with the first counterexample."""
    if table.empty:
        return Finding(UNDECIDED, condition, on=empty, proof=True)
    bad = table[~table["ok"].astype(bool)]
    if bad.empty:
        return Finding(SUPPORTED, condition, numbers=numbers, proof=True)
    first = bad.iloc[0]
    where = f"{first['setting']}, {first['workload']}, repeat {first['repeat']}"
    request = f", request {first['request']}" if "request" in bad else ""
    return Finding(REFUTED, condition, numbers=f"{numbers}; {where}{request}: {first['reason']}", proof=True)


def _share(table: pd.DataFrame) -> str:
    return f"{int(table['ok'].sum()):,} of {len(table):,}"


def _sizes(sizes: list[int]) -> str:
    """1024 + 1024 + 512, or 12 x 128 where there are many."""
    if len(sizes) <= 4:
        return " + ".join(str(size) for size in sizes)
    same = len(set(sizes[:-1])) == 1
    return f"{len(sizes) - 1} x {sizes[0]} + {sizes[-1]}" if same else f"{min(sizes)} to {max(sizes)} each"
