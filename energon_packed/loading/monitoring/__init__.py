"""Reports about a training run: which samples each step used, and throughput.

| module | content |
|---|---|
| metrics.py | ThroughputMetrics: tokens, targets and waiting time of the batches |
| order_log.py | the order log: samples of each step and rank, written, read and checked |
| replay.py | samples of a step on every rank, computed from the data |
"""
