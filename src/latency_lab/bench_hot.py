"""Is a hot cell the same as a cold one? The part `hot` of `make bench`; reuse.py compares what it measures."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from latency_lab import ROOT, files, measure, records, reuse, schemas, vllm_args
from latency_lab.study import Study, load_study

STUDY = ROOT / "notebooks" / "studies" / "hot-limits.yaml"
ROUNDS = 4
"""In one go, of some four minutes each; every go adds as many to those before."""

Way = Literal["hot", "cold"]


def compare(results: Path) -> None:
    """Add some rounds to `results`, and print how hot and cold compare over all of them.

    A round measures the study hot and cold, with a seed of its own: the order of settings and cells and all prompts are
    the same both ways, and others in the next round. Which of the two comes first alternates.
    """
    study = load_study(STUDY, vllm_args.installed())
    first = next(number for number in range(10_000) if not (results / f"round-{number}").exists())
    print(f"hot: rounds {first + 1} to {first + ROUNDS}, each hot and cold, {len(study.settings()) + 1} engine starts")
    for number in range(first, first + ROUNDS):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=_made(results)) as folder:  # a round that breaks off leaves nothing
            for how in _in_turn(number):
                asyncio.run(_measure(replace(study, seed=number, engine_reuse=how), Path(folder) / how))
            shutil.copytree(folder, results / f"round-{number}")
        print(f"  round {number + 1} took {time.monotonic() - began:.0f} s", flush=True)
    collect(results, study.name)
    measured = records.load(results / "records")
    print(reuse.text(measured, reuse.compare(measured)))


def _in_turn(number: int) -> tuple[Way, Way]:
    return ("hot", "cold") if number % 2 == 0 else ("cold", "hot")


async def _measure(study: Study, runs: Path) -> None:
    for lead in measure.starts(measure.jobs(study, runs)):
        await lead.run()


def collect(results: Path, name: str) -> None:
    """All rounds as one packed study in <results>/records, as reuse.py reads it."""
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(results.glob("round-*")):
            number = int(path.name.removeprefix("round-"))
            for how in _in_turn(0):
                study = records.load(path / how / name)
                for one in study.one_by_one():
                    row = one.cells.iloc[0]
                    own: dict[str, Any] = {
                        "cell": files.digest([number, how, row["cell"]]),
                        "setting": f"{row['setting']} {how}",
                        "repeat": number,
                    }
                    cell = pa.Table.from_pandas(one.cells.assign(**own), schemas.CELLS, preserve_index=False)
                    requests = one.requests.assign(**own)
                    written: dict[str, Any] = {**cell.to_pylist()[0], "steps_note": "left out here, to be small"}
                    table = pa.Table.from_pandas(requests, schemas.REQUESTS, preserve_index=False)
                    records.write_cell(Path(folder) / how, written, table)
        records.pack(Path(folder), results / "records")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
