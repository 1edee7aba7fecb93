"""What has to hold between a study's values, and what vLLM has to know of its engine arguments."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from latency_lab.claim_rules import Target
from latency_lab.files import digest
from latency_lab.study_file import Loc, Problem, StudyFile, allowed, show
from latency_lab.study_grid import DOOR_KEYS, Point, Setting, conflicts, doors
from latency_lab.study_schema import Burst, Closed, Gamma, MixedWorkload, Replay, StudyFields, Traffic
from latency_lab.vllm_args import EngineArguments, unchecked

RESERVED = {
    "model": "the study's `model:`",
    "model_weights": "the study's `model:`",
    "tokenizer": "the study's `model:`, which brings its own",
    "revision": "`revision:` of the study's `model:`",
    "tokenizer_revision": "`revision:` of the study's `model:`",
    "hf_config_path": "the study's `model: {source: config}`",
    "hf_token": "HF_TOKEN in your shell (records keep all arguments)",
    "seed": "the study's `seed:`",
    "skip_tokenizer_init": "nothing: prompts of tokens need no tokenizer, prompts of text do",
    "scheduler_cls": "nothing: the lab watches the scheduler by it",
    "worker_extension_cls": "nothing: the lab asks the workers for their memory by it",
    "disable_log_stats": "nothing: the lab reads the engine's own times from its statistics",
}
"""Engine arguments that a study must not set, and what to set in their place."""


def read_arguments(file: StudyFile, arguments: EngineArguments | None) -> tuple[StudyFile, list[Problem]]:
    """The file with its engine arguments as vLLM is to get them, and what is wrong with them.

    Works on the file's plain values, so that these errors come together with all others.
    """
    values, problems = copy.deepcopy(file.values), []
    for where, holder, key, name, lenient in _arguments(values):
        if name in RESERVED:
            text = f"{show(holder[key])} is not for a study to set; allowed: {RESERVED[name]}"
            problems.append(file.problem(where, text))
        elif arguments is None:
            holder[key] = unchecked(holder[key])
        else:
            holder[key], wrong = arguments.check(name, holder[key])
            if wrong and not (lenient and name in arguments.arguments):
                problems.append(file.problem(where, wrong))
    return replace(file, values=values), problems


def setting_problems(file: StudyFile, settings: list[Setting]) -> list[Problem]:
    """What is wrong with single settings, and which of them are the same."""
    problems = []
    labels: dict[str, Setting] = {}
    same: dict[str, Setting] = {}
    for setting in settings:
        where = _where(setting)
        if setting.label in labels:
            text = f"two settings are called {setting.label!r}; allowed: each label once"
            problems.append(file.problem(where, text))
        key = digest({"args": setting.args, "model": setting.model.model_dump()})
        if key in same and setting.label not in labels:
            other = same[key].label
            both = f"{other!r} and {setting.label!r}"
            text = f"the settings {both} have the same engine arguments; allowed: one of them"
            problems.append(file.problem(where, text))
        labels[setting.label] = same[key] = setting
        if setting.model.source == "config" and "load_format" in setting.args:
            given = show(setting.args["load_format"])
            text = f"{given} given, yet weights of a model of source config are random; allowed: no load_format"
            problems.append(file.problem(setting.origin["load_format"], text))
        if setting.expect == "valid":
            problems += [
                file.problem(setting.origin[argument], f"{text} (setting {setting.label!r})")
                for argument, text in conflicts(setting.args)
            ]
    return problems


def workload_problems(
    file: StudyFile, fields: StudyFields, settings: list[Setting], points: list[Point]
) -> list[Problem]:
    """What is wrong with workloads, alone and on the settings that they run on."""
    problems = []
    for name, workload in fields.workloads.items():
        mine = [point for point in points if point.workload == name]
        for i, glob in enumerate(workload.settings or ()):
            if not any(replace(mine[0], only_on=(glob,)).runs_on(setting) for setting in settings):
                text = f"{glob!r} matches no setting{allowed([setting.label for setting in settings], glob)}"
                problems.append(file.problem(("workloads", name, "settings", i), text))
        for where, traffic in classes_of(name, workload):
            problems += _too_long(file, where, traffic, [s for s in settings if mine[0].runs_on(s)])
            problems += _no_template(file, where, traffic, [s for s in settings if mine[0].runs_on(s)])
            if isinstance(workload, MixedWorkload):
                problems += _lists(file, where, traffic)
        for point in mine:
            problems += _too_slow(file, point)
    for setting in settings:
        if not any(point.runs_on(setting) for point in points):
            text = f"the setting {setting.label!r} has no workload; allowed: a workload that its label matches"
            problems.append(file.problem(_where(setting), text))
    return problems


def claim_problems(
    file: StudyFile, fields: StudyFields, settings: list[Setting], all_points: list[Point]
) -> list[Problem]:
    """Rules of claims that name settings, workloads or classes which the study does not have."""
    labels = [setting.label for setting in settings if setting.expect == "valid"]
    points = {point.label: point for point in all_points}
    runs = {name: [s.label for s in settings if point.runs_on(s)] for name, point in points.items()}
    problems = []
    for claim, rules in fields.claims.items():
        for i, rule in enumerate(rules.rules):
            where: Loc = ("claims", claim, "rules", i)
            asked = [("workload", name, list(points)) for name in rule.workload]
            asked += [("setting", name, labels) for name in getattr(rule, "setting", ())]
            asked += [("compare", name, labels) for pair in rule.compare for name in pair]
            asked += [
                ("of_class", of_class, [traffic.name for traffic in points[name].classes])
                for name in rule.workload
                if (of_class := getattr(rule, "of_class", None)) and name in points
            ]
            for key, name, known in asked:
                if name not in known:
                    text = f"{show(name)} is not in this study{allowed(known, name)}"
                    problems.append(file.problem((*where, key), text))
            sides = [("compare", label) for pair in rule.compare for label in pair]
            sides += [("setting", label) for label in rule.setting] if isinstance(rule, Target) else []
            for name, (key, label) in itertools.product(rule.workload, sides):
                if name in runs and label in labels and label not in runs[name]:
                    text = f"{name!r} does not run on {label!r}{allowed(runs[name], label)}"
                    problems.append(file.problem((*where, key), text))
    return problems


def _arguments(values: dict[str, Any]) -> Iterator[tuple[Loc, Any, Any, str, bool]]:
    """Every engine argument: where it stands, its holder and key there, its name, whether it may be wrong."""
    for name in _dict(values.get("engine")):
        yield ("engine", name), values["engine"], name, name, False
    settings = _dict(values.get("settings"))
    for name, choices in _dict(settings.get("axes")).items():
        holder = choices if isinstance(choices, list) else settings["axes"]
        for key in range(len(choices)) if isinstance(choices, list) else [name]:
            where = ("settings", "axes", name, key) if isinstance(choices, list) else ("settings", "axes", name)
            yield where, holder, key, name, False
    for title, named in _dict(settings.get("named")).items():
        lenient = _dict(named).get("expect") == "invalid"
        for name in _dict(_dict(named).get("engine")):
            yield ("settings", "named", title, "engine", name), named["engine"], name, name, lenient


def _dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _where(setting: Setting) -> Loc:
    """Where a setting comes from: the named setting, an axis, or the study as a whole."""
    places = sorted(setting.origin.values(), key=lambda loc: loc[0] == "engine")
    if places and places[0][0] == "settings":
        return places[0][:3]
    return ("settings", "named", setting.label)


def classes_of(name: str, workload: Any) -> Iterator[tuple[Loc, Traffic]]:
    """The classes of a workload and where they stand; of a plain one, itself."""
    if isinstance(workload, MixedWorkload):
        for key, traffic in workload.classes.items():
            yield ("workloads", name, "classes", key), traffic
    else:
        yield ("workloads", name), workload


def _too_long(file: StudyFile, where: Loc, traffic: Traffic, settings: list[Setting]) -> Iterator[Problem]:
    """Requests that the model's length cannot hold, once for each such length."""
    prompt, output = (lengths.bounds()[1] if lengths else 0 for lengths in (traffic.prompt, traffic.output))
    by_limit: dict[int, list[str]] = {}
    for setting in settings:
        limit = setting.args.get("max_model_len")
        if isinstance(limit, int) and 0 < limit < prompt + output and setting.expect == "valid":
            by_limit.setdefault(limit, []).append(setting.label)
    for limit, labels in by_limit.items():
        others = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        lengths = (
            f"up to {prompt} prompt and {output} output tokens" if prompt else f"a text and {output} output tokens"
        )
        text = f"{lengths} are more than max_model_len {limit} of setting {labels[0]!r}{others}"
        yield file.problem((*where, "prompt"), f"{text}; allowed: {limit} in all")


def _lists(file: StudyFile, where: Loc, traffic: Traffic) -> Iterator[Problem]:
    load = traffic.load
    keys = {Closed: ["concurrency"], Burst: ["requests"], Replay: ["time_scale"], Gamma: ["rate", "burstiness"]}
    for key in keys.get(type(load), ["rate"]):
        values = getattr(load, key)
        if len(values) > 1:
            text = f"{list(values)} in a class of a mix; allowed: one value, as a mix is one point"
            yield file.problem((*where, "load", key), text)
    for key in DOOR_KEYS:
        values = getattr(traffic, key) or ()
        if len(values) > 1:
            text = f"{list(values)} in a class of a mix; allowed: one value, as a mix is one point"
            yield file.problem((*where, key), text)


def _no_template(file: StudyFile, where: Loc, traffic: Traffic, settings: list[Setting]) -> Iterator[Problem]:
    """Requests to the chat API of a model that comes without a tokenizer."""
    chats = any(door.api == "chat" for _, door in doors(traffic))
    bare = next((setting for setting in settings if setting.model.source == "config"), None)
    if chats and bare is not None:
        text = (
            f"the chat API needs a tokenizer, and the model of setting {bare.label!r} is a config without one; "
            "allowed: via: openai with a prompt of tokens, which completions take"
        )
        yield file.problem((*where, "via"), text)


def _too_slow(file: StudyFile, point: Point) -> Iterator[Problem]:
    """Loads that are still sending requests when the cell's time is up."""
    for traffic in point.classes:
        load = traffic.load
        sends_s = load.seconds or (load.requests or 0) / (load.rate_per_s or float("inf"))
        lasts_s = load.start_s + (float(traffic.trace.at_s[-1]) if traffic.trace else sends_s)
        if lasts_s >= point.timeout_s:
            where: Loc = ("workloads", point.workload, "classes", traffic.name, "load")
            if point.load != "mix":
                where = ("workloads", point.workload, "load")
            text = f"{point.label!r} sends requests for {lasts_s:g} s, and a cell is given {point.timeout_s:g} s"
            yield file.problem(where, f"{text}; allowed: fewer requests or seconds, or a longer timeout_s")
