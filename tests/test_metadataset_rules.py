"""Every command and loader accepts or refuses the same Metadatasets; and the reader agrees with Energon."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from energon_packed import (
    ConfigError,
    EnergonDistributor,
    EnergonPackedError,
    FormatError,
    PackedDataset,
    get_packed_loader,
    steps_per_epoch,
)
from tests.canary import changed, packed_texts
from tests.internals import cli, replay
from tests.printed import separate_runner

HEAD = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
V1 = {"__module__": "megatron.energon", "__class__": "Metadataset"}
LOADING: dict[str, Any] = {"epochs": 1, "num_workers": 0, "shuffle": False}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, text_tokenizer_dir: Path) -> Path:
    """Folders a, b and c, packed, without a val split; `nothing` has no packs, `plain` is no dataset."""
    root = tmp_path_factory.mktemp("rules")
    for name in "abc":
        shards = packed_texts(root / "made" / name, text_tokenizer_dir, shard_prefix=name, seq_len=64)
        shutil.copytree(shards, root / name)
    shutil.copytree(root / "made" / "a" / "out", root / "out")
    (root / "plain").mkdir()
    shutil.copytree(root / "a", root / "not_indexed")
    (root / "not_indexed" / ".nv-meta" / ".info.json").unlink()
    return root


def written(root: Path, value: Any, name: str = "mix.yaml") -> Path:
    file = root / name
    file.write_text(value if isinstance(value, str) else yaml.safe_dump(value, sort_keys=False))
    return file


def command(*arguments: object) -> None:
    """Run a command; raise its error, or AssertionError with its output if it exits with 1."""
    result = CliRunner().invoke(cli, list(map(str, arguments)), standalone_mode=False)
    if isinstance(result.exception, Exception):
        raise result.exception
    assert result.exit_code == 0, result.output


Reader = Callable[[Path, Path], Any]
OFFLINE: dict[str, Reader] = {
    "pack": lambda file, tokenizer: command(
        "pack", file, "-o", file.parent / "new", "--tokenizer", tokenizer, "--seq-len", 64, "--workers", 1
    ),
    "pack --dry-run": lambda file, tokenizer: command(
        "pack", file, "-o", file.parent / "new", "--tokenizer", tokenizer, "--seq-len", 64, "--dry-run"
    ),
    "inspect": lambda file, _: command("inspect", file),
    "inspect --json": lambda file, _: command("inspect", file, "--json"),
    "report": lambda file, _: command("report", file, "-o", file.parent / "page.html"),
    "verify": lambda file, _: command("verify", file, "--fast", "--workers", 1),
    "metadataset": lambda file, _: command("metadataset", file.parent / "outer.yaml", file, "--epochized"),
}
LOADERS: dict[str, Reader] = {
    "get_packed_loader": lambda file, _: list(get_packed_loader(file, **LOADING)),
    "PackedDataset": lambda file, _: PackedDataset(file)[0],
    "EnergonDistributor": lambda file, _: EnergonDistributor(file),
    "steps_per_epoch": lambda file, _: steps_per_epoch(file),
    "replay": lambda file, _: replay(file, 1),
    "order replay": lambda file, _: command("order", "replay", file, "--step", 1),
}
READERS = OFFLINE | LOADERS


def train(*entries: Any, kind: str = "blend", **more: Any) -> dict[str, Any]:
    return {**HEAD, "splits": {"train": {kind: list(entries), **more}}}


A, B = {"path": "a"}, {"path": "b"}
JOINER = {"__module__": "megatron.energon", "__class__": "TextSample"}
ODD: dict[str, tuple[Any, str]] = {
    "weight 0": (train({**A, "weight": 0}, B), "weight of a must be above 0, got 0"),
    "all weights 0": (train({**A, "weight": 0}), "weight of a must be above 0, got 0"),
    "negative weight": (train({**A, "weight": -1}, B), "weight of a must be above 0, got -1"),
    "weight as text": (train({**A, "weight": "2"}, B), "weight of a must be above 0, got '2'"),
    "no weight": (train({**A, "weight": None}, B), "weight of a must be above 0, got None"),
    "repetitions 0": (
        train({**A, "repetitions": 0}, kind="blend_epochized"),
        "repetitions of a must be above 0, got 0",
    ),
    "weight 0 of V1": (
        {**V1, "splits": {"train": {"datasets": [{**A, "weight": 0}, B]}}},
        "weight of a must be above 0, got 0",
    ),
    "weight 0 in another split": (
        {**HEAD, "splits": {"train": A, "val": {"blend": [{**A, "split_part": "train", "weight": 0}]}}},
        "weight of a must be above 0, got 0",
    ),
    "s3": (
        train({"path": "s3://bucket/a"}, B),
        "refers to s3://bucket/a, a URL that Energon cannot read; write it as msc://PROFILE",
    ),
    "msc": (
        train({"path": "msc://profile/a"}, B),
        "refers to msc://profile/a: the profile 'profile' is not configured",
    ),
    "only s3": ({**HEAD, "splits": {"train": {"path": "s3://bucket/a"}}}, "write it as msc://PROFILE/KEY"),
    "missing": (train({"path": "gone"}, B), "refers to .*/gone, which does not exist"),
    "missing in another split": (
        {**HEAD, "splits": {"train": A, "val": {"path": "gone"}}},
        "refers to .*/gone, which does not exist",
    ),
    "the folder of the shards is meant": (train({"path": "out"}, B), "which has no .nv-meta folder; use .*out/webda"),
    "no dataset": (train({"path": "plain"}, B), "refers to .*/plain, which has no .nv-meta folder"),
    "unknown split of a dataset": (
        train({**A, "split_part": "dev"}, B),
        "/a has no packs in split 'dev'; it has trai",
    ),
    "empty split of a dataset": (train({**A, "split_part": "val"}, B), "/a has no packs in split 'val'; it has train"),
    "subset": (train({**A, "subset": {"range": ["0%", "50%"]}}, B), "uses 'subset' of .*/a, which only Energon's own"),
    "subset of a blend": (train(A, B, subset={"range": ["0%", "50%"]}), "uses 'subset', which only Energon's own"),
    "join": (
        {**HEAD, "splits": {"train": {"join": [dict(A), dict(B)], "joiner": JOINER}}},
        "uses 'join', which only Energon's own",
    ),
    "join in a blend": (train({"join": {"x": dict(A)}, "joiner": JOINER}, B), "uses 'join', which only Energon's"),
    "split_config": (train({**A, "split_config": "other.yaml"}, B), "uses 'split_config' of .*/a, which only"),
    "mixed modes": (train({"path": "epochs.yaml"}, B), "blends by weight, and .*epochs.yaml by repetitions"),
    "itself": (train({"path": "mix.yaml"}, B), "mix.yaml contains itself"),
    "no class": ({"splits": train(A)["splits"]}, "split 'train' has no 'datasets'"),
    "another base": ({**train(A, B), "path": "/elsewhere/x.yaml"}, "it has the unknown key 'path'"),
    "unknown key": (train({**A, "wieght": 2}, B), "it has the unknown key 'wieght'"),
    "weight of a single dataset": ({**HEAD, "splits": {"train": {**A, "weight": 2}}}, "the unknown key 'weight'"),
    "an empty blend": (train(), "'blend' of split 'train' has no datasets"),
    "a Recipe": (
        {**train(A, B), "__class__": "Recipe"},
        "mix.yaml is not .* it is a Recipe of Energon 8; write it as a MetadatasetV2 with subflavors",
    ),
    "tags": (train({**A, "tags": {"x": 1}}, B), "it has the unknown key 'tags'"),
    "no splits": ({**HEAD, "splits": {}}, "it has no splits"),
    "an object": (
        train({**A, "subflavors": {"x": {"__module__": "os", "__function__": "getcwd"}}}, B),
        "names os.getcwd, which belongs neither to energon-packed nor to Energon",
    ),
    "an alias": ("splits: {train: {datasets: [&x {path: a}, *x]}}\n", "line 1 has an alias, which Energon ignores"),
    "a document marker": ("---\n" + yaml.safe_dump(train(A, B)), "line 1 is ---, which Energon cannot read"),
    "UTF-16": (yaml.safe_dump(train(A, B)).encode("utf-16").decode("latin-1"), "is not a Metadataset that Energon"),
    "a nested weight 0": (train({"path": "zero.yaml"}, B), "weight of a must be above 0, got 0"),
    "a nested split that is missing": (
        train({"path": "epochs.yaml", "split_part": "x"}),
        "has no split 'x'; it has tr",
    ),
    "not indexed": (train({"path": "not_indexed"}, kind="blend_epochized"), ""),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", [case for case in ODD if case != "not indexed"])
def test_an_invalid_metadataset_is_refused_by_every_reader(
    data: Path, text_tokenizer_dir: Path, case: str, reader: str
) -> None:
    value, message = ODD[case]
    written(data, train({**A, "repetitions": 2}, kind="blend_epochized"), "epochs.yaml")
    written(data, train({**A, "weight": 0}), "zero.yaml")
    file = written(data, value)
    if case == "UTF-16":
        file.write_bytes(value.encode("latin-1"))
    with pytest.raises((EnergonPackedError, AssertionError), match=message) as raised:
        READERS[reader](file, text_tokenizer_dir)
    assert reader == "verify" or isinstance(raised.value, EnergonPackedError), raised.value
    assert "\n" not in str(raised.value) or reader == "verify"
    assert not (data / "page.html").exists()
    assert not (data / "new").exists() or not list((data / "new").glob("**/*.tar"))


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_energon_does_not_open_is_refused(data: Path, text_tokenizer_dir: Path, reader: str) -> None:
    file = written(data, train(A, B, kind="blend_epochized"), "mix.yml")
    with pytest.raises(
        EnergonPackedError, match=r"mix.yml is not a Metadataset .* its name must end in \.yaml; rename"
    ):
        READERS[reader](file, text_tokenizer_dir)


@pytest.mark.parametrize("reader", LOADERS)
def test_an_unknown_split_is_named(data: Path, reader: str) -> None:
    file = written(data, {**HEAD, "splits": {"dev": {**A, "split_part": "train"}}})
    with pytest.raises(EnergonPackedError, match="mix.yaml has no split 'train'; it has dev"):
        LOADERS[reader](file, data)
    with pytest.raises(EnergonPackedError, match="mix.yaml has no split 'train'; it has dev"):
        OFFLINE["pack --dry-run"](file, data)


@pytest.mark.parametrize("reader", [reader for reader in READERS if not reader.startswith("pack")])
def test_a_valid_metadataset_is_accepted_by_every_reader(data: Path, text_tokenizer_dir: Path, reader: str) -> None:
    inner = {"datasets": {**V1, "splits": {"train": {"datasets": [A]}}}, "one": {**HEAD, "splits": {"train": A}}}
    for name, value in inner.items():
        written(data, value, f"{name}.yaml")
    around = {"path": f"../{data.name}/c", "split_part": "train"}
    entries = {"path": "one.yaml", "repetitions": 2}, {**B, "subflavors": {"x": 1}}, around
    file = written(data, train(*entries, kind="blend_epochized"))
    READERS[reader](file, text_tokenizer_dir)
    (data / "page.html").unlink(missing_ok=True)


def test_a_linked_metadataset_is_relative_to_the_folder_of_the_link(data: Path, tmp_path: Path) -> None:
    """As by Energon: paths start from the folder of the name that was passed."""
    (tmp_path / "elsewhere").mkdir()
    target = written(tmp_path / "elsewhere", train(A, kind="blend_epochized"))
    shutil.copytree(data / "a", tmp_path / "a")
    (tmp_path / "link.yaml").symlink_to(target)
    packs = len(PackedDataset(tmp_path / "a"))
    assert len(PackedDataset(tmp_path / "link.yaml")) == packs
    assert sum(len(batch.__key__) for batch in get_packed_loader(tmp_path / "link.yaml", **LOADING)) == packs


def test_a_dataset_that_is_not_indexed_is_named(data: Path) -> None:
    file = written(data, ODD["not indexed"][0])
    with pytest.raises(EnergonPackedError, match="not_indexed is not indexed: .*run energon-packed nv-meta"):
        list(get_packed_loader(file, **LOADING))


@pytest.mark.parametrize("case", ["weight 0", "all weights 0", "s3", "only s3", "missing", "empty split of a dataset"])
def test_verify_fails_if_there_is_nothing_to_check(data: Path, case: str) -> None:
    value, message = ODD[case]
    arguments = ["verify", str(written(data, value)), "--fast", "--workers", "1"]
    done = separate_runner().invoke(cli, [*arguments, "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["passed"]) == (1, False)
    assert message.partition(".*")[0] in found["problems"][0]
    shown = CliRunner().invoke(cli, arguments)
    assert shown.exit_code == 1
    assert message.partition(".*")[0] in " ".join(shown.output.split())


def test_verify_of_a_dataset_without_tars_fails(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "a" / ".nv-meta", tmp_path / "empty" / ".nv-meta")
    for name in ("packing.json", "split.yaml"):
        (tmp_path / "empty" / ".nv-meta" / name).unlink()
    (tmp_path / "empty" / ".nv-meta" / "split.yaml").write_text("split_parts: {train: [], val: []}\nexclude: []\n")
    for path in (tmp_path / "empty", written(tmp_path, {**HEAD, "splits": {"train": {"path": "empty"}}})):
        done = separate_runner().invoke(cli, ["verify", str(path), "--fast", "--workers", "1", "--json"])
        assert (done.exit_code, json.loads(done.stdout)["passed"]) == (1, False)


def test_files_that_two_parsers_read_differently_are_refused_before_energon_runs_them(
    data: Path, tmp_path: Path
) -> None:
    """PyYAML ends a text in the last line without a line end; the parser of Energon adds a line end."""
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
    entry = f"    path: {data / 'a'}\n    subflavors:\n      x: |\n        text"
    for name in ("get_packed_loader", "PackedDataset"):
        LOADERS[name](written(tmp_path, head + entry + "\n"), data)
        with pytest.raises(FormatError, match="its YAML parser reads other values from it"):
            LOADERS[name](written(tmp_path, head + entry), data)


def test_files_that_expand_to_billions_of_datasets_are_refused_at_once(data: Path) -> None:
    names = ["a"]
    for depth in range(12):
        written(data, train(*({"path": names[-1]} for _ in range(20))), f"wide{depth}.yaml")
        names.append(f"wide{depth}.yaml")
    with pytest.raises(FormatError, match=r"expands to more than 10,000 datasets"):
        steps_per_epoch(data / names[-1])


def test_further_faults_are_counted(data: Path) -> None:
    for count, more in ((1, ""), (2, " (and 1 more fault)"), (3, " (and 2 more faults)")):
        file = written(data, train(*({"path": name, "weight": 0} for name in "abc"[:count])))
        with pytest.raises(ConfigError) as raised:
            steps_per_epoch(file)
        assert str(raised.value) == f"{file}: weight of a must be above 0, got 0; remove the dataset instead{more}"


def test_a_metadataset_is_in_at_most_16_others(data: Path) -> None:
    names = ["a"]
    for depth in range(18):
        written(data, {**HEAD, "splits": {"train": {"path": names[-1]}}}, f"deep{depth}.yaml")
        names.append(f"deep{depth}.yaml")
    assert steps_per_epoch(data / names[17]) == steps_per_epoch(data / "a")
    with pytest.raises(FormatError, match=r"deep0.yaml contains itself, or is in more than 16 others"):
        steps_per_epoch(data / names[18])


def _entry(rng: random.Random, number: str | None, is_v2: bool, nested: list[str], depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {
        "path": rng.choice(["a", "b", "./c", "x/../a", *nested, *nested, *nested] if depth else ["a", "b", "c"])
    }
    options: dict[str, Callable[[], Any]] = {
        "split_part": lambda: rng.choice(["train", "train", "val", None]),
        "subflavors": lambda: rng.choice([{"k": 1}, {"k": "2", "l": True}, {"l": None}, {}, None]),
        "shuffle_over_epochs_multiplier": lambda: rng.choice([1, 2, 3, -1, None]),
        "dataset_config": lambda: rng.choice(["dataset.yaml", None]),
        "split_config": lambda: None,
    }
    if is_v2:
        options["aux"] = lambda: rng.choice([{"n": "b"}, {"n": {"path": "c"}}, {"f": "filesystem://x/../d"},
                                             {"f": {"fs_path": "d"}}, None])  # fmt: skip
    else:
        options["subflavor"] = lambda: rng.choice(["old", None])
    if number:
        options[number] = lambda: rng.choice([1, 2, 0.5, 3.25, "010", "1e1"])
    for name, make in options.items():
        if rng.random() < (0.7 if name == "subflavors" else 0.3):
            value[name] = make()
    if rng.random() < 0.03:
        value["more"] = 1
    return value


def _random(rng: random.Random, nested: list[str], depth: int) -> dict[str, Any]:
    is_v2 = rng.random() < 0.7
    splits = {}
    for split in ["train"] + (["val"] if rng.random() < 0.3 else []):
        kinds = {"blend": "weight", "blend_epochized": "repetitions", "": None} if is_v2 else {"datasets": "weight"}
        kind = rng.choice(list(kinds))
        number = kinds[kind]
        entries = [_entry(rng, number, is_v2, nested, depth) for _ in range(rng.randint(1, 3))]
        splits[split] = {kind: entries} if kind else entries[0]
    return {**(HEAD if is_v2 else rng.choice([V1, {}])), "splits": splits}


def _of_energon(file: Path, split: str) -> list[tuple[Any, ...]]:
    from megatron.energon import WorkerConfig
    from megatron.energon.metadataset.loader import load_dataset, traverse_metadataset

    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    loaded = load_dataset(file).get_datasets(training=True, split_part=split, worker_config=config).datasets
    leaves = traverse_metadataset(file, split_part=split)
    return [
        (str(leaf.path), leaf.split_part, one.weight, one.repetitions, dict(leaf.subflavors))
        for one, leaf in zip(loaded, leaves, strict=True)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_the_reader_agrees_with_energon(data: Path, seed: int) -> None:
    from tests.internals import read_metadataset

    rng = random.Random(seed)
    accepted = 0
    for _ in range(30):
        nested: list[str] = []
        for depth in range(3):
            text = yaml.safe_dump(_random(rng, nested, depth)).replace("'010'", "010").replace("'1e1'", "1e1")
            nested.append(written(data, text, f"n{depth}.yaml").name)
        file = data / nested[-1]
        try:
            expected: Any = _of_energon(file, "train")
        except Exception as error:  # Energon raises what its parsers raise
            expected = f"{type(error).__name__}: {error}"
        try:
            found: Any = [
                (
                    str(leaf.path),
                    leaf.split_part,
                    leaf.weight,
                    leaf.repetitions,
                    dict(leaf.subflavors),
                )
                for leaf in read_metadataset(file).leaves("train")
            ]
        except EnergonPackedError as error:
            found = str(error)
        if isinstance(expected, list) and isinstance(found, list):
            accepted += 1
            plain = [one if one[3] is not None or one[2] is not None else (*one[:3], 1, *one[4:]) for one in expected]
            assert found == plain, file.read_text()
        else:
            assert isinstance(found, str) == isinstance(expected, str), (found, expected, file.read_text())
    assert accepted > 5


def test_split_files_are_read_as_by_energon(data: Path, tmp_path: Path) -> None:
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta

    from tests.internals import read_split

    folder = tmp_path / "a"
    shutil.copytree(data / "a", folder)
    names = [f"a-{number:06d}.tar" for number in range(4)]
    (folder / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": dict.fromkeys(names, 2)}))
    for exclude in ([], ["a-000001.tar"], ["a-{000001..000002}.tar"], ["a-000000.tar/k1"], ["a-{000000,000003}.tar"]):
        with changed(folder, "split.yaml", yaml.safe_dump(
            {"split_parts": {"train": ["a-{000000..000002}.tar"], "val": ["a-000003.tar"]}, "exclude": exclude}
        )):  # fmt: skip
            ours = read_split(folder)
            theirs = WebdatasetMeta.from_config(EPath(str(folder)), split_part="train")
            assert ours.shards("train") == [shard.name for shard in theirs.shards]
            assert set(ours.excluded_packs) == theirs.sample_excludes
            assert ours.parts["train"] == theirs.split_part_files
