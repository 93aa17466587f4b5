"""The table of issue 12: what each record tells and supervises under four kinds of templates, or why it is rejected.

The expected texts are in `semantics_expected`, one file a template; `any_template.txt` holds what no template changes.
"""

from functools import cache
from pathlib import Path

import pytest

from energon_packed import ChatEncoder, normalize
from tests.encoding import semantics
from tests.encoding.semantics import RECORDS, encoder_for, matches, told, write_image
from tests.turns import supervised_turns

EXPECTED = Path(__file__).parent / "semantics_expected"
TEMPLATES = {
    "qwen_vl": semantics.QWEN_VL,
    "hermes": semantics.HERMES,
    "tagged": semantics.TAGGED,
    "llama": semantics.LLAMA,
}


@cache
def table(name: str) -> dict[str, str]:
    """Expected text of each record, from a file of `### record | record` lines and the text below each."""
    found: dict[str, str] = {}
    for block in (EXPECTED / f"{name}.txt").read_text(encoding="utf-8").split("### ")[1:]:
        names, _, text = block.partition("\n")
        for one in names.split(" | "):
            assert one not in found, f"{one} twice in {name}"
            found[one] = text.strip("\n")
    return found


@pytest.fixture(scope="module")
def encoders(tokenizer_dir: Path) -> dict[str, ChatEncoder]:
    return {name: encoder_for(tokenizer_dir, template) for name, template in TEMPLATES.items()}


@pytest.fixture(scope="module")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_image(tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_record_has_one_expected_text(template: str) -> None:
    assert not table("any_template").keys() & table(template).keys()
    assert table("any_template").keys() | table(template).keys() == RECORDS.keys()


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("record", RECORDS)
def test_text_and_supervised_text_equal_the_expected(
    encoders: dict[str, ChatEncoder], image_root: str, template: str, record: str
) -> None:
    expected = (table("any_template") | table(template))[record]
    found = told(encoders[template], RECORDS[record], image_root).strip("\n")
    assert matches(found, expected), found


@pytest.mark.parametrize("template", TEMPLATES)
def test_supervised_turns_of_reports_come_from_labels(
    encoders: dict[str, ChatEncoder], image_root: str, template: str
) -> None:
    compared = 0
    for name, record in RECORDS.items():
        if "⟦" not in (table("any_template") | table(template))[name]:
            continue
        conversation = normalize(record, image_root=image_root)
        trained = [m.role == "assistant" and m.weight > 0 for m in conversation.messages]
        assert supervised_turns(encoders[template], conversation) == trained, name
        compared += 1
    assert compared > 12


RISKY = (
    *("audio_path", "audio_url", "chosen", "rejected", "bbox", "loss", "loss_mask", "mask", "weight"),
    *("tools", "functions", "tool_calls", "system_prompt", "system_message", "system_note", "reasoning"),
    *("reasoning_content", "thinking", "min_pixels", "max_pixels", "video", "videos", "video_url", "completion_mask"),
)


def test_unknown_fields_are_named() -> None:
    assert set(normalize(RECORDS["url"]).unused_fields) == {"source", "url"}


@pytest.mark.parametrize("field", RISKY)
def test_a_field_that_would_change_training_is_used_or_rejects_the_record(
    encoders: dict[str, ChatEncoder], field: str
) -> None:
    plain, given = RECORDS["plain"], {**RECORDS["plain"], field: "S."}
    found = told(encoders["hermes"], given)
    rejected = ("unsupported_", *(f"missing_{what}" for what in ("field: tools", "field: functions", "video: S.")))
    rejected = (*rejected, "missing_field: the record has a chosen", "missing_field: the record has a rejected")
    assert found.startswith(rejected) or "S." in found or "<video>" in found
    assert told(encoders["hermes"], {**plain, field: None}) == told(encoders["hermes"], plain)
