"""Write datasets as third-party tools write them. The results were compared once with files of these tools."""

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.sources.tars import write_tar

Record = dict[str, Any]


def groups(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Split items into groups of `size`."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def llava_onevision2_pack(key: str, records: Sequence[Record], root: Path) -> list[tuple[str, Any]]:
    """Members of a pack of LLaVA-OneVision-2's offline packer: the bytes of each image, with a name that ends in .jpg.

    `images[i][j]` of the JSON is not the name of a member, and a missing .npy file is an empty name.
    """
    members: list[tuple[str, Any]] = []
    columns: dict[str, list[Any]] = {name: [] for name in ("images", "prompts", "captions", "patch_positions")}
    for i, record in enumerate(records):
        images, arrays = record.get("images", []), record.get("patch_positions", [])
        arrays = [*arrays, *[""] * (len(images) - len(arrays))]
        members += [(f"{key}.img{i}_{j}.jpg", (root / name).read_bytes()) for j, name in enumerate(images)]
        members += [(f"{key}.img{i}_{j}.npy", (root / name).read_bytes()) for j, name in enumerate(arrays) if name]
        stems = [f"img{i:03d}_sub{j:03d}" for j in range(len(images))]
        columns["images"].append([f"{stem}.jpg" for stem in stems])
        columns["patch_positions"].append(
            [stem + ".npy" if name else "" for stem, name in zip(stems, arrays, strict=True)]
        )
        for column, role in (("prompts", "user"), ("captions", "assistant")):
            turns = [turn["content"] for turn in record["messages"] if turn["role"] == role]
            columns[column].append(turns or [""])
    names = ("images", "prompts", "captions")
    value: Record = {name: columns[name] for name in names} | {"sample_count": len(records)}
    if columns["patch_positions"]:
        value["patch_positions"] = columns["patch_positions"]
    if any("fps" in record for record in records):
        value["fps"] = [record.get("fps") for record in records]
    value["timestamp_decimal"] = [record.get("timestamp_decimal", 1) for record in records]
    return [*sorted(members), (f"{key}.json", value)]


def write_llava_onevision2(folder: Path, records: Sequence[Record], root: Path, per_pack: int = 4) -> Path:
    """Write a dataset like `s5_convert_to_webdataset.py`: no indexes, its own split.yaml and sample class."""
    meta = folder / ".nv-meta"
    meta.mkdir(parents=True)
    names = []
    packs = [
        llava_onevision2_pack(f"ps_{number:08d}", group, root)
        for number, group in enumerate(groups(records, per_pack))
    ]
    for number, group in enumerate(groups(packs, 2)):
        names.append(f"pretrain-{number:06d}.tar")
        write_tar(folder / names[-1], [member for pack in group for member in pack])
    kind = {"__module__": "aiak_training_llm.data.multimodal", "__class__": "PackedCaptioningSample"}
    loader_of = {name: f"sample_loader.py:{name}" for name in ("part_filter", "sample_loader")}
    (meta / "dataset.yaml").write_text(yaml.safe_dump({"sample_type": kind, **loader_of}))
    (meta / "split.yaml").write_text(yaml.safe_dump({"split": {"train": names, "val": [], "test": []}}))
    (meta / "sample_loader.py").write_text("raise RuntimeError('code of another package')\n")
    return folder


def read_packs(folder: Path) -> dict[str, dict[str, Any]]:
    """Read packs by key, with parsed JSON and the content of other parts. Only tarfile is used, for independence."""
    packs: dict[str, dict[str, Any]] = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, part = member.name.split(".", 1)
                stream = tar.extractfile(member)
                assert stream is not None
                content = stream.read()
                packs.setdefault(key, {})[part] = json.loads(content) if part == "json" else content
    return packs
