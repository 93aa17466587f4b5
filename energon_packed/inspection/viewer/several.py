"""Several, a page about some datasets and the pages of each of them: a Metadataset, or two datasets, in."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from energon_packed.inspection.blend import read_blend
from energon_packed.inspection.compare import compare
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.report import quoted
from energon_packed.inspection.viewer.pages import Pages, Response, index_in
from energon_packed.metadatasets import read_metadataset

_OPEN = 4  # datasets that stay open
Opener = Callable[[Path, str], Pages]
"""Opens a path as pages with a `base`."""


class Several(Pages):
    """A page about some datasets, and their pages below `/0`, `/1`, ..., which are opened when they are requested."""

    def __init__(self, name: str, values: Mapping[str, Any], opened: Sequence[Callable[[str], Pages]], base: str = ""):
        """Describe the datasets.

        Args:
            name, base: as in `Pages`.
            values: values of the template.
            opened: opens each of the datasets with its `base`.
        """
        super().__init__(name, base)
        self._values, self._count = values, len(opened)
        self._opened = lru_cache(_OPEN)(lambda index: opened[index](f"{base}/{index}"))

    @classmethod
    def of_blend(cls, path: Path, opened: Opener, base: str = "") -> "Several":
        """Show a Metadataset: its datasets with weights and counts, as in its report. Raises as `read_metadataset`."""
        blend = read_blend(read_metadataset(path))
        entries = [(split.name, place, entry) for split in blend for place, entry in enumerate(split.entries)]
        hrefs = {f"{place}{split}": f"{base}/{index}/" for index, (split, place, _) in enumerate(entries)}
        values = {"part": "blend.html.j2", "blend": blend, "hrefs": hrefs}
        return cls(str(path), values, [partial(opened, entry.path) for *_, entry in entries], base)

    @classmethod
    def of_two(cls, first: Path, second: Path, opened: Opener) -> "Several":
        """Show the differences of two datasets, as in the report about them. Raises as `compare`."""
        folders = [PackedFolder.open(path) for path in (first, second)]
        values = {"part": "compare.html.j2", "comparison": compare(*folders), "hrefs": ("/0/", "/1/")}
        values["names"] = tuple(str(folder.path) for folder in folders)
        return cls(f"{first} and {second}", values, [partial(opened, path) for path in (first, second)])

    def page(self, parts: Sequence[str], query: Mapping[str, str]) -> Response:
        """Answer with the page about all, or with a page of one of them."""
        if parts == [""]:
            return self.render("several", {}, **self._values)
        if (index := index_in(parts[0], self._count)) is not None:
            path = "/".join(map(quoted, parts[1:]))
            return self._opened(index).respond(f"/{path}?{urlencode(query)}")
        return super().page(parts, query)
