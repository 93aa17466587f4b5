"""Read-only views of tars, datasets, plans and Metadatasets, for `inspect`, `lengths`, `verify`, `report` and `view`.

folder.py       path -> PackedFolder: tars, manifest, packs by key, encoder of packing.json
view.py         raw parts of a pack -> PackView: turns and images; or the members as files
search.py       id, or file and line, or tests of rows -> a FoundRecord for each sample of the records
supervision.py  conversation and its encoder -> a flag per turn, whether it has a target
tokens.py       raw parts and an encoder -> a TokenRow for each token; kinds of tokens
lengths.py      sample lengths -> drop rate, utilization and attention span of each candidate seq_len
blend.py        Metadataset -> BlendSplit: counts, shares of draws and epochs of each dataset
compare.py      two PackedFolders -> Comparison: differences of counts, rejects and settings
report_data.py  PackedFolder -> ReportData; report.py: ReportData -> HTML page (templates/)
row.py          samples of a row -> HTML for a notebook
viewer/         URL -> page of `view` (templates/), requests of a browser on this machine -> pages
verify/         PackedFolder -> one Check for each condition
"""
