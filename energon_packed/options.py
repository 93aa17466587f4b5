"""Options, declared once as fields of a dataclass; the command line, config files and docs are made from them.

    @dataclass(frozen=True, kw_only=True)
    class PackOptions:
        seq_len: int = option(help="Tokens in one row.", group="Packing", minimum=1)

`declared(PackOptions)` lists the declarations, `make(PackOptions, values)` builds one from names and values, and
`check(self)` in `__post_init__` holds the values to their declared limits.
"""

import dataclasses
import difflib
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from energon_packed.errors import ConfigError

_KEY = "option"
_MOST = 2**63 - 1  # of integers: int64 holds them in files and kernels
_REMOTE = re.compile(r"(s3|s3a|gs|gcs|hf|az|abfs|abfss|hdfs|https?|msc):/", re.IGNORECASE)
T = TypeVar("T")
_shortened = reprlib.Repr()
_shortened.maxlevel, _shortened.maxstring, _shortened.maxother, _shortened.maxlong = 2, 200, 200, 40


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """One option.

    Attributes:
        name: of the argument.
        kind: type of the value.
        or_none: `None` is a value too.
        default: value when it is not given; `dataclasses.MISSING` when it is required.
        help: one sentence.
        group: heading in the help text.
        flags: on the command line, such as `--seq-len`; () for arguments that only Python takes.
        metavar: stands for the value in help texts.
        choices: valid values, or a function that returns them.
        minimum: smallest valid number; the largest integer is that of int64.
        parse: turns text of the command line or a config file into the value.
        decides: what the value decides: `lengths`, `tars`, or "" for neither.
        shown_default: the default in words, where the value does not tell.
        needed: the command line requires it, although Python has another way.
    """

    name: str
    kind: Any
    or_none: bool
    default: Any
    help: str
    group: str
    flags: tuple[str, ...]
    metavar: str | None = None
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] | None = None
    minimum: float | None = None
    parse: Callable[[str], Any] | None = None
    decides: str = ""
    shown_default: str | None = None
    needed: bool = False

    @property
    def is_required(self) -> bool:
        """There is no default."""
        return self.default is dataclasses.MISSING

    @property
    def is_flag(self) -> bool:
        """True or False."""
        return self.kind is bool

    @property
    def valid(self) -> tuple[str, ...] | None:
        """Valid values, or None for any."""
        return self.choices() if callable(self.choices) else self.choices


def option(
    default: Any = dataclasses.MISSING, *, help: str, group: str, flags: tuple[str, ...] | None = None, **rest: Any
) -> Any:
    """A dataclass field with a declaration.

    Args:
        default: as `dataclasses.field`; a callable is a factory. Without one the option is required.
        help, group, flags: as in `Declaration`; flags are made from the name by default.
        rest: other attributes of `Declaration`.
    """
    metadata = {_KEY: {"help": help, "group": group, "flags": flags, **rest}}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared_again(cls: type[Any], name: str, default: Any) -> Any:
    """A dataclass field with the declaration that `cls` has under `name`, and another default."""
    return dataclasses.field(default=default, metadata=cls.__dataclass_fields__[name].metadata)


def declared(cls: type[Any]) -> list[Declaration]:
    """All declarations of an option class, in order."""
    hints = typing.get_type_hints(cls)
    return [_declaration(field, hints[field.name]) for field in dataclasses.fields(cls) if _KEY in field.metadata]


def make(cls: type[T], values: Mapping[str, Any], *, what: str = "argument") -> T:
    """An option object.

    Args:
        cls: the option class.
        values: by name.
        what: what the names are, for messages.

    Raises:
        ConfigError: an unknown name (with the likely one), or a required one that is missing.
    """
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    if unknown := [name for name in values if name not in names]:
        close = difflib.get_close_matches(unknown[0], names, 1)
        hint = f"; did you mean `{close[0]}`?" if close else f"; valid names: {', '.join(names)}"
        raise ConfigError(f"unknown {what} {unknown[0]!r}{hint}")
    missing = [one.name for one in declared(cls) if one.is_required and one.name not in values]
    if missing:
        raise ConfigError(f"{', '.join(f'`{name}`' for name in missing)} must be given")
    return cls(**values)


def check(options: Any) -> None:
    """Hold the values of an option object to the declared types, choices and minimums; paths become `Path`, and
    texts the value that they stand for.

    Raises:
        ConfigError: the message names the argument, the value and the limit.
    """
    for one in declared(type(options)):
        value = getattr(options, one.name)
        if value is None:
            if not one.or_none:
                raise ConfigError(f"`{one.name}` has no value (null); give one, or leave it out")
            continue
        if isinstance(value, str) and one.parse is not None:
            value = one.parse(value)
            object.__setattr__(options, one.name, value)
        if one.kind is Path:
            if not isinstance(value, str | Path):
                raise ConfigError(f"`{one.name}` is {short(value)}; it must be a path")
            object.__setattr__(options, one.name, as_path(value, one.name))
        elif one.kind is bool and not isinstance(value, bool):
            raise ConfigError(f"`{one.name}` is {short(value)}; it must be True or False")
        elif one.kind is str and not isinstance(value, str):
            raise ConfigError(f"`{one.name}` is {short(value)}; it must be text")
        elif one.kind in (int, float):
            _check_number(one, value)
        if one.valid is not None and value not in one.valid:
            raise ConfigError(f"`{one.name}` is {short(value)}; use one of {', '.join(one.valid)}")


def _check_number(one: Declaration, value: Any) -> None:
    if isinstance(value, bool | str) or not isinstance(value, int | one.kind) or math.isnan(value):
        what = "an integer" if one.kind is int else "a number"
        raise ConfigError(f"`{one.name}` is {short(value)}; it must be {what}")
    if one.minimum is not None and value < one.minimum:
        raise ConfigError(f"`{one.name}` is {short(value)}; it must be at least {one.minimum}")
    if one.kind is int and value > _MOST:
        raise ConfigError(f"`{one.name}` is {short(value)}; it must be at most {_MOST}")


def as_path(value: str | Path, name: str) -> Path:
    """The path that a text stands for, `~` at its begin replaced by the home folder.

    Args:
        value: as it was given.
        name: of the argument, for messages.

    Raises:
        ConfigError: it is empty, as of a variable that is not set; or holds what no file name can.
    """
    text = str(value)
    if not text:
        raise ConfigError(f"`{name}` is empty; pass a path (. is the current folder)")
    if "\0" in text:
        raise ConfigError(f"`{name}` {text!r} holds a NUL character, which no path can")
    try:
        text.encode()
        return Path(text).expanduser() if text == "~" or text.startswith("~/") else Path(text)
    except UnicodeEncodeError as error:
        raise ConfigError(f"`{name}` {text!r} is not UTF-8; rename it, as files that we write name it") from error
    except RuntimeError as error:
        raise ConfigError(f"`{name}` {text}: the home folder is not known; pass the whole path") from error


def short(value: Any) -> str:
    """`repr` of a value for a message, however large it is."""
    return _shortened.repr(value)


def refuse_remote(value: str | Path, name: str = "") -> None:
    """Refuse an object store where a path is needed: it would become a folder named `s3:`.

    Args:
        value: a path; `Path` has made one slash of two.
        name: of the argument, for the message.

    Raises:
        ConfigError: it begins with `s3://`, `gs://`, `hf://` or the like.
    """
    if isinstance(value, str | Path) and (found := _REMOTE.match(str(value))):
        what = f"`{name}` {value}" if name else str(value)
        raise ConfigError(f"{what} is remote; {found[1]}:// is not supported yet, use a path of a mounted file system")


def plain_values(options: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of every declared option, in plain types for JSON."""
    for one in declared(type(options)):
        value = getattr(options, one.name)
        yield one.name, str(value) if isinstance(value, Path) else value


def _declaration(field: Any, hint: Any) -> Declaration:
    given = dict(field.metadata[_KEY])
    flags = given.pop("flags")
    if flags is None:
        flags = (f"--{field.name.replace('_', '-')}",)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    or_none = hint is Any or default is None or type(None) in typing.get_args(hint)
    return Declaration(name=field.name, kind=_kind(hint), or_none=or_none, default=default, flags=flags, **given)


def _kind(hint: Any) -> Any:
    """The type without `None`; `str` for literals."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [one for one in typing.get_args(hint) if one is not type(None)]
        return _kind(inner[0]) if len(inner) == 1 else Any
    if typing.get_origin(hint) is typing.Literal:
        return str
    return hint
