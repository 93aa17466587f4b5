"""EnergonDistributor: packs in the order of Energon's own loader, from a folder or a Metadataset."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.energon import SavableDataset, WorkerConfig, stateless

from energon_packed.encoding import StoredTokens
from energon_packed.flavors import PackSample
from energon_packed.loading.distributors.base import Distributor, Item
from energon_packed.loading.energon.config import LoaderConfig
from energon_packed.loading.energon.faults import raise_with_file_name
from energon_packed.loading.energon.source import EnergonSource
from energon_packed.loading.energon.states import dataset_fingerprint, from_plain, to_plain
from energon_packed.loading.energon.task_encoder import PackedTaskEncoder
from energon_packed.loading.failures import reraise_with_location
from energon_packed.loading.manifests import OpenedSplits, loaded_splits
from energon_packed.loading.ranks import ShardSpec

_CHECKPOINT = 16  # items between two states of Energon's dataset; a resumed one skips at most as many


class EnergonDistributor(Distributor):
    """Reads packs as `get_packed_loader` does: Energon shards, shuffles and blends; the value is a pack of its flavor.

    Args:
        path: folder that `energon-packed pack` wrote, or a Metadataset YAML.
        split: `train`, `val` or `test`.
        repeat: draw indefinitely, as blends by weight need; False ends after one exact pass, an epoch.
        shuffle: mix shards and packs; False reads in order.
        shuffle_buffer_size: packs in Energon's shuffle buffer.
        trust_sample_loader: run code of the dataset, as in `get_packed_loader`.

    Raises:
        ConfigError, FormatError: as `get_packed_loader`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        split: str = "train",
        repeat: bool = False,
        shuffle: bool = True,
        shuffle_buffer_size: int = 64,
        trust_sample_loader: bool = False,
    ) -> None:
        folders = loaded_splits(Path(path), split, trusted=trust_sample_loader)
        self._trusted = trust_sample_loader
        self._opened = OpenedSplits(folders)
        self.path = Path(path) if Path(path).is_file() else folders[0].path
        self._settings: dict[str, Any] = {
            "split": split,
            "epochs": None if repeat else 1,
            "shuffle": shuffle,
            "shuffle_buffer_size": shuffle_buffer_size,
        }
        self.infinite = repeat
        LoaderConfig(**self._settings)  # what it refuses is refused here

    def items(self, share: ShardSpec, start: Any) -> Iterator[Item]:
        """Energon's samples; a cursor is [a state of its dataset, items after it, number]."""
        state, skip, number = start or (None, 0, 0)
        dataset = self._dataset(share)
        if state is None:
            dataset.reset_state_deep()
        else:
            dataset.restore_state(from_plain(state))
        config = dataset.worker_config
        since = 0
        config.worker_activate(number - skip)
        try:
            for pack in self._named(dataset):
                config.worker_deactivate()
                since += 1
                number += since > skip
                if since > skip:
                    if since % _CHECKPOINT == 0:
                        state, since, skip = to_plain(dataset.save_state()), 0, 0
                    key = to_plain(pack.__restore_key__)
                    yield Item(number - 1, pack, key=key, resume_state=[state, since, number])
                config.worker_activate(number)
        finally:
            config.worker_deactivate()

    def _named(self, dataset: Any) -> Iterator[PackSample]:
        with raise_with_file_name(self.path, self._settings["split"], self._opened):
            yield from dataset

    def read_many(self, share: ShardSpec, keys: Any) -> list[Any]:
        """By Energon's restore keys."""
        if not keys:
            return []
        dataset, found = self._dataset(share), []
        for key in keys:
            dataset.worker_config.worker_activate(0)
            try:
                found.append(dataset.restore_sample(from_plain(key)))
            finally:
                dataset.worker_config.worker_deactivate()
        return found

    def count(self, share: ShardSpec) -> int | None:
        """Packs of a share; None with `repeat`."""
        if self._settings["epochs"] is None:
            return None
        return int(self._dataset(share).len_worker(0))

    def identity(self) -> dict[str, Any]:
        """Settings, and the fingerprint of the data."""
        found = dataset_fingerprint(self._dataset(ShardSpec()).config())
        return super().identity() | self._settings | {"dataset": found}

    def _dataset(self, share: ShardSpec) -> "SavableDataset[Any]":
        source = EnergonSource(
            path=self.path,
            config=LoaderConfig(**self._settings, seed=share.seed, trust_sample_loader=self._trusted),
            task_encoder=_Packs(one_pass=self._settings["epochs"] is not None, opened=self._opened, **self._buffer()),
            opened=self._opened,
            worker_config=_OneShare(
                rank=share.index, world_size=share.count, num_workers=1, global_error_handler=reraise_with_location
            ),
        )
        return source.dataset(share.epoch)

    def _buffer(self) -> dict[str, int]:
        return {"shuffle_buffer_size": self._settings["shuffle_buffer_size"] if self._settings["shuffle"] else 1}


class _Packs(PackedTaskEncoder):
    """Leaves packs as they are: the Processor, Packer and Collator of the dataflow come after it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(StoredTokens(), **options)

    @stateless
    def postencode_sample(self, sample: PackSample) -> PackSample:
        self.check_opened(sample)
        return sample

    @stateless
    def batch(self, samples: list[PackSample]) -> PackSample:
        return samples[0]


@dataclass(slots=True, kw_only=True, eq=False)
class _OneShare(WorkerConfig):
    """A share as a rank with one worker of its own: Energon numbers workers rank by rank, so the data is the same."""

    def rank_worker_id(self) -> int:
        return 0

    def assert_worker(self) -> None:
        return None
