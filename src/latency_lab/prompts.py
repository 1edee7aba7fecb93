"""Prompts from a file: real conversations, or texts of one's own.

- sharegpt: a JSON list of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, or
  one such object in each line
- jsonl: JSON lines of {"prompt": ..., "output_tokens": ...}, as vLLM's benchmark reads them (vllm/benchmarks/datasets,
  CustomDataset); without output_tokens the study says how long answers are

Conversations without a question and its answer are left out and counted; whatever else is wrong is an error that names
its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from latency_lab.files import file_sha256
from latency_lab.study_file import show
from latency_lab.traffic_file import TrafficError, read_table, read_tokens

PROMPTS = {"sharegpt": ("conversations",), "jsonl": ("prompt",)}
"""The columns that a file of prompts must have."""

_HUMANS = ("human", "user")


@dataclass(frozen=True, eq=False)
class Prompts:
    """Texts to ask, in the order of their file.

    digest : SHA-256 of the file
    answers : for each text the answer that it got, or how many tokens it is to get; None where the file does not say
    left_out : conversations in which no human's text has an answer after it
    unanswered : line of the first text whose answer is None
    """

    path: Path
    layout: str
    digest: str
    texts: tuple[str, ...]
    answers: tuple[str | int | None, ...]
    left_out: int
    unanswered: int | None

    def mean_tokens(self) -> tuple[float, float | None]:
        """Prompt and output tokens on average, roughly: of the first 1,000, at four letters a token."""
        answers = [answer if isinstance(answer, int) else len(answer) / 4 for answer in self.answers[:1000] if answer]
        return mean(map(len, self.texts[:1000])) / 4, mean(answers) if answers else None

    @property
    def note(self) -> str:
        """What a reader has to know of the file."""
        left_out = f", left out for no question with an answer: {self.left_out:,}" if self.left_out else ""
        return f"{len(self.texts):,} prompts in {self.path.name} ({self.layout}){left_out}"


def read_prompts(path: Path, layout: str | None = None) -> Prompts:
    """Read texts to ask; without `layout`, their columns tell. Raises TrafficError.

    Of a conversation, the first text of a human is the prompt and the text after it the answer: later turns would need
    the earlier ones. vLLM's benchmark (ShareGPTDataset) takes the first two texts whoever said them, and drops pairs
    with less than 4 tokens on a side, prompts above 1,024 tokens and pairs above 2,048. Here no pair is left out for
    its length: the lengths are what is asked for, and long ones are cut to the model's length and counted.
    """
    table = read_table(path)
    layout = table.layout(layout, PROMPTS)
    read_pair = {"sharegpt": _conversation, "jsonl": _prompt}[layout]
    texts: list[str] = []
    answers: list[str | int | None] = []
    left_out, unanswered = 0, None
    for line, row in table.rows:
        try:
            text, answer = read_pair(row)
        except ValueError as error:
            raise TrafficError(path, line, str(error)) from None
        if text is None:
            left_out += 1
            continue
        if answer is None and unanswered is None:
            unanswered = line
        texts.append(text)
        answers.append(answer)
    if not texts:
        raise TrafficError(path, 1, "no row asks for anything; allowed: at least one prompt")
    return Prompts(path, layout, file_sha256(path), tuple(texts), tuple(answers), left_out, unanswered)


def _conversation(row: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """A conversation's first text of a human and the answer to it; (None, None) where it holds no such pair."""
    turns = row.get("conversations")
    if not isinstance(turns, list):
        raise ValueError(f"conversations: {show(turns)} is not a list; allowed: [{{from: human, value: ...}}, ...]")
    for turn in turns:
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("from", "value")):
            raise ValueError(f"conversations: {show(turn)} is not a turn; allowed: {{from: human, value: ...}}")
    for turn, answer in pairwise(turns):
        if turn["from"] in _HUMANS:
            answered = answer["from"] not in (*_HUMANS, "system")
            usable = answered and _is_text(turn["value"]) and _is_text(answer["value"])
            return (turn["value"], answer["value"]) if usable else (None, None)
    return None, None


def _prompt(row: Mapping[str, Any]) -> tuple[str, int | None]:
    text, tokens = row.get("prompt"), row.get("output_tokens")
    if not isinstance(text, str) or not _is_text(text):
        raise ValueError(f"prompt: {show(text)} is not text; allowed: text that is not blank")
    try:
        return text, None if tokens is None else read_tokens(tokens, 1)
    except ValueError as error:
        raise ValueError(f"output_tokens: {error}") from None


def _is_text(text: str) -> bool:
    """Whether a text is not blank and has only characters that UTF-8, and so a tokenizer, can hold."""
    try:
        return bool(text.strip() and text.encode())
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return False
