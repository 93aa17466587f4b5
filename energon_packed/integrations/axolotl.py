"""Packed data in axolotl: a plugin that its configuration names."""

from typing import Any

from axolotl.common.datasets import TrainDatasetMeta
from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from energon_packed.encoding.chat import ChatEncoder
from energon_packed.errors import ConfigError
from energon_packed.integrations.transformers.trainer import PackedTrainerMixin
from energon_packed.loading.collator import PaddingFreeCollator
from energon_packed.loading.dataset import PackedDataset


class PackedPlugin(BasePlugin):
    """Plugin of axolotl that trains on a packed dataset with a PackedTrainer.

        plugins: [energon_packed.PackedPlugin]
        packed_dataset: out                       # folder or Metadataset
        packed_eval_split: val                    # no evaluation if absent
        packed_encoder: {tokenizer: DIR}          # parameters of ChatEncoder.from_pretrained; not for PackedTokensSample

    axolotl does not tokenize, shuffle or pack this data again.

    Raises:
        ConfigError: no `packed_dataset`, or a setting of axolotl that would pack again or not train on labels.
    """

    def get_input_args(self) -> str:
        """Return the class of the settings above, which axolotl adds to its own."""
        return f"{__name__}.{PackedArguments.__name__}"

    def register(self, cfg: Any) -> None:
        """Check the settings, and set `datasets`, which axolotl requires and does not read."""
        if not cfg.get("packed_dataset"):
            raise ConfigError("`packed_dataset` must be a packed dataset, got nothing. Add it to the configuration.")
        for name in ("sample_packing", "rl", "pretraining_dataset", "reward_model", "process_reward_model"):
            if cfg.get(name):
                raise ConfigError(f"`{name}` must not be set with PackedPlugin, got {cfg[name]!r}. Remove it.")
        cfg.setdefault("datasets", [{"path": str(cfg["packed_dataset"]), "type": "packed"}])

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> TrainDatasetMeta:
        """Open the dataset. The trainer computes the number of steps."""
        encoder = ChatEncoder.from_pretrained(**cfg.packed_encoder) if cfg.packed_encoder else None
        split = cfg.packed_eval_split
        evaluated = PackedDataset(cfg.packed_dataset, encoder, split=split) if split else None
        return TrainDatasetMeta(PackedDataset(cfg.packed_dataset, encoder), evaluated)

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[Any, dict[str, Any]]:
        """Return a function that ignores the padding options of axolotl."""
        return lambda tokenizer, **options: PaddingFreeCollator(), {}

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Return arguments whose defaults in axolotl do not fit packed data; see `check_training_arguments`."""
        return {"average_tokens_across_devices": True}

    def get_trainer_cls(self, cfg: Any) -> type[Any]:
        """Return the trainer of axolotl with the order and the loss of PackedTrainer."""
        return PackedAxolotlTrainer


class PackedArguments(BaseModel):
    """Settings of PackedPlugin in the configuration of axolotl."""

    packed_dataset: str
    packed_eval_split: str | None = None
    packed_encoder: dict[str, Any] | None = None


class PackedAxolotlTrainer(PackedTrainerMixin, AxolotlTrainer):
    """Trainer of axolotl that reads packed data in its global order; see PackedTrainerMixin."""
