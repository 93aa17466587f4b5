"""The harness finds the errors that it is for; the loop without an error is in ddp/test_ddp.py."""

import os
import socket
from pathlib import Path

import pytest

from tests.processes import Python
from tests.trainers.harness import Data, prove, rendezvous

ERRORS = {
    "shifted labels": ("assert_losses", "targets are expected|the loss of the samples by themselves"),
    "leaked attention": ("assert_losses", "the loss of the samples by themselves is"),
    "lost sample": ("assert_every_sample", r"epoch 0: no row has \['s\d+', 's\d+'\]"),
    "drop": ("assert_every_sample", r"\{12\} rows of each rank"),
    "mean of means": ("assert_gradients", "the relative difference of the gradient is"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_is_found(trainer_data: Data, tmp_path: Path, kind: str) -> None:
    check, message = ERRORS[kind]
    result = prove("ddp", trainer_data, tmp_path, title="", packages=(), kind=kind, resume=False)
    with pytest.raises(AssertionError, match=message):
        getattr(result, check)()


def test_a_run_that_starts_again_is_found(trainer_data: Data, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="killed after .*: (resumed after|other rows after it|other weights)"):
        prove("ddp", trainer_data, tmp_path, title="", packages=(), kind="start again").assert_resumed()


MEET = """
import os, time
if int(os.environ["RANK"]):
    time.sleep(1)  # the store must not end with rank 0
torch.distributed.init_process_group("gloo")
print(torch.distributed.get_world_size())
torch.distributed.barrier()  # a rank that ends may end the other one
torch.distributed.destroy_process_group()
"""


def test_no_other_process_can_take_the_port_of_a_run() -> None:
    store, place = rendezvous()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", int(place["MASTER_PORT"])))
    ranks = [Python("import torch" + MEET, env=os.environ | place | {"RANK": str(rank)}) for rank in range(2)]
    ended = [rank.wait() for rank in ranks]
    assert [done.stdout for done in ended] == ["2\n", "2\n"], [done.stderr for done in ended]
    del store
