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
    """One claim.

    needs : what a study has to hold so that the claim can be judged from it
    why : how vLLM and the hardware bring the effect about, and where it would differ; true whatever the verdict
    """

    id: str
    sentence: str
    experiment: str
    metric: str
    needs: str
    why: str


CLAIMS = (
    Claim(
        "queue",
        "max_num_seqs of 4 to 8 lowers latency at 20 concurrent requests.",
        "20 requests in flight, few sequences against many, at one budget",
        "p50 of TTFT and E2E",
        "a closed loop of 20 requests on two values of max_num_seqs",
        "vLLM runs at most max_num_seqs requests at a time, and the others wait in its queue. A step with fewer "
        "requests is shorter, but not in proportion, since it reads the same weights: what a request gains on each "
        "token it pays for, several times over, by waiting for its turn. TPOT falls, TTFT and E2E rise. Fewer places "
        "would help only where a step takes as long as it has requests.",
    ),
    Claim(
        "budget-short",
        "A budget (max_num_batched_tokens) of 1,024 to 2,048 lowers TTFT and E2E of short prompts against larger ones.",
        "short prompts at low and high concurrency, a small budget against a large one",
        "p50 of TTFT and E2E",
        "short prompts on two budgets with the same max_num_seqs",
        "The budget caps the tokens of one step. Short prompts of some twenty people fit into a small budget as well "
        "as into a large one, so both compute the same steps. A small one matters to short prompts only beside long "
        "ones, whose steps it cuts, or where more prompts wait than it holds: then the first get their token sooner, "
        "the last later.",
    ),
    Claim(
        "budget-throughput",
        "A budget of 1,024 lowers throughput against larger ones.",
        "short prompts at high concurrency, a small budget against a large one",
        "output tokens/s",
        "a high concurrency on two budgets with the same max_num_seqs",
        "A decoding request takes one token of the budget a step, so even a small budget has room for all that run. "
        "It costs throughput where many prompts wait: more steps are needed for the same tokens, and each has its "
        "fixed cost.",
    ),
    Claim(
        "chunked-itl",
        "Chunked prefill keeps the ITL of running streams low while long prompts arrive.",
        "streams that are answered while long prompts arrive, chunked at several budgets against chunking off",
        "p99 of the streams' ITL",
        "streams disturbed by long prompts, with chunked prefill on and off",
        "Without chunking one step holds a whole prompt, and every running stream waits until it has ended. Chunks "
        "cap the prompt tokens of a step, so the longest gap of a stream falls with the budget. A budget as long as "
        "the prompt cuts nothing, chunked prefill or not.",
    ),
    Claim(
        "chunked-ttft",
        "Small chunks slow a long prompt's prefill only slightly.",
        "long prompts alone, at small budgets against chunking off",
        "p50 of the long prompt's TTFT",
        "long prompts alone on several budgets and with chunking off",
        "Every chunk pays the fixed cost of a step once more and reads the KV cache of the chunks before it. Where a "
        "chunk keeps the processor busy for long, that is little beside its arithmetic. A processor that is done with "
        "a chunk in a moment, as a large GPU is, needs larger chunks for the same.",
    ),
    Claim(
        "no-loss",
        "With budget < prompt < max_model_len no token of the prompt is lost: it is computed in chunks, 4,096 tokens in"
        " exactly 4 at a budget of 1,024.",
        "prompts longer than the budget, alone, beside streams, and preempted; the same prompts without chunking",
        "scheduled prompt tokens of each request, number of chunks, equality of greedy outputs",
        "scheduler steps of prompts longer than the budget, and the same prompts with chunking off",
        "The scheduler notes for each request how many of its tokens have been computed, and the next step goes on "
        "from there: a prompt longer than the budget takes more steps, nothing else. Every chunk was recorded. "
        "Outputs with and without chunking may part where two tokens are almost equally likely, as sums in another "
        "order round differently.",
    ),
    Claim(
        "no-wait",
        "The scheduler does not wait to fill the budget: a lone request starts at once, however large the budget.",
        "lone short requests on all budgets",
        "mean queue time and p50 of TTFT",
        "lone short requests on several budgets",
        "A step takes what is there when the step before has ended. The budget is the most that it may take: nothing "
        "waits for it to fill.",
    ),
    Claim(
        "fcfs",
        "Requests are first scheduled in the order of their arrival; priority scheduling serves urgent ones first.",
        "a burst of numbered requests, and urgent ones sent late into a queue, under both scheduling policies",
        "order of first scheduling; p50 of the urgent requests' TTFT",
        "scheduler steps of a burst longer than max_num_seqs, and of urgent requests under both policies",
        "New requests join the end of the queue, and each step takes from its head while budget and places last. "
        "Under the priority policy the queue is sorted by priority first, so an urgent request passes all that wait, "
        "however long they have.",
    ),
    Claim(
        "isolation",
        "A request's greedy output does not depend on what else is in its batch.",
        "the same requests one at a time and all at once",
        "equality of output tokens; where they part, the gap between the two best log probabilities",
        "token ids of the same requests on two settings",
        "Requests of a batch share kernels and no numbers. But a kernel may add up in another order when the batch is "
        "larger, which changes the last digits; where two tokens are almost equally likely this decides between them, "
        "and the answer goes on differently. Lower precision and random weights make such ties frequent.",
    ),
    Claim(
        "quant-ttft",
        "Weight quantization (AWQ or GPTQ int4, FP8) does not improve TTFT at small batch, or worsens it.",
        "single requests on quantized weights against bfloat16",
        "p50 of TTFT",
        "quantized weights beside unquantized ones at concurrency 1",
        "The first token needs the whole prompt. A long prompt is bound by arithmetic: 4-bit weights are unpacked and "
        "multiplied in 16 bits all the same, which is more work, while FP8 and int8 are multiplied at up to twice the "
        "rate where a GPU can. A short prompt is bound as a decode step is, by reading weights and by the fixed cost "
        "of its kernels, so smaller weights help it as far as reading was the limit.",
    ),
    Claim(
        "quant-throughput",
        "Weight quantization may raise throughput.",
        "rising concurrency on quantized weights against bfloat16",
        "output tokens/s and p50 of TPOT",
        "quantized weights beside unquantized ones at high concurrency",
        "Every decode step reads all weights once. Where that takes most of the step, as on a GPU with little "
        "bandwidth, smaller weights make it shorter. Where the fixed cost of kernels or the arithmetic of many "
        "requests takes most of it, they do not, and unpacking 4-bit weights or scaling activations costs extra. The "
        "memory they free becomes KV cache, which helps only if requests had to wait for it.",
    ),
    Claim(
        "len-budget",
        "max_model_len = max_num_batched_tokens = 16,384 slows short prompts against a budget of 2,048.",
        "short prompts, alone and several at once, with a budget as long as the model's length against a smaller one",
        "p50 of TTFT and E2E",
        "short prompts on a budget equal to max_model_len and on a smaller one",
        "max_model_len caps how long a request may grow; no step takes longer for it. A budget as long as that lets "
        "one step hold a whole long prompt, which delays those beside it. Short prompts without long ones beside them "
        "are computed in the same steps under both.",
    ),
    Claim(
        "target",
        "E2E under 1 s is within reach for short outputs at concurrency 1 to 64.",
        "rising output lengths and concurrency on each setting",
        "longest output with p95 of E2E under 1 s",
        "several output lengths at several concurrencies",
        "E2E is TTFT and a token's time for each further token, so a second holds as many tokens as there are steps "
        "in it. Steps get longer with concurrency, slowly as long as reading the weights takes most of them. A GPU "
        "with less bandwidth has fewer steps in its second, for every setting.",
    ),
    Claim(
        "stuck-log",
        'A log that says "Running: 1 reqs, 19.4 tokens/s" means a stuck engine.',
        "one stream against the bound that the GPU's memory bandwidth sets",
        "output tokens/s of one stream",
        "one stream on a GPU whose memory bandwidth is known",
        "For each token of a lone request all weights are read once, so bandwidth over bytes bounds its rate; only "
        "smaller weights or speculative decoding get past that. vLLM's log line is an average since the line before, "
        "which a request that began or ended in between pulls down. An engine that is stuck reports no tokens at all "
        "while requests run.",
    ),
    Claim(
        "expected",
        "The thread's numbers (15.7 s on average, 300 to 380 tokens/s in all) are what an L4 can do.",
        "the thread's load, with the bound by weights, KV cache and bandwidth",
        "mean E2E and output tokens/s",
        "the thread's load on a GPU whose memory bandwidth is known",
        "Requests that run together share each reading of the weights, so the bound on their common rate grows with "
        "their number. An engine in order comes close to it at such loads; one that stays far below spends its time "
        "elsewhere, such as in launching kernels one by one (eager mode) or on a host too slow to feed the GPU.",
    ),
)

BY_ID = {claim.id: claim for claim in CLAIMS}
