"""Packed data in axolotl: a plugin that its configuration names."""

from typing import Any

from energon_packed.encoding.chat import ChatEncoder
from energon_packed.errors import ConfigError
from energon_packed.integrations.optional import base_class
from energon_packed.integrations.transformers.trainer import PackedTrainerMixin
from energon_packed.loading.collation.collator import PaddingFreeCollator
from energon_packed.loading.datasets.dataset import PackedDataset

_PACKAGE = "axolotl>=0.19"
_BasePlugin: Any = base_class("axolotl.integrations.base", "BasePlugin", _PACKAGE)
_BaseModel: Any = base_class("pydantic", "BaseModel", _PACKAGE)
_AxolotlTrainer: Any = base_class("axolotl.core.trainers", "AxolotlTrainer", _PACKAGE)


class PackedPlugin(_BasePlugin):
    """Plugin of axolotl: trains on a packed dataset with a PackedTrainer; set it in the configuration.

        plugins: [energon_packed.PackedPlugin]
        packed_dataset: out                  # folder or Metadataset
        packed_eval_split: val               # optional: also evaluate on this split
        packed_encoder: {tokenizer: DIR}     # parameters of ChatEncoder.from_pretrained; not for PackedTokensSample

    axolotl does not tokenize, shuffle or pack the data again.

    Raises:
        ConfigError: axolotl is not installed, `packed_dataset` is absent, or a setting does not fit packed data.
    """

    def get_input_args(self) -> str:
        """Return the name of the class of these settings, which axolotl adds to its own."""
        return f"{__name__}.{PackedArguments.__name__}"

    def register(self, cfg: Any) -> None:
        """Check the settings, and set `datasets`, which axolotl requires and the plugin replaces."""
        if not cfg.get("packed_dataset"):
            raise ConfigError("`packed_dataset` must be a packed dataset, got none. Add it to the configuration.")
        for name in ("sample_packing", "rl", "reward_model", "process_reward_model", "pretraining_dataset"):
            if cfg.get(name):
                raise ConfigError(f"`{name}` must not be set with PackedPlugin, got {cfg[name]!r}. Remove it.")
        if (size := cfg.get("context_parallel_size") or 1) != 1:
            raise ConfigError(
                f"`context_parallel_size` must be 1 with PackedPlugin, got {size}: no test shows that axolotl keeps "
                "the samples of a split row apart. Remove it."
            )
        if not cfg.get("datasets"):
            cfg["datasets"] = [{"path": str(cfg["packed_dataset"]), "type": "packed"}]

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> Any:
        """Open the dataset. The trainer computes the number of steps."""
        from axolotl.common.datasets import TrainDatasetMeta

        encoder = ChatEncoder.from_pretrained(**cfg.packed_encoder) if cfg.packed_encoder else None
        split = cfg.packed_eval_split
        evaluated = PackedDataset(cfg.packed_dataset, encoder, split=split) if split else None
        return TrainDatasetMeta(PackedDataset(cfg.packed_dataset, encoder), evaluated)

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[Any, dict[str, Any]]:
        """Return a collator that ignores the padding options of axolotl."""
        return lambda tokenizer, **options: PaddingFreeCollator(), {}

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Return arguments that packed data needs and axolotl does not set; see `check_training_arguments`."""
        return {"average_tokens_across_devices": True}

    def get_trainer_cls(self, cfg: Any) -> type[Any]:
        """Return the trainer of axolotl with the order and the loss of PackedTrainer."""
        return PackedAxolotlTrainer


class PackedArguments(_BaseModel):
    """Settings of PackedPlugin."""

    packed_dataset: str
    packed_eval_split: str | None = None
    packed_encoder: dict[str, Any] | None = None


class PackedAxolotlTrainer(PackedTrainerMixin, _AxolotlTrainer):
    """Trainer of axolotl that reads packed data in its global order; see PackedTrainerMixin."""
