"""A tar has the same samples and the same faults for every command and loader that reads it."""

import contextlib
import gzip
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from energon_packed import ChatEncoder, Conversation, FormatError, PackedDataset, SourceError, get_packed_loader, pack
from tests.internals import ShardReader, TarError, cli, open_sources, open_tar, read_content

Entries = list[tuple[str, bytes]]
BLOCK = 512
END = bytes(2 * BLOCK)


def picture() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (56, 84), "red").save(out, "JPEG")
    return out.getvalue()


PICTURE = picture()
PACK = {
    "images": [["img0_0.jpg"]],
    "prompts": [["<image>What is it?"]],
    "captions": [["It is red."]],
    "sample_count": 1,
}
PACKS: Entries = [
    entry
    for key in ("p0", "p1", "p2")
    for entry in ((f"{key}.json", json.dumps(PACK | {"ids": [key]}).encode()), (f"{key}.img0_0.jpg", PICTURE))
]
PAIRS: Entries = [
    entry for key in ("p0", "p1", "p2") for entry in ((f"{key}.jpg", PICTURE), (f"{key}.txt", b"It is red."))
]


def member(name: str, content: bytes = b"", kind: bytes = b"0", style: int = tarfile.GNU_FORMAT, **more: Any) -> bytes:
    """Headers and content of one member."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    for attribute, value in more.items():
        setattr(info, attribute, value)
    return info.tobuf(style) + content + bytes(-len(content) % BLOCK)


def signed(header: bytearray) -> bytes:
    """A header with its check sum."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def archive(entries: Entries, style: int = tarfile.GNU_FORMAT, kind: bytes = b"0", **more: Any) -> bytes:
    return b"".join(member(name, content, kind, style, **more) for name, content in entries) + END


def with_before(before: Callable[[str], bytes]) -> Callable[[Entries], bytes]:
    """Each member after another one, which is made from its name."""
    return lambda entries: b"".join(before(name) + member(name, content) for name, content in entries) + END


def base_256(entries: Entries) -> bytes:
    """Sizes in base 256, as of files of 8 GiB."""
    out = b""
    for name, content in entries:
        data = bytearray(member(name, content))
        data[124:136] = b"\x80" + len(content).to_bytes(11, "big")
        out += signed(data[:BLOCK]) + data[BLOCK:]
    return out + END


def times_in_the_prefix(entries: Entries) -> bytes:
    """As `tar --incremental` of GNU writes."""
    out = b""
    for name, content in entries:
        data = bytearray(member(name, content))
        data[345:369] = b"14610546711\x0014610546711\x00"
        out += signed(data[:BLOCK]) + data[BLOCK:]
    return out + END


GLOBAL = tarfile.TarInfo.create_pax_global_header({"comment": "0" * 40})
LONG = "a" * 120
SOUND: dict[str, Callable[[Entries], bytes]] = {
    "ustar": lambda entries: archive(entries, tarfile.USTAR_FORMAT),
    "v7": lambda entries: archive(entries, tarfile.USTAR_FORMAT, b"\0"),
    "contiguous": lambda entries: archive(entries, tarfile.USTAR_FORMAT, b"7"),
    "pax": lambda entries: archive(
        entries, tarfile.PAX_FORMAT, pax_headers={"mtime": "1.5", "SCHILY.xattr.a": "=\n1 "}
    ),
    "pax size and path": lambda entries: (
        b"".join(
            member(name, content, b"0", tarfile.PAX_FORMAT, pax_headers={"path": name, "size": str(len(content))})
            for name, content in entries
        )
        + END
    ),
    "a global header": lambda entries: GLOBAL + archive(entries),
    "macOS files": with_before(lambda name: member(f"._{name}", b"\0\x05\x16\x07" + bytes(500))),
    "macOS files below the root": with_before(lambda name: member(f"./._{name}", b"\0\x05\x16\x07")),
    "metadata of WebDataset": with_before(lambda _: member("__index__/shard.txt", b"x") + member("__meta__", b"x")),
    "folders": with_before(lambda _: member("folder", kind=b"5", size=700) + member("old/", kind=b"\0")),
    "volume label": lambda entries: member("backup.2024", kind=b"V") + archive(entries),
    "base 256": base_256,
    "times in the prefix": times_in_the_prefix,
    "padded": lambda entries: archive(entries) + bytes(20 * BLOCK),
}


class Fault(NamedTuple):
    """A member of p1 in the place of its image, and the message about it; size 0 in all headers."""

    kind: bytes
    message: str
    more: dict[str, Any] = {}  # noqa: RUF012


FAULTS = {
    "hard link": Fault(b"1", "is a hard link, which is never read", {"linkname": "p0.jpg"}),
    "symbolic link": Fault(b"2", "is a symbolic link, which is never read", {"linkname": "/etc/passwd"}),
    "character device": Fault(b"3", "is a device, which is never read"),
    "block device": Fault(b"4", "is a device, which is never read"),
    "FIFO": Fault(b"6", "is a FIFO, which is never read"),
    "sparse": Fault(b"S", "is a sparse file, which is never read"),
    "unknown": Fault(b"Z", "is a member of the unknown type 'Z', which is never read"),
}


def whole(entries: Entries) -> bytes:
    return archive(entries)


def zeroed(entries: Entries) -> bytes:
    data = whole(entries)
    return data[: 2 * BLOCK] + bytes(BLOCK) + data[3 * BLOCK :]


def flipped(entries: Entries) -> bytes:
    data = bytearray(whole(entries))
    data[len(member(*entries[0])) + 5] ^= 1
    return bytes(data)


DAMAGED: dict[str, tuple[Callable[[Entries], bytes], str]] = {
    "cut in a content": (lambda e: whole(e)[: BLOCK + 10], f"truncated inside p0.* at byte {BLOCK + 10}"),
    "cut in a header": (lambda e: whole(e)[: len(member(*e[0])) + 100], "truncated inside a header at byte"),
    "cut after a member": (lambda e: whole(e)[: len(member(*e[0]))], "no end-of-archive marker after byte"),
    "one block of zeros": (lambda e: whole(e)[:-BLOCK], "no end-of-archive marker after byte"),
    "a changed bit": (flipped, "damaged header at byte .*: its check sum is wrong"),
    "a header of zeros": (lambda e: member(*e[0]) + bytes(BLOCK) + whole(e[1:]), "data after the end"),
    "concatenated": (lambda e: whole(e) * 2, "data after the end of the archive at byte .* concatenated tars"),
    "a PAX header alone": (
        lambda e: whole(e)[:-1024] + member("x", b"10 path=a\n", b"x") + END,
        "damaged header at byte",
    ),
    "a damaged PAX header": (lambda e: member("x", b"9 path=aa\n", b"x") + whole(e), "damaged PAX header at byte 0"),
    "a global path": (lambda e: member("x", b"10 path=a\n", b"g") + whole(e), "global header at byte 0 sets path"),
}  # fmt: skip
OTHER = {
    "compressed": (lambda e: gzip.compress(whole(e)), r"is compressed \(gzip\)"),
    "empty": (lambda e: b"", r"is empty \(0 bytes\)"),
    "other": (lambda e: b"x" * 3000, "is not an uncompressed tar file"),
}


class Rows(NamedTuple):
    """Ids of the records of an input, and why others are rejected."""

    ids: list[str]
    rejected: list[str]


def as_source(path: Path) -> Rows:
    (source,) = open_sources([path], work_dir=path.parent / "work")
    rows = list(source.scan(0, source.extent()))
    records = [row.record for row in rows if row.reject is None]
    ids = [record.id if isinstance(record, Conversation) else record["id"] for record in records]
    return Rows(ids, [row.reject.detail for row in rows if row.reject is not None])


def inspected(path: Path) -> dict[str, Any]:
    shown = CliRunner().invoke(cli, ["inspect", str(path), "--json", "--limit", "0"])
    found: dict[str, Any] = json.loads(shown.output.splitlines()[0])
    assert shown.exit_code == bool(found["problems"]), shown.output
    return found


def run(*arguments: Any) -> str:
    """Output of a command, with the error that it ends with."""
    done = CliRunner().invoke(cli, list(map(str, arguments)))
    return f"{done.output} {done.exception or ''}"


def dataset(folder: Path, content: bytes, name: str = "x.tar") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", SOUND)
def test_a_valid_tar_has_three_samples_for_every_reader(tmp_path: Path, name: str, encoder: ChatEncoder) -> None:
    pairs = dataset(tmp_path / "pairs", SOUND[name](PAIRS)) / "x.tar"
    assert as_source(pairs) == Rows(["p0", "p1", "p2"], [])
    assert inspected(pairs).items() >= {"packs": 3, "members": 6, "problems": []}.items()

    folder = dataset(tmp_path / "packs", SOUND[name](PACKS))
    assert as_source(folder / "x.tar") == Rows(["p0", "p1", "p2"], [])
    assert inspected(folder / "x.tar").items() >= {"packs": 3, "members": 6, "problems": []}.items()
    assert "3 packs" in run("nv-meta", folder)
    packed = PackedDataset(folder, encoder)
    assert [[sample.id for sample in packed[place]] for place in range(len(packed))] == [["p0"], ["p1"], ["p2"]]
    batches = list(get_packed_loader(folder, encoder, seq_len=1024, epochs=1, num_workers=0))
    assert sorted(batch.ids for batch in batches) == [["p0"], ["p1"], ["p2"]]
    done = CliRunner().invoke(cli, ["verify", str(folder), "--fast"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", FAULTS)
def test_an_irregular_member_is_one_fault_for_every_reader(tmp_path: Path, name: str, encoder: ChatEncoder) -> None:
    fault = FAULTS[name]

    def with_fault(entries: Entries, place: int) -> bytes:
        parts = [member(*entry) for entry in entries]
        parts[place] = member(entries[place][0], b"", fault.kind, **fault.more)
        return b"".join(parts) + END

    pairs = dataset(tmp_path / "pairs", with_fault(PAIRS, 2)) / "x.tar"
    message = f"p1.jpg {fault.message}"
    rows = as_source(pairs)
    assert rows.ids == ["p0", "p2"]
    (rejected,) = rows.rejected
    assert message in rejected
    (problem,) = inspected(pairs)["problems"]
    assert message in problem

    message = f"p1.img0_0.jpg {fault.message}"
    empty = [(name, b"" if place == 3 else content) for place, (name, content) in enumerate(PACKS)]
    folder = dataset(tmp_path / "packs", whole(empty))
    run("nv-meta", folder)  # of a tar with the same byte offsets
    dataset(folder, with_fault(PACKS, 3))
    assert message in as_source(folder / "x.tar").rejected[0]
    assert message in inspected(folder / "x.tar")["problems"][0]
    assert message in run("verify", folder, "--fast")
    assert message in run("nv-meta", folder)
    packed = PackedDataset(folder, encoder)
    with pytest.raises(FormatError, match=re.escape(message)):
        [packed[place] for place in range(3)]


@pytest.mark.parametrize("name", [*DAMAGED, *OTHER])
def test_a_damaged_tar_has_the_same_message_for_every_reader(tmp_path: Path, name: str) -> None:
    make, message = (DAMAGED | OTHER)[name]
    folder = dataset(tmp_path / "packs", whole(PACKS))
    run("nv-meta", folder)
    dataset(folder, make(PACKS))
    path = folder / "x.tar"
    with pytest.raises(SourceError, match=message) as caught:
        as_source(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    problem = text.removeprefix(f"{path}: ")
    assert problem in (str(inspected(path)["problems"][:1]) if name in DAMAGED else run("inspect", path))
    for command in ("verify", "nv-meta"):
        assert problem in " ".join(run(command, folder, *(["--fast"] if command == "verify" else [])).split())


@pytest.mark.parametrize(
    ("before", "problem"),
    [
        # The part `_p0.json` of a sample `dir/`, which occurs many times: `energon prepare` refuses it.
        (
            lambda name: member(name.replace("/", "/._"), b"x"),
            "dir/._p0.json was added by macOS, and Energon reads it",
        ),
        # Energon reads it together with the member after it, which is of the next sample.
        (lambda _: GLOBAL, "the global header at byte 2048 makes Energon read past the end of a sample"),
    ],
)
def test_members_that_energon_would_misread_are_named(
    tmp_path: Path, before: Callable[[str], bytes], problem: str
) -> None:
    entries = [(f"dir/{name}", content) for name, content in PACKS]
    folder = dataset(tmp_path / "packs", whole(entries))
    run("nv-meta", folder)
    dataset(folder, with_before(before)(entries))
    assert as_source(folder / "x.tar") == Rows(["p0", "p1", "p2"], [])
    found = inspected(folder / "x.tar")
    assert (found["packs"], len(found["problems"])) == (3, 1)
    assert problem in found["problems"][0]
    assert problem in run("nv-meta", folder)
    assert problem in run("verify", folder, "--fast")


def test_a_repeated_part_is_one_fault_for_every_reader(tmp_path: Path) -> None:
    twice = [*PACKS[:2], PACKS[1], *PACKS[2:]]
    path = dataset(tmp_path / "packs", whole(twice)) / "x.tar"
    message = "p0.img0_0.jpg occurs twice in the tar; write it again"
    rows = as_source(path)
    assert (rows.ids, rows.rejected) == (["p1", "p2"], [message])
    assert inspected(path)["problems"] == [message]
    assert message in run("nv-meta", path.parent)
    ends = [0, len(b"".join(member(*entry) for entry in twice[:3]))]
    path.with_suffix(".tar.idx").write_bytes(b"".join(end.to_bytes(8, "little") for end in ends))
    with pytest.raises(FormatError, match=message):
        ShardReader([path])[0]


def test_packing_a_tar_of_macos_with_a_fifo(tmp_path: Path, tokenizer_dir: Path) -> None:
    parts = [member(name, content) for name, content in PAIRS]
    parts[2] = member("p1.jpg", kind=b"6")
    hidden = [member(f"._{name}", b"\0\x05\x16\x07") for name, _ in PAIRS]
    both = b"".join(block for pair in zip(hidden, parts, strict=True) for block in pair)
    (tmp_path / "x.tar").write_bytes(both + END)
    result = pack(
        tmp_path / "x.tar",
        output_dir=tmp_path / "out",
        tokenizer=tokenizer_dir,
        seq_len=512,
        workers=1,
        max_reject_rate=0.5,
    )
    assert (result.manifest.packed, result.manifest.images) == (2, 2)
    assert result.manifest.rejects == {"missing_image": 1}
    (line,) = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    assert json.loads(line)["detail"] == "p1.jpg is a FIFO, which is never read; store the file itself"


def read_all(path: Path) -> list[tuple[str, bytes, int, int]]:
    with open_tar(path) as tar:
        members = list(tar)
    return [(member.name, read_content(path, member), member.header, member.offset) for member in members]


NAMES = st.text(
    st.sampled_from("ab.é/_ 中"), min_size=1, max_size=12
).filter(lambda name: not re.search(r"(^|/)(\._|__)|^/|/$|//|(^|/)\.\.?(/|$)", name))  # fmt: skip


@st.composite
def archives(draw: st.DrawFn) -> tuple[int, list[tuple[str, int]]]:
    style = draw(st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    longest = 60 if style == tarfile.USTAR_FORMAT else 400
    names = draw(st.lists(st.tuples(NAMES, st.integers(0, longest)), max_size=6))
    sizes = draw(st.lists(st.integers(0, 1600), min_size=len(names), max_size=len(names)))
    return style, [(name + "x" * more, size) for (name, more), size in zip(names, sizes, strict=True)]


def written(style: int, files: Sequence[tuple[str, int]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=style) as tar:
        for number, (name, size) in enumerate(files):
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(bytes([number + 1]) * size))
    return out.getvalue()


@given(archives())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_archive_is_read_as_tarfile_reads_it(tmp_path: Path, made: tuple[int, list[tuple[str, int]]]) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(written(*made))
    with tarfile.open(path, "r:") as tar:
        theirs = [(info.name, tar.extractfile(info).read(), info.offset, info.offset_data) for info in tar]  # type: ignore[union-attr]
        end = tar.offset
    assert read_all(path) == theirs
    with open_tar(path) as ours:
        list(ours)
    assert ours.end == end


@given(archives(), st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_archive_that_is_cut_anywhere_is_an_error(
    tmp_path: Path, made: tuple[int, list[tuple[str, int]]], data: st.DataObject
) -> None:
    content = written(*made)
    end = len(content.rstrip(b"\0")) if made[1] else 0
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    whole_tar = read_all(path)
    cut = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(content[:cut])
    if cut >= end + 4 * BLOCK:  # behind the last content, its padding and the end of the archive
        assert read_all(path) == whole_tar
        return
    try:
        assert read_all(path) == whole_tar
    except TarError as error:
        assert str(path) in str(error)


@given(archives(), st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_byte_of_a_header_is_an_error_or_harmless(
    tmp_path: Path, made: tuple[int, list[tuple[str, int]]], data: st.DataObject
) -> None:
    content = bytearray(written(*made))
    if not made[1]:
        return
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    before = read_all(path)
    header = data.draw(st.sampled_from([entry[2] for entry in before]))
    content[header + data.draw(st.integers(0, BLOCK - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with contextlib.suppress(TarError):
        assert read_all(path) == before  # the check sum field alone has several spellings


def test_tars_of_gnu_tar_are_read(tmp_path: Path) -> None:
    """Long names, a sparse file, a hard link and a FIFO, in each of its formats."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"a" * 700)
    (folder / "b.txt").hardlink_to(folder / "a.txt")
    (folder / f"{LONG}.txt").write_bytes(b"long")
    with (folder / "s.bin").open("wb") as out:
        for place in range(40):
            out.seek(place << 17)
            out.write(b"x" * 4096)
    subprocess.run(["mkfifo", folder / "f.pipe"], check=True)
    names = ["a.txt", "b.txt", f"{LONG}.txt", "s.bin", "f.pipe"]
    for arguments in (["--format=gnu"], ["--format=posix"], ["--format=posix", "--sparse-version=0.1"],
                      ["--format=gnu", "--incremental"]):  # fmt: skip
        path = tmp_path / "a.tar"
        subprocess.run(["tar", "-cSf", path, *arguments, "-C", folder, *names], check=True)
        with open_tar(path) as tar:
            found = {member.name: member for member in tar}
        assert sorted(found) == sorted(names), arguments
        faults = [found[name].fault or "" for name in names]
        assert [fault.partition(" is a ")[2].partition(",")[0] for fault in faults] == [
            "", "hard link", "", "sparse file", "FIFO",
        ]  # fmt: skip
        assert read_content(path, found["a.txt"]) == b"a" * 700
        assert read_content(path, found[f"{LONG}.txt"]) == b"long"
        with pytest.raises(TarError, match="f.pipe is a FIFO"):
            read_content(path, found["f.pipe"])


def test_a_range_of_a_tar_is_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(written(tarfile.GNU_FORMAT, [("a.txt", 5), (f"{LONG}.txt", 600), ("b.txt", 7)]))
    with open_tar(path) as tar:
        _, second, third = tar
    with open_tar(path, second.header, third.header) as part:
        assert list(part) == [second]
    for stop in (second.header + 2 * BLOCK, second.offset):  # after the header of its long name, and after its own
        with open_tar(path, second.header, stop) as part, pytest.raises(TarError, match="truncated"):
            list(part)
