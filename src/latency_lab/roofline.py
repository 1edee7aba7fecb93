"""How long a step of an engine takes on a GPU: bytes over bandwidth, FLOPs over FLOP/s, and what neither explains.

A step computes some tokens of some requests: one each of those that decode, many of one whose prompt is read. On the
GPU it takes

    layers * kernel_s                    gaps between kernels and their starts and ends; more for quantized weights
    + requests * request_s               sampling and what else is done request by request
    + (weights + KV cache) bytes / (bandwidth_fraction * bandwidth)
    + FLOPs / (flops_fraction * FLOP/s)

in seconds. The classic roofline takes the larger of the last two; their sum predicts better here, since small matrix
products do not overlap reading and multiplying well, and it differs only where both matter.

Beside the GPU works the host, which has to launch a step's kernels before they can run. It launches a decode step of
up to max_num_seqs requests as one CUDA graph, and that is hidden behind the step before. A step with prompt tokens it
launches piece by piece (attention is not in the graphs), one with more tokens than the largest captured graph kernel
by kernel, and so each step in eager mode: a step then takes as long as the slower of host and GPU. Captured sizes are
1, 2, 4, multiples of 8 up to 256 and of 16 up to min(2 * max_num_seqs, 512), and a step computes as many tokens as the
next of them (vLLM's VllmConfig._set_cudagraph_sizes).

All of `Costs` is fitted to recorded steps (see fitting.py); bandwidth and FLOP/s come from gpus.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from latency_lab.gpus import Gpu
from latency_lab.shapes import FORMATS, Shape

LARGEST_CAPTURE = 512
LAUNCHES = ("graph", "pieces", "kernels", "eager")
"""How the host launches a step: as one CUDA graph, in pieces of graphs, kernel by kernel though compiled, eagerly."""


@dataclass(frozen=True)
class Costs:
    """What a step costs beside bytes and FLOPs at the GPU's best, and what fractions of that are reached.

    kernel_s : s a layer, by format of the weights
    request_s : s a request in the step
    bandwidth_fraction : of the GPU's bandwidth, reached while weights and KV cache are read
    flops_fraction : of the GPU's FLOP/s, reached in matrix products, by format of the weights
    launch_s : s a layer that the host takes to launch a step, by LAUNCHES; 0 where it was never seen
    inbound_s, outbound_s : s from a client's sending to the scheduler, and from a step's end to the client
    spacing_s : s between requests that are sent at once
    """

    kernel_s: Mapping[str, float]
    request_s: float
    bandwidth_fraction: float
    flops_fraction: Mapping[str, float]
    launch_s: Mapping[str, float]
    inbound_s: float = 0.0
    outbound_s: float = 0.0
    spacing_s: float = 0.0


@dataclass(frozen=True)
class Engine:
    """What of an engine setting sets the time of its steps.

    weights : a format of shapes.FORMATS
    cache : the KV cache's, of shapes.KV_BYTES
    graphs : CUDA graphs are on; else every step is launched eagerly
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    weights: str = "bf16"
    cache: str = "16-bit"
    graphs: bool = True
    asynchronous: bool = True
    chunked: bool = True
    kv_cache_tokens: int | None = None


class StepTime:
    """Times of the steps of one model on one GPU under one engine setting, in seconds.

    `gpu_s` and `host_s` take the work of one step: tokens computed, requests, tokens of context that are read from the
    KV cache, and pairs of a computed token and one that it looks at. `parts_s` says where the GPU's time goes.
    """

    def __init__(self, shape: Shape, gpu: Gpu, costs: Costs, engine: Engine) -> None:
        bandwidth = costs.bandwidth_fraction * gpu.bandwidth
        stored = FORMATS[engine.weights]
        wide = "float32" if engine.weights == "float32" else "16-bit"
        fraction = costs.flops_fraction[engine.weights]
        self.fixed_s = shape.layers * costs.kernel_s[engine.weights]
        self.weights_s = shape.step_bytes(engine.weights) / bandwidth
        self.request_s = costs.request_s
        self.context_s = shape.kv_bytes(engine.cache) / bandwidth
        self.token_s = 2 * shape.linear_parameters / (fraction * gpu.rate(stored.operands))
        # The LM head and attention multiply unquantized numbers, at the fraction that unquantized weights reach.
        plain = gpu.rate(wide) * costs.flops_fraction[wide if wide == "float32" else "bf16"]
        self.head_s = 2 * shape.head_parameters / plain
        self.pair_s = shape.attention_flops / plain
        self.launch_s = {kind: shape.layers * seconds for kind, seconds in costs.launch_s.items()}
        self.sizes = captured(engine.max_num_seqs) if engine.graphs else []
        self.graphs = engine.graphs

    def gpu_s(self, tokens: int, requests: int, context: float, pairs: float) -> float:
        """Seconds on the GPU. Works on arrays of steps as well, if `tokens` are already padded."""
        return (
            self.fixed_s
            + self.weights_s
            + requests * (self.request_s + self.head_s)
            + context * self.context_s
            + tokens * self.token_s
            + pairs * self.pair_s
        )

    def padded(self, tokens: int) -> int:
        """Tokens that are computed for so many: those of the next captured graph."""
        at = bisect_left(self.sizes, tokens)
        return self.sizes[at] if at < len(self.sizes) else tokens

    def launch(self, tokens: int, decode_only: bool) -> str:
        """Which of LAUNCHES a step takes."""
        if not self.graphs:
            return "eager"
        if tokens > self.sizes[-1]:
            return "kernels"
        return "graph" if decode_only else "pieces"

    def host_s(self, tokens: int, decode_only: bool) -> float:
        """Seconds of the host's launching."""
        return self.launch_s[self.launch(tokens, decode_only)]

    def parts_s(self, tokens: int, requests: int, context: float, pairs: float) -> dict[str, float]:
        """`gpu_s` by what the GPU does meanwhile: overhead, weights, KV cache, compute."""
        return {
            "overhead": self.fixed_s + requests * self.request_s,
            "weights": self.weights_s,
            "KV cache": context * self.context_s,
            "compute": self.padded(tokens) * self.token_s + requests * self.head_s + pairs * self.pair_s,
        }


def captured(max_num_seqs: int) -> list[int]:
    """Sizes in tokens of the CUDA graphs that vLLM captures by default."""
    largest = min(2 * max_num_seqs, LARGEST_CAPTURE)
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_CAPTURE + 1, 16)) if size <= largest]


def engine_of(cell: Mapping[Any, Any], weights: str) -> Engine:
    """The engine of a measured cell, from the values that vLLM resolved."""
    known = {name: value for name, value in cell.items() if pd.notna(value)}
    cache = str(known.get("kv_cache_dtype", "auto"))
    return Engine(
        max_num_seqs=int(known["max_num_seqs"]),
        max_num_batched_tokens=int(known["max_num_batched_tokens"]),
        weights=weights,
        cache="fp8" if cache.startswith("fp8") else "float32" if weights == "float32" else "16-bit",
        graphs=not known.get("enforce_eager", False),
        asynchronous=bool(known.get("async_scheduling", False)),
        chunked=bool(known.get("enable_chunked_prefill", True)),
        kv_cache_tokens=int(known["kv_cache_tokens"]) if "kv_cache_tokens" in known else None,
    )
