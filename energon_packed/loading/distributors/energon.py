"""A packed folder or a Metadataset to packs, in the order of Energon's own loader."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.energon import Sample, SavableDataset, WorkerConfig, edataclass, stateless

from energon_packed.encoding import Processor, StoredTokens
from energon_packed.flavors import PackSample
from energon_packed.loading.datasets.manifests import LoadedSplit, OpenedSplits, loaded_splits, repeats_packs
from energon_packed.loading.distributors.base import Distributor, Item, LoaderLayout
from energon_packed.loading.energon.epoch_dataset import epoch_dataset, reading
from energon_packed.loading.energon.faults import key_and_sources, raise_with_file_name, raise_with_location
from energon_packed.loading.energon.ranks import packs_of_epoch
from energon_packed.loading.energon.states import dataset_fingerprint, from_plain, to_plain
from energon_packed.loading.energon.task_encoder import PackedTaskEncoder
from energon_packed.loading.epoch_end import EpochEnd, steps_of_epoch
from energon_packed.loading.options import PackedLoaderOptions
from energon_packed.loading.packers.base import Packer
from energon_packed.loading.process import Failure, PackAt, Packs
from energon_packed.loading.ranks import ShardSpec
from energon_packed.metadatasets import is_metadataset
from energon_packed.shards.steps import steps_of_ranks
from energon_packed.storage import as_path

# Items between two states of Energon's dataset. A state is large (the shuffle buffer), and a resumed dataset reads and
# skips at most this many packs.
_CHECKPOINT = 64


class EnergonDistributor(Distributor):
    """Read packs as `get_packed_loader` does: Energon shards, shuffles and blends; a value is a pack of its flavor.

    Args:
        path: as for `get_packed_loader`.
        repeat: draw indefinitely, which blends by weight require; False ends after one exact pass, an epoch.
        split, shuffle, shuffle_buffer_size, trust_sample_loader, media_root: as in `PackedLoaderOptions`.

    Raises:
        ConfigError, FormatError: as `get_packed_loader`.

    Examples:
        >>> distributor = EnergonDistributor("demo-out", shuffle=False)
        >>> pack_0 = next(distributor.items(ShardSpec(), 0)).value
        >>> type(pack_0).__name__, pack_0.__key__
        ('PackedCaptioningSample', 'demo-out_00000000')
    """

    has_packs = True
    read_ahead = 1  # a pack has many samples, which are encoded together, and its pixels fill the memory

    def __init__(
        self,
        path: str | Path,
        *,
        split: str = "train",
        repeat: bool = False,
        shuffle: bool = True,
        shuffle_buffer_size: int = 64,
        trust_sample_loader: bool = False,
        media_root: Mapping[str, str] | None = None,
    ) -> None:
        config = PackedLoaderOptions(
            split=split,
            epochs=None if repeat else 1,
            shuffle=shuffle,
            shuffle_buffer_size=shuffle_buffer_size,
            trust_sample_loader=trust_sample_loader,
            media_root=media_root,
        )
        self._set(path, config, loaded_splits(path, split, trusted=trust_sample_loader), StoredTokens(), None)

    @classmethod
    def of(
        cls,
        path: str | Path,
        config: PackedLoaderOptions,
        splits: Sequence[LoadedSplit],
        encoder: Processor,
        packer: Packer | None,
    ) -> "EnergonDistributor":
        """Return the distributor of `get_packed_loader`.

        Args:
            path: as for the class.
            config: settings of the loader.
            splits: result of `loaded_splits`.
            encoder: measures samples without a recorded length.
            packer: chooses the packs of each row on the fly, which then is an item. Without it, each pack is an item.
        """
        distributor = cls.__new__(cls)
        distributor._set(path, config, splits, encoder, packer)
        return distributor

    def _set(
        self,
        path: str | Path,
        config: PackedLoaderOptions,
        splits: Sequence[LoadedSplit],
        encoder: Processor,
        packer: Packer | None,
    ) -> None:
        self.path = as_path(path) if is_metadataset(as_path(path)) else splits[0].path
        self.infinite = not config.one_pass
        self.complete_epochs = config.complete_epochs
        self.repeats = not config.one_pass or repeats_packs(splits)
        self._config, self._splits, self._encoder, self._packer = config, splits, encoder, packer
        self._opened = OpenedSplits(splits)

    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        """Yield Energon's samples, and errors of packs that cannot be read.

        A position is [a state of Energon's dataset, items since that state, number].
        """
        state, skipped, number = start or (None, 0, 0)
        failed: list[Failure] = []
        dataset = self._dataset(shard, self._failures_to(failed))
        if state is None:
            dataset.reset_state_deep()
        else:
            dataset.restore_state(from_plain(state))
        number, since = number - skipped, 0
        packs = self._packs(dataset, failed)
        while True:
            # Energon's random state applies only while its dataset runs, not in the roles that use the pack.
            with reading(dataset.worker_config, number):
                values = next(packs, None)
            if values is None:
                return
            for value, key in values:
                since, number = since + 1, number + 1
                if since > skipped:
                    yield Item(number - 1, value, key=key, position=[state, since, number])
            if since >= _CHECKPOINT:
                state, since, skipped = to_plain(dataset.save_state()), 0, 0

    def _packs(self, dataset: Any, failed: list[Failure]) -> Iterator[list[tuple[Any, Any]]]:
        """Yield the (value, key) of each pack, after the errors of the packs before it."""
        with raise_with_file_name(self.path, self._config.split, self._opened):
            try:
                for sample in dataset:
                    yield [*_taken(failed), (_value(sample), to_plain(sample.__restore_key__))]
            except Exception:
                if failed:  # the cause, before Energon gave up
                    yield _taken(failed)
                raise
        yield _taken(failed)

    def _failures_to(self, failed: list[Failure]) -> Callable[..., None]:
        """Return an error handler of Energon that adds the error of a pack to a list."""

        def handler(error: Exception, sample: Any, sources: Any = None) -> None:
            key, sources = key_and_sources(sample, sources)
            self._opened.check_sources(sources)  # raises if the tar was replaced, which is the cause
            failed.append(Failure(error, PackAt.of(key, sources)))

        return handler

    def read_many(self, shard: ShardSpec, keys: Any) -> list[Any]:
        """Read packs again by Energon's restore keys."""
        if not keys:
            return []
        dataset, packs = self._dataset(shard, raise_with_location), []
        for key in keys:
            with reading(dataset.worker_config, 0), raise_with_file_name(self.path, self._config.split, self._opened):
                packs.append(_value(dataset.restore_sample(from_plain(key))))
        return packs

    def count(self, shard: ShardSpec) -> int | None:
        """Return the number of packs of a shard; None if it has no end, or is packed on the fly."""
        if self.infinite or self._packer is not None:
            return None
        if (packs := packs_of_epoch(self._config, self._splits)) is None:
            return int(self._dataset(shard, raise_with_location).len_worker(0))
        return steps_of_ranks(packs, world_size=shard.num_shards)[shard.index]

    def steps_of_epoch(self, layout: LoaderLayout, epoch_end: EpochEnd) -> int | None:
        """Return the steps of an epoch; None if the packs are not counted, or are packed on the fly."""
        packs = packs_of_epoch(self._config, self._splits)
        if packs is None or layout.rows is None:
            return None
        return steps_of_epoch(
            packs,
            world_size=layout.world_size,
            micro_batch_size=layout.rows,
            num_workers=layout.num_workers,
            epoch_end=epoch_end,
            warns=not layout.rank,
        )

    def identity(self) -> dict[str, Any]:
        """Return the settings, and the fingerprint of the dataset."""
        names = ("split", "epochs", "complete_epochs", "shuffle", "shuffle_buffer_size", "packing_buffer_size")
        settings = {name: getattr(self._config, name) for name in names}
        packing = {} if self._packer is None else {"packing": self._packer.identity()}
        return super().identity() | settings | packing | {"dataset": self._fingerprint}

    @cached_property
    def _fingerprint(self) -> str:
        return dataset_fingerprint(self._dataset(ShardSpec(), raise_with_location).config())

    def _dataset(self, shard: ShardSpec, error_handler: Callable[..., None]) -> "SavableDataset[Any]":
        config = self._config
        return epoch_dataset(
            self.path,
            replace(config, seed=shard.seed, micro_batch_size=1),
            shard.epoch,
            task_encoder=_PackPassthrough(
                self._encoder,
                packer=self._packer,
                one_pass=config.one_pass,
                on_failure=error_handler,
                shuffle_buffer_size=config.shuffle_buffer_size if config.shuffle else 1,
                opened=self._opened,
                media_root=config.media_root,
            ),
            opened=self._opened,
            worker_config=_SingleWorker(
                rank=shard.index,
                world_size=shard.num_shards,
                num_workers=1,
                global_error_handler=error_handler,
            ),
        )


def _value(sample: Any) -> Any:
    """Return the item of a sample of Energon's dataset: a pack, or the packs of a row."""
    return Packs(sample.packs) if isinstance(sample, _Row) else sample


def _taken(failed: list[Failure]) -> list[tuple[Any, Any]]:
    """Return the failures as values without a key, and clear the list."""
    values = [(failure, None) for failure in failed]
    failed.clear()
    return values


@edataclass
class _Row(Sample):
    """The packs of a row that is packed on the fly."""

    packs: Sequence[PackSample]


class _PackPassthrough(PackedTaskEncoder):
    """Task encoder that leaves packs as they are: the dataflow encodes, packs and collates them afterwards."""

    @stateless
    def postencode_sample(self, sample: PackSample) -> PackSample:
        self.check_opened(sample)
        return sample

    @stateless
    def pack_selected_samples(self, samples: list[PackSample]) -> _Row:
        row: _Row = _Row.derive_from(samples[0], packs=samples)
        return row

    @stateless
    def batch(self, samples: list[PackSample]) -> PackSample:
        return samples[0]


@dataclass(slots=True, kw_only=True, eq=False)
class _SingleWorker(WorkerConfig):
    """Worker config of a shard, as a rank with one worker: Energon numbers workers rank by rank."""

    def rank_worker_id(self) -> int:
        return 0

    def assert_worker(self) -> None:
        return None
