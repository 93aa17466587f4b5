"""Entry point: finds the subcommand, and turns every user error into one line and exit status 1.

Ctrl-C, SIGTERM and SIGHUP: the first one ends a command in order, later ones do not disturb that.
"""

import atexit
import gc
import importlib
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import click

from energon_packed.errors import EnergonPackedError
from energon_packed.system import described
from energon_packed.version import __version__

_PATIENCE = 3.0  # seconds after which another signal ends the process at once
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Interrupts:
    """Raises KeyboardInterrupt at the first signal; a context manager.

    A second Ctrl-C within some seconds is taken for the same wish: while workers are ended and temporary files
    removed, it would only leave things behind. After that it ends the process at once. Signals that are ignored, as
    SIGHUP is under nohup, stay so.
    """

    def __init__(self) -> None:
        self.number = signal.SIGINT
        self._since: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def status(self) -> int:
        """Exit status, as of a process that the signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number

    @property
    def message(self) -> str:
        """What ended the command, and how to go on."""
        by = "" if self.number == signal.SIGINT else f" by {self.number.name}"
        return f"interrupted{by}; run the same command again to resume"

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._since is None:
            for number, before in self._before.items():
                signal.signal(number, before)
        if self._before:
            atexit.register(_ignore)  # what is done is done; before the exit functions of libraries, such as Ray's

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since, self.number = now, signal.Signals(number)
            raise KeyboardInterrupt
        if now - self._since > _PATIENCE:
            os._exit(self.status)


def _ignore() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


COMMANDS = {
    "lengths": "Show sample lengths, and what each --seq-len would drop and cost.",
    "pack": "Pack conversations with images into an Energon dataset.",
    "inspect": "Show the content of a tar, a dataset, a Metadataset or one pack.",
    "verify": "Check that a dataset is intact and matches its manifest.",
    "report": "Write an HTML report on a dataset or a Metadataset.",
    "nv-meta": "Create or repair .nv-meta for a folder of tars.",
    "metadataset": "Blend several datasets into one weighted Metadataset.",
    "state": "Redistribute saved loader states to another number of ranks.",
    "order": "Check the order log of a run, or show what a step will hold.",
    "demo": "Generate a small dataset, pack it and load one epoch.",
}


class _LazyGroup(click.Group):
    """Imports a subcommand when it is called, so that `--help` is instant."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Names in the order of COMMANDS."""
        return list(COMMANDS)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in the help text, without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """The command of module `energon_packed.cli.{name}`."""
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"energon_packed.cli.{name.replace('-', '_')}")
        command: click.Command = module.command
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="energon-packed")
def cli() -> None:
    """Pack conversations with images into fixed-length rows, as Megatron-Energon datasets.

    \b
    energon-packed demo --output-dir demo-out
    energon-packed pack data.jsonl -o out --seq-len 4096 --tokenizer DIR
    """


def main() -> None:
    """Run the command line. Exit status: 0 done, 1 a user error in one line, 2 wrong usage, 130 after Ctrl-C."""
    with Interrupts() as interrupts:
        try:
            _run()
        except (click.Abort, KeyboardInterrupt):
            _fail(interrupts.message, interrupts.status)


def _run() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its notices on missing backends do not apply here
    if sys.stdout is None:  # closed by the caller; not all that prints looks
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal without UTF-8
    try:
        cli(standalone_mode=False)
        gc.freeze()  # the process ends now: without this, collecting what torch has loaded takes half a second
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (EnergonPackedError, OSError) as error:
        from energon_packed.cli.options import as_options

        _fail(as_options(described(error) if isinstance(error, OSError) else str(error)), 1)
    except UnicodeEncodeError as error:
        around = error.object[max(0, error.start - 40) : error.end + 40]
        _fail(f"{around!r} holds a name that is not UTF-8; rename the file or folder", 1)
    except MemoryError:
        _fail("memory ran out; use fewer processes (--workers), or give this one more (ulimit -v)", 1)


def _fail(message: str, status: int) -> None:
    from energon_packed.cli.terminal import echo

    echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(status)
