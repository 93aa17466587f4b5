"""Benchmark images at load time against the installed image processor.

    python tools/bench_images.py [--json images.json] [--images 60]

Times the processor part of a row (resize, normalization, patches, one buffer) on one thread, next to the installed
processor of each family on the same decoded pictures, and compares the pixels. Decoding, the same for both, is timed
apart. Medians of interleaved runs.
"""

import logging
import resource
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchlib import Report, arguments, image_records, seconds
from PIL import Image

from energon_packed import EncodedSample, MediaReference, PaddingFreeCollator, VisionFamily
from energon_packed.encoding import EncoderSettings, load_vision
from energon_packed.encoding.images import load_image

_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL": {"image_processor": "Qwen2_5_VLProcessor", "factor": 28},
    "Qwen3-VL": {"image_processor": "Qwen3VLProcessor", "factor": 32},
    "LLaVA-OneVision-2, 3 x 3 merged": {"image_processor": "LlavaOnevision2Processor", "factor": 48},
}
_ROW = 4  # images in one row


def vision_of(name: str) -> VisionFamily:
    """The family with its default limits."""
    vision = load_vision(EncoderSettings(**_FAMILIES[name]))
    assert vision is not None
    return vision


def installed_row(vision: VisionFamily, images: list[Image.Image], dtype: torch.dtype) -> torch.Tensor:
    """Pixels of a row by the installed processor, image by image, joined."""
    return torch.cat([vision.pixels([image])[0] for image in images]).to(dtype)


def fused_row(vision: VisionFamily, images: list[Image.Image], dtype: torch.dtype) -> torch.Tensor:
    """Pixels of a row as the loaders make them."""
    ids = np.zeros(2, dtype=np.int64)
    samples = []
    for image in images:
        patches, grids = vision.patches([image])
        samples.append(EncodedSample(input_ids=ids, labels=ids, pixel_values=patches, image_grid_thw=grids))
    pixels = PaddingFreeCollator(pixel_dtype=dtype).collate(samples).pixel_values
    assert pixels is not None
    return pixels


def medians(rows: list[list[Image.Image]], *runs: Callable[[list[Image.Image]], object], times: int) -> list[float]:
    """Median seconds of each over all rows, interleaved row by row, after one warm-up."""
    for run in runs:
        run(rows[0])
    rounds = []
    for _ in range(times):
        spent = [[seconds(lambda run=run, row=row: run(row)) for run in runs] for row in rows]  # type: ignore[misc]
        rounds.append([sum(column) for column in zip(*spent, strict=True)])
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def bench_family(report: Report, name: str, rows: list[list[Image.Image]], times: int) -> None:
    """Speed and pixels of one family in both dtypes."""
    vision, count = vision_of(name), sum(map(len, rows))
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        installed, ours = medians(
            rows,
            lambda row, d=dtype: installed_row(vision, row, d),  # type: ignore[misc]
            lambda row, d=dtype: fused_row(vision, row, d),  # type: ignore[misc]
            times=times,
        )
        report.add(
            f"{name}, {kind}: processor part, speedup over the installed processor",
            installed / ours,
            "x",
            ">= 2",
            milliseconds=1e3 * ours / count,
            installed_milliseconds=1e3 * installed / count,
        )
    differ = max(
        float((installed_row(vision, row, torch.float32) - fused_row(vision, row, torch.float32)).abs().max())
        for row in rows
    )
    report.add(f"{name}: largest difference of pixel values", differ, "", "<= 1e-6")


def bench_parts(report: Report, files: list[Path], images: list[Image.Image], times: int) -> None:
    """What a picture costs before and within the processor part."""
    decode = statistics.median(
        seconds(lambda: [load_image(MediaReference(path=file)) for file in files]) for _ in range(times)
    )
    report.add("decoding, the same for both", 1e3 * decode / len(files), "ms per picture")
    vision = vision_of("Qwen2.5-VL")
    sizes = [(int(w) * 14, int(h) * 14) for image in images for _, h, w in vision.patches([image])[1]]

    def resize() -> None:
        for image, size in zip(images, sizes, strict=True):
            image.resize(size, Image.Resampling.BICUBIC)

    alone = statistics.median(seconds(resize) for _ in range(times))
    report.add("Pillow's resize alone, Qwen2.5-VL", 1e3 * alone / len(images), "ms per picture")


def bench_memory(report: Report, row_pixels: int) -> None:
    """Peak memory of one row of pixels over its buffer, each in its own process."""
    peaks = {}
    for name in ("fused_row", "installed_row"):
        done = subprocess.run(
            [sys.executable, __file__, "--memory", name, "--row-pixels", str(row_pixels)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        peaks[name] = float(done.stdout.split()[-1])
    what = f"row of {row_pixels / 1e6:g} million pixels, float32: peak memory relative to its pixel_values"
    report.add(what, peaks["fused_row"], "x", "<= 1.5")
    report.add(f"{what}, installed processor", peaks["installed_row"], "x")


def peak_of_row(name: str, row_pixels: int) -> float:
    """Peak growth of this process while it makes a row of 8 pictures, relative to the row's `pixel_values`."""
    vision = vision_of("Qwen2.5-VL")
    side = int((row_pixels / 8) ** 0.5)
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    row = {"fused_row": fused_row, "installed_row": installed_row}[name]
    row(vision, [Image.fromarray(noise[:56, :56])], torch.float32)
    images = [Image.fromarray(noise) for _ in range(8)]
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    pixels = row(vision, images, torch.float32)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / pixels.nbytes


def main() -> None:
    """Run the benchmarks and print the results."""
    parser = arguments(__doc__, "images")
    parser.add_argument("--images", type=int, default=60, help="pictures of 300 to 900 pixels per side")
    parser.add_argument("--runs", type=int, default=3, help="runs of which the median counts")
    parser.add_argument(
        "--row-pixels", type=int, default=32_000_000, help="pixels of the row whose memory is measured"
    )
    parser.add_argument("--memory", help="print the peak memory of one way, and nothing else")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if options.memory:
        print(peak_of_row(options.memory, options.row_pixels))
        return
    records = image_records(options.work / f"images-{options.images}", options.images)
    files = [Path(record["images"][0]) for record in records]
    images = [load_image(MediaReference(path=file)) for file in files]
    rows = [images[start : start + _ROW] for start in range(0, len(images), _ROW)]
    report = Report("images", options.json)
    bench_parts(report, files, images, options.runs)
    for name in _FAMILIES:
        bench_family(report, name, rows, options.runs)
    bench_memory(report, options.row_pixels)
    report.finish()


if __name__ == "__main__":
    main()
