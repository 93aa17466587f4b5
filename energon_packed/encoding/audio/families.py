"""AudioFamily: audio preprocessing of a model by its Transformers processor: samples -> tokens and features.

    processor(text=audio token, audio)          ─►  text of each clip, tensors for the audio encoder    (encode)
    number of samples                           ─►  number of tokens                                    (measure)

The class has no knowledge of single families. When a family is loaded, noise and silence are processed to find:

    the text of a clip in the output     as the processor returns it; plain text at its ends is of the conversation
    the number of its tokens             by a formula of `RULES` or of the processor, compared at the edges of frames
    the longest clip                     30 s if a longer clip has the tensors of its first 30 s; else by `RULES`
    how the tensors of clips join        the dimension; a mask that is returned for several clips alone is all true

A processor without a formula processes silence in place of it. `RULES` has what a processor does not report.
"""

import json
import logging
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_packed.encoding.audio.audio_file import Samples
from energon_packed.encoding.vision.positions import ImageRun, Int64, ModelNeeds, VisionInputs
from energon_packed.encoding.vision.processors import OF_TEXT, OF_TYPES, trials
from energon_packed.errors import ConfigError, Reason, RecordError
from energon_packed.libraries import installed

_WINDOW = 30
"""Seconds of a clip, after which the feature extractors of Whisper and its successors drop all samples."""
_CHECKED = 60
"""Seconds of the longest clip that is processed to compare a formula; the processor needs seconds for more."""
# Errors of a processor for a clip that is shorter than its first frame.
_TOO_SHORT = (ValueError, RuntimeError, LookupError, TypeError, AssertionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioRules:
    """Properties that the processor of a family does not report.

    Attributes:
        tokens: (processor, samples) -> number of audio tokens of a clip; None to ask the processor by its function
            `_get_num_multimodal_tokens`, or to process silence.
        limit: (processor) -> samples that a clip has at most: the processor drops all samples after them. None for the
            limit that is found.
        before, after: attributes of the processor with the tokens around the audio tokens in text without parts, if
            the chat template writes them, and not the processor.
        pads_to_longest: the processor pads the clips of a sample to the longest of them; the frames of a clip that is
            not a multiple of a frame depend on it.
        shortest: (processor) -> samples that the longest clip of a sample must have: the encoder pads shorter clips
            to the other clips of a row, and convolves the padding.
        call: (processor, clips) -> (tensors, text of each clip), for a processor without a call for text with audio.
        is_cut: the model reads only the frames of `feature_attention_mask`, so that frames after the longest clip of a
            sample are cut.
        has_tracks: the processor writes the tokens of the audio track of a video among the tokens of the video.
    """

    tokens: Callable[[Any, int], int] | None = None
    limit: Callable[[Any], int] | None = None
    before: str = ""
    after: str = ""
    pads_to_longest: bool = False
    shortest: Callable[[Any], int] | None = None
    call: Callable[[Any, Sequence[Samples]], tuple[dict[str, Any], list[str]]] | None = None
    is_cut: bool = False
    has_tracks: bool = False


def _whisper_frames(processor: Any, samples: int) -> int:
    """Frames of Whisper's feature extractor that have samples: the processors count them in the attention mask."""
    return int(-(-samples // processor.feature_extractor.hop_length))


def _of_frames(processor: Any, frames: int) -> int:
    """Tokens of the frames of a clip, by the processor's own function."""
    import torch

    return int(processor._get_audio_token_length(torch.tensor([frames]))[0])


def _granite_tokens(processor: Any, samples: int) -> int:
    """Tokens of GraniteSpeechProcessor, whose frames are centered: shorter clips cannot be padded by reflection."""
    extractor = processor.audio_processor
    is_short = samples <= extractor.melspec_kwargs["n_fft"] // 2
    return 0 if is_short else int(extractor._get_num_audio_features([samples])[0])


def _phi4_tokens(processor: Any, samples: int) -> int:
    import torch

    extractor = processor.audio_processor
    frames = (samples - extractor.win_length) // extractor.hop_length + 1
    return int(extractor._compute_audio_embed_size(torch.tensor([frames * extractor.audio_feat_stride]))[0])


def _windows(processor: Any) -> int:
    """Samples of the whole windows in the longest clip."""
    extractor = processor.feature_extractor
    return int(processor.max_audio_len // extractor.chunk_length * extractor.chunk_length * extractor.sampling_rate)


def _voxtral_tokens(processor: Any, samples: int) -> int:
    """Tokens of whole windows; four positions of the encoder are a token, which have two frames each."""
    extractor = processor.feature_extractor
    return int(-(-samples // extractor.n_samples) * extractor.nb_max_frames // 8)


def _call_voxtral(processor: Any, clips: Sequence[Samples]) -> tuple[dict[str, Any], list[str]]:
    """Features and text of VoxtralProcessor, whose `apply_chat_template` alone takes audio, with mistral-common."""
    extractor = processor.feature_extractor
    options = {"sampling_rate": extractor.sampling_rate, "pad_to_multiple_of": extractor.n_samples}
    options |= {"padding": True, "truncation": False, "return_tensors": "pt"}
    features = processor._retrieve_input_features(clips, extractor.nb_max_frames, **options)
    texts = ["[BEGIN_AUDIO]" + processor.audio_token * _voxtral_tokens(processor, len(clip)) for clip in clips]
    return {"input_features": features}, texts


_IN_WINDOWS = AudioRules(
    tokens=lambda processor, samples: _of_frames(processor, _whisper_frames(processor, samples)), limit=_windows
)
RULES: dict[str, AudioRules] = {
    # A convolution with stride 2, then a pooling of two: `_get_feat_extract_output_lengths` of Qwen2AudioEncoder.
    "Qwen2AudioProcessor": AudioRules(
        tokens=lambda processor, samples: ((_whisper_frames(processor, samples) - 1) // 2 - 1) // 2 + 1,
        limit=lambda processor: int(processor.feature_extractor.n_samples),
        before="audio_bos_token",
        after="audio_eos_token",
    ),
    "AudioFlamingo3Processor": _IN_WINDOWS,
    "GlmAsrProcessor": _IN_WINDOWS,
    "GraniteSpeechProcessor": AudioRules(tokens=_granite_tokens),
    "MossTranscribeDiarizeProcessor": AudioRules(before="audio_bos_token", after="audio_eos_token"),
    "MusicFlamingoProcessor": _IN_WINDOWS,
    "Phi4MultimodalProcessor": AudioRules(tokens=_phi4_tokens),
    "Qwen2_5OmniProcessor": AudioRules(
        limit=lambda processor: int(processor.feature_extractor.n_samples),
        before="audio_bos_token",
        after="audio_eos_token",
        is_cut=True,  # 15 MB for each file
        has_tracks=True,
    ),
    "Qwen3OmniMoeProcessor": AudioRules(
        before="audio_bos_token",
        after="audio_eos_token",
        pads_to_longest=True,
        shortest=lambda processor: int(100 * processor.feature_extractor.hop_length),  # a whole chunk of the encoder
        has_tracks=True,
    ),
    "VoxtralProcessor": AudioRules(tokens=_voxtral_tokens, call=_call_voxtral),
    "Qwen3ASRProcessor": AudioRules(
        tokens=lambda processor, samples: _of_frames(
            processor,
            # Shorter clips are padded, and counted as padded.
            max(samples, processor.feature_extractor.min_length) // processor.feature_extractor.hop_length,
        ),
        before="audio_bos_token",
        after="audio_eos_token",
    ),
}
"""Rules by the class of a processor, for those that need any."""


class AudioFamily:
    """Audio preprocessing of a model.

    Attributes:
        processor: the Transformers processor.
        rules: its rules.
        rate: samples per second that it needs.
        token: token whose run represents an audio file.
        placeholder: text of an audio file in text without content parts, with a single `token`.
        limit: samples of the longest clip; None without a limit.
        shortest: samples that the longest clip of a sample has at least; 0 without a limit.
        truncates: use the first `limit` samples of a longer clip, as the processor does; False rejects it.
        uses_tracks: use the audio tracks of videos.
        dims: dimension along which the tensors of several clips are joined, by argument of the model.
        edges: plain text before and after the tokens of a clip, which is part of the text of the conversation.
        token_type: type of the audio tokens in models with types of tokens.
        needs: what the model needs of a row with audio.
        problem: why the model cannot be trained with audio, as the trial with tiny models found; or "".
        warnings: what a user must know of this family.
    """

    def __init__(
        self,
        processor: Any,
        rules: AudioRules | None = None,
        *,
        truncates: bool = False,
        uses_tracks: bool = False,
        model_type: str = "",
    ) -> None:
        """Find text, tokens and joining rules of a processor with a few clips, and compare its rules.

        Args:
            processor: the Transformers processor.
            rules: its rules; None for the entry of `RULES`.
            truncates, uses_tracks: as the attributes.
            model_type: of config.json; "" if it is unknown.

        Raises:
            ConfigError: the processor has a behavior that this class does not support, or differs from the rules; the
                message names it.
        """
        self.processor, self.truncates, self.uses_tracks = processor, truncates, uses_tracks
        self.extractor: Any
        self.rules = rules or RULES.get(self.name, AudioRules())
        parts = (getattr(processor, name, None) for name in ("audio_processor", "feature_extractor"))
        self.extractor = next((part for part in parts if part is not None), None)
        if self.extractor is None or not getattr(processor, "audio_token", None):
            raise self._unsupported("its text has no audio token")
        if not getattr(processor.tokenizer, "is_fast", False):  # as of mistral-common
            raise self._unsupported("its folder has no tokenizer.json")
        if duration := getattr(processor, "audio_duration_token", None):
            raise self._unsupported(f"it writes the seconds of each clip in place of {duration}, and adds noise")
        self.rate = int(self.extractor.sampling_rate)
        self._hop = int(getattr(self.extractor, "hop_length", None) or self.rate // 100)
        self.token = str(processor.audio_token)
        added = [str(token) for token in processor.tokenizer.get_added_vocab()]
        self._special = re.compile("|".join(map(re.escape, sorted({*added, self.token}, key=len, reverse=True))))
        edges = [getattr(processor, name) if name else "" for name in (self.rules.before, self.rules.after)]
        self.placeholder = f"{edges[0]}{self.token}{edges[1]}"
        self.shortest = 0 if self.rules.shortest is None else self.rules.shortest(processor)
        self._known: list[tuple[int, int]] = []
        self.edges, self._all_features, self.token_type = ("", ""), True, 0
        try:
            self._is_alone = self._takes_one_clip()
            self.dims, self._masks, is_joined = self._joins()
            self.limit = self._found_limit() if self.rules.limit is None else self.rules.limit(processor)
            self._constant = self._check_tokens()
            self._check_padding()
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise self._unsupported(" ".join(str(error).split())[:200]) from error
        self.needs: ModelNeeds | None = None
        self.problem, self.warnings = "", tuple[str, ...]()
        self._judge(_trial(self.name, model_type), is_joined=is_joined)

    @property
    def name(self) -> str:
        """Name of the class of the processor."""
        return type(self.processor).__name__

    @property
    def mixes(self) -> bool:
        """Whether rows of several segments may have audio."""
        return not self.problem and (self.needs is None or not self.needs.one_audio)

    def run(self, samples: int, longest: int = 0) -> ImageRun:
        """Return the tokens of a clip, without its samples.

        Args:
            samples: samples at `rate`.
            longest: samples of the longest clip of the same conversation.

        Raises:
            RecordError: `unsupported_audio`, if the clip has no token, or is too long for the processor.
        """
        if self.limit is not None and samples > self.limit and not self.truncates:
            most, seconds = self.limit / self.rate, samples / self.rate
            detail = f"{seconds:.2f} s are more than the {most:g} s that {self.name} reads"
            raise RecordError(Reason.UNSUPPORTED_AUDIO, f"{detail}; split it, or set `long_audio` to 'truncate'")
        if max(samples, longest) < self.shortest:
            least, seconds = self.shortest / self.rate, max(samples, longest) / self.rate
            raise RecordError(
                Reason.UNSUPPORTED_AUDIO,
                f"{seconds:.2f} s are fewer than the {least:g} s that the longest clip of a sample must have, as the "
                f"encoder of {self.name} mixes shorter clips with the padding of a row; append silence",
            )
        length = self._length(samples, longest)
        if length < 1:
            detail = f"{samples:,} samples at {self.rate:,} per second have no token of {self.name}"
            raise RecordError(Reason.UNSUPPORTED_AUDIO, f"{detail}; remove the record")
        make = None if self._all_features else lambda: self._ids(self._text(samples))
        return ImageRun(length, make, edges=self.edges)

    def positions(self, samples: int) -> int:
        """Number of positions of a clip in the audio encoder, two frames each, with the padding of the processor.

        Args:
            samples: samples at `rate`.
        """
        samples = samples if self.limit is None else min(samples, self.limit)
        if self._window:
            samples = -(-samples // self._window) * self._window
        return -(-samples // (2 * self._hop))

    def needed(self, samples: int, rate: int) -> int:
        """Number of the first samples of a clip that its features depend on.

        Args:
            samples: samples of the clip, at `rate`.
            rate: samples per second of its file.
        """
        if self.limit is None:
            return samples
        # A second more than the processor uses, as the resampler needs the samples around each sample.
        return min(samples, -(-self.limit * rate // self.rate) + rate)

    def preprocess(self, clips: Sequence[Samples]) -> tuple[VisionInputs, list[ImageRun]]:
        """Return the arguments of the model for the clips of a sample, and the tokens of each clip.

        Args:
            clips: samples at `rate`, float32 (n,) each.
        """
        parts = [self._process([clip]) for clip in clips] if self._is_alone else [self._process(clips)]
        for out, _ in parts:
            for mask, features in self._masks.items():
                if mask not in out:
                    out[mask] = out[features].new_ones(out[features].shape[:2], dtype=bool)
        values, _ = VisionInputs.joined([VisionInputs(out, self.dims, len(texts)) for out, texts in parts])
        inputs = VisionInputs(values, self.dims, len(clips))
        texts = [text for _, of_part in parts for text in of_part]
        ids = [self._ids(text) for text in texts]
        made = [None if self._all_features else lambda found=found: found for found in ids]
        return inputs, [ImageRun(len(i), make, edges=self.edges) for i, make in zip(ids, made, strict=True)]

    def config(self) -> dict[str, Any]:
        """Settings that determine lengths and features, for fingerprints."""
        return {
            "processor": self.name,
            "feature_extractor": json.loads(self.extractor.to_json_string()),
            "placeholder": self.placeholder,
            "truncates": self.truncates,
            **({"uses_tracks": True} if self.uses_tracks else {}),
        }

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Check that a tokenizer (`tokenizers.Tokenizer`) has the audio token.

        Raises:
            ConfigError: it has not.
        """
        if tokenizer.token_to_id(self.token) is None:
            raise ConfigError(
                f"the tokenizer has no {self.token} token, which {self.name} needs; use the tokenizer of its model"
            )

    def _length(self, samples: int, longest: int = 0) -> int:
        """Number of tokens of a clip; 0 for a clip that has no audio token."""
        samples = samples if self.limit is None else min(samples, self.limit)
        if self._constant is not None:
            count = self._count(samples, longest)
            return count + self._constant if count > 0 else 0
        # Without a formula: a clip between two clips of equal length has that length as well.
        at = bisect_left(self._known, (samples, -1))
        for before, after in zip(self._known[at - 1 : at], self._known[at : at + 1], strict=False):
            if before[1] == after[1]:
                return after[1]
        if self._known[at : at + 1] and self._known[at][0] == samples:
            return self._known[at][1]
        length = len(self._ids(self._text(samples)))
        insort(self._known, (samples, length))
        return length

    def _count(self, samples: int, longest: int = 0) -> int:
        """Number of audio tokens of a clip by a formula."""
        if self.rules.pads_to_longest:
            longest = max(samples, longest)
            if longest <= self.extractor.n_fft // 2:  # too short for the padding of its STFT
                return 0
            # Frames with a sample in the mask, which ends with the last whole frame of the longest clip.
            samples = self._hop * min(-(-samples // self._hop), longest // self._hop)
        if self.rules.tokens is not None:
            return self.rules.tokens(self.processor, samples)
        return int(self.processor._get_num_multimodal_tokens(audio_lengths=[samples]).num_audio_tokens[0])

    def _text(self, samples: int, longest: int = 0) -> str:
        """Text of a silent clip beside a longer one; "" if the processor does not accept so few samples."""
        clips = [np.zeros(size, dtype=np.float32) for size in (samples, longest) if size]
        try:
            return self._process(clips)[1][0]
        except _TOO_SHORT:
            if samples > self.rate:
                raise
            return ""

    def _ids(self, text: str) -> Int64:
        """Tokens of the text of a clip, without the plain text at its ends; none if it has no audio token."""
        count = text.count(self.token)
        if text == self.token * count:
            return np.full(count, self.processor.tokenizer.convert_tokens_to_ids(self.token), dtype=np.int64)
        inner = text[len(self.edges[0]) : len(text) - len(self.edges[1])] if count else ""
        return np.array(self.processor.tokenizer(inner, add_special_tokens=False)["input_ids"], dtype=np.int64)

    def _process(self, clips: Sequence[Samples]) -> "tuple[dict[str, Any], list[str]]":
        """Return the tensors of the processor, and its text of each clip."""
        if self.rules.call is not None:
            return self.rules.call(self.processor, clips)
        with _quiet():
            out = self.processor(
                text=[self.token] * len(clips),
                audio=list(clips),
                sampling_rate=self.rate,
                return_text_replacement_offsets=True,
                return_tensors="pt",
                text_kwargs={"padding": True},
            )
        if "text_replacement_offsets" not in out:
            raise self._unsupported("it does not return the text of an audio file")
        texts = [offsets[0]["replacement"] for offsets in out.pop("text_replacement_offsets")]
        types = next((out[name] for name in OF_TYPES if name in out), None)
        if types is not None and (types != 0).any():
            self.token_type = int(types[types != 0][0])
        names = [name for name in out if name not in OF_TEXT and name not in OF_TYPES]
        frames = int(out["feature_attention_mask"].sum(-1).max()) if self.rules.is_cut else None
        # A copy, as a view would keep the padding in memory.
        return {name: out[name] if frames is None else out[name][..., :frames].clone() for name in names}, texts

    def _takes_one_clip(self) -> bool:
        """Whether the processor takes one clip per text; it pads several, and counts other frames."""
        clips = [np.zeros(self.rate, dtype=np.float32)] * 2
        try:
            with _quiet():
                self.processor(text=[self.token * 2], audio=clips, sampling_rate=self.rate, return_tensors="pt")
        except ValueError:
            return True
        return False

    def _joins(self) -> tuple[dict[str, int], dict[str, str], bool]:
        """Find how the tensors of two clips join.

        Returns:
            (dimension by name, features by the name of the mask that a clip alone has not, whether the joined tensors
            of two clips equal those of a call with both).
        """
        # Without padding, as the last frames of a padded clip have samples of the padding.
        is_padded = self.rules.pads_to_longest
        first, second = _noise(self.rate), _noise(self.rate)[::-1].copy() if is_padded else _noise(self.rate // 2)
        left, right, both = (self._process(clips)[0] for clips in ([first], [second], [first, second]))
        # Samples to a multiple of which clips are padded, by frames; 0 if features have the length of the clip.
        largest = max(left, key=lambda name: left[name].numel())
        is_window = not is_padded and left[largest].shape == right[largest].shape
        self._window = self._hop * max(left[largest].shape[1:]) if is_window else 0
        masks: dict[str, str] = {}
        for name in set(both) - set(left):
            fitting = [of for of in left if both[of].shape[:2] == both[name].shape and both[of].ndim > 2]
            if not fitting:
                raise self._unsupported(f"it returns {name} for two audio files, and not for one")
            masks[name] = fitting[0]
            for out in (left, right):
                out[name] = out[fitting[0]].new_ones(out[fitting[0]].shape[:2], dtype=bool)
        dims: dict[str, int] = {}
        for name in sorted(both):
            shapes = [tuple(out[name].shape) for out in (left, right, both)]
            fitting_dims = [
                dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if sizes[0] + sizes[1] == sizes[2]
            ]
            if len(fitting_dims) != 1:
                raise self._unsupported(f"{name} of two audio files cannot be joined, {shapes}")
            dims[name] = fitting_dims[0]
        joined, _ = VisionInputs.joined([VisionInputs(out, dims, 1) for out in (left, right)])
        # Others pad samples, so that the frames of the shorter clip have other values: right if the model is tested.
        return (
            dims,
            masks,
            all(joined[name].shape == both[name].shape and bool((joined[name] == both[name]).all()) for name in dims),
        )

    def _found_limit(self) -> int | None:
        """Samples of `_WINDOW` seconds, if the processor drops all after them."""
        noise = _noise((_WINDOW + 1) * self.rate)
        longer, whole = (self._process([clip])[0] for clip in (noise, noise[: _WINDOW * self.rate]))
        is_cut = all(longer[n].shape == whole[n].shape and bool((longer[n] == whole[n]).all()) for n in whole)
        return _WINDOW * self.rate if is_cut else None

    def _check_tokens(self) -> int | None:
        """Find the text of a clip, and compare the formula.

        Returns:
            Number of tokens of the text that the formula omits; None without a formula.
        """
        hop = self._hop
        longest = self.limit if self.limit is not None and self.limit <= _CHECKED * self.rate else None
        longest = longest or _WINDOW * self.rate
        lengths = [1, hop, 3 * hop - 1, 7 * hop, 7 * hop + 1, self.rate + 1, longest, longest + 1]
        texts = {samples: self._text(samples) for samples in lengths}
        found = {samples: text for samples, text in texts.items() if text.count(self.token)}
        if not found:
            raise self._unsupported("the text of an audio file has no audio token")
        edges = {self._plain_edges(text) for text in found.values()}
        if len(edges) == 1:
            self.edges = edges.pop()
        elif not self.rules.before:  # without a special token next to it, the text around changes its tokens
            raise self._unsupported("the text around an audio file depends on its length")
        self._all_features = all(text == self.token * text.count(self.token) for text in found.values())
        ids = {samples: len(self._ids(text)) for samples, text in texts.items()}
        self._known = sorted(ids.items())
        has_rule = self.rules.tokens is not None
        ask = getattr(self.processor, "_get_num_multimodal_tokens", None)  # of images alone in some processors
        if not has_rule and (ask is None or ask(audio_lengths=[self.rate]).num_audio_tokens is None):
            return None
        limit = self.limit or lengths[-1]
        counts = {samples: max(0, self._count(min(samples, limit))) for samples in lengths}
        omitted = {ids[samples] - count for samples, count in counts.items() if count or ids[samples]}
        if len(omitted) == 1 and not any(counts[samples] for samples in lengths if not ids[samples]):
            return omitted.pop()
        if not has_rule:  # such as the formula of an older release of the model
            return None
        wrong = next(n for n in reversed(lengths) if counts[n] != texts[n].count(self.token))
        written = texts[wrong].count(self.token)
        raise self._unsupported(f"it writes {written} tokens for {wrong} samples, not {counts[wrong]}")

    def _check_padding(self) -> None:
        """Compare the formula for clips beside a longer clip."""
        if not self.rules.pads_to_longest:
            return
        hop = self._hop
        for samples in (1, hop, 3 * hop - 1, 7 * hop, 7 * hop + 1, self.rate + 1):
            for longest in (samples + hop + 1, self.rate + 1):
                written = len(self._ids(self._text(samples, longest)))
                if written != (count := self._length(samples, longest)):
                    raise self._unsupported(
                        f"it writes {written} tokens for {samples} samples beside {longest}, not {count}"
                    )

    def _plain_edges(self, text: str) -> tuple[str, str]:
        """Plain text at both ends, which may share a token with the text around it."""
        special = list(self._special.finditer(text))
        return text[: special[0].start()], text[special[-1].end() :]

    def _judge(self, result: str | None, *, is_joined: bool) -> None:
        """Set `needs`, `problem` and `warnings` by the result of the trial with tiny models."""
        if result == "one sample" or (result is None and not is_joined):
            self.needs = ModelNeeds(one_audio=True)
            line = "rows of several samples with audio are refused; pack with max_samples_per_pack=1"
            self.warnings = (f"{self.name}: {line}",)
        elif result is None:
            line = "is not among the processors whose models were tested packed (docs/vision-families.md)"
            self.warnings = (f"{self.name} {line}; compare packed with separate logits once",)
        elif result.startswith("refused: "):
            self.problem = result.removeprefix("refused: ")

    def _unsupported(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.name} of Transformers {installed('transformers')} is not supported: {reason}")


def _trial(processor: str, model_type: str) -> str | None:
    """Result for audio of the trial with tiny models, as tools/family_table.py wrote it; None if untested."""
    rows = [
        row for row in trials() if (row["model_type"] == model_type if model_type else row["processor"] == processor)
    ]
    found = {row["audio"] for row in rows if row.get("audio", "none") != "none"}
    return found.pop() if len(found) == 1 else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Transformers: feature extractors warn about an argument that their processors do not pass on."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _noise(samples: int) -> Samples:
    return np.random.default_rng(samples).standard_normal(samples, dtype=np.float32)
