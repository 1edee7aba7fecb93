"""The requests of a cell: when they arrive, what they ask, how long their answers are.

Everything follows from a seed. Arrivals, lengths and prompts draw from streams of their own, and each request from its
own place in them, so that changing one (or asking for more requests) leaves the others as they were.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from latency_lab.study import Load, Point, TrafficClass
from latency_lab.study_grid import ENGINE, Door
from latency_lab.study_schema import Lengths
from latency_lab.traffic import BLOCK_TOKENS, fitted

GOLDEN_RATIO = (5**0.5 - 1) / 2


class Vocabulary(Protocol):
    """What load needs to know of a tokenizer.

    size : number of token ids
    usable : ids for random prompts, none of them special
    encode : ids of a text, in the model's chat template if asked; ValueError where there is no tokenizer or template
    """

    @property
    def size(self) -> int: ...

    @property
    def usable(self) -> Sequence[int] | np.ndarray: ...

    def encode(self, text: str, chat: bool) -> list[int]: ...


@dataclass(frozen=True)
class Request:
    """One request. `index` is unique in its cell; `due_s` counts from its stream's start, None in a closed loop.

    clamped : its lengths in a file were more than the model's, and are cut
    text : the prompt as words, where a server is to make tokens of them; `prompt` has the tokens expected
    """

    index: int
    class_name: str
    priority: int | None
    prompt: tuple[int, ...]
    output_tokens: int
    ignore_eos: bool
    due_s: float | None
    clamped: bool = False
    text: str | None = None
    door: Door = ENGINE


@dataclass
class Stream:
    """The requests of one class, from `start_s` after the cell's start.

    concurrency : closed loop: requests in flight; the next is sent when one ends. None: open loop, by `due_s`.
    seconds : closed loop: no request is sent later than this after `start_s`. None: until `requests` ends.
    requests : open loop: in order of `due_s`. A closed loop with `seconds` never runs out of them.
    """

    class_name: str
    concurrency: int | None
    seconds: float | None
    start_s: float
    requests: Iterator[Request]


def streams(point: Point, repeat: int, seed: int, vocabulary: Vocabulary) -> list[Stream]:
    """The streams of one cell. The same arguments give the same requests, in every process.

    Requests of finite streams are ready when this returns; those of endless ones are made as they are taken.
    Raises ValueError where a prompt needs a tokenizer or chat template that `vocabulary` lacks.
    """
    indexes = itertools.count()
    found, endless = [], []
    for traffic in point.classes:
        maker = _Maker(traffic, (point.id, repeat, seed, traffic.name), vocabulary)
        load = traffic.load
        stream = Stream(traffic.name, load.concurrency, load.seconds, load.start_s, iter(()))
        if load.kind != "closed":
            trace = traffic.trace
            due_s = trace.at_s if trace is not None else arrivals(load, _rng("arrivals", *maker.place))
            stream.requests = iter([maker.request(next(indexes), i, float(at)) for i, at in enumerate(due_s)])
            stream.seconds = None  # the arrivals end by themselves
        elif load.requests_each is not None:
            count = load.requests_each * (load.concurrency or 1)
            stream.requests = iter([maker.request(next(indexes), i, None) for i in range(count)])
        else:
            endless.append((stream, maker))
        found.append(stream)
    for stream, maker in endless:  # numbered last, and by one counter, as they are taken
        stream.requests = (maker.request(next(indexes), i, None) for i in itertools.count())
    return found


def arrivals(load: Load, rng: np.random.Generator) -> np.ndarray:
    """Arrival times of an open loop in seconds from its start, ascending.

    constant : a request each 1 / rate, the first at 0
    poisson : exponential gaps
    gamma : gaps of shape `burstiness` and scale 1 / (rate * burstiness), so that their mean is 1 / rate and their
        coefficient of variation 1 / sqrt(burstiness); this is how vLLM's benchmark defines burstiness
        (vllm/benchmarks/serve.py, get_request), which also stretches the gaps of a run to sum to n / rate: not so here
    burst : all at 0

    The load gives either the number of requests or the seconds after which none arrives.
    """
    if load.kind == "burst":
        return np.zeros(load.requests or 0)
    rate = load.rate_per_s or math.nan
    if load.kind == "constant":
        count = load.requests or math.ceil(rate * (load.seconds or 0.0))
        return np.arange(count) / rate
    shape = 1.0 if load.kind == "poisson" else load.burstiness or math.nan
    if load.requests is not None:
        return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), load.requests))
    times: list[float] = []
    at, seconds = 0.0, load.seconds or 0.0
    while (at := at + rng.gamma(shape, 1.0 / (rate * shape))) < seconds:
        times.append(at)
    return np.array(times)


def length(lengths: Lengths, rng: np.random.Generator) -> int:
    """A length in tokens, drawn from its distribution."""
    low, high = lengths.bounds()
    if lengths.lognormal is not None:
        drawn = rng.lognormal(math.log(lengths.lognormal.median), lengths.lognormal.sigma)
        return int(min(max(round(drawn), low), high))
    return int(rng.integers(low, high + 1))


class _Maker:
    """Makes the requests of one class of one cell; `place` is what sets the cell and the class apart."""

    def __init__(self, traffic: TrafficClass, place: tuple[Any, ...], vocabulary: Vocabulary) -> None:
        self.traffic = traffic
        self.place = place
        self.vocabulary = vocabulary
        self.usable = np.asarray(vocabulary.usable)
        self.first_number = _seed("numbers", *place) % 10**9
        prompt = traffic.prompt
        # The prefix is the same in all cells of a study's seed, or a repeat could not find it cached.
        self.prefix = self._random(_rng("prefix", traffic.name), prompt.shared_prefix_tokens if prompt else 0)
        self.same: tuple[str, tuple[int, ...]] | None = None

    def request(self, index: int, i: int, due_s: float | None) -> Request:
        """The class's i-th request, counted from 0."""
        traffic = self.traffic
        words = self._words(i)
        text = None if words is None else self._encoded(words)
        asked = self._prompt_tokens(i) if text is None else len(text), self._output_tokens(i)
        prompt_tokens, output_tokens = asked if traffic.limit is None else fitted(*asked, traffic.limit)
        as_words = traffic.door.api == "chat"
        if as_words and prompt_tokens < asked[0]:
            raise ValueError(
                f"{traffic.name}: prompt {i} has {asked[0]} tokens, more than fit, and the chat API takes no part of a "
                "text; allowed: api: completions, shorter prompts, a longer max_model_len"
            )
        return Request(
            index=index,
            class_name=traffic.name,
            priority=traffic.priority,
            prompt=self._tokens(i, prompt_tokens) if text is None else text[:prompt_tokens],
            output_tokens=int(output_tokens),
            ignore_eos=traffic.ignore_eos,
            due_s=due_s,
            clamped=asked != (prompt_tokens, output_tokens),
            text=words if as_words else None,
            door=traffic.door,
        )

    def _words(self, i: int) -> str | None:
        """The text of a prompt; None for one of random tokens."""
        prompt, prompts = self.traffic.prompt, self.traffic.prompts
        if prompts is not None:
            return prompts.texts[self._row(i)]
        if prompt is None or prompt.text is None or not prompt.distinct:
            return prompt.text if prompt else None
        # Nine digits, so that all prompts are equally long; consecutive, so that none occurs twice in a cell.
        return f"{(self.first_number + i) % 10**9:09d}. {prompt.text}"

    def _encoded(self, words: str) -> tuple[int, ...]:
        """The tokens of a text, which are the same for all prompts of a class that are."""
        if self.same is None or self.same[0] != words:
            chat = self.traffic.prompt is not None and self.traffic.prompt.chat
            self.same = words, tuple(self.vocabulary.encode(words, chat))
        return self.same[1]

    def _row(self, i: int) -> int:
        """Which of a file's prompts: in order, and each repeat from another place of the file on.

        The golden ratio keeps these places apart however many repeats there are, so that prompts of one are not in the
        prefix cache of the next unless the file is too small.
        """
        rows = len(self.traffic.prompts.texts) if self.traffic.prompts else 1
        repeat = self.place[1]
        return (int(rows * (repeat * GOLDEN_RATIO % 1)) + i) % rows

    def _prompt_tokens(self, i: int) -> int:
        traffic = self.traffic
        if traffic.prompt is not None:
            return length(traffic.prompt, _rng("length", *self.place, i))
        return int(traffic.trace.prompt_tokens[i]) if traffic.trace is not None else 0

    def _output_tokens(self, i: int) -> int:
        traffic = self.traffic
        if traffic.output is not None:
            return length(traffic.output, _rng("output", *self.place, i))
        answer = traffic.prompts.answers[self._row(i)] if traffic.prompts is not None else None
        if answer is None and traffic.trace is not None:
            return int(traffic.trace.output_tokens[i])
        return answer if isinstance(answer, int) else len(self.vocabulary.encode(answer or "", False))

    def _tokens(self, i: int, count: int) -> tuple[int, ...]:
        """Random tokens, after those that the class shares. Equal blocks of a trace are equal ones of the cell."""
        trace = self.traffic.trace
        if self.traffic.prompt is None and trace is not None and trace.blocks and trace.blocks[i]:
            blocks = (self._random(_rng("block", *self.place, block), BLOCK_TOKENS) for block in trace.blocks[i])
            return tuple(itertools.islice(itertools.chain.from_iterable(blocks), count))
        prompt = self.prefix[:count]
        return prompt + self._random(_rng("prompt", *self.place, i), count - len(prompt))

    def _random(self, rng: np.random.Generator, tokens: int) -> tuple[int, ...]:
        return tuple(self.usable[rng.integers(0, len(self.usable), tokens)].tolist())


def _seed(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8], "big")


def _rng(*parts: Any) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(_seed(*parts)))
