"""The output folder of a run, and the restart state in it.

Input: `output_dir` and the fingerprints of a run. Output: the paths of all files that the stages write, and a
ConfigError if the folder has shards of another run, or its disk is too small.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from energon_packed.errors import ConfigError
from energon_packed.files import atomic_write, format_bytes, move, open_regular, remove_if_possible, remove_tree
from energon_packed.shards.media_yaml import remove_media_yaml
from energon_packed.storage import StorageError, is_remote

ENCODER = "encoder (tokenizer, template or image settings)"
"""Name of the digest of the encoder in the settings of a run."""


def work_folder(output_dir: Path, work_dir: Path | None = None) -> Path:
    """Return the local folder of the restart state: `.work` of a local output folder.

    Args:
        output_dir: the output folder.
        work_dir: folder of the state of all outputs in object stores; by default in the user's cache folder.

    Raises:
        ConfigError: `work_dir` is set for a local output folder, or is missing for a user without a home.
    """
    if not is_remote(output_dir):
        if work_dir is not None:
            raise ConfigError(
                f"`work_dir` must be omitted for a local `output_dir`, got {work_dir}. Its restart state is in "
                f"{output_dir / '.work'}"
            )
        return output_dir / ".work"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if work_dir is None and cache.startswith("~"):
        raise ConfigError(f"`work_dir` must be set for `output_dir` {output_dir}: the home folder is not known")
    digest = hashlib.sha256(str(output_dir).encode()).hexdigest()
    return (work_dir or Path(cache, "energon-packed")).absolute() / digest[:16]


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of the restart state; {} if it is missing or damaged."""
    try:
        with open_regular(file) as stream:
            value = orjson.loads(stream.read())
    except StorageError:
        raise
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


class Folder:
    """Output folder of a run: the paths in it.

    out/webdataset/              the dataset
    out/media/                   images that are in no file, of datasets with references
    out/lengths.parquet          one row per record
    out/rejects.jsonl            every rejected record
    out/media.yaml, media-index/ the dataset for Energon's own loaders, if it references media
    out/.work/run.json           which run the shards belong to
    WORK/measure-{digest}/       lengths of chunks of the input
    WORK/write-{digest}/         index rows of finished shards, and unfinished shards of an object store
    WORK/media/                  index rows of finished tars of out/media, and the index of its images

    WORK is `out/.work`, or a local folder if `out` is in an object store: `work_folder`.
    """

    def __init__(self, root: Path, work: Path | None = None) -> None:
        self.root = root
        self.work = work or work_folder(root)
        self.shards = root / "webdataset"
        self.media = root / "media"
        self.media_work = self.work / "media"
        self._reports = root
        self._key = ""
        self._settings: Mapping[str, str] = {}
        self._encoder_differences: Callable[[], list[str]] = list
        self._run = root / ".work" / "run.json"  # the run that wrote the shards

    def set_run(
        self, key: str, settings: Mapping[str, str], encoder_differences: Callable[[], list[str]] = list
    ) -> None:
        """Set the run that writes into the folder; shards of any other run belong to another run.

        Args:
            key: fingerprint of its shards.
            settings: JSON of its settings, by name.
            encoder_differences: names the settings in which its encoder differs from the encoder of the shards; empty
                if they are unknown.
        """
        self._key, self._settings, self._encoder_differences = key, settings, encoder_differences

    @property
    def lengths(self) -> Path:
        """Report with a table row per record, in `.work` while the output folder contains a dataset of another run."""
        return self._reports / "lengths.parquet"

    @property
    def rejects(self) -> Path:
        """Report of the rejected records, beside `lengths`."""
        return self._reports / "rejects.jsonl"

    def measure_folder(self, fingerprint: str) -> Path:
        """Folder of measured chunks."""
        return self.work / f"measure-{fingerprint[:16]}"

    def write_folder(self, fingerprint: str) -> Path:
        """Folder of index rows of finished shards."""
        return self.work / f"write-{fingerprint[:16]}"

    def check_inputs(self, files: Iterable[Path]) -> None:
        """Refuse an input that the run would replace, such as a dataset that is packed again into its own folder.

        Raises:
            ConfigError: an input is in the output folder.
        """
        own = [
            Path(os.path.realpath(path))
            for path in (self.root / ".work", self.shards, self.work, self.lengths, self.rejects)
        ]
        for file in files:
            real = Path(os.path.realpath(file))
            if any(path == real or path in real.parents for path in own):
                raise ConfigError(f"{file} is an input, and the run would replace it; use another `output_dir`")

    def check_other_run(self, *, overwrite: bool) -> None:
        """Refuse an output folder with shards of another run.

        Raises:
            ConfigError: there are such shards and `overwrite` is off.
        """
        if not overwrite and not self._is_owner() and any(self.shards.glob("*.tar")):
            raise ConfigError(
                f"{self.shards} contains shards of another run ({self._difference()}). Set `overwrite` to replace "
                "them, or use another `output_dir`"
            )

    def check_space(self, needed: int, unfinished: int, *, replaces: bool = True) -> None:
        """Refuse a disk that is too small for the tars.

        Args:
            needed: bytes that are still to be written.
            unfinished: maximum bytes of shards that are written at the same time; object stores have the others.
            replaces: the shards of another run are deleted before.

        Raises:
            ConfigError: the disk is too small; the message has both sizes.
        """
        free = self.free_bytes(replaces=replaces)
        what, place, remedy = "the tars need", self.root, "Free some space, or use another `output_dir`."
        if is_remote(self.root):
            needed, what, place = min(needed, unfinished), "unfinished shards need", self.work
            remedy = "Use another `work_dir`, fewer `workers` or a smaller `max_shard_bytes`."
        if needed > free:
            raise ConfigError(
                f"{what} about {format_bytes(needed)}, but the file system of {place} has {format_bytes(free)} free. "
                f"{remedy}"
            )

    def free_bytes(self, *, replaces: bool = True) -> int:
        """Free bytes for the run, including the shards of another run if it `replaces` them."""
        root = self.work if is_remote(self.root) else self.root
        folder = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
        free = shutil.disk_usage(folder).free
        if not replaces or is_remote(self.root) or self._is_owner():
            return free
        return free + sum(tar.stat().st_size for tar in self.shards.glob("*.tar"))

    def open_for_run(self, *, overwrite: bool) -> None:
        """Create the folder of the restart state and choose the folder of the reports.

        Raises:
            ConfigError: the folder has shards of another run, as in `check_other_run`.
        """
        self.check_other_run(overwrite=overwrite)
        self.work.mkdir(parents=True, exist_ok=True)
        self.remove_leftovers()
        # The reports of another run stay beside its shards until this run replaces both: its limits may still stop it.
        self._reports = self.work if not self._is_owner() and any(self.shards.glob("*.tar")) else self.root

    def delete_other_run(self) -> None:
        """Delete the shards of another run, move the reports into place, and record this run as the run of the shards.

        Call it before the first shard is written.
        """
        # run.json is written last: a run that is killed before that point starts here again.
        if not self._is_owner():
            self.remove_index()
            self.remove_strays(set())
        for file in (self.lengths, self.rejects):
            if file != self.root / file.name:
                move(file, self.root / file.name)
        self._reports = self.root
        self.shards.mkdir(parents=True, exist_ok=True)
        atomic_write(self._run, orjson.dumps({"key": self._key, "settings": self._settings}))

    def remove_index(self) -> None:
        """Remove `.nv-meta` and media.yaml before a shard is written: no reader may open an incomplete dataset."""
        remove_tree(self.shards / ".nv-meta")
        remove_media_yaml(self.root)

    def remove_strays(self, names: set[str]) -> None:
        """Remove shards that are not in the plan, and temporary files of lost workers."""
        self.remove_leftovers()
        for tar in self.shards.glob("*.tar"):
            if tar.name not in names:
                tar.unlink()
                tar.with_suffix(".tar.idx").unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Remove temporary files of a killed run or killed workers; files with other names are not touched."""
        patterns = [(self.work, "**/.*.tmp")]
        if not is_remote(self.root):  # its temporary files are local
            patterns += [
                (self.shards / ".nv-meta", ".*.tmp"),
                (self.shards, ".*.tar.*tmp"),
                (self.media, ".media-*.tmp"),
                (self.media / ".nv-meta", ".*.tmp"),
                (self.root, ".lengths.parquet.*.tmp"),
                (self.root, ".rejects.jsonl.*.tmp"),
                (self.root, ".media.yaml.*.tmp"),
                (self.root / "media-index" / ".nv-meta", ".*.tmp"),
            ]
        for folder, pattern in patterns:
            with contextlib.suppress(FileNotFoundError):  # another process removes the folder: its error is reported
                for leftover in list(folder.glob(pattern)):
                    remove_if_possible(leftover)

    def forget(self, *fingerprints: str) -> None:
        """Delete the restart state of these fingerprints and of `out/media`."""
        for fingerprint in fingerprints:
            for folder in (self.measure_folder(fingerprint), self.write_folder(fingerprint)):
                shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self.media_work, ignore_errors=True)

    def _is_owner(self) -> bool:
        """Whether the shards were written by this run."""
        return bool(read_json_object(self._run).get("key") == self._key)

    def _difference(self) -> str:
        """Name the settings in which the run of the shards differs."""
        saved = read_json_object(self._run).get("settings")
        if not isinstance(saved, dict):
            return "input, options or image root differ, or its .work is gone"
        shown: list[str] = []
        for name, value in self._settings.items():
            if saved.get(name) == value:
                continue
            if name == ENCODER and (named := self._encoder_differences()):
                shown += named
            else:  # options have values to read; the others are digests
                shown.append(f"{name} was {saved.get(name)}, now {value}" if name[0] == "`" else f"the {name} differs")
        return ", ".join(shown) or "another release, or an encoder without a fingerprint"
