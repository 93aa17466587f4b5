"""One declaration of encoder settings: everything that takes them takes all of them, with the same meaning."""

import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import click
import pytest

from energon_packed import ChatEncoder, ConfigError, DataflowConfig, EncoderSettings, PackOptions
from tests.audio import qwen2_audio
from tests.internals import AUDIO_RULES, cli, declared

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "command-line.md"
QWEN = "Qwen2_5_VLProcessor"
NAMES = [one.name for one in declared(EncoderSettings)]
# A value of each setting other than the default, and what it needs.
VALUES: dict[str, dict[str, Any]] = {
    "tokenizer": {},
    "processor": {},
    "image_processor": {"image_processor": QWEN},
    "vision_family": {"vision_family": "qwen3_vl"},
    "factor": {"image_processor": QWEN, "factor": 56},
    "patch_size": {"image_processor": QWEN, "patch_size": 16},
    "merge_size": {"image_processor": QWEN, "merge_size": 3},
    "min_pixels": {"image_processor": QWEN, "min_pixels": 5000},
    "max_pixels": {"image_processor": QWEN, "max_pixels": 500_000},
    "patch_order": {"image_processor": QWEN, "patch_order": "row"},
    "fps": {"image_processor": QWEN, "fps": 1.5},
    "num_frames": {"image_processor": QWEN, "num_frames": 8},
    "min_frames": {"image_processor": QWEN, "min_frames": 6},
    "max_frames": {"image_processor": QWEN, "max_frames": 64},
    "video_min_pixels": {"image_processor": QWEN, "video_min_pixels": 5000},
    "video_max_pixels": {"image_processor": QWEN, "video_max_pixels": 500_000},
    "total_pixels": {"image_processor": QWEN, "total_pixels": 9_000_000},
    "long_audio": {"long_audio": "truncate"},
    "load_audio_from_video": {"load_audio_from_video": True},
    "loss_on": {"loss_on": "last"},
    "tokenizer_engine": {"tokenizer_engine": "tokenizers"},
    "allow_special_in_text": {"allow_special_in_text": True},
}


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def without(settings: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != name}


@pytest.mark.parametrize("name", ["pack", "lengths", "verify"])
def test_commands_have_an_option_for_every_setting(name: str) -> None:
    flags = {parameter.name: parameter.opts for parameter in command(name).params}
    for one in declared(EncoderSettings):
        assert flags.get(one.name) == list(one.flags), f"{name} has no --{one.name}"


def test_the_page_of_the_command_line_lists_every_setting() -> None:
    text = unescape(PAGE.read_text(encoding="utf-8"))
    tables = {}
    for name in ("pack", "lengths"):
        found = re.search(f"<!-- options of {name} -->(.*?)<!-- end of options -->", text, re.DOTALL)
        assert found is not None, f"{PAGE} has no table of {name}"
        tables[name] = found[1]
    for one in declared(EncoderSettings):
        row = rf"\| (?:`|<code>){one.flags[0]}\b.*\| `{one.name}` \|.*{re.escape(one.help)}"
        assert re.search(row, tables["pack"]), one.name
        assert f"`{one.flags[0]}`" in tables["lengths"], one.name  # in the list of options that `pack` has too


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_the_same_effect_wherever_it_is_given(
    tokenizer_dir: Path, text_tokenizer_dir: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(VALUES) == set(NAMES)
    settings = {"tokenizer": str(text_tokenizer_dir), **VALUES[name]}
    if name == "tokenizer":
        settings["tokenizer"] = str(tokenizer_dir)
    if name == "processor":
        settings["processor"] = str(tokenizer_dir)
    of_audio = name in ("long_audio", "load_audio_from_video")
    base = qwen2_audio(tmp_path / "audio") if of_audio else text_tokenizer_dir
    if of_audio:
        settings["tokenizer"] = str(base)
        # As the processors of Omni models, which need torchvision.
        rules = replace(AUDIO_RULES["Qwen2AudioProcessor"], has_tracks=True)
        monkeypatch.setitem(AUDIO_RULES, "Qwen2AudioProcessor", rules)
    (tmp_path / "d.jsonl").write_text("{}")
    data, out = str(tmp_path / "d.jsonl"), tmp_path / "out"
    loaders = [
        PackOptions(inputs=data, output_dir=out, seq_len=64, **settings).encoder_loader,
        DataflowConfig(dataset_path=data, packing_length=64, processor_config=settings).encoder_loader,
        DataflowConfig(dataset_path=data, packing_length=64, **settings).encoder_loader,
    ]
    encoder = ChatEncoder.from_pretrained(**settings)
    fingerprint = encoder.fingerprint()
    assert [loader.load().fingerprint() for loader in loaders] == [fingerprint] * 3
    assert all(loader.as_dict() == loaders[0].as_dict() for loader in loaders)
    if name == "tokenizer_engine":  # the tokens are the same, so it is not recorded
        assert name not in loaders[0].as_dict()
        assert all(loader.load().text_tokenizer.engine == "tokenizers" for loader in loaders)  # type: ignore[attr-defined]
        return
    assert loaders[0].as_dict()[name] == settings[name]
    other = {"tokenizer": str(base), **without(VALUES[name], name)}
    assert (ChatEncoder.from_pretrained(**other).fingerprint() == fingerprint) is False


def test_what_is_recorded_has_the_order_and_the_omissions_of_earlier_versions(tokenizer_dir: Path) -> None:
    given: dict[str, Any] = {
        "inputs": "d.jsonl", "output_dir": "out", "seq_len": 64, "tokenizer": tokenizer_dir, "factor": 28,
    }  # fmt: skip
    name = str(tokenizer_dir)
    recorded = PackOptions(**given).encoder_loader.as_dict()
    assert list(recorded.items()) == [("tokenizer", name), ("factor", 28), ("loss_on", "assistant")]
    given |= {"loss_on": "all", "allow_special_in_text": True, "patch_order": "row", "processor": tokenizer_dir}
    given |= {
        "min_pixels": 3136,
        "max_pixels": 200_704,
        "patch_size": 14,
        "merge_size": 2,
        "vision_family": "qwen2_vl",
    }
    given |= {"image_processor": QWEN, "tokenizer_engine": "tokenizers"}
    recorded = PackOptions(**given).encoder_loader.as_dict()
    assert list(recorded.items()) == [
        ("tokenizer", name), ("processor", name), ("image_processor", QWEN), ("vision_family", "qwen2_vl"),
        ("factor", 28), ("patch_size", 14), ("merge_size", 2), ("min_pixels", 3136), ("max_pixels", 200_704),
        ("patch_order", "row"), ("loss_on", "all"), ("allow_special_in_text", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"factor": 0}, "^`factor` must be at least 1, got 0$"),
        ({"min_pixels": "many"}, "^`min_pixels` must be an integer, got 'many'$"),
        ({"loss_on": "user"}, "^`loss_on` must be one of assistant, last, all, got 'user'$"),
        ({"patch_order": "column"}, "^`patch_order` must be one of auto, row, block, got 'column'$"),
        ({"allow_special_in_text": "no"}, "^`allow_special_in_text` must be True or False, got 'no'$"),
        ({"vision_family": 5}, "^`vision_family` must be a string, got 5$"),
    ],
)
def test_an_invalid_value_gets_the_same_line_everywhere(
    tokenizer_dir: Path, setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatEncoder.from_pretrained(tokenizer_dir, **setting)
    with pytest.raises(ConfigError, match=message):
        PackOptions(inputs="d.jsonl", output_dir="out", seq_len=64, tokenizer=tokenizer_dir, **setting)
    with pytest.raises(ConfigError, match=message):
        processor_config = {"tokenizer": tokenizer_dir, **setting}
        DataflowConfig(dataset_path="d.jsonl", packing_length=64, processor_config=processor_config)


def test_a_processor_folder_without_image_settings_is_refused(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(text_tokenizer_dir, tmp_path / "text")
    message = "has no preprocessor_config.json; pass `image_processor` instead"
    with pytest.raises(ConfigError, match=message):
        ChatEncoder.from_pretrained(text_tokenizer_dir, tmp_path / "text")
