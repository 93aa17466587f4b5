"""Audio files of records, in every spelling."""

import base64
from typing import Any

import av
import pytest
from PIL import Image

from energon_packed import AudioReference, MediaReference, RecordError, normalize
from tests.internals import AUDIO, IMAGE, VIDEO, audio_extension, is_video_content, stored_extension

ANSWER = {"role": "assistant", "content": "Hello."}
USER = {"role": "user", "content": "<audio>What?"}
DATA = b"RIFF\x10\x00\x00\x00WAVEfmt "
PILLOW = {"AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "TIFF", "WEBP"}
BASE64 = base64.b64encode(DATA).decode()


def parts(*content: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content, {"type": "text", "text": "What?"}]}, ANSWER]}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, ANSWER], "audios": ["a.wav"]},
        {"messages": [USER, ANSWER], "audio": "a.wav"},
        {"messages": [{**USER, "audios": ["a.wav"]}, ANSWER]},
        {"messages": [{**USER, "content": "What?", "audio": "a.wav"}, ANSWER]},
        {"conversations": [{"from": "human", "value": "<audio>What?"}, {"from": "gpt", "value": "Hello."}],
         "audios": ["a.wav"]},
        {"query": "<audio>What?", "response": "Hello.", "audios": ["a.wav"]},
        {"query": "<audio>a.wav</audio>What?", "response": "Hello."},
        {"instruction": "<audio>What?", "input": "", "output": "Hello.", "audios": ["a.wav"]},
        {"prompts": ["What?"], "captions": ["Hello."], "audios": ["a.wav"]},
        parts({"type": "audio", "audio": "a.wav"}),
        parts({"type": "audio", "audio_url": "a.wav"}),
        parts({"type": "audio", "path": "a.wav"}),
        parts({"type": "audio_url", "audio_url": {"url": "a.wav"}}),
        parts({"type": "audio_url", "value": "a.wav"}),
        parts({"audio": "a.wav"}),
        {**parts({"type": "audio"}), "audios": ["a.wav"]},
        {**parts({"type": "audio"}), "audio": {"path": "a.wav", "bytes": None}},
    ],
)  # fmt: skip
def test_spellings_of_an_audio_file(record: dict[str, Any]) -> None:
    conversation = normalize({"id": "a", **record}, image_root="/data")
    [audio] = conversation.audios
    assert audio == AudioReference(file=MediaReference(path="a.wav", root="/data"))
    assert [message.content for message in conversation.messages] == ["<audio>What?", "Hello."]
    assert conversation.kind == "audio"
    assert conversation.media_files == (audio.file,)
    assert not conversation.notes
    assert not conversation.unused_fields


@pytest.mark.parametrize(
    "value",
    [
        DATA,
        {"bytes": DATA, "path": "a.wav"},
        f"data:audio/wav;base64,{BASE64}",
        {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{BASE64}"}},
    ],
)
def test_bytes_of_an_audio_file(value: Any) -> None:
    record = (
        parts(value) if isinstance(value, dict) and "type" in value else {"messages": [USER, ANSWER], "audio": value}
    )
    [audio] = normalize(record).audios
    assert audio.file.data == DATA


@pytest.mark.parametrize("name", ["text", "transcription", "transcript", "sentence"])
def test_a_transcript_is_the_answer_to_its_audio(name: str) -> None:
    conversation = normalize({"audio": "a.wav", name: "Hello.", "speaker_id": 3, "audio_duration": 1.5})
    assert [message.content for message in conversation.messages] == ["<audio>", "Hello."]
    assert conversation.unused_fields == ("audio_duration", "speaker_id")
    asked = normalize(
        {"audio": "a.wav", name: "Hello.", "question": "What?"} if name != "text" else parts({"audio": "a.wav"})
    )
    assert asked.messages[0].content == "<audio>What?"


def test_gemini_parts() -> None:
    inline = {"inlineData": {"mimeType": "audio/wav", "data": BASE64}}
    contents = [
        {"role": "user", "parts": [inline, {"text": "What?"}]},
        {"role": "model", "parts": [{"text": "Hello."}]},
    ]
    conversation = normalize({"contents": contents})
    assert conversation.audios[0].file.data == DATA
    assert conversation.messages[0].content == "<audio>What?"


def test_parts_of_a_file() -> None:
    [audio] = normalize({"audio": {"path": "a.wav", "offset": 1, "duration": 2.5}, "text": "Hello."}).audios
    assert (audio.offset, audio.duration) == (1.0, 2.5)


def test_audio_and_images_keep_their_order() -> None:
    record = parts({"type": "audio", "audio": "a.wav"}, {"type": "image", "image": "b.png"}, {"audio": "c.wav"})
    conversation = normalize(record)
    assert conversation.messages[0].content == "<audio><image><audio>What?"
    assert [file.label for file in conversation.media_files] == ["b.png", "a.wav", "c.wav"]
    assert conversation.kind == "image"


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        ({"messages": [USER, ANSWER]}, "audio_count_mismatch", "1 <audio> placeholders for 0 audio files"),
        ({"messages": [USER, ANSWER], "audios": ["a.wav", "b.wav"]}, "audio_count_mismatch", "1 <audio> .* for 2"),
        (
            {"messages": [USER, ANSWER], "audios": ["a.wav"], "audio": "b.wav"},
            "audio_count_mismatch",
            "both audio and",
        ),
        ({**parts({"audio": "a.wav"}), "audios": ["b.wav"]}, "audio_count_mismatch", "both in the messages and"),
        (
            {"messages": [{**USER, "audios": ["a.wav", "b.wav"]}, ANSWER]},
            "audio_count_mismatch",
            "2 audio files for 1",
        ),
        ({"messages": [USER, ANSWER], "audio": 5}, "missing_audio", "an audio file is 5; use a path or bytes"),
        (parts({"type": "audio"}), "missing_audio", "a content part of type audio has no file"),
        (parts({"audio": "a.wav"}, {"type": "audio"}), "missing_audio", "a content part of type audio has no file"),
        ({"audio": "http://x/a.wav", "text": "a"}, "unsupported_media", "is remote; download it"),
        ({"audio": "s3://x/a.wav", "text": "a"}, "unsupported_media", "is remote, and `image_root` is not"),
        (
            {"audio": {"array": [0.1], "sampling_rate": 16_000}, "text": "a"},
            "unsupported_media",
            r"Audio\(decode=False",
        ),
        ({"audio": "data:audio/wav;base64,###", "text": "a"}, "corrupt_audio", "data:audio/wav"),
        ({"audio": {"path": "a.wav", "duration": 0}, "text": "a"}, "unsupported_field", "must be above 0 seconds"),
        ({"audio": {"path": "a.wav", "offset": -1}, "text": "a"}, "unsupported_field", "must be seconds, not -1"),
        ({"audio": {"path": "a.wav", "offset": "1"}, "text": "a"}, "unsupported_field", "must be seconds, not '1'"),
        ({"audio": {"path": {"path": {"path": "a"}}}, "text": "a"}, "missing_audio", "nested in several objects"),
        ({"wav": "a.wav", "question": "a", "answer": "b"}, "unsupported_media", "wav 'a.wav' refers to an audio file"),
        ({"clip": "a.flac", "question": "a", "answer": "b"}, "unsupported_media", "map=audios=clip"),
        (
            {"audio_path": "a.wav", "question": "a", "answer": "b"},
            "unsupported_field",
            "list the audio files as audios",
        ),
    ],
)
def test_rejects(record: dict[str, Any], reason: str, detail: str) -> None:
    with pytest.raises(RecordError, match=f"^{reason}: .*{detail}"):
        normalize(record)


OGG = b"OggS" + bytes(22)
MATROSKA = b"\x1a\x45\xdf\xa3\x9fB\x86\x81\1B\xf7\x81\1B\xf2\x81\4B\xf3\x81\x08B\x82\x84"


@pytest.mark.parametrize(
    ("head", "extension"),
    [
        (DATA, "wav"),
        (b"RIFF\n\n\n\nWAVEfmt ", "wav"),
        (b"RF64\xff\xff\xff\xffWAVEds64", "wav"),
        (b"BW64\xff\xff\xff\xffWAVEds64", "wav"),
        (b"fLaC\0\0\0\x22", "flac"),
        (OGG + b"\1\x13OpusHead\1", "opus"),
        (OGG + b"\1\x1e\1vorbis", "ogg"),
        (b"\0\0\0\x1cftypM4A \0\0\2\0", "m4a"),
        (b"\0\0\0\x1cftypM4B \0\0\2\0", "m4a"),
        (b"ID3\4\0\0", "mp3"),
        (b"\xff\xfb\x90\x64", "mp3"),
        (b"\xff\xf3\x90\x64", "mp3"),  # MPEG 2
        (b"\xff\xe3\x90\x64", "mp3"),  # MPEG 2.5
        (b"\xff\xf1\x50\x80", "aac"),
        (b"\xff\xf9\x50\x80", "aac"),  # MPEG 2
        (b"ADIF\1", "aac"),
        (b"FORM\0\0\0\0AIFFCOMM", "aiff"),
        (b"FORM\0\0\0\0AIFCFVER", "aiff"),
    ],
)
def test_extensions_of_audio_by_content(head: bytes, extension: str) -> None:
    assert (audio_extension(head), stored_extension(head + bytes(600))) == (extension, extension)


@pytest.mark.parametrize(
    ("head", "extension"),
    [
        (b"\0\0\0\x1cftypisom\0\0\2\0", "mp4"),
        (b"\0\0\0\x18stypmsdh\0\0\0\0", "mp4"),
        (b"\0\0\0\x14ftypqt  \0\0\2\0", "mov"),
        *((b"\0\0\0\x08" + box + bytes(8), "mov") for box in (b"moov", b"mdat", b"free", b"skip", b"wide")),
        (MATROSKA + b"webmB", "webm"),
        (MATROSKA + b"matroska", "mkv"),
        (b"RIFF\n\n\n\nAVI LIST", "avi"),
        (b"FLV\1\5", "flv"),
        (bytes.fromhex("3026b2758e66cf11a6d9"), "wmv"),
        (b"\0\0\1\xbaD", "mpg"),
        (b"\0\0\1\xb3\x14", "mpg"),
        ((b"G" + bytes(187)) * 4, "ts"),
        ((bytes(4) + b"G" + bytes(187)) * 4, "ts"),
        (OGG + b"\1\x2a\x80theora", None),
        (b"\0\0\0\x1cftypheic\0\0\0\0", None),
        (b"\0\0\0\x1cftypavif\0\0\0\0", None),
        ((b"G" + bytes(187)) * 3, None),
        (b"\xff\xd8\xff\xe0", None),
        (b"\x89PNG\r\n\x1a\n", None),
        (b"text", None),
    ],
)
def test_extensions_of_videos_by_content(head: bytes, extension: str | None) -> None:
    """A track of a video is stored as the video."""
    assert (audio_extension(head), stored_extension(head)) == (None, extension or "audio")
    assert is_video_content(head) == (extension is not None)


def test_the_names_of_files_that_ffmpeg_and_pillow_write_are_media() -> None:
    """Oracle: the extensions by which they choose a container, or a format."""
    containers = "wav w64 au aiff caf flac mp3 mp2 adts ogg oga opus amr mov mp4 ipod 3gp 3g2 f4v asf avi flv matroska"
    containers = f"{containers} webm mpegts mpeg vob ogv"
    written = {f".{name}" for each in containers.split() for name in av.ContainerFormat(each, "w").extensions}
    rare = {".adts", ".afc", ".m2a", ".m2t", ".m4b", ".mpa"}
    assert written - rare <= {*AUDIO.suffixes, *VIDEO.suffixes}
    Image.init()
    images = {extension for extension, kind in Image.registered_extensions().items() if kind in PILLOW}
    assert images - {".apng", ".dib", ".jpe", ".avifs", ".j2c", ".j2k", ".jpc", ".jpf", ".jpx"} <= {*IMAGE.suffixes}
