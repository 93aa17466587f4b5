"""Objects that all stages of a run share, and the fingerprints of a run.

Input: the options and opened sources of a run. Output: Fingerprints, digests of everything that changes the result of
a stage, which name the folders of its restart state; and RunState, which is passed from stage to stage.
"""

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from energon_packed.pipeline.engine import Engine, Progress
from energon_packed.pipeline.options import InputOptions, PackOptions
from energon_packed.pipeline.output.folder import ENCODER, Folder
from energon_packed.pipeline.reader import RecordReader
from energon_packed.records.mapping import Adapter
from energon_packed.sources import Source
from energon_packed.sources.base import changed_at
from energon_packed.system import announced
from energon_packed.version import FORMAT_VERSION

# Increase it when the same record is read or measured differently: earlier restart state is then not used.
_MEASURE_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """Hex digests.

    Attributes:
        input: digest of the content of the input files.
        encoder: digest of tokenizer, template, and settings of images, videos and text; "" if the encoder has no
            fingerprint.
        measure: digest for the measured lengths; includes paths and modification times of the input.
        tars: digest for the bytes of the tars; independent of the path of the input.
        write: digest for the finished shards.
        settings: JSON of everything in `write` that has a name, to name the differences of two runs.
    """

    input: str
    encoder: str
    measure: str
    tars: str
    write: str
    settings: dict[str, str]


def compute_fingerprints(
    options: InputOptions, sources: Sequence[Source], part: tuple[int, int] | None
) -> Fingerprints:
    """Compute the fingerprints of a run.

    Args:
        options: options of the run; a survey has no `tars` fingerprint.
        sources: the opened input.
        part: input part (I, N), or None.
    """
    encoder = options.encoder_loader.load().fingerprint()
    with announced("computing the fingerprint of the input files"):
        files = digest([source.fingerprint() for source in sources])
    read_as = [(source.reading.config, source.reading.copy) for source in sources]
    content = [FORMAT_VERSION, files, encoder, part, options.reader_fingerprint(), read_as]
    extracts, tars, of_tars = False, "", dict[str, object]()
    media: list[str] = []
    if isinstance(options, PackOptions):
        # It decodes the selected frames: it rejects records whose frames are damaged, and estimates bytes.
        extracts = options.extract_frames
        tar_options = options.tar_fingerprint_options()
        tars = digest(content, tar_options)
        media = [options.media, options.media_check] if options.media == "reference" else []
        tar_options["shard_prefix"] = tar_options.pop("prefix")
        of_tars = {f"`{name}`": value for name, value in tar_options.items()} | {"`media`": media}
    # An encoder without a fingerprint may return other tokens in the next run: a random token prevents any reuse.
    measure = digest(
        [*content, _MEASURE_VERSION, None if encoder else secrets.token_hex(), extracts],
        [options.sample_class, options.use_patch_positions, options.layout],
        options.image_check,
        [(str(s.path.resolve()), s.image_root, changed_at(s.path)) for s in sources],
    )
    named: dict[str, object] = {
        "content of the input": files,
        "path or time of the input": [(str(s.path.resolve()), changed_at(s.path)) for s in sources],
        ENCODER: encoder,
        **_reading(options),
        "`part`": part,
        "`sample_class`": options.sample_class,
        "`layout`": options.layout,
        **of_tars,
    }
    return Fingerprints(
        input=files,
        encoder=encoder,
        measure=measure,
        tars=tars,
        # Not part of `tars`: the same packs, wherever their images are.
        write=digest(measure, tars, *media),
        settings={name: json.dumps(value, default=str) for name, value in named.items()},
    )


def _reading(options: InputOptions) -> dict[str, object]:
    """Settings that determine how records are read, by name: the value of a single source, or a list of them."""
    configs = options.source_configs
    values: dict[str, list[object]] = {"`image_root`": [c.image_root or options.image_root for c in configs]}
    for name in ("map", "adapter", "source_split", "weight"):
        values[f"`{name}`"] = [getattr(config, name) for config in configs]
    values["code of the adapter"] = [digest(Adapter(c.adapter).source) if c.adapter else None for c in configs]
    named: dict[str, object] = {name: each[0] if len(each) == 1 else each for name, each in values.items()}
    named |= {"`record_weight`": options.record_weight, "`no_links`": options.no_links}
    return named if options.group_field is None else named | {"`group_field`": options.group_field}


def digest(*values: object) -> str:
    """Compute the hex SHA-256 of values in JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


COUNTERS = ("measured", "tokenized", "reused", "shards_written", "shards_reused")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Objects that all stages of a run share.

    Attributes:
        options: options of the run.
        progress: notified of every stage.
        engine: runs the tasks.
        output: the output folder.
        reader: reads the input.
        fingerprints: digests of what changes its results.
        counters: records measured, tokenized, and reused from an earlier run; shards written and reused.
        tokenizer_engines: names of the tokenizer engines in use.
    """

    options: PackOptions
    progress: Progress
    engine: Engine
    output: Folder
    reader: RecordReader
    fingerprints: Fingerprints
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    tokenizer_engines: set[str] = field(default_factory=set)
