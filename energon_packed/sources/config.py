"""SourceConfig, an input with per-source settings, in; Reading, the effect of the settings on an opened file, out.

An item of `sources` in a config file or in Python:

    sources:
      - path: captions/*.tar
        weight: 2
      - path: vqa.jsonl
        image_root: images
        map: {user: q, assistant: a}
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError, Reason, RecordError
from energon_packed.options import Options, declared, make, option, plain_values, refuse_remote, short
from energon_packed.records import Adapter, FieldMap
from energon_packed.records.mapping import parse_map

_MAX_WEIGHT = 1000  # each repetition is measured
_HASH_RANGE = 2**64


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings for the records of an opened file.

    Attributes:
        config: index of its SourceConfig.
        field_map: field names of flat records; None if the records have a known format.
        adapter: converts the records, or None.
        copy: index of this repetition of the file, from 0.
        fraction: fraction of its records to read, above 0 and up to 1.
        salt: seed of the selection if `fraction` is below 1.
    """

    config: int = 0
    field_map: FieldMap | None = None
    adapter: Adapter | None = None
    copy: int = 0
    fraction: float = 1.0
    salt: str = ""

    def check_sampled(self, address: int) -> None:
        """Reject a record that is not sampled; the choice depends only on the seed and the address of the record.

        Raises:
            RecordError: `not_sampled`.
        """
        # A hash of the address instead of a random stream: the choice does not depend on workers, chunks or their
        # order.
        drawn = hashlib.blake2b(f"{self.salt} {address}".encode(), digest_size=8).digest()
        if int.from_bytes(drawn, "big") >= self.fraction * _HASH_RANGE:
            raise RecordError(Reason.NOT_SAMPLED, f"the weight of its source takes {self.fraction:g} of the records")

    def named(self, ident: str) -> str:
        """Make the id of a record in this repetition: `id`, `id#2`, `id#3` ..."""
        return f"{ident}#{self.copy + 1}" if self.copy else ident


def _parse_path(value: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    paths = [value] if isinstance(value, str | Path) else value
    if not isinstance(paths, list | tuple) or not paths or not all(isinstance(path, str | Path) for path in paths):
        raise ConfigError(f"path must be a path or a list of paths, got {short(value)}")
    for path in paths:
        refuse_remote(path, or_object=True)
    return tuple(map(str, paths))


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Options):
    """An input with per-source settings, which override the options of the run.

    `weight` repeats or samples its records: 2 packs each record twice, 0.5 a seeded half of them, 2.5 each twice and
    half of them a third time. Each repetition has its own rows in lengths.parquet, with ids `id#2`, `id#3`; records
    that are not sampled are listed in rejects.jsonl as `not_sampled`, and do not count as rejected.

    Attributes:
        label: name of the source in messages; "" for a plain path.

    Raises ConfigError when made with an invalid value.

    Examples:
        >>> SourceConfig(path="data.jsonl", weight=2, map="user=question,assistant=answer").settings()
        {'path': ['data.jsonl'], 'map': 'user=question,assistant=answer', 'weight': 2}
    """

    path: Sequence[str] = option(
        help="File, glob, folder, Energon dataset or Hub name, or a list of them.", group="", parse=_parse_path
    )
    image_root: Path | None = option(
        None, help="Folder that paths of images and videos start from and must stay in.", group=""
    )
    map: str | None = option(
        None, help="Field names of flat records: a string or a mapping.", group="", parse=parse_map
    )
    adapter: str | None = option(None, help="`MODULE:FUNCTION` that converts each record.", group="")
    source_split: str | None = option(None, help="Split to read.", group="")
    weight: float = option(
        1.0, help="Repetition factor: 2 packs each record twice, 0.5 samples half of them.", group=""
    )
    label: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter is not None:
            _ = Adapter(self.adapter).source  # loaded now, so that an error appears here and not in the first worker
        if self.image_root is not None:
            refuse_remote(self.image_root, "image_root", or_object=True)
            if not self.image_root.is_dir():
                raise ConfigError(
                    f"`image_root` {self.image_root} is not a folder. Pass the folder that image paths start from."
                )
        if not (math.isfinite(self.weight) and 0 < self.weight <= _MAX_WEIGHT):
            raise ConfigError(f"weight must be above 0 and at most {_MAX_WEIGHT}, got {self.weight:g}")

    @classmethod
    def of(cls, value: Any, index: int) -> "SourceConfig":
        """Make a SourceConfig of an item of `sources`: a path, a mapping of settings, or a SourceConfig.

        Args:
            value: the item.
            index: index of the item in the list, for messages.

        Raises:
            ConfigError: an unknown setting (with the likely one), or an invalid value.
        """
        names = [option.name for option in declared(cls)]
        if isinstance(value, SourceConfig):
            settings: dict[str, Any] = {name: getattr(value, name) for name in names}
        elif isinstance(value, Mapping):
            settings = {str(name).replace("-", "_"): item for name, item in value.items()}
            settings = {name: item for name, item in settings.items() if item is not None}
        elif isinstance(value, str | Path):
            settings = {"path": value}
        else:
            raise ConfigError(f"sources[{index}] must be a path or a mapping with a path, got {short(value)}")
        label = _label(index, settings.get("path"))
        try:
            # `label` is a field of the class, but not a setting of the user.
            if "label" in settings:
                raise ConfigError(f"unknown setting 'label'; valid settings: {', '.join(names)}")
            return make(cls, {**settings, "label": label}, what="setting")
        except ConfigError as error:
            raise ConfigError(f"{label}: {plain(str(error))}") from error

    @property
    def repetitions(self) -> list[float]:
        """Fraction of the records that each repetition reads; for the weight 2.5, [1, 1, 0.5]."""
        return [min(1.0, self.weight - copy) for copy in range(math.ceil(self.weight))]

    def settings(self) -> dict[str, Any]:
        """All settings that are not None, in plain types: `path` (a list), `weight` and others."""
        plain_settings = {name: value for name, value in plain_values(self) if value is not None}
        return {**plain_settings, "path": list(self.path)}

    def key(self, seed: int) -> list[Any]:
        """Settings that decide which records are read and how, for fingerprints; an adapter counts by its code.

        Args:
            seed: seed of the run; used only if the weight samples records.
        """
        adapter = None if self.adapter is None else [self.adapter, Adapter(self.adapter).source]
        # A seed that is not used must not change the fingerprint.
        return [self.map, adapter, self.weight, seed if self.weight % 1 else None]


def plain(message: str) -> str:
    """Remove the backquotes of a message: the command line prints quoted names as options, and these are settings."""
    return message.replace("`", "")


def _label(index: int, path: Any) -> str:
    if isinstance(path, list | tuple) and path:
        path = f"{path[0]}, ..." if len(path) > 1 else path[0]
    return f"sources[{index}] ({path})" if isinstance(path, str | Path) else f"sources[{index}]"
