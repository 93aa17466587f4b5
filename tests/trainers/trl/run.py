"""SFTTrainer of TRL, alone and with PackedTrainerMixin."""

import sys
from typing import Any

from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from energon_packed import PackedDataset, PackedTrainerMixin, PaddingFreeCollator
from tests.trainers.huggingface.run import arguments, latest
from tests.trainers.recorder import RecordRows, Spec


class PackedSFTTrainer(PackedTrainerMixin, SFTTrainer):  # as on docs/trainers.md
    pass


def main(spec: Spec) -> None:
    options = arguments(spec) | {"bf16": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    trainer: Any = (PackedSFTTrainer if spec.kind == "packed" else SFTTrainer)(
        spec.load_model(),
        SFTConfig(spec.checkpoints, **options),
        train_dataset=PackedDataset(spec.packs).to_hf(),
        data_collator=PaddingFreeCollator(),
        processing_class=AutoTokenizer.from_pretrained(spec.tokenizer),
    )
    recorder = RecordRows(spec, trainer)
    trainer.train(resume_from_checkpoint=spec.resume and latest(spec))
    recorder.finish(trainer.model.state_dict())


if __name__ == "__main__":
    main(Spec.read(sys.argv[1]))
