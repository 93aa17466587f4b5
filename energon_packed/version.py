"""The version of this package, and of the on-disk format."""

__version__ = "0.1.0"

FORMAT_VERSION = 1
"""Version of the members of a pack and of `packing.json`; a reader refuses any other version."""
