"""What a study's file may hold: one pydantic model for each of its mappings, with units in the names.

The models check one value at a time and say what is allowed; study.py checks what depends on several of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError, model_validator

from latency_lab.claim_rules import Claims
from latency_lab.study_file import Problem, StudyFile, allowed, show
from latency_lab.study_values import (
    Count,
    CountFromZero,
    Environment,
    Flag,
    Free,
    FromZero,
    Name,
    Positive,
    Priority,
    Rate,
    Sigma,
    Slo,
    Strict,
    Text,
    Unknown,
    listed,
    mapping,
    named_mapping,
    wrong,
    wrong_at,
)

# --- where the weights come from ----------------------------------------------------------------------------


class SmolLM2(Strict):
    """SmolLM2-135M-Instruct out of its Python package: real weights that a CPU can serve."""

    source: Literal["smollm2"] = "smollm2"


class Hub(Strict):
    """A model on the Hugging Face hub; `revision` is a branch, tag or commit."""

    source: Literal["hub"] = "hub"
    id: Text
    revision: Text | None = None


class Folder(Strict):
    """A model's folder on this machine."""

    source: Literal["folder"] = "folder"
    path: Text


class Config(Strict):
    """A published config.json (the name of one in this package, or a folder) with random weights."""

    source: Literal["config"] = "config"
    config: Text


ModelSource = SmolLM2 | Hub | Folder | Config

# --- when requests arrive -----------------------------------------------------------------------------------


class Closed(Strict):
    """`concurrency` clients, each of which sends its next request when its last has been answered."""

    kind: Literal["closed"]
    concurrency: Annotated[tuple[Count, ...], BeforeValidator(listed)]
    requests_each: Count | None = None
    seconds: Positive | None = None
    start_s: FromZero = 0.0

    @model_validator(mode="after")
    def _ends(self) -> Closed:
        if (self.requests_each is None) == (self.seconds is None):
            raise wrong("how long it lasts is not clear; allowed: either requests_each or seconds")
        return self


class Open(Strict):
    """Requests that arrive whether or not earlier ones have been answered."""

    kind: Literal["constant", "poisson"]
    rate: Annotated[tuple[Rate, ...], BeforeValidator(listed)]
    requests: Count | None = None
    seconds: Positive | None = None
    start_s: FromZero = 0.0

    @model_validator(mode="after")
    def _ends(self) -> Open:
        if (self.requests is None) == (self.seconds is None):
            raise wrong("how long it lasts is not clear; allowed: either requests or seconds")
        if self.requests is None and any(map(math.isinf, self.rate)):
            raise wrong("an infinite rate for some seconds is infinitely many; allowed: requests beside rate: inf")
        return self


class Gamma(Open):
    """Arrivals with gamma-distributed gaps; `burstiness` is their shape (1 is Poisson, less is burstier)."""

    kind: Literal["gamma"]  # type: ignore[assignment]
    burstiness: Annotated[tuple[Positive, ...], BeforeValidator(listed)]


class Burst(Strict):
    """All requests at once."""

    kind: Literal["burst"]
    requests: Annotated[tuple[Count, ...], BeforeValidator(listed)]
    start_s: FromZero = 0.0


class Replay(Strict):
    """Arrivals of a trace, and its lengths where the workload gives none.

    file : from the study's folder
    layout : what traffic.py says; needed where the file's columns do not tell
    time_scale : by how much the gaps are stretched; 0.5 doubles the load
    requests, seconds : where to cut: so many requests, and those before so many seconds (of the run, not of the trace)
    """

    kind: Literal["replay"]
    file: Text
    layout: Literal["azure", "burstgpt", "mooncake"] | None = None
    time_scale: Annotated[tuple[Positive, ...], BeforeValidator(listed)] = (1.0,)
    requests: Count | None = None
    seconds: Positive | None = None
    start_s: FromZero = 0.0


# --- what a request asks ------------------------------------------------------------------------------------


class LogNormal(Strict):
    """Lengths whose logarithm is normal with `sigma`, cut to `min` and `max`; all but sigma in tokens."""

    median: Positive
    sigma: Sigma
    min: Count = 1
    max: Count

    @model_validator(mode="after")
    def _ordered(self) -> LogNormal:
        if not self.min <= self.median <= self.max:
            raise wrong(f"the median {self.median:g} is outside; allowed: from min {self.min} to max {self.max}")
        return self


class Lengths(Strict):
    """A length in tokens: exact, or drawn from a distribution."""

    tokens: Count | None = None
    uniform: tuple[Count, Count] | None = None
    lognormal: LogNormal | None = None

    @model_validator(mode="after")
    def _one(self) -> Lengths:
        kinds = [name for name in type(self).model_fields if name in ("file", "text", "tokens", "uniform", "lognormal")]
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise wrong(f"{' and '.join(given) or 'none of them'} given; allowed: exactly one of {', '.join(kinds)}")
        if self.uniform and self.uniform[0] > self.uniform[1]:
            raise wrong(f"uniform {list(self.uniform)} runs downwards; allowed: [least, most]")
        return self

    def bounds(self) -> tuple[int, int]:
        """Least and most tokens; (0, 0) for text and files, whose tokens are not known here."""
        if self.lognormal:
            return self.lognormal.min, self.lognormal.max
        return self.uniform or (self.tokens or 0, self.tokens or 0)

    def mean(self) -> float:
        """Tokens on average, roughly: the cuts of a lognormal are left out."""
        if self.lognormal:
            low, high = self.bounds()
            return min(max(self.lognormal.median * math.exp(self.lognormal.sigma**2 / 2), low), high)
        return sum(self.bounds()) / 2


class Prompt(Lengths):
    """A prompt: a text, one of a file's texts, or random tokens of some length.

    file : prompts, asked in the file's order; from the study's folder
    layout : what prompts.py says; needed where the file's columns do not tell
    chat : wrap the text in the model's chat template
    distinct : put a number that no other request has before the text; a file's texts are asked as they are
    shared_prefix_tokens : how many first tokens all requests of the class share, in all cells
    """

    text: Text | None = None
    file: Text | None = None
    layout: Literal["sharegpt", "jsonl"] | None = None
    chat: Flag = False
    distinct: Flag = True
    shared_prefix_tokens: CountFromZero = 0

    @model_validator(mode="after")
    def _fits(self) -> Prompt:
        if self.layout is not None and self.file is None:
            raise wrong(f"layout {self.layout} is for prompts of a file; allowed: file beside it")
        if self.file is not None and "distinct" in self.model_fields_set:
            raise wrong("distinct is for one text, and a file has many; allowed: file without it")
        if self.text is None and self.file is None and self.chat:
            raise wrong("chat: true is for text prompts; allowed: text beside it")
        if self.text is None and not self.distinct:
            raise wrong("distinct: false is for text prompts; allowed: shared_prefix_tokens for random ones")
        if self.shared_prefix_tokens and self.shared_prefix_tokens >= self.bounds()[0]:
            raise wrong(
                f"shared_prefix_tokens {self.shared_prefix_tokens} leaves nothing of its own to a prompt of "
                f"{self.bounds()[0] or 'some text'}; allowed: fewer tokens than the shortest random prompt"
            )
        return self


# --- workloads and settings ---------------------------------------------------------------------------------

T = TypeVar("T", bound=Strict)


def _one_of(key: str, kinds: dict[str, type[T]]) -> Callable[[Any], T]:
    """A validator that lets the value of `key` choose the model of a mapping."""

    def choose(value: Any) -> T:
        if isinstance(value, Strict) and type(value) in kinds.values():
            return value  # type: ignore[return-value]
        kind = mapping(value).get(key)
        if not isinstance(kind, str) or kind not in kinds:
            given = f"{show(kind)} is not known" if key in value else f"{key} is missing"
            raise wrong_at(key, f"{given}{allowed(list(kinds), kind)}")
        return kinds[kind].model_validate(value)

    return choose


LOADS = {"closed": Closed, "constant": Open, "poisson": Open, "gamma": Gamma, "burst": Burst, "replay": Replay}
MODELS = {"smollm2": SmolLM2, "hub": Hub, "folder": Folder, "config": Config}
LoadSpec = Closed | Open | Gamma | Burst | Replay
ModelField = Annotated[ModelSource, PlainValidator(_one_of("source", MODELS))]


class Traffic(Strict):
    """One class of requests. `ignore_eos`: run to the output's length, which is the default.

    Where they are left out, a trace gives the prompt's length, and the prompt's file or a trace the output's.

    via : through which door requests come: the engine's in this process, or that of its OpenAI-compatible server
    api : which of the server's; the chat API makes tokens of the text itself, completions are asked with token ids
    stream : false: the server gives each answer as a whole
    detokenize : false: the engine gives token ids alone; the server always makes text of them
    """

    load: Annotated[LoadSpec, PlainValidator(_one_of("kind", LOADS))]
    prompt: Prompt | None = None
    output: Lengths | None = None
    ignore_eos: Flag = True
    priority: Priority | None = None
    via: Annotated[tuple[Literal["engine", "openai"], ...], BeforeValidator(listed)] = ("engine",)
    api: Annotated[tuple[Literal["chat", "completions"], ...], BeforeValidator(listed)] | None = None
    stream: Annotated[tuple[Flag, ...], BeforeValidator(listed)] | None = None
    detokenize: Annotated[tuple[Flag, ...], BeforeValidator(listed)] | None = None

    @model_validator(mode="after")
    def _fits_door(self) -> Traffic:
        for key in ("api", "stream"):
            if getattr(self, key) is not None and "openai" not in self.via:
                raise wrong_at(key, f"{key} is for the OpenAI-compatible server; allowed: via: openai beside it")
        if self.detokenize is not None and "engine" not in self.via:
            raise wrong_at("detokenize", "detokenize is for the engine; allowed: via: engine beside it")
        if "chat" in (self.api or ()) and not (self.prompt and self.prompt.chat):
            raise wrong_at(
                "api", "chat is for texts in a chat template; allowed: chat: true in the prompt, completions"
            )
        return self

    @model_validator(mode="after")
    def _has_lengths(self) -> Traffic:
        replayed = isinstance(self.load, Replay)
        if self.prompt is None and not replayed:
            raise wrong("prompt is missing; allowed: `prompt:` with a value, or a load of kind replay")
        if self.output is None and not replayed and not (self.prompt and self.prompt.file):
            raise wrong("output is missing; allowed: `output:` with a value, a load of kind replay, or a prompt's file")
        return self


class PlainWorkload(Traffic):
    """A workload of one class.

    settings : globs of labels of the settings to run it on (default: all)
    keep_logprobs : keep the gap between the two best log probabilities at each token; takes the engine a little time
    """

    slo: Slo | None = None
    settings: tuple[Text, ...] | None = None
    repeats: Count | None = None
    timeout_s: Positive | None = None
    keep_logprobs: Flag = False

    @model_validator(mode="after")
    def _keeps(self) -> PlainWorkload:
        _logprobs_are_the_engines(self.keep_logprobs, self)
        return self


class MixedWorkload(Strict):
    """Several classes of requests at the same time."""

    classes: Annotated[dict[str, Traffic], BeforeValidator(named_mapping)]
    slo: Slo | None = None
    settings: tuple[Text, ...] | None = None
    repeats: Count | None = None
    timeout_s: Positive | None = None
    keep_logprobs: Flag = False

    @model_validator(mode="after")
    def _one_door(self) -> MixedWorkload:
        for name, traffic in self.classes.items():
            if traffic.via != next(iter(self.classes.values())).via:
                raise wrong(f"class {name} has a `via` of its own; allowed: the same for all classes of a mix")
            _logprobs_are_the_engines(self.keep_logprobs, traffic)
        return self


def _logprobs_are_the_engines(kept: bool, traffic: Traffic) -> None:
    if kept and "openai" in traffic.via:
        raise wrong_at("keep_logprobs", "true is for what comes from the engine; allowed: via: engine, or false")


def _workload(value: Any) -> PlainWorkload | MixedWorkload:
    kind = MixedWorkload if "classes" in mapping(value) else PlainWorkload
    return kind.model_validate(value)


class NamedSetting(Strict):
    """Engine arguments over the base ones. `expect: invalid` makes vLLM's own refusal the result."""

    engine: Free = {}
    model: ModelField | None = None
    expect: Literal["valid", "invalid"] = "valid"


class Settings(Strict):
    """Engine settings: the product of the axes, then the named ones."""

    axes: Annotated[dict[str, Annotated[list[Any], BeforeValidator(listed)]], BeforeValidator(named_mapping)] = {}
    named: Annotated[dict[str, NamedSetting], BeforeValidator(named_mapping)] = {}


class Speed(Strict):
    """What the study's estimated time is based on; unless given, SmolLM2-135M on two CPU cores.

    start_s : from asking for an engine until it is ready
    stream_tokens_per_s : output of one request alone
    peak_tokens_per_s : output of all requests together, however many
    prefill_tokens_per_s : prompt tokens, while no output comes
    """

    start_s: Positive = 45.0
    stream_tokens_per_s: Positive = 25.0
    peak_tokens_per_s: Positive = 120.0
    prefill_tokens_per_s: Positive = 1000.0


class StudyFields(Strict):
    """The whole file.

    trace : record what each scheduler step held
    engine_reuse : hot: one engine serves settings that differ in max_num_batched_tokens and max_num_seqs alone
    """

    study: Name | None = None
    question: Text
    model: ModelField
    engine: Free = {}
    env: Environment = {}
    settings: Settings = Settings()
    workloads: Annotated[
        dict[str, Annotated[PlainWorkload | MixedWorkload, PlainValidator(_workload)]],
        BeforeValidator(named_mapping),
    ] = Field(min_length=1)
    repeats: Count = 3
    warmup: CountFromZero = 4
    seed: CountFromZero = 0
    order: Literal["shuffled", "listed"] = "shuffled"
    timeout_s: Positive = 300.0
    start_timeout_s: Positive = 900.0
    keep_token_ids: Flag = False
    trace: Flag = True
    engine_reuse: Literal["cold", "hot"] = "cold"
    speed: Speed = Speed()
    claims: Claims = {}


def parse(file: StudyFile) -> tuple[StudyFields | None, list[Problem]]:
    """The file's values as models, or None and all that is wrong with them."""
    try:
        return StudyFields.model_validate(file.values), []
    except ValidationError as error:
        return None, [_problem(file, details) for details in error.errors()]


def _problem(file: StudyFile, error: Any) -> Problem:
    """One of pydantic's errors as a sentence that names the value and what is allowed."""
    value, loc, kind = error["input"], error["loc"], error["type"]
    if isinstance(value, Unknown):
        return file.problem(loc, f"unknown key (value {show(value.value)}){allowed(value.known, loc[-1])}")
    if kind == "study":
        text = error["msg"]
    elif kind == "missing" and isinstance(loc[-1], int):
        text = f"{show(value)} is too short; allowed: [least, most]"
    elif kind == "missing":
        text = f"{loc[-1]} is missing; allowed: `{loc[-1]}:` with a value"
    elif kind == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        text = f"{show(value)} is not known{allowed(choices, value)}"
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        text = f"{show(value)} is not a mapping; allowed: `name: value` lines, or {{name: value}}"
    elif kind in ("list_type", "tuple_type", "too_long"):
        text = f"{show(value)} is not a list of the right length; allowed: a list, [a, b]"
    else:
        text = f"{show(value)}: {error['msg']}; allowed: see the study files that come with this one"
    return file.problem(loc, text)
