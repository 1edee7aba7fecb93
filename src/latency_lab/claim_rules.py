"""How a study decides on the thread's claims: the `claims:` of its YAML, fixed before the run.

    claims:
      chunked-itl:
        note: streams of 96 tokens                    # anything a reader of the verdict should know
        rules:
          - {metric: itl_p99_s, workload: streams, of_class: chat,
             compare: [[budget=512, chunking-off]], ratio_at_most: 0.5, level: 0.95}
      no-loss:
        rules:
          - {proof: prompts-whole}
          - {proof: chunks-alone, workload: four-chunks c=1, setting: budget=1024, chunks: 4}
      target:
        rules:
          - {tokens_within_s: 1, share: 0.95, workload: [answer c=20], setting: [fp8], at_least: 64}
      stuck-log:
        rules:
          - {reported_tokens_per_s: 19.4, gpu: L4, config: qwen3-4b-instruct-2507, streams: 1, share_at_most: 0.1}

A rule is met where the whole interval of the effect (the first of the pair over, or minus, the second) is on its side
of the threshold, broken where the whole interval is on the other, and undecided in between. Each combination of the
metrics, workloads and pairs that a rule lists is a condition of its own, judged by itself. A proof is met where it
holds for every request, step or cell that it looks at. A target is met where the whole interval of the longest output
that arrives in time is on or above `at_least` tokens. A bound needs no measurement: it compares rates that somebody
reported with what a GPU's memory bandwidth allows, and has no interval. claims.py judges.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from latency_lab import gpus, models
from latency_lab.study_file import allowed, show
from latency_lab.study_values import (
    Count,
    CountFromZero,
    FromZero,
    Level,
    Positive,
    Real,
    Strict,
    Text,
    listed,
    mapping,
    wrong,
    wrong_at,
)
from latency_lab.thread_claims import BY_ID

RATE_METRICS = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
LATENCY_METRIC = re.compile(r"(ttft|tpot|itl|e2e|queue)_(mean|p50|p90|p95|p99)_s")
THRESHOLDS = ("ratio_at_most", "ratio_at_least", "difference_at_most", "difference_at_least")
PROOFS = ("prompts-whole", "chunks-alone", "within-limits", "served-in-order", "same-tokens")
"""prompts-whole: every prompt token is computed, once; chunks-alone: a request that shares no step takes as many chunks
as its prompt needs at its budget (or `chunks`); within-limits: no step exceeds budget or max_num_seqs; served-in-order:
first scheduled in the order of the policy; same-tokens: equal greedy outputs on each pair of settings."""


def _metric(value: Any) -> str:
    if isinstance(value, str) and (value in RATE_METRICS or LATENCY_METRIC.fullmatch(value)):
        return value
    raise wrong(
        f"{show(value)} is not a metric; allowed: METRIC_STATISTIC_s, METRIC one of ttft, tpot, itl, e2e, queue, "
        f"STATISTIC one of mean, p50, p90, p95, p99; or {', '.join(RATE_METRICS)}"
    )


def _pairs(value: Any) -> Any:
    """One pair as a list of one."""
    single = isinstance(value, list) and len(value) == 2 and not any(isinstance(item, list) for item in value)
    pairs = [value] if single else value
    if not isinstance(pairs, list) or not pairs or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise wrong(f"{show(value)} is not pairs of settings; allowed: [[a, b], ...] with a compared with b")
    return pairs


Labels = Annotated[tuple[Text, ...], BeforeValidator(listed)]
Pairs = Annotated[tuple[tuple[Text, Text], ...], BeforeValidator(_pairs)]


class Comparison(Strict):
    """A rule on an effect: the metric on the first setting of each pair against that on the second.

    of_class : class of a mixed workload whose requests count
    level : confidence of the interval
    """

    metric: Annotated[tuple[Annotated[str, PlainValidator(_metric)], ...], BeforeValidator(listed)]
    workload: Labels
    compare: Pairs
    of_class: Text | None = None
    ratio_at_most: Positive | None = None
    ratio_at_least: Positive | None = None
    difference_at_most: Real | None = None
    difference_at_least: Real | None = None
    level: Level = 0.95

    @model_validator(mode="after")
    def _one_threshold(self) -> Comparison:
        given = [name for name in THRESHOLDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise wrong(
                f"{' and '.join(given) or 'no threshold'} given; allowed: exactly one of {', '.join(THRESHOLDS)}"
            )
        return self

    @property
    def threshold(self) -> float:
        return float(next(getattr(self, name) for name in THRESHOLDS if getattr(self, name) is not None))

    @property
    def at_most(self) -> bool:
        return self.ratio_at_most is not None or self.difference_at_most is not None

    @property
    def is_ratio(self) -> bool:
        return self.ratio_at_most is not None or self.ratio_at_least is not None


class Proof(Strict):
    """A rule on what has to hold without exception, on the workloads and settings given (default: all).

    chunks : chunks-alone: how many chunks it must be
    near_tie_nats : same-tokens: where two outputs part and the best two tokens are at most this far apart in log
        probability, rounding decided
    """

    proof: Literal["prompts-whole", "chunks-alone", "within-limits", "served-in-order", "same-tokens"]
    workload: Labels = ()
    setting: Labels = ()
    compare: Pairs = ()
    of_class: Text | None = None
    chunks: Count | None = None
    near_tie_nats: FromZero = 0.01

    @model_validator(mode="after")
    def _pairs_where_needed(self) -> Proof:
        if (self.proof == "same-tokens") != bool(self.compare):
            raise wrong(
                f"{self.proof} {'with' if self.compare else 'without'} compare; allowed: same-tokens with compare"
            )
        if self.chunks and self.proof != "chunks-alone":
            raise wrong(f"{self.proof} with chunks; allowed: chunks-alone with chunks")
        return self


class Target(Strict):
    """A rule on how long an output may be to arrive in time, for each of the workloads on each of the settings.

    The longest such output has as many tokens as a `share` of the requests had received `tokens_within_s` after their
    arrival; it is at most the output length that the workload asks for.

    at_least : tokens that have to arrive in time
    level : confidence of the interval
    """

    tokens_within_s: Positive
    at_least: Count
    workload: Annotated[Labels, Field(min_length=1)]
    setting: Annotated[Labels, Field(min_length=1)]
    of_class: Text | None = None
    share: Level = 0.95
    level: Level = 0.95
    compare: ClassVar[tuple[tuple[str, str], ...]] = ()


def _gpu(value: Any) -> str:
    try:
        return gpus.find(value).name
    except (gpus.GpuError, AttributeError):
        raise wrong(f"{show(value)} is not a known GPU{allowed([gpu.name for gpu in gpus.GPUS], value)}") from None


def _config(value: Any) -> str:
    if value in (known := models.shipped_configs()):
        return str(value)
    raise wrong(f"{show(value)} is not a config that comes with this package{allowed(known, value)}")


class Bound(Strict):
    """A rule on decode rates that were reported elsewhere, as shares of what the GPU's memory bandwidth allows.

    config : one of the configs that come with this package, with 16-bit weights
    streams : requests that were decoded together
    context_tokens : tokens of each in the KV cache, on average
    """

    reported_tokens_per_s: Annotated[tuple[Positive, ...], BeforeValidator(listed)]
    gpu: Annotated[str, PlainValidator(_gpu)]
    config: Annotated[str, PlainValidator(_config)]
    streams: Count = 1
    context_tokens: CountFromZero = 0
    share_at_most: Positive | None = None
    share_at_least: Positive | None = None
    workload: ClassVar[tuple[str, ...]] = ()
    compare: ClassVar[tuple[tuple[str, str], ...]] = ()

    @model_validator(mode="after")
    def _one_threshold(self) -> Bound:
        if (self.share_at_most is None) == (self.share_at_least is None):
            raise wrong("not one threshold given; allowed: either share_at_most or share_at_least")
        return self

    @property
    def threshold(self) -> float:
        return float(next(share for share in (self.share_at_most, self.share_at_least) if share is not None))

    @property
    def at_most(self) -> bool:
        return self.share_at_most is not None


Rule = Comparison | Proof | Target | Bound
RULES: dict[str, type[Comparison | Proof | Target | Bound]] = {
    "metric": Comparison,
    "proof": Proof,
    "tokens_within_s": Target,
    "reported_tokens_per_s": Bound,
}
"""The kinds of rules by the key that only they have."""


def _rule(value: Any) -> Rule:
    if isinstance(value, Rule):
        return value
    kinds = [kind for key, kind in RULES.items() if key in mapping(value)]
    if len(kinds) != 1:
        raise wrong(f"{'none' if not kinds else 'several'} of {', '.join(RULES)} given; allowed: exactly one of them")
    return kinds[0].model_validate(value)


class ClaimRules(Strict):
    """The rules that decide on one claim in one study. `note`: what a reader of the verdict should know."""

    rules: Annotated[tuple[Annotated[Rule, PlainValidator(_rule)], ...], BeforeValidator(listed)]
    note: Text | None = None


def _known_claims(value: Any) -> Any:
    for key in mapping(value):
        if key not in BY_ID:
            raise wrong_at(key, f"{key!r} is not one of the thread's claims{allowed(list(BY_ID), key)}")
    return value


Claims = Annotated[dict[str, ClaimRules], BeforeValidator(_known_claims)]
