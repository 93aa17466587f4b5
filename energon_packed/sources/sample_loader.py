"""SampleLoader: runs the sample_loader.py that an Energon dataset brings along, once the user trusts it.

Energon calls `sample_loader(raw)` with the decoded parts of a key whose names pass `part_filter`, and makes a sample
from the dictionary that it returns (megatron/energon/flavors/webdataset/default_generic_webdataset.py). Here an image
part is a PIL image that is not read before its pixels are used; returned as it is, it becomes a reference to the bytes
in the tar, and an image that the code has made becomes a PNG.
"""

import hashlib
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from energon_packed.errors import Reason, RecordError, SourceError
from energon_packed.records import MediaReference
from energon_packed.sources.base import changed_at
from energon_packed.sources.tar_records import IMAGE_PARTS, KeyMembers
from energon_packed.tarfiles import Member

_JSON = ("json", "jsn")
_TEXTS = ("txt", "text", "transcript")
_INTEGERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
_ARRAYS = ("npy", "npz")
_UNREAD = ("mp", "msg", "msgpack", "cbor", "ten", "tb", "gz", "zst")
_MOST_AXES = 2  # of a tensor that becomes lists; one with more is an image


@dataclass(frozen=True, slots=True)
class SampleLoader:
    """Code of a dataset; small and picklable, each process loads it itself.

    Attributes:
        folder: `.nv-meta`, which file names start from.
        function: `FILE.py:FUNCTION` of the sample loader.
        part_filter: `FILE.py:FUNCTION`, or the names of the parts.
    """

    folder: Path
    function: str
    part_filter: str | tuple[str, ...]

    @property
    def file(self) -> Path:
        """The file of the sample loader."""
        return _path(self.folder, self.function)

    def load(self) -> None:
        """Run the file now, so that an error in it is one of the dataset.

        Raises:
            SourceError: it cannot be run, or has no such function.
        """
        _function(self.folder, self.function, "sample_loader")
        if isinstance(self.part_filter, str):
            _function(self.folder, self.part_filter, "part_filter")

    def digest(self) -> str:
        """Hex digest of the code."""
        files = [self.function, *([self.part_filter] if isinstance(self.part_filter, str) else [])]
        texts = [_path(self.folder, name).read_bytes() for name in files]
        return hashlib.sha256(b"\0".join([repr((self.function, self.part_filter)).encode(), *texts])).hexdigest()

    def sample(self, group: KeyMembers) -> dict[str, Any]:
        """The fields of a sample and its `id`: texts, numbers, lists, and references to images.

        Raises:
            RecordError: the code fails, skips the sample, or returns something else.
        """
        used = KeyMembers(group.path, self._parts(group))
        used.check()
        parts = [(member, _decoded(group, member)) for member in used.members]
        raw: dict[str, Any] = {"__key__": group.key, "__restore_key__": (), "__sources__": ()}
        raw |= {member.part: value for member, value in parts}
        try:
            found = _function(self.folder, self.function, "sample_loader")(raw)
        except (Exception, SystemExit) as error:
            raise self._failed(error) from error
        if not isinstance(found, Mapping):
            raise RecordError(
                Reason.ADAPTER_FAILED, f"{self.function} returned {type(found).__name__}, not a dictionary"
            )
        held = {id(value): m for m, value in parts if isinstance(value, Image.Image) or _is_content(value)}
        fields = {str(k): _plain(group, value, held) for k, value in found.items() if not str(k).startswith("__")}
        return {"id": str(found.get("__key__", group.key)), **fields}

    def _parts(self, group: KeyMembers) -> list[Member]:
        """The members that pass the part filter."""
        if not isinstance(self.part_filter, str):
            return [member for member in group.members if member.part in self.part_filter]
        passes = _function(self.folder, self.part_filter, "part_filter")
        try:
            return [member for member in group.members if passes(member.part)]
        except (Exception, SystemExit) as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> RecordError:
        if isinstance(error, RecordError):
            return error
        if type(error).__name__ == "SkipSample":  # of megatron.energon
            return RecordError(Reason.DROPPED_BY_ADAPTER, f"{self.function} skipped it")
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return RecordError(Reason.ADAPTER_FAILED, f"{self.function} raised {text[:200]}")


def _decoded(group: KeyMembers, member: Member) -> Any:
    """A part as Energon's default decoder gives it, with images of PIL."""
    kind = member.extension
    if kind in IMAGE_PARTS:
        try:
            return Image.open(group.reference(member).open())
        except Exception as error:
            raise RecordError(Reason.CORRUPT_IMAGE, f"{member.name}: {error}") from error
    if kind in _JSON:
        return group.json(member)
    if kind in _TEXTS:
        return group.text(member)
    content = group.content(member)
    try:
        if kind in _INTEGERS:
            return int(content)
        if kind in _ARRAYS:
            return np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        raise RecordError(Reason.BAD_JSON, f"{member.name} cannot be decoded: {error}") from error
    if kind in _UNREAD:
        raise RecordError(Reason.UNSUPPORTED_MEDIA, f"{member.name} is {kind}, which is not decoded")
    return content


def _plain(group: KeyMembers, value: Any, held: Mapping[int, Member]) -> Any:
    """A value of the returned dictionary in plain types, with references to images."""
    if id(value) in held:
        return group.reference(held[id(value)])
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(group, item, held) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(group, item, held) for item in value]
    if isinstance(value, Image.Image):
        out = io.BytesIO()
        value.save(out, "PNG")
        return MediaReference(data=out.getvalue())
    if hasattr(value, "tolist") and getattr(value, "ndim", _MOST_AXES + 1) <= _MOST_AXES:
        return value.tolist()
    raise RecordError(
        Reason.ADAPTER_FAILED,
        f"the sample loader returned a {type(value).__name__}; return texts, numbers, lists, and images as they are",
    )


def _is_content(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) > 1  # shorter ones are shared objects


def _path(folder: Path, function: str) -> Path:
    return folder / (function.rpartition(":")[0] or function)


def _function(folder: Path, function: str, default: str) -> Callable[[Any], Any]:
    """A function of a file; the file is run once per process and version of it.

    Raises:
        SourceError: the file is missing or fails, or has no such function.
    """
    name = function if ":" in function else f"{function}:{default}"
    path = _path(folder, name)
    try:
        found = getattr(_module(path, changed_at(path)), name.rpartition(":")[2], None)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    if not callable(found):
        raise SourceError(f"{path} has no function {name.rpartition(':')[2]}")
    return found  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _module(path: Path, changed: int) -> ModuleType:
    """The file as a module of a name that nothing else has."""
    name = f"_energon_packed_sample_loader_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    code = path.read_bytes()
    sys.modules[name] = module
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise SourceError(f"{path} cannot be run: {text[:200]}") from error
    return module
