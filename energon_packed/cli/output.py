"""Options `--quiet`, `--verbose` and `--json`: the flags in, an Output with verbosity and destination out.

`output_options` adds them to a command. While the command runs, log messages of the library are printed on stderr.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import click
from rich.console import Console

from energon_packed.cli.options import MESSAGES, as_options, group_option
from energon_packed.cli.progress import TerminalProgress
from energon_packed.cli.terminal import SafeConsole, echo, echo_json
from energon_packed.pipeline.engine import Progress
from energon_packed.system import NOTICE

_VERBOSE_INTERVAL = 10.0  # seconds between two progress lines


@dataclass(frozen=True)
class Output:
    """Verbosity and destination of the output of a command.

    Attributes:
        quiet: print only warnings and errors.
        verbose: also print log messages of level INFO, and frequent progress lines.
        as_json: print one JSON object on stdout, and everything else on stderr.
    """

    quiet: bool = False
    verbose: bool = False
    as_json: bool = False

    @cached_property
    def console(self) -> Console:
        """Console for tables and lines, without markup and without colored numbers."""
        return SafeConsole(stderr=self.as_json, quiet=self.quiet, markup=False, highlight=False)

    def progress(self) -> Progress:
        """Create the progress display of a run; with `quiet`, it prints nothing."""
        if self.quiet:
            return Progress()
        return TerminalProgress(self.console, **({"interval": _VERBOSE_INTERVAL} if self.verbose else {}))

    def result(self, value: Mapping[str, Any]) -> None:
        """Print the result of the command with `--json`."""
        if self.as_json:
            echo_json(value, indented=True)

    @contextmanager
    def logs(self) -> Iterator[None]:
        """Context manager that prints warnings of the library on stderr; with `verbose`, also INFO messages.

        On a terminal, steps that take long are printed too, unless `quiet`.
        """
        logger, handler = logging.getLogger("energon_packed"), _ToStderr()
        before = logger.level
        logger.addHandler(handler)
        shows_steps = not self.quiet and sys.stderr is not None and sys.stderr.isatty()
        logger.setLevel(logging.INFO if self.verbose else NOTICE if shows_steps else logging.WARNING)
        try:
            yield
        finally:
            # Tests and Python programs run several commands in one process.
            logger.setLevel(before)
            logger.removeHandler(handler)


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the three options; the command receives them as `output`."""

    @group_option("--quiet", "-q", is_flag=True, group=MESSAGES, help="Print only warnings and errors.")
    @group_option("--verbose", "-v", is_flag=True, group=MESSAGES,
                  help="Also print details: inputs, reused work and frequent progress lines.")  # fmt: skip
    @group_option("--json", "as_json", is_flag=True, group=MESSAGES,
                  help="Print the result as one JSON object; all else goes to stderr.")  # fmt: skip
    @wraps(command)
    def with_output(*arguments: Any, quiet: bool, verbose: bool, as_json: bool, **options: Any) -> Any:
        if quiet and verbose:
            raise click.UsageError("--quiet and --verbose contradict each other. Pass only one of them.")
        output = Output(quiet=quiet, verbose=verbose, as_json=as_json)
        # Logs are shown from the start, so that warnings about the options are shown too.
        with output.logs():
            return command(*arguments, output=output, **options)

    return with_output


class _ToStderr(logging.Handler):
    """Handler that prints each message as one line, with command-line options instead of argument names."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message on stderr."""
        level = "" if record.levelno <= NOTICE else f"{record.levelname.lower()}: "
        echo(level + " ".join(as_options(record.getMessage()).split()), err=True)
