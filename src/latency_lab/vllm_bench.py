"""vLLM's own benchmarks as their users run them (`vllm bench serve`, `throughput`, `sweep serve`), each a process.

The command `vllm` itself is not used: in the CPU build it looks for a package named vllm and ends at once. This calls
what that command calls.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

import psutil

from latency_lab import ROOT, machine, models, processes
from latency_lab.study_schema import Hub, SmolLM2

_MAIN = """
import sys
from importlib import import_module
from vllm.utils.argparse_utils import FlexibleArgumentParser
if __name__ == "__main__":
    bench = import_module("vllm.benchmarks." + sys.argv[1])
    parser = FlexibleArgumentParser()
    bench.add_cli_args(parser)
    bench.main(parser.parse_args(sys.argv[2:]))
"""


class BenchError(Exception):
    """A benchmark that cannot run, or vLLM's own that ended with an error; the message is one line."""


async def run(
    kind: str,
    options: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Run `vllm bench <kind>` to its end.

    Parameters
    ----------
    kind : serve, throughput or "sweep serve".
    options : `random_input_len: 32` becomes --random-input-len 32, true a bare --name, false a --no-name.

    Raises BenchError where it fails or is not done after `timeout_s`; it is ended then.
    """
    child = await asyncio.create_subprocess_exec(
        *command(kind, options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **(env or {})},
    )
    try:
        out, _ = await asyncio.wait_for(child.communicate(), timeout_s)
    except TimeoutError:
        raise BenchError(f"vllm bench {kind}: not done after {timeout_s:.0f} s") from None
    finally:
        if child.returncode is None:
            family = psutil.Process(child.pid).children(recursive=True)  # its engine, where it has one
            processes.end([psutil.Process(child.pid), *family])
            await child.wait()
    if child.returncode:
        lines = out.decode(errors="replace").strip().splitlines()
        raise BenchError(f"vllm bench {kind}: ended with exit code {child.returncode}: {lines[-1] if lines else ''}")


def command(kind: str, options: Mapping[str, Any]) -> list[str]:
    """`vllm bench <kind>` as words of a command line; see `run`."""
    module, *words = ["sweep.cli", "serve"] if kind == "sweep serve" else [kind]
    return [sys.executable, "-c", _MAIN, module, *words, *flags(options)]


def model() -> models.Model:
    """A model with a tokenizer, which vLLM's benchmark makes its random prompts with."""
    source = Hub(source="hub", id="Qwen/Qwen3-4B-Instruct-2507") if machine.has_gpu() else SmolLM2()
    return models.prepare(source, ROOT / "data" / "models")


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words
