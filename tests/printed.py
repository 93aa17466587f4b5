"""What commands print."""

import json
from inspect import signature
from typing import Any

import click
from click.testing import CliRunner


def printed_json(command: click.Command, arguments: list[str]) -> Any:
    """What a command prints on standard output, which must be JSON and nothing else; its errors are raised."""
    separate = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}  # Click before 8.2
    return json.loads(CliRunner(**separate).invoke(command, arguments, catch_exceptions=False).stdout)
