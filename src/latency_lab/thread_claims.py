"""The fifteen claims that this study judges: what a public thread on a slow vLLM was told, and what it was asked.

The thread: Qwen3-4B-Instruct-2507 on one NVIDIA L4, 20 concurrent requests of a short prompt and 256 output tokens,
15.7 s each on average. Each claim has its sentence, the experiment that can tell, and the metric that decides. Which
effect counts, and with what confidence, is not here but in the study's YAML (`claims:`), where it is fixed before the
run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One claim. `needs` says what a study has to hold so that the claim can be judged from it."""

    id: str
    sentence: str
    experiment: str
    metric: str
    needs: str


CLAIMS = (
    Claim(
        "queue",
        "max_num_seqs of 4 to 8 lowers latency at 20 concurrent requests.",
        "20 requests in flight, few sequences against many, at one budget",
        "p50 of TTFT and E2E",
        "a closed loop of 20 requests on two values of max_num_seqs",
    ),
    Claim(
        "budget-short",
        "A budget (max_num_batched_tokens) of 1,024 to 2,048 lowers TTFT and E2E of short prompts against larger ones.",
        "short prompts at low and high concurrency, a small budget against a large one",
        "p50 of TTFT and E2E",
        "short prompts on two budgets with the same max_num_seqs",
    ),
    Claim(
        "budget-throughput",
        "A budget of 1,024 lowers throughput against larger ones.",
        "short prompts at high concurrency, a small budget against a large one",
        "output tokens/s",
        "a high concurrency on two budgets with the same max_num_seqs",
    ),
    Claim(
        "chunked-itl",
        "Chunked prefill keeps the ITL of running streams low while long prompts arrive.",
        "streams that are answered while long prompts arrive, chunked at several budgets against chunking off",
        "p99 of the streams' ITL",
        "streams disturbed by long prompts, with chunked prefill on and off",
    ),
    Claim(
        "chunked-ttft",
        "Small chunks slow a long prompt's prefill only slightly.",
        "long prompts alone, at small budgets against chunking off",
        "p50 of the long prompt's TTFT",
        "long prompts alone on several budgets and with chunking off",
    ),
    Claim(
        "no-loss",
        "With budget < prompt < max_model_len no token of the prompt is lost: it is computed in chunks, 4,096 tokens in"
        " exactly 4 at a budget of 1,024.",
        "prompts longer than the budget, alone, beside streams, and preempted; the same prompts without chunking",
        "scheduled prompt tokens of each request, number of chunks, equality of greedy outputs",
        "scheduler steps of prompts longer than the budget, and the same prompts with chunking off",
    ),
    Claim(
        "no-wait",
        "The scheduler does not wait to fill the budget: a lone request starts at once, however large the budget.",
        "lone short requests on all budgets",
        "mean queue time and p50 of TTFT",
        "lone short requests on several budgets",
    ),
    Claim(
        "fcfs",
        "Requests are first scheduled in the order of their arrival; priority scheduling serves urgent ones first.",
        "a burst of numbered requests, and urgent ones sent late into a queue, under both scheduling policies",
        "order of first scheduling; p50 of the urgent requests' TTFT",
        "scheduler steps of a burst longer than max_num_seqs, and of urgent requests under both policies",
    ),
    Claim(
        "isolation",
        "A request's greedy output does not depend on what else is in its batch.",
        "the same requests one at a time and all at once",
        "equality of output tokens; where they part, the gap between the two best log probabilities",
        "token ids of the same requests on two settings",
    ),
    Claim(
        "quant-ttft",
        "Weight quantization (AWQ or GPTQ int4, FP8) does not improve TTFT at small batch, or worsens it.",
        "single requests on quantized weights against bfloat16",
        "p50 of TTFT",
        "quantized weights beside unquantized ones at concurrency 1",
    ),
    Claim(
        "quant-throughput",
        "Weight quantization may raise throughput.",
        "rising concurrency on quantized weights against bfloat16",
        "output tokens/s and p50 of TPOT",
        "quantized weights beside unquantized ones at high concurrency",
    ),
    Claim(
        "len-budget",
        "max_model_len = max_num_batched_tokens = 16,384 slows short prompts against a budget of 2,048.",
        "short prompts, alone and several at once, with a budget as long as the model's length against a smaller one",
        "p50 of TTFT and E2E",
        "short prompts on a budget equal to max_model_len and on a smaller one",
    ),
    Claim(
        "target",
        "E2E under 1 s is within reach for short outputs at concurrency 1 to 64.",
        "rising output lengths and concurrency on each setting",
        "longest output with p95 of E2E under 1 s",
        "several output lengths at several concurrencies",
    ),
    Claim(
        "stuck-log",
        'A log that says "Running: 1 reqs, 19.4 tokens/s" means a stuck engine.',
        "one stream against the bound that the GPU's memory bandwidth sets",
        "output tokens/s of one stream",
        "one stream on a GPU whose memory bandwidth is known",
    ),
    Claim(
        "expected",
        "The thread's numbers (15.7 s on average, 300 to 380 tokens/s in all) are what an L4 can do.",
        "the thread's load, with the bound by weights, KV cache and bandwidth",
        "mean E2E and output tokens/s",
        "the thread's load on a GPU whose memory bandwidth is known",
    ),
)

BY_ID = {claim.id: claim for claim in CLAIMS}
