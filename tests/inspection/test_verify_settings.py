"""`verify` accepts every encoder setting, encodes samples again with it, and reports the overridden settings."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from energon_packed import ConfigError, FormatError, PackOptions, pack
from tests.conftest import Packer
from tests.encoding.test_vision_settings import QWEN, write_model_folder
from tests.inspection.datasets import copied_output, edit_manifest
from tests.internals import as_options
from tests.printed import invoke

ENCODED = "✓ samples encode to their recorded length, with a supervised token ("


@pytest.fixture(scope="session")
def by_factor(pack_demo: Packer, text_tokenizer_dir: Path) -> Path:
    """Packed with a factor that is 16 x 3 or 24 x 2."""
    settings = {"image_processor": QWEN, "factor": 48, "min_pixels": 3136, "max_pixels": 4_000_000}
    return pack_demo(tokenizer=text_tokenizer_dir, max_packs_per_shard=3, **settings).shards


@pytest.fixture
def copy(by_factor: Path, tmp_path: Path) -> Path:
    return copied_output(by_factor, tmp_path / "out")


def verify(path: Path, line: str = "") -> Result:
    return invoke("verify", path, *shlex.split(line))


def refused(path: Path, line: str = "") -> str:
    """The message as the terminal shows it."""
    result = verify(path, line)
    if result.exit_code == 2:  # wrong usage
        return " ".join(result.output.split())
    assert isinstance(result.exception, ConfigError | FormatError), result.output
    message = as_options(str(result.exception))
    assert "\n" not in message
    return message


SETTINGS = ["--patch-size 16", "--patch-size 24", "--merge-size 2", "--vision-family llava_onevision2"]


@pytest.mark.parametrize("line", SETTINGS)
def test_data_packed_by_a_factor_is_encoded_again(copy: Path, line: str) -> None:
    result = verify(copy, line)
    assert result.exit_code == 0, result.output
    assert ENCODED in result.output
    assert "not checked" not in result.output
    note = f"note: {copy} is checked with settings that differ from packing.json: {line} (not set in packing.json)\n"
    assert result.output.count("note: ") == 1
    assert note in result.output


def test_encoded_samples_are_compared_with_the_records(copy: Path) -> None:
    tokens = json.loads((copy / ".nv-meta" / "packing.json").read_text())["supervised_tokens"]
    edit_manifest(copy, lambda value: value.update(supervised_tokens=tokens + 1))
    result = verify(copy)  # nothing says which of the two meanings the factor has
    assert result.exit_code == 0
    assert "- samples encode to their recorded length, with a supervised token (" in result.output
    result = verify(copy, "--patch-size 16")
    assert result.exit_code == 1
    assert f"supervised tokens, packing.json has {tokens + 1:,}" in " ".join(result.output.split())


def test_a_model_folder_decides_the_meaning_of_the_factor(
    copy: Path, text_tokenizer_dir: Path, tmp_path: Path
) -> None:
    names = {"tokenizer_class": "Qwen2Tokenizer", "model": "llava_onevision2"}
    folder = tmp_path / "model"
    write_model_folder(folder, text_tokenizer_dir, template="chat_template.json", **names)
    result = verify(copy, f"--processor {folder}")
    assert result.exit_code == 0, result.output
    assert ENCODED in result.output


@pytest.mark.parametrize("arguments", ["", "--quiet"])
def test_without_a_setting_the_check_names_the_settings_that_decide(copy: Path, arguments: str) -> None:
    result = verify(copy, arguments)
    assert result.exit_code == 0, result.output
    assert (
        f"{ENCODED.replace('✓', '-')}50 of 114 samples): not checked, --factor 48 is 16 x 3 or 24 x 2 (patch size x "
        "merge size). Pass --patch-size, --vision-family or --processor\n" in result.output
    )


def test_samples_without_images_are_encoded_again_with_an_ambiguous_factor(
    text_tokenizer_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "red square"}\n{"text": "blue square"}\n')
    options = PackOptions(
        inputs=(str(tmp_path / "d.jsonl"),), output_dir=tmp_path / "out", seq_len=64, workers=1, image_processor=QWEN,
        tokenizer=text_tokenizer_dir, factor=48, min_pixels=3136, max_pixels=4_000_000,
    )  # fmt: skip
    folder = pack(options).shards
    assert f"{ENCODED}2 samples)" in verify(folder).output
    edit_manifest(folder, lambda value: value.update(supervised_tokens=value["supervised_tokens"] + 1))
    assert "supervised tokens, packing.json has" in verify(folder).output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--patch-size 14", "--factor must be patch size times merge size (2 or 3 unless it is set), got --factor 48"),
        ("--patch-size 0", "--patch-size must be at least 1, got 0"),
        (
            "--patch-size 16 --min-pixels 6272",
            "(not set in packing.json), --min-pixels 6272 (3136 in packing.json). Omit",
        ),
        ("--patch-size 16 --loss-on all", "--loss-on all (assistant in packing.json). Omit the settings that"),
        ("--image-processor Nobody", "unknown vision family 'Nobody'. Set --vision-family to one of"),
    ],
)
def test_settings_that_result_in_other_tokens_are_refused(by_factor: Path, line: str, message: str) -> None:
    assert message in refused(by_factor, line)


def test_settings_apply_to_every_dataset_of_a_metadataset(by_factor: Path, tmp_path: Path) -> None:
    content = {
        "__module__": "megatron.energon", "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": [{"path": str(by_factor), "weight": 1}]}},
    }  # fmt: skip
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(content))
    result = verify(tmp_path / "blend.yaml", "--patch-size 16 --json --quiet")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert "samples encode to their recorded length, with a supervised token" in [
        check["name"] for check in found["of"][0]["checks"]
    ]


def test_third_party_datasets_use_settings_with_a_tokenizer(copy: Path, text_tokenizer_dir: Path) -> None:
    (copy / ".nv-meta" / "packing.json").unlink()
    assert "has no packing.json with a tokenizer. Pass --tokenizer" in refused(copy, "--patch-size 16")
    settings = f"--image-processor {QWEN} --factor 48 --min-pixels 3136 --max-pixels 4000000 --merge-size 3"
    result = verify(copy, f"--tokenizer {text_tokenizer_dir} {settings}")
    assert ENCODED in result.output
    assert "note: " not in result.output


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"factor": "48"}, "has no valid encoder (pack the data again): --factor must be an integer, got '48'"),
        ({"factor": 0}, "has no valid encoder (pack the data again): --factor must be at least 1, got 0"),
        ({"processor": 5}, "has no valid encoder (pack the data again): --processor must be a path, got 5"),
        (
            {"loss_on": "user"},
            "has no valid encoder (pack the data again): --loss-on must be one of assistant, last, all, got 'user'",
        ),
        (
            {"patchsize": 1},
            "has no valid encoder (pack the data again): unknown encoder setting 'patchsize'",
        ),
    ],
)
def test_a_packing_json_with_invalid_settings_is_refused_in_one_line(
    copy: Path, setting: dict[str, Any], message: str
) -> None:
    encoder = json.loads((copy / ".nv-meta" / "packing.json").read_text())["encoder"]
    edit_manifest(copy, lambda value: value.update(encoder=encoder | setting))
    assert message in refused(copy)
