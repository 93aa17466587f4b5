"""Train a small byte-level BPE tokenizer: strings in, a folder with ChatML template and Qwen-VL special tokens out."""

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
# Values of Qwen2.5-VL, with a smaller max_pixels so that the demo runs fast.
_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 256,
}
# Limits of each frame, small for the same reason.
_VIDEO_PREPROCESSOR = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 16},
}


def write_tokenizer(
    folder: Path, texts: Iterable[str], *, vocab_size: int = 2000, vision: bool = True, videos: bool = False
) -> Path:
    """Train a tokenizer and save it.

    Args:
        folder: created if missing.
        texts: strings to train on.
        vocab_size: number of tokens, including special tokens.
        vision: also save Qwen2.5-VL image settings (preprocessor_config.json).
        videos: also save Qwen2.5-VL video settings (video_preprocessor_config.json).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        # All 256 bytes, so that every string can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    )
    wrapped.chat_template = CHATML_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    wrapped.save_pretrained(str(folder))
    if vision:
        (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR, indent=2) + "\n", encoding="utf-8")
    if videos:
        settings = json.dumps(_VIDEO_PREPROCESSOR, indent=2) + "\n"
        (folder / "video_preprocessor_config.json").write_text(settings, encoding="utf-8")
    return folder
