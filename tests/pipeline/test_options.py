"""What each option of a build does."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from rich.console import Console

from energon_packed import (
    ChatEncoder,
    ConfigError,
    EncoderSettings,
    LoaderOptions,
    PackResult,
    RejectLimitError,
    SourceConfig,
)
from tests.conftest import Packer
from tests.internals import (
    DemoDataset,
    ShardReader,
    cli,
    result_table,
    view_pack,
)
from tests.pipeline.test_conservation import packed_samples

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello. " * 30}]


def rejects(result: PackResult) -> list[tuple[str, str]]:
    return [(r["reason"], r["detail"]) for r in map(json.loads, result.rejects.open())]


def test_overlong_is_dropped_named_and_counted(build: Any) -> None:
    long = {"prompts": ["Go on."], "captions": ["word " * 400]}
    result = build([{"messages": TURNS}, long], max_reject_rate=1)
    assert [reason for reason, _ in rejects(result)] == ["overlong"]
    assert "tokens, more than seq_len 256" in rejects(result)[0][1]
    assert pq.read_table(result.lengths)["length"].to_pylist()[1] > 256


def test_overlong_may_be_an_error(build: Any) -> None:
    long = {"prompts": ["Go on."], "captions": ["word " * 400]}
    with pytest.raises(RejectLimitError, match=r"record data:1 of .* is rejected: overlong: .*'error'\); raise"):
        build([{"messages": TURNS}, long], overlong="error")


@pytest.mark.parametrize(
    "flavor", ["PackedCaptioningSample", "PackedMultiMixQASample", "PackedTokensSample", "MultiMixQASample"]
)
def test_overlong_may_be_cut(build: Any, encoder: ChatEncoder, demo: DemoDataset, flavor: str) -> None:
    image = next(str(p) for p in (demo.jsonl.parent / "images").glob("*.png"))
    records = [
        {"id": "short", "messages": TURNS},
        {"id": "cut", "prompts": ["Go on."], "captions": ["word " * 400]},
        {"id": "no target left", "prompts": ["word " * 400], "captions": ["Yes."]},
        {"id": "image cut", "images": [image], "prompts": ["word " * 300 + "<image>"], "captions": ["Yes."]},
    ]
    options = {"sample_class": flavor, "image_root": Path("/"), "max_reject_rate": 1}
    result = build(records, overlong="truncate", **options)
    assert {reason for reason, _ in rejects(result)} == {"no_supervised_tokens", "overlong"}
    lengths = {n: len(ids) for samples in packed_samples(result.shards, encoder).values() for n, ids, _ in samples}
    assert set(lengths) == {"short", "cut"}
    assert lengths["cut"] == 256
    assert result.manifest.tokens == sum(lengths.values())
    rows = {row["id"]: row for row in pq.read_table(result.lengths).to_pylist()}
    assert [rows[name]["status"] for name in ("short", "cut", "no target left")] == [
        "packed",
        "truncated",
        "no_supervised_tokens",
    ]
    assert (result.manifest.truncated, result.manifest.tokens_cut) == (1, rows["cut"]["length"] - 256)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(result_table(result, 1, {"world_size": 1, "micro_batch_size": 1, "num_workers": 0}))
    assert re.search(r"truncated\s+│\s+1 ", shown.get())
    reader = ShardReader(sorted(result.shards.glob("*.tar")))
    cut = {s.id: s.truncated_to for pack in range(len(reader)) for s in view_pack(reader[pack]).samples}
    assert cut == {"short": None, "cut": None if flavor == "PackedTokensSample" else 256}
    verified = CliRunner().invoke(cli, ["verify", str(result.shards)])
    assert verified.exit_code == 0, verified.output


def test_pad_multiple_leaves_room_for_padding(pack_demo: Packer, encoder: ChatEncoder) -> None:
    result = pack_demo(pad_multiple=16)
    for samples in packed_samples(result.shards, encoder).values():
        assert sum(-(-len(ids) // 16) * 16 for _, ids, _ in samples) <= 1024


def test_max_samples_per_pack(pack_demo: Packer, encoder: ChatEncoder) -> None:
    result = pack_demo(max_samples_per_pack=2)
    assert max(len(samples) for samples in packed_samples(result.shards, encoder).values()) == 2


def test_group_by_media_keeps_kinds_apart(pack_demo: Packer, encoder: ChatEncoder) -> None:
    result = pack_demo(group_by="media")
    kinds = [
        {bool((ids == encoder.image_token_id).any()) for _, ids, _ in samples}
        for samples in packed_samples(result.shards, encoder).values()
    ]
    assert all(len(kind) == 1 for kind in kinds)
    assert {True} in kinds
    assert {False} in kinds


def test_splits_share_the_packs(pack_demo: Packer) -> None:
    result = pack_demo(split={"train": 0.75, "val": 0.25}, max_packs_per_shard=3)
    manifest = result.manifest
    assert manifest.packs_in("train") == round(0.75 * manifest.packs)
    assert manifest.packs_in("train") + manifest.packs_in("val") == manifest.packs
    assert all(shard.packs <= 3 for shard in manifest.shards)
    assert len({shard.name for shard in manifest.shards}) == len(manifest.shards)


def test_shards_end_at_their_size(pack_demo: Packer) -> None:
    result = pack_demo(max_shard_bytes=300_000)
    assert len(result.manifest.shards) > 3
    assert all(s.bytes < 600_000 for s in result.manifest.shards if s.packs > 1)


def test_seed_changes_the_order_of_packs_only(pack_demo: Packer, encoder: ChatEncoder) -> None:
    orders = []
    for seed in (0, 1):
        packs = packed_samples(pack_demo(seed=seed).shards, encoder)
        orders.append([tuple(name for name, *_ in samples) for samples in packs.values()])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_patch_positions_are_stored_or_ignored(build: Any, tmp_path: Path, demo: DemoDataset) -> None:
    image = next(str(p) for p in (demo.jsonl.parent / "images").glob("*.png"))
    record = {"images": [image], "captions": ["c"], "patch_positions": ["none.npy"]}
    options = {"image_root": Path("/"), "max_reject_rate": 1}
    with pytest.raises(
        RejectLimitError, match=r"1 x missing_patch_positions, e.g. line 1 of .*`use_patch_positions=False`"
    ):
        build([record], **options)
    assert build([record], use_patch_positions=False, overwrite=True, **options).manifest.packed == 1


def test_what_a_flavor_cannot_hold_is_rejected_with_the_remedy(build: Any) -> None:
    records = [
        {"messages": TURNS},
        {"messages": [*TURNS, {"role": "tool", "content": "t"}]},
        {"messages": TURNS, "tools": [{"name": "f"}]},
        {"input_ids": [1, 2, 3]},
    ]
    found = rejects(build(records, max_reject_rate=1, sample_class="PackedCaptioningSample"))
    assert [reason for reason, _ in found] == ["bad_role", "bad_role", "missing_field"]
    assert all("set `sample_class` to Packed" in detail for _, detail in found)
    # What is left is a matter of the template, which has no place for tools.
    others = rejects(build(records, sample_class="PackedMultiMixQASample", overwrite=True))
    assert [reason for reason, _ in others] == ["not_rendered"]


def test_too_many_rejects_stop_before_writing(build: Any, tmp_path: Path) -> None:
    records = [{"messages": TURNS}] * 8 + ["{broken"] * 2
    with pytest.raises(
        RejectLimitError, match=r"2 of 10 records \(20.0%\) .* `max_reject_rate` 0.05\): 2 x bad_json, e.g. line 9"
    ):
        build(records, max_reject_rate=0.05)
    assert not list((tmp_path / "out" / "webdataset").glob("*"))
    assert len((tmp_path / "out" / "rejects.jsonl").read_text().splitlines()) == 2
    assert build(records, max_reject_rate=0.2).manifest.packed == 8


def test_strict_stops_at_the_first(build: Any) -> None:
    with pytest.raises(RejectLimitError, match=r"rejected: bad_json.*`strict` stops at the first"):
        build([{"messages": TURNS}, "{broken"], strict=True, max_reject_rate=1)


def test_nothing_to_pack_is_an_error(build: Any) -> None:
    with pytest.raises(RejectLimitError, match="none of 0 records can be packed"):
        build([""])


def test_another_build_is_not_overwritten_by_accident(build: Any) -> None:
    records = [{"messages": TURNS}] * 5
    first = build(records)
    tar = next(first.shards.glob("*.tar")).read_bytes()
    with pytest.raises(ConfigError, match="contains shards of another run.*`overwrite`"):
        build(records, seq_len=512)
    assert next(first.shards.glob("*.tar")).read_bytes() == tar
    assert build(records, seq_len=512, overwrite=True).manifest.seq_len == 512


def test_another_seq_len_measures_nothing_again(build: Any) -> None:
    records = [{"messages": TURNS}] * 5
    assert build(records).manifest.counters.items() >= {"measured": 5, "tokenized": 5, "reused": 0}.items()
    again = build(records, seq_len=512, overwrite=True)
    assert again.manifest.counters.items() >= {"measured": 0, "tokenized": 0, "reused": 5}.items()
    fresh = build(records, seq_len=512, resume=False)
    assert fresh.manifest.counters.items() >= {"measured": 5, "tokenized": 5, "reused": 0}.items()


def test_a_changed_input_is_measured_again(build: Any) -> None:
    build([{"messages": TURNS}] * 5)
    changed = build([{"messages": TURNS}] * 6, overwrite=True)
    assert changed.manifest.counters["measured"] == 6


def test_an_image_removed_between_runs_is_missing_and_the_dataset_stays(
    build: Any, tmp_path: Path, demo: DemoDataset
) -> None:
    source = next((demo.jsonl.parent / "images").glob("*.png"))
    (tmp_path / "a.png").write_bytes(source.read_bytes())
    records = [{"images": ["a.png"], "captions": ["c"]}]
    shards = build(records).shards
    before = {path: path.read_bytes() for path in shards.rglob("*") if path.is_file()}
    (tmp_path / "a.png").unlink()
    for options in ({}, {"seq_len": 300, "overwrite": True}):
        with pytest.raises(
            RejectLimitError, match=r"1 x missing_image, e.g. line 1 of .*data.jsonl: /.*/a.png: No such"
        ):
            build(records, **options)
    assert {path: path.read_bytes() for path in shards.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "`seq_len` must be at least 1, got 0"),
        ({"sample_class": "Sample"}, "`sample_class` must be one of auto, PackedCaptioningSample"),
        ({"algorithm": "magic"}, "unknown algorithm 'magic'"),
        ({"shard_prefix": "a.b"}, "must be 1 to 64 letters, digits, '_' and '-', got 'a.b'"),
        ({"split": {"train": 0.5}}, "add up to 0.5"),
        ({"split": {"dev": 1.0}}, "unknown split dev"),
        ({"max_reject_rate": 2}, "between 0 and 1"),
        ({"pad_multiple": 512}, "`pad_multiple` must be at most `seq_len` 256, got 512"),
        ({"overlong": "keep"}, "`overlong` must be one of drop, error, truncate, split, got 'keep'"),
    ],
)
def test_options_are_checked_when_made(build: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build([{"messages": TURNS}], **options)


def test_the_default_flavor_is_the_one_that_holds_all_records(build: Any, tmp_path: Path) -> None:
    plain = [{"messages": TURNS}, {"text": "A story."}]
    assert build(plain, output_dir=tmp_path / "a").manifest.sample_class == "PackedCaptioningSample"
    talk = [*TURNS, {"role": "assistant", "content": "Once more."}]
    mixed = build([*plain, {"messages": talk}], output_dir=tmp_path / "b")
    assert (mixed.manifest.sample_class, mixed.manifest.rejects) == ("PackedMultiMixQASample", {})
    rejected = build([*plain, {"messages": [*talk, {"role": "alien", "content": "x"}]}], output_dir=tmp_path / "c")
    assert rejected.manifest.sample_class == "PackedCaptioningSample"  # what is rejected does not decide
    part = build(plain, output_dir=tmp_path / "d", part=(0, 1))
    assert part.manifest.sample_class == "PackedMultiMixQASample"  # parts are packed without knowing each other


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (EncoderSettings, {"los_on": "all"}, "unknown argument 'los_on'; did you mean `loss_on`?"),
        (LoaderOptions, {"num_worker": 2}, "unknown argument 'num_worker'; did you mean `num_workers`?"),
        (SourceConfig, {"path": "a", "wieght": 2}, "unknown argument 'wieght'; did you mean `weight`?"),
        (SourceConfig, {"weight": 2}, "missing required argument: `path`"),
    ],
)
def test_every_class_of_options_checks_names(cls: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        cls(**values)


def test_integers_of_numpy_are_integers() -> None:
    seed = LoaderOptions(seed=np.int64(5)).seed  # type: ignore[arg-type]
    assert (seed, type(seed)) == (5, int)
