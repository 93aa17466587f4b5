"""`nv-meta` on third-party folders: valid folders load, and errors name the faulty members."""

import io
import json
import re
import shutil
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from energon_packed import ChatEncoder, ConfigError, FormatError, PackedDataset, get_packed_loader
from tests.conftest import FLAVORS, Packer
from tests.internals import ShardReader, StoredTokens, cli, make_nv_meta, scan_tar
from tests.processes import energon

Members = list[tuple[str, bytes]]


def jpeg(colour: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (56, 84), colour).save(out, "JPEG")
    return out.getvalue()


def write_tar(path: Path, members: Members, *, style: int = tarfile.GNU_FORMAT) -> None:
    with tarfile.open(path, "w", format=style) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def llava_pack(key: str, colours: list[str]) -> Members:
    """A pack as LLaVA-OneVision-2 style packers write it: none of our keys, images before any prompt."""
    value = {
        "images": [[f"img{i}_0.jpg"] for i in range(len(colours))],
        "prompts": [[f"What colour is picture {i}?"] for i in range(len(colours))],
        "captions": [[f"It is {colour}."] for colour in colours],
        "sample_count": len(colours),
    }
    return [(f"{key}.json", json.dumps(value).encode())] + [
        (f"{key}.img{i}_0.jpg", jpeg(colour)) for i, colour in enumerate(colours)
    ]


def test_a_third_party_folder_is_repaired_and_loads(encoder: ChatEncoder, tmp_path: Path) -> None:
    for number in range(2):
        packs = [llava_pack(f"ps_{number}{i}", ["red", "green", "blue"][: i + 1]) for i in range(3)]
        write_tar(tmp_path / f"pretrain-{number}.tar", [member for pack in packs for member in pack])
    before = {tar: tar.read_bytes() for tar in tmp_path.glob("*.tar")}
    repaired = make_nv_meta(tmp_path)
    assert repaired.sample_class == "PackedCaptioningSample"
    assert [shard.packs for shard in repaired.shards] == [3, 3]
    assert all(tar.read_bytes() == content for tar, content in before.items())
    batches = list(get_packed_loader(tmp_path, encoder, seq_len=4096, epochs=1, num_workers=0))
    assert sorted(batch.num_samples for batch in batches) == [1, 1, 2, 2, 3, 3]
    assert all(batch.image_grid_thw.shape[0] == batch.num_samples for batch in batches)
    text = encoder.tokenizer.decode(batches[0].input_ids[0])
    assert "What colour is picture 0?" in text
    for arguments in (["info"], ["lint"]):
        done = energon(*arguments, tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flavor", FLAVORS)
def test_repairing_a_packed_folder_writes_the_same_files(pack_demo: Packer, flavor: str, tmp_path: Path) -> None:
    ours = pack_demo(sample_class=flavor, max_packs_per_shard=8, split={"train": 0.8, "val": 0.2}).shards
    shutil.copytree(ours, tmp_path / "copy")
    meta = tmp_path / "copy" / ".nv-meta"
    for gone in (meta / "dataset.yaml", meta / ".info.json", meta / "index.sqlite", *meta.parent.glob("*.idx")):
        gone.unlink()
    repaired = make_nv_meta(tmp_path / "copy")
    assert repaired.kept_split
    for path in [*ours.glob("*.tar.idx"), *(ours / ".nv-meta").iterdir()]:
        if path.name not in ("index.uuid", "index.sqlite"):  # made of hashes, which nobody has read; compared below
            assert path.read_bytes() == (tmp_path / "copy" / path.relative_to(ours)).read_bytes(), path.name
    for table in ("samples", "sample_parts"):
        rows = [
            sqlite3.connect(folder / ".nv-meta" / "index.sqlite").execute(f"SELECT * FROM {table}").fetchall()
            for folder in (ours, tmp_path / "copy")
        ]
        assert rows[0] == rows[1]


ONE = llava_pack("a", ["red"])
TWO = llava_pack("b", ["red"])


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            [("a.b.json", b"{}")],
            r"a\.b\.json: the key ends at the first dot, so it is 'a' with the unknown part 'b\.json'",
        ),
        ([*ONE, *TWO, ("a.img9_0.jpg", b"x")], r"a\.img9_0\.jpg is not adjacent to the other parts of a"),
        ([*ONE, ONE[0]], r"a\.json occurs twice"),
        ([("readme", b"x")], "readme has no key"),
        ([], "no members"),
        ([("a.json", b"{]")], "a is not a PackedCaptioningSample: .*the json part is damaged"),
        ([("a.json", b'{"captions": [["x"]], "images": [["gone.jpg"]]}')], "names gone.jpg, which is not in the tar"),
    ],
)
def test_faulty_members_are_named(tmp_path: Path, members: Members, message: str) -> None:
    write_tar(tmp_path / "x.tar", members)
    with pytest.raises(FormatError, match=rf"x\.tar: .*{message}"):
        make_nv_meta(tmp_path, "PackedCaptioningSample")
    assert not (tmp_path / ".nv-meta").exists()


def test_a_key_in_two_tars_and_a_cut_tar_are_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", ONE)
    write_tar(tmp_path / "y.tar", ONE)
    with pytest.raises(FormatError, match=r"key a is in x\.tar and in y\.tar"):
        make_nv_meta(tmp_path)
    content = (tmp_path / "x.tar").read_bytes()
    for size, message in ((600, "truncated inside a.json"), (1024, "no end-of-archive marker")):
        (tmp_path / "y.tar").write_bytes(content[:size])
        with pytest.raises(FormatError, match=rf"y\.tar: .*{message}"):
            make_nv_meta(tmp_path)
    (tmp_path / "y.tar").write_bytes(b"not a tar at all" * 100)
    with pytest.raises(FormatError, match=r"y\.tar is not an uncompressed tar file"):
        make_nv_meta(tmp_path)
    with pytest.raises(FormatError, match=r"contains no \.tar files"):
        make_nv_meta(tmp_path / "nothing")


@pytest.mark.parametrize("style", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_folders_are_indexed_as_energon_does(tmp_path: Path, style: int, encoder: Any) -> None:
    key = "folder/" + "long" * 30
    write_tar(tmp_path / "x.tar", [*llava_pack("a", ["red"]), *llava_pack(key, ["green"])], style=style)
    make_nv_meta(tmp_path)
    ours = (tmp_path / "x.tar.idx").read_bytes()
    assert [row for row in scan_tar(tmp_path / "x.tar").rows().keys] == ["a", key]
    (tmp_path / "x.tar.idx").unlink()
    done = energon("prepare", "--non-interactive", "--tar-index-only", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.tar.idx").read_bytes() == ours


def test_damage_in_the_middle_and_joined_tars_are_errors(tmp_path: Path) -> None:
    members = [member for i in range(4) for member in llava_pack(f"p{i}", ["red"])]
    write_tar(tmp_path / "x.tar", members)
    content = bytearray((tmp_path / "x.tar").read_bytes())
    third = scan_tar(tmp_path / "x.tar").rows().offsets[2]
    content[third + 148] ^= 1  # the check sum of a header
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(FormatError, match=rf"x\.tar: damaged header at byte {third}: its check sum is wrong"):
        make_nv_meta(tmp_path)
    write_tar(tmp_path / "x.tar", members[:2])
    (tmp_path / "x.tar").write_bytes((tmp_path / "x.tar").read_bytes() * 2)
    with pytest.raises(FormatError, match="or concatenated tars"):
        make_nv_meta(tmp_path)


def test_splits_and_exclusions_are_kept_and_a_stale_manifest_is_renamed(pack_demo: Packer, tmp_path: Path) -> None:
    ours = pack_demo(max_packs_per_shard=3, split={"train": 0.7, "val": 0.3}).shards
    shutil.copytree(ours, tmp_path / "copy")
    meta = tmp_path / "copy" / ".nv-meta"
    before = yaml.safe_load((meta / "split.yaml").read_text())
    gone = before["split_parts"]["train"].pop(0)
    before["exclude"] = [before["split_parts"]["train"][1], f"{before['split_parts']['train'][0]}/pack_00000004"]
    (tmp_path / "copy" / gone).unlink()
    write_tar(tmp_path / "copy" / "zz.tar", llava_pack("new", ["red"]))
    (meta / "split.yaml").write_text(yaml.safe_dump(before))
    repaired = make_nv_meta(tmp_path / "copy")
    assert (repaired.kept_split, repaired.dropped_manifest) == (False, True)
    after = yaml.safe_load((meta / "split.yaml").read_text())
    before["split_parts"]["train"].append("zz.tar")
    assert after == before
    assert not (meta / "packing.json").exists()
    assert not (tmp_path / "copy" / gone).with_suffix(".tar.idx").exists()
    with pytest.raises(ConfigError, match="excludes single packs, such as"):
        PackedDataset(tmp_path / "copy", StoredTokens())


def gathered(pack_demo: Packer, folder: Path) -> Path:
    """The tars of two outputs with train and val, without their .nv-meta."""
    folder.mkdir()
    for prefix in ("a", "b"):
        ours = pack_demo(max_packs_per_shard=3, shard_prefix=prefix, split={"train": 0.7, "val": 0.3}).shards
        for tar in ours.glob("*.tar"):
            shutil.copy(tar, folder)
    return folder


def test_shards_of_two_outputs_do_not_become_train(pack_demo: Packer, tmp_path: Path) -> None:
    folder = gathered(pack_demo, tmp_path / "both")
    before = sorted(path.name for path in folder.iterdir())
    message = r"`split` must be set for shards of several outputs of pack \(a, b\): no split.yaml lists"
    with pytest.raises(ConfigError, match=message):
        make_nv_meta(folder)
    assert sorted(path.name for path in folder.iterdir()) == before
    everything = make_nv_meta(folder, split={"train": 1.0}).splits
    assert everything == {"train": [name for name in before]}
    assert make_nv_meta(folder).kept_split  # split.yaml lists all of them
    split = yaml.safe_load((folder / ".nv-meta" / "split.yaml").read_text())
    split["split_parts"] = {"train": [n for n in before if n[0] == "a"][1:], "val": [before[0]], "test": []}
    (folder / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump(split))
    with pytest.raises(ConfigError, match=message):  # the other output was copied into the folder of the first
        make_nv_meta(folder)


def test_nv_meta_has_the_split_options_of_pack(pack_demo: Packer, tmp_path: Path) -> None:
    folder = gathered(pack_demo, tmp_path / "both")
    tars = sorted(path.name for path in folder.glob("*.tar"))
    drawn = []
    for seed in ("0", "0", "1"):
        done = CliRunner().invoke(
            cli, ["nv-meta", str(folder), "--split", "val=25,train=75", "--seed", seed, "--json"]
        )
        drawn.append(json.loads(done.stdout)["splits"])
        assert yaml.safe_load((folder / ".nv-meta" / "split.yaml").read_text())["split_parts"] == {
            **drawn[-1],
            "test": [],
        }
        assert sorted(drawn[-1]["train"] + drawn[-1]["val"]) == tars
        assert len(drawn[-1]["val"]) == round(len(tars) / 4)
    assert drawn[0] == drawn[1] != drawn[2]
    for value, message in (
        ("train=0.999,val=0.001", r"`split` must give each split at least one of \d+ shards, got val=0.001"),
        ("train=0.9", "the shares of `split` add up to 0.9"),
        ("train", "`split` must have the form"),
        ("dev=1", "unknown split dev"),
    ):
        done = CliRunner().invoke(cli, ["nv-meta", str(folder), "--split", value])
        assert isinstance(done.exception, ConfigError)
        assert re.match(message, str(done.exception))


def test_names_in_the_prefix_field_are_read_in_full(tmp_path: Path) -> None:
    key = "a" * 60 + "/" + "b" * 60
    write_tar(tmp_path / "x.tar", llava_pack(key, ["red"]), style=tarfile.USTAR_FORMAT)
    make_nv_meta(tmp_path)
    reader = ShardReader([tmp_path / "x.tar"])
    assert reader[0]["__key__"] == key
    assert set(reader.part(0, "json")) == {"__key__", "json"}


def test_missing_shards_of_split_yaml_are_refused(pack_demo: Packer, tmp_path: Path) -> None:
    ours = pack_demo(max_packs_per_shard=3, split={"train": 0.7, "val": 0.3}).shards
    shutil.copytree(ours, tmp_path / "copy")
    (tmp_path / "copy" / "pack-000001.tar").unlink()
    with pytest.raises(FormatError, match=r"1 of \d+ shards that are missing, such as pack-000001.tar\. Copy"):
        make_nv_meta(tmp_path / "copy")
    assert (tmp_path / "copy" / ".nv-meta" / "packing.json").exists()
