"""`survey_lengths`: the measure stage alone, over all records or a sample of them; nothing is kept on disk."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from energon_packed.build.chunks import Chunk, measured_records
from energon_packed.build.engine import LocalEngine
from energon_packed.build.measure import Measurer
from energon_packed.build.options import EncoderOptions
from energon_packed.build.progress import Progress
from energon_packed.build.reader import RecordReader
from energon_packed.build.table import load_table, reject_counts
from energon_packed.sources import open_sources

_SPREAD = 64  # places of the input that a sample comes from


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survey:
    """Measured records.

    Attributes:
        lengths: int32 (n,), tokens of the records that can be packed.
        rejects: records that cannot, by reason.
        is_sample: only some of the records were measured.
    """

    lengths: npt.NDArray[np.int32]
    rejects: dict[str, int]
    is_sample: bool

    @property
    def records(self) -> int:
        """Records measured."""
        return len(self.lengths) + sum(self.rejects.values())


def survey_lengths(
    inputs: Sequence[str],
    encoder: EncoderOptions,
    *,
    image_root: Path | None = None,
    sample_class: str = "PackedCaptioningSample",
    processes: int = 1,
    sample: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Survey:
    """Measure records as `pack` does.

    Args:
        inputs: files, globs or Hugging Face folders.
        encoder: how conversations become tokens.
        image_root: folder of relative media paths.
        sample_class: flavor that would hold them: what it cannot hold is a reject.
        processes: worker processes.
        sample: measure about this many records, from 64 places of the input; None measures all.
        seed: which records a sample takes.
        progress: told of the stage.

    Raises:
        ConfigError, SourceError: as `pack`.
    """
    progress = progress or Progress()
    with tempfile.TemporaryDirectory(prefix="energon-packed-") as folder:
        sources = open_sources(inputs, work_dir=Path(folder), image_root=image_root)
        reader = RecordReader(sources=sources, sample_class=sample_class, use_patch_positions=True)
        encoder.load()
        measurer = Measurer(reader=reader, encoder=encoder)
        ranges = [(number, *chunk) for number, source in enumerate(sources) for chunk in source.chunks()]
        if sample is not None:
            ranges = _sampled(ranges, sample, measurer, Path(folder), seed)
        chunks = [
            Chunk(source=number, start=start, stop=stop, file=Path(folder) / f"{place:07d}.arrow")
            for place, (number, start, stop) in enumerate(ranges)
        ]
        progress.start("measure", sum(chunk.stop - chunk.start for chunk in chunks), "records")
        for report in LocalEngine(processes).run(measurer, chunks):
            progress.advance(report.chunk.stop - report.chunk.start, report.records)
        table = load_table(chunks, len(sources))
    lengths = table.length[table.status == 0]
    return Survey(lengths=lengths, rejects=reject_counts(table.status), is_sample=sample is not None)


def _sampled(
    ranges: list[tuple[int, int, int]], sample: int, measurer: Measurer, folder: Path, seed: int
) -> list[tuple[int, int, int]]:
    """Short ranges spread over the input, with about `sample` records in all."""
    number, start, stop = ranges[0]
    first = Chunk(
        source=number, start=start, stop=min(stop, start + max(1, (stop - start) // 16)), file=folder / "first"
    )
    measurer(first)
    per_record = (first.stop - first.start) / max(measured_records(first), 1)
    total = sum(stop - start for _, start, stop in ranges)
    wanted = min(total, int(sample * per_record) + 1)
    if wanted >= total:
        return ranges
    rng = np.random.default_rng(seed)
    each = max(1, wanted // min(_SPREAD, len(ranges)))
    picked = sorted(rng.permutation(len(ranges))[: -(-wanted // each)].tolist())
    chosen = []
    for place in picked:
        number, start, stop = ranges[place]
        begin = start + int(rng.integers(0, max(1, stop - start - each + 1)))
        chosen.append((number, begin, min(stop, begin + each)))
    return chosen
