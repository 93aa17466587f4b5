"""The code that `pack` prints and packing.json stores: it loads the dataset as it is."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from energon_packed import ChatEncoder, PackingManifest, PackOptions, pack
from tests.internals import DemoDataset, cli, loading_code

HEADING = "load it in Python:\n"


def run(*words: object) -> Result:
    result = CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def executed(code: str, **names: Any) -> dict[str, Any]:
    """Names that the code defines."""
    assert 4 <= len(code.splitlines()) <= 6, code
    exec(compile(code, "code", "exec"), names)
    return names


def loaded(output: str, out: Path) -> dict[str, Any]:
    """Run the printed lines, and the lines of packing.json, which have other loader workers and the same encoder."""
    found = executed(output.split(HEADING)[1])
    stored = json.loads((out / "webdataset/.nv-meta/packing.json").read_text())["loading_code"]
    other = executed("\n".join(stored), path=out)
    assert other["batch"].num_tokens > 0
    assert other.keys() - {"path"} == found.keys()
    return found


@pytest.fixture
def texts(demo: DemoDataset, tmp_path: Path) -> Path:
    path = tmp_path / 'it\'s "text".jsonl'
    lines = [line for line in demo.jsonl.read_text().splitlines() if "image" not in line and "broken" not in line]
    path.write_text("".join(f"{line}\n" for line in lines[:40]))
    return path


CASES: dict[str, tuple[str, str]] = {
    "images": ("images", "--loader-workers 2"),
    "references": ("images", "--media reference"),
    "tokens with images": ("images", "--sample-class PackedTokensSample"),
    "another layout": ("images", "--layout llava-onevision2"),
    "conversations": ("images", "--sample-class PackedMultiMixQASample --loss-on last --max-pixels 100352"),
    "text": ("texts", "--split train=0.8,val=0.2 --micro-batch-size 2"),
    "no training split": ("texts", "--split val=1"),
    "tokens": ("texts", "--sample-class PackedTokensSample --pad-multiple 8"),
    "part of the input": ("texts", "--part 1/2"),
    "single samples": ("texts", "--unpacked"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_printed_code_loads_the_dataset(
    demo: DemoDataset, texts: Path, tokenizer_dir: Path, tmp_path: Path, case: str
) -> None:
    data, options = CASES[case]
    source = demo.jsonl if data == "images" else texts
    out = tmp_path / "a \\ folder's name"
    workers = () if "--loader-workers" in options else ("--loader-workers", 0)
    done = run(
        "pack", source, "-o", out, "--seq-len", 512, "--tokenizer", tokenizer_dir, "--workers", 1,
        "--max-reject-rate", 1, *workers, *shlex.split(options),
    )  # fmt: skip
    found = loaded(done.output, out)
    batch, manifest = found["batch"], PackingManifest.load(out)
    if case == "single samples":
        assert "steps" not in found
    else:
        assert found["steps"] == sum(1 for _ in found["loader"]) + 1  # the batch before is of the same epoch
    assert batch.num_tokens > 0
    assert ("encoder" in found) is (case != "tokens")
    if case != "tokens":
        assert found["encoder"].has_fingerprint(manifest.tokenizer_fingerprint)
    assert run("inspect", out, "--limit", 0).output.count(HEADING) == 1


def test_packs_whose_images_moved_are_packed_again_and_loaded(
    demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    os.symlink(demo.jsonl.parent, old)
    common = ("--seq-len", 512, "--tokenizer", tokenizer_dir, "--workers", 1, "--media", "reference",
              "--max-reject-rate", 1, "--loader-workers", 0)  # fmt: skip
    run("pack", old / demo.jsonl.name, "-o", tmp_path / "first", *common)
    old.rename(new)
    done = run("pack", tmp_path / "first", "-o", tmp_path / "second", *common, "--media-root", f"{old}={new}")
    found = loaded(done.output, tmp_path / "second")
    assert any(batch.pixel_values is not None for batch in found["loader"])


def test_a_comment_in_the_code_reports_an_ambiguous_factor(
    demo: DemoDataset, text_tokenizer_dir: Path, tmp_path: Path
) -> None:
    options = ("--tokenizer", text_tokenizer_dir, "--image-processor", "Qwen2_5_VLProcessor", "--factor", 48,
               "--min-pixels", 3136, "--max-pixels", 4_000_000, "--loader-workers", 0)  # fmt: skip
    done = run("pack", demo.jsonl, "-o", tmp_path / "out", "--seq-len", 2048, *options, "--max-reject-rate", 1)
    assert "warning" not in done.output
    code = done.output.split(HEADING)[1]
    comment = "  # 48 is 16 x 3 or 24 x 2 (patch size x merge size): add vision_family, patch_size or merge_size\n"
    assert comment in code
    found = executed(code.replace(f"){comment}", ', vision_family="llava_onevision2")\n'))
    assert any(batch.pixel_values is not None for batch in found["loader"])


def test_the_code_of_a_custom_encoder_names_its_class(encoder: ChatEncoder, texts: Path, tmp_path: Path) -> None:
    manifest = pack(texts, output_dir=tmp_path / "out", seq_len=512, encoder=encoder, workers=1).manifest
    line = "encoder = ...  # the energon_packed.encoding.chat.ChatEncoder that packed the data"
    assert manifest.loading_code[1] == line
    assert PackingManifest.load(tmp_path / "out").loading_code == manifest.loading_code


def test_values_of_a_damaged_manifest_stay_values(encoder: ChatEncoder, texts: Path, tmp_path: Path) -> None:
    """`inspect` makes the code again, so a file cannot add a line to it."""
    evil = "x\"\nimport os  # '\x1b[2J"
    pack(texts, output_dir=tmp_path / "out", seq_len=512, encoder=encoder, workers=1)
    file = tmp_path / "out/webdataset/.nv-meta/packing.json"
    content = json.loads(file.read_text()) | {"loading_code": ["import os"]}
    for settings in ({"processor_class": evil}, {"tokenizer": evil, "vision_family": evil}):
        file.write_text(json.dumps(content | {"encoder": settings}))
        code = loading_code(PackingManifest.load(tmp_path / "out"))
        assert "import os" not in code
        assert len(code) == 5
        compile("\n".join(code), "code", "exec")
        output = run("inspect", tmp_path / "out", "--limit", 0).output
        assert "\nimport os" not in output
        assert "\x1b" not in output


def test_options_of_pack_are_arguments_of_the_encoder(tokenizer_dir: Path, tmp_path: Path) -> None:
    """The same names, types and errors, so a dict of options serves both."""
    options: dict[str, Any] = {
        "tokenizer": tokenizer_dir, "processor": str(tokenizer_dir), "image_processor": "Qwen2_5_VLProcessor",
        "vision_family": "qwen2_5_vl", "factor": 32, "patch_size": 16, "merge_size": 2, "min_pixels": 3136,
        "max_pixels": 200_000, "patch_order": "row", "loss_on": "last", "tokenizer_engine": "tokenizers",
        "allow_special_in_text": True,
    }  # fmt: skip
    packing = PackOptions(inputs="x", output_dir=tmp_path, seq_len=8, **options)
    given, recorded = packing.encoder_loader.load(), packing.encoder_loader.as_dict()
    for again in (options, recorded):
        encoder = ChatEncoder.from_pretrained(**again)
        assert encoder.fingerprint() == given.fingerprint()
        assert encoder.vision is not None
        assert (encoder.vision.image_processor.patch_size, encoder.vision.merge_size) == (16, 2)
