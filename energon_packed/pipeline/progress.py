"""Progress: reports of a running pipeline; the command line draws them."""


class Progress:
    """Notified of every stage. The base class does nothing; override what you need."""

    def start(self, stage: str, total: int, unit: str) -> None:
        """A stage begins that has `total` units of work."""

    def advance(self, units: int, records: int = 0) -> None:
        """`units` of work are done, holding `records` records."""

    def finish(self, seconds: float) -> None:
        """The stage is done."""

    def stop(self) -> None:
        """The stage failed, or ends without a summary."""
