"""A data loader provider for Megatron's `pretrain`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from energon_packed.blends import has_split
from energon_packed.dataflow import get_packed_loader
from energon_packed.encoding import Processor
from energon_packed.errors import ConfigError
from energon_packed.integrations.megatron.iterator import MegatronIterator
from energon_packed.integrations.megatron.layouts import Layout, check_layout
from energon_packed.integrations.megatron.ranks import Place, check_parallelism
from energon_packed.integrations.megatron.restore import restore_iterator

Provider = Callable[[Any], tuple[MegatronIterator | None, MegatronIterator | None, MegatronIterator | None]]
_DECIDED = ("rank", "world_size", "split", "epochs", "shuffle")


def train_valid_test_dataloaders_provider(
    path: str | Path,
    encoder: Processor | None,
    *,
    layout: Layout = "bridge",
    restore: str | Path | Literal["auto"] | None = "auto",
    **options: Any,
) -> Provider:
    """A provider for Megatron's `pretrain`: called on every rank, it gives (train, valid, test) iterators.

        provider = train_valid_test_dataloaders_provider("out", encoder, micro_batch_size=2, num_workers=4)
        pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)

    Ranks are those of `megatron.core.parallel_state`. In `bridge` layout every rank loads: those of one data-parallel
    rank read the same rows, and middle pipeline stages get all but pixels. In `megatron-lm` layout the first
    tensor-parallel rank of the first and last stage loads, in `megatron-gpt` that of every stage, and the step
    broadcasts. `valid` and `test` are None where the data has no such split.

    Args:
        path: a packed dataset, or a Metadataset YAML.
        encoder: the Processor that the data was packed with; None where `get_packed_loader` needs none.
        layout: `bridge`, `megatron-lm` or `megatron-gpt`.
        restore: where the data position of a restarted run comes from. `auto`: under Megatron-LM, the file in
            `--dataloader-save` of the iteration that `--load` restored; Megatron-Bridge restores by itself. A path: a
            checkpoint folder (of its last complete iteration), an iteration folder or a file. None starts anew.
        options: as `get_packed_loader` takes them, without rank, world_size, split, epochs and shuffle.

    Raises:
        ConfigError: an unknown layout, or an option that Megatron decides; when called, settings that this layout or
            parallelism cannot have, megatron-core is missing, or there is no state to restore.
        BatchError: when called, the state is of another loader.
    """
    check_layout(layout)
    _check_options(options)

    def provider(train_val_test_num_samples: Any = None) -> tuple[Any, Any, Any]:
        place = Place.of_this_process()
        check_parallelism(place, layout, options.get("collator"))
        if not place.loads(layout):
            return None, None, None

        def iterator(split: str) -> MegatronIterator:
            ranks: dict[str, Any] = {"rank": place.rank, "world_size": place.world_size}
            loader = get_packed_loader(path, encoder, split=split, **ranks, **options)
            return MegatronIterator(loader, layout, with_pixels=not place.is_middle_stage)

        train = iterator("train")
        restore_iterator(train, restore, place.rank)
        valid, test = (iterator(split) if has_split(path, split) else None for split in ("val", "test"))
        return train, valid, test

    provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron then calls it on every rank
    return provider


def _check_options(options: Mapping[str, Any]) -> None:
    for name in _DECIDED:
        if name in options:
            raise ConfigError(
                f"`{name}` is no option of the provider: Megatron sets ranks and splits, and its loop repeats "
                "shuffled data; remove it"
            )
