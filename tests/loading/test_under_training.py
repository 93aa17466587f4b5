"""Trouble while a job trains: one clear error, or the data that it began with. No hang, no mixture, no short epoch."""

import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from energon_packed import (
    BatchError,
    ConfigError,
    DataChangedError,
    DataflowConfig,
    DataflowLoader,
    EnergonDistributor,
    EnergonPackedError,
    FormatError,
    MapDistributor,
    PackedDataset,
    PackedIterableDataset,
    PackOptions,
    PaddingFreeCollator,
    SourceError,
    WorkerError,
    get_packed_loader,
    pack,
)
from tests.internals import StoredTokens, cli, transport

RECORDS, NEW = 24, 5000  # tokens of records that replace others begin at NEW
HANG = 240  # seconds: what takes longer is a hang, also on a slow machine
pytestmark = pytest.mark.timeout(HANG, method="signal")  # which interrupts a main process that waits


@pytest.fixture(autouse=True)
def _no_children() -> Iterator[None]:
    yield
    with torch_notices_no_death():
        for child in multiprocessing.active_children():
            child.kill()
            child.join()


@contextmanager
def torch_notices_no_death() -> Iterator[None]:
    """Without its SIGCHLD handler, which raises wherever the main process is."""
    of_torch = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, of_torch)


class Faulty(StoredTokens):
    """Where `flag` exists, record r13 kills its worker, or is on a file system that hangs."""

    def __init__(self, folder: Path, *, hangs: bool = False) -> None:
        self.flag, self.fifo, self.hangs = folder / "flag", folder / "fifo", hangs
        if hangs:
            os.mkfifo(self.fifo)

    def encode_row(self, ids: Any, input_ids: Any, labels: Any, cu_seqlens: Any, loss_weights: Any = None) -> Any:
        if "r13" in ids and self.flag.exists():
            if self.hangs:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what waits for a disk is deaf to it
                os.open(self.fifo, os.O_RDONLY)  # nobody ever writes to it
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_row(ids, input_ids, labels, cu_seqlens, loss_weights)


def write(folder: Path, first: int = 0) -> Path:
    """Records of the same ids and lengths whatever `first`, so that packs of another run lie at the same bytes."""
    file = folder / "data.jsonl"
    rows = [[first + 100 + n] * (4 + n % 5) for n in range(RECORDS)]
    file.write_text(
        "".join(f"{json.dumps({'id': f'r{n}', 'input_ids': r, 'labels': r})}\n" for n, r in enumerate(rows))
    )
    return file


def packed(folder: Path, first: int = 0) -> Path:
    """24 packs of one record each, in 6 shards."""
    options: dict[str, Any] = {"max_samples_per_pack": 1, "max_packs_per_shard": 4, "workers": 1, "overwrite": True}
    inputs = (str(write(folder, first)),)
    out = folder / "out"
    options |= {"sample_class": "PackedTokensSample", "shard_prefix": "x"}
    return pack(PackOptions(inputs=inputs, output_dir=out, seq_len=8, encoder=StoredTokens(), **options)).shards


def by_energon(path: Path, workers: int, encoder: Any = None, **options: Any) -> Any:
    return get_packed_loader(path, encoder, epochs=1, num_workers=workers, check_encoder=False, **options)


def by_dataset(path: Path, workers: int, encoder: Any = None, **options: Any) -> Any:
    dataset = PackedDataset(path, encoder, check_encoder=False)
    return torch.utils.data.DataLoader(dataset, num_workers=workers, collate_fn=joined, **options)


def joined(packs: list[Any]) -> Any:
    return PaddingFreeCollator().collate([sample for one in packs for sample in one])


def by_dataflow(path: Path, workers: int, encoder: Any = None, **options: Any) -> Any:
    items = MapDistributor(PackedDataset(path, encoder, check_encoder=False))
    return DataflowLoader(items, num_workers=workers, **options)


def by_distributor(path: Path, workers: int, encoder: Any = None, **options: Any) -> Any:
    return DataflowLoader(EnergonDistributor(path, shuffle_buffer_size=3), encoder, num_workers=workers, **options)


def by_stream(path: Path, workers: int, encoder: Any = None, **options: Any) -> Any:
    data = str(path.parents[1] / "data.jsonl")
    names = [name for name in options if name in ("max_failures",)]
    config = DataflowConfig(
        dataset_path=data,
        packing_length=8,
        packing_strategy="sequential",
        encoder=encoder or StoredTokens(),
        **{name: options.pop(name) for name in names},
    )
    return PackedIterableDataset(config, num_workers=workers, **options)


READERS = [by_energon, by_dataset, by_dataflow, by_distributor, by_stream]
RESUMING = [by_energon, by_dataflow, by_distributor, by_stream]
Reader = Callable[..., Any]


def tokens(batch: Any) -> dict[str, int]:
    """First token of every sample of a batch, by its id."""
    starts = batch.cu_seqlens[:-1].tolist()
    return {ident: int(batch.input_ids[0, start]) for ident, start in zip(batch.ids, starts, strict=True)}


def read_all(batches: Any) -> dict[str, int]:
    return {ident: token for batch in batches for ident, token in tokens(batch).items()}


WHOLE = {f"r{n}": 100 + n for n in range(RECORDS)}


def in_place(file: Path, content: bytes) -> None:
    """As `cp` over a file that is there: the same inode, cut and written anew."""
    with file.open("r+b") as stream:
        stream.truncate(0)
        stream.write(content)


def remove(folder: Path) -> None:
    for file in (*folder.glob("*-000003.tar"), folder.parents[1] / "data.jsonl"):
        file.unlink()


def cut(folder: Path) -> None:
    for file in (*folder.glob("*-000003.tar"), folder.parents[1] / "data.jsonl"):
        in_place(file, file.read_bytes()[: file.stat().st_size // 2])


def zero(folder: Path) -> None:
    for file in (*folder.glob("*-000003.tar"), folder.parents[1] / "data.jsonl"):
        in_place(file, bytes(file.stat().st_size))


def replace_by_fifo(folder: Path) -> None:
    for file in (*folder.glob("*-000003.tar"), folder.parents[1] / "data.jsonl"):
        file.unlink()
        os.mkfifo(file)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("reader", READERS)
def test_damage_between_epochs_is_named(tmp_path: Path, reader: Reader, workers: int) -> None:
    for number, damage in enumerate([remove, zero] if workers else [remove, cut, zero, replace_by_fifo]):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = packed(folder)
        batches = reader(path, workers)
        assert read_all(batches) == WHOLE
        damage(path)
        try:
            again = read_all(batches)
        except EnergonPackedError as error:
            assert str(folder) in str(error), damage
            if reader is not by_dataset or not workers:  # torch adds the traceback of the worker
                assert "\n" not in str(error), damage
        else:
            assert again == WHOLE, damage  # files that are open stay readable


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("reader", READERS[:-1])
def test_packing_again_under_a_job_mixes_nothing(tmp_path: Path, reader: Reader, workers: int) -> None:
    path = packed(tmp_path)
    batches = reader(path, workers, **({"prefetch_factor": 1} if workers and reader is not by_energon else {}))
    iterator = iter(batches)
    seen = tokens(next(iterator))
    state = batches.state_dict() if reader is not by_dataset else None
    sizes = {tar.name: tar.stat().st_size for tar in path.glob("*.tar")}
    packed(tmp_path, NEW)
    assert {tar.name: tar.stat().st_size for tar in path.glob("*.tar")} == sizes  # nothing but content tells
    raised = ""
    try:
        for _ in range(3):
            for batch in iterator:
                seen |= tokens(batch)
            iterator = iter(batches)
    except DataChangedError as error:
        raised = str(error)
    assert seen.items() <= WHOLE.items()
    if raised:
        assert re.search(f"{tmp_path}.* was (replaced or changed|removed or replaced) while it was in use", raised)
    else:
        assert seen == WHOLE
        assert reader is not by_dataset  # the others read ahead: all files are open already
    if state is not None:
        with pytest.raises(
            BatchError, match=r"The dataset changed since the state was saved \(.* saved, .* now\). Restore"
        ):
            reader(path, workers).load_state_dict(state)
    assert min(read_all(reader(path, workers)).values()) >= NEW


def test_packing_again_between_epochs_is_refused(tmp_path: Path) -> None:
    """Energon would read the new data as the next epoch, in a state that says that it is the old."""
    path = packed(tmp_path)
    loader = get_packed_loader(path, num_workers=0, complete_epochs=True)
    stream = iter(loader)
    read = [tokens(next(stream)) for _ in range(RECORDS)]
    assert {key for one in read for key in one} == set(WHOLE)
    packed(tmp_path, NEW)
    with pytest.raises(DataChangedError):
        next(stream)
    with pytest.raises(DataChangedError):
        loader.state_dict()


@pytest.mark.parametrize("reader", READERS[:-1])
def test_a_copy_of_the_same_shard_is_no_change(tmp_path: Path, reader: Reader) -> None:
    path = packed(tmp_path)
    batches = reader(path, 0)
    assert read_all(batches) == WHOLE
    for tar in path.glob("*.tar"):
        shutil.copyfile(tar, tmp_path / "copy")
        (tmp_path / "copy").rename(tar)
    assert read_all(batches) == WHOLE


@pytest.mark.parametrize("reader", [by_energon, by_dataset])
def test_a_shard_that_is_cut_while_it_is_open_ends_no_process(tmp_path: Path, reader: Reader) -> None:
    path = packed(tmp_path)
    iterator = iter(reader(path, 0))
    seen = tokens(next(iterator))
    for tar in path.glob("*.tar"):
        in_place(tar, b"")
    try:
        seen |= read_all(iterator)
    except DataChangedError as error:
        assert "bytes before, 0 now" in str(error)
        assert seen.items() <= WHOLE.items()
    else:
        assert reader is by_energon  # it reads ahead: the packs are in memory already
        assert seen == WHOLE


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("reader", READERS)
def test_a_corrupt_sample_is_named_or_counted(tmp_path: Path, reader: Reader, workers: int) -> None:
    path = packed(tmp_path)
    for file in (*path.glob("*.tar"), tmp_path / "data.jsonl"):
        content = file.read_bytes()
        bad = content.replace(b'"r13"', b'\x00r13"')  # in JSON of the pack, and in the line of the record
        file.write_bytes(bad)
    with pytest.raises(EnergonPackedError, match=r"json|bad_json"):
        read_all(reader(path, workers, **({"max_failures": 0} if reader is by_stream else {})))
    if reader is by_dataset:
        return  # torch's DataLoader has no policy: its dataset raises
    batches = reader(path, workers, max_failures=1)
    assert read_all(batches) == {key: value for key, value in WHOLE.items() if key != "r13"}
    assert sum(batches.failures.counts.values()) == 1


@pytest.mark.parametrize("reader", RESUMING)
def test_a_killed_worker_is_one_error_and_the_state_is_good(tmp_path: Path, reader: Reader) -> None:
    path, encoder = packed(tmp_path), Faulty(tmp_path)
    whole = [tokens(batch) for batch in reader(path, 2, encoder)]
    encoder.flag.touch()
    batches = reader(path, 2, encoder)
    read, states = [], []
    message = r"\(pid \d+\) was killed by signal 9 \(SIGKILL\): out of memory.*resume from the last saved state"
    with pytest.raises(WorkerError, match=message) as caught:
        for batch in batches:
            read.append(tokens(batch))
            states.append(batches.state_dict())
    assert read == whole[: len(read)]
    assert len(read) < len(whole)
    assert "\n" not in str(caught.value)
    encoder.flag.unlink()
    fresh = reader(path, 2, encoder)
    if states:
        fresh.load_state_dict(states[-1])
    assert [tokens(batch) for batch in fresh] == whole[len(states) :]
    assert [tokens(batch) for batch in batches] == whole[len(read) :]


@pytest.mark.parametrize("reader", RESUMING)
def test_a_worker_killed_in_the_training_step_is_one_error_after_it_and_ends_the_others(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_STEPS", 1)  # or a worker could end, because its first message has all its steps
    path = packed(tmp_path)
    before, steps = set(multiprocessing.active_children()), 0
    with pytest.raises(
        WorkerError, match=r"^a worker process of .* \(pid \d+\) was killed by signal 9 \(SIGKILL\): .*new loader.$"
    ):
        for _ in reader(path, 2):
            workers = set(multiprocessing.active_children()) - before
            assert len(workers) == 2
            os.kill(next(iter(workers)).pid, signal.SIGKILL)  # type: ignore[arg-type]
            time.sleep(1)  # the training step, which the signal does not interrupt
            steps += 1
    assert steps == 1
    assert not set(multiprocessing.active_children()) - before


class TwoArguments(EnergonPackedError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class WithMessage(Exception):
    message = "of the class"


class Raising(StoredTokens):
    """Raises an error for record r13 that another process cannot restore."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def encode_row(self, ids: Any, input_ids: Any, labels: Any, cu_seqlens: Any, loss_weights: Any = None) -> Any:
        class Local(Exception):
            pass

        class LocalOfThePackage(EnergonPackedError):
            pass

        if "r13" in ids:
            errors = [Local("the cause"), LocalOfThePackage("the cause"), WithMessage("the cause")]
            errors.append(TwoArguments("the", "cause"))
            raise next(error for error in errors if type(error).__name__ == self.kind)
        return super().encode_row(ids, input_ids, labels, cu_seqlens, loss_weights)


@pytest.mark.parametrize("kind", ["Local", "LocalOfThePackage", "WithMessage", "TwoArguments"])
@pytest.mark.parametrize("reader", [by_energon, by_dataset, by_dataflow, by_stream])
def test_an_error_that_cannot_be_unpickled_is_sent_as_text(tmp_path: Path, reader: Reader, kind: str) -> None:
    path = packed(tmp_path)
    own = kind in ("LocalOfThePackage", "TwoArguments")
    for workers in (2, 0):
        with pytest.raises(Exception, match=r"the cause") as raised:
            read_all(reader(path, workers, Raising(kind), **({"timeout": 20} if workers else {})))
        if workers:
            assert type(raised.value) is (EnergonPackedError if own else RuntimeError)
            assert f"{kind}: the cause" in str(raised.value)
        else:
            assert type(raised.value).__name__ == kind
    del raised
    gc.collect()  # ends the workers: later tests stop all child processes


def test_a_killed_worker_of_stock_torch_is_an_error_too(tmp_path: Path) -> None:
    path, encoder = packed(tmp_path), Faulty(tmp_path)
    encoder.flag.touch()
    iterator = iter(by_dataset(path, 2, encoder))
    with torch_notices_no_death():
        with pytest.raises((RuntimeError, OSError, EOFError)):
            read_all(iterator)
        for worker in iterator._workers:
            worker.kill()


@pytest.mark.parametrize("reader", [by_energon, by_dataflow])
def test_storage_that_hangs_is_one_error_after_the_timeout(tmp_path: Path, reader: Reader) -> None:
    path, encoder = packed(tmp_path), Faulty(tmp_path, hangs=True)
    encoder.flag.touch()
    batches = reader(path, 2, encoder, timeout=4)
    with pytest.raises(
        WorkerError, match=r"timed out after 4.* seconds \(`timeout`\) waiting for a batch: storage hangs"
    ):
        read_all(batches)
    assert not multiprocessing.active_children()  # or Python would wait for them when it exits


def test_a_timeout_without_workers_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = packed(tmp_path)
    by_energon(path, 0, timeout=5)
    assert "timeout need worker processes, so they have no effect with `num_workers` 0" in caplog.text
    with pytest.raises(ConfigError, match="`timeout` must be at least 0, got -1"):
        by_energon(path, 2, timeout=-1)


def test_a_fifo_is_named_and_not_waited_for(tmp_path: Path) -> None:
    whole = packed(tmp_path)
    files = [*whole.glob("*-000000.*"), *(whole / ".nv-meta").iterdir()]
    names = sorted(file.relative_to(whole) for file in files)
    for number, name in enumerate(names):
        folder = tmp_path / f"copy{number}"
        shutil.copytree(whole, folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        for reader in (by_energon, by_dataset):
            with pytest.raises(FormatError, match=f"{folder / name} is a FIFO, not a regular file; "):
                reader(folder, 0)
        for command in ("inspect", "verify", "report", "nv-meta"):
            found = CliRunner().invoke(cli, [command, str(folder)])
            if command in ("inspect", "nv-meta") and name.suffix != ".tar":
                continue  # the one does not read the others, the other replaces them
            assert found.exit_code == 1, (command, name)
            assert "FIFO" in f"{found.exception} {' '.join(found.output.split())}", (command, name)


def test_an_input_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "d.jsonl")
    with pytest.raises(SourceError, match="d.jsonl is a FIFO, not a regular file"):
        pack(tmp_path / "d.jsonl", output_dir=tmp_path / "out", seq_len=8, encoder=StoredTokens())


def test_a_tar_header_of_negative_size_ends(tmp_path: Path) -> None:
    path = packed(tmp_path)
    tar = next(path.glob("*.tar"))
    content = bytearray(tar.read_bytes())
    content[124:136] = b"-0000001000\0"  # as many bytes as a header: read naively, the same header follows
    content[148:156] = b"%06o\0 " % (sum(content[:148]) + 8 * ord(" ") + sum(content[156:512]))
    tar.write_bytes(content)
    dataset = PackedDataset(path)
    with pytest.raises(FormatError, match="damaged header at byte 0: its size is b'-0000001000"):
        [dataset[place] for place in range(len(dataset))]


def test_a_state_is_of_the_packs_and_not_of_their_number(tmp_path: Path) -> None:
    """What refuses a state of the data before: the hashes, as numbers and sizes are equal."""
    path = packed(tmp_path)
    prints = [PackedDataset(path).fingerprint()]
    packed(tmp_path, NEW)
    assert len({*prints, PackedDataset(path).fingerprint()}) == 2
    assert np.all(PackedDataset(path).lengths > 0)
