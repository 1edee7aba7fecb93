"""Verdicts on the thread's claims: each study's records, judged by the rules that its YAML fixed before the run.

A rule's condition is *supported* where the whole interval of its effect lies on its side of the threshold, *refuted*
where the whole interval lies on the other side, and *not enough data* in between, or where the study cannot give an
interval. A claim is supported (refuted) where all its conditions are; where they disagree it *depends*, and the
verdict says on what; where some are undecided and the others agree, there is *not enough data*. Proofs speak of every
request or step, so one counterexample refutes. A target is judged by the longest output that arrives in time. A bound
is computed, for the GPU that its rule names. Claims that no study has rules for are *not tested*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from latency_lab import ROOT, bounds, effects, panels, proving, records
from latency_lab.claim_rules import RATE_METRICS, Bound, ClaimRules, Comparison, Proof, Target
from latency_lab.proving import DEPENDS, REFUTED, SUPPORTED, UNDECIDED, Finding, Measured
from latency_lab.records import Records
from latency_lab.thread_claims import CLAIMS, Claim

NOT_TESTED = "not tested"
VERDICTS = (SUPPORTED, REFUTED, DEPENDS, UNDECIDED, NOT_TESTED)

STUDIES = ROOT / "notebooks" / "studies"


@dataclass(frozen=True)
class Verdict:
    """What one study on one machine says of one claim.

    on : what it depends on, or why there is no verdict
    source : name of the folder above the study's records: runs or reference
    computed : from a bound alone: nothing was measured on that machine, and no model ran
    """

    claim: Claim
    verdict: str
    on: str = ""
    study: str = ""
    source: str = ""
    machine: str = ""
    model: str = ""
    weights: str = ""
    note: str = ""
    findings: tuple[Finding, ...] = ()
    computed: bool = False


def judge(study: Records, rules: Mapping[str, ClaimRules], draws: int = 2000) -> list[Verdict]:
    """A verdict for each claim that the study has rules for, on each machine that it was measured or computed for."""
    verdicts: list[Verdict] = []
    if not rules:
        return verdicts
    source = study.path.parent.name
    for machine, cells in study.cells.groupby("device", sort=True, dropna=False):
        own = _measured(study, cells)
        said = {column: ", ".join(sorted(cells[column].dropna().unique())) for column in ("model", "weights", "study")}
        for claim, rule in _of_claims(rules):
            measured = [one for one in rule.rules if not isinstance(one, Bound)]
            if findings := [finding for one in measured for finding in _findings(one, own, draws)]:
                name = str(machine) if pd.notna(machine) else "unknown"
                verdicts.append(_verdict(claim, rule, findings, source=source, machine=name, **said))
    for claim, rule in _of_claims(rules):
        computed = [one for one in rule.rules if isinstance(one, Bound)]
        for gpu, model in dict.fromkeys((one.gpu, one.config) for one in computed):
            named = [one for one in computed if (one.gpu, one.config) == (gpu, model)]
            findings = [finding for one in named for finding in bounds.findings(one)]
            about = {"machine": gpu, "model": model, "study": study.path.name, "computed": True}
            verdicts.append(_verdict(claim, rule, findings, source=source, **about))
    return verdicts


def judge_all(folders: Iterable[Path]) -> list[Verdict]:
    """Verdicts of all studies in the order of the claims; a claim that none of them tests has one that says so."""
    found = [verdict for folder in folders for verdict in judge(records.load(folder), rules_of(folder))]
    out = []
    for claim in CLAIMS:
        own = [verdict for verdict in found if verdict.claim.id == claim.id]
        computed = {(one.machine, one.model): one for one in own if one.computed}  # the same in a study's every folder
        own = [one for one in own if not one.computed] + list(computed.values())
        out += own or [Verdict(claim, NOT_TESTED, f"no study here holds {claim.needs}")]
    return out


def rules_of(folder: Path) -> dict[str, ClaimRules]:
    """The rules of a study by its folder of records: of the YAML in it, else of the shipped study of that name.

    None where there is no such file: records of a study of one's own, kept without it. Raises study.StudyError for a
    faulty file.
    """
    from latency_lab.study import load_rules

    for path in (folder / "study.yaml", STUDIES / f"{folder.name}.yaml"):
        if path.exists():
            return load_rules(path)
    return {}


def combine(findings: Sequence[Finding]) -> tuple[str, str]:
    """One verdict from those of a claim's conditions, and what it depends on or lacks."""
    by_verdict = {verdict: [f for f in findings if f.verdict == verdict] for verdict in VERDICTS}
    supported, refuted, depends, undecided = (by_verdict[v] for v in (SUPPORTED, REFUTED, DEPENDS, UNDECIDED))
    if refuted and all(finding.proof for finding in findings):
        return REFUTED, ""
    if supported and refuted:
        return DEPENDS, _on(supported, refuted)
    if depends and not undecided:
        return DEPENDS, "; ".join(dict.fromkeys(finding.on for finding in depends))
    if undecided:
        reasons = dict.fromkeys(finding.on or finding.condition for finding in undecided)
        return UNDECIDED, "; ".join(reasons)
    return (SUPPORTED if supported else REFUTED), ""


def _verdict(claim: Claim, rule: ClaimRules, findings: Sequence[Finding], **about: Any) -> Verdict:
    """The verdict that the findings make; `about`: other fields of it."""
    verdict, on = combine(findings)
    return Verdict(claim, verdict, on, note=rule.note or "", findings=tuple(findings), **about)


def _of_claims(rules: Mapping[str, ClaimRules]) -> list[tuple[Claim, ClaimRules]]:
    """The rules with their claims, in the order of the claims."""
    return [(claim, rules[claim.id]) for claim in CLAIMS if claim.id in rules]


def metric_label(metric: str) -> str:
    """`itl_p99_s` as a reader calls it: p99 ITL."""
    if metric in RATE_METRICS:
        return metric.removesuffix("_per_s").replace("_", " ") + "/s"
    name, statistic, _ = metric.split("_")
    return f"{statistic} {'queue time' if name == 'queue' else name.upper()}"


def metric_value(metric: str, value: float) -> str:
    """A metric's value with its unit."""
    if metric in RATE_METRICS:
        return f"{panels.three(value)} {metric_label(metric)}"
    return panels.seconds(value)


def _measured(study: Records, cells: pd.DataFrame) -> Records:
    """The part of a study that was measured on one machine.

    Failed requests stay: to leave them out would make an overloaded setting look fast. Steps of a cell that broke off,
    or that were not all kept, prove nothing and are left out.
    """
    whole = cells[cells["status"].eq("done") & cells["steps_dropped"].fillna(0).eq(0)]
    own = study.part(cells)
    own.__dict__["steps"] = study.part(whole).steps
    return own


def _findings(rule: Any, study: Records, draws: int) -> list[Finding]:
    if isinstance(rule, Proof):
        return proving.findings(rule, study)
    if isinstance(rule, Target):
        return [
            _in_time(rule, workload, setting, study.requests, draws)
            for workload, setting in product(rule.workload, rule.setting)
        ]
    return [
        _compared(rule, metric, workload, pair, study.requests, draws)
        for metric, workload, pair in product(rule.metric, rule.workload, rule.compare)
    ]


def _compared(
    rule: Comparison, metric: str, workload: str, pair: tuple[str, str], requests: pd.DataFrame, draws: int
) -> Finding:
    """The verdict on one condition of a rule."""
    own = requests[requests["workload"] == workload]
    found = effects.effect(
        own, metric, pair, of_class=rule.of_class, ratio=rule.is_ratio, level=rule.level, draws=draws
    )
    names = {"metric": metric_label(metric), "workload": workload, "settings": f"{pair[0]} against {pair[1]}"}
    whose = f" of {rule.of_class}" if rule.of_class else ""
    condition = f"{names['metric']}{whose}, {workload}, {names['settings']}"
    if found.problem:
        return Finding(UNDECIDED, condition, names, on=f"{workload}, {found.problem}")
    threshold = rule.threshold
    inside, outside = (found.high, found.low) if rule.at_most else (found.low, found.high)
    holds, fails = (
        (inside <= threshold, outside > threshold) if rule.at_most else (inside >= threshold, outside < threshold)
    )
    verdict = SUPPORTED if holds else REFUTED if fails else UNDECIDED
    form = (
        (lambda x: f"{x:.3g}") if rule.is_ratio else (lambda x: ("-" if x < 0 else "") + metric_value(metric, abs(x)))
    )
    kind = "ratio" if rule.is_ratio else "difference"
    effect = f"{form(found.value)} [{form(found.low)}, {form(found.high)}]"
    asked = f"{'at most' if rule.at_most else 'at least'} {form(threshold)}"
    numbers = (
        f"{names['metric']}{whose} at {workload}: {metric_value(metric, found.of)} on {pair[0]}, "
        f"{metric_value(metric, found.against)} on {pair[1]}, {kind} {effect}, asked for {asked} ({rule.level:.0%})"
    )
    on = f"the interval of {condition} holds the threshold" if verdict == UNDECIDED else ""
    unit = "" if rule.is_ratio else f" ({metric_label(metric)})" if metric in RATE_METRICS else " (s)"
    measured = Measured(f"{kind}{unit}", found.value, found.low, found.high, threshold, rule.at_most)
    return Finding(verdict, condition, names, numbers=numbers, effect=f"{kind} {effect}", on=on, measured=measured)


def _in_time(rule: Target, workload: str, setting: str, requests: pd.DataFrame, draws: int) -> Finding:
    """The verdict on one workload and setting of a target."""
    own = requests[requests["workload"] == workload]
    found = effects.tokens_in_time(
        own, setting, rule.tokens_within_s, rule.share, of_class=rule.of_class, level=rule.level, draws=draws
    )
    names = {"metric": f"tokens within {rule.tokens_within_s:g} s", "workload": workload, "settings": setting}
    condition = f"{names['metric']}, {workload}, {setting}"
    if found.problem:
        return Finding(UNDECIDED, condition, names, on=f"{workload}, {found.problem}")
    verdict = SUPPORTED if found.low >= rule.at_least else REFUTED if found.high < rule.at_least else UNDECIDED
    interval = f"[{found.low:.0f}, {found.high:.0f}]"
    reached = f"{found.value:.0f} {interval}" if found.value < found.against else f"all {found.against:.0f} {interval}"
    numbers = (
        f"{workload} on {setting}: {rule.share:.0%} of the requests had {reached} of {found.against:.0f} tokens within "
        f"{rule.tokens_within_s:g} s, asked for at least {rule.at_least} ({rule.level:.0%})"
    )
    on = f"the interval of {condition} holds the threshold" if verdict == UNDECIDED else ""
    effect = f"{reached} tokens in {rule.tokens_within_s:g} s"
    measured = Measured(names["metric"], found.value, found.low, found.high, rule.at_least, at_most=False)
    return Finding(verdict, condition, names, numbers=numbers, effect=effect, on=on, measured=measured)


def _on(supported: Sequence[Finding], refuted: Sequence[Finding]) -> str:
    """What sets the supported conditions apart from the refuted ones: the first name whose values never mix."""
    for name in ("metric", "workload", "settings"):
        holds, fails = ([finding.names.get(name, "") for finding in side] for side in (supported, refuted))
        if not set(holds) & set(fails):
            return f"the {name}: holds for {_listed(holds)}, not for {_listed(fails)}"
    holds, fails = ([finding.condition for finding in side] for side in (supported, refuted))
    return f"the condition: holds for {_listed(holds)}; not for {_listed(fails)}"


def _listed(values: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(values))
