"""Files of another version are refused in one line with the remedy, and caches of another version are not used."""

import json
import re
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    Consumed,
    DataflowLoader,
    FormatError,
    JointLoader,
    MapDistributor,
    PackedDataset,
    get_packed_loader,
    pack,
    steps_per_epoch,
)
from tests.internals import FORMAT_VERSION, cli, keys, make_blend, redistribute

HERE = Path(__file__).parent
ITEMS = [{"id": f"s{n}", "input_ids": [n] * 3} for n in range(6)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a dataset."""
    return shutil.copytree(HERE / "datasets" / "captions-text", tmp_path_factory.mktemp("versions") / "texts")


@pytest.fixture(scope="module")
def golden_encoder() -> ChatEncoder:
    return ChatEncoder.from_pretrained(HERE / "tokenizer")


def torch_loader() -> DataflowLoader:
    return DataflowLoader(MapDistributor(ITEMS), seed=3)


def joint() -> JointLoader:
    return JointLoader({"a": torch_loader(), "b": torch_loader()}, {"a": 1, "b": 2})


STATES: dict[str, Callable[[], tuple[Callable[[Any], object], dict[str, Any]]]] = {
    "torch": lambda: (torch_loader().load_state_dict, torch_loader().state_dict()),
    "joint": lambda: (joint().load_state_dict, joint().state_dict()),
    "consumed": lambda: (Consumed(torch_loader()).load_state_dict, Consumed(torch_loader()).state_dict()),
    "energon": lambda: (golden_loader().load_state_dict, golden_loader().state_dict()),
    "redist": lambda: (lambda one: redistribute([one], 1), golden_loader(num_workers=1).state_dict()),
}


def golden_loader(num_workers: int = 0) -> DataflowLoader:
    encoder = ChatEncoder.from_pretrained(HERE / "tokenizer")
    return get_packed_loader(HERE / "datasets" / "captions-text", encoder, num_workers=num_workers)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("step", [-1, 1])
def test_states_of_every_other_version_are_refused(name: str, step: int) -> None:
    load, state = STATES[name]()
    load(state)
    version = state["version"] + step
    message = (
        rf"version {version} is not supported \(this release reads version {state['version']}\). Finish the run with"
    )
    with pytest.raises(BatchError, match=message):
        load(state | {"version": version})


REFUSED = (
    rf"packing.json has format version \d, and this release reads version {FORMAT_VERSION}\. Use the release of "
    r"energon-packed that packed the data, or pack the data again\.$"
)


@pytest.fixture(params=[FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def other(request: pytest.FixtureRequest, texts: Path, tmp_path: Path) -> Path:
    """A dataset that has another format version."""
    out = shutil.copytree(texts, tmp_path / "other")
    file = out / "webdataset" / ".nv-meta" / "packing.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": request.param}))
    return out


def test_python_refuses_another_format(other: Path, golden_encoder: ChatEncoder) -> None:
    for use in (
        lambda: PackedDataset(other, golden_encoder),
        lambda: get_packed_loader(other, golden_encoder),
        lambda: steps_per_epoch(other),
        lambda: make_blend([(other, None)]),
    ):
        with pytest.raises(FormatError, match=REFUSED):
            use()


@pytest.mark.parametrize("command", ["verify", "inspect", "report", "metadataset", "nv-meta"])
def test_commands_refuse_another_format(other: Path, tmp_path: Path, command: str) -> None:
    before = {file: file.read_bytes() for file in other.rglob("*") if file.is_file()}
    place = {"nv-meta": [other / "webdataset"], "metadataset": [tmp_path / "mix.yaml", other]}.get(command, [other])
    done = CliRunner().invoke(cli, [command, *map(str, place)])
    assert isinstance(done.exception, FormatError), done.output
    assert re.search(REFUSED, str(done.exception))
    assert before == {file: file.read_bytes() for file in other.rglob("*") if file.is_file()}


def test_restart_files_of_another_version_are_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"seq_len": 160, "workers": 1, "sample_class": "PackedTokensSample"}
    inputs, tokenizer = HERE / "inputs" / "texts.jsonl", HERE / "tokenizer"

    def run(**more: Any) -> tuple[dict[str, int], bytes]:
        result = pack(inputs, output_dir=tmp_path / "out", tokenizer=tokenizer, **{**options, **more})
        counters = {name: result.manifest.counters[name] for name in ("measured", "tokenized", "reused")}
        return counters, next(result.shards.glob("*.tar")).read_bytes()

    first, content = run()
    assert first == {"measured": 5, "tokenized": 5, "reused": 0}
    assert run(seq_len=150, overwrite=True)[0] == {"measured": 0, "tokenized": 0, "reused": 5}
    monkeypatch.setattr(keys, "_MEASURE_VERSION", keys._MEASURE_VERSION + 1)
    with pytest.raises(
        ConfigError, match=r"contains shards of another run .*\. Set `overwrite` to replace them, or use an"
    ):
        run()
    assert run(overwrite=True) == (first, content)


def test_the_states_are_of_different_batches() -> None:
    ids = [batch.ids for batch in islice(torch_loader(), 6)]
    assert len(set(map(str, ids))) == 6
