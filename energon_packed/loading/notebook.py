"""Encoded samples and batches as a notebook shows them: samples of a row in, HTML out."""

from collections.abc import Sequence
from importlib import import_module

from energon_packed.encoding import EncodedSample


class ShownSamples(list[EncodedSample]):
    """Samples of a pack, with a view for notebooks."""

    def _repr_html_(self) -> str:
        return shown_row("pack", self, sum(map(len, self)))


def shown_row(name: str, samples: Sequence[EncodedSample], width: int) -> str:
    """Render a row for a notebook; arguments as for `inspection.row.row_html`."""
    # By name: only a notebook needs the templates, and this folder is below `inspection`.
    return str(import_module("energon_packed.inspection.row").row_html(name, samples, width))
