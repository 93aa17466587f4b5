"""Generated records with videos, and packed outputs of them."""

import json
from pathlib import Path
from typing import Any

from energon_packed import ChatEncoder, PackResult, pack
from tests.internals import write_dataset, write_tokenizer


class VideoDemo:
    """30 records of the demo, 9 of them with generated videos."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        demo = write_dataset(folder / "data", records=30, broken=0, videos=True)
        self.jsonl, self.tokenizer = demo.jsonl, write_tokenizer(folder / "tokenizer", demo.texts, videos=True)
        self.encoder = ChatEncoder.from_pretrained(self.tokenizer)
        self._packed: dict[str, PackResult] = {}

    def options(self, output_dir: Path, **changes: Any) -> dict[str, Any]:
        settings = {"seq_len": 1024, "workers": 1, "shard_prefix": "v", "max_reject_rate": 1, "max_packs_per_shard": 2}
        return {"tokenizer": self.tokenizer, "output_dir": output_dir, **settings, **changes}

    def packed(self, **changes: Any) -> PackResult:
        """Pack once for each combination of options."""
        name = f"out-{len(self._packed)}"
        key = json.dumps(changes, sort_keys=True, default=str)
        if key not in self._packed:
            self._packed[key] = pack(self.jsonl, **self.options(self.folder / name, **changes))
        return self._packed[key]
