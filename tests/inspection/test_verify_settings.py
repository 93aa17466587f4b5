"""`verify` takes every encoder setting: it encodes again what `pack` measured, and reports what it overrides."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from energon_packed import ConfigError, FormatError
from tests.conftest import Packer
from tests.encoding.test_vision_settings import QWEN, write_model_folder
from tests.internals import as_options, cli

ENCODED = "✓ samples encode to their recorded length, with a supervised token ("


@pytest.fixture(scope="session")
def by_factor(pack_demo: Packer, text_tokenizer_dir: Path) -> Path:
    """Packed with a factor that is 16 x 3 or 24 x 2."""
    settings = {"image_processor": QWEN, "factor": 48, "min_pixels": 3136, "max_pixels": 4_000_000}
    return pack_demo(tokenizer=text_tokenizer_dir, max_packs_per_shard=3, **settings).shards


@pytest.fixture
def copy(by_factor: Path, tmp_path: Path) -> Path:
    shutil.copytree(by_factor.parent, tmp_path / "out", ignore=shutil.ignore_patterns(".work"))
    return tmp_path / "out" / "webdataset"


def verify(path: Path, line: str = "") -> Result:
    return CliRunner().invoke(cli, ["verify", str(path), *shlex.split(line)])


def refused(path: Path, line: str = "") -> str:
    """The message as the terminal shows it."""
    result = verify(path, line)
    assert isinstance(result.exception, ConfigError | FormatError), result.output
    message = as_options(str(result.exception))
    assert "\n" not in message
    return message


def edit_manifest(folder: Path, **values: Any) -> None:
    file = folder / ".nv-meta" / "packing.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


SETTINGS = ["--patch-size 16", "--patch-size 24", "--merge-size 2", "--vision-family llava_onevision2"]


@pytest.mark.parametrize("line", SETTINGS)
def test_data_packed_by_a_factor_is_encoded_again(copy: Path, line: str) -> None:
    result = verify(copy, line)
    assert result.exit_code == 0, result.output
    assert ENCODED in result.output
    assert "not encoded again" not in result.output
    note = f"note: {copy} is checked with settings that differ from packing.json: {line} (not set in packing.json)\n"
    assert result.output.count("note: ") == 1
    assert note in result.output


def test_what_is_encoded_again_is_compared(copy: Path) -> None:
    tokens = json.loads((copy / ".nv-meta" / "packing.json").read_text())["supervised_tokens"]
    edit_manifest(copy, supervised_tokens=tokens + 1)
    assert verify(copy).exit_code == 0  # nothing says which of the two meanings the factor has
    result = verify(copy, "--patch-size 16")
    assert result.exit_code == 1
    assert f"supervised tokens, packing.json says {tokens + 1:,}" in " ".join(result.output.split())


def test_a_model_folder_says_what_the_factor_means(copy: Path, text_tokenizer_dir: Path, tmp_path: Path) -> None:
    names = {"tokenizer_class": "Qwen2Tokenizer", "model": "llava_onevision2"}
    folder = tmp_path / "model"
    write_model_folder(folder, text_tokenizer_dir, template="chat_template.json", **names)
    result = verify(copy, f"--processor {folder}")
    assert result.exit_code == 0, result.output
    assert ENCODED in result.output


def test_without_a_setting_the_note_names_those_that_decide(copy: Path) -> None:
    result = verify(copy)
    assert result.exit_code == 0, result.output
    assert "note: samples are not encoded again: --factor 48 is 16 x 3 or 24 x 2 (patch size x merge" in result.output
    assert "; pass --patch-size, --vision-family or --processor" in result.output
    assert ENCODED not in result.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--patch-size 14", "--factor is 48; --patch-size is 14; --factor must be patch size times merge size"),
        ("--patch-size 0", "--patch-size must be at least 1, got 0"),
        (
            "--patch-size 16 --min-pixels 6272",
            "(not set in packing.json), --min-pixels 6272 (3136 in packing.json). Omit",
        ),
        ("--patch-size 16 --loss-on all", "--loss-on all (assistant in packing.json). Omit the settings that"),
        ("--image-processor Nobody", "unknown image processor 'Nobody'; set --vision-family or --image-processor"),
    ],
)
def test_settings_that_give_other_tokens_are_refused(by_factor: Path, line: str, message: str) -> None:
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


def test_data_of_other_packers_takes_settings_with_a_tokenizer(copy: Path, text_tokenizer_dir: Path) -> None:
    (copy / ".nv-meta" / "packing.json").unlink()
    assert "has no packing.json that names a tokenizer; pass --tokenizer" in refused(copy, "--patch-size 16")
    settings = f"--image-processor {QWEN} --factor 48 --min-pixels 3136 --max-pixels 4000000 --merge-size 3"
    result = verify(copy, f"--tokenizer {text_tokenizer_dir} {settings}")
    assert ENCODED in result.output
    assert "note: " not in result.output


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"factor": "48"}, "has no valid encoder: --factor must be an integer, got '48'; pack the data again"),
        ({"factor": 0}, "has no valid encoder: --factor must be at least 1, got 0; pack the data again"),
        ({"processor": 5}, "has no valid encoder: --processor must be a path, got 5; pack the data again"),
        (
            {"loss_on": "user"},
            "has no valid encoder: --loss-on must be one of assistant, last, all, got 'user'",
        ),
        ({"patchsize": 1}, "has no valid encoder: unknown encoder setting 'patchsize'; did you mean --patch-size?"),
    ],
)
def test_a_packing_json_with_invalid_settings_is_refused_in_one_line(
    copy: Path, setting: dict[str, Any], message: str
) -> None:
    encoder = json.loads((copy / ".nv-meta" / "packing.json").read_text())["encoder"]
    edit_manifest(copy, encoder=encoder | setting)
    assert message in refused(copy)
