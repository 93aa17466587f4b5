"""Records in the user's own words: a field map, or an adapter function.

    --map user=question,assistant=answer,image=pic      names of the record's fields, for any flat record
    --adapter package.module:function                   record -> record, Conversation, or None to drop it

Both come before the shapes: what they return is read as any other record.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from energon_packed.errors import ConfigError, Reason, RecordError
from energon_packed.options import short
from energon_packed.records.conversation import Conversation
from energon_packed.records.fields import OBJECT, Record, key_names

TURNS = ("system", "user", "assistant")
TARGETS = (*TURNS, "image", "images", "video", "videos", "tools", "id")


@dataclass(frozen=True, slots=True)
class FieldMap:
    """Names of a record's fields for what they mean.

    Attributes:
        fields: (target, field) in order; targets are those of `TARGETS`.
    """

    fields: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: Any) -> "FieldMap":
        """`user=question,assistant=answer`, or the same as a mapping.

        Raises:
            ConfigError: another form, an unknown target, no `assistant`, or a field given twice.
        """
        if isinstance(text, Mapping):
            pairs = [(str(target), str(field)) for target, field in text.items()]
        elif not isinstance(text, str):
            raise ConfigError(f"`map` is {short(text)}; use the form user=question,assistant=answer,image=pic")
        else:
            parts = [part.partition("=") for part in text.split(",")]
            pairs = [(target.strip(), field.strip()) for target, _, field in parts]
        if not all(target and field for target, field in pairs):
            raise ConfigError(f"invalid `map` {text!r}; use the form user=question,assistant=answer,image=pic")
        targets, fields = [target for target, _ in pairs], [field for _, field in pairs]
        if unknown := [target for target in targets if target not in TARGETS]:
            raise ConfigError(f"unknown name {unknown[0]!r} in `map`; use {', '.join(TARGETS)}")
        if len(set(targets)) < len(targets) or len(set(fields)) < len(fields):
            raise ConfigError(f"`map` {text!r} names something twice; give each name and each field once")
        if "assistant" not in targets:
            raise ConfigError(f"`map` {text!r} has no assistant; name the field that holds the answer")
        return cls(tuple(pairs))

    def __str__(self) -> str:
        return ",".join(f"{target}={field}" for target, field in self.fields)

    def apply(self, record: Any) -> Any:
        """The record in messages shape; fields that the map does not name stay as they are.

        Raises:
            RecordError: a field is missing, or a field of the record already has the name of a target.
        """
        if not isinstance(record, OBJECT):
            return record  # `normalize` rejects it
        used = {field for _, field in self.fields}
        if missing := [field for _, field in self.fields if field not in record]:
            raise RecordError(
                Reason.MISSING_FIELD,
                f"`map` names {missing[0]}, but the record has {key_names(record) or 'no fields'}",
            )
        mapped = {key: value for key, value in record.items() if key not in used}
        values = {target: record[field] for target, field in self.fields}
        turns = {target: values.pop(target) for target in TURNS if target in values}
        for name in ("messages", *(target for target in values if target != "id")):
            if mapped.get(name) is not None:
                raise RecordError(
                    Reason.UNSUPPORTED_FIELD,
                    f"the record has a field {name} beside those of `map`; name it in the map, or use an `adapter`",
                )
        return {**mapped, **values, "messages": _messages(turns)}


def _messages(turns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Alternating turns; a system turn without a value is none, a user turn without one is empty."""
    user, answer = turns.get("user"), turns["assistant"]
    if isinstance(user, list | tuple) or isinstance(answer, list | tuple):
        users, answers = ([one] if isinstance(one, str) else list(one or ()) for one in (user, answer))
        if len(users) != len(answers):
            raise RecordError(Reason.MISSING_FIELD, f"`map` gives {len(users)} user turns for {len(answers)} answers")
    else:
        users, answers = [user], [answer]
    system = turns.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    for one, other in zip(users, answers, strict=True):
        messages += [{"role": "user", "content": "" if one is None else one}, {"role": "assistant", "content": other}]
    return messages


@dataclass(frozen=True, slots=True)
class Adapter:
    """A function of the user's that makes records.

    The function must give the same result each time: records are read when they are measured and when they are
    written.

    Attributes:
        name: `package.module:function`; the working directory is searched too.
    """

    name: str

    def apply(self, record: Any) -> Any:
        """A record, or a Conversation, which is used as it is.

        Raises:
            RecordError: `dropped_by_adapter`, where the function returns None; `adapter_failed`, where it raises.
        """
        function, _ = _load(self.name)
        try:
            adapted = function(dict(record) if isinstance(record, Mapping) else record)
        except RecordError:
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise RecordError(Reason.ADAPTER_FAILED, f"{self.name} raised {text[:200]}") from error
        if adapted is None:
            raise RecordError(Reason.DROPPED_BY_ADAPTER, f"{self.name} returned None")
        if not isinstance(adapted, (Conversation, *OBJECT, list)):
            raise RecordError(
                Reason.ADAPTER_FAILED,
                f"{self.name} returned {type(adapted).__name__}; return a record, a Conversation or None",
            )
        return adapted

    @property
    def source(self) -> str:
        """Source text of the function's module, for fingerprints.

        Raises:
            ConfigError: the function cannot be found.
        """
        return _load(self.name)[1]


@lru_cache(maxsize=16)
def _load(name: str) -> tuple[Callable[[Any], Record | Conversation | None], str]:
    """Function and source text of its module.

    Raises:
        ConfigError: the name has another form, or nothing has this name.
    """
    module_name, _, function_name = str(name).partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"invalid `adapter` {name!r}; use the form package.module:function")
    try:
        module = _import(module_name)
    except ImportError as error:
        raise ConfigError(
            f"`adapter` {name}: {error}; install the module, or run where its file is (now {os.getcwd()})"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"`adapter` {name}: {module_name} has no function {function_name}")
    try:
        return function, inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise ConfigError(f"`adapter` {name}: {module_name} has no source text; pass a Python file") from error


def _import(name: str) -> Any:
    """The module, from the working directory where the path does not have it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        folder = os.getcwd()
        if error.name is None or not f"{name}.".startswith(f"{error.name}.") or folder in sys.path:
            raise
        sys.path.insert(0, folder)
        return importlib.import_module(name)
