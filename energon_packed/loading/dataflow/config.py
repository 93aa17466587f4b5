"""DataflowConfig: options in Python or the YAML of `pack --config` in, the settings of loading raw records out.

`is_dataflow_config` detects such a YAML; `work_folder` is the folder for measurements and converted copies of a run.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from energon_packed.encoding import StoredTokens
from energon_packed.encoding.settings import TOKENS
from energon_packed.errors import ConfigError, SourceError
from energon_packed.files import read_yaml
from energon_packed.loading.packers.base import Packer
from energon_packed.loading.packers.pool import PoolPacker
from energon_packed.loading.packers.simple import SequentialPacker
from energon_packed.options import declared_again, make, option, short
from energon_packed.pipeline.config_file import DATASET_TYPES, read_config, translated
from energon_packed.pipeline.options import (
    INPUT,
    PACKING,
    RUN,
    GroupBy,
    PackOptions,
    RejectOptions,
    parse_seq_len,
    parse_split,
)
from energon_packed.pipeline.reader import RecordReader
from energon_packed.sources import SourceConfig
from energon_packed.sources.registry import SOURCES

_STRATEGY_OF = {"bfd": "best_fit", "ffd": "first_fit"}  # names of `algorithm` and `packing_strategy`
AUTO = "auto"
_TEMPORARY: list["tempfile.TemporaryDirectory[str]"] = []  # removed when this process ends


@dataclass(frozen=True, kw_only=True)
class DataflowConfig(RejectOptions):
    """Settings of `get_raw_loader`, `PackedIterableDataset` and `plan_in_memory`: raw records to batches.

        DataflowConfig(dataset_path="data.jsonl", packing_length=4096, processor_config="TOKENIZER_DIR")
        DataflowConfig.from_yaml("pack.yaml")

    The option names of `pack` are accepted as well: `inputs`, `sources`, `seq_len`, `algorithm`, `tokenizer`,
    `image_root`, `map`, `adapter`, `seed`, and the other options for reading and tokenizing.

    The limits on rejected records (`max_failures`, `max_reject_rate`, `strict`) end loading. Planning counts all
    records; a stream counts the records of its rank in an epoch, and checks `max_reject_rate` for every 1,000 records
    in a row, and when an epoch ends.

    Raises:
        ConfigError: a value is invalid, or two names of a setting have different values.

    Examples:
        >>> config = DataflowConfig(inputs=[data], tokenizer=tokenizer, seq_len=2048)
        >>> config.row_length
        2048
    """

    dataset_path: Any = option(
        None, help="A path, a list of paths, a list of sources with per-source settings (`path`, `weight`, "
        "`image_root`, `map`, ...), or a YAML file with such a list.", group=INPUT, flags=(),
    )  # fmt: skip
    dataset_format: str = option(
        AUTO, help="File format that every input must have, such as `jsonl` or `parquet`; `auto` and `hf_dataset` "
        "accept any. `yaml`: dataset_path is a YAML file with a list of inputs, which may have any format.",
        group=INPUT, flags=(),
    )  # fmt: skip
    packing: bool = option(
        True, help="Pack several samples per row; False puts one sample in each row.", group=PACKING, flags=()
    )
    seq_len: int | None = option(
        None, help="Tokens in one row, required.", group=PACKING, flags=(), parse=parse_seq_len, minimum=1
    )
    packing_length: int | None = option(
        None, help="Another name of `seq_len`.", group=PACKING, flags=(), parse=parse_seq_len, minimum=1
    )
    packing_strategy: str | None = option(
        None, help="`first_fit`, `best_fit`, `window_N` (sorted by length and packed within windows of N samples), "
        "`sequential`, `pool_N` (best fit over a buffer of N). Streaming `first_fit` and `best_fit` use a buffer of "
        "256 samples; `plan_in_memory` uses all, and windows for `pool_N`.", group=PACKING, flags=(),
        shown_default="as `algorithm`",
    )  # fmt: skip
    shuffle: bool = option(True, help="Draw a new seeded order every epoch.", group=PACKING, flags=())
    processor_config: Any = option(
        None, help="Folder of the tokenizer, or a mapping of the fields of `EncoderSettings`. Without a tokenizer, "
        "records must be tokenized.", group=TOKENS, flags=(),
    )  # fmt: skip
    streaming: bool | None = option(
        None, help="Stream with `get_raw_loader`; False plans in memory.", group=RUN, flags=(),
        shown_default="True, or as `dataset_type`",
    )  # fmt: skip
    datasets: Any = option(None, help="Of lmms-engine: a list of inputs.", group=INPUT, flags=())
    dataset_type: str | None = option(
        None, help="Of lmms-engine: `vision` plans in memory, `vision_iterable` streams.", group=INPUT, flags=()
    )
    filter_overlong: bool | None = option(
        None, help="Of lmms-engine, for `overlong`: True is `drop`, False is `error`.", group=PACKING, flags=()
    )
    max_images: int | None = option(None, help="Maximum images in one row.", group=PACKING, flags=(), minimum=1)
    max_patches: int | None = option(
        None, help="Maximum patches of images and videos in one row of a stream.", group=PACKING, flags=(), minimum=1
    )
    group_by: GroupBy = declared_again(PackOptions, "group_by", "none")
    split: Any = option(
        None, help="Of `pack`: the records of all splits would be loaded, so several splits are refused.",
        group=PACKING, flags=(), parse=parse_split,
    )  # fmt: skip
    part: Any = option(
        None, help="Of `pack`: a loader assigns records to ranks, so a part is refused.", group=INPUT, flags=()
    )
    max_failures: int | None = declared_again(RejectOptions, "max_failures", 1000)
    work_dir: Path | None = option(
        None, help="Folder for measurements and converted copies, kept for the next run.", group=RUN, flags=(),
        shown_default="a temporary folder",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if str(self.dataset_format).lower() == "yaml":  # of the list of datasets, not of their files
            is_file = isinstance(self.dataset_path, str | Path)
            if not (
                self.sources
                or self.datasets
                or (is_file and Path(self.dataset_path).suffix.lower() in (".yaml", ".yml"))
            ):
                raise ConfigError(
                    f"`dataset_path` must be a YAML file (`dataset_format` yaml), got {short(self.dataset_path)}."
                )
            object.__setattr__(self, "dataset_format", AUTO)
        object.__setattr__(self, "dataset_format", _known_format(self.dataset_format))
        of_training = ("dataset_path", "datasets", "dataset_type", "packing_length", "processor_config")
        names = (*of_training, "packing_strategy", "filter_overlong")
        values = {name: getattr(self, name) for name in names}
        defaults = {attribute.name: attribute.default for attribute in fields(self)}
        # All later code reads the names of `pack`; `translated` converts the names of this class to them.
        for name, value in translated(values).items():
            own = getattr(self, name)
            if name == "sources":  # SourceConfigs already, if `replace` makes a config from another config
                value = tuple(SourceConfig.of(source, i) for i, source in enumerate(value))
            if own != defaults[name] and own and str(own) != str(value):
                raise ConfigError(
                    f"`{name}` must have one value, got {short(own)} and, by its other name, {short(value)}. Remove "
                    "one of them."
                )
            object.__setattr__(self, name, value)
        if self.streaming is None:
            object.__setattr__(self, "streaming", DATASET_TYPES.get(str(self.dataset_type), True))
        if self.packing_strategy is None:
            object.__setattr__(self, "packing_strategy", _STRATEGY_OF.get(str(self.algorithm), self.algorithm))
        if self.tokenizer is None and self.encoder is None:
            object.__setattr__(self, "encoder", StoredTokens())
        if self.seq_len is None:
            raise ConfigError("Missing required option: `packing_length` (or `seq_len`), the tokens in one row.")
        super().__post_init__()
        object.__setattr__(self, "packing_length", self.seq_len)
        self._refuse_part_of_the_data()

    def _refuse_part_of_the_data(self) -> None:
        if self.split is not None and len(shares := {n: s for n, s in parse_split(self.split).items() if s}) > 1:
            shown = ",".join(f"{name}={share:g}" for name, share in shares.items())
            raise ConfigError(
                f"`split` must be one split in training on raw records, got {shown}: the records of all splits "
                "would be trained on. Train on the packed dataset, or remove `split` and list the files to train on."
            )
        if self.part not in (None, "0/1", (0, 1)):
            raise ConfigError(
                f"`part` must be left out in training on raw records, got {short(self.part)}: a loader assigns the "
                "records to ranks itself. Pass `part` on the command line of `pack`."
            )

    @classmethod
    def from_yaml(cls, path: str | Path) -> "DataflowConfig":
        """Read a config from the YAML file of `pack --config`; options for writing shards are ignored.

        Raises:
            ConfigError: the file cannot be read, has an unknown option, or selects a part of the data.
        """
        return make(cls, read_config(Path(path), cls, PackOptions))

    def packer(self) -> Packer:
        """Create the packer of the packing strategy and limits.

        Raises:
            ConfigError: the strategy or a limit is invalid.
        """
        limits: dict[str, Any] = {"max_images": self.max_images, "max_patches": self.max_patches}
        limits |= {"overlong": self.overlong, "multiple": self.pad_multiple, "group_by": self.group_by}
        length, strategy = self.row_length, str(self.packing_strategy)
        packer: Packer
        if not self.packing:
            packer = SequentialPacker(length, max_samples=1, **limits)
        elif strategy == "sequential":
            packer = SequentialPacker(length, max_samples=self.max_samples_per_pack, **limits)
        else:
            if strategy.startswith("pool_"):
                limits["pool_size"] = int(strategy.removeprefix("pool_"))
            algorithm = "bfd" if "pool_size" in limits else self.algorithm  # a pool is best fit over its buffer
            packer = PoolPacker(length, algorithm=algorithm, max_samples=self.max_samples_per_pack, **limits)
        if self.overlong == "split":
            packer.split_overlap = self.split_overlap
        return packer

    @property
    def row_length(self) -> int:
        """Tokens in one row."""
        assert self.seq_len is not None
        return self.seq_len

    @property
    def written(self) -> Mapping[str, tuple[Path, ...]]:
        """Measured lengths."""
        return {"work_dir": () if self.work_dir is None else (self.work_dir / "measure" / "0.parquet",)}

    def check_format(self, reader: RecordReader) -> None:
        """Check that all inputs have the file format `dataset_format`.

        Raises:
            SourceError: an input has another file format.
        """
        if (wanted := self.dataset_format) == AUTO:
            return
        for source in reader.sources:
            if (actual := _format_of(type(source))) != wanted:
                raise SourceError(
                    f"{source.path} must be {wanted} (`dataset_format`), got {actual}. Use auto, or {actual}."
                )


def _known_format(name: str) -> str:
    """Return a `dataset_format` as `_format_of` names it; `hf_dataset`, any file of a dataset of the Hub, is `auto`.

    Raises:
        ConfigError: the file format is unknown.
    """
    wanted = str(name).replace("_", "").lower()
    known = sorted({_format_of(kind) for kind in SOURCES})
    if wanted in (AUTO, "hfdataset"):
        return AUTO
    if wanted not in known:
        raise ConfigError(f"`dataset_format` must be one of auto, hf_dataset, yaml, {', '.join(known)}, got {name!r}.")
    return wanted


def is_dataflow_config(path: Path) -> bool:
    """Whether a file is the YAML of a config, and not a Metadataset."""
    if not path.is_file():
        return False
    # By keys that only Metadatasets have; a config has none of them.
    try:
        content = read_yaml(path)
    except yaml.YAMLError:
        return False
    return isinstance(content, dict) and not {"splits", "__class__"} & set(content)


def _format_of(kind: type[Any]) -> str:
    """File format of a reader class: jsonl for JsonlSource and CompressedJsonlSource."""
    return kind.__name__.removesuffix("Source").removeprefix("Compressed").lower()


def work_folder(config: DataflowConfig) -> Path:
    """Return `work_dir`, or a new temporary folder that is removed when this process ends."""
    if config.work_dir is not None:
        config.work_dir.mkdir(parents=True, exist_ok=True)
        return config.work_dir
    _TEMPORARY.append(tempfile.TemporaryDirectory(prefix="energon-packed-"))
    return Path(_TEMPORARY[-1].name)
