"""`energon-packed metadataset`: weights, warnings, refusals, and what Energon makes of the file."""

import collections
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from energon_packed import ChatEncoder, ConfigError, EnergonPackedError, PackOptions, get_packed_loader, pack
from tests.internals import cli, make_blend, render, write_metadataset
from tests.printed import printed_json


@pytest.fixture(scope="module")
def outputs(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders a, b and c: 40, 20 and 10 packs or so, with many, fewer and few samples in each pack."""
    root = tmp_path_factory.mktemp("outputs")
    for name, records, words in (("a", 400, 5), ("b", 100, 12), ("c", 20, 40)):
        data = root / f"{name}.jsonl"
        lines = [json.dumps({"id": f"{name}{i}", "text": "green circle " * words}) for i in range(records)]
        data.write_text("\n".join(lines))
        pack(
            PackOptions(
                inputs=(str(data),),
                output_dir=root / name,
                tokenizer=tokenizer_dir,
                seq_len=256,
                sample_class="PackedTokensSample",
                shard_prefix=name,
                workers=1,
            )
        )
    return root


def test_weights_and_epochs_over_each_input(outputs: Path) -> None:
    folders: list[tuple[Path, None]] = [(outputs / name, None) for name in "abc"]
    by_samples = make_blend(folders)
    assert [dataset.weight for dataset in by_samples.train] == [400, 100, 20]
    by_packs = make_blend(folders, weight_by="packs")
    assert [dataset.weight for dataset in by_packs.train] == [dataset.packs for dataset in by_packs.train]
    assert by_packs.times_seen() == pytest.approx([1, 1, 1])
    assert not by_packs.warnings()
    assert "weights by samples repeat" in by_samples.warnings()[0]
    assert "weights by records repeat" in make_blend(folders, weight_by="records").warnings()[0]
    assert "set `weight_by` to 'packs'" in by_samples.warnings()[0]
    one = outputs / "one.yaml"
    one.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\n"
        f"splits: {{train: {{path: {outputs / 'a' / 'webdataset'}}}}}\n"
    )
    for epochized in (False, True):
        assert make_blend([(one, 1), (outputs / "b", 1)], epochized=epochized).train[0].samples == 400
    draws = sum(dataset.packs for dataset in by_samples.train)
    expected = [draws * dataset.weight / 520 / dataset.packs for dataset in by_samples.train]
    assert by_samples.times_seen() == pytest.approx(expected)
    assert [dataset.weight for dataset in make_blend(folders, weight_by="equal").train] == [1, 1, 1]
    tokens = make_blend(folders, weight_by="tokens").train
    assert [dataset.weight for dataset in tokens] == [dataset.tokens for dataset in tokens]


@pytest.mark.parametrize("schema", ["v1", "v2"])
@pytest.mark.parametrize("absolute", [True, False])
def test_energon_draws_by_weight(
    outputs: Path, encoder: ChatEncoder, tmp_path: Path, schema: Any, absolute: bool
) -> None:
    blend = make_blend([(outputs / "a", 2.5), (outputs / "b", 0.5), (outputs / "c", 0)], schema=schema)
    out = tmp_path / "deep" / "mix.yaml"
    write_metadataset(blend, out, absolute=absolute)
    assert all(Path(e["path"]).is_absolute() == absolute for e in _entries(out))
    loader, draws = get_packed_loader(out, encoder, num_workers=0), 600
    seen = collections.Counter(b.__key__[0].partition("_")[0] for b in itertools.islice(loader, draws))
    assert seen["c"] == 0
    deviation = (draws * (5 / 6) * (1 / 6)) ** 0.5
    assert abs(seen["a"] - draws * 5 / 6) < 3 * deviation


def _entries(out: Path) -> list[dict[str, Any]]:
    train = yaml.safe_load(out.read_text())["splits"]["train"]
    return next(iter(train.values()))  # type: ignore[no-any-return]


def test_epochized_repeats_every_pack_by_its_repetitions(outputs: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    blend = make_blend([(outputs / "a", 1), (outputs / "b", 2)], epochized=True)
    write_metadataset(blend, tmp_path / "mix.yaml")
    loader = get_packed_loader(tmp_path / "mix.yaml", encoder, num_workers=0, epochs=1)
    seen = collections.Counter(b.__key__[0] for b in loader)
    assert {(key[0], count) for key, count in seen.items()} == {("a", 1), ("b", 2)}
    once = make_blend([(outputs / "a", None), (outputs / "b", None)], epochized=True)
    assert [(dataset.weight, dataset.weighed_by) for dataset in once.train] == [(1, "once")] * 2
    assert "times per epoch" not in render(once, tmp_path / "mix.yaml")


def test_each_split_has_its_own_counts(tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "green circle " * 9}) for _ in range(120)))
    options: dict[str, Any] = {"seq_len": 64, "split": "train=0.75,val=0.25", "workers": 1}
    done = pack(tmp_path / "a.jsonl", output_dir=tmp_path / "a", tokenizer=tokenizer_dir, **options)
    packs = {split: done.manifest.packs_in(split) for split in ("train", "val")}
    blend = make_blend([(tmp_path / "a", None)])
    assert [dataset.packs for dataset in (*blend.train, *blend.val)] == [packs["train"], packs["val"]]
    assert sum(dataset.samples for dataset in (*blend.train, *blend.val)) == done.manifest.packed
    of_val = make_blend([(tmp_path / "a", None)], split_from="val")
    assert ([dataset.packs for dataset in of_val.train], of_val.val) == ([packs["val"]], [])


def test_nested_inputs_and_validation(outputs: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    inner = tmp_path / "inner.yaml"
    write_metadataset(make_blend([(outputs / "a", None), (outputs / "b", None)]), inner)
    blend = make_blend([(inner, 3), (outputs / "c", 1)], subflavors={"from": "test"})
    nested = blend.train[0]
    assert (nested.samples, nested.counted_by) == (500, "sum of 2 datasets")
    out = tmp_path / "outer.yaml"
    write_metadataset(blend, out)
    loader = get_packed_loader(out, encoder, num_workers=0)
    assert {b.__key__[0][0] for b in itertools.islice(loader, 200)} == {"a", "b", "c"}
    assert all(entry["subflavors"] == {"from": "test"} for entry in _entries(out))
    held_out = make_blend([(outputs / "a", None)], val=[outputs / "c"])
    write_metadataset(held_out, out)
    val = list(get_packed_loader(out, encoder, split="val", epochs=1, num_workers=0))
    assert len(val) == held_out.val[0].packs
    assert {b.__key__[0][0] for b in val} == {"c"}


def test_comments_name_the_source_of_weights(outputs: Path, tmp_path: Path) -> None:
    blend = make_blend([(outputs / "a", None), (outputs / "b", None)])
    seen = f"{blend.times_seen()[0]:.3g} times per epoch"
    assert f"400 samples (packing.json); weight: samples; {seen}" in render(blend, tmp_path / "mix.yaml")
    assert "weight: given" in render(make_blend([(outputs / "a", 2)]), tmp_path / "mix.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder.yaml must be a new file, or a Metadataset that this command wrote"):
        write_metadataset(blend, tmp_path / "folder.yaml")


def test_numbers_are_exact_and_an_input_overrides_subflavors(outputs: Path, tmp_path: Path) -> None:
    folder, shared = outputs / "a", {"x": 1, "y": 1}
    weights = [(folder, 0.123456789012), (outputs / "b", 1234567)]
    write_metadataset(make_blend(weights, subflavors=shared, input_subflavors={folder: {"x": 2}}), tmp_path / "m.yaml")
    entries = _entries(tmp_path / "m.yaml")
    assert [entry["weight"] for entry in entries] == [0.123456789012, 1234567]
    assert [entry["subflavors"] for entry in entries] == [{"x": 2, "y": 1}, shared]


def test_counts_without_a_manifest(outputs: Path, tmp_path: Path) -> None:
    shutil.copytree(outputs / "b", tmp_path / "b")
    (tmp_path / "b" / "webdataset" / ".nv-meta" / "packing.json").unlink()
    known = make_blend([(outputs / "b", None)]).train[0]
    found = make_blend([(tmp_path / "b", None)]).train[0]
    assert (found.packs, found.samples) == (known.packs, known.samples)
    assert found.counted_by.startswith("counted in the tars")
    write_metadataset(make_blend([(tmp_path / "b", None), (outputs / "a", None)]), tmp_path / "mix.yaml")
    with pytest.raises(ConfigError, match=r"mix.yaml has no packing.json, so its number of records is unknown"):
        make_blend([(tmp_path / "mix.yaml", None), (outputs / "c", None)], weight_by="records")


def edited(source: Path, target: Path, **settings: Any) -> Path:
    """A copy whose manifest says something else."""
    shutil.copytree(source, target)
    manifest = target / "webdataset" / ".nv-meta" / "packing.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | settings))
    return target


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["a", "./a"], "a/webdataset is listed twice"),
        (["a", "a_copy"], "both have a shard a-000000"),
        (
            ["a", "long"],
            "a/webdataset and .*long/webdataset have seq_len 256 and 512; .* repack one of them with .* settings$",
        ),
        (["a", "other"], "have tokenizer .* and zzz"),
        (["a", "flavor"], "have flavor PackedTokensSample and PackedCapt"),
        (["c", "both"], "have seq_len 256 and 512, flavor .*; .* repack .* and a different `shard_prefix`"),
        (["a", "nothing"], "nothing must be a dataset folder, got a folder without .nv-meta"),
        (["a", "missing"], "missing does not exist"),
        (["a=-1"], "the weight of a must be a finite number >= 0, got '-1'"),
        (["a=nan"], "the weight of a must be .* got 'nan'"),
        (["a=0", "b=0"], "all weights are 0"),
        (["a=many"], "the weight of .* must be a finite number >= 0, got 'many'"),
        (["a", "--split-from", "val"], "has no packs in split 'val'; it has train"),
        (["a", "--epochized", "--schema", "v1"], "`epochized` requires `schema` 'v2'"),
        (["a", "--subflavor", "x"], "must have the form key=value, got 'x'"),
        (["a", "--val", "a"], "validation data .*a/webdataset and the training data .* share the shard a-000000"),
        (
            ["weighted.yaml", "c", "--epochized"],
            "weighted.yaml draws by weight, indefinitely, but this blend draws in epochs",
        ),
        (["epochs.yaml", "c"], "epochs.yaml draws in epochs, but this blend draws by weight"),
        (["outer.yaml", "c"], "mix.yaml would include itself through outer.yaml"),
        (["--out", "mix.txt", "a"], "mix.txt must end in .yaml; Energon"),
        (["broken.yaml"], "broken.yaml is not a Metadataset that Energon can read"),
        (["a", "--val", "c", "--val", "./c"], "c/webdataset is listed twice"),
        (["a", "--val", "long"], "a/webdataset and .*long/webdataset have seq_len 256 and 512"),
        (["b", "--val", "weighted.yaml"], "weighted.yaml has no split 'val'; it has train"),
        (["b", "--val", "held.yaml"], "held.yaml draws by weight, indefinitely, but this blend draws in epochs"),
        (["unknown", "a", "long"], "a/webdataset and .*long/webdataset have seq_len 256 and 512"),
        (["uneven.yaml"], "a/webdataset and .*long/webdataset have seq_len 256 and 512"),
        (["uneven.yaml", "b"], "a/webdataset and .*long/webdataset have seq_len 256 and 512"),
        (
            ["moved", "--split-from", "val"],
            "moved/webdataset has no packs in split 'val' by packing.json; run .* nv-meta",
        ),
    ],
)
def test_errors_name_the_wrong_value(
    outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: list[str], message: str
) -> None:
    for name in "abc":
        (tmp_path / name).symlink_to(outputs / name)
    shutil.copytree(outputs / "a", tmp_path / "a_copy")
    edited(outputs / "c", tmp_path / "long", seq_len=512)
    edited(outputs / "c", tmp_path / "other", tokenizer_fingerprint="zzz")
    edited(outputs / "c", tmp_path / "flavor", sample_class="PackedCaptioningSample")
    edited(outputs / "c", tmp_path / "both", sample_class="PackedCaptioningSample", seq_len=512)
    shutil.copytree(outputs / "b", tmp_path / "unknown")
    (tmp_path / "unknown" / "webdataset" / ".nv-meta" / "packing.json").unlink()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "broken.yaml").write_text("splits: 3\n")
    monkeypatch.chdir(tmp_path)
    write_metadataset(make_blend([("a", None), ("b", None)]), Path("weighted.yaml"))
    write_metadataset(make_blend([("a", None), ("b", None)], epochized=True), Path("epochs.yaml"))
    write_metadataset(make_blend([("a", None), ("b", None)]), Path("mix.yaml"))
    write_metadataset(make_blend([("mix.yaml", 2)]), Path("outer.yaml"))
    write_metadataset(make_blend([("a", None)], val=["c"], schema="v1"), Path("held.yaml"))
    assert make_blend([("b", None)], val=["held.yaml"], schema="v1").val[0].mode == "weight"
    members = "[{path: a/webdataset, weight: 1}, {path: long/webdataset, weight: 1}]"
    Path("uneven.yaml").write_text(
        Path("mix.yaml").read_text().partition("  train:")[0] + f"  train: {{blend: {members}}}"
    )
    split = shutil.copytree(outputs / "c", tmp_path / "moved") / "webdataset" / ".nv-meta" / "split.yaml"
    text = (
        split.read_text().replace("  train:", "  other:").replace("  val:", "  train:").replace("  other:", "  val:")
    )
    split.write_text(text)
    before = Path("mix.yaml").read_bytes()
    out = "mix.yaml"
    if inputs[0] == "--out":
        out, inputs = inputs[1], inputs[2:]
    result = CliRunner().invoke(cli, ["metadataset", out, *inputs])
    assert result.exit_code == 2 or isinstance(result.exception, EnergonPackedError), result.output
    told = " ".join(result.output.split()) if result.exit_code == 2 else str(result.exception)
    assert re.search(message, told), told
    assert Path("mix.yaml").read_bytes() == before


def test_the_command_prints_shares(outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["metadataset", "mix.yaml", f"{outputs / 'a'}=3", f"{outputs / 'b'}=1"])
    assert result.exit_code == 0, result.output
    assert "75.00%" in result.output
    assert make_blend([(Path("mix.yaml"), None)]).train[0].samples == 500


def test_an_input_without_a_weight_has_weight_one_if_another_has_a_weight(outputs: Path) -> None:
    blend = make_blend([(outputs / "a", None), (outputs / "b", 2)])
    assert [(dataset.weight, dataset.weighed_by) for dataset in blend.train] == [(1, "given"), (2, "given")]


def test_names_with_an_equals_sign_and_types_of_subflavors(outputs: Path, tmp_path: Path) -> None:
    (tmp_path / "a=2").symlink_to(outputs / "a")
    pairs = {"long": "9" * 300, "quote": '"', "quoted": "'7'", "flag": "TRUE", "zeros": "007", "share": "1e-1"}
    options = [option for name, value in pairs.items() for option in ("--subflavor", f"{name}={value}")]
    printed = printed_json(cli, ["metadataset", str(tmp_path / "mix.yaml"), str(tmp_path / "a=2"), "--json", *options])
    assert [entry["weighed_by"] for entry in printed["train"]] == ["samples"]
    [entry] = yaml.safe_load((tmp_path / "mix.yaml").read_text())["splits"]["train"]["blend"]
    assert entry["subflavors"] == {
        "long": int("9" * 300), "quote": '"', "quoted": "7", "flag": True, "zeros": "007", "share": 0.1,
    }  # fmt: skip


def test_a_blend_needs_an_input_with_a_weight(outputs: Path) -> None:
    with pytest.raises(ConfigError, match="no input"):
        make_blend([])
    for weight in (float("inf"), float("nan"), -1.0):
        with pytest.raises(ConfigError, match=f"a/webdataset must be a finite number >= 0, got {weight:g}"):
            make_blend([(outputs / "a", weight)])


def test_validation_data_of_a_nested_blend_is_kept(outputs: Path, tmp_path: Path) -> None:
    write_metadataset(make_blend([(outputs / "a", None)], val=[outputs / "c"]), tmp_path / "inner.yaml")
    blend = make_blend([(tmp_path / "inner.yaml", 1), (outputs / "b", 1)])
    assert [dataset.path for dataset in blend.val] == [tmp_path / "inner.yaml"]
    assert blend.val[0].packs == make_blend([(outputs / "c", None)]).train[0].packs


@pytest.mark.parametrize(("shares_of", "expected"), [("packs", 0.875), ("samples", 0.7), ("tokens", None)])
def test_energon_draws_the_shares_that_are_asked_for(
    outputs: Path, encoder: ChatEncoder, tmp_path: Path, shares_of: str, expected: float | None
) -> None:
    """Packs of a have many more samples than packs of b."""
    out = tmp_path / "mix.yaml"
    arguments = [f"{outputs / 'a'}=0.7", f"{outputs / 'b'}=0.3", "--shares-of", shares_of]
    result = CliRunner().invoke(cli, ["metadataset", "-o", str(out), *arguments])
    assert result.exit_code == 0, result.output
    packs: collections.Counter[str] = collections.Counter()
    samples: collections.Counter[str] = collections.Counter()
    tokens: collections.Counter[str] = collections.Counter()
    for batch in itertools.islice(get_packed_loader(out, encoder, num_workers=0), 1000):
        name = batch.__key__[0].partition("_")[0]
        packs[name] += 1
        samples[name] += batch.num_samples
        tokens[name] += batch.num_tokens
    found = {"packs": packs, "samples": samples, "tokens": tokens}
    assert found[shares_of]["a"] / found[shares_of].total() == pytest.approx(0.7, abs=0.05)  # 3.5 deviations
    if expected is not None and shares_of == "packs":
        assert samples["a"] / samples.total() > 0.8, "shares of packs are other shares of samples"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "`shares_of` 'samples' needs the share of each input, got none. Write DIR=SHARE."),
        (["a=1", "b=1", "--epochized"], "`shares_of` must be 'packs' with `epochized`, got 'samples'"),
    ],
)
def test_shares_that_cannot_be_computed_are_refused(outputs: Path, arguments: list[str], message: str) -> None:
    paths = [str(outputs / name) if not name.startswith("-") else name for name in arguments]
    with pytest.raises(ConfigError) as raised:
        make_blend(
            [(path.partition("=")[0], float(path.partition("=")[2]) if "=" in path else None) for path in paths[:2]],
            shares_of="samples",
            epochized="--epochized" in paths,
        )
    assert message in str(raised.value)


def test_a_file_without_datasets_is_refused() -> None:
    result = CliRunner().invoke(cli, ["metadataset", "mix.yaml"])
    assert result.exit_code == 2
    assert "DIR must be at least one dataset, got none beside the file mix.yaml." in result.output
