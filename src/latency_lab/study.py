"""What is asked: a study's YAML file, and the engine settings, workload points and cells that it expands to.

    question: Which budget keeps chat fast?
    model: {source: smollm2}              # or hub (id, revision), folder (path), config (random weights)
    engine: {dtype: float32}              # any of vLLM's engine arguments; null is vLLM's default
    env: {OMP_NUM_THREADS: 2}
    settings:                             # without it, one setting called "base"
      axes: {max_num_batched_tokens: [128, 512], max_num_seqs: [4, 32]}          # every combination
      named: {eager: {engine: {enforce_eager: on}}, refused: {engine: {...}, expect: invalid}}
    workloads:
      chat: {load: {kind: closed, concurrency: [1, 8], requests_each: 3},
             prompt: {tokens: 64}, output: {tokens: 32}}
      open: {load: {kind: poisson, rate: [0.5, inf], requests: 60}, prompt: {uniform: [32, 256]},
             output: {lognormal: {median: 64, sigma: 0.5, max: 256}}, settings: ["budget=512*"], repeats: 2}
      mix:  {classes: {chat: {...}, long: {load: {kind: constant, rate: 3, requests: 10, start_s: 1}, ...}}}
      real: {load: {kind: replay, file: azure.csv, time_scale: [1, 0.5], requests: 500}}   # lengths as in the trace
      talk: {load: {kind: poisson, rate: 2, requests: 60}, prompt: {file: sharegpt.json, chat: true}}
      http: {via: [engine, openai], stream: [on, off], load: {...}, prompt: {text: Why?, chat: true}, ...}
    repeats: 3
    warmup: 4
    seed: 0
    engine_reuse: hot                     # one engine for settings that differ in budget and seqs alone; default cold

A *setting* is one configuration of the engine, a *point* one workload at one concurrency or rate, a *cell*
one repeat of one point on one setting. study_schema.py holds every key with its meaning, study_grid.py the
expansion, study_checks.py what is checked across keys, study_traffic.py what comes from files, study_hot.py
which settings may share an engine. Nothing here imports vLLM.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from latency_lab import study_hot
from latency_lab.claim_rules import ClaimRules
from latency_lab.study_checks import claim_problems, read_arguments, setting_problems, workload_problems
from latency_lab.study_file import StudyError, read
from latency_lab.study_grid import Load, Point, Setting, TrafficClass, expand_points, expand_settings
from latency_lab.study_schema import ModelSource, Speed, parse
from latency_lab.study_traffic import read_files, traffic_problems
from latency_lab.vllm_args import EngineArguments

__all__ = [
    "CellPlan",
    "Load",
    "Point",
    "Setting",
    "Study",
    "StudyError",
    "TrafficClass",
    "derive_seed",
    "load_rules",
    "load_study",
]


@dataclass(frozen=True)
class CellPlan:
    """One cell to measure. `seed` does not depend on the setting: every setting gets the same requests."""

    setting: Setting
    point: Point
    repeat: int
    seed: int


@dataclass(frozen=True, eq=False)
class Study:
    """A checked study. Times in seconds; `warmup` counts the requests before the first cell of a setting."""

    path: Path
    name: str
    question: str
    model: ModelSource
    engine: dict[str, Any]
    env: dict[str, str]
    repeats: int
    warmup: int
    seed: int
    order: Literal["shuffled", "listed"]
    timeout_s: float
    start_timeout_s: float
    keep_token_ids: bool
    trace: bool
    engine_reuse: Literal["cold", "hot"]
    speed: Speed
    claims: dict[str, ClaimRules]
    all_settings: tuple[Setting, ...] = field(repr=False)
    all_points: tuple[Point, ...] = field(repr=False)

    def settings(self) -> list[Setting]:
        """All engine settings as the file lists them: the axes' product, then the named ones."""
        return list(self.all_settings)

    def settings_in_order(self) -> list[Setting]:
        """All engine settings in the order to run them."""
        return self._ordered(self.all_settings, "settings")

    def together(self, setting: Setting) -> list[Setting]:
        """The settings that one engine serves together with this one, itself included, in the order to run them."""
        if self.engine_reuse == "cold":
            return [setting]
        return study_hot.together(self.settings_in_order(), setting)

    def points(self) -> list[Point]:
        """All workload points as the file lists them."""
        return list(self.all_points)

    def cells(self, setting: Setting) -> list[CellPlan]:
        """The cells of one setting in the order to run them.

        Each round holds one repeat of every point, so that a slow minute of the machine does not fall on all
        repeats of one point.
        """
        points = [point for point in self.all_points if point.runs_on(setting)]
        plans = []
        for repeat in range(max((point.repeats for point in points), default=0)):
            due = [point for point in points if repeat < point.repeats]
            for point in self._ordered(due, setting.label, repeat):
                plans.append(CellPlan(setting, point, repeat, derive_seed(self.seed, point.id, repeat)))
        return plans

    def traffic(self) -> list[str]:
        """What a reader has to know of the files that workloads are made of, a line for each point."""
        lines = []
        for point in self.all_points:
            if point.note is not None:
                cuts = [cut for traffic in point.classes if (cut := traffic.cut_short()) is not None]
                lines.append(f"{point.label}: {'; '.join([point.note, *cuts])}")
        return lines

    def estimate_s(self) -> float:
        """Roughly how long the whole study takes, in seconds, at the speeds that it expects (`speed`).

        Assumes that the tokens of a cell come at the speed of one stream for each request in flight up to the peak,
        that none come while a prompt is read, and that nothing fails.
        """
        cells = [plan for setting in self.all_settings if setting.expect == "valid" for plan in self.cells(setting)]
        starts = {self.together(setting)[0].label for setting in self.all_settings}
        return self.speed.start_s * len(starts) + sum(_cell_s(plan, self.speed) for plan in cells)

    def _ordered(self, items: Iterable[Any], *where: Any) -> list[Any]:
        found = list(items)
        if self.order == "shuffled":
            random.Random(derive_seed(self.seed, *where)).shuffle(found)
        return found


def derive_seed(*parts: Any) -> int:
    """A seed of 63 bits from anything that JSON can write; the same in every process."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 1


def load_study(path: Path, arguments: EngineArguments | None = None) -> Study:
    """Read and check a study; `arguments` are the installed vLLM's (None: engine arguments go unchecked).

    Raises StudyError with all problems of the file at once.
    """
    file = read(path)
    file, problems = read_arguments(file, arguments)
    fields, more = parse(file)
    problems += more
    if fields is None:
        raise file.error(problems)
    settings = expand_settings(fields)
    problems += setting_problems(file, settings)
    problems += study_hot.problems(file, fields, settings)
    files, more = read_files(file, fields)
    problems += more
    if more:  # without what these files hold there are no points to check
        raise file.error(problems)
    points = expand_points(fields, settings, files)
    problems += workload_problems(file, fields, settings, points)
    problems += traffic_problems(file, fields, settings, files, points)
    problems += claim_problems(file, fields, settings, points)
    if problems or file.problems:
        raise file.error(problems)
    return Study(
        path=path,
        name=fields.study or path.stem,
        question=fields.question,
        model=fields.model,
        engine=fields.engine,
        env=fields.env,
        repeats=fields.repeats,
        warmup=fields.warmup,
        seed=fields.seed,
        order=fields.order,
        timeout_s=fields.timeout_s,
        start_timeout_s=fields.start_timeout_s,
        keep_token_ids=fields.keep_token_ids,
        trace=fields.trace,
        engine_reuse=fields.engine_reuse,
        speed=fields.speed,
        claims=fields.claims,
        all_settings=tuple(settings),
        all_points=tuple(points),
    )


def load_rules(path: Path) -> dict[str, ClaimRules]:
    """A study's rules alone: for judging records where the files of its workloads are not at hand.

    Raises StudyError where the study's own values are faulty.
    """
    file, problems = read_arguments(read(path), None)
    fields, more = parse(file)
    if fields is None or problems or file.problems:
        raise file.error(problems + more)
    return fields.claims


def _cell_s(plan: CellPlan, speed: Speed) -> float:
    """Roughly how long a cell takes: its arrivals, or the tokens that it moves where they take longer."""
    span_s, in_flight, outputs, prompts = 0.0, 0, 0.0, 0.0
    for traffic in plan.point.classes:
        load, (prompt, output) = traffic.load, traffic.mean_tokens()
        requests = load.requests or (load.concurrency or 0) * (load.requests_each or 0)
        if load.rate_per_s:
            requests = requests or int(load.rate_per_s * (load.seconds or 0))
            span_s = max(span_s, load.start_s + requests / load.rate_per_s)
        span_s = max(span_s, load.start_s + (load.seconds or 0.0))
        in_flight += load.concurrency or (load.requests if load.kind == "burst" else 1) or 1
        outputs += requests * output
        prompts += requests * prompt
    most = plan.setting.args.get("max_num_seqs")
    running = max(1, min(in_flight, most)) if isinstance(most, int) else in_flight
    tokens_per_s = min(running * speed.stream_tokens_per_s, speed.peak_tokens_per_s)
    busy_s = outputs / tokens_per_s + prompts / speed.prefill_tokens_per_s
    return min(max(span_s, busy_s), plan.point.timeout_s)
