"""Rates that somebody reported against what a GPU's memory bandwidth allows: computed from sizes, not measured.

Each step reads all weights once, however many requests are in it, and the KV cache of each of them. Nothing decodes
faster than these bytes come from memory; by how much an engine is slower, only a measurement says.
"""

from __future__ import annotations

from latency_lab import gpus, shapes
from latency_lab.claim_rules import Bound
from latency_lab.panels import seconds, three
from latency_lab.proving import REFUTED, SUPPORTED, Finding, Measured


def step_s(rule: Bound) -> float:
    """The least time of a decode step of the rule's requests, in which each of them gets one token."""
    shape = shapes.shape(rule.config)
    cache = rule.streams * rule.context_tokens * shape.kv_bytes("16-bit")
    return (shape.step_bytes("bf16") + cache) / gpus.find(rule.gpu).bandwidth


def findings(rule: Bound) -> list[Finding]:
    """A finding for each rate reported. There is no noise in a bound, so its interval is a point."""
    least_s, gpu = step_s(rule), gpus.find(rule.gpu)
    at_most_per_s = rule.streams / least_s
    asked = f"{'at most' if rule.at_most else 'at least'} {rule.threshold:.0%}"
    out = []
    for rate in rule.reported_tokens_per_s:
        share = rate / at_most_per_s
        holds = share <= rule.threshold if rule.at_most else share >= rule.threshold
        condition = f"{rate:g} tokens/s, {rule.streams} at a time"
        numbers = (
            f"{rate:g} tokens/s were reported with {rule.streams} request{'s' * (rule.streams > 1)} running; reading "
            f"the {three(least_s * gpu.bandwidth / 1e9)} GB of a step at {gpu.bandwidth / 1e9:,.0f} GB/s takes "
            f"{seconds(least_s)}, so {gpu.name} gives {three(at_most_per_s)} tokens/s at most, {1 / least_s:.0f} to "
            f"each request: this is {share:.0%} of the bound, asked for {asked} (computed, not measured)"
        )
        effect = f"{share:.0%} of the bandwidth bound"
        measured = Measured("share of the bound", share, share, share, rule.threshold, rule.at_most)
        names = {"metric": condition, "workload": "", "settings": ""}
        verdict = SUPPORTED if holds else REFUTED
        out.append(Finding(verdict, condition, names, numbers=numbers, effect=effect, measured=measured))
    return out
