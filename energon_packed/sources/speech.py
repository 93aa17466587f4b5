"""Corpora of speech in; records with an audio file, or a part of it, and its transcript out.

LibriSpeech    `84-121123.trans.txt`, with a line `84-121123-0000 TEXT` for each 84-121123-0000.flac beside it
Common Voice   `train.tsv`, with the columns client_id, path and sentence; the files are in `clips`
Kaldi          `wav.scp` with `text`, and perhaps `segments`; commands in wav.scp are not run
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from energon_packed.errors import Reason, Reject, SourceError
from energon_packed.records.fields import shown
from energon_packed.records.media.kinds import AUDIO
from energon_packed.sources.base import SourceRecord
from energon_packed.sources.convert import not_utf8
from energon_packed.sources.csv import CsvSource
from energon_packed.sources.json import JsonlSource
from energon_packed.sources.listed import ListedSource
from energon_packed.system import raise_resource_error

_COLUMNS = {"client_id", "path", "sentence"}
_HEADER_BYTES = 4096
Lines = dict[str, str]


class LibriSpeechSource(JsonlSource):
    """The transcripts of a chapter of LibriSpeech."""

    suffixes: ClassVar[tuple[str, ...]] = (".trans.txt",)

    def row(self, entry: tuple[int, bytes]) -> SourceRecord:
        """Parse a line."""
        offset, line = entry
        try:
            ident, _, text = line.decode("utf-8-sig").strip().partition(" ")
        except UnicodeDecodeError as error:
            return SourceRecord(offset, len(line), None, Reject(Reason.BAD_JSON, not_utf8(line[error.start])))
        # An absolute path, as every chapter has its own folder.
        record = {"id": ident, "audio": f"{self.media_folder.start}/{ident}.flac", "transcript": text.strip()}
        return SourceRecord(offset, len(line), record)


class CommonVoiceSource(CsvSource):
    """A table of Common Voice, without quotes, as `mozilla-foundation/common_voice_17_0` reads it."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    quoting: ClassVar[int] = csv.QUOTE_NONE

    @classmethod
    def matches(cls, path: Path) -> bool:
        """Whether it is a .tsv file with the columns of Common Voice."""
        if path.suffix.lower() != ".tsv" or not path.is_file():
            return False
        with path.open("rb") as stream:
            names = stream.read(_HEADER_BYTES).split(b"\n", 1)[0].decode("utf-8-sig", "replace")
        return _COLUMNS.issubset(names.strip().split("\t"))

    def record(self, values: dict[str, Any]) -> dict[str, Any]:
        """Make the path of the audio file; releases up to 4 omit its extension."""
        record = super().record(values)
        name = record.pop("path")
        if name is not None:
            suffix = "" if AUDIO.has_suffix(name) else ".mp3"
            record["audio"] = f"{self.media_folder.start}/clips/{name}{suffix}"
        return record


class KaldiSource(ListedSource):
    """A data folder of Kaldi, by its wav.scp; the format is described in kaldi-asr.org/doc/data_prep.html."""

    suffixes: ClassVar[tuple[str, ...]] = ("wav.scp",)

    @classmethod
    def records(cls, path: Path) -> Iterator[dict[str, Any]]:
        """Yield a record per utterance, in the order of `segments`, or else of wav.scp."""
        folder = path.parent
        files, texts = _lines(path), _lines(folder / "text")
        has_segments = (folder / "segments").is_file()
        utterances = _lines(folder / "segments") if has_segments else {name: name for name in files}
        for name, value in utterances.items():
            record: dict[str, Any] = {"id": name}
            if name not in texts:
                record["fault"] = Reason.MISSING_FIELD, f"{name} has no line in text"
            else:
                part = _segment(name, value) if has_segments else {"path": name}
                record |= {"transcript": texts[name]} | (part if "fault" in part else _audio(part, files))
            yield record
        listed = "segments" if has_segments else "wav.scp"
        for name in texts:
            if name not in utterances:
                yield {"id": name, "fault": (Reason.MISSING_AUDIO, f"{name} of text has no line in {listed}")}


def _segment(name: str, line: str) -> dict[str, Any]:
    """Read a line of `segments`, `RECORDING START END` in seconds; the end -1 is the end of the recording."""
    fields = line.split()
    if len(fields) == 4:
        detail = f"{name}: segments names the channel {shown(fields[3])}, and channels are averaged; cut the file"
        return {"fault": (Reason.UNSUPPORTED_FIELD, detail)}
    try:
        recording, start, end = fields[0], float(fields[1]), float(fields[2])
        if len(fields) == 3 and 0 <= start < (end if end != -1 else start + 1) <= 1e6:
            return {"path": recording, "offset": start, "duration": None if end == -1 else end - start}
    except (IndexError, ValueError):
        pass
    detail = f"{name}: segments must have a recording, a start and a later end in seconds, got {shown(line)}"
    return {"fault": (Reason.UNSUPPORTED_FIELD, detail)}


def _audio(part: dict[str, Any], files: Lines) -> dict[str, Any]:
    """Replace the id of a recording by its file."""
    recording = part["path"]
    file = files.get(recording)
    if file is None:
        return {"fault": (Reason.MISSING_AUDIO, f"the recording {recording} has no line in wav.scp")}
    if file.startswith("|") or file.endswith("|") or file == "-":
        detail = f"wav.scp has a command for {recording}, {shown(file)}, which is not run; write its output to a file"
        return {"fault": (Reason.UNSUPPORTED_MEDIA, detail)}
    return {"audio": {**part, "path": file}}


def _lines(file: Path) -> Lines:
    """Read the lines `ID VALUE` of a file.

    Raises:
        SourceError: the file is missing, is not UTF-8, or has an id twice.
    """
    found: Lines = {}
    try:
        with file.open(encoding="utf-8") as stream:
            for line in stream:
                name, *value = line.strip().split(maxsplit=1)[:2] or [""]
                if name in found:
                    raise SourceError(f"{file} has {name} twice. Fix it with utils/fix_data_dir.sh.")
                if name:
                    found[name] = value[0] if value else ""
    except UnicodeDecodeError as error:
        raise SourceError(f"{file}: {not_utf8(error.object[error.start])}") from error
    except OSError as error:
        raise_resource_error(error, file)
        raise SourceError(f"{file} cannot be read: {error.strerror}. wav.scp of Kaldi needs it beside it.") from error
    return found
