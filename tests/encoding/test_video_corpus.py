"""Videos of all encoders: each selection of frames equals sequential decoding, or the file is rejected."""

import json
import os
import random
from collections import Counter
from pathlib import Path

from tests.internals import video_file
from tests.processes import run_python
from tests.video_corpus import compare, make_case

VIDEOS = int(os.environ.get("ENERGON_PACKED_VIDEOS", "16"))  # files; `make hard` sets more
_PART = 50  # files of a process: a crash of an encoder names its part


def test_selected_frames_equal_sequential_decoding(tmp_path: Path) -> None:
    """Encoders print to the standard error, so that this runs in processes of its own."""
    total: Counter[str] = Counter()
    wrong: list[str] = []
    for first in range(0, VIDEOS, _PART):
        done = run_python(COMPARED, tmp_path, first, min(first + _PART, VIDEOS))
        assert done.returncode == 0, f"files {first} to {first + _PART}: {done.stderr[-2000:]}"
        counts, found = json.loads(done.stdout.splitlines()[-1])
        total.update(counts)
        wrong += found
    print(json.dumps(total, indent=1))
    assert wrong == []
    assert total["files"] > 0.8 * VIDEOS
    assert total["selections"] > 4 * total["files"]


COMPARED = """
import sys
from tests.encoding.test_video_corpus import compare_all
compare_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""


def compare_all(folder: str, first: int, stop: int) -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for number in range(first, stop):
        if (case := make_case(Path(folder), number)) is None:
            continue
        path, description = case
        rng = random.Random(number)
        video_file._WORTH_A_SEEK = rng.choice((0, 1 << 20))
        rejection, selections, found = compare(path, rng)
        reason = rejection.partition(" at ")[0].partition("(")[0].partition(";")[0]
        counts.update({"files": 1, "selections": selections, **({f"rejected: {reason}": 1} if rejection else {})})
        wrong += [f"{description}: {line}" for line in found]
        path.unlink()
    print(json.dumps((counts, wrong)))
