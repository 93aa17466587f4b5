"""Audio files, a folder of Qwen2-Audio's processor, and a tiny Qwen2-Audio."""

from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from energon_packed import MediaReference
from tests.internals import write_audio, write_tokenizer

TEXTS = ["hello world what is said in the audio? transcribe it", "You are a helpful assistant.", "Audio 1:"] * 20
KINDS = {
    "wav16": ("wav", "pcm_s16le", None),
    "wav8": ("wav", "pcm_u8", None),
    "wav24": ("wav", "pcm_s24le", None),
    "wav32": ("wav", "pcm_s32le", None),
    "float": ("wav", "pcm_f32le", None),
    "double": ("wav", "pcm_f64le", None),
    "alaw": ("wav", "pcm_alaw", None),
    "adpcm": ("wav", "adpcm_ms", None),
    "flac": ("flac", "flac", None),
    "aiff": ("aiff", "pcm_s16be", None),
    "caf": ("caf", "pcm_s16le", None),
    "w64": ("w64", "pcm_s16le", None),
    "au": ("au", "pcm_s16be", None),
    "mp3": ("mp3", "libmp3lame", None),
    "mka-mp3": ("mka", "libmp3lame", "matroska"),
    "m4a": ("m4a", "aac", "ipod"),
    "alac": ("m4a", "alac", "ipod"),
    "aac": ("aac", "aac", "adts"),
    "mp4": ("mp4", "aac", None),
    "opus": ("opus", "libopus", "ogg"),
    "webm": ("webm", "libopus", None),
}
"""(extension, codec, container) by name."""


def signal(samples: int, rate: int, seed: int = 0) -> Any:
    """A tone with changing pitch, and some noise, float32 (samples,)."""
    time = np.arange(samples) / rate
    tone = 0.3 * np.sin(2 * np.pi * 200 * time * (1 + 0.1 * np.sin(time)))
    return (tone + 0.02 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def write(path: Path, kind: str, samples: Any, rate: int, channels: int = 1) -> Path:
    """Write an audio file of a kind of `KINDS`."""
    extension, codec, container = KINDS[kind]
    path = path.with_suffix(f".{extension}")
    return write_audio(path, samples, rate, codec=codec, container=container, channels=channels)


def at(path: Path) -> MediaReference:
    return MediaReference(path=str(path))


def num_decoded(path: Path) -> int:
    """Samples that PyAV decodes."""
    with av.open(str(path)) as container:
        return sum(frame.samples for frame in container.decode(audio=0))


def qwen2_audio(folder: Path) -> Path:
    """Write tokenizer, template and feature extractor of a Qwen2-Audio."""
    return write_tokenizer(folder, TEXTS, audio=True)


def tiny_model(tokens: int, audio_token: int, seed: int = 0) -> Any:
    """A random Qwen2-Audio of two layers."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    torch.manual_seed(seed)
    config = Qwen2AudioConfig(
        audio_config={
            "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
            "num_mel_bins": 128, "max_source_positions": 1500,
        },
        text_config={
            "model_type": "qwen2", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": tokens,
        },
        audio_token_id=audio_token,
    )  # fmt: skip
    return Qwen2AudioForConditionalGeneration(config).eval()
