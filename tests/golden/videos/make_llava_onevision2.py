"""Write the golden files of LLaVA-OneVision-2 from its own processor and its own trainer; see README.md here.

    python -m tests.golden.videos.make_llava_onevision2 CLONE

CLONE is a clone of EvolvingLMMs-Lab/LLaVA-OneVision-2. `llava_onevision2.json` has the output of its processor for
videos; `llava_onevision2_records.json` has the samples that its trainer encodes from records of frames.
"""

import importlib
import json
import random
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.golden.videos.cases import digest
from tests.golden.videos.ov2_inputs import (
    VIDEO,
    collapsed,
    frame,
    image_settings,
    positions_of,
    write_tokenizer,
)

HERE = Path(__file__).parent
LAYOUTS = ((14, 2), (16, 3), (16, 2), (14, 3))
LIMITS = ((3136, 8000), (5000, 6000), (256, 6272), (1, 10000))
SIZES = ((48, 64), (64, 48), (90, 160), (36, 36), (120, 68), (24, 100), (90, 30), (96, 96), (33, 47), (16, 16))
COUNTS = (1, 2, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 50, 64, 75, 100, 120, 199)
RATES = ("1", "2", "5", "10", "24000/1001", "24", "25", "30000/1001", "30", "60", "1/2", "15/2")
OPTIONS: tuple[dict[str, Any], ...] = (
    *({"max_frames": 32},) * 6,
    *({"num_frames": n} for n in (1, 2, 4, 13)),
    *({"target_fps": f} for f in (1.0, 0.5, 2.0)),
    {"target_fps": 4.0, "max_frames": 6},
    {"max_frames": 20},
)
TEXTS = (
    "<video>\nWhat?",
    "Watch: <video> What?",
    "What?<video>",
    "<video>",
    "A <video> or <video>?",
)


def video_cases() -> list[dict[str, Any]]:
    draw, cases = random.Random(2), []
    for number in range(202):
        text = TEXTS[number % len(TEXTS)] if number % 3 == 0 else TEXTS[0]
        videos = [
            {
                "frames": draw.choice(COUNTS),
                "fps": draw.choice(RATES),
                "size": list(draw.choice(SIZES)),
                "seed": 10 * number + i,
            }
            for i in range(text.count("<video>"))
        ]
        case = {
            "text": text,
            "layout": list(LAYOUTS[number % 4]),
            "limits": list(LIMITS[draw.randrange(4)]),
            "options": draw.choice(OPTIONS),
            "videos": videos,
        }
        if number in (30, 31):  # as many frames as its default for a long video
            case |= {"options": {"max_frames": 384}, "limits": [1, 1600]}
            videos[0] |= {"frames": 500, "fps": "12", "size": [96, 64] if number == 30 else [20, 200]}
        cases.append(case)
    return cases


class Reader:
    """As decord.VideoReader: a path names a video by formula."""

    def __init__(self, path: str) -> None:
        self.video = json.loads(path)

    def __len__(self) -> int:
        return int(self.video["frames"])

    def get_avg_fps(self) -> float:
        return float(Fraction(self.video["fps"]))

    def get_batch(self, indices: list[int]) -> Any:
        frames = [frame(self.video["seed"], index, *self.video["size"]) for index in indices]
        return SimpleNamespace(asnumpy=lambda: np.stack(frames))


def run_processor(clone: Path, folder: Path) -> list[dict[str, Any]]:
    import decord

    decord.VideoReader = Reader
    sys.path.insert(0, str(clone / "transformers_impl/llavaonevision2"))
    # A package, because the module of the processor has relative imports.
    package = ModuleType("llavaonevision2")
    package.__path__ = [str(clone / "transformers_impl/llavaonevision2")]
    sys.modules["llavaonevision2"] = package
    module = importlib.import_module("llavaonevision2.processing_llava_onevision2")
    results = []
    for case in video_cases():
        settings = image_settings(*case["layout"], *case["limits"])
        name = "-".join(map(str, (*case["layout"], *case["limits"])))
        processor = module.Llava_Onevision2Processor.from_pretrained(str(write_tokenizer(folder / name, settings)))
        content = case["text"].replace("<video>", VIDEO)
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "A word."}]
        text = processor.apply_chat_template(turns, tokenize=False)
        try:
            out = processor(text=[text], videos=[json.dumps(v) for v in case["videos"]], **case["options"])
        except (ValueError, RuntimeError, ImportError, ModuleNotFoundError) as error:
            results.append({**case, "error": type(error).__name__})
            continue
        ids = out["input_ids"][0]
        positions = out["patch_positions"]
        grids = out["image_grid_thw"].tolist()
        sizes = [[h, w] for _, h, w in grids]
        values = out["pixel_values"]
        assert values.dtype == torch.float32
        indices, start = [], 0
        for t, h, w in grids:
            indices.append(int(positions[start, 0]))
            start += t * h * w
        flat = values.reshape(-1)
        results.append(
            {
                **case,
                "indices": indices,
                "grids": [size for size, before in zip(sizes, [None, *sizes], strict=False) if size != before],
                "rendered": collapsed(processor.tokenizer.decode(ids))[:400],
                "ids": digest(ids.numpy().astype(np.int64)),
                "length": len(ids),
                "positions": digest(positions.numpy().astype(np.int64)),
                "pixels": digest(values.numpy()),
                "values": [round(float(v), 6) for v in flat[:: max(len(flat) // 5, 1)][:5]],
            }
        )
    return results


def load_trainer(clone: Path) -> tuple[type[Any], ModuleType, ModuleType]:
    """Import the task encoder without starting Megatron: packages of the clone, without their `__init__`."""
    sys.path.insert(0, str(clone))
    for name in ("aiak_training_llm", "aiak_training_llm.data", "aiak_training_llm.utils"):
        package = ModuleType(name)
        package.__path__ = [str(clone / name.replace(".", "/"))]
        sys.modules[name] = package
    flavors = importlib.import_module("megatron.energon.flavors.webdataset")
    vars(flavors).setdefault("VideoData", object)  # a name of earlier releases of Energon, for annotations
    constants = importlib.import_module("aiak_training_llm.utils.constants")
    utils = sys.modules["aiak_training_llm.utils"]
    vars(utils).update(constants=constants, get_args=None, get_tokenizer=None, get_chat_template=None)
    templates = importlib.import_module("aiak_training_llm.data.chat_templete")
    encoder = importlib.import_module("aiak_training_llm.data.multimodal.qwen2vl_task_encoder")
    return encoder.Qwen2VLTaskEncoder, templates, constants


def record_cases() -> list[dict[str, Any]]:
    """Records of frames: files of positions by frame, by video, of canvases, or none; rates; places in the text."""
    draw, cases = random.Random(3), []
    texts = ("{frames}\nWhat?", "{frames}What?", "Watch: {frames}\n\nWhat?", "What?{frames}", "{frames}")
    for number in range(100):
        count = draw.choice((1, 2, 3, 5, 8, 12))
        step = draw.choice((1, 3, 7, 30, 111))
        joint = "\n" if number % 4 else draw.choice(("", " ", "\n\n"))
        fps = draw.choice((1, 2, 24, 25, 30, 29.97, 60, [30], 0.5))
        cases.append(
            {
                "text": texts[number % len(texts)].format(frames=joint.join(["<image>"] * count)),
                "turns": draw.choice((1, 1, 2)),
                "blocks": [draw.choice((1, 2, 3)), draw.choice((1, 2, 3))],
                "layout": list(LAYOUTS[number % 4]),
                "times": [step * i + draw.randrange(step) for i in range(count)],
                "files": ("video", "frame", "canvas", "video", "none")[number % 5],
                "fps": None if number % 9 == 8 else 0 if number % 17 == 16 else fps,
                "timestamp_decimal": draw.choice((None, 1, 2, 2, 3)),
                "seed": number,
            }
        )
    return cases


def run_trainer(clone: Path, folder: Path) -> list[dict[str, Any]]:
    from transformers import AutoTokenizer, Qwen2VLImageProcessor

    trainer, templates, constants = load_trainer(clone)
    template = templates.ChatTemplate.from_name("qwen2-vl")
    template.default_system = ""  # the golden chat template has no system prompt
    results = []
    for case in record_cases():
        (patch, merge), (rows, columns) = case["layout"], case["blocks"]
        side = patch * merge
        path = write_tokenizer(folder / f"{patch}-{merge}", image_settings(patch, merge, 1, 10**6))
        tokenizer = AutoTokenizer.from_pretrained(str(path))
        wrapped = SimpleNamespace(
            tokenize=lambda text, add_special_tokens, t=tokenizer: t(text, add_special_tokens=False)["input_ids"],
            convert_tokens_to_ids=tokenizer.convert_tokens_to_ids,
            eos=tokenizer.convert_tokens_to_ids("<|im_end|>"),
            bos=None,
        )
        encoder = object.__new__(trainer)
        encoder.args = SimpleNamespace(
            training_phase=constants.TrainingPhase.SFT, seq_length=10**9, enable_discard_sample=True
        )
        encoder.chat_template, encoder.tokenizer = template, wrapped
        encoder.processor = SimpleNamespace(image_processor=Qwen2VLImageProcessor.from_pretrained(str(path)))
        count = len(case["times"])
        turns = [{"role": "user", "content": case["text"]}, {"role": "assistant", "content": "A word."}]
        turns += [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}] * (case["turns"] - 1)
        images = [Image.fromarray(frame(case["seed"], i, rows * side, columns * side)) for i in range(count)]
        sample = SimpleNamespace(
            **{"__key__": "k", "__restore_key__": (), "__subflavors__": {}},
            messages=turns,
            system=None,
            video=None,
            image=images,
            patch_positions=positions_of(case) or None,
            fps=case["fps"],
            timestamp_decimal=case["timestamp_decimal"],
        )
        out = encoder.encode_multi_mix_qa(sample)
        positions = torch.cat(out.patch_positions).numpy()
        results.append(
            {
                **case,
                "rendered": collapsed(tokenizer.decode(out.tokens))[:400],
                "ids": digest(out.tokens.numpy().astype(np.int64)),
                "labels": digest(out.labels.numpy().astype(np.int64)),
                "length": len(out.tokens),
                "grids": out.image_grid_thw.tolist(),
                "positions": digest(positions.astype(np.int64)),
            }
        )
    return results


def write(name: str, cases: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (HERE / name).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    importlib.import_module("tests.golden.videos.operators")  # before torchvision
    clone = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        write("llava_onevision2.json", run_processor(clone, Path(temporary)))
        write("llava_onevision2_records.json", run_trainer(clone, Path(temporary) / "records"))
