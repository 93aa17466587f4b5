"""Compatibility checks between the inputs of a blend."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Protocol

from energon_packed.errors import ConfigError


class Input(Protocol):
    """Attributes of a BlendInput that are compared."""

    @property
    def path(self) -> Path:
        """Folder or file."""

    @property
    def settings(self) -> Mapping[str, object]:
        """Packing settings by name; None if unknown."""

    @property
    def shards(self) -> frozenset[str]:
        """Stems of its shards."""

    @property
    def mode(self) -> str | None:
        """Draw mode of a Metadataset; None for a single dataset."""


def check_together(inputs: Sequence[Input]) -> None:
    """Reject inputs that repeat the same packs or share pack keys."""
    twice = [path for path, count in Counter(one.path.resolve() for one in inputs).items() if count > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is listed twice; list it once with a larger weight")
    owner: dict[str, Path] = {}
    for one in inputs:
        for shard in one.shards:
            if shard in owner:
                raise ConfigError(
                    f"{owner[shard]} and {one.path} both have a shard {shard}, so their keys collide; repack "
                    "one of them with a different `shard_prefix`"
                )
            owner[shard] = one.path


def check_held_out(train: Sequence[Input], val: Sequence[Input]) -> None:
    """Reject validation inputs that overlap with training inputs."""
    for one in val:
        for other in train:
            if one.shards & other.shards:
                raise ConfigError(
                    f"the validation data {one.path} and the training data {other.path} share the shard "
                    f"{min(one.shards & other.shards)}; pack with `split` train=0.98,val=0.02 or use other "
                    "validation data"
                )


def check_modes(inputs: Sequence[Input], mode: str) -> None:
    """Reject a Metadataset whose draw mode differs from the blend's; Energon does not support mixing them."""
    for one in inputs:
        if one.mode not in (None, mode):
            kinds = {"weight": "by weight, indefinitely", "repetitions": "in epochs"}
            raise ConfigError(
                f"{one.path} draws {kinds[one.mode]}, but this blend draws {kinds[mode]}; list its datasets directly"
            )


def check_settings(inputs: Sequence[Input]) -> None:
    """Reject inputs packed with different settings; the message lists all settings in which two inputs differ."""
    for first, second in combinations(inputs, 2):
        differ = [
            f"{name} {str(value)[:24]} and {str(second.settings[name])[:24]}"
            for name, value in first.settings.items()
            if None not in (value, second.settings.get(name)) and second.settings[name] != value
        ]
        if differ:
            prefix = " and a different `shard_prefix`" if first.shards & second.shards else ""
            raise ConfigError(
                f"{first.path} and {second.path} have {', '.join(differ)}; all inputs need the same, repack one of "
                f"them with the other's settings{prefix}"
            )
