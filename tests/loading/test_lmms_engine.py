"""Configs of LMMS-Engine, as its documentation has them, load here; what cannot be loaded is refused with the reason.

The text of YAML and Python is that of docs/datasets.md, docs/getting_started/train.md and docs/models/qwenvl.md of
EvolvingLMMs-Lab/lmms-engine. Only the data and the folder of the processor are made here, at the paths of the text.
"""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

import energon_packed
from energon_packed import (
    ConfigError,
    DataflowConfig,
    MapDistributor,
    PackedIterableDataset,
    PackOptions,
    get_raw_loader,
    plan_in_memory,
)
from energon_packed import DataflowConfig as DatasetConfig
from tests.processes import energon_packed as command

datasets = pytest.importorskip("datasets")

TRAIN = """
trainer_type: fsdp2_trainer

# Dataset configuration - now includes the actual dataset definitions
dataset_config:
  dataset_type: vision
  dataset_format: yaml # Uses 'yaml' format for both external files and inline definitions

  # Inline dataset definitions (no dataset_path needed)
  datasets:
    - path: data/open_thoughts_debug
      data_folder: ""
      data_type: arrow

  # Processor configuration
  processor_config:
    processor_name: "Qwen/Qwen2.5-VL-7B-Instruct"
    processor_type: "qwen2_5_vl"

  # Packing configuration
  packing: true
  packing_strategy: first_fit
  packing_length: 16384

# Model configuration
model_config:
  load_from_pretrained_path: "Qwen/Qwen2.5-VL-7B-Instruct"
  attn_implementation: "flash_attention_2"

# Training arguments, mostly compatible with HuggingFace Trainer
trainer_args:
  per_device_train_batch_size: 1
  learning_rate: 1.0e-06 # we should use 1.0 to makes YAML recognize it as a float
  freeze_modules: ["visual"]
  use_rmpad: true
"""
QWEN3_VL = """
- type: trainer
  config:
    trainer_type: fsdp2_trainer
    
    # Dataset configuration
    dataset_config:
      dataset_type: qwen3_vl_iterable           # Use iterable dataset for Qwen3-VL
      dataset_format: yaml
      
      datasets:
        - path: "path/to/your/dataset.parquet"
          data_folder: ""
          data_type: parquet
      
      # Processor configuration
      processor_config:
        processor_name: "Qwen/Qwen3-VL-8B-Instruct"  # Or 4B variant
        processor_type: "qwen3_vl"
      
      # Packing configuration
      packing: false                             # Note: packing for Qwen3-VL
      packing_length: 51200
      filter_overlong: true
      
      # Video configuration - Qwen3-VL optimized
      video_backend: qwen_vl_utils
      video_sampling_strategy: fps
      video_max_pixels: 50176                    # 224 * 224
      video_max_frames: 512
      fps: 1
    
    # Model configuration
    model_config:
      load_from_pretrained_path: "Qwen/Qwen3-VL-8B-Instruct"
    per_device_train_batch_size: 1
"""
MINIMAL = """
dataset:
  dataset_type: vision
  dataset_format: hf_dataset
  dataset_path: your/hub_or_path
  shuffle: true
  packing: true
  packing_length: 32000
  filter_overlong: true
  processor_config:
    processor_type: your_processor
"""
# examples/qwen3_vl/example_config.yaml, without trainer_args
EXAMPLE = """
trainer_type: fsdp2_trainer
dataset_config:
  extra_kwargs: {}
  dataset_type: qwen3_vl_iterable
  dataset_format: yaml
  processor_config:
    processor_name: ""
    processor_type: nit
  dataset_path: data/video/debug.yaml
  datasets: null
  shuffle: true
  eval_dataset_path: null
  object_storage: none
  bucket_name: null
  packing: false
  packing_strategy: first_fit
  packing_length: 51200
  filter_overlong: true
  filter_overlong_workers: 8
  max_length: null
  video_sampling_strategy: fps
  video_max_pixels: 50176
  video_max_frames: 512
  frame_num: 64
  fps: 1
  video_backend: qwen_vl_utils
model_config:
  extra_kwargs: {}
  monkey_patch_kwargs: null
extra_kwargs: null
"""
CHATS = [
    {
        "id": f"r{n}",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is it? " * n}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        ],
    }
    for n in range(1, 9)
]
TOKENS = [{"id": f"t{n}", "input_ids": [n] * (3 + n), "labels": [n] * (3 + n)} for n in range(8)]


@pytest.fixture
def project(tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data and models that the texts name; it is the current folder."""
    for name in ("Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct"):
        shutil.copytree(tokenizer_dir, tmp_path / "Qwen" / name)
    datasets.Dataset.from_list(CHATS).save_to_disk(tmp_path / "data/open_thoughts_debug")
    for path in ("path/to/your/dataset.parquet", "your/hub_or_path/data.parquet", "data/video/tokens.parquet"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(CHATS if path.startswith("path") else TOKENS).to_parquet(tmp_path / path)
    listed = {"datasets": [{"path": "data/video/tokens.parquet", "data_folder": "", "data_type": "parquet"}]}
    (tmp_path / "data/video/debug.yaml").write_text(yaml.safe_dump(listed))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(text: str) -> DataflowConfig:
    Path("config.yaml").write_text(text)
    return DataflowConfig.from_yaml("config.yaml")


@pytest.mark.parametrize(
    ("text", "is_stream", "rows", "ids"),
    [
        (TRAIN, False, 1, {one["id"] for one in CHATS}),
        (QWEN3_VL, True, 8, {one["id"] for one in CHATS}),
        (MINIMAL, False, 1, {one["id"] for one in TOKENS}),
        (EXAMPLE, True, 8, {one["id"] for one in TOKENS}),
    ],
    ids=["train", "qwen3_vl", "minimal", "example"],
)
def test_a_yaml_file_loads_as_written(project: Path, text: str, is_stream: bool, rows: int, ids: set[str]) -> None:
    loader = get_raw_loader(config_of(text))
    assert isinstance(loader.roles.distributor, MapDistributor) != is_stream
    batches = list(loader)
    assert {ident for batch in batches for ident in batch.ids} == ids
    assert len(batches) == rows


def test_pack_reads_the_same_file(project: Path) -> None:
    Path("config.yaml").write_text(TRAIN)
    done = command("pack", "--config", "config.yaml", "-o", "out", "--seq-len", "1k", "--workers", "1", "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("out/webdataset/.nv-meta/packing.json").read_text())["packed"] == len(CHATS)


def test_the_python_call_loads_as_written(project: Path) -> None:
    cfg = DatasetConfig(
        dataset_type="vision",                 # or "vision_audio"
        dataset_format="hf_dataset",          # json | jsonl | yaml | hf_dataset | arrow | parquet
        dataset_path="your/hub_or_path",      # or use datasets=[...] for yaml inline
        processor_config={"processor_type": "your_processor"},
        shuffle=True,
        # Packing
        packing=True,
        packing_strategy="first_fit",         # naive only: first_fit | window_XX
        packing_length=32000,
        filter_overlong=True,                  # drop samples > packing_length
    )  # fmt: skip
    assert (cfg.streaming, cfg.overlong, cfg.dataset_format) == (False, "drop", "auto")
    planned = plan_in_memory(cfg)
    assert {ident for row in range(len(planned)) for ident in planned.ids(row)} == {one["id"] for one in TOKENS}
    assert sum(batch.num_samples for batch in PackedIterableDataset(cfg)) == len(TOKENS)
    inline = DatasetConfig(
        dataset_type="vision_iterable",
        dataset_format="yaml",
        datasets=[{"path": "data/video/tokens.parquet", "data_folder": "", "data_type": "parquet"}],
        packing_length=8,
        filter_overlong=False,
    )
    assert inline.overlong == "error"
    assert inline.streaming


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({"dataset_type": name}, f"`dataset_type` must be .* got '{name}': it has audio, which is not supported yet")
          for name in ("vision_audio", "qwen_omni")],
        *[({"dataset_type": name}, f"`dataset_type` must be .* got '{name}': it trains on noised images")
          for name in ("rae", "sit", "bagel")],
        ({"dataset_type": "visoin"}, "`dataset_type` must be one of vision, .*, got 'visoin'. Records are recognized"),
        ({"dataset_type": ["vision"]}, "`dataset_type` must be a string, got|`dataset_type` must be one of"),
        ({"dataset_format": "excel"}, "`dataset_format` must be one of auto, hf_dataset, yaml, arrow, .* got 'excel'"),
        ({"processor_config": {"processor_tpye": "x"}}, "unknown option 'processor_tpye' in `processor_config`"),
        ({"processor_config": {"processor_name": "x", "tokenizer": "y"}}, "sets tokenizer and processor_name"),
        ({"processor_config": {"kwargs": {"a": 1}}}, "processor_config: kwargs must be .*Use the encoder settings"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_loaded_are_refused_when_the_config_is_made(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DataflowConfig(dataset_path="data.jsonl", packing_length=64, **options)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"dataset_config": {"dataset_path": "d.jsonl"} | options}))
    with pytest.raises(ConfigError, match=message + "|Missing required"):
        DataflowConfig.from_yaml(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_dataset_path": "val.jsonl"}, "eval_dataset_path must be left out, got 'val.jsonl'. Make a second con"),
        ({"object_storage": "gcs"}, "object_storage must be none, got 'gcs'. Write the paths with their scheme"),
        ({"max_length": 100}, "max_length must be left out, got 100. .*Set packing_length"),
        ({"extra_kwargs": {"a": 1}}, "extra_kwargs must be {}, got"),
        ({"video_sampling_strategy": "all"}, "`video_sampling_strategy` must be fps or frame_num, got 'all'"),
    ],
)
def test_options_with_an_effect_there_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    base = {"dataset_path": "d.jsonl", "packing_length": 64}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"dataset_config": base | options}))
    with pytest.raises(ConfigError, match=message):
        DataflowConfig.from_yaml(tmp_path / "c.yaml")


def test_frames_are_selected_as_there(tokenizer_dir: Path, tmp_path: Path) -> None:
    base = {"dataset_path": "d.jsonl", "packing_length": 64, "video_max_frames": 8, "frame_num": 4}
    base["processor_config"] = {"processor_name": str(tokenizer_dir)}
    for strategy, expected in (("fps", (8, None)), ("frame_num", (None, 4))):
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(base | {"video_sampling_strategy": strategy}))
        config = DataflowConfig.from_yaml(tmp_path / "c.yaml")
        assert (config.max_frames, config.num_frames) == expected


def test_an_unknown_or_missing_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown argument 'packing_lenght'; did you mean `packing_length`"):
        DataflowConfig(dataset_path="d.jsonl", packing_lenght=64)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="unknown argument 'bucket'"):
        PackOptions(inputs=["d.jsonl"], output_dir="out", seq_len=64, bucket=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="missing required argument: `output_dir`"):
        PackOptions(inputs=["d.jsonl"], seq_len=64)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "equivalent"),
    [
        ("MultiModalDataset", "plan_in_memory"),
        ("MultiModalIterableDataset", "PackedIterableDataset"),
        ("DatasetConfig", "DataflowConfig"),
        ("CosmosDataLoader", "DataflowLoader"),
    ],
)
def test_names_of_other_packages_have_a_hint(name: str, equivalent: str) -> None:
    hint = rf"energon_packed has no {name}. Use {equivalent}.*; see docs/migrate.md#[\w-]+"
    with pytest.raises(AttributeError, match=hint), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(energon_packed, name)
    with pytest.warns(UserWarning, match=hint), pytest.raises(ImportError):
        exec(f"from energon_packed import {name}")
    assert not hasattr(energon_packed, "Anything")
    for _, section in energon_packed._EQUIVALENTS.values():
        page, _, anchor = section.partition("#")
        text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
        assert f"\n## {anchor}\n" in text.lower()
