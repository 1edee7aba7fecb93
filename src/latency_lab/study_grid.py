"""The grid: from a study's fields, and what its files of traffic hold, to its engine settings and workload points.

Pure functions, no vLLM.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from latency_lab.files import digest
from latency_lab.prompts import Prompts
from latency_lab.study_file import Loc
from latency_lab.study_schema import (
    Burst,
    Closed,
    Gamma,
    Lengths,
    MixedWorkload,
    ModelSource,
    Open,
    PlainWorkload,
    Prompt,
    Replay,
    StudyFields,
    Traffic,
)
from latency_lab.traffic import Trace

SHORT = {"max_num_batched_tokens": "budget", "max_num_seqs": "seqs"}
"""How labels call these arguments."""


@dataclass(frozen=True, eq=False)
class Setting:
    """One configuration of the engine.

    args : engine arguments for vLLM; what is null in the study is left out, which gives vLLM's default
    asked : the same with the nulls, as the study gave them
    origin : where in the study's file each argument stands
    """

    label: str
    args: dict[str, Any]
    asked: dict[str, Any]
    expect: Literal["valid", "invalid"]
    model: ModelSource
    origin: dict[str, Loc] = field(repr=False)


@dataclass(frozen=True)
class Files:
    """What the files that a study's workloads name hold, by the name and layout that the study gives."""

    traces: dict[tuple[str, str | None], Trace] = field(default_factory=dict)
    prompts: dict[tuple[str, str | None], Prompts] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """When the requests of a class arrive; fields that its kind has no use for are None. Times in seconds."""

    kind: Literal["closed", "constant", "poisson", "gamma", "burst", "replay"]
    concurrency: int | None = None
    requests_each: int | None = None
    requests: int | None = None
    seconds: float | None = None
    rate_per_s: float | None = None
    burstiness: float | None = None
    start_s: float = 0.0


@dataclass(frozen=True)
class Door:
    """How requests reach the engine: in its process, or through its OpenAI-compatible server (`openai`).

    api : which of the server's; None for the engine
    stream : false where an answer is asked for as a whole
    detokenize : false where nobody asks for the text of an answer; the server always makes it
    """

    via: Literal["engine", "openai"] = "engine"
    api: Literal["chat", "completions"] | None = None
    stream: bool = True
    detokenize: bool = True


ENGINE = Door()

DOOR_KEYS = ("via", "api", "stream", "detokenize")
"""What a workload, and the label of a point, may say of its door."""


@dataclass(frozen=True)
class TrafficClass:
    """One class of a point's requests.

    prompt, output : None where `trace`, or the answers of `prompts`, give the lengths
    trace : what a replay sends, cut and stretched
    prompts : the texts of the prompt's file
    limit : tokens that prompt and output may have together where a file gives their lengths: the least max_model_len of
        the settings that the point runs on, so that all of them get the same requests
    """

    name: str
    load: Load
    prompt: Prompt | None
    output: Lengths | None
    ignore_eos: bool
    priority: int | None
    trace: Trace | None = None
    prompts: Prompts | None = None
    limit: int | None = None
    door: Door = ENGINE

    def definition(self) -> dict[str, Any]:
        """All of it as plain values, for hashing: of a file what it holds, wherever it lies."""
        known: dict[str, Any] = {
            "name": self.name,
            "load": asdict(self.load),
            "prompt": self.prompt and self.prompt.model_dump(mode="json", exclude={"file", "layout"}),
            "output": self.output and self.output.model_dump(mode="json"),
            "ignore_eos": self.ignore_eos,
            "priority": self.priority,
        }
        if self.limit is not None:
            known["limit"] = self.limit
        if self.trace is not None:
            known["trace"] = [self.trace.digest, self.trace.layout, self.trace.time_scale]
        if self.prompts is not None:
            known["prompts"] = [self.prompts.digest, self.prompts.layout]
        if self.door != ENGINE:
            known["door"] = asdict(self.door)
        return known

    def mean_tokens(self) -> tuple[float, float]:
        """Prompt and output tokens on average, roughly: a token of text is taken for four letters."""
        prompt, output = 0.0, self.output.mean() if self.output else None
        if self.prompts is not None:
            prompt, answer = self.prompts.mean_tokens()
            output = answer if output is None else output
        elif self.prompt is not None:
            prompt = self.prompt.mean() or len(self.prompt.text or "") / 4
        elif self.trace is not None:
            prompt = float(self.trace.prompt_tokens.mean())
        if output is None and self.trace is not None:
            output = float(self.trace.output_tokens.mean())
        return prompt, output or 0.0

    def cut_short(self) -> str | None:
        """How many requests of a replay are cut to `limit`; None where only the tokenizer of their texts can tell."""
        if self.trace is None or self.limit is None or (self.prompt is not None and not self.prompt.bounds()[1]):
            return None
        prompt = self.prompt.bounds()[1] if self.prompt else self.trace.prompt_tokens
        output = self.output.bounds()[1] if self.output else self.trace.output_tokens
        cut = int(np.count_nonzero(prompt + output > self.limit))
        drawn = any(lengths and lengths.tokens is None for lengths in (self.prompt, self.output))
        return f"{'up to ' * drawn}{cut:,} of {len(self.trace.at_s):,} requests cut to max_model_len {self.limit:,}"

    @property
    def note(self) -> str | None:
        """What a reader has to know of the files that the requests come from; None where they come from none."""
        notes = [file.note for file in (self.trace, self.prompts) if file is not None]
        requests = self.load.requests or (self.load.concurrency or 0) * (self.load.requests_each or 0)
        if self.prompts is not None and requests > len(self.prompts.texts):
            notes.append(f"{requests:,} requests ask some of them again")
        return "; ".join(notes) or None


@dataclass(frozen=True)
class Point:
    """One workload at one concurrency or rate. `load` is the kind of its class, or mix where it has several.

    `id` hashes all that shapes its requests; targets (`slo`), repeats and time limits may change without a
    new one.
    """

    label: str
    workload: str
    load: str
    classes: tuple[TrafficClass, ...]
    slo: dict[str, float] | None
    timeout_s: float
    repeats: int
    only_on: tuple[str, ...] | None
    keep_logprobs: bool = False

    @property
    def id(self) -> str:
        return digest({"label": self.label, "classes": [traffic.definition() for traffic in self.classes]})

    @property
    def via(self) -> str:
        """Which door its requests take, all classes of a mix the same."""
        return self.classes[0].door.via

    @property
    def concurrency(self) -> int | None:
        """Closed loop: requests in flight; burst: requests sent at once."""
        load = self.classes[0].load
        return None if self.load == "mix" else load.requests if load.kind == "burst" else load.concurrency

    @property
    def rate_per_s(self) -> float | None:
        return None if self.load == "mix" else self.classes[0].load.rate_per_s

    @property
    def burstiness(self) -> float | None:
        return None if self.load == "mix" else self.classes[0].load.burstiness

    @property
    def note(self) -> str | None:
        """What a reader has to know of the files that its requests come from; None where they come from none."""
        notes = [
            (f"{traffic.name}: " * (self.load == "mix")) + traffic.note for traffic in self.classes if traffic.note
        ]
        return "; ".join(notes) or None

    def runs_on(self, setting: Setting) -> bool:
        return _matches(self.only_on, setting)


def expand_settings(fields: StudyFields) -> list[Setting]:
    """Every engine setting: the product of the axes (the last one fastest), then the named ones."""
    settings = []
    base: dict[str, Loc] = {key: ("engine", key) for key in fields.engine}
    axes = fields.settings.axes
    if axes or not fields.settings.named:
        for places in itertools.product(*(range(len(values)) for values in axes.values())):
            chosen = {key: axes[key][i] for key, i in zip(axes, places, strict=True)}
            origin = base | {key: ("settings", "axes", key, i) for key, i in zip(axes, places, strict=True)}
            settings.append(_setting(label(chosen), fields.engine | chosen, "valid", fields.model, origin))
    for name, named in fields.settings.named.items():
        origin = base | {key: ("settings", "named", name, "engine", key) for key in named.engine}
        asked = fields.engine | named.engine
        settings.append(_setting(name, asked, named.expect, named.model or fields.model, origin))
    return settings


def label(chosen: Mapping[str, Any]) -> str:
    """The label of a combination of axis values: `budget=512 seqs=32`; `base` where there are no axes."""
    return " ".join(f"{SHORT.get(key, key)}={_word(value)}" for key, value in chosen.items()) or "base"


def conflicts(args: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Why vLLM would refuse a combination of engine arguments: the one to blame, and a sentence; none if
    valid.

    Only what the study itself gives is judged: vLLM's defaults depend on the model and the device.
    """
    budget, seqs = _whole(args, "max_num_batched_tokens"), _whole(args, "max_num_seqs")
    longest = _whole(args, "max_model_len")
    for key in ("max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size"):
        value = _whole(args, key)
        if value is not None and value < 1:
            yield key, f"{value} is too small; allowed: a whole number from 1 on"
    if longest is not None and longest < 1 and longest != -1:
        yield (
            "max_model_len",
            f"{longest} is too small; allowed: a whole number from 1 on, or -1 (as long as fits)",
        )
    if budget is not None and seqs is not None and 0 < budget < seqs:
        yield (
            "max_num_batched_tokens",
            f"{budget} is less than max_num_seqs {seqs}, and each running request needs a token; "
            f"allowed: a budget from {seqs} on, fewer max_num_seqs, or `expect: invalid`",
        )
    if args.get("enable_chunked_prefill") is False and budget and longest and 0 < budget < longest:
        yield (
            "enable_chunked_prefill",
            f"false with max_num_batched_tokens {budget} below max_model_len {longest}, and an uncut prompt has "
            f"to fit into one step; allowed: a budget from {longest} on, a lower max_model_len, or "
            "`expect: invalid`",
        )


def expand_points(fields: StudyFields, settings: Sequence[Setting], files: Files) -> list[Point]:
    """Every workload point, in the order of the file. `files` holds all that the workloads name."""
    points = []
    for name, workload in fields.workloads.items():
        limit = _limit(workload, settings)
        if isinstance(workload, MixedWorkload):
            mixed = [_traffic(key, traffic, files, limit)[0][1] for key, traffic in workload.classes.items()]
            shapes = [(name, "mix", tuple(mixed))]
        else:
            shapes = [
                (f"{name} {suffix}".strip(), traffic.load.kind, (traffic,))
                for suffix, traffic in _traffic(name, workload, files, limit)
            ]
        for text, kind, classes in shapes:
            points.append(
                Point(
                    label=text,
                    workload=name,
                    load=kind,
                    classes=classes,
                    slo=workload.slo,
                    timeout_s=workload.timeout_s or fields.timeout_s,
                    repeats=workload.repeats or fields.repeats,
                    only_on=workload.settings,
                    keep_logprobs=workload.keep_logprobs,
                )
            )
    return points


def needs_limit(traffic: Traffic) -> bool:
    """Whether a file gives the lengths of a class's prompts or outputs."""
    return traffic.prompt is None or traffic.prompt.file is not None or traffic.output is None


def loads(spec: Closed | Open | Gamma | Burst) -> list[tuple[str, Load]]:
    """The loads that a specification with lists stands for, each with what it adds to the point's label."""
    if isinstance(spec, Closed):
        return [
            (f"c={n}", Load("closed", n, spec.requests_each, seconds=spec.seconds, start_s=spec.start_s))
            for n in spec.concurrency
        ]
    if isinstance(spec, Burst):
        many = len(spec.requests) > 1
        return [(f"n={n}" * many, Load("burst", requests=n, start_s=spec.start_s)) for n in spec.requests]
    found = {}
    for rate in spec.rate:
        for shape in spec.burstiness if isinstance(spec, Gamma) else (None,):
            if math.isinf(rate):
                found["rate=inf"] = Load("burst", requests=spec.requests, start_s=spec.start_s)
                continue
            suffix = f"rate={_word(rate)}/s" + (f" b={_word(shape)}" if shape is not None else "")
            found[suffix] = Load(
                spec.kind,
                requests=spec.requests,
                seconds=spec.seconds,
                rate_per_s=rate,
                burstiness=shape,
                start_s=spec.start_s,
            )
    return list(found.items())


def _setting(name: str, asked: dict[str, Any], expect: Any, model: ModelSource, origin: dict[str, Loc]) -> Setting:
    args = {key: value for key, value in asked.items() if value is not None}
    return Setting(name, args, asked, expect, model, origin)


def _traffic(name: str, traffic: Traffic, files: Files, limit: int | None) -> list[tuple[str, TrafficClass]]:
    """A class at each of its loads, with what the load adds to the point's label."""
    spec, prompt = traffic.load, traffic.prompt
    prompts = files.prompts[prompt.file, prompt.layout] if prompt is not None and prompt.file is not None else None
    shapes: list[tuple[str, Load, Trace | None]] = []
    if isinstance(spec, Replay):
        whole = files.traces[spec.file, spec.layout]
        for scale in spec.time_scale:
            cut = whole.cut(scale, spec.requests, spec.seconds)
            load = Load("replay", requests=len(cut.at_s), rate_per_s=cut.rate_per_s, start_s=spec.start_s)
            shapes.append((f"scale={_word(scale)}" * (len(spec.time_scale) > 1), load, cut))
    else:
        shapes = [(suffix, load, None) for suffix, load in loads(spec)]
    rest = (prompt, traffic.output, traffic.ignore_eos, traffic.priority)
    limit = limit if needs_limit(traffic) else None
    return [
        (f"{suffix} {which}".strip(), TrafficClass(name, load, *rest, trace, prompts, limit, door))
        for suffix, load, trace in shapes
        for which, door in doors(traffic)
    ]


def doors(traffic: Traffic) -> list[tuple[str, Door]]:
    """The doors that a class's keys (see DOOR_KEYS) stand for, each with what they add to the point's label.

    A label names what varies, as that of a setting does: `via=openai stream=off`.
    """
    chat = traffic.prompt is not None and traffic.prompt.chat
    apis = traffic.api or (("chat",) if chat else ("completions",))
    streams, texts = traffic.stream or (True,), traffic.detokenize or (True,)
    found: list[tuple[dict[str, Any], Door]] = []
    for via in traffic.via:
        named: dict[str, Any] = {"via": via} if len(traffic.via) > 1 else {}
        if via == "engine":
            for text in texts:
                found.append((named | ({"detokenize": text} if len(texts) > 1 else {}), Door(detokenize=text)))
            continue
        for api, stream in itertools.product(apis, streams):
            varied: dict[str, Any] = {"api": api} if len(apis) > 1 else {}
            varied |= {"stream": stream} if len(streams) > 1 else {}
            found.append((named | varied, Door(via, api, stream)))
    return [(" ".join(f"{key}={_word(value)}" for key, value in named.items()), door) for named, door in found]


def _limit(workload: PlainWorkload | MixedWorkload, settings: Sequence[Setting]) -> int | None:
    """The least max_model_len of the settings that a workload runs on, where the study gives any."""
    mine = [setting.args for setting in settings if setting.expect == "valid" and _matches(workload.settings, setting)]
    return min((longest for args in mine if (longest := _whole(args, "max_model_len"))), default=None)


def _matches(globs: tuple[str, ...] | None, setting: Setting) -> bool:
    return globs is None or any(fnmatch.fnmatchcase(setting.label, glob) for glob in globs)


def _whole(args: Mapping[str, Any], key: str) -> int | None:
    value = args.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _word(value: Any) -> str:
    """A value in a label: on and off, `default` for null, short numbers, a hash in place of anything long."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= 40 else digest(value, 8)
