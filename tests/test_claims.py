"""Verdicts on made-up records with a known answer: supported, refuted, depends, not enough data, not tested."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic import cell, cells, frame, request
from test_proofs import steps

from latency_lab import bounds, claim_figures, claims, effects, records, verdicts
from latency_lab.claim_rules import Bound, ClaimRules
from latency_lab.study import StudyError, load_study


def measured(*rows, device="made-up CPU", steps_table=None, **values):
    """A study of these requests; each setting, workload and repeat is a cell."""
    table = frame(list(rows))
    keys = ["setting", "workload", "repeat", "cell"]
    own = cells([cell(**row, device=device, **values) for row in table[keys].drop_duplicates().to_dict("records")])
    study = records.Records(Path("made-up"), own)
    study.__dict__.update(requests=table, steps=steps() if steps_table is None else steps_table)
    return study


def ttft(setting, ttft_s, workload="chat c=1", repeats=3, each=8, spread=0.0, **values):
    """Requests with TTFT about `ttft_s`: in each repeat evenly spread by a share of it."""
    made = []
    for repeat in range(repeats):
        for i, factor in enumerate(np.linspace(1 - spread, 1 + spread, each)):
            times = [ttft_s * factor, ttft_s * factor + 0.1]
            named = {"setting": setting, "workload": workload, "repeat": repeat, "request": i, "token_times_s": times}
            made.append(request(**(named | {"cell": f"{setting}-{workload}-{repeat}", "queue_s": 0.001} | values)))
    return made


def rule(**values):
    return {"metric": "ttft_p50_s", "workload": "chat c=1", "compare": [["a", "b"]], "ratio_at_most": 0.8} | values


def verdict(study, *rules, claim="queue"):
    (one,) = claims.judge(study, {claim: ClaimRules.model_validate({"rules": list(rules)})}, draws=300)
    return one


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_supported_where_the_whole_interval_clears_the_threshold():
    one = verdict(measured(*ttft("a", 0.1), *ttft("b", 0.2)), rule())
    assert one.verdict == "supported" and one.claim.id == "queue"
    assert (one.machine, one.model, one.weights, one.study) == ("made-up CPU", "made-up-135M", "random", "made-up")
    assert one.findings[0].numbers == (
        "p50 TTFT at chat c=1: 100 ms on a, 200 ms on b, ratio 0.5 [0.5, 0.5], asked for at most 0.8 (95%)"
    )


def test_refuted_where_the_whole_interval_is_beyond_it():
    assert verdict(measured(*ttft("a", 0.2), *ttft("b", 0.2)), rule()).verdict == "refuted"
    at_least = rule(ratio_at_least=1.1, ratio_at_most=None)
    assert verdict(measured(*ttft("a", 0.2), *ttft("b", 0.2)), at_least).verdict == "refuted"
    assert verdict(measured(*ttft("a", 0.3), *ttft("b", 0.2)), at_least).verdict == "supported"


def test_not_enough_data_where_the_interval_holds_the_threshold():
    one = verdict(measured(*ttft("a", 0.16, spread=0.5), *ttft("b", 0.2, spread=0.5)), rule())
    assert one.verdict == "not enough data" and one.on.startswith("the interval of p50 TTFT, chat c=1, a against b")


@pytest.mark.parametrize(
    ("study", "on"),
    [
        (measured(*ttft("a", 0.1, repeats=1), *ttft("b", 0.2)), "a: 1 repeat only, an interval needs 2"),
        (measured(*ttft("a", 0.1), *ttft("c", 0.2)), "b was not measured"),
        (measured(*ttft("a", 0.1, repeats=2, each=2), *ttft("b", 0.2)), "a: 4 values, p50 needs 5"),
    ],
)
def test_not_enough_data_says_what_is_missing(study, on):
    one = verdict(study, rule())
    assert (one.verdict, one.on) == ("not enough data", f"chat c=1, {on}")


def test_depends_on_concurrency():
    rows = [*ttft("a", 0.1), *ttft("b", 0.2), *ttft("a", 0.4, "chat c=20"), *ttft("b", 0.2, "chat c=20")]
    one = verdict(measured(*rows), rule(workload=["chat c=1", "chat c=20"]))
    assert (one.verdict, one.on) == ("depends", "the workload: holds for chat c=1, not for chat c=20")


def test_depends_on_the_metric():
    rows = [*ttft("a", 0.1, queue_s=0.02), *ttft("b", 0.2, queue_s=0.01)]
    one = verdict(measured(*rows), rule(metric=["ttft_p50_s", "queue_mean_s"]))
    assert (one.verdict, one.on) == ("depends", "the metric: holds for p50 TTFT, not for mean queue time")


def test_depends_on_more_than_one_thing_lists_the_conditions():
    rows = [*ttft("a", 0.1), *ttft("b", 0.2), *ttft("a", 0.4, "chat c=20"), *ttft("b", 0.2, "chat c=20")]
    both = rule(workload=["chat c=1", "chat c=20"], metric=["ttft_p50_s", "queue_mean_s"])
    one = verdict(measured(*rows), both)
    assert one.verdict == "depends" and "holds for p50 TTFT, chat c=1, a against b; not for" in one.on


def test_one_undecided_condition_leaves_a_supported_claim_undecided():
    rows = [*ttft("a", 0.1), *ttft("b", 0.2)]
    one = verdict(measured(*rows), rule(workload=["chat c=1", "chat c=4"]))
    assert (one.verdict, one.on) == ("not enough data", "chat c=4, a was not measured")


def test_machines_are_judged_apart():
    one, other = measured(*ttft("a", 0.1), *ttft("b", 0.2)), measured(*ttft("a", 0.2), *ttft("b", 0.2), device="x")
    other.requests["cell"] = "x" + other.requests["cell"]
    other.cells["cell"] = "x" + other.cells["cell"]
    both = records.Records(Path("made-up"), pd.concat([one.cells, other.cells]))
    both.__dict__.update(requests=pd.concat([one.requests, other.requests]), steps=steps())
    rules = {"queue": ClaimRules.model_validate({"rules": [rule()]})}
    found = {v.machine: v.verdict for v in claims.judge(both, rules, draws=100)}
    assert found == {"made-up CPU": "supported", "x": "refuted"}


def test_failed_requests_do_not_make_a_setting_fast():
    failed = {"error": "timed out", "token_times_s": [], "first_token_s": None, "output_tokens": 0}
    rows = [*ttft("a", 0.1), *ttft("b", 0.2)]
    rows = [row | failed if row["setting"] == "a" and row["request"] > 1 else row for row in rows]
    assert verdict(measured(*rows), rule()).verdict == "refuted"


# --- targets ----------------------------------------------------------------------------------------------------------


def answers(setting="a", tokens=100, per_token_s=0.02, workload="answer c=20", repeats=3, each=20, **values):
    """Requests of `tokens` tokens, the n-th of them n x `per_token_s` after the request was due."""
    times = [per_token_s * (n + 1) for n in range(tokens)]
    named = {"setting": setting, "workload": workload, "token_times_s": times, "target_output_tokens": tokens}
    return [
        request(**(named | {"repeat": repeat, "request": i, "cell": f"{setting}-{workload}-{repeat}"} | values))
        for repeat in range(repeats)
        for i in range(each)
    ]


def target(**values):
    return {"tokens_within_s": 1.01, "at_least": 40, "workload": "answer c=20", "setting": "a"} | values


def test_a_target_is_met_by_the_longest_output_that_arrives_in_time():
    one = verdict(measured(*answers()), target(), claim="target")
    assert one.verdict == "supported"
    assert one.findings[0].numbers == (
        "answer c=20 on a: 95% of the requests had 50 [50, 50] of 100 tokens within 1.01 s, asked for at least 40 (95%)"
    )


def test_a_target_counts_from_the_scheduled_arrival_and_failures_have_received_nothing():
    late = measured(*answers(scheduled_s=0.0, sent_s=0.5))
    assert verdict(late, target(), claim="target").verdict == "refuted"
    lost = [row | {"error": "timed out"} if row["request"] < 6 else row for row in answers()]
    one = verdict(measured(*lost), target(), claim="target")
    assert one.verdict == "refuted" and "had 0 [0, 0]" in one.findings[0].numbers


def test_a_target_that_holds_for_some_settings_and_loads_depends_on_them():
    rows = [*answers(), *answers("b", per_token_s=0.05), *answers(tokens=45, workload="answer c=1")]
    one = verdict(measured(*rows), target(setting=["a", "b"]), claim="target")
    assert (one.verdict, one.on) == ("depends", "the settings: holds for a, not for b")
    whole = verdict(measured(*rows), target(workload="answer c=1"), claim="target")
    assert whole.findings[0].effect == "all 45 [45, 45] tokens in 1.01 s"


@pytest.mark.parametrize(
    ("rows", "on"),
    [
        (answers(each=5), "a: 15 requests, a share of 0.95 needs 20"),
        (answers(repeats=1), "a: 1 repeat only, an interval needs 2"),
        (answers("b"), "a was not measured"),
    ],
)
def test_a_target_without_enough_requests_is_undecided(rows, on):
    one = verdict(measured(*rows), target(), claim="target")
    assert (one.verdict, one.on) == ("not enough data", f"answer c=20, {on}")


def test_a_target_whose_repeats_disagree_is_undecided():
    rows = [
        row for n, speed in enumerate((0.02, 0.02, 0.03)) for row in answers(per_token_s=speed) if row["repeat"] == n
    ]
    one = verdict(measured(*rows), target(), claim="target")
    assert one.verdict == "not enough data" and "holds the threshold" in one.on


# --- bounds -----------------------------------------------------------------------------------------------------------


def bound(**values):
    return {
        "reported_tokens_per_s": 19.4,
        "gpu": "L4",
        "config": "qwen3-4b-instruct-2507",
        "share_at_most": 0.1,
    } | values


def test_a_bound_is_weights_and_cache_over_bandwidth():
    # 4.0 billion weights of 2 bytes, the tied embedding being the output layer; an L4 moves 300 GB/s.
    assert bounds.step_s(Bound.model_validate(bound())) == pytest.approx(4.02e9 * 2 / 300e9, rel=1e-3)
    # Keys and values of 36 layers with 8 KV heads of 128 numbers of 2 bytes: 147,456 bytes a token.
    busy = bounds.step_s(Bound.model_validate(bound(streams=20, context_tokens=160)))
    assert busy == pytest.approx((4.02e9 * 2 + 20 * 160 * 147_456) / 300e9, rel=1e-3)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (bound(), "refuted"),  # half of the bound is slow, and not stuck
        (bound(reported_tokens_per_s=2), "supported"),
        (bound(share_at_most=None, share_at_least=0.4), "supported"),
        (bound(reported_tokens_per_s=[2, 20]), "depends"),
    ],
)
def test_a_reported_rate_is_judged_for_the_gpu_that_the_rule_names(rule, expected):
    one = verdict(measured(*ttft("a", 0.1)), rule, claim="stuck-log")
    assert one.verdict == expected and one.computed
    assert (one.machine, one.model, one.weights) == ("L4", "qwen3-4b-instruct-2507", "")
    assert "at 300 GB/s takes 26.8 ms, so L4 gives 37.3 tokens/s at most" in one.findings[0].numbers


def test_measured_and_computed_conditions_of_one_claim_are_verdicts_of_their_own():
    rules = {"expected": ClaimRules.model_validate({"rules": [bound(), rule()]})}
    found = claims.judge(measured(*ttft("a", 0.1), *ttft("b", 0.2)), rules, draws=100)
    assert [(one.machine, one.computed, one.verdict) for one in found] == [
        ("made-up CPU", False, "supported"),
        ("L4", True, "refuted"),
    ]


# --- proofs as findings -----------------------------------------------------------------------------------------------


def proven(*held, **values):
    row = {"token_times_s": [0.1], "cached_tokens": 0, "max_num_batched_tokens": 4, "prompt_tokens": 10}
    return measured(request(**(row | values)), steps_table=steps(*held), max_num_batched_tokens=4, max_num_seqs=2)


def test_a_whole_prompt_in_three_chunks():
    study = proven([(0, 4, 0)], [(0, 4, 4)], [(0, 2, 8)])
    rules = [{"proof": "prompts-whole"}, {"proof": "within-limits"}, {"proof": "chunks-alone", "chunks": 3}]
    one = verdict(study, *rules, claim="no-loss")
    assert one.verdict == "supported"
    assert [finding.numbers for finding in one.findings] == [
        "1 of 1 prompts were computed whole, 1 of them in more than one chunk (10 tokens in 3 chunks)",
        "1 of 1 cells kept budget and max_num_seqs in all of their 3 steps",
        "1 of 1 lone prompts took the chunks that their budget asks for: 10 tokens at a in 3 (4 + 4 + 2)",
    ]


def test_what_chunks_beside_a_stream_cost_is_said():
    row = {"token_times_s": [0.1], "cached_tokens": 0, "max_num_batched_tokens": 4}
    rows = [request(request=i, prompt_tokens=tokens, **row) for i, tokens in enumerate((8, 1))]
    held = [[(1, 1, 0)], [(1, 1, 1), (0, 3, 0)], [(1, 1, 2), (0, 3, 3)], [(0, 2, 6)]]
    one = verdict(measured(*rows, steps_table=steps(*held)), {"proof": "prompts-whole"}, claim="no-loss")
    assert one.findings[0].numbers.endswith("beside other requests, 8 tokens at a took 3 chunks, alone 2")


def test_one_counterexample_refutes():
    study = proven([(0, 4, 0)], [(0, 4, 4)], [(0, 2, 8)])
    one = verdict(study, {"proof": "prompts-whole"}, {"proof": "chunks-alone", "chunks": 4}, claim="no-loss")
    assert one.verdict == "refuted" and "request 0: took 3 chunks: [4, 4, 2]" in one.findings[1].numbers


def test_without_steps_a_proof_is_undecided_and_says_why():
    study = measured(*ttft("a", 0.1), steps_note="this vLLM can't be traced")
    one = verdict(study, {"proof": "served-in-order"}, claim="fcfs")
    assert one.verdict == "not enough data"
    assert one.on == "no scheduler steps were recorded (this vLLM can't be traced)"


def test_steps_that_were_not_all_kept_prove_nothing():
    study = proven([(0, 4, 0)], [(0, 4, 4)])
    study.cells["steps_dropped"] = pd.array([1], dtype="Int64")
    assert verdict(study, {"proof": "prompts-whole"}, claim="no-loss").verdict == "not enough data"


def told(gap=None, other=(1, 9)):
    kept = {"logprob_gaps": [0.5, gap]} if gap is not None else {}
    rows = [
        request(setting=name, cell=name, token_ids=list(ids), token_times_s=[0.1, 0.2], **kept)
        for name, ids in (("a", (1, 2)), ("b", other))
    ]
    return measured(*rows)


@pytest.mark.parametrize(
    ("study", "expected", "on"),
    [
        (told(other=(1, 2)), "supported", ""),
        (told(gap=0.0004), "depends", "rounding: outputs part at near-ties of at most 0.0004 nats"),
        (told(gap=0.3), "refuted", ""),
        (told(), "not enough data", "1 outputs part, and log probabilities that could tell a near-tie were not kept"),
    ],
)
def test_equal_outputs(study, expected, on):
    same = {"proof": "same-tokens", "compare": ["a", "b"], "near_tie_nats": 0.001}
    one = verdict(study, same, claim="isolation")
    assert (one.verdict, one.on) == (expected, on)


# --- effects ----------------------------------------------------------------------------------------------------------


def test_effects_in_the_units_of_their_metric():
    table = frame([*ttft("a", 0.1), *ttft("b", 0.2, queue_s=0.003)])
    assert effects.effect(table, "ttft_mean_s", ("a", "b")).value == pytest.approx(0.5)
    assert effects.effect(table, "itl_p50_s", ("a", "b")).value == pytest.approx(1.0, rel=1e-6)
    queue = effects.effect(table, "queue_mean_s", ("b", "a"), ratio=False)
    assert (queue.value, queue.low, queue.high) == pytest.approx((0.002, 0.002, 0.002))
    rate = effects.effect(table, "output_tokens_per_s", ("a", "b"))
    assert rate.of == pytest.approx(16 / 0.2) and rate.low <= rate.value <= rate.high


def test_an_interval_widens_with_the_noise_and_is_the_same_every_time():
    noisy = frame([*ttft("a", 0.1, spread=0.4), *ttft("b", 0.2, spread=0.4)])
    quiet = frame([*ttft("a", 0.1, spread=0.05), *ttft("b", 0.2, spread=0.05)])
    wide, narrow = (effects.effect(table, "ttft_p50_s", ("a", "b")) for table in (noisy, quiet))
    assert wide.high - wide.low > narrow.high - narrow.low > 0
    assert dataclasses.astuple(effects.effect(noisy, "ttft_p50_s", ("a", "b"))) == dataclasses.astuple(wide)


def test_an_effect_on_one_class_leaves_the_others_out():
    table = frame([*ttft("a", 0.1), *ttft("a", 9.0, class_name="long"), *ttft("b", 0.2)])
    assert effects.effect(table, "ttft_p50_s", ("a", "b"), of_class="chat").value == pytest.approx(0.5)


# --- all claims, from folders -----------------------------------------------------------------------------------------


def test_claims_without_rules_are_not_tested(tmp_path):
    found = claims.judge_all([])
    assert [v.claim.id for v in found] == [claim.id for claim in claims.CLAIMS] and len(found) == 15
    assert {v.verdict for v in found} == {"not tested"}
    assert next(v.on for v in found if v.claim.id == "quant-ttft").startswith("no study here holds quantized weights")


def test_rules_come_from_the_file_beside_the_records_or_the_shipped_study(tmp_path):
    assert claims.rules_of(tmp_path / "nobody-knows-it") == {}
    assert {"no-loss", "fcfs", "isolation"} <= set(claims.rules_of(tmp_path / "chunked-prefill"))
    text = """\
question: Why?
model: {source: smollm2}
settings: {axes: {max_num_seqs: [4, 8]}}
workloads:
  chat: {load: {kind: closed, concurrency: 1, requests_each: 1}, prompt: {tokens: 8}, output: {tokens: 4}}
claims:
  queue:
    rules: [{metric: ttft_p50_s, workload: chat c=1, compare: [seqs=4, seqs=8], ratio_at_most: 0.9}]
"""
    (tmp_path / "study.yaml").write_text(text)
    (rules,) = claims.rules_of(tmp_path)["queue"].rules
    assert (rules.metric, rules.compare, rules.threshold) == (("ttft_p50_s",), (("seqs=4", "seqs=8"),), 0.9)


HEAD = """\
question: Why?
model: {source: smollm2}
settings: {axes: {max_num_seqs: [4, 8]}}
workloads:
  chat: {load: {kind: closed, concurrency: 1, requests_each: 1}, prompt: {tokens: 8}, output: {tokens: 4}}
  one: {load: {kind: burst, requests: 1}, prompt: {tokens: 8}, output: {tokens: 4}, settings: [seqs=4]}
claims:
"""
BOUND = "reported_tokens_per_s: 1, config: qwen3-4b-instruct-2507, share_at_most: 1"
BASE = "metric: ttft_p50_s, workload: chat c=1, compare: [seqs=4, seqs=8], ratio_at_most: 1"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("  queu: {rules: []}", "8: claims.queu: 'queu' is not one of the thread's claims; did you mean queue?"),
        (f"  queue: {{rules: [{{{BASE}, level: 95}}]}}", "8: claims.queue.rules[0].level: 95 is too large"),
        (
            f"  queue: {{rules: [{{{BASE}, proof: x}}]}}",
            "several of metric, proof, tokens_within_s, rep",
        ),
        (f"  queue: {{rules: [{{{BASE}, ratio_at_least: 1}}]}}", "ratio_at_most and ratio_at_least given"),
        (f"  queue: {{rules: [{{{BASE}}}]}}".replace("p50", "p51"), "'ttft_p51_s' is not a metric"),
        (f"  queue: {{rules: [{{{BASE}}}]}}".replace("chat c=1", "chat"), "'chat' is not in this study"),
        (f"  queue: {{rules: [{{{BASE}}}]}}".replace("seqs=8", "seqs=9"), "'seqs=9' is not in this study"),
        (f"  queue: {{rules: [{{{BASE}}}]}}".replace("chat c=1", "one"), "'one' does not run on 'seqs=8'"),
        (f"  queue: {{rules: [{{{BASE}, of_class: x}}]}}", "'x' is not in this study"),
        ("  fcfs: {rules: [{proof: in-order}]}", "'in-order' is not known"),
        ("  target: {rules: [{at_least: 4}]}", "none of metric, proof, tokens_within_s, reported"),
        (
            "  target: {rules: [{tokens_within_s: 1, at_least: 4, workload: chat c=1, setting: x}]}",
            "'x' is not in this",
        ),
        ("  target: {rules: [{tokens_within_s: 1, at_least: 4, workload: one, setting: seqs=8}]}", "does not run on"),
        (f"  stuck-log: {{rules: [{{{BOUND}, gpu: L5}}]}}", "'L5' is not a known GPU; allowed: L4, "),
        (f"  stuck-log: {{rules: [{{{BOUND}, gpu: L4, share_at_least: 1}}]}}", "not one threshold given"),
        (
            f"  stuck-log: {{rules: [{{{BOUND}, gpu: L4}}]}}".replace("qwen3-4b", "x"),
            "'x-instruct-2507' is not a config that comes with this",
        ),
        ("  isolation: {rules: [{proof: same-tokens}]}", "same-tokens without compare"),
        ("  isolation: {rules: [{proof: same-tokens, compare: [seqs=4]}]}", "['seqs=4'] is not pairs of settings"),
        ("  fcfs: {rules: [{proof: served-in-order, chunks: 2}]}", "served-in-order with chunks"),
    ],
)
def test_a_faulty_rule_is_found_before_the_run(tmp_path, text, problem):
    path = tmp_path / "mine.yaml"
    path.write_text(HEAD + text + "\n")
    with pytest.raises(StudyError) as caught:
        load_study(path)
    assert problem in str(caught.value) and all("; allowed: " in one for one in caught.value.problems)


# --- as a reader sees them --------------------------------------------------------------------------------------------


def test_the_page_shows_every_claim_its_verdict_and_the_numbers(tmp_path):
    rows = [*ttft("a", 0.1), *ttft("b", 0.2), *ttft("a", 0.4, "chat c=20"), *ttft("b", 0.2, "chat c=20")]
    one = verdict(measured(*rows), rule(workload=["chat c=1", "chat c=20"]))
    rest = [v for v in claims.judge_all([]) if v.claim.id != "queue"]
    assert "15 claims, 15 verdicts: 1 depends, 14 not tested" in verdicts.summary([one, *rest])
    table = verdicts.table([one, *rest])
    assert table.count("<tr>") == 16 and "◐ depends" in table and "random" in table
    text = verdicts.passages([one, *rest], tmp_path)
    assert text.count("<h3") == 15 and text.count("<img") == 1 and (tmp_path / "claim-queue.csv").exists()
    assert "Depends on the workload: holds for chat c=1, not for chat c=20." in text
    assert "✔ p50 TTFT at chat c=1: 100 ms on a, 200 ms on b, ratio 0.5 [0.5, 0.5]" in text
    assert "✘ p50 TTFT at chat c=20: 400 ms on a, 200 ms on b, ratio 2 [2, 2]" in text


def test_machines_that_disagree_are_named_and_not_averaged(tmp_path):
    here = verdict(measured(*ttft("a", 0.1), *ttft("b", 0.2)), rule())
    there = verdict(measured(*ttft("a", 0.2), *ttft("b", 0.2), device="x"), rule())
    said = "The studies differ: supported on made-up CPU (made-up); refuted on x (made-up). They are not averaged"
    assert said in verdicts.passages([here, there], tmp_path)
    assert "differ" not in verdicts.passages([here, here], tmp_path)


def test_a_figure_has_each_condition_with_its_interval_and_what_random_weights_are():
    rows = [*ttft("a", 0.1), *ttft("b", 0.2), *ttft("a", 0.4, "chat c=20"), *ttft("b", 0.2, "chat c=20")]
    one = verdict(measured(*rows), rule(workload=["chat c=1", "chat c=20"]))
    drawn = claim_figures.effects([one])
    assert list(drawn.data["value"]) == pytest.approx([0.5, 2.0]) and set(drawn.data["threshold"]) == {0.8}
    texts = " ".join(text.get_text() for text in drawn.figure.texts).replace("\n", " ")
    assert texts.startswith("queue: of 2 conditions, 1 supported, 1 refuted")
    assert "Random weights: they time the same kernels as real ones and speak no sense." in texts
    nothing = claim_figures.effects(claims.judge_all([])[:1])
    assert nothing.figure is None and nothing.reason


def test_folders_of_records_by_name(tmp_path):
    from synthetic import write_study

    write_study(tmp_path / "one", budgets=(128,), seqs=(4,), concurrency=(1,), repeats=1, mix=False, failures=False)
    assert verdicts.folders(str(tmp_path)) == [tmp_path / "one"]
    assert verdicts.folders([str(tmp_path / "one"), str(tmp_path)]) == [tmp_path / "one"]
    with pytest.raises(FileNotFoundError, match="no such folder of records"):
        verdicts.folders(str(tmp_path / "none"))
    assert {v.verdict for v in claims.judge_all([tmp_path / "one"])} == {"not tested"}
