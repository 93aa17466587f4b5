"""Check: the result of one verification."""

from dataclasses import dataclass, field

_MOST = 5  # maximum number of problems listed per check


@dataclass(slots=True)
class Check:
    """Result of one verification.

    Attributes:
        name: condition that must hold.
        problems: first five violations, with the file name.
        found: summary of what was checked.
        count: total number of problems.
        remedy: command that fixes it: `pack`, `nv-meta`, or `check-images` for `pack --check-images full`.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    found: str = ""
    count: int = 0
    remedy: str = "pack"

    def fail(self, problem: str) -> None:
        """Record a problem."""
        self.count += 1
        if self.count <= _MOST:
            self.problems.append(problem)

    def add(self, other: "Check") -> None:
        """Merge the problems of the same check for another file."""
        self.count += other.count
        self.problems = (self.problems + other.problems)[:_MOST]

    @property
    def holds(self) -> bool:
        """Whether no problem was found."""
        return self.count == 0
