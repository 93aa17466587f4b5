"""Write the golden files of videos with the processors of Transformers; README.md describes the environment.

`qwen2_vl.jsonl` and so on are of the cases of cases.py, `files.json` of real files that `make_video` writes and PyAV
decodes.

python -m tests.golden.videos.generate
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.videos import operators  # noqa: F401

# isort: split

import av
import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.video_utils import VideoMetadata

from tests.golden.videos.cases import FAMILIES, FILES, FOLDERS, MESSAGES, PATCH, Case, cases, digest
from tests.videos import decoded, make_video

HERE = Path(__file__).parent
T = transformers
CLASSES: dict[str, tuple[Any, ...]] = {
    "qwen2_vl": (T.Qwen2VLProcessor, T.Qwen2VLVideoProcessor, Qwen2VLModel, T.Qwen2VLConfig()),
    "qwen2_5_vl": (
        T.Qwen2_5_VLProcessor,
        T.Qwen2VLVideoProcessor,
        Qwen2_5_VLModel,
        T.Qwen2_5_VLConfig(vision_config={"tokens_per_second": 2}),
    ),
    "qwen3_vl": (T.Qwen3VLProcessor, T.Qwen3VLVideoProcessor, Qwen3VLModel, T.Qwen3VLConfig()),
}


def processor_of(case: Case, tokenizer: Any) -> Any:
    """The processor of a folder, with the settings of a record."""
    processor_class, video_class, _, _ = CLASSES[case.family]
    side = PATCH[case.family]
    folder, is_qwen3 = FOLDERS[case.family][case.folder], case.family == "qwen3_vl"
    if folder is None:  # a folder without a file for videos
        folder = {"cap_pixels_per_frame": True}
    settings = {"do_sample_frames": True, "cap_pixels_per_frame": False, **folder}
    if settings.get("fps") is None and settings.get("num_frames") is None:
        settings["fps"] = 2
    changes = dict(case.settings)
    if "fps" in changes:
        settings.pop("num_frames", None)
    if "num_frames" in changes:
        settings["fps"] = None
    for name in ("fps", "num_frames", "min_frames", "max_frames"):
        if name in changes:
            settings[name] = changes.pop(name)
    if settings.get("num_frames") is not None:
        settings["fps"] = None
    factor = 2 * side
    if is_qwen3 and "max_pixels" in changes:
        settings |= {"cap_pixels_per_frame": True, "max_video_tokens": changes.pop("max_pixels") // factor**2}
    if not is_qwen3:
        size = dict(settings.pop("size", video_class.size))
        size["shortest_edge"] = settings.pop("min_pixels", size["shortest_edge"])
        size["longest_edge"] = settings.pop("max_pixels", size["longest_edge"])
        # A limit of the record moves the other limit of the folder, if they contradict each other.
        low, high = changes.pop("min_pixels", None), changes.pop("max_pixels", None)
        least, most = low or size["shortest_edge"], high or size["longest_edge"]
        settings["size"] = {
            "shortest_edge": min(least, most) if low is None else low,
            "longest_edge": max(least, most) if high is None else high,
        }
        if "total_pixels" in changes:
            tokens = round(changes["total_pixels"] / factor**2 / 0.9)
            assert int(tokens * factor * factor * 0.9) == changes.pop("total_pixels")
            settings |= {"cap_pixels_per_frame": True, "max_video_tokens": tokens}
    assert not changes, changes
    images = transformers.Qwen2VLImageProcessor(patch_size=side, size={"shortest_edge": 3136, "longest_edge": 10**6})
    videos = video_class(patch_size=side, merge_size=2, temporal_patch_size=2, **settings)
    return processor_class(image_processor=images, tokenizer=tokenizer, video_processor=videos)


def expected(case: Case, tokenizer: Any) -> dict[str, Any]:
    """Output of the processor and of get_rope_index for a case, or the class of the error that it raises."""
    processor = processor_of(case, tokenizer)
    arrays = [np.stack([video.frame(index) for index in range(video.num_frames)]) for video in case.videos]
    metadata = [
        VideoMetadata(total_num_frames=video.num_frames, fps=video.fps, height=video.height, width=video.width)
        for video in case.videos
    ]
    image = None if case.image is None else [Image.new("RGB", case.image[::-1])]
    try:
        return _outputs(case.family, processor, case.text, image, arrays, metadata)
    except (ValueError, IndexError, ZeroDivisionError) as error:
        return {"error": type(error).__name__}


def expected_of_file(family: str, settings: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Output for a conversation about a real file, whose frames PyAV decodes from the start."""
    settings = dict(settings)
    with tempfile.TemporaryDirectory() as folder:
        path = make_video(Path(folder) / f"video.{settings.pop('extension')}", **settings)
        frames = [np.rot90(frame, -settings.get("rotation", 0) // 90) for _, frame in decoded(path)]
        with av.open(str(path)) as container:
            rate = float(container.streams.video[0].average_rate)
    media = "<|vision_start|><|video_pad|><|vision_end|>"
    messages = [turn | {"content": turn["content"].replace("{media}", media)} for turn in MESSAGES]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    height, width = frames[0].shape[:2]
    metadata = VideoMetadata(total_num_frames=len(frames), fps=rate, height=height, width=width)
    processor = processor_of(Case(family, 0, ()), tokenizer)
    result = _outputs(family, processor, text, None, [np.stack(frames)], [metadata])
    # Pixels depend on the release of FFmpeg.
    return {name: value for name, value in result.items() if name not in ("pixels", "values")}


def _outputs(family: str, processor: Any, text: str, images: Any, arrays: Any, metadata: Any) -> dict[str, Any]:
    out = processor(
        text=[text],
        images=images,
        videos=arrays,
        video_metadata=metadata,
        input_data_format="channels_last",
        return_metadata=True,
        return_tensors="pt",
    )
    chosen = [[int(index) for index in video.frames_indices] for video in out["video_metadata"]]
    _, _, model_class, config = CLASSES[family]
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = config
    grids = {name: out[name] for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts") if name in out}
    positions, _ = model.get_rope_index(out["input_ids"], out["mm_token_type_ids"], **grids)
    ids, pixels = out["input_ids"][0].numpy(), out["pixel_values_videos"].numpy()
    assert pixels.dtype == np.float32
    result: dict[str, Any] = {
        "indices": chosen,
        "grids": out["video_grid_thw"].tolist(),
        "tokens": len(ids),
        "ids": digest(ids.astype("<i8")),
        "positions": digest(positions[:, 0].numpy().astype("<i8")),
        "last": positions[:, 0, -1].tolist(),
        "pixels": digest(pixels.astype("<f4")),
        "values": [round(float(value), 5) for value in pixels.ravel()[:: max(1, pixels.size // 3)][:3]],
    }
    if "second_per_grid_ts" in out:
        result["seconds"] = [float(value) for value in out["second_per_grid_ts"]]
    return result


def main() -> None:
    """Write one JSON file for each family."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(HERE.parent / "tokenizer"))
    for family in FAMILIES:
        lines = [json.dumps(expected(case, tokenizer), separators=(",", ":")) for case in cases(family)]
        (HERE / f"{family}.jsonl").write_text("\n".join(lines) + "\n")
        print(family, len(lines), sum("error" in line for line in lines), file=sys.stderr)
    of_files = [[expected_of_file(family, settings, tokenizer) for family in FAMILIES] for settings in FILES]
    lines = ",\n".join(json.dumps(line, separators=(",", ":")) for line in of_files)
    (HERE / "files.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
