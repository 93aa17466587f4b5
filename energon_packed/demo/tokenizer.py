"""Train a small byte-level BPE tokenizer: strings in, a folder with ChatML template and Qwen-VL special tokens out.

With `audio`, the folder has the special tokens, the template and the feature extractor of Qwen2-Audio.
"""

import json
from collections.abc import Iterable
from pathlib import Path

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
AUDIO_TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
# As Qwen2-Audio's template, which numbers the audio files of a conversation.
AUDIO_TEMPLATE = (
    "{% set audio = namespace(count=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}{% set audio.count = audio.count + 1 %}"
    "{{ 'Audio ' ~ audio.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Values of Qwen2-Audio.
_AUDIO_PREPROCESSOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "Qwen2AudioProcessor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "padding_value": 0.0,
    "return_attention_mask": True,
}
# Values of Qwen2.5-VL, with a smaller max_pixels so that the demo runs fast.
_PATCHES = {
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    **_PATCHES,
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 256,
}
# Limits of each frame, small for the same reason.
_VIDEO_PREPROCESSOR = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    **_PATCHES,
    "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 16},
}


def write_tokenizer(
    folder: Path,
    texts: Iterable[str],
    *,
    vocab_size: int = 2000,
    vision: bool = True,
    videos: bool = False,
    audio: bool = False,
) -> Path:
    """Train a tokenizer and save it.

    Args:
        folder: created if missing.
        texts: strings to train on.
        vocab_size: number of tokens, including special tokens.
        vision: also save Qwen2.5-VL image settings (preprocessor_config.json).
        videos: also save Qwen2.5-VL video settings (video_preprocessor_config.json).
        audio: save Qwen2-Audio's feature extractor and template in place of the settings of images.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = SPECIAL_TOKENS + AUDIO_TOKENS if audio else SPECIAL_TOKENS
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        # All 256 bytes, so that every string can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special[1:]),
    )
    wrapped.chat_template = AUDIO_TEMPLATE if audio else CHATML_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    wrapped.save_pretrained(str(folder))
    if audio:
        settings = json.dumps(_AUDIO_PREPROCESSOR, indent=2) + "\n"
        (folder / "preprocessor_config.json").write_text(settings, encoding="utf-8")
    elif vision:
        (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR, indent=2) + "\n", encoding="utf-8")
    if videos:
        settings = json.dumps(_VIDEO_PREPROCESSOR, indent=2) + "\n"
        (folder / "video_preprocessor_config.json").write_text(settings, encoding="utf-8")
    return folder
