"""Traffic from files: every published layout in miniature, every fault with its line, and the requests that come of it."""

# ruff: noqa: E501 -- the table of faults reads best with one fault a line

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from test_load import NoTokenizer, Words, taken

from latency_lab import __main__ as cli
from latency_lab import figures, models, records, schemas, tables
from latency_lab.load import Request, streams
from latency_lab.prompts import read_prompts
from latency_lab.study import StudyError, load_rules, load_study
from latency_lab.study_grid import Point
from latency_lab.traffic import BLOCK_TOKENS, fitted, read_trace
from latency_lab.traffic_file import TrafficError

AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00+00:00,10,6
2024-05-10 01:00:00.509930+01:00,11,7
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
45,ChatGPT,417,0,417,API log
118,ChatGPT,0,0,0,Conversation log
"""
BURSTGPT_3 = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log
19440161.5,,2,ChatGPT,36,29,65,API log
"""
MOONCAKE = """\
{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 30535, "input_length": 1030, "output_length": 26, "hash_ids": [46, 47, 2366]}
{"timestamp": 30535, "input_length": 20, "output_length": 1, "hash_ids": [7]}
"""
SHAREGPT: list[dict[str, Any]] = [
    {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "and so on"}, {"from": "human", "value": "Why?"}]},
    {"id": "c", "conversations": []},
    {
        "id": "d",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Where am I?"},
            {"from": "gpt", "value": "Here."},
            {"from": "human", "value": "And now?"},
            {"from": "gpt", "value": "Still here."},
        ],
    },
    {"id": "e", "conversations": [{"from": "human", "value": "\ud83d"}, {"from": "gpt", "value": "Half a character."}]},
    {"id": "f", "conversations": [{"from": "human", "value": "Say nothing."}, {"from": "gpt", "value": " "}]},
]
JSONL = '{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "three", "output_tokens": 9, "category": "x"}\n'


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "text", "at_s", "prompts", "outputs", "failed", "unsorted"),
    [
        ("azure", AZURE_2023, [0, 4.314579, 4.541977], [374, 396, 879], [44, 109, 55], 0, 0),
        ("azure", AZURE_2024, [0, 0.00993, 0.50993], [10, 2162, 11], [6, 5, 7], 0, 1),
        ("burstgpt", BURSTGPT, [0, 40], [472, 1087], [18, 230], 2, 0),
        ("burstgpt", BURSTGPT_3, [0, 51.5], [906, 36], [446, 29], 0, 0),
        ("mooncake", MOONCAKE, [0, 3.053, 3.053], [1100, 1030, 20], [52, 26, 1], 0, 0),
    ],
)
def test_a_trace_of_each_layout(
    tmp_path: Path,
    layout: str,
    text: str,
    at_s: list[float],
    prompts: list[int],
    outputs: list[int],
    failed: int,
    unsorted: int,
) -> None:
    for given in (None, layout):
        trace = read_trace(write(tmp_path / "trace", text), given)
        assert trace.layout == layout
        assert trace.at_s.tolist() == pytest.approx(at_s, abs=1e-9)
        assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == (prompts, outputs)
        assert (trace.rows, trace.failed, trace.unsorted) == (len(at_s), failed, unsorted)
    blocks = ((46, 47, 2353), (46, 47, 2366), (7,))
    assert trace.blocks == (blocks if layout == "mooncake" else ())


def test_conversations_give_the_first_question_and_the_length_of_its_answer(tmp_path: Path) -> None:
    for text in (json.dumps(SHAREGPT), json.dumps(SHAREGPT, indent=2), "\n".join(map(json.dumps, SHAREGPT))):
        prompts = read_prompts(write(tmp_path / "sharegpt.json", text))
        assert (prompts.layout, prompts.left_out, prompts.unanswered) == ("sharegpt", 4, None)
        assert prompts.texts == ("Hi", "Where am I?")
        assert prompts.answers == ("Hello.", "Here.")


def test_prompts_of_ones_own(tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path / "mine.jsonl", JSONL))
    assert (prompts.layout, prompts.texts, prompts.answers) == ("jsonl", ("one", "three"), (3, 9))
    assert prompts.unanswered is None
    prompts = read_prompts(write(tmp_path / "mine.jsonl", JSONL.replace(', "output_tokens": 9', "")))
    assert (prompts.answers, prompts.unanswered) == ((3, None), 3)


@pytest.mark.parametrize(
    "changed",
    [
        lambda text: b"\xef\xbb\xbf" + text,
        gzip.compress,
        lambda text: gzip.compress(b"\xef\xbb\xbf" + text),
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: text.replace(b"\n", b"\n\n"),
        lambda text: b"\n" + text.replace(b"\n", b"\n  \n"),
        lambda text: text.rstrip(b"\n"),
    ],
    ids=["byte order mark", "gzip", "both", "CRLF", "empty rows", "rows of blanks", "no last line end"],
)
def test_files_as_other_programs_write_them(tmp_path: Path, changed: Any) -> None:
    for text in (AZURE_2023, BURSTGPT, MOONCAKE):
        plain = read_trace(write(tmp_path / "plain", text))
        trace = read_trace(write(tmp_path / "changed", changed(text.encode())))
        assert trace.at_s.tolist() == plain.at_s.tolist()
        assert trace.prompt_tokens.tolist() == plain.prompt_tokens.tolist()
        assert (trace.blocks, trace.rows, trace.failed) == (plain.blocks, plain.rows, plain.failed)
    for text in (json.dumps(SHAREGPT, indent=1), JSONL):
        prompts = read_prompts(write(tmp_path / "changed", changed(text.encode())))
        assert prompts.texts == read_prompts(write(tmp_path / "plain", text)).texts


def test_spreadsheets_leave_quotes_points_and_rows_of_commas(tmp_path: Path) -> None:
    text = 'Timestamp, Request tokens ,"Response tokens",Model\r\n"5.0","374.0",10.0,"a ""b"", c"\r\n,,,\r\n6,1,2,\r\n'
    trace = read_trace(write(tmp_path / "trace.csv", text))
    assert (trace.at_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == (
        [0, 1],
        [374, 1],
        [10, 2],
    )


def test_rows_out_of_order_are_sorted_and_those_of_one_time_keep_their_order(tmp_path: Path) -> None:
    rows = [(9, 1), (3, 2), (3, 3), (9, 4), (1, 5), (10, 6)]
    text = "Timestamp,Request tokens,Response tokens\n" + "".join(f"{at},{tokens},1\n" for at, tokens in rows)
    trace = read_trace(write(tmp_path / "trace.csv", text))
    assert trace.at_s.tolist() == [0, 2, 2, 8, 8, 9]
    assert trace.prompt_tokens.tolist() == [5, 2, 3, 1, 4, 6]
    assert trace.unsorted == 3
    assert "out of order and sorted: 3" in trace.note


# --- faults -----------------------------------------------------------------------------------------------------------

AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\n"
CAKE = '{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'

TRACE_FAULTS: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "1: the file is empty; allowed: at least one request"),
    "blanks": ("\n \n", "1: the file is empty"),
    "header alone": (AZURE_HEAD, "1: no row asks for any tokens; allowed: at least one request"),
    "failures alone": (AZURE_HEAD + ROW.replace("44", "0"), "1: no row asks for any tokens"),
    "missing column": ("TIMESTAMP,ContextTokens\n", "1: 'TIMESTAMP, ContextTokens' are columns of no known layout; allowed: azure (TIMESTAMP, ContextTokens, GeneratedTokens); burstgpt ("),
    "two layouts": (AZURE_HEAD.strip() + ",Timestamp,Request tokens,Response tokens\n", "are the columns of azure and burstgpt; allowed: `layout:`, one of azure"),
    "no header": (ROW, "1: '2023-11-16 18:15:46.6805900, 374, 44' are columns of no known layout"),
    "too few fields": (AZURE_HEAD + ROW + ROW.replace(",44", ""), "3: 2 fields; allowed: 3, as in the header"),
    "too many fields": (AZURE_HEAD + ROW.replace("44", "44,1"), "2: 4 fields; allowed: 3"),
    "text for tokens": (AZURE_HEAD + ROW + "\n" + ROW.replace("374", "many"), "4: ContextTokens: 'many' is not a number of tokens; allowed: a whole number from 0 to 2147483647"),
    "no tokens": (AZURE_HEAD + ROW.replace("44", ""), "2: GeneratedTokens: '' is not a number of tokens"),
    "half a token": (AZURE_HEAD + ROW.replace("44", "4.5"), "2: GeneratedTokens: '4.5' is not a number of tokens"),
    "negative": (AZURE_HEAD + ROW.replace("374", "-1"), "2: ContextTokens: '-1' is not a number of tokens"),
    "too many tokens": (AZURE_HEAD + ROW.replace("374", "9" * 30), "2: ContextTokens: '999999999999999999999999999999' is not"),
    "not a date": (AZURE_HEAD + ROW.replace("2023-11-16 18", "2023-11-16 28"), "2: TIMESTAMP: '2023-11-16 28:15:46.6805900' is not a date and time; allowed: as in 2023-11-16"),
    "NaN": (BURSTGPT.replace("\n5,", "\nnan,"), "2: Timestamp: 'nan' is not a number; allowed: a finite number"),
    "infinite": (BURSTGPT.replace("\n45,", "\ninf,"), "3: Timestamp: 'inf' is not a number"),
    "open quote": (AZURE_HEAD + ROW + '"' + ROW + ROW, "3: not CSV: unexpected end of data; allowed:"),
    "not text": (AZURE_HEAD.encode() + b"\xff", "2: byte 1 of the line is not text; allowed: UTF-8"),
    "UTF-16": (AZURE_HEAD.encode("utf-16"), "1: byte 1 of the line is not text"),
    "half of a gzip": (gzip.compress(AZURE_2023.encode())[:-12], ": the gzip data break off here; allowed: a whole file"),
    "gzip by name of its magic alone": (b"\x1f\x8bno", "1: the gzip data break off here"),
    "not JSON": (CAKE + CAKE[:-3], "2: not JSON: Expecting ',' delimiter (column 76); allowed: an object in each line"),
    "a list of lists": ("[[1]]", "1: [1] is not a JSON object; allowed: {name: value}"),
    "an empty list": ("[]", "1: '' are columns of no known layout"),
    "a number in a row": (CAKE + "5\n", "2: 5 is not a JSON object"),
    "nested": ("[" * 100_000, "1: not JSON: nested too deeply"),
    "missing value": (CAKE + CAKE.replace('"output_length": 5, ', ""), "2: output_length is missing; allowed: timestamp, input_length, output_length"),
    "null": (CAKE.replace("600", "null"), "1: input_length: null is not a number of tokens"),
    "true": (CAKE.replace("600", "true"), "1: input_length: true is not a number of tokens"),
    "no time": (CAKE.replace('"timestamp": 1', '"timestamp": NaN'), "1: timestamp: .nan is not a number"),
    "ids of text": (CAKE.replace("[1, 2]", '[1, "2"]'), "1: hash_ids: [1, '2'] is not a list of ids"),
    "ids of another block size": (CAKE.replace("[1, 2]", "[1, 2, 3]"), "1: hash_ids: 3 ids for 600 prompt tokens; allowed: 2, one for each 512"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRACE_FAULTS)
def test_a_fault_in_a_trace_is_one_line(tmp_path: Path, name: str) -> None:
    text, expected = TRACE_FAULTS[name]
    path = write(tmp_path / "trace", text)
    with pytest.raises(TrafficError) as caught:
        read_trace(path)
    assert expected in str(caught.value) and str(caught.value).startswith(f"{path}:")
    assert "\n" not in str(caught.value) and "; allowed" in str(caught.value)


PROMPT_FAULTS = {
    "a trace": (MOONCAKE, "1: 'timestamp, input_length, output_length, hash_ids' are columns of no known layout; allowed: sharegpt (conversations); jsonl (prompt)"),
    "plain text": ("Why?\nHow?\n", "1: 'Why?' are columns of no known layout"),
    "number as prompt": (JSONL + '{"prompt": 5}', "4: prompt: 5 is not text; allowed: text that is not blank"),
    "blank prompt": ('{"prompt": " "}', "1: prompt: ' ' is not text"),
    "half a character": ('{"prompt": "\\ud83d"}', "1: prompt: "),
    "no tokens asked for": (JSONL.replace("9", "0"), "3: output_tokens: 0 is not a number of tokens; allowed: a whole number from 1"),
    "not a list of turns": ('[{"conversations": []},\n{"conversations": "x"}]', "2: conversations: 'x' is not a list; allowed: [{from: human"),
    "not a turn": ('[\n{"conversations": [5]}]', "2: conversations: 5 is not a turn; allowed: {from: human, value: ...}"),
    "turn without text": ('[{"conversations": [{"from": "human", "value": null}]}]', "1: conversations: {'from': 'human', 'value': None} is not a turn"),
    "no question anywhere": (json.dumps(SHAREGPT[1:3]), "1: no row asks for anything; allowed: at least one prompt"),
    "a list that breaks off": ('[{"conversations": []}\n', "2: not JSON: the list breaks off here; allowed: a list of objects"),
    "an item that breaks off": ('[{"conversations": []},\n\n {"conv', "3: not JSON: Unterminated string"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPT_FAULTS)
def test_a_fault_in_a_file_of_prompts_is_one_line(tmp_path: Path, name: str) -> None:
    text, expected = PROMPT_FAULTS[name]
    path = write(tmp_path / "prompts", text)
    with pytest.raises(TrafficError) as caught:
        read_prompts(path)
    assert f"{path}:{expected}" in str(caught.value)
    assert "\n" not in str(caught.value) and "; allowed" in str(caught.value)


def test_a_layout_that_is_given_names_the_column_that_lacks(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", AZURE_2023)
    with pytest.raises(
        TrafficError, match=r"trace:1: Timestamp is not among the columns 'TIMESTAMP, .*'; allowed in layout burstgpt"
    ):
        read_trace(path, "burstgpt")
    with pytest.raises(TrafficError, match="none:1: No such file or directory; allowed: the path of a file"):
        read_trace(tmp_path / "none")
    with pytest.raises(TrafficError, match="Is a directory"):
        read_trace(tmp_path)


# --- cuts -------------------------------------------------------------------------------------------------------------


def test_cuts_by_count_and_by_seconds_of_the_run(tmp_path: Path) -> None:
    text = "Timestamp,Request tokens,Response tokens\n" + "".join(f"{at},{at + 1},1\n" for at in range(10))
    trace = read_trace(write(tmp_path / "trace.csv", text))
    assert trace.cut(1, 3, None).at_s.tolist() == [0, 1, 2]
    assert trace.cut(0.5, None, 2).at_s.tolist() == [0, 0.5, 1, 1.5]
    assert trace.cut(0.5, 3, 2).prompt_tokens.tolist() == [1, 2, 3]
    assert trace.cut(1, 99, 99).rows == 10
    assert (trace.rate_per_s, trace.cut(0.5, None, None).rate_per_s) == (1, 2)
    assert trace.cut(1, 1, None).rate_per_s is None
    assert trace.cut(0.5, 3, None).note == "the first 3 of 10 requests in trace.csv (burstgpt), gaps times 0.5"


def test_lengths_are_fitted_prompt_first() -> None:
    lengths = [(5, 3), (9, 3), (5, 12), (12, 12), (1, 9)]
    assert [tuple(map(int, fitted(*both, 10))) for both in lengths] == [(5, 3), (7, 3), (1, 9), (1, 9), (1, 9)]


# --- in a study -------------------------------------------------------------------------------------------------------

HEAD = "question: Why?\nmodel: {source: smollm2}\nengine: {max_model_len: 2000}\n"


def write_study(folder: Path, workloads: str, head: str = HEAD) -> Path:
    write(folder / "azure.csv", AZURE_2023)
    write(folder / "mooncake.jsonl", MOONCAKE)
    write(folder / "sharegpt.json", json.dumps(SHAREGPT))
    write(folder / "mine.jsonl", JSONL)
    return write(folder / "study.yaml", head + "workloads:\n" + workloads)


def points(folder: Path, workloads: str, head: str = HEAD) -> list[Point]:
    return load_study(write_study(folder, workloads, head)).points()


def cell(point: Point, repeat: int = 0) -> list[Request]:
    return [request for stream in streams(point, repeat, 7, Words()) for request in taken(stream, 50)]


def text_of(request: Request) -> str:
    return "".join(map(chr, request.prompt))


def test_a_replay_sends_what_the_trace_says(tmp_path: Path) -> None:
    (point,) = points(tmp_path, "  real: {load: {kind: replay, file: azure.csv, time_scale: 0.5, start_s: 1}}\n")
    assert (point.label, point.load, point.concurrency) == ("real", "replay", None)
    assert point.rate_per_s == pytest.approx(2 / (4.541977 / 2))
    (stream,) = streams(point, 0, 7, Words())
    assert (stream.start_s, stream.concurrency, stream.seconds) == (1, None, None)
    requests = taken(stream)
    assert [r.due_s for r in requests] == pytest.approx([0, 4.314579 / 2, 4.541977 / 2])
    assert [(len(r.prompt), r.output_tokens, r.clamped) for r in requests] == [
        (374, 44, False),
        (396, 109, False),
        (879, 55, False),
    ]
    prompts = {r.prompt[:16] for repeat in (0, 1) for r in cell(point, repeat)}
    assert len(prompts) == 6, "a trace without blocks shares nothing, in a cell or between repeats"
    assert cell(point) == requests


def test_equal_blocks_are_equal_tokens_within_a_cell_and_only_there(tmp_path: Path) -> None:
    (point,) = points(tmp_path, "  real: {load: {kind: replay, file: mooncake.jsonl}}\n")
    first, second, third = (r.prompt for r in cell(point))
    assert (len(first), len(second), len(third)) == (1100, 1030, 20)
    assert first[: 2 * BLOCK_TOKENS] == second[: 2 * BLOCK_TOKENS]
    assert first[:BLOCK_TOKENS] != first[BLOCK_TOKENS : 2 * BLOCK_TOKENS]
    assert first[1024:1030] != second[1024:1030] and third != first[:20]
    assert {token for prompt in (first, second, third) for token in prompt} <= set(Words.usable)
    assert cell(point, 1)[0].prompt[:20] != first[:20], "or a repeat would find it all cached"


def test_lengths_are_cut_to_the_shortest_model_that_runs_them(tmp_path: Path) -> None:
    head = HEAD.replace("2000", "2000") + "settings: {axes: {max_model_len: [1050, 1080, 500]}}\n"
    workload = "  real: {load: {kind: replay, file: mooncake.jsonl}, settings: ['*=10*']}\n  all: {load: {kind: replay, file: mooncake.jsonl}}\n"
    real, every = points(tmp_path, workload, head)
    requests = cell(real)
    assert [(len(r.prompt), r.output_tokens, r.clamped) for r in requests] == [
        (998, 52, True),
        (1024, 26, True),
        (20, 1, False),
    ]
    assert requests[0].prompt == requests[1].prompt[:998], "what is left of a prompt is its beginning"
    assert real.classes[0].cut_short() == "2 of 3 requests cut to max_model_len 1,050"
    assert every.classes[0].limit == 500 and real.id != every.id


def test_prompts_of_a_file_are_asked_in_order_and_by_each_repeat_from_another_place_on(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": f"q{i:02d}", "output_tokens": i + 1}) + "\n" for i in range(20))
    study = "  talk: {load: {kind: poisson, rate: 9, requests: 4}, prompt: {file: many.jsonl}}\n"
    write(tmp_path / "many.jsonl", lines)
    (point,) = points(tmp_path, study)
    first = cell(point)
    assert [(text_of(r), r.output_tokens, r.clamped) for r in first] == [(f"q{i:02d}", i + 1, False) for i in range(4)]
    texts = [text_of(r) for repeat in range(3) for r in cell(point, repeat)]
    assert len(set(texts)) == 12, "no repeat finds its prompts cached by another"
    (again,) = points(tmp_path, study.replace("requests: 4", "requests: 21"))
    assert [text_of(r) for r in cell(again)][-2:] == ["q19", "q00"]
    assert again.note == "20 prompts in many.jsonl (jsonl); 21 requests ask some of them again"


def test_conversations_with_any_load_and_output(tmp_path: Path) -> None:
    talk, chat, replayed, endless, fixed = points(
        tmp_path,
        """\
  talk: {load: {kind: burst, requests: 2}, prompt: {file: sharegpt.json}}
  chat: {load: {kind: closed, concurrency: 1, requests_each: 2}, prompt: {file: sharegpt.json, chat: true}, output: {tokens: 5}}
  replayed: {load: {kind: replay, file: azure.csv}, prompt: {file: sharegpt.json}}
  endless: {load: {kind: closed, concurrency: 1, seconds: 5}, prompt: {file: mine.jsonl}}
  fixed: {load: {kind: replay, file: azure.csv}, prompt: {tokens: 8, shared_prefix_tokens: 4}, output: {tokens: 3}}
""",
    )
    assert [(text_of(r), r.output_tokens) for r in cell(talk)] == [("Hi", len("Hello.")), ("Where am I?", len("Here."))]
    assert [(r.prompt[0], r.prompt[-1], r.output_tokens) for r in cell(chat)] == [(1, 2, 5), (1, 2, 5)]
    assert [(text_of(r), r.output_tokens) for r in cell(replayed)] == [("Hi", 6), ("Where am I?", 5), ("Hi", 6)]
    assert [r.due_s for r in cell(replayed)] == pytest.approx([0, 4.314579, 4.541977])
    assert [text_of(r) for r in cell(endless)][:3] == ["one", "three", "one"] and len(cell(endless)) == 50
    assert [(len(r.prompt), r.output_tokens) for r in cell(fixed)] == [(8, 3)] * 3
    assert len({r.prompt[:4] for r in cell(fixed)}) == 1 and len({r.prompt for r in cell(fixed)}) == 3
    assert fixed.classes[0].limit is None and fixed.classes[0].cut_short() is None, "no file gives its lengths"
    with pytest.raises(ValueError, match="no tokenizer"):
        streams(talk, 0, 7, NoTokenizer())


def test_output_of_the_trace_beside_a_prompt_of_ones_own(tmp_path: Path) -> None:
    (point,) = points(tmp_path, "  w: {load: {kind: replay, file: azure.csv}, prompt: {uniform: [8, 1900]}}\n")
    assert [r.output_tokens for r in cell(point)] == [44, 109, 55]
    assert point.classes[0].cut_short() == "up to 1 of 3 requests cut to max_model_len 2,000"
    (point,) = points(tmp_path, "  w: {load: {kind: replay, file: azure.csv}, output: {tokens: 7}}\n")
    assert [(len(r.prompt), r.output_tokens) for r in cell(point)] == [(374, 7), (396, 7), (879, 7)]


def test_texts_longer_than_the_model_are_cut_and_known(tmp_path: Path) -> None:
    (point,) = points(
        tmp_path,
        "  talk: {load: {kind: burst, requests: 2}, prompt: {file: sharegpt.json}}\n",
        HEAD.replace("2000", "10"),
    )
    assert [(text_of(r), r.output_tokens, r.clamped) for r in cell(point)] == [("Hi", 6, False), ("Where", 5, True)]


def test_time_scales_are_points_of_rising_load(tmp_path: Path) -> None:
    slow, fast = points(
        tmp_path, "  real: {load: {kind: replay, file: azure.csv, time_scale: [2, 0.5], seconds: 2.2}}\n"
    )
    assert (slow.label, fast.label) == ("real scale=2", "real scale=0.5")
    assert (len(cell(slow)), len(cell(fast))) == (1, 2)
    assert slow.rate_per_s is None and fast.rate_per_s == pytest.approx(1 / 2.1572895)


def test_a_changed_file_is_another_workload_and_a_moved_one_is_not(tmp_path: Path) -> None:
    replay = "  w: {load: {kind: replay, file: %s}}\n"
    talk = "  w: {load: {kind: burst, requests: 1}, prompt: {file: %s}}\n"
    for study, name, text in ((replay, "azure.csv", AZURE_2023), (talk, "mine.jsonl", JSONL)):
        (before,) = points(tmp_path, study % name)
        write(tmp_path / "other", text)
        (moved,) = points(tmp_path, study % "other")
        write(tmp_path / "other", text.replace("9", "8"))
        (changed,) = points(tmp_path, study % "other")
        (shorter,) = points(tmp_path, study % name, HEAD.replace("2000", "1000"))
        assert before.id == moved.id and len({before.id, changed.id, shorter.id}) == 3
    ids = [
        points(tmp_path, (replay % "azure.csv").replace("csv", "csv" + more))[0].id
        for more in ("", ", time_scale: 2", ", requests: 2", ", start_s: 1")
    ]
    assert len(set(ids)) == 4


def test_other_workloads_keep_their_ids(tmp_path: Path) -> None:
    """Or every cell that anybody has measured would be measured again."""
    workload = (
        "  w: {load: {kind: poisson, rate: 2, requests: 20}, prompt: {uniform: [4, 64]}, output: {uniform: [1, 9]}}\n"
    )
    assert points(tmp_path, workload)[0].id == "90687948a102"


REPLAY = "kind: replay, file: azure.csv"
STUDY_FAULTS = {
    "fault in a trace": (f"  w: {{load: {{{REPLAY}}}}}\n", HEAD, "study.yaml:5: workloads.w.load.file: {folder}/azure.csv:3: ContextTokens: 'x' is not"),
    "no such file": ("  w: {load: {kind: replay, file: no.csv}}\n", HEAD, "workloads.w.load.file: {folder}/no.csv:1: No such file"),
    "no such prompts": ("  w: {load: {kind: burst, requests: 1}, prompt: {file: no.json}}\n", HEAD, "workloads.w.prompt.file: {folder}/no.json:1: No such file"),
    "more than there are": ("  w: {load: {kind: replay, file: mooncake.jsonl, requests: 4}}\n", HEAD, "w.load.requests: 4 are more than the 3 of {folder}/mooncake.jsonl"),
    "no length of the model": ("  w: {load: {kind: replay, file: mooncake.jsonl}}\n", HEAD.replace("2000", "-1"), "w.load.file: max_model_len of setting 'base' is -1, and lengths from a file are cut to it; allowed: a whole number from 2 on"),
    "length of the model not given": ("  w: {load: {kind: burst, requests: 1}, prompt: {file: mine.jsonl}}\n", HEAD.split("engine")[0], "w.prompt.file: max_model_len of setting 'base' is missing"),
    "no output": ("  w: {load: {kind: burst, requests: 1}, prompt: {file: open.jsonl}}\n", HEAD, "w.prompt.file: {folder}/open.jsonl:2: output_tokens is missing; allowed: output_tokens in each row, or `output:`"),
    "no tokenizer": ("  w: {load: {kind: burst, requests: 1}, prompt: {file: mine.jsonl}}\n", HEAD.replace("smollm2", "config, config: some"), "w.prompt: a text needs a tokenizer, and the model of setting 'base' is a config without one"),
    "no tokenizer for a text": ("  w: {load: {kind: burst, requests: 1}, prompt: {text: Hi}, output: {tokens: 1}}\n", HEAD.replace("smollm2", "config, config: some"), "w.prompt: a text needs a tokenizer"),
    "no prompt": ("  w: {load: {kind: burst, requests: 1}, output: {tokens: 1}}\n", HEAD, "w: prompt is missing; allowed: `prompt:` with a value, or a load of kind replay"),
    "no output at all": ("  w: {load: {kind: burst, requests: 1}, prompt: {tokens: 1}}\n", HEAD, "w: output is missing; allowed:"),
    "layout": ("  w: {load: {kind: replay, file: mooncake.jsonl, layout: moncake}}\n", HEAD, "w.load.layout: 'moncake' is not known; did you mean mooncake?; allowed: azure, burstgpt, mooncake"),
    "layout without file": ("  w: {load: {kind: burst, requests: 1}, prompt: {tokens: 1, layout: jsonl}, output: {tokens: 1}}\n", HEAD, "w.prompt: layout jsonl is for prompts of a file"),
    "distinct": ("  w: {load: {kind: burst, requests: 1}, prompt: {file: mine.jsonl, distinct: true}}\n", HEAD, "w.prompt: distinct is for one text"),
    "file and tokens": ("  w: {load: {kind: burst, requests: 1}, prompt: {file: mine.jsonl, tokens: 5}}\n", HEAD, "w.prompt: tokens and file given; allowed: exactly one of tokens, uniform, lognormal, text, file"),
    "no scale": ("  w: {load: {kind: replay, file: mooncake.jsonl, time_scale: 0}}\n", HEAD, "w.load.time_scale: 0 is too small; allowed: a number above 0"),
    "scales in a mix": ("  w: {classes: {a: {load: {kind: replay, file: mooncake.jsonl, time_scale: [1, 2]}}}}\n", HEAD, "a.load.time_scale: [1.0, 2.0] in a class of a mix; allowed: one value"),
    "longer than its time": ("  w: {load: {kind: replay, file: mooncake.jsonl, time_scale: 100}}\n", HEAD, "'w' sends requests for 305.3 s, and a cell is given 300 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", STUDY_FAULTS)
def test_a_study_that_asks_too_much_of_its_files(tmp_path: Path, name: str) -> None:
    workload, head, expected = STUDY_FAULTS[name]
    path = write_study(tmp_path, workload, head)
    write(tmp_path / "azure.csv", AZURE_2023.replace("396", "x"))
    write(tmp_path / "open.jsonl", '{"prompt": "a", "output_tokens": 1}\n{"prompt": "b"}\n')
    with pytest.raises(StudyError) as caught:
        load_study(path)
    assert any(expected.format(folder=tmp_path) in problem for problem in caught.value.problems), caught.value.problems
    assert all("; allowed" in problem for problem in caught.value.problems)


def test_rules_are_read_where_the_files_are_not_at_hand(tmp_path: Path) -> None:
    path = write_study(tmp_path, "  w: {load: {kind: replay, file: mooncake.jsonl}}\n")
    (tmp_path / "mooncake.jsonl").unlink()
    assert load_rules(path) == {}
    with pytest.raises(StudyError):
        load_study(path)


def test_the_estimate_of_a_replay(tmp_path: Path) -> None:
    study = load_study(
        write_study(tmp_path, "  w: {load: {kind: replay, file: azure.csv, time_scale: 9}, repeats: 1}\n")
    )
    assert study.estimate_s() == pytest.approx(
        45 + max(9 * 4.541977 * 3 / 2, (44 + 109 + 55) / 25 + (374 + 396 + 879) / 1000)
    )


def test_check_says_what_becomes_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "prepare", lambda source, cache: source)
    monkeypatch.setattr(models, "Tokens", lambda model: Words())
    workloads = """\
  real: {load: {kind: replay, file: azure.csv}}
  talk: {load: {kind: burst, requests: 2}, prompt: {file: sharegpt.json}}
"""
    path = write_study(tmp_path, workloads, HEAD.replace("2000", "450"))
    write(tmp_path / "azure.csv", AZURE_2023 + ROW.replace("44", "0"))
    assert cli.main(["check", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "real: all 3 requests in azure.csv (azure), left out for 0 prompt or output tokens: 1; 2 of 3 requests cut to max_model_len 450"
        in lines
    )
    assert "talk: 2 prompts in sharegpt.json (sharegpt), left out for no question with an answer: 4" in lines
    assert "talk: 0 of the first 2 requests cut to max_model_len" in lines


def test_the_report_says_what_was_cut() -> None:
    common = {"status": "done", "requests": 500, "requests_failed": 0, "schema_version": 1, "load": "replay"}
    keys = {"study": "s", "setting": "base", "setting_id": "x", "workload_id": "y"}
    rows = [
        {
            **keys,
            **common,
            "cell": f"{name}{i}",
            "workload": name,
            "repeat": i,
            "traffic": note,
            "requests_clamped": cut,
        }
        for name, note, cut in (("real", "500 of <b>", 12), ("mine", "2 prompts", 0), ("chat c=1", None, None))
        for i in range(1 + (name == "real"))
    ]
    cells = records.to_pandas(records.table(rows, schemas.CELLS))
    assert tables.traffic(cells) == [
        "real: 500 of <b>; 24 of 1,000 requests were cut to max_model_len in 2 cells.",
        "mine: 2 prompts; no request was cut.",
    ]
    assert figures.family("real scale=0.5") == figures.family("real scale=2") == "real"
