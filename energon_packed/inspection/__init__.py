"""What is in a tar, a dataset, a plan: read, checked and shown.

lengths.py    what each seq_len would drop, waste and cost
view.py       one pack as a person reads it: turns, images
tokens.py     one pack token by token, as the loader gives it
blend.py      what a Metadataset blends
folder.py     tars with their manifest, packs by key, and the encoder they were packed with
kinds.py      which tokens of a pack are image, supervised and other
report_data.py, facts.py, charts.py, report.py, templates/   one page about it all
verify/       is it whole, and what its manifest says it is
"""
