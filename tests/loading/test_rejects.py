"""One reject report: `pack`, a plan, streams and `get_raw_loader` reject the same records, for the same reasons."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_packed import (
    ConfigError,
    DataflowConfig,
    DataflowLoader,
    MapDistributor,
    MixtureDistributor,
    PackedIterableDataset,
    PackOptions,
    PoolPacker,
    RejectLimitError,
    get_packed_loader,
    get_raw_loader,
    pack,
    plan_in_memory,
)
from tests.internals import DemoDataset
from tests.processes import energon_packed

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello. " * 30}]
GOOD = {"messages": TURNS}
LONG = {"id": "long", "messages": [TURNS[0], {"role": "assistant", "content": "word " * 400}]}
BAD: dict[str, Any] = {
    "bad_json": "{broken",
    "missing_field": {"id": 7, "foo": 1},
    "bad_role": {"messages": [{"role": "nobody", "content": "Hi"}]},
    "missing_image": {"images": ["none.png"], "prompts": ["<image> What?"], "captions": ["A cat."]},
    "image_outside_root": {"id": "../x", "images": ["../../a.png"], "captions": ["A cat."]},
    "empty": {"id": "silent", "messages": [TURNS[0], {"role": "assistant", "content": ""}]},
    "overlong": LONG,
}
Report = tuple[dict[str, int], list[dict[str, Any]]]


def in_order(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))


def packed(options: dict[str, Any], folder: Path) -> Report:
    result = pack(PackOptions(**{"max_reject_rate": 1} | options, output_dir=folder / "out"))
    return result.manifest.rejects, [json.loads(line) for line in result.rejects.open()]


def planned(options: dict[str, Any], folder: Path) -> Report:
    dataset = plan_in_memory(DataflowConfig(**options))
    assert sum(len(dataset[row]) for row in range(len(dataset)))
    return dataset.rejects.counts, dataset.rejects.rows


def streamed(options: dict[str, Any], folder: Path, **more: Any) -> Report:
    stream = PackedIterableDataset(DataflowConfig(**options), **more)
    assert list(stream)
    return stream.failures.counts, stream.failures.rows


def streamed_by_workers(options: dict[str, Any], folder: Path) -> Report:
    return streamed(options, folder, num_workers=2)


def raw(options: dict[str, Any], folder: Path, streaming: bool) -> Report:
    loader = get_raw_loader(DataflowConfig(**options, streaming=streaming))
    assert list(loader)
    return loader.failures.counts, loader.failures.rows


def raw_streaming(options: dict[str, Any], folder: Path) -> Report:
    return raw(options, folder, True)


def raw_planned(options: dict[str, Any], folder: Path) -> Report:
    return raw(options, folder, False)


MODES = [packed, planned, streamed, streamed_by_workers, raw_streaming, raw_planned]
Options = Callable[..., dict[str, Any]]


@pytest.fixture
def options(tmp_path: Path, tokenizer_dir: Path) -> Options:
    """Options of a file of records (objects, or lines as they are), and blank lines between them."""

    def make(records: list[Any], **settings: Any) -> dict[str, Any]:
        data = tmp_path / "data.jsonl"
        data.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n\n" for r in records))
        given = {"inputs": (str(data),), "tokenizer": tokenizer_dir, "seq_len": 256, "workers": 1}
        return given | {"max_reject_rate": 1} | settings

    return make


@pytest.fixture(params=MODES, ids=lambda mode: mode.__name__)
def mode(request: pytest.FixtureRequest) -> Callable[..., Report]:
    found: Callable[..., Report] = request.param
    return found


def same(mode: Any, given: dict[str, Any], folder: Path) -> Report:
    """The report of a mode, which is that of `pack`."""
    expected_counts, expected_rows = packed(given, folder)
    counts, rows = mode(given, folder)
    assert in_order(counts) == in_order(expected_counts)
    assert rows == expected_rows
    return counts, rows


def test_every_reason_has_the_same_counts_and_rows(mode: Any, options: Options, tmp_path: Path) -> None:
    records = [one for bad in BAD.values() for one in (GOOD, bad, {"id": "good", **GOOD})]
    counts, rows = same(mode, options([*records, "{broken"]), tmp_path)
    assert in_order(counts) == in_order(dict.fromkeys(BAD, 1) | {"bad_json": 2})
    assert [row["row"] for row in rows] == [*range(1, len(records), 3), len(records)]
    assert [row["id"] for row in rows[:3]] == ["data:1", "7", "data:7"]
    assert list(rows[0]) == ["source", "row", "line", "id", "reason", "detail"]
    assert [row["line"] for row in rows] == [2 * row["row"] + 1 for row in rows]  # blank lines between


def test_the_demo_has_the_same_rows(mode: Any, demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path) -> None:
    """Images of all kinds, twice; half of the records of one source are left out by choice."""
    sources = [{"path": str(demo.jsonl), "weight": 1.5}]
    given = {
        "sources": sources,
        "tokenizer": tokenizer_dir,
        "seq_len": 128,
        "workers": 1,
        "max_reject_rate": 1,
        "pad_multiple": 7,
    }
    counts, _ = same(mode, given, tmp_path)
    assert {"not_sampled", "overlong", "corrupt_image", "missing_image", "no_supervised_tokens"} <= set(counts)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".tar", ".parquet"])
def test_every_container_has_the_same_rows(mode: Any, tokenizer_dir: Path, tmp_path: Path, suffix: str) -> None:
    path = container(tmp_path / f"data{suffix}")
    given = {"inputs": (str(path),), "tokenizer": tokenizer_dir, "seq_len": 256, "workers": 1, "max_reject_rate": 1}
    _, rows = same(mode, given, tmp_path)
    assert [row["row"] for row in rows] == [1, 4]


def container(path: Path) -> Path:
    import gzip
    import io
    import tarfile

    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [GOOD, {"messages": []}, GOOD, GOOD, LONG]
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in records).encode()))
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"messages": [record["messages"] for record in records]}), path)
    else:
        with tarfile.open(path, "w") as tar:
            for number, record in enumerate(records):
                data = json.dumps(record).encode()
                info = tarfile.TarInfo(f"k{number}.json")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def test_truncation_leaves_the_same(mode: Any, options: Options, tmp_path: Path, demo: DemoDataset) -> None:
    image = next(str(p) for p in (demo.jsonl.parent / "images").glob("*.png"))
    records = [
        GOOD,
        LONG,
        {"prompts": ["word " * 400], "captions": ["Yes."]},
        {"images": [image], "prompts": ["word " * 300 + "<image>"], "captions": ["Yes."]},
    ]
    counts, _ = same(mode, options(records, overlong="truncate", image_root=Path("/")), tmp_path)
    assert in_order(counts) == {"no_supervised_tokens": 1, "overlong": 1}


@pytest.mark.parametrize("streaming", [True, False])
def test_truncated_samples_are_those_of_pack(options: Options, streaming: bool) -> None:
    config = DataflowConfig(**options([GOOD, LONG], overlong="truncate", pad_multiple=10), streaming=streaming)
    lengths = [
        int(length)
        for batch in get_raw_loader(config)
        for ident, length in zip(batch.ids, batch.cu_seqlens.diff(), strict=True)
        if ident == "long"
    ]
    assert lengths == [250]


REFUSALS = [
    (
        {"overlong": "error"},
        [GOOD, LONG],
        r"record long of .* rejected: overlong: .*seq_len 256 \(`overlong` is 'error'",
    ),
    ({"overlong": "error", "max_failures": 1000}, [GOOD, LONG], "`overlong` is 'error'"),
    ({"strict": True}, [GOOD, "{broken"], r"record data:1 of .*data.jsonl is rejected: bad_json: .*`strict`"),
    ({"strict": True}, [GOOD, LONG], r"record long of .* is rejected: overlong: .*`strict`"),
    ({"strict": True}, [GOOD, BAD["missing_image"]], "record data:1 of .* is rejected: missing_image: .*`strict`"),
    (
        {"max_failures": 0},
        [GOOD, "{broken"],
        r"1 records were rejected \(limit `max_failures` 0\): bad_json 1\. Fix the data",
    ),
    ({"max_failures": 1}, [GOOD, "{broken", "{broken"], r"2 records were rejected \(limit `max_failures` 1\)"),
    (
        {"max_reject_rate": 0.3},
        [GOOD, GOOD, "{broken", LONG],
        r"2 of 4 records \(50.0%\) .*`max_reject_rate` 0.3\): 1 x",
    ),
    (
        {"max_reject_rate": 0},
        [GOOD, GOOD, GOOD, LONG],
        r"1 of (4|the last \d) records .* 1 x overlong, e.g. line 7 of .*: .* seq_len 256 "
        r"(\(the longest sample has 814 tokens\) )?\(raise",
    ),
    ({}, ["{broken", LONG, LONG], r"none of 3 records can be packed: 2 x overlong, e.g. line 3 of .*; 1 x bad_json"),
]


@pytest.mark.parametrize(("settings", "records", "message"), REFUSALS, ids=lambda value: str(value)[:40])
def test_limits_refuse_the_same(
    mode: Any, options: Options, tmp_path: Path, settings: Any, records: Any, message: str
) -> None:
    with pytest.raises(RejectLimitError, match=message) as raised:
        mode(options(records, **settings), tmp_path)
    assert "\n" not in str(raised.value)


ALLOWED = [
    ({"max_failures": 0}, [GOOD, LONG]),
    ({"max_failures": 1}, [GOOD, LONG, LONG, "{broken"]),
    ({"max_reject_rate": 0.5}, [GOOD, GOOD, "{broken", LONG]),
    ({"max_failures": None, "max_reject_rate": 1}, [GOOD, *["{broken"] * 9]),
    ({"overlong": "error", "strict": True, "max_reject_rate": 0, "max_failures": 0}, [GOOD]),
]


@pytest.mark.parametrize(("settings", "records"), ALLOWED, ids=lambda value: str(value)[:40])
def test_limits_allow_the_same(mode: Any, options: Options, tmp_path: Path, settings: Any, records: Any) -> None:
    counts, _ = same(mode, options(records, **settings), tmp_path)
    assert sum(counts.values()) == sum(record != GOOD for record in records)


@pytest.mark.parametrize("mode", [streamed, raw_streaming, raw_planned, planned])
def test_one_line_in_the_log(mode: Any, options: Options, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        mode(options([GOOD, GOOD, "{broken", LONG, LONG]), tmp_path)
    (line,) = [one.getMessage() for one in caplog.records if "records are rejected" in one.getMessage()]
    assert "3 of 5 records are rejected (overlong 2, bad_json 1); see" in line
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        mode(options([GOOD]), tmp_path)
    assert not caplog.records


def default(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "max_reject_rate"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_with_a_wrong_image_root_stops(
    options: Options, caplog: pytest.LogCaptureFixture, num_workers: int
) -> None:
    """As `pack` does, without an option; streaming reads at most 1,000 records before it stops."""
    records = [BAD["missing_image"] if n % 7 in (1, 4) else GOOD for n in range(300)]
    for streaming in (True, False):
        caplog.clear()
        with pytest.raises(
            RejectLimitError, match=r"rejected \(limit `max_reject_rate` 0.05.*: \d+ x missing_image, e.g"
        ):
            config = DataflowConfig(**default(options(records)), streaming=streaming)
            list(get_raw_loader(config, num_workers=num_workers))
        assert len(caplog.records) <= 3  # not one for each record
    caplog.clear()
    stream = PackedIterableDataset(DataflowConfig(**options(records, max_reject_rate=0.3)), num_workers=num_workers)
    with caplog.at_level(logging.WARNING):
        assert sum(batch.num_samples for batch in stream) == 214
    lines = [record.getMessage() for record in caplog.records]
    if not num_workers:  # the log of a worker is not captured
        assert [line.split(";")[0] for line in lines if "so far" in line] == [
            "1 rejected so far",
            "10 rejected so far",
        ]
    assert "86 of 300 records are rejected (missing_image 86)" in lines[-1]


def test_the_rate_of_a_stream_is_of_1000_records_in_a_row(options: Options) -> None:
    short = {"text": "Hi there."}

    def read(bad: Callable[[int], bool], reject: Any = "{broken", **limits: Any) -> int:
        records = [reject if bad(n) else short for n in range(1500)]
        config = DataflowConfig(**default(options(records)) | limits, shuffle=False)
        return sum(batch.num_samples for batch in PackedIterableDataset(config))

    assert read(lambda n: n % 25 == 0) == 1440
    assert read(lambda n: 975 <= n < 1050) == 1425  # 25 of the first 1,000, and 50 of the others
    with pytest.raises(
        RejectLimitError, match=r"^51 of the last 151 records were .* `max_reject_rate` 0.05 of 1000\): 51"
    ):
        read(lambda n: 1100 <= n < 1155)  # 3.7% of all
    assert read(lambda n: 1100 <= n < 1155, max_reject_rate=0.1) == 1445
    assert read(lambda n: n >= 100, max_reject_rate=None, max_failures=None) == 100
    with pytest.raises(RejectLimitError, match="51 of the last 501 .* 51 x overlong"):
        read(lambda n: n % 10 == 0, LONG)  # counts, as in `pack`


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_counts_anew(options: Options, num_workers: int) -> None:
    stream = PackedIterableDataset(
        DataflowConfig(**options([GOOD, "{broken"], max_failures=1)), num_workers=num_workers
    )
    for _ in range(3):
        assert list(stream)
        assert stream.failures.counts == {"bad_json": 1}
        assert [row["row"] for row in stream.failures.rows] == [1]


def test_memory_is_bounded_and_counts_are_exact(options: Options) -> None:
    records = [GOOD, *["{broken"] * 1200]
    for streaming in (True, False):
        loader = get_raw_loader(DataflowConfig(**options(records, max_failures=None), streaming=streaming))
        assert list(loader)
        assert loader.failures.counts == {"bad_json": 1200}
        assert len(loader.failures.rows) == 1000


def test_a_mixture_names_the_rows_of_each_source(options: Options, tmp_path: Path) -> None:
    given = options([GOOD, "{broken"])
    other = tmp_path / "other.jsonl"
    other.write_text(f"{json.dumps(GOOD)}\n" * 3 + "[1]\n")
    of_each = [given, given | {"inputs": (str(other),)}]
    roles = [PackedIterableDataset(DataflowConfig(**one)).roles for one in of_each]
    mixture = MixtureDistributor([one.distributor for one in roles], [1, 1])
    loader = DataflowLoader(mixture, roles[0].processor, PoolPacker(256, overlong="drop"), max_failures=9)
    assert list(loader)
    assert [(Path(row["source"]).name, row["row"], row["id"]) for row in loader.failures.rows] == [
        ("data.jsonl", 1, "data:1"),
        ("other.jsonl", 3, "other:3"),
    ]


def test_a_limit_of_images_rejects_the_same(options: Options, tmp_path: Path, demo: DemoDataset) -> None:
    image = next(str(p) for p in (demo.jsonl.parent / "images").glob("*.png"))
    records = [{"images": [image] * count, "prompts": ["<image>" * count], "captions": ["A."]} for count in (1, 2, 3)]
    given = options([GOOD, *records, LONG], max_images=2, image_root=Path("/"), seq_len=4096)
    expected = planned(given, tmp_path)
    assert [row["detail"] for row in expected[1]] == ["3 images, more than max_images 2"]
    assert streamed(given, tmp_path) == expected


def test_a_restored_stream_counts_what_it_reads(options: Options) -> None:
    """It does not know the rest of the epoch, so the share of rejected records is not checked."""
    records = [*[{"id": f"g{n}", **GOOD} for n in range(6)], *["{broken"] * 3]
    given = options(records, shuffle=False, max_reject_rate=0.34, packing=False)
    first, second = (PackedIterableDataset(DataflowConfig(**given)) for _ in range(2))
    batches = iter(first)
    for _ in range(4):
        next(batches)
    second.load_state_dict(first.state_dict())
    for _ in range(2):  # the rest of this epoch, and the next one
        assert list(second)
        assert second.failures.counts == {"bad_json": 3}
        assert [row["row"] for row in second.failures.rows] == [6, 7, 8]


def test_a_config_file_for_training_serves_pack(options: Options, tmp_path: Path) -> None:
    given = options([GOOD, "{broken", "{broken"])
    file = tmp_path / "train.yaml"
    lines = [f"dataset_path: {given['inputs'][0]}", "packing_length: 256", f"processor_config: {given['tokenizer']}"]
    lines += ["filter_overlong: false", "max_failures: 1", "max_reject_rate: 1", "workers: 1"]
    file.write_text("\n".join([*lines, f"output_dir: {tmp_path / 'out'}"]))
    config = DataflowConfig.from_yaml(file)
    assert (config.overlong, config.max_failures, config.max_reject_rate) == ("error", 1, 1)
    with pytest.raises(RejectLimitError, match=r"limit `max_failures` 1"):
        plan_in_memory(config)
    done = energon_packed("pack", "--config", file, "--quiet")
    assert done.returncode == 1
    assert "limit --max-failures 1" in done.stderr


def test_energon_refuses_what_it_does_not_do(pack_demo: Any, encoder: Any) -> None:
    shards = pack_demo(sample_class="MultiMixQASample").shards
    for overlong in ("drop", "truncate", "split"):
        with pytest.raises(
            ConfigError, match=f"`overlong` of a packer must be 'error' under Energon, got '{overlong}'"
        ):
            get_packed_loader(shards, encoder, packer=PoolPacker(1024, overlong=overlong), packing_buffer_size=8)
    with pytest.raises(ConfigError, match="`overlong` must be one of drop, error, truncate, split, got 'cut'"):
        PoolPacker(1024, overlong="cut")


def test_items_that_are_no_records_stop_or_are_dropped() -> None:
    data = MapDistributor([{"id": "a", "input_ids": [1] * 4}, {"id": "b", "input_ids": [1] * 17}])

    def load(overlong: str) -> Iterator[Any]:
        loader = DataflowLoader(data, packer=PoolPacker(16, overlong=overlong), max_failures=9)  # type: ignore[arg-type]
        return ((batch.cu_seqlens.tolist(), loader.failures.counts) for batch in list(loader))

    assert list(load("drop")) == [([0, 4], {"overlong": 1})]
    assert next(load("truncate"))[0] in ([0, 4], [0, 16])
    with pytest.raises(ValueError, match="a sample does not fit a row: 17 tokens, more than seq_len 16"):
        list(load("error"))
