"""Text files that come from elsewhere, row by row: packed with gzip or not, with a byte order mark or not, and every
fault with its line.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from latency_lab.study_file import show
from latency_lab.study_values import LARGEST

GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952, section 2.3.1


class TrafficError(Exception):
    """A file that cannot be used; the message is one line with the file, the line in it, and what is allowed."""

    def __init__(self, path: Path, line: int, text: str) -> None:
        super().__init__(f"{path}:{line}: {text}")


@dataclass
class Table:
    """A file's rows, to be read once.

    columns : the names in a CSV file's header, or in the first of its JSON objects; `line` is where they stand
    rows : each row's line (of several, the first) and its values by column: texts in CSV, else JSON values. Blank rows
        are left out. Raises TrafficError at a row that is none.
    """

    path: Path
    line: int
    columns: list[str]
    rows: Iterator[tuple[int, dict[str, Any]]]

    def layout(self, given: str | None, known: Mapping[str, Sequence[str]]) -> str:
        """The given layout if its columns are here, else the only known one whose columns are. Raises TrafficError."""
        mine = show(", ".join(self.columns))
        if given is None:
            fits = [layout for layout, needed in known.items() if set(needed) <= set(self.columns)]
            if len(fits) == 1:
                return fits[0]
            described = "; ".join(f"{layout} ({', '.join(needed)})" for layout, needed in known.items())
            which = f"the columns of {' and '.join(fits)}" if fits else "columns of no known layout"
            text = f"{mine} are {which}; allowed: {'`layout:`, one of ' * bool(fits)}{described}"
            raise TrafficError(self.path, self.line, text)
        for name in known[given]:
            if name not in self.columns:
                text = f"{name} is not among the columns {mine}; allowed in layout {given}: {', '.join(known[given])}"
                raise TrafficError(self.path, self.line, text)
        return given


def read_table(path: Path) -> Table:
    """A file of CSV with a header, of a JSON object in each line, or of one JSON list of objects.

    It is UTF-8, packed with gzip or not. Raises TrafficError where it is not, or is empty.
    """
    first = next((line.strip() for line in _lines(path) if line.strip()), None)
    if first is None:
        raise TrafficError(path, 1, "the file is empty; allowed: at least one request")
    if first[0] not in "{[":
        fields = _csv_rows(path)
        line, header = next(fields)
        names = [name.strip() for name in header]
        return Table(path, line, names, _by_column(path, names, fields))
    items = _objects(path, _list_items(path) if first[0] == "[" else _json_lines(path))
    line, value = next(items, (1, {}))
    return Table(path, line, list(value), itertools.chain([(line, value)], items))


def read_number(value: Any) -> float:
    """A finite number, or the text of one. Raises ValueError."""
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{show(value)} is not a number; allowed: a finite number")
    return number


def read_tokens(value: Any, least: int = 0) -> int:
    """A number of tokens, or the text of one; 374.0 is what a spreadsheet makes of 374. Raises ValueError."""
    number: float = math.nan
    if type(value) is int or (type(value) is str and value.isdecimal() and len(value) < 20):
        number = int(value)
    else:
        with contextlib.suppress(ValueError):
            number = read_number(value)
    if not (least <= number <= LARGEST and number == int(number)):
        text = f"{show(value)} is not a number of tokens; allowed: a whole number from {least} to {LARGEST}"
        raise ValueError(text)
    return int(number)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, their ends included. Raises TrafficError where it is none, or cannot be read."""
    number = 0
    try:
        with path.open("rb") as file:
            packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            file.seek(0)
            for number, line in enumerate(cast(IO[bytes], gzip.GzipFile(fileobj=file)) if packed else file, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        text = f"byte {error.start + 1} of the line is not text; allowed: UTF-8, packed with gzip or not"
        raise TrafficError(path, number, text) from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TrafficError(path, number + 1, "the gzip data break off here; allowed: a whole file") from None
    except OSError as error:
        text = f"{error.strerror or error}; allowed: the path of a file, from the study's folder"
        raise TrafficError(path, 1, text) from None


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each row that is not blank, the header among them."""
    reader = csv.reader(_lines(path), strict=True)
    line = 1
    try:
        for row in reader:
            if any(field.strip() for field in row):
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        text = f"not CSV: {error}; allowed: fields between commas, quotes in pairs"
        raise TrafficError(path, line, text) from None


def _by_column(
    path: Path, names: list[str], fields: Iterator[tuple[int, list[str]]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, row in fields:
        if len(row) != len(names):
            raise TrafficError(path, line, f"{len(row)} fields; allowed: {len(names)}, as in the header")
        yield line, dict(zip(names, row, strict=True))


def _objects(path: Path, items: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, value in items:
        if not isinstance(value, dict):
            raise TrafficError(path, line, f"{show(value)} is not a JSON object; allowed: {{name: value}}")
        yield line, value


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                text = f"not JSON: {_reason(error)}; allowed: an object in each line, or one list of objects"
                raise TrafficError(path, number, text) from None


def _list_items(path: Path) -> Iterator[tuple[int, Any]]:
    """The items of one JSON list, read one at a time, so that the line of each is known."""
    text = "".join(_lines(path))
    decoder = json.JSONDecoder()
    line, seen, at = 1, 0, text.index("[") + 1
    while True:
        at = _after_blanks(text, at)
        line, seen = line + text.count("\n", seen, at), at
        if text[at : at + 1] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            where = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise TrafficError(path, where, f"not JSON: {_reason(error)}; allowed: a list of objects") from None
        yield line, value
        at = _after_blanks(text, at)
        if text[at : at + 1] not in (",", "]"):
            line += text.count("\n", seen, at)
            raise TrafficError(path, line, "not JSON: the list breaks off here; allowed: a list of objects")
        at += text[at] == ","


def _after_blanks(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
