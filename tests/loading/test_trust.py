"""Loading a dataset of somebody else runs none of its code, unless it is trusted."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from energon_packed import (
    ConfigError,
    EnergonDistributor,
    EnergonPackedError,
    FormatError,
    PackedDataset,
    ShardSpec,
    get_packed_loader,
)
from tests.canary import Canary, changed, dataset_yaml, packed_texts
from tests.internals import check_trusted, make_blend, write_metadataset

NAMED = {"part_filter": "sample_loader.py:part_filter", "sample_loader": "sample_loader.py:sample_loader"}
OPTIONS: dict[str, Any] = {"epochs": 1, "num_workers": 0, "shuffle": False}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, text_tokenizer_dir: Path) -> Path:
    return packed_texts(tmp_path_factory.mktemp("trust"), text_tokenizer_dir)


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    return Canary(tmp_path)


def loaded(path: Path, **options: Any) -> int:
    return sum(len(batch.ids) for batch in get_packed_loader(path, **OPTIONS, **options))


def test_a_sample_loader_of_somebody_else_runs_only_where_it_is_trusted(dataset: Path, canary: Canary) -> None:
    ours = (dataset / ".nv-meta" / "sample_loader.py").read_text()
    named = r"sample_loader.py, or .* not what energon-packed writes.*trust_sample_loader=True"
    with changed(dataset, "sample_loader.py", canary.code + ours):
        with pytest.raises(ConfigError, match=named):
            loaded(dataset)
        distributor = EnergonDistributor(dataset)
        with pytest.raises(ConfigError, match="trust_sample_loader"):
            next(iter(distributor.items(ShardSpec(), None)))
        assert len(PackedDataset(dataset)) > 0
        assert PackedDataset(dataset)[0]
        assert not canary.sang()
        assert loaded(dataset, trust_sample_loader=True) == 8
        assert canary.sang()
    assert loaded(dataset) == 8


def test_subflavors_of_the_user_are_no_code(dataset: Path, canary: Canary) -> None:
    own = (dataset / ".nv-meta" / "dataset.yaml").read_text() + "subflavors: {quality: high}\n"
    with changed(dataset, "dataset.yaml", own):
        assert loaded(dataset) == 8
        with (
            changed(dataset, "sample_loader.py", canary.code),
            pytest.raises(ConfigError, match="not what energon-pa"),
        ):
            loaded(dataset)
    with changed(dataset, "dataset.yaml", own + f"more: {canary.object}\n"), pytest.raises(EnergonPackedError):
        loaded(dataset)
    assert not canary.sang()


@pytest.mark.parametrize("name", ["sample_loader.py", "../evil.py", "/nowhere/evil.py"])
def test_another_file_with_code_is_not_run(dataset: Path, canary: Canary, name: str) -> None:
    named = {key: f"{name}:{key}" for key in NAMED}
    (dataset / "evil.py").write_text(canary.code)
    with (
        changed(dataset, "sample_loader.py", canary.code),
        changed(dataset, "dataset.yaml", dataset_yaml(**named)),
        pytest.raises(ConfigError, match=rf"dataset.yaml names '{name}:sample_loader' as sample_loader"),
    ):
        loaded(dataset)
    assert not canary.sang()


def test_objects_are_made_nowhere(dataset: Path, canary: Canary) -> None:
    split = {"split_parts": {"train": ["s-000000.tar"]}, "exclude": [canary.object]}
    for name, content in {
        "dataset.yaml": yaml.safe_dump(canary.object),
        "split.yaml": yaml.safe_dump(split),
    }.items():
        with changed(dataset, name, content), pytest.raises(EnergonPackedError):
            loaded(dataset)
        assert not canary.sang(), name
    for more in ({"decoder": canary.object}, {"subflavors": {"a": [canary.object]}}, {"x": {"path": canary.object}}):
        content = dataset_yaml(field_map={"text": "txt"}, **more)
        with changed(dataset, "dataset.yaml", content), pytest.raises(ConfigError, match=r"names os\.mkdir|sets 'x'"):
            loaded(dataset)
        assert not canary.sang()
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"):
        for content in (canary.tag, yaml.safe_dump(canary.object), json.dumps(canary.object)):
            with changed(dataset, "dataset.yaml", content.encode(encoding)), pytest.raises(EnergonPackedError):
                loaded(dataset)
            assert not canary.sang(), encoding
    assert not canary.sang()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("more", [{}, {"__module__": "os", "__function__": "getcwd"}])
def test_names_and_counts_in_another_encoding_are_refused_in_one_line(
    dataset: Path, tmp_path: Path, encoding: str, more: dict[str, str]
) -> None:
    """JSON may be UTF-16, which Energon reads, and in which `__module__` has other bytes."""
    meta, blend = dataset / ".nv-meta", tmp_path / "blend.yaml"
    reference = {"path": str(dataset), "split_config": "other.json"}
    plain = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    blend.write_text(yaml.safe_dump({**plain, "splits": {"train": reference}}))
    split = yaml.safe_load((meta / "split.yaml").read_text())
    info = json.loads((meta / ".info.json").read_text())
    refused = r"must be UTF-8, got another encoding|names os\.getcwd"
    for name, value, path in (("other.json", split, blend), (".info.json", info, dataset)):
        content = json.dumps(value | ({"more": more} if more else {})).encode(encoding)
        with changed(dataset, name, content):
            if encoding.startswith("utf-8") and not more:
                check_trusted(path)
                continue
            with pytest.raises(EnergonPackedError, match=refused) as raised:
                check_trusted(path)
            assert "\n" not in str(raised.value)
            assert name in str(raised.value)


def test_the_datasets_behind_a_metadataset_are_looked_at(dataset: Path, canary: Canary, tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner.yaml", tmp_path / "outer.yaml"
    write_metadataset(make_blend([(dataset, 1.0)], epochized=True), inner)
    write_metadataset(make_blend([(inner, 1.0)], epochized=True), outer)
    assert loaded(outer) == 8
    ours = (dataset / ".nv-meta" / "sample_loader.py").read_text()
    with changed(dataset, "sample_loader.py", canary.code + ours):
        for path in (inner, outer):
            with pytest.raises(ConfigError, match="trust_sample_loader"):
                loaded(path)
            with pytest.raises(ConfigError, match="trust_sample_loader"):  # Energon reads a blend for it
                PackedDataset(path)
        assert not canary.sang()
        assert len(PackedDataset(outer, trust_sample_loader=True)) > 0


def test_a_metadataset_makes_no_objects(dataset: Path, canary: Canary, tmp_path: Path) -> None:
    reference = {"path": str(dataset)}
    plain = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    (tmp_path / "inner.yaml").write_text(yaml.safe_dump({**plain, "splits": {"train": canary.object}}))
    for number, value in enumerate(
        [
            canary.object,
            {**plain, "splits": {"train": {"join": [reference, {**reference}], "joiner": {**canary.object}}}},
            {**plain, "splits": {"train": {**reference, "subflavors": {"a": canary.object}}}},
            {**plain, "splits": {"train": {"path": "inner.yaml"}}},
            {**plain, "splits": {"train": {**reference, "aux": {"a": "inner.yaml"}}}},
        ]
    ):
        path = tmp_path / f"blend{number}.yaml"
        path.write_text(yaml.safe_dump(value))
        for load in (loaded, PackedDataset):
            with pytest.raises(
                ConfigError, match=r"names os\.mkdir.*trust_sample_loader|uses 'join', which only|is not a prepared"
            ):
                load(path)
        assert not canary.sang(), value
    remote_paths = {
        f"file://{tmp_path}/inner.yaml": "cannot be checked before",
        "msc://elsewhere/inner.yaml": "the profile 'elsewhere' is not configured",
    }
    for path, message in remote_paths.items():
        remote = tmp_path / "remote.yaml"
        remote.write_text(yaml.safe_dump({**plain, "splits": {"train": {"path": path}}}))
        with pytest.raises(ConfigError, match=message):
            loaded(remote)
    (tmp_path / "link").symlink_to(dataset)  # Energon takes `link/..` out of the text
    (tmp_path / "around.yaml").write_text(yaml.safe_dump({**plain, "splits": {"train": {"path": "link/../.yaml"}}}))
    (tmp_path / ".yaml").write_text(yaml.safe_dump(canary.object))
    with pytest.raises(ConfigError, match=r"names os\.mkdir"):
        loaded(tmp_path / "around.yaml")
    assert not canary.sang()
    (tmp_path / "round.yaml").write_text(yaml.safe_dump({**plain, "splits": {"train": {"path": "round.yaml"}}}))
    with pytest.raises(FormatError, match="contains itself"):
        loaded(tmp_path / "round.yaml")


def test_a_dataset_config_in_another_place(dataset: Path, canary: Canary, tmp_path: Path) -> None:
    """Ours beside our own loader, while Energon runs the sample_loader.py of `.nv-meta`; and other keys."""
    meta, place = dataset / ".nv-meta", dataset / ".nv-meta" / "sub"
    place.mkdir()
    for name in ("dataset.yaml", "sample_loader.py"):
        (place / name).write_bytes((meta / name).read_bytes())
    blend = tmp_path / "blend.yaml"
    reference = {"path": str(dataset), "dataset_config": "sub/dataset.yaml"}
    plain = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    blend.write_text(yaml.safe_dump({**plain, "splits": {"train": reference}}))
    with changed(dataset, "sample_loader.py", canary.code), pytest.raises(ConfigError, match="trust_sample_loader"):
        loaded(blend)
    more = dataset_yaml(field_map={"text": "txt"}, split_config="../evil.yaml")
    with changed(dataset, "dataset.yaml", more), pytest.raises(ConfigError, match="sets 'split_config'"):
        loaded(dataset)
    assert not canary.sang()


def test_crude_data_and_fields_by_name_are_not_code(dataset: Path, tmp_path: Path) -> None:
    check_trusted(dataset, dataset_config="crude.yaml")
    with changed(dataset, "dataset.yaml", dataset_yaml(field_map={"text": "txt"})):
        check_trusted(dataset)
