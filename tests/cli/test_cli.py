"""The command line: output, exit status, one-line errors."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click import Command, Context, Group, Option
from click.testing import CliRunner

import energon_packed as energon_packed_package
from energon_packed import PackingManifest
from tests.canary import packed_texts
from tests.internals import SOURCES, DemoDataset, as_options, cli
from tests.printed import invoke
from tests.processes import energon_packed

PACK = ["pack", "d.jsonl", "-o", "out", "--tokenizer", "t"]
TOOL = Path(sys.executable).with_name("energon-packed")


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command without the imports of a new interpreter; `run_installed` has these imports."""
    return energon_packed(*arguments, env={**os.environ, "COLUMNS": "120"}, **options)


def run_installed(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the installed script, so that output of imports would be seen."""
    return subprocess.run(
        [str(TOOL), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
        **options,
    )


def test_the_runbook_line_works_as_written(demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "DIR").symlink_to(tokenizer_dir)
    good = [line for line in demo.jsonl.read_text().splitlines() if "demo-" in line]
    root = demo.jsonl.parent
    (tmp_path / "part_00.jsonl").write_text("\n".join(good).replace('"images/', f'"{root}/images/') + "\n")
    line = (
        "pack --jsonl part_00.jsonl --tokenizer DIR --image-processor Qwen2_5_VLProcessor --factor 28 "
        "--min-pixels 3136 --max-pixels 4000000 --image-root / --sample-class PackedCaptioningSample "
        "--shard-prefix name_a --output-dir out/node_a --seq-len 4096 --no-npy"
    )
    done = run(*shlex.split(line), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = PackingManifest.load(tmp_path / "out" / "node_a")
    assert (manifest.packed, manifest.rejects) == (len(good), {})
    assert [shard.name for shard in manifest.shards] == ["name_a-000000.tar"]


def test_the_summary_table_shows_counts_and_times(demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path) -> None:
    done = run_installed(
        *("pack", demo.jsonl, "-o", tmp_path, "--seq-len", "1024", "--tokenizer", tokenizer_dir),
        *("--world-size", "2", "--micro-batch-size", "2", "--loader-workers", "1"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    manifest = PackingManifest.load(tmp_path)
    rows = {
        cells[0].strip(): cells[1].strip()
        for line in done.stdout.splitlines()
        if len(cells := [c for c in line.split("│") if c.strip()]) == 2
    }
    assert rows["records"] == str(demo.records)
    assert rows["packed"] == str(manifest.packed)
    assert rows["rejected"].startswith(f"{demo.broken} (")
    assert rows["bad_json"] == rows["corrupt_image"] == "1"
    assert rows["packs"] == str(manifest.packs)
    assert rows["tokens"].replace(",", "") == str(manifest.tokens)
    assert rows["utilization"] == f"{manifest.utilization:.2%}"
    assert {"samples per pack", "shards", "size", "measure seconds", "write seconds", "images"} <= set(rows)
    assert re.search(r"world size 2, micro batch 2", done.stdout)
    for stage in ("measure", "plan", "write", "index"):
        assert re.search(rf"^{stage} .* s ", done.stdout, re.MULTILINE)
    assert str(tmp_path / "rejects.jsonl") in done.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--seq-len", "0"], 2, "error: --seq-len must be at least 1, got 0"),
        (["--seq-len", "8"], 1, "error: none of 126 records can be packed"),
        (["--seq-len", "256", "--tokenizer", "/nowhere"], 1, "error: /nowhere is not a folder"),
        (["--seq-len", "256", "--split", "train"], 2, "--split must have the form train=0.98,val=0.02, got 'train'"),
        (["--seq-len", "256", "--algorithm", "magic"], 2, "error: unknown algorithm 'magic'; use one of bfd"),
        (["--seq-len", "256", "--max-reject-rate", "0"], 1, "were rejected (limit --max-reject-rate 0)"),
        (["--seq-len", "256", "--strict"], 1, "--strict stops at the first"),
        (["--seq-len", "256", "--image-root", "/usr"], 1, "missing_image"),
        (["--seq-len", "256", "--image-root", "/nowhere"], 2, "--image-root must be a folder, got /nowhere"),
        (["--seq-len", "many"], 2, "--seq-len must be an integer, such as 8192 or 8k"),
        (["--seq-len", "256", "--max-shard-size", "big"], 2, "use bytes or a unit"),
        ([], 2, "Missing option '--seq-len'"),
    ],
)
def test_errors_are_one_line_and_never_a_traceback(
    demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path, options: list[str], status: int, message: str
) -> None:
    tokenizer = [] if "--tokenizer" in options else ["--tokenizer", str(tokenizer_dir)]
    done = run("pack", demo.jsonl, "-o", tmp_path / "out", *tokenizer, *options)
    assert done.returncode == status
    message = message.replace("126", str(demo.records))
    assert message in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_unreadable_and_unwritable_paths_are_one_line_errors(
    tokenizer_dir: Path, demo: DemoDataset, tmp_path: Path
) -> None:
    options = ("--seq-len", "256", "--tokenizer", tokenizer_dir)
    for source, out, message in (
        (tmp_path / "none.jsonl", tmp_path / "out", "none.jsonl: no such file"),
        (demo.jsonl, demo.jsonl / "out", "Not a directory"),
    ):
        done = run("pack", source, "-o", out, *options)
        assert done.returncode == 1
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_the_demo_packs_and_loads(tmp_path: Path) -> None:
    done = run_installed("demo", "-o", tmp_path / "demo", "--records", "120")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "$ energon-packed pack" in done.stdout
    assert re.search(r"batch 0: \d+ samples, input_ids \(1, \d+\), position_ids \(4, 1, \d+\)", done.stdout)
    packed = sum(1 for line in (tmp_path / "demo" / "source" / "data.jsonl").open() if "demo-" in line)
    assert f"{packed} samples" in done.stdout
    assert "supervised), no padding" in done.stdout
    assert "Next steps:\n  energon-packed inspect " in done.stdout


def test_the_demo_with_videos_packs_and_loads(tmp_path: Path) -> None:
    done = run("demo", "-o", tmp_path / "demo", "--records", "60", "--videos")
    assert done.returncode == 0, done.stderr
    shapes = r"pixel_values_videos \((\d+), 1176\), video_grid_thw \((\d+), 3\), second_per_grid_ts \((\d+),\)"
    batches = re.findall(shapes, done.stdout)
    records = (tmp_path / "demo" / "source" / "data.jsonl").read_text().splitlines()
    videos = [line for line in records if '"demo-' in line and "videos/" in line]
    assert sum(int(count) for _, count, _ in batches) == sum(int(count) for *_, count in batches) == len(videos)
    rejects = [json.loads(line) for line in (tmp_path / "demo" / "rejects.jsonl").read_text().splitlines()]
    reasons = {reject["id"]: reject["reason"] for reject in rejects}
    assert reasons["broken-cut-video"] == "corrupt_video"
    assert reasons["broken-missing-video"] == "missing_video"


def test_the_demo_with_videos_without_pyav_is_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    error = invoke("demo", "-o", tmp_path / "demo", "--records", "20", "--videos").exception
    assert str(error) == "`av` is needed for video and audio files; pip install 'energon-packed[video]'"


def test_the_demo_does_not_replace_other_datasets(tmp_path: Path) -> None:
    tar = tmp_path / "webdataset" / "pack-000000.tar"
    tar.parent.mkdir()
    tar.write_bytes(b"mine")
    done = run("demo", "-o", tmp_path, "--records", "20")
    assert done.returncode == 1
    assert "contains a dataset that the demo did not write. Pass another --output-dir" in done.stderr
    assert tar.read_bytes() == b"mine"
    assert not (tmp_path / "source").exists()


def test_wrong_usage_is_one_line_with_the_way_to_the_help() -> None:
    for arguments in (["pack", "--foo"], ["pack"], ["nothing"], ["verify"], ["lengths", "x", "--workers", "many"]):
        done = run(*arguments)
        assert done.returncode == 2
        assert re.fullmatch(r"error: .*[.?)] See 'energon-packed[^']* --help'\.\n", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["pakc"], "No such command 'pakc'. Did you mean 'pack'? See 'energon-packed --help'."),
        (["meta-dataset", "x"], "Did you mean 'metadataset'? See"),
        (["nothing"], "No such command 'nothing'. See"),
    ],
)
def test_an_unknown_command_suggests_a_similar_command(arguments: list[str], suggestion: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert suggestion in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_help_of_pack_lists_every_file_format() -> None:
    shown = " ".join(run("pack", "--help").stdout.split()).split("several at once")[0]
    for suffix in {suffix for source in SOURCES for suffix in source.suffixes}:
        stem, dot, compression = suffix.removeprefix(".").partition(".")
        assert suffix in shown or (f".{stem}" in shown and bool(dot) and f".{compression}" in shown)


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    code = (
        "import runpy, sys; sys.argv = ['energon-packed', '--help']\n"
        "try: runpy.run_module('energon_packed', run_name='__main__')\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'megatron', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pack " in done.stdout
    assert "demo " in done.stdout
    help_text = run("pack", "--help")
    assert help_text.returncode == 0
    for option in ("--seq-len", "--tokenizer", "--image-root", "--overlong", "--max-reject-rate", "--help-all"):
        assert option in help_text.stdout


def test_rejects_can_be_read_as_json(demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path) -> None:
    run("pack", demo.jsonl, "-o", tmp_path, "--seq-len", "1024", "--tokenizer", tokenizer_dir)
    rows = [json.loads(line) for line in (tmp_path / "rejects.jsonl").open()]
    assert {tuple(row) for row in rows} == {("source", "row", "line", "id", "reason", "detail")}
    reasons = {"bad_json", "bad_role", "corrupt_image", "image_count_mismatch", "missing_image"}
    assert {row["reason"] for row in rows} == {*reasons, "no_supervised_tokens"}


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "{}"]])
def test_output_may_be_closed(text_tokenizer_dir: Path, tmp_path: Path, arguments: list[str]) -> None:
    """Standard output may be closed by `>&-` of a shell, or by a service manager."""
    packed = packed_texts(tmp_path, text_tokenizer_dir)
    command = [sys.executable, "-m", "energon_packed", *(one.format(packed) for one in arguments)]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", ".", "--min-utilization", "nan"], "'--min-utilization': nan is not in the range"),
        (["report", ".", "--seed", "-1"], "'--seed': -1 is not in the range"),
        (
            ["order", "replay", ".", "--step", "1", "--world-size", "65537"],
            "'--world-size': 65537 is not in the range",
        ),
        (["demo", "--seq-len", "0"], "'--seq-len': 0 is not in the range"),
        ([*PACK, "--seq-len", "8", "--max-reject-rate", "2"], "--max-reject-rate must be between 0 and 1, got 2.0"),
        ([*PACK, "--seq-len", "8", "--part", "3/2"], "--part must be I/N with 0 <= I < N, got 3/2"),
        ([*PACK, "--seq-len", "8", "--split", "train=0.5"], "the shares of --split add up to 0.5"),
        ([*PACK, "--seq-len", "8", "--unpacked", "--layout", "llava-onevision2"], "Omit one"),
        ([*PACK, "--seq-len", "8", "--map", "x"], "--map"),
        ([*PACK, "--seq-len", "8", "--media-root", "x"], "--media-root must be OLD=NEW, got 'x'"),
        (["pack", "--config", "pack.yaml"], "pack.yaml: unknown option 'seqlen'; did you mean seq_len?"),
        (["lengths", "d.jsonl", "--tokenizer", "t", "--seq-len", "0"], "--seq-len must be at least 1, got 0"),
        (["lengths", "d.jsonl", "--tokenizer", "t", "--seq-len", "many"], "--seq-len must be integers, such as"),
        (
            ["lengths", "d.jsonl", "--tokenizer", "t", "--max-reject-rate", "-1"],
            "--max-reject-rate must be at least 0",
        ),
        (["verify", ".", "--media-root", "x"], "--media-root must be OLD=NEW, got 'x'"),
        (["report", ".", "-o", "page.txt"], "--output must end in .html or .htm, got page.txt"),
        (["inspect", ".", "--pack", "a", "--id", "b"], "--pack and --id must not be combined"),
        (["metadataset", "x.yaml", "a=-1"], "the weight of a must be a finite number >= 0, got '-1'"),
        (["metadataset", "x.yaml", "a=much"], "the weight of a must be a finite number >= 0, got 'much'"),
        (["metadataset", "x.yaml", "a", "--subflavor", "k"], "a subflavor must have the form key=value, got 'k'"),
        (["metadataset", "x.yaml", "a", "--subflavor", "=v"], "a subflavor must have the form key=value, got '=v'"),
        (["metadataset", "x.yaml", "a", "--subflavor", f"k={'9' * 5000}"], "at most 300 digits, got 5000: 9999999999"),
        (["order", "replay", ".", "--step", "1", "--content"], "--content and --data must be set together"),
        (
            ["steps", ".", "--world-size", "3", "--tp", "2"],
            "must be a multiple of --tp x --cp x --pp = 2, got 3",
        ),
    ],
)
def test_wrong_option_values_are_wrong_usage(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pack.yaml").write_text("seqlen: 8\n")
    done = CliRunner().invoke(cli, arguments)
    assert (done.exit_code, message in " ".join(done.output.split())) == (2, True), done.output


def test_every_command_has_help_all() -> None:
    def shown(command: Command, *names: str) -> None:
        done = CliRunner().invoke(cli, [*names, "--help-all"], catch_exceptions=False)
        assert done.exit_code == 0
        missing = {option.opts[0] for option in command.params if isinstance(option, Option)} - {*done.output.split()}
        assert not {flag for flag in missing if f"{flag}," not in done.output}
        if isinstance(command, Group):
            for name in command.list_commands(Context(command)):
                shown(command.get_command(Context(command), name), *names, name)  # type: ignore[arg-type]

    shown(cli)


def test_a_folder_name_that_is_not_utf8_is_a_one_line_error(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    packed = packed_texts(tmp_path, text_tokenizer_dir)
    link = os.fsencode(tmp_path) + b"/caf\xe9"
    os.symlink(packed, link)
    done = run("report", os.fsdecode(link), "-o", tmp_path / "page.html")
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: '.*caf.udce9.*' contains a name that is not valid UTF-8\. Rename the file or folder\.\n", done.stderr
    )


def test_messages_contain_only_options_that_exist() -> None:
    commands = [cli.get_command(Context(cli), name) for name in cli.list_commands(Context(cli))]
    options = {flag for command in commands for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    package = Path(energon_packed_package.__file__).parent
    names = {name for file in package.rglob("*.py") for name in re.findall(r"`\w+(?:=[^`\n]*)?`", file.read_text())}
    shown = {name: as_options(name) for name in names}
    assert {shown["`seq_len`"], shown["`weight_by`"], shown["`use_patch_positions=False`"]} == {
        "--seq-len", "--weight-by", "--no-npy",
    }  # fmt: skip
    wrong = {name: text for name, text in shown.items() if text.startswith("--") and text.split()[0] not in options}
    assert not wrong
    assert shown["`text`"] == "`text`"
    assert as_options("`overlong='split'`") == "--overlong split"


INTERRUPTED = """
import sys
from tests.internals import main

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
main()
"""


def test_a_signal_that_interrupts_an_import_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, "inspect", "x"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\nerror: interrupted; run the same command again to resume\n")
