"""Media by reference: the part `media.json` of a pack in, the media that it locates out.

{key}.media.json   {PART: LOCATOR or null}: the media parts of the pack, in order; null if the tar has the part

A LOCATOR has

    file, offset, size   `size` bytes of `file` from byte `offset`. A relative path starts from the dataset folder
    digest               the first 128 bits of the BLAKE3 hash of these bytes, in hex, or
    changed              [bytes, time of the last change in ns] of `file`, of packs that were written without digests
    source, member       the auxiliary dataset of media.yaml with the bytes, and the name of the entry in it:
                         `files` and a path from the root folder; `tars` and TAR/OFFSET.EXTENSION; or `media`

Every read compares size and digest (or `changed`), so a file that changed raises DataChangedError. No codec knows
references: they are resolved before `Codec.read` gets the parts.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from energon_packed.errors import ConfigError, FormatError, ResourceError
from energon_packed.files import of_type
from energon_packed.options import short
from energon_packed.records.media.kinds import AUDIO, IMAGE, VIDEO
from energon_packed.records.media.reference import ImageChanged, Locator, MediaReference, PackedImage, read_packed
from energon_packed.storage import absolute_name, as_path, is_remote, read_ranges

MEDIA_PART = "media.json"
FOLDER, MEDIA_ROOT = "__folder__", "__media_root__"
"""Keys of raw parts: the dataset folder, and the moved folders as (old, new) pairs. Energon's raw parts have neither:
the folder is in their `__sources__`, and `set_media_root` sets the moved folders."""
PATHS = "__paths__"
"""Key of complete parts: the paths of referenced media by part, for messages."""
MediaRoot = tuple[tuple[str, str], ...]
FILES, TARS, STORED = "files", "tars", "media"
"""Auxiliary datasets of locators: files, by their path from the root folder; members of tars; and images that are in
no file of the input, in the folder `media` beside the dataset."""
MOST_BYTES = 1 << 30
"""Bytes of the largest media file of a pack, which loaders read into memory; larger files are rejected while
packing."""
_KINDS = {"vid": VIDEO, "aud": AUDIO}  # by the start of a part; all others are images
_moved: dict[str, str] = {}
_DIGITS = 32  # hex digits of a digest
_REQUIRED, _FIELDS = {"file", "offset", "size"}, set(Locator._fields)  # of a locator


def moved_folders(media_root: Mapping[str, str] | None) -> MediaRoot:
    """Return the folders that moved as pairs of absolute paths (old, new), inner folders first.

    Args:
        media_root: new folder by old folder; None for no moved folder.

    Raises:
        ConfigError: a new folder does not exist, an old folder has two new folders, or it is not such a mapping.
    """
    if not isinstance(media_root or {}, Mapping):
        raise ConfigError(f"`media_root` must map old folders to new folders, got {short(media_root)}.")
    moved: dict[str, str] = {}
    for old, new in (media_root or {}).items():
        if not isinstance(old, str | Path) or not isinstance(new, str | Path) or "\0" in f"{old}{new}":
            raise ConfigError(f"`media_root` must map old folders to new folders, got {short({old: new})}.")
        _add_moved(moved, absolute_name(old), absolute_name(new))
        if not as_path(new).exists():
            raise ConfigError(f"`media_root` must name folders that exist, got {new} for {old}.")
    return tuple(sorted(moved.items(), key=lambda pair: (-len(pair[0]), pair)))


def parse_media_root(values: Mapping[str, str] | str | Sequence[str]) -> Mapping[str, str]:
    """Return new folder by old folder, from such a mapping, `OLD=NEW`, or several.

    Raises:
        ConfigError: a value is not OLD=NEW, or an old folder has two new folders.
    """
    if isinstance(values, Mapping):
        return values
    moved: dict[str, str] = {}
    for value in values if isinstance(values, list | tuple) else [values]:
        old, _, new = value.partition("=") if isinstance(value, str) else ("", "", "")
        if not old or not new:
            raise ConfigError(f"`media_root` must be OLD=NEW, got {value!r}.")
        _add_moved(moved, absolute_name(old), absolute_name(new))
    return moved


def set_media_root(media_root: Mapping[str, str]) -> None:
    """Declare folders that moved, for datasets that Energon's own loaders read in this process and its forks.

    Args:
        media_root: new folder by old folder. It is added to the folders of earlier calls.

    Raises:
        ConfigError: as `moved_folders`; or an earlier call set another new folder for an old folder.
    """
    if isinstance(media_root, Mapping) and media_root.items() <= _moved.items():
        return  # set before, by another epoch of the loader or its parent process
    pairs = moved_folders(media_root)
    after = dict(_moved)
    for old, new in pairs:
        _add_moved(after, old, new)
    _moved.update(after)


def _add_moved(moved: dict[str, str], old: str, new: str) -> None:
    if moved.setdefault(old, new) != new:
        raise ConfigError(f"`media_root` must have one new folder for {old}, got {moved[old]} and {new}. Remove one.")


def complete_parts(
    raw: Mapping[str, Any], changes: set[str] | None = None, *, with_paths: bool = False
) -> dict[str, Any]:
    """Return the parts of a pack with the referenced media in place of `media.json`, in the order of a copied pack.

    Args:
        raw: `__key__`, bytes by part name, and `FOLDER` or Energon's `__sources__`.
        changes: to which changes such as `PATH has other bytes` are added, with an empty part in place of the image;
            None raises.
        with_paths: add the paths of the referenced media by part, as `PATHS`.

    Raises:
        DataChangedError: a referenced file changed, or is missing.
        ResourceError: a referenced file cannot be read.
        FormatError: `media.json` is damaged.
    """
    return complete_packs([raw], changes, with_paths=with_paths)[0]


def complete_packs(
    packs: Sequence[Mapping[str, Any]], changes: set[str] | None = None, *, with_paths: bool = False
) -> list[dict[str, Any]]:
    """Return what `complete_parts` returns of several packs, whose media in object stores are requested together."""
    located = [_located(raw) for raw in packs]
    requested = _requested(located)
    return [_completed(pack, found, changes, with_paths) for pack, found in zip(located, requested, strict=True)]


class _Located(NamedTuple):
    """Raw parts of a pack, the locators of its media (None for media in its tar), and the path or URL of each file."""

    raw: Mapping[str, Any]
    locators: Mapping[str, Locator | None]
    paths: dict[str, str]


def _located(raw: Mapping[str, Any]) -> _Located:
    locators = read_locators(raw) if MEDIA_PART in raw else {}
    return _Located(raw, locators, _paths_of(raw, locators, raw.get(MEDIA_ROOT) or moved_here()))


def _completed(
    pack: _Located, requested: Mapping[str, bytes], changes: set[str] | None, with_paths: bool
) -> dict[str, Any]:
    raw = pack.raw
    parts = {name: content for name, content in raw.items() if name not in pack.locators and name != MEDIA_PART}
    for name, locator in pack.locators.items():
        if locator is not None:
            try:
                parts[name] = read_packed(
                    pack.paths[name],
                    locator.offset,
                    locator.size,
                    digest=locator.digest,
                    changed=locator.changed,
                    requested=requested.get(name),
                )
            except ImageChanged as change:
                if changes is None:
                    raise _packed(locator, raw, name).error(str(change)) from change
                changes.add(str(change))
                parts[name] = b""
            except ResourceError as error:
                raise ResourceError(f"{_place(raw, name)}, cannot be read: {error}") from error
        elif name in raw:
            parts[name] = raw[name]
    if with_paths and MEDIA_PART in raw:
        parts[PATHS] = pack.paths
    return parts


def emptied(raw: Mapping[str, Any], is_left_out: Callable[[str], bool]) -> dict[str, Any]:
    """Return a pack with empty bytes in place of some referenced parts, so that `complete_parts` does not read them.

    Args:
        raw: as for `complete_parts`.
        is_left_out: whether a part is empty, by its name.

    Raises:
        FormatError: `media.json` is damaged.
    """
    if MEDIA_PART not in raw:
        return dict(raw)
    names = {name for name in read_locators(raw) if is_left_out(name)}
    located = orjson.loads(raw[MEDIA_PART])
    kept = {name: locator for name, locator in located.items() if name not in names}
    return {**raw, MEDIA_PART: orjson.dumps(kept), **dict.fromkeys(names, b"")}


def read_locators(raw: Mapping[str, Any]) -> dict[str, Locator | None]:
    """Return the locators of a pack by part, None for media in its tar.

    Raises:
        FormatError: `media.json` is damaged.
    """
    try:
        content = raw[MEDIA_PART]
        value = orjson.loads(content) if isinstance(content, bytes | bytearray | memoryview | str) else content
        located = {name: None if item is None else _locator(item) for name, item in of_type(value, dict).items()}
        for name in located:
            # The parts that codecs read come from the tar: a locator must not replace them.
            if not isinstance(name, str) or name.startswith("__") or (located[name] and name in raw):
                raise ValueError(f"{short(name)} is in the tar, or is not the name of an image")
        return located
    except ValueError as error:
        problem = " ".join(str(error).split())[:200]
        raise FormatError(f"{raw.get('__key__')}.{MEDIA_PART} is damaged ({problem}); pack the data again") from error


def _locator(value: Any) -> Locator:
    if not _REQUIRED <= of_type(value, dict, "a locator").keys() <= _FIELDS:
        raise ValueError(f"{short(value)} is not a locator")
    locator = Locator(**value)
    # `type`: True is an int of Python.
    if type(locator.offset) is not int or type(locator.size) is not int or not isinstance(locator.file, str):
        raise ValueError(f"{short(dict(value))} is not a locator")
    if not locator.file or "\0" in locator.file:
        raise ValueError(f"{short(locator.file)} is not the path of a file")
    if locator.offset < 0 or not 0 <= locator.size <= MOST_BYTES or locator.offset + locator.size >= 1 << 63:
        raise ValueError(f"a file has {locator.size} bytes from byte {locator.offset}")
    changed: Any = locator.changed
    is_time = isinstance(changed, list) and [type(number) for number in changed] == [int, int]
    is_digest = isinstance(locator.digest, str) and len(locator.digest) == _DIGITS
    if not (is_digest and changed is None) and not (is_time and locator.digest is None):
        raise ValueError(f"{short(dict(value))} has no digest")
    return locator


def _paths_of(raw: Mapping[str, Any], located: Mapping[str, Locator | None], moved: MediaRoot = ()) -> dict[str, str]:
    """Return the path or URL of each located part, after folders have moved."""
    folder, found = "", {}
    for name, locator in located.items():
        if locator is not None:
            file = locator.file
            if not is_remote(file) and not os.path.isabs(file):
                folder = folder or _folder_of(raw)
                file = os.path.join(folder, file)
            # A string: a Path of each file would need a third of the time of its reading.
            found[name] = moved_path(absolute_name(file), moved)
    return found


def _folder_of(raw: Mapping[str, Any]) -> str:
    """Return the folder of a dataset as relative locators start from it, once for a pack: links need system calls."""
    if (folder := raw.get(FOLDER)) is None:
        sources = raw.get("__sources__") or ()
        folder = sources[0].dataset_path if sources else ""
    return str(as_path(absolute_name(str(folder))).resolve())  # `..` of a link would be another folder


def moved_here() -> MediaRoot:
    """Return the folders of `set_media_root`, as `moved_folders` does."""
    return tuple(sorted(_moved.items(), key=lambda pair: (-len(pair[0]), pair)))


def _requested(packs: Sequence[_Located]) -> list[dict[str, bytes]]:
    """Request the parts of packs with a digest that are in object stores together; none if a request fails."""
    places = [
        (index, name, (path, locator.offset, locator.size))
        for index, pack in enumerate(packs)
        for name, path in pack.paths.items()
        if is_remote(path) and (locator := pack.locators[name]) is not None and locator.digest is not None
    ]
    found: list[dict[str, bytes]] = [{} for _ in packs]
    with suppress(OSError):  # `read_packed` names the part in its errors
        contents = read_ranges([wanted for _, _, wanted in places])
        for (index, name, _), content in zip(places, contents, strict=True):
            found[index][name] = content
    return found


def moved_path(path: str, moved: MediaRoot) -> str:
    """Return the path of a file after folders have moved."""
    for old, new in moved:
        if path == old or path.startswith(old.rstrip("/") + "/"):
            return new + path[len(old.rstrip("/")) :]
    return path


def located_names(raw: Mapping[str, Any]) -> set[str]:
    """Return the names of the parts that are in other files, without reading them. Raises as `located_images`."""
    located = read_locators(raw) if MEDIA_PART in raw else {}
    return {name for name, locator in located.items() if locator is not None}


def located_images(raw: Mapping[str, Any]) -> dict[str, MediaReference]:
    """Return the images of a pack that are in other files, by part name; `packed` makes readers compare their bytes.

    The paths are as in the pack: readers of records replace folders that have moved.

    Args:
        raw: as for `complete_parts`.

    Raises:
        FormatError: `media.json` is damaged.
    """
    images, located = {}, read_locators(raw)
    paths = _paths_of(raw, located)
    with suppress(LookupError, ValueError):  # a codec without json
        raw = {**raw, "json": orjson.loads(raw["json"])}  # parsed once, for the ids of all images
    for name, locator in located.items():
        if locator is not None:
            place = _packed(locator, raw, name)
            images[name] = MediaReference(path=paths[name], offset=locator.offset, size=locator.size, packed=place)
    return images


def _packed(locator: Locator, raw: Mapping[str, Any], part: str) -> PackedImage:
    return PackedImage(_place(raw, part), locator.digest, locator.changed, _KINDS.get(part[:3], IMAGE).noun)


def _place(raw: Mapping[str, Any], part: str) -> str:
    """Pack, part, index and id of the sample of a media file, for messages."""
    kind = _KINDS.get(part[:3], IMAGE).a
    number = part.removeprefix("img").removeprefix("vid").removeprefix("aud").partition("_")[0]
    try:
        value = of_type(raw["json"] if isinstance(raw["json"], Mapping) else orjson.loads(raw["json"]), dict)
        if "ids" in value:
            ident = of_type(value["ids"], list)[int(number)]
        else:
            ident = of_type(of_type(value.get("samples") or [value], list)[int(number)], dict)["id"]
    except (LookupError, ValueError):  # the json of a custom codec
        ident = None
    return f"{raw.get('__key__')}: {part}, {kind} of sample {number}" + ("" if ident is None else f" ({ident})")
