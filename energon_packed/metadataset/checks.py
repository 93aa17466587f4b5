"""What inputs of one blend must not have, and must have in common."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Protocol

from energon_packed.errors import ConfigError


class Input(Protocol):
    """What is compared of a BlendInput."""

    @property
    def path(self) -> Path:
        """Folder or file."""

    @property
    def settings(self) -> Mapping[str, object]:
        """By name; None where unknown."""

    @property
    def shards(self) -> frozenset[str]:
        """Stems of its shards."""

    @property
    def mode(self) -> str | None:
        """How a Metadataset draws inside."""


def check_together(inputs: Sequence[Input]) -> None:
    """Refuse what would show the same packs twice, or give two packs one name."""
    twice = [path for path, count in Counter(one.path.resolve() for one in inputs).items() if count > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is given twice; give it once, with a larger weight")
    owner: dict[str, Path] = {}
    for one in inputs:
        for shard in one.shards:
            if shard in owner:
                raise ConfigError(
                    f"{owner[shard]} and {one.path} both have a shard {shard}, so their keys are the same; pack "
                    "one of them again with another --shard-prefix"
                )
            owner[shard] = one.path


def check_held_out(train: Sequence[Input], val: Sequence[Input]) -> None:
    """Refuse validation on what is trained on."""
    for one in val:
        for other in train:
            if one.shards & other.shards:
                raise ConfigError(
                    f"the validation data {one.path} and the training data {other.path} share the shard "
                    f"{min(one.shards & other.shards)}; pack with --split train=0.98,val=0.02, or hold out other data"
                )


def check_modes(inputs: Sequence[Input], mode: str) -> None:
    """Refuse a Metadataset that draws in another way than the blend: Energon does not mix them."""
    for one in inputs:
        if one.mode not in (None, mode):
            kinds = {"weight": "by weight, for ever", "repetitions": "in epochs"}
            raise ConfigError(
                f"{one.path} draws {kinds[one.mode]}, and this blend {kinds[mode]}; give its data sets themselves"
            )


def check_settings(inputs: Sequence[Input]) -> None:
    """Refuse inputs that were packed with different settings; the message names all that two differ in."""
    for first, second in combinations(inputs, 2):
        differ = [
            f"{name} {str(value)[:24]} and {str(second.settings[name])[:24]}"
            for name, value in first.settings.items()
            if None not in (value, second.settings.get(name)) and second.settings[name] != value
        ]
        if differ:
            prefix = ", also with another --shard-prefix" if first.shards & second.shards else ""
            raise ConfigError(
                f"{first.path} and {second.path} have {', '.join(differ)}; a blend needs the same, pack one of them "
                f"again{prefix}"
            )
