"""`inspect` shows the contents of any tar, and agrees with the loader token by token."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import Result

from energon_packed import ChatEncoder, PackOptions, get_packed_loader, pack
from tests.conftest import FLAVORS, Packer
from tests.inspection.datasets import METADATASET_V2
from tests.internals import CHATML_TEMPLATE
from tests.printed import invoke
from tests.shards.test_repair import llava_pack, write_tar


def run(*arguments: object) -> Result:
    return invoke("inspect", *arguments)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_tokens_labels_and_positions_equal_the_batch_of_the_loader(
    pack_demo: Packer, encoder: ChatEncoder, flavor: str
) -> None:
    folder = pack_demo(sample_class=flavor, max_packs_per_shard=3).shards
    batches = list(get_packed_loader(folder, encoder, epochs=1, num_workers=0, shuffle=False))
    batch = batches[4]
    (key,) = batch.__key__
    result = run(folder, "--pack", key, "--tokens", "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row["token"] for row in rows] == batch.input_ids[0].tolist()
    assert [row["label"] for row in rows] == batch.labels[0].tolist()
    assert [row["position"] for row in rows] == batch.position_ids.reshape(-1, len(rows)).T.tolist()
    starts = [rows[bound]["segment"] for bound in batch.cu_seqlens[:-1].tolist()]
    assert starts == list(range(batch.num_samples))
    assert {row["key"] for row in rows} == {key}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_dataset_and_a_pack_are_shown_with_their_counts(pack_demo: Packer, flavor: str) -> None:
    result = pack_demo(sample_class=flavor, max_packs_per_shard=8)
    shown = run(result.shards.parent)
    assert shown.exit_code == 0, shown.output
    assert f"{result.manifest.packed:,} samples in {result.manifest.packs:,} packs" in shown.output
    assert "pack_00000000" in shown.output
    value = json.loads(run(result.shards, "--pack", "pack_00000002", "--json").output)
    assert value["sample_class"] == flavor
    assert value["sample_count"] == len(value["samples"]) > 0
    assert value["tokens"] == sum(sample["length"] for sample in value["samples"])
    assert value["samples"][0]["start"] == 0
    images = [image for sample in value["samples"] for image in sample["images"]]
    assert all(image["width"] > 0 and value["parts"][image["name"]] == image["bytes"] for image in images)
    missing = run(result.shards, "--pack", "pack_99999999")
    assert "no pack has the key 'pack_99999999'" in str(missing.exception)


def test_third_party_tars_are_shown_without_a_manifest(tmp_path: Path, tokenizer_dir: Path) -> None:
    tar = tmp_path / "foreign.tar"
    write_tar(tar, llava_pack("ps_0", ["red", "green"]))
    shown = run(tar)
    assert shown.exit_code == 0, shown.output
    assert "ps_0  PackedCaptioningSample  2 samples, lengths not recorded" in shown.output
    assert "56 x 84" in shown.output
    assert "It is green." in shown.output
    assert "lengths not recorded" in shown.output
    assert "no packing.json with a tokenizer. Pass `tokenizer`" in str(run(tar, "--tokens").exception)
    assert "What" in run(tar, "--tokens", "--tokenizer", tokenizer_dir).output
    assert len([json.loads(line) for line in run(tar, "--json").output.splitlines()]) == 2  # no line is a note


def test_the_first_tars_of_a_folder_are_listed(tmp_path: Path) -> None:
    for number in range(22):
        write_tar(tmp_path / f"{number:02}.tar", llava_pack(f"ps_{number}", ["red"]))
    shown = run(tmp_path, "--limit", 0).output
    assert shown.count(".tar: 1 packs") == 20
    assert "and 2 more tars\n" in shown


def test_damaged_and_unknown_tars_are_shown_with_the_problem(tmp_path: Path, pack_demo: Packer) -> None:
    content = next(pack_demo(max_packs_per_shard=3).shards.glob("*.tar")).read_bytes()
    cut = tmp_path / "cut.tar"
    cut.write_bytes(content[: len(content) // 2])
    shown = run(cut)
    assert "truncated inside" in shown.output
    assert "pack_0000000" in shown.output  # what is left can be seen
    assert "cut.tar: truncated inside pack_0000000" in str(shown.exception)  # after the packs, with exit status 1
    assert run(cut, "--limit", 100).exit_code == 1
    strange = tmp_path / "strange.tar"
    write_tar(strange, [("a.img0.jpg", b"x"), ("a.json", b'{"captions": [["c"]], "images": [["img0.jpg"]]}')])
    assert "img0.jpg  <1 bytes>: not an image that Pillow can read" in run(strange).output
    write_tar(strange, [("a.pic.jpg", b"x"), ("a.json", b'{"captions": [["c"]]}')])
    assert "with the unknown part 'pic.jpg'; remove dots from keys and name images" in run(strange).output
    write_tar(strange, [("a.json", b'{"what": 1}')])
    assert "matches no known flavor: its json has the keys what" in str(run(strange).exception)
    write_tar(strange, [("a.txt", b"x")])
    assert "a matches no known flavor: it has no json part" in str(run(strange).exception)
    other = tmp_path / "other.tar"
    other.write_bytes(b"x" * 3000)
    for damaged in (cut, other):
        done = run(damaged, "--json", "--limit", 0)
        assert json.loads(done.output)["problems"]
        assert str(done.exception).startswith(str(damaged))
    assert "is not an uncompressed tar file" in run(other).output
    records = other.rename(tmp_path / "data.jsonl")
    assert "got records. Use energon-packed lengths" in str(run(records).exception)


def test_a_missing_shard_is_a_problem_of_its_dataset(tmp_path: Path, pack_demo: Packer) -> None:
    folder = shutil.copytree(pack_demo(max_packs_per_shard=3).shards, tmp_path / "webdataset")
    first, *others = sorted(folder.glob("*.tar"))
    first.unlink()
    problem = f"{first} cannot be opened: No such file or directory"
    shown = run(first.parent)
    assert f"✗ {problem}" in shown.output
    assert str(shown.exception).startswith(problem)
    lines = [json.loads(line) for line in run(first.parent, "--json", "--limit", 0).output.splitlines()]
    assert [(line["tar"], bool(line["problems"])) for line in lines] == [
        (str(first), True),
        *[(str(tar), False) for tar in others],
    ]
    assert run(others[0]).exit_code == 0  # of this tar


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    value = {"images": [[]], "prompts": [["\x1b[2J[red]hi"]], "captions": [["\x07ok"]], "sample_count": 1}
    write_tar(tmp_path / "x.tar", [("a.json", json.dumps(value).encode())])
    shown = run(tmp_path / "x.tar").output
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert "\\x1b[2J" in shown
    assert "\\x07ok" in shown
    assert "[red]hi" in shown


def test_brackets_in_names_are_not_markup(tmp_path: Path) -> None:
    folder = tmp_path / "[red]run[" / "[/b]"
    folder.mkdir(parents=True)
    write_tar(folder / "x.tar", llava_pack("ps_0", ["red"]))
    (folder / "broken.tar").write_bytes(b"x" * 3000)
    assert "[red]run[/[/b]/broken.tar is not an uncompressed tar file" in run(folder).output
    (folder / "broken.tar").unlink()
    shown = run(folder)
    assert shown.exit_code == 0, shown.output
    assert "[red]run[/[/b]/x.tar: 1 packs" in shown.output


def test_tool_calls_tabs_and_joined_emoji_are_shown(tokenizer_dir: Path, tmp_path: Path) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "weather?\n\tin Oslo \U0001f408\u200d\u2b1b"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3C"},
        {"role": "assistant", "content": "Cold."},
    ]
    record = {"id": "t", "messages": messages, "tools": [{"name": "get_weather"}]}
    (tmp_path / "d.jsonl").write_text(json.dumps(record))
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_dir, folder)
    (folder / "chat_template.jinja").write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML_TEMPLATE)
    for flavor in ("PackedMultiMixQASample", "MultiMixQASample"):
        options = {"inputs": (str(tmp_path / "d.jsonl"),), "seq_len": 512, "workers": 1, "sample_class": flavor}
        out = tmp_path / flavor
        result = pack(PackOptions(tokenizer=folder, output_dir=out, **options))  # type: ignore[arg-type]
        shown = run(result.shards).output.replace("\n[", "[")  # lines are wrapped
        assert 'tools     [{"type":"function","function":{"name":"get_weather"}}]' in shown
        assert 'tool_calls: [{"function":{"name":"get_weather","arguments":{"city":"Oslo"}}}]' in shown
        assert "\U0001f408\u200d\u2b1b" in shown
        assert "\\t" not in shown
        value = json.loads(run(result.shards, "--pack", f"{flavor}_00000000", "--json").output)
        assert value["samples"][0]["turns"][2]["extra"] == {"tool_calls": [call]}


def test_a_metadataset_is_shown_with_unreadable_datasets(pack_demo: Packer, tmp_path: Path) -> None:
    shards = pack_demo(max_packs_per_shard=3).shards
    mix = tmp_path / "mix.yaml"
    entries = f"      - {{path: {shards}, weight: 3}}\n      - {{path: gone, weight: 1}}\n"
    mix.write_text(f"{METADATASET_V2}splits:\n  train:\n    blend:\n{entries}")
    shown = run(mix)
    assert shown.exit_code == 1
    assert "gone, which does not exist" in shown.output  # beside the dataset that can be read
    assert shown.output.count("│ train │") == 2
    assert "gone, which does not exist" in str(shown.exception)
    mix.write_text(f"{METADATASET_V2}splits:\n  train:\n    blend:\n      - {{path: {shards}, weight: 3}}\n")
    assert "Use --pack with one of its datasets" in run(mix, "--pack", "x").output
    assert "Use --tokens and --extract with one of its datasets" in run(mix, "--tokens").output
    entry = json.loads(run(mix, "--json").output)
    assert (entry["share"], entry["times"], entry["mode"]) == (1.0, 1.0, "weight")
    mix.write_text("- 1\n")
    assert "mix.yaml is not a Metadataset that Energon can read" in str(run(mix).exception)
