"""Reports about a training run: which samples each step used, and throughput.

| module | content |
|---|---|
| counts.py | count_batch: counts of a batch of any type |
| metrics.py | ThroughputMetrics: throughput, padding, imbalance and sources of the batches of all ranks |
| order_log.py | the order log: samples of each step and rank, written, read and checked |
| replay.py | samples of a step on every rank, computed from the data |
"""
