"""What is stored: the parquet schemas of a study's three tables, with the unit and meaning of every column.

A *cell* is one repeat of one workload point on one engine setting; it has one row in `cells` and one row in `requests`
for each request that was due, failed or not. Every time in `requests` is in seconds on one monotonic clock
(`time.perf_counter`) that starts at 0 with the cell, so nothing here moves when the wall clock is set.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 1

STATUSES = ("done", "failed", "timeout", "refused", "skipped")
"""done: measured; failed: see `error`; timeout: ran past its limit; refused: vLLM refused a setting that the study
expected it to refuse; skipped: not attempted, because its engine had already died."""


def _field(name: str, type_: pa.DataType, doc: str, *, required: bool = False) -> pa.Field:
    return pa.field(name, type_, nullable=not required, metadata={"doc": doc})


KEYS = [
    _field("study", pa.string(), "name of the study", required=True),
    _field("cell", pa.string(), "id of the cell: a hash of all that shaped it", required=True),
    _field("setting", pa.string(), "label of the engine setting", required=True),
    _field(
        "setting_id",
        pa.string(),
        "hash of the setting, its model, the vLLM version and the device",
        required=True,
    ),
    _field("workload", pa.string(), "label of the workload point, e.g. 'chat c=8'", required=True),
    _field("workload_id", pa.string(), "hash of the workload point's definition", required=True),
    _field("repeat", pa.int16(), "0-based number of the repeat", required=True),
]

SETTING_VALUES = [
    _field("max_num_batched_tokens", pa.int32(), "token budget of a scheduler step, as vLLM resolved it"),
    _field("max_num_seqs", pa.int32(), "most requests running at once, as vLLM resolved it"),
    _field("max_model_len", pa.int32(), "longest prompt plus output in tokens, as vLLM resolved it"),
    _field("enable_chunked_prefill", pa.bool_(), "chunked prefill, as vLLM resolved it"),
    _field("enable_prefix_caching", pa.bool_(), "prefix caching, as vLLM resolved it"),
    _field("enforce_eager", pa.bool_(), "no CUDA graphs and no torch.compile, as vLLM resolved it"),
    _field("async_scheduling", pa.bool_(), "schedule the next step while one runs, as vLLM resolved it"),
    _field("scheduling_policy", pa.string(), "fcfs or priority, as vLLM resolved it"),
    _field("dtype", pa.string(), "type of activations and unquantized weights, as vLLM resolved it"),
    _field("quantization", pa.string(), "weight quantization method, as vLLM resolved it"),
    _field("kv_cache_dtype", pa.string(), "type of the KV cache, as vLLM resolved it"),
    _field("tensor_parallel_size", pa.int16(), "GPUs that share each layer, as vLLM resolved it"),
    _field("pipeline_parallel_size", pa.int16(), "GPUs that share the layers, as vLLM resolved it"),
]

WORKLOAD_VALUES = [
    _field("load", pa.string(), "closed, constant, poisson, gamma, burst, replay or mix", required=True),
    _field("concurrency", pa.int32(), "closed loop: requests in flight; burst: requests sent at once; mix: null"),
    _field("rate_per_s", pa.float64(), "open loop: mean arrivals a second"),
    _field("burstiness", pa.float64(), "gamma arrivals: shape of the gaps (1 is Poisson, less is burstier)"),
]

REQUESTS = pa.schema(
    KEYS
    + SETTING_VALUES
    + WORKLOAD_VALUES
    + [
        _field(
            "request",
            pa.int32(),
            "0-based number of the request in its cell, in order of scheduling",
            required=True,
        ),
        _field("request_id", pa.string(), "the id given to vLLM", required=True),
        _field(
            "class_name",
            pa.string(),
            "class of the workload's mix that the request belongs to",
            required=True,
        ),
        _field("priority", pa.int32(), "vLLM's priority: lower is served first"),
        _field("via", pa.string(), "engine (in-process) or openai (HTTP)", required=True),
        _field("api", pa.string(), "which of the server's: chat or completions; null in-process"),
        _field("streaming", pa.bool_(), "false where the client got the whole answer at once", required=True),
        _field(
            "detokenize", pa.bool_(), "false where vLLM gave token ids alone; null where nobody noted it: it made text"
        ),
        _field("prompt_tokens", pa.int32(), "tokens in the prompt; as the server counts them, where it made them"),
        _field("target_output_tokens", pa.int32(), "max_tokens asked for"),
        _field("output_tokens", pa.int32(), "tokens received; 0 where none came"),
        _field("cached_tokens", pa.int32(), "prompt tokens served by the prefix cache"),
        _field("scheduled_s", pa.float64(), "when the request was due; latency counts from here", required=True),
        _field("sent_s", pa.float64(), "when the client handed it over; null if it never did"),
        _field("first_token_s", pa.float64(), "when the first token reached the client"),
        _field("last_token_s", pa.float64(), "when the last token reached the client"),
        _field("finished_s", pa.float64(), "when the request ended, well or not"),
        _field(
            "token_times_s",
            pa.list_(pa.float32()),
            "arrival of each chunk of tokens, in seconds after sent_s",
        ),
        _field(
            "token_counts",
            pa.list_(pa.int32()),
            "tokens in each chunk; sums to output_tokens; null where only the chunks' times are known",
        ),
        _field("token_ids", pa.list_(pa.int32()), "the output's token ids, where the study asks to keep them"),
        _field(
            "logprob_gaps",
            pa.list_(pa.float32()),
            "nats between the two best log probabilities at each output token, where the workload asks to keep them",
        ),
        _field("queue_s", pa.float64(), "engine's own: from queued to first scheduled"),
        _field("prefill_s", pa.float64(), "engine's own: from first scheduled to first token"),
        _field("decode_s", pa.float64(), "engine's own: from first token to last token"),
        _field("preemptions", pa.int32(), "engine's own: times that the request was preempted"),
        _field("finish_reason", pa.string(), "length, stop or abort, as vLLM reports it"),
        _field("error", pa.string(), "why the request failed; null where it did not"),
    ]
)

STEPS = pa.schema(
    KEYS
    + [
        _field("engine", pa.int16(), "which scheduler: 0, or from 0 on under data parallelism", required=True),
        _field("step", pa.int32(), "0-based number in the cell of a step that held work", required=True),
        _field("start_s", pa.float64(), "when the scheduler began to choose; before the cell's time 0: warm-up"),
        _field(
            "end_s",
            pa.float64(),
            "when the step's tokens were back in the scheduler. With async scheduling the next step starts before "
            "that: steps overlap, and what one costs is the time from its predecessor's end to its own",
        ),
        _field("requests", pa.list_(pa.int32()), "numbers of the requests in the step; -1: not one of the cell's"),
        _field("tokens", pa.list_(pa.int32()), "tokens scheduled, of each request; the rest of a step's lists follow"),
        _field("computed", pa.list_(pa.int32()), "tokens of the request computed (or cached) before the step"),
        _field(
            "prefill", pa.list_(pa.int32()), "of `tokens`, those of the prompt that are computed for the first time"
        ),
        _field(
            "recomputed",
            pa.list_(pa.int32()),
            "of `tokens`, those computed before, and lost to a preemption; what neither holds is decode",
        ),
        _field("waiting", pa.int32(), "requests that wait after the step was scheduled"),
        _field("running", pa.int32(), "requests that run after the step was scheduled, whether or not it holds them"),
        _field("preempted", pa.int32(), "requests preempted while the step was scheduled"),
        _field("kv_cache_usage", pa.float32(), "share of the KV cache's blocks in use after scheduling, 0 to 1"),
    ]
)

CELLS = pa.schema(
    KEYS
    + SETTING_VALUES
    + WORKLOAD_VALUES
    + [
        _field("schema_version", pa.int16(), "version of this schema", required=True),
        _field("status", pa.string(), ", ".join(STATUSES), required=True),
        _field("error", pa.string(), "one line that says what went wrong"),
        _field("log_tail", pa.string(), "last lines of the engine's log, where something went wrong"),
        _field("requests", pa.int32(), "rows in the requests file", required=True),
        _field("requests_failed", pa.int32(), "rows with an error", required=True),
        _field(
            "requests_clamped",
            pa.int32(),
            "rows whose prompt or output is cut to max_model_len, as files know no such limit; null without files",
        ),
        _field("traffic", pa.string(), "the files that requests come from, and what of them was left out or sorted"),
        _field(
            "requests_sha256",
            pa.string(),
            "digest of the requests file of this cell; null where there is none",
        ),
        _field("steps", pa.int32(), "rows in the steps file; null where the scheduler was not traced"),
        _field("steps_dropped", pa.int64(), "last steps of the cell that were not kept, for lack of memory"),
        _field("steps_sha256", pa.string(), "digest of the steps file of this cell; null where there is none"),
        _field("steps_note", pa.string(), "why there are no steps, or not all"),
        _field("started_at", pa.timestamp("us", tz="UTC"), "wall clock at the cell's time 0"),
        _field("duration_s", pa.float64(), "from time 0 to the last request's end"),
        _field("slo", pa.string(), "the workload's SLOs as JSON, where the study gives any"),
        # the engine
        _field("engine_start_s", pa.float64(), "from asking for the engine until it was ready"),
        _field("asked", pa.string(), "engine arguments that the study gave, as JSON"),
        _field("resolved", pa.string(), "every engine argument as vLLM resolved it, as JSON"),
        _field("resolved_id", pa.string(), "hash of `resolved`: equal for two labels of one configuration"),
        _field(
            "hot",
            pa.bool_(),
            "true where one engine served several settings, with its limits changed while it lived: those of this cell "
            "are max_num_batched_tokens and max_num_seqs; null where nobody noted it: it was not",
        ),
        _field("started_max_num_batched_tokens", pa.int32(), "where hot: the budget that the engine was started with"),
        _field("started_max_num_seqs", pa.int32(), "where hot: the max_num_seqs that the engine was started with"),
        _field("env", pa.string(), "environment variables that shaped the run, as JSON"),
        _field("kv_cache_blocks", pa.int32(), "blocks in the KV cache"),
        _field("kv_cache_tokens", pa.int64(), "tokens that the KV cache holds"),
        _field("kv_cache_usage_max", pa.float64(), "largest share of the KV cache in use, 0 to 1"),
        _field(
            "weight_bytes",
            pa.int64(),
            "bytes of parameters and buffers that were loaded, over all workers; null on a CPU",
        ),
        _field("model", pa.string(), "hub id, folder name or name of the published config"),
        _field("weights", pa.string(), "real or random"),
        _field("model_digest", pa.string(), "SHA-256 over the model's config and weight file digests or sizes"),
        _field("seed", pa.int64(), "the study's seed"),
        # the client's own cost
        _field("client_us_per_token", pa.float64(), "time in the client's own code for each output token"),
        _field("client_share", pa.float64(), "client's own time over the cell's duration"),
        _field("frontend_cpu_share", pa.float64(), "CPU time of the whole front-end process over the duration"),
        _field(
            "client_cpu_share",
            pa.float64(),
            "CPU time of the client's process over the duration; null where the client is in the front end's",
        ),
        _field("loop_lag_p99_s", pa.float64(), "p99 lateness of a 10 ms timer in the client's event loop"),
        # the machine
        _field("vllm_version", pa.string(), "version of vLLM"),
        _field("torch_version", pa.string(), "version of PyTorch"),
        _field("python_version", pa.string(), "version of Python"),
        _field("lab_version", pa.string(), "version of this package"),
        _field("git_commit", pa.string(), "commit of this repository, '+dirty' where files were changed"),
        _field("imported_from", pa.string(), "tool and file that the cell comes from; null where measured here"),
        _field("device", pa.string(), "name of the GPU, or of the CPU where there is none"),
        _field("device_count", pa.int16(), "GPUs used by the engine; 0 on a CPU"),
        _field("driver_version", pa.string(), "version of the NVIDIA driver"),
        _field("cpu", pa.string(), "name of the CPU"),
        _field("cpu_cores", pa.int16(), "logical cores"),
        _field(
            "affinity",
            pa.string(),
            "logical cores that the engine and its client might run on, e.g. '0-3,8': those that they were pinned to, "
            "or all; null where nobody noted it: nothing was pinned",
        ),
        _field("memory_bytes", pa.int64(), "memory of the machine"),
        _field("os", pa.string(), "operating system and kernel"),
        # what the machine did meanwhile
        _field(
            "memory_used_before_bytes",
            pa.int64(),
            "memory in use before the engine started (GPU, else machine)",
        ),
        _field("memory_used_max_bytes", pa.int64(), "most memory in use in the cell (GPU, else machine)"),
        _field("power_mean_w", pa.float64(), "NVML: mean power of the engine's GPUs together"),
        _field("energy_j", pa.float64(), "NVML: energy of the engine's GPUs together"),
        _field("sm_clock_mean_mhz", pa.float64(), "NVML: mean SM clock"),
        _field("temperature_max_c", pa.float64(), "NVML: highest GPU temperature"),
        _field("cpu_load_before", pa.float64(), "1-minute load average before the engine started"),
    ]
)
