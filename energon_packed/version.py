"""The version of this package, and of the on-disk format that it writes."""

__version__ = "0.1.0"

FORMAT_VERSION = 3
"""Newest version of the members of a pack and of `packing.json`, of datasets with referenced media; a reader refuses a
newer version."""

WEIGHTED_FORMAT_VERSION = 2
"""Version of datasets with loss weights, and without references."""

UNWEIGHTED_FORMAT_VERSION = 1
"""Version of datasets without loss weights other than 0 and 1, which releases without loss weights can read."""
