"""What surrounds a run does not change a byte: locale, time zone, hash seed, umask, folder names, workers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from energon_packed import PackedDataset, get_packed_loader
from tests.canary import packed_texts

ODD = "a b/ü日 [1-9]*?\n{x,y}#%41'\""
"""A folder whose name globs, brace patterns, URIs and shells would read as something else."""


def contents(dataset: Path) -> dict[str, bytes]:
    """All files of a dataset but packing.json, by name; that one without the paths and the work of the run."""
    files = {str(file.relative_to(dataset)): file for file in dataset.rglob("*") if file.is_file()}
    manifest = json.loads(files.pop(".nv-meta/packing.json").read_bytes())
    for name in ("counters", "encoder", "sources", "tokenizer_engine"):
        manifest.pop(name)
    return {name: file.read_bytes() for name, file in files.items()} | {"packing": json.dumps(manifest).encode()}


def test_bytes_are_the_same_in_every_environment(tmp_path: Path, text_tokenizer_dir: Path) -> None:
    expected = contents(packed_texts(tmp_path / "plain", text_tokenizer_dir))
    assert sum(name.endswith(".tar") for name in expected) == 1
    odd = tmp_path / ODD
    odd.mkdir(parents=True)
    shutil.copy(tmp_path / "plain" / "data.jsonl", odd / "data [2].jsonl")
    shutil.copytree(text_tokenizer_dir, odd / "tokenizer")
    settings = ("--seq-len", "128", "--sample-class", "PackedTokensSample", "--loss-on", "all")
    for number, (cwd, given, variables, umask) in enumerate(
        (
            (odd, Path(), {"LC_ALL": "C", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "1"}, 0o077),
            (
                Path("/"),
                odd,
                {"LANG": "tr_TR.UTF-8", "PYTHONIOENCODING": "ascii", "TZ": "UTC+12", "PYTHONHASHSEED": "77"},
                0o002,
            ),
        )
    ):
        out, workers = given / f"out{number}", str(number + 2)
        arguments = ["pack", given / "data [2].jsonl", "-o", out, "--tokenizer", given / "tokenizer", *settings]
        arguments += ["--workers", workers, "--shard-prefix", "s"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
        ran = subprocess.run(
            [sys.executable, "-m", "energon_packed", *map(str, arguments)],
            cwd=cwd, env=environment, umask=umask, capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr.decode(errors="replace")
        assert contents(odd / f"out{number}" / "webdataset") == expected, variables
        assert (odd / f"out{number}" / "webdataset").stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_dataset_in_an_odd_folder_loads_and_verifies(tmp_path: Path, text_tokenizer_dir: Path) -> None:
    from tests.internals import PackedFolder, make_blend, make_nv_meta, verify, write_metadataset

    odd = tmp_path / ODD
    dataset = packed_texts(odd, text_tokenizer_dir, shard_prefix=None, max_packs_per_shard=1)
    assert [problem for check in verify(PackedFolder.open(odd / "out"), None) for problem in check.problems] == []
    assert len(make_nv_meta(dataset).shards) == len(PackedDataset(dataset)) > 1
    finder = PackedFolder.of_tars(dataset)
    keys = [raw["__key__"] for raw in finder.first(9)]
    assert [finder.pack(key)["__key__"] for key in keys] == keys
    write_metadataset(make_blend([(dataset, 1.0)], epochized=True), odd / "blend [1].yaml")
    for path in (odd / "out", odd / "blend [1].yaml"):
        loader = get_packed_loader(path, epochs=1, shuffle=False, num_workers=0)
        assert sorted(one for batch in loader for one in batch.ids) == [f"r{number}" for number in range(8)]
