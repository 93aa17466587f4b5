"""Which oldest allowed versions these are (`make test-lowest`): what a test expects of another release is no skip."""

from importlib.metadata import version

TRANSFORMERS = version("transformers").startswith("5.16.")
ACCELERATE = version("accelerate").startswith("1.3.")
