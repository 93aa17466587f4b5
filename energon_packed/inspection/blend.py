"""Entries of a Metadataset with counts, shares of draws and epochs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from energon_packed.blends import epochs_by_weight, read_input
from energon_packed.errors import EnergonPackedError
from energon_packed.metadatasets import Entry, Metadataset


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendEntry:
    """One entry of a split.

    Attributes:
        split: `train`, `val` or `test`.
        path: path resolved relative to the file.
        mode: `weight`, `repetitions` or `once`.
        number: weight or repetitions.
        packs, samples: counts; None if the entry cannot be read.
        tokens: tokens without padding; None if they are not recorded.
        share: share of the draws, or of an epoch's packs.
        token_share: share of the tokens in those draws; None if the tokens of an entry are not recorded.
        times: epochs over it per epoch of the largest entry of the split, or repetitions per epoch.
        problem: why the entry cannot be read, or None.
    """

    split: str
    path: Path
    mode: str
    number: float
    packs: int | None
    samples: int | None
    tokens: int | None = None
    share: float | None = None
    token_share: float | None = None
    times: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendSplit:
    """One split of a Metadataset.

    Attributes:
        name: `train`, `val` or `test`.
        entries: its datasets.
    """

    name: str
    entries: Sequence[BlendEntry]

    @property
    def mode(self) -> str:
        """Of all entries: `weight`, `repetitions` or `once`."""
        return self.entries[0].mode

    @property
    def unreadable(self) -> int:
        """Entries that cannot be read; the totals are without them."""
        return sum(entry.problem is not None for entry in self.entries)

    def total(self, count: str) -> int | None:
        """Sum of `packs`, `samples` or `tokens` over the entries that can be read; None where one is not recorded."""
        found = [getattr(entry, count) for entry in self.entries if entry.problem is None]
        return None if None in found or not found else sum(found)

    def drawn(self, count: str) -> float | None:
        """As `total`, in one epoch, in which each entry is drawn `times` times; None where that is unknown."""
        found = [(getattr(entry, count), entry.times) for entry in self.entries]
        if any(value is None or times is None for value, times in found):
            return None
        return float(sum(value * times for value, times in found))


def read_blend(metadataset: Metadataset) -> list[BlendSplit]:
    """All splits of a Metadataset, each entry with its counts, including those that cannot be read."""
    return [
        BlendSplit(name=split, entries=_counted([_entry(split, blend.mode, entry) for entry in blend.entries]))
        for split, blend in metadataset.splits.items()
    ]


def _entry(split: str, mode: str, entry: Entry) -> BlendEntry:
    packs = samples = tokens = None
    problem = entry.fault or entry.unsupported
    if problem is None:
        try:
            found = read_input(entry.path, entry.split_part or split)
            packs, samples, tokens = found.packs, found.samples, found.tokens
        except EnergonPackedError as error:
            problem = str(error)
    return BlendEntry(
        split=split,
        path=entry.path,
        mode=mode,
        number=entry.number,
        packs=packs,
        samples=samples,
        tokens=tokens,
        problem=problem,
    )


def _counted(entries: list[BlendEntry]) -> list[BlendEntry]:
    """Add shares and times if all entries could be read."""
    if not all(entry.packs for entry in entries):
        return entries
    packs = [entry.packs or 0 for entry in entries]
    numbers = [entry.number for entry in entries]
    if entries[0].mode == "weight":
        times = epochs_by_weight(numbers, packs)
        draws = numbers
    else:
        times = numbers
        draws = [number * count for number, count in zip(numbers, packs, strict=True)]
    shares = _shares(draws)
    drawn = [None if e.tokens is None else e.tokens * seen for e, seen in zip(entries, times, strict=True)]
    tokens = [None] * len(entries) if None in drawn else _shares([value or 0 for value in drawn])
    columns = zip(entries, shares, tokens, times, strict=True)
    return [replace(entry, share=a, token_share=b, times=c) for entry, a, b, c in columns]


def _shares(values: Sequence[float]) -> list[float | None]:
    total = sum(values) or 1
    return [value / total for value in values]
