"""A packed dataset or a loader to the input of transformers.Trainer.

| module | content |
|---|---|
| arguments.py | packed_training_arguments, check_training_arguments: arguments that fit packed data |
| stream.py | TrainerStream, TrainerStreamCallback: a loader as streaming data, resumed exactly |
| trainer.py | PackedTrainer, IsolationCheckCallback, SetEpochCallback |
"""
