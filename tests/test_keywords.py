"""Keyword arguments: types for editors and type checkers, made from the declared options."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CALLS = """
from energon_packed import (
    BalancedPoolPacker, ChatEncoder, DataflowConfig, DataflowLoader, MapDistributor, get_packed_loader, get_raw_loader,
    pack,
)

pack("d.jsonl", output_dir="out", seq_len="8k", split="train=0.9,val=0.1", map={"user": "question"})
pack("d.jsonl", output_dir="out", seqlen=8)  # error: Unexpected keyword argument "seqlen"
pack("d.jsonl", output_dir="out", seq_len=8.5)  # error: "float"; expected "int | str"
ChatEncoder.from_pretrained("t", "p", max_pixels=5, loss_on="last")
ChatEncoder.from_pretrained("t", loss_on="user")  # error: expected "Literal['assistant', 'last', 'all']"
get_packed_loader("out", micro_batch_size=2, timeout=0.5, order_log="order")
get_packed_loader("out", micro_batch=2)  # error: Unexpected keyword argument "micro_batch"
get_packed_loader("out", epochs="1")  # error: "str"; expected "int | None"
DataflowLoader(MapDistributor([]), batch_size=2, num_workers=2, prefetch_factor=4)
DataflowLoader(MapDistributor([]), num_worker=2)  # error: Unexpected keyword argument "num_worker"
get_raw_loader(DataflowConfig(), batch_size=2, rank=0, world_size=1)
get_raw_loader(DataflowConfig(), worldsize=1)  # error: Unexpected keyword argument "worldsize"
BalancedPoolPacker(8, pool_size=16)
BalancedPoolPacker(8, poolsize=16)  # error: Unexpected keyword argument "poolsize"
"""


def test_type_checkers_check_keywords(tmp_path: Path) -> None:
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", str(script)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    errors = {int(line.split(":")[1]): line for line in found if ": error: " in line}
    expected = {
        number: line.partition("# error: ")[2]
        for number, line in enumerate(CALLS.splitlines(), 1)
        if "# error: " in line
    }
    assert errors.keys() == expected.keys(), found
    for number, text in expected.items():
        assert text in errors[number]
