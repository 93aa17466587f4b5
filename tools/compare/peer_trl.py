"""TRL: SFTTrainer with `packing` (bfd) or `padding_free`."""

from contract import Spec, cache_folder, run, watch_trainer, without_torchvision_operators

_BATCH = 6  # conversations of a padding-free row: about as many tokens as a packed row


def main(spec: Spec) -> None:
    """Prepare and train: SFTTrainer tokenizes and packs when it is created."""
    cache_folder(spec)
    if spec.images:
        without_torchvision_operators()
    from datasets import load_dataset
    from transformers import AutoProcessor, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    data = load_dataset("json", data_files=spec.records, split="train").select_columns(["messages"])
    settings = {"dataset_num_proc": 2, "assistant_only_loss": not spec.images}
    if spec.variant == "packing":
        settings |= {"packing": True, "max_length": spec.seq_len, "packing_strategy": "bfd"}
    else:
        settings |= {"padding_free": True, "max_length": None, "per_device_train_batch_size": _BATCH}
    if spec.images:
        data = load_dataset("json", data_files=spec.records, split="train")
    processing = (AutoProcessor if spec.images else AutoTokenizer).from_pretrained(spec.model)
    watch_trainer(spec)
    arguments = SFTConfig(**spec.arguments() | settings)
    trainer = SFTTrainer(spec.load_model(), arguments, train_dataset=data, processing_class=processing)
    trainer.train(resume_from_checkpoint=spec.checkpoint)


if __name__ == "__main__":
    run(main, "trl", "transformers", "datasets")
