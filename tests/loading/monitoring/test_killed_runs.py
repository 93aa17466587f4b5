"""Runs that SIGKILL ends four times and that change their ranks three times: nothing lost, nothing twice."""

from pathlib import Path

import pytest

from tests.internals import LoggedData, check_order
from tests.loading.flows import energon_folder
from tests.processes import run_ranks

SCRIPT = "from tests.loading.monitoring.killed_runs import main; main()"
PACKS = 41


@pytest.mark.timeout(300)
def test_four_kills_and_three_changes_of_ranks(tmp_path: Path) -> None:
    packs = energon_folder(tmp_path, PACKS)
    kinds = ["planned", "pooled", "accelerated", "consumed", "joint", "megatron", "trainer_stream"]
    given = (tmp_path, packs)
    # The first kill is before a checkpoint, the next is after the batches of a checkpoint, so that lines are replaced;
    # the last process continues to the end.
    for attempt, (ranks, stop) in enumerate([(3, 2), (2, 7), (3, 4), (1, 5)]):
        run_ranks(SCRIPT, ranks, tmp_path / f"store{attempt}", *given, stop, ",".join(kinds), status=-9)
    run_ranks(SCRIPT, 1, tmp_path / "store", *given, 45, ",".join(kinds), "end")
    data = LoggedData(packs)
    for kind in [*kinds[:4], "joint/planned", "joint/pooled", *kinds[5:]]:
        report = check_order(tmp_path / kind, data)
        assert report.problems == [], kind
        if not kind.startswith("joint"):
            assert report.replaced > 0
            assert [text.split()[0] for text in report.processes] == ["2", "3", "1", "1"], kind
        assert kind == "megatron" or 0 in report.complete, kind
        assert report.samples >= PACKS
