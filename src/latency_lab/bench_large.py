"""What the report costs on large results: the part `large` of `make bench`. Made-up studies, and no vLLM."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from latency_lab import ROOT, machine, synthetic
from latency_lab.vllm_bench import BenchError

REQUESTS = (100_000, 1_000_000, 10_000_000)
TOKENS = 64
CELLS = 72
"""Of the study that synthetic.write_study makes by default, without the one that is refused."""

BYTES_PER_REQUEST = 320
"""On disk: 4 bytes for the time of each token, which random times do not let zstd make smaller, and the rest."""

POLL_S = 0.1


def cost(requests: Sequence[int] = REQUESTS) -> None:
    """Time and memory that `report` takes for made-up studies of so many requests, each with the times of its tokens.

    A study is made in the folder for temporary files and removed again; one that does not fit there is left out.
    Memory is that of all the report's processes together, at its highest; pages that they share count in each.
    """
    folder = Path(tempfile.gettempdir())
    need, have = max(requests) * BYTES_PER_REQUEST, shutil.disk_usage(folder).free
    print(f"large: the report on made-up studies of {CELLS} cells, {TOKENS} tokens a request, {machine.cores()} cores")
    print(f"takes up to {_gb(need)} of disk in {folder} (TMPDIR names another), where {_gb(have)} are free")
    print(f"{'requests':>12} {'disk GB':>8} {'make s':>7} {'report s':>9} {'s / million':>12} {'memory GB':>10}")
    for count in requests:
        need, have = count * BYTES_PER_REQUEST, shutil.disk_usage(folder).free
        if have < need:
            print(f"{count:>12,}  left out: it needs {_gb(need)} of disk in {folder}, where {_gb(have)} are free")
            continue
        with tempfile.TemporaryDirectory(prefix="latency-lab-large-") as temporary:
            _row(count, Path(temporary))


def _row(count: int, folder: Path) -> None:
    began = time.monotonic()
    synthetic.write_study(folder / "data" / "runs" / "made-up", each=count // CELLS, tokens=TOKENS)
    made_s = time.monotonic() - began
    disk = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    took_s, memory = _report(folder)
    print(
        f"{count:>12,} {disk / 1e9:>8.2f} {made_s:>7.0f} {took_s:>9.1f} {took_s / count * 1e6:>12.1f} "
        f"{memory / 1e9:>10.2f}",
        flush=True,
    )


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
    held = 0
    try:
        for one in [process, *process.children(recursive=True)]:
            held += one.memory_info().rss
    except psutil.NoSuchProcess:  # ended just now
        pass
    return held


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
