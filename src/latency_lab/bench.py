"""What the study's own tools cost, and whether they agree with vLLM's own: `make bench`, or `bench PART ...` for some.

Every part prints ratios within one run, since machines and their moods differ. Those that compare with vLLM's own
benchmark also write what they measured to data/runs/fidelity, from where the report draws it (see fidelity.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from latency_lab import (
    ROOT,
    bench_client,
    bench_executors,
    bench_fidelity,
    bench_hot,
    bench_http,
    bench_kills,
    bench_large,
    bench_restarts,
    bench_simulator,
    bench_trace,
    machine,
)
from latency_lab.vllm_bench import BenchError

RESULTS = ROOT / "data" / "runs" / "fidelity"
REUSE = ROOT / "data" / "runs" / "bench" / "hot-limits"
RESTARTS = ROOT / "data" / "runs" / "bench" / "restarts.csv"
KILLS = ROOT / "data" / "runs" / "bench" / "kills.csv"
EXECUTORS = ROOT / "data" / "runs" / "bench" / "executors"
LARGE = ROOT / "data" / "runs" / "bench" / "large.csv"
SIMULATOR = ROOT / "data" / "runs" / "bench" / "simulator.csv"

PARTS: dict[str, tuple[bool, Callable[[], None]]] = {
    "client": (False, bench_client.cost),
    "send": (False, bench_http.send_error),
    "large": (False, lambda: bench_large.cost(LARGE)),
    "cpu": (False, bench_simulator.cpu),
    "simulator": (False, lambda: bench_simulator.cost(SIMULATOR)),
    "http": (True, lambda: bench_http.cost(RESULTS)),
    "trace": (True, lambda: asyncio.run(bench_trace.cost())),
    "serve": (True, lambda: asyncio.run(bench_fidelity.serve(RESULTS))),
    "throughput": (True, lambda: bench_fidelity.throughput(RESULTS)),
    "hot": (True, lambda: bench_hot.compare(REUSE)),
    "restarts": (True, lambda: bench_restarts.ours(RESTARTS)),
    "restarts-vllm": (True, lambda: bench_restarts.vllms(RESTARTS)),
    "executors": (True, lambda: bench_executors.compare(EXECUTORS)),
    "kills": (True, lambda: bench_kills.loop(KILLS)),
}
"""By name: whether a part needs vLLM, and what runs it."""


def run(parts: Sequence[str] = ()) -> int:
    """Run the parts named, all where none is, and print their tables; returns the exit code. Raises BenchError."""
    if unknown := [name for name in parts if name not in PARTS]:
        raise BenchError(f"bench: {unknown[0]!r}; allowed: {', '.join(PARTS)}")
    version = machine.vllm_version()
    print(f"{machine.device()}, vLLM {version or 'not installed'}, commit {machine.git_commit()}")
    for name in parts or PARTS:
        needs_vllm, part = PARTS[name]
        if needs_vllm and not version:
            print(f"\n{name}: left out, as it needs vLLM")
            continue
        print()
        part()
    return 0
