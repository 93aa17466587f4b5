"""Compare energon-packed with the packing of TRL, ms-swift, LLaMA-Factory and Megatron-Energon.

    python tools/bench_compare.py [--only NAME ...] [--kinds text images] [--records 5000 50000]

Every peer gets the same conversations, tokenizer, chat template, tiny model and `seq_len`, and runs its own code; see
`compare/contract.py`. Peers with tests/trainers/NAME/requirements.txt run in the environment of `make test-trainers`.
The results are written to tools/compare/result.json, from which `make_tables.py` generates the tables of
docs/comparison.md and the README. Measured for each peer:

1. The preparation of both numbers of `--records`, in all processes until the first training step; again with the
   caches of this run. The smaller number is prepared `--runs` times, and the medians are written.
2. One epoch over the first `--trained` of them: rows, utilization, tokens per second (medians of the steps), the peak
   memory of a step above the memory before the first step, and the losses of the samples in their rows and alone.
3. Training that is stopped at a checkpoint and resumed, compared with the uninterrupted run.
4. Records that are too long, have no answer, or whose image is corrupt or missing, in a small set.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "compare"))

import torch
from benchlib import Usage, image_records, paragraphs, text_records, usage, write_jsonl
from compare.contract import END, START, Spec
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from energon_packed.demo import write_tokenizer

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "tools" / "compare" / "result.json"
_SYSTEM = "You are a helpful assistant."
# ChatML; the tags mark the text of the assistant for TRL.
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% elif message['content'] is string %}{{ message['content'] + '<|im_end|>\\n' }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_BAD = 5  # records of each kind that cannot be trained on as they are
_CLEAN = 40  # other records of that set
# Words of a line that reports a lost record; see `is_report`.
_REPORTS = re.compile(
    r"(?i)drop|skip|truncat|exceed|too long|longer|reject|invalid|corrupt|missing|error|failed|no_superv|cannot"
)
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Peer:
    """A row of the table.

    Attributes:
        name: of the row.
        script: tools/compare/peer_SCRIPT.py.
        environment: folder of tests/trainers whose requirements it needs; empty: the development environment.
        variant: Spec.variant.
        prepares: has an offline command.
        loses: measure lost records; not for a second variant with the same preparation.
        torchvision: with images, needs the packages of requirements-images.txt.
        streams: tokenizes and packs while training, so that the time until the first step contains only a buffer.
    """

    name: str
    script: str
    environment: str = ""
    variant: str = ""
    prepares: bool = False
    loses: bool = True
    torchvision: bool = False
    streams: bool = False


PEERS = (
    Peer("energon-packed", "packed", prepares=True),
    Peer("energon-packed, stored tokens", "packed", variant="tokens", prepares=True, loses=False),
    Peer("TRL `packing`", "trl", variant="packing", torchvision=True),
    Peer("TRL `padding_free`", "trl", variant="padding_free", loses=False, torchvision=True),
    Peer("ms-swift", "ms_swift", environment="ms_swift", prepares=True, torchvision=True),
    Peer("LLaMA-Factory", "llamafactory", environment="llamafactory", torchvision=True),
    Peer("Megatron-Energon", "energon", prepares=True, streams=True),
)


def python_of(peer: Peer) -> str:
    """Return the Python of a peer; its environment is created if missing."""
    if not peer.environment:
        return sys.executable
    folder = ROOT / os.environ.get("TRAINERS_VENV", ".venv-trainers") / peer.environment
    subprocess.run(["make", "-C", str(ROOT), "--silent", str((folder / ".installed").relative_to(ROOT))], check=True)
    return str(folder / "bin" / "python")


def media_packages(work: Path, media: str) -> Path:
    """Return a folder with the packages of requirements-images.txt or requirements-audio.txt, installed if missing."""
    folder = work / f"{media}-packages"
    if not folder.exists():
        requirements = ROOT / "tools" / "compare" / f"requirements-{media}.txt"
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*install, "--target", str(folder), "-r", str(requirements)], check=True)
        for library in folder.glob("torchaudio/lib/*.so"):  # for CUDA; its Python part resamples
            library.unlink()
    return folder


def marked(records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Add a system message, and marks at the start and at the end of each conversation."""
    for number, record in enumerate(records):
        messages = [{"role": "system", "content": _SYSTEM}, *record["messages"]]
        question, answer = messages[1], messages[-1]
        image, _, text = question["content"].rpartition("<image>")
        messages[1] = question | {
            "content": f"{'<image>' if 'images' in record else image}{START.format(number)} {text}"
        }
        messages[-1] = answer | {"content": f"{answer['content']} {END.format(number)}"}
        yield record | {"messages": messages}


def first(path: Path, count: int) -> Path:
    """Write the first records of a file to another file."""
    part = path.with_name(f"{path.stem}-{count}.jsonl")
    with path.open(encoding="utf-8") as lines:
        part.write_text("".join(line for line, _ in zip(lines, range(count), strict=False)), encoding="utf-8")
    return part


def too_long(record: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Make the last answer three times as long as a row."""
    answer = record["messages"][-1]
    words = "one more word " * spec["seq_len"]
    return record | {"messages": [*record["messages"][:-1], answer | {"content": words + answer["content"]}]}


def unanswered(record: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Remove all answers."""
    return record | {"messages": record["messages"][:2]}


def corrupt(record: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Replace the image by the first half of its file."""
    path = Path(record["images"][0])
    half = path.with_name(f"{path.stem}-half.jpg")
    data = path.read_bytes()
    half.write_bytes(data[: len(data) // 2])
    return record | {"images": [str(half)]}


def missing(record: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Name an image that does not exist."""
    return record | {"images": [record["images"][0] + ".missing.jpg"]}


BAD: dict[str, dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]]] = {
    "text": {"too long": too_long, "no answer": unanswered},
    "images": {"corrupt image": corrupt, "missing image": missing},
}


def write_model(folder: Path, texts: Iterable[str], *, images: bool) -> Path:
    """Write a tiny random Qwen2 or Qwen2.5-VL with its tokenizer, trained on `texts`, chat template and processor."""
    if (folder / "model.safetensors").exists():
        return folder
    write_tokenizer(folder, [*texts, _SYSTEM], vocab_size=4096, vision=images, videos=images)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    token = tokenizer.convert_tokens_to_ids
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "bos_token_id": None}
    sizes |= {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "max_position_embeddings": 32_768,
    }
    kind: Any = AutoModelForCausalLM
    config = AutoConfig.for_model("qwen2", **sizes)
    if images:
        kind = AutoModelForImageTextToText
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64}
        vision |= {"fullatt_block_indexes": [1], "window_size": 56, "tokens_per_second": 2}
        named = {"image_token_id": token("<|image_pad|>"), "video_token_id": token("<|video_pad|>")}
        named |= {"vision_start_token_id": token("<|vision_start|>"), "vision_end_token_id": token("<|vision_end|>")}
        text = sizes | {"rope_parameters": rope}
        config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision, **named)
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim >= 2:  # large enough for the attention to matter
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    return folder


class Runner:
    """Runs the phases of one peer with one kind of data.

    Args:
        peer: row of the table.
        work: folder for its files, emptied first.
        common: settings of Spec that all phases share.
        save_every: steps between checkpoints.
    """

    def __init__(self, peer: Peer, work: Path, common: dict[str, Any], save_every: int) -> None:
        self.peer, self.work, self.common, self._save_every = peer, work, common, save_every
        self._phases = ("prepare", "start") if peer.prepares else ("start",)
        self._python = python_of(peer)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)

    def run(
        self, phase: str, folder: str, rows: str, records: Path, **settings: Any
    ) -> tuple[Usage, list[dict[str, Any]]]:
        """Run one process, and return its resources and the lines of its rows."""
        place = self.work / folder
        place.mkdir(parents=True, exist_ok=True)
        file = self.work / f"{rows}.jsonl"
        spec = Spec(
            phase=phase, variant=self.peer.variant, records=str(records), folder=str(place), rows=str(file),
            **self.common | settings,
        )  # fmt: skip
        written = self.work / f"{rows}-{phase}.json"
        written.write_text(json.dumps(vars(spec)), encoding="utf-8")
        script = ROOT / "tools" / "compare" / f"peer_{self.peer.script}.py"
        environment = ["HF_HUB_OFFLINE=1", "TOKENIZERS_PARALLELISM=true", "RAYON_NUM_THREADS=2", "OMP_NUM_THREADS=1"]
        if self.peer.torchvision and self.common["images"]:
            environment.append(f"PYTHONPATH={media_packages(self.work.parents[1], 'images')}")
        log = self.work / f"{rows}-{phase}.log"
        command = f'exec env {" ".join(environment)} "$0" "$1" "$2" 2>"$3"'
        try:
            used = usage(["sh", "-c", command, self._python, script, written, log])
        except subprocess.CalledProcessError as error:
            log.write_text((error.output or "") + log.read_text(errors="replace"))
            raise
        log.write_text(used.output + log.read_text(errors="replace"))
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return used, lines

    def train(self, folder: str, rows: str, records: Path, **settings: Any) -> tuple[Usage, list[dict[str, Any]]]:
        """Prepare a folder if needed, and train."""
        if self.peer.prepares and not (self.work / folder).exists():
            self.run("prepare", folder, rows, records, **settings)
        return self.run("train", folder, rows, records, **settings)

    def output(self, rows: str) -> str:
        """Return the output of all processes with these rows."""
        return "".join(file.read_text(errors="replace") for file in sorted(self.work.glob(f"{rows}-*.log")))

    def preparation(self, records: Path, runs: int) -> dict[str, float]:
        """Measure the time until the first step, without and with caches: medians of several runs."""
        results = [self._prepared(records, f"{records.stem}-run-{number}") for number in range(runs)]
        return {name: statistics.median(result[name] for result in results) for name in results[0]}

    def _prepared(self, records: Path, folder: str) -> dict[str, float]:
        parts = [self.run(phase, folder, f"{folder}-cold", records)[0] for phase in self._phases]
        warm = parts[-1] if self.peer.prepares else self.run("start", folder, f"{folder}-warm", records)[0]
        shutil.rmtree(self.work / folder)
        return {
            "wall": sum(part.wall for part in parts),
            "cpu": sum(part.cpu for part in parts),
            "memory": max(part.memory for part in parts),
            "warm_wall": warm.wall,
            "warm_cpu": warm.cpu,
        }

    def epoch(self, records: Path) -> dict[str, Any]:
        """Train for one epoch, describe its rows, and compare it with a run from one of its checkpoints."""
        used, lines = self.train("small", "epoch", records, save_every=self._save_every)
        values = describe(lines, self.common["seq_len"], self._save_every)
        last = (values["rows"] - 1) // self._save_every * self._save_every
        values["versions"] = json.loads(used.output.splitlines()[-1])
        return values | {"resume": self._resumed(records, lines, last)}

    def _resumed(self, records: Path, complete: list[dict[str, Any]], step: int) -> str:
        """Compare a run that continues from the checkpoint of a step with the uninterrupted run."""
        try:
            _, rest = self.run("train", "small", "resumed", records, resume_from=step)
        except subprocess.CalledProcessError:
            return "error"
        expected = complete[step:]
        rows, more = [[(row["samples"], row["loss"]) for row in run if "tokens" in row] for run in (expected, rest)]
        if len(more) > len(rows) and more[: len(rows)] == rows:
            return "equal, then another epoch"
        if [row.get("samples") for row in expected] != [row.get("samples") for row in rest]:
            return "other rows"
        if [row.get("loss") for row in expected] != [row.get("loss") for row in rest]:
            return "other losses"
        return "equal" if expected[-1]["weights"] == rest[-1]["weights"] else "other weights"

    def losses(self, kind: str, records: Path) -> dict[str, Any]:
        """Train on small sets with records of each bad kind."""
        clean = [json.loads(line) for line in first(records, _CLEAN).read_text(encoding="utf-8").splitlines()]
        known = {_NUMBERS.sub("0", line.rstrip()) for line in self.output("epoch").splitlines()}
        found = {}
        for name, change in BAD[kind].items():
            bad = {number: change(clean[number], self.common) for number in range(0, 7 * _BAD, 7)}
            file = self.work / f"records-{len(found)}.jsonl"
            file.write_text("".join(json.dumps(bad.get(number, record)) + "\n" for number, record in enumerate(clean)))
            rows = f"bad-{len(found)}"
            try:
                _, lines = self.train(rows, rows, file)
                failed = False
            except subprocess.CalledProcessError:
                failed, lines = True, []
            output = self.output(rows).replace(f"{self.work.parents[1]}/", "")
            new = [
                line
                for line in map(str.rstrip, output.splitlines())
                if is_report(line) and _NUMBERS.sub("0", line) not in known
            ]
            samples = {
                number: (is_whole, targets) for row in lines for number, is_whole, targets in row.get("samples", [])
            }
            fates = ["missing" if number not in samples else fate(*samples[number]) for number in bad]
            good = sum(number in samples and samples[number][0] for number in range(_CLEAN) if number not in bad)
            found[name] = {
                "result": "error" if failed else ", ".join(f"{fates.count(one)} {one}" for one in sorted(set(fates))),
                "others": good - (_CLEAN - _BAD) if not failed else 0,
                "message": (new[-1] if failed else new[0])[:300] if new else "",
            }
        return found


def is_report(line: str) -> bool:
    """Whether a line of output may report a lost record.

    Long lines print all settings, indented lines are frames of a traceback, and the caches of `datasets` sometimes
    report what they cannot pickle.
    """
    return len(line) < 1000 and not line[:1].isspace() and "pickle" not in line and bool(_REPORTS.search(line))


def describe(lines: list[dict[str, Any]], seq_len: int, save_every: int) -> dict[str, Any]:
    """Compute the values of one epoch from the lines of its rows."""
    rows = [line for line in lines if "tokens" in line]
    samples = [sample for row in rows for sample in row["samples"]]
    apart = [abs(alone - packed) for row in rows for _, alone, packed in row["apart"]]
    tokens, size = sum(row["tokens"] for row in rows), sum(row["size"] for row in rows)
    values = {
        "rows": len(rows),
        "seq_len": seq_len,
        "tokens": tokens,
        "utilization": tokens / (len(rows) * seq_len),
        "padding": 1 - tokens / size,
        "longest": max(row["tokens"] for row in rows),
        "leakage": max(apart),
        "compared": len(apart),
        "whole": len({number for number, is_whole, targets in samples if is_whole and targets}),
        "targets": sum(targets for _, _, targets in samples),
    }
    # Neither a row whose samples are also run alone nor a row before which a checkpoint is written.
    timed = [
        (row["tokens"], row["seconds"], row["started"] - before["written"], row["memory"])
        for number, (before, row) in enumerate(pairwise(rows), 1)
        if number % save_every and not row["apart"] and not before["apart"]
    ]
    if timed:
        values["tokens_per_second"] = statistics.median(tokens / seconds for tokens, seconds, *_ in timed)
        # From the end of a step to the next: the optimizer, and reading.
        values["tokens_per_second_read"] = statistics.median(tokens / (step + rest) for tokens, step, rest, _ in timed)
        values["step_memory"] = max(memory for *_, memory in timed)
    return values


def fate(is_whole: bool, targets: int) -> str:
    """What happened to a bad record that is in a row."""
    return "truncated" if not is_whole and targets else "whole" if targets else "without targets"


def write(kind: str, name: str, values: dict[str, Any], path: Path) -> None:
    """Add the values of one peer to the results."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results.setdefault(kind, {}).setdefault(name, {}).update(values)
    path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("bench-work") / "compare", help="folder for data and runs")
    parser.add_argument("--json", type=Path, default=RESULT, help="file for the results")
    parser.add_argument(
        "--only", nargs="+", default=[], help="scripts (packed trl ms_swift llamafactory energon) or variants"
    )
    parser.add_argument("--kinds", nargs="+", default=["text", "images"])
    parser.add_argument("--parts", nargs="+", default=["preparation", "epoch", "losses"])
    parser.add_argument(
        "--records", type=int, nargs=2, default=[5000, 50_000], help="conversations to prepare; a tenth with images"
    )
    parser.add_argument("--runs", type=int, default=3, help="of the preparation of the smaller number")
    parser.add_argument("--trained", type=int, default=400, help="conversations of the epoch; half with images")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seq-len", type=int, default=2048)
    options = parser.parse_args()
    work = options.work.resolve()
    for kind in options.kinds:
        images = kind == "images"
        counts = [count // 10 for count in options.records] if images else options.records
        trained = options.trained // 2 if images else options.trained
        data = image_records(work / "images", max(counts)) if images else text_records(max(counts))
        records = write_jsonl(work / f"{kind}-{max(counts)}.jsonl", marked(data))
        model = write_model(work / f"model-{kind}", chain(*paragraphs()), images=images)
        common = {"model": str(model), "seq_len": options.seq_len, "images": images}
        for peer in PEERS:
            if options.only and not {peer.script, peer.variant} & {*options.only}:
                continue
            runner = Runner(peer, work / "runs" / f"{kind}-{peer.script}-{peer.variant}", common, options.save_every)
            print(f"{kind}: {peer.name}", file=sys.stderr, flush=True)
            values: dict[str, Any] = {"streams": peer.streams}
            try:
                if "epoch" in options.parts:
                    part = first(records, trained)
                    values |= runner.epoch(part) | {"records": trained}
                    values["digest"] = hashlib.sha256(part.read_bytes()).hexdigest()
                if "losses" in options.parts and peer.loses:
                    values["bad"] = runner.losses(kind, records)
                if "preparation" in options.parts:
                    values["preparation"] = [
                        {"records": count}
                        | runner.preparation(first(records, count), options.runs if count < max(counts) else 1)
                        for count in counts
                    ]
            except subprocess.CalledProcessError as error:
                lines = [line for file in runner.work.glob("*.log") for line in file.read_text().splitlines()]
                values["error"] = next((line.strip()[:300] for line in reversed(lines) if "Error" in line), str(error))
            print(json.dumps(values, indent=2), file=sys.stderr, flush=True)
            write(kind, peer.name, values, options.json)


if __name__ == "__main__":
    main()
