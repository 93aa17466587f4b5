"""True for packages that have the oldest allowed version (`make test-lowest`); tests of newer behavior are skipped."""

from importlib.metadata import version

import pytest

TRANSFORMERS = version("transformers").startswith("5.16.")
DATASETS = version("datasets").startswith("3.2.")
PYARROW = version("pyarrow").startswith("18.0.")

needs_isolated_qwen2_5_vl = pytest.mark.skipif(
    TRANSFORMERS, reason="in this release, samples of Qwen2.5-VL leak into each other; test_isolation has the refusal"
)
