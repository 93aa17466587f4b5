"""How batches travel from worker processes to the main process: several steps in one message, rows in a compact form.

    worker   Step, Step, ... ──encoded──► Message: one bytes object, large tensors ──queue of torch's DataLoader──┐
    main     ... Step, Step ◄──decoded, one of each worker in turn ◄──────────────────────────────────────────────┘

Sending one message costs both processes together some 0.6 ms of CPU time, whatever its size (locks, threads that wake
up, a request for the next one), and 115 KB through a pipe cost half as much again. A row of 4096 tokens is made in
1.3 ms. Therefore

- up to 16 steps share a message, as many as are made in half a second and fit 256 KiB: a row of pixels goes alone, and
  so does each batch of a slow processor;
- a row of text is sent as some 9 KB: its ids in the narrowest integers that hold them, its targets as bits. Labels,
  weights and positions are made again where they follow from those, which the worker checks for every row: compact.py;
- tensors above 1 MiB, and batches that are no PackedBatch, travel as torch sends them, in shared memory.

Steps are handed out one of each worker in turn, whatever messages they came in, so order and states do not depend on
them. A worker far ahead of what was handed out sends empty messages: what waits in the main process is bounded.
"""

import pickle
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch._utils import ExceptionWrapper

from energon_packed.dataflow.compact import decode_batch, encode_batch
from energon_packed.dataflow.worker_stream import Step
from energon_packed.errors import EnergonPackedError

_STEPS = 16  # in one message
_BYTES = 1 << 18  # of a message, from which on it is sent
_SECONDS = 0.5  # after which a message is sent with what it has


class Message(NamedTuple):
    """What torch's queue takes.

    Attributes:
        worker: who sends it.
        blob: the steps, pickled: (batch, bytes, other fields) of each, or an error.
        objects: tensors and batches that torch sends in its own way; the blob has their numbers.
    """

    worker: int
    blob: bytes
    objects: list[Any]

    def entries(self) -> "Iterator[_Entry]":
        """The steps, as they came."""
        for one in pickle.loads(self.blob):
            yield _Entry(self.worker, one, self.objects)

    def pin_memory(self) -> "PinnedMessage":
        """The steps with pinned tensors; the thread of DataLoaders with `pin_memory=True` calls it."""
        from torch.utils.data._utils.pin_memory import pin_memory

        found = []
        for entry in self.entries():
            step = entry.decoded()
            if isinstance(step, Step):
                step = step._replace(batch=pin_memory(step.batch))  # type: ignore[no-untyped-call]
            found.append(entry._replace(step=step))
        return PinnedMessage(self.worker, found)


class PinnedMessage(NamedTuple):
    """A message whose steps were decoded and pinned."""

    worker: int
    decoded: "list[_Entry]"

    def entries(self) -> "Iterator[_Entry]":
        """The steps."""
        return iter(self.decoded)


class _Entry(NamedTuple):
    """A step that arrived.

    Attributes:
        worker: who sent it.
        sent: what the blob had.
        objects: of the message.
        step: decoded already.
    """

    worker: int
    sent: Any
    objects: list[Any]
    step: Any = None

    @property
    def size(self) -> int:
        return self.sent[1] if isinstance(self.sent, tuple) else 0

    def decoded(self) -> Any:
        """A Step, or an error."""
        if self.step is not None or not isinstance(self.sent, tuple):
            return self.step or self.sent
        batch, _, *rest = self.sent
        return Step(self.worker, decode_batch(batch, self.objects), *rest)


class Counts:
    """Steps and bytes of each worker that were handed out, seen by all processes.

    Args:
        num_workers: processes.
    """

    def __init__(self, num_workers: int) -> None:
        self._handed = torch.zeros((2, num_workers), dtype=torch.int64)
        torch.Tensor.share_memory_(self._handed)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Before an epoch, or the rest of one."""
        self._handed.zero_()

    def handed_out(self) -> npt.NDArray[np.int64]:
        """int64 (2, workers), steps and bytes, in shared memory."""
        return np.asarray(self._handed.numpy())


class Outbox:
    """The messages of one worker.

    Args:
        worker: its number.
        counts: what was handed out.
        in_flight: messages that torch asks for in advance.
        one_by_one: each step is a message.
    """

    def __init__(self, worker: int, counts: Counts, in_flight: int, *, one_by_one: bool) -> None:
        self._worker, self._handed, self._in_flight = worker, counts.handed_out()[:, worker], in_flight
        self._steps = 1 if one_by_one else _STEPS
        self._made = np.zeros(2, dtype=np.int64)

    def messages(self, steps: Iterator[Any]) -> Iterator[Message]:
        """Send the steps and errors, in order."""
        ended = False
        while not ended:
            while self._steps > 1 and self._is_far_ahead():
                yield Message(self._worker, _EMPTY, [])
            begin, size, sent, objects = time.monotonic(), 0, [], list[Any]()
            ended = True
            for step in steps:
                sent.append(encode_step(step, objects))
                size += sent[-1][1] if isinstance(sent[-1], tuple) else 0
                if len(sent) >= self._steps or size >= _BYTES or time.monotonic() - begin >= _SECONDS:
                    ended = False
                    break
            self._made += len(sent), size
            if sent:
                yield Message(self._worker, pickle.dumps(sent, pickle.HIGHEST_PROTOCOL), objects)

    def _is_far_ahead(self) -> bool:
        steps, size = (self._made - self._handed).tolist()
        return bool(steps > self._in_flight + 1 and size > 2 * (self._in_flight + 2) * _BYTES)


def guarded(steps: Iterator[Any], worker: int) -> Iterator[Any]:
    """The steps, and an error in its place behind them: the main process raises it in turn."""
    try:
        yield from steps
    except EnergonPackedError as error:  # torch would turn it into a traceback
        yield error
    except Exception:
        yield ExceptionWrapper(where=f"in DataLoader worker process {worker}")  # type: ignore[no-untyped-call]


def in_turn(messages: Iterator[Any], first: int, counts: Counts) -> Iterator[Any]:
    """One step of each worker in turn, from worker `first` on, until all ended.

    Raises:
        EnergonPackedError: a worker raised it.
        Exception: what else a worker raised, with its traceback in the message, as torch does.
    """
    handed = counts.handed_out()
    workers = handed.shape[1]
    waiting: dict[int, deque[_Entry]] = {(first + place) % workers: deque() for place in range(workers)}
    while waiting:
        for worker, mine in list(waiting.items()):
            while not mine:
                message = next(messages, None)
                if message is None:
                    return
                waiting[message.worker].extend(message.entries())
            entry = mine.popleft()
            step = entry.decoded()
            if isinstance(step, ExceptionWrapper):
                step.reraise()  # type: ignore[no-untyped-call]
            if isinstance(step, Exception):
                raise step
            handed[:, worker] += 1, entry.size
            if step.ended:
                del waiting[worker]
            yield step
    for _ in messages:  # torch's iterator ends, and its workers with it
        pass


def encode_step(step: Any, objects: list[Any]) -> Any:
    """What the blob has of a step: (batch, bytes, other fields of it); an error as it is."""
    if not isinstance(step, Step):
        return step
    batch, size = encode_batch(step.batch, objects, alone=_BYTES)
    size += 0 if step.state is None else len(step.state[1])
    return batch, size, *step[2:]


_EMPTY = pickle.dumps([])
