"""Builds of a few records."""

import json
from pathlib import Path
from typing import Any

import pytest

from energon_packed import PackOptions, PackResult, pack


@pytest.fixture
def build(tmp_path: Path, tokenizer_dir: Path) -> Any:
    """Packs a list of records (objects, or lines as they are); without one, the records of the last call again.

    The file is not touched when its content stays the same, as a user would run the same command again.
    """

    def run(records: list[Any] | None = None, **options: Any) -> PackResult:
        data = tmp_path / "data.jsonl"
        if records is not None:
            lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
            text = "".join(line + "\n" for line in lines)
            if not data.exists() or data.read_text() != text:
                data.write_text(text)
        settings = {
            "inputs": (str(data),),
            "output_dir": tmp_path / "out",
            "tokenizer": tokenizer_dir,
            "seq_len": 256,
            "workers": 1,
            "unpacked": options.get("sample_class") == "MultiMixQASample",
            "max_reject_rate": 1,
        }
        return pack(PackOptions(**{**settings, **options}))

    return run
