"""Fractional loss weights of turns, records and tokens reach `loss_mask` by every flavor and reader, unchanged."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon import WorkerConfig, get_loader, get_val_dataset

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    Conversation,
    DataflowConfig,
    DataflowLoader,
    EncodedSample,
    MapDistributor,
    PackedBatch,
    PackedDataset,
    PackedIterableDataset,
    PackingManifest,
    PaddingFreeCollator,
    Processor,
    RecordError,
    get_packed_loader,
    normalize,
    pack,
    plan_in_memory,
)
from tests.conftest import FLAVORS
from tests.internals import encode_pack, megatron_batch
from tests.printed import invoke

USER = {"role": "user", "content": "What is 2 + 3?"}
WEIGHTS = st.sampled_from([0, 0.001, 0.5, 1, 1.7, 2, 1e6])


def talk(*weights: float, ident: str = "t", **fields: Any) -> dict[str, Any]:
    """A conversation whose assistant turns have these loss weights."""
    answers = [{"role": "assistant", "content": f"It is {n}, five.", "weight": w} for n, w in enumerate(weights)]
    return {"id": ident, "messages": [turn for answer in answers for turn in (USER, answer)], **fields}


def masks(batches: Iterable[PackedBatch]) -> dict[str, list[float]]:
    """`loss_mask` of each sample by id."""
    found: dict[str, list[float]] = {}
    for batch in batches:
        bounds = batch.cu_seqlens.tolist()
        for ident, start, end in zip(batch.ids, bounds, bounds[1:], strict=False):
            found[str(ident)] = batch.loss_mask[0, start:end].tolist()
    return found


def mask_of(encoder: ChatEncoder, record: dict[str, Any], **options: Any) -> list[float]:
    batch = PaddingFreeCollator().collate([encoder.encode(normalize(record, **options))])
    return batch.loss_mask[0].tolist()


@pytest.fixture
def build(tmp_path: Path, tokenizer_dir: Path) -> Any:
    """Packs records to any folder."""

    def run(records: list[Any], **options: Any) -> Any:
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        single = options["sample_class"] == "MultiMixQASample"
        defaults = {"output_dir": tmp_path / "out", "tokenizer": tokenizer_dir, "seq_len": 256, "workers": 1}
        return pack(data, **{**defaults, "unpacked": single, **options})

    return run


@pytest.mark.parametrize("loss_on", ["assistant", "last", "all"])
@settings(max_examples=20)
@given(weights=st.lists(WEIGHTS, min_size=1, max_size=4).filter(lambda weights: weights[-1] > 0))
def test_each_token_has_the_weight_of_its_turn(tokenizer_dir: Path, loss_on: Any, weights: list[float]) -> None:
    encoder = _encoder(tokenizer_dir, loss_on)
    # The tokens of a turn, by the rule for weights of 0 and 1 alone: those that become context with its weight 0.
    whole = np.array(mask_of(encoder, talk(*[1] * len(weights))))
    expected = whole.copy()
    for turn, weight in enumerate(weights):
        if loss_on == "last" and turn < len(weights) - 1:
            continue
        try:
            others = np.array(mask_of(encoder, talk(*[int(n != turn) for n in range(len(weights))])))
        except RecordError:  # the only turn with targets
            others = np.zeros_like(whole)
        expected[(whole == 1) & (others == 0)] = weight
    assert mask_of(encoder, talk(*weights)) == expected.astype(np.float32).tolist()


_ENCODERS: dict[Any, ChatEncoder] = {}


def _encoder(folder: Path, loss_on: Any) -> ChatEncoder:
    return _ENCODERS.setdefault((folder, loss_on), ChatEncoder.from_pretrained(folder, loss_on=loss_on))


def test_weights_of_special_text_images_and_parallel_batches_are_kept(encoder: ChatEncoder, demo: Any) -> None:
    lines = [json.loads(line) for line in demo.jsonl.open() if '"demo-' in line]
    image = next(record["images"][0] for record in lines if record.get("images"))
    odd = talk(0.5, 2)
    odd["messages"][0] = {"role": "user", "content": "<image>Is <|im_end|> an Ünïcode token?"}
    odd["messages"][1]["content"] = "<|im_start|> ist ein Tökén."
    odd["images"] = [image]
    records = [talk(1), talk(0.25), odd]
    conversations = [normalize(record, image_root=str(demo.jsonl.parent)) for record in records]
    together = encoder.encode_many(conversations)
    for conversation, sample in zip(conversations, together, strict=True):
        alone = encoder.encode(conversation)
        assert isinstance(sample, EncodedSample)
        measured = encoder.measure(conversations, keep_tokens=True)[conversations.index(conversation)].sample
        found = [PaddingFreeCollator().collate([one]).loss_mask.tolist() for one in (alone, sample, measured)]
        assert found[0] == found[1] == found[2]
    of_odd = PaddingFreeCollator().collate([encoder.encode(conversations[2])])
    values = of_odd.loss_mask[of_odd.loss_mask > 0]
    assert set(values.tolist()) == {0.5, 2.0}
    assert ((of_odd.loss_mask > 0) == (of_odd.labels != -100)).all()


RECORDS = [
    talk(0.5, 2, ident="fractions"),
    talk(0, 0.125, ident="masked"),
    talk(1, 1, ident="plain"),
    {"id": "document", "text": "A document of several words, which ends.", "sample_weight": 0.75},
    talk(0.3, ident="record", weight=3),
]


@pytest.fixture(scope="module")
def expected(encoder: ChatEncoder) -> dict[str, list[float]]:
    return {record["id"]: mask_of(encoder, record, record_weight="loss") for record in RECORDS}


@pytest.fixture(scope="module", params=FLAVORS)
def stored(request: Any, tokenizer_dir: Path, tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    result = pack(
        data, output_dir=folder / "out", seq_len=256, tokenizer=tokenizer_dir, sample_class=request.param, workers=1,
        record_weight="loss", unpacked=request.param == "MultiMixQASample",
    )  # fmt: skip
    assert result.manifest.packed == len(RECORDS)
    return result.shards


def test_every_flavor_and_reader_has_the_same_loss_mask(
    stored: Path, encoder: ChatEncoder, expected: dict[str, list[float]]
) -> None:
    assert {value for mask in expected.values() for value in mask} >= {0.5, 2.0, 0.125, 1.0, 0.75}
    collate = PaddingFreeCollator().collate
    dataset = PackedDataset(stored, encoder)
    assert masks(collate(dataset[i]) for i in range(len(dataset))) == expected
    assert masks(DataflowLoader(MapDistributor(dataset), encoder, num_workers=1)) == expected
    assert masks(get_packed_loader(stored, encoder, epochs=1, num_workers=0)) == expected
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    packs = list(get_loader(get_val_dataset(stored, split_part="train", worker_config=config, batch_size=None)))
    assert masks(collate(encode_pack(one, encoder)) for one in packs) == expected


def test_records_with_loss_weights_are_counted(stored: Path) -> None:
    assert PackingManifest.load(stored).notes["loss weights other than 0 and 1"] == 4


def test_a_dataset_that_is_packed_again_keeps_its_weights(
    stored: Path, encoder: ChatEncoder, expected: dict[str, list[float]], tmp_path: Path, tokenizer_dir: Path
) -> None:
    options: Any = {"output_dir": tmp_path / "out", "tokenizer": tokenizer_dir, "workers": 1}
    for seq_len, reused in ((300, 0), (200, len(RECORDS))):  # the second run reads the kept tokens of the first
        result = pack(stored, seq_len=seq_len, sample_class="PackedTokensSample", overwrite=True, **options)
        assert result.manifest.counters["reused"] == reused
        assert masks(get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)) == expected


@pytest.mark.parametrize("stored", ["PackedTokensSample"], indirect=True)
def test_inspect_and_report_show_the_weights(stored: Path, expected: dict[str, list[float]], tmp_path: Path) -> None:
    found: list[list[float]] = []
    for pack_index in range(PackingManifest.load(stored).packs):
        arguments = ("inspect", stored, "--pack", f"out_{pack_index:08d}", "--tokens")
        rows = [json.loads(line) for line in invoke(*arguments, "--json").output.splitlines()]
        for segment in range(rows[-1]["segment"] + 1):
            of_sample = [row for row in rows if row["segment"] == segment]
            found.append([row.get("weight", float(row["label"] >= 0)) for row in of_sample])
        weights = {row.get("weight") for row in rows}
        assert all(f" {weight:g} " in invoke(*arguments).output for weight in weights - {None})
    assert sorted(found) == sorted(expected.values())
    page = tmp_path / "report.html"
    invoke("report", stored, "-o", page)
    assert "other than 0 and 1 in 4 records" in page.read_text()


@pytest.mark.parametrize("streaming", [True, False])
def test_raw_records_have_the_same_loss_mask(
    tmp_path: Path, tokenizer_dir: Path, expected: dict[str, list[float]], streaming: bool
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    config = DataflowConfig(
        dataset_path=str(data), packing_length=256, processor_config=str(tokenizer_dir), record_weight="loss"
    )
    flow: Any = PackedIterableDataset(config) if streaming else DataflowLoader(MapDistributor(plan_in_memory(config)))
    assert masks(flow) == expected


TOKENS = {"id": "k", "input_ids": list(range(20, 32)), "labels": [-100] * 4 + list(range(24, 32))}
OF_TOKENS = [9.0, 9, 9, 9, 0.5, 0.5, 0, 1, 2, 0.25, 0.25, 1]


@pytest.mark.parametrize(
    ("flavor", "overlong"),
    [("PackedTokensSample", "split"), *((flavor, "drop") for flavor in FLAVORS if flavor != "PackedCaptioningSample")],
)
@pytest.mark.parametrize("shift", [0, 1])
def test_weights_of_tokens_are_packed_and_split(
    build: Any, encoder: ChatEncoder, flavor: str, overlong: str, shift: int
) -> None:
    labels = [label if label < 0 else label + shift for label in TOKENS["labels"]]  # custom labels need labels.npy
    plain = {"id": "plain", "input_ids": list(range(40, 45))}
    record = {**TOKENS, "labels": labels, "loss_weights": OF_TOKENS}
    result = build([plain, record], sample_class=flavor, overlong=overlong, seq_len=12 if overlong == "drop" else 7)
    found = masks(get_packed_loader(result.shards, encoder, epochs=1, num_workers=0))
    assert found.pop("plain") == [0, 1, 1, 1, 1]
    expected = [0, 0, 0, 0, *OF_TOKENS[4:]]
    if overlong == "drop":
        assert found == {"k": expected}
    else:  # a fragment repeats a token as context
        assert found == {"k#0": expected[:7], "k#1": [0, *expected[7:]]}


@pytest.mark.parametrize("streaming", [True, False])
def test_fragments_of_raw_records_have_the_weights_of_their_tokens(tmp_path: Path, streaming: bool) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({**TOKENS, "loss_weights": OF_TOKENS, "weight": 2}))
    config = DataflowConfig(dataset_path=str(data), packing_length=7, overlong="split", record_weight="loss")
    flow: Any = PackedIterableDataset(config) if streaming else DataflowLoader(MapDistributor(plan_in_memory(config)))
    assert masks(flow) == {"k#0": [0, 0, 0, 0, 1, 1, 0], "k#1": [0, 2, 4, 0.5, 0.5, 2]}


def test_weights_of_one_store_nothing(build: Any, tmp_path: Path, encoder: ChatEncoder) -> None:
    first = build([TOKENS], sample_class="PackedTokensSample")
    names = {tar.name: tar.read_bytes() for tar in first.shards.glob("*.tar")}
    ones = {**TOKENS, "loss_weights": [0.5] * 4 + [1] * 8}  # a weight counts only at targets
    again = build([ones], sample_class="PackedTokensSample", output_dir=tmp_path / "ones" / "out")
    assert {tar.name: tar.read_bytes() for tar in again.shards.glob("*.tar")} == names
    assert again.manifest.weight_checksum == first.manifest.weight_checksum == 0
    assert encoder.encode(normalize(ones)).loss_weights is None


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"loss_weights": [1.0]}, "loss_weights has 1 entries for 12 input_ids"),
        ({"loss_weights": [1.0] * 11 + [-0.5]}, r"loss_weights\[11\] is -0.5; use 0, or a number from 1e-9 to 1e9"),
        ({"loss_weights": [float("nan")] * 12}, r"loss_weights\[0\] is nan; use 0"),
        ({"loss_weights": [1e300] * 12}, r"loss_weights\[0\] is inf; use 0"),
        ({"loss_weights": ["a"] * 12}, "loss_weights must be a flat list of numbers"),
        ({"loss_weights": [[1.0]] * 12}, "loss_weights must be a flat list of numbers"),
        ({"weight": 0.5}, "`record_weight` to loss"),
    ],
)
def test_invalid_weights_of_tokens_reject_the_record(fields: dict[str, Any], detail: str) -> None:
    with pytest.raises(RecordError, match=detail):
        normalize({**TOKENS, **fields})


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), 1e-10, 1e10])
def test_invalid_weights_of_turns_and_records_reject_the_record(weight: float) -> None:
    with pytest.raises(RecordError, match="weight of a turn is .*; use 0, or a number from 1e-9 to 1e9"):
        normalize(talk(weight))
    with pytest.raises(RecordError, match="weight of the record is .*; use 0, or a number from 1e-9 to 1e9"):
        normalize(talk(1, weight=weight), record_weight="loss")


def test_the_weight_of_a_record_is_refused_until_the_option_gives_its_meaning(encoder: ChatEncoder) -> None:
    for name in ("weight", "sample_weight", "loss_weight", "loss_scale"):
        with pytest.raises(RecordError, match=f"the field {name} of the record .*: set `record_weight` to loss"):
            normalize(talk(1, **{name: 0.5}))
        found = mask_of(encoder, talk(1, 4, **{name: 0.5}), record_weight="loss")
        assert set(found) == {0, 0.5, 2}
    with pytest.raises(RecordError, match="the field loss_scale of the record .*: give each turn a weight"):
        normalize(talk(1, loss_scale="last_round"))  # a strategy of ms-swift
    with pytest.raises(RecordError, match="weight and loss_scale of the record differ"):
        normalize(talk(1, weight=1, loss_scale=2), record_weight="loss")
    with pytest.raises(RecordError, match="no token after the first is a target"):
        encoder.encode(normalize(talk(1, weight=0), record_weight="loss"))


class Words(Processor):
    """Applies no weights."""

    def encode(self, conversation: Conversation) -> EncodedSample:
        ids = np.arange(9)
        return EncodedSample(id=conversation.id, input_ids=ids, labels=ids)


def test_a_custom_processor_does_not_drop_weights_without_a_sign() -> None:
    weighted = [normalize(talk(0.5)), normalize({"text": "A.", "weight": 2}, record_weight="loss")]
    encoded, measured = Words().encode_many(weighted), Words().measure(weighted)
    assert all("Words applies no loss weights" in str(reject) for reject in encoded)
    assert all("Words applies no loss weights" in str(measurement.reject) for measurement in measured)
    assert isinstance(Words().encode_many([normalize(talk(0, 1))])[0], EncodedSample)


def test_flags_agree_with_any_weight_above_0() -> None:
    answer = {"role": "assistant", "content": "Five.", "loss": True, "train": True, "weight": 0.5, "loss_scale": 0.5}
    assert normalize({"messages": [USER, answer]}).messages[1].weight == 0.5
    for wrong in ({"loss": False}, {"loss_scale": 1}, {"weight": 0}):
        with pytest.raises(RecordError, match="which differ; keep weight alone"):
            normalize({"messages": [USER, {**answer, **wrong}]})


def test_loss_scale_of_a_turn_is_its_weight() -> None:
    turns = [USER, {"role": "assistant", "content": "Five.", "loss_scale": 0.25}]
    assert normalize({"messages": turns}).messages[1].weight == 0.25
    with pytest.raises(RecordError, match="loss_scale is 0.5 for a user turn"):
        normalize({"messages": [{**USER, "loss_scale": 0.5}, turns[1]]})


def sample(*weights: float, ident: str = "s") -> EncodedSample:
    ids = np.arange(len(weights) + 1) + 10
    values = np.array([1, *weights], dtype=np.float32)
    return EncodedSample(id=ident, input_ids=ids, labels=ids, loss_weights=values)


def test_the_mask_is_the_product_of_the_weights_of_record_and_collator() -> None:
    row = [sample(0.5, 2), replace(sample(1), loss_weights=None)]
    assert PaddingFreeCollator().collate(row).loss_mask.tolist() == [[0, 0.5, 2, 0, 1]]
    weighted = PaddingFreeCollator(loss_weighting="sample").collate(row)
    assert weighted.loss_mask.tolist() == [[0, 0.375, 1.5, 0, 1.5]]
    padded = PaddingFreeCollator(pad_multiple=4, pad_to=12).collate(row)
    assert padded.loss_mask.tolist() == [[0, 0.5, 2, 0, 0, 1, 0, 0, 0, 0, 0, 0]]
    assert padded.to("cpu", dtype=torch.bfloat16).loss_mask.dtype == torch.float32
    assert padded.megatron_inputs()["loss_mask"][0, :2].tolist() == [0.5, 2]
    for collator, batch in ((PaddingFreeCollator(loss_weighting="sample"), weighted), (PaddingFreeCollator(), padded)):
        again = collator.collate(batch.split())
        assert again.loss_mask[again.loss_mask > 0].tolist() == batch.loss_mask[batch.loss_mask > 0].tolist()


def test_the_loss_is_the_weighted_mean() -> None:
    batch = PaddingFreeCollator().collate([sample(0.5, 2), sample(1)])
    logits = torch.randn(1, 5, 40)
    each = torch.nn.functional.cross_entropy(logits[0, :-1], batch.input_ids[0, 1:], reduction="none")
    assert torch.isclose(batch.loss(logits), (0.5 * each[0] + 2 * each[1] + each[3]) / 3.5)


def test_a_models_own_loss_is_refused_for_weighted_batches() -> None:
    batch = PaddingFreeCollator().collate([sample(0.5, 2)])
    with pytest.raises(BatchError, match="`weighted_loss` must be True .* PackedTrainer"):
        batch.transformers_inputs()
    assert "labels" in batch.transformers_inputs(weighted_loss=True)
    with pytest.raises(BatchError, match="PackedTrainer"):
        PaddingFreeCollator()([batch])
    with pytest.raises(BatchError, match="PackedTrainer"):
        PaddingFreeCollator()([[sample(0.5, 2)]])
    feature = {"input_ids": [1, 2, 3], "loss_weights": [1, 0.5, 0]}
    with pytest.raises(BatchError, match="PackedTrainer"):
        PaddingFreeCollator()([feature])
    PaddingFreeCollator()([{**feature, "loss_weights": None}])
    for wrong in ([1, 0.5], [1, -1, 1], [[1, 1, 1], [1, 1, 1]]):
        with pytest.raises(BatchError, match="loss_weights"):
            PaddingFreeCollator()([{**feature, "loss_weights": wrong}])


@pytest.mark.parametrize("weights", [(0.5, 2, 1), (0.1, 0.1, 0.1), (0.7, 0.7), (3.3, 1.4, 1)])
def test_megatron_divides_by_the_sum_of_the_weights(weights: tuple[float, ...]) -> None:
    batch = PaddingFreeCollator().collate([sample(*weights)])
    for layout in ("bridge", "megatron-gpt"):
        mask = megatron_batch(batch, layout)["loss_mask"]
        divisor = mask.sum().to(torch.int)  # as Megatron's loss functions compute it
        assert divisor == max(round(sum(weights)), 1)
        shares, expected = mask[mask > 0] / divisor, torch.tensor(weights) / sum(weights)
        assert torch.allclose(shares, expected, rtol=1e-5)
    with pytest.raises(ConfigError, match="does not support loss weights"):
        megatron_batch(batch, "megatron-lm")
