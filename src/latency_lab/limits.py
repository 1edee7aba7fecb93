"""Change max_num_batched_tokens and max_num_seqs of a living engine, up to those that it was started with.

What runs here runs in the engine's process, on a scheduler that trace.py made. Both limits are the scheduler's to obey:
it never decides more, so what the worker was built for (its buffers) may be larger. What else vLLM derives from the two
(0.24, 0.32: config/scheduler.py, v1/core/sched/scheduler.py, v1/core/kv_cache_manager.py) is either set here as well or
makes this refuse:

- `scheduler_config` is one object with the worker's where both share a process: the scheduler gets a copy of its own;
- sliding windows and chunked attention reserve KV-cache blocks for the tokens in flight, Mamba layers align chunks;
- encoders have budgets of their own, speculative decoding and LoRA take slots from the token budget.

What torch.compile and CUDA graphs make of the limits at the start is not the scheduler's: a study that has either is
refused before (study_hot.py).
"""

from __future__ import annotations

import copy
from typing import Any


def limit(scheduler: Any, budget_tokens: int, seqs: int) -> str | None:
    """Let an idle vLLM scheduler decide from now on as if it had been made with these two limits.

    Returns None where it will, else why it can't; nothing is changed then.
    """
    reason = _obstacle(scheduler, budget_tokens, seqs)
    if reason is not None:
        return reason
    own = copy.copy(scheduler.scheduler_config)
    own.max_num_batched_tokens = own.max_num_encoder_input_tokens = own.encoder_cache_size = budget_tokens
    own.max_num_seqs = seqs
    scheduler.scheduler_config = own
    scheduler.max_num_scheduled_tokens = budget_tokens
    scheduler.max_num_running_reqs = seqs
    if hasattr(scheduler, "max_num_active_reqs"):  # 0.24 has no such thing
        scheduler.max_num_active_reqs = seqs
    return None


def _obstacle(scheduler: Any, budget_tokens: int, seqs: int) -> str | None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = scheduler.vllm_config
    started = config.scheduler_config
    apart = [
        name for name in ("max_num_scheduled_tokens", "max_num_active_seqs") if getattr(started, name, None) is not None
    ]
    kinds = {type(group.kv_cache_spec) for group in scheduler.kv_cache_config.kv_cache_groups}
    if not (hasattr(scheduler, "max_num_scheduled_tokens") and hasattr(scheduler, "max_num_running_reqs")):
        return "the scheduler of this vLLM keeps its limits elsewhere"
    if budget_tokens > started.max_num_batched_tokens or seqs > started.max_num_seqs:
        return (
            f"max_num_batched_tokens {budget_tokens} and max_num_seqs {seqs} are not within those that the engine was "
            f"started with, {started.max_num_batched_tokens} and {started.max_num_seqs}"
        )
    if apart:
        return f"{' and '.join(apart)} given, which limits the scheduler beside the two"
    if config.speculative_config is not None or config.lora_config is not None:
        return "speculative decoding and LoRA size more than the scheduler by these limits"
    if config.model_config.is_multimodal_model or config.model_config.is_encoder_decoder:
        return "models with an encoder size more than the scheduler by these limits"
    if kinds != {FullAttentionSpec}:
        return "a KV cache of another kind than full attention's is sized by these limits"
    if scheduler.has_unfinished_requests():
        return "requests are still running"
    return None
