"""transformers.Trainer on packed data.

arguments.py    packed_training_arguments, check_training_arguments: arguments that fit packed data
stream.py       TrainerStream and StreamState: a loader as streaming data, resumed exactly
trainer.py      PackedTrainer: the global order of the data, evaluation loss as the mean over tokens
callbacks.py    IsolationCheck, BlendEpochs
"""

from energon_packed.integrations.transformers.arguments import check_training_arguments, packed_training_arguments
from energon_packed.integrations.transformers.stream import StreamState, TrainerStream
from energon_packed.integrations.transformers.trainer import BlendEpochs, IsolationCheck, PackedTrainer

__all__ = [
    "BlendEpochs",
    "IsolationCheck",
    "PackedTrainer",
    "StreamState",
    "TrainerStream",
    "check_training_arguments",
    "packed_training_arguments",
]
