"""ms-swift: a cached dataset, and `packing`."""

import json
import os
from pathlib import Path

from contract import Spec, as_options, cache_folder, run, watch_trainer, without_torchvision_operators

without_torchvision_operators()


def main(spec: Spec) -> None:
    """Export the cached dataset, or train on it."""
    cache_folder(spec)
    os.environ["MODELSCOPE_CACHE"] = str(Path(spec.folder, "cache"))
    os.environ["MAX_PIXELS"], os.environ["MIN_PIXELS"] = str(spec.max_pixels), str(spec.min_pixels)
    from swift.arguments import SftArguments
    from swift.pipelines.export.cached_dataset import ExportCachedDataset
    from swift.pipelines.train.sft import SwiftSft

    if spec.images:  # its template has the token ids of the published models
        from swift.template.templates.qwen import Qwen2VLTemplate

        Qwen2VLTemplate.image_token_id = json.loads(Path(spec.model, "config.json").read_text())["image_token_id"]
    family = ("qwen2_5_vl", "qwen2_5_vl") if spec.images else ("qwen2", "qwen2_5")
    options = {"model": spec.model, "model_type": family[0], "template": family[1], "max_length": spec.seq_len}
    options |= {"torch_dtype": "float32", "attn_impl": "sdpa"}
    cached = Path(spec.folder, "cached")
    if spec.phase == "prepare":
        options |= {"dataset": spec.records, "split_dataset_ratio": 0, "dataset_num_proc": 2}
        ExportCachedDataset(as_options(options | {"to_cached_dataset": True, "output_dir": cached})).main()
        return

    def for_cpus(arguments: SftArguments) -> None:  # ms-swift requires flash attention, which CPUs do not have
        arguments.padding_free = True

    SftArguments._check_padding_free = for_cpus
    options |= {"tuner_type": "full", "cached_dataset": cached / "train", "packing": True, "add_version": False}
    options |= {"check_model": False, "freeze_vit": False, "freeze_aligner": False}
    if spec.checkpoint:
        options["resume_from_checkpoint"] = spec.checkpoint
    watch_trainer(spec)
    SwiftSft(as_options(spec.arguments() | options)).main()


if __name__ == "__main__":
    run(main, "ms-swift", "transformers", "datasets")
