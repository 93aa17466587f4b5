"""PackOptions, and what it shares with the survey of lengths: all that decides a run, checked at construction.

Option values from text: the command line, config files and Python take the same forms.
"""

import logging
import math
import os
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from energon_packed.encoding import EncoderSettings, Processor
from energon_packed.encoding.settings import IMAGES
from energon_packed.encoding.vision.media import ImageCheck
from energon_packed.errors import ConfigError
from energon_packed.formats import CODECS, LAYOUTS, Codec, codec_for
from energon_packed.options import declared, option, refuse_remote, short
from energon_packed.packing import algorithm_names, check_algorithm
from energon_packed.pipeline.encoders import EncoderLoader, GivenEncoder, PretrainedEncoder
from energon_packed.pipeline.rejects import RejectLimits
from energon_packed.records import Adapter, FieldMap
from energon_packed.shards.nv_meta import SPLITS
from energon_packed.sources import SourceConfig
from energon_packed.system import available_cores

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_TOKENS = re.compile(r"(-?\d+(?:\.\d+)?)\s*(k?)", re.IGNORECASE)
_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST_PREFIX = 64


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
                "`part=auto` needs SLURM_PROCID and SLURM_NTASKS, which srun sets; pass `part=I/N`"
            ) from error
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not found:
        raise ConfigError(f"invalid `part` {text!r}; use the form 0/4, or auto")
    return int(found[1]), int(found[2])


def checked_part(part: object) -> tuple[int, int]:
    """(I, N) with 0 <= I < N.

    Raises:
        ConfigError: it is something else.
    """
    pair = part if isinstance(part, list | tuple) and len(part) == 2 else ()
    numbers = [one for one in pair if isinstance(one, int) and not isinstance(one, bool)]
    if len(numbers) != 2:
        raise ConfigError(f"`part` is {short(part)}; it must be two integers, or a text such as 0/4")
    number, count = numbers
    if not 0 <= number < count:
        raise ConfigError(f"`part` is {number}/{count}; the first number must be from 0 to below the second")
    return number, count


def parse_split(text: str) -> dict[str, float]:
    """`train=0.98,val=0.02` as a dict.

    Raises:
        ConfigError: the text has another form.
    """
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = (one.strip() for one in part.partition("="))
        if name in shares:
            raise ConfigError(f"`split` {text!r} names {name} twice; name each split once")
        try:
            shares[name] = float(share)
        except ValueError as error:
            raise ConfigError(f"invalid `split` {text!r}; use the form train=0.98,val=0.02") from error
    return shares


def parse_size(text: str) -> int:
    """Bytes of `512M`, `1GB` or `1073741824`; K, M, G and T are powers of 1024.

    Raises:
        ConfigError: the text has another form.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"invalid size {text!r}; use bytes or a unit, such as 512M or 1G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_seq_len(text: str) -> int:
    """Tokens of `8192` or `8k`; k is 1024.

    Raises:
        ConfigError: the text has another form.
    """
    match = _TOKENS.fullmatch(text.strip())
    tokens = float(match[1]) * _UNITS[match[2].upper()] if match is not None else math.nan
    if not tokens.is_integer():
        raise ConfigError(f"`seq_len` is {text!r}; it must be an integer, such as 8192 or 8k")
    return int(tokens)


def checked_split(split: dict[str, float]) -> dict[str, float]:
    """The shares in the order of `SPLITS`, so that the same shares always make the same shards.

    Shares add up to 1. Percentages (that add up to 100) and whole numbers are divided by their sum.

    Raises:
        ConfigError: no share, an unknown split, or fractions with another sum.
    """
    if not isinstance(split, dict):
        raise ConfigError(f"`split` is {short(split)}; use shares such as train=0.98,val=0.02")
    if not split or not all(_is_share(share) for share in split.values()):
        raise ConfigError("`split` must name shares >= 0, such as train=0.98,val=0.02")
    if unknown := set(split) - set(SPLITS):
        raise ConfigError(f"unknown split {', '.join(sorted(map(str, unknown)))}; use {', '.join(SPLITS)}")
    total = sum(split.values())
    ordered = {name: float(split[name]) for name in SPLITS if name in split}
    if abs(total - 1) <= 1e-6:
        return ordered
    whole = all(share.is_integer() for share in ordered.values())
    if total == 0 or not (whole or abs(total - 100) <= 1e-4):
        raise ConfigError(
            f"the shares of `split` add up to {total:g}; they must add up to 1 or 100, or be whole numbers"
        )
    return {name: share / total for name, share in ordered.items()}


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def prefix_of(folder: Path) -> str:
    """Start of shard names for an output folder: its name, so that outputs of different names can be blended.

    `{part}` and what joins it are left out, as the number of the part follows the prefix anyway; where nothing else
    remains, the folder above gives the name.
    """
    resolved = Path(os.path.abspath(folder))
    for part in (resolved.name, resolved.parent.name):
        name = _NOT_IN_KEYS.sub("_", part.replace("{part}", "")).strip("_-")
        if name:
            return name[:_LONGEST_PREFIX]
    return "pack"


def part_suffix(number: int | None) -> str:
    """`_p003` for part 3, nothing for the complete input."""
    return "" if number is None else f"_p{number:03d}"


_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}")
Options = TypeVar("Options", bound="InputOptions")
INPUT, PACKING, OUTPUT, RUN = "Input", "Packing", "Output", "Run"
Overlong = Literal["drop", "error", "truncate"]
GroupBy = Literal["none", "media"]
CheckImages = Literal["header", "full"]
AUTO, CAPTIONING, MULTI_MIX = "auto", "PackedCaptioningSample", "PackedMultiMixQASample"
SINGLE = "MultiMixQASample"
_log = logging.getLogger(__name__)
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def check_flavor(options: "InputOptions") -> None:
    """Give `sample_class` the flavor that is written: that of single samples only with `unpacked`.

    Raises:
        ConfigError: `unpacked` with the flavor of a pack.
    """
    if options.unpacked:
        if options.sample_class not in (AUTO, SINGLE) or options.layout is not None:
            other = f"`layout` {options.layout}" if options.layout else f"`sample_class` {options.sample_class}"
            raise ConfigError(f"`unpacked` writes {SINGLE}, one sample a member, and {other} holds packs; omit one")
        object.__setattr__(options, "sample_class", SINGLE)
    elif options.sample_class == SINGLE:
        _log.warning(
            "`sample_class` %s names single samples; packs of them are written, as %s. `unpacked` writes one sample a "
            "member, for packing while training",
            SINGLE,
            MULTI_MIX,
        )
        object.__setattr__(options, "sample_class", MULTI_MIX)


def image_check(options: "InputOptions") -> ImageCheck:
    """`check_images`, or `convert` where the layout converts images when they are written."""
    if options.check_images == "header" and options.layout is not None and not getattr(options, "keep_bytes", False):
        return "convert"
    return options.check_images


def check_layout(options: "InputOptions") -> None:
    """Give `sample_class` the flavor of the layout.

    Raises:
        ConfigError: another flavor, or supervision that the layout does not hold.
    """
    if options.layout is None:
        return
    flavor = LAYOUTS[options.layout].sample_class
    if options.sample_class not in ("auto", flavor):
        raise ConfigError(
            f"`layout` {options.layout} is a form of {flavor}, not of `sample_class` {options.sample_class}; leave "
            "one of them out"
        )
    if options.patch_order == "block":
        raise ConfigError(
            f"`patch_order` is 'block', but the reader of `layout` {options.layout} puts every .npy file into block "
            "order itself; it needs files in row order"
        )
    if options.loss_on != "assistant":
        raise ConfigError(
            f"`loss_on` is {options.loss_on!r}, but the reader of `layout` {options.layout} trains on every assistant "
            "turn; use 'assistant'"
        )
    object.__setattr__(options, "sample_class", flavor)


def check_layout_outputs(options: "PackOptions") -> None:
    """Refuse options that need a layout, or that its reader does not follow.

    Raises:
        ConfigError: the message names the option.
    """
    if options.layout is None:
        for name in ("keep_bytes", "dataset_module"):
            if getattr(options, name):
                raise ConfigError(f"`{name}` needs a `layout`; use {', '.join(LAYOUTS)}")
        return
    if options.overlong == "truncate":
        raise ConfigError(
            f"`overlong` is 'truncate', but the reader of `layout` {options.layout} reads samples whole; use 'drop'"
        )
    if options.dataset_module is not None and not _MODULE.fullmatch(options.dataset_module):
        raise ConfigError(
            f"`dataset_module` {options.dataset_module!r} is not the name of a package, such as "
            "aiak_training_llm.data.multimodal"
        )


@dataclass(frozen=True, kw_only=True)
class InputOptions(EncoderSettings):
    """What is read, and how it becomes tokens: the same for packing and for surveying lengths.

    Raises ConfigError when made with an invalid value.
    """

    inputs: Sequence[str | Path] = option(
        (), help="Files, globs, folders, Energon datasets or Hub names.", group=INPUT, flags=("--jsonl",),
        metavar="FILE", shown_default="required, or `sources`",
    )  # fmt: skip
    sources: Sequence[SourceConfig | Mapping[str, Any] | str] = option(
        (), help="Inputs with settings of their own.", group=INPUT, flags=()
    )
    image_root: Path | None = option(
        None, help="Folder that image paths start from and must stay in.", group=INPUT,
        shown_default="the folder of each input", metavar="DIR",
    )  # fmt: skip
    source_split: str | None = option(
        None, help="Split of Hugging Face DatasetDicts and Energon datasets to read.", group=INPUT,
        shown_default="train for Energon datasets", metavar="NAME",
    )  # fmt: skip
    use_patch_positions: bool = option(
        True, help="Ignore patch_positions in the records.", group=INPUT, flags=("--no-npy",), decides="lengths"
    )
    map: str | None = option(
        None, help="Names of the fields of flat records.", group=INPUT, decides="lengths",
        metavar="user=FIELD,assistant=FIELD,...",
    )  # fmt: skip
    adapter: str | None = option(
        None, help="Function that makes each record: it returns a record, a Conversation, or None to drop it.",
        group=INPUT, decides="lengths", metavar="MODULE:FUNCTION",
    )  # fmt: skip
    trust_sample_loader: bool = option(
        False, help="Run the sample_loader.py of Energon datasets to read them.", group=INPUT
    )
    encoder: Processor | None = None
    check_images: CheckImages = option(
        "header", help="How far images are checked: by header and structure, or by decoding all pixels.",
        group=IMAGES, choices=("header", "full"),
    )  # fmt: skip
    sample_class: str = option(
        AUTO, help="Flavor to write; auto: PackedCaptioningSample where it holds all records, else "
        "PackedMultiMixQASample.", group=OUTPUT, choices=lambda: (AUTO, *CODECS), decides="tars",
    )  # fmt: skip
    unpacked: bool = option(
        False, help="Write one sample a member (MultiMixQASample), for packing while training.", group=OUTPUT
    )
    layout: str | None = option(
        None, help="Write PackedCaptioningSample as the reader of another package takes it.", group=OUTPUT,
        choices=lambda: tuple(LAYOUTS), decides="tars", shown_default="our own", metavar="NAME",
    )  # fmt: skip
    algorithm: str = option(
        "bfd", help=f"Planner: {', '.join(algorithm_names())}.", group=PACKING, decides="tars", metavar="NAME"
    )
    max_samples_per_pack: int | None = option(
        None, help="Maximum samples in one pack.", group=PACKING, minimum=1, decides="tars"
    )
    pad_multiple: int = option(
        1, help="Plan each sample rounded up to a multiple of this (context parallelism: 2 * cp).", group=PACKING,
        minimum=1, decides="tars",
    )  # fmt: skip
    seed: int = option(0, help="Order of the packs.", group=PACKING, minimum=0, decides="tars")
    workers: int = option(0, help="Processes.", group=RUN, minimum=0, shown_default="all cores")

    def __post_init__(self) -> None:
        given = [self.inputs] if isinstance(self.inputs, str | Path) else self.inputs
        if not isinstance(given, list | tuple) or not all(isinstance(one, str | Path) for one in given):
            raise ConfigError(f"`inputs` is {short(self.inputs)}; pass one path or a list of paths")
        if any(one == "" for one in given):
            raise ConfigError("an input is empty; pass a path (. is the current folder)")
        object.__setattr__(self, "inputs", tuple(map(str, given)))
        self._read_sources()
        self._refuse_remote()
        if self.map is not None:  # text, or the mapping of a config file
            object.__setattr__(self, "map", str(FieldMap.parse(self.map)))
        super().__post_init__()
        if self.adapter is not None:
            _ = Adapter(self.adapter).source  # a wrong one is an error now, not in the first worker
        check_flavor(self)
        check_layout(self)
        check_algorithm(self.algorithm)
        if not self.inputs and not self.sources:
            raise ConfigError("no input; pass one or more files")
        if (self.encoder is None) == (self.tokenizer is None):
            given = "neither" if self.tokenizer is None else "both"
            raise ConfigError(f"pass the folder of a `tokenizer` or, from Python, an `encoder`; {given} is given")
        if self.encoder is not None and not isinstance(self.encoder, Processor):
            raise ConfigError(f"`encoder` is a {type(self.encoder).__name__}; pass a Processor such as ChatEncoder")
        if self.image_root is not None and not self.image_root.is_dir():
            raise ConfigError(
                f"`image_root` {self.image_root} is not a folder; pass the folder that image paths start from"
            )

    def _refuse_remote(self) -> None:
        for given in self.inputs:
            refuse_remote(given)
        for one in declared(type(self)):
            if one.kind is Path and getattr(self, one.name) is not None:
                refuse_remote(getattr(self, one.name), one.name)

    def _read_sources(self) -> None:
        if not isinstance(self.sources, list | tuple):
            raise ConfigError(f"sources is {type(self.sources).__name__}; it must be a list of inputs with settings")
        configs = tuple(SourceConfig.of(one, number) for number, one in enumerate(self.sources))
        object.__setattr__(self, "sources", configs)

    @property
    def source_configs(self) -> list[SourceConfig]:
        """`inputs`, then `sources`, with the `map` and the `adapter` of the run where they have none of their own."""
        configs = [SourceConfig(path=(str(one),)) for one in self.inputs]
        configs += [one for one in self.sources if isinstance(one, SourceConfig)]  # all of them are, by now
        return [replace(c, map=c.map or self.map, adapter=c.adapter or self.adapter) for c in configs]

    def reader_fingerprint(self) -> list[Any]:
        """What decides how records are read, for fingerprints, one item for each input."""
        return [config.key(self.seed) for config in self.source_configs]

    @property
    def codec(self) -> Codec:
        """The codec of `sample_class`; of the widest flavor before `auto` is resolved."""
        return codec_for(MULTI_MIX if self.sample_class == AUTO else self.sample_class, self.layout or "")

    def resolved(self: Options, fits_captioning: bool) -> Options:
        """These options with the flavor that `auto` stands for.

        Args:
            fits_captioning: PackedCaptioningSample holds every record that can be packed.
        """
        if self.sample_class != AUTO:
            return self
        return replace(self, sample_class=CAPTIONING if fits_captioning else MULTI_MIX)

    @property
    def processes(self) -> int:
        """Processes to use: `workers`, or all cores that this process may run on."""
        return self.workers or available_cores()

    @property
    def encoder_loader(self) -> EncoderLoader:
        """What loads the encoder in each process."""
        return PretrainedEncoder(self) if self.encoder is None else GivenEncoder(self.encoder)


@dataclass(frozen=True, kw_only=True)
class RejectOptions(InputOptions):
    """What happens to records that cannot be used: the same for packing, planning and streaming.

    `overlong` decides about samples longer than a row. `strict`, `max_failures` and `max_reject_rate` stop the run;
    records that are left out by choice (`REQUESTED_REJECTS`) count for none of them, and overlong samples that
    `overlong` drops do not count for `max_failures`.
    """

    overlong: Overlong = option(
        "drop", help="What happens to samples longer than a row.", group=PACKING,
        choices=("drop", "error", "truncate"), decides="tars",
    )  # fmt: skip
    max_reject_rate: float | None = option(
        0.05, help="Stop before writing when a larger share of the records is rejected.", group=RUN, minimum=0
    )
    max_failures: int | None = option(
        None, help="Stop when more records than this are rejected; overlong ones do not count.", group=RUN, minimum=0,
        metavar="N",
    )  # fmt: skip
    strict: bool = option(False, help="Stop at the first rejected record.", group=RUN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_reject_rate is not None and self.max_reject_rate > 1:
            raise ConfigError(f"`max_reject_rate` is {self.max_reject_rate}; it must be between 0 and 1")

    @property
    @abstractmethod
    def row_length(self) -> int:
        """Tokens in one row."""

    @property
    def usable_len(self) -> int:
        """Tokens of the longest sample that fits: `seq_len` down to a multiple of `pad_multiple`."""
        return self.row_length // self.pad_multiple * self.pad_multiple

    @property
    def limits(self) -> RejectLimits:
        """What stops the run."""
        return RejectLimits(
            strict=self.strict,
            max_failures=self.max_failures,
            max_reject_rate=self.max_reject_rate,
            overlong=self.overlong,
        )

    @property
    def truncate(self) -> int | None:
        """Tokens that longer samples are truncated to, or None."""
        return self.usable_len if self.overlong == "truncate" else None


@dataclass(frozen=True, kw_only=True)
class PackOptions(RejectOptions):
    """What to pack, and how.

    Attributes that have no help text of their own: `part` (I, N) packs the I-th of N parts of the input, as one of N
    runs without communication; each needs its own `output_dir`, in which `{part}` stands for `p000` and so on.
    """

    output_dir: Path = option(
        help="Folder for the dataset and its reports.", group=OUTPUT, flags=("--output-dir", "-o"), metavar="DIR"
    )
    seq_len: int = option(
        help="Tokens in one row; 8k is 8192.", group=PACKING, minimum=1, decides="tars", parse=parse_seq_len,
        metavar="N",
    )  # fmt: skip
    group_by: GroupBy = option(
        "none", help="media: text, image and video samples in separate packs.", group=PACKING,
        choices=("none", "media"), decides="tars",
    )  # fmt: skip
    split: dict[str, float] = option(
        lambda: {"train": 1.0}, help="Shares of the packs, such as train=0.98,val=0.02 or train=98,val=2.",
        group=PACKING, parse=parse_split, decides="tars", shown_default="train=1", metavar="SHARES",
    )  # fmt: skip
    shard_prefix: str | None = option(
        None, help="Start of shard names and keys, different for each output of a blend.", group=OUTPUT,
        metavar="NAME", shown_default="the name of the output folder",
    )  # fmt: skip
    keep_bytes: bool = option(
        False, help="With --layout: images that are no JPEG keep their bytes under a .jpg name, instead of being "
        "converted.", group=OUTPUT, decides="tars",
    )  # fmt: skip
    dataset_module: str | None = option(
        None, help="With --layout: package whose PackedCaptioningSample dataset.yaml names, with a sample_loader.py "
        "that needs no import of this package.", group=OUTPUT, metavar="NAME",
    )  # fmt: skip
    max_packs_per_shard: int = option(
        1000, help="Maximum packs in one shard.", group=OUTPUT, minimum=1, decides="tars"
    )
    max_shard_bytes: int = option(
        1 << 30, help="Maximum bytes in one shard.", group=OUTPUT, minimum=1, parse=parse_size,
        flags=("--max-shard-size",), decides="tars", shown_default="1G", metavar="SIZE",
    )  # fmt: skip
    part: tuple[int, int] | None = option(
        None, help="Pack only the I-th of N parts of the input; auto takes both from SLURM.", group=INPUT,
        parse=parse_part, metavar="I/N|auto",
    )  # fmt: skip
    engine: Literal["local", "ray"] = option(
        "local", help="Where tasks run: processes of this machine, or a Ray cluster.", group=RUN,
        choices=("local", "ray"),
    )  # fmt: skip
    ray_address: str | None = option(
        None, help="Address of the Ray cluster.", group=RUN,
        shown_default="the running cluster, else one on this machine", metavar="ADDRESS",
    )  # fmt: skip
    resume: bool = option(
        True, help="Reuse completed work from a previous run.", group=RUN, flags=("--resume/--no-resume",)
    )
    overwrite: bool = option(False, help="Replace shards of another run in the output folder.", group=RUN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_prefix is None:
            object.__setattr__(self, "shard_prefix", prefix_of(self.output_dir))
        self._place_part()
        check_layout_outputs(self)
        if self.seq_len > np.iinfo(np.int32).max:
            raise ConfigError(f"`seq_len` is {self.seq_len}; it must be at most {np.iinfo(np.int32).max}")
        if self.pad_multiple > self.seq_len:
            raise ConfigError(
                f"`pad_multiple` {self.pad_multiple} is above `seq_len` {self.seq_len}; no sample would fit"
            )
        if not _PREFIX.fullmatch(str(self.shard_prefix)):
            raise ConfigError(
                f"`shard_prefix` {self.shard_prefix!r} must be 1 to 64 letters, digits, '_' and '-': keys have no dots"
            )
        object.__setattr__(self, "split", checked_split(self.split))

    def _place_part(self) -> None:
        if self.part is None:
            if "{part}" in str(self.output_dir):
                raise ConfigError(
                    f"`output_dir` {self.output_dir} has a {{part}}, but no part is given; pass `part=I/N`"
                )
            return
        number, count = checked_part(self.part)
        object.__setattr__(self, "part", (number, count))
        folder = str(self.output_dir).replace("{part}", part_suffix(number)[1:])
        object.__setattr__(self, "output_dir", Path(folder))

    @property
    def prefix(self) -> str:
        """Start of shard names and keys, with the number of the part."""
        return str(self.shard_prefix) + part_suffix(None if self.part is None else self.part[0])

    @property
    def row_length(self) -> int:
        """Tokens in one row."""
        return self.seq_len

    def tar_fingerprint_options(self) -> dict[str, Any]:
        """The options that decide the bytes of the tars, by name."""
        names = [one.name for one in declared(type(self)) if one.decides == "tars"]
        names += ["check_images"] if self.check_images != "header" else []  # digests of earlier versions stay
        return {name: getattr(self, name) for name in (*names, "use_patch_positions", "prefix")}
