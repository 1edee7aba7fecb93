"""Bring results of `vllm bench serve` into the records, so that the report reads runs that were made with it.

    vllm bench serve ... --save-result --save-detailed --metadata max_num_seqs=32 "device=NVIDIA L4" vllm_version=0.24.0
    python -m latency_lab import-bench RESULT.json --study mine --setting "budget=2048 seqs=32"
    python -m latency_lab report

A result becomes a cell of the study. Times are the benchmark's own: its token times follow from `ttfts` and `itls`,
cell time 0 is the first request's arrival, and a failed request is a row. It notes chunks, not the tokens in each:
where a request's chunks are not as many as its tokens, `token_counts` is null. What neither the file nor the command
says is null as well. Layout of the file: vllm/benchmarks/serve.py, main_async and benchmark, of vLLM 0.24 to 0.32.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from latency_lab import records, study_grid
from latency_lab.files import digest, file_sha256
from latency_lab.schemas import CELLS, SETTING_VALUES
from latency_lab.study_values import NAME
from latency_lab.vllm_args import WORDS

IDENTITY = (
    "backend",
    "model_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "total_output_tokens",
)
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
"""Keys that tell a result of `vllm bench serve` from another tool's, and those that --save-detailed adds."""

FACTS = ("device", "cpu", "vllm_version", "weights", *(field.name for field in SETTING_VALUES))
"""Columns of `cells` that a result cannot know, but its --metadata or this command's --fact may say."""


class BenchFileError(records.BadRecord):
    """A file that cannot be imported, or an option that is wrong; the message is one line that names it."""


class Result(BaseModel):
    """One result. Times in seconds; `start_times` on a clock of the benchmark's own. Metadata is in `model_extra`.

    queue_times : how long each request waited for --max-concurrency; None from versions that don't note it (0.24)
    latencies : from sent to the last chunk of tokens; None likewise
    """

    model_config = ConfigDict(extra="allow")

    backend: str
    label: str | None = None
    model_id: str
    date: str | None = None
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    duration: float
    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    start_times: list[float]
    errors: list[str]
    queue_times: list[float] | None = None
    latencies: list[float] | None = None

    @property
    def load(self) -> str:
        """The kind of arrivals, in the words of the records."""
        if math.isinf(self.request_rate):
            return "burst" if self.max_concurrency is None else "closed"
        return {1.0: "poisson", math.inf: "constant"}.get(self.burstiness, "gamma")


@dataclass(frozen=True)
class Imported:
    """A cell that was written. `unknown_counts`: requests of which it is not known how many tokens a chunk held."""

    setting: str
    workload: str
    repeat: int
    requests: int
    failed: int
    unknown_counts: int

    def __str__(self) -> str:
        text = f"setting {self.setting!r}, workload {self.workload!r}, repeat {self.repeat}: {self.requests} requests"
        text += f", {self.failed} failed" if self.failed else ""
        if self.unknown_counts:
            text += f"; {self.unknown_counts} came in other than a token a chunk: what each chunk held is not known"
        return text


def study_folder(runs: Path, name: str) -> Path:
    """The folder of a study of this name. Raises BenchFileError where the name cannot be one."""
    if not NAME.fullmatch(name):
        raise BenchFileError(f"--study: {name!r}; allowed: letters, digits and . _ + - behind a letter or digit")
    return runs / name


def import_file(
    path: Path,
    study: Path,
    setting: str | None = None,
    workload: str | None = None,
    facts: Iterable[str] = (),
) -> list[Imported]:
    """Write the results that a file holds (one, or a line each with --append-result) into the folder of a study.

    Parameters
    ----------
    study : folder to add to, e.g. data/runs/mine; a result that it holds already is replaced.
    setting : label; words in it like `budget=2048` are facts too. Default: made of the file's facts, else its --label.
    workload : name of the workload, to which its concurrency or rate is added. Default: the lengths.
    facts : `name=value` for columns that the file doesn't know; they go before the file's own metadata.

    Raises BenchFileError before anything is written.
    """
    given = _facts(facts, "--fact") | (_facts(_pairs(setting), "--setting") if setting else {})
    cells = [
        _cell(result, path, position, study.name, setting, workload, given)
        for position, result in enumerate(read(path))
    ]
    written = []
    for cell, rows in cells:
        for stale in study.glob(f"*/{cell['cell']}.*.parquet"):
            stale.unlink()
        cell["repeat"] = _free_repeat(study, cell)
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", cell["setting"]).strip("-")[:60]
        keys = {name: cell[name] for name in cell if name in records.REQUESTS.names}
        requests = [{**keys, **row} for row in rows]
        records.write_cell(study / f"{slug}-{cell['setting_id']}", cell, requests)
        written.append(
            Imported(
                cell["setting"],
                cell["workload"],
                cell["repeat"],
                len(rows),
                sum(row["error"] is not None for row in rows),
                sum(row["token_times_s"] is not None and row["token_counts"] is None for row in rows),
            )
        )
    return written


def read(path: Path) -> list[Result]:
    """The results in a file. Raises BenchFileError where it is not one of `vllm bench serve`, or holds totals only."""
    results = []
    for number, value in enumerate(_values(path)):
        where = f"{path}" if number == 0 else f"{path}: result {number + 1}"
        results.append(_checked(value, where))
    return results


def _values(path: Path) -> Iterator[Any]:
    """The JSON values of a file, one after the other: --append-result writes a line for each run."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchFileError(f"{path}: cannot be read as text ({error})") from error
    decoder, at = json.JSONDecoder(), 0
    while at == 0 or text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise BenchFileError(f"{path}: not JSON (line {error.lineno}: {error.msg})") from error
        yield value


def _checked(value: Any, where: str) -> Result:
    if not isinstance(value, dict):
        raise BenchFileError(f"{where}: holds a JSON {type(value).__name__}, not a result of `vllm bench serve`")
    if missing := [key for key in IDENTITY if key not in value]:
        raise BenchFileError(f"{where}: not a result of `vllm bench serve` on text: no key {missing[0]!r}")
    if missing := [key for key in DETAILS if key not in value]:
        raise BenchFileError(
            f"{where}: no key {missing[0]!r}: it holds totals, not requests; run it again with --save-detailed"
        )
    if value.get("ramp_up_strategy") is not None:
        raise BenchFileError(
            f"{where}: ramp_up_strategy: {value['ramp_up_strategy']!r}, and a rate that changes is not one workload "
            "point; allowed: none"
        )
    try:
        result = Result.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(f"[{part}]" if isinstance(part, int) else str(part) for part in first["loc"])
        raise BenchFileError(f"{where}: {key}: {first['msg']} (it is {str(first['input'])[:60]!r})") from error
    lists = [*DETAILS, *(key for key in ("queue_times", "latencies") if getattr(result, key) is not None)]
    lengths = {key: len(getattr(result, key)) for key in lists}
    if odd := [key for key in lists if lengths[key] != lengths["input_lens"]]:
        raise BenchFileError(
            f"{where}: {odd[0]}: {lengths[odd[0]]} entries, but input_lens has {lengths['input_lens']}"
        )
    if not result.input_lens:
        raise BenchFileError(f"{where}: input_lens: empty: no request was sent")
    return result


def _cell(
    result: Result,
    path: Path,
    position: int,
    study: str,
    setting: str | None,
    workload: str | None,
    given: dict[str, Any],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The row of `cells` (without its repeat) and the rows of `requests` of one result."""
    known = _facts(_metadata(result.model_extra or {}), f"{path}: metadata") | given
    values = {field.name: known.get(field.name) for field in SETTING_VALUES}
    chosen = {name: value for name, value in values.items() if value is not None}
    label = setting or (study_grid.label(chosen) if chosen else result.label or Path(result.model_id).name)
    load = {
        "load": result.load,
        "concurrency": {"burst": len(result.input_lens), "closed": result.max_concurrency}.get(result.load),
        "rate_per_s": None if math.isinf(result.request_rate) else result.request_rate,
        "burstiness": result.burstiness if result.load == "gamma" else None,
    }
    name = workload or f"in={_length(result.input_lens)} out={_length(result.output_lens)}"
    cap = f" c<={result.max_concurrency}" if result.load not in ("burst", "closed") and result.max_concurrency else ""
    point = f"{name} {_suffix(load)}{cap}"
    sha256 = file_sha256(path)
    cell = {
        **values,
        **load,
        **{name: value for name, value in known.items() if name not in values},
        "study": study,
        "cell": digest([sha256, position]),
        "setting": label,
        "setting_id": digest([label, result.model_id, known]),
        "workload": point,
        "workload_id": digest([point, load]),
        "status": "done",
        "started_at": _started_at(result),
        "duration_s": result.duration,
        "asked": json.dumps(chosen, sort_keys=True),
        "model": result.model_id.rstrip("/").rsplit("/")[-1]
        if Path(result.model_id).is_absolute()
        else result.model_id,
        "imported_from": f"vllm bench serve: {path.name} (SHA-256 {sha256[:12]})",
    }
    rows = _requests(result, name, cell["cell"])
    failed = [row["error"] for row in rows if row["error"] is not None]
    if len(failed) == len(rows):
        cell |= {"status": "failed", "error": f"all {len(rows)} requests failed: {failed[0]}"}
    return cell, rows


def _requests(result: Result, class_name: str, cell: str) -> list[dict[str, Any]]:
    start = np.array(result.start_times)
    # In a closed loop a request is due when it is sent: what vLLM calls its queue time is the loop's own doing.
    waited = np.array(result.queue_times or 0.0) if result.load != "closed" else 0.0
    due = start - waited
    zero = due.min()
    return [
        {
            "request": number,
            "request_id": f"{cell}-{number}",
            "class_name": class_name,
            "via": "openai",
            "streaming": True,
            "prompt_tokens": result.input_lens[number],
            "scheduled_s": float(due[number] - zero),
            "sent_s": float(start[number] - zero),
            **_outcome(result, number, float(start[number] - zero)),
        }
        for number in range(len(start))
    ]


def _outcome(result: Result, number: int, sent_s: float) -> dict[str, Any]:
    """Columns of one request that say what came back. It has failed where it has an error, or no token came."""
    ttft, tokens = result.ttfts[number], result.output_lens[number]
    after_sent = ttft + np.concatenate([[0.0], np.cumsum(result.itls[number])]) if ttft > 0 else np.empty(0)
    came, chunks = bool(len(after_sent)), len(after_sent)
    lines = result.errors[number].strip().splitlines()  # a traceback's last line is the exception
    error = " ".join(lines[-1].split())[:1000] if lines else None if came else "failed without a reason: no token came"
    known = error is None and tokens == chunks
    return {
        "output_tokens": 0 if not came else None if error else tokens,
        "first_token_s": sent_s + float(after_sent[0]) if came else None,
        "last_token_s": sent_s + float(after_sent[-1]) if came else None,
        "finished_s": sent_s + result.latencies[number] if result.latencies and came and not error else None,
        "token_times_s": after_sent.tolist() if came else None,
        "token_counts": [1] * chunks if known else None,
        "error": error,
    }


def _started_at(result: Result) -> datetime.datetime | None:
    """Wall clock at the first request, to some seconds: the file's date is of the run's end, in its local time.

    It is taken for local time here too, as the file names no zone.
    """
    try:
        end = datetime.datetime.strptime(result.date or "", "%Y%m%d-%H%M%S").astimezone()
    except ValueError:
        return None
    return end - datetime.timedelta(seconds=result.duration)


def _metadata(extra: Mapping[str, Any]) -> list[str]:
    """The file's own facts: of its metadata, what these records have a column for."""
    return [f"{name}={value}" for name, value in extra.items() if _long(name) in FACTS]


def _pairs(label: str) -> list[str]:
    """The words of a label that name an engine argument and its value."""
    arguments = {field.name for field in SETTING_VALUES}
    return [word for word in label.split() if "=" in word and _long(word.split("=")[0]) in arguments]


def _facts(pairs: Iterable[str], where: str) -> dict[str, Any]:
    """`name=value` words as typed columns. Raises BenchFileError for a name that is no fact, or a wrong value."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = _long(name)
        if not equals or name not in FACTS:
            raise BenchFileError(f"{where}: {pair!r}; allowed: NAME=VALUE with NAME one of {', '.join(FACTS)}")
        type_ = CELLS.field(name).type
        value: Any = text
        if pa.types.is_boolean(type_):
            value, says = WORDS.get(text.lower()), "on or off"
        elif pa.types.is_integer(type_):
            value, says = int(text) if re.fullmatch(r"\d+", text) else None, "a whole number"
        elif name == "weights":
            value, says = text if text in ("real", "random") else None, "real or random"
        if value is None:
            raise BenchFileError(f"{where}: {name}: {text!r}; allowed: {says}")
        found[name] = value
    return found


def _long(name: str) -> str:
    """An engine argument by its own name, of which labels may have a short one."""
    return next((long for long, short in study_grid.SHORT.items() if short == name), name)


def _free_repeat(study: Path, cell: Mapping[str, Any]) -> int:
    """The lowest number that no other cell of the setting and workload has in the study's folder."""
    taken = set()
    if study in records.studies(study.parent):
        others = records.load(study).cells
        same = (others["setting"] == cell["setting"]) & (others["workload"] == cell["workload"])
        taken = set(others.loc[same, "repeat"])
    return next(number for number in range(len(taken) + 1) if number not in taken)


def _length(lengths: Sequence[int]) -> str:
    """A length that all have, else about the mean."""
    known = [length for length in lengths if length > 0] or [0]
    return f"{known[0]}" if len(set(known)) == 1 else f"~{round(float(np.mean(known)))}"


def _suffix(load: Mapping[str, Any]) -> str:
    """What a load adds to a point's label, as a study's own labels have it (study_grid.loads)."""
    if load["load"] == "burst":
        return f"n={load['concurrency']}"
    if load["load"] == "closed":
        return f"c={load['concurrency']}"
    shape = f" b={load['burstiness']:g}" if load["burstiness"] is not None else ""
    return f"rate={load['rate_per_s']:g}/s{shape}"
