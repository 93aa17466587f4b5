"""InputState: size and time of the input files, to notice that one changes while it is packed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from energon_packed.errors import SourceError
from energon_packed.sources import Source

_Stat = tuple[int, int]


@dataclass(frozen=True, slots=True)
class InputState:
    """Of all input files, and of the copies that are read in place of some.

    Attributes:
        files: bytes and time of the last change (ns) by path.
    """

    files: dict[Path, _Stat]

    @classmethod
    def of(cls, sources: Sequence[Source]) -> "InputState":
        """The state at this moment.

        Raises:
            OSError: a file cannot be found.
        """
        return cls({path: _stat(path) for source in sources for path in (source.path, source.data)})

    def check(self, remedy: str) -> None:
        """Refuse a file that has changed since: what was measured is not what is read now.

        Args:
            remedy: how to go on.

        Raises:
            SourceError: it names the file and both sizes.
        """
        for path, (size, changed) in self.files.items():
            try:
                found = _stat(path)
            except OSError as error:
                raise SourceError(f"{path} is gone while it is packed: {error.strerror}; {remedy}") from error
            if found != (size, changed):
                what = f"from {size} to {found[0]} bytes" if found[0] != size else f"its {size} bytes are others"
                raise SourceError(f"{path} changed while it was packed ({what}); let its writer finish, and {remedy}")


def _stat(path: Path) -> _Stat:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
