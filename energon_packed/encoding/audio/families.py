"""AudioFamily: audio preprocessing of a model by its Transformers processor: samples -> token counts and features.

    processor(text=audio token, audio)          ─►  text of each file, tensors for the audio encoder    (encode)
    number of samples                           ─►  number of tokens                                    (measure)

Processors differ in data, not in code: `RULES` has, by the name of its class, what a processor does not report. When a
family is loaded, the count of tokens is compared with the text that the processor writes for clips of some lengths,
and the tensors of two clips are compared with the tensors of a clip alone; a difference is an error.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_packed.encoding.audio.audio_file import Samples
from energon_packed.encoding.vision.positions import VisionInputs
from energon_packed.errors import ConfigError, Reason, RecordError
from energon_packed.libraries import installed

_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "text_replacement_offsets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioRules:
    """Properties that the processor of a family does not report.

    Attributes:
        tokens: (processor, samples) -> number of tokens of a clip; None to ask the processor by its function
            `_get_num_multimodal_tokens`.
        limit: (processor) -> samples that a clip has at most: the processor drops all samples after them.
        before, after: attributes of the processor with the tokens around the audio tokens in text without parts.
        pads_to_longest: the processor pads the clips of a sample to the longest of them; the frames of a clip that is
            not a multiple of a frame depend on it.
        has_tracks: the processor writes the tokens of the audio track of a video among the tokens of the video.
    """

    tokens: Callable[[Any, int], int] | None = None
    limit: Callable[[Any], int] | None = None
    before: str = ""
    after: str = ""
    pads_to_longest: bool = False
    has_tracks: bool = False


def _whisper_frames(processor: Any, samples: int) -> int:
    """Frames of Whisper's feature extractor that have samples: the processors count them in the attention mask."""
    extractor = processor.feature_extractor
    return int(-(-min(samples, extractor.n_samples) // extractor.hop_length))


RULES: dict[str, AudioRules] = {
    # A convolution with stride 2, then a pooling of two: `_get_feat_extract_output_lengths` of Qwen2AudioEncoder.
    "Qwen2AudioProcessor": AudioRules(
        tokens=lambda processor, samples: ((_whisper_frames(processor, samples) - 1) // 2 - 1) // 2 + 1,
        limit=lambda processor: int(processor.feature_extractor.n_samples),
        before="audio_bos_token",
        after="audio_eos_token",
    ),
    "Qwen2_5OmniProcessor": AudioRules(
        limit=lambda processor: int(processor.feature_extractor.n_samples),
        before="audio_bos_token",
        after="audio_eos_token",
        has_tracks=True,
    ),
    "Qwen3OmniMoeProcessor": AudioRules(
        before="audio_bos_token", after="audio_eos_token", pads_to_longest=True, has_tracks=True
    ),
}
"""Rules by the class of a processor."""


class AudioFamily:
    """Audio preprocessing of a model.

    Attributes:
        processor: the Transformers processor.
        rate: samples per second that it needs.
        token: token whose run represents an audio file.
        placeholder: text of an audio file in text without content parts, with a single `token`.
        limit: samples of the longest clip; None without a limit.
        truncates: use the first `limit` samples of a longer clip, as the processor does; False rejects it.
        uses_tracks: use the audio tracks of videos.
        dims: dimension along which the tensors of several clips are joined, by argument of the model.
    """

    def __init__(
        self, processor: Any, rules: AudioRules, *, truncates: bool = False, uses_tracks: bool = False
    ) -> None:
        """Compare the rules with the processor.

        Raises:
            ConfigError: they differ; the message names the difference.
        """
        self.processor, self._rules, self.truncates, self.uses_tracks = processor, rules, truncates, uses_tracks
        self.rate = int(processor.feature_extractor.sampling_rate)
        self.token = str(processor.audio_token)
        edges = [getattr(processor, name) if name else "" for name in (rules.before, rules.after)]
        self.placeholder = f"{edges[0]}{self.token}{edges[1]}"
        self.limit = None if rules.limit is None else rules.limit(processor)
        self.dims = self._joins()
        self._check_tokens()

    @property
    def name(self) -> str:
        """Name of the class of the processor."""
        return type(self.processor).__name__

    def tokens(self, samples: int, longest: int = 0) -> int:
        """Number of tokens of a clip.

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
        count = self._count(samples, longest)
        if count < 1:
            detail = f"{samples:,} samples at {self.rate:,} per second have no token of {self.name}"
            raise RecordError(Reason.UNSUPPORTED_AUDIO, f"{detail}; remove the record")
        return count

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

    def preprocess(self, clips: Sequence[Samples]) -> tuple[VisionInputs, list[int]]:
        """Return the arguments of the model for the clips of a sample, and the number of tokens of each clip.

        Args:
            clips: samples at `rate`, float32 (n,) each.
        """
        out, texts = self._process(clips)
        inputs = VisionInputs({name: out[name] for name in self.dims}, self.dims, len(clips))
        return inputs, [self._length(text) for text in texts]

    def config(self) -> dict[str, Any]:
        """Settings that determine lengths and features, for fingerprints."""
        return {
            "processor": self.name,
            "feature_extractor": json.loads(self.processor.feature_extractor.to_json_string()),
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

    def _count(self, samples: int, longest: int = 0) -> int:
        if self._rules.pads_to_longest:
            extractor, longest = self.processor.feature_extractor, max(samples, longest)
            if longest <= extractor.n_fft // 2:  # too short for the padding of its STFT
                return 0
            # Frames with a sample in the mask, which ends with the last whole frame of the longest clip.
            hop = int(extractor.hop_length)
            samples = hop * min(-(-samples // hop), longest // hop)
        if self._rules.tokens is not None:
            return self._rules.tokens(self.processor, samples)
        return int(self.processor._get_num_multimodal_tokens(audio_lengths=[samples]).num_audio_tokens[0])

    def _process(self, clips: Sequence[Samples]) -> tuple[dict[str, Any], list[str]]:
        """Return the tensors of the processor, and its text of each clip."""
        import torch

        with _quiet():
            out = self.processor(
                text=[self.token] * len(clips),
                audio=list(clips),
                sampling_rate=self.rate,
                return_text_replacement_offsets=True,
            )
        texts = [offsets[0]["replacement"] for offsets in out.pop("text_replacement_offsets")]
        names = [name for name in out if name not in _OF_TEXT]
        return {name: torch.as_tensor(np.asarray(out[name])) for name in names}, texts

    def _length(self, text: str) -> int:
        """Tokens of the text of a clip, which must be a run of the audio token."""
        count = text.count(self.token)
        if text != self.token * count:
            raise self._unsupported("the text of an audio file has other tokens than the audio token")
        return count

    def _joins(self) -> dict[str, int]:
        """Find the dimension along which each tensor of two clips joins; the parts equal the tensors of a clip."""
        # Without padding, as the last frames of a padded clip have samples of the padding.
        is_padded = self._rules.pads_to_longest
        first, second = _noise(self.rate), _noise(self.rate)[::-1].copy() if is_padded else _noise(self.rate // 2)
        left, right, both = (self._process(clips)[0] for clips in ([first], [second], [first, second]))
        dims: dict[str, int] = {}
        for name in sorted(both):
            shapes = [tuple(out[name].shape) for out in (left, right, both)]
            fitting = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if sizes[0] + sizes[1] == sizes[2]]
            if len(fitting) != 1:
                raise self._unsupported(f"{name} of two audio files cannot be joined, {shapes}")
            dims[name] = fitting[0]
        joined, _ = VisionInputs.joined([VisionInputs(out, dims, 1) for out in (left, right)])
        for name in dims:
            if not (joined[name].shape == both[name].shape and bool((joined[name] == both[name]).all())):
                raise self._unsupported(f"{name} of two audio files differs from {name} of each file alone")
        return dims

    def _check_tokens(self) -> None:
        hop = int(getattr(self.processor.feature_extractor, "hop_length", self.rate // 100))
        lengths = [1, hop, 3 * hop - 1, 7 * hop, 7 * hop + 1, self.rate + 1]
        lengths += [] if self.limit is None else [self.limit, self.limit + 1]
        for samples in lengths:
            longer = [samples + hop + 1, self.rate + 1] if self._rules.pads_to_longest else []
            for longest in (samples, *longer):
                count, written = self._count(samples, longest), self._written(samples, longest)
                if count != written:
                    raise self._unsupported(f"it writes {written} tokens for {samples} samples, not {count}")

    def _written(self, samples: int, longest: int) -> int:
        """Tokens that the processor writes for a clip beside a longer clip; 0 if it fails for so few samples."""
        clips = [np.zeros(size, dtype=np.float32) for size in dict.fromkeys((samples, longest))]
        try:
            return self._length(self._process(clips)[1][0])
        except RuntimeError:
            return 0

    def _unsupported(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.name} of Transformers {installed('transformers')} is not supported: {reason}")


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
