"""A group of encoded samples in, one PackedBatch out.

| module | content |
|---|---|
| collator.py | the collator: the tensors of a row, padding-free unless requested |
| row_media.py | the media tensors of a row |
| dummy_images.py | the dummy image of a row without media |
| batch.py | PackedBatch, and the arguments of each training framework |
| cross_entropy.py | the loss of many logits, without a float32 copy of all of them |
| features.py | dicts of token ids, as Hugging Face datasets have them, to and from encoded samples |
"""
