"""Thin adapters to training frameworks; each imports its framework when it is used.

isolation.py    check_isolation: packed samples must not influence each other
transformers/   Trainer: arguments, streams, evaluation, callbacks
accelerate.py   prepare_loader: a loader of a rank, not split again
gathered.py     GatheredLoader: one state for all ranks, for Lightning, Fabric and DeepSpeed
consumed.py     ConsumedBatches: the loader state after each used batch, for trainers that read ahead
megatron/       Megatron-LM and Megatron-Bridge
"""
