"""RunState: what all stages of one run share.

Keys: digests of everything that decides the result of a stage, under which its restart state is kept.
"""

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from energon_packed.pipeline.engine import Engine, Progress
from energon_packed.pipeline.options import InputOptions, PackOptions, image_check
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.workspace import Workspace
from energon_packed.sources import Source
from energon_packed.sources.base import changed_at
from energon_packed.version import FORMAT_VERSION

_MEASURE_VERSION = 6  # raise it when the same record is read or measured differently


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """Hex digests.

    Attributes:
        input: content of the input files.
        encoder: tokenizer, template, image settings and loss options; "" when the encoder has no fingerprint.
        measure: of the measured lengths; restart state also depends on where the input is, and when it changed.
        tars: of the bytes of the tars, the same wherever the input is.
        write: of the finished shards.
    """

    input: str
    encoder: str
    measure: str
    tars: str
    write: str


def compute_fingerprints(
    options: InputOptions, sources: Sequence[Source], part: tuple[int, int] | None
) -> Fingerprints:
    """Keys of a run.

    Args:
        options: of the run; those of a survey have no `tars` key.
        sources: the opened input.
        part: of the input, or None.
    """
    encoder = options.encoder_loader.load().fingerprint()
    found = digest([source.fingerprint() for source in sources])
    read_as = [(source.reading.config, source.reading.copy) for source in sources]
    content = [FORMAT_VERSION, found, encoder, part, options.reader_fingerprint(), read_as]
    measure = digest(
        [*content, _MEASURE_VERSION, *([] if encoder else [secrets.token_hex()])],  # no fingerprint: nothing is reused
        [options.sample_class, options.use_patch_positions, *([options.layout] if options.layout else [])],
        image_check(options),
        [(str(s.path.resolve()), s.image_root, changed_at(s.path)) for s in sources],
    )
    tars = digest(content, options.tar_fingerprint_options()) if isinstance(options, PackOptions) else ""
    return Fingerprints(input=found, encoder=encoder, measure=measure, tars=tars, write=digest(measure, tars))


def digest(*parts: object) -> str:
    """Hex SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


COUNTERS = ("measured", "tokenized", "reused", "shards_written", "shards_reused")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Of one run.

    Attributes:
        options: of the run.
        progress: notified of every stage.
        engine: runs the tasks.
        space: the output folder.
        reader: of the input.
        counters: records measured, texts tokenized, records reused from an earlier run; shards written and reused.
        tokenizer_engines: what tokenized the texts.
    """

    options: PackOptions
    progress: Progress
    engine: Engine
    space: Workspace
    reader: RecordReader
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    tokenizer_engines: set[str] = field(default_factory=set)
