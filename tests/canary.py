"""Canary: code that leaves a trace when it is run, and a small packed dataset that may contain it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from energon_packed import PackOptions, pack


class Canary:
    """File that `code`, `tag` or `object` create when they are run, in this process or in another process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "canary"

    @property
    def code(self) -> str:
        """Python code that creates the file, with the functions of a sample_loader.py."""
        return (
            f"open({str(self.path)!r}, 'w').close()\n"
            "def sample_loader(raw): return raw\ndef part_filter(part): return True\n"
        )

    @property
    def tag(self) -> str:
        """YAML tag that creates the file if a YAML reader follows it."""
        return f"!!python/object/apply:builtins.open [{str(self.path)!r}, w]"

    @property
    def object(self) -> dict[str, object]:
        """Mapping that Energon would turn into a call that creates a folder with its name."""
        return {"__module__": "os", "__function__": "mkdir", "path": str(self.path)}

    def sang(self) -> bool:
        """True if the code was run."""
        return self.path.exists()


def packed_texts(folder: Path, tokenizer: Path, **options: object) -> Path:
    """Pack a PackedTokensSample dataset of a few conversations into `folder/out/webdataset`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"id": f"r{n}", "messages": [{"role": "user", "content": f"Say {n}."},
              {"role": "assistant", "content": f"It is {n}. " * (n + 1)}]} for n in range(8)]  # fmt: skip
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings: dict[str, object] = {
        "inputs": (str(folder / "data.jsonl"),), "output_dir": folder / "out", "tokenizer": tokenizer,
        "seq_len": 128, "workers": 1, "sample_class": "PackedTokensSample", "shard_prefix": "s", "loss_on": "all",
    }  # fmt: skip
    return pack(PackOptions(**{**settings, **options})).shards  # type: ignore[arg-type]


@contextmanager
def changed(folder: Path, name: str, content: str | bytes) -> Iterator[None]:
    """Context manager that replaces the content of a file of `.nv-meta`."""
    file = folder / ".nv-meta" / name
    before = file.read_bytes() if file.exists() else None
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        yield
    finally:
        file.unlink() if before is None else file.write_bytes(before)


def copied(dataset: Path, to: Path) -> Path:
    """Copy the output folder of a dataset to `to`, and return the copied dataset."""
    shutil.copytree(dataset.parent, to)
    return to / dataset.name


def dataset_yaml(**fields: object) -> str:
    """Content of a dataset.yaml with a sample class of Energon."""
    return yaml.safe_dump({"sample_type": {"__module__": "megatron.energon", "__class__": "TextSample"}, **fields})
