"""Inputs that would run code where they are loaded carelessly: pickles, extension types, names out of the folder."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon_packed import EnergonPackedError, SourceError
from tests.canary import Canary
from tests.internals import _shape, codec_for, open_sources
from tests.sources.tars import conversations, write_tar

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Blue."}]


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    return Canary(tmp_path)


class _Sings:
    """Creates the canary where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.path), "w")


def test_an_array_of_objects_is_not_unpickled(tmp_path: Path, canary: Canary) -> None:
    out = io.BytesIO()
    np.save(out, np.array([_Sings(canary.path)], dtype=object), allow_pickle=True)
    array = out.getvalue()
    raw = {"__key__": "0", "input_ids.npy": array, "cu_seqlens.npy": array, "loss_spans.npy": array, "json": b"{}"}
    with pytest.raises(EnergonPackedError, match="input_ids.npy"):
        codec_for("PackedTokensSample").read({**raw, "json": b'{"images": [], "ids": []}'})
    assert _shape(array).startswith("damaged")
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, {"descr": "<i4", "fortran_order": False, "shape": (2**50,)})
    assert _shape(huge.getvalue()).startswith("damaged")
    with pytest.raises(EnergonPackedError, match="input_ids.npy"):
        codec_for("PackedTokensSample").read({"__key__": "0", "input_ids.npy": huge.getvalue(), "json": b"{}"})
    members = [("0.json", {"messages": TALK}), ("0.pkl", pickle.dumps(_Sings(canary.path)))]
    (source,) = open_sources([write_tar(tmp_path / "s.tar", members)], work_dir=tmp_path)
    (row,) = source.scan(0, source.extent())
    assert row.reject is not None
    assert "is a pickle, which is never loaded" in row.reject.detail
    assert not canary.sang()
    pickle.loads(pickle.dumps(_Sings(canary.path))).close()
    assert canary.sang()  # what was tried


def test_an_extension_type_of_arrow_is_not_unpickled(tmp_path: Path, canary: Canary) -> None:
    """As `pyarrow.PyExtensionType` stored itself: a pickle in the metadata of a field."""
    stored = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(_Sings(canary.path)),
    }
    kind = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema(
        [pa.field("messages", pa.list_(kind)), pa.field("id", pa.string(), metadata=stored)],
        metadata={b"pandas": b"[" * 50_000, b"huggingface": b"{" * 50_000},
    )
    table = pa.table({"messages": [TALK], "id": ["a"]}, schema=schema)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        (one,) = conversations(open_sources([tmp_path / name], work_dir=tmp_path))
        assert [message.content for message in one.messages] == ["Hi", "Blue."]
    assert not canary.sang()


@pytest.mark.parametrize("name", ["../a.arrow", "/a.arrow", "", "x/../../a.arrow"])
def test_a_saved_dataset_names_files_inside_it_only(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(SourceError, match="leads out of the folder"):
        open_sources([folder], work_dir=tmp_path)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(SourceError, match="leads out of the folder"):
        open_sources([folder], work_dir=tmp_path, split=name)
