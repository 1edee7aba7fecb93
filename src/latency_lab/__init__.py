"""Measure what vLLM's batching, chunked-prefill and quantization settings do to latency and throughput."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The project's folder; relative paths on the command line and in notebooks' parameters count from here."""
