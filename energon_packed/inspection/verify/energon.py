"""Whether Energon itself loads the dataset."""

import warnings
from typing import Any

from energon_packed.dataflow.trust import check_trusted
from energon_packed.errors import EnergonPackedError, FormatError
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.verify.check import Check
from energon_packed.metadatasets import NV_META, read_split
from energon_packed.shards.nv_meta import CRUDE, loader_files


def energon_loads(folder: PackedFolder) -> Check:
    """The first sample of every split, through Energon, which runs `sample_loader.py`: only one that we wrote.

    A dataset whose dataset.yaml names the class of another package is loaded by its crude.yaml.
    """
    from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset

    from energon_packed.dataflow.energon.cookers import cook_pack

    check = Check("sample_loader.py is unmodified, and Energon loads the dataset", remedy="nv-meta")
    module = folder.manifest.dataset_module if folder.manifest else None
    for name, content in loader_files(folder.codec, module).items():
        file = folder.path / NV_META / name
        if not file.is_file():
            check.fail(f"{name} is missing; run energon-packed nv-meta")
        elif file.read_bytes() != content:
            check.fail(f"{name} is not what energon-packed writes, so it was not executed; review it, or run nv-meta")
    try:
        check_trusted(folder.path, dataset_config=CRUDE if module is not None else None)
    except EnergonPackedError as error:
        check.fail(str(error))
    if not check.holds:
        return check

    class Nothing(DefaultTaskEncoder):  # type: ignore[misc]
        decoder = None
        cookers = (Cooker(cook_pack),)  # for crude.yaml

    def refuse(error: Exception, *rest: Any) -> None:
        raise error

    try:
        splits = sorted(set(folder.shards.values()))
        read_split(folder.path)
    except FormatError as error:
        check.fail(str(error))
        return check
    check.found = ", ".join(splits) if module is None else f"{', '.join(splits)}, by crude.yaml, without {module}"
    for split in splits:
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=refuse)
        try:
            dataset = get_val_dataset(
                folder.path,
                split_part=split,
                worker_config=config,
                batch_size=None,
                task_encoder=Nothing(),
                dataset_config=None if module is None else CRUDE,
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on pinned memory, where there is no GPU
                next(iter(get_loader(dataset, watchdog_timeout_seconds=None)))  # its thread never ends
        except (Exception, StopIteration) as error:  # Energon raises what its parts raise
            check.fail(f"split {split}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return check
