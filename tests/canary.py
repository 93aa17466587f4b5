"""Code that tells that it was run, and a small packed dataset to put it into."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from energon_packed import PackOptions, pack


class Canary:
    """A file that code creates when it is run, in this process or in another one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "canary"

    @property
    def code(self) -> str:
        """Python that creates it, and the functions that a sample_loader.py has."""
        return (
            f"open({str(self.path)!r}, 'w').close()\n"
            "def sample_loader(raw): return raw\ndef part_filter(part): return True\n"
        )

    @property
    def tag(self) -> str:
        """A YAML tag that creates it, where it is followed."""
        return f"!!python/object/apply:builtins.open [{str(self.path)!r}, w]"

    @property
    def object(self) -> dict[str, object]:
        """A mapping that Energon would turn into a call that creates it."""
        return {"__module__": "os", "__function__": "mkdir", "path": str(self.path)}

    def sang(self) -> bool:
        """Whether the code was run."""
        return self.path.exists()


def packed_texts(folder: Path, tokenizer: Path, **options: object) -> Path:
    """A PackedTokensSample dataset of a few texts; `folder/out/webdataset`."""
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
    """A file of `.nv-meta` with other content, for a while."""
    file = folder / ".nv-meta" / name
    before = file.read_bytes() if file.exists() else None
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        yield
    finally:
        file.unlink() if before is None else file.write_bytes(before)


def copied(dataset: Path, to: Path) -> Path:
    shutil.copytree(dataset.parent, to)
    return to / dataset.name


def dataset_yaml(**fields: object) -> str:
    """Content of a dataset.yaml that names a sample class of Energon."""
    return yaml.safe_dump({"sample_type": {"__module__": "megatron.energon", "__class__": "TextSample"}, **fields})
