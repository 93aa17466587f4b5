"""How much a command prints, and where: `--quiet`, `--verbose`, `--json`, and warnings of the library."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import click
from rich.console import Console

from energon_packed.cli.options import MESSAGES, DeclaredOption, as_options
from energon_packed.cli.progress import TerminalProgress
from energon_packed.cli.terminal import SafeConsole, echo, echo_json
from energon_packed.pipeline.engine import Progress

_VERBOSE_INTERVAL = 10.0  # seconds between two progress lines


@dataclass(frozen=True)
class Output:
    """Where a command prints.

    Attributes:
        quiet: only warnings and errors.
        verbose: what the library logs, and progress lines more often.
        as_json: one JSON object on stdout, everything else on stderr.
    """

    quiet: bool = False
    verbose: bool = False
    as_json: bool = False

    @cached_property
    def console(self) -> Console:
        """For tables and lines; markup and colors of numbers are off."""
        return SafeConsole(stderr=self.as_json, quiet=self.quiet, markup=False, highlight=False)

    def progress(self) -> Progress:
        """Of a run; it prints nothing with `quiet`."""
        if self.quiet:
            return Progress()
        return TerminalProgress(self.console, **({"interval": _VERBOSE_INTERVAL} if self.verbose else {}))

    def result(self, value: Mapping[str, Any]) -> None:
        """Print the object of `--json`."""
        if self.as_json:
            echo_json(value, indented=True)

    def logs(self) -> AbstractContextManager[None]:
        """Show warnings of the library on stderr while a block runs; with `verbose`, all that it logs."""
        return _shown_logs(logging.INFO if self.verbose else logging.WARNING)


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds the three options; the command gets `output` in their place."""

    @click.option("--quiet", "-q", is_flag=True, cls=DeclaredOption, group=MESSAGES,
                  help="Print only warnings and errors.")  # fmt: skip
    @click.option("--verbose", "-v", is_flag=True, cls=DeclaredOption, group=MESSAGES,
                  help="Print more: what is read and reused, progress lines more often.")  # fmt: skip
    @click.option("--json", "as_json", is_flag=True, cls=DeclaredOption, group=MESSAGES,
                  help="Print the result as one JSON object; all else goes to stderr.")  # fmt: skip
    @wraps(command)
    def with_output(*arguments: Any, quiet: bool, verbose: bool, as_json: bool, **options: Any) -> Any:
        if quiet and verbose:
            raise click.UsageError("--quiet and --verbose contradict each other; give one of them")
        output = Output(quiet=quiet, verbose=verbose, as_json=as_json)
        with output.logs():
            return command(*arguments, output=output, **options)

    return with_output


@contextmanager
def _shown_logs(level: int) -> Iterator[None]:
    logger, handler = logging.getLogger("energon_packed"), _ToStderr()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class _ToStderr(logging.Handler):
    """One line for each message, with the options of the command line in place of arguments."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        echo(level + " ".join(as_options(record.getMessage()).split()), err=True)
