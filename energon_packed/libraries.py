"""Checks of installed packages: one line, with name and version, for a release that this package does not know.

| name | check |
|---|---|
| check_energon, has_energon | the release of Energon |
| private | a name that a package does not promise to keep exists |
| calls | a TypeError or AttributeError of a call is a change of the package, not a fault of the data |
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from energon_packed.errors import ConfigError, EnergonPackedError

ENERGON = "megatron-energon"
MULTI_STORAGE = "multi-storage-client"
NO_ENERGON = "megatron-energon and torch are not installed"
_FIRST_UNKNOWN = 8  # renames Metadataset to Recipe, and `subflavors` to `tags`


def has_energon() -> bool:
    """Return whether Energon is installed, and with it torch: the packages of the extra `train`."""
    return installed(ENERGON) is not None


def check_energon() -> None:
    """Refuse an environment without Energon, or with a release that this package was never run with.

    Raises:
        ConfigError: Energon is not installed, or its release is 8 or later.
    """
    release = installed(ENERGON)
    if release is None:
        raise ConfigError(f"{NO_ENERGON}. Run pip install 'energon-packed[train]'.")
    if int(release.split(".")[0]) >= _FIRST_UNKNOWN:
        raise ConfigError(
            f"`megatron-energon` must be a version before {_FIRST_UNKNOWN}, got {release}. Run pip install "
            f"'megatron-energon<{_FIRST_UNKNOWN}'."
        )


def changed(package: str, found: str) -> ConfigError:
    """Return the error for a release that differs from the tested releases.

    Args:
        package: name for pip.
        found: the difference, after "got VERSION, ".
    """
    floor = re.compile(rf"{re.escape(package)}[<,\d.]*>=([\d.]+)")
    oldest = next((match[1] for requirement in _requirements() if (match := floor.match(requirement))), None)
    # The minimum version is tested, and its bug fixes are not expected to change names.
    tested = f"Run pip install '{package}=={oldest}.*'" if oldest else f"Install an earlier version of {package}"
    return ConfigError(
        f"`{package}` must be a version that energon-packed knows, got {installed(package) or 'an unknown version'}, "
        f"{found}. {tested}, or install a newer energon-packed."
    )


def private(owner: Any, name: str, package: str) -> Any:
    """Return the attribute `name` of an object, class or module of a package that may remove it in any release.

    Raises:
        ConfigError: it has no such attribute.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = owner if isinstance(owner, type) else type(owner)
        where = getattr(owner, "__name__", kind.__name__)
        raise changed(package, f"in which {where} has no `{name}`") from None


@contextmanager
def calls(package: str, *, is_parser: bool = False) -> Iterator[None]:
    """Context manager around calls of a package: an unknown argument or a missing name stops the run.

    Args:
        package: name for pip.
        is_parser: the package reads data with Python code, in which damaged data may raise these errors too. They
            pass unchanged; only errors of the call itself are converted.

    Raises:
        ConfigError: the block raised TypeError or AttributeError.
    """
    try:
        yield
    except EnergonPackedError:
        raise
    except (TypeError, AttributeError) as error:
        if is_parser and not _is_raised_here(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise changed(package, f"which raises {type(error).__name__}: {reason}") from error


def _is_raised_here(error: BaseException) -> bool:
    """Whether a line of this package raised an error, as for an unknown argument, and not the code that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith(__name__.partition(".")[0])


def installed(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _requirements() -> list[str]:
    try:
        return requires("energon-packed") or []
    except PackageNotFoundError:  # used from its source folder
        return []
