"""Check and benchmark packed rows on a GPU: `python tools/bench_gpu.py [PART ...] [--json FILE] [--show FILE ...]`.

    throughput  useful tokens per second, utilization of the GPU and peak memory of a training step of a Qwen2 of 0.5
                billion parameters, for padded batches, and for packed rows with each attention implementation
    isolation   logits, loss and gradients of packed rows against those of separate samples, and the test of
                check_isolation: chosen families, families that need kernels, and families with images
    families    the test of check_isolation for all other families, with flash attention
    loader      batches of a loader with pinned memory: copied and used without waiting for the GPU; tokens per second
                of training from the loader against batches in memory

Without CUDA, or with --small, all parts run in a reduced form. Each result is written to the JSON as soon as it is
measured, and by default the parts end within 10 minutes. --show prints the tables of such files and measures nothing.

`flash_varlen` is flash attention of torch (tools/varlen.py). `flash_attention_4` is tested if it is installed.
Kernels of flash-linear-attention, mamba-ssm and causal-conv1d are tested if they are installed.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import logging
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without it, torch.cuda.is_available() starts CUDA, which then fails in forked processes.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from bounded import line  # noqa: E402
from isolation_table import _BOUNDARIES, result  # noqa: E402
from tiny_families import build_model, build_processor, picture, write_folder  # noqa: E402
from tiny_models import model_types, tiny_config, tiny_model  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from varlen import VARLEN, use_varlen  # noqa: E402

from energon_packed import (  # noqa: E402
    ChatEncoder,
    Conversation,
    CostModel,
    DataflowLoader,
    MapDistributor,
    MediaReference,
    Message,
    PackedBatch,
    PackedDataset,
    PackOptions,
    PaddingFreeCollator,
    RowSizes,
    get_packed_loader,
    pack,
    pack_lengths,
    step_targets,
)
from energon_packed.demo import write_tokenizer  # noqa: E402
from energon_packed.demo.dataset import write_dataset  # noqa: E402
from energon_packed.encoding import EncodedSample, StoredTokens  # noqa: E402
from energon_packed.errors import BatchError  # noqa: E402
from energon_packed.files import atomic_write  # noqa: E402
from energon_packed.integrations.isolation import isolation_table, short_row  # noqa: E402
from energon_packed.integrations.transformers.model_loss import loss_in_pieces  # noqa: E402

PARTS = ("throughput", "isolation", "families", "loader")
FLASH4 = "flash_attention_4"
FAMILY_SECONDS = 120
# Tokens of the samples of a row: more than a tile of the kernels, less than a tile, and not a multiple of its size.
LENGTHS = (130, 257, 64, 61)
# Families whose gradients are compared with each implementation: sliding windows, several kinds of layers, experts and
# two head sizes are among them.
CHOSEN = (
    *("Qwen2ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM"),
    *("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GPTNeoXForCausalLM", "Olmo3ForCausalLM", "GptOssForCausalLM"),
)
FLEX = ("Qwen2ForCausalLM", "MistralForCausalLM", "qwen3_vl")
# Families of the Qwen-VL models, with the pixels of a patch side.
QWEN_VL = {"qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_5": 16}
# Model types that are served by their processor; lighton_ocr has the tower of Pixtral.
IMAGES = ("llava", "llava_next", "gemma3", "idefics3", "lighton_ocr", "internvl", "llava_onevision", "aya_vision")
Row = dict[str, Any]


def device() -> str:
    """Return the device of the measurements."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class Results:
    """Tables of results by name, written to a JSON file after each row.

    Args:
        path: JSON file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        machine = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
        self.values: dict[str, Any] = {"machine": machine, "tables": {}}

    def add(self, table: str, row: Row) -> None:
        """Append a row, print it, and write the file."""
        self.values["tables"].setdefault(table, []).append(row)
        print(f"{table}: {json.dumps(row)}", file=sys.stderr, flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.path, json.dumps(self.values, indent=1).encode() + b"\n")  # may be killed at any time


def show(values: dict[str, Any]) -> None:
    """Print the tables of a JSON file as Markdown."""
    print(", ".join(f"{name} {value}" for name, value in values["machine"].items()))
    for name, rows in values["tables"].items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        lines = [
            columns,
            ["---"] * len(columns),
            *([_cell(row.get(column, "")) for column in columns] for row in rows),
        ]
        print(f"\n{name}\n", *(f"| {' | '.join(line)} |" for line in lines), sep="\n")


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# --- isolation


def implementations(part: str, family: str, small: bool) -> list[tuple[str, torch.dtype]]:
    """List attention implementations with their dtypes; flash attention has no float32."""
    flash = [(VARLEN, torch.bfloat16)] + ([(FLASH4, torch.bfloat16)] if has_flash4() else [])
    if part == "families":
        return flash
    found = [*flash, ("sdpa", torch.float32)]
    if not small:
        found += [("sdpa", torch.bfloat16), ("eager", torch.float32)]
        # Compiling flex attention for the lengths of a row and of its samples takes most of a minute.
        found += [("flex_attention", torch.bfloat16)] if family in FLEX else []
    return found


def has_flash4() -> bool:
    """Whether the package of flash attention 4 is installed."""
    installed = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    return device() == "cuda" and bool(installed)


def supports(model_class: type[Any], attention: str) -> bool:
    """Whether a class has an attention implementation."""
    names = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn", "eager": "__module__"}
    return bool(getattr(model_class, names.get(attention, "_supports_flash_attn")))


def text_case(kind: str, model_type: str, class_name: str, attention: str) -> tuple[Any, PackedBatch]:
    """Create a tiny model of a family, and a row of text."""
    model_class = getattr(transformers, class_name)
    if not supports(model_class, attention):
        raise NotImplementedError(f"{class_name} has no {attention}")
    model = tiny_model(model_class, tiny_config(model_type, model_class), attention)
    return model, short_row(model, LENGTHS)


def image_case(name: str, attention: str) -> tuple[Any, PackedBatch]:
    """Create a tiny model of a family with images, and a row with images from its processor."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer")
        write_tokenizer(path, ["What is a house? It is a drawing."], vision=name in QWEN_VL)
        if name in QWEN_VL:
            family = "qwen3_vl" if QWEN_VL[name] == 16 else name
            encoder = ChatEncoder.from_pretrained(
                path, vision_family=family, patch_size=QWEN_VL[name], min_pixels=3136
            )
            return qwen_vl(name, encoder, attention), image_row(encoder)
        encoder = ChatEncoder.from_pretrained(write_folder(Path(folder, name), name, path))
        return build_model(name, build_processor(name, path), attention), image_row(encoder)


def image_row(encoder: ChatEncoder) -> PackedBatch:
    """Encode a row of three samples with images of different sizes, and one sample without images."""
    samples = []
    for index, shapes in enumerate([[(64, 96)], [], [(120, 40), (50, 200)], [(80, 80)]]):
        turns = [
            Message("user", "<image> " * len(shapes) + f"What is a house {index}?"),
            Message("assistant", "It is."),
        ]
        streams = [io.BytesIO() for _ in shapes]
        for shape, stream in zip(shapes, streams, strict=True):
            picture(*shape).save(stream, "PNG")
        images = [MediaReference(data=stream.getvalue()) for stream in streams]
        samples.append(encoder.encode(Conversation(messages=turns, images=images)))
    return PaddingFreeCollator(dummy_images="never").collate(samples)


def qwen_vl(name: str, encoder: ChatEncoder, attention: str) -> Any:
    """Create a tiny Qwen-VL model with the vocabulary of the encoder's tokenizer, and M-RoPE."""
    token = encoder.tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": len(encoder.tokenizer), "head_dim": 16, "rope_parameters": rope}
    text |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
    if name == "qwen2_5_vl":
        vision |= {"fullatt_block_indexes": [1], "window_size": 56, "tokens_per_second": 2}
    else:
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    if name == "qwen3_5":
        sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
        heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
        text |= sizes | heads | {"layer_types": ["linear_attention", "full_attention"]}
    config_class = type(transformers.AutoConfig.for_model(name))
    config = config_class(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    model_class = transformers.AutoModelForImageTextToText._model_mapping[config_class]
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=attention, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim >= 2:  # large enough for images to matter
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model.eval()


def tested(create: Callable[[str], tuple[Any, PackedBatch]], attention: str, dtype: torch.dtype) -> Row:
    """Test a model as check_isolation does.

    Returns:
        result: as in the isolation table, `refused` by energon-packed, or `not tested`.
        reason: of the result; for `leaks`, the change of later samples as a fraction of the change of the first.
    """
    try:
        model, batch = create(attention)
        model, batch = model.to(device(), dtype), batch.to(device(), dtype)
        found = result(model, attention, batch)
    except BatchError as error:
        return {"result": "refused", "reason": line(error)}
    except Exception as error:
        return {"result": "not tested", "reason": line(error)}
    reason = found.get("not_tested") or found.get("reason") or found.get("needs") or found.get("share", "")
    return {"result": found.get(attention, "not tested"), "reason": reason}


def compared(create: Callable[[str], tuple[Any, PackedBatch]], attention: str, dtype: torch.dtype) -> Row:
    """Compare a packed row with its samples alone.

    Returns:
        logits, loss, gradients: norm of the difference divided by the norm of the values of the separate samples.
        rounding: the same for the gradients of the separate samples against those in float32 without flash attention,
        only for bfloat16.
    """
    model, batch = create(attention)
    model, batch = model.to(device(), dtype), batch.to(device(), dtype)
    alone = list(separate(batch))
    packed, apart = outputs(model, [(batch.transformers_inputs(), 1.0)]), outputs(model, alone)
    row: Row = dict(zip(("logits", "loss", "gradients"), map(difference, packed, apart), strict=True))
    if dtype == torch.bfloat16:
        exact = create("sdpa" if supports(type(model), "sdpa") else "eager")[0].to(device())
        exact.load_state_dict(model.state_dict())
        alone = [({name: single(value) for name, value in inputs.items()}, share) for inputs, share in alone]
        try:
            row["rounding"] = difference(apart[2], outputs(exact, alone)[2])
        except Exception as error:  # kernels without float32
            row["reason"] = line(error)
    return row


def single(value: Any) -> Any:
    """Convert a tensor of bfloat16 to float32."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return |left - right| / |right|."""
    return float((left - right).norm() / right.norm())


def separate(batch: PackedBatch) -> Iterator[tuple[Row, float]]:
    """Yield the arguments of a model for each sample alone, and the share of the sample in the targets of the row."""
    targets = (batch.labels[:, 1:] != -100).sum()
    where = batch.input_ids.device
    for sample in batch.split():
        row = PaddingFreeCollator(dummy_images="never").collate([sample]).to(where)
        inputs = {name: value for name, value in row.transformers_inputs().items() if name not in _BOUNDARIES}
        # Without positions, the model computes its own.
        positions = inputs.pop("position_ids")
        if positions.ndim == 3:
            inputs["mm_token_type_ids"] = (row.input_ids == (batch.image_token_id or -1)).int()
        yield inputs, float((row.labels[:, 1:] != -100).sum() / targets)


def outputs(model: Any, rows: list[tuple[Row, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (T, V), mean loss and all gradients of some rows, in float32."""
    model.zero_grad()
    logits, losses = [], []
    for inputs, share in rows:
        output = model(**inputs)
        (output.loss * share).backward()
        logits.append(output.logits[0].detach().float())
        losses.append(output.loss.detach().float() * share)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    flat = torch.cat([gradient.float().flatten() for gradient in gradients])
    return torch.cat(logits), torch.stack(losses).sum(), flat


Case = tuple[str, tuple[str, ...]]  # name, and the arguments of `text_case` or of `image_case`


def cases(part: str, small: bool) -> list[Case]:
    """List the families of a part."""
    known = isolation_table()["families"]
    texts = {entry[2]: entry for entry in model_types()}
    if small:  # the kernels of Qwen3-Next run on a GPU alone
        names = ("LlamaForCausalLM",) if part == "families" else ("Qwen2ForCausalLM", "Qwen3NextForCausalLM")
        return [(name, texts[name]) for name in names] + [("qwen3_vl", ("qwen3_vl",))] * (part == "isolation")
    kernels = [name for name, row in known.items() if "needs" in row]
    chosen = [*CHOSEN, *kernels]
    if part == "families":
        return [(name, entry) for name, entry in texts.items() if name not in chosen]
    images = [(name, (name,)) for name in (*QWEN_VL, *IMAGES)]
    named = [(name, texts[name]) for name in (*kernels, *CHOSEN) if name in texts]
    return [*named[: len(kernels)], *images[: len(QWEN_VL)], *named[len(kernels) :], *images[len(QWEN_VL) :]]


def family(part: str, case: Case, small: bool, only: list[str]) -> Iterator[Row]:
    """Test a family with each attention implementation: results, and for the part `isolation` differences."""
    name, arguments = case
    create = partial(text_case if len(arguments) == 3 else image_case, *arguments)
    for attention, dtype in implementations(part, name, small):
        if only and attention not in only:
            continue
        row = {"family": name, "attention": attention, "dtype": str(dtype).removeprefix("torch.")}
        row |= tested(create, attention, dtype)
        if part == "isolation" and row["result"] == "clean":
            try:
                row |= compared(create, attention, dtype)
            except Exception as error:
                row["reason"] = line(error)
        yield row


def isolation(results: Results, part: str, options: argparse.Namespace) -> None:
    """Test the families of a part, each in its own process, as an error in a kernel ends all work of a process."""
    todo = cases(part, options.small)
    if options.small:
        prepare()
        for case in todo:
            for row in family(part, case, True, options.only):
                results.add(part, row)
        return
    with ThreadPoolExecutor(options.processes) as pool:
        started = [pool.submit(in_process, part, case, options.end, options.only) for case in todo]
        for done in as_completed(started):
            for row in done.result():
                results.add(part, row)


def in_process(part: str, case: Case, end: float, only: list[str]) -> list[Row]:
    """Test a family in a new process until a time, and return the results until then."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, part, case, only))
    rows: list[Row] = []
    if time.monotonic() < end:
        end = min(end, time.monotonic() + FAMILY_SECONDS)
        process.start()
        sender.close()
        with contextlib.suppress(EOFError):
            while receiver.poll(max(0.0, end - time.monotonic())):
                rows.append(receiver.recv())
        process.kill()
        process.join()
    done = bool(rows) and "end" in rows[-1]
    return rows[:-1] if done else [*rows, {"family": case[0], "result": "not tested", "reason": "time, or a crash"}]


def _child(pipe: Any, part: str, case: Case, only: list[str]) -> None:
    prepare()
    for row in family(part, case, False, only):
        pipe.send(row)
    pipe.send({"end": True})


def prepare() -> None:
    """Prepare a process: `flash_varlen`, and no long search for the fastest configuration of kernels."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # else convolutions round float32 to 10 bits
    use_varlen()
    with contextlib.suppress(ImportError):
        from triton.runtime.autotuner import Autotuner

        before = Autotuner.__init__

        def init(self: Any, fn: Any, arg_names: Any, configs: Any, *arguments: Any, **options: Any) -> None:
            # Compiling all configurations takes minutes. The smallest tile fits into shared memory with any dtype.
            before(self, fn, arg_names, sorted(configs, key=_tile)[:1], *arguments, **options)

        Autotuner.__init__ = init


def _tile(config: Any) -> tuple[int, int, int]:
    sizes = [value for value in config.kwargs.values() if isinstance(value, int) and value > 0]
    return math.prod(sizes), config.num_stages, config.num_warps


# --- throughput


class Trained:
    """A model and its optimizer.

    Args:
        config: configuration of the model.
        attention: attention implementation.
    """

    def __init__(self, config: Qwen2Config, attention: str) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device() == "cuda" else torch.float32
        with torch.device(device()):
            self.model = Qwen2ForCausalLM._from_config(config, attn_implementation=attention, dtype=dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, inputs: Row) -> None:
        """Run one training step; logits of targets alone are computed in pieces with the loss, as by PackedTrainer."""
        with loss_in_pieces(self.model, head=True) if "logits_to_keep" in inputs else contextlib.nullcontext():
            self.model(**inputs).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def model_config(small: bool) -> Qwen2Config:
    """Configuration of Qwen2 0.5B, or of a tiny model."""
    size = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    size |= {"num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 32_768}
    if small:
        size |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        size |= {"vocab_size": 1000}
    return Qwen2Config(**size, tie_word_embeddings=True)


def sample_lengths(count: int, seq_len: int, seed: int) -> np.ndarray:
    """Lognormal lengths of chats, as ShareGPT (median 735 tokens), int64 (count,)."""
    return np.clip(np.random.default_rng(seed).lognormal(6.6, 1.1, count), 16, seq_len).astype(np.int64)


def encoded(length: int, vocabulary: int, supervised: float, seed: int) -> EncodedSample:
    """Create a sample of random tokens, the last of which are supervised."""
    ids = np.random.default_rng(seed).integers(0, vocabulary, length)
    labels = np.where(np.arange(length) >= round(length * (1 - supervised)), ids, -100)
    return EncodedSample(input_ids=ids, labels=labels)


def packed_rows(
    lengths: np.ndarray, seq_len: int, steps: int, vocabulary: int, supervised: float
) -> list[PackedBatch]:
    """Pack samples, and return some rows, each with a padding tail up to `seq_len`."""
    plan = list(pack_lengths(lengths, seq_len, seed=0))[:steps]
    collator = PaddingFreeCollator(pad_to=seq_len)
    return [
        collator.collate([encoded(int(lengths[index]), vocabulary, supervised, int(index)) for index in row])
        for row in plan
    ]


def padded_batches(lengths: np.ndarray, seq_len: int, steps: int, vocabulary: int) -> list[tuple[Row, list[int]]]:
    """Batches of separate samples in their order, of at most `seq_len` positions, with the lengths of the samples."""
    batches, group = [], [0]
    for index in range(1, len(lengths)):
        if (len(group) + 1) * lengths[[*group, index]].max() > seq_len:
            batches.append(group)
            group = []
        group.append(index)
    made = []
    for group in batches[:steps]:
        samples = [torch.from_numpy(encoded(int(lengths[i]), vocabulary, 1.0, i).input_ids) for i in group]
        ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(sample) for sample in samples], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
        made.append((inputs, [len(sample) for sample in samples]))
    return made


def matmul_peak(size: int) -> float:
    """Measure floating point operations per second of a product of square matrices."""
    dtype = torch.bfloat16 if device() == "cuda" else torch.float32
    left, right = torch.randn(2, size, size, device=device(), dtype=dtype)
    seconds = []
    for _ in range(30):
        wait()
        start = time.perf_counter()
        for _ in range(5):
            torch.mm(left, right)
        wait()
        seconds.append((time.perf_counter() - start) / 5)
    return 2 * size**3 / statistics.median(seconds[5:])


def wait() -> None:
    """Wait for the GPU."""
    if device() == "cuda":
        torch.cuda.synchronize()


def throughput(results: Results, options: argparse.Namespace) -> None:
    """Measure training steps of each kind of batch."""
    use_varlen()
    small = options.small
    config, steps = model_config(small), 3 if small else 10
    peak = matmul_peak(256 if small else 8192)
    results.add("peak", {"matrix product, TFLOP/s": peak / 1e12})
    cost = CostModel.from_config(config)
    vocabulary = config.vocab_size
    for seq_len in (256,) if small else (8192, 16_384):
        lengths = sample_lengths(50 * steps, seq_len, seed=1) if not small else np.full(60, 60)
        padded = padded_batches(lengths, seq_len, steps, vocabulary)
        plain = [(inputs, used, sum(used)) for inputs, used in padded]
        full = [_packed(batch) for batch in packed_rows(lengths, seq_len, steps, vocabulary, 1.0)]
        flash = [(FLASH4, "packed", full)] if has_flash4() and not small else []
        kinds: list[tuple[str, str, list[tuple[Row, list[int], int]]]] = [
            (VARLEN, "packed", full),
            ("sdpa", "packed", full),
            ("sdpa", "padded", plain),
            (VARLEN, "padded", plain),
        ]
        for supervised in (1.0, 0.5, 0.1):
            rows = packed_rows(lengths, seq_len, steps, vocabulary, supervised)
            chosen = [_packed(row, logits="targets") for row in rows]
            kinds.append((VARLEN, f"packed, logits of {supervised:.0%} targets", chosen))
        kinds += [*flash] if small else [*flash, ("flex_attention", "packed", full)]
        for attention, kind, batches in kinds:
            if options.only and attention not in options.only:
                continue
            row: Row = {"row": seq_len, "batches": kind, "attention": attention}
            if time.monotonic() > options.end:
                row["result"] = "not measured, time"
            else:
                row |= measured(config, attention, batches, cost, peak)
            release()
            results.add("throughput", row)


def _packed(batch: PackedBatch, logits: Literal["all", "targets"] = "all") -> tuple[Row, list[int], int]:
    """Arguments of the model, lengths of the samples, and number of tokens of the row."""
    used = batch.cu_seqlens.diff()[: batch.num_samples].tolist()
    return batch.transformers_inputs(logits=logits), used, batch.input_ids.shape[1]


def measured(
    config: Qwen2Config, attention: str, batches: list[tuple[Row, list[int], int]], cost: CostModel, peak: float
) -> Row:
    """Measure steps: useful tokens per second, share of the peak for useful tokens, and peak memory."""
    try:
        return _measured(Trained(config, attention), batches, cost, peak)
    except torch.OutOfMemoryError:
        return {"result": "out of memory"}
    except Exception as error:
        return {"result": line(error)}


def release() -> None:
    """Free the memory of the GPU that nothing uses."""
    gc.collect()
    torch.cuda.empty_cache()


def _measured(trained: Trained, batches: list[tuple[Row, list[int], int]], cost: CostModel, peak: float) -> Row:
    moved = [({name: to_device(value) for name, value in inputs.items()}, used) for inputs, used, _ in batches]
    for inputs, _ in moved[:3]:
        trained.step(inputs)
    wait()
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for inputs, _ in moved:
        trained.step(inputs)
    wait()
    seconds = time.perf_counter() - start
    tokens = sum(sum(used) for _, used in moved)
    # The output layer computes only the kept logits.
    config = trained.model.config
    head = 6 * config.hidden_size * config.vocab_size
    left_out = sum(sum(used) - len(inputs["logits_to_keep"]) for inputs, used in moved if "logits_to_keep" in inputs)
    sizes = RowSizes.of_samples([used for _, used in moved], patches=[[]] * len(moved))
    operations = float(cost.costs(sizes).sum()) - head * left_out
    memory = torch.cuda.max_memory_allocated() / 2**30 if device() == "cuda" else 0.0
    return {
        "tokens per second": tokens / seconds,
        "useful tokens": tokens / sum(inputs["input_ids"].numel() for inputs, _ in moved),
        "ms per step": 1000 * seconds / len(moved),
        "MFU": operations / seconds / peak,
        "memory, GiB": memory,
    }


def to_device(value: Any) -> Any:
    """Copy a tensor to the device."""
    return value.to(device()) if isinstance(value, torch.Tensor) else value


# --- loader


def stored_rows(folder: Path, rows: int, seq_len: int, vocabulary: int) -> PackedDataset:
    """Pack samples of random tokens into about `rows` rows."""
    rng = np.random.default_rng(0)
    lengths = sample_lengths(10_000, seq_len, seed=2)
    lengths = lengths[: int(np.searchsorted(lengths.cumsum(), rows * seq_len))]
    folder.mkdir(parents=True)
    with (folder / "data.jsonl").open("w", encoding="utf-8") as stream:
        for index, length in enumerate(lengths.tolist()):
            ids = rng.integers(0, vocabulary, length).tolist()
            stream.write(json.dumps({"id": f"sample-{index}", "input_ids": ids, "labels": ids}) + "\n")
    stored: Row = {"sample_class": "PackedTokensSample", "encoder": StoredTokens(), "workers": 2}
    pack(PackOptions(inputs=(str(folder / "data.jsonl"),), output_dir=folder / "out", seq_len=seq_len, **stored))
    return PackedDataset(folder / "out")


def image_loader(folder: Path, small: bool) -> Any:
    """Pack conversations with images, and return a loader of Energon."""
    data = write_dataset(folder, records=30 if small else 120, broken=0)
    tokenizer = write_tokenizer(folder / "tokenizer", data.texts)
    options: Row = {"tokenizer": tokenizer, "sample_class": "PackedMultiMixQASample", "workers": 1}
    pack(PackOptions(inputs=(str(data.jsonl),), output_dir=folder / "out", seq_len=1024, **options))
    return get_packed_loader(folder / "out", ChatEncoder.from_pretrained(tokenizer), epochs=1, num_workers=1)


def loader(results: Results, options: argparse.Namespace) -> None:
    """Move and use the batches of loaders without waiting for the GPU, and train from a loader."""
    small, cuda = options.small, device() == "cuda"
    config = model_config(small)
    with tempfile.TemporaryDirectory() as name:
        seq_len, rows = (512, 8) if small else (8192, 64)
        dataset = stored_rows(Path(name, "text"), rows, seq_len, config.vocab_size)

        def new() -> DataflowLoader:
            collator = PaddingFreeCollator(pad_to=seq_len)
            return DataflowLoader(MapDistributor(dataset), collator=collator, num_workers=1, pin_memory=cuda)

        for kind, batches in (("tokens", new()), ("images", image_loader(Path(name, "images"), small))):
            results.add("waits", {"batches": kind} | unsynchronized(batches))
        results.add("training from a loader", fed(new, config))


def unsynchronized(batches: Any) -> Row:
    """Copy batches to the GPU and prepare a step, in a mode of torch in which waiting for the GPU raises an error."""
    times, pinned = [], True
    for batch in batches:
        pinned &= batch.input_ids.is_pinned()
        start = time.perf_counter()
        try:
            with no_waiting():
                moved = batch.to(device(), non_blocking=True)
                moved.transformers_inputs()
                step_targets([moved])
        except RuntimeError as error:
            return {"number": len(times), "pinned": str(pinned), "waits": line(error)}
        times.append(time.perf_counter() - start)
    return {
        "number": len(times), "pinned": str(pinned), "host, ms": 1000 * statistics.median(times), "waits": "none"
    }  # fmt: skip


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Raise an error at each operation that waits for the GPU."""
    if device() == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def fed(new: Callable[[], DataflowLoader], config: Qwen2Config) -> Row:
    """Train on the rows of a loader, and on the same rows in memory."""
    use_varlen()
    trained = Trained(config, VARLEN)
    kept = [(batch.to(device()), batch.num_tokens) for batch in new()]
    for batch, _ in kept[:3]:
        trained.step(batch.transformers_inputs())
    speeds = []
    for source in (kept, ((batch, batch.num_tokens) for batch in new())):
        iterator = iter(source)
        next(iterator)  # starts the workers
        wait()
        start, tokens = time.perf_counter(), 0
        for batch, used in iterator:
            trained.step(batch.to(device(), non_blocking=True).transformers_inputs())
            tokens += used
        wait()
        speeds.append(tokens / (time.perf_counter() - start))
    return {"in memory, tokens per second": speeds[0], "from the loader": speeds[1], "ratio": speeds[1] / speeds[0]}


def main() -> None:
    """Run the parts, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--small", action="store_true", help="reduced form; always without CUDA")
    parser.add_argument(
        "--seconds", type=float, default=540, help="of all parts; a part starts nothing after its share"
    )
    parser.add_argument("--processes", type=int, default=8, help="families that are tested at the same time")
    parser.add_argument("--only", nargs="+", default=[], metavar="ATTENTION", help="attention implementations to test")
    parser.add_argument("--json", type=Path, default=Path("bench-results") / "gpu.json", help="file for the results")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print the tables of JSON files")
    options = parser.parse_args()
    if options.show:
        for file in options.show:
            show(json.loads(file.read_text(encoding="utf-8")))
        return
    options.small = options.small or device() == "cpu"
    results = Results(options.json)
    run: dict[str, Callable[..., None]] = {"throughput": throughput, "loader": loader}
    start, parts = time.monotonic(), options.parts or PARTS
    for number, part in enumerate(parts, 1):
        options.end = start + options.seconds * number / len(parts)  # a part that is done earlier leaves its time
        try:
            if part in run:
                run[part](results, options)
            else:
                isolation(results, part, options)
        except Exception as error:  # the other parts still run
            results.add("failed", {"part": part, "reason": line(error)})
    show(results.values)


if __name__ == "__main__":
    main()
