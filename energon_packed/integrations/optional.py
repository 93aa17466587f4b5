"""Base classes from trainers that may not be installed."""

from importlib import import_module
from typing import Any

from energon_packed.errors import ConfigError


def base_class(module: str, name: str, package: str) -> Any:
    """Return the class `name` of a module; if its package is absent, a class whose objects raise a ConfigError.

    Args:
        module: full name of the module.
        name: of the class.
        package: to install, for the error.
    """
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        reason = str(error)

    class Absent:
        def __init__(self, *args: object, **options: object) -> None:
            raise ConfigError(f"{type(self).__name__} needs {package}, got: {reason}. Run pip install '{package}'.")

    return Absent
