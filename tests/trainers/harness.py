"""In a test: prove that a trainer is trained on exactly the packed samples.

    result = prove("huggingface", data, kind="stream", packages=("transformers", "accelerate"))
    result.assert_exact()

Each trainer has a folder `tests/trainers/NAME`: `run.py` (see `recorder.py`), `test_NAME.py`, `result.json`, and
`requirements.txt` if the development environment does not have its packages; packages that are installed without their
requirements are in `requirements-no-deps.txt`. `prove` runs `run.py` as 2 ranks four times:

| run | learning rate | dropout | compared with |
|---|---|---|---|
| exact | 0 | 0 | each sample alone, in float64: the loss of each row, the gradient of each step |
| complete | 0.005 | 0.1 | |
| killed | 0.005 | 0.1 | `complete`: the same rows and losses until SIGKILL, on a random rank and micro batch |
| resumed | 0.005 | 0.1 | `complete`: the remaining rows and losses, and the final weights, bit by bit |

The number of packs is odd: at the end of an epoch one rank has no pack, and a step has fewer micro batches.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from energon_packed import PackedDataset, pack
from tests.internals import write_tokenizer
from tests.processes import Python
from tests.trainers.recorder import IGNORED, Spec

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
PACKS = 13
TOLERANCE = 1e-5  # of float32, relative
VOCABULARY = 276  # of the tokenizer; some trainers resize embeddings that differ
WRITE_RESULTS = "ENERGON_PACKED_WRITE_RESULTS"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}


class Data:
    """A packed dataset of random tokens, a tiny model, and the loss and gradient of each sample by itself.

    Args:
        folder: an empty folder for all files.
        family: of the model: `qwen2` or `qwen3`.

    Attributes:
        samples: labels and tokens by id, as they were before packing: (input_ids, labels).
        packs: ids of the samples of each pack.
        folder: has `packs`, `model`, `tokenizer` and `samples.json`.
    """

    def __init__(self, folder: Path, family: str = "qwen2") -> None:
        self.folder, self._family = folder, family
        draw = random.Random(0)
        self.samples: dict[str, tuple[list[int], list[int]]] = {}
        for number in range(62):
            tokens = [draw.randrange(5, VOCABULARY) for _ in range(draw.randint(8, 40))]
            prompt = draw.randint(1, 6)
            self.samples[f"s{number}"] = (tokens, [IGNORED] * prompt + tokens[prompt:])
        (folder / "samples.json").write_text(json.dumps(self.samples))
        records = [{"id": name, "input_ids": ids, "labels": labels} for name, (ids, labels) in self.samples.items()]
        (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
        tokenizer = write_tokenizer(folder / "tokenizer", ["a few words", "and more words"] * 9, vision=False)
        shards = pack(
            folder / "records.jsonl", output_dir=folder / "out", seq_len=120, tokenizer=tokenizer,
            sample_class="PackedTokensSample", workers=1,
        ).shards  # fmt: skip
        (folder / "packs").symlink_to(shards)
        self.load_model().save_pretrained(folder / "model")
        self.packs = [[str(sample.id) for sample in group] for group in PackedDataset(shards)]
        assert len(self.packs) == PACKS, f"{len(self.packs)} packs: change the number of samples"

    def load_model(self) -> Any:
        """Return the tiny model, the same at each call."""
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(self._family, pad_token_id=0, **sizes))

    @cached_property
    def reference(self) -> dict[str, tuple[float, int, dict[str, torch.Tensor]]]:
        """Sum of the loss, number of targets and gradient of the sum, of each sample by itself; by id, in float64."""
        model = self.load_model().double()
        found = {}
        for name, (tokens, labels) in self.samples.items():
            model.zero_grad()
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits, torch.tensor(labels[1:]), reduction="sum", ignore_index=IGNORED
            )
            loss.backward()
            gradient = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
            found[name] = (loss.item(), self.targets(name), gradient)
        return found

    def targets(self, name: str) -> int:
        """Number of targets of a sample."""
        return sum(label != IGNORED for label in self.samples[name][1][1:])

    def row(self, ids: Sequence[str]) -> tuple[float, int]:
        """Sum of the loss, and number of targets, of a row with these samples."""
        return sum(self.reference[name][0] for name in ids), sum(self.reference[name][1] for name in ids)


@dataclass(frozen=True)
class Run:
    """What the ranks of one run recorded.

    Attributes:
        rows: of each rank, in order: {"ids": ..., "loss": ..., "targets": ...}.
        weights: digest of the final weights of each rank; missing for a killed rank.
        gradients: of each optimizer step: the number of rows of rank 0 until then, and the gradients by name.
    """

    rows: list[list[dict[str, Any]]]
    weights: list[str]
    gradients: list[tuple[int, dict[str, torch.Tensor]]]


def rendezvous() -> tuple[torch.distributed.TCPStore, dict[str, str]]:
    """Return the store through which the ranks of a run meet, and their environment, as torchrun does.

    This process has the port from the start, and until the last rank has ended: otherwise another process may take it
    before rank 0 listens, or rank 0 may end before the other ranks are done.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    place |= {
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return store, place


def run(name: str, spec: Spec, *, timeout: float = 480) -> Run:
    """Run `tests/trainers/NAME/run.py` as 2 ranks.

    Raises:
        AssertionError: a rank failed, or they did not end in `timeout` seconds; with the end of its output.
    """
    out = Path(spec.out)
    out.mkdir(parents=True)
    file = spec.write(out / "spec.json")
    store, place = rendezvous()
    place |= _ENVIRONMENT
    # The packages of the development environment are imported once, for all processes.
    kind = _Started if (Path(__file__).parent / name / "requirements.txt").exists() else _Forked
    ranks: list[_Started | _Forked] = []
    end = time.monotonic() + timeout
    try:
        for rank in range(RANKS):
            ranks.append(kind(name, file, os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
        while any(rank.status() is None for rank in ranks) and time.monotonic() < end:
            if any(rank.status() for rank in ranks):
                time.sleep(2)  # the other rank may finish a checkpoint, and report the cause
                break
            time.sleep(0.02)
        ended = [rank.status() for rank in ranks]
    finally:
        for started in ranks:
            started.kill()
        del store
    if spec.kill_after:
        assert ended[spec.kill_rank] == -signal.SIGKILL, f"{ended}\n{ranks[spec.kill_rank].output()}"
    else:
        failed = [
            f"exit status {ended[n]} (None: {timeout} s)\n{ranks[n].output()}" for n in range(RANKS) if ended[n] != 0
        ]
        assert not failed, "\n".join(failed)
    files = [out / f"rank{rank}.jsonl" for rank in range(RANKS)]
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    weights = [] if spec.kill_after else [(out / f"rank{rank}.weights").read_text() for rank in range(RANKS)]
    saved = out / "gradients.pt"
    return Run(rows, weights, torch.load(saved) if saved.exists() else [])


class _Started:
    """A rank as a new process, whose python has the packages of a trainer."""

    def __init__(self, name: str, spec: Path, environment: dict[str, str]) -> None:
        self._log = spec.with_name(f"log{environment['RANK']}")
        command = [sys.executable, "-m", f"tests.trainers.{name}.run", str(spec)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def status(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def output(self) -> str:
        return _cause(self._log.read_text(errors="replace"))


class _Forked:
    """A rank as a process of `tests/processes.py`, in the environment of the tests."""

    def __init__(self, name: str, spec: Path, environment: dict[str, str]) -> None:
        code = f"import sys\nfrom tests.trainers.{name}.run import main\nfrom tests.trainers.recorder import Spec\n"
        self._process = Python(code + "main(Spec.read(sys.argv[1]))", spec, env=environment, cwd=ROOT)

    def status(self) -> int | None:
        return self._process.status()

    def kill(self) -> None:
        self._process.kill()

    def output(self) -> str:
        return _cause(self._process.read("stderr"))


def _cause(text: str) -> str:
    """The end of an output, from its first traceback."""
    text = text[max(0, text.find("Traceback")) :]
    return text if len(text) < 6000 else f"{text[:3000]}\n...\n{text[-3000:]}"


@dataclass
class Result:
    """The four runs of a trainer; see the top of this file.

    Attributes:
        name, kind: of the trainer.
        packages: whose versions are in the result.
        title: of its row in the table of docs/reliability.md; its anchors are of docs/trainers.md.
    """

    name: str
    kind: str
    title: str
    packages: Sequence[str]
    data: Data
    exact: Run
    complete: Run
    killed: Run
    resumed: Run
    spec: Spec
    measured: dict[str, Any] = field(default_factory=dict)

    def assert_exact(self, *, repeats: bool = False, endless: bool = False, dropout: str = "equal") -> None:
        """Check all properties, and write the result.

        Args:
            repeats: the trainer repeats one pack at the end of an epoch, instead of a row without targets.
            endless: the next epoch starts within the last step of an epoch.
            dropout: `equal`: a resumed run with dropout equals the uninterrupted run; otherwise, why it has none.

        Raises:
            AssertionError: a property is missing; the message names it.
        """
        assert (dropout == "equal") == (self.spec.dropout > 0)
        self.assert_every_sample(repeats=repeats, endless=endless)
        self.assert_losses()
        self.assert_gradients()
        self.assert_resumed()
        uneven = "one pack twice" if repeats else "the next epoch follows" if endless else "each pack once"
        self.measured |= {"uneven": uneven, "dropout": dropout}
        if os.environ.get(WRITE_RESULTS):
            self.write()

    def assert_every_sample(self, *, repeats: bool = False, endless: bool = False) -> None:
        """Every sample is trained on once in each epoch, and all ranks have the same number of rows."""
        for run_ in (self.exact, self.complete) if self.complete.rows else (self.exact,):
            lengths = {len(rows) for rows in run_.rows}
            assert lengths == {self.spec.epochs * -(-PACKS // RANKS)}, f"{lengths} rows of each rank"
            in_order = [row for step in zip(*run_.rows, strict=True) for row in step]
            size = PACKS if endless else len(in_order) // self.spec.epochs
            for epoch in range(self.spec.epochs):
                seen = Counter(name for row in in_order[epoch * size : (epoch + 1) * size] for name in row["ids"])
                extra = seen - Counter(list(self.data.samples))
                missing = set(self.data.samples) - set(seen)
                assert not missing, f"epoch {epoch}: no row has {sorted(missing)}"
                allowed = [Counter(pack) for pack in self.data.packs] if repeats else [Counter()]
                assert extra in allowed, f"epoch {epoch}: not once: {dict(extra)}"

    def assert_losses(self) -> None:
        """The loss of each row is the sum of the losses of its samples."""
        worst = 0.0
        for row in (row for rows in self.exact.rows for row in rows if row["ids"]):
            loss, targets = self.data.row(row["ids"])
            assert row["targets"] == targets, f"{row}: {targets} targets are expected"
            worst = max(worst, abs(row["loss"] - loss) / loss)
            assert worst < TOLERANCE, f"{row}: the loss of the samples by themselves is {loss}"
        self.measured["loss"] = worst

    def assert_gradients(self) -> None:
        """The gradient of each optimizer step is that of the mean over all targets of its rows on all ranks."""
        start, worst = 0, 0.0
        steps = self.exact.gradients
        assert len(steps) > 1, "no gradient is recorded"
        for step, (end, gradients) in enumerate(steps):
            ids = [name for rows in self.exact.rows for row in rows[start:end] for name in row["ids"]]
            targets, start = self.data.row(ids)[1], end
            distance = size = 0.0
            for name, gradient in gradients.items():
                expected = sum(self.data.reference[one][2][name] for one in ids) / targets
                distance += float((gradient.double() - expected).square().sum())
                size += float(expected.square().sum())  # type: ignore[union-attr]
            assert len(gradients) == len(self.data.reference[ids[0]][2]), "a parameter has no gradient"
            worst = max(worst, (distance / size) ** 0.5)
            assert worst < TOLERANCE, f"step {step}: the relative difference of the gradient is {worst}"
        assert start == len(self.exact.rows[0]), "rows are not part of a step"
        self.measured["gradient"] = worst

    def assert_resumed(self) -> None:
        """A killed run, continued from its last checkpoint, equals the run without interruption."""
        killed = f"killed after micro batch {self.spec.kill_after} of rank {self.spec.kill_rank}"
        for complete, before, after in zip(self.complete.rows, self.killed.rows, self.resumed.rows, strict=True):
            assert before == complete[: len(before)], f"{killed}: other rows before it"
            start = len(complete) - len(after)
            assert 0 < start <= len(before), f"{killed}: resumed after {start} rows"
            assert self.spec.kill_after - start <= 2 * self.spec.accumulation, f"{killed}: resumed after {start} rows"
            assert after == complete[start:], f"{killed}: other rows after it"
        assert len(set(self.complete.weights)) == 1, "ranks have different weights"
        assert self.resumed.weights == self.complete.weights, f"{killed}: other weights at the end"
        self.measured["resume"] = "equal"

    def write(self) -> None:
        """Write the result of this kind to `result.json` of the trainer, for tools/make_tables.py."""
        path = Path(__file__).parent / self.name / "result.json"
        results = json.loads(path.read_text()) if path.exists() else {}
        measured = {key: f"{value:.0e}" if isinstance(value, float) else value for key, value in self.measured.items()}
        versions = {package: version(package).partition("+")[0] for package in (*self.packages, "torch")}
        results[self.kind] = {"title": self.title, "versions": versions, **measured}
        path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


def prove(
    name: str,
    data: Data,
    folder: Path,
    *,
    title: str,
    packages: Sequence[str],
    kind: str = "",
    dropout: float = 0.1,
    resume: bool = True,
) -> Result:
    """Run a trainer four times; see the top of this file.

    Args:
        name: of the folder of the trainer.
        data: shared by all trainers.
        folder: for the records and checkpoints.
        title: of its row in the table.
        packages: whose versions are in the result.
        kind: `Spec.kind`.
        dropout: 0 if a resumed run of the trainer has other dropout.
        resume: False: only the run that is compared with each sample alone.
    """
    steps = -(-PACKS // RANKS) * Spec.__dataclass_fields__["epochs"].default
    files = {key: str(data.folder / key) for key in ("packs", "model", "tokenizer")}
    plain = Spec(
        kind=kind, samples=str(data.folder / "samples.json"), out=str(folder / "exact"),
        checkpoints=str(folder / "checkpoints-exact"), gradients=True, **files,
    )  # fmt: skip
    draw = random.SystemRandom()
    train = replace(plain, gradients=False, learning_rate=5e-3, dropout=dropout)
    kill = {"kill_after": draw.randint(2 * plain.accumulation + 1, steps - 1), "kill_rank": draw.randrange(RANKS)}
    parts = {"checkpoints": str(folder / "checkpoints")}
    complete = replace(train, out=str(folder / "complete"), checkpoints=str(folder / "checkpoints-complete"))
    killed = replace(train, out=str(folder / "killed"), **parts, **kill)
    nothing = Run([], [], [])
    return Result(
        name, kind, title, packages, data,
        exact=run(name, plain),
        complete=run(name, complete) if resume else nothing,
        killed=run(name, killed) if resume else nothing,
        resumed=run(name, replace(train, out=str(folder / "resumed"), **parts, resume=True)) if resume else nothing,
        spec=killed,
    )  # fmt: skip
