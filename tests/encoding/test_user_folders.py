"""No run needs a home folder or writes below it, so that no file in the user's cache folder decides tokens."""

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path

folder = Path(sys.argv[1])
from energon_packed import ChatEncoder, DataflowConfig, PackedDataset, PackedIterableDataset, get_packed_loader, pack
from tests.internals import main

for tokenizer in sys.argv[2:]:
    out = folder / "out" / Path(tokenizer).name
    result = pack(folder / "d.jsonl", output_dir=out, tokenizer=tokenizer, seq_len=256, workers=2, shard_prefix="p")
    encoder = ChatEncoder.from_pretrained(tokenizer)
    row = PackedDataset(result.shards, encoder)[0]
    batch = next(iter(get_packed_loader(result.shards, encoder, num_workers=0)))
    config = DataflowConfig(dataset_path=str(folder / "d.jsonl"), packing_length=256, processor_config=tokenizer)
    next(iter(PackedIterableDataset(config)))
    for arguments in (["lengths", folder / "d.jsonl", "--tokenizer", tokenizer, "--seq-len", "256"], ["verify", out]):
        sys.argv = ["energon-packed", *map(str, arguments)]
        try:
            main()
        except SystemExit as stop:
            assert not stop.code, f"{arguments[0]} ended with status {stop.code}"
    print("PACKED", result.manifest.packed, result.manifest.tokens)
"""
RECORDS = 40
CLASSES = ("TokenizersBackend", "Qwen2Tokenizer")


@pytest.fixture
def folder(text_tokenizer_dir: Path) -> Iterator[Path]:
    """Records and tokenizers in a folder that every user may read and write, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for class_ in CLASSES:
            shutil.copytree(text_tokenizer_dir, folder / class_)
            settings = json.loads((folder / class_ / "tokenizer_config.json").read_text())
            (folder / class_ / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": class_}))
        turns = [{"role": role, "content": f"the {role}"} for role in ("user", "assistant")]
        (folder / "d.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(RECORDS)))
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o777)
        yield folder


def run(folder: Path, environment: dict[str, str], *command: str) -> None:
    """Run everything that loads a tokenizer, with tokenizers of each class."""
    kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [*command, sys.executable, "-c", SCRIPT, str(folder), *(str(folder / class_) for class_ in CLASSES)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**kept, "PYTHONPATH": os.pathsep.join(map(str, sys.path)), **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.rmtree(folder / "out")
    packed = [line for line in done.stdout.splitlines() if line.startswith("PACKED")]
    assert len(packed) == len(CLASSES)
    assert all(line.startswith(f"PACKED {RECORDS} ") for line in packed)


def test_nothing_is_written_below_the_home_folder_that_could_decide_tokens(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    run(folder, {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")})
    assert [str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()] == []


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, to become another user")
def test_a_user_without_home_and_passwd_entry(folder: Path) -> None:
    """A container's user: it may read the installation, wherever that is, and not write there."""
    with pytest.raises(KeyError):
        pwd.getpwuid(54321)
    before = {path.name for path in folder.iterdir()}
    user = ("--reuid=54321", "--regid=54321", "--clear-groups")
    reads = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    run(folder, {}, "setpriv", *user, *reads)
    assert {path.name for path in folder.iterdir()} == before
