"""RunState: what all stages of one run share."""

from dataclasses import dataclass, field

from energon_packed.pipeline.engine import Engine
from energon_packed.pipeline.options import PackOptions
from energon_packed.pipeline.progress import Progress
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.workspace import Workspace

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
