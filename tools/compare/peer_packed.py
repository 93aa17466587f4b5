"""energon-packed: `pack`, and PackedTrainer over the packs; the variant `tokens` stores them as tokens."""

import os
import sys

from contract import Spec, run, watch_trainer


def main(spec: Spec) -> None:
    """Pack, or train on the packs."""
    packs = f"{spec.folder}/packs"
    if spec.phase == "prepare":
        options = ["-o", packs, "--seq-len", spec.seq_len, "--tokenizer", spec.model, "--workers", "2"]
        options += ["--max-reject-rate", "1", *(["--image-root", "/"] if spec.images else [])]
        options += ["--sample-class", "PackedTokensSample"] if spec.variant == "tokens" else []
        os.execv(
            sys.executable, list(map(str, [sys.executable, "-m", "energon_packed", "pack", spec.records, *options]))
        )
    from energon_packed import (
        ChatEncoder,
        PackedDataset,
        PackedTrainer,
        PaddingFreeCollator,
        packed_training_arguments,
    )

    is_stored = spec.variant == "tokens" and not spec.images  # packs with images need the encoder for the pixels
    encoder = None if is_stored else ChatEncoder.from_pretrained(spec.model)
    data = PackedDataset(packs, encoder)
    arguments = spec.arguments()
    watch_trainer(spec)
    trainer = PackedTrainer(
        spec.load_model(),
        packed_training_arguments(arguments.pop("output_dir"), data, **arguments),
        train_dataset=data,
        data_collator=PaddingFreeCollator(),
    )
    trainer.train(resume_from_checkpoint=spec.checkpoint)


if __name__ == "__main__":
    run(main, "energon-packed", "transformers")
