"""Run commands in this process, and read their output."""

import json
from inspect import signature
from typing import Any

import click
from click.testing import CliRunner, Result

from tests.internals import cli


def invoke(*arguments: object) -> Result:
    """Run `energon-packed` with these arguments; errors are in `exception` of the result."""
    return CliRunner().invoke(cli, list(map(str, arguments)))


def separate_runner() -> CliRunner:
    """A runner whose results have standard output and standard error apart, with all releases of Click."""
    separate = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}  # Click before 8.2
    return CliRunner(**separate)


def printed_json(command: click.Command, arguments: list[str]) -> Any:
    """Run a command that must print only JSON on standard output, and return the value. Errors are raised."""
    return json.loads(separate_runner().invoke(command, arguments, catch_exceptions=False).stdout)
