"""Benchmark `pack --overlong split` against TRL's `pack_dataset(strategy="bfd_split")`.

    python tools/bench_split.py [--json split.json]

Both read the same token records from a JSONL file, and pack rows of 1024 tokens. TRL does not repeat the token before
a cut, so the first token of every piece is not a target; fragments repeat it, and lose no target.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from benchlib import Report, arguments, bench_tokenizer, cli, run_peer, seconds, write_jsonl

from energon_packed import PackingManifest

_TOKENS, _SEQ_LEN = 914_783, 1024

_TRL = """
import json, sys, time
start = time.perf_counter()
from datasets import load_dataset
from trl import pack_dataset
data = load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[2]).select_columns(["input_ids"])
packed = pack_dataset(data, int(sys.argv[3]), "bfd_split", map_kwargs={"batch_size": len(data)})
seconds = time.perf_counter() - start
tokens, pieces = (sum(map(len, packed[name])) for name in ("input_ids", "seq_lengths"))
print(json.dumps({"seconds": seconds, "rows": len(packed), "tokens": tokens, "pieces": pieces}))
"""


def token_records() -> list[dict[str, Any]]:
    """Documents of lognormal lengths, 20 to 40,000 tokens, with `_TOKENS` tokens in sum."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.5, 1.2, 2000), 20, 40_000).astype(int)
    ends = np.minimum(np.cumsum(lengths), _TOKENS)
    sizes = np.diff(ends[: int(np.searchsorted(ends, _TOKENS)) + 1], prepend=0)
    return [{"id": f"d{i}", "input_ids": rng.integers(300, 20_000, size).tolist()} for i, size in enumerate(sizes)]


def main() -> None:
    """Run the benchmark and print the results."""
    options: Any = arguments(__doc__, "split").parse_args()
    report, work = Report("split", options.json), Path(options.work)
    records = token_records()
    source = write_jsonl(work / "split.jsonl", iter(records))
    tokenizer, out = bench_tokenizer(work, vision=False), work / "out-split"
    for folder in (out, work / "hf-cache"):
        shutil.rmtree(folder, ignore_errors=True)
    command = ("pack", source, "-o", out, "--tokenizer", tokenizer, "--seq-len", _SEQ_LEN, "--overlong", "split")
    wall = seconds(lambda: cli(*command))
    ours = PackingManifest.load(out / "webdataset")
    peer = run_peer(work, _TRL, source, work / "hf-cache", _SEQ_LEN)
    repeated = ours.fragments - ours.records_split  # a token for each cut
    report.add("rows relative to TRL", ours.packs / peer["rows"], "", packs=ours.packs, peer=peer)
    report.add("tokens kept", (ours.tokens - repeated) / _TOKENS, "", ">= 1")
    report.add("tokens kept by TRL", peer["tokens"] / _TOKENS)
    report.add("targets kept", (ours.tokens - repeated - len(records)) / (_TOKENS - len(records)), "", ">= 1")
    report.add("targets kept by TRL", (peer["tokens"] - peer["pieces"]) / (_TOKENS - len(records)))
    report.add("utilization", ours.utilization)
    report.add("utilization of TRL", peer["tokens"] / (peer["rows"] * _SEQ_LEN))
    report.add("seconds", wall, "s")
    report.add("seconds of TRL", peer["seconds"], "s")
    report.finish()


if __name__ == "__main__":
    main()
