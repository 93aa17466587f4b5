"""Entry point: a command line in, an exit status out.

`main` runs the subcommand, and prints every user error and wrong usage as one line on stderr, without a traceback.
Interrupts handles Ctrl-C, SIGTERM and SIGHUP: the first signal stops a command in order (workers are stopped,
temporary files are removed), and later signals do not disturb that.
"""

import atexit
import gc
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import click

from energon_packed.cli.subcommands import cli
from energon_packed.errors import EnergonPackedError
from energon_packed.system import described

_GRACE_PERIOD = 3.0  # seconds after which another signal ends the process at once
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Interrupts:
    """Context manager that raises KeyboardInterrupt at the first signal.

    A second signal within a grace period is ignored: it would only interrupt the removal of temporary files. Later
    signals end the process at once. Signals that are already ignored, such as SIGHUP under nohup, stay ignored.
    """

    def __init__(self) -> None:
        self.number = signal.SIGINT
        self._since: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def status(self) -> int:
        """Exit status, 128 + the signal number as in a shell: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number

    @property
    def message(self) -> str:
        """Error message with the signal and the way to continue."""
        by = "" if self.number == signal.SIGINT else f" by {self.number.name}"
        return f"interrupted{by}; run the same command again to resume"

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._since is None:
            for number, before in self._before.items():
                signal.signal(number, before)
        if self._before:
            # The result is complete, so a signal must not change the exit status. Registered last, this runs before
            # the exit functions of libraries, such as Ray.
            atexit.register(_ignore_signals)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since, self.number = now, signal.Signals(number)
            raise KeyboardInterrupt
        if now - self._since > _GRACE_PERIOD:
            os._exit(self.status)


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Run the command line. Exit status: 0 success, 1 user error, 2 wrong usage, 130 after Ctrl-C."""
    with Interrupts() as interrupts:
        try:
            _run()
        except (click.Abort, KeyboardInterrupt):
            # Not by `_fail`, whose imports fail if the signal has interrupted the import of NumPy.
            click.echo(f"error: {interrupts.message}", err=True)
            sys.exit(interrupts.status)


def _run() -> None:
    if sys.platform == "win32":
        _fail("energon-packed runs on Linux and macOS, got Windows. Use the Windows Subsystem for Linux (WSL 2).", 1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # hides its notices about missing backends
    if sys.stdout is None:  # closed by the caller, as by `>&-`; libraries print without a check
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal without UTF-8
    try:
        cli(standalone_mode=False)
        if "triton" not in sys.modules:  # whose bindings report frozen objects as leaks
            # The process ends now: without this, the last collection of torch's objects lasts half a second.
            gc.freeze()
    except click.UsageError as error:
        # Without arguments, click 8.2 raises an error that prints the help.
        if error.ctx is None or type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(error.exit_code)
        message = error.format_message().rstrip(".")
        message += " " if message.endswith("?") else ". "
        _fail(f"{message}See '{error.ctx.command_path} --help'.", error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except (EnergonPackedError, OSError) as error:
        from energon_packed.cli.options import as_options

        _fail(as_options(described(error) if isinstance(error, OSError) else str(error)), 1)
    except UnicodeEncodeError as error:
        around = error.object[max(0, error.start - 40) : error.end + 40]
        _fail(f"{around!r} contains a name that is not valid UTF-8. Rename the file or folder.", 1)
    except MemoryError:
        _fail("memory ran out. Use fewer processes (--workers), or raise the memory limit (ulimit -v).", 1)


def _fail(message: str, status: int) -> None:
    from energon_packed.cli.terminal import echo

    echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(status)
