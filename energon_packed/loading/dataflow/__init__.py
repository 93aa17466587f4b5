"""DataflowLoader: the four roles under torch's DataLoader, with exact resume.

| module | content |
|---|---|
| loader.py | the loader and its worker processes |
| steps.py | the position in an epoch, and the steps from there: of known packs, and of streams |
| worker_stream.py | the four roles of a worker shard |
| state_files.py | loader states in files, and for another number of ranks |
| transport.py | batches from worker processes to the main process |
| config.py, raw_records.py | the loader over raw records, streamed or planned |
| workers.py | worker processes that die or do not answer |
"""
