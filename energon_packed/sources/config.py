"""SourceConfig: one input with settings of its own, an item of `sources` in a config file or in Python.

    sources:
      - path: captions/*.tar
        weight: 2
      - {path: vqa.jsonl, image_root: images, map: {user: q, assistant: a}}

`Reading` is what these settings do to the records of one opened file.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError, Reason, RecordError
from energon_packed.options import check, declared, make, option, plain_values, refuse_remote, short
from energon_packed.records import Adapter, FieldMap

_MOST = 1000  # of a weight: each repetition is measured
_WHOLE = 2**64


@dataclass(frozen=True, slots=True)
class Reading:
    """How the records of one opened file are read.

    Attributes:
        config: number of its SourceConfig.
        field_map: names the fields of the records; None where their shapes do.
        adapter: makes records of the user's own; None without.
        copy: number of this repetition of the file, from 0.
        fraction: share of its records that is taken, above 0 and up to 1.
        salt: decides which ones, where `fraction` is below 1.
    """

    config: int = 0
    field_map: FieldMap | None = None
    adapter: Adapter | None = None
    copy: int = 0
    fraction: float = 1.0
    salt: str = ""

    def check_sampled(self, address: int) -> None:
        """Reject a record that is not among the sampled ones; the choice depends on the seed and its address.

        Raises:
            RecordError: `not_sampled`.
        """
        drawn = hashlib.blake2b(f"{self.salt} {address}".encode(), digest_size=8).digest()
        if int.from_bytes(drawn, "big") >= self.fraction * _WHOLE:
            raise RecordError(Reason.NOT_SAMPLED, f"the weight of its source takes {self.fraction:g} of the records")

    def named(self, ident: str) -> str:
        """The id of a record in this repetition: `id`, `id#2`, `id#3` ..."""
        return f"{ident}#{self.copy + 1}" if self.copy else ident


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One input with settings of its own, which win over those of the run.

    `weight` repeats or samples its records: 2 packs each record twice, 0.5 a seeded half of them, 2.5 each twice and
    half of them a third time. Repetitions are rows of their own in lengths.parquet, with ids `id#2`, `id#3`; records
    that are not sampled are listed in rejects.jsonl as `not_sampled`, and do not count as rejected.

    Attributes:
        label: what names it in messages; "" for a plain path.

    Raises ConfigError when made with an invalid value.
    """

    path: Sequence[str] = option(help="File, glob, folder, Energon dataset or Hub name, or a list of them.", group="")
    image_root: Path | None = option(None, help="Folder that image paths start from and must stay in.", group="")
    map: str | None = option(None, help="Names of the fields of flat records: text, or a mapping.", group="")
    adapter: str | None = option(None, help="`MODULE:FUNCTION` that makes each record.", group="")
    source_split: str | None = option(None, help="Split to read.", group="")
    weight: float = option(1.0, help="How often each record is packed; below 1, the share that is.", group="")
    label: str = ""

    def __post_init__(self) -> None:
        paths = [self.path] if isinstance(self.path, str | Path) else self.path
        if not isinstance(paths, list | tuple) or not paths or not all(isinstance(one, str | Path) for one in paths):
            raise ConfigError(f"path is {short(self.path)}; it must be a path or a list of paths")
        for one in paths:
            refuse_remote(one)
        object.__setattr__(self, "path", tuple(map(str, paths)))
        if self.map is not None:
            object.__setattr__(self, "map", str(FieldMap.parse(self.map)))
        check(self)
        if self.adapter is not None:
            _ = Adapter(self.adapter).source  # a wrong one is an error now, not in the first worker
        if self.image_root is not None:
            refuse_remote(self.image_root, "image_root")
            if not self.image_root.is_dir():
                raise ConfigError(
                    f"`image_root` {self.image_root} is not a folder; pass the folder that image paths start from"
                )
        if not (math.isfinite(self.weight) and 0 < self.weight <= _MOST):
            raise ConfigError(f"weight is {self.weight:g}; it must be above 0 and at most {_MOST}")

    @classmethod
    def of(cls, value: Any, number: int) -> "SourceConfig":
        """An item of `sources`: a path, a mapping of settings, or a SourceConfig.

        Args:
            value: the item.
            number: its place in the list, for messages.

        Raises:
            ConfigError: an unknown setting (with the likely one), or an invalid value.
        """
        names = [one.name for one in declared(cls)]
        if isinstance(value, SourceConfig):
            given: dict[str, Any] = {name: getattr(value, name) for name in names}
        elif isinstance(value, Mapping):
            given = {str(name).replace("-", "_"): item for name, item in value.items()}
            given = {name: item for name, item in given.items() if item is not None}
        elif isinstance(value, str | Path):
            given = {"path": value}
        else:
            raise ConfigError(f"sources[{number}] is {short(value)}; it must be a path or a mapping with a path")
        label = _label(number, given.get("path"))
        try:
            if "label" in given:
                raise ConfigError(f"unknown setting 'label'; valid settings: {', '.join(names)}")
            return make(cls, {**given, "label": label}, what="setting")
        except ConfigError as error:
            raise ConfigError(f"{label}: {plain(str(error))}") from error

    @property
    def repetitions(self) -> list[float]:
        """The share of the records that each repetition takes; for the weight 2.5, [1, 1, 0.5]."""
        return [min(1.0, self.weight - copy) for copy in range(math.ceil(self.weight))]

    def settings(self) -> dict[str, Any]:
        """The settings that are given, in plain types: `path` (a list), `weight`, and what is not None."""
        found = {name: value for name, value in plain_values(self) if value is not None}
        return {**found, "path": list(self.path)}

    def key(self, seed: int) -> list[Any]:
        """What decides which records are read and how, for fingerprints: an adapter by its source text.

        Args:
            seed: of the run; it counts where records are sampled.
        """
        adapter = None if self.adapter is None else [self.adapter, Adapter(self.adapter).source]
        return [self.map, adapter, self.weight, seed if self.weight % 1 else None]


def plain(message: str) -> str:
    """A message about settings of a source: without the backquotes that the command line turns into its options."""
    return message.replace("`", "")


def _label(number: int, path: Any) -> str:
    if isinstance(path, list | tuple) and path:
        path = f"{path[0]}, ..." if len(path) > 1 else path[0]
    return f"sources[{number}] ({path})" if isinstance(path, str | Path) else f"sources[{number}]"
