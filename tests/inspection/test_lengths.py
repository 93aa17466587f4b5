"""`lengths` shows the result of `pack` for each seq_len."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from tests.conftest import Packer
from tests.internals import compare, histogram, percentiles, recommend
from tests.printed import invoke


def run(*arguments: object) -> Result:
    return invoke("lengths", *arguments)


def test_candidates_match_a_complete_pack(demo: Any, tokenizer_dir: Path, pack_demo: Packer) -> None:
    shown = run(demo.jsonl, "--tokenizer", tokenizer_dir, "--workers", 1, "--json", "--seq-len", 128, 300, 512)
    assert shown.exit_code == 0, shown.output
    value = json.loads(shown.stdout[shown.stdout.index("{") :])
    assert [candidate["seq_len"] for candidate in value["candidates"]] == [128, 300, 512]
    for candidate in value["candidates"]:
        manifest = pack_demo(seq_len=candidate["seq_len"], max_reject_rate=1.0).manifest
        assert manifest.records == value["records"]
        assert candidate["dropped_records"] == manifest.rejects.get("overlong", 0) / manifest.records
        assert (candidate["packs"], round(candidate["utilization"], 6)) == (manifest.packs, manifest.utilization)
        assert candidate["samples_per_pack"] == pytest.approx(manifest.samples_per_pack)
        others = {reason: count for reason, count in manifest.rejects.items() if reason != "overlong"}
        assert others == value["rejects"]


def test_planning_options_match_pack(demo: Any, tokenizer_dir: Path, pack_demo: Packer) -> None:
    options = ("--pad-multiple", 64, "--max-samples-per-pack", 3, "--algorithm", "sequential", "--loss-on", "all")
    shown = run(demo.jsonl, "--tokenizer", tokenizer_dir, "--workers", 1, "--json", "--seq-len", 512, *options)
    assert shown.exit_code == 0, shown.output
    (candidate,) = json.loads(shown.stdout[shown.stdout.index("{") :])["candidates"]
    manifest = pack_demo(
        seq_len=512,
        max_reject_rate=1.0,
        pad_multiple=64,
        max_samples_per_pack=3,
        algorithm="sequential",
        tokenizer=tokenizer_dir,
        loss_on="all",
    ).manifest
    assert (candidate["packs"], round(candidate["utilization"], 6)) == (manifest.packs, manifest.utilization)
    assert candidate["samples_per_pack"] == pytest.approx(manifest.samples_per_pack)
    wrong = run(demo.jsonl, "--tokenizer", tokenizer_dir, "--algorithm", "magic")
    assert "unknown algorithm" in str(wrong.exception)


def test_the_table_recommends_a_candidate(demo: Any, tokenizer_dir: Path) -> None:
    shown = run(demo.jsonl, "--tokenizer", tokenizer_dir, "--workers", 1, "--seq-len", "256,1024")
    assert shown.exit_code == 0, shown.output
    assert "--seq-len 1024: the smallest candidate that drops less than 1% of the tokens" in shown.output
    assert "█" in shown.output


def test_a_sample_of_the_records_is_close_to_all_records(tokenizer_dir: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": "red square " * int(n)}) for n in rng.integers(1, 100, 20_000)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    sampled = run(tmp_path / "d.jsonl", "--tokenizer", tokenizer_dir, "--sample", 2000, "--json", "--seq-len", 256)
    value = json.loads(sampled.stdout[sampled.stdout.index("{") :])
    assert value["is_sample"]
    assert 1000 < value["records"] < 4000
    whole = run(tmp_path / "d.jsonl", "--tokenizer", tokenizer_dir, "--json", "--seq-len", 256)
    expected = json.loads(whole.stdout[whole.stdout.index("{") :])
    assert expected["records"] == 20_000
    assert value["percentiles"]["50"] == pytest.approx(expected["percentiles"]["50"], rel=0.1)


def test_values_match_a_calculation_by_hand() -> None:
    lengths = np.array([1, 2, 3, 4, 10], dtype=np.int32)
    assert percentiles(lengths)[50] == 3
    assert percentiles(lengths)[100] == 10
    assert sum(count for _, _, count in histogram(lengths)) == 5
    small, large = compare(lengths, [12, 5], records=6)
    assert (small.seq_len, small.dropped_records, small.packs, small.samples_per_pack) == (5, 1 / 6, 2, 2.0)
    assert small.dropped_tokens == 0.5
    assert small.attention == pytest.approx((1 + 3 + 6 + 10) / 10)
    assert (large.packs, large.dropped_tokens) == (2, 0.0)
    assert recommend([small, large], lengths)[0] is large
    best, reason = recommend(compare(lengths, [4, 5, 6], records=5), lengths)
    assert best.seq_len == 4  # 5 and 6 drop the same sample
    assert "drops 50.0% of the tokens: 1 of 5 samples are longer, up to 10" in reason
    one = np.full(3, 7, dtype=np.int32)
    assert histogram(one) == [(7, 7, 3)]


def test_wrong_input_is_a_one_line_error(tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("{}\n")
    assert "none of 1 records can be packed: 1 x " in str(
        run(tmp_path / "d.jsonl", "--tokenizer", tokenizer_dir).exception
    )
    wrong = run(tmp_path / "d.jsonl", "--tokenizer", tokenizer_dir, "--seq-len", "many")
    assert "`seq_lens` must be integers, such as 8192 or 8k, got 'many'" in str(wrong.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seq-len", "0"), "`seq_len` must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_a_one_line_error(
    demo: Any, tokenizer_dir: Path, options: tuple[str, str], message: str
) -> None:
    result = run(demo.jsonl, "--tokenizer", tokenizer_dir, "--workers", 1, *options)
    assert message in str(result.exception)
    assert run(demo.jsonl, "--tokenizer", tokenizer_dir, "--workers", -5).exit_code == 1
