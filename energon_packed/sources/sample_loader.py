"""SampleLoader: members of a tar key in; the sample that the trusted sample_loader.py of the dataset makes, out.

Energon calls `sample_loader(raw)` with the decoded parts of a key whose names pass `part_filter`, and makes a sample
of the dictionary that it returns (megatron/energon/flavors/webdataset/default_generic_webdataset.py). Here an image
part is a PIL image that is not decoded before its pixels are used. If the code returns it unchanged, it becomes a
reference to the bytes in the tar; an image that the code creates becomes a PNG. A video part is a VideoReference, and
an audio part an AudioReference, which the code can only return: Energon's AVDecoder is not created.
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

from energon_packed.errors import ConfigError, Reason, RecordError, SourceError
from energon_packed.libraries import calls
from energon_packed.records import AudioReference, MediaReference, VideoReference
from energon_packed.sources.base import changed_at
from energon_packed.sources.tar_records import IMAGE_PARTS, INTEGER_PARTS, JSON_PARTS, KeyMembers
from energon_packed.system import raise_resource_error
from energon_packed.tarfiles import Member

_TEXT_TYPES = ("txt", "text", "transcript")
_ARRAY_TYPES = ("npy", "npz")
_UNSUPPORTED_TYPES = ("mp", "msg", "msgpack", "cbor", "ten", "tb", "gz", "zst")
_MAX_LIST_DIMS = 2  # tensors with more dimensions are images and do not become lists


@dataclass(frozen=True, slots=True)
class SampleLoader:
    """Code of a dataset. Objects are small and picklable; each process loads the code itself.

    Attributes:
        folder: `.nv-meta`, the folder of the code.
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
        """Run the file now, so that an error in it is reported for the dataset and not for each record.

        Raises:
            SourceError: the file cannot run, or lacks the function.
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
        """Run the code for a key: the fields of the sample and its `id`, in plain types and image references.

        Raises:
            RecordError: the code fails, skips the sample, or returns another type.
        """
        used = KeyMembers(group.path, self._parts(group))
        used.check()
        parts = [(member, _decoded(group, member)) for member in used.members]
        # The keys that Energon passes beside the parts.
        raw: dict[str, Any] = {"__key__": group.key, "__restore_key__": (), "__sources__": ()}
        raw |= {member.part: value for member, value in parts}
        try:
            result = _function(self.folder, self.function, "sample_loader")(raw)
        # The code may call sys.exit, which must not end the run.
        except (Exception, SystemExit) as error:
            raise self._failed(error) from error
        if not isinstance(result, Mapping):
            raise RecordError(
                Reason.ADAPTER_FAILED, f"{self.function} returned {type(result).__name__}, not a dictionary"
            )
        # By identity: a part that the code returns unchanged needs no copy of its bytes.
        originals = {id(value): m for m, value in parts if isinstance(value, Image.Image) or _is_content(value)}
        fields = {
            str(k): _plain(group, value, originals) for k, value in result.items() if not str(k).startswith("__")
        }
        return {"id": str(result.get("__key__", group.key)), **fields}

    def _parts(self, group: KeyMembers) -> list[Member]:
        """Select the members that pass the part filter."""
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
        raise_resource_error(error, self.function)
        if type(error).__name__ == "SkipSample":  # of megatron.energon
            return RecordError(Reason.DROPPED_BY_ADAPTER, f"{self.function} skipped it")
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return RecordError(Reason.ADAPTER_FAILED, f"{self.function} raised {text[:200]}")


def _decoded(group: KeyMembers, member: Member) -> Any:
    """Decode a part like Energon's default decoder, with PIL images."""
    kind = member.extension
    if kind in IMAGE_PARTS:
        try:
            with calls("pillow", is_parser=True):
                return Image.open(group.reference(member).open())
        except ConfigError:
            raise
        except Exception as error:
            raise_resource_error(error, group.path)
            raise RecordError(Reason.CORRUPT_IMAGE, f"{member.name}: {error}") from error
    if group.kind_of(member) is not None:
        return group.media(member)
    if kind in JSON_PARTS:
        return group.json(member)
    if kind in _TEXT_TYPES:
        return group.text(member)
    content = group.content(member)
    try:
        if kind in INTEGER_PARTS:
            return int(content)
        if kind in _ARRAY_TYPES:
            return np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        raise RecordError(Reason.BAD_JSON, f"{member.name} cannot be decoded: {error}") from error
    # Decoding these needs optional packages, and the code does not expect bytes instead.
    if kind in _UNSUPPORTED_TYPES:
        raise RecordError(Reason.UNSUPPORTED_MEDIA, f"{member.name} is {kind}, which is not decoded")
    return content


def _plain(group: KeyMembers, value: Any, originals: Mapping[int, Member]) -> Any:
    """Convert a returned value to plain types and image references."""
    if id(value) in originals:
        return group.reference(originals[id(value)])
    if value is None or isinstance(value, str | bool | int | float | VideoReference | AudioReference):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(group, item, originals) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(group, item, originals) for item in value]
    if isinstance(value, Image.Image):
        out = io.BytesIO()
        value.save(out, "PNG")
        return MediaReference(data=out.getvalue())
    if hasattr(value, "tolist") and getattr(value, "ndim", _MAX_LIST_DIMS + 1) <= _MAX_LIST_DIMS:
        return value.tolist()
    raise RecordError(
        Reason.ADAPTER_FAILED,
        f"the sample loader returned a {type(value).__name__}; return texts, numbers, lists, and media as they are",
    )


def _is_content(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) > 1  # Python shares the objects of shorter bytes


def _path(folder: Path, function: str) -> Path:
    return folder / (function.rpartition(":")[0] or function)


def _function(folder: Path, function: str, default: str) -> Callable[[Any], Any]:
    """Load a function of a file; the file runs once per process and version of the file.

    Raises:
        SourceError: the file is missing, fails, or lacks the function.
    """
    name = function if ":" in function else f"{function}:{default}"
    path = _path(folder, name)
    try:
        function_object = getattr(_module(path, changed_at(path)), name.rpartition(":")[2], None)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    if not callable(function_object):
        raise SourceError(f"{path} has no function {name.rpartition(':')[2]}")
    return function_object  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _module(path: Path, changed: int) -> ModuleType:
    """Run the file as a module with a unique name."""
    name = f"_energon_packed_sample_loader_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    code = path.read_bytes()
    # Before it runs: dataclasses and pickle look their module up.
    sys.modules[name] = module
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise SourceError(f"{path} cannot be run: {text[:200]}") from error
    return module
