"""What a GPU can move and multiply at best: memory bandwidth and dense FLOP/s, each with its source.

Vendors print FLOP/s twice as high, for weights half of which are zero ("with sparsity"). Here they are dense, with
accumulation in 32 bits, as vLLM's kernels multiply.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np


class GpuError(Exception):
    """A GPU that is not in the table; the message lists those that are."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a CPU in its place.

    bandwidth : bytes/s to and from its memory
    flops : dense FLOP/s of a matrix product by the type of its operands: float32, 16-bit, fp8, int8. What has no
        entry is multiplied as 16-bit operands, as vLLM does with FP8 weights on Ampere
    memory : bytes
    bfloat16 : whether 16-bit operands may be bfloat16; else float16 alone
    source : where the numbers are from
    """

    name: str
    bandwidth: float
    flops: Mapping[str, float]
    memory: float
    source: str
    bfloat16: bool = True

    def rate(self, operands: str) -> float:
        """Dense FLOP/s of a matrix product of such operands."""
        return self.flops[operands] if operands in self.flops else self.flops["16-bit"]


def _flops(sixteen: float, fp8: float | None, int8: float) -> dict[str, float]:
    return {"16-bit": sixteen, "int8": int8} | ({} if fp8 is None else {"fp8": fp8})


GPUS = (
    Gpu("L4", 300e9, _flops(121e12, 242.5e12, 242.5e12), 24e9, "NVIDIA L4 datasheet (prints sparse rates)"),
    Gpu("A10G", 600e9, _flops(70e12, None, 140e12), 24e9, "NVIDIA A10G datasheet as published by AWS"),
    Gpu("L40S", 864e9, _flops(362e12, 733e12, 733e12), 48e9, "NVIDIA L40S datasheet"),
    Gpu("A100-40GB", 1555e9, _flops(312e12, None, 624e12), 40e9, "NVIDIA A100 datasheet"),
    Gpu("A100-80GB", 2039e9, _flops(312e12, None, 624e12), 80e9, "NVIDIA A100 datasheet, SXM"),
    Gpu("H100", 3350e9, _flops(989e12, 1979e12, 1979e12), 80e9, "NVIDIA H100 datasheet, SXM (prints sparse rates)"),
    Gpu("H200", 4800e9, _flops(989e12, 1979e12, 1979e12), 141e9, "NVIDIA H200 datasheet, SXM (prints sparse rates)"),
    Gpu("T4", 320e9, _flops(65e12, None, 130e12), 16e9, "NVIDIA T4 datasheet", bfloat16=False),
    Gpu("RTX 4090", 1008e9, _flops(165e12, 330e12, 661e12), 24e9, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
)

CPU = Gpu(
    "AMD EPYC (2 cores)",
    26e9,
    {"float32": 0.204e12},
    25e9,
    "measured by `python -m latency_lab bench cpu`: the best of several copies and of several float32 matrix products",
)
"""The kind of machine that the committed CPU studies were measured on: two virtual cores."""

_BY_DEVICE = (
    ("a100.*80", "A100-80GB"),
    ("a100.*40", "A100-40GB"),
    ("4090", "RTX 4090"),
    *((rf"\b{gpu.name.lower()}\b", gpu.name) for gpu in GPUS if gpu.name.isalnum()),
)


def find(name: str) -> Gpu:
    """The GPU of that name, as in the table or as the driver calls it ("NVIDIA A100-SXM4-80GB"). Raises GpuError."""
    given = name.lower().replace("_", "-")
    by_name = {gpu.name: gpu for gpu in (*GPUS, CPU)}
    if name in by_name:
        return by_name[name]
    for pattern, found in _BY_DEVICE:
        if re.search(pattern, given):
            return by_name[found]
    raise GpuError(f"GPU {name!r} is not known; allowed: {', '.join(gpu.name for gpu in GPUS)}")


def measure_cpu(seconds: float = 2.0) -> tuple[float, float]:
    """This CPU's copy bandwidth in bytes/s (read and written bytes both count) and its float32 FLOP/s.

    The best of what fits into `seconds` each: anything else that runs can only make it slower.
    """
    source = np.ones(64 * 2**20, np.float32)  # 256 MiB: no cache holds it
    target = np.empty_like(source)
    copy_s = _best(lambda: np.copyto(target, source), seconds)
    left = np.ones((2048, 2048), np.float32)
    product = np.empty_like(left)
    product_s = _best(lambda: np.matmul(left, left, out=product), seconds)
    return 2 * source.nbytes / copy_s, 2 * len(left) ** 3 / product_s


def _best(work: Callable[[], object], seconds: float) -> float:
    end = time.perf_counter() + seconds
    best = float("inf")
    while (began := time.perf_counter()) < end:
        work()
        best = min(best, time.perf_counter() - began)
    return best
