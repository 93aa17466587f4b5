"""What is in a tar, a data set, a plan: read, checked and shown.

folder.py     a data set as its files say: manifest, shards, packs one by one
verify.py     is it whole, and what its manifest says it is
view.py       one pack as a person reads it: turns, images, tokens
lengths.py    what each seq_len would drop, waste and cost
"""
