"""Measure what vLLM's batching, chunked-prefill and quantization settings do to latency and throughput."""
