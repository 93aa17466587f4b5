"""Property: the rendered text is the text of the record, and the supervised text is the text of its assistant.

For any record format, the tokens decode to exactly the text that `talks` writes down for the record, and the labels to
exactly the supervised turns. A record with content that the template does not render is rejected.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon_packed import ChatEncoder, RecordError, normalize
from tests.encoding import semantics
from tests.encoding.semantics import encoder_for, write_image
from tests.encoding.talks import PICTURE, TEMPLATES, Talk, talks, trained
from tests.internals import IGNORE_INDEX
from tests.turns import supervised_turns

_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")

LOSS_ON = ("assistant", "last")


@pytest.fixture(scope="module")
def encoders(tokenizer_dir: Path) -> dict[tuple[str, str], ChatEncoder]:
    return {
        (name, loss_on): encoder_for(tokenizer_dir, getattr(semantics, name), loss_on=loss_on)
        for name in TEMPLATES
        for loss_on in LOSS_ON
    }


@pytest.fixture(scope="module")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_image(tmp_path_factory.mktemp("images"))


def decoded(encoder: ChatEncoder, ids: Any) -> str:
    return re.sub(r"(<\|image_pad\|>)+", "<|image_pad|>", encoder.tokenizer.decode(ids))


def expected(talk: Talk, template: str, loss_on: str) -> tuple[str, str] | None:
    """(text, supervised text) of a record; None if it must be rejected."""
    if talk.document is not None:
        text = talk.document.replace("<image>", PICTURE) + "<|im_end|>"
        return (text, text.replace("<|image_pad|>", "")) if talk.document.replace("<image>", "").strip() else None
    pieces = TEMPLATES[template](talk)
    flags = trained(talk.turns, loss_on)
    if pieces is None or talk.is_empty or not any(flags):
        return None
    wrote = iter([flag for flag, turn in zip(flags, talk.turns, strict=True) if turn.role == "assistant"])
    supervised = [
        text
        for head, text in pieces
        if head.endswith(("assistant\n", "assistant<|end_header_id|>\n\n")) and next(wrote)
    ]
    text = "".join([head + text for head, text in pieces])
    return text.replace("<image>", PICTURE), "".join(supervised)


@given(talk=talks, template=st.sampled_from(sorted(TEMPLATES)), loss_on=st.sampled_from(LOSS_ON))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_text_and_targets_equal_the_record(
    encoders: dict[tuple[str, str], ChatEncoder], image_root: str, talk: Talk, template: str, loss_on: str
) -> None:
    encoder, wanted = encoders[template, loss_on], expected(talk, template, loss_on)
    record = orjson.loads(orjson.dumps(talk.record))
    try:
        conversation = normalize(record, image_root=image_root)
        sample = encoder.encode(conversation)
    except RecordError as error:
        # No text stands for a special token beside characters that could be this text.
        both = wanted is not None and _PRIVATE.search(wanted[0]) and "special tokens and private-use" in str(error)
        assert wanted is None or both, f"{error} for {wanted}"
        assert "\n" not in str(error)
        return
    assert wanted is not None, decoded(encoder, sample.input_ids)
    assert decoded(encoder, sample.input_ids) == wanted[0]
    targets = np.flatnonzero(sample.labels != IGNORE_INDEX)
    assert decoded(encoder, sample.labels[targets]) == wanted[1]
    assert encoder.length(conversation) == len(sample)
    assert conversation.unused_fields == ()
    if talk.document is None:
        assert supervised_turns(encoder, conversation) == trained(talk.turns, loss_on)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_tokens_are_trained_as_they_are_given(encoders: dict[tuple[str, str], ChatEncoder], data: Any) -> None:
    ids = data.draw(st.lists(st.integers(10, 200), min_size=2, max_size=9))
    mask = data.draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    labels = [token if flag else -100 for token, flag in zip(ids, mask, strict=True)]
    name, value = data.draw(st.sampled_from([("labels", labels), ("loss_mask", mask), ("assistant_masks", mask)]))
    try:
        sample = encoders["HERMES", "assistant"].encode(normalize({"input_ids": ids, name: value}))
    except RecordError as error:
        assert not any(mask[1:]), error
        return
    assert (sample.input_ids.tolist(), sample.labels.tolist()) == (ids, labels)
