"""The version of this package, and of the on-disk format that it writes."""

__version__ = "0.1.0"

FORMAT_VERSION = 4
"""Newest version of the members of a pack and of `packing.json`, of datasets with videos, or with timestamps of
frames in their lengths; a reader refuses a newer version."""

REFERENCE_FORMAT_VERSION = 3
"""Version of datasets with referenced media, and without videos."""

WEIGHTED_FORMAT_VERSION = 2
"""Version of datasets with loss weights, and without references and videos."""

UNWEIGHTED_FORMAT_VERSION = 1
"""Version of datasets without loss weights other than 0 and 1, which releases without loss weights can read."""


def oldest_version(*, videos: bool, timestamps: bool, references: bool, weights: bool) -> int:
    """Return the oldest version of the format that has everything in a dataset.

    Earlier releases would load samples with timestamps of frames without them, in another length.
    """
    if videos or timestamps:
        return FORMAT_VERSION
    if references:
        return REFERENCE_FORMAT_VERSION
    return WEIGHTED_FORMAT_VERSION if weights else UNWEIGHTED_FORMAT_VERSION
