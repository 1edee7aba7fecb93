"""Studies: what a file expands to, and every mistake found with its line before an engine starts."""

# ruff: noqa: E501 -- the table of mistakes reads best with one mistake a line

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import elsewhere
import pytest

from latency_lab import vllm_args
from latency_lab.study import Study, StudyError, load_study
from latency_lab.study_grid import conflicts
from latency_lab.vllm_args import Argument, EngineArguments

STUDIES = sorted((Path(__file__).parents[1] / "notebooks" / "studies").glob("*.yaml"))


def argument(name: str, *types: str, choices: tuple[Any, ...] | None = None) -> Argument:
    return Argument(name, frozenset(types), choices)


# A small vLLM, so that these tests say the same beside any version of it.
VLLM = EngineArguments(
    "1.2.3",
    {
        a.name: a
        for a in (
            argument("max_num_batched_tokens", "int", "None"),
            argument("max_num_seqs", "int", "None"),
            argument("max_model_len", "int", "None"),
            argument("gpu_memory_utilization", "float"),
            argument("enable_chunked_prefill", "bool", "None"),
            argument("enforce_eager", "bool"),
            argument("block_size", "int", "None"),
            argument("dtype", choices=("auto", "float32", "bfloat16")),
            argument("mode", "str", choices=("none", "off", "full")),
            argument("quantization", "str", "None", choices=("awq", "fp8")),
            argument("load_format", "str"),
            argument("hf_overrides", "dict"),
            argument("model", "str"),
            argument("scheduler_cls", "str"),
        )
    },
)

HEAD = """\
question: Why?
model: {source: smollm2}
"""
WORK = """\
workloads:
  chat: {load: {kind: closed, concurrency: 1, requests_each: 1}, prompt: {tokens: 8}, output: {tokens: 4}}
"""


@pytest.fixture
def study(tmp_path: Path) -> Any:
    """Reads a study from text."""

    def read(text: str, arguments: EngineArguments | None = VLLM) -> Study:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return load_study(path, arguments)

    return read


def problems(study: Any, text: str) -> list[str]:
    """The problems of a faulty study, without the folder of its file."""
    with pytest.raises(StudyError) as caught:
        study(text)
    assert str(caught.value).splitlines() == caught.value.problems
    return [problem.split("mine.yaml:", 1)[1] for problem in caught.value.problems]


# --- what a study is --------------------------------------------------------------------------------------------------


def test_defaults_give_one_setting_and_the_name_of_the_file(study: Any) -> None:
    found = study(HEAD + WORK)
    assert (found.name, found.repeats, found.warmup, found.seed, found.order) == ("mine", 3, 4, 0, "shuffled")
    assert (found.timeout_s, found.start_timeout_s, found.keep_token_ids) == (300, 900, False)
    assert [(s.label, s.args, s.expect) for s in found.settings()] == [("base", {}, "valid")]
    assert [point.label for point in found.points()] == ["chat c=1"]


def test_axes_multiply_and_named_settings_follow(study: Any) -> None:
    found = study(
        HEAD
        + """\
engine: {max_model_len: 64, enforce_eager: true}
settings:
  axes: {max_num_batched_tokens: [128, 512], max_num_seqs: [4, 32]}
  named:
    compiled: {engine: {enforce_eager: off}}
    other: {model: {source: hub, id: a/b, revision: "123"}}
    refused: {engine: {max_num_seqs: -1}, expect: invalid}
"""
        + WORK
    )
    assert [setting.label for setting in found.settings()] == [
        "budget=128 seqs=4",
        "budget=128 seqs=32",
        "budget=512 seqs=4",
        "budget=512 seqs=32",
        "compiled",
        "other",
        "refused",
    ]
    by_label = {setting.label: setting for setting in found.settings()}
    assert by_label["budget=512 seqs=4"].args == {
        "max_model_len": 64,
        "enforce_eager": True,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 4,
    }
    assert by_label["compiled"].args == {"max_model_len": 64, "enforce_eager": False}
    assert by_label["other"].model.model_dump() == {"source": "hub", "id": "a/b", "revision": "123"}
    assert by_label["refused"].expect == "invalid"


def test_labels_name_values_as_a_reader_does(study: Any) -> None:
    axes = {
        "{enforce_eager: [on, off]}": ["enforce_eager=on", "enforce_eager=off"],
        "{gpu_memory_utilization: [0.5, 1]}": ["gpu_memory_utilization=0.5", "gpu_memory_utilization=1"],
        "{block_size: [null, 16]}": ["block_size=default", "block_size=16"],
        "{hf_overrides: [{a: 1}]}": ['hf_overrides={"a":1}'],
    }
    for text, labels in axes.items():
        assert [s.label for s in study(HEAD + f"settings: {{axes: {text}}}\n" + WORK).settings()] == labels


def test_points_of_every_kind_of_load(study: Any) -> None:
    found = study(
        HEAD
        + """\
workloads:
  chat: {load: {kind: closed, concurrency: [1, 8], seconds: 5}, prompt: {tokens: 8}, output: {tokens: 4}}
  thread: {load: {kind: burst, requests: 20}, prompt: {text: "Why?", chat: on}, output: {tokens: 4}}
  bursts: {load: {kind: burst, requests: [2, 4]}, prompt: {tokens: 8}, output: {tokens: 4}}
  open: {load: {kind: poisson, rate: [0.5, inf], requests: 60}, prompt: {tokens: 8}, output: {tokens: 4}}
  gam: {load: {kind: gamma, rate: 2, burstiness: [0.5, 4], seconds: 9}, prompt: {tokens: 8}, output: {tokens: 4}}
  mix:
    classes:
      a: {load: {kind: closed, concurrency: 8, requests_each: 1}, prompt: {tokens: 8}, output: {tokens: 4}}
      b: {load: {kind: constant, rate: 3.33, requests: 10, start_s: 1}, prompt: {tokens: 8}, output: {tokens: 1}, priority: -1}
"""
    )
    rows = [(p.label, p.load, p.concurrency, p.rate_per_s, p.burstiness) for p in found.points()]
    assert rows == [
        ("chat c=1", "closed", 1, None, None),
        ("chat c=8", "closed", 8, None, None),
        ("thread", "burst", 20, None, None),
        ("bursts n=2", "burst", 2, None, None),
        ("bursts n=4", "burst", 4, None, None),
        ("open rate=0.5/s", "poisson", None, 0.5, None),
        ("open rate=inf", "burst", 60, None, None),
        ("gam rate=2/s b=0.5", "gamma", None, 2.0, 0.5),
        ("gam rate=2/s b=4", "gamma", None, 2.0, 4.0),
        ("mix", "mix", None, None, None),
    ]
    assert len({point.id for point in found.points()}) == len(rows)
    mix = found.points()[-1]
    assert [(c.name, c.priority, c.load.start_s) for c in mix.classes] == [("a", None, 0), ("b", -1, 1)]


def test_doors_multiply_as_loads_do_and_labels_name_what_varies(study: Any) -> None:
    def doors(more: str, prompt: str = '{text: "Why?", chat: on}') -> list[tuple[str, str, str | None, bool]]:
        load = "load: {kind: closed, concurrency: [1, 8], requests_each: 1}"
        found = study(HEAD + f"workloads:\n  w: {{{load}, prompt: {prompt}, output: {{tokens: 4}}{more}}}\n").points()
        return [(p.label, p.via, p.classes[0].door.api, p.classes[0].door.stream) for p in found]

    assert doors("") == [("w c=1", "engine", None, True), ("w c=8", "engine", None, True)]
    assert doors(", via: openai")[0] == ("w c=1", "openai", "chat", True)
    assert doors(", via: openai, stream: off", "{tokens: 8}")[0] == ("w c=1", "openai", "completions", False)
    assert doors(", via: [engine, openai], stream: [on, off]")[:3] == [
        ("w c=1 via=engine", "engine", None, True),
        ("w c=1 via=openai stream=on", "openai", "chat", True),
        ("w c=1 via=openai stream=off", "openai", "chat", False),
    ]
    assert [row[0] for row in doors(", detokenize: [off, on]")][:2] == ["w c=1 detokenize=off", "w c=1 detokenize=on"]
    assert [row[0] for row in doors(", via: openai, api: [chat, completions]")][:2] == [
        "w c=1 api=chat",
        "w c=1 api=completions",
    ]


def test_a_points_id_follows_its_requests_and_not_its_targets(study: Any) -> None:
    def point_id(more: str, output: int = 4) -> str:
        text = f"load: {{kind: burst, requests: 2}}, prompt: {{tokens: 8}}, output: {{tokens: {output}}}"
        return study(HEAD + f"workloads: {{w: {{{text}{more}}}}}").points()[0].id

    assert point_id("") == point_id(", slo: {e2e_p95_s: 1}, timeout_s: 9, repeats: 7")
    assert point_id("") == point_id(", via: engine") == "ea964fa96264", "known from before there were doors"
    others = [point_id("", output=5), *(point_id(more) for more in (", ignore_eos: false", ", priority: 1"))]
    others += [point_id(", via: openai"), point_id(", via: openai, stream: off"), point_id(", detokenize: off")]
    assert len({point_id(""), *others}) == 7


def test_repeats_are_rounds_shuffled_by_the_seed(study: Any) -> None:
    text = HEAD + "settings: {axes: {max_num_seqs: [1, 2, 3, 4, 5, 6]}}\n" + WORK.replace("1,", "[1, 2, 3, 4, 5],", 1)
    found = study(text)
    setting = found.settings()[0]
    plans = found.cells(setting)
    assert [plan.repeat for plan in plans] == [0] * 5 + [1] * 5 + [2] * 5
    rounds = [[plan.point.label for plan in plans[i : i + 5]] for i in (0, 5, 10)]
    listed = [f"chat c={n}" for n in (1, 2, 3, 4, 5)]
    assert all(sorted(order) == listed for order in rounds)
    assert len({tuple(order) for order in [*rounds, listed]}) == 4
    assert sorted(s.label for s in found.settings_in_order()) == [s.label for s in found.settings()]
    assert [s.label for s in found.settings_in_order()] != [s.label for s in found.settings()]

    again, other, in_order = study(text), study(text + "seed: 1\n"), study(text + "order: listed\n")
    labels = [plan.point.label for plan in plans]
    assert [plan.point.label for plan in again.cells(again.settings()[0])] == labels
    assert [plan.point.label for plan in other.cells(other.settings()[0])] != labels
    assert [plan.point.label for plan in in_order.cells(in_order.settings()[0])] == listed * 3
    assert in_order.settings_in_order() == in_order.settings()


def test_every_setting_gets_the_same_requests_and_every_repeat_others(study: Any) -> None:
    found = study(HEAD + "settings: {axes: {max_num_seqs: [4, 32]}}\n" + WORK.replace("1,", "[1, 2],", 1))
    first, second = ({(p.point.label, p.repeat): p.seed for p in found.cells(s)} for s in found.settings())
    assert first == second
    assert len(set(first.values())) == len(first) == 6


def test_a_workload_may_choose_settings_repeats_and_a_time_limit(study: Any) -> None:
    found = study(
        HEAD
        + "settings: {axes: {max_num_batched_tokens: [128, 512], max_num_seqs: [4, 32]}}\n"
        + WORK
        + '  few: {load: {kind: burst, requests: 1}, prompt: {tokens: 8}, output: {tokens: 4}, settings: ["budget=512*"], '
        + "repeats: 1, timeout_s: 9}\n"
    )
    counts = {setting.label: Counter(p.point.label for p in found.cells(setting)) for setting in found.settings()}
    assert counts["budget=128 seqs=4"] == {"chat c=1": 3}
    assert counts["budget=512 seqs=32"] == {"chat c=1": 3, "few": 1}
    assert [point.timeout_s for point in found.points()] == [300, 9]


def test_the_estimate_grows_with_what_there_is_to_do(study: Any) -> None:
    one = study(HEAD + WORK).estimate_s()
    assert one == pytest.approx(45 + 3 * (4 / 25 + 8 / 1000))  # a start; 3 repeats of 4 tokens out, 8 in
    assert study(HEAD + WORK + "speed: {start_s: 1}\n").estimate_s() == pytest.approx(one - 44)
    two = study(HEAD + "settings: {axes: {max_num_seqs: [4, 32]}}\n" + WORK).estimate_s()
    assert two == pytest.approx(2 * one)


def test_the_same_study_in_another_process(study: Any, tmp_path: Path) -> None:
    found = study(HEAD + WORK)
    code = (
        "import sys; from pathlib import Path; from latency_lab.study import load_study; s = load_study(Path(sys.argv[1]));"
        "print([(p.point.id, p.seed) for p in s.cells(s.settings()[0])])"
    )
    here = str([(plan.point.id, plan.seed) for plan in found.cells(found.settings()[0])])
    assert elsewhere.printed(code, tmp_path / "mine.yaml") == [here, here]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_studies_that_are_shipped_load(path: Path) -> None:
    found = load_study(path, vllm_args.installed())
    assert found.name == path.stem
    for setting in found.settings():
        assert found.cells(setting)


def test_the_smoke_study_is_what_it_promises() -> None:
    found = load_study(STUDIES[0].with_name("cpu-smoke.yaml"))
    args = [setting.args for setting in found.settings()]
    assert len({a["max_num_batched_tokens"] for a in args}) >= 3
    assert len({a["max_num_seqs"] for a in args}) == 2
    assert {1, 20} <= {point.concurrency for point in found.points()}
    thread = next(point.classes[0] for point in found.points() if point.label == "thread")
    assert (thread.load.requests, thread.output.tokens) == (20, 256)
    assert thread.prompt.text == "Explain KV caching like I'm five."
    assert found.estimate_s() < 600


# --- values mean what a reader thinks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "args"),
    [
        ("max_num_seqs: 1e3", {"max_num_seqs": 1000}),
        ("max_num_seqs: 1_000", {"max_num_seqs": 1000}),
        ("max_num_seqs: 010", {"max_num_seqs": 10}),
        ("max_model_len: 0x10", {"max_model_len": 16}),
        ("max_model_len: -1", {"max_model_len": -1}),
        ("max_model_len: auto", {"max_model_len": "auto"}),
        ("gpu_memory_utilization: 1", {"gpu_memory_utilization": 1.0}),
        ("gpu_memory_utilization: 1e-3", {"gpu_memory_utilization": 0.001}),
        ("gpu_memory_utilization: inf", {"gpu_memory_utilization": float("inf")}),
        ("gpu_memory_utilization: -.inf", {"gpu_memory_utilization": float("-inf")}),
        ("enforce_eager: off", {"enforce_eager": False}),
        ("enforce_eager: No", {"enforce_eager": False}),
        ("enforce_eager: FALSE", {"enforce_eager": False}),
        ("enable_chunked_prefill: on", {"enable_chunked_prefill": True}),
        ("mode: off", {"mode": "off"}),
        ("mode: none", {"mode": "none"}),
        ("quantization: my-plugin", {"quantization": "my-plugin"}),
        ("max_num_seqs: null", {}),
        ("max_num_seqs: ~", {}),
        ("max_num_seqs:", {}),
        ("hf_overrides: {a: 1e3, b: off}", {"hf_overrides": {"a": 1000.0, "b": "off"}}),
    ],
)
def test_engine_values(study: Any, written: str, args: dict[str, Any]) -> None:
    found = study(HEAD + f"engine:\n  {written}\n" + WORK).settings()[0].args
    assert found == args
    assert [type(value) for value in found.values()] == [type(value) for value in args.values()]


def test_null_is_kept_in_what_was_asked(study: Any) -> None:
    found = study(HEAD + "engine: {block_size: 16}\nsettings: {axes: {block_size: [null, 32]}}\n" + WORK).settings()
    assert [(s.args, s.asked) for s in found] == [
        ({}, {"block_size": None}),
        ({"block_size": 32}, {"block_size": 32}),
    ]


def test_without_vllm_names_go_unchecked_and_words_are_booleans(study: Any) -> None:
    found = study(HEAD + "engine: {anything: off, count: 1e3, share: 0.5}\n" + WORK, arguments=None)
    assert found.settings()[0].args == {"anything": False, "count": 1000, "share": 0.5}
    assert isinstance(found.settings()[0].args["count"], int)


def test_numbers_in_workloads(study: Any) -> None:
    text = (
        HEAD
        + "workloads: {w: {load: {kind: poisson, rate: 1e-1, requests: 1e1}, prompt: {tokens: 1e2}, output: {tokens: 8}}}"
    )
    traffic = study(text).points()[0].classes[0]
    assert (traffic.load.rate_per_s, traffic.load.requests, traffic.prompt.tokens) == (0.1, 10, 100)
    assert [type(v) for v in (traffic.load.requests, traffic.prompt.tokens)] == [int, int]


def test_environment_values_become_what_a_shell_would_hold(study: Any) -> None:
    found = study(HEAD + "env: {A: 0, B: off, C: true, D: 1e3, E: 0.5, F: null}\n" + WORK)
    assert found.env == {"A": "0", "B": "off", "C": "1", "D": "1000", "E": "0.5"}


def test_anchors_and_merges(study: Any) -> None:
    found = study(
        HEAD
        + """\
workloads:
  a: &a {load: {kind: burst, requests: 2}, prompt: {tokens: 8}, output: {tokens: 4}}
  b: {<<: *a, output: {tokens: 5}}
"""
    )
    assert [point.classes[0].output.tokens for point in found.points()] == [4, 5]


# --- what is wrong ----------------------------------------------------------------------------------------------------

LOAD = "kind: closed, concurrency: 1, requests_each: 1"


def workload(load: str = LOAD, prompt: str = "tokens: 8", output: str = "tokens: 4", more: str = "") -> str:
    """A study whose workload has its load in line 5, its prompt in 6, its output in 7, and more from 8 on."""
    return HEAD + (
        f"workloads:\n  w:\n    load: {{{load}}}\n    prompt: {{{prompt}}}\n    output: {{{output}}}\n"
        + (f"    {more}\n" if more else "")
    )


def engine(written: str) -> str:
    """A study with engine arguments in line 4."""
    return HEAD + f"engine:\n  {written}\n" + WORK


MISTAKES = {
    # unknown keys and names
    "key": (HEAD + "repeat: 3\n" + WORK, "3: repeat: unknown key (value 3); did you mean repeats?; allowed: study,"),
    "key in a load": (workload(LOAD + ", rat: 1"), "5: workloads.w.load.rat: unknown key (value 1); allowed: kind,"),
    "key of another kind": (workload(LOAD + ", rate: 1"), "5: workloads.w.load.rate: unknown key (value 1)"),
    "key in a model": (HEAD.replace("2}", "2, id: x}") + WORK, "2: model.id: unknown key (value 'x'); allowed: source"),
    "kind of load": (workload("kind: posson"), "5: workloads.w.load.kind: 'posson' is not known; did you mean poisson?"),
    "kind missing": (workload("rate: 1"), "5: workloads.w.load: kind is missing; allowed: closed, constant, poisson"),
    "source": (HEAD.replace("smollm2", "smolm2") + WORK, "2: model.source: 'smolm2' is not known; did you mean smollm2?"),
    "no workloads": (HEAD, "1: study: workloads is missing"),
    "empty workloads": (HEAD + "workloads: {}\n", "3: workloads: is empty; allowed: at least one"),
    "no prompt": (HEAD + f"workloads:\n  w: {{load: {{{LOAD}}}, output: {{tokens: 1}}}}\n", "4: workloads.w: prompt is missing"),
    "order": (HEAD + "order: random\n" + WORK, "3: order: 'random' is not known; allowed: shuffled, listed"),
    "target": (workload(more="slo: {e2e_p95: 1}"), "8: workloads.w.slo.e2e_p95: 'e2e_p95' is not a target; allowed: METRIC_"),
    "name with a space": (WORK.replace("chat", '"a b"') + HEAD, "2: workloads.a b: 'a b' is no name; allowed: letters"),
    "settings glob": (workload(more='settings: [bas]'), "8: workloads.w.settings[0]: 'bas' matches no setting; did you mean base?"),
    # engine arguments
    "argument": (engine("max_num_seq: 4"), "4: engine.max_num_seq: 4: vLLM 1.2.3 has no engine argument of this name; did you mean max_num_seqs?"),
    "argument in axes": (HEAD + "settings:\n  axes: {foo: [1]}\n" + WORK, "4: settings.axes.foo[0]: 1: vLLM 1.2.3 has no"),
    "argument of a dropped feature": (engine("swap_space: 4"), "(vLLM's V1 engine recomputes preempted requests"),
    "fraction for int": (engine("max_num_seqs: 1.5"), "4: engine.max_num_seqs: 1.5 is not a value of max_num_seqs; allowed: a whole number, null"),
    "bool for int": (engine("max_num_seqs: true"), "4: engine.max_num_seqs: true is not a value"),
    "text for int": (engine('max_num_seqs: "4"'), "4: engine.max_num_seqs: '4' is not a value"),
    "inf for int": (engine("max_num_seqs: inf"), "4: engine.max_num_seqs: 'inf' is not a value"),
    "int for bool": (engine("enforce_eager: 1"), "4: engine.enforce_eager: 1 is not a value of enforce_eager; allowed: true, false"),
    "choice": (engine("dtype: float31"), "4: engine.dtype: 'float31' is not a value of dtype; did you mean float32?; allowed: auto, float32, bfloat16"),
    "near a known plugin name": (engine("quantization: awqq"), "4: engine.quantization: 'awqq' is not a value of quantization; did you mean awq?"),
    "list for mapping": (engine("hf_overrides: [1]"), "4: engine.hf_overrides: [1] is not a value of hf_overrides; allowed: a mapping"),
    "the lab's own": (engine("scheduler_cls: x.Y"), "4: engine.scheduler_cls: 'x.Y' is not for a study to set; allowed:"),
    "model as argument": (engine("model: a/b"), "4: engine.model: 'a/b' is not for a study to set; allowed: the study's `model:`"),
    # combinations of engine arguments
    "budget < seqs": (
        HEAD + "settings:\n  axes:\n    max_num_batched_tokens: [16, 64]\n    max_num_seqs: [4, 32]\n" + WORK,
        "5: settings.axes.max_num_batched_tokens[0]: 16 is less than max_num_seqs 32",
    ),
    "budget of the base < seqs of an axis": (
        HEAD + "engine:\n  max_num_batched_tokens: 8\nsettings: {axes: {max_num_seqs: [16]}}\n" + WORK,
        "4: engine.max_num_batched_tokens: 8 is less than max_num_seqs 16",
    ),
    "chunking off": (
        HEAD + "engine: {max_model_len: 2048, max_num_batched_tokens: 512}\nsettings:\n  named:\n"
        "    whole:\n      engine:\n        enable_chunked_prefill: off\n" + WORK,
        "8: settings.named.whole.engine.enable_chunked_prefill: false with max_num_batched_tokens 512 below max_model_len 2048",
    ),
    "no sequences": (engine("max_num_seqs: 0"), "4: engine.max_num_seqs: 0 is too small; allowed: a whole number from 1 on"),
    "too long for the model": (
        workload(prompt="uniform: [8, 60]", more="settings: [base]").replace(HEAD, HEAD.replace("?\n", "?\nengine: {max_model_len: 63}\n")),
        "7: workloads.w.prompt: up to 60 prompt and 4 output tokens are more than max_model_len 63 of setting 'base'",
    ),
    "text and output too long for the model": (
        HEAD + "engine: {max_model_len: 63}\n" + workload(prompt="text: a", output="tokens: 64").replace(HEAD, ""),
        "7: workloads.w.prompt: a text and 64 output tokens are more than max_model_len 63",
    ),
    # settings
    "empty axis": (HEAD + "settings:\n  axes: {max_num_seqs: []}\n" + WORK, "4: settings.axes.max_num_seqs: the list is empty"),
    "no axes": (HEAD + "settings:\n  axes: {}\n" + WORK, "4: settings.axes: is empty; allowed: at least one"),
    "value twice": (HEAD + "settings:\n  axes: {max_num_seqs: [4, 4.0]}\n" + WORK, "4: settings.axes.max_num_seqs[1]: 4 is given twice"),
    "same arguments": (
        HEAD + "engine: {max_num_seqs: 4}\nsettings:\n  named:\n    a: {engine: {max_num_seqs: 8}}\n    b: {engine: {max_num_seqs: 8.0}}\n" + WORK,
        "7: settings.named.b: the settings 'a' and 'b' have the same engine arguments; allowed: one of them",
    ),
    "setting without work": (
        workload(more="settings: [a]") + "settings:\n  named:\n    a: {engine: {max_num_seqs: 8}}\n    b: {}\n",
        "12: settings.named.b: the setting 'b' has no workload",
    ),
    "load format of random weights": (
        HEAD.replace("smollm2", "config, config: some") + "engine: {load_format: auto}\n" + WORK,
        "3: engine.load_format: 'auto' given, yet weights of a model of source config are random",
    ),
    # loads
    "no rate": (workload("kind: poisson, rate: 0, requests: 1"), "5: workloads.w.load.rate: 0 is too small; allowed: a number above 0, or inf"),
    "negative rate": (workload("kind: poisson, rate: [1, -1], requests: 1"), "5: workloads.w.load.rate[1]: -1 is too small"),
    "NaN": (workload("kind: poisson, rate: .nan, requests: 1"), "5: workloads.w.load.rate: NaN is not a number"),
    "nan": (workload("kind: poisson, rate: nan, requests: 1"), "5: workloads.w.load.rate: .nan is not finite"),
    "NaN for an argument": (engine("gpu_memory_utilization: .nan"), "4: engine.gpu_memory_utilization: NaN is not a number"),
    "infinite for seconds": (workload("kind: poisson, rate: inf, seconds: 1"), "5: workloads.w.load: an infinite rate for some seconds"),
    "no end": (workload("kind: poisson, rate: 1"), "5: workloads.w.load: how long it lasts is not clear; allowed: either requests or seconds"),
    "two ends": (workload(LOAD + ", seconds: 1"), "5: workloads.w.load: how long it lasts is not clear; allowed: either requests_each or seconds"),
    "no client": (workload("kind: closed, concurrency: [0], requests_each: 1"), "5: workloads.w.load.concurrency[0]: 0 is too small; allowed: a whole number from 1 on"),
    "half a client": (workload("kind: closed, concurrency: 1.5, requests_each: 1"), "5: workloads.w.load.concurrency: 1.5 is not whole"),
    "infinite clients": (workload("kind: closed, concurrency: inf, requests_each: 1"), "5: workloads.w.load.concurrency: .inf is not finite"),
    "quoted number": (workload('kind: closed, concurrency: "4", requests_each: 1'), "5: workloads.w.load.concurrency: '4' is not a whole number"),
    "no burstiness": (workload("kind: gamma, rate: 1, requests: 1"), "5: workloads.w.load: burstiness is missing"),
    "longer than its time": (workload("kind: constant, rate: 0.1, requests: 40"), "5: workloads.w.load: 'w rate=0.1/s' sends requests for 400 s, and a cell is given 300 s"),
    "list in a mix": (
        HEAD + "workloads:\n  m:\n    classes:\n      a:\n        load: {kind: closed, concurrency: [1, 2], requests_each: 1}\n"
        "        prompt: {tokens: 8}\n        output: {tokens: 4}\n",
        "7: workloads.m.classes.a.load.concurrency: [1, 2] in a class of a mix; allowed: one value",
    ),
    # lengths
    "two lengths": (workload(prompt="tokens: 8, uniform: [1, 2]"), "6: workloads.w.prompt: tokens and uniform given; allowed: exactly one of"),
    "no length": (workload(output=""), "7: workloads.w.output: none of them given; allowed: exactly one of tokens, uniform, lognormal"),
    "zero tokens": (workload(output="tokens: 0"), "7: workloads.w.output.tokens: 0 is too small"),
    "downwards": (workload(output="uniform: [9, 2]"), "7: workloads.w.output: uniform [9, 2] runs downwards; allowed: [least, most]"),
    "half a range": (workload(output="uniform: [9]"), "7: workloads.w.output.uniform: [9] is too short; allowed: [least, most]"),
    "median outside": (workload(output="lognormal: {median: 9, sigma: 1, max: 8}"), "7: workloads.w.output.lognormal: the median 9 is outside"),
    "chat without text": (workload(prompt="tokens: 8, chat: true"), "6: workloads.w.prompt: chat: true is for text prompts"),
    "all shared": (workload(prompt="tokens: 8, shared_prefix_tokens: 8"), "6: workloads.w.prompt: shared_prefix_tokens 8 leaves nothing"),
    # doors
    "door": (workload(more="via: http"), "8: workloads.w.via: 'http' is not known; allowed: engine, openai"),
    "no door": (workload(more="via: []"), "8: workloads.w.via: the list is empty"),
    "api of the engine": (workload(more="api: chat"), "8: workloads.w.api: api is for the OpenAI-compatible server; allowed: via: openai"),
    "stream of the engine": (workload(more="stream: off"), "8: workloads.w.stream: stream is for the OpenAI-compatible server"),
    "text of the server": (workload(more="via: openai\n    detokenize: off"), "9: workloads.w.detokenize: detokenize is for the engine; allowed: via: engine"),
    "unknown api": (workload(more="via: openai\n    api: talk"), "9: workloads.w.api: 'talk' is not known; allowed: chat, completions"),
    "chat of tokens": (workload(more="via: openai\n    api: [completions, chat]"), "9: workloads.w.api: chat is for texts in a chat template"),
    "chat without a tokenizer": (
        workload(prompt="text: a, chat: on", more="via: openai").replace("smollm2", "config, config: some"),
        "8: workloads.w.via: the chat API needs a tokenizer, and the model of setting 'base' is a config without one",
    ),
    "logprobs through the server": (workload(more="via: openai\n    keep_logprobs: on"), "9: workloads.w.keep_logprobs: true is for what comes from the engine"),
    "two doors in a mix": (
        HEAD + "workloads:\n  m:\n    classes:\n" + "".join(f"      {name}: {{load: {{{LOAD}}}, prompt: {{tokens: 8}}, output: {{tokens: 4}}, via: {via}}}\n" for name, via in (("a", "engine"), ("b", "openai"))),
        "4: workloads.m: class b has a `via` of its own; allowed: the same for all classes of a mix",
    ),
    "doors in a class": (
        HEAD + f"workloads:\n  m:\n    classes:\n      a: {{load: {{{LOAD}}}, prompt: {{tokens: 8}}, output: {{tokens: 4}}, via: [engine, openai]}}\n",
        "6: workloads.m.classes.a.via: ['engine', 'openai'] in a class of a mix; allowed: one value",
    ),
    # the environment
    "secret": (HEAD + "env: {HF_TOKEN: abc}\n" + WORK, "3: env.HF_TOKEN: 'HF_TOKEN' looks like a secret"),
    # YAML itself
    "duplicate key": (HEAD + WORK + "model: {source: smollm2}\n", "5: model: given twice, first in line 2; allowed: each key once"),
    "tab": (HEAD + "engine:\n\tdtype: auto\n", "4: not YAML: while scanning for the next token found character '\\t'"),
    "bracket": (HEAD + "engine: {a: [1}\n", "3: not YAML:"),
    "empty": ("# nothing\n", "1: the file is empty; allowed: a study"),
    "list": ("- a\n", "1: not a mapping; allowed:"),
    "number as key": (HEAD + "engine: {1: 2}\n" + WORK, "3: engine: the key 1 is not a name; allowed: text, in quotes"),
    "python tag": (HEAD + "seed: !!python/name:os.system\n" + WORK, "3: seed: the tag tag:yaml.org,2002:python/name:os.system is not known"),
    "alias to itself": (HEAD + "claims: &a {b: *a}\n" + WORK, "3: claims.b: refers to itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(study: Any, name: str) -> None:
    text, expected = MISTAKES[name]
    found = problems(study, text)
    assert any(expected in problem for problem in found), found
    assert all("; allowed: " in problem for problem in found)


def test_all_mistakes_are_found_at_once(study: Any) -> None:
    text = """\
question: Why?
question: How?
model: {source: hub}
engine: {max_num_seqs: x, dtpe: auto}
workloads:
  w: {load: {kind: closed, concurrency: 0, requests_each: nan}, prompt: {}, output: {tokens: 4}}
"""
    found = problems(study, text)
    keys = [problem.split(": ")[1] for problem in found]
    lines = [int(problem.split(":")[0]) for problem in found]
    assert keys == [
        "question",
        "model",
        "engine.dtpe",
        "engine.max_num_seqs",
        "workloads.w.load.concurrency",
        "workloads.w.load.requests_each",
        "workloads.w.prompt",
    ]
    assert lines == [2, 3, 4, 4, 6, 6, 6]


def test_an_expected_refusal_may_be_wrong_but_not_misspelled(study: Any) -> None:
    text = (
        HEAD
        + "settings: {named: {no: {engine: {max_num_seqs: x, max_num_batched_tokens: -1}, expect: invalid}}}\n"
        + WORK
    )
    setting = study(text).settings()[0]
    assert (setting.expect, setting.args) == ("invalid", {"max_num_seqs": "x", "max_num_batched_tokens": -1})
    found = problems(study, text.replace("max_num_seqs", "max_num_seq"))
    assert len(found) == 1 and "did you mean max_num_seqs?" in found[0]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, expected in ((tmp_path / "none.yaml", "there is no such file"), (tmp_path, "Is a directory")):
        with pytest.raises(StudyError, match=expected):
            load_study(path)
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff")
    with pytest.raises(StudyError, match="bytes.yaml:1: byte 3: not text; allowed: YAML in UTF-8"):
        load_study(tmp_path / "bytes.yaml")


@pytest.mark.parametrize(
    ("args", "blamed"),
    [
        ({}, []),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 8}, []),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, ["max_num_batched_tokens"]),
        ({"max_num_seqs": 9}, []),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8}, []),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8, "max_model_len": 8}, []),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 8, "max_model_len": 9},
            ["enable_chunked_prefill"],
        ),
        ({"enable_chunked_prefill": True, "max_num_batched_tokens": 8, "max_model_len": 9}, []),
        ({"max_model_len": -1}, []),
        ({"max_model_len": 0}, ["max_model_len"]),
    ],
)
def test_conflicts_blame_one_argument(args: dict[str, Any], blamed: list[str]) -> None:
    assert [key for key, _ in conflicts(args)] == blamed


def test_reading_a_study_does_not_import_vllm() -> None:
    code = "import sys; import latency_lab.study, latency_lab.load, latency_lab.vllm_args as v; v.installed(); print('vllm' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
