"""The options of `pack` and of the survey of lengths.

Input: values by name from Python, the command line or a config file; strings such as `8k`, `512M` or `2/8` are
parsed. Output: a frozen `PackOptions` (or `InputOptions`, `RejectOptions`), checked when it is made, from which the
stages get the encoder loader, the codec and the reject limits.

InputOptions    input, encoder and flavor; shared with `lengths` and the planned datasets
RejectOptions   + the limits on rejected records
PackOptions     + the output folder, shards and engine
"""

import hashlib
import logging
import math
import os
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from energon_packed.encoding import EncoderSettings, Processor
from energon_packed.encoding.settings import IMAGES
from energon_packed.encoding.vision.media import ImageCheck
from energon_packed.errors import ConfigError
from energon_packed.formats import CODECS, LAYOUTS, Codec, codec_for
from energon_packed.formats.references import parse_media_root
from energon_packed.options import declared, option, refuse_remote, short
from energon_packed.packing import algorithm_names, check_algorithm
from energon_packed.pipeline.encoders import EncoderLoader, GivenEncoder, PretrainedEncoder
from energon_packed.pipeline.media.locator import Media, MediaCheck
from energon_packed.pipeline.rejects import RejectLimits
from energon_packed.records import Adapter
from energon_packed.records.fields import is_number
from energon_packed.records.mapping import parse_map
from energon_packed.records.normalize import RecordWeight
from energon_packed.shards.nv_meta import SPLITS
from energon_packed.sources import SourceConfig
from energon_packed.storage import as_path
from energon_packed.system import available_cores

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_TOKENS = re.compile(r"(-?\d+(?:\.\d+)?)\s*(k?)", re.IGNORECASE)
_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_PREFIX = 64  # characters
_PREFIX = re.compile(rf"[A-Za-z0-9_-]{{1,{_MAX_PREFIX}}}")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MAX_INT32 = int(np.iinfo(np.int32).max)
INPUT, PACKING, OUTPUT, RUN = "Input", "Packing", "Output", "Run"
AUTO, CAPTIONING, MULTI_MIX = "auto", "PackedCaptioningSample", "PackedMultiMixQASample"
SINGLE, TOKENS = "MultiMixQASample", "PackedTokensSample"
Overlong = Literal["drop", "error", "truncate", "split"]
GroupBy = Literal["none", "media"]
CheckMedia = Literal["header", "full"]
_log = logging.getLogger(__name__)


def parse_inputs(value: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """Return paths as strings.

    Raises:
        ConfigError: a value is not a path, is empty, or is remote and not in an object store.
    """
    paths = [value] if isinstance(value, str | Path) else value
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str | Path) for path in paths):
        raise ConfigError(f"`inputs` must be a path or a list of paths, got {short(value)}")
    for path in paths:
        if path == "":  # Path("") would be the current folder
            raise ConfigError("an input is empty; pass a path (. is the current folder)")
        refuse_remote(path, or_object=True)
    return tuple(map(str, paths))


def parse_sources(value: Sequence[SourceConfig | Mapping[str, Any] | str]) -> tuple[SourceConfig, ...]:
    """Return inputs with per-source settings.

    Raises:
        ConfigError: it is not a list, or as `SourceConfig.of`.
    """
    if not isinstance(value, list | tuple):
        raise ConfigError(f"`sources` must be a list, got {type(value).__name__}")
    return tuple(SourceConfig.of(source, index) for index, source in enumerate(value))


def parse_part(value: tuple[int, int] | str) -> tuple[int, int]:
    """Return (I, N) with 0 <= I < N, from `2/8` or a pair; `auto` reads both numbers from SLURM.

    Raises:
        ConfigError: the value has another form, or there is no SLURM task.
    """
    if value == "auto":
        try:
            value = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        except (KeyError, ValueError) as error:
            raise ConfigError(
                "`part=auto` needs SLURM_PROCID and SLURM_NTASKS, which srun sets; pass `part=I/N`"
            ) from error
    elif isinstance(value, str):
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", value)
        if not match:
            raise ConfigError(f"`part` must have the form 0/4, or be auto, got {value!r}")
        value = int(match[1]), int(match[2])
    pair = value if isinstance(value, list | tuple) and len(value) == 2 else ()
    integers = [number for number in pair if isinstance(number, int) and not isinstance(number, bool)]
    if len(integers) != 2:
        raise ConfigError(f"`part` must be two integers, or a string such as 0/4, got {short(value)}")
    index, count = integers
    if not 0 <= index < count:
        raise ConfigError(f"`part` must be I/N with 0 <= I < N, got {index}/{count}")
    return index, count


def parse_split(value: dict[str, float] | str) -> dict[str, float]:
    """Return shares in the order of `SPLITS`, so that equal shares always make equal shards.

    A string has the form `train=0.98,val=0.02`. Shares add up to 1. Percentages (that add up to 100) and whole numbers
    are divided by their sum.

    Raises:
        ConfigError: the value has another form, there is no share, a split is unknown, or fractions have another sum.
    """
    split = _shares_in(value) if isinstance(value, str) else value
    if not isinstance(split, dict):
        raise ConfigError(f"`split` must be shares such as train=0.98,val=0.02, got {short(split)}")
    if not split or not all(is_number(share) and 0 <= share < math.inf for share in split.values()):
        raise ConfigError("`split` must name shares >= 0, such as train=0.98,val=0.02")
    if unknown := set(split) - set(SPLITS):
        raise ConfigError(f"unknown split {', '.join(sorted(map(str, unknown)))}; use {', '.join(SPLITS)}")
    total = sum(split.values())
    ordered = {name: float(split[name]) for name in SPLITS if name in split}
    if abs(total - 1) <= 1e-6:  # returned as written: dividing by 0.9999999 would change the split of a pack
        return ordered
    whole = all(share.is_integer() for share in ordered.values())
    if total == 0 or not (whole or abs(total - 100) <= 1e-4):
        raise ConfigError(
            f"the shares of `split` add up to {total:g}; they must add up to 1 or 100, or be whole numbers"
        )
    return {name: share / total for name, share in ordered.items()}


def _shares_in(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for item in text.split(","):
        name, _, share = (word.strip() for word in item.partition("="))
        if name in shares:
            raise ConfigError(f"`split` must name each split once, got {name} twice in {text!r}")
        try:
            shares[name] = float(share)
        except ValueError as error:
            raise ConfigError(f"`split` must have the form train=0.98,val=0.02, got {text!r}") from error
    return shares


def parse_size(value: int | str) -> int:
    """Return bytes, from a number or `512M`, `1GB` or `1073741824`; K, M, G and T are powers of 1024.

    Raises:
        ConfigError: the string has another form.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ConfigError(f"invalid size {value!r}; use bytes or a unit, such as 512M or 1G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_seq_len(value: int | str) -> int:
    """Return tokens, from a number or `8192` or `8k`; k is 1024.

    Raises:
        ConfigError: the string has another form.
    """
    if not isinstance(value, str):
        return value
    match = _TOKENS.fullmatch(value.strip())
    # nan.is_integer() is False: one error for a string that does not match, and for 0.3k
    tokens = float(match[1]) * _UNITS[match[2].upper()] if match is not None else math.nan
    if not tokens.is_integer():
        raise ConfigError(f"`seq_len` must be an integer, such as 8192 or 8k, got {value!r}")
    return int(tokens)


def prefix_of(folder: Path) -> str:
    """Prefix of shard names for an output folder: its name, so that outputs of different names can be blended.

    `{part}` and the separator beside it are removed, because the number of the input part follows the prefix anyway.
    If nothing else remains, the name of the parent folder is used. A name that is too long, or has characters that no
    key has, is shortened, and a digest of the name follows: two names must not become the same prefix.
    """
    resolved = Path(os.path.abspath(folder))  # not resolve(): a link keeps the name that the user chose
    for part in (resolved.name, resolved.parent.name):
        name = part.replace("{part}", "").strip("_-") if "{part}" in part else part
        plain = _NOT_IN_KEYS.sub("_", name).strip("_-")
        if name and name == plain and len(name) <= _MAX_PREFIX:
            return name
        if name:
            digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
            return f"{plain[: _MAX_PREFIX - 1 - len(digest)] or 'pack'}-{digest}"
    return "pack"


def part_suffix(index: int | None) -> str:
    """Suffix of names in input part `index`, `_p003` for 3; "" for the complete input."""
    return "" if index is None else f"_p{index:03d}"


def check_flavor(options: "InputOptions") -> None:
    """Set `sample_class` to the flavor that is written; the flavor of single samples is used only with `unpacked`.

    Raises:
        ConfigError: `unpacked` is combined with the flavor of a pack.
    """
    if options.unpacked:
        if options.sample_class not in (AUTO, SINGLE) or options.layout is not None:
            other = f"`layout` {options.layout}" if options.layout else f"`sample_class` {options.sample_class}"
            raise ConfigError(f"`unpacked` writes {SINGLE}, one sample per member, but {other} stores packs. Omit one")
        object.__setattr__(options, "sample_class", SINGLE)
    elif options.sample_class == SINGLE:
        _log.warning(
            "`sample_class` %s stores single samples; writing %s instead. Use `unpacked` to store one sample per "
            "member, for packing while training",
            SINGLE,
            MULTI_MIX,
        )
        object.__setattr__(options, "sample_class", MULTI_MIX)


def check_layout(options: "InputOptions") -> None:
    """Set `sample_class` to the flavor of the layout.

    Raises:
        ConfigError: the flavor is different, or the layout cannot store the supervision.
    """
    if options.layout is None:
        return
    flavor = LAYOUTS[options.layout].sample_class
    if options.sample_class not in ("auto", flavor):
        raise ConfigError(
            f"`layout` {options.layout} is a variant of {flavor}, not of `sample_class` {options.sample_class}. Omit "
            "one of them"
        )
    if options.patch_order == "block":
        raise ConfigError(
            f"`patch_order` must be 'row' or 'auto' with `layout` {options.layout}, got 'block'. Its reader "
            "permutes every .npy file from row to block order"
        )
    if options.loss_on != "assistant":
        raise ConfigError(
            f"`loss_on` must be 'assistant' with `layout` {options.layout}, got {options.loss_on!r}. Its reader "
            "trains on every assistant turn"
        )
    object.__setattr__(options, "sample_class", flavor)


def check_layout_outputs(options: "PackOptions") -> None:
    """Refuse options that need a layout, or that the reader of the layout does not support.

    Raises:
        ConfigError: the message names the option.
    """
    if options.layout is not None and options.media == "reference":
        raise ConfigError(
            f"`media` must be 'copy' with `layout` {options.layout}, got 'reference'. Its reader needs the images in "
            "the shards"
        )
    if options.layout is None:
        for name in ("keep_bytes", "dataset_module"):
            if getattr(options, name):
                raise ConfigError(f"`{name}` needs a `layout`; use {', '.join(LAYOUTS)}")
        return
    if options.overlong == "truncate":
        raise ConfigError(
            f"`overlong` must be 'drop' or 'error' with `layout` {options.layout}, got 'truncate'. Its reader does "
            "not truncate samples"
        )
    if options.dataset_module is not None and not _MODULE.fullmatch(options.dataset_module):
        raise ConfigError(
            f"`dataset_module` {options.dataset_module!r} is not the name of a package, such as "
            "aiak_training_llm.data.multimodal"
        )


@dataclass(frozen=True, kw_only=True)
class InputOptions(EncoderSettings):
    """The input, its encoder and the flavor to write: the same for packing and for surveying lengths.

    Raises ConfigError when made with an invalid value.
    """

    inputs: Sequence[str | Path] = option(
        (), help="Files, globs, folders, Energon datasets or Hub names.", group=INPUT, flags=("--jsonl",),
        metavar="FILE", shown_default="required, or `sources`", parse=parse_inputs,
    )  # fmt: skip
    sources: Sequence[SourceConfig | Mapping[str, Any] | str] = option(
        (), help="Inputs with per-source settings.", group=INPUT, flags=(), parse=parse_sources
    )
    image_root: Path | None = option(
        None, help="Folder of images and videos: their paths start from it and must stay in it.", group=INPUT,
        shown_default="the folder of each input", metavar="DIR",
    )  # fmt: skip
    source_split: str | None = option(
        None, help="Split of Hugging Face DatasetDicts and Energon datasets to read.", group=INPUT,
        shown_default="train for Energon datasets", metavar="NAME",
    )  # fmt: skip
    use_patch_positions: bool = option(
        True, help="Ignore the patch_positions (.npy) of the records.", group=INPUT, flags=("--no-npy",),
        decides="lengths",
    )  # fmt: skip
    map: str | None = option(
        None, help="Field names: user=question,assistant=data.answer, or images=pic alone.", group=INPUT,
        decides="lengths", metavar="user=FIELD,assistant=FIELD,...", parse=parse_map,
    )  # fmt: skip
    adapter: str | None = option(
        None, help="Function that makes each record: it returns a record, a Conversation, or None to drop it.",
        group=INPUT, decides="lengths", metavar="MODULE:FUNCTION",
    )  # fmt: skip
    record_weight: RecordWeight = option(
        "refuse", help="How to use a weight, sample_weight, loss_weight or loss_scale of a record: refuse rejects the "
        "record, loss multiplies the loss of its targets.", group=INPUT, decides="lengths",
    )  # fmt: skip
    group_field: str | None = option(
        None, help="Field with a string or an integer: records of a file with equal values share a row, in their "
        "order.", group=INPUT, decides="lengths", metavar="NAME",
    )  # fmt: skip
    media_root: Mapping[str, str] = option(
        dict, help="Folder of images and videos that packs in the input refer to, and its new place; repeatable.",
        group=INPUT, parse=parse_media_root, metavar="OLD=NEW", shown_default="the recorded paths",
        repeatable=True,
    )  # fmt: skip
    no_links: bool = option(
        False, help="Refuse symbolic links in media paths, folders and globs, for untrusted data.", group=INPUT,
        decides="lengths",
    )  # fmt: skip
    trust_sample_loader: bool = option(
        False, help="Run the sample_loader.py of Energon datasets to read them.", group=INPUT
    )
    encoder: Processor | None = None
    check_media: CheckMedia = option(
        "header", help="How to check images, videos and audio: by header and structure, or by decoding all of them.",
        group=IMAGES, decides="tars",
    )  # fmt: skip
    sample_class: str = option(
        AUTO, help="Flavor to write; auto chooses PackedTokensSample for groups and labels, PackedCaptioningSample if "
        "it can store every record, otherwise PackedMultiMixQASample.", group=OUTPUT,
        choices=lambda: (AUTO, *CODECS), decides="tars",
    )  # fmt: skip
    unpacked: bool = option(
        False, help="Write one sample per tar key (MultiMixQASample), for packing while training.", group=OUTPUT
    )
    layout: str | None = option(
        None, help="Write PackedCaptioningSample in the variant that another project reads.", group=OUTPUT,
        choices=lambda: tuple(LAYOUTS), decides="tars", shown_default="the variant of this package", metavar="NAME",
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
    seed: int = option(0, help="Random seed for the order of the packs.", group=PACKING, minimum=0, decides="tars")
    workers: int = option(0, help="Processes.", group=RUN, minimum=0, shown_default="all cores")
    max_reject_rate: float | None = option(
        0.05,
        help="Maximum share of rejected records; a larger share stops the run before writing.",
        group=RUN,
        minimum=0,
    )

    def __post_init__(self) -> None:
        self._refuse_remote()  # before `check` makes paths of strings
        super().__post_init__()
        if self.max_reject_rate is not None and self.max_reject_rate > 1:
            raise ConfigError(f"`max_reject_rate` must be between 0 and 1, got {self.max_reject_rate}")
        if self.adapter is not None:
            _ = Adapter(self.adapter).source  # an adapter that cannot be imported raises here, not in a worker
        # The layout may set the flavor that `sample_class` left open, so it is checked second.
        check_flavor(self)
        check_layout(self)
        check_algorithm(self.algorithm)
        if not self.inputs and not self.sources:
            raise ConfigError("no input; pass one or more files")
        if (self.encoder is None) == (self.tokenizer is None):
            count = "neither" if self.tokenizer is None else "both"
            raise ConfigError(f"pass exactly one of `tokenizer` and, from Python, `encoder`, got {count}")
        if self.encoder is not None and not isinstance(self.encoder, Processor):
            raise ConfigError(f"`encoder` must be a Processor such as ChatEncoder, got {type(self.encoder).__name__}")
        if self.image_root is not None and not self.image_root.is_dir():
            raise ConfigError(
                f"`image_root` must be a folder, got {self.image_root}. Pass the folder that image paths start from"
            )

    def _refuse_remote(self) -> None:
        for declaration in declared(type(self)):
            if declaration.kind is Path and getattr(self, declaration.name) is not None:
                is_read = declaration.name in ("image_root", "output_dir", "output")
                refuse_remote(getattr(self, declaration.name), declaration.name, or_object=is_read)

    @property
    def source_configs(self) -> list[SourceConfig]:
        """`inputs`, then `sources`; `map` and `adapter` of the run apply to sources without these settings."""
        configs = [SourceConfig(path=(str(path),)) for path in self.inputs]
        configs += [source for source in self.sources if isinstance(source, SourceConfig)]  # all, by __post_init__
        return [replace(c, map=c.map or self.map, adapter=c.adapter or self.adapter) for c in configs]

    def reader_fingerprint(self) -> list[Any]:
        """Values that determine how records are read, for fingerprints."""
        values = [[config.key(self.seed) for config in self.source_configs], self.record_weight, self.no_links]
        return values if self.group_field is None else [*values, self.group_field]

    @property
    def written(self) -> Mapping[str, tuple[Path, ...]]:
        """Names of files that a run writes, by the option that names their folder, as examples of its files."""
        return {}

    @property
    def codec(self) -> Codec:
        """The codec of `sample_class`; before `auto` is resolved, the codec of PackedMultiMixQASample."""
        return codec_for(MULTI_MIX if self.sample_class == AUTO else self.sample_class, self.layout or "")

    def resolved(self, fits_captioning: bool, needs_tokens: bool = False) -> Self:
        """Return the options with the flavor that `auto` selects.

        Args:
            fits_captioning: PackedCaptioningSample can store every record that can be packed.
            needs_tokens: samples have groups, roles, labels or per-token values, which only PackedTokensSample stores.
        """
        if self.sample_class != AUTO:
            return self
        return replace(self, sample_class=TOKENS if needs_tokens else CAPTIONING if fits_captioning else MULTI_MIX)

    @property
    def image_check(self) -> ImageCheck:
        """`check_media`, or `convert` if the layout converts images when they are written."""
        # An image that cannot be converted must be rejected while measuring: after planning, its pack would lack a
        # sample.
        return "convert" if self.check_media == "header" and self.layout is not None else self.check_media

    @property
    def processes(self) -> int:
        """Processes to use: `workers`, or all cores that this process may run on."""
        return self.workers or available_cores()

    @property
    def encoder_loader(self) -> EncoderLoader:
        """Loader of the encoder, for every process of the run."""
        return PretrainedEncoder(self) if self.encoder is None else GivenEncoder(self.encoder)


@dataclass(frozen=True, kw_only=True)
class RejectOptions(InputOptions):
    """Handling of records that cannot be used: the same for packing, planning and streaming.

    `overlong` applies to samples longer than a row. `strict`, `max_failures` and `max_reject_rate` stop the run.
    They ignore records that are left out on request (`REQUESTED_REJECTS`), and `max_failures` also ignores the
    samples that `overlong` drops.
    """

    overlong: Overlong = option(
        "drop", help="Samples longer than a row; split divides documents and token records.",
        group=PACKING, decides="tars",
    )  # fmt: skip
    split_overlap: int = option(
        1, help="With --overlong split: tokens that a fragment repeats from the fragment before, as context.",
        group=PACKING, minimum=1, metavar="N",
    )  # fmt: skip
    max_failures: int | None = option(
        None, help="Stop when more records than this are rejected; overlong samples do not count.", group=RUN,
        minimum=0, metavar="N",
    )  # fmt: skip
    strict: bool = option(False, help="Stop at the first rejected record.", group=RUN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlong == "split" and self.split_overlap >= self.usable_len:
            raise ConfigError(
                f"`split_overlap` must be smaller than a row of {self.usable_len} tokens, got {self.split_overlap}"
            )

    @property
    @abstractmethod
    def row_length(self) -> int:
        """Tokens in one row."""

    @property
    def usable_len(self) -> int:
        """Tokens of the longest sample that fits: `seq_len` rounded down to a multiple of `pad_multiple`."""
        return self.row_length // self.pad_multiple * self.pad_multiple

    @property
    def limits(self) -> RejectLimits:
        """The limits that stop the run."""
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
    """Options of `pack`: inputs, tokenizer, packing, output and run settings.

    `part=(I, N)` packs input part I of N, in one of N runs without communication. Each run needs its own
    `output_dir`, in which `{part}` is replaced by `p000` and so on.

    Examples:
        >>> pack_options = PackOptions(inputs=[data], tokenizer=tokenizer, output_dir="out", seq_len="8k")
        >>> pack_options.seq_len, pack_options.algorithm, pack_options.split
        (8192, 'bfd', {'train': 1.0})
    """

    output_dir: Path = option(
        help="Folder for the dataset and its reports, also in an object store.", group=OUTPUT,
        flags=("--output-dir", "-o"), metavar="DIR",
    )  # fmt: skip
    work_dir: Path | None = option(
        None, help="With an output in an object store: local folder of restart state and unfinished shards.",
        group=OUTPUT, metavar="DIR", shown_default="energon-packed in the cache folder of the user",
    )  # fmt: skip
    seq_len: int = option(
        help="Tokens in one row; 8k is 8192.", group=PACKING, minimum=1, decides="tars", parse=parse_seq_len,
        metavar="N",
    )  # fmt: skip
    group_by: GroupBy = option(
        "none", help="media: text, image and video samples in separate packs.", group=PACKING, decides="tars"
    )
    split: dict[str, float] = option(
        lambda: {"train": 1.0}, help="Shares of the packs, such as train=0.98,val=0.02 or train=98,val=2.",
        group=PACKING, parse=parse_split, decides="tars", shown_default="train=1", metavar="SHARES",
    )  # fmt: skip
    shard_prefix: str | None = option(
        None, help="Start of shard names and keys, different for each output of a blend.", group=OUTPUT,
        metavar="NAME", shown_default="the name of the output folder",
    )  # fmt: skip
    keep_bytes: bool = option(
        False, help="With --layout: keep the bytes of images that are not JPEG under a .jpg name, instead of "
        "converting them.", group=OUTPUT, decides="tars",
    )  # fmt: skip
    dataset_module: str | None = option(
        None, help="With --layout: package of the PackedCaptioningSample class that dataset.yaml names; "
        "sample_loader.py then does not import energon_packed.", group=OUTPUT, metavar="NAME",
    )  # fmt: skip
    media: Media = option(
        "copy", help="Images and videos: copy stores their bytes in the shards, reference only their location and "
        "digest.", group=OUTPUT,
    )  # fmt: skip
    media_check: MediaCheck = option(
        "digest", help="With --media reference: what readers compare: digest of the bytes, or size and time of "
        "change of the file, without reading its bytes.", group=OUTPUT,
    )  # fmt: skip
    extract_frames: bool = option(
        False, help="Store the selected frames of video files as JPEG images, in place of the files, so that loaders "
        "decode no video.", group=OUTPUT, decides="tars",
    )  # fmt: skip
    max_packs_per_shard: int = option(
        1000, help="Maximum packs in one shard.", group=OUTPUT, minimum=1, decides="tars"
    )
    max_shard_bytes: int = option(
        1 << 30, help="Maximum bytes in one shard.", group=OUTPUT, minimum=1, parse=parse_size,
        flags=("--max-shard-size",), decides="tars", shown_default="1G", metavar="SIZE",
    )  # fmt: skip
    part: tuple[int, int] | None = option(
        None, help="Pack only the I-th of N parts of the input; auto reads both numbers from SLURM.", group=INPUT,
        parse=parse_part, metavar="I/N|auto",
    )  # fmt: skip
    engine: Literal["local", "ray"] = option(
        "local", help="Engine that runs the tasks: local processes, or a Ray cluster.", group=RUN
    )
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
        if self.overlong == "split":
            self._store_tokens()
        self._place_part()
        check_layout_outputs(self)
        if self.extract_frames and self.media == "reference":
            raise ConfigError(
                "`extract_frames` must be False with `media` 'reference': extracted frames are in no file of the "
                "input. Set `media` to 'copy'"
            )
        if self.extract_frames and self.load_audio_from_video:
            raise ConfigError(
                "`extract_frames` must be False with `load_audio_from_video`: frames have no audio track. Remove one"
            )
        if self.seq_len > _MAX_INT32:  # cu_seqlens of a batch are int32
            raise ConfigError(f"`seq_len` must be at most {_MAX_INT32}, got {self.seq_len}")
        if self.pad_multiple > self.seq_len:
            raise ConfigError(f"`pad_multiple` must be at most `seq_len` {self.seq_len}, got {self.pad_multiple}")
        if not _PREFIX.fullmatch(str(self.shard_prefix)):
            raise ConfigError(
                f"`shard_prefix` must be 1 to {_MAX_PREFIX} letters, digits, '_' and '-', got {self.shard_prefix!r}"
            )

    def _store_tokens(self) -> None:
        # A fragment is a range of tokens, which text does not have: tokenized again, it could have other tokens.
        if self.sample_class == AUTO and self.layout is None:
            object.__setattr__(self, "sample_class", TOKENS)
        if not self.codec.stores_tokens:
            raise ConfigError(
                f"`sample_class` must be {TOKENS} with `overlong` 'split', got {self.sample_class}. Fragments are "
                "stored as tokens"
            )

    def _place_part(self) -> None:
        if self.part is None:
            if "{part}" in str(self.output_dir):
                raise ConfigError(
                    f"`output_dir` {self.output_dir} contains {{part}}, but `part` is not set. Pass `part=I/N`"
                )
            return
        folder = str(self.output_dir).replace("{part}", part_suffix(self.part[0])[1:])
        object.__setattr__(self, "output_dir", as_path(folder))

    @property
    def image_check(self) -> ImageCheck:
        """The check of `lengths`, but with `keep_bytes` no image is converted."""
        return self.check_media if self.keep_bytes else super().image_check

    @property
    def unfinished_bytes(self) -> int:
        """Maximum bytes of the shards that are written at the same time."""
        return self.processes * self.max_shard_bytes

    @property
    def prefix(self) -> str:
        """Prefix of shard names and keys, with the suffix of the input part."""
        return str(self.shard_prefix) + part_suffix(None if self.part is None else self.part[0])

    @property
    def written(self) -> Mapping[str, tuple[Path, ...]]:
        """Files of the output folder."""
        names = ("lengths.parquet", "rejects.jsonl", f"webdataset/{self.prefix}-000000.tar")
        return {"output_dir": tuple([self.output_dir / name for name in names])}

    @property
    def row_length(self) -> int:
        """Tokens in one row."""
        return self.seq_len

    def tar_fingerprint_options(self) -> dict[str, Any]:
        """Options that change the bytes of the tars, by name."""
        names = [declaration.name for declaration in declared(type(self)) if declaration.decides == "tars"]
        names += ["split_overlap"] if self.overlong == "split" else []  # otherwise without effect
        return {name: getattr(self, name) for name in (*names, "use_patch_positions", "prefix")}
