"""Packs that do not fill the last step of two processes: every trainer trains each pack once in each epoch."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.loading.flows import ITEMS, energon_folder
from tests.processes import run_ranks

RANK = """
import json, os
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29535", OMP_NUM_THREADS="1")
from accelerate import Accelerator
from transformers import Trainer
from energon_packed import *
from tests.integrations.launched import tiny_qwen2

packs, folder = sys.argv[4:]
ENDS = {"num_train_epochs": 2, "save_strategy": "no", "logging_strategy": "no", "per_device_train_batch_size": 1}

def recorded():
    model, seen = tiny_qwen2(), []
    def record(model, arguments, inputs):
        if "labels" in inputs:  # otherwise it is the check of the isolation
            seen.append(inputs["input_ids"][inputs["labels"] != -100].unique().tolist())
    model.register_forward_pre_hook(record, with_kwargs=True)
    return model, seen

def trained(trainer, data, *callbacks):
    model, seen = recorded()
    args = packed_training_arguments(folder, data, use_cpu=True, report_to=[], disable_tqdm=True, **ENDS)
    made = trainer(model, args, train_dataset=data, data_collator=PaddingFreeCollator(), callbacks=list(callbacks))
    made.train()
    assert all(weights.isfinite().all() for weights in model.parameters())
    return seen[:made.state.global_step]

def streamed(make):
    stream = TrainerStream(make)
    return trained(Trainer, stream, TrainerStreamCallback(stream))

def accelerated(loader):
    accelerator, (model, seen) = Accelerator(cpu=True), recorded()
    loader = prepare_loader(accelerator, loader)
    model = accelerator.prepare(model)
    for _ in range(2):
        for batch in loader:
            loss = model(**batch).loss
            assert loss.isfinite(), "a row without targets must not make the loss NaN"
            accelerator.backward(loss)
    assert all(weights.grad.isfinite().all() for weights in model.parameters())
    return seen

def global_order(**options):
    return DataflowLoader(MapDistributor(PackedDataset(packs)), **options)

def energon():
    return get_packed_loader(packs, epochs=1, num_workers=0)

print(json.dumps({
    "TrainerStream, DataflowLoader": streamed(global_order),
    "TrainerStream, get_packed_loader": streamed(energon),
    "PackedTrainer": trained(PackedTrainer, PackedDataset(packs)),
    "accelerate, DataflowLoader": accelerated(global_order()),
    "accelerate, get_packed_loader": accelerated(energon()),
    "TrainerStream, off": streamed(lambda: global_order(even_ranks="off")),
}))
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> list[dict[str, list[list[int]]]]:
    folder: Path = tmp_path_factory.mktemp("uneven")
    assert ITEMS % 2
    outputs = run_ranks(RANK, 2, folder / "store", energon_folder(folder), folder / "run")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize("trainer", ["TrainerStream", "accelerate"])
@pytest.mark.parametrize("loader", ["DataflowLoader", "get_packed_loader"])
def test_streams_train_each_pack_once_in_each_epoch(ranks: list[Any], trainer: str, loader: str) -> None:
    check_each_epoch([rank[f"{trainer}, {loader}"] for rank in ranks])


def test_packed_trainer_trains_each_pack_once_in_each_epoch(ranks: list[Any]) -> None:
    check_each_epoch([rank["PackedTrainer"] for rank in ranks])


def test_a_stream_of_ranks_that_end_early_leaves_no_pack_out(ranks: list[Any]) -> None:
    seen = Counter(number for rank in ranks for step in rank["TrainerStream, off"] for number in step)
    assert min(seen[number] for number in range(ITEMS)) == 2


def check_each_epoch(ranks: list[list[list[int]]]) -> None:
    """Each rank has the same number of steps, and both together have each pack in each of two epochs."""
    steps = -(-ITEMS // 2)
    assert [len(rank) for rank in ranks] == [2 * steps] * 2
    for epoch in (slice(steps), slice(steps, None)):
        assert sorted(number for rank in ranks for step in rank[epoch] for number in step) == list(range(ITEMS))
