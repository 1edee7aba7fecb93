"""Requests: arrivals of the right rate and dispersion, distinct prompts, lengths in bounds, all of it from a seed."""

from __future__ import annotations

import hashlib
import itertools
import math
from pathlib import Path
from typing import Any

import elsewhere
import numpy as np
import pytest

from latency_lab.load import Request, Stream, arrivals, length, streams
from latency_lab.study import Load, Point, load_study
from latency_lab.study_schema import Lengths, LogNormal


class Words:
    """A tokenizer whose tokens are characters; a chat's text is between two special ones."""

    size = 1000
    usable = range(100, 1000)

    def encode(self, text: str, chat: bool) -> list[int]:
        ids = [ord(letter) for letter in text]
        return [1, *ids, 2] if chat else ids


class NoTokenizer(Words):
    def encode(self, text: str, chat: bool) -> list[int]:
        raise ValueError("there is no tokenizer")


def points(tmp_path: Path, workloads: str) -> list[Point]:
    path = tmp_path / "study.yaml"
    path.write_text("question: Why?\nmodel: {source: smollm2}\nworkloads:\n" + workloads)
    return load_study(path).points()


def taken(stream: Stream, most: int = 10_000) -> list[Request]:
    return list(itertools.islice(stream.requests, most))


def cell(point: Point, repeat: int = 0, seed: int = 7) -> list[Request]:
    """All requests of a cell of finite streams."""
    return [request for stream in streams(point, repeat, seed, Words()) for request in taken(stream)]


CHAT = "  w: {load: {kind: closed, concurrency: 4, requests_each: 3}, prompt: {tokens: 8}, output: {tokens: 5}}\n"
TEXT = '  w: {load: {kind: burst, requests: 5}, prompt: {text: "Hi", chat: true%s}, output: {tokens: 5}}\n'

# --- arrivals ---------------------------------------------------------------------------------------------------------


def test_constant_arrivals_are_a_ruler() -> None:
    assert arrivals(Load("constant", rate_per_s=4.0, requests=3), np.random.default_rng(0)).tolist() == [0, 0.25, 0.5]
    assert arrivals(Load("constant", rate_per_s=4.0, seconds=1.0), np.random.default_rng(0)).tolist() == [
        0,
        0.25,
        0.5,
        0.75,
    ]


def test_a_burst_arrives_at_once() -> None:
    assert arrivals(Load("burst", requests=3), np.random.default_rng(0)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("kind", "burstiness"), [("poisson", None), ("gamma", 0.25), ("gamma", 1.0), ("gamma", 4.0)])
def test_random_arrivals_have_their_rate_and_dispersion(kind: Any, burstiness: float | None) -> None:
    at = arrivals(Load(kind, rate_per_s=5.0, requests=20_000, burstiness=burstiness), np.random.default_rng(1))
    gaps = np.diff(at, prepend=0.0)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 5.0, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness or 1.0), rel=0.04)


def test_arrivals_for_some_seconds_end_in_time_and_keep_their_rate() -> None:
    at = arrivals(Load("poisson", rate_per_s=50.0, seconds=100.0), np.random.default_rng(2))
    assert at[-1] < 100.0
    assert len(at) == pytest.approx(5000, rel=0.05)


def test_gamma_of_shape_one_is_poisson() -> None:
    both = [
        arrivals(Load(kind, rate_per_s=2.0, requests=50, burstiness=shape), np.random.default_rng(3))
        for kind, shape in (("poisson", None), ("gamma", 1.0))
    ]
    assert both[0].tolist() == both[1].tolist()


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_closed_loop_has_exactly_its_requests(tmp_path: Path) -> None:
    (stream,) = streams(points(tmp_path, CHAT)[0], 0, 7, Words())
    assert (stream.class_name, stream.concurrency, stream.seconds, stream.start_s) == ("w", 4, None, 0)
    requests = taken(stream)
    assert [request.index for request in requests] == list(range(12))
    assert {(r.due_s, r.output_tokens, r.ignore_eos, r.priority) for r in requests} == {(None, 5, True, None)}


def test_a_closed_loop_for_some_seconds_never_runs_out(tmp_path: Path) -> None:
    (point,) = points(tmp_path, CHAT.replace("requests_each: 3", "seconds: 2"))
    (stream,) = streams(point, 0, 7, Words())
    assert (stream.concurrency, stream.seconds) == (4, 2)
    assert [request.index for request in taken(stream, 500)] == list(range(500))


def test_an_open_loop_is_due_in_order(tmp_path: Path) -> None:
    workload = (
        "  w: {load: {kind: poisson, rate: 2, seconds: 30, start_s: 1.5}, prompt: {tokens: 8}, output: {tokens: 5}}\n"
    )
    (stream,) = streams(points(tmp_path, workload)[0], 0, 7, Words())
    due = [request.due_s for request in taken(stream)]
    assert (stream.concurrency, stream.seconds, stream.start_s) == (None, None, 1.5)
    assert due == sorted(due) and due[0] >= 0 and due[-1] < 30  # from the stream's start, not the cell's


def test_a_mix_numbers_its_requests_together(tmp_path: Path) -> None:
    mix = """\
  m:
    classes:
      endless: {load: {kind: closed, concurrency: 1, seconds: 9}, prompt: {tokens: 8}, output: {tokens: 5}}
      also: {load: {kind: closed, concurrency: 1, seconds: 9}, prompt: {tokens: 8}, output: {tokens: 5}}
      long: {load: {kind: constant, rate: 2, requests: 4}, prompt: {tokens: 60}, output: {tokens: 1}, priority: 3}
"""
    found = {stream.class_name: stream for stream in streams(points(tmp_path, mix)[0], 0, 7, Words())}
    assert list(found) == ["endless", "also", "long"]
    assert [(r.index, r.priority, len(r.prompt)) for r in taken(found["long"])] == [(i, 3, 60) for i in range(4)]
    first = [next(found[name].requests) for name in ("endless", "also", "also", "endless")]
    assert [request.index for request in first] == [4, 5, 6, 7]
    # What a class asks does not depend on the order in which the classes were served.
    again = {stream.class_name: stream for stream in streams(points(tmp_path, mix)[0], 0, 7, Words())}
    assert [request.prompt for request in taken(again["also"], 2)] == [first[1].prompt, first[2].prompt]


# --- prompts and lengths ----------------------------------------------------------------------------------------------


def test_random_prompts_are_distinct_in_a_cell_and_across_cells(tmp_path: Path) -> None:
    small, large = points(tmp_path, CHAT.replace("concurrency: 4", "concurrency: [4, 8]"))
    prompts = [
        request.prompt for point in (small, large) for repeat in (0, 1) for request in cell(point, repeat, seed=7)
    ]
    prompts += [request.prompt for request in cell(small, 0, seed=8)]
    assert len(set(prompts)) == len(prompts) == 12 + 12 + 24 + 24 + 12
    assert {len(prompt) for prompt in prompts} == {8}
    assert {token for prompt in prompts for token in prompt} <= set(Words.usable)


def test_texts_are_distinct_unless_asked_otherwise(tmp_path: Path) -> None:
    (point,) = points(tmp_path, TEXT % "")
    prompts = [request.prompt for repeat in (0, 1) for request in cell(point, repeat)]
    assert len(set(prompts)) == 10
    assert len({len(prompt) for prompt in prompts}) == 1
    texts = ["".join(map(chr, prompt[1:-1])) for prompt in prompts]
    assert all(text[:9].isdigit() and text[9:] == ". Hi" for text in texts)

    (point,) = points(tmp_path, TEXT % ", distinct: false")
    assert {request.prompt for repeat in (0, 1) for request in cell(point, repeat)} == {(1, ord("H"), ord("i"), 2)}


def test_a_text_needs_a_tokenizer_and_random_tokens_do_not(tmp_path: Path) -> None:
    (text,), (tokens,) = points(tmp_path, TEXT % ""), points(tmp_path, CHAT)
    with pytest.raises(ValueError, match="no tokenizer"):
        streams(text, 0, 7, NoTokenizer())
    assert streams(tokens, 0, 7, NoTokenizer())


def test_a_shared_prefix_is_shared_by_all_cells_and_nothing_else(tmp_path: Path) -> None:
    (point,) = points(tmp_path, CHAT.replace("tokens: 8", "tokens: 40, shared_prefix_tokens: 16"))
    prompts = [request.prompt for repeat in (0, 1) for request in cell(point, repeat)]
    assert len({prompt[:16] for prompt in prompts}) == 1
    assert len({prompt[16:] for prompt in prompts}) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {40}


@pytest.mark.parametrize(
    ("lengths", "low", "high", "median"),
    [
        (Lengths(tokens=7), 7, 7, 7),
        (Lengths(uniform=(10, 20)), 10, 20, 15),
        (Lengths(lognormal=LogNormal(median=64, sigma=0.5, min=8, max=256)), 8, 256, 64),
        (Lengths(lognormal=LogNormal(median=64, sigma=3, min=32, max=128)), 32, 128, 64),
    ],
)
def test_lengths_keep_their_bounds_and_median(lengths: Lengths, low: int, high: int, median: int) -> None:
    rng = np.random.default_rng(0)
    drawn = [length(lengths, rng) for _ in range(4000)]
    assert all(type(tokens) is int and low <= tokens <= high for tokens in drawn)
    assert np.median(drawn) == pytest.approx(median, rel=0.1)
    if lengths.uniform:
        assert {min(drawn), max(drawn)} == {low, high}


# --- one seed for all -------------------------------------------------------------------------------------------------

OPEN = "  w: {load: {kind: poisson, rate: 2, requests: 20}, prompt: {uniform: [4, 64]}, output: {uniform: [1, 9]}}\n"


def test_arrivals_lengths_and_prompts_draw_from_streams_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two points that differ in one distribution only, given the same id, differ in nothing else."""
    monkeypatch.setattr(Point, "id", "same")

    def requests(workload: str) -> list[Request]:
        (point,) = points(tmp_path, workload)
        return cell(point)

    base = requests(OPEN)
    later = requests(OPEN.replace("rate: 2", "rate: 3"))
    longer = requests(OPEN.replace("[1, 9]", "[10, 90]"))
    more = requests(OPEN.replace("requests: 20", "requests: 30"))
    assert [r.prompt for r in later] == [r.prompt for r in base] and later[3].due_s != base[3].due_s
    assert [r.prompt for r in longer] == [r.prompt for r in base] and longer[3].output_tokens != base[3].output_tokens
    assert [r.due_s for r in longer] == [r.due_s for r in base]
    assert more[:20] == base


def test_the_same_requests_in_every_process(tmp_path: Path) -> None:
    (point,) = points(tmp_path, OPEN)
    here = hashlib.sha256(repr(cell(point)).encode()).hexdigest()
    code = (
        "import sys, hashlib; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from test_load import *;"
        "print(hashlib.sha256(repr(cell(load_study(Path(sys.argv[2])).points()[0])).encode()).hexdigest())"
    )
    assert elsewhere.printed(code, Path(__file__).parent, tmp_path / "study.yaml") == [here, here]
