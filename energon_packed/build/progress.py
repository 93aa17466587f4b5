"""Progress: how a build tells what it does; the command line draws it, everybody else may ignore it."""


class Progress:
    """Told of every stage. This base class says nothing; override what is wanted."""

    def start(self, stage: str, total: int, unit: str) -> None:
        """A stage begins that has `total` units of work."""

    def advance(self, units: int, records: int = 0) -> None:
        """`units` of work are done, holding `records` records."""

    def finish(self, seconds: float) -> None:
        """The stage is done."""

    def stop(self) -> None:
        """The stage failed, or has nothing to say at its end."""
