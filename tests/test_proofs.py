"""Proofs on steps that one can check by hand: whole prompts pass, and each way of being broken is found."""

import math

import pandas as pd
import pytest
from synthetic import cell, cells, frame, request

from latency_lab import proofs, records, schemas


def steps(*held, cell="cell0", budget_s=0.1, preempted=()):
    """Steps of one cell. Each is a list of (request, tokens, computed before); `preempted`: numbers of steps."""
    rows = []
    for number, parts in enumerate(held):
        rows.append(
            {name: request(cell=cell)[name] for name in [field.name for field in schemas.KEYS]}
            | {
                "engine": 0,
                "step": number,
                "start_s": number * budget_s,
                "end_s": (number + 1) * budget_s,
                "requests": [part[0] for part in parts],
                "tokens": [part[1] for part in parts],
                "computed": [part[2] for part in parts],
                "prefill": [part[1] if part[1] > 1 else 0 for part in parts],
                "recomputed": [0 for _ in parts],
                "waiting": 0,
                "running": len(parts),
                "preempted": int(number in preempted),
                "kv_cache_usage": 0.5,
            }
        )
    return records.to_pandas(records.table(rows, schemas.STEPS))


def requests(*rows, **common):
    base = {"max_num_batched_tokens": 4, "max_num_seqs": 2, "token_times_s": [0.1], "cached_tokens": 0}
    return frame([request(**(base | {"request": number} | common | row)) for number, row in enumerate(rows)])


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_lone_prompt_takes_as_many_chunks_as_the_budget_asks_for():
    table = proofs.prompts(steps([(0, 4, 0)], [(0, 4, 4)], [(0, 2, 8)], [(0, 1, 10)]), requests({"prompt_tokens": 10}))
    (row,) = table.to_dict("records")
    assert row["ok"] and row["alone"]
    assert (row["chunks"], row["chunks_alone"], row["chunk_tokens"]) == (3, 3, [4, 4, 2])
    assert (row["prefill_tokens"], row["recomputed_tokens"], row["restarts"]) == (10, 0, 0)


def test_a_prompt_beside_a_stream_takes_more_chunks_and_is_not_alone():
    held = [[(1, 2, 0)], [(1, 1, 2), (0, 3, 0)], [(1, 1, 3), (0, 3, 3)], [(1, 1, 4), (0, 2, 6)]]
    table = proofs.prompts(steps(*held), requests({"prompt_tokens": 8}, {"prompt_tokens": 2}))
    assert table["ok"].all()
    assert table["chunks"].tolist() == [3, 1] and table["chunks_alone"].tolist() == [2, 1]
    assert table["alone"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        ([[(0, 4, 0)], [(0, 4, 5)], [(0, 1, 9)]], "tokens 4 to 4 were never scheduled"),
        ([[(0, 4, 0)], [(0, 4, 4)]], "tokens 8 to 9 were never scheduled"),
        ([[(0, 4, 0)], [(0, 4, 3)], [(0, 3, 7)]], "tokens from 3 on were computed again without a preemption"),
        ([[(0, 4, 2)], [(0, 4, 6)]], "it starts at token 2, and 0 were cached"),
        ([[(1, 4, 0)]], "no step holds it"),
    ],
)
def test_a_lost_or_doubled_token_is_found(held, reason):
    (row,) = proofs.prompts(steps(*held), requests({"prompt_tokens": 10})).to_dict("records")
    assert not row["ok"] and row["reason"] == reason


def test_what_the_prefix_cache_holds_needs_no_step():
    (row,) = proofs.prompts(
        steps([(0, 4, 4)], [(0, 2, 8)]), requests({"prompt_tokens": 10, "cached_tokens": 4})
    ).to_dict("records")
    assert row["ok"] and (row["prefill_tokens"], row["cached_tokens"], row["chunks_alone"]) == (6, 4, 2)


def test_recompute_after_a_preemption_is_counted_and_loses_nothing():
    held = [[(0, 4, 0)], [(0, 2, 4)], [(1, 1, 0)], [(0, 4, 0)], [(0, 4, 4)], [(0, 1, 8)]]
    table = proofs.prompts(steps(*held, preempted=[2]), requests({"prompt_tokens": 8}))
    (row,) = table.to_dict("records")
    assert row["ok"] and (row["restarts"], row["recomputed_tokens"], row["prefill_tokens"]) == (1, 6, 8)


def test_a_token_lost_while_recomputing_is_found():
    held = [[(0, 4, 0)], [(0, 2, 4)], [(1, 1, 0)], [(0, 4, 0)], [(0, 3, 5)]]
    table = proofs.prompts(steps(*held, preempted=[2]), requests({"prompt_tokens": 8}))
    assert table["reason"].tolist() == ["tokens 4 to 4 were never scheduled"]


def test_failed_requests_and_cells_without_steps_are_not_judged():
    rows = requests({"prompt_tokens": 4}, {"error": "timed out", "prompt_tokens": 4}, {"cell": "cell1"})
    assert proofs.prompts(steps([(0, 4, 0)]), rows)["request"].tolist() == [0]
    assert proofs.prompts(steps(), rows).empty


# --- limits and costs of steps ----------------------------------------------------------------------------------------


def test_limits_of_a_step():
    own = cells([cell(max_num_batched_tokens=4, max_num_seqs=2)])
    assert proofs.limits(steps([(0, 3, 0), (1, 1, 0)]), own)["ok"].tolist() == [True]
    over = proofs.limits(steps([(0, 3, 0), (1, 2, 0)]), own)
    assert not over["ok"].any() and over["reason"].tolist() == ["a step held 5 tokens"]
    wide = proofs.limits(steps([(0, 1, 0), (1, 1, 0), (2, 1, 0)]), own)
    assert wide["reason"].tolist() == ["a step held 3 requests"]


def test_a_step_costs_the_time_from_its_predecessors_end():
    table = steps([(0, 4, 0)], [(0, 1, 4)], [(0, 1, 5)])
    table["start_s"], table["end_s"] = [0.0, 0.05, 0.9], [0.3, 0.4, 1.0]
    per_step = proofs.per_step(table)
    assert per_step["took_s"].round(6).tolist() == [0.3, 0.1, 0.1]
    assert per_step["prefill"].tolist() == [4, 0, 0] and per_step["decode"].tolist() == [0, 1, 1]


def test_foreign_requests_count_in_a_step_and_are_nobodys_prompt():
    table = steps([(-1, 3, 0), (0, 1, 0)])
    assert proofs.per_step(table)["tokens"].tolist() == [4]
    assert proofs.prompts(table, requests({"prompt_tokens": 1}))["alone"].tolist() == [False]


# --- order ------------------------------------------------------------------------------------------------------------


def test_first_come_first_served():
    rows = requests(*({"sent_s": 0.001 * i - 0.003, "scheduling_policy": "fcfs"} for i in range(3)))
    good = proofs.order(steps([(0, 2, 0), (1, 2, 0)], [(2, 2, 0)]), rows)
    assert good["ok"].tolist() == [True] and (good["requests"][0], good["waited"][0]) == (3, 1)
    bad = proofs.order(steps([(0, 2, 0), (2, 2, 0)], [(1, 2, 0)]), rows)
    assert bad["reason"].tolist() == ["request 2 was scheduled before request 1"] and bad["overtaken"][0] == 1
    later = rows.assign(sent_s=[-0.003, -0.002, 0.05])  # it was not there yet when the first step was chosen
    assert proofs.order(steps([(0, 2, 0), (1, 2, 0)], [(2, 2, 0)]), later)["waited"].tolist() == [0]
    same_step = proofs.order(steps([(1, 2, 0), (0, 2, 0)]), rows)
    assert not same_step["ok"].any()


def test_priority_serves_the_urgent_first_among_those_that_wait():
    late = {"priority": 0, "sent_s": 0.15}
    rows = requests(*({"priority": 1} for _ in range(3)), late, scheduling_policy="priority")
    urgent_first = steps([(0, 2, 0)], [(1, 2, 0)], [(0, 1, 2)], [(3, 2, 0)], [(2, 2, 0)])
    assert proofs.order(urgent_first, rows)["ok"].tolist() == [True]  # 0 and 1 were served before it was sent
    urgent_last = steps([(0, 2, 0)], [(1, 2, 0)], [(0, 1, 2)], [(2, 2, 0)], [(3, 2, 0)])
    assert proofs.order(urgent_last, rows)["reason"].tolist() == ["request 2 was scheduled before request 3"]
    under_fcfs = rows.assign(scheduling_policy="fcfs")
    assert proofs.order(urgent_last, under_fcfs)["ok"].tolist() == [True]


# --- outputs ----------------------------------------------------------------------------------------------------------


def outputs(setting, *ids, **values):
    rows = [{"token_ids": list(one), "setting": setting, "request": i, **values} for i, one in enumerate(ids)]
    return requests(*rows)


def test_equal_outputs():
    both = pd.concat([outputs("a", [1, 2, 3], [4, 5]), outputs("b", [1, 2, 3], [4, 5])])
    table = proofs.same_tokens(both, "a", "b")
    assert table["ok"].all() and table["same"].tolist() == [3, 2] and table["tokens"].sum() == 5


def test_outputs_that_part_say_where_and_how_near_a_tie_it_was():
    gaps = [[0.5, 0.001, 0.2]]
    both = pd.concat(
        [
            outputs("a", [1, 2, 3]).assign(logprob_gaps=gaps),
            outputs("b", [1, 9, 3]).assign(logprob_gaps=[[0.5, 0.003, 1]]),
        ]
    )
    (row,) = proofs.same_tokens(both, "a", "b").to_dict("records")
    assert not row["ok"] and row["same"] == 1 and row["gap_nats"] == 0.003
    assert row["reason"] == "token 1 differs, where the best two are 0.003 nats apart"


def test_outputs_that_part_without_log_probabilities():
    (row,) = proofs.same_tokens(pd.concat([outputs("a", [1]), outputs("b", [2])]), "a", "b").to_dict("records")
    assert not row["ok"] and math.isnan(row["gap_nats"]) and row["reason"] == "token 0 differs"


def test_a_shorter_output_is_not_equal():
    table = proofs.same_tokens(pd.concat([outputs("a", [1, 2]), outputs("b", [1])]), "a", "b")
    assert not table["ok"].any() and table["same"].tolist() == [1]


def test_only_what_both_completed_is_compared():
    both = pd.concat([outputs("a", [1], [2]), outputs("b", [1])])
    assert len(proofs.same_tokens(both, "a", "b")) == 1
    assert proofs.same_tokens(both, "a", "c").empty
