"""Reports about a training run: which samples each step used, and throughput.

| module | content |
|---|---|
| counts.py | count_batch: counts of a batch of any type |
| metrics.py | ThroughputMetrics: throughput, padding, imbalance and sources of the batches of all ranks |
| order_log.py | OrderLog: a line for each consumed batch, in a file of the process |
| order_lines.py | the lines, and which of them a restart has replaced |
| order_check.py | check_order: samples that are lost or used twice |
| order_epoch.py | the samples and items of an epoch |
| order_missing.py | lines that are missing in the files |
| order_data.py | LoggedData: the samples of the data, with which a log is compared |
| order_lookup.py | the batches of a logged step, and the uses of a sample |
| replay.py | samples of a step on every rank, computed from the data |
"""
