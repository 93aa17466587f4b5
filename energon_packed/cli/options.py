"""Click options, config files and error texts from declared options: nothing about an option is written twice."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import click

from energon_packed.errors import ConfigError
from energon_packed.options import Declaration, declared
from energon_packed.pipeline.config_file import read_config

_ARGUMENT = re.compile(r"`(\w+)(?:=([^`]*))?`")
MESSAGES = "Messages"
_ORDER = ("Options", "Input", "Tokens", "Images", "Packing", "Output", "Run", "Table", MESSAGES)
Decorated = Callable[[Callable[..., Any]], Callable[..., Any]]


class GroupedCommand(click.Command):
    """A command whose help lists options in groups."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """One section per group, in the order of `_ORDER`; `--help` is the last line."""
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for parameter in self.get_params(context):
            if not isinstance(parameter, click.Option):
                continue
            if (record := parameter.get_help_record(context)) is not None:
                group = MESSAGES if "--help" in parameter.opts else "Options"
                groups[getattr(parameter, "group", None) or group].append(record)
        for name, records in sorted(groups.items(), key=lambda item: _place(item[0])):
            with formatter.section(name):
                formatter.write_dl(records)


def _place(group: str) -> int:
    return _ORDER.index(group) if group in _ORDER else len(_ORDER) - 2


class DeclaredOption(click.Option):
    """A click option of a declaration; `group` is its heading in the help text."""

    def __init__(self, *arguments: Any, group: str = "", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.group = group


def options_of(
    cls: type[Any], *, without: Iterable[str] = (), config: bool = True, defaults: bool = True
) -> Decorated:
    """A decorator that adds every declared option of a class to a command.

    Values that are not given on the command line are absent from its keyword arguments, so that defaults and config
    files apply.

    Args:
        cls: the option class.
        without: names that the command declares itself.
        config: add `--config FILE.yaml`.
        defaults: show in the help text which options are required, and the defaults of the others.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        if config:
            command = click.option(
                "--config", type=click.Path(path_type=Path, dir_okay=False, exists=True), cls=DeclaredOption,
                group="Run", metavar="FILE.yaml", help="Options by name; the command line wins over them.",
            )(command)  # fmt: skip
        for one in reversed(declared(cls)):
            if one.name not in without and one.flags:
                command = _click_option(one, defaults=defaults)(command)
        return command

    return decorate


def collect(given: dict[str, Any], cls: type[Any]) -> dict[str, Any]:
    """Values by name, from the command line and from `--config`.

    Args:
        given: keyword arguments of the command; None stands for not given. `config` names the file.
        cls: the option class.

    Raises:
        ConfigError: the config file is not a mapping of option names.
    """
    file = given.pop("config", None)
    values: dict[str, Any] = read_config(file, cls) if file is not None else {}
    for one in declared(cls):
        value = given.get(one.name)
        if value is not None:
            values[one.name] = _parsed(one, value)
    return values


def _parsed(one: Declaration, value: Any) -> Any:
    if one.parse is None or not isinstance(value, str):
        return value
    try:
        return one.parse(value)
    except ConfigError as error:
        raise click.UsageError(as_options(str(error))) from error


def as_options(message: str) -> str:
    """An error text with arguments as command line options: `seq_len` becomes --seq-len."""

    def replace(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        flag = _flags().get(name, f"--{name.replace('_', '-')}")
        if value is None or value == "True":
            return flag
        return f"--no-{flag[2:]}" if value == "False" else f"{flag} {value.strip(chr(39))}"

    return _ARGUMENT.sub(replace, message)


@lru_cache(maxsize=1)
def _flags() -> dict[str, str]:
    """First flag of every declared option, by name."""
    from energon_packed.pipeline.options import PackOptions
    from energon_packed.pipeline.survey import LengthsOptions

    every = [*declared(LengthsOptions), *declared(PackOptions)]
    return {one.name: one.flags[0].split("/")[0] for one in every if one.flags}


def _click_option(one: Declaration, *, defaults: bool) -> Decorated:
    options: dict[str, Any] = {"help": _help(one) if defaults else one.help, "metavar": one.metavar, "default": None}
    if one.is_flag and len(one.flags) == 1 and "/" not in one.flags[0]:
        options |= {"is_flag": True, "flag_value": not one.default}
    elif one.is_flag:
        options |= {"is_flag": True}
    elif one.parse is not None:
        options |= {"type": str}
    elif one.valid is not None:
        options |= {"type": click.Choice(one.valid), "metavar": None}
    elif one.kind is Path:
        options |= {"type": click.Path()}
    else:
        options |= {"type": one.kind}
    return click.option(*one.flags, one.name, cls=DeclaredOption, group=one.group, **options)


def _help(one: Declaration) -> str:
    default = one.shown_default
    if default is None and not one.is_required and one.default is not None and not one.is_flag:
        default = str(one.default)
    if one.is_required or one.needed:
        return f"{one.help} [required]"
    return f"{one.help} [default: {default}]" if default else one.help
