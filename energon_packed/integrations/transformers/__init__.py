"""A packed dataset or a loader to the input of transformers.Trainer.

| module | content |
|---|---|
| arguments.py | packed_training_arguments, check_training_arguments: arguments that fit packed data |
| stream.py | TrainerStream: a loader as streaming data |
| checkpoints.py | TrainerStreamCallback: the state of a TrainerStream in checkpoints, resumed exactly |
| batch_taps.py | BatchTap: values of the batches that the model has used |
| metrics.py | MetricsCallback: throughput, padding, imbalance and sources in the logs |
| order.py | OrderLogCallback: the order log of a Trainer over a PackedDataset |
| mixture.py | MixtureCallback: weights of a mixture that learn from the losses of its sources |
| model_loss.py | the loss that a model computes by itself, without a float32 copy of its logits |
| patches.py | changes of Trainer for which it has no public hook |
| trainer.py | PackedTrainer, PackedTrainerMixin, IsolationCheckCallback, SetEpochCallback |
"""

from energon_packed.integrations.transformers.arguments import check_training_arguments, packed_training_arguments
from energon_packed.integrations.transformers.checkpoints import TrainerStreamCallback
from energon_packed.integrations.transformers.metrics import MetricsCallback
from energon_packed.integrations.transformers.mixture import MixtureCallback
from energon_packed.integrations.transformers.order import OrderLogCallback
from energon_packed.integrations.transformers.stream import TrainerStream
from energon_packed.integrations.transformers.trainer import (
    IsolationCheckCallback,
    PackedTrainer,
    PackedTrainerMixin,
    SetEpochCallback,
)

__all__ = [
    "IsolationCheckCallback",
    "MetricsCallback",
    "MixtureCallback",
    "OrderLogCallback",
    "PackedTrainer",
    "PackedTrainerMixin",
    "SetEpochCallback",
    "TrainerStream",
    "TrainerStreamCallback",
    "check_training_arguments",
    "packed_training_arguments",
]
