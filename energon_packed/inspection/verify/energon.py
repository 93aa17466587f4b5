"""Whether Energon itself loads the data set."""

import warnings
from typing import Any

from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.verify.check import Check


def energon_loads(folder: PackedFolder) -> Check:
    """The first sample of every split, through Energon itself."""
    from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset

    check = Check("Energon loads it")

    class Nothing(DefaultTaskEncoder):  # type: ignore[misc]
        decoder = None

    def refuse(error: Exception, *rest: Any) -> None:
        raise error

    splits = sorted({shard.split for shard in folder.manifest.shards})
    check.found = ", ".join(splits)
    for split in splits:
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=refuse)
        try:
            dataset = get_val_dataset(
                folder.path, split_part=split, worker_config=config, batch_size=None, task_encoder=Nothing()
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on pinned memory, where there is no GPU
                next(iter(get_loader(dataset)))
        except (Exception, StopIteration) as error:  # Energon raises what its parts raise
            check.fail(f"split {split}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return check
