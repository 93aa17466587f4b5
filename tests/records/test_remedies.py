"""A remedy that a message contains works: the adapter of the message is run on the record that was rejected."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from energon_packed import Conversation, RecordError, normalize
from tests.internals import cli

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello."}


def adapted(record: Any) -> Conversation:
    """The conversation that the adapter in the message of a rejected record makes of it."""
    with pytest.raises(RecordError) as caught:
        normalize(record)
    assert len(caught.value.detail) < 500  # the limit of rejects.jsonl
    line = re.search(r"def (\w+)\(record\): .*\}", caught.value.detail)
    assert line, caught.value.detail
    scope: dict[str, Any] = {}
    exec(line[0], scope)
    return normalize(scope[line[1]](record))


LVIS = {
    "images": ["a.jpg"],
    "width": 640,
    "height": 480,
    "objects": [{"category": "cat", "bbox": [1, 2, 3, 4], "polygons": [[1, 2, 3, 4, 5, 6]]}],
}


@pytest.mark.parametrize("record", [LVIS, {"image": "a.jpg", "objects": {"bbox": [[1, 2, 3, 4]], "category": [7]}}])
def test_an_image_with_objects_is_trained_on_them_with_the_adapter_of_the_message(record: dict[str, Any]) -> None:
    question, answer = adapted(record).messages
    assert (question.content, json.loads(answer.content)) == ("<image>List the objects.", record["objects"])


def test_objects_beside_turns_are_counted() -> None:
    messages = [{**HI, "content": "<image>Hi"}, HELLO]
    conversation = normalize({**LVIS, "messages": messages})
    assert [m.content for m in conversation.messages] == ["<image>Hi", "Hello."]
    assert conversation.unused_fields == ("height", "objects", "width")


def test_the_remedy_of_pack_works_word_for_word(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Image.new("RGB", (56, 56)).save("a.png")
    record, adapter = {"image": "a.png", "objects": [{"bbox": [1, 2, 3, 4]}]}, "boxes:answer"
    Path("data.jsonl").write_text(json.dumps(record) + "\n")
    arguments = ["pack", "data.jsonl", "-o", "out", "--seq-len", "512", "--tokenizer", str(tokenizer_dir)]
    arguments += ["--image-processor", "Qwen2_5_VLProcessor", "--workers", "1", "--quiet"]
    assert CliRunner().invoke(cli, arguments).exit_code == 1
    detail = json.loads(Path("out/rejects.jsonl").read_text())["detail"]
    match = re.search(r"--adapter (\w+):(\w+) with this line in (\w+\.py): (def .*\})", detail)
    assert match is not None
    assert f"{match[1]}:{match[2]}" == adapter
    Path(match[3]).write_text(match[4] + "\n")
    done = CliRunner().invoke(cli, [*arguments, "--adapter", adapter])
    assert done.exit_code == 0, done.output
    assert json.loads(Path("out/webdataset/.nv-meta/packing.json").read_text())["packed"] == 1
