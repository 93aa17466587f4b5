"""PackedDataset: finished shards as a map-style dataset, for samplers, epochs and stock trainers."""

from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from energon_packed.dataflow.cookers import FLAVORS
from energon_packed.dataflow.encode import encode_pack
from energon_packed.dataflow.loader import check_manifest
from energon_packed.encoding import EncodedSample, Processor
from energon_packed.errors import ConfigError, FormatError
from energon_packed.flavors import PackedTokensSample, PackSample
from energon_packed.shards import PackingManifest
from energon_packed.shards.layouts import sample_class_of
from energon_packed.shards.reader import ShardReader
from energon_packed.shards.split import dataset_folder, shards_in_split


class PackedDataset(torch.utils.data.Dataset[list[EncodedSample]]):
    """Pack i of a packed data set, without Energon's loader.

        dataset = PackedDataset("out", encoder)
        trainer = transformers.Trainer(model, args, train_dataset=dataset, data_collator=PaddingFreeCollator())

    Tars are memory-mapped by each process that reads; the dataset can be pickled, forked and indexed in any order.

    Args:
        path: folder that `energon-packed pack` wrote, `out` or `out/webdataset`.
        encoder: the Processor that the data was packed with. None for a PackedTokensSample data set without images,
            which holds all that is needed.
        split: `train`, `val` or `test`.
        check_encoder: refuse an encoder other than the one that the data was packed with.
        check_lengths: raise where a sample's length differs from the recorded one.

    Raises:
        ConfigError: an empty split, another encoder, or none where one is needed.
        FormatError: `path` is no packed data set, or is damaged.
    """

    def __init__(
        self,
        path: str | Path,
        encoder: Processor | None = None,
        *,
        split: str = "train",
        check_encoder: bool = True,
        check_lengths: bool = True,
    ) -> None:
        folder = dataset_folder(path)
        self.encoder = encoder
        self.check_lengths = check_lengths
        self.reader = ShardReader(shards_in_split(folder, split))
        self._sample_class: str | None = None
        images = 0
        try:
            manifest = PackingManifest.load(folder)
        except FormatError:  # packed by other tools
            manifest = None
        if manifest is not None:
            check_manifest(manifest, split, encoder if check_encoder else None, path)
            self._sample_class, images = manifest.sample_class, manifest.images
        if encoder is None and (self._sample_class != PackedTokensSample.__name__ or images):
            raise ConfigError(
                f"{path} holds {self._sample_class or 'packs'}{' with images' if images else ''}, which an encoder "
                "must turn into tokens and pixels: PackedDataset(path, ChatEncoder.from_pretrained(...))"
            )

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> list[EncodedSample]:
        """The encoded sub-samples of one pack; negative numbers count from the end.

        Raises:
            IndexError: there is no such pack.
            FormatError: the shard is damaged, or a length differs from the recorded one.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack {index} is not among the {len(self)} packs")
        sample = self.sample(index % len(self))
        if self.encoder is None:
            assert isinstance(sample, PackedTokensSample)
            return _encoded_as_stored(sample)
        return encode_pack(sample, self.encoder, check_lengths=self.check_lengths)

    def sample(self, index: int) -> PackSample:
        """The pack as its flavor, not encoded."""
        raw = self.reader[index]
        flavor, load = FLAVORS[self._sample_class or sample_class_of(raw)]
        return flavor(__key__=raw["__key__"], __restore_key__=(), __subflavors__={}, **load(raw))

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each pack, int64 (P,); the first use reads what every pack recorded."""
        return np.array([self._length(index) for index in range(len(self))], dtype=np.int64)

    def _length(self, index: int) -> int:
        sample = self.sample(index)
        if isinstance(sample, PackedTokensSample):
            return len(sample.input_ids)
        recorded = sample.expected_lengths()
        if not any(length is None for length in recorded):
            return sum(length for length in recorded if length is not None)
        assert self.encoder is not None
        return sum(self.encoder.length(conversation) for conversation in sample.conversations())


def _encoded_as_stored(pack: PackedTokensSample) -> list[EncodedSample]:
    """The sub-samples of a pack of text tokens."""
    input_ids, labels = pack.input_ids.astype(np.int64), pack.labels.astype(np.int64)
    bounds = pairwise(pack.cu_seqlens.tolist())
    return [
        EncodedSample(id=ident, input_ids=input_ids[start:end], labels=labels[start:end])
        for ident, (start, end) in zip(pack.ids, bounds, strict=True)
    ]
