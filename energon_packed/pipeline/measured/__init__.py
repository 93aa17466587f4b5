"""Files of the measure stage: chunks.py writes a part of the input, table.py has the columns of all parts.

chunk_reader.py reads tokens, columns and frames of single records. arrow_columns.py: arrays to Arrow and back.
"""
