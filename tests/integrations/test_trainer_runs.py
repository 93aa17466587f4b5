"""transformers.Trainer in two processes of one group: epochs, resume, streams, blends, evaluation, refusals."""

from collections import Counter
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_packed import (
    ChatEncoder,
    DataflowLoader,
    MapDistributor,
    PackedDataset,
    PackedTrainer,
    PaddingFreeCollator,
    TrainerStream,
    packed_training_arguments,
    steps_per_epoch,
)
from tests.integrations.launched import run_script, tiny_qwen2
from tests.integrations.trainer_runs import ONE_EPOCH, QUIET, Recording, train


@pytest.fixture(scope="module")
def ranks(
    text_packs: list[Path], text_tokenizer_dir: Path, image_packs: Path, tokenizer_dir: Path, tmp_path_factory: Any
) -> list[Any]:
    out = tmp_path_factory.mktemp("runs")
    data = (text_packs[0], text_packs[2], text_tokenizer_dir, image_packs, tokenizer_dir)
    steps = ONE_EPOCH | {"num_train_epochs": 2}
    alone = train(out / "alone", PackedDataset(text_packs[0]), stop=3, packed=True, **steps)
    found = run_script("tests.integrations.trainer_runs", *data, out / "alone" / "checkpoint-3", out=out)
    return [rank | {"alone": alone} for rank in found]


@pytest.mark.parametrize("kind", ["grouped", "ordered"])
def test_map_style_has_each_sample_twice_in_two_epochs(ranks: list[Any], text_packs: list[Path], kind: str) -> None:
    data = PackedDataset(text_packs[0])
    assert len(data) % 2 == 0, "accelerate fills up uneven data with packs from the start"
    seen = _counted(ranks, kind)
    assert seen == {sample.id: 2 for number in range(len(data)) for sample in data[number]}
    assert ranks[0][kind]["complete"]["steps"] == len(data)


@pytest.mark.parametrize("kind", ["sft", "sft_images"])
def test_trl_trains_on_text_and_images(
    ranks: list[Any], text_packs: list[Path], image_packs: Path, encoder: ChatEncoder, kind: str
) -> None:
    data = PackedDataset(text_packs[0]) if kind == "sft" else PackedDataset(image_packs, encoder)
    assert len(data) % 2 == 0
    assert _counted(ranks, kind) == {sample.id: 1 for number in range(len(data)) for sample in data[number]}
    if kind == "sft_images":
        assert any(sample.image_grid_thw is not None for sample in data[0])


KINDS = ("ordered", "grouped", "ordered_blend", "blend", "stream_of_blend", "dataflow")


@pytest.mark.parametrize("kind", [*KINDS, "sft", "sft_images"])
def test_a_resumed_run_equals_the_one_without_interruption(ranks: list[Any], kind: str) -> None:
    saved = 2 if kind.startswith("sft") else 3
    for rank in ranks:
        complete, first, second = (rank[kind][part] for part in ("complete", "first", "second"))
        assert complete["steps"] > saved
        assert saved <= first["steps"] <= saved + 1
        assert first["seen"][: first["used"]] == complete["seen"][: first["used"]]
        rest = complete["seen"][complete["until"][str(saved)] : complete["used"]]
        assert second["seen"][: len(rest)] == rest, "samples are replayed or skipped"
        losses = [
            {step: loss for step, loss in run["losses"].items() if int(step) > saved} for run in (complete, second)
        ]
        assert losses[0] == losses[1] != {}
        if not kind.startswith("sft"):  # with dropout
            assert second["weights"] == complete["weights"]


def test_the_order_is_that_of_a_dataflow_loader(ranks: list[Any], text_packs: list[Path]) -> None:
    for number, rank in enumerate(ranks):
        order = MapDistributor(PackedDataset(text_packs[0]))
        loader = DataflowLoader(order, batch_size=1, rank=number, world_size=2, seed=42)  # the Trainer's default seed
        expected = [batch.ids for _ in range(2) for batch in loader]
        assert rank["ordered"]["complete"]["seen"] == expected


@pytest.mark.parametrize("kind", ["ordered", "dataflow"])
def test_one_process_continues_the_checkpoint_of_two(
    ranks: list[Any], text_packs: list[Path], tmp_path: Path, kind: str
) -> None:
    """With twice the accumulation, the steps are those of the two processes, and no pack is lost or repeated."""
    folder = Path(ranks[0]["folder"]) / kind / "parts"
    data: Any = PackedDataset(text_packs[0])
    if kind == "dataflow":
        data = TrainerStream(DataflowLoader(MapDistributor(data)))
    collator = Recording(of_stream=kind == "dataflow")
    steps = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    args = packed_training_arguments(str(tmp_path), data, **QUIET | {"save_strategy": "no"} | steps)
    trainer = PackedTrainer(tiny_qwen2(), args, train_dataset=data, data_collator=collator)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    complete = [rank[kind]["complete"] for rank in ranks]
    assert trainer.state.global_step == complete[0]["steps"]
    expected = [
        batch for step in zip(*(one["seen"][3 : one["used"]] for one in complete), strict=True) for batch in step
    ]
    assert collator.seen[: len(expected)] == expected


def test_two_processes_continue_the_checkpoint_of_one(ranks: list[Any], text_packs: list[Path]) -> None:
    """A step then has twice as many packs; the last step is that of the second epoch."""
    data, alone = PackedDataset(text_packs[0]), ranks[0]["alone"]
    batches = alone["seen"][: alone["used"]]
    for rank in ranks:
        batches += rank["continued"]["seen"][: rank["continued"]["used"]]
    seen = Counter(name for batch in batches for name in batch if name)  # a row without targets has no name
    count = len(data)
    assert seen == {sample.id: 2 for number in range(count) for sample in data[number]}
    assert {rank["continued"]["steps"] for rank in ranks} == {3 + ceil((count - 3) / 2) + ceil(count / 2)}


def test_evaluation_while_training_changes_no_batch(ranks: list[Any]) -> None:
    for rank in ranks:
        complete, second = rank["dataflow"]["complete"]["evaluated"], rank["dataflow"]["second"]["evaluated"]
        assert set(complete) == {"2", "4", "6"}
        assert {step: second[step] for step in ("4", "6")} == {step: complete[step] for step in ("4", "6")}
        assert complete["6"] < complete["2"]


def test_max_steps_from_the_helper_is_exactly_two_epochs(ranks: list[Any], text_packs: list[Path]) -> None:
    steps = steps_per_epoch(text_packs[0], world_size=2)
    assert [rank["dataflow"]["complete"]["steps"] for rank in ranks] == [2 * steps] * 2
    assert set(_counted(ranks, "dataflow").values()) == {2}


def test_evaluation_loss_is_that_of_all_tokens(ranks: list[Any], text_packs: list[Path]) -> None:
    data = PackedDataset(text_packs[0], split="val")
    model = tiny_qwen2().eval()
    total = targets = 0
    with torch.no_grad():
        for number in range(len(data)):
            batch = PaddingFreeCollator().collate(data[number])
            count = int((batch.labels[:, 1:] != -100).sum())
            total += model(**batch.transformers_inputs()).loss.item() * count
            targets += count
    for rank in ranks:
        for size in ("1", "4"):  # 4: one rank has all packs
            assert rank["evaluation"][size] == pytest.approx(total / targets, abs=1e-5)
        assert abs(rank["evaluation"]["Trainer"] - total / targets) > 1e-4, "rows have unequal numbers of targets"


def test_what_would_lose_data_is_refused_on_every_rank(ranks: list[Any]) -> None:
    for number, rank in enumerate(ranks):
        dispatched, alone, streamed, lines = rank["refusals"]
        assert dispatched.startswith("`dispatch_batches=True` splits tensors between processes")
        assert f"the loader must be of rank {number} of 2, as this process, got rank 0 of 1" in alone
        assert streamed.startswith("`dispatch_batches=True` splits tensors between processes")
        assert [line.split("`")[1] for line in lines.splitlines()[1:]] == [
            "dispatch_batches",
            "max_steps",
            "ignore_data_skip",
        ]


def _counted(ranks: list[Any], kind: str) -> dict[str, int]:
    return dict(
        Counter(
            name
            for rank in ranks
            for batch in rank[kind]["complete"]["seen"][: rank[kind]["complete"]["used"]]
            for name in batch
        )
    )
