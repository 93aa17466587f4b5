"""`pack(...)` from Python, config files, a Processor of one's own, and measurements that two commands share."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from energon_packed import (
    ChatEncoder,
    ConfigError,
    Conversation,
    EncodedSample,
    PackedDataset,
    PackingManifest,
    PackOptions,
    PackResult,
    Processor,
    get_packed_loader,
    pack,
)
from tests.internals import (
    LengthsOptions,
    LocalEngine,
    as_options,
    cli,
    declared,
    make_blend,
    parse_seq_len,
    parse_size,
    prefix_of,
)


def tars(result: PackResult) -> dict[str, bytes]:
    return {tar.name: tar.read_bytes() for tar in result.shards.glob("*.tar")}


def test_the_command_line_a_config_file_and_python_make_the_same_shards(
    demo: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    first = pack(
        demo.jsonl,
        output_dir=tmp_path / "a",
        seq_len=512,
        tokenizer=str(tokenizer_dir),
        split={"train": 0.9, "val": 0.1},
        max_shard_bytes=1 << 20,
        max_reject_rate=0.5,
        use_patch_positions=False,
        shard_prefix="x",
        workers=1,
    )
    config = {
        "inputs": [str(demo.jsonl)],
        "seq-len": 4096,
        "tokenizer": str(tokenizer_dir),
        "split": "train=0.9,val=0.1",
        "max-shard-size": "1M",
        "max_reject_rate": 0.5,
        "no-npy": True,
        "shard-prefix": "x",
        "workers": 1,
    }
    (tmp_path / "pack.yaml").write_text(yaml.safe_dump(config))
    run = CliRunner().invoke
    options = ["--config", str(tmp_path / "pack.yaml"), "-o", str(tmp_path / "b"), "--seq-len", "512"]
    assert run(cli, ["pack", *options]).exit_code == 0
    options = ["-o", str(tmp_path / "c"), "--seq-len", "512", "--tokenizer", str(tokenizer_dir), "--no-npy"]
    options += [
        "--shard-prefix",
        "x",
        "--split",
        "train=90,val=10",
        "--max-shard-size",
        "1M",
        "--max-reject-rate",
        "0.5",
    ]
    assert run(cli, ["pack", str(demo.jsonl), *options]).exit_code == 0
    for name in ("b", "c"):
        assert {t.name: t.read_bytes() for t in (tmp_path / name / "webdataset").glob("*.tar")} == tars(first)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq_lem: 4", "unknown option 'seq_lem'; did you mean seq_len?"),
        ("encoder: x", "unknown option 'encoder'"),
        ("split: 5", "`split` must be shares such as"),
        ("inputs: 5", "`inputs` must be a path or a list of paths, got 5"),
        ("strict: 'no'", "strict must be true or false, got 'no'"),
        ("[1]", "must be a mapping of option names"),
        ("a: [", "is not YAML"),
        ("seq_len: many", "`seq_len` must be an integer"),
        ("split: most", "`split` must have the form train=0.98,val=0.02, got 'most'"),
        ("overlong: keep", "`overlong` must be one of drop, error, truncate, split, got 'keep'"),
    ],
)
def test_mistakes_in_a_config_file_are_named(
    demo: Any, tokenizer_dir: Path, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    options = ["--config", str(tmp_path / "c.yaml"), "-o", str(tmp_path / "o"), "--tokenizer", str(tokenizer_dir)]
    if "seq_len" not in text:
        options += ["--seq-len", "64"]
    inputs = [] if "inputs" in text else [str(demo.jsonl)]
    done = CliRunner().invoke(cli, ["pack", *inputs, *options])
    assert (done.exit_code, as_options(message) in " ".join(done.output.split())) == (2, True), done.output


def test_mistakes_in_python_are_named(tokenizer_dir: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    good: dict[str, Any] = {"output_dir": tmp_path, "seq_len": 8}
    for changes, message in (
        ({"tokenizer": tokenizer_dir, "sequence_length": 8}, "unknown argument 'sequence_length'"),
        ({}, "pass exactly one of `tokenizer` and, from Python, `encoder`, got neither"),
        ({"tokenizer": tokenizer_dir, "encoder": encoder}, "`encoder`, got both"),
        ({"encoder": tokenizer_dir}, "must be a Processor such as ChatEncoder, got"),
        ({"tokenizer": tokenizer_dir, "seq_len": "8x"}, "`seq_len` must be an integer"),
        ({"tokenizer": tokenizer_dir, "seq_len": "0.3k"}, "`seq_len` must be an integer"),
        ({"tokenizer": tokenizer_dir, "seq_len": 8.5}, "`seq_len` must be an integer"),
    ):
        with pytest.raises(ConfigError, match=message):
            pack("x.jsonl", **{**good, **changes})
    with pytest.raises(ConfigError, match="missing required arguments: `output_dir`, `seq_len`"):
        pack("x.jsonl", tokenizer=tokenizer_dir)
    with pytest.raises(ConfigError, match="invalid size 'big'"):
        parse_size("big")
    assert (parse_size("512M"), parse_size("1.5 KiB"), parse_size("7")) == (512 << 20, 1536, 7)


def test_numbers_of_tokens_take_a_k_everywhere(demo: Any, tokenizer_dir: Path, tmp_path: Path) -> None:
    assert (parse_seq_len("8k"), parse_seq_len("1.5K"), parse_seq_len("4096")) == (8192, 1536, 4096)
    settings: dict[str, Any] = {"inputs": demo.jsonl, "output_dir": tmp_path / "out", "tokenizer": tokenizer_dir}
    assert PackOptions(**settings, seq_len="1k").seq_len == 1024  # type: ignore[arg-type]
    assert LengthsOptions(inputs=demo.jsonl, tokenizer=tokenizer_dir, seq_lens="1k 2k").seq_lens == (1024, 2048)  # type: ignore[arg-type]
    (tmp_path / "c.yaml").write_text("seq_len: 1k\nmax_reject_rate: 0.5\nworkers: 1\n")
    options = [str(demo.jsonl), "--tokenizer", str(tokenizer_dir), "--config", str(tmp_path / "c.yaml")]
    for folder, more in (("a", []), ("b", ["--seq-len", "2K"])):
        done = CliRunner().invoke(cli, ["pack", *options, "-o", str(tmp_path / folder), *more])
        assert done.exit_code == 0, done.output
        assert PackingManifest.load(tmp_path / folder).seq_len == 1024 * (1 + len(more) // 2)
    shown = CliRunner().invoke(cli, ["lengths", *options[:3], "--workers", "1", "--seq-len", "1k", "2k"])
    assert "2,048" in shown.output


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        ("train=90,val=10", {"train": 0.9, "val": 0.1}),
        ("val=1,train=3", {"train": 0.75, "val": 0.25}),
        ({"train": 99.5, "val": 0.5}, {"train": 0.995, "val": 0.005}),
        ("train=0.9,val=0.1", {"train": 0.9, "val": 0.1}),
        ("train=0.9,val=0.2", "add up to 1.1; they must add up to 1 or 100, or be whole numbers"),
        ("train=0", "add up to 0;"),
    ],
)
def test_shares_are_normalized(tokenizer_dir: Path, tmp_path: Path, given: Any, shares: Any) -> None:
    def options() -> PackOptions:
        return PackOptions(inputs=("x",), output_dir=tmp_path, tokenizer=tokenizer_dir, seq_len=8, split=given)

    if isinstance(shares, str):
        with pytest.raises(ConfigError, match=shares):
            options()
    else:
        assert list(options().split.items()) == list(shares.items())


@pytest.mark.parametrize(
    ("folder", "part", "prefix"),
    [
        ("node_a", None, "node_a"),
        ("my data.v2", None, "my_data_v2-08323681"),
        ("数据", None, "pack-5440f742"),
        ("数据", (2, 4), "pack-5440f742_p002"),
        ("数据 2", None, "2-733620da"),
        ("{part}", (2, 4), "above_p002"),
        ("out-{part}", (2, 4), "out_p002"),
        ("out", (0, 4), "out_p000"),
        ("a/..", None, "above"),
        ("x" * 100, None, f"{'x' * 55}-09ecb6eb"),
    ],
)
def test_the_prefix_is_the_name_of_the_folder(
    tokenizer_dir: Path, tmp_path: Path, folder: str, part: tuple[int, int] | None, prefix: str
) -> None:
    settings: dict[str, Any] = {"inputs": ("x",), "tokenizer": tokenizer_dir, "seq_len": 8, "part": part}
    options = PackOptions(**settings, output_dir=tmp_path / "above" / folder)
    assert options.prefix == prefix
    assert replace(options, seed=1).prefix == prefix
    assert prefix_of(Path("/")) == "pack"


NAMES = (
    "数据",
    "图片",
    "é",
    "e\u0301",
    "a b",
    "a_b",
    "a.b",
    "a-b",
    "_a",
    "a",
    "a_",
    "😀",
    "-",
    "_",
    ".a",
    "x" * 64,
    "x" * 65,
    "x" * 66,
)


def test_names_of_folders_have_distinct_prefixes() -> None:
    prefixes = [prefix_of(Path("above", name)) for name in NAMES]
    assert len({prefix.casefold() for prefix in prefixes}) == len(NAMES)
    assert all(re.fullmatch("[A-Za-z0-9_-]{1,64}", prefix) for prefix in prefixes)
    assert prefixes == [prefix_of(Path("other", name)) for name in NAMES]


def test_default_outputs_blend(build: Any, tmp_path: Path) -> None:
    records = [{"text": f"line {n}"} for n in range(20)]
    folders = [build(records, output_dir=tmp_path / name).shards for name in ("first", "cn/数据", "cn/图片")]
    assert len(make_blend([(folder, None) for folder in folders]).train) == 3


def test_every_option_says_what_it_does() -> None:
    for cls in (PackOptions, LengthsOptions):
        for one in declared(cls):
            assert one.help.endswith(".")
            assert one.flags or one.name == "sources"  # only in config files and Python
            assert one.group
    names = {one.name for one in declared(PackOptions)} | {"encoder"}
    assert names == {field for field in PackOptions.__dataclass_fields__}


class Letters(Processor):
    """One token a letter; the last half is supervised."""

    def encode(self, conversation: Conversation) -> EncodedSample:
        """Code points."""
        text = "".join(message.content for message in conversation.messages)
        ids = np.array([ord(letter) for letter in text], dtype=np.int64)
        return EncodedSample(id=conversation.id, input_ids=ids, labels=np.where(np.arange(len(ids)) > 2, ids, -100))


@pytest.mark.parametrize("flavor", ["PackedCaptioningSample", "PackedTokensSample"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_processor_of_ones_own_packs_and_loads(tmp_path: Path, flavor: str, workers: int) -> None:
    rows = [{"prompts": ["Count to."], "captions": ["x" * (n % 40 + 1)]} for n in range(100)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options: dict[str, Any] = {"output_dir": tmp_path / "o", "seq_len": 256, "sample_class": flavor}
    result = pack(tmp_path / "d.jsonl", encoder=Letters(), workers=workers, **options)
    assert (result.manifest.packed, result.manifest.tokens) == (100, sum(len(r["captions"][0]) + 9 for r in rows))
    for source in (PackedDataset(result.shards, Letters()), get_packed_loader(tmp_path / "o", Letters(), epochs=1)):
        ids = [s.id for pack in source for s in pack] if isinstance(source, PackedDataset) else []
        ids = ids or [name for batch in source for name in batch.ids]
        assert sorted(ids) == sorted(f"d:{n}" for n in range(100))
    shown = CliRunner().invoke(cli, ["verify", str(tmp_path / "o")])
    assert "was packed with the Processor tests.pipeline.test_python_api.Letters" in str(shown.exception)
    assert CliRunner().invoke(cli, ["verify", str(tmp_path / "o"), "--fast"]).exit_code == 0
    again = pack(tmp_path / "d.jsonl", encoder=Letters(), workers=workers, overwrite=True, **options)
    assert again.manifest.counters["reused"] == 0  # without a fingerprint nothing is reused


def test_pack_reuses_what_lengths_measured(demo: Any, tokenizer_dir: Path, tmp_path: Path) -> None:
    common = [str(demo.jsonl), "--tokenizer", str(tokenizer_dir), "-o", str(tmp_path / "out"), "--workers", "1"]
    shown = CliRunner().invoke(cli, ["lengths", *common, "--seq-len", "512", "1024"])
    assert shown.exit_code == 0, shown.output
    result = pack(
        demo.jsonl, tokenizer=tokenizer_dir, output_dir=tmp_path / "out", seq_len=512, max_reject_rate=0.5, workers=1
    )
    # The chunk with the missing image is measured again, in case that image exists now.
    counters = result.manifest.counters
    assert counters["reused"] + counters["measured"] == demo.records
    clean = tmp_path / "clean.jsonl"
    clean.write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(50)))
    common[0] = str(clean)
    assert CliRunner().invoke(cli, ["lengths", *common, "--seq-len", "64"]).exit_code == 0
    result = pack(clean, tokenizer=tokenizer_dir, output_dir=tmp_path / "out", seq_len=64, workers=1, overwrite=True)
    counters = {"measured": 0, "tokenized": 0, "reused": 50, "shards_written": 1, "shards_reused": 0}
    assert result.manifest.counters == counters


def test_workers_can_be_spawned(demo: Any, tokenizer_dir: Path, tmp_path: Path) -> None:
    """What macOS does, where forking a process with threads is not safe."""
    assert sorted(LocalEngine(2, "spawn").run(abs, range(-20, 0))) == [*range(1, 21)]
    code = (
        "import sys; from energon_packed import pack\n"
        "from tests.internals import engine\n"
        "if __name__ == '__main__':\n"
        "    engine.sys = type('S', (), {'platform': 'darwin'})\n"
        "    assert engine.LocalEngine(2).start_method == 'spawn'\n"
        "    pack(sys.argv[1], output_dir=sys.argv[2], tokenizer=sys.argv[3], seq_len=512, workers=2,\n"
        "         max_reject_rate=0.5, shard_prefix='x')\n"
    )
    (tmp_path / "run.py").write_text(code)
    arguments = [str(demo.jsonl), str(tmp_path / "spawned"), str(tokenizer_dir)]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), *arguments], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    forked = pack(
        demo.jsonl,
        output_dir=tmp_path / "f",
        tokenizer=tokenizer_dir,
        seq_len=512,
        workers=2,
        max_reject_rate=0.5,
        shard_prefix="x",
    )
    spawned = {tar.name: tar.read_bytes() for tar in (tmp_path / "spawned" / "webdataset").glob("*.tar")}
    assert spawned == tars(forked)


def test_workers_use_torch_after_a_fork_of_a_process_with_its_threads() -> None:
    """As image and video processors do with torchvision: without a limit, the workers wait for threads forever."""
    code = (
        "import torch; from tests.internals import LocalEngine\n"
        "torch.set_num_threads(2)\n"
        "def total(size): return int(torch.ones(size).permute(1, 0).contiguous().sum())\n"
        "assert total((2000, 1000)) == 2_000_000\n"
        "print(sorted(LocalEngine(2).run(total, [(1000, 1000), (2000, 1000)])))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[1000000, 2000000]\n", done.stderr


def test_cores_are_counted_where_affinity_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.internals import available_cores

    assert available_cores() >= 1
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert available_cores() == os.cpu_count()
