"""The files of real traffic that a study's workloads name: what they hold, and what has to hold for using them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from latency_lab.prompts import read_prompts
from latency_lab.study_checks import classes_of
from latency_lab.study_file import Loc, Problem, StudyFile, show
from latency_lab.study_grid import Files, Point, Setting, needs_limit
from latency_lab.study_schema import Replay, StudyFields, Traffic
from latency_lab.traffic import read_trace
from latency_lab.traffic_file import TrafficError


def read_files(file: StudyFile, fields: StudyFields) -> tuple[Files, list[Problem]]:
    """What the workloads' traces and prompts hold, each read once, and what is wrong with them.

    Their paths start from the study's folder. A problem names the study's line, and then the file's.
    """
    files, problems = Files(), []
    for name, workload in fields.workloads.items():
        for where, traffic in classes_of(name, workload):
            load, prompt = traffic.load, traffic.prompt
            if isinstance(load, Replay) and (load.file, load.layout) not in files.traces:
                try:
                    files.traces[load.file, load.layout] = read_trace(_path(file, load.file), load.layout)
                except TrafficError as error:
                    problems.append(file.problem((*where, "load", "file"), str(error)))
            if prompt is not None and prompt.file is not None and (prompt.file, prompt.layout) not in files.prompts:
                try:
                    files.prompts[prompt.file, prompt.layout] = read_prompts(_path(file, prompt.file), prompt.layout)
                except TrafficError as error:
                    problems.append(file.problem((*where, "prompt", "file"), str(error)))
    return files, problems


def traffic_problems(
    file: StudyFile, fields: StudyFields, settings: list[Setting], files: Files, points: list[Point]
) -> Iterator[Problem]:
    """What workloads ask of files that these do not hold, and of settings that these cannot give."""
    for name, workload in fields.workloads.items():
        point = next(point for point in points if point.workload == name)
        mine = [setting for setting in settings if setting.expect == "valid" and point.runs_on(setting)]
        for where, traffic in classes_of(name, workload):
            yield from _missing(file, where, traffic, files)
            text = traffic.prompt is not None and (traffic.prompt.text or traffic.prompt.file)
            for setting in mine:
                longest = setting.args.get("max_model_len")
                if needs_limit(traffic) and not (isinstance(longest, int) and longest > 1):
                    what = "is missing" if longest is None else f"is {show(longest)}"
                    known = "prompt" if text else "load"
                    yield file.problem(
                        (*where, known, "file"),
                        f"max_model_len of setting {setting.label!r} {what}, and lengths from a file are cut to it; "
                        "allowed: a whole number from 2 on, for example in `engine:`",
                    )
                    break
            for setting in mine:
                if text and setting.model.source == "config":
                    yield file.problem(
                        (*where, "prompt"),
                        f"a text needs a tokenizer, and the model of setting {setting.label!r} is a config without "
                        "one; allowed: tokens, uniform, lognormal, or another model",
                    )
                    break


def _missing(file: StudyFile, where: Loc, traffic: Traffic, files: Files) -> Iterator[Problem]:
    load, prompt = traffic.load, traffic.prompt
    if isinstance(load, Replay) and load.requests:
        trace = files.traces[load.file, load.layout]
        if load.requests > trace.rows:
            text = f"{load.requests:,} are more than the {trace.rows:,} of {trace.path}; allowed: as many, or fewer"
            yield file.problem((*where, "load", "requests"), text)
    if prompt is not None and prompt.file is not None and traffic.output is None and not isinstance(load, Replay):
        prompts = files.prompts[prompt.file, prompt.layout]
        if prompts.unanswered is not None:
            text = f"{prompts.path}:{prompts.unanswered}: output_tokens is missing"
            yield file.problem(
                (*where, "prompt", "file"), f"{text}; allowed: output_tokens in each row, or `output:` in the study"
            )


def _path(file: StudyFile, name: str) -> Path:
    return file.path.parent / Path(name).expanduser()
