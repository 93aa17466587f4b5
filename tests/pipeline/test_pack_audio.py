"""Records with audio: packed, stored, checked, shown, and read again."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from energon_packed import (
    ChatEncoder,
    CostModel,
    DataChangedError,
    PackedDataset,
    PackResult,
    PaddingFreeCollator,
    SourceError,
    materialize,
    normalize,
    pack,
)
from tests.audio import TEXTS, qwen2_audio, signal, write
from tests.internals import ShardReader, cli, count_batch, folder_packs, write_speech, write_tokenizer
from tests.pipeline.test_adversity import unstable_record

CLASSES = ("PackedCaptioningSample", "PackedMultiMixQASample", "PackedTokensSample", "MultiMixQASample")


class Speech:
    """40 generated records, 6 of them invalid, and outputs of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        demo = write_speech(folder / "source", records=40, broken=6)
        self.jsonl = demo.jsonl
        self.tokenizer = write_tokenizer(folder / "tokenizer", [*demo.texts, *TEXTS], audio=True)
        file = self.tokenizer / "preprocessor_config.json"
        # Most of the time is features, which are computed for all seconds of this length.
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chunk_length": 10}))
        self.encoder = ChatEncoder.from_pretrained(self.tokenizer)
        self._packed: dict[str, PackResult] = {}

    def options(self, output_dir: Path, **changes: Any) -> dict[str, Any]:
        settings = {"seq_len": 400, "workers": 1, "shard_prefix": "s", "max_reject_rate": 1, "max_packs_per_shard": 3}
        return {"tokenizer": self.tokenizer, "output_dir": output_dir, **settings, **changes}

    def packed(self, **changes: Any) -> PackResult:
        name = json.dumps(changes, sort_keys=True)
        if name not in self._packed:
            out = self.folder / f"out-{len(self._packed)}"
            self._packed[name] = pack(self.jsonl, **self.options(out, **changes))
        return self._packed[name]


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return Speech(tmp_path_factory.mktemp("speech"))


def features(dataset: PackedDataset) -> dict[str, tuple[Any, ...]]:
    """Tokens, labels and features of each sample, by id."""
    found = {}
    for samples in dataset:
        for sample in samples:
            assert sample.audio_inputs is not None
            values = [sample.audio_inputs.values[name] for name in sorted(sample.audio_inputs.values)]
            found[str(sample.id)] = (sample.input_ids.tolist(), sample.labels.tolist(), *values)
    return found


def same(left: dict[str, tuple[Any, ...]], right: dict[str, tuple[Any, ...]]) -> bool:
    return left.keys() == right.keys() and all(
        a == b if isinstance(a, list) else torch.equal(a, b)
        for name in left
        for a, b in zip(left[name], right[name], strict=True)
    )


def test_every_record_is_packed_or_rejected_with_its_reason(speech: Speech) -> None:
    result = speech.packed()
    manifest = result.manifest
    assert manifest.rejects == {
        "audio_count_mismatch": 1, "missing_audio": 1, "corrupt_audio": 3, "unsupported_audio": 1
    }  # fmt: skip
    assert (manifest.records, manifest.packed, manifest.audios) == (40, 34, 34)
    lengths = pq.read_table(result.lengths).to_pylist()
    assert sum(row["num_audios"] for row in lengths if row["status"] == "packed") == 34
    seconds = 0.0
    for raw in ShardReader([result.shards / shard.name for shard in manifest.shards]):
        for files in json.loads(raw["json"])["audio_files"]:
            for file in files:
                assert raw[file["part"]]
                seconds += file["samples"] / file["rate"]
                assert (file["start"], file["samples"]) == (0, file["total"])
    assert abs(seconds - manifest.audio_seconds) < 0.04


@pytest.mark.parametrize("flavor", CLASSES)
def test_loaders_encode_what_the_records_have(flavor: str, speech: Speech) -> None:
    dataset = PackedDataset(speech.packed(sample_class=flavor).shards, speech.encoder)
    found = features(dataset)
    expected = {}
    for line in speech.jsonl.read_text().splitlines():
        if json.loads(line).get("id") in found:
            conversation = normalize(json.loads(line), image_root=str(speech.jsonl.parent))
            sample = speech.encoder.encode(conversation)
            assert sample.audio_inputs is not None
            values = [sample.audio_inputs.values[name] for name in sorted(sample.audio_inputs.values)]
            expected[str(conversation.id)] = (sample.input_ids.tolist(), sample.labels.tolist(), *values)
    assert len(expected) == 34
    assert same(found, expected)


def tars(result: PackResult) -> list[bytes]:
    return [(result.shards / shard.name).read_bytes() for shard in result.manifest.shards]


def test_workers_and_restarts_change_no_byte(speech: Speech, tmp_path: Path) -> None:
    before = speech.packed()
    assert tars(pack(speech.jsonl, **speech.options(tmp_path / "a", workers=2))) == tars(before)
    out = speech.options(tmp_path / "a")
    again = pack(speech.jsonl, **{**out, "overwrite": True})
    assert tars(again) == tars(before)
    planned = pack(speech.jsonl, **{**out, "seq_len": 600, "overwrite": True, "max_reject_rate": 1})
    assert planned.manifest.counters["measured"] == 0 or planned.manifest.rejects  # rejected files are tried again


@pytest.mark.parametrize("flavor", CLASSES[:3])
def test_references_are_read_like_copies(flavor: str, speech: Speech, tmp_path: Path) -> None:
    copy = speech.packed(sample_class=flavor)
    referenced = speech.packed(sample_class=flavor, media="reference")
    assert referenced.bytes < copy.bytes / 3
    found = features(PackedDataset(referenced.shards, speech.encoder))
    assert same(found, features(PackedDataset(copy.shards, speech.encoder)))
    materialize(referenced.shards, tmp_path / "copied")
    names = [shard.name for shard in copy.manifest.shards]
    assert [(tmp_path / "copied" / "webdataset" / name).read_bytes() for name in names] == tars(copy)


def test_changed_files_of_references_are_found(speech: Speech, tmp_path: Path) -> None:
    shutil.copytree(speech.folder / "source", tmp_path / "source")
    result = pack(tmp_path / "source/data.jsonl", **speech.options(tmp_path / "out", media="reference"))
    file = tmp_path / "source/audio/00001.wav"
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(
        DataChangedError, match=r"aud\d_0.wav, an audio file of sample .* is not the packed audio file"
    ):
        features(PackedDataset(result.shards, speech.encoder))
    done = CliRunner().invoke(cli, ["verify", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "referenced audio files are unchanged" in done.output


@pytest.mark.parametrize("changes", [{}, {"sample_class": "PackedTokensSample"}, {"media": "reference"}])
def test_verify_accepts_and_finds_other_samples(changes: dict[str, str], speech: Speech) -> None:
    result = speech.packed(**changes)
    done = CliRunner().invoke(cli, ["verify", str(result.shards.parent)])
    assert done.exit_code == 0, done.output
    assert "audio files decode to the packed samples" in done.output
    assert "34 audio files" in done.output


def test_verify_finds_an_audio_file_of_other_samples(speech: Speech, tmp_path: Path) -> None:
    """A stored clip has another number of samples than its file."""
    shutil.copytree(speech.packed().shards.parent, tmp_path / "out")
    tar = next((tmp_path / "out/webdataset").glob("*.tar"))
    data = tar.read_bytes()
    at = data.index(b'"total":')
    tar.write_bytes(data[: at + 8] + b"9" + data[at + 9 :])
    done = CliRunner().invoke(cli, ["verify", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "✗ audio files decode to the packed samples" in done.output
    assert "Hz were packed" in " ".join(done.output.split())


def test_inspect_shows_duration_rate_and_tokens(speech: Speech) -> None:
    out = str(speech.packed().shards.parent)
    done = CliRunner().invoke(cli, ["inspect", out, "--pack", "s_00000000", "--tokenizer", str(speech.tokenizer)])
    assert done.exit_code == 0, done.output
    line = next(line for line in done.output.splitlines() if "aud0_0." in line and " s, " in line)
    assert " Hz, " in line
    assert " tokens, " in line
    shown = json.loads(CliRunner().invoke(cli, ["inspect", out, "--pack", "s_00000000", "--json"]).output)
    audio = shown["samples"][0]["audios"][0]
    assert audio["seconds"] == audio["total_seconds"] > 0
    assert audio["problem"] is None


def test_samples_of_a_kind_share_rows(speech: Speech, tmp_path: Path) -> None:
    lines = speech.jsonl.read_text().splitlines()
    text = [json.dumps({"id": f"t{i}", "prompts": ["hello"], "captions": ["world " * 9]}) for i in range(30)]
    (tmp_path / "mixed.jsonl").write_text("\n".join([*lines, *text]) + "\n")
    options = speech.options(tmp_path / "out", image_root=str(speech.jsonl.parent), group_by="media")
    result = pack(tmp_path / "mixed.jsonl", **options)
    rows = [row for row in pq.read_table(result.lengths).to_pylist() if row["status"] == "packed"]
    kinds: dict[str, set[bool]] = {}
    for row in rows:
        kinds.setdefault(row["pack"], set()).add(row["num_audios"] > 0)
    assert all(len(kind) == 1 for kind in kinds.values())
    assert {frozenset(kind) for kind in kinds.values()} == {frozenset({True}), frozenset({False})}
    done = CliRunner().invoke(cli, ["verify", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output


def test_audio_counts_in_the_cost_of_a_row(speech: Speech, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file has the positions of 10 s in the encoder of Qwen2-Audio, 500, as in the batch."""
    out, audios = speech.packed(), []
    dataset = PackedDataset(out.shards, speech.encoder)
    for index, samples in enumerate(dataset):
        batch = PaddingFreeCollator().collate(samples)
        audios.append(sum(batch.num_audios))
        counted = count_batch(batch).read()
        assert (counted.patches, counted.patch_squares) == (500 * audios[-1], 500**2 * audios[-1])
        assert counted.tokens == dataset.lengths[index]
    assert 0 < min(audios) < max(audios)
    sizes = dataset.row_sizes()
    assert sizes.patches.tolist() == [500 * count for count in audios]
    assert sizes.patch_squares.tolist() == [500**2 * count for count in audios]
    monkeypatch.setattr(folder_packs, "_MAX_WITH_MEDIA", 1)
    assert np.array_equal(PackedDataset(out.shards, speech.encoder).row_sizes().patches, sizes.patches)  # by the mean
    assert CostModel(token=0, square=0, patch=1).costs(sizes).tolist() == sizes.patches.tolist()


def test_audio_in_cells_and_in_json_is_stored(speech: Speech, tmp_path: Path) -> None:
    """Columns of Hugging Face datasets, and base64 of OpenAI; references store it once in `out/media`."""
    file = write(tmp_path / "a", "flac", signal(16_000, 16_000), 16_000)
    other = write(tmp_path / "b", "mp3", signal(20_000, 16_000), 16_000)
    rows = [
        {"id": "cell", "audio": {"bytes": file.read_bytes(), "path": "a.flac"}, "text": "hello"},
        {"id": "again", "audio": {"bytes": file.read_bytes(), "path": None}, "text": "world"},
        {"id": "mp3", "audio": {"bytes": other.read_bytes(), "path": "b.mp3"}, "text": "said"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    content = [
        {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(file.read_bytes()).decode(), "format": "flac"},
        },
        {"type": "text", "text": "What?"},
    ]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"id": "json", "messages": turns}) + "\n")
    inputs = [str(tmp_path / "data.parquet"), str(tmp_path / "data.jsonl")]
    copy = pack(inputs, **speech.options(tmp_path / "copy"))
    referenced = pack(inputs, **speech.options(tmp_path / "reference", media="reference"))
    assert copy.manifest.packed == 4
    assert referenced.manifest.media_stored["images"] == 2
    members = {name for raw in ShardReader(sorted((tmp_path / "reference/media").glob("*.tar"))) for name in raw}
    assert {"flac", "mp3"} <= members
    assert same(
        features(PackedDataset(copy.shards, speech.encoder)),
        features(PackedDataset(referenced.shards, speech.encoder)),
    )


def test_packs_are_packed_again(speech: Speech, tmp_path: Path) -> None:
    before = speech.packed()
    again = pack(before.shards, **speech.options(tmp_path / "again", seq_len=800, media="reference"))
    assert again.manifest.packed == again.manifest.audios == 34
    assert same(
        features(PackedDataset(again.shards, speech.encoder)), features(PackedDataset(before.shards, speech.encoder))
    )


def test_full_checks_decode_and_reject_damage_inside(speech: Speech, tmp_path: Path) -> None:
    file = write(tmp_path / "a", "flac", signal(160_000, 16_000), 16_000)
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 3] = bytes(255 - value for value in data[middle : middle + 3])
    file.write_bytes(data)
    write(tmp_path / "b", "flac", signal(16_000, 16_000), 16_000)
    lines = [json.dumps({"id": name, "audio": f"{name}.flac", "text": "hello"}) for name in ("a", "b")]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    result = pack(tmp_path / "data.jsonl", **speech.options(tmp_path / "out", check_media="full"))
    assert result.manifest.rejects == {"corrupt_audio": 1}
    assert [len(samples) for samples in PackedDataset(result.shards, speech.encoder)] == [1]


def test_clips_of_a_file_are_stored_with_their_place(speech: Speech, tmp_path: Path) -> None:
    write(tmp_path / "a", "flac", signal(10 * 16_000, 16_000), 16_000)
    records = [
        {"id": str(i), "audio": {"path": "a.flac", "offset": i * 2.5, "duration": 2.5}, "text": "hello"}
        for i in range(4)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    result = pack(tmp_path / "data.jsonl", **speech.options(tmp_path / "out", media="reference"))
    assert result.manifest.audio_seconds == 10
    [raw] = ShardReader(sorted(result.shards.glob("*.tar")))
    entries = sorted(entry["start"] for [entry] in json.loads(raw["json"])["audio_files"])
    assert entries == [0, 40_000, 80_000, 120_000]
    samples = [sample for row in PackedDataset(result.shards, speech.encoder) for sample in row]
    assert len({sample.audio_inputs.values["input_features"].numpy().tobytes() for sample in samples}) == 4
    assert {int(sample.audio_inputs.values["feature_attention_mask"].sum()) for sample in samples} == {250}


@pytest.mark.parametrize("kind", ["wav16", "wav24", "flac", "mp3", "m4a"])
def test_parts_of_a_long_file_are_stored_alone(speech: Speech, tmp_path: Path, kind: str) -> None:
    """500 parts of a recording must not store it 500 times, and train on the same samples."""
    channels = 2 if kind in ("flac", "mp3") else 1
    file = write(tmp_path / "long", kind, signal(40 * 16_000, 16_000), 16_000, channels=channels)
    short = write(tmp_path / "short", "flac", signal(16_000, 16_000), 16_000)
    records = [
        {"id": f"{place}", "audio_filepath": file.name, "offset": place * 0.7, "duration": 0.4001, "text": "hello"}
        for place in range(25)
    ]
    records.append({"id": "s", "audio_filepath": short.name, "offset": 0.1, "duration": 0.8, "text": "hello"})
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    result = pack(path, **speech.options(tmp_path / "out", check_media="full", max_packs_per_shard=100))
    assert result.manifest.rejects == {}
    size = 2 if kind == "wav16" else 4
    found = {}
    for raw in ShardReader(sorted(result.shards.glob("*.tar"))):
        content = json.loads(raw["json"])
        for ident, [entry] in zip(content["ids"], content["audio_files"], strict=True):
            found[ident] = entry, raw[entry["part"]]
    for ident, (entry, data) in found.items():
        if ident == "s":
            assert data == short.read_bytes()
            assert (entry["start"], entry["samples"], entry["total"]) == (1600, 12_800, 16_000)
        else:
            assert entry["part"].endswith(".wav")
            assert len(data) <= 44 + size * 6402
            assert (entry["start"], entry["samples"]) == (0, entry["total"])
    expected = {}
    for record in records:
        sample = speech.encoder.encode(normalize(record, image_root=str(tmp_path)))
        assert sample.audio_inputs is not None
        values = [sample.audio_inputs.values[name] for name in sorted(sample.audio_inputs.values)]
        expected[str(record["id"])] = (sample.input_ids.tolist(), sample.labels.tolist(), *values)
    assert same(features(PackedDataset(result.shards, speech.encoder)), expected)


def test_an_audio_file_that_a_record_has_lost_stops_the_run(speech: Speech, tmp_path: Path) -> None:
    write(tmp_path / "a", "flac", signal(16_000, 16_000), 16_000)
    turns = [{"role": "user", "content": "<audio>" * 2}, {"role": "assistant", "content": "hello"}]
    first = {"messages": turns, "audios": ["a.flac"] * 2}
    then = {"messages": [{"role": "user", "content": "<audio>"}, turns[1]], "audios": ["a.flac"]}
    with pytest.raises(SourceError, match=r"it has 1 audio files, and had 2\); run again$"):
        pack(**unstable_record(tmp_path, first, then), **speech.options(tmp_path / "out"))


def test_a_text_encoder_stops_with_the_remedy(speech: Speech, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "text", TEXTS, vision=False)
    arguments = ["pack", str(speech.jsonl), "--tokenizer", str(tokenizer), "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, [*arguments, "--seq-len", "400"])
    assert done.exit_code == 1
    assert "has audio, but" in str(done.output) + str(done.exception)


def test_lengths_counts_audio(speech: Speech) -> None:
    done = CliRunner().invoke(
        cli, ["lengths", str(speech.jsonl), "--tokenizer", str(speech.tokenizer), "--max-reject-rate", "1"]
    )
    assert done.exit_code == 0, done.output
    assert "34 audio files, 0." in done.output


def test_the_folder_of_the_tokenizer_has_no_image_processor(tmp_path: Path) -> None:
    encoder = ChatEncoder.from_pretrained(qwen2_audio(tmp_path))
    assert encoder.vision is None
    assert encoder.audio is not None
    assert np.isclose(encoder.audio.rate, 16_000)


def test_the_report_plays_audio(speech: Speech, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    out = str(speech.packed().shards.parent)
    done = CliRunner().invoke(cli, ["report", out, "-o", str(page), "--tokenizer", str(speech.tokenizer)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "<dt>audio files</dt><dd>34</dd>" in text
    assert text.count("<audio controls") > 3
    assert 'src="data:audio/flac;base64,' in text
    assert '<path class="audio"' in text
