"""Measure one engine setting: start its engine, run its cells, write each as it ends. What measure.ipynb calls.

A job is one setting of a study. It owns the folder <runs>/<study>/<setting>-<hash>/ with the executed notebook, the
engine's log, the parameters that it was really run with, and two parquet files a cell (see records.py). Cells that the
folder already holds are not measured again.

Where a study says `engine_reuse: hot`, one engine serves several jobs one after another (`Job.members`), and its limits
are changed in between. The first of them with cells to measure leads: the notebook, the log and the parameters are in
its folder, the cells in their own jobs' folders, just as if each job had had an engine to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from latency_lab import (
    ROOT,
    client,
    doors,
    engine,
    files,
    load,
    machine,
    metrics,
    models,
    records,
    schemas,
    steps,
    study_hot,
    vllm_args,
)
from latency_lab.study import CellPlan, Setting, Study, StudyError, load_study

FINISHED = ("done", "refused")
"""Statuses that a resumed sweep keeps; cells that failed or timed out are measured again."""

CURRENT = ".current"
"""File in a job's folder that names the cell under way, for the sweep's progress line."""

PROBE_TIMEOUT_S = 60.0


def root_path(path: str | Path) -> Path:
    """A path as the reader means it: relative ones from the project's folder, wherever the kernel was started."""
    return (ROOT / Path(path).expanduser()).resolve()


def setting_id(setting: Setting, model: models.Model, env: dict[str, str], seed: int, cores: int | None = None) -> str:
    """Hash of all that shapes a setting's cells: arguments, model, environment, vLLM's version, device, schema.

    On a CPU the device has as many `cores` as the engine is pinned to (default: those that this process may use).
    """
    return files.digest(
        {
            "args": setting.args,
            "model": [model.name, model.weights, model.digest],
            "env": env,
            "seed": seed,
            "vllm": machine.vllm_version(),
            "device": machine.device(cores),
            "schema": schemas.SCHEMA_VERSION,
        }
    )


@dataclass(eq=False)
class Job:
    """One setting of a study, ready to be measured. `open_job` makes it."""

    study: Study
    setting: Setting
    model: models.Model
    runs: Path
    force: bool = False
    cores: int | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    members: list[Job] = field(default_factory=list, repr=False, compare=False)
    """The jobs that one engine serves, in the order to run, this one among them."""

    _seen: dict[str, tuple[Any, dict[str, Any] | None]] = field(default_factory=dict, repr=False)
    """Rows that have been read, by cell, with the stamps of the files that they were read from."""

    def __post_init__(self) -> None:
        self.members = self.members or [self]
        self.id = setting_id(self.setting, self.model, self.study.env, self.study.seed, self.cores)
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.setting.label).strip("-")[:60]
        self.folder = self.runs / self.study.name / f"{slug}-{self.id}"
        self.lead_folder = self.folder

    @property
    def log(self) -> Path:
        """The log of the engine that serves this job."""
        return self.lead_folder / "engine.log"

    @property
    def hot(self) -> bool:
        """Whether the engine serves other settings as well."""
        return len(self.members) > 1

    def lead(self) -> list[Job]:
        """Make this job the one whose notebook starts the engine; returns the members with cells to measure."""
        for member in self.members:
            member.lead_folder = self.folder
        return [member for member in self.members if member.pending()]

    def cell_id(self, plan: CellPlan) -> str:
        """Id of a cell: equal only where setting, workload point, repeat, seed and what is kept are equal."""
        return files.digest(
            [self.id, plan.point.id, plan.repeat, plan.seed, self.study.warmup, self.study.keep_token_ids]
            + (["trace"] if self.study.trace else [])
            + (["logprobs"] if plan.point.keep_logprobs else [])
        )

    def row(self, cell: str) -> dict[str, Any] | None:
        """The row of a cell, or None where it has none yet. Files that lie are renamed to *.bad, and are none.

        Files are read, and their digests computed, once for each version of them.
        """
        kinds = ("cell", "requests", "steps")
        stamps = [files.stamp(self.folder / f"{cell}.{kind}.parquet") for kind in kinds]
        if cell not in self._seen or self._seen[cell][0] != stamps:
            try:
                self._seen[cell] = stamps, records.read_cell(self.folder, cell)
            except records.BadRecord as error:
                print(f"set aside, will be measured again: {error}")
                for path in self.folder.glob(f"{cell}.*.parquet"):
                    records.set_aside(path)
                return None
        return self._seen[cell][1]

    def finished(self) -> dict[str, dict[str, Any]]:
        """Rows of this job's cells that have finished well, by cell id."""
        rows = {cell: self.row(cell) for cell in map(self.cell_id, self.study.cells(self.setting))}
        return {cell: row for cell, row in rows.items() if row is not None and row["status"] in FINISHED}

    def pending(self) -> list[CellPlan]:
        """Cells still to be measured, in the order to run."""
        finished = {} if self.force else self.finished()
        return [plan for plan in self.study.cells(self.setting) if self.cell_id(plan) not in finished]

    def parameters(self) -> dict[str, Any]:
        """What measure.ipynb must have been given for this job."""
        return {
            "study": str(self.study.path.resolve()),
            "setting": self.setting.label,
            "runs": str(self.runs.resolve()),
            "force": self.force,
        }

    async def run(self, show: Callable[[pd.DataFrame], object] = lambda _: None) -> None:
        """Measure all pending cells, of the other members too; `show` gets the table of cells whenever one has ended.

        Raises engine.EngineError where the engine does not start (unless the study expects that) and engine.EngineDied
        where it dies under load; every cell has its row with the reason by then.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_text(json.dumps(self.parameters(), indent=1), self.folder / "parameters.json")
        left = [(job, job.pending()) for job in self.lead()]
        if not left:
            return
        for job, pending in left:
            job.folder.mkdir(parents=True, exist_ok=True)
            job.forget(pending)
        self.log.unlink(missing_ok=True)
        status, facts = "refused" if self.setting.expect == "invalid" else "failed", None
        try:
            async with self._engine() as living:
                error = living.facts.unapplied
                if self.setting.expect == "invalid":
                    status, error = "failed", "the study expects vLLM to refuse this setting, but the engine started"
                if error is not None:
                    facts = living.facts
                    raise engine.EngineError(error)
                for job, pending in left:
                    if self.hot:
                        await living.limit({name: job.setting.args[name] for name in study_hot.LIMITS})
                    await job._measure(living, pending, lambda: show(self.table()))
        except (engine.EngineError, engine.EngineDied) as error:
            died = isinstance(error, engine.EngineDied)
            for job, pending in left:
                if not job.rows and died:
                    job._give_up(pending, "skipped", "the engine had died or hung while it served another setting")
                elif not job.rows:
                    job._give_up(pending, status, str(error), facts)
            show(self.table())
            if died or status == "failed":
                raise

    def table(self) -> pd.DataFrame:
        """The cells of this run so far, a line each, with the medians that tell whether all is well."""
        columns = [
            "workload",
            "repeat",
            "status",
            "requests",
            "failed",
            "TTFT p50 [ms]",
            "TPOT p50 [ms]",
            "E2E p50 [s]",
            "tokens/s",
            "error",
        ]
        rows = [row for job in self.members for row in job.rows]
        found = pd.DataFrame([_line(row) for row in rows], columns=columns)
        if self.hot:
            found.insert(0, "setting", [row["setting"] for row in rows])
        return found

    def forget(self, plans: list[CellPlan]) -> None:
        """Remove what is known of some cells, so that no older result is taken for the one that is to come."""
        for plan in plans:
            for path in self.folder.glob(f"{self.cell_id(plan)}.*.parquet"):
                path.unlink()

    def give_up(self, status: str, error: str) -> None:
        """Record all cells that have no row yet as `status`: called by the sweep after a notebook that broke off."""
        lacking = [plan for plan in self.pending() if self.row(self.cell_id(plan)) is None]
        self._give_up(lacking, status, error)

    def _engine(self) -> contextlib.AbstractAsyncContextManager[engine.Engine]:
        most = study_hot.largest([job.setting for job in self.members]) if self.hot else {}
        return engine.running(
            {**self.setting.args, **most},
            self.model,
            log=self.log,
            ledger=self.runs,
            env=self.study.env,
            seed=self.study.seed,
            trace=self.study.trace,
        )

    async def _measure(self, living: engine.Engine, pending: list[CellPlan], show: Callable[[], object]) -> None:
        from tqdm import tqdm  # as text: an executed notebook keeps no widgets

        if self.study.trace and living.tracer.note:
            print(f"scheduler steps are not recorded: {living.tracer.note}")
        vocabulary = models.Tokens(self.model)
        async with doors.opened(living, self.model.name, [plan.point for plan in pending], self.log) as ways:
            await self._warm_up(ways, vocabulary, pending)
            bar = tqdm(pending, unit="cell", desc=self.setting.label)
            for number, plan in enumerate(bar):
                current = f"{plan.point.label}, repeat {plan.repeat}"
                bar.set_postfix_str(current)
                files.write_text(current, self.lead_folder / CURRENT)
                await self._cell(ways, plan, vocabulary)
                show()
                if not await _answers(living):
                    self._give_up(
                        pending[number + 1 :],
                        "skipped",
                        "the engine had died or hung in an earlier cell",
                        living.facts,
                    )
                    show()
                    raise engine.EngineDied(f"in {plan.point.label}, repeat {plan.repeat}; see {self.log}")

    async def _warm_up(self, ways: doors.Doors, vocabulary: models.Tokens, pending: list[CellPlan]) -> None:
        """Requests of a pending point, of a repeat that is never measured: no measured prompt is known after.

        Through each door that the cells use, as each has first times of its own. What is wrong will show, and be
        recorded, in the cells.
        """
        first = {tuple(traffic.door for traffic in plan.point.classes): plan for plan in reversed(pending)}
        for plan in first.values():
            requests = [
                replace(request, output_tokens=min(request.output_tokens, 16), ignore_eos=True, priority=None)
                for stream in load.streams(plan.point, -1, plan.seed ^ 0x5EED, vocabulary)
                for request, _ in zip(stream.requests, range(self.study.warmup), strict=False)
            ][: self.study.warmup]
            one_by_one = load.Stream("warm-up", 1, None, 0.0, iter(requests))
            await ways.drive(plan.point, [one_by_one], f"warm-up-{self.id}", self.study.keep_token_ids)

    async def _cell(self, ways: doors.Doors, plan: CellPlan, vocabulary: models.Tokens) -> None:
        cell, living = self.cell_id(plan), ways.engine
        streams = load.streams(plan.point, plan.repeat, plan.seed, vocabulary)
        living.reset_stats(keep_logprobs=plan.point.keep_logprobs)
        await living.tracer.begin()
        started_at = datetime.datetime.now(datetime.UTC)
        with machine.Monitor() as monitor:
            run = await ways.drive(plan.point, streams, cell, self.study.keep_token_ids)
        known = await living.request_stats(sum(timing.error is None for timing in run.timings))
        stats = {f"{cell}-{steps.request_number(name, cell)}": columns for name, columns in known.items()}
        keys = self._keys(plan)
        recorded = await living.tracer.end(run.zero_s, keys)
        failed = [timing.error for timing in run.timings if timing.error]
        status, error = "done", None
        if living.dead:
            status, error = (
                "failed",
                f"the engine died ({failed[0] if failed else 'no request was in flight'})",
            )
        elif run.timed_out:
            status, error = "timeout", f"ran past its limit of {plan.point.timeout_s:g} s"
        elif len(failed) == len(run.timings):
            status, error = (
                "failed",
                f"all {len(failed)} requests failed: {failed[0] if failed else 'none was due'}",
            )
        common = {**keys, **living.facts.setting_values}
        row = {
            **common,
            **self._facts(living.facts),
            **run.columns,
            **recorded.columns,
            **monitor.columns(),
            "status": status,
            "error": error,
            "log_tail": engine.log_tail(self.log) if error else None,
            "started_at": started_at,
            "slo": json.dumps(plan.point.slo) if plan.point.slo else None,
            "requests_clamped": sum(timing.request.clamped for timing in run.timings) if plan.point.note else None,
            "traffic": plan.point.note,
            "kv_cache_usage_max": living.kv_cache_usage_max,
        }
        requests = client.rows(run, self.study.keep_token_ids, stats, common)
        records.write_cell(self.folder, row, requests, recorded.table)
        self.rows.append({**row, "_requests": requests})

    def _give_up(self, plans: list[CellPlan], status: str, error: str, facts: engine.EngineFacts | None = None) -> None:
        for plan in plans:
            row = {
                **self._keys(plan),
                **self._facts(facts),
                "status": status,
                "error": error[:2000],
                "log_tail": engine.log_tail(self.log),
                "started_at": datetime.datetime.now(datetime.UTC),
            }
            if facts is None:  # no engine ever resolved them: the typed columns say what was asked
                asked = self.setting.args
                row |= {column.name: asked.get(column.name) for column in schemas.SETTING_VALUES}
            else:
                row |= facts.setting_values
            try:
                records.write_cell(self.folder, row, [])
            except (ValueError, TypeError):  # asked for something that has not even the right type
                row |= {column.name: None for column in schemas.SETTING_VALUES}
                records.write_cell(self.folder, row, [])
            self.rows.append({**row, "_requests": []})

    def _keys(self, plan: CellPlan) -> dict[str, Any]:
        return {
            "study": self.study.name,
            "cell": self.cell_id(plan),
            "setting": self.setting.label,
            "setting_id": self.id,
            "workload": plan.point.label,
            "workload_id": plan.point.id,
            "repeat": plan.repeat,
            "load": plan.point.load,
            "concurrency": plan.point.concurrency,
            "rate_per_s": plan.point.rate_per_s,
            "burstiness": plan.point.burstiness,
        }

    def _facts(self, facts: engine.EngineFacts | None) -> dict[str, Any]:
        """Columns of `cells` that are the same for all cells of this job."""
        columns: dict[str, Any] = {
            **machine.provenance(),
            "asked": json.dumps(self.setting.asked, sort_keys=True),
            "env": json.dumps(self.study.env, sort_keys=True),
            "model": self.model.name,
            "weights": models.weights(self.model, self.setting.args),
            "model_digest": self.model.digest,
            "seed": self.study.seed,
        }
        if facts is not None:
            columns |= {
                "engine_start_s": facts.engine_start_s,
                "resolved": json.dumps(facts.resolved, sort_keys=True),
                "resolved_id": facts.resolved_id,
                "hot": facts.started is not None,
                **{f"started_{name}": value for name, value in (facts.started or {}).items()},
                "kv_cache_blocks": facts.kv_cache_blocks,
                "kv_cache_tokens": facts.kv_cache_tokens,
                "weight_bytes": facts.weight_bytes,
                "memory_used_before_bytes": facts.memory_used_before_bytes,
                "cpu_load_before": facts.cpu_load_before,
            }
        return columns


def open_job(study: str | Path, setting: str, runs: str | Path = "data/runs", force: bool = False) -> Job:
    """The job for one setting of a study file, by its label; with an empty label, the study's first setting.

    Raises study.StudyError for a faulty file, models.ModelError, and ValueError for an unknown label.
    """
    loaded = load_study(root_path(study), vllm_args.installed())
    settings = loaded.settings()
    chosen = next((one for one in settings if one.label == setting), None) if setting else settings[0]
    if chosen is None:
        raise ValueError(
            f"{study}: setting: {setting!r} is not in this study; allowed: {', '.join(s.label for s in settings)}"
        )
    found = jobs(loaded, root_path(runs), force, loaded.together(chosen))
    return next(job for job in found if job.setting is chosen)


def jobs(
    study: Study,
    runs: Path,
    force: bool = False,
    settings: list[Setting] | None = None,
    cores: int | None = None,
) -> list[Job]:
    """The jobs of a study in the order to run them; models are made ready here.

    `cores` : how many the engines are pinned to, where that is not this process's own affinity.

    Raises models.ModelError, and StudyError where engines can't be reused as the study asks on this machine.
    """
    if study.engine_reuse == "hot" and machine.has_gpu():
        raise StudyError([f"{study.path}: engine_reuse: hot: not shown to change nothing on a GPU; allowed: cold"])
    cache = runs.parent / "models"
    prepared: dict[str, models.Model] = {}
    found = []
    for setting in settings if settings is not None else study.settings_in_order():
        key = files.digest(setting.model.model_dump())
        if key not in prepared:
            prepared[key] = models.prepare(setting.model, cache)
        found.append(Job(study, setting, prepared[key], runs, force, cores))
    for job in found:
        job.members = [other for other in found if other.setting in study.together(job.setting)]
    return found


def starts(jobs: list[Job]) -> list[Job]:
    """The engine starts that it takes to measure what is pending, each as the job that leads it."""
    leads: list[Job] = []
    for job in jobs:
        if job.pending() and not any(job in lead.members for lead in leads):
            job.lead()
            leads.append(job)
    return leads


def _line(row: dict[str, Any]) -> list[Any]:
    """One line of the live table."""
    medians: dict[str, float | None] = {"ttft_s": None, "tpot_s": None, "e2e_s": None}
    tokens = 0
    if row["_requests"]:
        requests = metrics.latencies(records.to_pandas(records.table(row["_requests"], schemas.REQUESTS)))
        medians = {name: requests[name].median() for name in medians}
        tokens = int(requests["output_tokens"].sum())
    ttft, tpot, e2e = (None if value is None or pd.isna(value) else float(value) for value in medians.values())
    return [
        row["workload"],
        row["repeat"],
        row["status"],
        len(row["_requests"]),
        sum(request["error"] is not None for request in row["_requests"]),
        None if ttft is None else round(ttft * 1e3, 1),
        None if tpot is None else round(tpot * 1e3, 2),
        None if e2e is None else round(e2e, 3),
        round(tokens / row["duration_s"], 1) if row.get("duration_s") else None,
        row["error"],
    ]


async def _answers(living: engine.Engine) -> bool:
    """Whether the engine still gives a token within a minute."""
    if living.dead:
        return False

    async def one_token() -> None:
        async for _ in living.stream("still-there", load.Request(0, "", None, (1000,), 1, True, None)):
            pass

    try:
        await asyncio.wait_for(one_token(), PROBE_TIMEOUT_S)
    except Exception:
        return False
    return True
