"""A dataset with video files under trainers: steps of a tiny Qwen2.5-VL, exact resume, costs and limits of rows."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from transformers import Trainer, TrainerCallback

from energon_packed import (
    ChatEncoder,
    CostModel,
    DataflowConfig,
    DataflowLoader,
    MapDistributor,
    PackedDataset,
    PackedIterableDataset,
    PackedTrainer,
    PaddingFreeCollator,
    TrainerStream,
    normalize,
    pack,
    packed_training_arguments,
    plan_in_memory,
    prepare_loader,
)
from tests.integrations.trainer_runs import QUIET, StopAt
from tests.loading.clips import MODELS, Clips
from tests.loading.models import tiny_model
from tests.oldest import needs_isolated_qwen2_5_vl
from tests.videos import make_video

RECORDS = 25
VISION: dict[str, Any] = {
    "image_processor": "qwen2_5_vl",
    "factor": 28,
    "min_pixels": 3136,
    "num_frames": 6,
    "video_min_pixels": 3136,
    "video_max_pixels": 6 * 784,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of text, an image, a video, both, and two videos, in turn."""
    folder = tmp_path_factory.mktemp("videos")
    for number, extension in enumerate(("mp4", "mkv", "avi")):
        make_video(folder / f"{number}.{extension}", frames=8 + 12 * number, width=64 + 32 * number)
    files = sorted(path.name for path in folder.iterdir())
    lines = []
    for number in range(RECORDS):
        videos = [[], [files[number % 3]], [], [files[number % 3]], files[:2]][number % 5]
        images = [_image(folder, number)] if number % 5 in (2, 3) else []
        content = "<video>" * len(videos) + "What is it?" + "<image>" * len(images)
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": f"It is {number}. " * 3}]
        lines.append({"id": f"r{number}", "messages": turns, "images": images, "videos": videos})
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _image(folder: Path, number: int) -> str:
    pixels = np.random.default_rng(number).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    (folder / f"{number}.png").write_bytes(stream.getvalue())
    return f"{number}.png"


@pytest.fixture(scope="module")
def vision_encoder(tokenizer_dir: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(tokenizer_dir, **VISION)


@pytest.fixture(scope="module")
def dataset(
    source: Path, tokenizer_dir: Path, vision_encoder: ChatEncoder, tmp_path_factory: pytest.TempPathFactory
) -> PackedDataset:
    out = tmp_path_factory.mktemp("packed")
    pack(source, output_dir=out, seq_len=160, tokenizer=tokenizer_dir, image_root=source.parent, **VISION)
    dataset = PackedDataset(out, vision_encoder)
    assert len(dataset) >= 6
    kinds = {(any(s.num_images for s in row), any(s.num_videos for s in row)) for row in dataset}
    assert (True, True) in kinds  # a row with images and videos
    return dataset


def model_of(encoder: ChatEncoder) -> Any:
    return tiny_model("qwen2_5_vl", encoder, "sdpa").train()


def test_stored_samples_equal_the_encoded_records(source: Path, tokenizer_dir: Path, dataset: PackedDataset) -> None:
    """Decoded from the file of the record, and from the file in the pack."""
    config = DataflowConfig(inputs=(source,), tokenizer=tokenizer_dir, image_root=source.parent, seq_len=160, **VISION)
    records = {s.id: s for batch in PackedIterableDataset(config) for s in batch.split()}
    assert len(records) == RECORDS
    for row in dataset:
        for sample in PaddingFreeCollator().collate(row).split():
            other = records[sample.id]
            assert np.array_equal(sample.input_ids, other.input_ids)
            assert np.array_equal(sample.position_ids, other.position_ids)  # type: ignore[arg-type]
            assert (sample.num_videos, sample.num_images) == (other.num_videos, other.num_images)
            if sample.num_videos:
                assert torch.equal(sample.pixel_values_videos, other.pixel_values_videos)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=needs_isolated_qwen2_5_vl) if f == "qwen2_5_vl" else f for f in MODELS]
)
def test_encoded_records_in_a_row_equal_separate_forward_passes(
    source: Path, tokenizer_dir: Path, family: str
) -> None:
    """The model alone computes its positions from the grids, as with the output of its processor."""
    options = {**VISION, "image_processor": family, "factor": 32 if family == "qwen3_vl" else 28}
    encoder = ChatEncoder.from_pretrained(tokenizer_dir, **options)
    clips = Clips(family, tiny_model(family, encoder, "sdpa"))
    lines = source.read_text().splitlines()[:10]
    samples = [encoder.encode(normalize(json.loads(line), image_root=source.parent)) for line in lines]
    row = PaddingFreeCollator().collate(samples)
    assert (sum(row.num_images), sum(row.num_videos)) == (4, 8)
    with torch.no_grad():
        packed = clips.model(**row.transformers_inputs()).logits[0]
        separate = torch.cat([clips.alone(sample).logits[0] for sample in samples])
    assert (packed - separate).abs().max() <= 1e-5


def losses(trainer: Trainer, **arguments: Any) -> dict[int, float]:
    trainer.train(**arguments)
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


@needs_isolated_qwen2_5_vl
@pytest.mark.parametrize("kind", ["packed", "stream"])
def test_a_resumed_trainer_equals_the_run_without_interruption(
    dataset: PackedDataset, vision_encoder: ChatEncoder, kind: str, tmp_path: Path
) -> None:
    def run(folder: str, callbacks: list[TrainerCallback], **arguments: Any) -> dict[int, float]:
        data: Any = TrainerStream(DataflowLoader(MapDistributor(dataset), seed=1)) if kind == "stream" else dataset
        args = packed_training_arguments(str(tmp_path / folder), data, **{**QUIET, "save_steps": 2, "max_steps": 4})
        options: dict[str, Any] = {"data_collator": PaddingFreeCollator(), "callbacks": callbacks}
        return losses(PackedTrainer(model_of(vision_encoder), args, train_dataset=data, **options), **arguments)

    complete = run("complete", [])
    assert len(complete) == 4
    assert run("first", [StopAt(2)]) == {step: loss for step, loss in complete.items() if step <= 2}
    second = run("first", [], resume_from_checkpoint=True)
    assert second.items() >= {step: loss for step, loss in complete.items() if step > 2}.items()


def test_the_stock_trainer_trains_on_videos(
    dataset: PackedDataset, vision_encoder: ChatEncoder, tmp_path: Path
) -> None:
    settings = {**QUIET, "save_strategy": "no", "max_steps": 3, "per_device_train_batch_size": 2}
    args = packed_training_arguments(str(tmp_path), dataset, **settings)
    model = model_of(vision_encoder)
    found = losses(Trainer(model, args, train_dataset=dataset, data_collator=PaddingFreeCollator()))
    assert len(found) == 3
    assert found[3] < found[1]


def test_accelerate_prepares_a_loader_with_videos(dataset: PackedDataset, vision_encoder: ChatEncoder) -> None:
    accelerator = Accelerator(cpu=True)
    model = model_of(vision_encoder)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    loader = prepare_loader(accelerator, DataflowLoader(MapDistributor(dataset), seed=1))
    found = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert len(found) == len(dataset)
    assert np.isfinite(found).all()
    assert any("pixel_values_videos" in batch for batch in loader)


@pytest.mark.parametrize("media", ["copy", "reference"])
def test_costs_count_the_patches_of_videos_without_reading_them(
    source: Path, tokenizer_dir: Path, vision_encoder: ChatEncoder, tmp_path: Path, media: str
) -> None:
    inputs = shutil.copytree(source.parent, tmp_path / "inputs")
    options: dict[str, Any] = {"tokenizer": tokenizer_dir, "image_root": inputs, "media": media, **VISION}
    pack(inputs / source.name, output_dir=tmp_path / "out", seq_len=160, **options)
    dataset = PackedDataset(tmp_path / "out", vision_encoder)
    patches = [sum(sample.num_patches for sample in row) for row in dataset]
    grids = [[g for s in row for g in (s.image_grid_thw, s.video_grid_thw) if g is not None] for row in dataset]
    squares = [sum(int((g[:, 0] * (g[:, 1] * g[:, 2]) ** 2).sum()) for g in of_row) for of_row in grids]
    assert any(sample.num_videos for row in dataset for sample in row)
    if media == "reference":  # reading one of the files would raise
        for file in inputs.glob("*.m[pk]*"):
            file.unlink()
    sizes = PackedDataset(tmp_path / "out", vision_encoder).row_sizes()
    assert sizes.patches.tolist() == patches
    assert sizes.patch_squares.tolist() == squares
    assert np.allclose(CostModel(token=0, square=0, patch=1).costs(sizes), patches)


def test_a_truncated_record_keeps_its_videos_whole(
    source: Path, tokenizer_dir: Path, vision_encoder: ChatEncoder, tmp_path: Path
) -> None:
    """A target before the video remains after truncation, so that only the check of videos can reject the record."""
    turns = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "It is 1."},
        {"role": "user", "content": "<video>What is it?"},
        {"role": "assistant", "content": "It is 2."},
    ]
    record = {"id": "cut", "messages": turns, "videos": ["2.avi"]}
    text = {"id": "text", "messages": turns[:2]}
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (record, text)))
    options: dict[str, Any] = {"overlong": "truncate", "max_reject_rate": 1.0, "image_root": source.parent, **VISION}
    for name in ("PackedCaptioningSample", "PackedTokensSample"):
        done = pack(
            tmp_path / "data.jsonl",
            output_dir=tmp_path / name,
            seq_len=34,
            tokenizer=tokenizer_dir,
            sample_class=name,
            **options,
        )
        assert done.manifest.rejects == {"overlong": 1}
        assert "would remove part of a video" in done.rejects.read_text()
        assert [[s.id for s in row] for row in PackedDataset(tmp_path / name, vision_encoder)] == [["text"]]


def test_frames_count_as_images_for_families_without_a_video_token(source: Path, tokenizer_dir: Path) -> None:
    config = DataflowConfig(
        inputs=(source,),
        tokenizer=tokenizer_dir,
        image_root=source.parent,
        seq_len=4000,
        max_images=20,
        image_processor="llavaonevision15",
        factor=28,
        min_pixels=3136,
        max_pixels=4 * 784,
        num_frames=4,
    )
    for data in (PackedIterableDataset(config), DataflowLoader(MapDistributor(plan_in_memory(config)))):
        batches = list(data)
        assert sum(batch.num_samples for batch in batches) == RECORDS
        assert max(sum(batch.num_images) for batch in batches) <= 20
        assert sum(sum(batch.num_images) for batch in batches) == 10 + 4 * 20
        assert all(batch.video_grid_thw is None for batch in batches)
