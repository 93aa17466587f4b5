"""Tokenizers by folder, by the name of a model in the local Hugging Face cache, and with a template in a file."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from energon_packed import ChatEncoder, ConfigError, Conversation, Message, pack
from tests import oldest
from tests.internals import PackedFolder

CHAT = Conversation(messages=(Message("user", "Hi"), Message("assistant", "Hello.")))
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(text_tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the model `some/model`."""
    from huggingface_hub import constants

    model = tmp_path / "hub" / "models--some--model"
    shutil.copytree(text_tokenizer_dir, model / "snapshots" / REVISION)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return model / "snapshots" / REVISION


def test_a_name_finds_the_local_cache(cache: Path, text_tokenizer_dir: Path, tmp_path: Path) -> None:
    named = ChatEncoder.from_pretrained("some/model")
    assert named.fingerprint() == ChatEncoder.from_pretrained(text_tokenizer_dir).fingerprint()
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "hello there"}))
    options: dict[str, Any] = {"output_dir": tmp_path / "o", "seq_len": 64, "workers": 1}
    result = pack(tmp_path / "d.jsonl", tokenizer="some/model", **options)
    assert result.manifest.encoder["tokenizer"] == str(cache)
    assert PackedFolder.open(result.shards).load_encoder().fingerprint() == named.fingerprint()


@pytest.mark.usefixtures("cache")
def test_a_missing_model_is_reported_with_the_download_command() -> None:
    message = (
        r"^some/other is neither a folder nor a model in the local .*: hf download some/other --include '\*.json'"
    )
    with pytest.raises(ConfigError, match=message):
        ChatEncoder.from_pretrained("some/other")
    with pytest.raises(ConfigError, match="^some/other/x is not a folder. Pass a tokenizer or processor folder"):
        ChatEncoder.from_pretrained("./some/other/x")


def test_a_folder_without_a_usable_tokenizer_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    file = tmp_path / "x" / "tokenizer.json"
    with pytest.raises(ConfigError, match="^.*/x has no tokenizer.json. Pass the folder of a tokenizer.$"):
        ChatEncoder.from_pretrained(tmp_path / "x")
    file.write_text("{")  # as after a download that stopped; tokenizers raises an Exception of no other class
    with pytest.raises(ConfigError, match=r"cannot load the tokenizer of .*/x: .*; download or save"):
        ChatEncoder.from_pretrained(tmp_path / "x")
    with pytest.raises(ConfigError, match=r"tokenizer.json is not a folder. Pass its folder .*/x\.$"):
        ChatEncoder.from_pretrained(file)


@pytest.mark.parametrize("name", ["chat_template.json", "chat_template.jinja"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_template_beside_tokenizer_json(text_tokenizer_dir: Path, tmp_path: Path, name: str, alone: bool) -> None:
    template = ChatEncoder.from_pretrained(text_tokenizer_dir).tokenizer.chat_template
    shutil.copy(text_tokenizer_dir / "tokenizer.json", tmp_path)
    if not alone:
        settings = json.loads((text_tokenizer_dir / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / name).write_text(json.dumps({"chat_template": template}) if name.endswith("json") else template)
    encoded = ChatEncoder.from_pretrained(tmp_path).encode(CHAT)
    expected = ChatEncoder.from_pretrained(text_tokenizer_dir).encode(CHAT)
    assert encoded.input_ids.tolist() == expected.input_ids.tolist()
    assert encoded.labels.tolist() == expected.labels.tolist()
    (tmp_path / name).unlink()
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(ConfigError, match="must be a JSON object with `chat_template`"):
        ChatEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("class_", "model"),
    [
        ("TokenizersBackend", None),
        ("PreTrainedTokenizerFast", None),
        ("PreTrainedTokenizer", None),
        ("Qwen2Tokenizer", None),
        ("Qwen2TokenizerFast", "qwen2_5_vl"),
        ("Qwen2Tokenizer", "qwen2"),
        ("Qwen2Tokenizer", "qwen3"),
        ("PreTrainedTokenizerFast", "qwen3"),
        ("Qwen2Tokenizer", "llama"),
        ("TokenizersBackend", "qwen2"),  # of a model whose class is known to be wrong in published folders
        ("PreTrainedTokenizerFast", "llama"),
        ("LlamaTokenizerFast", "llama"),
        ("GPT2TokenizerFast", "gpt2"),
        (None, "gpt2"),
    ],
)
def test_the_tokenizer_equals_auto_tokenizer(
    text_tokenizer_dir: Path, tmp_path: Path, class_: str | None, model: str | None
) -> None:
    folder = shutil.copytree(text_tokenizer_dir, tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": class_}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({name: value for name, value in settings.items() if value is not None})
    )
    if model is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model}))
    encoder, expected = ChatEncoder.from_pretrained(folder), AutoTokenizer.from_pretrained(str(folder))
    assert type(encoder.tokenizer) is type(expected)
    assert encoder.tokenizer.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert encoder.fingerprint() == ChatEncoder(expected).fingerprint()
    assert encoder.parts.special_tokens == dict(expected.special_tokens_map)
    assert encoder.parts.chat_template == expected.get_chat_template()
    assert set(encoder.parts.added_tokens) == set(expected.added_tokens_encoder)
    assert encoder.parts.vocabulary == len(expected)


@pytest.mark.parametrize(("class_", "every"), [("PreTrainedTokenizerFast", 8), ("Qwen2TokenizerFast", 1)])
def test_the_class_of_every_model_equals_auto_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, class_: str, every: int
) -> None:
    model = BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": class_, "chat_template": "{{ 1 }}"})
    )
    auto = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", NotImplemented)  # a TypeError where it is called
    compared = 0
    for name in [*sorted(CONFIG_MAPPING_NAMES)[::every], "qwen2", "qwen2_5_vl", "qwen3", "qwen3_vl_moe", "llama"]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        try:
            tokenizer = ChatEncoder.from_pretrained(tmp_path).tokenizer
        except ConfigError:  # AutoTokenizer decides
            continue
        try:
            expected = auto(str(tmp_path))
        except (ImportError, ValueError):  # a configuration that needs more than its type
            continue
        assert type(tokenizer) is type(expected), name
        compared += 1
    assert compared >= 10


@pytest.mark.skipif(oldest.TRANSFORMERS, reason="this release imports torch for any tokenizer")
@pytest.mark.parametrize(("class_", "model"), [("TokenizersBackend", None), ("Qwen2Tokenizer", "qwen2_5_vl")])
def test_common_tokenizers_load_without_torch(
    text_tokenizer_dir: Path, tmp_path: Path, class_: str, model: str | None
) -> None:
    folder = shutil.copytree(text_tokenizer_dir, tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": class_}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if model is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model}))
    code = (
        "import sys\n"
        "from energon_packed import ChatEncoder, Conversation, Message\n"
        "encoder = ChatEncoder.from_pretrained(sys.argv[1])\n"
        "encoder.length(Conversation(messages=(Message('user', 'Hi'), Message('assistant', 'Hello.'))))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
