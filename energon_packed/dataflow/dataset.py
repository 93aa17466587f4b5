"""PackedDataset: finished shards as a map-style dataset, for samplers, epochs and stock trainers."""

from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from energon_packed.dataflow.encode import encode_pack
from energon_packed.dataflow.manifests import LoadedSplit, processor_for
from energon_packed.encoding import EncodedSample, Processor, SampleSource
from energon_packed.flavors import PackSample, load_pack
from energon_packed.formats import Codec, codec_for, codec_of
from energon_packed.shards.reader import ShardReader
from energon_packed.shards.split import shards_in_split


class PackedDataset(torch.utils.data.Dataset[list[EncodedSample]]):
    """Pack i of a packed dataset, without Energon's loader.

        dataset = PackedDataset("out", encoder)
        trainer = transformers.Trainer(model, args, train_dataset=dataset, data_collator=PaddingFreeCollator())

    Tars are memory-mapped by each process that reads; the dataset can be pickled, forked and indexed in any order.

    Args:
        path: folder that `energon-packed pack` wrote, `out` or `out/webdataset`.
        encoder: the Processor that the data was packed with. None for a PackedTokensSample dataset without images,
            which holds everything that is needed.
        split: `train`, `val` or `test`.
        check_encoder: refuse an encoder other than the one that the data was packed with.
        check_lengths: raise where a sample's length differs from the recorded one.

    Raises:
        ConfigError: an empty split, another encoder, or none where one is needed.
        FormatError: `path` is not a packed dataset, or is damaged.
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
        found = LoadedSplit.of_folder(path, split)
        self.encoder = processor_for([found], encoder, check=check_encoder)
        self.check_lengths = check_lengths
        self.source = SampleSource(str(found.path), {})
        self.reader = ShardReader(shards_in_split(found.path, split))
        self._recorded_codec = codec_for(found.manifest.sample_class) if found.manifest else None

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
        pack = self.sample(index % len(self))
        return encode_pack(pack, self.encoder, check_lengths=self.check_lengths, source=self.source)

    def sample(self, index: int) -> PackSample:
        """The pack as its flavor, not encoded."""
        return load_pack(self._codec, self.reader[index])

    @cached_property
    def _codec(self) -> Codec:
        return self._recorded_codec or codec_of(self.reader[0])

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each pack, int64 (P,); the first use reads what every pack recorded, and no image."""
        return np.array([self._length(index) for index in range(len(self))], dtype=np.int64)

    def _length(self, index: int) -> int:
        recorded = self._codec.lengths(self.reader.part(index, self._codec.lengths_part))
        if None not in recorded:
            return sum(length for length in recorded if length is not None)
        return sum(self.encoder.length(conversation) for conversation in self.sample(index).conversations())
