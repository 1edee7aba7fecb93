"""A study's records on disk: writing a finished cell, believing it again, and reading a study's tables.

On disk a study is a folder in one of two forms, and `load` reads both:

- running:   <study>/<setting folder>/<cell>.steps.parquet (where the scheduler was traced), <cell>.requests.parquet and
             <cell>.cell.parquet, written in this order;
- packed:    <study>/steps.parquet, requests.parquet and cells.parquet, one row group a cell (`pack` makes it).

The cell's row holds the SHA-256 of its other files: it is the marker that the cell has finished, and `read_cell`
believes it only where the digests agree. What the columns mean is in schemas.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from latency_lab.files import file_sha256, replacing
from latency_lab.schemas import CELLS, REQUESTS, SCHEMA_VERSION, STEPS


@dataclass(frozen=True)
class Records:
    """A study's tables. `path` is the folder that they came from."""

    path: Path
    cells: pd.DataFrame
    requests: pd.DataFrame

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Scheduler steps, read when first asked for: they can be many. Empty where none were recorded."""
        return to_pandas(load_steps(self.path))


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
    write_parquet(table([row], CELLS), folder / f"{cell['cell']}.cell.parquet")


def read_cell(folder: Path, cell: str) -> dict[str, Any] | None:
    """The row of a cell, or None where it has not finished. Raises BadRecord where its files do not agree."""
    path = folder / f"{cell}.cell.parquet"
    if not path.exists():
        return None
    rows = _read(path, CELLS).to_pylist()
    if len(rows) != 1 or rows[0]["cell"] != cell:
        raise BadRecord(f"{path}: holds {len(rows)} rows or another cell, not the row of cell {cell}")
    row: dict[str, Any] = rows[0]
    for kind in ("requests", "steps"):
        file = folder / f"{cell}.{kind}.parquet"
        if row[f"{kind}_sha256"] is not None:
            if not file.exists():
                raise BadRecord(f"{file}: missing, though the cell's row says that it was written")
            if file_sha256(file) != row[f"{kind}_sha256"]:
                raise BadRecord(f"{file}: its digest is not the one in {path.name}: truncated or replaced")
    return row


def set_aside(path: Path) -> Path:
    """Rename a bad file so that no reader takes it up again; returns the new name."""
    target = path.with_name(path.name + ".bad")
    path.replace(target)
    return target


def load(folder: Path) -> Records:
    """The tables of a study's folder, packed or still running. Times of one cell are comparable, across cells not.

    Raises BadRecord for a file that cannot be read, FileNotFoundError where the folder holds no records.
    """
    cell_files, request_files = _files(folder, "requests")
    if not cell_files:
        raise FileNotFoundError(f"{folder}: no records here (expected cells.parquet, or folders with *.cell.parquet)")
    cells = pa.concat_tables([_read(path, CELLS) for path in cell_files])
    requests = pa.concat_tables([_read(path, REQUESTS) for path in request_files] or [REQUESTS.empty_table()])
    return Records(folder, to_pandas(cells), to_pandas(requests))


def load_steps(folder: Path) -> pa.Table:
    """The steps of a study's folder as one table of STEPS, empty where none were recorded. Raises BadRecord."""
    return pa.concat_tables([_read(path, STEPS) for path in _files(folder, "steps")[1]] or [STEPS.empty_table()])


def studies(root: Path) -> list[Path]:
    """Folders directly below `root` that hold records, sorted by name."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and _files(path, "requests")[0])


def pack(source: Path, target: Path) -> None:
    """Bring a running study's folder into the packed form: cells in order of their start, one row group a cell."""
    cell_files, _ = _files(source, "requests")
    if not cell_files:
        raise FileNotFoundError(f"{source}: no records here")
    cells = pa.concat_tables([_read(path, CELLS) for path in cell_files]).sort_by(
        [("started_at", "ascending"), ("cell", "ascending")]
    )
    target.mkdir(parents=True, exist_ok=True)
    for kind, schema in (("requests", REQUESTS), ("steps", STEPS)):
        by_name = {path.name.split(".")[0]: path for path in _files(source, kind)[1]}
        if kind == "steps" and not by_name:
            (target / "steps.parquet").unlink(missing_ok=True)
            continue
        with (
            replacing(target / f"{kind}.parquet") as temporary,
            pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
        ):
            for cell in cells.column("cell").to_pylist():
                if cell in by_name:
                    data = _read(by_name[cell], schema)
                    writer.write_table(data, row_group_size=max(1, data.num_rows))
    write_parquet(cells, target / "cells.parquet")


def _files(folder: Path, kind: str) -> tuple[list[Path], list[Path]]:
    """The cell files of a study's folder, and the files of a `kind` (requests, steps) of cells that have finished."""
    if (folder / "cells.parquet").exists():
        packed = folder / f"{kind}.parquet"
        return [folder / "cells.parquet"], [packed] if packed.exists() else []
    cell_files = sorted(folder.glob("*/*.cell.parquet"))
    files = [path.with_name(path.name.replace(".cell.", f".{kind}.")) for path in cell_files]
    return cell_files, [path for path in files if path.exists()]


def _read(path: Path, schema: pa.Schema) -> pa.Table:
    """A parquet file in `schema`; columns that an older file lacks are null, and foreign files are a BadRecord."""
    try:
        data = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise BadRecord(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error
    missing = [field.name for field in schema if not field.nullable and field.name not in data.column_names]
    if missing:
        raise BadRecord(f"{path}: not one of this study's files: no column {missing[0]!r}")
    columns = [
        data.column(field.name).cast(field.type)
        if field.name in data.column_names
        else pa.nulls(data.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def to_pandas(data: pa.Table) -> pd.DataFrame:
    """Integers and booleans stay what they are beside nulls (pandas' nullable types); lists become numpy arrays."""
    types = {
        pa.int16(): pd.Int16Dtype(),
        pa.int32(): pd.Int32Dtype(),
        pa.int64(): pd.Int64Dtype(),
        pa.bool_(): pd.BooleanDtype(),
    }
    return data.to_pandas(types_mapper=types.get)
