"""Declarations of options, from which the command line, config files and docs are made.

Input: a dataclass whose fields are made by `option`, and values by name from Python, the command line or a YAML
file. Output: `Declaration` objects, or an instance with checked values:

    @dataclass(frozen=True, kw_only=True)
    class PackOptions(Options):
        seq_len: int = option(help="Tokens in one row.", group="Packing", minimum=1)

`declared(PackOptions)` lists the declarations, and making an instance checks names and values.
"""

import dataclasses
import difflib
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from energon_packed import storage
from energon_packed.errors import ConfigError
from energon_packed.keywords import OptionKeywords

_KEY = "option"  # of the declaration in the metadata of a dataclass field
_NO_NAMES: Mapping[str, str] = types.MappingProxyType({})
_LARGEST = 2**63 - 1  # files and kernels store integers as int64
# Without this check, Path("hf://x") would become a local folder named `hf:`. Path collapses `//` to `/`.
_REMOTE = re.compile(r"(s3|s3a|gs|gcs|hf|az|abfs|abfss|hdfs|https?|msc):/", re.IGNORECASE)
T = TypeVar("T")
_shortened = reprlib.Repr()
_shortened.maxlevel, _shortened.maxstring, _shortened.maxother, _shortened.maxlong = 2, 200, 200, 40
_DECLARED: "dict[type[Any], tuple[Declaration, ...]]" = {}


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """Declaration of an option.

    Attributes:
        name: name of the argument.
        kind: type of the value.
        or_none: `None` is a valid value.
        default: default value; `dataclasses.MISSING` if the option is required.
        help: one sentence.
        group: heading in the help text.
        flags: flags of the command line, such as `--seq-len`; () for arguments that exist only in Python.
        metavar: placeholder of the value in the help text.
        choices: valid values, or a function that returns them; by default the values of a `Literal`.
        minimum: smallest valid number; the largest integer is the maximum of int64.
        parse: makes the value from what the command line, a config file or Python passes. The type of its argument is
            the type that Python accepts, and it returns a finished value as it is.
        decides: part of the output that the value changes: `lengths`, `tars`, or "".
        shown_default: the default in words, if the value alone does not explain it.
        needed: the command line requires it; Python has an alternative.
        repeatable: the command line accepts it several times, and passes all strings as a tuple.
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
    parse: Callable[[Any], Any] | None = None
    decides: str = ""
    shown_default: str | None = None
    needed: bool = False
    repeatable: bool = False

    @property
    def is_required(self) -> bool:
        """The option has no default."""
        return self.default is dataclasses.MISSING

    @property
    def is_flag(self) -> bool:
        """The value is True or False."""
        return self.kind is bool

    @property
    def valid(self) -> tuple[str, ...] | None:
        """Valid values, or None for any."""
        return self.choices() if callable(self.choices) else self.choices


class Options:
    """Base class of the classes of declared options, which are frozen dataclasses.

    Raises:
        ConfigError: when made with an unknown name or without a required name, as `check_names`, or with an invalid
            value, as `check`.
    """

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Check the names, for which the __init__ of a dataclass raises TypeError; a copy is made without values."""
        if values:
            check_names(cls, values)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check(self)


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    group: str,
    flags: tuple[str, ...] | None = None,
    **limits: Unpack[OptionKeywords],
) -> Any:
    """Return a dataclass field with a declaration.

    Args:
        default: as in `dataclasses.field`; a callable is a factory. Without a default, the option is required.
        help, group, flags: as in `Declaration`; by default, the flag is made from the name of the field.
        limits: the optional attributes of `Declaration`.
    """
    metadata = {_KEY: {"help": help, "group": group, "flags": flags, **limits}}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared_again(cls: type[Any], name: str, default: Any, **limits: Unpack[OptionKeywords]) -> Any:
    """Return a dataclass field with the declaration of `name` in `cls`, except for the default and other limits."""
    return option(default, **{**cls.__dataclass_fields__[name].metadata[_KEY], **limits})


def declared(cls: type[Any]) -> tuple[Declaration, ...]:
    """Return all declarations of an option class, in order."""
    if cls not in _DECLARED:  # each object asks several times
        hints = typing.get_type_hints(cls)
        fields = [field for field in dataclasses.fields(cls) if _KEY in field.metadata]
        _DECLARED[cls] = tuple(_declaration(field, hints[field.name]) for field in fields)
    return _DECLARED[cls]


def make(
    cls: type[T], values: Mapping[str, Any], *, what: str = "argument", refused: Mapping[str, str] = _NO_NAMES
) -> T:
    """Build an option object from values by name; arguments and errors as for `check_names`."""
    check_names(cls, values, what=what, refused=refused)
    return cls(**values)


def check_names(
    cls: type[Any], values: Iterable[str], *, what: str = "argument", refused: Mapping[str, str] = _NO_NAMES
) -> None:
    """Refuse names that are not fields of an option class, and missing names.

    Args:
        cls: the option class.
        values: names of the values.
        what: noun for the names in messages.
        refused: names that users of other tools know, with the end of the message about each.

    Raises:
        ConfigError: a name is unknown (the message suggests a similar name), or a required name is missing.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    if unknown := [name for name in values if name not in names]:
        if unknown[0] in refused:
            raise ConfigError(f"`{unknown[0]}` is not an option of {refused[unknown[0]]}")
        close = difflib.get_close_matches(unknown[0], names, 1)
        hint = f"; did you mean `{close[0]}`?" if close else f"; valid names: {', '.join(names)}"
        raise ConfigError(f"unknown {what} {unknown[0]!r}{hint}")
    required = [declaration.name for declaration in declared(cls) if declaration.is_required]
    if missing := [name for name in required if name not in values]:
        plural = "s" if len(missing) > 1 else ""
        raise ConfigError(f"missing required argument{plural}: {', '.join(f'`{name}`' for name in missing)}")


def values_of(cls: type[Any], options: Any) -> dict[str, Any]:
    """Values of the fields of an option class, from an object of this class or of a subclass with more fields."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(cls)}


def check(options: Any) -> None:
    """Enforce the declared types, choices and minimums on an option object.

    Strings for a path become `Path`, and the value of an option with `parse` becomes the parsed value.

    Raises:
        ConfigError: a value is invalid; the message names the argument, the limit and the value.
    """
    for declaration in declared(type(options)):
        name, kind, value = declaration.name, declaration.kind, getattr(options, declaration.name)
        if value is None:
            if not declaration.or_none:
                raise ConfigError(f"`{name}` must not be null. Set a value or remove the option")
            continue
        if declaration.parse is not None:
            value = declaration.parse(value)
            object.__setattr__(options, name, value)  # option classes are frozen
        if kind is int:
            object.__setattr__(options, name, as_integer(value, name, declaration.minimum))
        limit = ""
        if kind is Path and isinstance(value, str | Path):
            object.__setattr__(options, name, as_path(value, name))
        elif kind is Path:
            limit = "a path"
        elif kind is bool and not isinstance(value, bool):
            limit = "True or False"
        elif kind is str and not isinstance(value, str):
            limit = "a string"
        elif kind is float:
            limit = _limit_of_float(value, declaration.minimum)
        if not limit and declaration.valid is not None and value not in declaration.valid:
            limit = f"one of {', '.join(declaration.valid)}"
        if limit:
            raise ConfigError(f"`{name}` must be {limit}, got {short(value)}")


def _limit_of_float(value: Any, minimum: float | None) -> str:
    """The limit that a value violates, or ""."""
    # bool is a subclass of int, and NaN compares False with every minimum: both would pass the comparison below.
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return "a number"
    return f"at least {minimum}" if minimum is not None and value < minimum else ""


def as_integer(value: Any, name: str, minimum: float | None = 1) -> int:
    """Return an integer, which may be of NumPy, as an int.

    Args:
        value: the integer.
        name: name of the argument, for messages.
        minimum: smallest valid value; None for any.

    Raises:
        ConfigError: it is not an integer, or is below the minimum.
    """
    number = int(value) if not isinstance(value, bool) and isinstance(value, Integral) else None
    if number is None:
        limit = "an integer"
    elif minimum is not None and number < minimum:
        limit = f"at least {minimum}"
    elif number > _LARGEST:
        limit = f"at most {_LARGEST}"
    else:
        return number
    raise ConfigError(f"`{name}` must be {limit}, got {short(value)}")


def optional_integer(value: int | None, name: str) -> int | None:
    """Return what `as_integer` returns, or None for None."""
    return None if value is None else as_integer(value, name)


def check_type(name: str, value: Any, kind: type[Any], remedy: str) -> None:
    """Check that an argument is None or an object of a class, which a string or number in its place is not.

    Raises:
        ConfigError: it is of another class; the message names the argument, the class and the value.
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"`{name}` must be a {kind.__name__}, got {short(value)}. {remedy}")


def check_choice(name: str, value: object, literal: Any) -> None:
    """Check that an argument is one of the values of a `Literal`.

    Raises:
        ConfigError: it is not; the message names the argument and the valid values.
    """
    if value not in (valid := typing.get_args(literal)):
        raise ConfigError(f"`{name}` must be one of {', '.join(valid)}, got {value!r}.")


def as_path(value: str | Path, name: str) -> Path:
    """Return the path that a string names; a leading `~` is replaced by the home folder.

    Args:
        value: the string or path.
        name: name of the argument, for messages.

    Raises:
        ConfigError: the string is empty (as from an unset shell variable), or contains characters that are invalid in
            a file name.
    """
    text = str(value)
    if not text:
        raise ConfigError(f"`{name}` is empty; pass a path (. is the current folder)")
    if "\0" in text:
        raise ConfigError(f"`{name}` must not contain a NUL character, got {text!r}")
    try:
        text.encode()
        return Path(text).expanduser() if text == "~" or text.startswith("~/") else storage.as_path(text)
    except UnicodeEncodeError as error:
        # packing.json and lengths.parquet store the path, and both are UTF-8
        raise ConfigError(f"`{name}` must be valid UTF-8, got {text!r}. Rename the path") from error
    except RuntimeError as error:
        raise ConfigError(f"`{name}` {text}: the home folder is not known; pass the whole path") from error


def short(value: Any) -> str:
    """Abbreviated `repr` of a value for a message, even if the value is large."""
    return _shortened.repr(value)


def refuse_remote(value: str | Path, name: str = "", *, or_object: bool = False) -> None:
    """Refuse the address of an object store for an argument that must be a local path.

    Args:
        value: a path, whose `//` `Path` has already collapsed to `/`.
        name: name of the argument, for the message.
        or_object: the argument may be in an object store, so that a RemotePath is valid.

    Raises:
        ConfigError: the path starts with `s3://`, `gs://`, `hf://` or the like.
    """
    if or_object and isinstance(value, str | Path) and storage.is_remote(value):
        return
    if isinstance(value, str | Path) and (scheme := _REMOTE.match(str(value))):
        path = f"`{name}` {value}" if name else str(value)
        raise ConfigError(
            f"{path} is remote; {scheme[1]}:// is not supported yet, use a path of a mounted file system"
        )


def plain_values(options: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of every declared option, in plain types for JSON."""
    for declaration in declared(type(options)):
        value = getattr(options, declaration.name)
        yield declaration.name, str(value) if isinstance(value, Path) else value


def _declaration(field: Any, hint: Any) -> Declaration:
    attributes = dict(field.metadata[_KEY])
    flags = attributes.pop("flags")
    if flags is None:
        flags = (f"--{field.name.replace('_', '-')}",)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    or_none = hint is Any or default is None or type(None) in typing.get_args(hint)
    kind = _without_none(hint)
    if typing.get_origin(kind) is typing.Literal:
        kind, attributes["choices"] = str, typing.get_args(kind)
    return Declaration(name=field.name, kind=kind, or_none=or_none, default=default, flags=flags, **attributes)


def _without_none(hint: Any) -> Any:
    """The type without `None`; Any for several types."""
    if not (isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union):
        return hint
    inner = [member for member in typing.get_args(hint) if member is not type(None)]
    return inner[0] if len(inner) == 1 else Any
