"""Call a function in a new process with limits of time and memory: some models never return, some take all memory."""

import multiprocessing
import resource
from collections.abc import Callable
from typing import Any

import torch


def bounded(function: Callable[..., Any], arguments: tuple[Any, ...], *, seconds: int, gigabytes: int) -> Any:
    """Return the result of `function(*arguments)`, or a line of text if it exceeded a limit or raised.

    Args:
        function: of a module that is imported already, because the process is a fork.
        arguments: its arguments.
        seconds: limit of processor time; the wall time may be 15 times as long.
        gigabytes: limit of memory.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, function, arguments, seconds, gigabytes))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(15 * seconds) else f"no result within {15 * seconds} seconds"
    except EOFError:
        return f"more than {seconds} seconds of processor time or {gigabytes} GB of memory"
    finally:
        process.kill()
        process.join()


def line(error: Exception) -> str:
    """An error as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _child(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...], seconds: int, gigabytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes * 2**30,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds,) * 2)
    torch.set_num_threads(1)
    try:
        pipe.send(function(*arguments))
    except Exception as error:
        pipe.send(line(error))
