"""Count the datasets of a Metadataset: a parsed Metadataset in, one BlendSplit for each of its splits out.

Each entry has its packs, samples and tokens, its share of the draws, and how often its packs are read per epoch.
Datasets that cannot be read stay in the list, with the problem.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from energon_packed.blends import epochs_by_weight, read_input
from energon_packed.errors import EnergonPackedError
from energon_packed.metadatasets import Entry, Metadataset


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendEntry:
    """One dataset of a split. `inspect --json` prints these names.

    Attributes:
        split: `train`, `val` or `test`.
        path: path resolved relative to the file.
        mode: `weight`, `repetitions` or `once`.
        number: weight or repetitions.
        packs, samples: counts; None if the dataset cannot be read.
        tokens: tokens without padding; None if they are not recorded.
        share: share of the draws, or of an epoch's packs.
        token_share: share of the tokens in these draws; None if the tokens of a dataset are not recorded.
        times: how many times an epoch has each of its packs; repetitions, if these are given.
        problem: why the dataset cannot be read, or None.
    """

    split: str
    path: Path
    mode: str
    number: float
    packs: int | None = None
    samples: int | None = None
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
        """Draw mode of all entries: `weight`, `repetitions` or `once`."""
        return self.entries[0].mode

    @property
    def unreadable(self) -> int:
        """Number of entries that cannot be read. The totals exclude them."""
        return sum(entry.problem is not None for entry in self.entries)

    def total(self, count: str) -> int | None:
        """Sum of `packs`, `samples` or `tokens` over the readable entries; None if a count is not recorded."""
        counts = [getattr(entry, count) for entry in self.entries if entry.problem is None]
        return None if None in counts or not counts else sum(counts)

    def drawn(self, count: str) -> float | None:
        """Sum of `packs`, `samples` or `tokens` that one epoch draws; None if a count or `times` is unknown."""
        counts = [(getattr(entry, count), entry.times) for entry in self.entries]
        if any(value is None or times is None for value, times in counts):
            return None
        return float(sum(value * times for value, times in counts))


def read_blend(metadataset: Metadataset) -> list[BlendSplit]:
    """Count every dataset of every split of a Metadataset."""
    return [
        BlendSplit(name=split, entries=_counted([_entry(split, blend.mode, entry) for entry in blend.entries]))
        for split, blend in metadataset.splits.items()
    ]


def _entry(split: str, mode: str, entry: Entry) -> BlendEntry:
    made = BlendEntry(split=split, path=entry.path, mode=mode, number=entry.number)
    # `fault` is an invalid entry, `unsupported` a valid entry that this package cannot read.
    problem = entry.fault or entry.unsupported
    if problem is None:
        try:
            dataset = read_input(entry.path, entry.split_part or split)
            return replace(made, packs=dataset.packs, samples=dataset.samples, tokens=dataset.tokens)
        except EnergonPackedError as error:
            problem = str(error)
    return replace(made, problem=problem)


def _counted(entries: list[BlendEntry]) -> list[BlendEntry]:
    """Add shares and times if every entry could be read: a share needs the counts of all entries."""
    if not all(entry.packs for entry in entries):
        return entries
    packs = [entry.packs or 0 for entry in entries]
    numbers = [entry.number for entry in entries]
    if entries[0].mode == "weight":  # a weight is a share of the draws, whatever the size of the dataset
        times = epochs_by_weight(numbers, packs)
        draws = numbers
    else:  # repetitions: every pack is read that many times
        times = numbers
        draws = [number * count for number, count in zip(numbers, packs, strict=True)]
    shares = _shares(draws)
    # Tokens drawn = tokens of the dataset * passes per epoch.
    drawn = [None if e.tokens is None else e.tokens * passes for e, passes in zip(entries, times, strict=True)]
    tokens = [None] * len(entries) if None in drawn else _shares([value or 0 for value in drawn])
    columns = zip(entries, shares, tokens, times, strict=True)
    return [replace(entry, share=a, token_share=b, times=c) for entry, a, b, c in columns]


def _shares(values: Sequence[float]) -> list[float | None]:
    total = sum(values) or 1
    return [value / total for value in values]
