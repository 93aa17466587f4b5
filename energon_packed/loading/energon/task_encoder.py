"""Packs of any flavor to batches, inside Energon's dataset: each hook of Energon is a call of a role.

| name | content |
|---|---|
| PackedTaskEncoder | Energon's hooks |
| EncodedPack | the encoded samples of a pack, between two hooks |
| cook_pack | raw parts to a pack, for datasets that Energon loads as crude data |
| OnePass | a wrapper that ends an epoch once, even if a state is restored after the end |
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from megatron.energon import (
    Cooker,
    CrudeSample,
    Sample,
    SavableDataset,
    ShuffleBufferDataset,
    SkipSample,
    TaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    stateless,
)
from megatron.energon.cache import FileStore
from megatron.energon.wrappers.base import BaseWrapperDataset

from energon_packed.encoding import EncodedRow, EncodedSample, Processor
from energon_packed.encoding.vision.media import num_images
from energon_packed.errors import EnergonPackedError
from energon_packed.flavors import PackSample, load_pack
from energon_packed.formats import codec_for, codec_of
from energon_packed.formats.references import set_media_root
from energon_packed.loading.collation.batch import PackedBatch
from energon_packed.loading.collation.collator import Collator, PaddingFreeCollator
from energon_packed.loading.datasets.manifests import OpenedSplits
from energon_packed.loading.packers.base import Packer, Sizes, kind_of, unfit
from energon_packed.loading.process import encode_pack
from energon_packed.records import Conversation


@stateless
def cook_pack(sample: CrudeSample, **aux: FileStore) -> PackSample:
    """Return the pack of raw parts; the flavor comes from the subflavor `sample_class`, else from the parts.

    Args:
        sample: the parts.
        aux: auxiliary datasets of media.yaml, which are not used: the codecs read references, and compare digests.

    Raises:
        FormatError: the parts match no flavor.
        ConfigError: the subflavor names an unknown flavor.
    """
    flavor = (sample.get("__subflavors__") or {}).get("sample_class")
    codec = codec_for(flavor) if flavor else codec_of(sample)
    return load_pack(codec, sample, basic_sample_keys(sample))


@edataclass
class EncodedPack(Sample):
    """The encoded samples of one pack.

    Attributes:
        samples: in the order of the pack.
    """

    samples: Sequence[EncodedSample]


class PackedTaskEncoder(TaskEncoder):
    """Task encoder of Energon that encodes packs of any flavor, and joins a micro batch of packs into one row.

    Args:
        encoder: the Processor that the dataset was packed with.
        collator: joins samples into a row.
        packer: groups samples if Energon has a `packing_buffer_size`.
        one_pass: the data is read once, shuffled by `shuffle_buffer_size` here, and a state saved at any step of the
            pass restores its rest; otherwise Energon shuffles and repeats.
        shuffle_buffer_size: packs in the shuffle buffer of `one_pass`.
        on_failure: called with the error and the pack if one of its samples cannot be encoded; when it returns, that
            sample is skipped and the other samples of the pack stay. None raises.
        check_lengths: raise if the length of a sample differs from the recorded length, as the tokenizer, template or
            image settings then differ, too.
        opened: the tars that may be read; a tar that was replaced or changed raises. None does not check.
        media_root: folders of referenced images that moved, new folder by old folder.

    Raises:
        ConfigError: as `set_media_root`.

    Examples:
        >>> class Sorted(PackedTaskEncoder):
        ...     def batch(self, samples):
        ...         return super().batch(sorted(samples, key=len))
    """

    decoder = None
    cookers = (Cooker(cook_pack),)

    def __init__(
        self,
        encoder: Processor,
        *,
        collator: Collator | None = None,
        packer: Packer | None = None,
        one_pass: bool = False,
        shuffle_buffer_size: int = 1,
        on_failure: Callable[[Exception, Any], None] | None = None,
        check_lengths: bool = True,
        opened: OpenedSplits | None = None,
        media_root: Mapping[str, str] | None = None,
    ) -> None:
        self.encoder = encoder
        self.collator = collator or PaddingFreeCollator()
        self.packer = packer
        self.one_pass = one_pass
        self.shuffle_buffer_size = shuffle_buffer_size
        self.on_failure = on_failure
        self.check_lengths = check_lengths
        self.opened = opened
        self.media_root = media_root
        set_media_root(media_root or {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Energon calls `sample_loader` with nothing but the parts, so moved folders are a setting of the process: of a
        # worker that is not forked, too.
        self.__dict__.update(state)
        set_media_root(self.media_root or {})

    def build_encode_sample(
        self, dataset: "SavableDataset[PackSample]", *, worker_config: WorkerConfig
    ) -> "SavableDataset[PackSample]":
        """Wrap the dataset between blending and packing, for a single pass in shuffled order."""
        dataset = super().build_encode_sample(dataset, worker_config=worker_config)
        if not self.one_pass:
            return dataset
        # Before the shuffle buffer, which must see the end of the pass only once.
        dataset = OnePass(dataset, worker_config=worker_config)
        if self.shuffle_buffer_size <= 1:
            return dataset
        return ShuffleBufferDataset(dataset, size=self.shuffle_buffer_size, worker_config=worker_config)

    @stateless
    def postencode_sample(self, sample: PackSample) -> EncodedPack:
        """Encode every sample; with packing on the fly, after the samples of a row are chosen."""
        self.check_opened(sample)
        encoded = encode_pack(sample, self.encoder, check_lengths=self.check_lengths, on_failure=self.on_failure)
        if not encoded:
            raise SkipSample
        pack: EncodedPack = EncodedPack.derive_from(sample, samples=encoded)
        return pack

    def check_opened(self, sample: Sample) -> None:
        """Refuse a sample of a tar that changed since the loader was created.

        Raises:
            DataChangedError: the tar was replaced, changed or removed.
        """
        if self.opened is not None:
            self.opened.check_sources(sample.__sources__, is_recent=True)  # of every sample

    def select_samples_to_pack(self, samples: list[PackSample]) -> list[list[PackSample]]:
        """Group a buffer of samples by the packer; a sample that cannot be measured or fits no row fails alone."""
        assert self.packer is not None, "packing_buffer_size needs a packer"
        fitting, sizes, kinds = [], [], []
        for sample in samples:
            try:
                length = self._length(sample)
                images = sum(self._images(conversation) for conversation in sample.conversations())
                if (reject := self.packer.reject_reason(length, images, 0)) is not None:
                    raise unfit(reject)
            except EnergonPackedError as error:
                if self.on_failure is None:
                    raise
                self.on_failure(error, sample)
                continue
            fitting.append(sample)
            sizes.append((length, images, 0))
            conversations = sample.conversations()
            videos, audios = (any(getattr(c, name) for c in conversations) for name in ("videos", "audios"))
            kinds.append(kind_of(images, videos, audios))
        if not fitting:
            return []
        groups = self.packer.groups_of(Sizes(*np.array(sizes, dtype=np.int64).T), np.array(kinds))
        return [[fitting[i] for i in group] for group in groups]

    @stateless
    def pack_selected_samples(self, samples: list[EncodedPack]) -> EncodedPack:
        """Join the chosen samples into one pack."""
        inside = EncodedRow.joined([sample.samples for sample in samples])
        pack: EncodedPack = EncodedPack.derive_from(samples[0], samples=inside)
        return pack

    @stateless
    def batch(self, samples: list[EncodedPack]) -> PackedBatch:
        """Join all samples of a micro batch into one row."""
        batch = self.collator.collate(EncodedRow.joined([sample.samples for sample in samples]))
        batch.__key__ = [sample.__key__ for sample in samples]
        return batch

    def _images(self, conversation: Conversation) -> int:
        """Return the images of a stored conversation for the model."""
        frames = [video.frames for video in conversation.videos if video.frames is not None]
        return num_images(self.encoder.vision, conversation, frames)

    def _length(self, sample: PackSample) -> int:
        """Return the recorded tokens of a pack; samples without a recorded length are measured."""
        return sum(
            self.encoder.length(stored.conversation) if stored.length is None else stored.length
            for stored in sample.stored_samples()
        )


class OnePass(BaseWrapperDataset):
    """Dataset that stays exhausted after its end, even after its state is restored.

    Energon's buffers (shuffling, packing, batching) flush when their source ends, but a saved state does not record
    that end. Restored during the flush, the source would restart and change the rest of the epoch. With this wrapper
    between source and buffers, a state saved at any step of an epoch resumes with the same remaining samples.

    Args:
        dataset: source to read once.
        worker_config: as for every Energon dataset.
    """

    _savable_fields = ("_ended",)

    def __init__(self, dataset: "SavableDataset[Any]", *, worker_config: WorkerConfig) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Reset to the start; Energon calls this before the first iteration."""
        self._ended = False

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Return the number of samples of a worker."""
        return int(self.dataset.len_worker(worker_idx))

    def __iter__(self) -> Iterator[Any]:
        if self._ended:
            return
        yield from self.dataset
        self._ended = True

    def config(self) -> dict[str, Any]:
        """Return the settings that determine the samples, for fingerprints."""
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}
