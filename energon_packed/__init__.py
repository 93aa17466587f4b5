"""Pack conversations with images into rows, store them as Megatron-Energon datasets, feed padding-free
batches to Megatron and Hugging Face training.

The public names are listed in `__init__.pyi`; each is loaded when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
