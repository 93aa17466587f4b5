"""Audio of a model family: audio files and a processor folder -> token counts and features.

audio_file.py   audio file -> number of samples (from header and packets), or samples at a rate
families.py     AudioFamily: a Transformers processor -> tokens of a number of samples, features of samples
settings.py     processor folder and settings -> AudioFamily
media.py        audio files of a conversation -> clips and tokens, or features
"""
