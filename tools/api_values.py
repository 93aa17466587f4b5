"""Extension of the API pages (griffe, in mkdocs.yml): defaults as values, and the declared options of a class.

In the source, a default may be the name of a constant, a factory or an `option(...)`. The pages show the value in the
imported package. Declared options (`energon_packed.options`) of a class are listed by group.
"""

import dataclasses
import enum
import importlib
import inspect
import sys
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from energon_packed.options import Declaration, declared


class Values(griffe.Extension):
    """Replace the default of each parameter by its value, and list declared options."""

    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        """Edit all classes and functions of a package."""
        griffe.DataclassesExtension().on_package(pkg=pkg, **others)  # makes __init__; by itself, it would run later
        self._edit(pkg)
        for name, member in list(pkg.members.items()):
            # records/normalize.py has a function `normalize`, which `energon_packed.records` imports.
            is_ours = member.is_alias and member.target_path.startswith(f"{pkg.name}.")
            if is_ours and member.final_target.is_module and not inspect.ismodule(_imported(member.target_path)):
                pkg.set_member(name, griffe.Alias(name, f"{member.target_path}.{name}", parent=pkg))

    def _edit(self, parent: griffe.Module | griffe.Class) -> None:
        for member in parent.members.values():
            if isinstance(member, griffe.Module | griffe.Class):
                self._edit(member)
            if isinstance(member, griffe.Class | griffe.Function):
                found = _imported(member.path)
                _set_defaults(member, found)
                if isinstance(member, griffe.Class) and any(f.metadata for f in _fields(found)):
                    _list_options(member, declared(found))


def _imported(path: str) -> Any:
    """Return the object of this path, or None if its module needs a package that is not installed."""
    names = path.split(".")
    for count in range(len(names) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:count]))
        except ModuleNotFoundError as error:
            if error.name is not None and path.startswith(error.name):
                continue
            return None
        for name in names[count:]:
            found = inspect.getattr_static(found, name, None)
        return getattr(found, "__func__", found)
    return None


def _set_defaults(member: griffe.Class | griffe.Function, found: Any) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return
    function = member.members.get("__init__") if isinstance(member, griffe.Class) else member
    if not isinstance(function, griffe.Function):
        return
    fields = {field.name: field for field in _fields(found)}
    for parameter in function.parameters:
        actual = signature.parameters.get(parameter.name)
        if parameter.default is None or actual is None or str(actual.kind.description).startswith("variadic"):
            continue
        default = actual.default
        field = fields.get(parameter.name)
        if field is not None and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        parameter.default = None if default is inspect.Parameter.empty else _text(default)


def _fields(found: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()


def _text(value: object) -> str:
    if isinstance(value, enum.Enum):
        return str(value)
    return value.__name__ if inspect.isclass(value) or inspect.isroutine(value) else repr(value)


def _list_options(member: griffe.Class, options: tuple[Declaration, ...]) -> None:
    assert member.docstring is not None
    text = member.docstring.value
    for group, members in groupby(sorted(options, key=lambda option: _order(options, option)), lambda o: o.group):
        text += f"\n\nArgs: {group or 'Settings'}\n"
        for option in members:
            default = f" Default: {option.shown_default}." if option.shown_default and not option.is_required else ""
            text += f"    {option.name}: {escape(option.help, quote=False)}{default}\n"
    member.docstring.value = text.rstrip()


def _order(options: tuple[Declaration, ...], option: Declaration) -> int:
    """Return the place of the group of an option among all groups."""
    groups = [other.group for other in options]
    return groups.index(option.group)
