"""PackingManifest: `packing.json`, what was packed, with what settings, and the hashes of the shards.

It holds no clock or host. Two builds of the same input differ at most in `counters`, which tell what each run did
itself, and in the paths of `encoder`.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from energon_packed.errors import FormatError
from energon_packed.shards.files import write_whole
from energon_packed.shards.nv_meta import NV_META
from energon_packed.version import FORMAT_VERSION, __version__

FILE_NAME = "packing.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard.

    Attributes:
        name: file name.
        split: `train`, `val` or `test`.
        packs, samples, tokens: what it holds.
        bytes: size of the tar.
        sha256: hex digest of the tar.
    """

    name: str
    split: str
    packs: int
    samples: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingManifest:
    """Counts and settings of one packed data set.

    Attributes:
        sample_class: flavor in `energon_packed.flavors`.
        records: records in the input; `packed` of them are in packs, `rejects` counts the others by reason.
        max_samples_per_pack: most samples that a pack may hold, or None.
        truncated: packed samples that were cut to a row; `tokens_cut` were lost with it.
        packs, tokens, images: totals over all shards; tokens without padding.
        seq_len: tokens that one row holds.
        utilization: tokens over packs * seq_len.
        pad_multiple: each sample was counted rounded up to a multiple of this many tokens.
        overlong: what was done with samples longer than a row: drop, error or truncate.
        tokenizer_fingerprint: digest of tokenizer, template, image settings and loss options.
        input_fingerprint: digest of the input files.
        encoder: options that made the encoder, to make it again.
        counters: records measured, texts tokenized, records whose length came from the cache.
        shards: every tar, in order.
    """

    format_version: int = FORMAT_VERSION
    tool_version: str = __version__
    sample_class: str
    shard_prefix: str
    records: int
    packed: int
    truncated: int = 0
    tokens_cut: int = 0
    rejects: dict[str, int]
    packs: int
    tokens: int
    images: int
    seq_len: int
    algorithm: str
    max_samples_per_pack: int | None = None
    group_by: str
    seed: int
    utilization: float
    pad_multiple: int
    overlong: str
    tokenizer_fingerprint: str
    input_fingerprint: str
    fingerprint: str
    encoder: dict[str, Any]
    counters: dict[str, int] = field(default_factory=dict)
    shards: list[ShardEntry]

    @property
    def samples_per_pack(self) -> float:
        """Mean number of samples in a pack."""
        return self.packed / self.packs if self.packs else 0.0

    def packs_in(self, split: str) -> int:
        """Packs of one split."""
        return sum(shard.packs for shard in self.shards if shard.split == split)

    def save(self, folder: Path) -> None:
        """Write `.nv-meta/packing.json` of a shard folder."""
        content = orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        write_whole(folder / NV_META / FILE_NAME, content)

    @classmethod
    def load(cls, path: str | Path) -> "PackingManifest":
        """Read the manifest of a shard folder, or of an output folder that holds one in `webdataset`.

        Raises:
            FormatError: there is none, it is broken, or a newer version wrote it.
        """
        root = Path(path)
        if root.is_file():
            raise FormatError(f"{root} is a file, and one data set folder is needed here")
        for folder in (root, root / "webdataset"):
            file = folder / NV_META / FILE_NAME
            if file.is_file():
                return cls._parse(file)
        raise FormatError(f"{root} has no {NV_META}/{FILE_NAME}; is it a folder that energon-packed wrote?")

    @classmethod
    def load_if_there(cls, path: str | Path) -> "PackingManifest | None":
        """As `load`; None where there is no packing.json, as in data that other tools packed.

        Raises:
            FormatError: it is broken, or a newer version wrote it: then nobody may go on as if there was none.
        """
        root = Path(path)
        files = [folder / NV_META / FILE_NAME for folder in (root, root / "webdataset")]
        return cls.load(root) if any(file.is_file() for file in files) else None

    @classmethod
    def _parse(cls, file: Path) -> "PackingManifest":
        try:
            value = orjson.loads(file.read_bytes())
            found = value["format_version"]
            if found > FORMAT_VERSION:
                raise FormatError(
                    f"{file} has format version {found}, this tool reads up to {FORMAT_VERSION}; update it"
                )
            return cls(**{**value, "shards": [ShardEntry(**shard) for shard in value["shards"]]})
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise FormatError(f"{file} is not a packing manifest: {error}") from error
