"""PackedTaskEncoder: Energon's hooks, each a call of one role.

OnePass: a source that stays exhausted after its end, even after its state is restored.

Energon's buffers (shuffling, packing, batching) flush when their source ends, but a saved state does not record that
end. Restored during the flush, the source would restart and change the rest of the epoch. With this wrapper between
source and buffers, a state saved at any point of an epoch resumes with the same remaining samples.

`cook_pack`: a pack from raw parts, for datasets that Energon loads crude.

The flavor comes from the subflavor `sample_class` where there is one, else from the parts of the sample.
"""

from collections.abc import Callable, Iterator, Sequence
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
from megatron.energon.wrappers.base import BaseWrapperDataset

from energon_packed.encoding import EncodedSample, Processor
from energon_packed.errors import EnergonPackedError
from energon_packed.flavors import PackSample, load_pack
from energon_packed.formats import codec_for, codec_of
from energon_packed.loading.batch import PackedBatch
from energon_packed.loading.collator import Collator, PaddingFreeCollator
from energon_packed.loading.manifests import OpenedSplits
from energon_packed.loading.packers import Packer, Sizes
from energon_packed.loading.packers.base import unfit
from energon_packed.loading.process import encode_pack


class OnePass(BaseWrapperDataset):
    """Passes samples through; yields nothing more after `dataset` ends.

    Args:
        dataset: source to read once.
        worker_config: as for every Energon dataset.
    """

    _savable_fields = ("_ended",)

    def __init__(self, dataset: "SavableDataset[Any]", *, worker_config: WorkerConfig) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Reset to the beginning; Energon calls this before the first iteration."""
        self._ended = False

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Number of samples of one worker."""
        return int(self.dataset.len_worker(worker_idx))

    def __iter__(self) -> Iterator[Any]:
        if self._ended:
            return
        yield from self.dataset
        self._ended = True

    def config(self) -> dict[str, Any]:
        """Settings that determine the samples, for fingerprints."""
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}


@stateless
def cook_pack(sample: CrudeSample) -> PackSample:
    """A pack of its flavor from raw parts.

    Raises:
        FormatError: the parts match no flavor.
        ConfigError: the subflavor names an unknown one.
    """
    named = (sample.get("__subflavors__") or {}).get("sample_class")
    codec = codec_for(named) if named else codec_of(sample)
    return load_pack(codec, sample, basic_sample_keys(sample))


@edataclass
class EncodedPack(Sample):
    """The encoded sub-samples of one pack.

    Attributes:
        samples: in the order of the pack.
    """

    samples: Sequence[EncodedSample]


class PackedTaskEncoder(TaskEncoder):
    """Encodes packs of any flavor and joins a micro batch of them into one row.

    Args:
        encoder: makes tokens; the one that the data was packed with.
        collator: lays samples in a row.
        packer: groups samples when Energon is given a `packing_buffer_size`.
        one_pass: the data is read once, shuffled by `shuffle_buffer_size` here, and a state saved anywhere in that
            pass restores to the rest of it; otherwise Energon shuffles and repeats.
        shuffle_buffer_size: packs in the shuffle buffer of `one_pass`.
        on_failure: called with the error and the pack when one of its samples cannot be encoded; when it returns,
            that sample is skipped and the others of the pack stay. None raises.
        opened: the tars that may be read; one that was replaced or changed since raises. None does not look.
        check_lengths: a sample whose length differs from the recorded one raises, since its tokenizer, template or
            image settings are not those that it was packed with.
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
    ) -> None:
        self.encoder = encoder
        self.collator = collator or PaddingFreeCollator()
        self.packer = packer
        self.one_pass = one_pass
        self.shuffle_buffer_size = shuffle_buffer_size
        self.on_failure = on_failure
        self.check_lengths = check_lengths
        self.opened = opened

    def build_encode_sample(
        self, dataset: "SavableDataset[PackSample]", *, worker_config: WorkerConfig
    ) -> "SavableDataset[PackSample]":
        """Energon's hook between blending and packing: where one pass begins and is shuffled."""
        dataset = super().build_encode_sample(dataset, worker_config=worker_config)
        if not self.one_pass:
            return dataset
        dataset = OnePass(dataset, worker_config=worker_config)
        if self.shuffle_buffer_size <= 1:
            return dataset
        return ShuffleBufferDataset(dataset, size=self.shuffle_buffer_size, worker_config=worker_config)

    @stateless
    def postencode_sample(self, sample: PackSample) -> EncodedPack:
        """Encode every sub-sample; with packing on the fly, after the samples of a row are chosen."""
        self.check_opened(sample)
        encoded = encode_pack(sample, self.encoder, check_lengths=self.check_lengths, on_failure=self.on_failure)
        if not encoded:
            raise SkipSample
        pack: EncodedPack = EncodedPack.derive_from(sample, samples=encoded)
        return pack

    def check_opened(self, sample: Sample) -> None:
        """Refuse a sample of a tar that is not the one that was opened.

        Raises:
            DataChangedError: it was replaced, changed or removed.
        """
        if self.opened is not None:
            self.opened.check_sources(sample.__sources__)

    def select_samples_to_pack(self, samples: list[PackSample]) -> list[list[PackSample]]:
        """Group a buffer of samples by the packer; one that cannot be measured or fits no row fails alone."""
        assert self.packer is not None, "packing_buffer_size needs a packer"
        fitting, sizes = [], []
        for sample in samples:
            try:
                length = self._length(sample)
                images = sum(len(one.images) for one in sample.conversations())
                if (excess := self.packer.reject_reason(length, images, 0)) is not None:
                    raise unfit(excess)
            except EnergonPackedError as error:
                if self.on_failure is None:
                    raise
                self.on_failure(error, sample)
                continue
            fitting.append(sample)
            sizes.append((length, images, 0))
        groups = self.packer.groups(Sizes(*np.array(sizes, dtype=np.int64).T)) if fitting else []
        return [[fitting[i] for i in group] for group in groups]

    @stateless
    def pack_selected_samples(self, samples: list[EncodedPack]) -> EncodedPack:
        """One pack of the samples that were chosen."""
        inside = [encoded for sample in samples for encoded in sample.samples]
        pack: EncodedPack = EncodedPack.derive_from(samples[0], samples=inside)
        return pack

    @stateless
    def batch(self, samples: list[EncodedPack]) -> PackedBatch:
        """One row of all sub-samples of a micro batch."""
        is_one = len(samples) == 1  # a stored row is collated by its columns
        inside = samples[0].samples if is_one else [encoded for sample in samples for encoded in sample.samples]
        batch = self.collator.collate(inside)
        batch.__key__ = [sample.__key__ for sample in samples]
        return batch

    def _length(self, sample: PackSample) -> int:
        """Recorded tokens, or measured where none are recorded."""
        return sum(
            self.encoder.length(one.conversation) if one.length is None else one.length
            for one in sample.stored_samples()
        )
