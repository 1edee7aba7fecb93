"""What becomes of a job whose engine is not what the study asked for, with a made-up engine."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from latency_lab import engine, measure, records
from latency_lab.study import load_study

STUDY = """\
question: Is it quantized?
model: {source: config, config: smollm2-135m-instruct}
settings: {named: {gptq: {engine: {quantization: gptq}}}}
workloads:
  chat: {load: {kind: closed, concurrency: [1, 2], requests_each: 1}, prompt: {tokens: 8}, output: {tokens: 4}}
repeats: 1
"""


def test_weights_that_stayed_unquantized_fail_all_cells_of_their_setting(tmp_path, monkeypatch):
    (tmp_path / "made-up.yaml").write_text(STUDY)
    (job,) = measure.jobs(load_study(tmp_path / "made-up.yaml"), tmp_path / "runs")
    facts = engine.EngineFacts(
        engine_start_s=1.0,
        resolved={"quantization": "auto_gptq"},
        resolved_id="r",
        kv_cache_blocks=1,
        kv_cache_tokens=16,
        weight_bytes=269_000_000,
        memory_used_before_bytes=0,
        cpu_load_before=0.0,
        unapplied="quantization not applied: auto_gptq was asked for",
    )

    @contextlib.asynccontextmanager
    async def started():
        yield SimpleNamespace(facts=facts)

    monkeypatch.setattr(job, "_engine", started)
    with pytest.raises(engine.EngineError, match="quantization not applied"):
        asyncio.run(job.run())
    cells = records.load(tmp_path / "runs" / "made-up").cells
    assert list(cells["status"]) == ["failed"] * 2 and set(cells["error"]) == {facts.unapplied}
    assert set(cells["weight_bytes"]) == {269_000_000} and set(cells["quantization"]) == {"auto_gptq"}
    assert len(job.pending()) == 2, "a later sweep measures them again"
