"""Custom records: a field map or an adapter function turns a raw record into a record of a supported record format.

    --map user=question,assistant=answer,image=pic      field names of flat records
    --map images=screenshot                             a field of records in any record format
    --map messages=data.turns                           a field of an object; turns.0 is an item of a list
    --adapter package.module:function                   record -> record, Conversation, or None to drop the record

Both run before the record formats: their result is read like any other record.
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
from energon_packed.records.fields import OBJECT, Record, is_given, key_names, missing_field, shown, unsupported_field
from energon_packed.records.media.kinds import MEDIA_KINDS
from energon_packed.records.turns import is_turn
from energon_packed.system import raise_resource_error

_MEDIA = (*(name for kind in MEDIA_KINDS.values() for name in kind.fields), "image_base64_str")
TURNS = ("system", "user", "assistant")
TARGETS = (*TURNS, "messages", "image", "images", "video", "videos", "audio", "audios", "tools", "id")


@dataclass(frozen=True, slots=True)
class FieldMap:
    """Field names of flat records: which field is the question, the answer, the image.

    A map without turns renames fields, of records in any record format.

    Attributes:
        fields: (target, field) in order; each target is in `TARGETS`.

    Examples:
        >>> fields = FieldMap.parse("user=question,assistant=answer")
        >>> fields.apply({"question": "2 + 2?", "answer": "4"})["messages"][1]
        {'role': 'assistant', 'content': '4'}
    """

    fields: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, value: Any) -> "FieldMap":
        """Parse `user=question,assistant=answer`, or a mapping with the same content.

        Raises:
            ConfigError: invalid syntax, an unknown target, a question without `assistant`, or a repeated field.
        """
        if isinstance(value, Mapping):
            pairs = [(str(target), str(field)) for target, field in value.items()]
        elif not isinstance(value, str):
            raise ConfigError(f"`map` must have the form user=question,assistant=answer,image=pic, got {short(value)}")
        else:
            parts = [part.partition("=") for part in value.split(",")]
            pairs = [(target.strip(), field.strip()) for target, _, field in parts]
        if not all(target and field for target, field in pairs):
            raise ConfigError(f"`map` must have the form user=question,assistant=answer,image=pic, got {value!r}")
        targets, fields = [target for target, _ in pairs], [field for _, field in pairs]
        if unknown := [target for target in targets if target not in TARGETS]:
            raise ConfigError(f"unknown name {unknown[0]!r} in `map`. Use {', '.join(TARGETS)}.")
        if len(set(targets)) < len(targets) or len(set(fields)) < len(fields):
            raise ConfigError(f"`map` {value!r} repeats a name or a field. Use each only once.")
        if "messages" in targets and not set(targets).isdisjoint(TURNS):
            raise ConfigError(f"`map` {value!r} has messages beside single turns. Name either of them.")
        if "assistant" not in targets and not set(targets).isdisjoint(TURNS):
            raise ConfigError(f"`map` {value!r} has no assistant. Name the field with the answer.")
        return cls(tuple(pairs))

    def __str__(self) -> str:
        return ",".join(f"{target}={field}" for target, field in self.fields)

    def apply(self, record: Any) -> Any:
        """Rename fields; with turns in the map, convert to the messages format. Other fields stay unchanged.

        Raises:
            RecordError: a field is missing, a field of the record already has the name of a target, or the question is
                empty and the record has no image, video or audio.
        """
        if not isinstance(record, OBJECT):
            return record  # `normalize` rejects it
        values = {target: _value(record, field) for target, field in self.fields}
        # A field that the map uses is removed, or it would be read again under its old name.
        mapped: Any = record
        for _, field in self.fields:
            mapped = _without(mapped, _path(record, field))
        turns = {target: values.pop(target) for target in TURNS if target in values}
        if turns:
            values["messages"] = _messages(turns)
            if not (
                any(is_given(values.get(name) or mapped.get(name)) for name in _MEDIA)
                or any(turn["role"] == "user" and str(turn["content"]).strip() for turn in values["messages"])
            ):
                name = dict(self.fields).get("user")
                fault = f"{name} is empty" if name else "`map` has no user"
                raise RecordError(
                    Reason.EMPTY, f"{fault}, and the record has no image, video or audio: there is no question"
                )
        for name in values:
            # Neither value is preferred silently: the record has both a mapped field and a field of the target's name.
            if name != "id" and mapped.get(name) is not None:
                raise unsupported_field(
                    f"the record has a field {name} beside those of `map`; name it in the map, or use an `adapter`"
                )
        return {**mapped, **values}


def parse_map(value: str | Mapping[str, str]) -> str:
    """Return a field map as a string; errors as for `FieldMap.parse`."""
    return str(FieldMap.parse(value))


def _path(record: Record, field: str) -> list[str]:
    """Keys of a field in the record: a single key if the record has it, or else one per dot."""
    return [field] if field in record else field.split(".")


def _value(record: Record, field: str) -> Any:
    """Find the value of a field, in objects and lists of the record.

    Raises:
        RecordError: `missing_field`; the message names the fields that the innermost object has.
    """
    value: Any = record
    place = "the record"
    for key in _path(record, field):
        if isinstance(value, OBJECT) and key in value:
            value = value[key]
        elif isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            has = f"has {key_names(value) or 'no fields'}" if isinstance(value, OBJECT) else f"is {shown(value)}"
            raise missing_field(f"`map` names {field}, but {place} {has}")
        place = key if place == "the record" else f"{place}.{key}"
    return value


def _without(value: Any, path: list[str]) -> Any:
    """Copy a record without a field, and without objects that have no other; items of lists are kept."""
    if not path or not isinstance(value, OBJECT):
        return value if path else {}
    rest = {key: inner for key, inner in value.items() if key != path[0]}
    inner = value.get(path[0])
    if len(path) > 1 and (not isinstance(inner, OBJECT) or (inner := _without(inner, path[1:]))):
        rest[path[0]] = inner
    return rest


def _messages(turns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Build alternating turns; an empty system turn is left out, an empty user turn is kept."""
    user, answer = turns.get("user"), turns["assistant"]
    if isinstance(user, list | tuple) or isinstance(answer, list | tuple):
        users, answers = ([side] if isinstance(side, str) else list(side or ()) for side in (user, answer))
        if len(users) != len(answers):
            raise missing_field(f"`map` has {len(users)} user turns for {len(answers)} answers")
    else:
        users, answers = [user], [answer]
    system = turns.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    for question, reply in zip(users, answers, strict=True):
        messages += [
            {"role": "user", "content": "" if question is None else question},
            {"role": "assistant", "content": reply},
        ]
    return messages


@dataclass(frozen=True, slots=True)
class Adapter:
    """A user function that converts records.

    The function must be deterministic: records are read both when they are measured and when they are written.

    Attributes:
        name: `package.module:function`; the working directory is searched too.

    Examples:
        >>> code = "def convert(record): return {'text': record['body']}"
        >>> _ = Path("my_records.py").write_text(code)
        >>> Adapter("my_records:convert").apply({"body": "A document."})
        {'text': 'A document.'}
    """

    name: str

    def apply(self, record: Any) -> Any:
        """Convert a record; a returned Conversation is used unchanged.

        Raises:
            RecordError: `dropped_by_adapter` if the function returns None; `adapter_failed` if it raises.
            ResourceError: it raises because memory, open files, permissions or a disk fail.
        """
        function, _ = _load(self.name)
        # A copy, so that a function that changes its argument cannot change records that are kept by their reader.
        try:
            adapted = function(dict(record) if isinstance(record, Mapping) else record)
        except RecordError:
            raise
        except Exception as error:
            raise_resource_error(error, self.name)
            # Details of rejects are a single line of limited length.
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise RecordError(Reason.ADAPTER_FAILED, f"{self.name} raised {text[:200]}") from error
        if adapted is None:
            raise RecordError(Reason.DROPPED_BY_ADAPTER, f"{self.name} returned None")
        if isinstance(adapted, list) and not (adapted and all(map(is_turn, adapted))):
            raise RecordError(
                Reason.ADAPTER_FAILED,
                f"{self.name} returned a list of {len(adapted)} values; return one record, or the list of its turns. "
                "To make several records of one, write them to a file before packing",
            )
        # A wrong type is a fault of the adapter and not of the record.
        if not isinstance(adapted, (Conversation, *OBJECT, list)):
            raise RecordError(
                Reason.ADAPTER_FAILED,
                f"{self.name} returned {type(adapted).__name__}; return a record, a Conversation or None",
            )
        return adapted

    @property
    def source(self) -> str:
        """Source code of the function's module, for fingerprints.

        Raises:
            ConfigError: the function cannot be found.
        """
        return _load(self.name)[1]


# Loaded once per process: the module may be large, and its top-level code must not run for each record.
@lru_cache(maxsize=16)
def _load(name: str) -> tuple[Callable[[Any], Record | Conversation | None], str]:
    """Import the function and read the source code of its module.

    Raises:
        ConfigError: the name is invalid, or no such module or function exists.
    """
    module_name, _, function_name = str(name).partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"`adapter` must have the form package.module:function, got {name!r}")
    try:
        module = _import(module_name)
    except ImportError as error:
        raise ConfigError(
            f"`adapter` {name}: {error}. Install the module, or run in the folder of its file (now {os.getcwd()})."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"`adapter` {name}: {module_name} has no function {function_name}")
    try:
        if getattr(module, "__file__", None) is None:  # built into Python
            raise OSError
        return function, inspect.getsource(module)
    except OSError as error:
        raise ConfigError(f"`adapter` {name}: {module_name} has no source code. Pass a Python file.") from error


def _import(name: str) -> Any:
    """Import a module; if `sys.path` does not have it, from the working directory."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        folder = os.getcwd()
        # Only the adapter itself is searched there: a module that the adapter imports and lacks is an error.
        if error.name is None or not f"{name}.".startswith(f"{error.name}.") or folder in sys.path:
            raise
        sys.path.insert(0, folder)
        return importlib.import_module(name)
