"""A study's records on disk: writing a finished cell, believing it again, and reading a study's tables.

On disk a study is a folder in one of two forms, and `load` reads both:

- running:   <study>/<setting folder>/<cell>.steps.parquet (where the scheduler was traced), <cell>.requests.parquet and
             <cell>.cell.parquet, written in this order;
- packed:    <study>/steps.parquet, requests.parquet and cells.parquet (`pack` makes it): no cell is spread over row
             groups, but small ones share a group.

The cell's row holds the SHA-256 of its other files, and its file's metadata a digest of the row: it is the marker that
the cell has finished, and `read_cell` believes it only where the digests agree. `load` leaves out and names cells whose
files do not. What the columns mean is in schemas.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from latency_lab.files import digest, file_sha256, replacing
from latency_lab.schemas import CELLS, REQUESTS, SCHEMA_VERSION, STEPS

KEPT = {"requests": 50_000, "steps": 200_000}
"""Most rows of a study that are kept once read, to be shared by its parts; of a larger one, parts are read anew."""

GROUP_ROWS = 1000
"""Small cells share a row group of at least so many rows in a packed file: each group takes some kilobytes and time."""

_ROW_DIGEST = b"row_sha256"


@dataclass(frozen=True)
class Records:
    """A study: its cells, and its requests and steps, which are read when first asked for, since they can be many.

    path : the folder that they come from
    harmed : of cells that were left out because their files are not what was written, a line each that says which
    whole : the study that this is a part of
    """

    path: Path
    cells: pd.DataFrame
    harmed: tuple[str, ...] = ()
    whole: Records | None = None

    @cached_property
    def requests(self) -> pd.DataFrame:
        """All requests of the cells, with every column."""
        return self._rows("requests", REQUESTS)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """All scheduler steps of the cells. Empty where none were recorded."""
        return self._rows("steps", STEPS)

    def requests_with(self, columns: Sequence[str]) -> pd.DataFrame:
        """All requests of the cells, with some columns only: the lists of token times hold most of the bytes."""
        if "requests" in self.__dict__ or (self.whole is None and self.keeps("requests")):
            return self.requests[list(columns)]
        return self._rows("requests", REQUESTS, columns)

    def part(self, cells: pd.DataFrame) -> Records:
        """The study of some of its cells; what has been read of them is not read again."""
        return Records(self.path, cells, whole=self)

    def one_by_one(self) -> Iterator[Records]:
        """Each cell as a study of its own."""
        for at in range(len(self.cells)):
            yield self.part(self.cells.iloc[at : at + 1])

    def keeps(self, kind: str) -> bool:
        """Whether its requests or steps are in memory, or few enough to be kept there."""
        return kind in self.__dict__ or self.cells[kind].fillna(0).sum() <= KEPT[kind]

    def _rows(self, kind: str, schema: pa.Schema, columns: Sequence[str] | None = None) -> pd.DataFrame:
        if self.whole is not None and self.whole.keeps(kind):
            held: pd.DataFrame = getattr(self.whole, kind)
            mine = held["cell"].isin(self.cells["cell"])
            return (held if columns is None else held[list(columns)])[mine].reset_index(drop=True)
        return to_pandas(_load(self.path, kind, schema, self.cells["cell"], columns))


class BadRecord(Exception):
    """A file that is not what its name says; the message names the file and the reason."""


def table(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows as a table of exactly `schema`: absent values become null, unknown names are an error (KeyError)."""
    rows = list(rows)
    unknown = sorted({name for row in rows for name in row} - set(schema.names))
    if unknown:
        raise KeyError(f"not in the schema: {', '.join(unknown)}")
    return pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema=schema)


def write_parquet(data: pa.Table, path: Path) -> None:
    """Write a table as one row group of zstd parquet, whole or not at all: a temporary name first, then renamed.

    Raises OSError (disk full, no permission) and leaves nothing behind then.
    """
    with replacing(path) as temporary:
        pq.write_table(data, temporary, compression="zstd", row_group_size=max(1, data.num_rows))


def write_cell(
    folder: Path,
    cell: Mapping[str, Any],
    requests: Iterable[Mapping[str, Any]] | pa.Table,
    steps: pa.Table | None = None,
) -> None:
    """Write one finished cell: its steps and requests first, then its row, which says that it has finished.

    `requests`, `requests_failed`, `steps`, the digests and `schema_version` of the row are filled in here.
    """
    rows = requests if isinstance(requests, pa.Table) else table(requests, REQUESTS)
    requests_file = folder / f"{cell['cell']}.requests.parquet"
    steps_file = folder / f"{cell['cell']}.steps.parquet"
    if steps is not None:
        write_parquet(steps.cast(STEPS), steps_file)
    else:
        steps_file.unlink(missing_ok=True)
    if rows.num_rows:
        write_parquet(rows.cast(REQUESTS), requests_file)
    else:
        requests_file.unlink(missing_ok=True)
    row = {
        **cell,
        "schema_version": SCHEMA_VERSION,
        "requests": rows.num_rows,
        "requests_failed": rows.num_rows - rows.column("error").null_count,
        "requests_sha256": file_sha256(requests_file) if rows.num_rows else None,
        "steps": None if steps is None else steps.num_rows,
        "steps_sha256": None if steps is None else file_sha256(steps_file),
    }
    cells = table([row], CELLS)
    noted = {**(cells.schema.metadata or {}), _ROW_DIGEST: _row_digest(cells).encode()}
    write_parquet(cells.replace_schema_metadata(noted), folder / f"{cell['cell']}.cell.parquet")


def read_cell(folder: Path, cell: str) -> dict[str, Any] | None:
    """The row of a cell, or None where it has not finished. Raises BadRecord where its files do not agree."""
    path = folder / f"{cell}.cell.parquet"
    if not path.exists():
        return None
    row: dict[str, Any] = _believed(path).to_pylist()[0]
    return row


def _believed(path: Path) -> pa.Table:
    """The row of a cell's file, with its other files checked against it. Raises BadRecord where they do not agree."""
    cell, rows = _cell_of(path), _read(path, CELLS)
    with _opened(path, CELLS) as opened:
        noted = (opened.schema_arrow.metadata or {}).get(_ROW_DIGEST)
    if rows.column("cell").to_pylist() != [cell]:
        raise BadRecord(f"{path}: holds {rows.num_rows} rows or another cell, not the row of cell {cell}")
    if noted is not None and noted.decode() != _row_digest(rows):  # before there were such digests, none was noted
        raise BadRecord(f"{path}: its row is not the one that was written: its digest differs")
    for kind in ("requests", "steps"):
        file, known = path.with_name(f"{cell}.{kind}.parquet"), rows.column(f"{kind}_sha256")[0].as_py()
        if known is not None:
            if not file.exists():
                raise BadRecord(f"{file}: missing, though the cell's row says that it was written")
            if file_sha256(file) != known:
                raise BadRecord(f"{file}: its digest is not the one in {path.name}: truncated or replaced")
    return rows


def _row_digest(row: pa.Table) -> str:
    """Of the values that are not null: a column that came later changes no older row's digest."""
    values = row.to_pylist()[0]
    return digest({name: value for name, value in values.items() if value is not None})


def set_aside(path: Path) -> Path:
    """Rename a bad file so that no reader takes it up again; returns the new name."""
    target = path.with_name(path.name + ".bad")
    path.replace(target)
    return target


def load(folder: Path) -> Records:
    """A study's folder, packed or still running. Times of one cell are comparable, across cells not.

    A harmed cell of a running study is left out and named in `harmed`. Raises BadRecord where a packed file cannot be
    read, or every cell is harmed, FileNotFoundError where the folder holds no records.
    """
    cell_files, request_files = _files(folder, "requests")
    if not cell_files:
        raise FileNotFoundError(f"{folder}: no records here (expected cells.parquet, or folders with *.cell.parquet)")
    if cell_files == [folder / "cells.parquet"]:
        for path in request_files:
            with _opened(path, REQUESTS):  # a file that cannot be read is told now, not in the middle of a report
                pass
        return Records(folder, to_pandas(_read(cell_files[0], CELLS)))
    with ThreadPoolExecutor() as pool:  # digests take most of the time, and are computed beside one another
        found = list(pool.map(_believed_or_harmed, cell_files))
    good = [one for one in found if isinstance(one, pa.Table)]
    harmed = [str(one) for one in found if isinstance(one, BadRecord)]
    if not good:
        raise BadRecord(f"{harmed[0]}; and no other cell here is whole")
    return Records(folder, to_pandas(pa.concat_tables(good)), tuple(harmed))


def _believed_or_harmed(path: Path) -> pa.Table | BadRecord:
    try:
        return _believed(path)
    except (BadRecord, OSError) as error:  # OSError: a sweep at work here has just taken the file away
        return error if isinstance(error, BadRecord) else BadRecord(f"{path}: {error}")


def studies(root: Path) -> list[Path]:
    """Folders directly below `root` that hold records, sorted by name."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and _files(path, "requests")[0])


def pack(source: Path, target: Path) -> None:
    """Bring a study's folder into the packed form, from either form: cells in order of their start.

    Paths of the machine that measured are cut to their last name, as they mean nothing elsewhere.

    Raises BadRecord where a cell is harmed, FileNotFoundError where there are no records.
    """
    cell_files, _ = _files(source, "requests")
    if not cell_files:
        raise FileNotFoundError(f"{source}: no records here")
    packed = cell_files == [source / "cells.parquet"]
    cells = pa.concat_tables([_read(path, CELLS) if packed else _believed(path) for path in cell_files]).sort_by(
        [("started_at", "ascending"), ("cell", "ascending")]
    )
    target.mkdir(parents=True, exist_ok=True)
    for kind, schema in (("requests", REQUESTS), ("steps", STEPS)):
        files = _files(source, kind)[1]
        if kind == "steps" and not files:
            (target / "steps.parquet").unlink(missing_ok=True)
            continue
        with (
            replacing(target / f"{kind}.parquet") as temporary,
            _packing(temporary, schema) as writer,
        ):
            for group in _grouped(_each(files, kind, schema, cells.column("cell").to_pylist())):
                writer.write_table(group, row_group_size=group.num_rows)
    for name in ("asked", "resolved", "env"):
        at = cells.schema.get_field_index(name)
        portable = [None if text is None else _portable(text) for text in cells.column(name).to_pylist()]
        cells = cells.set_column(at, cells.schema.field(name), pa.array(portable, pa.string()))
    write_parquet(cells, target / "cells.parquet")


def _each(files: Sequence[Path], kind: str, schema: pa.Schema, cells: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of each cell in turn."""
    packed = [path for path in files if path.name == f"{kind}.parquet"]
    of_cell = {} if packed else {_cell_of(path): path for path in files}
    for cell in cells:
        if packed or cell in of_cell:
            yield _read(packed[0], schema, {cell}) if packed else _read(of_cell[cell], schema)


def _grouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Tables one after another, as many together as make GROUP_ROWS rows."""
    held: list[pa.Table] = []
    for one in tables:
        held.append(one)
        if sum(part.num_rows for part in held) >= GROUP_ROWS:
            yield pa.concat_tables(held)
            held = []
    if any(part.num_rows for part in held):
        yield pa.concat_tables(held)


def _portable(text: str) -> str:
    """JSON with absolute paths cut to their last name."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cut(one) for name, one in value.items()}
        if isinstance(value, list):
            return [cut(one) for one in value]
        local = isinstance(value, str) and value.startswith(("/", "~/"))
        return f".../{PurePosixPath(value).name}" if local else value

    return json.dumps(cut(json.loads(text)), sort_keys=True)


def _packing(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer for files that are committed: half the size of the plain ones.

    Times differ in their last bits and hardly in their first, so floats are stored byte by byte (Parquet's
    BYTE_STREAM_SPLIT): nothing is rounded.
    """
    leaves = pq.ParquetFile(pa.BufferReader(_empty(schema))).schema
    floats = [leaf.path for leaf in leaves if leaf.physical_type in ("FLOAT", "DOUBLE")]
    others = [leaf.path for leaf in leaves if leaf.path not in floats]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=15,
        use_dictionary=others,
        use_byte_stream_split=floats,
    )


def _empty(schema: pa.Schema) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    return sink.getvalue()


def _files(folder: Path, kind: str) -> tuple[list[Path], list[Path]]:
    """The cell files of a study's folder, and the files of a `kind` (requests, steps) of cells that have finished."""
    if (folder / "cells.parquet").exists():
        packed = folder / f"{kind}.parquet"
        return [folder / "cells.parquet"], [packed] if packed.exists() else []
    cell_files = sorted(folder.glob("*/*.cell.parquet"))
    files = [path.with_name(path.name.replace(".cell.", f".{kind}.")) for path in cell_files]
    return cell_files, [path for path in files if path.exists()]


def _load(
    folder: Path, kind: str, schema: pa.Schema, cells: Iterable[str], columns: Sequence[str] | None = None
) -> pa.Table:
    """The rows of some cells from a study's files of one kind, in the order of the files. Raises BadRecord."""
    wanted = set(cells)
    asked = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    files = [path for path in _files(folder, kind)[1] if path.name == f"{kind}.parquet" or _cell_of(path) in wanted]
    return pa.concat_tables([_read(path, asked, wanted) for path in files] or [asked.empty_table()])


def _cell_of(path: Path) -> str:
    """The cell that a file of a running study is of."""
    return path.name.split(".")[0]


def _read(path: Path, schema: pa.Schema, cells: Collection[str] | None = None) -> pa.Table:
    """The columns of `schema` in a file, of some cells or all; columns that an older file lacks are null."""
    names = [field.name for field in schema]
    with _opened(path, schema) as file:
        metadata = file.metadata
        groups = [at for at in range(metadata.num_row_groups) if _may_hold(metadata.row_group(at), cells)]
        held = [name for name in dict.fromkeys(["cell", *names]) if name in file.schema_arrow.names]
        data = file.read_row_groups(groups, columns=held)
    if cells is not None:
        mine = pc.is_in(data.column("cell"), pa.array(list(cells), pa.string()))
        data = data if pc.all(mine).as_py() else data.filter(mine)
    try:
        columns = [
            data.column(field.name).cast(field.type) if field.name in held else pa.nulls(data.num_rows, field.type)
            for field in schema
        ]
    except pa.ArrowException as error:
        raise BadRecord(f"{path}: not one of this study's files: {str(error).splitlines()[0]}") from error
    return pa.table(columns, schema=schema)


@contextmanager
def _opened(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetFile]:
    """A parquet file. Raises BadRecord where it cannot be read, or lacks a column that `schema` requires."""
    try:
        with pq.ParquetFile(path) as file:
            lacking = [
                field.name for field in schema if not field.nullable and field.name not in file.schema_arrow.names
            ]
            if lacking:
                raise BadRecord(f"{path}: not one of this study's files: no column {lacking[0]!r}")
            yield file
    except (pa.ArrowException, OSError) as error:
        raise BadRecord(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error


def _may_hold(group: Any, cells: Collection[str] | None) -> bool:
    """Whether a row group can hold rows of the cells, by the least and the greatest cell in it."""
    if cells is None:
        return True
    column = next(group.column(at) for at in range(group.num_columns) if group.column(at).path_in_schema == "cell")
    known = column.statistics
    if known is None or not known.has_min_max:
        return True
    return any(known.min <= cell <= known.max for cell in cells)


def to_pandas(data: pa.Table) -> pd.DataFrame:
    """Integers and booleans stay what they are beside nulls (pandas' nullable types), lists what they are in Arrow."""
    types = {
        pa.int16(): pd.Int16Dtype(),
        pa.int32(): pd.Int32Dtype(),
        pa.int64(): pd.Int64Dtype(),
        pa.bool_(): pd.BooleanDtype(),
    }
    return data.to_pandas(types_mapper=lambda one: pd.ArrowDtype(one) if pa.types.is_list(one) else types.get(one))
