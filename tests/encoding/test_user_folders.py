"""No file in the user's cache folder decides tokens, and no run needs a home folder or writes below it."""

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
from pathlib import Path

folder, tokenizer = Path(sys.argv[1]), sys.argv[2]
from energon_packed import ChatEncoder, DataflowConfig, PackedDataset, PackedIterableDataset, get_packed_loader, pack
from tests.internals import main

out = folder / "out"
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


@pytest.fixture
def folder(text_tokenizer_dir: Path) -> Iterator[Path]:
    """Records and a tokenizer in a folder that every user may read and write, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(text_tokenizer_dir, folder / "tokenizer")
        turns = [{"role": role, "content": f"the {role}"} for role in ("user", "assistant")]
        (folder / "d.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(RECORDS)))
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o777)
        yield folder


def run(folder: Path, environment: dict[str, str], *command: str) -> str:
    """The last line of a run of everything that loads a tokenizer."""
    kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [*command, sys.executable, "-c", SCRIPT, str(folder), str(folder / "tokenizer")],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**kept, "PYTHONPATH": os.pathsep.join(map(str, sys.path)), **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.rmtree(folder / "out")
    return done.stdout.splitlines()[-1]


def damaged(value: Any) -> Any:
    """The same JSON with other texts."""
    if isinstance(value, dict):
        return {key: damaged(item) for key, item in value.items()}
    if isinstance(value, list):
        return [damaged(item) for item in value]
    return value.replace("<|im_end|>", " and so on <|im_end|>") if isinstance(value, str) else value


def test_files_in_the_cache_folder_do_not_change_tokens(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    first = run(folder, environment)
    assert first.startswith(f"PACKED {RECORDS} ")
    for file in home.rglob("*.json"):
        file.write_text(json.dumps(damaged(json.loads(file.read_bytes()))))
    assert run(folder, environment) == first
    for file in home.rglob("*.json"):
        file.write_text('{"answer": 3, "backend": null, "chat_template": 5, "special_tokens": []}')
    assert run(folder, environment) == first


@pytest.mark.parametrize("class_", ["TokenizersBackend", "Qwen2Tokenizer"])
def test_nothing_is_written_below_the_home_folder(folder: Path, tmp_path: Path, class_: str) -> None:
    settings = json.loads((folder / "tokenizer" / "tokenizer_config.json").read_text())
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": class_}))
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
    assert run(folder, {}, "setpriv", *user, *reads).startswith(f"PACKED {RECORDS} ")
    assert {path.name for path in folder.iterdir()} == before
