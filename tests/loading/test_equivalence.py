"""What the model sees packed equals what it sees unpacked: logits, loss and gradients of real model classes.

Rows come from real shards through the real loader; separate forwards use the samples' own encodings and the models'
own positions, with nothing of this package's batching in between.
"""

import json
from typing import Any

import pytest
import torch

from energon_packed import ChatEncoder, PackedBatch, PaddingFreeCollator, get_packed_loader, normalize
from tests.conftest import Packer
from tests.internals import DemoDataset
from tests.loading.models import tiny_model

MODELS = [(name, attention) for name in ("qwen2", "llama", "qwen2_5_vl") for attention in ("sdpa", "eager")]


@pytest.fixture(scope="session")
def text_encoder(text_tokenizer_dir: Any) -> ChatEncoder:
    return ChatEncoder.from_pretrained(text_tokenizer_dir)


@pytest.fixture(scope="session")
def text_packs(demo: DemoDataset, pack_demo: Packer, text_tokenizer_dir: Any, tmp_path_factory: Any) -> Any:
    """Packs of the text-only records."""

    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(line for line in demo.jsonl.open() if "demo-" in line and "images/" not in line))
    return pack_demo(inputs=(str(path),), tokenizer=text_tokenizer_dir, seq_len=300).shards


class Case:
    """A model, a packed row, and the separate forwards of its samples."""

    def __init__(self, name: str, attention: str, encoder: ChatEncoder, packs: Any, demo: DemoDataset) -> None:
        self.encoder = encoder
        self.model = tiny_model(name, encoder, attention)
        self.is_vision = name == "qwen2_5_vl"
        self.records = {r["id"]: r for line in demo.jsonl.open() if "demo-" in line and (r := json.loads(line))}
        self.root = str(demo.jsonl.parent)
        self.packs = packs

    def batch(self, **options: Any) -> PackedBatch:
        """A row of two packs, with several images where the model has vision."""
        loader = get_packed_loader(
            self.packs, self.encoder, epochs=1, num_workers=0, micro_batch_size=2, shuffle=False, **options
        )
        batch = next(iter(loader))
        assert batch.num_samples > 4
        if self.is_vision:
            assert len(batch.image_grid_thw) > 2
        return batch

    def separate(self, name: str | None) -> tuple[Any, int]:
        """Model output and number of targets of one sample alone, as Transformers is normally called."""
        assert name is not None
        sample = self.encoder.encode(normalize(self.records[name], image_root=self.root))
        ids = torch.from_numpy(sample.input_ids)[None]
        inputs: dict[str, Any] = {"input_ids": ids, "labels": torch.from_numpy(sample.labels)[None]}
        if self.is_vision:
            inputs["mm_token_type_ids"] = (ids == self.encoder.image_token_id).int()
        if sample.pixel_values is not None:
            inputs |= {"pixel_values": sample.pixel_values, "image_grid_thw": sample.image_grid_thw}
        return self.model(**inputs, use_cache=False), int((sample.labels[1:] != -100).sum())

    def separate_logits(self, batch: PackedBatch) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([self.separate(name)[0].logits[0] for name in batch.ids])


@pytest.fixture(params=MODELS, ids="-".join)
def case(
    request: Any,
    demo: DemoDataset,
    pack_demo: Packer,
    encoder: ChatEncoder,
    text_encoder: ChatEncoder,
    text_packs: Any,
) -> Case:
    name, attention = request.param
    if name == "qwen2_5_vl":
        return Case(name, attention, encoder, pack_demo(seq_len=600).shards, demo)
    return Case(name, attention, text_encoder, text_packs, demo)


def test_packed_logits_equal_the_separate_forwards(case: Case) -> None:
    batch = case.batch()
    with torch.no_grad():
        packed = case.model(**batch.transformers_inputs()).logits[0]
    assert (packed - case.separate_logits(batch)).abs().max() <= 1e-5


def test_packed_loss_and_gradients_equal_the_token_weighted_mean(case: Case) -> None:
    batch = case.batch()
    case.model.zero_grad()
    packed_loss = case.model(**batch.transformers_inputs()).loss
    packed_loss.backward()
    packed = {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}
    case.model.zero_grad()
    outputs = [case.separate(name) for name in batch.ids]
    total = sum(targets for _, targets in outputs)
    loss = sum(output.loss * targets for output, targets in outputs if targets) / total
    loss.backward()
    assert abs(packed_loss.item() - loss.item()) <= 1e-5 * abs(loss.item())
    separate = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
    assert set(packed) == set(separate)
    norm = torch.cat([grad.flatten() for grad in separate.values()]).norm()
    difference = torch.cat([(packed[name] - separate[name]).flatten() for name in separate]).norm()
    assert difference <= 1e-5 * norm
    assert torch.isclose(batch.loss(case.model(**batch.transformers_inputs()).logits), packed_loss, rtol=1e-5)


def test_padding_changes_nothing_that_is_real(case: Case) -> None:
    plain = case.batch()
    width = plain.input_ids.shape[1] + 8 * plain.num_samples + 5
    padded = case.batch(collator=PaddingFreeCollator(pad_multiple=8, pad_to=width))
    assert padded.cu_seqlens_padded is not None
    with torch.no_grad():
        packed = case.model(**padded.transformers_inputs()).logits[0][~padded.padding_mask[0]]
        assert (packed - case.separate_logits(plain)).abs().max() <= 1e-5


def test_the_check_sees_removed_boundaries(case: Case) -> None:
    """Kept so that the tests above are known to see a leak: without boundaries, samples attend to each other."""
    batch = case.batch()
    inputs = batch.transformers_inputs()
    running = torch.arange(batch.input_ids.shape[1])
    positions = inputs["position_ids"].clone()
    positions[0 if positions.ndim == 2 else (0, 0)] = running
    with torch.no_grad():
        leaky = case.model(**{**inputs, "position_ids": positions}).logits[0]
    assert (leaky - case.separate_logits(batch)).abs().max() > 1e-3


def test_three_rows_of_positions_would_leak(demo: DemoDataset, pack_demo: Packer, encoder: ChatEncoder) -> None:
    """Why M-RoPE batches have a fourth row: without it Transformers builds no boundaries, and says nothing."""
    case = Case("qwen2_5_vl", "sdpa", encoder, pack_demo(seq_len=600).shards, demo)
    batch = case.batch()
    inputs = batch.transformers_inputs()
    with torch.no_grad():
        leaky = case.model(**{**inputs, "position_ids": inputs["position_ids"][1:]}).logits[0]
    assert (leaky - case.separate_logits(batch)).abs().max() > 1e-3


@pytest.mark.parametrize("weighting", ["token", "sample", "sqrt"])
def test_loss_weighting_is_the_formula(
    demo: DemoDataset, text_packs: Any, text_encoder: ChatEncoder, weighting: str
) -> None:
    case = Case("qwen2", "sdpa", text_encoder, text_packs, demo)
    batch = case.batch(collator=PaddingFreeCollator(loss_weighting=weighting))  # type: ignore[arg-type]
    with torch.no_grad():
        found = batch.loss(case.model(**batch.transformers_inputs(weighted_loss=True)).logits)
        outputs = [case.separate(name) for name in batch.ids]
    share = {"token": lambda n: n, "sample": lambda n: 1, "sqrt": lambda n: n**0.5}[weighting]
    weights = [share(n) for _, n in outputs]
    expected = sum(w * output.loss for w, (output, _) in zip(weights, outputs, strict=True)) / sum(weights)
    assert torch.isclose(found, expected, rtol=1e-5)
    assert torch.isclose(batch.loss_mask.sum(), (batch.labels != -100).sum().float())
    assert ((batch.loss_mask > 0) == (batch.labels != -100)).all()
