"""A sample of the input: short ranges from all over it."""

import numpy as np

from energon_packed.pipeline.chunks import Chunk, measured_records
from energon_packed.pipeline.measure import MeasureStage

_SPREAD = 64  # places of the input that a sample comes from


def sampled_chunks(stage: MeasureStage, sample: int, seed: int) -> list[Chunk]:
    """Short ranges spread over the input, with about `sample` records in all."""
    ranges = [(number, *chunk) for number, source in enumerate(stage.reader.sources) for chunk in source.chunks()]
    number, start, stop = ranges[0]
    first = stage.chunk("first", number, start, min(stop, start + max(1, (stop - start) // 16)))
    first.file.parent.mkdir(parents=True, exist_ok=True)
    stage.measurer(first)
    per_record = (first.stop - first.start) / max(measured_records(first), 1)
    total = sum(stop - start for _, start, stop in ranges)
    wanted = min(total, int(sample * per_record) + 1)
    if wanted < total:
        rng = np.random.default_rng(seed)
        each = max(1, wanted // min(_SPREAD, len(ranges)))
        picked = sorted(rng.permutation(len(ranges))[: -(-wanted // each)].tolist())
        chosen = []
        for number, start, stop in (ranges[place] for place in picked):
            begin = start + int(rng.integers(0, max(1, stop - start - each + 1)))
            chosen.append((number, begin, min(stop, begin + each)))
        ranges = chosen
    return [stage.chunk(f"{place:07d}", *edges) for place, edges in enumerate(ranges)]
