"""The commands of a runbook for distributed offline packing, unchanged, and its silent differences.

The runbook is `distributed-offline-packing` of LLaVA-OneVision-2; only the names of the scripts are replaced.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from PIL import Image

from energon_packed import ChatEncoder, ConfigError, PackedDataset, PackingManifest, PackOptions, pack
from tests.encoding.test_vision_settings import write_model_folder
from tests.internals import FolderLock, as_options, cli, make_blend
from tests.processes import energon_packed

STEP_0 = (
    "lengths --jsonl full.jsonl --tokenizer DIR --image-processor Qwen2_5_VLProcessor --factor 48 --min-pixels 3136 "
    "--max-pixels 4000000 --output token_lens.txt"
)
LENGTHS = (
    "lengths --jsonl part_00.jsonl --tokenizer DIR --image-processor Qwen2_5_VLProcessor --factor 48 "
    "--min-pixels 3136 --max-pixels 4000000 --image-root / --no-npy --output lens.txt"
)
PACK = (
    "pack --jsonl part_00.jsonl --tokenizer DIR --image-processor Qwen2_5_VLProcessor --factor 48 --min-pixels 3136 "
    "--max-pixels 4000000 --image-root / --sample-class PackedCaptioningSample --shard-prefix name_a "
    "--output-dir out/node_a --seq-len 4096 --no-npy"
)


def run(line: str) -> Result:
    result = CliRunner().invoke(cli, shlex.split(line), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def refused(line: str) -> str:
    """Run a command that fails, and return its message."""
    result = CliRunner().invoke(cli, shlex.split(line))
    if result.exit_code == 2:
        return " ".join(result.output.split())
    assert isinstance(result.exception, ConfigError), result.output
    return as_options(str(result.exception))


def shell(line: str) -> str:
    """Run a line of the runbook in bash."""
    return subprocess.run(["bash", "-c", line], check=True, capture_output=True, text=True).stdout


def write_records(folder: Path) -> list[dict[str, Any]]:
    """Write records with absolute image paths, and with patch_positions of any kind, as upstream tools add them."""
    rng = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    anything: list[Any] = [None, [], "", [""], ["gone.npy"], 5, {"a": 1}, [["a.npy", "b.npy", "c.npy"]], [None], True]
    for number, positions in enumerate(anything):
        path = folder / f"{number}.jpg"
        Image.fromarray(rng.integers(0, 255, (100 + 60 * number, 200, 3), dtype=np.uint8)).save(path)
        turns = [{"role": "user", "content": "<image>\nWhat?"}, {"role": "assistant", "content": f"Noise {number}."}]
        found.append({"id": f"a:{number}", "images": [str(path)], "messages": turns, "patch_positions": positions})
    found.append({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]})
    (folder / "part_00.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    return found


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_records(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("which", ["tokenizer alone", "model folder", "folder with other image settings"])
def test_both_lines_of_the_runbook_work(node: Path, text_tokenizer_dir: Path, tokenizer_dir: Path, which: str) -> None:
    folder = {"tokenizer alone": text_tokenizer_dir, "model folder": node / "model"}.get(which, tokenizer_dir)
    if which == "model folder":
        write_model_folder(
            folder, text_tokenizer_dir, template="chat_template.json", tokenizer_class="Qwen2Tokenizer",
            model="llava_onevision2",
        )  # fmt: skip
    shown = run(LENGTHS.replace("DIR", str(folder)))
    assert "11 records (all records), 0 rejected" in shown.output
    read = dict(re.fullmatch(r"(.+):(\d+)", line).groups() for line in Path("lens.txt").read_text().splitlines())  # type: ignore[union-attr]
    assert list(read) == [*(f"a:{number}" for number in range(10)), "part_00:10"]
    done = run(PACK.replace("DIR", str(folder)))
    manifest = PackingManifest.load("out/node_a")
    assert (manifest.sample_class, manifest.packed, manifest.seq_len) == ("PackedCaptioningSample", 11, 4096)
    assert manifest.tokens == sum(map(int, read.values()))
    assert sorted(path.name for path in Path("out/node_a/webdataset").glob("*.tar")) == ["name_a-000000.tar"]
    assert "warning" not in shown.output + done.output
    # The code that `pack` and `inspect` print runs, or a comment names what is missing.
    code = [line for line in done.output.splitlines() if line.startswith("encoder = ")]
    assert code == [line for line in run("inspect out/node_a").output.splitlines() if line.startswith("encoder = ")]
    comment = "# 48 is 16 x 3 or 24 x 2 (patch size x merge size): add vision_family, patch_size or merge_size"
    assert (comment in code[0]) is (which != "model folder")
    told = run(PACK.replace("DIR", str(folder)) + " --verbose").output
    assert (f"image options win over {folder}: " in told) is (which != "tokenizer alone")
    assert ("--factor 48 is 16 x 3 or 24 x 2" in told) is (which != "model folder")
    # The model folder trains on it, whichever folder was given.
    settings = {"vision_family": "llava_onevision2", "factor": 48, "min_pixels": 3136, "max_pixels": 4_000_000}
    encoder = ChatEncoder.from_pretrained(folder, **settings)
    batches = list(PackedDataset("out/node_a", encoder)[number] for number in range(manifest.packs))
    assert sum(len(sample) for samples in batches for sample in samples) == manifest.tokens
    run("verify out/node_a --min-utilization 0.05")


def test_every_step_of_the_runbook_works_word_for_word(
    tmp_path: Path, text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "nfs").mkdir()
    records = write_records(tmp_path / "images")[:-1]
    monkeypatch.chdir(tmp_path / "nfs")
    Path("DIR").symlink_to(text_tokenizer_dir)
    lines = [
        {"images": record["images"], "prompts": ["<image>\nWhat?", "Where?"], "captions": ["Noise.", "Here."]}
        for record in records
    ]
    Path("full.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # 0: the images are outside the folder of the records, and there is no --image-root.
    shown = run(STEP_0).output
    assert "10 records (all records), 0 rejected" in shown
    assert "10 x absolute paths of media: pack needs --image-root" in shown
    assert "warning" not in shown
    lens = [int(line.rpartition(":")[2]) for line in Path("token_lens.txt").read_text().splitlines()]
    assert min(lens) > 10, "with the tokens of the images"
    refusal = CliRunner().invoke(cli, shlex.split(f"{STEP_0.partition(' --output')[0]} --output-dir kept"))
    assert "image_outside_root" in str(refusal.exception), "pack reuses these measurements"
    # 1
    shell("split -l 5 -d --additional-suffix=.jsonl full.jsonl part_")
    # 4
    for number, node in enumerate("ab"):
        line = PACK.replace("part_00", f"part_0{number}").replace("name_a", f"name_{node}")
        done = energon_packed(*shlex.split(line.replace("node_a", f"node_{node}")))
        assert (done.returncode, done.stderr) == (0, "")
        Path(f"node_{node}.log").write_text(done.stdout)
    # 5
    assert shell("ls out/node_a/webdataset/*.tar | wc -l").strip() == "1"
    assert re.search(r"utilization .*\d%", shell('grep -E "(bins|util|efficiency)" node_a.log'))
    assert re.search(r"packs +│ +1", shell('grep -E "(packs|util)" node_a.log'))  # the replacement on the page
    shell("mkdir tar && tar -xf out/node_a/webdataset/name_a-000000.tar -C tar")
    keys = json.loads(next(Path("tar").glob("*.json")).read_text()).keys()
    assert {"images", "prompts", "captions", "sample_count"} <= keys
    # 6
    run("metadataset train.yaml out/node_a out/node_b --weight-by records --subflavor augmentation=false")
    assert [
        entry["weight"] for entry in yaml.safe_load(Path("train.yaml").read_text())["splits"]["train"]["blend"]
    ] == [5, 5]
    manifests = [PackingManifest.load(f"out/node_{node}") for node in "ab"]
    assert sum(manifest.tokens for manifest in manifests) == sum(lens)


def test_a_sample_class_of_single_samples_is_packed_unless_unpacked(node: Path, text_tokenizer_dir: Path) -> None:
    line = PACK.replace("DIR", str(text_tokenizer_dir)).replace("PackedCaptioningSample", "MultiMixQASample")
    done = run(line)
    assert (
        "--sample-class MultiMixQASample stores single samples; writing PackedMultiMixQASample instead" in done.output
    )
    assert PackingManifest.load("out/node_a").sample_class == "PackedMultiMixQASample"
    assert PackingManifest.load("out/node_a").packs == 1
    single = run(line.replace("--sample-class MultiMixQASample", "--unpacked").replace("node_a", "node_b"))
    assert "stores single samples" not in single.output
    manifest = PackingManifest.load("out/node_b")
    assert (manifest.sample_class, manifest.packs) == ("MultiMixQASample", 11)
    assert PackOptions(
        inputs="x", output_dir="o", seq_len=8, tokenizer=text_tokenizer_dir, unpacked=True
    ).sample_class == "MultiMixQASample"  # fmt: skip
    for wrong in ({"sample_class": "PackedTokensSample"}, {"layout": "llava-onevision2"}):
        with pytest.raises(ConfigError, match="`unpacked` writes MultiMixQASample, one sample per member, but `"):
            PackOptions(inputs="x", output_dir="o", seq_len=8, tokenizer=text_tokenizer_dir, unpacked=True, **wrong)
    with pytest.raises(ConfigError, match="`patch_order` must be 'row' or 'auto' with `layout` llava-onevision2"):
        PackOptions(
            inputs="x", output_dir="o", seq_len=8, tokenizer=text_tokenizer_dir, layout="llava-onevision2",
            patch_order="block",
        )  # fmt: skip


def test_lengths_that_cannot_be_listed_are_refused(node: Path, text_tokenizer_dir: Path) -> None:
    line = LENGTHS.replace("DIR", str(text_tokenizer_dir))
    assert "--output lists all records, and --sample measures some of them" in refused(line + " --sample 3")
    assert "is a folder; pass the name of a text file" in refused(line.replace("lens.txt", str(node)))


def test_status_shows_the_progress_of_a_run(node: Path, text_tokenizer_dir: Path) -> None:
    assert "nowhere does not exist; no run has written there" in refused("pack --status -o nowhere")
    assert not Path("nowhere").exists()
    run(LENGTHS.replace("DIR", str(text_tokenizer_dir)) + " --output-dir out/node_a")
    assert run("pack --status -o out/node_a").output == "out/node_a: not finished; 11 records measured\n"
    with FolderLock(Path("out/node_a"), Path("out/node_a/.work")):
        running = run("pack --status -o out/node_a").output
    assert re.fullmatch(r"out/node_a: running \(process \d+ on \S+\); 11 records measured\n", running)
    run(PACK.replace("DIR", str(text_tokenizer_dir)))
    told = run("pack --status -o out/node_a --json").stdout  # with older click, after the line on standard error
    (state,) = json.loads(told[told.index("{") :])["status"]
    assert (state["stage"], state["running"], state["packs"], state["shards"]) == ("done", None, 1, 1)
    for number in (0, 1):
        run(f"{PACK.replace('DIR', str(text_tokenizer_dir)).replace('node_a', '{part}')} --part {number}/2")
    assert [line.split(":")[0] for line in run("pack --status -o out/{part}").output.splitlines()] == [
        "out/p000",
        "out/p001",
    ]


def test_a_low_utilization_fails_verify(node: Path, text_tokenizer_dir: Path) -> None:
    run(PACK.replace("DIR", str(text_tokenizer_dir)))
    failed = CliRunner().invoke(cli, shlex.split("verify out/node_a --fast --min-utilization 0.95"))
    assert failed.exit_code == 1
    assert "✗ utilization is at least 95.00%" in failed.output
    run(PACK.replace("DIR", str(text_tokenizer_dir)).replace("node_a", "node_b") + " --unpacked --sample-class auto")
    message = refused("verify out/node_b --fast --min-utilization 0.95")
    assert "stores single samples, so it has no utilization" in message


def test_a_blend_by_records_with_typed_subflavors(tmp_path: Path, text_tokenizer_dir: Path) -> None:
    for name, count in (("a", 6), ("b", 3)):
        lines = [json.dumps({"text": f"Document {number} of {name}."}) for number in range(count)] + ["{broken"] * 2
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        options: dict[str, Any] = {
            "tokenizer": text_tokenizer_dir,
            "seq_len": 64,
            "workers": 1,
            "max_reject_rate": 1.0,
        }
        pack(tmp_path / f"{name}.jsonl", output_dir=tmp_path / name, **options)
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "mix.yaml"
    run(
        f"metadataset {out} {a} {b} --weight-by records --subflavor augmentation=false --subflavor epoch=3 "
        f"--subflavor rate=0.5 --subflavor 'code=\"1\"' --subflavor mode=on --subflavor zip=007 "
        f"--input-subflavor {b} source=web --input-subflavor {b} augmentation=true"
    )
    entries = yaml.safe_load(out.read_text())["splits"]["train"]["blend"]
    assert [entry["weight"] for entry in entries] == [8, 5]  # lines of the input, broken ones included
    common = {"augmentation": False, "epoch": 3, "rate": 0.5, "code": "1", "mode": "on", "zip": "007"}
    assert [entry["subflavors"] for entry in entries] == [common, {**common, "source": "web", "augmentation": True}]
    with pytest.raises(ConfigError, match="c has subflavors, but is not an input"):
        (tmp_path / "c").mkdir()
        make_blend([(a, None)], input_subflavors={tmp_path / "c": {"x": 1}})
    (a / "webdataset" / ".nv-meta" / "packing.json").unlink()
    with pytest.raises(ConfigError, match="has no packing.json, so its number of records is unknown; set `weight_by`"):
        make_blend([(a, None), (b, None)], weight_by="records")


def test_a_note_reports_that_times_of_frames_are_only_stored(node: Path, text_tokenizer_dir: Path) -> None:
    records = [json.loads(line) for line in Path("part_00.jsonl").read_text().splitlines()]
    videos = [{**one, "fps": 2.0, "timestamp": {"0": "0.5"}} for one in records]
    Path("part_00.jsonl").write_text("".join(json.dumps(one) + "\n" for one in videos))
    done = run(PACK.replace("DIR", str(text_tokenizer_dir)))
    assert PackingManifest.load("out/node_a").notes == {"fps stored, no timestamps in the text": 10}
    assert "fps stored, no timestamps in the text" in done.output
    assert PackingManifest.load("out/node_a").unused_fields == {"timestamp": 11}
    line = PACK.replace("DIR", str(text_tokenizer_dir)).replace("node_a", "node_b") + " --layout llava-onevision2"
    assert "fps: the reader adds timestamps to the measured length" in run(line).output
