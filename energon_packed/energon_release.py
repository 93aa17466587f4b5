"""Check of the installed release of Energon. Input: package metadata. Output: nothing, or an error of one line."""

from importlib.metadata import version

from energon_packed.errors import ConfigError

_FIRST_UNKNOWN = 8  # renames Metadataset to Recipe, and `subflavors` to `tags`


def check_energon() -> None:
    """Refuse a release of Energon that this package was never run with.

    Raises:
        ConfigError: the installed release is 8 or later.
    """
    installed = version("megatron-energon")
    if int(installed.split(".")[0]) >= _FIRST_UNKNOWN:
        raise ConfigError(
            f"`megatron-energon` must be a version before {_FIRST_UNKNOWN}, got {installed}. Run pip install "
            f"'megatron-energon<{_FIRST_UNKNOWN}'."
        )
