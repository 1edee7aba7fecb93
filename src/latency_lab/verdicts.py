"""Verdicts as a reader sees them: one table over all claims, then a passage a claim with the numbers that decided."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from latency_lab import ROOT, claim_figures, records, style, tables
from latency_lab.claims import NOT_TESTED, VERDICTS, Verdict
from latency_lab.proving import DEPENDS, REFUTED, SUPPORTED, UNDECIDED, Finding
from latency_lab.tables import Html

MARKS = dict(zip(VERDICTS, ("✔", "✘", "◐", "?", "–"), strict=True))
"""Beside the word, never in its place: a verdict must not hang on a sign or a colour."""


def folders(given: str | Iterable[str]) -> list[Path]:
    """Folders of records that a notebook's parameter names: studies, or folders that hold them; from the project's."""
    found: list[Path] = []
    for name in [given] if isinstance(given, str) else given:
        path = ROOT / name
        inside = records.studies(path)
        if not inside and not path.is_dir():
            raise FileNotFoundError(f"{path}: no such folder of records")
        found += inside or [path]
    return list(dict.fromkeys(found))


def table(verdicts: Sequence[Verdict]) -> Html:
    """One row for each claim, study and machine."""
    names = ["claim", "verdict", "effect", "study", "machine, weights", "what it depends on, or lacks"]
    rows = [
        (
            v.claim.id,
            marked(v.verdict),
            _effect(v),
            _study(v),
            f"{v.machine}, {v.weights or 'computed'}" if v.study else "",
            _first(v.on),
        )
        for v in verdicts
    ]
    return Html(tables.table(names, [[(text or "-", None) for text in row] for row in rows]))


def summary(verdicts: Sequence[Verdict]) -> Html:
    """How many claims have which verdict, in a sentence. A claim with several verdicts counts by each."""
    counts = {verdict: sum(v.verdict == verdict for v in verdicts) for verdict in VERDICTS}
    claims = len({v.claim.id for v in verdicts})
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return Html(f"<p>{claims} claims, {len(verdicts)} verdicts: {said}.</p>")


def passages(verdicts: Sequence[Verdict], figures: Path) -> Html:
    """For each claim: the verdict of each study and machine with the numbers that decided it, why it is so, and a
    figure of all its conditions, which goes into the folder `figures` as well.
    """
    out = []
    for claim, group in groupby(verdicts, key=lambda v: v.claim):
        own = list(group)
        out.append(f'<h3 id="claim-{claim.id}">{claim.id}: {_text(claim.sentence)}</h3>')
        out += [_passage(verdict) for verdict in own]
        out.append(f"<p>{_text(' '.join(filter(None, [_disagreement(own), claim.why])))}</p>")
        drawn = claim_figures.effects(own)
        if drawn.figure is not None:
            out.append(style.show(drawn, f"claim-{claim.id}", figures).data)
        out.append(f'<p class="note">Experiment: {_text(claim.experiment)}. Metric: {_text(claim.metric)}.</p>')
    return Html("\n".join(out))


def _passage(verdict: Verdict) -> str:
    """The verdict in a paragraph; all of its conditions folded below where there are more than it tells."""
    head = f"<strong>{MARKS[verdict.verdict]} {verdict.verdict.capitalize()}</strong>"
    if verdict.verdict == NOT_TESTED:
        return f"<p>{head}: {_text(verdict.on)}.</p>"
    where = f"{verdict.machine}, study {_study(verdict)}, {verdict.model} with {verdict.weights} weights"
    if verdict.computed:
        where = f"{verdict.machine} for {verdict.model}: computed, not measured"
    text = f"<p>{head} on {_text(where)}."
    told = _deciding(verdict)
    for finding in told:
        text += f" {_numbers(finding)}."
    if verdict.verdict == DEPENDS:
        text += f" Depends on {_text(verdict.on)}."
    elif verdict.verdict == UNDECIDED:
        open_ones = sum(finding.verdict == UNDECIDED for finding in verdict.findings)
        text += f" Undecided in {open_ones} of {len(verdict.findings)} conditions: {_text(_first(verdict.on))}."
    if verdict.note:
        text += f" Note: {_text(verdict.note.rstrip('.'))}."
    if len(told) == len(verdict.findings):
        return f"{text}</p>"
    items = "".join(f"<li>{_numbers(finding)}.</li>" for finding in verdict.findings)
    return f"{text}</p><details><summary>All {len(verdict.findings)} conditions</summary><ul>{items}</ul></details>"


def _deciding(verdict: Verdict) -> list[Finding]:
    """The first condition that has the verdict and numbers; where it depends, the first on either side."""
    wanted = (SUPPORTED, REFUTED, DEPENDS) if verdict.verdict == DEPENDS else (verdict.verdict,)
    firsts = [next((one for one in verdict.findings if one.verdict == each and one.numbers), None) for each in wanted]
    return [finding for finding in firsts if finding is not None]


def _disagreement(verdicts: Sequence[Verdict]) -> str:
    """Which machines say what, where those that were measured and decided do not say the same."""
    decided = [one for one in verdicts if one.verdict in (SUPPORTED, REFUTED, DEPENDS) and not one.computed]
    if len({one.verdict for one in decided}) < 2:
        return ""
    said = "; ".join(f"{one.verdict} on {one.machine} ({one.study})" for one in decided)
    return f"The studies differ: {said}. They are not averaged: what limits a step is not the same on every machine."


def _numbers(finding: Finding) -> str:
    return f"{MARKS[finding.verdict]} {_text(finding.numbers or f'{finding.condition}: {finding.on}')}"


def _effect(verdict: Verdict) -> str:
    """The effect of the first condition that has one, and how many more there are; proofs are counted."""
    effects = [finding.effect for finding in verdict.findings if finding.effect]
    proofs = [finding for finding in verdict.findings if finding.proof]
    said = []
    if proofs:
        held = sum(finding.verdict == "supported" for finding in proofs)
        said.append(f"{held} of {len(proofs)} proofs hold")
    if effects:
        said.append(effects[0] + (f" and {len(effects) - 1} more" if len(effects) > 1 else ""))
    return "; ".join(said)


def _study(verdict: Verdict) -> str:
    """A study that was measured here may have a reference of the same name."""
    where = {"runs": " (measured here)", "reference": " (reference)"}
    return verdict.study + where.get(verdict.source, "")


def _first(reasons: str) -> str:
    """The first of several reasons, and how many more the passage below the table has."""
    first, *more = reasons.split("; ")
    return f"{first} (and {len(more)} more)" if more else first


def marked(verdict: str) -> str:
    """A verdict with its mark."""
    return f"{MARKS[verdict]} {verdict}"


def _text(value: object) -> str:
    return html.escape(str(value))
