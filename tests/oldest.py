"""True for packages that have the oldest allowed version (`make test-lowest`); tests of newer behavior are skipped."""

from importlib.metadata import version

TRANSFORMERS = version("transformers").startswith("5.16.")
ACCELERATE = version("accelerate").startswith("1.3.")
DATASETS = version("datasets").startswith("3.2.")
PYARROW = version("pyarrow").startswith("18.0.")
