# Written by tools/make_keywords.py from the declared options.
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from energon_packed.sources.config import SourceConfig

class EncoderKeywords(TypedDict, total=False):
    """Fields of EncoderSettings."""

    image_processor: str | None
    vision_family: str | None
    factor: int | None
    patch_size: int | None
    merge_size: int | None
    min_pixels: int | None
    max_pixels: int | None
    patch_order: Literal["auto", "row", "block"]
    fps: float | None
    num_frames: int | None
    min_frames: int | None
    max_frames: int | None
    video_min_pixels: int | None
    video_max_pixels: int | None
    total_pixels: int | None
    long_audio: Literal["reject", "truncate"]
    load_audio_from_video: bool
    loss_on: Literal["assistant", "last", "all"]
    tokenizer_engine: Literal["auto", "tokenizers", "fastokens"]
    allow_special_in_text: bool

class LoaderKeywords(TypedDict, total=False):
    """Fields of LoaderOptions."""

    num_workers: int
    rank: int | None
    world_size: int | None
    seed: int
    epoch_end: Literal["repeat", "drop", "error"]
    allow_changed_weights: bool
    order_log: Path | str | None
    max_failures: int | None
    check_lengths: bool
    persistent_workers: bool
    pin_memory: bool
    prefetch_factor: int | None
    timeout: float
    multiprocessing_context: Any
    worker_init_fn: Callable[[int], None] | None

class OptionKeywords(TypedDict, total=False):
    """Attributes of a Declaration that have a default."""

    metavar: str | None
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] | None
    minimum: float | None
    parse: Callable[[Any], Any] | None
    decides: str
    shown_default: str | None
    needed: bool
    repeatable: bool

class PackKeywords(TypedDict, total=False):
    """Fields of PackOptions."""

    tokenizer: Path | str | None
    processor: Path | str | None
    image_processor: str | None
    vision_family: str | None
    factor: int | None
    patch_size: int | None
    merge_size: int | None
    min_pixels: int | None
    max_pixels: int | None
    patch_order: Literal["auto", "row", "block"]
    fps: float | None
    num_frames: int | None
    min_frames: int | None
    max_frames: int | None
    video_min_pixels: int | None
    video_max_pixels: int | None
    total_pixels: int | None
    long_audio: Literal["reject", "truncate"]
    load_audio_from_video: bool
    loss_on: Literal["assistant", "last", "all"]
    tokenizer_engine: Literal["auto", "tokenizers", "fastokens"]
    allow_special_in_text: bool
    sources: Sequence[SourceConfig | Mapping[str, Any] | str]
    image_root: Path | str | None
    source_split: str | None
    use_patch_positions: bool
    map: str | Mapping[str, str] | None
    adapter: str | None
    record_weight: Literal["refuse", "loss"]
    group_field: str | None
    media_root: Mapping[str, str] | str | Sequence[str]
    no_links: bool
    trust_sample_loader: bool
    check_media: Literal["header", "full"]
    sample_class: str
    unpacked: bool
    layout: str | None
    algorithm: str
    max_samples_per_pack: int | None
    pad_multiple: int
    seed: int
    workers: int
    max_reject_rate: float | None
    overlong: Literal["drop", "error", "truncate", "split"]
    split_overlap: int
    max_failures: int | None
    strict: bool
    output_dir: Path | str
    work_dir: Path | str | None
    seq_len: int | str
    group_by: Literal["none", "media"]
    split: dict[str, float] | str
    shard_prefix: str | None
    keep_bytes: bool
    dataset_module: str | None
    media: Literal["copy", "reference"]
    media_check: Literal["digest", "time"]
    extract_frames: bool
    max_packs_per_shard: int
    max_shard_bytes: int | str
    part: tuple[int, int] | str | None
    engine: Literal["local", "ray"]
    ray_address: str | None
    resume: bool
    overwrite: bool

class PackedLoaderKeywords(TypedDict, total=False):
    """Fields of PackedLoaderOptions."""

    num_workers: int
    rank: int | None
    world_size: int | None
    seed: int
    epoch_end: Literal["repeat", "drop", "error"]
    allow_changed_weights: bool
    order_log: Path | str | None
    max_failures: int | None
    check_lengths: bool
    persistent_workers: bool
    pin_memory: bool
    prefetch_factor: int | None
    timeout: float
    multiprocessing_context: Any
    worker_init_fn: Callable[[int], None] | None
    micro_batch_size: int
    seq_len: int | None
    split: str
    epochs: int | None
    complete_epochs: bool
    shuffle: bool
    shuffle_buffer_size: int
    packing_buffer_size: int | None
    check_encoder: bool
    trust_sample_loader: bool
    media_root: Mapping[str, str] | None

class PoolKeywords(TypedDict, total=False):
    """Arguments of PoolPacker."""

    pool_size: int
    algorithm: str
    max_samples: int | None
    multiple: int
    max_images: int | None
    max_patches: int | None
    overlong: Literal["drop", "error", "truncate", "split"]

class ProviderKeywords(TypedDict, total=False):
    """Fields of PackedLoaderOptions that Megatron does not decide."""

    num_workers: int
    seed: int
    epoch_end: Literal["repeat", "drop", "error"]
    allow_changed_weights: bool
    order_log: Path | str | None
    max_failures: int | None
    check_lengths: bool
    persistent_workers: bool
    pin_memory: bool
    prefetch_factor: int | None
    timeout: float
    multiprocessing_context: Any
    worker_init_fn: Callable[[int], None] | None
    micro_batch_size: int
    seq_len: int | None
    complete_epochs: bool
    shuffle_buffer_size: int
    packing_buffer_size: int | None
    check_encoder: bool
    trust_sample_loader: bool
    media_root: Mapping[str, str] | None
