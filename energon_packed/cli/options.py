"""Build click options from declared options: an option class in, decorators, values and messages out.

`options_of` adds every declared option of a class to a command, which receives their values as one dict, from the
command line and `--config`. GroupedCommand lists options in groups. `as_options` replaces argument names in a message
by command-line options. Help, types and defaults are declared once, in the option classes.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any

import click

from energon_packed.errors import ConfigError
from energon_packed.formats.references import parse_media_root, set_media_root
from energon_packed.options import Declaration, declared
from energon_packed.pipeline.config_file import read_config
from energon_packed.storage import as_path, is_remote

MESSAGES = "Messages"
_ALL = "energon_packed.help_all"  # key of `click.Context.meta`
_CLAUSE = re.compile(r"(?:[^.,;:]|[.:](?=\w))*")  # the dot of a file name is part of a clause
_DEFAULT = re.compile(r"\[(default: .*|required)\]$")
_ARGUMENT = re.compile(r"`(\w+)(?:=([^`]*))?`")
_GROUPS = ("Options", "Input", "Tokens", "Images", "Videos", "Audio", "Packing", "Output", "Run", "Table", MESSAGES)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class GroupedCommand(click.Command):
    """A command whose help text lists options in groups.

    Args:
        common: names of the options that `--help` shows, one line each, in addition to the group Messages;
            `--help-all` shows all options. Empty: `--help` shows all options.
    """

    # click passes every keyword of `click.command` to this class, so they cannot be listed here.
    def __init__(self, *arguments: Any, common: Collection[str] = (), **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._common = common
        if common:
            show_all = DeclaredOption(
                ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, group=MESSAGES,
                help="Show all options and exit.",
            )  # fmt: skip
            self.params.append(show_all)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per group, in the order of `_GROUPS`; `--help` is the last option."""
        groups: dict[str, list[click.Option]] = defaultdict(list)
        options = [each for each in self.get_params(context) if isinstance(each, click.Option) and not each.hidden]
        is_brief = self._common and _ALL not in context.meta
        for option in options:
            group = getattr(option, "group", None) or (MESSAGES if "--help" in option.opts else "Options")
            if not is_brief or group == MESSAGES or option.name in self._common:
                groups[group].append(option)
        # Groups of other packages are before `Table`.
        order = {name: place for place, name in enumerate(_GROUPS)}
        for name in sorted(groups, key=lambda name: order.get(name, len(_GROUPS) - 2)):
            records = [record for each in groups[name] if (record := each.get_help_record(context))]
            with formatter.section(name):
                if is_brief:
                    formatter.write_dl(_brief(groups[name], records, formatter.width), col_max=formatter.width)
                else:
                    formatter.write_dl(records)
        if is_brief:
            formatter.write_paragraph()
            formatter.write_text(f"All {len(options)} options: {context.command_path} --help-all")


def _show_all(context: click.Context, option: click.Parameter, value: bool) -> None:
    """Callback of --help-all."""
    if value:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


def _brief(options: Sequence[click.Option], records: Sequence[tuple[str, str]], width: int) -> list[tuple[str, str]]:
    """Shorten the help records of a group to one line each: the first clause, with choices or default if they fit."""
    names = [
        f"{', '.join(option.opts)} NAME" if isinstance(option.type, click.Choice) else shown
        for option, (shown, _) in zip(options, records, strict=True)
    ]
    room = width - max(map(len, names)) - 4  # the indent and the space between the columns
    lines = []
    for option, (_, text) in zip(options, records, strict=True):
        clause = _CLAUSE.match(text)[0]  # type: ignore[index]  # it also matches an empty string
        longer = [f"{clause}: {', '.join(option.type.choices)}"] if isinstance(option.type, click.Choice) else []
        longer += [f"{clause} {default[0]}"] if (default := _DEFAULT.search(text)) else []
        lines.append(next((line for line in longer if len(line) <= room), clause))
    return list(zip(names, lines, strict=True))


class InputPath(click.Path):
    """A path, which may be in an object store."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Path:
        """Return a Path, or a RemotePath; click checks only local paths."""
        return as_path(str(value if is_remote(value) else super().convert(value, param, context)))


class DeclaredOption(click.Option):
    """A click option with a group, the heading in the help text."""

    # click passes every keyword of `click.option` to this class, so they cannot be listed here.
    def __init__(self, *arguments: Any, group: str = "", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group


group_option = partial(click.option, cls=DeclaredOption)
"""Decorator that adds an option with a `group`."""


def options_of(
    cls: type[Any], *, without: Collection[str] = (), config: bool = True, defaults: bool = True
) -> Decorator:
    """Add every declared option of a class to a command, which receives their values by name as `values`.

    `values` contains only options of the command line and of the config file, so that defaults apply to the others.
    The command line overrides the config file.

    Args:
        cls: option class.
        without: names that the command declares itself.
        config: add `--config FILE.yaml`.
        defaults: show in the help text which options are required, and the defaults of the others.
    """
    declarations = [each for each in declared(cls) if each.name not in without and each.flags]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_values(**arguments: Any) -> Any:
            file = arguments.pop("config", None) if config else None
            with wrong_usage():
                values: dict[str, Any] = read_config(file, cls) if file is not None else {}
                for declaration in declarations:
                    # None: the option is not on the command line.
                    if (value := arguments.pop(declaration.name)) not in (None, ()):
                        values[declaration.name] = value
            return command(values=values, **arguments)

        decorated: Callable[..., Any] = with_values
        if config:
            decorated = group_option(
                "--config", type=click.Path(path_type=Path, dir_okay=False, exists=True),
                group="Run", metavar="FILE.yaml", help="YAML file of options; the command line overrides them.",
            )(decorated)  # fmt: skip
        # Decorators are applied from the bottom up: reversed, so that the help text has the order of declaration.
        for declaration in reversed(declarations):
            decorated = _click_option(declaration, defaults=defaults)(decorated)
        return decorated

    return decorate


def media_root_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --media-root, for commands that read the images of a dataset; it is set for the process."""
    return click.option(
        "--media-root", multiple=True, metavar="OLD=NEW", expose_value=False,
        callback=_set_media_root,
        help="Folder of images and videos that packs refer to, and its new place; repeatable.",
    )(command)  # fmt: skip


def _set_media_root(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> None:
    """Callback of --media-root."""
    with wrong_usage():
        set_media_root(parse_media_root(values))


def set_inputs(values: dict[str, Any], files: Sequence[str]) -> None:
    """Set the inputs of the command line, which override inputs and sources of the config file.

    Raises:
        UsageError: there is no input.
    """
    if files:
        values |= {"inputs": tuple(files), "sources": ()}
    if not values.get("inputs") and not values.get("sources"):
        raise click.UsageError("Missing argument 'INPUT...' (or '--jsonl FILE', or `inputs` in --config).")


def require(values: dict[str, Any], *names: str) -> None:
    """Check that options without a default have a value.

    Raises:
        UsageError: an option is missing.
    """
    for name in names:
        if values.get(name) is None:
            raise click.UsageError(f"Missing option '--{name.replace('_', '-')}' (or `{name}` in --config).")


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Raise the errors of option values in the block as wrong usage, with exit status 2."""
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(as_options(str(error))) from error


def as_options(message: str) -> str:
    """Replace arguments in a message by command-line options: `seq_len` becomes --seq-len, `text` stays."""

    def replace(match: re.Match[str]) -> str:
        flag, value = _flags().get(match[1]), match[2]
        if flag is None:
            return match[0]
        if value is None or value == "True" or (value == "False" and flag.startswith("--no-")):
            return flag
        return f"--no-{flag[2:]}" if value == "False" else f"{flag} {value.strip(chr(39))}"

    return _ARGUMENT.sub(replace, message)


@lru_cache(maxsize=1)
def _flags() -> dict[str, str]:
    """First flag of every option of the commands, by name; declared options first."""
    # Imported here: errors of commands without these options do not need the pipeline.
    from energon_packed.cli.subcommands import COMMANDS, cli
    from energon_packed.pipeline.options import PackOptions
    from energon_packed.pipeline.survey import LengthsOptions

    options: list[click.Option] = []
    for name in COMMANDS:
        with suppress(ConfigError):  # a command that needs the extra `train`
            command = cli.get_command(click.Context(cli), name)
            options += [each for each in command.params if isinstance(each, click.Option)] if command else []
    declarations = [*declared(LengthsOptions), *declared(PackOptions)]
    return {each.name: each.opts[0] for each in options if each.name} | {
        each.name: each.flags[0].split("/")[0] for each in declarations if each.flags
    }


def _click_option(declaration: Declaration, *, defaults: bool) -> Decorator:
    shown = _help(declaration) if defaults else declaration.help
    settings: dict[str, Any] = {"help": shown, "metavar": declaration.metavar, "default": None}
    if declaration.is_flag:
        settings["is_flag"] = True
        if len(declaration.flags) == 1 and "/" not in declaration.flags[0]:
            # A flag with one form, such as --no-npy, sets the value that is not the default.
            settings["flag_value"] = not declaration.default
    elif declaration.valid is not None and declaration.parse is None:
        settings |= {"type": click.Choice(declaration.valid), "metavar": None}
    else:
        kind = str if declaration.parse is not None else declaration.kind
        settings |= {"type": click.Path() if kind is Path else kind, "multiple": declaration.repeatable}
    return group_option(*declaration.flags, declaration.name, group=declaration.group, **settings)


def _help(declaration: Declaration) -> str:
    if declaration.is_required or declaration.needed:
        return f"{declaration.help} [required]"
    default = declaration.shown_default
    if default is None and declaration.default is not None and not declaration.is_flag:
        default = str(declaration.default)
    return f"{declaration.help} [default: {default}]" if default else declaration.help
