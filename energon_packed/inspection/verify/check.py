"""Check: the result of verifying one condition of a dataset, as `verify` yields it. FailedChecks: of a tar."""

from dataclasses import dataclass, field

MAX_LISTED = 5  # problems listed per check; the others are counted


@dataclass(slots=True)
class Check:
    """Result of verifying a condition.

    Attributes:
        name: the condition, as a statement.
        problems: first five violations, with the file name.
        summary: amount that was checked, such as "12 packs".
        count: total number of violations.
        not_checked: why the condition was not checked, or only for a part of the dataset; "" if it was checked.
        remedy: command that repairs it: `pack`, `nv-meta`, or `check-media` for `pack --check-media full`.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    summary: str = ""
    count: int = 0
    not_checked: str = ""
    remedy: str = "pack"

    def fail(self, problem: str) -> None:
        """Record a problem."""
        self.count += 1
        if self.count <= MAX_LISTED:
            self.problems.append(problem)

    def add(self, other: "Check | None") -> None:
        """Add the problems of the same check of a file; None if it passed."""
        if other is None:
            return
        self.count += other.count
        self.problems = (self.problems + other.problems)[:MAX_LISTED]

    @property
    def passed(self) -> bool | None:
        """False with violations; None without violations if the condition was not checked; else True."""
        return False if self.count else None if self.not_checked else True


class FailedChecks(dict[str, Check]):
    """Checks of a tar that failed, by their names: there may be thousands of tars, and most pass all checks."""

    def fail(self, name: str, problem: str) -> None:
        """Record a problem of a check."""
        self.setdefault(name, Check(name)).fail(problem)
