"""Try every vision-language model type of Transformers: `python tools/family_table.py [TYPE ...] [--check]`.

For each type, a processor of its default configuration and a tiny random model of its class are made (tiny_families),
and a model folder of both is loaded by `ChatEncoder`, as a user's is. The oracle is the other side: the processor
called with text and images, and the model called with what the processor returns, one sample at a time.

    ids and tensors   `encode` of conversations with 0 to 3 images of all shapes  =  the processor
    lengths           `measure`, without pixels                                   =  the processor
    logits, loss,     one packed row of four samples                              =  four calls of the model
    gradients
    control           the same row without its boundaries                         ≠  four calls of the model

Results, with the reason of all but the first:

    packed      everything is equal
    one sample  equal in rows of one sample with images; rows of several are refused
    kernel      the model needs a kernel that runs on a GPU only for rows of several samples; else equal, and with a
                loop over the samples in its place (kernel_loops) for such rows too
    refused     the encoder or the batch refuses the family by name
    wrong       something differs, without a message
    not tested  there is no processor, no conversation, or no tiny model of this type

The same is tried with videos, whose frames the processor selects (`video`). A family whose videos differ is refused by
its result; `none`: the frames of a video are images.

And with audio (`audio`): clips around the edges of frames and of windows of 30 s, alone and, if rows with images are
right, beside images. `none`: the model has no audio.

They are written to energon_packed/encoding/vision/vision_families.json and to the table in docs/vision-families.md.
With types, only their rows change. --check compares with the file, and writes nothing. torchvision's operators, which
processors do not call, are declared if it has no build for this machine.
"""

import argparse
import io
import json
import logging
import re
import sys
import warnings
import wave
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torchvision_operators  # noqa: E402, F401, I001  before Transformers

import kernel_loops  # noqa: E402  before the modules of models
import tiny_families  # noqa: E402
import transformers  # noqa: E402
from bounded import bounded, line  # noqa: E402
from PIL import Image  # noqa: E402

from energon_packed import ChatEncoder, Conversation, MediaReference, Message, PaddingFreeCollator  # noqa: E402
from energon_packed.demo import write_tokenizer  # noqa: E402
from energon_packed.demo.videos import write_video  # noqa: E402
from energon_packed.encoding.audio.settings import audio_problem  # noqa: E402
from energon_packed.errors import EnergonPackedError, IsolationError, Reject  # noqa: E402
from energon_packed.records import AudioReference, VideoReference  # noqa: E402

DATA = ROOT / "energon_packed" / "encoding" / "vision" / "vision_families.json"
SECONDS, GIGABYTES = 240, 14  # of one type: processor time, memory
# Relative to the largest logit, or gradient of a parameter: float32 sums in another order differ by less.
TOLERANCE = 2e-5
_SIDES = (20, 33, 56, 90, 140, 250, 401)
_CLIPS = ((24, 8, 112, 160), (30, 10, 90, 120), (16, 8, 140, 84))  # frames, frames per second, height, width
_ROW: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = (
    ("<image>What is a house?", ((90, 140),)),
    ("What is this?", ()),
    ("A house <image> is <image> a drawing.", ((140, 60), (56, 56))),
    ("Is it? <image>", ((120, 120),)),
)
# Samples of clips at 16 kHz: frames, windows of 30 s, and clips that may be longer than the model reads.
_SAMPLES = (16_000, 8_001, 24_321, 480_000, 480_001, 1600, 12_345, 720_000)
_AUDIO_ROW: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = (
    ("<audio>What is a house?", ((16_000,),)),
    ("What is this?", ()),
    ("A house <audio> is <audio> a drawing.", ((24_321,), (9_999,))),
    ("Is it? <audio>", ((8_000,),)),
    ("A house is <audio>a drawing.", ((41_000,),)),
)
# With images, if rows of several samples with images are right.
_BOTH_ROW = (("<image>What is <audio>?", ((90, 140), (12_000,))), ("Is it <image>?", ((56, 56),)))
_VIDEO_ROW = (
    ("<video>What is a house?", _CLIPS[:1]),
    ("What is this?", ()),
    ("A house <image> is a drawing.", ((140, 60),)),
    ("Is it? <video>", _CLIPS[1:2]),
)


class Family:
    """A model type: its folder, encoder and processor."""

    def __init__(self, model_type: str, folder: Path, text_tokenizer: Path) -> None:
        self.model_type = model_type
        path = tiny_families.write_folder(folder / model_type, model_type, text_tokenizer)
        self.processor = transformers.AutoProcessor.from_pretrained(path)
        self.encoder = ChatEncoder.from_pretrained(path)

    def expected(
        self,
        question: str,
        images: list[Image.Image],
        videos: list[tiny_families.Video] | None = None,
        clips: list[Any] | None = None,
    ) -> dict[str, Any]:
        """What the processor returns for the conversation of `talk`."""
        vision, audio = self.encoder.vision, self.encoder.audio
        if vision is not None:
            image = tiny_families.image_text(self.model_type, self.processor) or vision.template_token
            question = question.replace("<image>", image).replace("<video>", vision.video_placeholder)
        if audio is not None:
            question = question.replace("<audio>", audio.placeholder)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "It is."}]
        text = self.encoder.renderer.template.render(turns)
        floats = [clip / np.float32(1 << 15) for clip in clips or ()]
        return tiny_families.model_inputs(self.model_type, self.processor, text, images, videos, floats)

    def compare(self, conversations: int) -> int:
        """Compare ids, tensors and lengths of random conversations with the processor; return how many it accepts.

        Raises:
            ValueError: something differs.
        """
        rng = np.random.default_rng(0)
        accepted = 0
        for seed in range(conversations):
            count = seed % 4
            words = rng.choice(["What is it?", "\n", " a house ", "It is a drawing. "], count + 1).tolist()
            question = "<image>".join(words) if seed % 3 else "<image>" * count + "What?"
            images = [_noise(*rng.choice(_SIDES, 2).tolist(), seed=seed) for _ in range(count)]
            try:
                theirs = self.expected(question, images)
            except (ValueError, ZeroDivisionError):  # an image or text that the processor rejects
                continue
            accepted += self.equals(talk(question, images), theirs)
        return accepted

    def compare_videos(self, folder: Path) -> int:
        """`compare` for conversations with videos, and images."""
        accepted = 0
        for question in ("<video>What is it?", "A <video>\n<video> b", "<image> a <video>", "It is <video><image>."):
            for first in range(len(_CLIPS)):
                count = question.count("<video>")
                videos = [video(folder, *clip) for clip in (_CLIPS * 2)[first : first + count]]
                images = [_noise(90, 140, seed=first)] * question.count("<image>")
                try:
                    theirs = self.expected(question, images, [_frames(path) for path in videos])
                except (ValueError, RuntimeError):  # videos of different lengths, or more than one
                    continue
                accepted += self.equals(talk(question, images, videos), theirs, has_shapes=len(videos + images) > 1)
        return accepted

    def compare_audio(self, conversations: int) -> int:
        """`compare` for conversations with 0 to 3 clips, and for the shortest clips."""
        rng = np.random.default_rng(0)
        accepted = 0
        samples = iter(_SAMPLES * conversations)
        for seed in range(conversations):
            count = (1, 0, 1, 2, 1, 3)[seed % 6]
            words = rng.choice(["What is it?", "\n", " a house ", "It is a drawing. "], count + 1).tolist()
            question = "<audio>".join(words) if seed % 3 else "<audio>" * count + "What?"
            clips = [self.clip(next(samples), seed) for _ in range(count)]
            try:
                theirs = self.expected(question, [], clips=clips)
            except (ValueError, TypeError):  # several clips, or none, that the processor rejects
                accepted += 1
                continue
            accepted += self.equals(self.talk(question, clips), theirs)
        for count in (1, 159, 160, 161, 320, 399, 400, 401, 479, 480, 640, 641, 800, 1119, 1120, 1121, 1280):
            clip = self.clip(count, 0)
            try:
                theirs = self.expected("<audio>What?", [], clips=[clip])
            except (ValueError, RuntimeError, IndexError, AssertionError):
                theirs = {"input_ids": torch.zeros((1, 0))}
            is_long = count >= self.encoder.audio.shortest
            has_tokens = is_long and self.encoder.rules.audio_token_id in theirs["input_ids"]
            if self.equals(self.talk("<audio>What?", [clip]), theirs) != has_tokens:
                raise ValueError(f"{count} samples have tokens of the processor, or of the encoder alone")
        return accepted

    def clip(self, samples: int, seed: int) -> Any:
        """Noise of a number of samples at 16 kHz, int16 at the rate of the processor."""
        count = -(-samples * self.encoder.audio.rate // 16_000)
        return np.random.default_rng(seed).integers(-(1 << 14), 1 << 14, count, dtype=np.int16)

    def talk(self, question: str, clips: list[Any], images: list[Image.Image] | None = None) -> Conversation:
        """Return a conversation with clips as WAV files."""
        files = []
        for clip in clips:
            stream = io.BytesIO()
            with wave.open(stream, "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(self.encoder.audio.rate)
                file.writeframes(clip.tobytes())
            files.append(AudioReference(file=MediaReference(data=stream.getvalue())))
        return talk(question, images or [], audios=files)

    def equals(self, record: Conversation, theirs: dict[str, Any], *, has_shapes: bool = False) -> int:
        """Compare a conversation with the output of the processor; return 1, or 0 if it is rejected.

        Raises:
            ValueError: something differs; `has_shapes` permits other shapes with the same values.
        """
        [ours] = self.encoder.encode_many([record])
        [measured] = self.encoder.measure([record])
        if isinstance(ours, Reject):
            if measured.reject != ours:
                raise ValueError(f"`encode` rejects {record.id!r} with {ours}, `measure` with {measured.reject}")
            return 0
        if ours.input_ids.tolist() != theirs["input_ids"][0].tolist():
            raise ValueError(f"tokens of {record.id!r} differ")
        if measured.length != len(ours):
            raise ValueError(f"{measured.length} tokens are measured, {len(ours)} are encoded")
        inputs = PaddingFreeCollator(dummy_images="never").collate([ours]).transformers_inputs()
        if inputs["input_ids"][0].tolist() != ours.input_ids.tolist():  # images are passed to the model as videos
            return 1
        for name, value in theirs.items():
            if name not in inputs or name in ("attention_mask", "position_ids"):
                continue
            own, value = torch.as_tensor(inputs[name]), torch.as_tensor(value)
            if has_shapes and own.numel() == value.numel():
                own = own.reshape(value.shape)
            if not _equal(own, value):
                raise ValueError(f"{name} of {record.id!r} differs")
        return 1

    def trial(
        self, attention: str = "sdpa", row_of_media: tuple[Any, ...] = _ROW, folder: Path | None = None
    ) -> dict[str, str]:
        """Compare a packed row with separate calls of the model."""
        model = tiny_families.build_model(self.model_type, self.processor, attention)
        samples, alone = [], []
        for index, (question, shapes) in enumerate(row_of_media):
            images = [_noise(*shape, seed=index) for shape in shapes if len(shape) == 2]
            videos = [video(folder, *shape) for shape in shapes if len(shape) > 2 and folder is not None]
            least = 0 if self.encoder.audio is None else self.encoder.audio.shortest
            clips = [self.clip(max(shape[0], least), index) for shape in shapes if len(shape) == 1]
            try:
                alone.append(self.expected(question, images, [_frames(path) for path in videos], clips))
            except (ValueError, TypeError):  # some processors have no text without images or audio, or with two clips
                continue
            record = self.talk(question, clips, images) if clips else talk(question, images, videos)
            samples.append(self.encoder.encode(record))
        labels = [torch.from_numpy(sample.labels)[None] for sample in samples]
        separate = [_run(model, inputs, of) for inputs, of in zip(alone, labels, strict=True)]
        collator = PaddingFreeCollator(dummy_images="never")
        for sample, expected in zip(samples, separate, strict=True):
            row = collator.collate([sample])
            if (problem := _difference(_run(model, row.transformers_inputs(), row.labels), [expected])) is not None:
                return {"result": "wrong", "reason": f"a row of one sample: {problem}"}
        row = collator.collate(samples)
        # Tried whatever the last results say.
        row.needs = None if row.needs is None else replace(row.needs, one_sample=False, one_audio=False)
        inputs = row.transformers_inputs()
        try:
            problem = _difference(_run(model, inputs, row.labels), separate)
        except IsolationError as error:
            return {"result": "refused", "reason": str(error)}
        except Exception as error:
            if "packed sequences apart without" in str(error):
                raise
            return {"result": "one sample", "reason": f"the model refuses a row of several samples: {line(error)}"}
        if problem is not None:
            return {"result": "one sample", "reason": problem}
        positions = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["position_ids"])
        bounds = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
        plain = {name: value for name, value in inputs.items() if name not in bounds} | {"position_ids": positions}
        if _difference(_run(model, plain, row.labels), separate) is None:
            return {"result": "not tested", "reason": "the samples of the tiny model do not influence each other"}
        return {"result": "packed", "reason": ""}


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether tensors are equal; (images, tiles, ...) of the processor may be (1, images * tiles, ...) in a row."""
    if ours.shape != theirs.shape and len(ours) == 1 and ours.ndim == theirs.ndim:
        theirs = theirs.flatten(0, 1)[None]
    return torch.equal(ours, theirs)


def talk(
    question: str,
    images: list[Image.Image],
    videos: list[Path] | None = None,
    audios: list[AudioReference] | None = None,
) -> Conversation:
    """Return a conversation with images as PNG files, videos and audio files."""
    files = []
    for image in images:
        stream = io.BytesIO()
        image.save(stream, "PNG")
        files.append(MediaReference(data=stream.getvalue()))
    return Conversation(
        id=question,
        messages=[Message("user", question), Message("assistant", "It is.")],
        images=files,
        videos=[VideoReference(file=MediaReference(data=path.read_bytes())) for path in videos or ()],
        audios=audios or [],
    )


def video(folder: Path, frames: int, fps: int, height: int, width: int) -> Path:
    """Write a video whose frames differ."""
    path = folder / f"{frames}-{fps}-{height}-{width}.mp4"
    if not path.exists():
        write_video(path, [np.array(_noise(height, width, seed=index)) for index in range(frames)], fps=fps)
    return path


def _frames(path: Path) -> tiny_families.Video:
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return np.stack(frames), float(container.streams.video[0].average_rate)


def _noise(height: int, width: int, seed: int) -> Image.Image:
    return tiny_families.picture(height, width, seed)


def _run(model: Any, inputs: dict[str, Any], labels: torch.Tensor) -> tuple[torch.Tensor, float, dict[str, Any]]:
    """Logits (T, vocabulary), loss summed over the targets, and its gradients by parameter."""
    tensors = {name: value for name, value in inputs.items() if name != "labels"}
    floats = {n for n, value in tensors.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    inputs = {name: value.float() if name in floats else value for name, value in tensors.items()}
    model.zero_grad()
    logits = model(**{"use_cache": False} | inputs).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits[0].detach(), float(loss.detach()), gradients


def _difference(row: Any, separate: list[Any]) -> str | None:
    """What differs between a row and separate calls; None if nothing does."""
    logits, loss, gradients = row
    expected = torch.cat([one[0] for one in separate])
    if logits.shape != expected.shape:
        return f"logits {tuple(logits.shape)}, {tuple(expected.shape)} separately"
    change = float((logits - expected).abs().max() / expected.abs().max())
    if not change <= TOLERANCE:
        return f"logits differ by {change:.0e}"
    losses = sum(one[1] for one in separate)
    if not abs(loss - losses) <= TOLERANCE * abs(losses):
        return f"loss {loss}, {losses} separately"
    names = {name for one in separate for name in one[2]} | set(gradients)
    for name in sorted(names):
        parts = [one[2][name] for one in separate if name in one[2]]
        summed = sum(parts[1:], parts[0]) if parts else torch.zeros_like(gradients[name])
        own = gradients.get(name, torch.zeros_like(summed))
        scale = float(summed.abs().max())
        if not float((own - summed).abs().max()) <= 10 * TOLERANCE * max(scale, 1e-2):
            return f"the gradient of {name} differs by {float((own - summed).abs().max()):.0e} of {scale:.0e}"
    return None


def row_of(model_type: str, conversations: int) -> dict[str, str]:
    """Try a model type."""
    name = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES.get(model_type) or ""
    row = {"model_type": model_type, "processor": name}
    if model_type in tiny_families.NOT_CHAT:
        row |= {"result": "not tested", "reason": tiny_families.NOT_CHAT[model_type], "video": "not tested"}
        return row | {"audio": audio_alone(model_type, conversations)}
    with TemporaryDirectory() as folder:
        text = write_tokenizer(Path(folder, "text"), ["What is a house? It is a drawing."], vision=False)
        try:
            family = Family(model_type, Path(folder), text)
        except EnergonPackedError as error:
            text = " ".join(str(error).replace(folder, "").split())
            found = re.search(r"needs a custom VisionFamily: (.*)\)\. Set", text) or re.search(r"\((.*)\)\. Set", text)
            row |= {"result": "refused", "reason": found[1] if found else text}
            return row | {"video": "refused: as for images", "audio": "none"}
        except Exception as error:
            return row | {"result": "not tested", "reason": line(error), "video": "not tested", "audio": "none"}
        row["processor"] = type(family.processor).__name__
        row |= _tried(family, lambda: family.compare(conversations), conversations, family.trial)
        row["video"] = video_result(family, Path(folder), row["result"])
        both = _BOTH_ROW if row["result"] in ("packed", "kernel") else ()
        return row | {"audio": audio_result(family, conversations, _AUDIO_ROW + both)}


def audio_alone(model_type: str, conversations: int) -> str:
    """Try the audio of a model type without images: as `audio_result`."""
    if model_type not in tiny_families.AUDIO:
        return "none"
    if model_type in tiny_families.STREAMING:
        return f"refused: {tiny_families.STREAMING[model_type]}"
    with TemporaryDirectory() as folder:
        text = write_tokenizer(Path(folder, "text"), ["What is a house? It is a drawing."], vision=False)
        try:
            family = Family(model_type, Path(folder), text)
        except Exception as error:
            return f"refused: {line(error).replace(folder, '')}"
        return audio_result(family, conversations, _AUDIO_ROW)


def _tried(
    family: Family, compare: Callable[[], int], conversations: int, trial: Callable[[], dict[str, str]]
) -> dict[str, str]:
    """Result and reason of a comparison with the processor and a comparison with the model."""
    try:
        if 2 * (accepted := compare()) < conversations:
            reason = f"only {accepted} of {conversations} conversations are accepted"
            return {"result": "not tested", "reason": reason}
    except ValueError as error:
        return {"result": "wrong", "reason": line(error)}
    try:
        return trial()
    except Exception as error:
        if "packed sequences apart without" in str(error):
            kernel_loops.enable()
            found = trial()
            if found["result"] != "packed":
                return found
            return {"result": "kernel", "reason": str(error).split("without `")[1].split("`")[0]}
        return {"result": "not tested", "reason": f"the tiny model: {line(error)}"}


def video_result(family: Family, folder: Path, of_images: str) -> str:
    """Try videos: the result, `refused: REASON`, or `none` if the family has the frames of a video as images."""
    vision = family.encoder.vision
    if getattr(vision, "takes_clips", False):
        vision.video_problem = ""  # tried whatever the last result says
    if vision.video_problem:
        return f"refused: {vision.video_problem.split('not supported, ')[1].split('. Pass the frames')[0]}"
    if vision.video_token is None:
        return "none"
    found = _tried(
        family,
        lambda: family.compare_videos(folder),
        2 * len(_CLIPS),
        lambda: family.trial("sdpa", _VIDEO_ROW, folder),
    )
    if found["result"] in ("packed", of_images):
        return of_images  # rows of several samples are refused for videos as they are for images
    return f"refused: {'its model is not tested' if found['result'] == 'not tested' else found['reason']}"


def audio_result(family: Family, conversations: int, row: tuple[Any, ...]) -> str:
    """Try audio: the result, `refused: REASON`, or `none` for a family without audio."""
    audio = family.encoder.audio
    if audio is None:
        problem = audio_problem(family.encoder.settings)
        return f"refused: {problem.split('not supported: ')[-1]}" if problem else "none"
    audio.problem = ""  # tried whatever the last result says
    found = _tried(
        family, lambda: family.compare_audio(conversations), conversations, lambda: family.trial("sdpa", row)
    )
    if found["result"] in ("packed", "one sample", "kernel"):
        return found["result"]
    return f"refused: {'its model is not tested' if found['result'] == 'not tested' else found['reason']}"


def main() -> None:
    """Try the families, print the results, and write or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", metavar="TYPE")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=12, help="of each type, compared with the processor")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    chosen = options.model_types or tiny_families.types()

    def run(model_type: str) -> dict[str, str]:
        row = bounded(row_of, (model_type, options.conversations), seconds=SECONDS, gigabytes=GIGABYTES)
        if isinstance(row, str):
            row = {
                "model_type": model_type,
                "processor": "",
                "result": "not tested",
                "reason": row,
                "video": "not tested",
                "audio": "none",
            }
        print(json.dumps(row), flush=True)
        return row

    with ThreadPoolExecutor(options.processes) as pool:
        rows = list(pool.map(run, chosen))
    before = {row["model_type"]: row for row in json.loads(DATA.read_text(encoding="utf-8"))["families"]}
    print(", ".join(f"{result} {count}" for result, count in Counter(row["result"] for row in rows).most_common()))
    if options.check:
        columns = ("result", "video", "audio")
        results = {name: [row.get(column) for column in columns] for name, row in before.items()}
        changed = [
            row["model_type"] for row in rows if results.get(row["model_type"]) != [row[column] for column in columns]
        ]
        raise SystemExit(f"other results than in {DATA.name}: {', '.join(changed)}" if changed else 0)
    found = before | {row["model_type"]: row for row in rows}
    order = [name for name in tiny_families.types() if name in found]
    lines = ",\n".join(json.dumps(found[name], ensure_ascii=False) for name in order)
    head = f'"transformers": {json.dumps(transformers.__version__)}'
    DATA.write_text(f'{{{head}, "families": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
