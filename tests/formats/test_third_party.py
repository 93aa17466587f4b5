"""Packs of LLaVA-OneVision-1.5, -2 and LoongForge encode like packs that this package makes of the same records."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from energon_packed import (
    ChatEncoder,
    FormatError,
    PackedDataset,
    PackOptions,
    get_packed_loader,
    normalize,
    pack,
    steps_per_epoch,
)
from tests.conftest import Packer
from tests.internals import READ_ONLY, PackedFolder, ReportData, codec_of, make_nv_meta, open_sources, render_report
from tests.outside import write_llava_onevision2
from tests.processes import energon
from tests.sources.tars import conversations, picture, write_tar

Samples = dict[tuple[Any, ...], Any]


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """Records and the folder of their files: every format, several images, none, .npy files, fps, no placeholder."""
    root = tmp_path_factory.mktemp("records")
    found: list[dict[str, Any]] = []
    for number, kind in enumerate(("JPEG", "PNG", "GIF", "WEBP")):
        (root / f"{number}.{kind.lower()}").write_bytes(picture(number, 56 + 28 * number, kind))
        image = {"images": [f"{number}.{kind.lower()}"]}
        found.append({"messages": turns(f"<image>\nWhat is {kind}?", "A.", "And?", "No."), **image})
        found.append({"messages": turns(f"No placeholder in {kind}.", "Before the text."), **image})
        found.append({"messages": turns(f"Text {kind}", "only.")})
    found.append({"messages": turns("<image> or <image>?", "Both."), "images": ["0.jpeg", "1.png"], "fps": 2.0})
    np.save(root / "p.npy", np.add(np.indices((1, 4, 4)).reshape(3, -1).T, [7, 0, 0]))  # row by row, as its tools do
    found.append(
        {
            "messages": turns("Where is <image>?", "Here."),
            "images": ["0.jpeg"],
            "patch_positions": ["p.npy"],
            "timestamp_decimal": 2,
        }
    )
    return [{"id": f"r{i}", **record} for i, record in enumerate(found)], root


@pytest.fixture(scope="module")
def vision_encoder(tokenizer_dir: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(tokenizer_dir, image_processor="LlavaOnevision2Processor")


def encoded(path: Path, encoder: ChatEncoder) -> Samples:
    """Encoded samples by their texts and images."""
    dataset = PackedDataset(path, encoder)
    found: Samples = {}
    for number in range(len(dataset)):
        stored = [sample.conversation for sample in dataset.sample(number).stored_samples()]
        for conversation, sample in zip(stored, dataset[number], strict=True):
            key = (*(m.content for m in conversation.messages), *(image.read() for image in conversation.images))
            assert key not in found
            found[key] = sample
    return found


def test_third_party_packs_encode_like_the_source_records(
    records: tuple[list[dict[str, Any]], Path], vision_encoder: ChatEncoder, tmp_path: Path
) -> None:
    rows, root = records
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours = pack(PackOptions(inputs=[root / "data.jsonl"], output_dir=tmp_path / "ours", encoder=vision_encoder,
                            seq_len=512, workers=1))  # fmt: skip
    assert ours.manifest.packed == len(rows)
    theirs = write_llava_onevision2(tmp_path / "theirs", rows, root)
    before = {tar.name: tar.read_bytes() for tar in theirs.glob("*.tar")}
    with pytest.raises(FormatError, match=r"no \.info\.json; run energon-packed nv-meta"):
        next(iter(get_packed_loader(theirs, vision_encoder, seq_len=512, epochs=1, num_workers=0)))
    repaired = make_nv_meta(theirs)
    assert repaired.kept_split
    assert repaired.splits["train"] == sorted(before)
    assert {tar.name: tar.read_bytes() for tar in theirs.glob("*.tar")} == before
    expected, actual = encoded(tmp_path / "ours", vision_encoder), encoded(theirs, vision_encoder)
    assert set(actual) == set(expected)
    assert len(actual) == len(rows)
    for key, sample in expected.items():
        for name in ("input_ids", "labels", "position_ids", "pixel_values", "image_grid_thw", "patch_positions"):
            want, got = getattr(sample, name), getattr(actual[key], name)
            assert (want is None) == (got is None)
            assert want is None or torch.equal(torch.as_tensor(want), torch.as_tensor(got)), name
    batches = list(get_packed_loader(theirs, vision_encoder, seq_len=512, epochs=1, num_workers=0))
    assert sum(batch.num_samples for batch in batches) == len(rows)
    packs = len(PackedDataset(theirs, vision_encoder))
    assert steps_per_epoch(theirs, world_size=2) == packs // 2
    assert packs % 2 == 0
    for command in ("info", "lint"):
        done = energon(command, theirs)
        assert done.returncode == 0, done.stderr


def test_third_party_packs_are_inputs_before_and_after_nv_meta(
    records: tuple[list[dict[str, Any]], Path], vision_encoder: ChatEncoder, tmp_path: Path
) -> None:
    rows, root = records
    theirs = write_llava_onevision2(tmp_path / "theirs", rows, root)

    def packed(name: str) -> list[bytes]:
        result = pack(PackOptions(inputs=[theirs], output_dir=tmp_path / name, encoder=vision_encoder, seq_len=512,
                                  workers=1, shard_prefix="x"))  # fmt: skip
        assert (result.manifest.packed, result.manifest.rejects) == (len(rows), {})
        return [tar.read_bytes() for tar in result.shards.glob("*.tar")]

    before = packed("before")
    make_nv_meta(theirs)
    assert packed("after") == before


def test_reports_count_datasets_without_a_manifest(
    records: tuple[list[dict[str, Any]], Path], vision_encoder: ChatEncoder, tmp_path: Path
) -> None:
    rows, root = records
    theirs = write_llava_onevision2(tmp_path / "theirs", rows, root)
    make_nv_meta(theirs)
    plain = ReportData(PackedFolder.open(theirs), None)
    assert plain.is_counted
    assert plain.manifest.seq_len == plain.manifest.tokens == 0
    images = sum(len(row.get("images", ())) for row in rows)
    assert (plain.manifest.packed, plain.manifest.images, plain.packs) == (len(rows), images, -(-len(rows) // 4))
    measured = ReportData(PackedFolder.open(theirs), vision_encoder)
    assert measured.manifest.seq_len == max(pack.tokens for pack in measured.measured) > 0
    lengths = [vision_encoder.length(normalize(row, image_root=str(root))) for row in rows]
    assert sorted(n for pack in measured.measured for n in pack.lengths) == sorted(lengths)
    for data in (plain, measured):
        page = render_report("theirs", data)
        assert "packed by a third-party tool" in page
        assert "utilization" not in page


@pytest.mark.parametrize("media", ["copy", "reference"])
def test_counts_of_a_dataset_without_its_manifest_are_those_of_the_manifest(
    pack_demo: Packer, tmp_path: Path, media: str
) -> None:
    result = pack_demo(media=media, max_packs_per_shard=3)
    copy = shutil.copytree(result.shards, tmp_path / "copy")
    (copy / ".nv-meta" / "packing.json").unlink()
    counted, manifest = ReportData(PackedFolder.open(copy), None).manifest, result.manifest
    same = ("packs", "packed", "tokens", "images", "videos", "audios")
    assert [getattr(counted, name) for name in same] == [getattr(manifest, name) for name in same]
    shards = [
        [(s.name, s.split, s.packs, s.samples, s.tokens, s.bytes) for s in m.shards] for m in (counted, manifest)
    ]
    assert shards[0] == shards[1]
    lengths = [sum(pack.lengths) for pack in ReportData(PackedFolder.open(result.shards), None).measured]
    assert counted.seq_len == max(lengths) > lengths[-1]
    assert counted.utilization == round(manifest.tokens / (manifest.packs * max(lengths)), 6)


def test_tokens_are_not_counted_if_a_pack_has_no_lengths(
    records: tuple[list[dict[str, Any]], Path], pack_demo: Packer, tmp_path: Path
) -> None:
    rows, root = records
    theirs = write_llava_onevision2(tmp_path / "theirs", rows, root)
    ours = pack_demo().manifest
    shutil.copy(pack_demo().shards / ours.shards[0].name, theirs / "z.tar")  # after their tars
    make_nv_meta(theirs)
    counted = ReportData(PackedFolder.open(theirs), None).manifest
    assert counted.packed == len(rows) + ours.shards[0].samples
    assert (counted.tokens, counted.utilization) == (0, 0)


JPEG = picture(1)


@pytest.mark.parametrize(
    ("value", "members", "counts"),
    [
        # LLaVA-OneVision-1.5: paths in the json, KEY.img{k}.jpg
        ({"images": ["/a/x.jpg", "/y.jpg"], "prompts": ["p", "q"], "captions": ["a", "b"]}, ["img0", "img1"], [1, 1]),
        # `auto_pipe.sh` for single questions: one list for all, taken for one sample
        ({"images": ["img000.jpg", "img001.jpg"], "prompts": ["p", "q"], "captions": ["a", "b"], "sample_count": 1},
         ["img0_0", "img0_1"], [1, 1]),
        # LoongForge's packed_captioning: one list of all images; placeholders say whose they are
        ({"images": ["img0.jpg", "img1.jpg", "img2.jpg"], "prompts": [["<image><image>p"], ["t"], ["<image>q"]],
          "captions": [["a"], ["b"], ["c"]]}, ["img0", "img1", "img2"], [2, 0, 1]),
        ({"images": [["x.jpg"], []], "prompts": [["p"], ["q"]], "captions": [["a"], ["b"]],
          "patch_positions": [[""], []], "fps": [[30], None]}, ["img0_0"], [1, 0]),
        # placeholders that do not match: all images before the first turn, as its trainer puts them
        ({"images": [["x.jpg", "y.jpg"]], "prompts": [["<image>p", "q"]], "captions": [["a", "b"]]},
         ["img0_0", "img0_1"], [2]),
    ],
)  # fmt: skip
def test_names_without_a_member_are_resolved_by_position(
    value: dict[str, Any], members: list[str], counts: list[int]
) -> None:
    contents = [picture(number) for number in range(len(members))]
    raw = {"__key__": "k", "json": value} | {f"{m}.jpg": c for m, c in zip(members, contents, strict=True)}
    samples = codec_of(raw).read(raw)
    assert [len(sample.conversation.images) for sample in samples] == counts
    assert [image.data for sample in samples for image in sample.conversation.images] == contents
    assert [sample.conversation.messages[0].content.count("<image>") for sample in samples] == counts
    assert [sample.conversation.fps for sample in samples][:1] == [30.0 if "fps" in value else None]
    for one in members:
        broken = {part: content for part, content in raw.items() if part != f"{one}.jpg"}
        with pytest.raises(FormatError, match="k names .*, which is not in the tar"):
            codec_of(broken).read(broken)


def test_images_without_matching_placeholders_precede_the_first_turn() -> None:
    value = {"images": [["a.jpg", "a.jpg"]], "prompts": [["<image>\n\np", "q"]], "captions": [["a\n", "b"]]}
    raw = {"__key__": "k", "json": {**value, "timestamp_decimal": [2]}, "a.jpg": JPEG}
    (sample,) = codec_of(raw).read(raw)
    said = [message.content.replace("<image>", "") for message in sample.conversation.messages]
    assert [text.strip("\n") for text in said] == ["p", "a", "q", "b"]
    assert said[1] == "a\n"
    assert sample.conversation.messages[0].content == "<image><image>p"
    assert sample.conversation.timestamp_decimal == 2


def test_a_string_counts_as_a_list_of_one_turn_or_name() -> None:
    """A text is no list of characters, a name no list of files; a name may have dots, and an image its positions."""
    value = {
        "images": ["cat.v2.jpg", ["x.jpg"], None], "prompts": ["What is it?", ["And it?"], None],
        "captions": ["A cat.", ["Two cats."], "A text."], "patch_positions": [["p.npy"], [""], None],
    }  # fmt: skip
    raw = {"__key__": "k", "json": value, "cat.v2.jpg": JPEG, "img1_0.jpg": JPEG, "p.npy": b"positions", "a.txt": b"-"}
    samples = codec_of(raw).read(raw)
    assert [[image.name for image in sample.conversation.images] for sample in samples] == [
        ["cat.v2.jpg"],
        ["img1_0.jpg"],
        [],
    ]
    assert [image.extension for sample in samples for image in sample.conversation.images] == ["jpg", "jpg"]
    assert [[file.data for file in sample.conversation.patch_positions] for sample in samples] == [
        [b"positions"],
        [],
        [],
    ]
    assert [[message.content for message in sample.conversation.messages] for sample in samples[:2]] == [
        ["<image>What is it?", "A cat."],
        ["<image>And it?", "Two cats."],
    ]
    raw["cat.v2.jpg"] = Image.new("RGB", (2, 2))
    with pytest.raises(FormatError, match=r"k\.cat\.v2\.jpg came as Image; set `decoder: null` in dataset\.yaml"):
        codec_of(raw).read(raw)


def test_loongforge_needs_conversations_and_media_files() -> None:
    chat = READ_ONLY["LoongForge.PackedChatMixSample"]
    assert chat.matches({"json": {"media_files": [[]], "messages": [{"conversations": []}, {"messages": []}]}})
    for other in (
        {"messages": [{"messages": []}]},
        {"media_files": [[]], "messages": [{"role": "user", "content": "?"}]},
        {"media_files": [[]], "messages": ["messages"]},
        {"media_files": [[]]},
    ):
        assert not chat.matches({"json": other})
    with pytest.raises(FormatError, match=r"PackedChatMixSample is read, not written; write PackedMultiMixQASample"):
        chat.write([])


def test_fps_may_be_a_list_a_number_or_absent() -> None:
    value = {"images": [["a.jpg"]] * 4, "prompts": [["<image>"]] * 4, "captions": [["A."]] * 4}
    raw = {"__key__": "k", "json": {**value, "fps": [[30], 24, None, []]}, "a.jpg": JPEG}
    assert [sample.conversation.fps for sample in codec_of(raw).read(raw)] == [30, 24, None, None]


def test_members_of_loongforge_are_recognized_by_name() -> None:
    codec = READ_ONLY["LoongForge.PackedMultiMixQASample"]
    assert [codec.part_filter(part) for part in ("json", "s000_cat.jpg", "txt", "img0_0.jpg")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"images": ["a.jpg"], "prompts": ["p", "q"], "captions": ["a", "b"]},
         "k lists 1 images in one list for 2 samples with 0 <image> placeholders"),
        ({"images": [["a.jpg"]], "prompts": ["p", "q"], "captions": ["a", "b"]},
         "k lists the images of 1 samples, but has 2"),
        ({"images": [], "prompts": ["p"], "captions": ["a", "b"]}, "k has 1 prompts for 2 captions"),
        ({"prompts": ["p", "q"], "captions": ["a", "b"], "ids": ["1"]}, "k has 1 ids for 2 captions"),
        ({"prompts": ["p"], "captions": ["a"], "ids": {"x": 1}}, "k is damaged, .*ids is dict, not list"),
        ({"prompts": ["p"], "captions": ["a"], "ids": ["1"], "image_settings": [[{"max_pixels": 3}]], "images": [[]]},
         "k is damaged"),
        ({"prompts": ["p"], "captions": ["a"], "fps": [2.0, 2.0]}, "k has 2 fps for 1 captions"),
        ({"media_files": [["a.mp4"]], "texts": {"prompts": ["p"], "captions": ["a"]}, "media_type": "video"},
         "k is a LoongForge pack of media_type 'video'"),
        ({"media_files": [[]], "texts": {"prompts": ["p"], "captions": []}, "media_type": "text"},
         "k has 1 prompts for 0 captions"),
        ({"media_files": [[], []], "texts": {"prompts": ["p"], "captions": ["a"]}, "media_type": "text"},
         "k has media_files of 2 samples, but 1 samples"),
        ({"media_files": [[]], "texts": {"prompts": [["p", "q"]], "captions": [["a"]]}, "media_type": "text"},
         "sample 0 of k has 2 prompts for 1 captions"),
        ({"media_files": [], "messages": [{"messages": []}], "media_type": "text"}, "sample 0 of k: "),
    ],
)  # fmt: skip
def test_ambiguous_packs_are_refused_with_their_key(value: dict[str, Any], message: str) -> None:
    raw = {"__key__": "k", "json": value, "a.jpg": JPEG}
    with pytest.raises(FormatError, match=message):
        codec_of(raw).read(raw)


def loongforge_members(kind: str) -> list[tuple[str, Any]]:
    """Two packs as its `construct_native_packed_sample` writes them."""
    meta = {"pack_id": "pack_0", "sample_ids": ["a", "b"], "token_lens": [9, 9], "total_token_len": 18}
    first, second = turns("<image>\nWhat?", "A cat.", "Sure?", "Yes."), turns("<image>\nWhere?", "Here.")
    files = [["s000_cat.one.jpg"], ["s001_dog.png"]]
    if kind == "packed_multi_mix_qa":
        asked = [[turn["content"] for turn in turns_of[:2]] for turns_of in (first, second)]
        value = {"texts": {"prompts": [p for p, _ in asked], "captions": [[c] for _, c in asked]}}
    else:
        value = {"messages": [{"messages": first, "source": {"x": 1}}, {"messages": second, "name": ["y.png"]}]}
    value |= {"media_files": files, "media_type": "image", "_meta": meta}
    pictures = [("pack_0.s000_cat.one.jpg", JPEG), ("pack_0.s001_dog.png", picture(2, kind="PNG"))]
    return [("pack_0.json", value), *pictures]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("packed_multi_mix_qa", "PackedMultiMixQASample"), ("packed_chat_mix", "PackedChatMixSample")],
)
def test_loongforge_packs_are_recognized_by_content(
    kind: str, name: str, vision_encoder: ChatEncoder, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    (folder / ".nv-meta").mkdir(parents=True)
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        f"__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors:\n  sample_type: {kind}\n"
    )
    write_tar(folder / "pretrain-000000.tar", loongforge_members(kind))
    read = conversations(open_sources([str(folder)], work_dir=tmp_path / "work"))
    assert make_nv_meta(folder).sample_class == f"LoongForge.{name}"
    rounds = 1 if kind == "packed_multi_mix_qa" else 2
    assert [(c.id, len(c.messages), c.images[0].read()) for c in read] == [
        ("a", 2 * rounds, JPEG), ("b", 2, picture(2, kind="PNG"))
    ]  # fmt: skip
    batch = next(iter(get_packed_loader(folder, vision_encoder, seq_len=512, epochs=1, num_workers=0)))
    assert batch.num_samples == 2
    expected = [vision_encoder.encode(c).input_ids for c in read]
    assert torch.equal(batch.input_ids[0], torch.as_tensor(np.concatenate(expected)))


def test_an_image_that_only_pillow_recognizes_is_read(tmp_path: Path, vision_encoder: ChatEncoder) -> None:
    out = io.BytesIO()
    Image.new("P", (56, 56)).save(out, "GIF")
    value = {"images": [["img000_sub000.jpg"]], "prompts": [["What?"]], "captions": [["Black."]], "sample_count": 1}
    raw = {"__key__": "k", "json": value, "img0_0.jpg": out.getvalue()}
    sample = codec_of(raw).read(raw)[0]
    assert sample.conversation.images[0].name == "img0_0.jpg"
    assert vision_encoder.encode(sample.conversation).image_grid_thw is not None
