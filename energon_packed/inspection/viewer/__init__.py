"""Pages of `energon-packed view`: the path and the query of a URL in, a Response out.

server.py   requests of a browser on this machine -> Pages
pages.py    Pages, the base class of the pages of a dataset or an input, and their media
packs.py    PackedFolder -> pages of packs, samples, tokens, records of the run and rejected records
records.py  input of `pack` -> pages of its records before packing
several.py  Metadataset, or two datasets -> a page about them, and the pages of each; paths -> Pages

Templates are in inspection/templates, which `report` uses too.
"""
