"""Messages about rejected records: the most common reason, one example, and advice that fits the reason."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from energon_packed import Reason, RejectLimitError
from tests.internals import advice, cli, main_reason

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello. " * 30}]
IMAGE = {"images": ["none.png"], "captions": ["A cat."]}


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        (
            {"foo": 1},
            {},
            r"40 x missing_field, e.g. line 1 of .*data.jsonl: .*`map`, or convert them with an `adapter`",
        ),
        (
            IMAGE,
            {},
            r"40 x missing_image, e.g. line 1 of .*none.png.*; add the files, or set `image_root` to the folder",
        ),
        ({**IMAGE, "images": ["../a.png"]}, {}, r"40 x image_outside_root.*; set `image_root` to the folder"),
        (
            {"messages": TURNS},
            {"seq_len": 16},
            r"40 x overlong, .* tokens, .*; raise `seq_len` \(`energon-packed lengths` compares values\), or",
        ),
        ("{broken", {}, r"40 x bad_json, .*; each line must be one JSON object"),
    ],
)
def test_an_input_without_usable_records_shows_one_and_what_to_do(
    build: Any, tmp_path: Path, record: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RejectLimitError, match=f"none of 40 records can be packed: {message}") as raised:
        build([record] * 40, **options)
    assert str(raised.value).endswith(f"{tmp_path / 'out' / 'rejects.jsonl'} lists all")
    assert "\n" not in str(raised.value)


def test_each_reason_has_an_example_and_the_most_common_reason_is_first(build: Any) -> None:
    records = [{"messages": TURNS}] * 3 + ["{broken"] + [IMAGE] * 2
    first = r"2 x missing_image, e.g. line 5 of .*data.jsonl: .* \(add the files, or set `image_root`.*\)"
    second = r"1 x bad_json, e.g. line 4 of .*data.jsonl: .*\. See .*raise `max_reject_rate`"
    with pytest.raises(RejectLimitError, match=rf"3 of 6 records \(50.0%\) .*: {first}; {second}"):
        build(records, max_reject_rate=0.1)


def test_the_length_of_the_longest_sample_is_named_if_seq_len_is_too_small(build: Any) -> None:
    records = [{"text": "red square " * count} for count in (1, 30, 300, 60)]
    longest = max(pq.read_table(build(records, seq_len=4096).lengths)["length"].to_pylist())
    for overlong, count in (("drop", "3 x overlong, e.g. line 2 of"), ("error", "the first of 3 such records")):
        with pytest.raises(RejectLimitError, match=rf"{count}.* \(the longest sample has {longest} tokens\)"):
            build(seq_len=16, overlong=overlong, max_reject_rate=0, overwrite=True)
    with pytest.raises(RejectLimitError, match=r"`overlong` is 'error'") as raised:
        build(records[:2], seq_len=16, overlong="error", overwrite=True)
    assert "the longest" not in str(raised.value), "the message has the length of the only record"


def test_lengths_shows_the_example_too(tmp_path: Path, tokenizer_dir: Path) -> None:
    data = tmp_path / "data.jsonl"
    options = [str(data), "--tokenizer", str(tokenizer_dir), "--workers", "1", "--max-reject-rate", "0.5"]
    data.write_text("".join(json.dumps(record) + "\n" for record in [IMAGE] * 9))
    failed = str(CliRunner().invoke(cli, ["lengths", *options]).exception)
    assert "none of 9 records can be packed: 9 x missing_image, e.g. line 1 of" in failed
    data.write_text("".join(json.dumps(record) + "\n" for record in [{"messages": TURNS}, IMAGE]))
    shown = CliRunner().invoke(cli, ["lengths", *options]).output
    assert "rejected: 1 x missing_image, e.g. line 2 of" in shown
    assert (
        "\nmissing_image: add the files, or set --image-root to the folder that image paths start from; pack " in shown
    )
    records = [{"messages": TURNS}, {"messages": TURNS}, IMAGE] * 66
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    sampled = CliRunner().invoke(cli, ["lengths", *options, "--sample", "20"]).output
    assert "e.g. a record of" in sampled


def test_advice_is_that_of_the_main_reason() -> None:
    assert "image_root" in advice({Reason.MISSING_IMAGE.value: 2, "overlong": 1})
    assert advice({}) == advice({Reason.CORRUPT_IMAGE.value: 1}) == ""
    assert main_reason({"overlong": 1, "bad_role": 1}) == "bad_role"
