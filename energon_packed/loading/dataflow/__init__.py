"""DataflowLoader: the four roles under torch's DataLoader, with exact resume.

loader.py: the loader and its worker processes. steps.py: the steps of known packs, position (epoch, step), and of
streams, one position for each worker shard. worker_stream.py: the four roles of one worker shard. transport.py:
how batches travel from worker processes.
"""
