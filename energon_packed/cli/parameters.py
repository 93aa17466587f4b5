"""Parameter types that click does not have."""

import re
from typing import Any

import click

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


class ByteSize(click.ParamType[int]):
    """A size such as `512M`, `1GB` or `1073741824`; K, M, G and T are powers of 1024."""

    name = "size"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        """Bytes."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no size; use bytes or a unit, such as 512M or 1G", parameter, context)
        return int(float(match.group(1)) * _UNITS[match.group(2).upper()])
