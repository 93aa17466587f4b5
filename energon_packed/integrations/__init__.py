"""Loaders and batches to the input of training frameworks; each module imports its framework on first use.

| module | content |
|---|---|
| isolation.py | check_isolation: samples of a packed row must not influence each other |
| consumed.py | Consumed: a loader as the inputs of a trainer, with a state of all ranks after the last used batch |
| random_state.py | SeparateRandomStates: a reader draws no random numbers from the states of the training |
| accelerate.py | prepare_loader: a loader of this rank for accelerate, without sharding it again |
| axolotl.py | PackedPlugin: a plugin for the configuration of axolotl |
| ms_swift.py | PackedSft: `swift sft` on packed data |
| optional.py | base classes of trainers that may not be installed |
| nemo_automodel.py | AutomodelStream: a dataset for recipes of NeMo Automodel |
| torchtitan.py | PackedDataLoader: packs for torchtitan's Trainer |
| transformers/ | Trainer: arguments, streams, evaluation, callbacks |
| megatron/ | Megatron-LM and Megatron-Bridge |
"""

from energon_packed.libraries import check_energon

check_energon()  # before modules of this folder import torch
