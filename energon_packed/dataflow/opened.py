"""What a loader opened, so that it notices when a dataset is packed again, changed or removed under it."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from energon_packed.dataflow.manifests import LoadedSplit
from energon_packed.metadatasets import read_split
from energon_packed.shards.opened import OpenedFiles


def digests_of(one: LoadedSplit) -> Mapping[Path, str]:
    """SHA-256 of each tar that packing.json lists."""
    shards = one.manifest.shards if one.manifest is not None else ()
    return {one.path / shard.name: shard.sha256 for shard in shards}


class OpenedSplits(OpenedFiles):
    """The tars that Energon reads, by the sources that it names.

    Args:
        splits: of the loader.

    Attributes:
        folders: the dataset folders, with `.nv-meta`.

    Raises:
        FormatError: a tar is missing.
    """

    def __init__(self, splits: Sequence[LoadedSplit]) -> None:
        self.folders = [one.path for one in splits]
        digests: dict[Path, str] = {}
        tars: dict[Path, None] = {}
        for one in splits:
            folder = one.path.resolve()
            digests |= {folder / tar.name: digest for tar, digest in digests_of(one).items()}
            tars |= dict.fromkeys(folder / name for name in read_split(one.path).shards(one.split))
        super().__init__(tars, digests)
        self._found: dict[tuple[Any, str], Path | None] = {}

    def check_sources(self, sources: Iterable[Any] | None) -> None:
        """Refuse a sample whose tar is not the one of before.

        Args:
            sources: `__sources__` of a sample of Energon, or none.

        Raises:
            DataChangedError: a tar was replaced, changed or removed.
        """
        for source in sources or ():
            if (tar := self._tar(source.dataset_path, getattr(source, "shard_name", ""))) is not None:
                self.check(tar)

    def _tar(self, folder: Any, name: str) -> Path | None:
        """The tar of a source, a name in an EPath; None for what is none of ours, such as an auxiliary file."""
        key = (folder, name)
        if key not in self._found:
            tar = Path(str(folder)).resolve() / str(name)
            self._found[key] = tar if tar in self else None
        return self._found[key]
