"""Images: token counts, pixels and positions for each model family.

families.py: VisionFamily and the built-in families; processors.py: families served by a Transformers processor;
settings.py: the family that a folder and explicit settings describe. images.py: headers and decoding. media.py: the
images of one conversation. positions.py: image tokens and pixels of a sample, M-RoPE positions.
"""
