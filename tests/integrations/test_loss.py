"""The gradient of a step of 2 ranks and 4 micro batches is that of the mean over its targets, or samples."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    Consumed,
    DataflowLoader,
    MapDistributor,
    PackedBatch,
    PackedDataset,
    PackedTrainer,
    PaddingFreeCollator,
    TrainerStream,
    normalize,
    pack,
    packed_training_arguments,
    prepare_loader,
)
from tests import oldest
from tests.conftest import Packer
from tests.integrations.launched import run_script, tiny_qwen2
from tests.integrations.trainer_runs import QUIET
from tests.internals import DemoDataset
from tests.loading.models import tiny_model

BLOCKS = {"train_accelerate.py": ("trainers.md", 4), "train.py": ("train-torch.md", 2), "fsdp": ("train-torch.md", 4)}
"""Page of each loop, and micro batches of a step."""
TRAINED = [("qwen2", "token", ""), ("qwen2", "sample", ""), ("qwen2_5_vl", "token", "")]
WEIGHTED = [("qwen2", "token", "weighted"), ("llama", "sample", "weighted"), ("qwen2_5_vl", "sample", "weighted")]
if oldest.TRANSFORMERS:  # PackedTrainer refuses its Qwen2.5-VL
    TRAINED, WEIGHTED = TRAINED[:-1], WEIGHTED[:-1]


def weighted_records(images: list[str]) -> list[dict[str, Any]]:
    """Conversations, documents and tokens with loss weights in all fields that have them."""
    records: list[dict[str, Any]] = []
    names = ("weight", "loss_weight", "loss_scale")
    for n in range(40):
        turns: list[dict[str, Any]] = []
        for turn, weight in enumerate(((0.25, 3.0), (1.5, 0), (1, 0.1))[n % 3]):
            answer = " ".join(["word"] * (1 + (7 * n + 5 * turn) % 23))
            turns.append({"role": "user", "content": "<image>Next?" if images and not turn else "Next?"})
            turns.append({"role": "assistant", "content": answer, names[n % 3]: weight})
        ids = [65 + (3 * n + k) % 20 for k in range(6 + n % 30)]
        record: dict[str, Any] = {"messages": turns}
        if images:
            record["images"] = [images[n % len(images)]]
        elif n % 4 == 1:
            record = {"text": "word " * n + "of a document"}
        elif n % 4 == 3:
            weights = [(0.5, 1, 0, 2.5)[k // 3 % 4] for k in range(len(ids))]
            record = {"input_ids": ids, "labels": [-100, *ids[1:]], "loss_weights": weights}
        if n % 5:
            record[(*names, "sample_weight")[n % 4]] = 0.2 * (n % 5) + (n % 2)
        records.append({"id": f"w{n}", **record})
    return records


def weights_of(encoder: ChatEncoder, record: dict[str, Any], **options: Any) -> list[float]:
    """Loss weight of each token, by the fields of the record and weights of 0 and 1 in turn."""
    names = ("weight", "loss_weight", "loss_scale", "sample_weight")

    def targets(chosen: int | None = None) -> Any:
        plain = {name: value for name, value in record.items() if name not in (*names, "loss_weights")}
        if chosen is not None:
            plain["messages"] = [
                {"role": message["role"], "content": message["content"], "weight": int(turn == chosen)}
                for turn, message in enumerate(record["messages"])
            ]
        return encoder.encode(normalize(plain, **options)).labels != -100

    if "messages" in record:
        answers = [(n, message) for n, message in enumerate(record["messages"]) if message["role"] == "assistant"]
        weights = sum(targets(n) * next(message[name] for name in names if name in message) for n, message in answers)
    else:
        weights = targets() * record.get("loss_weights", 1.0)
    found: list[float] = (weights * next((record[name] for name in names if name in record), 1)).tolist()
    return found


def pack_weighted(folder: Path, tokenizer: Path, demo: DemoDataset | None) -> Path:
    """Pack weighted records, with images if there is a demo dataset, and write their weights to `weights.json`."""
    folder.mkdir()
    root = None if demo is None else demo.jsonl.parent
    images = [] if root is None else [str(path) for path in sorted((root / "images").glob("*_0.png"))[:4]]
    records = weighted_records(images)
    (folder / "data.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    encoder, options = ChatEncoder.from_pretrained(tokenizer), {} if root is None else {"image_root": str(root)}
    weights = {record["id"]: weights_of(encoder, record, **options) for record in records}
    (folder / "weights.json").write_text(json.dumps(weights))
    flavor = "PackedTokensSample" if root is None else "PackedMultiMixQASample"
    return pack(
        folder / "data.jsonl", output_dir=folder / "out", seq_len=256 if root is None else 600, tokenizer=tokenizer,
        sample_class=flavor, record_weight="loss", image_root=root, workers=1,
    ).shards  # fmt: skip


@pytest.fixture(scope="module")
def ranks(
    demo: DemoDataset,
    short_packs: Path,
    text_tokenizer_dir: Path,
    tokenizer_dir: Path,
    pack_demo: Packer,
    tmp_path_factory: Any,
) -> list[Any]:
    folder = tmp_path_factory.mktemp("loss")
    lines = demo.jsonl.read_bytes().splitlines()
    (folder / "images.jsonl").write_bytes(b"\n".join([line for line in lines if b"image" in line][:18]))
    images = pack_demo(inputs=(str(folder / "images.jsonl"),), image_root=demo.jsonl.parent, seq_len=300).shards
    shutil.copytree(text_tokenizer_dir, folder / "model")
    tiny_qwen2().save_pretrained(folder / "model")
    (folder / "text.jsonl").write_bytes(b"\n".join(line for line in lines if b"image" not in line))
    settings: dict[str, Any] = {"tokenizer": folder / "model", "sample_class": "PackedTokensSample", "seq_len": 256}
    (folder / "tokens").symlink_to(pack_demo(inputs=(str(folder / "text.jsonl"),), **settings).shards)
    out = {"folder": str(folder)}
    jobs: dict[str, Any] = {name: ("block", out | {"page": page, "name": name}) for name, (page, _) in BLOCKS.items()}
    jobs["naive"] = ("naive", out)
    for model, weighting, weights in TRAINED + WEIGHTED:
        packs, tokenizer = (images, tokenizer_dir) if "vl" in model else (short_packs, text_tokenizer_dir)
        if weights:
            packs = pack_weighted(folder / model, tokenizer, demo if "vl" in model else None)
        data = {"packs": str(packs), "tokenizer": str(tokenizer), "model": model, "weighting": weighting}
        data["weights"] = str(folder / model / "weights.json") if weights else ""
        jobs[f"{model} {weighting} {weights}"] = ("trainer", out | data)
        if weights:
            jobs[f"loop of {model}"] = ("loop", out | data)
    jobs["Trainer"] = ("trainer", jobs["qwen2 token "][1] | {"kind": "Trainer"})
    if not oldest.TRANSFORMERS:
        jobs["Trainer of a vision model"] = ("trainer", jobs["qwen2_5_vl token "][1] | {"kind": "Trainer"})
    return run_script("tests.integrations.loss_runs", json.dumps(jobs), out=folder)


@pytest.mark.parametrize(("name", "rows"), [*((name, rows) for name, (_, rows) in BLOCKS.items()), ("Trainer", 4)])
def test_loops_of_the_pages_average_over_all_targets_of_a_step(ranks: list[Any], name: str, rows: int) -> None:
    for rank in ranks:
        assert rank[name]["error"] < 1e-5
        assert len(rank[name]["targets"]) == rows


@pytest.mark.parametrize(("model", "weighting", "weights"), TRAINED + WEIGHTED)
def test_packed_trainer_averages_over_all_targets_or_samples(
    ranks: list[Any], model: str, weighting: str, weights: str
) -> None:
    for rank in ranks:
        found = rank[f"{model} {weighting} {weights}"]
        assert found["error"] < 1e-5
        assert found["logged"] == pytest.approx(found["loss"], rel=1e-6)
        assert found["evaluated"] == pytest.approx(found["expected"], rel=1e-6)


@pytest.mark.parametrize("model", [model for model, *_ in WEIGHTED])
def test_batch_loss_has_the_gradient_of_the_weights_in_the_records(ranks: list[Any], model: str) -> None:
    for rank in ranks:
        assert rank[f"loop of {model}"]["error"] < 1e-5
        assert len(rank[f"loop of {model}"]["targets"]) == 4


def test_the_mean_of_means_is_another_gradient(ranks: list[Any]) -> None:
    for name in ranks[0].keys() & {"naive", "Trainer of a vision model"}:
        assert ranks[0][name]["error"] > 1e-2, "rows have unequal numbers of targets"


def weighted_loader(packs: Path) -> Any:
    return DataflowLoader(
        MapDistributor(PackedDataset(packs)), collator=PaddingFreeCollator(loss_weighting="sample"), num_workers=0
    )


def test_loaders_for_other_loops_refuse_weights_or_yield_the_batch(text_packs: list[Path]) -> None:
    for make in (partial(prepare_loader, Accelerator(cpu=True)), Consumed):
        with pytest.raises(BatchError, match="`loss_mask` must be 1 at every target"):
            next(iter(make(weighted_loader(text_packs[0]))))
        batch = next(iter(make(weighted_loader(text_packs[0]), to_inputs=lambda batch: batch)))
        assert isinstance(batch, PackedBatch)
        assert batch.loss_mask_scale > 1


def trained(packs: Path, folder: Path, data: Any = None, **options: Any) -> PackedTrainer:
    data = PackedDataset(packs) if data is None else data
    args = packed_training_arguments(str(folder), data, **QUIET | {"save_strategy": "no"}, **options.pop("args", {}))
    collator = PaddingFreeCollator(loss_weighting="sample")
    return PackedTrainer(tiny_qwen2(), args, train_dataset=data, data_collator=collator, **options)


def test_a_stream_of_weighted_rows_has_the_weights_in_a_packed_trainer_only(
    text_packs: list[Path], tmp_path: Path
) -> None:
    stream = TrainerStream(weighted_loader(text_packs[0]))
    trainer = trained(text_packs[0], tmp_path, stream, args={"max_steps": 1})
    trainer.train()
    model = tiny_qwen2()
    batch = next(iter(weighted_loader(text_packs[0])))
    output = model(**batch.transformers_inputs(weighted_loss=True))
    (logged,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(batch.loss(output.logits).item(), rel=1e-6)
    assert abs(logged - output.loss.item()) > 1e-4
    stock = Trainer(tiny_qwen2(), trainer.args, train_dataset=stream, data_collator=PaddingFreeCollator())
    with pytest.raises(BatchError, match="`loss_mask` must be 1 at every target"):
        stock.train()


def test_evaluation_applies_the_weights(text_packs: list[Path], tmp_path: Path) -> None:
    data = PackedDataset(text_packs[0], split="val")
    samples = [sample for number in range(len(data)) for sample in data[number]]
    batch = PaddingFreeCollator(loss_weighting="sample").collate(samples)
    with torch.no_grad():
        expected = batch.loss(tiny_qwen2().eval()(**batch.transformers_inputs(weighted_loss=True)).logits).item()
    for size in (1, 4):
        trainer = trained(text_packs[0], tmp_path, data, args={"per_device_eval_batch_size": size})
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["compute_loss_func", "label_smoothing_factor"])
def test_losses_that_ignore_weights_are_refused(text_packs: list[Path], tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"args": {"label_smoothing_factor": 0.1}}
    if name == "compute_loss_func":
        options = {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs.logits.sum()}
    with pytest.raises(ConfigError, match=f"`{name}` must not be set with loss weights"):
        trained(text_packs[0], tmp_path, **options).train()


def test_a_row_without_targets_has_loss_0_for_models_whose_loss_is_a_mean(
    image_packs: Path, encoder: ChatEncoder, tmp_path: Path
) -> None:
    data = PackedDataset(image_packs, encoder)
    args = packed_training_arguments(str(tmp_path), data, **QUIET)
    model = tiny_model("qwen2_5_vl", encoder, "sdpa")
    trainer = PackedTrainer(model, args, train_dataset=data, data_collator=PaddingFreeCollator())
    row = PaddingFreeCollator().collate(data[0]).without_targets().transformers_inputs()
    loss = trainer.compute_loss(model, row, num_items_in_batch=torch.tensor(5.0))
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
