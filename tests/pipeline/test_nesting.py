"""Records nested deeply cost themselves, whatever reads the value that is nested."""

import json
import shutil
from pathlib import Path

import pytest

from energon_packed import pack

TALK = '"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y"%s}]'


def deep(levels: int, opener: str = '{"a":', closer: str = "}") -> str:
    return opener * levels + "1" + closer * levels


@pytest.mark.parametrize("levels", [101, 900, 5000])
def test_a_record_nested_too_deeply_is_rejected(text_tokenizer_dir: Path, tmp_path: Path, levels: int) -> None:
    value, nested = deep(levels), deep(levels, "[", "]")
    call = ',"tool_calls":[{"type":"function","function":{"name":"f","arguments":%s}}]'
    records = [
        f'{{"messages":{nested}}}',
        f'{{{TALK % ""},"tools":[{{"type":"function","function":{{"name":"f","parameters":{value}}}}}]}}',
        f"{{{TALK % (call % value)}}}",
        f"{{{TALK % (call % json.dumps(value))}}}",
        f'{{"messages":[{{"role":"user","content":"x"}},{{"role":"assistant","content":{value}}}]}}',
        f'{{"images":{nested},"prompts":["x"],"captions":["y"]}}',
        f'{{"text":{value}}}',
        f'{{"input_ids":{nested}}}',
        value,
        nested,
    ]
    good = f"{{{TALK % ''}}}"
    (tmp_path / "d.jsonl").write_text("\n".join([good, *records, good]) + "\n")
    options = {"tokenizer": text_tokenizer_dir, "seq_len": 64, "max_reject_rate": 1.0, "workers": 1}
    result = pack(tmp_path / "d.jsonl", output_dir=tmp_path / "out", **options)
    assert result.manifest.packed == 2
    rejects = [json.loads(line) for line in result.rejects.read_text().splitlines()]
    assert [reject["row"] for reject in rejects] == list(range(1, 11))
    assert all(len(reject["detail"]) < 300 for reject in rejects)


def test_a_nested_schema_of_a_tool_is_kept(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    tokenizer = shutil.copytree(text_tokenizer_dir, tmp_path / "tokenizer")
    template = tokenizer / "chat_template.jinja"
    template.write_text("{{ tools | tojson if tools }}" + template.read_text())
    schema = f'[{{"type":"function","function":{{"name":"f","parameters":{deep(60)}}}}}]'
    too_deep = schema.replace(deep(60), deep(300))  # orjson reads 1,024 levels, and writes 254
    records = [f'{{{TALK % ""},"tools":{tools}}}\n' for tools in (schema, too_deep)]
    (tmp_path / "d.jsonl").write_text("".join(records))
    options = {"tokenizer": tokenizer, "seq_len": 4096, "workers": 1, "max_reject_rate": 1.0}
    result = pack(tmp_path / "d.jsonl", output_dir=tmp_path / "out", **options)
    assert (result.manifest.packed, result.manifest.sample_class) == (1, "PackedMultiMixQASample")
    (reject,) = map(json.loads, result.rejects.read_text().splitlines())
    assert (reject["row"], reject["reason"]) == (1, "bad_json")
    assert reject["detail"] == "tools is nested more than 100 levels deep"
