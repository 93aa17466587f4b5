"""Write the golden files of images with settings and of objects; see README.md.

python -m tests.golden.record_settings.generate MS_SWIFT
"""

import ast
import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.golden.videos import operators  # noqa: F401

# isort: split
import qwen_vl_utils.vision_process as utils
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.golden.record_settings.cases import BOX_SIZES, OBJECTS, PATCHES, SETTINGS, SIZES, image, messages
from tests.golden.videos.cases import digest

FOLDER = Path(__file__).parent
STATISTICS = {"qwen3_vl": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}}
TEMPLATES = {"qwen2_vl": "Qwen2VLTemplate", "qwen2_5_vl": "Qwen2_5VLTemplate", "qwen3_vl": "Qwen3VLTemplate"}
BOX_SETTINGS: list[dict[str, int]] = [{}, {"max_pixels": 64 * 784}, {"resized_height": 280, "resized_width": 420}]


def images() -> list[dict[str, Any]]:
    """Return a line for each family, size and settings: `fetch_image`, and the processor without its own resize."""
    lines = []
    for family, patch in PATCHES.items():
        processor = Qwen2VLImageProcessorPil(patch_size=patch, **STATISTICS.get(family, {}))
        for size in SIZES:
            for settings in SETTINGS:
                resized = utils.fetch_image({"image": image(*size), **settings}, image_patch_size=patch)
                out = processor(images=[resized], do_resize=False, return_tensors="np")
                grid, values = out["image_grid_thw"][0].tolist(), digest(out["pixel_values"])
                lines.append({"family": family, "size": size, "settings": settings, "grid": grid, "pixels": values})
    return lines


def template(clone: Path, name: str) -> Any:
    """Return a class with the methods of a template of ms-swift that write boxes, from its source."""
    sources = ["swift/template/base.py", "swift/template/templates/qwen.py"]
    classes: dict[str, ast.ClassDef] = {}
    for source in sources:
        text = subprocess.check_output(["git", "-C", str(clone), "show", f"HEAD:{source}"], text=True)
        classes |= {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    methods = ("normalize_bbox", "_get_bbox_str", "replace_ref", "replace_bbox", "_get_height_width")
    own: dict[str, Any] = {"bbox_format": "legacy"}
    names = [name]
    while names[-1] != "Template":
        names.append(classes[names[-1]].bases[0].id)  # type: ignore[attr-defined]
    for base in reversed(names):
        kept = [
            node
            for node in classes[base].body
            if (isinstance(node, ast.FunctionDef) and node.name in methods)
            or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "norm_bbox")
        ]
        future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
        exec(compile(ast.fix_missing_locations(ast.Module([future, *kept], [])), base, "exec"), own)
    return type(name, (), own)()


def check_objects(clone: Path) -> Any:
    """Return `_check_objects` of the preprocessor of datasets, which orders corners."""
    text = subprocess.check_output(
        ["git", "-C", str(clone), "show", "HEAD:swift/dataset/preprocessor/core.py"], text=True
    )
    found = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == "_check_objects")
    found.decorator_list = []
    own: dict[str, Any] = {}
    exec(compile(ast.Module([found], []), "core.py", "exec"), own)
    return own["_check_objects"]


def boxes(clone: Path) -> list[dict[str, Any]]:
    """Return a line for each family, objects and settings: the turns, as `_pre_tokenize` replaces the placeholders."""
    lines, check = [], check_objects(clone)
    for family, patch in PATCHES.items():
        swift = template(clone, TEMPLATES[family])
        for objects in OBJECTS:
            for settings in BOX_SETTINGS:
                row = {"objects": copy.deepcopy(objects)}
                check(row)
                inputs = SimpleNamespace(objects=row["objects"], images=[image(*size) for size in BOX_SIZES])
                swift._get_height_width(inputs)
                inputs.images = [
                    utils.fetch_image({"image": one, **settings}, image_patch_size=patch) for one in inputs.images
                ]
                swift.normalize_bbox(inputs)
                refs, found = iter(inputs.objects["ref"]), iter(inputs.objects["bbox"])
                contents = []
                for turn in messages(len(BOX_SIZES)):
                    text = turn["content"]
                    while "<ref-object>" in text:
                        text = text.replace("<ref-object>", swift.replace_ref(next(refs), 0, inputs)[0], 1)
                    while "<bbox>" in text:
                        text = text.replace("<bbox>", swift.replace_bbox(next(found), 0, inputs)[0], 1)
                    contents.append(text)
                lines.append({"family": family, "objects": objects, "settings": settings, "contents": contents})
    return lines


def main() -> None:
    """Write both files."""
    for name, lines in (("images", images()), ("boxes", boxes(Path(sys.argv[1])))):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (FOLDER / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
