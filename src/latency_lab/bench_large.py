"""What the report costs on large results: the part `large` of `make bench`. Made-up studies, and no vLLM."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from latency_lab import ROOT, files, machine, synthetic
from latency_lab.vllm_bench import BenchError

REQUESTS = (100_000, 1_000_000, 10_000_000)
TOKENS = 64
CELLS = 72
"""Of the study that synthetic.write_study makes by default, without the one that is refused."""

BYTES_PER_REQUEST = 320
"""On disk: 4 bytes for the time of each token, which random times do not let zstd make smaller, and the rest."""

POLL_S = 0.1


def cost(results: Path, requests: Sequence[int] = REQUESTS, studies: Path | None = None) -> None:
    """Time and memory that `report` takes for made-up studies of so many requests, each with the times of its tokens.

    A study is made in the folder for temporary files and removed again, or kept in `studies` and used from there the
    next time; one that does not fit on the disk is left out. Memory is that of all the report's processes together, at
    its highest; pages that they share count in each. The table is also written to `results`.
    """
    folder = studies or Path(tempfile.gettempdir())
    print(f"large: the report on made-up studies of {CELLS} cells, {TOKENS} tokens a request, {machine.cores()} cores")
    need, have = max(requests) * BYTES_PER_REQUEST, shutil.disk_usage(folder).free
    print(f"takes up to {_gb(need)} of disk in {folder} (TMPDIR names another), where {_gb(have)} are free")
    rows = []
    for count in requests:
        need, have = count * BYTES_PER_REQUEST, shutil.disk_usage(folder).free
        if have < need:
            print(
                f"{count:,} requests: left out: they need {_gb(need)} of disk in {folder}, where {_gb(have)} are free"
            )
            continue
        if studies is None:
            with tempfile.TemporaryDirectory(prefix="latency-lab-large-") as temporary:
                rows.append(measure(count, Path(temporary)))
        else:
            rows.append(measure(count, studies / f"{count}"))
        print(f"{count:,} requests: {rows[-1]['report_s']:.0f} s", flush=True)
    if rows:
        table = pd.DataFrame(rows).assign(**_facts())
        files.write_text(table.to_csv(index=False, float_format="%.4g"), results)
        print(text(table))


def measure(count: int, folder: Path) -> dict[str, float]:
    """Make a study of `count` requests in folder/data, unless it is there, and report on it: a row of the table."""
    study = folder / "data" / "runs" / "made-up"
    began = time.monotonic()
    if not study.exists():
        making = synthetic.write_study(folder / "making" / study.name, each=count // CELLS, tokens=TOKENS)
        study.parent.mkdir(parents=True, exist_ok=True)
        making.rename(study)
    made_s = time.monotonic() - began
    size = sum(path.stat().st_size for path in study.rglob("*.parquet"))
    report_s, memory = _report(folder)
    return {"requests": count, "disk_gb": size / 1e9, "made_s": made_s, "report_s": report_s, "memory_gb": memory / 1e9}


def text(table: pd.DataFrame) -> str:
    """What the report took, as Markdown; a million more: of what a study took longer than the smallest."""
    first = table.iloc[0]
    lines = [
        f"{first['cpu']}, of which {first['cores']} are used, Python {first['python_version']}, {first['date']}, "
        f"commit {first['git_commit']}.",
        "",
        "| requests | on disk | report | a million more | memory |",
        "|---|---|---|---|---|",
    ]
    for row in table.to_dict("records"):
        more = row["requests"] - first["requests"]
        each = f"{(row['report_s'] - first['report_s']) / more * 1e6:.1f} s" if more else "-"
        sizes = f"{row['disk_gb']:.2f} GB | {row['report_s']:.0f} s | {each} | {row['memory_gb']:.2f} GB"
        lines.append(f"| {row['requests']:,} | {sizes} |")
    return "\n".join(lines)


def _facts() -> dict[str, Any]:
    known = machine.provenance()
    facts = {name: known[name] for name in ("cpu", "python_version", "git_commit")}
    return facts | {"cores": machine.cores(), "date": f"{datetime.date.today()}"}


def _report(folder: Path) -> tuple[float, int]:
    """Seconds that `report` takes on folder/data, and the most bytes that its processes held together."""
    command = [sys.executable, "-m", "latency_lab", "report"]
    command += ["--data", str(folder / "data"), "--figures", str(folder / "figures")]
    began, most = time.monotonic(), 0
    log = folder / "report.log"
    with log.open("w") as out:
        process = psutil.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            most = max(most, _held(process))
            time.sleep(POLL_S)
    took_s = time.monotonic() - began
    if process.returncode:
        raise BenchError(f"bench: the report on made-up results failed: {log.read_text().strip().splitlines()[-1]}")
    return took_s, most


def _held(process: psutil.Process) -> int:
    """Resident bytes of a process and its descendants."""
    held, all_of_them = 0, [process]
    with contextlib.suppress(psutil.NoSuchProcess):  # ended just now
        all_of_them += process.children(recursive=True)
    for one in all_of_them:
        with contextlib.suppress(psutil.NoSuchProcess):
            held += one.memory_info().rss
    return held


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
