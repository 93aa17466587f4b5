"""MetricsCallback and MixtureCallback in two processes of one group, in each trainer, against the data itself."""

import logging
import re
import signal
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    DataflowLoader,
    MapDistributor,
    MixtureCallback,
    MixtureDistributor,
    PackedDataset,
    PaddingFreeCollator,
    TrainerStream,
    TrainerStreamCallback,
    packed_training_arguments,
)
from tests.integrations.launched import run_script, tiny_qwen2
from tests.integrations.metrics_runs import MIXTURE_STEPS, QUIET_RUN, SAVED, Seen, samples, strong
from tests.processes import run_ranks

SCRIPT = "tests.integrations.metrics_runs"
NAMES = ["perf/tokens_per_s", "perf/targets_per_s", "perf/imbalance", "data/padding", "data/wait_s"]
NAMES += [f"perf/global_seq_len_{name}" for name in ("avg", "min", "max")]


@pytest.fixture(scope="module")
def ranks(text_packs: list[Path], image_packs: Path, tokenizer_dir: Path, tmp_path_factory: Any) -> list[Any]:
    out = tmp_path_factory.mktemp("metrics")
    data = (text_packs[0], text_packs[2], image_packs, tokenizer_dir)
    run_script(SCRIPT, "killed", *data, out=out, status=-signal.SIGKILL)
    return run_script(SCRIPT, "all", *data, out=out)


def tokens_of(logs: list[Any]) -> float:
    return sum(entry["data/tokens_per_step"] for entry in logs)


@pytest.mark.parametrize("kind", ["map_style", "ordered", "images", "other_collator"])
def test_every_step_has_the_values_of_all_ranks(ranks: list[Any], kind: str) -> None:
    first, second = (rank[kind] for rank in ranks)
    for mine, other in zip(first, second, strict=True):
        assert set(NAMES) <= set(mine)
        assert {k: v for k, v in mine.items() if "/" in k} == {k: v for k, v in other.items() if "/" in k}
        assert mine["perf/global_seq_len_min"] <= mine["perf/global_seq_len_avg"] <= mine["perf/global_seq_len_max"]
        assert 0 < mine["data/wait_s"] < 60


def test_each_token_counts_once(
    ranks: list[Any], text_packs: list[Path], image_packs: Path, encoder: ChatEncoder
) -> None:
    data = PackedDataset(text_packs[0])
    assert tokens_of(ranks[0]["map_style"]) == sum(data.lengths)
    assert tokens_of(ranks[0]["images"]) == sum(PackedDataset(image_packs, encoder).lengths)
    assert tokens_of(ranks[0]["other_collator"]) == sum(range(10, 18))
    found = ranks[0]["accelerated"]
    assert found["data/tokens_per_step"] * len(data) / 2 == pytest.approx(sum(data.lengths))
    assert found["data/source/" + str(text_packs[0])] == 1
    # Images cost compute: the imbalance of costs is not the imbalance of tokens.
    entry = ranks[0]["images"][0]
    assert entry["perf/imbalance"] != pytest.approx(
        entry["perf/global_seq_len_max"] / entry["perf/global_seq_len_avg"]
    )


def test_padding_sources_and_reporters_of_a_blend(ranks: list[Any]) -> None:
    logs, by_source = ranks[0]["ordered"], Counter(ranks[0]["blend"])
    assert tokens_of(logs) == by_source.total()
    found: Counter[str] = Counter()
    for entry in logs:
        assert entry["data/padding"] == pytest.approx(1 - entry["data/tokens_per_step"] / 800)  # rows of 400 tokens
        assert entry["perf/imbalance"] == 1
        for name, share in entry.items():
            if name.startswith("data/source/"):
                found[name.removeprefix("data/source/")] += round(share * entry["data/tokens_per_step"])
    assert found == by_source
    assert len(by_source) == 2
    assert ranks[0]["reported"] == [sorted(name for name in entry if "/" in name) for entry in logs]


def test_a_killed_run_continues_with_its_weights_and_batches(ranks: list[Any]) -> None:
    for rank in ranks:
        complete, resumed = rank["mixture"], rank["resumed"]
        assert [entry["step"] for entry in complete["logs"]] == list(range(1, MIXTURE_STEPS + 1))
        assert len({entry["data/weight/a"] for entry in complete["logs"]}) == 1 + MIXTURE_STEPS // 2
        for before, after in zip(complete["logs"][SAVED:], resumed["logs"][SAVED:], strict=True):
            names = {name for name in before if "/" in name} | {"loss", "step"}
            assert {name: before[name] for name in names} == {name: after[name] for name in names}
        rows = 2 * (MIXTURE_STEPS - SAVED)
        assert resumed["ids"][:rows] == complete["ids"][2 * SAVED : 2 * MIXTURE_STEPS]
        assert resumed["weights"] == complete["weights"]
    last = [dict(rank["mixture"]["logs"][-1]) for rank in ranks]
    assert [entry.pop("data/rank") for entry in last] == [0, 1]
    assert last[0] == last[1]


def test_losses_and_weights_are_those_of_each_sample_alone(ranks: list[Any]) -> None:
    model = tiny_qwen2()
    by_id = {sample.id: sample for seed, name in enumerate("ab") for sample in samples(name, seed)}
    sums: dict[str, list[float]] = {"a": [0, 0], "b": [0, 0]}
    used = [ident for rank in ranks for row in islice(rank["still"]["ids"], 4) for ident in row]
    for ident in used:
        ids = torch.tensor(by_id[ident].input_ids)[None]
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss.item()
        sums[ident[0]][0] += loss * (ids.shape[1] - 1)
        sums[ident[0]][1] += ids.shape[1] - 1
    losses = {name: loss / count for name, (loss, count) in sums.items()}
    mixture = MixtureDistributor([MapDistributor([1])] * 2, [1, 1], names=["a", "b"], smoothing=0.1)
    expected = mixture.update(strong(losses))
    last = ranks[0]["still"]["logs"][-1]
    for name in "ab":
        assert last[f"data/loss/{name}"] == pytest.approx(losses[name], rel=1e-5)
        assert last[f"data/weight/{name}"] == pytest.approx(expected[name], rel=1e-5)
        assert last[f"data/reward/{name}"] == pytest.approx(3 * losses[name], rel=1e-5)
        assert last[f"data/count/{name}"] == sum(ident[0] == name for ident in used)
    assert [rank["still"]["logs"][-1]["data/rank"] for rank in ranks] == [0, 1]


@pytest.mark.parametrize("kind", ["entropy", "gradient_norm", "validation_loss"])
def test_rewards_of_other_signals(tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Entropy and gradient norm of each target by PyTorch, and validation losses of the Trainer."""
    parts = [MapDistributor(samples(name, seed)[:6], shuffle=False) for seed, name in enumerate("ab")]
    mixture = MixtureDistributor(parts, [1, 1], repeat=True, names=["a", "b"])
    stream = TrainerStream(lambda: DataflowLoader(mixture))
    model, seen = tiny_qwen2(), Seen()
    collator = PaddingFreeCollator() if kind == "validation_loss" else seen
    more: Any = {"eval_strategy": "steps", "eval_steps": 1} if kind == "validation_loss" else {}
    args = packed_training_arguments(
        str(tmp_path), stream, **QUIET_RUN | {"max_steps": 3, "learning_rate": 0.0} | more
    )
    evaluated = {name: [samples(name, seed)[:2]] for seed, name in enumerate("ab")}
    callbacks = [TrainerStreamCallback(stream), MixtureCallback(mixture, every=3, signal=kind)]
    trainer = Trainer(
        model, args, train_dataset=stream, eval_dataset=evaluated, data_collator=collator, callbacks=callbacks
    )
    with caplog.at_level(logging.INFO):
        trainer.train()
    last = next(entry for entry in reversed(trainer.state.log_history) if "data/rank" in entry)
    by_id = {sample.id: sample for seed, name in enumerate("ab") for sample in samples(name, seed)}
    metrics = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
    values = {name: [metrics[f"eval_{name}_loss"]] for name in "ab" if kind == "validation_loss"}
    for ident in [ident for row in seen.ids[:3] for ident in row]:
        ids = torch.tensor(by_id[ident].input_ids)[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        logits.requires_grad_()
        if kind == "entropy":
            of_targets = torch.distributions.Categorical(logits=logits).entropy()
        else:
            torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").backward()
            of_targets = logits.grad.norm(dim=-1)
        values.setdefault(ident[0], []).extend(of_targets.tolist())
    for name, own in values.items():
        expected = sum(own) / len(own)
        assert last[f"data/{kind}/{name}"] == last[f"data/reward/{name}"] == pytest.approx(expected, rel=1e-4)
    (line,) = [one.getMessage() for one in caplog.records if "of the mixture" in one.getMessage()]
    assert re.match(
        r"rank 0: update 1 of the mixture, from step \d+ .*: a 0\.\d+(, reward [\d.]+)?, \d samples; b ", line
    )


class WithoutLogits(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, **inputs: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.weight * 1}


def test_errors_are_one_line(tmp_path: Path) -> None:
    mixture = MixtureDistributor([MapDistributor([1])], [1])
    with pytest.raises(ConfigError, match="`every` must be at least 1, got 0"):
        MixtureCallback(mixture, every=0)
    with pytest.raises(ConfigError, match="`signal` must be one of loss, entropy, .* got 'accuracy'"):
        MixtureCallback(mixture, signal="accuracy")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs eval_dataset={NAME: dataset} .* with the names 0, got the m"):
        MixtureCallback(mixture, signal="validation_loss").on_evaluate(None, None, None, {"eval_loss": 1.0})

    def train(data: Any, collator: Any, model: Any) -> None:
        args = TrainingArguments(str(tmp_path), **QUIET_RUN, max_steps=1, remove_unused_columns=False)
        callbacks = [MixtureCallback(mixture)]
        Trainer(model, args, train_dataset=data, data_collator=collator, callbacks=callbacks).train()

    features = [{"input_ids": [2] * 9, "labels": [2] * 9}]
    with pytest.raises(BatchError, match="needs batches with sources, got a dict without. Pass PaddingFreeCollator"):
        train(features, DataCollatorWithFlattening(), tiny_qwen2())
    with pytest.raises(ConfigError, match="needs the logits of the model, got none. Turn off kernels"):
        train([samples("a", 0)[:2]], PaddingFreeCollator(), WithoutLogits())
    with pytest.raises(ConfigError, match="Unknown reward name 'a'. Known names: 0"):
        train([samples("a", 0)[:2]], PaddingFreeCollator(), tiny_qwen2())


GROUPS = """
from energon_packed import MapDistributor, MixtureCallback, MixtureDistributor
parts = [MapDistributor(range(4)), MapDistributor(range(4))]
groups = [torch.distributed.new_group([index]) for index in range(count)]
callback = MixtureCallback(
    MixtureDistributor(parts, [1, 1], repeat=True, names=["a", "b"]), every=2, group=groups[rank])
saved = {"losses": {}, "sums": [{"a": (3.0, 2.0, 4)}], "last": {"reward": {}, "count": {}}, "validation": {}}
callback.restore(saved, None, None)
assert callback.state()["sums"] == saved["sums"], callback.state()
"""


def test_losses_are_restored_in_the_group_of_the_ranks_that_read_different_data(tmp_path: Path) -> None:
    run_ranks(GROUPS, 2, tmp_path / "store")
