"""`pack` with video files: every stage keeps the frames that were selected, and the bytes depend on nothing else."""

import io
import json
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megatron.energon import WorkerConfig, get_loader, get_val_dataset
from PIL import Image
from rich.console import Console

from energon_packed import (
    ChatEncoder,
    ConfigError,
    DataChangedError,
    EncodedSample,
    MediaReference,
    PackedDataset,
    PackOptions,
    PackResult,
    Progress,
    RecordError,
    RejectLimitError,
    SourceError,
    get_packed_loader,
    materialize,
    normalize,
    pack,
)
from tests.conftest import FLAVORS
from tests.internals import (
    ShardReader,
    codec_for,
    codec_of,
    complete_parts,
    dry_run,
    measure_stage,
    result_table,
    video_file,
)
from tests.pipeline.test_adversity import unstable_record
from tests.pipeline.undisturbed import contents
from tests.printed import invoke
from tests.processes import energon, energon_packed, run_python
from tests.shards.test_media_yaml import cooker as cooker
from tests.shards.test_media_yaml import read
from tests.storage import Store
from tests.video_corpus import pictures
from tests.video_demo import VideoDemo
from tests.videos import make_video, write_video, wrong_bytes

FIXED = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


@pytest.fixture(scope="session")
def data(video_demo: VideoDemo) -> VideoDemo:
    return video_demo


def tars(result: PackResult) -> dict[str, bytes]:
    return {tar.name: tar.read_bytes() for tar in sorted(result.shards.glob("*.tar"))}


def stored(result: PackResult) -> list[Any]:
    """All stored samples."""
    reader = ShardReader(sorted(result.shards.glob("*.tar")))
    raws = [complete_parts(reader[index]) for index in range(len(reader))]
    return [sample for raw in raws for sample in codec_of(raw).read(raw)]


def bodies(result: PackResult) -> set[bytes]:
    """Content of all video files."""
    return {video.file.data for sample in stored(result) for video in sample.conversation.videos}


def records(data: VideoDemo) -> dict[str, dict[str, Any]]:
    found = {}
    for line in data.jsonl.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found[record.get("id")] = record
    return found


def equal(left: EncodedSample, right: EncodedSample) -> bool:
    """Whether tokens, labels, positions and pixels are equal."""
    names = ("input_ids", "labels", "position_ids", *FIXED)
    return all(_same(getattr(left, name), getattr(right, name)) for name in names)


def _same(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right
    return np.array_equal(np.asarray(left), np.asarray(right))


def test_the_manifest_and_the_reports_count_videos_and_frames(data: VideoDemo) -> None:
    result = data.packed()
    manifest = result.manifest
    samples = stored(result)
    frames = [video.frames for sample in samples for video in sample.conversation.videos]
    assert (manifest.videos, manifest.frames) == (len(frames), sum(len(f.indices) for f in frames))
    assert manifest.videos >= 9
    table = pq.read_table(result.lengths)
    by_id = {sample.conversation.id: len(sample.conversation.videos) for sample in samples}
    assert {row["id"]: row["num_videos"] for row in table.to_pylist() if row["status"] == "packed"} == by_id
    shown = energon_packed("lengths", data.jsonl, "--tokenizer", data.tokenizer, "--workers", 1)
    assert f" tokens; {manifest.videos} videos with {manifest.frames} selected frames\n" in shown.stdout


@pytest.mark.parametrize(
    ("options", "check"),
    [
        ({}, "checked by packets"),
        ({"check_media": "full"}, "checked by decoding"),
        ({"extract_frames": True}, "checked by decoding the selected frames"),
    ],
)
def test_the_table_says_how_videos_were_checked(data: VideoDemo, options: dict[str, Any], check: str) -> None:
    console = Console(width=120, file=io.StringIO())
    result = data.packed(**options)
    console.print(result_table(result, None, {}))
    assert isinstance(console.file, io.StringIO)
    assert re.search(rf"  {check} +│ +{result.manifest.videos} │", console.file.getvalue())


def test_the_size_of_extracted_frames_is_estimated_from_some_of_them(data: VideoDemo, tmp_path: Path) -> None:
    """The size decides the cuts of the shards, and whether the disk is too small."""
    written = data.packed(extract_frames=True).bytes
    options = data.options(tmp_path / "out", extract_frames=True)
    planned = dry_run(PackOptions(inputs=(str(data.jsonl),), **options)).num_bytes
    assert 0.85 < planned / written < 1.15
    make_video(tmp_path / "a.mp4", frames=200)
    file, options = write_jsonl(tmp_path, [record("a", "a.mp4")]), options | {"seq_len": 4096}
    assert 0.85 < dry_run(PackOptions(inputs=(str(file),), **options)).num_bytes / pack(file, **options).bytes < 1.15


def test_data_without_videos_has_no_trace_of_them(data: VideoDemo, tmp_path: Path) -> None:
    lines = [json.dumps(record) for record in records(data).values() if "video" not in json.dumps(record)]
    file = data.jsonl.with_name("images.jsonl")
    file.write_text("\n".join(lines))
    result = pack(file, **data.options(tmp_path / "out"))
    manifest = result.manifest
    assert (manifest.packed > 10, manifest.videos, manifest.frames) == (True, 0, 0)
    columns = ["source", "row", "line", "id", "length", "num_images", "status", "pack", "sample", "shard"]
    assert pq.read_table(result.lengths).column_names == columns
    assert not list(tmp_path.rglob("*.frames"))
    (chunk,) = tmp_path.glob("out/.work/measure-*/*.arrow")
    assert not [name for name in pa.ipc.open_file(chunk).schema.names if "video" in name or "frame" in name]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_loaders_decode_the_frames_that_were_measured(data: VideoDemo, flavor: str) -> None:
    result = data.packed(sample_class=flavor, unpacked=flavor == "MultiMixQASample")
    dataset = PackedDataset(result.shards, data.encoder)
    samples = [sample for index in range(len(dataset)) for sample in dataset[index]]
    assert sum(sample.pixel_values_videos is not None for sample in samples) >= 9
    for sample in samples:
        conversation = normalize(records(data)[sample.id], image_root=str(data.jsonl.parent))
        assert equal(sample, data.encoder.encode(conversation)), sample.id
    loader = get_packed_loader(result.shards, data.encoder, epochs=1, num_workers=0)
    by_id = {sample.id: sample for sample in samples}
    read = []
    for batch in loader:
        for sample, ident in zip(batch.split(), batch.ids, strict=True):
            read.append(ident)
            assert _same(sample.input_ids, by_id[ident].input_ids), ident
            assert _same(sample.pixel_values_videos, by_id[ident].pixel_values_videos), ident
    assert sorted(read) == sorted(by_id)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_raw_bytes_of_videos_reach_energons_own_loader(data: VideoDemo, flavor: str) -> None:
    """Energon's default decoder would make an AVDecoder of the file."""
    result = data.packed(sample_class=flavor, unpacked=flavor == "MultiMixQASample")
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_val_dataset(result.shards, split_part="train", worker_config=config, batch_size=None)
    found = {}
    for sample in get_loader(dataset):
        for one in sample.stored_samples():
            found[one.conversation.id] = [(video.file.data, video.frames) for video in one.conversation.videos]
    assert found == {
        s.conversation.id: [(v.file.data, v.frames) for v in s.conversation.videos] for s in stored(result)
    }
    assert sum(map(len, found.values())) == result.manifest.videos > 0
    for command in ("info", "lint", "preview"):
        done = energon(command, result.shards)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert "Error" not in done.stdout + done.stderr


def test_bytes_depend_on_no_worker_and_no_engine(data: VideoDemo, tmp_path: Path) -> None:
    expected = tars(data.packed())
    assert tars(pack(data.jsonl, **data.options(tmp_path / "3", workers=3))) == expected
    # A second plan with the first measurements, and the first plan again.
    again = pack(data.jsonl, **data.options(tmp_path / "3", seq_len=700, overwrite=True))
    assert again.manifest.counters["measured"] == 0
    assert tars(again) != expected
    back = pack(data.jsonl, **data.options(tmp_path / "3", overwrite=True))
    assert (back.manifest.counters["measured"], tars(back)) == (0, expected)
    parts = [pack(data.jsonl, **data.options(tmp_path / f"{i}", part=f"{i}/2")) for i in range(2)]
    assert sum(part.manifest.frames for part in parts) == data.packed().manifest.frames
    assert set().union(*map(bodies, parts)) == bodies(data.packed())


def test_another_plan_reads_no_video_to_select_frames(data: VideoDemo, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = pack(data.jsonl, **data.options(out, seq_len=700))
    (frames,) = out.glob(".work/measure-*/*.frames")
    content = frames.read_bytes()
    frames.write_bytes(content.replace(b'"fps":2.0', b'"fps":9.0'))  # of the same size
    again = pack(data.jsonl, **data.options(out, overwrite=True))
    assert (first.manifest.counters["measured"], again.manifest.counters["measured"]) == (30, 0)
    assert {video.frames.settings["fps"] for s in stored(again) for video in s.conversation.videos} == {9.0}
    frames.write_bytes(content[:-1])  # damaged: everything is measured again
    back = pack(data.jsonl, **data.options(out, overwrite=True, max_packs_per_shard=3))
    assert back.manifest.counters["measured"] == 30
    assert frames.read_bytes() == content


class _Replaces(Progress):
    """Replaces a video when a stage starts."""

    def __init__(self, stage: str, video: Path, frames: int) -> None:
        self.stage, self.video, self.frames = stage, video, frames

    def start(self, stage: str, total: int, unit: str) -> None:
        if stage == self.stage:
            make_video(self.video, frames=self.frames)


@pytest.mark.parametrize("media", ["copy", "reference"])
def test_a_video_that_is_replaced_during_a_run_stops_it(data: VideoDemo, tmp_path: Path, media: str) -> None:
    video = make_video(tmp_path / "a.mp4", frames=12)
    file = write_jsonl(tmp_path, [record("a", "a.mp4")])
    options = data.options(tmp_path / "out", media=media)
    with pytest.raises(SourceError, match=r"record 0 of .* changed since it was measured"):
        pack(file, **options, progress=_Replaces("write", video, 24))
    result = pack(file, **options)
    assert [v.frames.num_frames for sample in stored(result) for v in sample.conversation.videos] == [24]
    run = unstable_record(tmp_path, record("a", "a.mp4", "a.mp4"), record("a", "a.mp4"))
    with pytest.raises(SourceError, match=r"it has 1 videos, and had 2\); run again$"):
        pack(**data.options(tmp_path / "unstable", media=media), **run)


def record(ident: str, *videos: Any) -> dict[str, Any]:
    question = "<video>" * len(videos) + "What is shown?"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "A number."}]
    return {"id": ident, "messages": turns, "videos": list(videos)}


def write_jsonl(folder: Path, lines: list[dict[str, Any]]) -> Path:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL with local files, a tar with members, and a Parquet file with bytes."""
    folder = tmp_path_factory.mktemp("clips")
    kinds = [("libx264", "mp4"), ("libx264", "mkv"), ("libvpx", "webm"), ("mpeg4", "avi"), ("libx264", "ts")]
    kinds += [("libx264", "mov"), ("libx264", "flv")]
    made = [
        make_video(folder / f"{index}.{extension}", codec=codec, frames=20 + 4 * index)
        for index, (codec, extension) in enumerate(kinds)
    ]
    write_jsonl(folder, [record(f"file-{video.stem}", video.name) for video in made])
    with tarfile.open(folder / "members.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for video in made[:3]:
            text = json.dumps({"id": f"tar-{video.stem}", "messages": record("", "x")["messages"]}).encode()
            for name, content in ((video.name, video.read_bytes()), (f"{video.stem}.json", text)):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    rows = [
        {"id": f"bytes-{video.stem}-{copy}", "messages": record("", "x")["messages"], "videos": [video.read_bytes()]}
        for video in made[3:]
        for copy in range(2)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "bytes.parquet")
    return folder


def inputs(folder: Path) -> list[str]:
    return [str(folder / name) for name in ("data.jsonl", "members.tar", "bytes.parquet")]


@pytest.mark.parametrize("flavor", ["PackedCaptioningSample", "PackedTokensSample"])
def test_referenced_videos_equal_copied_videos(
    data: VideoDemo,
    clips: Path,
    tmp_path: Path,
    flavor: str,
    cooker: Any,
) -> None:
    options = {"sample_class": flavor, "split": {"train": 0.6, "val": 0.4}}
    copied = pack(inputs(clips), **data.options(tmp_path / "copied", **options))
    referenced = pack(inputs(clips), **data.options(tmp_path / "ref", media="reference", **options))
    assert (copied.manifest.videos, referenced.manifest.videos) == (18, 18)
    assert stored(referenced) == stored(copied)
    assert {video.file.extension for sample in stored(copied) for video in sample.conversation.videos} == {
        "mp4", "mkv", "webm", "avi", "ts", "mov", "flv"
    }  # fmt: skip
    assert referenced.manifest.media_stored["images"] == 4  # the rows of the table have each video twice
    assert sum(map(len, tars(referenced).values())) < sum(map(len, tars(copied).values())) / 2
    materialize(referenced.shards, tmp_path / "back")
    assert {
        name: content for name, content in contents(tmp_path / "back").items() if not name.endswith("packing.json")
    } == {
        name: content for name, content in contents(tmp_path / "copied").items() if not name.endswith("packing.json")
    }
    for folder in (copied.shards, referenced.shards):
        done = energon_packed("verify", folder, "--tokenizer", data.tokenizer)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "videos have the selected frames" in done.stdout
    # Energon alone, by the auxiliary datasets of media.yaml and the cooker of the page.
    samples = read(tmp_path / "ref" / "media.yaml", cooker.Encoder()).values()
    assert {body for sample in samples for body in sample.media.values()} <= bodies(copied)


def test_a_changed_video_is_named_and_a_moved_folder_is_declared(data: VideoDemo, clips: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(clips, old)
    result = pack(inputs(old), **data.options(tmp_path / "out", media="reference"))
    expected = stored(result)
    old.rename(new)
    with pytest.raises(DataChangedError, match=r"vid\d+_0\.\w+, a video of sample \d+ \((tar|file)-\d\), .* does not"):
        _read_all(PackedDataset(result.shards, data.encoder))
    moved = PackedDataset(result.shards, data.encoder, media_root={str(old): str(new)})
    assert len(_read_all(moved)) == len(expected)
    # The packs are an input, too: the new packs refer to the same files.
    repacked = pack(
        result.shards, **data.options(tmp_path / "again", media="reference", media_root={str(old): str(new)})
    )
    assert repacked.manifest.videos == result.manifest.videos
    assert not (tmp_path / "again" / "media").exists()
    files = {sample.conversation.id: sample.conversation.videos for sample in stored(repacked)}
    assert files == {sample.conversation.id: sample.conversation.videos for sample in expected}
    content = bytearray((new / "4.ts").read_bytes())
    content[-1] ^= 1
    (new / "4.ts").write_bytes(content)
    with pytest.raises(DataChangedError, match=r"\(file-4\), is not the packed video: .*4\.ts has other bytes"):
        _read_all(PackedDataset(result.shards, data.encoder, media_root={str(old): str(new)}))
    done = energon_packed("verify", result.shards, "--tokenizer", data.tokenizer, "--media-root", f"{old}={new}")
    assert done.returncode == 1
    assert "4.ts has other bytes" in done.stdout


def _read_all(dataset: PackedDataset) -> list[EncodedSample]:
    return [sample for index in range(len(dataset)) for sample in dataset[index]]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_extracted_frames_have_the_tokens_of_the_file(data: VideoDemo, flavor: str, tmp_path: Path) -> None:
    options = {"sample_class": flavor, "unpacked": flavor == "MultiMixQASample"}
    files, frames = data.packed(**options), data.packed(extract_frames=True, **options)
    assert frames.manifest.extract_frames
    assert frames.manifest.frames == files.manifest.frames
    assert not [part for part in _parts(frames) if re.fullmatch(r"vid\d+_\d+\.\w+", part)]
    assert (
        len([part for part in _parts(frames) if re.fullmatch(r"vid\d+_\d+_\d+\.jpg", part)]) == frames.manifest.frames
    )
    by_id = {sample.id: sample for sample in _read_all(PackedDataset(files.shards, data.encoder))}
    read = _read_all(PackedDataset(frames.shards, data.encoder))
    assert {sample.id for sample in read} == by_id.keys()
    for sample in read:
        other = by_id[sample.id]
        for name in ("input_ids", "labels", "position_ids", "video_grid_thw", "second_per_grid_ts", "pixel_values"):
            assert _same(getattr(sample, name), getattr(other, name)), (sample.id, name)
        if other.pixel_values_videos is not None:
            change = (sample.pixel_values_videos - other.pixel_values_videos).abs()
            assert 0 < change.mean() < 0.05, sample.id  # JPEG of quality 95
    done = energon_packed("verify", frames.shards, "--tokenizer", data.tokenizer)
    assert done.returncode == 0, done.stdout + done.stderr
    # The packs are an input, whose frames are not encoded again.
    again = pack(frames.shards, **data.options(tmp_path / "again", **options))
    before = {sample.conversation.id: sample.conversation.videos for sample in stored(frames)}
    assert {sample.conversation.id: sample.conversation.videos for sample in stored(again)} == before


@pytest.mark.parametrize("extract_frames", [False, True])
def test_tokens_keep_the_order_of_images_and_frames_that_are_images(
    data: VideoDemo, tmp_path: Path, extract_frames: bool
) -> None:
    for name, count in (("a.mp4", 12), ("b.mp4", 20)):
        make_video(tmp_path / name, frames=count)
    Image.new("RGB", (64, 48), "red").save(tmp_path / "red.png")
    Image.new("RGB", (64, 48), "blue").save(tmp_path / "blue.png")
    texts = ["<video>and<image>", "<image><video>", "<video><image>then<video><image>", "<image><image><video><video>"]
    lines = [
        {
            "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}],
            "videos": ["a.mp4", "b.mp4"][: text.count("<video>")],
            "images": ["red.png", "blue.png"][: text.count("<image>")],
            "id": text,
        }
        for text in texts
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    options = data.options(tmp_path, seq_len=4096, image_processor="LlavaOnevision2Processor", workers=1)
    encoder = ChatEncoder.from_pretrained(data.tokenizer, image_processor="LlavaOnevision2Processor")

    def read(name: str, source: Path, flavor: str) -> tuple[Path, dict[str | None, EncodedSample]]:
        changes = {"output_dir": tmp_path / name, "sample_class": flavor, "extract_frames": extract_frames}
        shards = pack(source, **(options | changes)).shards
        return shards, {sample.id: sample for sample in _read_all(PackedDataset(shards, encoder))}

    _, expected = read("text", file, "PackedCaptioningSample")
    tokens, read_tokens = read("tokens", file, "PackedTokensSample")
    _, read_again = read("again", tokens, "PackedTokensSample")
    assert expected.keys() == set(texts)
    for name, sample in expected.items():
        assert equal(read_tokens[name], sample), name
        assert equal(read_again[name], sample), name


def test_token_records_with_images_and_videos_of_unknown_order_are_rejected(data: VideoDemo, tmp_path: Path) -> None:
    encoder = ChatEncoder.from_pretrained(data.tokenizer, image_processor="LlavaOnevision2Processor")
    make_video(tmp_path / "a.mp4", frames=12)
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    record = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "images": ["a.png"], "videos": ["a.mp4"]}
    (measured,) = encoder.measure([normalize(record, image_root=tmp_path)])
    assert measured.reject is not None
    assert (measured.reject.reason.value, "order is unknown" in measured.reject.detail) == ("unsupported_media", True)


def test_extracted_frames_are_loaded_without_a_decoder(data: VideoDemo) -> None:
    result = data.packed(extract_frames=True)
    code = (
        "import sys; sys.modules['av'] = None; from energon_packed import *;"
        "data = PackedDataset(sys.argv[1], ChatEncoder.from_pretrained(sys.argv[2]));"
        "print(sum(s.pixel_values_videos is not None for i in range(len(data)) for s in data[i]))"
    )
    done = run_python(code, result.shards, data.tokenizer)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len([sample for sample in stored(result) if sample.conversation.videos])


def _parts(result: PackResult) -> list[str]:
    reader = ShardReader(sorted(result.shards.glob("*.tar")))
    return [member.part for pack in range(len(reader)) for member, _ in reader.members(pack, only=())]


def test_a_damaged_frame_costs_one_sample_and_no_pack(data: VideoDemo, tmp_path: Path) -> None:
    """The header and the packets of the file are valid, and its frames are not."""
    good = make_video(tmp_path / "good.mp4", frames=60)
    wrong_bytes(tmp_path / "bad.mp4", good.read_bytes())
    file = write_jsonl(tmp_path, [record("good", "good.mp4"), record("bad", "bad.mp4")])
    assert pack(file, **data.options(tmp_path / "by-header")).manifest.packed == 2
    for options in ({"extract_frames": True}, {"check_media": "full"}):
        result = pack(file, **data.options(tmp_path / next(iter(options)), **options))
        assert [sample.conversation.id for sample in stored(result)] == ["good"], options
        assert [json.loads(line)["id"] for line in result.rejects.read_text().splitlines()] == ["bad"]


def test_full_and_verify_compare_with_sequential_decoding(
    data: VideoDemo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that starts at every keyframe returns other frames of H.264 with intra refresh."""
    options = {"preset": "medium", "x264-params": "intra-refresh=1:keyint=30"}
    write_video(tmp_path / "a.mp4", pictures(90, 64, 48, 1), options=options)
    file = write_jsonl(tmp_path, [record("a", "a.mp4")])
    settings = {"num_frames": 4, "workers": 1}
    good = pack(file, **data.options(tmp_path / "good", check_media="full", **settings))
    assert good.manifest.packed == 1
    assert invoke("verify", good.shards).exit_code == 0
    monkeypatch.setattr(video_file.Starts, "is_start", lambda self, packet: packet.is_keyframe)
    assert "differs if decoding starts at a keyframe" in invoke("verify", good.shards).output.replace("\n", " ")
    with pytest.raises(RejectLimitError, match="a frame 45 that differs if decoding starts at a keyframe; convert it"):
        pack(file, **data.options(tmp_path / "bad", check_media="full", **settings))


@pytest.mark.parametrize("flavor", ["PackedCaptioningSample", "PackedTokensSample"])
@pytest.mark.parametrize("media", ["copy", "reference"])
def test_a_damaged_frame_is_an_error_with_pack_sample_and_file(
    data: VideoDemo, tmp_path: Path, flavor: str, media: str
) -> None:
    good = make_video(tmp_path / "good.mp4", frames=60)
    bad = wrong_bytes(tmp_path / "bad.mp4", good.read_bytes())
    file = write_jsonl(tmp_path, [record("a", "good.mp4"), record("b\nc", "bad.mp4")])
    result = pack(file, **data.options(tmp_path / "out", sample_class=flavor, media=media))
    file_of = rf"vid1_0\.mp4 \({re.escape(str(bad))}\)" if media == "reference" else r"vid1_0\.mp4"
    named = rf"sample b\\nc of pack \w+: {file_of} has damaged data"
    tar = re.escape(str(next(result.shards.glob("*.tar"))))
    with pytest.raises(RecordError, match=rf"{tar}, pack 0 of its split: {named}.*--check-media full"):
        _read_all(PackedDataset(result.shards, data.encoder))
    options = {"epochs": 1, "num_workers": 1, "shuffle": False}
    with pytest.raises(RecordError, match=rf"{tar}, pack \w+: {named}.*--check-media full"):
        list(get_packed_loader(result.shards, data.encoder, **options))
    loader = get_packed_loader(result.shards, data.encoder, max_failures=1, **options)
    assert sum(batch.num_samples for batch in loader) == 1
    done = energon_packed("verify", result.shards)
    assert done.returncode == 1
    listed = rf"✗ videos have the selected frames.*\n.*sample b\nc: corrupt_video: {file_of} has"
    assert re.search(listed, done.stdout)
    assert done.stdout.count("✗") == 1
    assert "packing.json has" not in done.stdout
    assert "with --check-media full" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"frames": 24}, "vid0_0.avi has 24 frames of 48 x 64 pixels, and 20 of 48 x 64 were selected from"),
        ({"frames": 20, "fps": 7}, "the frames of vid0_0.avi have other times than the selected frames"),
    ],
)
def test_verify_finds_other_frames(data: VideoDemo, tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    make_video(tmp_path / "a.avi", codec="mjpeg", frames=20)
    make_video(tmp_path / "b.avi", codec="mjpeg", **change)
    file = write_jsonl(tmp_path, [record("a", "a.avi")])
    result = pack(file, **data.options(tmp_path / "out"))
    (sample,) = stored(result)
    file = MediaReference(data=(tmp_path / "b.avi").read_bytes(), extension="avi")
    (video,) = sample.conversation.videos
    conversation = replace(sample.conversation, videos=(replace(video, file=file),))
    _rewrite(result, [replace(sample, conversation=conversation)])
    done = energon_packed("verify", result.shards)
    assert done.returncode == 1
    assert problem in done.stdout


def _rewrite(result: PackResult, samples: list[Any]) -> None:
    """Replace the only pack of a dataset."""
    (tar,) = result.shards.glob("*.tar")
    with tarfile.open(tar) as old:
        key = old.getnames()[0].split(".")[0]
    with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as new:
        for part, content in codec_for("PackedCaptioningSample").write(samples):
            member = tarfile.TarInfo(f"{key}.{part}")
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    assert energon_packed("nv-meta", result.shards).returncode == 0


def test_videos_that_no_pack_can_have_are_rejected(
    data: VideoDemo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_video(tmp_path / "small.mp4", frames=4)
    large = make_video(tmp_path / "large.avi", codec="ffv1", frames=40)
    file = write_jsonl(tmp_path, [record("small", "small.mp4"), record("large", "large.avi")])
    monkeypatch.setattr(measure_stage, "MOST_BYTES", large.stat().st_size - 1)
    result = pack(file, **data.options(tmp_path / "out"))
    (reject,) = [json.loads(line) for line in result.rejects.read_text().splitlines()]
    assert (reject["id"], reject["reason"]) == ("large", "unsupported_media")
    assert re.fullmatch(
        r"large.avi has [\d,]+ bytes, and packs have files of at most [\d,]+; set `extract_frames`, or cut the video",
        reject["detail"],
    )
    extracted = pack(file, **data.options(tmp_path / "frames", extract_frames=True))
    assert (extracted.manifest.packed, extracted.manifest.videos) == (2, 2)


def test_combinations_that_cannot_work_are_refused(data: VideoDemo, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`extract_frames` must be False with `media` 'reference'"):
        PackOptions(
            inputs=(str(data.jsonl),), **data.options(tmp_path / "out", extract_frames=True, media="reference")
        )
    make_video(tmp_path / "a.mp4", frames=4)
    file = write_jsonl(tmp_path, [record("a", "a.mp4"), record("b")])
    result = pack(file, **data.options(tmp_path / "out", layout="llava-onevision2"))
    reasons = {json.loads(line)["id"]: json.loads(line)["detail"] for line in result.rejects.read_text().splitlines()}
    assert "reads images only; omit `layout` for records with videos or audio" in reasons["a"]


@pytest.mark.parametrize("flavor", ["PackedCaptioningSample", "PackedTokensSample"])
def test_truncation_removes_no_part_of_a_video(data: VideoDemo, tmp_path: Path, flavor: str) -> None:
    make_video(tmp_path / "a.mp4", frames=10)
    first, second = record("", "a.mp4")["messages"], [{"role": "assistant", "content": "word " * 200}]
    lines = [
        {"id": "kept", "messages": [*first[:1], *second], "videos": ["a.mp4"]},
        {"id": "cut", "messages": [{"role": "user", "content": "Why?"}, *second, *first], "videos": ["a.mp4"]},
    ]
    options = data.options(tmp_path / "out", sample_class=flavor, seq_len=100, overlong="truncate")
    result = pack(write_jsonl(tmp_path, lines), **options)
    (reject,) = [json.loads(line) for line in result.rejects.read_text().splitlines()]
    assert (reject["id"], reject["reason"]) == ("cut", "overlong")
    assert reject["detail"].endswith("truncation to 100 would remove part of a video")
    (sample,) = _read_all(PackedDataset(result.shards, data.encoder))
    assert (sample.id, len(sample), sample.pixel_values_videos is None) == ("kept", 100, False)


def test_audio_tracks_are_counted_and_not_used(data: VideoDemo, tmp_path: Path) -> None:
    make_video(tmp_path / "a.mp4", frames=10, audio=True)
    make_video(tmp_path / "b.mp4", frames=10)
    file = write_jsonl(tmp_path, [record("a", "a.mp4", "a.mp4"), record("b", "b.mp4")])
    result = pack(file, **data.options(tmp_path / "out"))
    assert result.manifest.notes == {"audio track of a video: not used": 1}
    assert result.manifest.packed == 2


def test_samples_of_videos_share_rows_with_their_kind(data: VideoDemo) -> None:
    result = data.packed(group_by="media", sample_class="PackedMultiMixQASample")
    reader = ShardReader(sorted(result.shards.glob("*.tar")))
    for pack_index in range(len(reader)):
        kinds = {sample.conversation.kind for sample in codec_of(reader[pack_index]).read(reader[pack_index])}
        assert len(kinds) == 1
    assert "video" in {sample.conversation.kind for sample in stored(result)}


def test_shards_are_cut_by_the_bytes_of_videos(data: VideoDemo, clips: Path, tmp_path: Path) -> None:
    limit = 60_000
    options = {"max_shard_bytes": limit, "seq_len": 200, "max_packs_per_shard": 1000, "overlong": "drop"}
    for name, more in (("files", {}), ("frames", {"extract_frames": True})):
        result = pack(inputs(clips)[:1], **data.options(tmp_path / name, **options, **more))
        sizes = [shard.bytes for shard in result.manifest.shards]
        packs = [shard.packs for shard in result.manifest.shards]
        assert len(sizes) > 1, name
        assert all(size <= limit + 10_240 or count == 1 for size, count in zip(sizes, packs, strict=True)), name


def test_videos_in_an_object_store_equal_those_of_local_files(data: VideoDemo, store: Store, tmp_path: Path) -> None:
    store.put_folder("clips", data.jsonl.parent)
    local = data.packed()
    expected = _read_all(PackedDataset(local.shards, data.encoder))
    copied = pack(store.url("clips/data.jsonl"), **data.options(tmp_path / "copied"))
    assert tars(copied) == tars(local)
    referenced = pack(store.url("clips/data.jsonl"), **data.options(tmp_path / "refs", media="reference"))
    assert not any(b"ftyp" in content for content in tars(referenced).values())
    for place in (referenced.shards, store.put_folder("out", tmp_path / "refs") + "/webdataset"):
        read = _read_all(PackedDataset(place, data.encoder))
        assert all(equal(left, right) for left, right in zip(read, expected, strict=True))
