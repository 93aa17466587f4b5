"""The output folder: folder.py (its files and disk space), locks.py, run_state.py (fingerprints and work that exists).

shard_states.py: tars that are complete. run_status.py: progress of the run in a folder. run_reports.py reads
lengths.parquet and rejects.jsonl.
"""
