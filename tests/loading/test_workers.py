"""Worker processes that die or do not answer: one line, the other workers ended, and only when a batch is read."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection, queues
from typing import Any

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from energon_packed import DataflowLoader, MapDistributor, WorkerError
from tests.internals import StoredTokens, WatchedWorkers
from tests.loading.flows import feature

DATA = [feature(number) for number in range(6)]
HANG = 120  # seconds: what takes longer is a hang, also on a slow machine
pytestmark = pytest.mark.timeout(HANG, method="signal")  # which interrupts a main process that waits


class Numbers(torch.utils.data.IterableDataset[Any]):
    """Numbers of a worker; a string in place of a number is code that worker 0 executes."""

    def __init__(self, *numbers: Any) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers:
            if isinstance(number, str) and torch.utils.data.get_worker_info().id == 0:  # type: ignore[union-attr]
                exec(number)
            yield number


class X(torch.utils.data.DataLoader[Any]):
    """Its name is in messages."""


def batches(*numbers: Any, timeout: float = 0, **options: Any) -> tuple[Iterator[Any], set[Any]]:
    """An iterator over the numbers of two workers, and the workers."""
    before = set(multiprocessing.active_children())
    loader = X(Numbers(*numbers), batch_size=None, num_workers=2, timeout=timeout, **options)
    found = WatchedWorkers(loader)
    return found, set(multiprocessing.active_children()) - before


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"was killed by signal 9 \(SIGKILL\): out of memory \(see dmesg\)"),
        ("os.kill(os.getpid(), signal.SIGBUS)", r"was killed by signal 7 \(SIGBUS\): shared memory is full"),
        ("os._exit(3)", "ended with exit code 3: out of memory, or a crash"),
        ("os._exit(0)", "ended with exit code 0: out of memory, or a crash"),  # torch counts it as an unexpected end
    ],
)
def test_a_worker_that_dies_is_named_with_signal_or_exit_code(code: str, message: str) -> None:
    found, workers = batches(*range(3), code, *range(100))
    with pytest.raises(WorkerError, match=rf"^a worker process of X (\(pid \d+\) )?{message}.*new loader\.$"):
        list(found)
    assert not workers & set(multiprocessing.active_children())


def test_a_worker_that_dies_while_the_main_process_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes in the constructor of torch's iterator, between the requests of the first batches."""
    before, of_queue = set(multiprocessing.active_children()), queues.Queue.put

    def put(*args: Any) -> None:
        of_queue(*args)
        time.sleep(1)

    monkeypatch.setattr(queues.Queue, "put", put)
    with pytest.raises(WorkerError, match=r"^a worker process of X \(pid \d+\) was killed by signal 9"):
        batches("os.kill(os.getpid(), signal.SIGKILL)")
    assert not set(multiprocessing.active_children()) - before


def test_a_worker_that_dies_in_a_write_does_not_hang_the_reader() -> None:
    """It leaves a part of a message in the pipe, whose rest nobody writes."""
    die = "import threading; threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()"
    found, workers = batches(1, die, b"x" * (64 << 20))
    next(found)
    assert connection.wait([worker.sentinel for worker in workers], HANG)  # the writes of both wait for a reader
    with pytest.raises(WorkerError, match="SIGKILL"):
        list(found)


def test_a_training_step_is_not_interrupted() -> None:
    found, workers = batches(*range(100))
    next(found)
    victim = next(iter(workers))
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(HANG)
    time.sleep(0.1)  # the training step
    with pytest.raises(WorkerError, match=rf"pid {victim.pid}\) was killed by signal 9"):
        next(found)
    assert not workers & set(multiprocessing.active_children())


def test_torch_interrupts_a_training_step() -> None:
    """Without this behavior of torch, `workers.py` needs no process ids of torch; it is the error of other loaders."""
    found = iter(torch.utils.data.DataLoader(range(100), num_workers=1))  # type: ignore[arg-type]
    next(found)
    with pytest.raises(RuntimeError, match="DataLoader worker .* is killed by signal") as raised:
        os.kill(found._workers[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        time.sleep(HANG)
    assert not isinstance(raised.value, WorkerError)


@pytest.mark.parametrize("pin", [False, True])
def test_a_batch_that_does_not_come_is_one_error(pin: bool) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
    found, workers = batches(1, deaf, timeout=2, pin_memory=pin)
    with pytest.raises(WorkerError, match=r"^X timed out after 2 seconds \(`timeout`\) waiting for a batch: storage"):
        list(found)
    assert not workers & set(multiprocessing.active_children())


def test_workers_that_end_and_other_errors_are_not_deaths() -> None:
    found, _ = batches(1, 2, timeout=30)
    assert sorted(found) == [1, 1, 2, 2]
    found, _ = batches(1, "raise RuntimeError('of a sample')", timeout=30)
    with pytest.raises(RuntimeError, match="of a sample") as raised:
        list(found)
    assert not isinstance(raised.value, WorkerError)


def test_persistent_workers_are_watched_in_each_epoch() -> None:
    before = set(multiprocessing.active_children())
    loader = DataflowLoader(MapDistributor(DATA), StoredTokens(), batch_size=1, num_workers=2, persistent_workers=True)
    for _ in range(3):
        assert len(list(loader)) == len(DATA)
    (victim, *_) = set(multiprocessing.active_children()) - before
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(HANG)
    with pytest.raises(WorkerError, match="was killed by signal 9"):
        next(iter(loader))
    assert len(list(loader)) == len(DATA)  # in new workers


def test_a_connection_to_a_dead_worker_is_its_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch notices it if a tensor comes in shared memory: ConnectionResetError, before the signal."""

    found, workers = batches(1)
    victim = next(iter(workers))

    def reset(self: Any) -> Any:
        threading.Timer(0.5, victim.kill).start()
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_next_data", reset)
    of_torch = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with pytest.raises(WorkerError, match=r"worker process of X \(pid \d+\) was killed by signal 9 ") as raised:
            next(found)
    finally:
        signal.signal(signal.SIGCHLD, of_torch)
    assert isinstance(raised.value.__cause__, ConnectionResetError)
