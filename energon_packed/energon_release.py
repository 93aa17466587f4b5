"""Check of the installed release of Energon. Input: package metadata. Output: nothing, or an error of one line."""

from importlib.metadata import PackageNotFoundError, version

from energon_packed.errors import ConfigError

NO_ENERGON = "megatron-energon and torch are not installed"
_FIRST_UNKNOWN = 8  # renames Metadataset to Recipe, and `subflavors` to `tags`


def has_energon() -> bool:
    """Return whether Energon is installed, and with it torch: the packages of the extra `train`."""
    try:
        return bool(version("megatron-energon"))
    except PackageNotFoundError:
        return False


def check_energon() -> None:
    """Refuse an environment without Energon, or with a release that this package was never run with.

    Raises:
        ConfigError: Energon is not installed, or its release is 8 or later.
    """
    if not has_energon():
        raise ConfigError(f"{NO_ENERGON}. Run pip install 'energon-packed[train]'.")
    installed = version("megatron-energon")
    if int(installed.split(".")[0]) >= _FIRST_UNKNOWN:
        raise ConfigError(
            f"`megatron-energon` must be a version before {_FIRST_UNKNOWN}, got {installed}. Run pip install "
            f"'megatron-energon<{_FIRST_UNKNOWN}'."
        )
