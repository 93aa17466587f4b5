"""`--dry-run` says what a run would do and writes nothing; a disk that is too small is refused before writing."""

import gzip
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from energon_packed import ConfigError, PackOptions, RejectLimitError
from tests.conftest import FLAVORS
from tests.internals import DemoDataset, cli, dry_run
from tests.printed import printed_json

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello. " * 30}]


def options(demo: DemoDataset, tokenizer: Path, out: Path, **more: Any) -> PackOptions:
    given: dict[str, Any] = {"inputs": demo.jsonl, "output_dir": out, "tokenizer": tokenizer, "seq_len": 1024}
    return PackOptions(**{**given, "workers": 1, "max_reject_rate": 0.5, **more})


@pytest.mark.parametrize("flavor", FLAVORS)
def test_numbers_are_those_of_the_run(demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path, flavor: str) -> None:
    from energon_packed import pack

    single = flavor == "MultiMixQASample"
    run = options(demo, tokenizer_dir, tmp_path / "out", sample_class=flavor, unpacked=single)
    before = dry_run(run)
    assert not (tmp_path / "out").exists()
    assert (before.to_measure, before.records) == (1.0, demo.records)
    done = pack(run)
    after = dry_run(run)
    assert sum(after.rejects.values()) == sum(before.rejects.values()) == demo.broken
    assert (before.packs, before.tokens) == (after.packs, after.tokens) == (done.manifest.packs, done.manifest.tokens)
    assert done.bytes <= before.num_bytes * 1.02
    assert before.num_bytes < 1.5 * done.bytes
    clean = [line for line in demo.jsonl.read_text().splitlines() if "demo-" in line]
    (demo.jsonl.parent / "clean.jsonl").write_text("\n".join(clean))
    clean_file = demo.jsonl.parent / "clean.jsonl"
    run = options(demo, tokenizer_dir, tmp_path / "clean", inputs=clean_file, sample_class=flavor, unpacked=single)
    pack(run)
    again = dry_run(run)
    assert (again.to_measure, again.sampled) == (0, 0)


@pytest.mark.parametrize(
    ("flavor", "most"), [("PackedCaptioningSample", 1.5), ("PackedMultiMixQASample", 1.2), ("PackedTokensSample", 1.2)]
)
def test_the_size_of_short_texts(
    demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path, flavor: str, most: float
) -> None:
    """Keys, ids and lengths are a large part of them; the flavor of captions has no keys for each turn."""
    from energon_packed import pack

    lines = [line for line in demo.jsonl.read_text().splitlines() if "demo-" in line and "image" not in line]
    (tmp_path / "text.jsonl").write_text("\n".join(lines * 4))
    run = options(demo, tokenizer_dir, tmp_path / "out", inputs=str(tmp_path / "text.jsonl"), sample_class=flavor)
    estimate, written = dry_run(run).num_bytes, pack(run).bytes
    assert written - 10_240 < estimate < most * written, "a tar is filled up to a multiple of 10 KiB"


def test_references_need_less_space_in_as_many_shards(demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path) -> None:
    from energon_packed import pack

    more: dict[str, Any] = {"shard_prefix": "d", "max_shard_bytes": 400_000}
    copied = dry_run(options(demo, tokenizer_dir, tmp_path / "copied", **more))
    run = options(demo, tokenizer_dir, tmp_path / "out", media="reference", **more)
    before, done = dry_run(run), pack(run)
    assert before.shards == copied.shards > 3
    assert copied.num_bytes / 5 > before.num_bytes > done.bytes / 1.2
    assert before.num_bytes < 2 * done.bytes


def test_a_large_input_is_sampled(tmp_path: Path, tokenizer_dir: Path) -> None:
    lines = [json.dumps({"text": "word " * (20 + n % 50)}) for n in range(20_000)]
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as out:
        out.write("\n".join(lines))
    found = dry_run(
        PackOptions(inputs=tmp_path / "d.jsonl.gz", output_dir=tmp_path / "o", tokenizer=tokenizer_dir, seq_len=512)  # type: ignore[arg-type]
    )
    assert 200 < found.sampled < 5000
    assert found.records == pytest.approx(20_000, rel=0.1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.jsonl.gz"]


def test_the_command_prints_a_table_or_json_and_writes_nothing(
    demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path
) -> None:
    given = [str(demo.jsonl), "-o", str(tmp_path / "out"), "--seq-len", "1k", "--tokenizer", str(tokenizer_dir)]
    shown = CliRunner().invoke(cli, ["pack", *given, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "dry run: no files were written" in shown.output
    assert "free disk space" in shown.output
    value = printed_json(cli, ["pack", *given, "--dry-run", "--json"])
    assert value["records"] == demo.records
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_refused_before_anything_is_written(
    build: Any, tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"messages": TURNS}] * 50
    first = build(records)
    tars = {tar.name: tar.read_bytes() for tar in first.shards.glob("*.tar")}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert build(records).manifest == first.manifest.__class__.load(first.shards)  # nothing is left to write
    more = [*records, *records, *records]
    message = r"the tars need about [0-9.]+ KiB, but the file system of .*out has [0-9.]+ KiB free. .*`output_dir`"
    with pytest.raises(ConfigError, match=message):
        build(more, overwrite=True)
    assert {tar.name: tar.read_bytes() for tar in first.shards.glob("*.tar")} == tars
    settings: dict[str, Any] = {"inputs": tmp_path / "data.jsonl", "output_dir": tmp_path / "new", "seq_len": 256}
    with pytest.raises(ConfigError, match="the tars need about"):
        dry_run(PackOptions(**settings, tokenizer=tokenizer_dir))
    assert not (tmp_path / "new").exists()


def test_what_stops_a_run_stops_a_dry_run(build: Any, tmp_path: Path, tokenizer_dir: Path) -> None:
    build([{"messages": TURNS}])
    settings: dict[str, Any] = {"inputs": tmp_path / "data.jsonl", "tokenizer": tokenizer_dir, "workers": 1}
    with pytest.raises(ConfigError, match="contains shards of another run"):
        dry_run(PackOptions(**settings, output_dir=tmp_path / "out", seq_len=300))
    with pytest.raises(RejectLimitError, match=r"none of 1 records can be packed: 1 x overlong, e.g. line 1 of"):
        dry_run(PackOptions(**settings, output_dir=tmp_path / "new", seq_len=8))


def test_the_first_record_is_shown_with_what_is_not_used(tmp_path: Path, tokenizer_dir: Path) -> None:
    data = tmp_path / "d.jsonl"
    records = [{"question": "", "answer": ""}, {"question": "One?\nTwo?", "answer": "Three.", "source": "s"}]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = [str(data), "-o", str(tmp_path / "out"), "--seq-len", "512", "--tokenizer", str(tokenizer_dir)]
    arguments += ["--max-reject-rate", "0.5"]
    shown = CliRunner().invoke(cli, ["pack", *arguments, "--dry-run"], catch_exceptions=False).output
    assert "\n  user      One?\n            Two?\n  assistant Three.\n" in shown
    assert "fields not used: 1 x source" in shown
    assert not (tmp_path / "out").exists()
