"""The group of a record: records with an equal value of a field, such as `prompt_id`, share a row.

Input: a Conversation, the record that it was made of, and the name of the field. Output: the Conversation with
`group`, and with the `role` and `label` of the record if its format does not read them.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from energon_packed.records.conversation import Conversation
from energon_packed.records.fields import Record, is_number, shown, unsupported_field


def with_group(conversation: Conversation, record: Record, name: str) -> Conversation:
    """Return the conversation with the group, role and label of its record; itself if the record has no group.

    Raises:
        RecordError: `unsupported_field`, if one of them has another type.
    """
    group = read_group(record, name)
    if group is None:
        return conversation
    read: dict[str, Any] = {"group": group}
    if "role" in conversation.unused_fields:
        read["role"] = _role_in_group(record["role"])
    if "label" in conversation.unused_fields:
        read["label"] = _label_in_group(record["label"])
    unused = tuple([field for field in conversation.unused_fields if field != name and field not in read])
    return replace(conversation, **read, unused_fields=unused)


def read_group(record: Mapping[str, Any], name: str) -> str | None:
    """Read the key of the group of a record; None without a value.

    Raises:
        RecordError: `unsupported_field`, if it is neither a string nor an integer.
    """
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise unsupported_field(
            f"{name} of the record is {shown(value)}; the key of a group is a string or an integer"
        )
    return str(value)


def group_key(source: int, group: str | int) -> str:
    """Return the key of a group in a row; groups of two sources are different.

    Args:
        source: index of the source.
        group: the key in its records; or the index of a record that is a group.
    """
    return f"{source}:{group}" if isinstance(group, int) else f"{source} {group}"


def _label_in_group(value: Any) -> tuple[float, ...]:
    """Read a label that `fields.read_label` does not read, such as a list of integers, as a number for each class.

    Raises:
        RecordError: `unsupported_field` for another value.
    """
    values = value if isinstance(value, list | tuple) else [value]
    are_finite = [is_number(n) and math.isfinite(n) for n in values]
    if not values or not all(are_finite):
        raise unsupported_field(f"label of the record is {shown(value)}; use a number, or a list of numbers")
    return tuple(map(float, values))


def _role_in_group(value: Any) -> str:
    if not isinstance(value, str):
        raise unsupported_field(f"role of the record is {shown(value)}; the role of a sample in its group is a string")
    return value
