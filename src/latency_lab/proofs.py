"""What scheduler steps and token ids prove, request by request. Tables in, tables out; each row says `ok` and why not.

The proofs rest on positions, not on the recorder's own split: a step that computes `tokens` of a request after
`computed` ones covers the positions from `computed` on. A prompt is whole where its steps cover its positions one after
another, from the first that the prefix cache did not hold. A preempted request loses its KV cache and starts over: the
positions that it covers again are recompute, allowed once a preemption has happened, and none may be left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from latency_lab import lists

PLACE = ["cell", "engine", "step"]
KEYS = ["setting", "workload", "cell", "repeat"]

ARRIVAL_S = 0.05
"""A request counts as waiting from this long after it was sent: it has to reach the engine's process first."""


def scheduled(steps: pd.DataFrame) -> pd.DataFrame:
    """One row a request in a step: `steps` with its lists taken apart, in the order in which vLLM scheduled them.

    `position` is the request's place in the step, `width` how many requests it held.
    decode = tokens - prefill - recomputed.
    """
    parts = {name: lists.flat(steps[name]) for name in _PARTS}
    width = parts["tokens"][1].astype(int)
    row = np.repeat(np.arange(len(steps)), width)
    out = steps[[*KEYS, "engine", "step", "start_s", "end_s"]].take(row).reset_index(drop=True)
    for name, (values, _) in parts.items():
        out[name] = values.astype(int)
    out["position"] = np.arange(len(row)) - np.repeat(np.cumsum(width) - width, width)
    out["width"] = np.repeat(width, width)
    out["decode"] = out["tokens"] - out["prefill"] - out["recomputed"]
    return out.rename(columns={"requests": "request"})


def per_step(steps: pd.DataFrame) -> pd.DataFrame:
    """One row a step: tokens in all and by kind, requests, and took_s, what the step cost.

    took_s counts from the later of its start and its predecessor's end, because with async scheduling a step is chosen
    while the one before still runs; null where its end is not known.
    """
    out = steps[[*KEYS, "engine", "step", "start_s", "end_s", "waiting", "running", "preempted", "kv_cache_usage"]]
    sums = {}
    for name in ("tokens", "prefill", "recomputed"):
        values, width = lists.flat(steps[name])
        sums[name] = np.bincount(np.repeat(np.arange(len(steps)), width), values, len(steps)).astype(int)
    out = out.assign(**sums, decode=sums["tokens"] - sums["prefill"] - sums["recomputed"], requests=width)
    out = out.sort_values(PLACE, ignore_index=True)
    before = out.groupby(["cell", "engine"])["end_s"].shift()
    out["took_s"] = out["end_s"] - np.fmax(out["start_s"], before)
    return out


def prompts(steps: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """Whether each completed request's prompt was computed whole: its positions covered one after another, none lost.

    chunks : steps that computed some of the prompt for the first time; chunk_tokens are their sizes
    recomputed_tokens, restarts : work done again after a preemption
    alone : no step with a chunk held anything else; chunks_alone is then how many it must take, from the budget
    """
    done = requests[requests["error"].isna() & requests["cell"].isin(steps["cell"].unique())]
    done = done[[*KEYS, "request", "class_name", "prompt_tokens", "cached_tokens", "max_num_batched_tokens"]]
    done = done.reset_index(drop=True)
    parts = _coverage(steps, done)
    own, count = parts["own"].to_numpy(), len(done)
    prompt = done["prompt_tokens"].to_numpy(int)
    cached = done["cached_tokens"].astype("Float64").fillna(np.inf).to_numpy(float)
    begun = np.bincount(own, minlength=count) > 0
    first, reached = np.zeros(count, int), np.zeros(count, int)
    starts = parts.drop_duplicates("own")
    first[starts["own"]] = starts["computed"]
    np.maximum.at(reached, own, parts["end"].to_numpy())
    chunk = parts[parts["fresh"] > 0]
    chunks = np.bincount(chunk["own"], minlength=count)
    shared = np.bincount(chunk["own"], chunk["width"] > 1, count)
    sizes = np.split(chunk["fresh"].to_numpy(), np.cumsum(chunks)[:-1]) if count else []
    said = _broken(steps, parts, done)
    reasons = []
    for at in range(count):
        if begun[at] and first[at] > cached[at]:
            reasons.append(f"it starts at token {first[at]}, and {cached[at]:.0f} were cached")
        elif not begun[at]:
            reasons.append("no step holds it")
        elif at not in said and reached[at] < prompt[at]:
            reasons.append(f"tokens {reached[at]} to {prompt[at] - 1} were never scheduled")
        else:
            reasons.append(said.get(at, ""))
    budget = done["max_num_batched_tokens"].astype("Float64").to_numpy(float, na_value=np.nan)
    out = done.drop(columns="max_num_batched_tokens").assign(
        cached_tokens=first,
        chunks=chunks,
        chunk_tokens=pd.Series([part.tolist() for part in sizes], dtype=object),
        prefill_tokens=np.bincount(own, parts["fresh"], count).astype(int),
        recomputed_tokens=np.bincount(own, parts["again"], count).astype(int),
        restarts=np.bincount(own, parts["restart"], count).astype(int),
        alone=(chunks > 0) & (shared == 0),
        chunks_alone=pd.array(np.ceil((prompt - first) / budget), dtype="Float64").astype("Int64"),
        ok=[not reason for reason in reasons],
        reason=reasons,
    )
    return out[_PROMPTS]


def limits(steps: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """Whether no step of a cell held more tokens than the budget, or more requests than max_num_seqs."""
    most = per_step(steps).groupby("cell")[["tokens", "requests", "step"]].max()
    columns = [*KEYS, "max_num_batched_tokens", "max_num_seqs"]
    out = cells.loc[cells["cell"].isin(most.index), columns].reset_index(drop=True)
    out["tokens_max"] = out["cell"].map(most["tokens"])
    out["requests_max"] = out["cell"].map(most["requests"])
    out["steps"] = out["cell"].map(most["step"]) + 1
    over_budget = out["tokens_max"] > out["max_num_batched_tokens"].fillna(np.iinfo(np.int32).max)
    over_seqs = out["requests_max"] > out["max_num_seqs"].fillna(np.iinfo(np.int32).max)
    out["ok"] = ~(over_budget | over_seqs).astype(bool)
    out["reason"] = [
        "; ".join(
            [f"a step held {int(row['tokens_max'])} tokens"] * bool(tokens)
            + [f"a step held {int(row['requests_max'])} requests"] * bool(seqs)
        )
        for row, tokens, seqs in zip(out.to_dict("records"), over_budget, over_seqs, strict=True)
    ]
    return out


def order(steps: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """Whether the requests of each cell were first scheduled in the order in which their policy serves them.

    That is the order of their sending under fcfs; under priority, the more urgent first among those that wait, and the
    order of sending among equals. A request overtakes another where it is scheduled before it although it comes later
    in that order. A more urgent request that was sent later is only overtaken by what was scheduled ARRIVAL_S or more
    after. Requests that share a step are in order where vLLM put them so. One row a cell and engine; `waited`: requests
    that had been sent before a step that was not theirs, without which there is no order to see.
    """
    parts = scheduled(steps)
    first = parts[parts["request"] >= 0].drop_duplicates(["cell", "request"])  # steps come in order
    known = ["cell", "request", "priority", "sent_s", "scheduling_policy", "error"]
    table = first.merge(requests[known], on=["cell", "request"])
    starts = dict(list(steps.groupby(["cell", "engine"], sort=False)["start_s"]))
    rows = []
    for (cell, engine), own in table[table["sent_s"].notna()].groupby(["cell", "engine"], sort=False):
        by_priority = str(own["scheduling_policy"].iloc[0]) == "priority"
        own = own.assign(rank=own["priority"].fillna(0).astype(int) if by_priority else 0)
        own = own.sort_values(["rank", "sent_s", "request"], kind="stable")
        overtaken = _overtaken(own)
        reason = f"request {overtaken[0][1]} was scheduled before request {overtaken[0][0]}" if overtaken else ""
        rows.append(
            {
                **{name: own[name].iloc[0] for name in ["setting", "workload", "repeat"]},
                "cell": cell,
                "engine": engine,
                "policy": "priority" if by_priority else "fcfs",
                "requests": len(own),
                "waited": _waited(own, starts[cell, engine]),
                "overtaken": len(overtaken),
                "ok": not overtaken,
                "reason": reason,
            }
        )
    columns = ["setting", "workload", "repeat", "cell", "engine", "policy", "requests", "waited", "overtaken"]
    return pd.DataFrame(rows, columns=[*columns, "ok", "reason"])


def same_tokens(requests: pd.DataFrame, one: str, other: str) -> pd.DataFrame:
    """Whether each request gave the same greedy output on two settings, which get the same requests by their seed.

    One row a request that completed on both with its token ids kept. `same` first tokens are equal; where the outputs
    part, gap_nats is how far apart the two best log probabilities were at that token, the larger of both sides: a gap
    within rounding is a near-tie. Null where log probabilities were not kept.
    """
    known = requests[requests["error"].isna() & requests["token_ids"].notna()]
    keys = ["workload", "workload_id", "repeat", "request"]
    values = ["prompt_tokens", "token_ids", "logprob_gaps"]
    left, right = ([*keys, "class_name", *values], [*keys, *values])
    pairs = known.loc[known["setting"] == one, left].merge(known.loc[known["setting"] == other, right], on=keys)
    rows = []
    for pair in pairs.to_dict("records"):
        mine, theirs = ([int(token) for token in pair[f"token_ids_{side}"]] for side in "xy")
        same = sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(mine, theirs, strict=False)))
        ok = len(mine) == len(theirs) == same and pair["prompt_tokens_x"] == pair["prompt_tokens_y"]
        gaps = [_at(pair[f"logprob_gaps_{side}"], same) for side in "xy"]
        gap = math.nan if ok or any(map(math.isnan, gaps)) else max(gaps)
        reason = (
            "" if ok else f"token {same} differs" + (f", where the best two are {gap:.2g} nats apart" * (gap == gap))
        )
        names = {"setting": one, "other": other, "class_name": pair["class_name"]}
        counts = {"tokens": len(mine), "same": same, "gap_nats": gap, "ok": ok, "reason": reason}
        rows.append(names | {name: pair[name] for name in ["workload", "repeat", "request"]} | counts)
    columns = ["setting", "other", "class_name", "workload", "repeat", "request", "tokens", "same", "gap_nats"]
    return pd.DataFrame(rows, columns=[*columns, "ok", "reason"])


_PARTS = ("requests", "tokens", "computed", "prefill", "recomputed")
_PROMPTS = [*KEYS, "request", "class_name", "prompt_tokens", "cached_tokens", "chunks", "chunk_tokens"]
_PROMPTS += ["prefill_tokens", "recomputed_tokens", "restarts", "alone", "chunks_alone", "ok", "reason"]


def _coverage(steps: pd.DataFrame, done: pd.DataFrame) -> pd.DataFrame:
    """Each request's steps in order, and how far its positions had been covered before.

    own : the request's row in `done`; end : the position after the last that the step computes
    reached : position up to which its tokens had ever been computed; reached_now : since its last restart
    before : its step before, -1 where there is none
    fresh : tokens of its prompt that the step computes for the first time; again : tokens that had been computed before
    restart : it starts below what had been reached: its KV cache was lost; gap : it leaves prompt tokens out
    """
    wanted = done[["cell", "request", "prompt_tokens"]].assign(own=np.arange(len(done)))
    parts = scheduled(steps).drop(columns=["setting", "workload", "repeat", "start_s", "end_s"])
    parts = parts.merge(wanted, on=["cell", "request"]).sort_values("own", kind="stable", ignore_index=True)
    start, prompt = parts["computed"], parts["prompt_tokens"].astype(int)
    parts["end"] = start + parts["tokens"]
    grouped = parts.groupby("own", sort=False)
    ends = grouped["end"].cummax().groupby(parts["own"], sort=False).shift()
    reached = ends.fillna(start).astype(int)
    now = grouped["end"].shift().fillna(start).astype(int)
    return parts.assign(
        reached=reached,
        reached_now=now,
        before=grouped["step"].shift().fillna(-1).astype(int),
        fresh=(np.minimum(parts["end"], prompt) - np.maximum(start, reached)).clip(lower=0),
        again=(np.minimum(parts["end"], reached) - start).clip(lower=0),
        restart=start < np.minimum(now, prompt),
        gap=(now < prompt) & (start > now),
    )


def _broken(steps: pd.DataFrame, parts: pd.DataFrame, done: pd.DataFrame) -> dict[int, str]:
    """For each row of `done` whose steps do not follow one another, the first reason; `parts`: of `_coverage`."""
    at_preemption = steps.loc[steps["preempted"].fillna(0) > 0, PLACE]
    preempting = set(at_preemption.itertuples(index=False, name=None))
    found: dict[int, str] = {}
    for part in parts[parts["restart"] | parts["gap"]].to_dict("records"):
        start, between = part["computed"], range(part["before"] + 1, part["step"] + 1)
        if part["gap"]:
            last = min(start, part["prompt_tokens"]) - 1
            found.setdefault(part["own"], f"tokens {part['reached_now']} to {last} were never scheduled")
        elif not any((part["cell"], part["engine"], step) in preempting for step in between):
            found.setdefault(part["own"], f"tokens from {start} on were computed again without a preemption")
    return found


def _waited(own: pd.DataFrame, start_s: pd.Series) -> int:
    """How many of the requests saw a step start between their sending and their own first step."""
    starts = np.sort(start_s.to_numpy(float))
    next_step = np.searchsorted(starts, own["sent_s"].to_numpy(float))
    return int((starts[np.minimum(next_step, len(starts) - 1)] < own["start_s"].to_numpy(float)).sum())


def _overtaken(own: pd.DataFrame) -> list[tuple[int, int]]:
    """Pairs (overtaken, overtaker) of request numbers; `own` is in the order in which its policy serves."""
    places = own["step"].to_numpy(int) * (own["position"].max() + 1) + own["position"].to_numpy(int)
    if (np.diff(places) > 0).all():
        return []
    table = list(own[["request", "rank", "sent_s", "step", "position", "start_s"]].itertuples(index=False, name=None))
    found = []
    for i, (early, rank, sent_s, step, position, _) in enumerate(table):
        for late, other_rank, other_sent_s, other_step, other_position, start_s in table[i + 1 :]:
            if (other_step, other_position) >= (step, position):
                continue
            if rank < other_rank and sent_s > other_sent_s and start_s < sent_s + ARRIVAL_S:
                continue  # the urgent one had not arrived yet
            found.append((int(early), int(late)))
    return found


def _at(values: Sequence[float] | np.ndarray | None, position: int) -> float:
    """The value at a position of a list that may be null or too short."""
    if values is None or isinstance(values, float) or values is pd.NA or position >= len(values):
        return math.nan
    return float(values[position])
