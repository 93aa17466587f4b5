"""PackOptions: everything that decides a build, checked when it is made."""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from energon_packed.encoding import ChatEncoder
from energon_packed.encoding.rendering import LOSS_ON
from energon_packed.errors import ConfigError
from energon_packed.packing import algorithm_names, check_algorithm
from energon_packed.shards.layouts import layout_for
from energon_packed.shards.nv_meta import SPLITS

_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}")
Overlong = Literal["drop", "error", "truncate"]
GroupBy = Literal["none", "media"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOptions:
    """How the encoder is made; the arguments of `ChatEncoder.from_pretrained`."""

    tokenizer: Path
    processor: Path | None = None
    image_processor: str | None = None
    factor: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    loss_on: Literal["assistant", "last", "all"] = "assistant"

    def __post_init__(self) -> None:
        for folder in ("tokenizer", "processor"):
            if getattr(self, folder) is not None:
                object.__setattr__(self, folder, Path(getattr(self, folder)))
        _one_of("loss_on", self.loss_on, LOSS_ON)
        for name in ("factor", "min_pixels", "max_pixels"):
            _at_least(name, getattr(self, name), 1)

    def load(self) -> ChatEncoder:
        """The encoder, loaded once in each process; forked workers inherit it."""
        return _load_encoder(self, tuple(_stamps(self.tokenizer)), tuple(_stamps(self.processor)))

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for the manifest."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in asdict(self).items() if v is not None}


def _stamps(folder: Path | None) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of the files in a folder, so that a changed one is loaded again."""
    if folder is not None and folder.is_dir():
        for path in sorted(folder.iterdir()):
            stat = path.stat()
            yield path.name, stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=2)
def _load_encoder(options: EncoderOptions, *stamps: object) -> ChatEncoder:
    return ChatEncoder.from_pretrained(
        options.tokenizer,
        options.processor,
        loss_on=options.loss_on,
        image_processor=options.image_processor,
        factor=options.factor,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """What to pack, and how. Raises ConfigError when made with a value that cannot be used.

    Attributes:
        inputs: files, globs or Hugging Face folders.
        output_dir: folder that gets `webdataset/`, `lengths.parquet`, `rejects.jsonl` and `.work/`.
        encoder: how conversations become tokens.
        seq_len: tokens in one row.
        image_root: folder of relative media paths, which no path may leave; by default the folder of each input.
        use_patch_positions: False ignores the .npy files that records name.
        sample_class: flavor to write.
        shard_prefix: start of shard names and keys; must differ between data sets that are blended.
        part: (I, N) packs the I-th of N parts of the input, as one of N runs that know nothing of each other; each
            needs an `output_dir` of its own, in which `{part}` stands for `p000` and so on.
        max_samples_per_pack: most samples in one pack, or None.
        max_packs_per_shard, max_shard_bytes: a shard ends at whichever comes first.
        algorithm: planner, as `pack_lengths` takes it.
        group_by: `media` keeps text, image and video samples in packs of their own.
        pad_multiple: each sample is planned with its length rounded up to a multiple of this many tokens.
        overlong: what happens to samples longer than `seq_len`.
        split: share of the packs that goes to each split.
        seed: order of the packs.
        engine: `local` for processes of this machine, `ray` for a Ray cluster.
        ray_address: of the cluster; None for the running one, or else one on this machine.
        workers: processes, or Ray tasks at a time; 0 for all cores.
        max_reject_rate: largest share of records that may be left out, 0 to 1.
        strict: stop at the first record that is left out.
        resume: take up what an earlier run of the same build has done.
        overwrite: replace shards of another build.
    """

    inputs: tuple[str, ...]
    output_dir: Path
    encoder: EncoderOptions
    seq_len: int
    image_root: Path | None = None
    use_patch_positions: bool = True
    sample_class: str = "PackedCaptioningSample"
    shard_prefix: str = "pack"
    part: tuple[int, int] | None = None
    max_samples_per_pack: int | None = None
    max_packs_per_shard: int = 1000
    max_shard_bytes: int = 1 << 30
    algorithm: str = "bfd"
    group_by: GroupBy = "none"
    pad_multiple: int = 1
    overlong: Overlong = "drop"
    split: dict[str, float] = field(default_factory=lambda: {"train": 1.0})
    seed: int = 0
    engine: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    workers: int = 0
    max_reject_rate: float = 0.05
    strict: bool = False
    resume: bool = True
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("output_dir", "image_root"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        if self.part is not None:
            number, count = self.part
            if not 0 <= number < count:
                raise ConfigError(f"part is {number}/{count}; the first number counts from 0 and is below the second")
            folder = str(self.output_dir).replace("{part}", part_suffix(number)[1:])
            object.__setattr__(self, "output_dir", Path(folder))
        elif "{part}" in str(self.output_dir):
            raise ConfigError(f"output_dir {self.output_dir} has a {{part}}, but no part is given; use --part I/N")
        _one_of("engine", self.engine, ("local", "ray"))
        object.__setattr__(self, "inputs", tuple(str(given) for given in self.inputs))
        if self.image_root is not None and not self.image_root.is_dir():
            raise ConfigError(
                f"image_root {self.image_root} is not a folder; give the folder that image paths start from"
            )
        if self.seq_len > np.iinfo(np.int32).max:
            raise ConfigError(f"seq_len is {self.seq_len}; it must be at most {np.iinfo(np.int32).max}")
        layout_for(self.sample_class)
        check_algorithm(self.algorithm)
        for name in ("seq_len", "max_packs_per_shard", "max_shard_bytes", "pad_multiple", "max_samples_per_pack"):
            _at_least(name, getattr(self, name), 1)
        _at_least("workers", self.workers, 0)
        _at_least("seed", self.seed, 0)
        _one_of("overlong", self.overlong, ("drop", "error", "truncate"))
        _one_of("group_by", self.group_by, ("none", "media"))
        if self.pad_multiple > self.seq_len:
            raise ConfigError(f"pad_multiple {self.pad_multiple} is above seq_len {self.seq_len}; no sample would fit")
        if not _PREFIX.fullmatch(self.shard_prefix):
            raise ConfigError(
                f"shard_prefix {self.shard_prefix!r} must be 1 to 64 letters, digits, '_' and '-': keys have no dots"
            )
        if not 0 <= self.max_reject_rate <= 1:
            raise ConfigError(f"max_reject_rate is {self.max_reject_rate}; it must be between 0 and 1")
        if not self.split or not all(math.isfinite(share) and share >= 0 for share in self.split.values()):
            raise ConfigError("split must name shares >= 0, such as train=0.98,val=0.02")
        if unknown := set(self.split) - set(SPLITS):
            raise ConfigError(f"unknown split {', '.join(sorted(unknown))}; use {', '.join(SPLITS)}")
        if abs(sum(self.split.values()) - 1) > 1e-6:
            raise ConfigError(f"the shares of split add up to {sum(self.split.values()):g}; they must add up to 1")
        # One order, so that the same shares always make the same shards.
        object.__setattr__(self, "split", {name: self.split[name] for name in SPLITS if name in self.split})

    @property
    def processes(self) -> int:
        """Processes to use: `workers`, or all cores that this process may run on."""
        return self.workers or len(os.sched_getaffinity(0))

    @property
    def prefix(self) -> str:
        """Start of shard names and keys, with the number of the part."""
        return self.shard_prefix + part_suffix(None if self.part is None else self.part[0])

    @property
    def usable_len(self) -> int:
        """Tokens of the longest sample that fits: `seq_len` down to a multiple of `pad_multiple`."""
        return self.seq_len // self.pad_multiple * self.pad_multiple


def part_suffix(number: int | None) -> str:
    """`_p003` for part 3, nothing for the whole input."""
    return "" if number is None else f"_p{number:03d}"


def parse_part(text: str) -> tuple[int, int]:
    """`2/8` as (2, 8); `auto` takes both numbers from SLURM.

    Raises:
        ConfigError: the text has another form, or there is no SLURM task.
    """
    if text == "auto":
        try:
            return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        except (KeyError, ValueError) as error:
            raise ConfigError(
                "--part auto needs SLURM_PROCID and SLURM_NTASKS, which srun sets; give --part I/N"
            ) from error
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not found:
        raise ConfigError(f"part {text!r} must look like 0/4, or be auto")
    return int(found[1]), int(found[2])


def parse_split(text: str) -> dict[str, float]:
    """`train=0.98,val=0.02` as a dict.

    Raises:
        ConfigError: the text has another form.
    """
    try:
        return {name.strip(): float(share) for name, share in (part.split("=") for part in text.split(","))}
    except ValueError as error:
        raise ConfigError(f"split {text!r} must look like train=0.98,val=0.02") from error


def known_algorithms() -> str:
    """Names for help texts."""
    return ", ".join(algorithm_names())


def _at_least(name: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}")


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(f"{name} is {value!r}; use one of {', '.join(valid)}")
