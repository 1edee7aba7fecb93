"""Records survive what a machine does to files, and read back as what was written."""

import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from latency_lab import files, records, schemas

KEYS = {
    "study": "s",
    "cell": "c1",
    "setting": "budget=512",
    "setting_id": "x",
    "workload": "chat c=2",
    "workload_id": "w",
    "repeat": 0,
    "load": "closed",
}
CELL = {**KEYS, "status": "done"}


def request(number: int, **values: object) -> dict[str, object]:
    return {
        **KEYS,
        "request": number,
        "request_id": f"c1-{number}",
        "class_name": "chat",
        "via": "engine",
        "streaming": True,
        "scheduled_s": 0.0,
        **values,
    }


GOOD = request(0, output_tokens=3, sent_s=0.5, token_times_s=[0.1, 0.2], token_counts=[1, 2], max_num_seqs=4)
LOST = request(1, error="timeout: due, but never sent")


def test_round_trip_keeps_integers_beside_nulls_and_lists(tmp_path):
    records.write_cell(tmp_path / "s" / "setting", CELL, [GOOD, LOST])
    loaded = records.load(tmp_path / "s")
    rows = loaded.requests
    assert rows["max_num_seqs"].dtype == pd.Int32Dtype()
    assert rows["max_num_seqs"].tolist() == [4, pd.NA]
    assert rows["output_tokens"].tolist()[0] == 3
    assert [round(float(at), 3) for at in rows["token_times_s"][0]] == [0.1, 0.2]
    assert rows["token_times_s"].isna().tolist() == [False, True]
    assert rows["error"][1] == "timeout: due, but never sent"
    cell = loaded.cells.iloc[0]
    assert (cell["requests"], cell["requests_failed"], cell["schema_version"]) == (2, 1, schemas.SCHEMA_VERSION)


def test_files_have_one_schema_whatever_the_rows_hold():
    assert records.table([], schemas.REQUESTS).schema == records.table([GOOD, LOST], schemas.REQUESTS).schema


def test_a_column_that_the_schema_lacks_is_an_error():
    with pytest.raises(KeyError, match="tokens_per_second"):
        records.table([{**GOOD, "tokens_per_second": 1.0}], schemas.REQUESTS)


def test_an_absent_required_column_is_an_error(tmp_path):
    with pytest.raises(pa.ArrowInvalid):
        records.write_parquet(records.table([{"study": "s"}], schemas.CELLS), tmp_path / "a.parquet")
    assert list(tmp_path.iterdir()) == [], "a write that failed left something behind"


def test_a_cell_is_finished_only_with_its_row(tmp_path):
    records.write_parquet(records.table([GOOD], schemas.REQUESTS), tmp_path / "c1.requests.parquet")
    assert records.read_cell(tmp_path, "c1") is None
    records.write_cell(tmp_path, CELL, [GOOD])
    assert records.read_cell(tmp_path, "c1")["status"] == "done"


def truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


def replace(path):
    pq.write_table(pa.table({"a": [1]}), path)


def empty(path):
    path.write_bytes(b"")


def flip_a_bit(path):
    """In a value: parquet, which holds no checksum of its own here, reads the file as if nothing were wrong."""
    data = bytearray(path.read_bytes())
    at = data.index(b"budget=512")
    data[at] ^= 1
    path.write_bytes(data)
    assert pq.read_table(path)["setting"][0].as_py() == "cudget=512"


def retype(path):
    """A file with the columns of ours, of which one holds something else."""
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index("repeat"), "repeat", [["first"] * len(table)]), path)


HARMS = {"truncated": truncate, "foreign": replace, "empty": empty, "a bit": flip_a_bit, "retyped": retype}


@pytest.mark.parametrize("harm", [*HARMS.values(), lambda path: path.unlink()], ids=[*HARMS, "missing"])
def test_a_harmed_requests_file_is_not_believed(tmp_path, harm):
    records.write_cell(tmp_path, CELL, [GOOD, LOST])
    harm(tmp_path / "c1.requests.parquet")
    with pytest.raises(records.BadRecord, match=r"c1\.requests\.parquet"):
        records.read_cell(tmp_path, "c1")


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_harmed_cell_file_is_named(tmp_path, harm):
    records.write_cell(tmp_path, CELL, [GOOD])
    harm(tmp_path / "c1.cell.parquet")
    with pytest.raises(records.BadRecord, match=r"c1\.cell\.parquet"):
        records.read_cell(tmp_path, "c1")


@pytest.mark.parametrize("kind", ["cell", "requests"])
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_study_is_read_without_its_harmed_cells_which_are_named(tmp_path, harm, kind):
    study = tmp_path / "s"
    records.write_cell(study / "a", CELL, [GOOD, LOST])
    records.write_cell(study / "a", {**CELL, "cell": "c2"}, [{**GOOD, "cell": "c2", "request_id": "c2-0"}])
    harm(study / "a" / f"c2.{kind}.parquet")
    loaded = records.load(study)
    assert loaded.cells["cell"].tolist() == ["c1"] and loaded.requests["cell"].unique().tolist() == ["c1"]
    (line,) = loaded.harmed
    assert line.startswith(f"{study / 'a' / f'c2.{kind}.parquet'}: ") and "\n" not in line
    with pytest.raises(records.BadRecord, match=rf"c2\.{kind}\.parquet"):
        records.pack(study, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_a_study_of_harmed_cells_alone_is_an_error(tmp_path):
    records.write_cell(tmp_path / "s" / "a", CELL, [GOOD])
    truncate(tmp_path / "s" / "a" / "c1.requests.parquet")
    with pytest.raises(records.BadRecord, match=r"c1\.requests\.parquet.*no other cell here is whole"):
        records.load(tmp_path / "s")


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    records.write_cell(tmp_path, CELL, [GOOD])
    before = (tmp_path / "c1.requests.parquet").read_bytes()

    def disk_full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.pq, "write_table", disk_full)
    with pytest.raises(OSError, match="No space left"):
        records.write_cell(tmp_path, CELL, [GOOD, LOST])
    monkeypatch.undo()
    assert (tmp_path / "c1.requests.parquet").read_bytes() == before
    assert records.read_cell(tmp_path, "c1")["requests"] == 1
    assert not list(tmp_path.glob(".*"))


def measured(tmp_path):
    """A study of three cells of two requests, one and none."""
    source = tmp_path / "s"
    records.write_cell(source / "a", CELL, [GOOD, LOST])
    second = {**GOOD, "cell": "c2", "request_id": "c2-0"}
    records.write_cell(source / "b", {**CELL, "cell": "c2"}, [second])
    records.write_cell(source / "b", {**CELL, "cell": "c3", "status": "refused", "error": "no"}, [])
    return source


@pytest.mark.parametrize(("least", "groups"), [(1, 2), (3, 1), (1000, 1)])
def test_packing_keeps_every_row_and_puts_small_cells_together(tmp_path, monkeypatch, least, groups):
    source, target = measured(tmp_path), tmp_path / "packed"
    monkeypatch.setattr(records, "GROUP_ROWS", least)
    records.pack(source, target)
    assert pq.ParquetFile(target / "requests.parquet").num_row_groups == groups
    running, packed = records.load(source), records.load(target)
    assert len(packed.cells) == 3
    pd.testing.assert_frame_equal(
        running.requests.sort_values("request_id", ignore_index=True),
        packed.requests.sort_values("request_id", ignore_index=True),
    )
    assert records.studies(tmp_path) == [target, source]


@pytest.mark.parametrize("kept", [0, 1000])
def test_a_cell_is_found_wherever_it_lies(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(records, "KEPT", {"requests": kept, "steps": kept})
    records.pack(measured(tmp_path), tmp_path / "packed")
    whole = records.load(tmp_path / "packed")
    found = {one.cells["cell"].iloc[0]: one.requests["request_id"].tolist() for one in whole.one_by_one()}
    assert found == {"c1": ["c1-0", "c1-1"], "c2": ["c2-0"], "c3": []}
    second = whole.part(whole.cells[whole.cells["cell"] == "c2"])
    assert second.requests_with(["request"]).to_dict("list") == {"request": [0]}


def test_packing_again_changes_nothing(tmp_path):
    target = tmp_path / "packed"
    records.pack(measured(tmp_path), target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    records.pack(target, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_packing_leaves_out_where_things_lay_on_the_machine(tmp_path):
    resolved = {"model": "/home/someone/models/smol", "worker_cls": "vllm.v1.Worker", "files": ["~/a/b", "original/*"]}
    cell = {**CELL, "resolved": json.dumps(resolved), "env": '{"OMP_NUM_THREADS": "2"}'}
    records.write_cell(tmp_path / "s" / "a", cell, [GOOD])
    records.pack(tmp_path / "s", tmp_path / "packed")
    (row,) = records.load(tmp_path / "packed").cells.to_dict("records")
    assert json.loads(row["resolved"]) == {
        "model": ".../smol",
        "worker_cls": "vllm.v1.Worker",
        "files": [".../b", "original/*"],
    }
    assert row["env"] == cell["env"] and pd.isna(row["asked"])


def test_requests_of_an_unfinished_cell_are_not_read(tmp_path):
    records.write_cell(tmp_path / "s" / "a", CELL, [GOOD])
    stray = records.table([{**GOOD, "cell": "c9"}], schemas.REQUESTS)
    records.write_parquet(stray, tmp_path / "s" / "a" / "c9.requests.parquet")
    assert records.load(tmp_path / "s").requests["cell"].unique().tolist() == ["c1"]


def test_every_column_says_what_it_is():
    for schema in (schemas.REQUESTS, schemas.CELLS):
        assert not [field.name for field in schema if not field.metadata[b"doc"]]


def test_a_digest_is_the_same_everywhere():
    assert files.digest({"b": [1, None], "a": 1.5}) == files.digest({"a": 1.5, "b": [1, None]}) == "91ce22852ed2"
