"""packed_training_arguments and check_training_arguments: each thing that is wrong, by name, with what to write."""

import subprocess
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    Consumed,
    CostModel,
    DataflowConfig,
    DataflowLoader,
    MapDistributor,
    PackedDataset,
    PackedIterableDataset,
    PackedTrainer,
    PaddingFreeCollator,
    TrainerStream,
    check_isolation,
    check_training_arguments,
    get_packed_loader,
    pack,
    packed_training_arguments,
)
from tests.integrations.launched import tiny_qwen2

CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in signature(TrainingArguments).parameters
)  # its name, new and old


def made(tmp_path: Path, **arguments: Any) -> TrainingArguments:
    return TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **arguments)


MAP_STYLE: list[tuple[dict[str, Any], str, str]] = [
    ({"accelerator_config": {"dispatch_batches": True}}, "`dispatch_batches`", "'dispatch_batches': False"),
    ({"train_sampling_strategy": "group_by_length"}, "`train_sampling_strategy`", "or use PackedTrainer"),
    ({"train_sampling_strategy": "batch_rebalance"}, "`train_sampling_strategy`", "Set it to 'random'"),
    ({"use_cache": True}, "`use_cache`", "Set it to False"),
]


@pytest.mark.parametrize(("arguments", "names", "says"), MAP_STYLE)
def test_each_argument_that_is_wrong_for_packs(
    text_packs: list[Path], tmp_path: Path, arguments: dict[str, Any], names: str, says: str
) -> None:
    data = PackedDataset(text_packs[0])
    check_training_arguments(made(tmp_path), data)
    with pytest.raises(ConfigError) as caught:
        check_training_arguments(made(tmp_path, **arguments), data)
    assert str(caught.value).startswith(names)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_several_processes_need(image_packs: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    data = PackedDataset(image_packs, encoder)

    class Two(TrainingArguments):
        world_size = 2
        n_gpu = 2

    args = Two(
        str(tmp_path),
        use_cpu=True,
        average_tokens_across_devices=True,
        ddp_find_unused_parameters=False,
        **{CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}},
        accelerator_config={"split_batches": True},
        per_device_train_batch_size=3,
    )
    args.average_tokens_across_devices = False
    with pytest.raises(ConfigError) as caught:
        check_training_arguments(args, data)
    lines = str(caught.value).splitlines()[1:]
    expected = ["split_batches", "DataParallel", "average_tokens_across_devices", "ddp_find_unused_parameters"]
    assert len(lines) == 5
    assert all(name in line for name, line in zip([*expected, "use_reentrant"], lines, strict=True))
    right = packed_training_arguments(str(tmp_path), data, use_cpu=True, **{CHECKPOINTING: True})
    assert right.ddp_find_unused_parameters is True
    assert getattr(right, f"{CHECKPOINTING}_kwargs") == {"use_reentrant": False}


def test_a_stream_says_all_that_it_needs(text_packs: list[Path], tmp_path: Path) -> None:
    stream = TrainerStream(get_packed_loader(text_packs[0], epochs=1, num_workers=0))
    packs = len(PackedDataset(text_packs[0]))
    wrong = made(
        tmp_path,
        dataloader_num_workers=2,
        auto_find_batch_size=True,
        gradient_accumulation_steps=2,
        accelerator_config={"split_batches": True},
    )
    with pytest.raises(ConfigError) as caught:
        check_training_arguments(wrong, stream)
    lines = str(caught.value).splitlines()[1:]
    names = ["dispatch_batches", "split_batches", "max_steps", "ignore_data_skip", "per_device_train_batch_size"]
    names += ["dataloader_num_workers", "auto_find_batch_size"]
    assert [line.split("`")[1] for line in lines] == names
    assert f"An epoch has {packs} batches: set max_steps={-(-packs // 2)}" in str(caught.value)
    right = packed_training_arguments(str(tmp_path), stream, use_cpu=True, gradient_accumulation_steps=2)
    assert right.max_steps == -(-3 * packs // 2)  # 3 epochs by default


def test_data_without_a_known_length_need_max_steps(
    demo: Any, text_tokenizer_dir: Path, text_packs: list[Path], tmp_path: Path
) -> None:
    config = DataflowConfig(
        inputs=(str(text_packs[2].parent / "a.jsonl"),), tokenizer=text_tokenizer_dir, packing_length=384
    )
    stream = TrainerStream(PackedIterableDataset(config))
    with pytest.raises(ConfigError, match="not known in advance: set the number of steps"):
        packed_training_arguments(str(tmp_path), stream, use_cpu=True)
    assert packed_training_arguments(str(tmp_path), stream, use_cpu=True, max_steps=7).max_steps == 7
    with pytest.raises(ConfigError, match="Pass `steps`, the batches of one iteration"):
        next(iter(Consumed(PackedIterableDataset(config))))
    loader = Consumed(PackedIterableDataset(config), steps=2)
    assert [len(list(loader)) for _ in range(4)] == [2] * 4


def test_packed_trainer_groups_by_the_lengths_of_the_data(text_packs: list[Path], tmp_path: Path) -> None:
    data = PackedDataset(text_packs[0])
    args = made(tmp_path, train_sampling_strategy="group_by_length")
    trainer = PackedTrainer(tiny_qwen2(), args, train_dataset=data, data_collator=PaddingFreeCollator())
    loader = DataflowLoader(MapDistributor(data, balance="attention"), batch_size=8, seed=args.seed)
    expected = [batch.input_ids.tolist() for batch in loader]
    assert [inputs["input_ids"].tolist() for inputs in trainer.get_train_dataloader()] == expected
    cost = CostModel(square=1)
    args = made(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=1)
    trainer = PackedTrainer(tiny_qwen2(), args, train_dataset=data, data_collator=PaddingFreeCollator(), balance=cost)
    order = MapDistributor(data, balance=cost, accumulation=2)
    expected = [batch.input_ids.tolist() for batch in DataflowLoader(order, batch_size=1, seed=args.seed)]
    assert [inputs["input_ids"].tolist() for inputs in trainer.get_train_dataloader()] == expected
    with pytest.raises(ConfigError, match="`balance` needs a PackedDataset or PlannedDataset .*, got list"):
        PackedTrainer(tiny_qwen2(), args, train_dataset=[{}], data_collator=PaddingFreeCollator(), balance=cost)
    with pytest.raises(ConfigError, match="`use_cache` must be False, got True"):
        PackedTrainer(tiny_qwen2(), made(tmp_path, use_cache=True), train_dataset=data)


def test_rows_of_a_hugging_face_dataset_are_packs(text_packs: list[Path]) -> None:
    data = PackedDataset(text_packs[0])
    rows = data.to_hf()
    collator = PaddingFreeCollator()
    for number in (0, len(data) - 1):
        row, expected = rows[number], collator([data[number]])
        assert row["input_ids"].tolist() == expected["input_ids"][0].tolist()
        assert row["seq_lengths"].tolist() == [len(sample) for sample in data[number]]
        assert collator([row])["labels"].tolist() == expected["labels"].tolist()
    assert collator([rows[1], rows[2]])["input_ids"].tolist() == collator([data[1], data[2]])["input_ids"].tolist()
    assert rows.shuffle(seed=3)[0]["pack"][0].id in {sample.id for pack in data for sample in pack}


def test_packed_trainer_reads_a_whole_hugging_face_dataset_in_its_order(
    text_packs: list[Path], tmp_path: Path
) -> None:
    data = PackedDataset(text_packs[0])
    table = data.to_hf()
    kept = [table, table.select(range(3)), table.select([1, 0, *range(2, len(data))])]
    trainers = [
        PackedTrainer(tiny_qwen2(), made(tmp_path), train_dataset=rows, data_collator=PaddingFreeCollator())
        for rows in kept
    ]
    assert trainers[0].train_dataset is data
    assert trainers[1].train_dataset is kept[1]
    assert trainers[2].train_dataset is kept[2]


def test_a_finished_row_stays_alone_and_a_resumed_consumed_loader_goes_on(text_packs: list[Path]) -> None:
    make = lambda: Consumed(DataflowLoader(MapDistributor(PackedDataset(text_packs[0]))))  # noqa: E731
    batches = list(get_packed_loader(text_packs[0], epochs=1, num_workers=0))
    assert PaddingFreeCollator()(batches[:1])["input_ids"] is batches[0].input_ids
    with pytest.raises(BatchError, match="of finished rows must have 1 row, got 2"):
        PaddingFreeCollator()(batches[:2])
    loader = make()
    stream = [batch["input_ids"].tolist() for _ in range(3) for batch in loader]
    assert len(stream) == 3 * len(loader)
    for used in range(2 * len(loader) + 1):
        first, second = make(), make()
        seen = iter(batch for _ in range(3) for batch in first)
        for _ in range(used):
            next(seen)
        second.load_state_dict(first.state_dict())
        rest = [batch["input_ids"].tolist() for batch in second]
        end = (used // len(loader) + 1) * len(loader)
        assert rest == stream[used:end], f"after {used} batches"


def test_packed_trainer_has_the_arguments_of_trainer() -> None:
    own, theirs = (list(signature(kind.__init__).parameters) for kind in (PackedTrainer, Trainer))
    assert own == [*theirs, "balance", "order_log", "logits", "loss", "ref_model"]


def test_a_loader_is_not_a_train_dataset() -> None:
    """In a process of its own, whose forks are safe: after other tests, this process has threads of many libraries."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    cases = Path(__file__).with_name("loader_cases.py")
    done = subprocess.run([*command, cases], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mrope_positions_are_refused_for_a_text_model(text_packs: list[Path], tmp_path: Path) -> None:
    class WithMRope(PaddingFreeCollator):
        def collate(self, samples: Any) -> Any:
            batch = super().collate(samples)
            return replace(batch, position_ids=batch.position_ids.expand(4, 1, -1))

    data = PackedDataset(text_packs[0])
    message = r"^`position_ids` must be \(1, T\) for Qwen2ForCausalLM, which has no M-RoPE, got \(4, 1, \d+\)\. "
    args = packed_training_arguments(str(tmp_path), data, use_cpu=True, report_to=[], max_steps=1)
    with pytest.raises(ConfigError, match=message):
        PackedTrainer(tiny_qwen2(), args, train_dataset=data, data_collator=WithMRope()).train()
    batch = WithMRope().collate([sample for index in range(2) for sample in data[index]])
    with pytest.raises(ConfigError, match=message):
        check_isolation(tiny_qwen2(), batch)


def test_text_with_a_vision_folder_is_for_its_model_or_packed_as_text(tokenizer_dir: Path, tmp_path: Path) -> None:
    """The 4 rows of positions of Qwen2.5-VL: a stock Trainer of a text model fails with them, far from the cause."""
    records = tmp_path / "a.jsonl"
    records.write_text('{"text": "A red square."}\n' * 8)
    arguments = {"use_cpu": True, "report_to": [], "max_steps": 1, "save_strategy": "no", "disable_tqdm": True}

    def trainer(**settings: Any) -> tuple[Any, Any, Trainer]:
        folder = tmp_path / settings.get("vision_family", "default")
        shards = pack(records, output_dir=folder, seq_len=64, tokenizer=tokenizer_dir, workers=1, **settings).shards
        data = PackedDataset(shards, ChatEncoder.from_pretrained(tokenizer_dir, **settings))
        args = packed_training_arguments(str(tmp_path / "run"), data, **arguments)
        model = tiny_qwen2(vocab_size=len(data.encoder.tokenizer))
        return args, data, Trainer(model, args, train_dataset=data, data_collator=PaddingFreeCollator())

    args, data, stock = trainer()
    message = r"^`position_ids` must be \(1, T\) for Qwen2ForCausalLM, .* got \(4, 1, T\) from Qwen25VLVision\. Train"
    with pytest.raises(ConfigError, match=message):
        check_training_arguments(args, data, model=stock.model)
    with pytest.raises(RuntimeError):
        stock.train()
    args, data, stock = trainer(vision_family="none")
    check_training_arguments(args, data, model=stock.model)
    stock.train()
    assert stock.state.global_step == 1


def test_packed_trainer_joins_rows_without_a_collator(text_packs: list[Path], tmp_path: Path) -> None:
    data = PackedDataset(text_packs[0])
    args = packed_training_arguments(str(tmp_path), data, use_cpu=True, report_to=[], max_steps=1)
    trainer = PackedTrainer(tiny_qwen2(), args, train_dataset=data)
    row = next(iter(trainer.get_train_dataloader()))
    assert {"input_ids", "labels", "position_ids"} <= set(row)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accelerator_config": {"dispatch_batches": False}},
        {"accelerator_config": {"dispatch_batches": False}, "dataloader_num_workers": 1},
    ],
)
def test_each_refusal_of_a_stream_names_the_function_that_sets_all(
    text_packs: list[Path], tmp_path: Path, arguments: dict[str, Any]
) -> None:
    stream = TrainerStream(
        DataflowLoader(MapDistributor(PackedDataset(text_packs[0])), collator=PaddingFreeCollator())
    )
    args = made(tmp_path, max_steps=2, **arguments)
    trainer = Trainer(tiny_qwen2(), args, train_dataset=stream, data_collator=PaddingFreeCollator())
    with pytest.raises(ValueError, match="packed_training_arguments"):
        trainer.train()
    with pytest.raises(ConfigError) as caught:
        check_training_arguments(args, stream)
    assert "packed_training_arguments" in str(caught.value).splitlines()[0]
