"""Scripts that tests run as two ranks, or with torchrun or accelerate launch: a tiny model, and where results go."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests import optimizer_files  # noqa: F401
from tests.processes import forked_commands, run_ranks

ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}


# On a free port: the launches of two test processes may run at the same time.
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    # --multi_gpu means several processes; the script says Accelerator(cpu=True)
    "accelerate": [
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        "0",
    ],
}


def launch(
    script: str, *arguments: object, out: Path, launcher: str = "torchrun", folder: str = "integrations"
) -> list[Any]:
    """What each of 2 processes of a script in `tests/{folder}` wrote with `report`."""
    command = ["python", "-m", *LAUNCHERS[launcher]]
    command += ["-m", f"tests.{folder}.{script}", str(out), *map(str, arguments)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **forked_commands(), **_ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stderr = process.communicate(timeout=300)[1]
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks, which have sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the ranks, if the launcher did not end them
    told = stderr[max(0, stderr.find("Traceback")) :]
    assert process.returncode == 0, told if len(told) < 6000 else f"{told[:2000]}\n...\n{told[-4000:]}"
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


# What torchrun sets; the group exists, so that no port is used.
_RANK = """
import os
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
from {module} import main
del sys.argv[1:4]
main()
"""


def run_script(module: str, *arguments: object, out: Path, status: int = 0) -> list[Any]:
    """What each of 2 ranks of `main()` of a module wrote with `report`, without the imports of `launch`."""
    (out / "store").unlink(missing_ok=True)
    run_ranks(_RANK.format(module=module), 2, out / "store", out, *arguments, status=status)
    return [] if status else [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def report(out: str, result: Any) -> None:
    """Hand the result of this process to the test."""
    (Path(out) / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))


def tiny_qwen2(vocab_size: int = 2048, *, dropout: float = 0.0) -> Qwen2ForCausalLM:
    """Two layers, the same weights in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            attention_dropout=dropout,
        )
    )
