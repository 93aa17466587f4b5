"""A packed folder or a Metadataset to packs, in the order of Energon's own loader."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.energon import SavableDataset, WorkerConfig, stateless

from energon_packed.encoding import StoredTokens
from energon_packed.flavors import PackSample
from energon_packed.loading.distributors.base import Distributor, Item
from energon_packed.loading.energon.config import LoaderConfig
from energon_packed.loading.energon.faults import raise_with_file_name
from energon_packed.loading.energon.source import EnergonSource, reading
from energon_packed.loading.energon.states import dataset_fingerprint, from_plain, to_plain
from energon_packed.loading.energon.task_encoder import PackedTaskEncoder
from energon_packed.loading.failures import reraise_with_location
from energon_packed.loading.manifests import OpenedSplits, loaded_splits, repeats_packs
from energon_packed.loading.ranks import ShardSpec
from energon_packed.storage import as_path

# Items between two states of Energon's dataset. A state is large (the shuffle buffer), and a resumed dataset reads and
# skips at most this many packs.
_CHECKPOINT = 64


class EnergonDistributor(Distributor):
    """Read packs as `get_packed_loader` does: Energon shards, shuffles and blends; a value is a pack of its flavor.

    Args:
        path: folder that `energon-packed pack` wrote, or a Metadataset YAML.
        split: `train`, `val` or `test`.
        repeat: draw indefinitely, which blends by weight require; False ends after one exact pass, an epoch.
        shuffle: mix shards and packs; False reads in order.
        shuffle_buffer_size: packs in Energon's shuffle buffer.
        trust_sample_loader, media_root: as in `get_packed_loader`.

    Raises:
        ConfigError, FormatError: as `get_packed_loader`.

    Examples:
        >>> distributor = EnergonDistributor("demo-out", shuffle=False)
        >>> pack_0 = next(distributor.items(ShardSpec(), 0)).value
        >>> type(pack_0).__name__, pack_0.__key__
        ('PackedCaptioningSample', 'demo-out_00000000')
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
        media_root: Mapping[str, str] | None = None,
    ) -> None:
        folders = loaded_splits(path, split, trusted=trust_sample_loader)
        self._opened = OpenedSplits(folders)
        self.path = as_path(path) if as_path(path).is_file() else folders[0].path
        self.infinite = repeat
        self.repeats = repeat or repeats_packs(folders)
        self._config = LoaderConfig(
            split=split,
            epochs=None if repeat else 1,
            shuffle=shuffle,
            shuffle_buffer_size=shuffle_buffer_size,
            trust_sample_loader=trust_sample_loader,
            media_root=media_root,
        )

    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        """Yield Energon's samples; a resume state is [a state of its dataset, items after it, number]."""
        state, skip, number = start or (None, 0, 0)
        dataset = self._dataset(shard)
        if state is None:
            dataset.reset_state_deep()
        else:
            dataset.restore_state(from_plain(state))
        config = dataset.worker_config
        since, index, packs = 0, number - skip, self._packs(dataset)
        while True:
            # Energon's random state applies only while its dataset runs, not in the roles that use the pack.
            with reading(config, index):
                pack = next(packs, None)
            if pack is None:
                return
            since += 1
            number += since > skip
            index = number
            if since > skip:
                if since % _CHECKPOINT == 0:
                    state, since, skip = to_plain(dataset.save_state()), 0, 0
                key = to_plain(pack.__restore_key__)
                yield Item(number - 1, pack, key=key, resume_state=[state, since, number])

    def _packs(self, dataset: Any) -> Iterator[PackSample]:
        with raise_with_file_name(self.path, self._config.split, self._opened):
            yield from dataset

    def read_many(self, shard: ShardSpec, keys: Any) -> list[Any]:
        """Read packs again by Energon's restore keys."""
        if not keys:
            return []
        dataset, packs = self._dataset(shard), []
        for key in keys:
            with reading(dataset.worker_config, 0), raise_with_file_name(self.path, self._config.split, self._opened):
                packs.append(dataset.restore_sample(from_plain(key)))
        return packs

    def count(self, shard: ShardSpec) -> int | None:
        """Return the number of packs of a shard; None with `repeat`."""
        return None if self.infinite else int(self._dataset(shard).len_worker(0))

    def identity(self) -> dict[str, Any]:
        """Return the settings, and the fingerprint of the dataset."""
        settings = {
            name: getattr(self._config, name) for name in ("split", "epochs", "shuffle", "shuffle_buffer_size")
        }
        fingerprint = dataset_fingerprint(self._dataset(ShardSpec()).config())
        return super().identity() | settings | {"dataset": fingerprint}

    def _dataset(self, shard: ShardSpec) -> "SavableDataset[Any]":
        source = EnergonSource(
            path=self.path,
            config=replace(self._config, seed=shard.seed),
            task_encoder=_PackPassthrough(
                StoredTokens(),
                one_pass=not self.infinite,
                shuffle_buffer_size=self._config.shuffle_buffer_size if self._config.shuffle else 1,
                opened=self._opened,
                media_root=self._config.media_root,
            ),
            opened=self._opened,
            worker_config=_SingleWorker(
                rank=shard.index,
                world_size=shard.num_shards,
                num_workers=1,
                global_error_handler=reraise_with_location,
            ),
        )
        return source.dataset(shard.epoch)


class _PackPassthrough(PackedTaskEncoder):
    """Task encoder that leaves packs as they are: the dataflow encodes, packs and collates them afterwards."""

    @stateless
    def postencode_sample(self, sample: PackSample) -> PackSample:
        self.check_opened(sample)
        return sample

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
