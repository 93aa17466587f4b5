"""TrainingArguments for packed data: what a stock Trainer must be told, and a check that names all that is wrong."""

from math import ceil
from typing import Any

from transformers import TrainingArguments

from energon_packed.errors import ConfigError
from energon_packed.integrations.transformers.stream import TrainerStream
from energon_packed.loading import PackedDataset
from energon_packed.loading.ranks import all_gather_object

_BY_LENGTH = ("group_by_length", "batch_rebalance")


def packed_training_arguments(output_dir: str, data: Any, **arguments: Any) -> TrainingArguments:
    """TrainingArguments that are right for `data`.

        args = packed_training_arguments("run", dataset, num_train_epochs=2, per_device_train_batch_size=2)

    Whatever `arguments` does not say gets a value that fits: no dispatching and no splitting of batches, all columns,
    losses per token over all devices, and for images `ddp_find_unused_parameters`. For a TrainerStream also
    `ignore_data_skip`, no loader workers of the Trainer, a batch size of 1, and `max_steps`, from the exact number of
    batches in `num_train_epochs` epochs.

    Args:
        output_dir: as TrainingArguments.
        data: PackedDataset, PlannedDataset, their `to_hf()`, or TrainerStream.
        arguments: of TrainingArguments.

    Raises:
        ConfigError: arguments that contradict the data; one line for each.
    """
    streams = isinstance(data, TrainerStream)
    defaults: dict[str, Any] = {
        "remove_unused_columns": False,
        "average_tokens_across_devices": True,
        "accelerator_config": {"dispatch_batches": False, "split_batches": False},
    }
    if _has_images(data):
        defaults["ddp_find_unused_parameters"] = True
        for name in ("activation_checkpointing", "gradient_checkpointing"):  # its name, new and old
            if arguments.get(name):
                defaults[f"{name}_kwargs"] = {"use_reentrant": False}
    if streams:
        defaults |= {"ignore_data_skip": True, "dataloader_num_workers": 0, "per_device_train_batch_size": 1}
    args = TrainingArguments(output_dir, **(defaults | arguments))  # begins the process group, which loaders need
    if streams and args.max_steps <= 0:
        steps = all_gather_object(data.steps)  # a rank that trains longer than another waits for it indefinitely
        if None not in steps:
            args.max_steps = ceil(args.num_train_epochs * min(steps) / args.gradient_accumulation_steps)
    check_training_arguments(args, data)
    return args


def check_training_arguments(args: TrainingArguments, data: Any, *, lengths_known: bool = False) -> None:
    """Refuse arguments with which a Trainer would lose, repeat, cut or misweight packed data.

    Args:
        args: of the Trainer.
        data: its `train_dataset`: PackedDataset, PlannedDataset, their `to_hf()`, or TrainerStream.
        lengths_known: the Trainer takes `data.lengths` for `group_by_length`, as PackedTrainer does.

    Raises:
        ConfigError: one line for each thing that is wrong, with what to write.
    """
    strategy = args.train_sampling_strategy
    wrong = _of_any_data(args, data)
    if strategy in _BY_LENGTH and not (lengths_known and strategy == "group_by_length"):
        wrong.append(
            f"`train_sampling_strategy` is {strategy!r}, for which the Trainer reads every sample to know its length: "
            "set it to 'random', as packs are of nearly one length, or use PackedTrainer with 'group_by_length', "
            "set on finished arguments"
        )
    if isinstance(data, TrainerStream):
        wrong += _of_streams(args, data)
    if wrong:
        lines = "".join(f"\n- {one}" for one in wrong)
        raise ConfigError(f"these training arguments do not fit packed data:{lines}" if len(wrong) > 1 else wrong[0])


def _of_any_data(args: Any, data: Any) -> list[str]:
    wrong = []
    config = args.accelerator_config
    if config.dispatch_batches:
        wrong.append(
            "`dispatch_batches` is True, which cuts a packed row in equal parts: set "
            "accelerator_config={'dispatch_batches': False}"
        )
    if config.split_batches and args.world_size > 1 and args.per_device_train_batch_size % args.world_size:
        wrong.append(
            f"`split_batches` is True, which deals the {args.per_device_train_batch_size} packs of a batch to "
            f"{args.world_size} processes: set accelerator_config={{'split_batches': False}}"
        )
    if args.n_gpu > 1:
        wrong.append(
            f"one process has {args.n_gpu} devices, and DataParallel cuts a packed row in equal parts: launch with "
            "torchrun --nproc-per-node, or set CUDA_VISIBLE_DEVICES to one device"
        )
    if not args.average_tokens_across_devices and args.world_size > 1:
        wrong.append(
            "`average_tokens_across_devices` is False, so a token of a process with fewer targets counts more: set it "
            "to True"
        )
    if getattr(args, "use_cache", False):
        wrong.append("`use_cache` is True, and with a cache models ignore the boundaries of samples: set it to False")
    return wrong + _of_images(args, data) + _of_blends(args, data)


def _of_images(args: Any, data: Any) -> list[str]:
    if args.world_size == 1 or not _has_images(data):
        return []
    wrong = []
    if args.ddp_find_unused_parameters is False or (
        args.ddp_find_unused_parameters is None and args.gradient_checkpointing
    ):
        wrong.append(
            "`ddp_find_unused_parameters` is off, and a row without images leaves the vision encoder without "
            "gradients on one process, which hangs the others: set ddp_find_unused_parameters=True"
        )
    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False)
    if args.gradient_checkpointing and reentrant:
        wrong.append(
            "reentrant activation checkpointing cannot find unused parameters, and rows without images have some: set "
            "activation_checkpointing_kwargs={'use_reentrant': False}"
        )
    return wrong


def _of_blends(args: Any, data: Any) -> list[str]:
    if args.dataloader_persistent_workers and len(getattr(data, "blend", ())) > 1:
        return [
            "`dataloader_persistent_workers` is True, and persistent workers keep the packs that a blend drew for the "
            "first epoch: set it to False"
        ]
    return []


def _of_streams(args: Any, data: TrainerStream) -> list[str]:
    wrong = []
    if args.accelerator_config.dispatch_batches is None:
        wrong.append(
            "`dispatch_batches` is not set, and for streaming data accelerate then reads on process 0 only: set "
            "accelerator_config={'dispatch_batches': False}"
        )
    if args.accelerator_config.split_batches:
        wrong.append(
            "`split_batches` is True, and each process streams its own batches: set "
            "accelerator_config={'split_batches': False}"
        )
    if args.max_steps <= 0:
        steps = data.steps
        say = (
            f"an epoch has {steps} batches, so set max_steps={ceil(steps / args.gradient_accumulation_steps)} for each"
            if steps
            else "this loader's epoch has no length that is known in advance, so set the number of steps to train for"
        )
        wrong.append(f"`max_steps` is {args.max_steps}, and a stream does not end: {say}")
    if not args.ignore_data_skip:
        wrong.append(
            "`ignore_data_skip` is False, so on resuming the Trainer skips batches that the restored stream does not "
            "give again: set it to True, with callbacks=[TrainerStreamCallback(stream)]"
        )
    if args.per_device_train_batch_size != 1:
        wrong.append(
            f"`per_device_train_batch_size` is {args.per_device_train_batch_size}, and each batch of a stream is a "
            "finished row: set it to 1, and `micro_batch_size` of the loader"
        )
    if args.dataloader_num_workers:
        wrong.append(
            f"`dataloader_num_workers` is {args.dataloader_num_workers}, and each would stream everything: set it to "
            "0, and `num_workers` of the loader"
        )
    if args.auto_find_batch_size:
        wrong.append("`auto_find_batch_size` trains again after batches were read, which skips them: set it to False")
    return wrong


def _has_images(data: Any) -> bool:
    """Whether some packs have images, as far as the manifests of a PackedDataset tell."""
    if not isinstance(data, PackedDataset):
        return False
    return any(one.manifest is not None and one.manifest.images for one in data.blend)
