"""Packed data to TrainingArguments that fit it, and a check that names every argument that does not fit."""

from math import ceil
from typing import Any

from transformers import TrainingArguments
from transformers.core_model_loading import revert_weight_conversion

from energon_packed.encoding import ChatEncoder
from energon_packed.errors import ConfigError
from energon_packed.integrations.isolation import MROPE_REMEDY, has_mrope, not_mrope
from energon_packed.integrations.transformers.patches import saves_own_names
from energon_packed.integrations.transformers.stream import TrainerStream
from energon_packed.loading.datasets.dataset import PackedDataset
from energon_packed.loading.loaders import Loader
from energon_packed.loading.ranks import all_gather_object
from energon_packed.loading.state import refuse_as_dataset

STREAM_ARGUMENTS: dict[str, Any] = {
    "ignore_data_skip": True,
    "dataloader_num_workers": 0,
    "per_device_train_batch_size": 1,
}
"""Arguments of a Trainer that a TrainerStream needs, beside those of all packed data and `max_steps`."""
_WRONG = "these training arguments do not fit packed data; packed_training_arguments(output_dir, data) makes others:"
_BY_LENGTH = ("group_by_length", "batch_rebalance")


def packed_training_arguments(output_dir: str, data: Any, **arguments: object) -> TrainingArguments:
    """Return TrainingArguments that fit `data`.

        args = packed_training_arguments("run", dataset, num_train_epochs=2, per_device_train_batch_size=2)

    Defaults that differ from TrainingArguments: batches are not dispatched or split, all columns are kept, losses are
    averaged per token over all devices, and `ddp_find_unused_parameters` is set for images. For a TrainerStream also
    `ignore_data_skip`, no loader workers, a batch size of 1, and `max_steps` from the exact number of batches in
    `num_train_epochs` epochs.

    Args:
        output_dir: folder of checkpoints, as in TrainingArguments.
        data: PackedDataset, PlannedDataset, their `to_hf()`, or TrainerStream.
        arguments: any arguments of TrainingArguments; they override the defaults.

    Raises:
        ConfigError: arguments contradict the data; one line for each.
    """
    streams = isinstance(data, TrainerStream)
    defaults: dict[str, Any] = {
        "remove_unused_columns": False,
        "average_tokens_across_devices": True,
        "accelerator_config": {"dispatch_batches": False, "split_batches": False},
    }
    if _has_images(data):
        defaults["ddp_find_unused_parameters"] = True
        for name in ("activation_checkpointing", "gradient_checkpointing"):  # the current and the old name
            if arguments.get(name):
                defaults[f"{name}_kwargs"] = {"use_reentrant": False}
    if streams:
        defaults |= STREAM_ARGUMENTS
    args = TrainingArguments(output_dir, **(defaults | arguments))  # initializes the process group for the loader
    set_steps(args, data)
    check_training_arguments(args, data)
    return args


def set_steps(args: Any, data: Any) -> None:
    """Set `max_steps` of arguments that have none from the batches of a TrainerStream; every rank must call it."""
    if isinstance(data, TrainerStream) and args.max_steps <= 0:
        steps = all_gather_object(data.steps)
        if None not in steps:  # a rank with fewer steps continues with its next epoch, so that no batch is left out
            args.max_steps = ceil(args.num_train_epochs * max(steps) / args.gradient_accumulation_steps)


def check_training_arguments(
    args: TrainingArguments, data: Any, *, lengths_known: bool = False, model: Any = None
) -> None:
    """Refuse arguments with which a Trainer would lose, repeat, split or misweight packed data.

    Args:
        args: arguments of the Trainer.
        data: its `train_dataset`: PackedDataset, PlannedDataset, their `to_hf()`, or TrainerStream.
        lengths_known: the Trainer uses `data.lengths` for `group_by_length`, as PackedTrainer does.
        model: the model of a stock Trainer, which must accept the positions, and whose checkpoints must restore all
            weights; PackedTrainer checks both itself.

    Raises:
        ConfigError: one line for each wrong argument, with the value to set.
    """
    if isinstance(data, Loader):
        refuse_as_dataset(type(data).__name__)
    problems = _of_any_data(args, data)
    strategy = args.train_sampling_strategy
    problems[
        f"`train_sampling_strategy` must be 'random', got {strategy!r}, with which the Trainer reads every sample to "
        "compute its length. Set it to 'random', as packs have nearly equal lengths, or use PackedTrainer and set "
        "'group_by_length' on the finished arguments"
    ] = strategy in _BY_LENGTH and not (lengths_known and strategy == "group_by_length")
    if isinstance(data, TrainerStream):
        problems |= _of_streams(args, data)
    encoder = data.encoder if isinstance(data, PackedDataset) else None
    if model is not None and isinstance(encoder, ChatEncoder) and encoder.position_axes and not has_mrope(model):
        problems[f"{not_mrope(model)}, got (4, 1, T) from {type(encoder.vision).__name__}. {MROPE_REMEDY}"] = True
    if lost := _not_restored(model) if args.save_strategy != "no" else []:
        problems[
            f"checkpoints must restore all weights of {type(model).__name__}, but a Trainer saves {len(lost)} of them "
            f"with names that it does not load, such as {lost[0]}. Use PackedTrainer, or set model.save_pretrained = "
            "functools.partial(model.save_pretrained, save_original_format=False)"
        ] = True
    wrong = [problem for problem, is_there in problems.items() if is_there]
    if wrong:
        lines = "".join(f"\n- {problem}" for problem in wrong)
        raise ConfigError(f"{_WRONG}{lines}" if len(wrong) > 1 else wrong[0])


def _of_any_data(args: Any, data: Any) -> dict[str, bool]:
    """Return the problems of packed data, and whether the arguments have each."""
    config, has_several = args.accelerator_config, args.world_size > 1
    is_uneven = has_several and _has_images(data)  # some rows have no image
    finds_unused = args.ddp_find_unused_parameters
    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False)
    return {
        "`dispatch_batches` must be False, got True, which splits a packed row in equal parts. Set "
        "accelerator_config={'dispatch_batches': False}": config.dispatch_batches,
        f"`split_batches` must be False, got True, which splits the {args.per_device_train_batch_size} packs of a "
        f"batch over {args.world_size} processes. Set accelerator_config={{'split_batches': False}}": (
            config.split_batches and has_several and args.per_device_train_batch_size % args.world_size
        ),
        f"a process must have 1 device, got {args.n_gpu}: DataParallel splits a packed row in equal parts. Launch "
        "with torchrun --nproc-per-node, or set CUDA_VISIBLE_DEVICES to one device": args.n_gpu > 1,
        "`average_tokens_across_devices` must be True, got False, so that a token of a process with fewer targets "
        "has a larger weight. Set it to True": has_several and not args.average_tokens_across_devices,
        "`use_cache` must be False, got True: a cache ignores sample boundaries. Set it to False": (
            getattr(args, "use_cache", False)
        ),
        "`ddp_find_unused_parameters` must be True: a row without images leaves the vision encoder without "
        "gradients on its process, and other processes hang. Set ddp_find_unused_parameters=True": (
            is_uneven and (finds_unused is False or (finds_unused is None and args.gradient_checkpointing))
        ),
        "reentrant activation checkpointing does not support unused parameters, which rows without images have. "
        "Set activation_checkpointing_kwargs={'use_reentrant': False}": (
            is_uneven and args.gradient_checkpointing and reentrant
        ),
        "`dataloader_persistent_workers` must be False, got True: persistent workers keep the packs that a blend "
        "drew for the first epoch. Set it to False": (
            args.dataloader_persistent_workers and len(getattr(data, "blend", ())) > 1
        ),
    }


def _of_streams(args: Any, data: TrainerStream) -> dict[str, bool]:
    """Return the problems of a stream, and whether the arguments have each."""
    config, is_endless = args.accelerator_config, args.max_steps <= 0
    remedy = "The length of an epoch is not known in advance: set the number of steps to train"
    if is_endless and (steps := data.steps):
        steps_of_epoch = ceil(steps / args.gradient_accumulation_steps)
        remedy = f"An epoch has {steps} batches: set max_steps={steps_of_epoch} an epoch"
    return {
        "`dispatch_batches` must be False, got None: accelerate then reads streaming data on process 0 only. Set "
        "accelerator_config={'dispatch_batches': False}": config.dispatch_batches is None,
        "`split_batches` must be False, got True: each process streams its own batches. Set "
        "accelerator_config={'split_batches': False}": config.split_batches,
        f"`max_steps` must be above 0, got {args.max_steps}: a stream does not end. {remedy}": is_endless,
        "`ignore_data_skip` must be True, got False: a resumed Trainer would skip batches of the restored stream. "
        "Set it to True, with callbacks=[TrainerStreamCallback(stream)]": not args.ignore_data_skip,
        f"`per_device_train_batch_size` must be 1, got {args.per_device_train_batch_size}: each batch of a stream "
        "is a finished row. Set it to 1, and `micro_batch_size` of the loader": args.per_device_train_batch_size != 1,
        f"`dataloader_num_workers` must be 0, got {args.dataloader_num_workers}: each worker would stream all "
        "batches. Set it to 0, and `num_workers` of the loader": args.dataloader_num_workers,
        "`auto_find_batch_size` must be False, got True: it restarts training after batches were read, which "
        "skips them. Set it to False": args.auto_find_batch_size,
    }


def _not_restored(model: Any) -> list[str]:
    """Return the weights of a model that a checkpoint of a stock Trainer has under other names.

    `save_pretrained` writes the names of the first release of a model, which `from_pretrained` converts. A Trainer
    that resumes loads the file as it is, and only warns: it continues with new weights.
    """
    if saves_own_names(model):
        return []
    weights = {name: weight.to("meta") for name, weight in model.state_dict().items()}
    return sorted(weights.keys() - revert_weight_conversion(model, dict(weights)).keys())


def _has_images(data: Any) -> bool:
    """Return whether the manifests of a PackedDataset have images or videos."""
    if not isinstance(data, PackedDataset):
        return False
    manifests = [split.manifest for split in data.blend if split.manifest is not None]
    return any(manifest.images or manifest.videos or manifest.audios for manifest in manifests)
