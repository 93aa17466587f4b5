"""MixtureDistributor.update: the published formula, one decision on all ranks, the same items whatever workers read
ahead, exact resume, and shares that follow the weights."""

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_packed import ConfigError, DataflowLoader, MapDistributor, MixtureDistributor, PoolPacker
from tests.loading.flows import feature, saved, signature
from tests.processes import run_ranks

NAMES = ["a", "b", "c"]


def rows(start: int, count: int = 60) -> list[dict[str, Any]]:
    return [feature(number, start) for number in range(count)]


def new_mixture(weights: tuple[float, ...] = (1, 1, 1)) -> MixtureDistributor:
    parts = [MapDistributor(rows(1000 * number)) for number in range(len(weights))]
    return MixtureDistributor(parts, weights, repeat=True, names=NAMES[: len(weights)])


def rewards_of(step: int) -> dict[str, float]:
    """A source is missing in some steps; c is best at first, b later."""
    found = {"a": 0.5, "b": 1.0 + step / 20, "c": 2.0 + math.sin(step) / 4}
    del found[NAMES[step % 3]]
    return found


def test_weights_are_those_of_the_paper() -> None:
    mixture = new_mixture()
    estimates, weights, count = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 1 / 3), len(NAMES)
    for step in range(1, 101):
        rewards = rewards_of(step)
        for name in rewards:
            estimates[name] = 0.9 * estimates[name] + 0.1 * rewards[name] / weights[name]
        before, explored = (min(1 / count, math.sqrt(math.log(count) / (count * t))) for t in (step, step + 1))
        total = sum(math.exp(before * estimate) for estimate in estimates.values())
        weights = {
            name: (1 - count * explored) * math.exp(before * estimates[name]) / total + explored for name in NAMES
        }
        assert mixture.update(rewards) == pytest.approx(weights, rel=1e-12)
    assert weights["b"] > weights["c"] > weights["a"]


def test_other_weights_are_a_prior_and_no_source_is_lost() -> None:
    mixture = new_mixture((6, 3, 1))
    assert mixture.update({}) == pytest.approx({"a": 0.6, "b": 0.3, "c": 0.1})
    for _ in range(50):
        found = mixture.update({"a": 0.0, "b": 0.0, "c": 3000.0})
    assert found["c"] > 0.5
    assert min(found.values()) > 0
    assert sum(found.values()) == pytest.approx(1)


class Slow:
    """A data set whose workers are late, in one run of two."""

    def __init__(self, data: list[Any], seconds: float) -> None:
        self.data, self.seconds = data, seconds

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.data[index]


def trained(loader: DataflowLoader, steps: range, late: float = 0) -> tuple[list[Any], list[Any]]:
    """(signatures, states behind the update) of batches after each of which the mixture learns."""
    mixture: Any = loader.roles.distributor
    found, states = [], []
    for step, batch in zip(steps, loader, strict=False):
        time.sleep(late if step % 5 == 0 else 0)
        found.append(signature(batch))
        mixture.update(rewards_of(step))
        states.append(saved(loader.state_dict()))
    return found, states


def new_loader(num_workers: int, seconds: float = 0, **options: Any) -> DataflowLoader:
    parts = [MapDistributor(Slow(rows(1000 * number), seconds)) for number in range(3)]
    mixture = MixtureDistributor(parts, [1, 1, 1], repeat=True, names=NAMES)
    return DataflowLoader(mixture, packer=PoolPacker(24, pool_size=9), num_workers=num_workers, seed=5, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_items_do_not_depend_on_what_was_read_ahead_and_resume_exactly(num_workers: int) -> None:
    steps = 60
    expected, states = trained(new_loader(num_workers), range(steps))
    assert trained(new_loader(num_workers, 0.001), range(steps), late=0.01)[0] == expected
    unlearned = [signature(batch) for batch, _ in zip(new_loader(num_workers), range(steps), strict=False)]
    assert unlearned != expected
    assert unlearned[: 1 + 4 * num_workers] == expected[: 1 + 4 * num_workers]  # 2 * 2 steps of each of 2 workers
    for step in (0, 7, 13, 30, 51):
        resumed = new_loader(num_workers)
        resumed.load_state_dict(states[step])
        assert trained(resumed, range(step + 1, steps)) == (expected[step + 1 :], states[step + 1 :]), step


def test_an_update_holds_from_the_first_item_of_the_next_epoch() -> None:
    parts = [MapDistributor(rows(1000 * number, 200)) for number in range(2)]
    for num_workers in (0, 2):
        mixture = MixtureDistributor(parts, [1, 1], names=["a", "b"])
        loader = DataflowLoader(mixture, num_workers=num_workers, persistent_workers=num_workers > 0)
        assert len(list(loader)) == 400
        for _ in range(60):
            mixture.update({"a": 0.0, "b": 50.0})
        first = [batch.ids[0] for batch, _ in zip(loader, range(40), strict=False)]
        assert sum(int(str(one)[1:]) >= 1000 for one in first) > 34


def test_what_cannot_be_learned_from_is_one_line() -> None:
    mixture = new_mixture()
    with pytest.raises(ConfigError, match="Unknown reward name 'x'. Known names: a, b, c. Pass `names`"):
        mixture.update({"x": 1.0})
    with pytest.raises(ConfigError, match="The reward of 'a' must be finite, got nan on rank 0. Leave it out"):
        mixture.update({"a": torch.tensor(float("nan"))})
    with pytest.raises(ConfigError, match="`smoothing` must be at least 0 and below 1, got 1"):
        MixtureDistributor([MapDistributor([1])], [1], smoothing=1)
    with pytest.raises(ConfigError, match="`names` must have 2 different names, got 1"):
        MixtureDistributor([MapDistributor([1])] * 2, [1, 1], names=["a", "a"])
    MixtureDistributor([mixture, MapDistributor([1])], [1, 1])
    with pytest.raises(ConfigError, match="part of another mixture. Call `update` on the outer mixture"):
        mixture.update({"a": 1.0})


LOGS = """
import logging
from tests.loading.test_mixture_updates import new_mixture
logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
mixture = new_mixture((2, 1, 1))
mixture.update({"a": 1.0 + 2 * rank}, counts={"a": 3 + rank, "c": 5})
mixture.update({})
"""


def test_every_rank_logs_counts_rewards_and_weights(tmp_path: Path) -> None:
    """Counts of the rank, and the mean reward of all ranks."""
    first, second = run_ranks(LOGS, 2, tmp_path / "store")
    for rank, output in enumerate((first, second)):
        lines = [line for line in output.splitlines() if "of the mixture" in line]
        start = f"rank {rank}: update 1 of the mixture, from step 0 of each worker: a "
        assert re.fullmatch(
            rf"{start}0\.\d{{4}}, reward 2, {3 + rank} samples; b 0\.\d{{4}}, 0 samples; c 0\.\d{{4}}, 5 samples",
            lines[0],
        )
        assert re.fullmatch(r"rank \d: update 2 .*: a 0\.\d{4}; b 0\.\d{4}; c 0\.\d{4}", lines[1])


RANKS = """
import json
from energon_packed import ConfigError, DataflowLoader, MapDistributor, MixtureDistributor

def new():
    parts = [MapDistributor([{"id": str(n), "input_ids": [1, 2]}] * 400) for n in range(3)]
    mixture = MixtureDistributor(parts, [1, 1, 1], repeat=True, names=["a", "b", "c"])
    return mixture, DataflowLoader(mixture, seed=1)

def run(mixture, loader, first, last):
    found, state = [], None
    for step, batch in zip(range(first, last), loader):
        place = int(batch.ids[0])                                           # each rank tells of its source alone
        reward = [2, 6, 18][place] * (1 + (rank + step) % 3)
        found.append([place, list(mixture.update({"abc"[place]: reward} if rank != 3 else {}).values())])
        if step == 449:
            state = json.dumps(loader.state_dict())
    return found, state

found, state = run(*new(), 0, 500)
mixture, loader = new()
loader.load_state_dict(json.loads(state))
assert run(mixture, loader, 450, 500)[0] == found[450:]
error = ""
try:
    mixture.update({"a": float("inf") if rank == 2 else 1.0})
except ConfigError as caught:
    error = str(caught)
print(json.dumps([[place for place, _ in found], [weights for _, weights in found], error]))
"""


def test_four_ranks_decide_alike_resume_alike_and_the_shares_follow(tmp_path: Path) -> None:
    outputs = [json.loads(one) for one in run_ranks(RANKS, 4, tmp_path / "store")]
    weights = outputs[0][1]
    assert len(weights) == 500
    assert all(one[1] == weights for one in outputs)
    assert {one[2] for one in outputs} == {"The reward of 'a' must be finite, got inf on rank 2. Leave it out."}
    assert len({tuple(one) for one in weights}) > 490  # the first ones explore alone: K * ln K updates
    for source in range(3):
        expected = [one[source] for one in [[1 / 3] * 3, *weights[:-1]]]
        for seen in outputs:
            got = seen[0].count(source)
            spread = math.sqrt(sum(p * (1 - p) for p in expected))
            # an update holds for items behind those that are read together, 32
            assert abs(got - sum(expected)) < 3 * spread + 32 * abs(weights[-1][source] - 1 / 3)
    assert weights[-1][2] > 0.5
