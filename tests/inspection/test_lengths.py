"""`lengths` shows the result of `pack` for each seq_len."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from click.testing import Result

from energon_packed import ConfigError, PackOptions, RejectLimitError
from tests.conftest import Packer
from tests.internals import LengthsOptions, compare, dry_run, histogram, percentiles, recommend, survey_lengths
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
    assert "unknown algorithm" in wrong.output


def test_the_table_recommends_a_candidate(demo: Any, tokenizer_dir: Path) -> None:
    shown = run(demo.jsonl, "--tokenizer", tokenizer_dir, "--workers", 1, "--seq-len", "256,1024")
    assert shown.exit_code == 0, shown.output
    assert "--seq-len 1024: the smallest candidate that drops less than 1% of the tokens" in shown.output
    assert "█" in shown.output


def test_an_input_may_be_a_number_and_few_records_have_a_thin_bar(
    text_tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("4096").mkdir()
    Path("4096/d.jsonl").write_text('{"text": "Hi."}\n' * 99 + json.dumps({"text": "Hi. " * 99}) + "\n")
    shown = run("--seq-len", 512, 1024, "4096", "--tokenizer", text_tokenizer_dir, "--workers", 1)
    assert shown.exit_code == 0, shown.output
    assert "│ 1,024   │" in shown.output
    assert "4,096" not in shown.output
    assert shown.output.count("▏\n") == 1


def test_a_sample_of_the_records_is_close_to_all_records(tokenizer_dir: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": "red square " * int(n)}) for n in rng.integers(1, 100, 4_000)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    sampled = run(tmp_path / "d.jsonl", "--tokenizer", tokenizer_dir, "--sample", 500, "--json", "--seq-len", 256)
    value = json.loads(sampled.stdout[sampled.stdout.index("{") :])
    assert value["is_sample"]
    assert 250 < value["records"] < 1000
    whole = run(tmp_path / "d.jsonl", "--tokenizer", tokenizer_dir, "--json", "--seq-len", 256)
    expected = json.loads(whole.stdout[whole.stdout.index("{") :])
    assert expected["records"] == 4_000
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
    assert "--seq-len must be integers, such as 8192 or 8k, got 'many'" in wrong.output


def measured(*arguments: object) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.parametrize("order", [("short.jsonl", "long.parquet"), ("long.parquet", "short.jsonl")])
def test_a_sample_of_several_formats_is_in_proportion_to_their_records(
    text_tokenizer_dir: Path, tmp_path: Path, order: tuple[str, str]
) -> None:
    (tmp_path / "short.jsonl").write_text(f"{json.dumps({'text': 'red'})}\n" * 1500)
    pa.parquet.write_table(pa.table({"text": ["red square " * 300] * 500}), tmp_path / "long.parquet")
    files = [tmp_path / name for name in order]
    value = measured(*files, "--tokenizer", text_tokenizer_dir, "--sample", 200)
    assert value == measured(*files, "--tokenizer", text_tokenizer_dir, "--sample", 200)
    assert value["records"] == pytest.approx(200, rel=0.1)
    assert (value["percentiles"]["50"], value["percentiles"]["99"]) == (3, 603)
    survey = survey_lengths(LengthsOptions(inputs=files, tokenizer=text_tokenizer_dir, sample=200))  # type: ignore[arg-type]
    assert np.count_nonzero(survey.lengths > 3) / len(survey.lengths) == pytest.approx(0.25, abs=0.02)


def test_a_sample_of_many_files_reads_each_file_in_proportion(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    for number in range(100):
        size = 400 if number == 50 else 10
        (tmp_path / f"{number}.jsonl").write_text(f"{json.dumps({'text': 'red ' * (number + 1)})}\n" * size)
    files = sorted(tmp_path.glob("*.jsonl"))
    survey = survey_lengths(LengthsOptions(inputs=files, tokenizer=text_tokenizer_dir, sample=350))  # type: ignore[arg-type]
    lengths, counts = np.unique(survey.lengths, return_counts=True)
    assert len(lengths) > 70
    assert counts.max() / counts.sum() == pytest.approx(400 / 1390, abs=0.03)
    assert counts.sum() == pytest.approx(350, rel=0.1)


@pytest.mark.parametrize("sample", [1, 2, 50, 10_000])
def test_a_sample_of_a_few_records_has_a_record(text_tokenizer_dir: Path, tmp_path: Path, sample: int) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "red " * 2000}) + "\n" + '{"text": "red"}\n' * 60)
    (tmp_path / "empty.jsonl").touch()
    for seed in range(5):
        settings = ("--tokenizer", text_tokenizer_dir, "--sample", sample, "--seed", seed)
        value = measured(tmp_path / "empty.jsonl", tmp_path / "a.jsonl", *settings)
        assert 1 <= value["records"] <= 61


@pytest.mark.parametrize("content", ["", "\n \n", "\n" * 5000])
@pytest.mark.parametrize("settings", [(), ("--sample", 10)])
def test_an_empty_input_is_one_line(
    text_tokenizer_dir: Path, tmp_path: Path, content: str, settings: tuple[object, ...]
) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    done = run(tmp_path / "a.jsonl", "--tokenizer", text_tokenizer_dir, *settings)
    message = "none of 0 records can be packed: the input is empty; pass a file with records"
    assert isinstance(done.exception, RejectLimitError)
    assert str(done.exception) == message
    options: dict[str, Any] = {"inputs": tmp_path / "a.jsonl", "tokenizer": text_tokenizer_dir, "seq_len": 64}
    with pytest.raises(RejectLimitError, match=message):
        dry_run(PackOptions(**options, output_dir=tmp_path / "out"))


def test_a_reject_rate_above_the_limit_ends_lengths_and_a_dry_run_as_it_ends_pack(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    lines = [{"messages": turns} | ({"images": ["gone.png"]} if n % 10 == 9 else {}) for n in range(100)]
    (tmp_path / "d.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    given, out = (tmp_path / "d.jsonl", "--tokenizer", tokenizer_dir, "--workers", 1), tmp_path / "out"
    packing = (*given, "--seq-len", 64, "-o", out)
    message = str(invoke("pack", *packing).exception)
    assert message.startswith("10 of 100 records (10.0%) were rejected (limit `max_reject_rate` 0.05): 10 x ")
    report = tmp_path / "lens.txt"
    for stopped in (run(*given, "--output", report), invoke("pack", *packing, "--dry-run")):
        assert isinstance(stopped.exception, RejectLimitError)
        assert str(stopped.exception) == message.replace(f"See {out / 'rejects.jsonl'}. ", "")
        assert "recommended" not in stopped.output
    assert not report.exists(), "a list of the records that are left"
    sampled = str(run(*given, "--sample", 50).exception)
    assert " sampled records (" in sampled
    assert "e.g. a record of " in sampled
    shown = run(*given, "--max-reject-rate", 0.1, "--output", report)
    assert "recommended: --seq-len 2048" in shown.output
    assert len(report.read_text().splitlines()) == 90
    assert invoke("pack", *packing, "--dry-run", "--max-reject-rate", 0.1).exit_code == 0


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(ConfigError, match="'nonsense'"):
        compare(np.ones(3, dtype=np.int32), [4], records=3, algorithm="nonsense")
