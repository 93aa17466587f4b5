"""Check: one thing that should hold, and where it does not."""

from dataclasses import dataclass, field

_MOST = 5  # problems told of each check


@dataclass(slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what should hold.
        problems: where it does not, with the file; the first five.
        found: how much was looked at.
        count: number of all problems.
        remedy: what mends it: `pack` or `nv-meta`.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    found: str = ""
    count: int = 0
    remedy: str = "pack"

    def fail(self, problem: str) -> None:
        """Note a problem."""
        self.count += 1
        if self.count <= _MOST:
            self.problems.append(problem)

    def add(self, other: "Check") -> None:
        """Take in the problems of the same check of another file."""
        self.count += other.count
        self.problems = (self.problems + other.problems)[:_MOST]

    @property
    def holds(self) -> bool:
        """No problem was found."""
        return self.count == 0
