"""Command `energon-packed demo`: a generated dataset, its packs, and one epoch of batches, into one folder."""

import shlex
import time
from pathlib import Path

import click
from rich.console import Console

from energon_packed.cli.commands.pack import show_run
from energon_packed.cli.output import Output
from energon_packed.cli.terminal import SafeConsole
from energon_packed.demo import write_dataset, write_speech, write_tokenizer
from energon_packed.errors import ConfigError
from energon_packed.libraries import NO_ENERGON, has_energon
from energon_packed.options import make, refuse_remote
from energon_packed.pipeline import PackOptions

_MAX_REJECT_RATE = 0.5  # some generated records are invalid on purpose
_INVALID = {False: 6, True: 8}  # invalid records, by whether there are videos: one of each kind
_SHOWN_BATCHES = 3
_SHOWN = ("input_ids", "position_ids", "cu_seqlens", "pixel_values", "image_grid_thw", "pixel_values_videos",
          "video_grid_thw", "second_per_grid_ts", "input_features")  # fmt: skip


@click.command()
@click.option("--output-dir", "-o", type=click.Path(path_type=Path, file_okay=False), default="demo-out",
              show_default=True, help="Folder for everything that the demo creates.")  # fmt: skip
@click.option("--records", type=click.IntRange(min=20), default=400, show_default=True, help="Records to generate.")
@click.option("--seq-len", type=click.IntRange(min=1), default=2048, show_default=True, help="Tokens in one row.")
@click.option("--videos", is_flag=True, help="Also generate videos; needs pip install 'energon-packed[video]'.")
@click.option("--audio", is_flag=True, help="Generate speech-like audio with transcripts in place of images, for "
              "Qwen2-Audio; needs pip install 'energon-packed[video]'.")  # fmt: skip
def command(output_dir: Path, records: int, seq_len: int, videos: bool, audio: bool) -> None:
    """Generate a small dataset and a tokenizer, pack it, and load one epoch of padding-free batches.

    Works without a network: media and conversations are generated, and the tokenizer is trained on them.
    """
    output = Output()
    console = SafeConsole(highlight=False, markup=False)
    refuse_remote(output_dir, "output_dir")
    source = output_dir / "source"
    # The demo packs with `overwrite`, which must not replace a dataset of the user.
    if not source.exists() and any((output_dir / "webdataset").glob("*.tar")):
        raise ConfigError(f"{output_dir} contains a dataset that the demo did not write. Pass another `output_dir`.")
    if audio and videos:
        raise ConfigError("`audio` must not be set with `videos`: Qwen2-Audio has no images. Pass one of them.")
    media = "Speaking audio" if audio else "Drawing images and videos" if videos else "Drawing images"
    console.print(f"{media} and writing {records} conversations to {source} ...", soft_wrap=True)
    if audio:
        data = write_speech(source, records=records, broken=_INVALID[False])
    else:
        data = write_dataset(source, records=records, broken=_INVALID[videos], videos=videos)
    tokenizer = write_tokenizer(source / "tokenizer", data.texts, videos=videos, audio=audio)
    arguments = ["pack", data.jsonl, "-o", output_dir, "--seq-len", seq_len, "--tokenizer", tokenizer]
    arguments += ["--max-reject-rate", _MAX_REJECT_RATE]
    console.print(f"\n$ energon-packed {shlex.join(map(str, arguments))}\n", soft_wrap=True)
    settings = {"tokenizer": tokenizer, "seq_len": seq_len, "max_reject_rate": _MAX_REJECT_RATE, "overwrite": True}
    with output.logs():
        show_run(
            make(PackOptions, {"inputs": (str(data.jsonl),), "output_dir": output_dir, **settings}), output=output
        )
    if has_energon():
        _load(console, output_dir, tokenizer)
    else:
        console.print(
            f"\nThe batches are not shown: {NO_ENERGON}. Run pip install 'energon-packed[train]'.", soft_wrap=True
        )
    console.print("\nNext steps:")
    console.print(f"  energon-packed inspect {shlex.quote(str(output_dir))}", soft_wrap=True)
    console.print("  energon-packed pack YOUR.jsonl -o out --seq-len 4096 --tokenizer DIR", soft_wrap=True)


def _load(console: Console, output_dir: Path, tokenizer: Path) -> None:
    """Load one epoch with Energon, and print the shapes of the first batches."""
    from energon_packed.encoding import ChatEncoder
    from energon_packed.loading.energon.packed_loader import get_packed_loader

    console.print("\nLoading one epoch through Energon, two packs a batch ...")
    start = time.perf_counter()
    # No workers: starting them would be slower than loading the demo.
    loader = get_packed_loader(
        output_dir, ChatEncoder.from_pretrained(tokenizer), micro_batch_size=2, num_workers=0, epochs=1
    )
    batches = samples = tokens = supervised = 0
    for batch in loader:
        if batches < _SHOWN_BATCHES:
            shapes = {name: tuple(value.shape) for name in _SHOWN if (value := getattr(batch, name)) is not None}
            console.print(f"  batch {batches}: {batch.num_samples} samples, " +
                          ", ".join(f"{name} {shape}" for name, shape in shapes.items()), soft_wrap=True)  # fmt: skip
        batches += 1
        samples += batch.num_samples
        tokens += batch.num_tokens
        supervised += int(batch.loss_mask.sum())
    seconds = time.perf_counter() - start
    console.print(
        f"  {batches} batches, {samples} samples, {tokens:,} tokens ({supervised:,} supervised), "
        f"no padding, {seconds:.1f} s"
    )
