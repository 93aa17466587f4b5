"""Parts of one input, packed by runs that know nothing of each other; and two runs in one folder."""

import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon_packed import ChatEncoder, ConfigError, PackOptions, SourceError, get_packed_loader, pack
from tests.internals import FolderLock, make_blend, parse_part, write_metadataset
from tests.processes import run_python, start_energon_packed


def ids_in(folder: Path) -> list[str]:
    """Names of all records in the ledger of an output, packed ones and rejects apart."""
    rows = pq.read_table(folder / "lengths.parquet").to_pylist()
    return [row["id"] for row in rows if row["status"] == "packed"]


def records(count: int) -> list[str]:
    """Lines of very different sizes, with blank ones and a broken one."""
    lines = [json.dumps({"id": f"r{i}", "text": "blue square " * (1 + i * i % 37)}) for i in range(count)]
    lines[count // 2] = '{"text": '
    lines.insert(3, "")
    return lines


def test_three_parts_at_once_hold_every_record_once(tokenizer_dir: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(records(300)) + "\n")
    command = ["pack", data, "-o", tmp_path / "{part}", "--tokenizer", tokenizer_dir, "--seq-len", "512"]
    command += ["--workers", "1", "--part", "auto"]
    environment = {**os.environ, "SLURM_NTASKS": "3"}
    runs = [start_energon_packed(*command, env={**environment, "SLURM_PROCID": str(number)}) for number in range(3)]
    assert [run.wait().returncode for run in runs] == [0, 0, 0]
    folders = [tmp_path / f"p{number:03d}" for number in range(3)]
    found = [ids_in(folder) for folder in folders]
    assert all(len(ids) > 60 for ids in found)
    assert sorted(itertools.chain(*found)) == sorted(f"r{i}" for i in range(300) if i != 150)
    rejects = [line for folder in folders for line in (folder / "rejects.jsonl").read_text().splitlines()]
    assert len(rejects) == 1

    folders_and_weights: list[tuple[Path, None]] = [(folder, None) for folder in folders]
    for schema in ("v1", "v2"):
        mix = tmp_path / f"{schema}.yaml"
        write_metadataset(make_blend(folders_and_weights, schema=schema), mix)  # type: ignore[arg-type]
        loader = get_packed_loader(mix, encoder, num_workers=0)
        seen = {name for batch in itertools.islice(loader, 400) for name in batch.ids}
        assert seen == set(itertools.chain(*found))


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_parts_of_several_files_and_formats(tokenizer_dir: Path, tmp_path: Path, count: int) -> None:
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name} {i}"}) for i in range(50)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))  # no newline at the end
    table = pa.table({"text": [f"table {i}" for i in range(500)]})
    pq.write_table(table, tmp_path / "c.parquet")
    (tmp_path / "d.jsonl").write_text("")
    names: list[str] = []
    prefixes = set()
    for number in range(count):
        options = PackOptions(
            inputs=tuple(str(tmp_path / n) for n in ("a.jsonl", "c.parquet", "d.jsonl", "b.jsonl")),
            output_dir=tmp_path / "out" / "{part}",
            part=(number, count),
            tokenizer=tokenizer_dir,
            seq_len=256,
            workers=1,
        )
        result = pack(options)
        found = ids_in(result.shards.parent)
        names += found
        # A part has its share of each input, and not the inputs one after the other.
        shares = [sum(name.startswith(file) for name in found) for file in ("a", "c", "b")]
        assert all(abs(share - size / count) <= 2 for share, size in zip(shares, (50, 500, 50), strict=True)), shares
        prefixes |= {tar.name.rpartition("-")[0] for tar in result.shards.glob("*.tar")}
    assert len(names) == len(set(names)) == 600
    assert prefixes == {f"out_p{number:03d}" for number in range(count)}


def test_part_numbers_are_checked(tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ((3, 3), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match=f"`part` must be I/N with 0 <= I < N, got {part[0]}/{part[1]}"):
            PackOptions(inputs=("x",), output_dir=tmp_path, tokenizer=tokenizer_dir, seq_len=8, part=part)
    with pytest.raises(ConfigError, match=r"contains \{part\}, but `part` is not set. Pass `part=I/N`"):
        PackOptions(inputs=("x",), output_dir=tmp_path / "{part}", tokenizer=tokenizer_dir, seq_len=8)
    with pytest.raises(ConfigError, match="`part` must have the form 0/4, or be auto, got 'x'"):
        parse_part("x")
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    with pytest.raises(ConfigError, match="SLURM_PROCID"):
        parse_part("auto")
    (tmp_path / "one.jsonl").write_text("{}")
    with pytest.raises(SourceError, match=r"part 0/9 of the input is empty; use fewer parts"):
        pack(
            PackOptions(
                inputs=(str(tmp_path / "one.jsonl"),),
                output_dir=tmp_path,
                tokenizer=tokenizer_dir,
                seq_len=8,
                part=(0, 9),
            )
        )


def _hold(folder: Path, ready: Any, release: Any) -> None:
    with FolderLock(folder, folder / ".work"):
        ready.set()
        release.wait()


def test_a_second_run_in_one_folder_is_refused(build: Any, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path / "out", ready, release))
    holder.start()
    ready.wait()
    with pytest.raises(ConfigError, match=f"is being written by process {holder.pid} on {socket.gethostname()}"):
        build([{"text": "hello there"}])
    assert not (tmp_path / "out" / "webdataset").exists()
    release.set()
    holder.join()
    assert build([{"text": "hello there"}]).manifest.packed == 1
    assert not (tmp_path / "out" / ".work" / "owner.json").exists()


def test_the_lock_of_a_killed_run_is_taken_over_on_its_host(build: Any, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path / "out", ready, context.Event()))
    holder.start()
    ready.wait()
    holder.kill()
    holder.join()
    assert (tmp_path / "out" / ".work" / "owner.json").exists()
    assert build([{"text": "hello there"}]).manifest.packed == 1


def test_one_process_does_not_lock_a_folder_twice(tmp_path: Path) -> None:
    work = tmp_path / ".work"
    with FolderLock(tmp_path, work):
        with (
            pytest.raises(ConfigError, match=f"is being written by process {os.getpid()}"),
            FolderLock(tmp_path, work),
        ):
            pass
        code = "import sys; from pathlib import Path; from tests.internals import FolderLock\n"
        code += "with FolderLock(Path(sys.argv[1]), Path(sys.argv[1], '.work')): pass"
        other = run_python(code, tmp_path)
        assert f"is being written by process {os.getpid()}" in other.stderr  # the refusal did not give it away


def test_a_file_system_without_locks_is_refused(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(ConfigError, match="has no file locks: .*; use another `output_dir`"):
        build([{"text": "hello there"}])


def test_a_wrong_name_leaves_no_folder_behind(build: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        build(inputs=(str(tmp_path / "typo.jsonl"),))
    assert not (tmp_path / "out").exists()
