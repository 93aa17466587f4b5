"""Packs that do not fill the last step of two processes: each trainer with each `epoch_end`, counted by sample."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.epoch_end_runs import EPOCHS
from tests.integrations.launched import run_script
from tests.loading.flows import ITEMS, energon_folder
from tests.processes import run_ranks

KNOWN = [
    *(f"{trainer}, {loader}" for trainer in ("DDP", "accelerate", "TrainerStream") for loader in ("order", "energon")),
    "Consumed, order",
    "Consumed, energon",
]
STREAMS = ["DDP, stream", "accelerate, stream", "TrainerStream, stream"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> list[dict[str, Any]]:
    """Targets of each row of each trainer, or the error, of both ranks."""
    folder: Path = tmp_path_factory.mktemp("uneven")
    assert ITEMS % 2
    (out := folder / "out").mkdir()
    return run_script("tests.integrations.epoch_end_runs", energon_folder(folder), out=out)


@pytest.mark.parametrize("trainer", [*KNOWN, *STREAMS, "PackedTrainer"])
def test_repeat_trains_each_sample_once_in_each_epoch(ranks: list[Any], trainer: str) -> None:
    runs = [rank[f"{trainer}, repeat"] for rank in ranks]
    if trainer not in STREAMS:
        assert [len(run) for run in runs] == [EPOCHS * -(-ITEMS // 2)] * 2
    steps = iter(zip(*runs, strict=True))
    for _ in range(EPOCHS):  # of a stream, the number of rows depends on the order of the records
        numbers: list[int] = []
        while len(numbers) < ITEMS:
            numbers += [number for row in next(steps) for number in row]
        assert sorted(numbers) == list(range(ITEMS))
    assert next(steps, None) is None


@pytest.mark.parametrize("trainer", [*KNOWN, *STREAMS, "PackedTrainer", "Trainer"])
def test_drop_trains_the_same_number_of_rows_with_targets_on_each_rank(ranks: list[Any], trainer: str) -> None:
    runs = [rank[f"{trainer}, drop"] for rank in ranks]
    steps = len(runs[0]) // EPOCHS
    assert steps == (3 if trainer in STREAMS else ITEMS // 2)
    assert [len(run) for run in runs] == [EPOCHS * steps] * 2
    for epoch in range(EPOCHS):
        rows = [row for run in runs for row in run[epoch * steps : (epoch + 1) * steps]]
        assert all(rows)
        assert set(Counter(number for row in rows for number in row).values()) == {1}


@pytest.mark.parametrize("trainer", [*KNOWN, *STREAMS])
def test_error_raises_one_line_on_each_rank(ranks: list[Any], trainer: str) -> None:
    first, second = (rank[f"{trainer}, error"] for rank in ranks)
    assert first == second
    assert "\n" not in first
    expected = "got no batch 4 on rank 1, and more batches on rank 0" if trainer in STREAMS else "got 1 of 13 packs"
    assert first.startswith("ConfigError: `epoch_end='error'` needs ")
    assert expected in first


def test_a_stock_trainer_repeats_a_sample_with_its_targets(ranks: list[Any]) -> None:
    seen = Counter(number for rank in ranks for row in rank["Trainer, repeat"] for number in row)
    assert set(seen) == set(range(ITEMS))
    assert seen.total() == EPOCHS * (ITEMS + 1)


RESUMED = """
import json
from energon_packed import WorkerError
from tests.integrations.epoch_end_runs import stream

def ids(batches):
    return [[name for name in batch.ids if name is not None] for batch in batches]

saving = stream()
batches, states, seen = iter(saving), [saving.state_dict()], []
for batch in batches:
    seen += ids([batch])
    states.append(saving.state_dict())
following = ids(saving)
resumed = []
for state in states:
    loader = stream()
    loader.load_state_dict(state)
    resumed.append(ids(loader))
assert resumed == [seen[step:] or following for step in range(len(states))], resumed

if rank == 0:  # the other rank does not iterate
    torch.distributed.destroy_process_group()
else:
    try:
        next(iter(stream()))
    except WorkerError as error:
        print("WorkerError", error)
"""


def test_a_stream_resumes_at_every_step_also_at_a_row_of_another_rank(tmp_path: Path) -> None:
    outputs = run_ranks(RESUMED, 2, tmp_path / "store")
    assert "WorkerError batch 1 of this iteration was not read on all ranks" in outputs[1]


ON_THE_FLY = """
import json
from energon_packed import ChatEncoder, get_packed_loader
encoder = ChatEncoder.from_pretrained(sys.argv[5])
options = {"epochs": 1, "packing_buffer_size": 20, "num_workers": 0}
found = {}
for choice in ("repeat", "drop"):
    batches = list(get_packed_loader(sys.argv[4], encoder, epoch_end=choice, **options))
    found[choice] = [[name for name in batch.ids if name is not None] for batch in batches]
print(json.dumps(found))
"""


def test_rows_of_energon_that_are_packed_on_the_fly(pack_demo: Any, tokenizer_dir: Path, tmp_path: Path) -> None:
    result = pack_demo(sample_class="MultiMixQASample")
    outputs = run_ranks(ON_THE_FLY, 2, tmp_path / "store", result.shards, tokenizer_dir)
    runs = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert len(runs[0]["repeat"]) == len(runs[1]["repeat"]) == max(len(list(filter(None, r["repeat"]))) for r in runs)
    ids = [name for run in runs for row in run["repeat"] for name in row]
    assert len(ids) == len(set(ids)) == result.manifest.packed
    assert len(runs[0]["drop"]) == len(runs[1]["drop"]) == min(len(list(filter(None, r["repeat"]))) for r in runs)
