"""Steps of worker processes to the steps of the main process: how batches travel through torch's queue.

    worker   PackedBatch ──reduced: small tensors as bytes──┐
             Step, Step, ... ──────► Message ───────────────┴─queue of torch's DataLoader──┐
    main     ... Step, Step ◄──unpickled when its turn comes, round-robin over workers ◄───┘

`send_by_value` changes how a class is pickled for another process, in every DataLoader: its small tensors are bytes in
the message; torch would share memory for each of them (a file descriptor, a connection and a mapping per
tensor). Large tensors and all other objects travel as torch sends them.

A message costs both processes together 0.2 to 0.4 ms of CPU time, more than collating a row of 4096 text tokens.
Its bytes cost time too, most of all beyond the buffer of a pipe. Therefore small steps share a message, and integers
travel in a narrower dtype. Steps are yielded round-robin over workers: order and states do not depend on messages.
A worker that is far ahead sends empty messages, which bounds what waits in the main process.
`tools/bench_transport.py` compares this with torch's own transport.
"""

import copyreg
import io
import pickle
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch._utils import ExceptionWrapper

from energon_packed.errors import EnergonPackedError
from energon_packed.loading.sample_errors import sendable
from energon_packed.system import resource_error

_LARGE = 1 << 20  # bytes of a tensor above which shared memory is cheaper than a copy through a pipe
_STEPS = 16  # maximum steps in a message
_BYTES = 1 << 19  # a message is sent when it has as many
_SECONDS = 0.5  # or when it is as old
# Narrower dtypes to try: for ids, labels and positions, and for loss weights.
_NARROWER = {"int64": ("int16", "int32"), "float32": ("bool",)}
_DTYPES = {  # that NumPy has too
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
_WORTH = 1 << 10  # minimum elements of an array that is narrowed
_REDUCERS: dict[Any, Any] = {}  # classes of `send_by_value`
Class = TypeVar("Class", bound=type)


def send_by_value(cls: Class) -> Class:
    """Class decorator that sends small tensors in the fields of `cls` as bytes; pickle files do not change.

    Subclasses may have a custom pickled form, so they are sent as torch sends them.
    """
    ForkingPickler.register(cls, _reduced)
    _REDUCERS[cls] = _reduced
    return cls


def _reduced(value: Any) -> tuple[Any, ...]:
    make, args, (attributes, slots) = value.__reduce_ex__(2)[:3]
    return make, args, (attributes, {name: _by_value(field) for name, field in slots.items()})


def _by_value(value: Any) -> Any:
    if type(value) is dict:
        return {name: _by_value(entry) for name, entry in value.items()}
    if type(value) is not torch.Tensor or not value.is_cpu or value.layout is not torch.strided:
        return value
    if value.nbytes > _LARGE or value.dtype not in _DTYPES:
        return value
    try:
        return _Bytes(value.numpy())
    except RuntimeError:  # with a gradient, conjugated
        return value


class _Bytes:
    """A tensor that is pickled as bytes, in the narrowest dtype that restores it bit by bit."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array

    def __reduce__(self) -> tuple[Any, ...]:
        array = np.ascontiguousarray(self.array)
        sent, bits = array, f"u{array.itemsize}"
        for narrow in _NARROWER.get(array.dtype.name, ()) if array.size >= _WORTH else ():
            candidate = array.astype(narrow)
            if np.array_equal(candidate.astype(array.dtype).view(bits), array.view(bits)):
                sent = candidate
                break
        return _tensor, (sent.tobytes(), sent.dtype.char, array.dtype.char, self.array.shape)


def _tensor(raw: bytes, sent: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.ndarray(shape, sent, raw).astype(dtype))


@dataclass(slots=True)
class Message:
    """The unit that torch's queue transports.

    Attributes:
        worker: the sender.
        entries: (step or error, bytes that it counts for); small steps are pickled.
    """

    worker: int
    entries: list[Any]

    def pin_memory(self) -> "Message":
        """The steps with pinned tensors; the thread of DataLoaders with `pin_memory=True` calls it."""
        return Message(self.worker, [(_pinned(_received(entry)), size) for entry, size in self.entries])


def messages(
    steps: Iterator[Any], worker: int, counts: torch.Tensor, in_flight: int, *, one_by_one: bool
) -> Iterator[Message]:
    """Yield the messages of a worker: its steps and errors, in order.

    Args:
        steps: the Steps, and errors as values (`guarded`).
        worker: index of the worker.
        counts: int64 (2, workers), steps and bytes of each worker that the main process yielded; in shared memory.
        in_flight: messages that torch requests in advance.
        one_by_one: each step is a message.
    """
    yielded, made = counts[:, worker].numpy(), np.zeros(2, dtype=np.int64)
    most, ended = 1 if one_by_one else _STEPS, False
    while not ended:
        # An empty message answers torch's request without a step: otherwise a fast worker would fill the memory of the
        # main process while it waits for the step of a slow worker.
        while not one_by_one and _is_far_ahead(made - yielded, in_flight):
            yield Message(worker, [])
        start, entries, size, ended = time.monotonic(), list[Any](), 0, True
        for step in steps:
            entries.append(_entry(step))
            size += entries[-1][1]
            if len(entries) >= most or size >= _BYTES or time.monotonic() - start >= _SECONDS:
                ended = False
                break
        made += len(entries), size
        if entries:
            yield Message(worker, entries)


def _is_far_ahead(waiting: npt.NDArray[np.int64], in_flight: int) -> bool:
    steps, size = waiting.tolist()
    return bool(steps > in_flight + 1 and size > 2 * (in_flight + 2) * _BYTES)


def _entry(step: Any) -> tuple[Any, int]:
    """Return (entry, bytes that it counts for): a small step is pickled here, a large step by torch's queue.

    An entry of bytes is unpickled when its turn comes, perhaps after its worker ended. Shared memory must be received
    before that, so steps that torch shares are unpickled on arrival.
    """
    if not isinstance(step, Exception | ExceptionWrapper) and _is_small(step.batch):
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = copyreg.dispatch_table | _REDUCERS
        pickler.dump(step)
        return buffer.getvalue(), buffer.tell()
    return step, 2 * _BYTES


def _is_small(batch: Any) -> bool:
    if type(batch) not in _REDUCERS:
        return batch is None
    values = [getattr(batch, name) for name in type(batch).__dataclass_fields__]
    entries = [entry for value in values for entry in (value.values() if type(value) is dict else [value])]
    return sum(entry.nbytes for entry in entries if isinstance(entry, torch.Tensor)) <= _LARGE


def _received(entry: Any) -> Any:
    return pickle.loads(entry) if isinstance(entry, bytes) else entry


def _pinned(step: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    if isinstance(step, Exception | ExceptionWrapper):
        return step
    return step._replace(batch=pin_memory(step.batch))  # type: ignore[no-untyped-call]


def guarded(steps: Iterator[Any], worker: int) -> Iterator[Any]:
    """Yield the steps; an error is the last value, so that the main process raises it when its turn comes."""
    try:
        yield from steps
    except EnergonPackedError as error:  # torch would turn it into a traceback
        yield sendable(error)
    except Exception as error:
        where = f"in DataLoader worker process {worker}"
        sent = sendable(error)
        info = (type(sent), sent, sent.__traceback__)
        yield resource_error(error, where) or ExceptionWrapper(info, where=where)  # type: ignore[no-untyped-call]


def round_robin(received: Iterator[Message], first: int, counts: torch.Tensor) -> Iterator[Any]:
    """Yield the steps, round-robin over workers from worker `first` on, until all ended.

    Raises:
        EnergonPackedError: a worker raised it.
        Exception: any other exception of a worker, with its traceback in the message, as torch does.
    """
    yielded = counts.numpy()
    workers = yielded.shape[1]
    waiting: dict[int, deque[tuple[Any, int]]] = {(first + place) % workers: deque() for place in range(workers)}
    while waiting:
        for worker, entries in list(waiting.items()):
            while not entries:
                message = next(received, None)
                if message is None:
                    return
                waiting[message.worker].extend(message.entries)
            entry, size = entries.popleft()
            step = _received(entry)
            if isinstance(step, ExceptionWrapper):
                step.reraise()  # type: ignore[no-untyped-call]
            if isinstance(step, Exception):
                raise step
            yielded[:, worker] += 1, size
            if step.ended:
                del waiting[worker]
            yield step
    for _ in received:  # torch's iterator ends, and its workers with it
        pass
