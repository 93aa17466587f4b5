"""`sources`: inputs with an image root, a field map, an adapter, a split and a weight of their own."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from energon_packed import ConfigError, PackingManifest, PackOptions, SourceConfig, SourceError, pack
from tests.internals import ShardReader, cli, dry_run, main, read_config
from tests.sources.tars import picture, write_tar

CAPTIONING = "PackedCaptioningSample"
FLAT = r"sources\[0\] \(flat.jsonl\): "
ADAPTER = "def shout(record):\n    return {**record, 'answer': record['answer'].upper()}\n"


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three inputs that need different settings, with images of the same name in two folders."""
    for name, seed in (("red", 1), ("blue", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(picture(seed))
    flat = [{"id": f"flat{n}", "q": f"What is {n}?", "a": f"It is {n}.", "pic": "1.jpg"} for n in range(4)]
    write_rows(tmp_path / "flat.jsonl", flat)
    asked = [{"id": f"asked{n}", "question": f"Which {n}?", "answer": f"this {n}", "image": "1.jpg"} for n in range(6)]
    write_rows(tmp_path / "asked.jsonl", asked)
    write_tar(tmp_path / "texts.tar", [(f"text{n}.txt", f"Text {n}.") for n in range(3)])
    (tmp_path / "settings_adapter.py").write_text(ADAPTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


SOURCES: list[Any] = [
    {"path": "flat.jsonl", "image_root": "red", "map": {"user": "q", "assistant": "a", "image": "pic"}},
    {"path": ["asked.jsonl"], "image-root": "blue", "adapter": "settings_adapter:shout", "weight": 2},
    "texts.tar",
]


def samples(shards: Path) -> dict[str, tuple[list[str], list[bytes]]]:
    """Turns and images of every sample, by id."""
    found: dict[str, tuple[list[str], list[bytes]]] = {}
    reader = ShardReader(sorted(shards.glob("*.tar")))
    for number in range(len(reader)):
        parts = reader[number]
        content = json.loads(parts["json"])
        for place, ident in enumerate(content["ids"]):
            images = [parts[name] for row in content["images"][place : place + 1] for name in row]
            assert ident not in found
            found[ident] = (content["captions"][place], images)
    return found


def run(folder: Path, tokenizer_dir: Path, sources: list[Any], name: str = "out", **options: Any) -> Any:
    settings = {"output_dir": folder / name, "tokenizer": tokenizer_dir, "seq_len": 512, "workers": 1, **options}
    return pack(sources=sources, **settings)


def test_each_source_is_read_by_its_own_settings(folder: Path, tokenizer_dir: Path) -> None:
    result = run(folder, tokenizer_dir, SOURCES)
    expected = {f"flat{n}": ([f"It is {n}."], [picture(1)]) for n in range(4)}
    for mark in ("", "#2"):
        expected |= {f"asked{n}{mark}": ([f"THIS {n}"], [picture(2)]) for n in range(6)}
    expected |= {f"text{n}": ([f"Text {n}."], []) for n in range(3)}
    assert samples(result.shards) == expected
    lengths = pq.read_table(result.lengths).to_pylist()
    assert len(lengths) == result.manifest.records == result.manifest.packed == 19
    assert Counter(row["source"] for row in lengths) == {"flat.jsonl": 4, "asked.jsonl": 12, "texts.tar": 3}
    loaded = PackingManifest.load(result.shards).sources
    assert [(*one.path, one.weight, one.files, one.records, one.packed) for one in loaded] == [
        ("flat.jsonl", 1.0, 1, 4, 4), ("asked.jsonl", 2, 1, 12, 12), ("texts.tar", 1.0, 1, 3, 3),
    ]  # fmt: skip
    assert sum(one.tokens for one in loaded) == result.manifest.tokens
    assert loaded[0].map == "user=q,assistant=a,image=pic"
    assert loaded[1].adapter == "settings_adapter:shout"


def test_the_same_from_a_config_file_and_the_command_line_wins(folder: Path, tokenizer_dir: Path) -> None:
    config = {"sources": SOURCES, "output_dir": "out", "seq_len": 256, "tokenizer": str(tokenizer_dir), "workers": 1}
    (folder / "pack.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    done = CliRunner().invoke(cli, ["pack", "--config", "pack.yaml", "--seq-len", "512", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert not (folder / "out").exists()
    done = CliRunner().invoke(cli, ["pack", "--config", "pack.yaml", "--seq-len", "512", "--quiet"])
    assert done.exit_code == 0, done.output
    manifest = PackingManifest.load(folder / "out")
    assert (manifest.records, manifest.seq_len) == (19, 512)
    result = run(folder, tokenizer_dir, SOURCES, "python", shard_prefix="out")
    assert result.lengths.read_bytes() == (folder / "out" / "lengths.parquet").read_bytes()
    other = result.manifest
    assert other.fingerprint == manifest.fingerprint
    assert [shard.sha256 for shard in other.shards] == [shard.sha256 for shard in manifest.shards]
    lengths = {name: config[name] for name in ("sources", "tokenizer", "workers")}
    (folder / "lengths.yaml").write_text(yaml.safe_dump(lengths))
    done = CliRunner().invoke(cli, ["lengths", "--config", "lengths.yaml", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["records"] == 19
    args = ["pack", "texts.tar", "--config", "pack.yaml", "--quiet", "-o", "named"]
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 0, done.output
    assert PackingManifest.load(folder / "named").records == 3


def test_a_setting_of_a_source_wins_over_that_of_the_run(folder: Path, tokenizer_dir: Path) -> None:
    sources = [SOURCES[0], {"path": "asked.jsonl"}]
    result = run(folder, tokenizer_dir, sources, image_root="blue")
    found = samples(result.shards)
    assert found["flat0"][1] == [picture(1)]
    assert found["asked0"] == (["this 0"], [picture(2)])
    flat = write_rows(folder / "more.jsonl", [{"id": "m", "question": "What?", "answer": "a", "image": "1.jpg"}])
    result = run(
        folder, tokenizer_dir, [SOURCES[1]], "both", inputs=str(flat), image_root="red",
        map="user=question,assistant=answer,image=image",
    )  # fmt: skip
    found = samples(result.shards)
    assert found["m"] == (["a"], [picture(1)])
    assert found["asked1#2"] == (["THIS 1"], [picture(2)])


def test_a_fraction_is_a_seeded_share_and_every_record_is_accounted_for(folder: Path, tokenizer_dir: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{n}"}]} for n in range(400)
    ]
    write_rows(folder / "many.jsonl", rows)
    options: dict[str, Any] = {"strict": True, "max_reject_rate": 0}
    half = run(folder, tokenizer_dir, [{"path": "many.jsonl", "weight": 0.5}], **options)
    rejects = half.manifest.rejects
    assert set(rejects) == {"not_sampled"}
    assert half.manifest.packed + rejects["not_sampled"] == half.manifest.records == 400
    assert abs(half.manifest.packed - 200) < 4 * 10  # four standard deviations
    listed = [json.loads(line) for line in half.rejects.read_text().splitlines()]
    assert {one["reason"] for one in listed} == {"not_sampled"}
    assert len(samples(half.shards)) + len(listed) == 400
    again = run(folder, tokenizer_dir, [{"path": "many.jsonl", "weight": 0.5}], "again", workers=2, shard_prefix="out")
    assert [one.sha256 for one in again.manifest.shards] == [one.sha256 for one in half.manifest.shards]
    other = run(folder, tokenizer_dir, [{"path": "many.jsonl", "weight": 0.5}], "seed", seed=1, **options)
    assert set(samples(other.shards)) != set(samples(half.shards))
    more = run(folder, tokenizer_dir, [{"path": "many.jsonl", "weight": 2.25}], "more", **options)
    ids = Counter(ident.partition("#")[2] for ident in samples(more.shards))
    assert ids[""] == ids["2"] == 400
    assert abs(ids["3"] - 100) < 4 * 9
    assert more.manifest.packed + more.manifest.rejects["not_sampled"] == more.manifest.records == 1200


def test_parts_have_each_repetition_once(folder: Path, tokenizer_dir: Path) -> None:
    found: list[str] = []
    for number in range(3):
        result = run(folder, tokenizer_dir, SOURCES, f"part{number}", part=(number, 3), sample_class=CAPTIONING)
        part = samples(result.shards)
        assert all(not images or images[0] in (picture(1), picture(2)) for _, images in part.values())
        found += part
    whole = samples(run(folder, tokenizer_dir, SOURCES).shards)
    assert sorted(found) == sorted(whole)


def test_what_decides_the_records_is_in_the_fingerprint(folder: Path, tokenizer_dir: Path) -> None:
    base = run(folder, tokenizer_dir, [{"path": "asked.jsonl", "image_root": "red"}], "base").manifest
    changes: list[dict[str, Any]] = [
        {"weight": 2}, {"weight": 0.5}, {"adapter": "settings_adapter:shout"},
        {"map": "user=question,assistant=answer,image=image"},
    ]  # fmt: skip
    keys = {base.fingerprint}
    for number, change in enumerate(changes):
        one = run(folder, tokenizer_dir, [{"path": "asked.jsonl", "image_root": "red", **change}], f"o{number}")
        keys.add(one.manifest.fingerprint)
    assert len(keys) == 5
    plain = pack("texts.tar", output_dir="plain", tokenizer=tokenizer_dir, seq_len=512, workers=1).manifest
    listed = run(folder, tokenizer_dir, ["texts.tar"], "listed").manifest
    assert plain.tokens == listed.tokens


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"path": "a"}, "`sources` must be a list, got dict"),
        ([3], r"sources\[0\] must be a path or a mapping with a path, got 3"),
        ([{"weight": 2}], r"sources\[0\]: missing required argument: path"),
        (["a", {"path": "b", "imageroot": ""}], r"s\[1\] \(b\): unknown setting 'imageroot'; .* image_root\?"),
        ([{"path": "flat.jsonl", "image_root": "none"}], FLAT + r"image_root none is not a folder"),
        ([{"path": "flat.jsonl", "weight": 0}], FLAT + r"weight must be above 0 and at most 1000, got 0"),
        ([{"path": "flat.jsonl", "weight": float("nan")}], "weight must be a number, got nan"),
        ([{"path": "flat.jsonl", "weight": "2"}], "weight must be a number, got '2'"),
        ([{"path": "flat.jsonl", "map": "user=q"}], FLAT + r"map 'user=q' has no assistant"),
        ([{"path": "flat.jsonl", "adapter": "no.such:f"}], FLAT + r"adapter no.such:f: No module"),
        ([{"path": []}], "path must be a path or a list of paths, got"),
        ([{"path": "flat.jsonl", "label": "x"}], "unknown setting 'label'"),
        ([{"path": "hf://b/a.jsonl"}], r"sources\[0\] \(hf://b/a.jsonl\): hf://b/a.jsonl is remote"),
    ],
)  # fmt: skip
def test_wrong_settings_name_the_source(folder: Path, tokenizer_dir: Path, sources: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PackOptions(sources=sources, output_dir=folder / "out", tokenizer=tokenizer_dir, seq_len=512)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["texts.tar", {"path": "none-*.jsonl"}], r"sources\[1\] \(none-\*.jsonl\): nothing matches none-\*.jsonl"),
        ([{"path": "flat.jsonl", "source_split": "val"}], FLAT + r"source_split is 'val', but .* no splits"),
        (["texts.tar", {"path": "texts.tar", "weight": 3}], "texts.tar is listed twice, .* set its weight in sources"),
        ([{"path": ["texts.tar", "./texts.tar"]}], "texts.tar is listed twice"),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_opened_name_the_source(
    folder: Path, tokenizer_dir: Path, sources: list[Any], message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        run(folder, tokenizer_dir, sources)


def test_messages_of_a_source_do_not_name_options_of_the_command(
    folder: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"sources": [{"path": "flat.jsonl", "image_root": "none"}], "tokenizer": str(tokenizer_dir)}
    (folder / "wrong.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr("sys.argv", ["energon-packed", "pack", "--config", "wrong.yaml", "-o", "o", "--seq-len", "9"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "sources[0] (flat.jsonl): image_root none is not a folder" in " ".join(capsys.readouterr().err.split())


def test_one_file_can_be_read_in_two_ways(folder: Path, tokenizer_dir: Path) -> None:
    shouted = {"path": "asked.jsonl", "image_root": "red", "adapter": "settings_adapter:shout"}
    two = [{"path": "asked.jsonl", "image_root": "red"}, shouted]
    result = run(folder, tokenizer_dir, two)
    assert result.manifest.packed == 12


def test_dry_run_and_python_objects(folder: Path, tokenizer_dir: Path) -> None:
    sources = [SourceConfig(path="texts.tar", weight=3)]
    options = PackOptions(sources=sources, output_dir=folder / "out", tokenizer=tokenizer_dir, seq_len=512, workers=1)
    assert dry_run(options).records == 9
    assert pack(options).manifest.packed == 9


def sources_of(folder: Path, content: Any, name: str = "list.yaml") -> list[dict[str, Any]]:
    """The per-source settings in a config file, read by `pack --config`."""
    (folder / name).write_text(json.dumps(content))
    return [source.settings() for source in PackOptions(**options_of(folder / name)).source_configs]


def options_of(file: Path) -> dict[str, Any]:
    return {"output_dir": "out", "tokenizer": "DIR", "seq_len": 512, **read_config(file, PackOptions)}


INTERNVL = {"flat": {"root": "red", "annotation": "flat.jsonl", "data_augment": False, "repeat_time": 2, "length": 4}}
LISTS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "LLaVA-NeXT": (
        {"datasets": [{"json_path": "flat.jsonl", "sampling_strategy": "all"}, {"json_path": "asked.jsonl"}]},
        [{"path": ["flat.jsonl"], "weight": 1.0}, {"path": ["asked.jsonl"], "weight": 1.0}],
    ),
    "lmms-engine": (
        {"dataset_config": {"dataset_format": "yaml", "packing_length": 64, "datasets": [
            {"path": "flat.jsonl", "data_folder": "red", "data_type": "jsonl"},
            {"path": "asked.jsonl", "data_folder": ""}]}},
        [{"path": ["flat.jsonl"], "image_root": "red", "weight": 1.0}, {"path": ["asked.jsonl"], "weight": 1.0}],
    ),
    "axolotl": (
        {"datasets": [{"path": "asked.jsonl", "type": "alpaca", "ds_type": "json", "split": "train"}]},
        [{"path": ["asked.jsonl"], "source_split": "train", "weight": 1.0}],
    ),
    "InternVL": (INTERNVL, [{"path": ["flat.jsonl"], "image_root": "red", "weight": 2}]),
    "paths": ({"datasets": ["flat.jsonl"]}, [{"path": ["flat.jsonl"], "weight": 1.0}]),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_datasets_of_other_tools_are_sources(folder: Path, name: str) -> None:
    content, expected = LISTS[name]
    assert sources_of(folder, content) == expected
    if name == "lmms-engine":
        content = {"datasets": content["dataset_config"]["datasets"]}
        assert options_of(folder / "list.yaml")["seq_len"] == 64
    (folder / "list.yaml").write_text(json.dumps(content))
    assert sources_of(folder, {"dataset": {"dataset_path": "list.yaml"}}, "config.yaml") == expected


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"sampling_strategy": "first:10%"}, "sampling_strategy must be all, got 'first:10%'. To pack a share of"),
        ({"ratio": 0.5}, "ratio must be left out, got 0.5. To pack a share of the records, set weight."),
        ({"data_augment": True}, "data_augment must be false, got True. Images are stored as they are."),
        ({"type": {"field_output": "a"}}, "type must be alpaca or sharegpt or chat_template or completion, got {"),
        ({"ds_type": "text"}, "ds_type must be json or jsonl or parquet or arrow or csv, got 'text'. Remove it"),
        ({"json_path": "a.json"}, "sets path twice, under two names"),
    ],
)
def test_settings_of_datasets_without_a_counterpart_are_refused(
    folder: Path, entry: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^datasets\[0\]:? {re.escape(message)}"):
        sources_of(folder, {"datasets": [{"path": "flat.jsonl", **entry}]})
    with pytest.raises(ConfigError, match="unknown setting 'max_dynamic_patch'"):
        sources_of(folder, {"datasets": [{"path": "flat.jsonl", "max_dynamic_patch": 6}]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"datasets": ["a"], "dataset_path": "b"}, "`dataset_path` and `datasets` are both set. Remove one of them"),
        ({"datasets": ["a"], "sources": ["b"]}, "sets `sources` twice, under two names"),
        ({"datasets": "a"}, "`datasets` must be a list of datasets, got 'a'"),
        ({"dataset": {"seed": 1}, "seed": 2}, "sets `seed` twice, also under dataset"),
        ({"dataset": "a"}, "unknown option 'dataset'"),
        ({"dataset_path": "other.yaml"}, "a list of datasets must be alone in its file, got also 'seed'"),
    ],
)
def test_options_that_contradict_a_list_of_datasets_are_refused(folder: Path, content: Any, message: str) -> None:
    (folder / "other.yaml").write_text(json.dumps({"datasets": ["flat.jsonl"], "seed": 1}))
    with pytest.raises(ConfigError, match=message):
        sources_of(folder, content)


@pytest.mark.parametrize("name", ["list.yaml", "list.json"])
def test_a_list_of_datasets_is_not_an_input(folder: Path, tokenizer_dir: Path, name: str) -> None:
    for content in (INTERNVL, LISTS["axolotl"][0]) if name == "list.json" else (LISTS["axolotl"][0],):
        (folder / name).write_text(json.dumps(content))
        with pytest.raises(SourceError, match=f"Pass .* as --config {name}"):
            pack(name, output_dir=folder / "out", tokenizer=tokenizer_dir, seq_len=64, workers=1)
