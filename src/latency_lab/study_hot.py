"""`engine_reuse: hot`: which settings of a study one engine can serve, and what a study must say for that.

Pure functions, no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from latency_lab.files import digest
from latency_lab.study_file import Problem, StudyFile
from latency_lab.study_grid import Setting
from latency_lab.study_schema import StudyFields

LIMITS = ("max_num_batched_tokens", "max_num_seqs")
"""The engine arguments that limits.py changes in a living engine."""

PINNED = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
"""Either makes the KV cache as large as it says. Without, vLLM takes what a step of the largest budget leaves over."""

BESIDE = ("speculative_config", "enable_lora", "max_num_scheduled_tokens", "max_num_active_seqs")
"""Arguments that let more than the scheduler depend on the two limits."""


def together(settings: Sequence[Setting], setting: Setting) -> list[Setting]:
    """The settings that one engine serves beside and with `setting`: those that differ in the two limits alone."""
    if setting.expect != "valid":
        return [setting]
    return [other for other in settings if other.expect == "valid" and _rest(other) == _rest(setting)]


def largest(settings: Sequence[Setting]) -> dict[str, int]:
    """The limits that an engine for all of the settings is started with."""
    return {name: max(setting.args[name] for setting in settings) for name in LIMITS}


def problems(file: StudyFile, fields: StudyFields, settings: Sequence[Setting]) -> list[Problem]:
    """Why a study's settings can't share engines as it asks; none where it does not ask."""
    if fields.engine_reuse == "cold":
        return []
    found = list(_unfit([setting for setting in settings if setting.expect == "valid"]))
    if not fields.trace:
        found.append("trace: false, and the limits are changed by the scheduler that traces; allowed: trace: true")
    if not found and all(len(together(settings, setting)) == 1 for setting in settings):
        found.append(f"no two settings differ in {' and '.join(LIMITS)} alone; allowed: cold")
    return [file.problem(("engine_reuse",), f"hot: {text}") for text in found]


def _unfit(settings: Sequence[Setting]) -> Iterator[str]:
    """What keeps settings from being served by one engine, with the first that it is true of."""
    for setting in settings:
        if not all(isinstance(setting.args.get(name), int) for name in LIMITS):
            yield (
                f"setting {setting.label!r} leaves a limit to vLLM, whose default depends on the machine; allowed: "
                f"{' and '.join(LIMITS)} for every setting, or cold"
            )
            break
    for setting in settings:
        if not any(setting.args.get(name) for name in PINNED):
            yield (
                f"the KV cache of setting {setting.label!r} would be as large as the budget leaves it; allowed: "
                f"{' or '.join(PINNED)} in `engine:`, or cold"
            )
            break
    for setting in settings:
        if setting.args.get("enforce_eager") is not True:
            yield (
                f"setting {setting.label!r} compiles or captures graphs, which are made for the limits of the start; "
                "allowed: enforce_eager: true in `engine:`, or cold"
            )
            break
    for setting in settings:
        beside = [name for name in BESIDE if setting.args.get(name)]
        if beside:
            yield (
                f"setting {setting.label!r} has {beside[0]}, by which more than the scheduler depends on "
                f"{' and '.join(LIMITS)}; allowed: settings without it, or cold"
            )
            break


def _rest(setting: Setting) -> str:
    """A hash of all of a setting but its limits."""
    args: dict[str, Any] = {name: value for name, value in setting.args.items() if name not in LIMITS}
    return digest({"args": args, "model": setting.model.model_dump()})
