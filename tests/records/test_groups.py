"""Preference, reward, embedding and reranking data, as published or documented, become the expected members.

The pairs are compared with TRL: its functions that find the prompt, and the tokens of its DPOTrainer.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packed import ChatEncoder, Conversation, MediaReference, RecordError, normalize
from tests.internals import EQUAL, PAIR, RANKING, TEXTS, UNPAIRED, with_files

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello."}
BYE = {"role": "assistant", "content": "Bye."}
HUMAN = {"from": "human", "value": "Hi"}
SYSTEM = {"role": "system", "content": "S"}
U, GOOD, BAD = ("user", "Hi"), ("assistant", "Hello."), ("assistant", "Bye.")
PAIRED: list[Any] = [("chosen", None, [U, GOOD]), ("rejected", None, [U, BAD])]
CONTEXT = ("assistant", "Yes?", 0)
EARLIER = {"role": "assistant", "content": "Yes?"}

# name: record; role, label, and turns or text of each member; unused fields
GROUPS: dict[str, tuple[dict[str, Any], list[tuple[str | None, Any, Any]], list[str]]] = {
    "TRL, strings": ({"prompt": "Hi", "chosen": "Hello.", "rejected": "Bye."}, PAIRED, []),
    "TRL, turns": ({"prompt": [HI], "chosen": [HELLO], "rejected": [BYE]}, PAIRED, []),
    "TRL, turns without a prompt": ({"chosen": [HI, HELLO], "rejected": [HI, BYE]}, PAIRED, []),
    "TRL, strings without a prompt": (
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        [("chosen", None, "The sky is blue."), ("rejected", None, "The sky is green.")], [],
    ),
    "TRL, margin": (
        {"prompt": [HI], "chosen": [HELLO], "rejected": [BYE], "margin": 0.5},
        [("chosen", 0.5, [U, GOOD]), ("rejected", 0.0, [U, BAD])], [],
    ),
    "TRL, tokens": (
        {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]},
        [("chosen", None, ([1, 2, 3], [-100, -100, 3])), ("rejected", None, ([1, 2, 4, 5], [-100, -100, 4, 5]))], [],
    ),
    "TRL, tokens and labels": (
        {"prompt_input_ids": [1], "chosen_input_ids": [1, 3], "chosen_labels": [-100, 3],
         "rejected_input_ids": [1, 4, 0], "rejected_labels": [-100, 4, -100], "rejected_attention_mask": [1, 1, 0]},
        [("chosen", None, ([1, 3], [-100, 3])), ("rejected", None, ([1, 4], [-100, 4]))], [],
    ),
    "UltraFeedback binarized": (
        {"prompt": "Hi", "prompt_id": "x", "chosen": [HI, HELLO], "rejected": [HI, BYE], "messages": [HI, HELLO],
         "score_chosen": 8.5, "score_rejected": 7},
        [("chosen", 8.5, [U, GOOD]), ("rejected", 7.0, [U, BAD])], ["prompt_id"],
    ),
    "Argilla": (
        {"source": "evol", "prompt": "Hi", "chosen": [HI, HELLO], "chosen-rating": 5, "chosen-model": "m",
         "rejected": [HI, BYE], "rejected-rating": 2.5, "rejected-model": "n"},
        [("chosen", 5.0, [U, GOOD]), ("rejected", 2.5, [U, BAD])], ["chosen-model", "rejected-model", "source"],
    ),
    "another prompt beside whole dialogs": (
        {"prompt": "Other", "chosen": [HI, HELLO], "rejected": [HI, BYE]}, PAIRED, ["prompt"],
    ),
    "Argilla dpo-mix": (
        {"dataset": "capybara", "chosen": [HI, EARLIER, HI, HELLO], "rejected": [HI, EARLIER, HI, BYE],
         "chosen_rating": 5, "rejected_rating": 4},
        [("chosen", 5.0, [U, CONTEXT, U, GOOD]), ("rejected", 4.0, [U, CONTEXT, U, BAD])], ["dataset"],
    ),
    "HH-RLHF": (
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Hi\n\nAssistant: Hello.",
         "rejected": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Hi\n\nAssistant: Bye."},
        [("chosen", None, [U, CONTEXT, U, GOOD]), ("rejected", None, [U, CONTEXT, U, BAD])], [],
    ),
    "full-hh-rlhf": (
        {"prompt": "\n\nHuman: Hi\n\nAssistant:", "response": " Hello.", "chosen": " Hello.", "rejected": " Bye."},
        [("chosen", None, [U, ("assistant", " Hello.")]), ("rejected", None, [U, ("assistant", " Bye.")])],
        ["response"],
    ),
    "Orca DPO": (
        {"system": "S", "question": "Hi", "chosen": "Hello.", "rejected": "Bye."},
        [("chosen", None, [("system", "S"), U, GOOD]), ("rejected", None, [("system", "S"), U, BAD])], [],
    ),
    "RLAIF-V": (
        {"ds_name": "RLAIF-V", "image": "a.png", "question": "Hi", "chosen": "Hello.", "rejected": "Bye.", "idx": 0},
        [("chosen", None, [("user", "<image>Hi"), GOOD]), ("rejected", None, [("user", "<image>Hi"), BAD])],
        ["ds_name", "idx"],
    ),
    "LLaMA-Factory, alpaca": (
        {"instruction": "Say", "input": "Hi", "chosen": "Hello.", "rejected": "Bye.", "history": [["Hi", "Yes?"]]},
        [("chosen", None, [U, CONTEXT, ("user", "Say\n\nHi"), GOOD]),
         ("rejected", None, [U, CONTEXT, ("user", "Say\n\nHi"), BAD])], [],
    ),
    "LLaMA-Factory, sharegpt": (
        {"conversations": [HUMAN], "chosen": {"from": "gpt", "value": "Hello."},
         "rejected": {"from": "gpt", "value": "Bye."}}, PAIRED, [],
    ),
    "LLaMA-Factory, images (RLHF-V)": (
        {"conversations": [{"from": "human", "value": "<image>Hi"}], "images": ["a.png"],
         "chosen": {"from": "gpt", "value": "Hello."}, "rejected": {"from": "gpt", "value": "Bye."}},
        [("chosen", None, [("user", "<image>Hi"), GOOD]), ("rejected", None, [("user", "<image>Hi"), BAD])], [],
    ),
    "LLaMA-Factory 1.0": ({"chosen_messages": [HI, HELLO], "rejected_messages": [HI, BYE]}, PAIRED, []),
    "ms-swift, rejected_response": ({"messages": [HI, HELLO], "rejected_response": "Bye."}, PAIRED, []),
    "ms-swift, query": ({"query": "Hi", "response": "Hello.", "rejected_response": "Bye."}, PAIRED, []),
    "ms-swift, rejected turns": (
        {"messages": [SYSTEM, HI, EARLIER, HI, HELLO], "rejected_response": [BYE]},
        [("chosen", None, [("system", "S"), U, CONTEXT, U, GOOD]),
         ("rejected", None, [("system", "S"), U, CONTEXT, U, BAD])], [],
    ),
    "ms-swift, rejected_messages": (
        {"messages": [{**HI, "content": "<image>Hi"}, HELLO], "images": ["a.png"],
         "rejected_messages": [{**HI, "content": "<image>Hi"}, BYE], "rejected_images": ["a.png"]},
        [("chosen", None, [("user", "<image>Hi"), GOOD]), ("rejected", None, [("user", "<image>Hi"), BAD])], [],
    ),
    "ms-swift, rejected_images": (
        {"messages": [{**HI, "content": "<image>Hi"}, HELLO], "images": ["a.png"], "rejected_images": ["b.png"]},
        [("chosen", None, [("user", "<image>Hi"), GOOD]), ("rejected", None, [("user", "<image>Hi"), GOOD])], [],
    ),
    "UltraInteract": (
        {"trajectory": [{"from": "user", "value": "Hi"}], "chosen": "Hello.", "rejected": "Bye."}, PAIRED, [],
    ),
    "SHP": (
        {"post_id": "q", "history": "Hi", "human_ref_A": "Bye.", "human_ref_B": "Hello.", "labels": 0, "score_A": 1},
        PAIRED, ["post_id", "score_A"],
    ),
    "PKU-SafeRLHF": (
        {"prompt": "Hi", "response_0": "Bye.", "response_1": "Hello.", "better_response_id": 1,
         "safer_response_id": 0},
        PAIRED, ["safer_response_id"],
    ),
    "HelpSteer2 preference": (
        {"prompt": "Hi", "response_1": "Hello.", "response_2": "Bye.", "preference_strength": -2, "split": "train"},
        PAIRED, ["split"],
    ),
    "HelpSteer3": (
        {"domain": "code", "context": [HI], "response1": "Bye.", "response2": "Hello.", "overall_preference": 3},
        PAIRED, ["domain"],
    ),
    "Chatbot Arena": (
        {"model_a": "m", "model_b": "n", "winner": "model_b", "conversation_a": [HI, BYE],
         "conversation_b": [HI, HELLO]},
        PAIRED, ["model_a", "model_b"],
    ),
    "UltraFeedback": (
        {"source": "evol", "instruction": "Hi", "models": ["m", "n"], "completions": [
            {"model": "m", "response": "Hello.", "overall_score": 8.5, "critique": "Good."},
            {"model": "n", "response": "Bye.", "overall_score": 2, "critique": "Bad."}]},
        [("completion", 8.5, [U, GOOD]), ("completion", 2.0, [U, BAD])], ["critique", "model", "models", "source"],
    ),
    "Nectar": (
        {"prompt": "\n\nHuman: Hi\n\nAssistant: ", "answers": [
            {"answer": "Hello.", "model": "m", "rank": 1.0}, {"answer": "Bye.", "model": "n", "rank": 2.0}]},
        [("completion", -1.0, [U, GOOD]), ("completion", -2.0, [U, BAD])], ["model"],
    ),
    "distilabel": (
        {"instruction": "Hi", "generations": ["Hello.", "Bye."], "ratings": ["5", "2"], "generation_model": "m"},
        [("completion", 5.0, [U, GOOD]), ("completion", 2.0, [U, BAD])], ["generation_model"],
    ),
    "RRHF": (
        {"query": "Hi", "responses": ["Hello.", "Bye."], "scores": [0.5, -1]},
        [("completion", 0.5, [U, GOOD]), ("completion", -1.0, [U, BAD])], [],
    ),
    "members": (
        {"members": [{"role": "a", "label": 1, "messages": [HI, HELLO]}, {"text": "Bye.", "label": [0.5, 1]}]},
        [("a", 1.0, [U, GOOD]), (None, (0.5, 1.0), "Bye.")], [],
    ),
    "pairs of Sentence Transformers": (
        {"anchor": "q", "positive": "p"}, [("query", None, "q"), ("positive", None, "p")], [],
    ),
    "triplets of Sentence Transformers": (
        {"query": "q", "positive": "p", "negative_1": "n1", "negative_2": "n2", "negative_10": "n10"},
        [("query", None, "q"), ("positive", None, "p"), ("negative", None, "n1"), ("negative", None, "n2"),
         ("negative", None, "n10")], [],
    ),
    "FlagEmbedding": (
        {"query": "q", "pos": ["p"], "neg": ["n", "m"], "pos_scores": [0.9], "neg_scores": [0.1, 0.2], "prompt": "P: ",
         "type": "normal"},
        [("query", None, "P: q"), ("positive", 0.9, "p"), ("negative", 0.1, "n"), ("negative", 0.2, "m")], ["type"],
    ),
    "Tevatron, MS MARCO": (
        {"query_id": "1", "query": "q", "positive_passages": [{"docid": "2", "title": "T", "text": "p"}],
         "negative_passages": [{"docid": "3", "title": "", "text": "n"}]},
        [("query", None, "q"), ("positive", None, "T p"), ("negative", None, "n")], ["query_id"],
    ),
    "DPR": (
        {"question": "q", "answers": ["a"], "positive_ctxs": [{"title": "T", "text": "p"}], "negative_ctxs": [],
         "hard_negative_ctxs": [{"title": "N", "text": "n"}]},
        [("query", None, "q"), ("positive", None, "T p"), ("negative", None, "N n")], ["answers"],
    ),
    "NeMo": (
        {"query": "q", "pos_doc": "p", "neg_doc": ["n"]},
        [("query", None, "q"), ("positive", None, "p"), ("negative", None, "n")], [],
    ),
    "ms-swift, embeddings and rerankers": (
        {"messages": [{**HI, "content": "<image>q"}], "images": ["a.png"],
         "positive_messages": [[{**HELLO, "content": "p"}]],
         "negative_messages": [[{**HELLO, "content": "<image>n"}]], "negative_images": [["b.png"]]},
        [("query", None, [("user", "<image>q")]), ("positive", None, [("assistant", "p")]),
         ("negative", None, [("assistant", "<image>n")])], [],
    ),
    "ms-swift, cosine similarity": (
        {"messages": [HI], "positive_messages": [[HI]], "label": 0.8},
        [("query", None, [U]), ("positive", 0.8, [U])], [],
    ),
    "lists of rerankers": (
        {"query": "q", "docs": ["a", "b"], "labels": [1, 0]},
        [("query", None, "q"), ("document", 1.0, "a"), ("document", 0.0, "b")], [],
    ),
    "MS MARCO": (
        {"query": "q", "query_id": 1, "answers": ["x"], "passages": {"is_selected": [0, 1], "passage_text": ["a", "b"],
                                                                     "url": ["u", "v"]}},
        [("query", None, "q"), ("document", 0.0, "a"), ("document", 1.0, "b")], ["answers", "query_id"],
    ),
    "STS": (
        {"sentence1": "a", "sentence2": "b", "score": 0.4}, [("query", None, "a"), ("document", 0.4, "b")], [],
    ),
    "NLI": (
        {"premise": "a", "hypothesis": "b", "label": 2, "idx": 3}, [("query", None, "a"), ("document", 2.0, "b")],
        ["idx"],
    ),
    "QQP": (
        {"question1": "a", "question2": "b", "label": 0}, [("query", None, "a"), ("document", 0.0, "b")], [],
    ),
    "pairs of rerankers": (
        {"query": "q", "passage": "a", "label": True}, [("query", None, "q"), ("document", 1.0, "a")], [],
    ),
}  # fmt: skip

# name: record; label, and turns or text; unused fields
LABELS: dict[str, tuple[dict[str, Any], Any, Any, list[str]]] = {
    "KTO of TRL": ({"prompt": "Hi", "completion": "Bye.", "label": False}, (0.0,), [U, BAD], []),
    "KTO of ms-swift": ({"messages": [HI, HELLO], "label": True}, (1.0,), [U, GOOD], []),
    "KTO of LLaMA-Factory": (
        {"conversations": [HUMAN, {"from": "gpt", "value": "Bye."}], "kto_tag": False}, (0.0,), [U, BAD], [],
    ),
    "HelpSteer": (
        {"prompt": "Hi", "response": "Hello.", "helpfulness": 3, "correctness": 4, "coherence": 4, "complexity": 2,
         "verbosity": 1}, (3.0, 4.0, 4.0, 2.0, 1.0), [U, GOOD], [],
    ),
    "classification": ({"text": "a", "label": 2}, (2.0,), "a", []),
    "regression": ({"text": "a", "label": 0.5}, (0.5,), "a", []),
    "several classes": ({"text": "a", "labels": [0.0, 1.0, 1.0]}, (0.0, 1.0, 1.0), "a", []),
    "classification of ms-swift": ({"messages": [HI], "label": 1}, (1.0,), [U], []),
    "indices of classes (GoEmotions)": ({"text": "a", "labels": [2, 27]}, None, "a", ["labels"]),
    "a label that is text": ({"text": "a", "label": "good"}, None, "a", ["label"]),
    "a label that is no number": ({"text": "a", "label": float("nan")}, None, "a", ["label"]),
    "a hash": ({"text": "a", "label": 2**24 + 1}, None, "a", ["label"]),
    "ChartQA": ({"query": "Hi", "label": ["Hello."]}, None, [U, GOOD], []),
    "labels of tokens": ({"input_ids": [1, 2], "labels": [-100, 2]}, None, ([1, 2], [-100, 2]), []),
}  # fmt: skip


def content(conversation: Conversation) -> Any:
    """Turns with their weights other than 1, text, or tokens and labels."""
    if conversation.input_ids is not None:
        assert conversation.labels is not None
        return conversation.input_ids.tolist(), conversation.labels.tolist()
    turns = [(m.role, m.content) if m.weight == 1 else (m.role, m.content, m.weight) for m in conversation.messages]
    return conversation.text if conversation.text is not None else turns


@pytest.mark.parametrize("name", GROUPS)
def test_public_formats_of_groups_become_their_members(name: str) -> None:
    record, members, unused = GROUPS[name]
    found = normalize({"id": 7, **record})
    assert found.id == "7"
    expected = [(role, (label,) if isinstance(label, float) else label, turns) for role, label, turns in members]
    assert [(m.role, m.label, content(m)) for m in found.members] == expected
    assert list(found.unused_fields) == unused
    assert found.images == tuple(image for member in found.members for image in member.images)
    assert not found.messages
    assert any("in one row" in note for note in found.notes)


@pytest.mark.parametrize("name", LABELS)
def test_labels_of_samples(name: str) -> None:
    record, label, turns, unused = LABELS[name]
    found = normalize(record)
    assert (found.label, content(found), list(found.unused_fields)) == (label, turns, unused)
    assert (UNPAIRED in found.notes) == name.startswith("KTO")


def test_25_formats_are_tested() -> None:
    assert len(GROUPS) + len(LABELS) >= 60


def test_images_of_the_rejected_answer() -> None:
    chosen, rejected = normalize(GROUPS["ms-swift, rejected_images"][0]).members
    assert [[image.path for image in one.images] for one in (chosen, rejected)] == [["a.png"], ["b.png"]]
    shared = normalize({**GROUPS["RLAIF-V"][0], "tools": [{"name": "f"}], "chat_template_kwargs": {"a": 1}})
    assert [[image.path for image in one.images] for one in shared.members] == [["a.png"], ["a.png"]]
    assert all(one.tools and one.chat_template_kwargs == {"a": 1} for one in shared.members)
    assert len(shared.images) == 2


def test_notes_name_the_kind_of_a_group() -> None:
    for name, note in (("TRL, turns", PAIR), ("SHP", PAIR), ("Nectar", RANKING), ("NLI", TEXTS)):
        assert normalize(GROUPS[name][0]).notes == (note,)
    assert normalize({"prompt": "Hi", "chosen": "Bye.", "rejected": "Bye."}).notes == (PAIR, EQUAL)


def test_the_weight_of_a_record_is_that_of_its_members() -> None:
    record = {**GROUPS["TRL, turns"][0], "weight": 0.5}
    assert [one.weight for one in normalize(record, record_weight="loss").members] == [0.5, 0.5]
    with pytest.raises(RecordError, match="set `record_weight` to loss"):
        normalize(record)


def test_fields_of_a_group_and_of_its_turns_are_counted_or_cost_the_record() -> None:
    turns = [HI, {**HELLO, "mood": "good"}]
    assert normalize({"messages": turns, "rejected_response": "Bye.", "url": "u"}).unused_fields == ("mood", "url")
    with pytest.raises(RecordError, match="image_id 5 refers to an image, but the record contains none"):
        normalize({"prompt": "Hi", "chosen": "Hello.", "rejected": "Bye.", "image_id": 5})


def test_a_record_with_an_answer_is_not_a_group_of_texts() -> None:
    for more in ({"positive": "p"}, {"documents": ["d"], "labels": [1]}, {"passage": "p", "label": 1}):
        found = normalize({"query": "Hi", "response": "Hello.", **more})
        assert (found.members, content(found)) == ((), [U, GOOD])


REJECTED: list[tuple[Any, str]] = [
    ({"prompt": "Hi", "chosen": "Hello.", "rejected": ""}, "empty: rejected is empty"),
    ({"prompt": "Hi", "chosen": "Hello.", "rejected": " "}, r"empty: member 1 \(rejected\): an answer is empty"),
    ({"prompt": "Hi", "chosen": "Hello."}, "missing_field: the record has a chosen answer and no rejected answer"),
    ({"prompt": "Hi", "rejected": "Bye."}, "no chosen answer; a preference pair has both"),
    ({"prompt": "Hi", "chosen": ["Hello."], "rejected": ["Bye."]}, "chosen is .'Hello.'.; use a string, or turns"),
    ({"prompt": "Hi", "chosen": {"a": 1}, "rejected": "x"}, "chosen is .{'a': 1}.; use a string, or turns"),
    ({"prompt": "Hi", "chosen": True, "rejected": "x"}, "chosen is True; use a string, or turns"),
    ({"chosen": "x", "rejected": [HI, BYE]}, "use two lists of turns"),
    ({"messages": [HI, HELLO], "chosen": "x", "rejected": "y"}, "end with an answer; end them with a user turn"),
    ({"messages": [BYE, HI], "chosen": [HI, HELLO], "rejected": [HI, BYE]}, "start with other turns than the record"),
    ({"chosen": [HI, HELLO], "rejected": [HI]}, "rejected has no assistant turn after the prompt"),
    ({"prompt": [HI], "chosen": [HELLO], "rejected": [{"role": "narrator", "content": "x"}]}, "rejected has no"),
    ({"prompt": "Hi", "chosen": "a", "rejected_response": "b", "rejected": "c"}, "rejected_response; keep"),
    ({"chosen_ids": [1], "prompt_ids": [2]}, "no rejected answer"),
    ({"prompt": [HI], "chosen": [HELLO], "rejected": [BYE], "margin": "x"}, "margin must be a number"),
    ({"prompt": [HI], "chosen": [HELLO], "rejected": [BYE], "history": [["a", "b"]]}, "the field history of"),
    ({"prompt": "Hi", "completions": ["a", "b"], "labels": [True, False]}, "stepwise supervision"),
    ({"prompt": "Hi", "completions": ["a", "b"], "scores": [1]}, "scores has 1 entries for 2 completions"),
    ({"prompt": "Hi", "completions": ["a", "b"], "scores": [1, None]}, "entry 1 of completions has no score"),
    ({"prompt": "Hi", "completions": ["a"], "scores": [1]}, "completions has 1 answer; a group has 2 or more"),
    ({"prompt": "Hi", "answers": [{"answer": "a", "rank": 1}, 5]}, "an entry of answers is 5"),
    ({"prompt": "Hi", "response_1": "a", "response_2": "b", "preference_strength": 0}, "0: neither answer is chosen"),
    ({"prompt": "Hi", "response_1": "a", "response_2": "b", "preference_strength": [None]}, "neither answer"),
    ({"winner": "tie", "conversation_a": [HI, BYE], "conversation_b": [HI, HELLO]}, "'tie': neither answer is chosen"),
    ({"messages": [HI, HELLO], "kto_tag": "true"}, "kto_tag must be true or false, not 'true'"),
    ({"query": "q", "pos": ["p"], "pos_scores": [1, 2]}, "pos_scores has 2 entries for 1 texts"),
    ({"query": "q", "pos": [{"title": "T"}]}, "a text of pos must be text, not null"),
    ({"query": "q", "pos": [""]}, r"member 1 \(positive\): text is empty"),
    ({"query": "q", "pos": "p", "system": "S"}, r"member 0 \(query\): a text record has a system field"),
    ({"messages": [HI], "positive_messages": [[HI]], "positive_images": []}, None),
    ({"messages": [HI], "positive_messages": [[HI]], "positive_images": [["a"], ["b"]]}, "2 lists for 1 pos"),
    ({"query": "q", "docs": ["a", "b"], "labels": [1]}, "labels has 1 entries for 2 docs"),
    ({"query": "q", "docs": ["a"], "labels": ["x"]}, "labels must be a number"),
    ({"premise": "a", "hypothesis": "b", "label": -1}, "label is -1: the pair has no label"),
    ({"members": [{"text": "a", "role": 5}]}, "the role of a member must be text, not 5"),
    ({"members": [{"text": "a", "label": "x"}]}, "its label must be a number or a list of numbers, not 'x'"),
    ({"members": [{"members": [{"text": "a"}]}]}, "a member is a group itself"),
    ({"members": [{"a": "b"}]}, r"member 0 \(no role\): no record format has the fields a"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "detail"), REJECTED)
def test_a_wrong_group_is_rejected_in_one_line(record: Any, detail: str | None) -> None:
    if detail is None:
        assert normalize(record).members
        return
    with pytest.raises(RecordError, match=detail) as caught:
        normalize(record)
    assert "\n" not in str(caught.value)


EXAMPLES = min(int(os.environ.get("ENERGON_PACKED_FUZZ", "400")), 5000)
BROKEN = st.sampled_from(
    (
        None,
        True,
        0,
        1.5,
        "",
        " ",
        "x",
        "\n\nHuman:",
        [],
        {},
        [None],
        ["x"],
        [[]],
        [{}],
        [HI],
        [HELLO],
        HI,
        [1, 2],
        [0.5],
    )
)


@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_value_in_a_group_is_read_or_rejected(data: st.DataObject) -> None:
    record = dict(data.draw(st.sampled_from([record for record, _, _ in GROUPS.values()])))
    for name in data.draw(st.lists(st.sampled_from(sorted(record)), max_size=2)):
        record[name] = data.draw(BROKEN)
    try:
        assert isinstance(normalize(record), Conversation)
    except RecordError as error:
        assert error.detail
        assert "\n" not in error.detail


TRL = [name for name in GROUPS if name.startswith(("TRL, turns", "Argilla dpo-mix"))]


@pytest.mark.parametrize("name", TRL)
def test_pairs_have_the_prompt_and_the_tokens_of_trl(name: str, tokenizer_dir: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.data_utils import common_prefix_length

    record = {key: value for key, value in GROUPS[name][0].items() if key in ("prompt", "chosen", "rejected")}
    pair = trl.maybe_extract_prompt(record)
    members = normalize(record).members
    unpaired = list(trl.unpair_preference_dataset(Dataset.from_list([pair])))
    assert [row["label"] for row in unpaired] == [member.role == "chosen" for member in members]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    encoder = ChatEncoder.from_pretrained(tokenizer_dir)
    prompt = tokenizer.apply_chat_template(pair["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
    for member, row in zip(members, unpaired, strict=True):
        turns = [*row["prompt"], *row["completion"]]
        assert [(m.role, m.content) for m in member.messages] == [(t["role"], t["content"]) for t in turns]
        # As the DPOTrainer: the completion starts after the tokens of the prompt.
        ids = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
        start = common_prefix_length(prompt, ids)
        sample = encoder.encode(member)
        assert sample.input_ids.tolist() == ids
        targets = (sample.labels != -100).nonzero()[0]
        assert targets[0] == start
        assert (sample.labels[targets] == sample.input_ids[targets]).all()
        after = ids[targets[-1] + 1 :]  # the line break after the last turn is no target
        assert tokenizer.decode(after).strip() == ""
        assert targets.tolist() == list(range(start, len(ids) - len(after)))


def test_a_pair_of_tokens_is_that_of_the_dpo_trainer(tokenizer_dir: Path) -> None:
    """The columns that DPOTrainer's collator joins: prompt and completion, and the mask of the completion."""
    pytest.importorskip("trl")
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    row = {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [10, 11]}
    batch = DataCollatorForPreference(pad_token_id=0)([row])
    for member, ids, mask in zip(
        normalize(row).members, batch["input_ids"].tolist(), batch["completion_mask"].tolist(), strict=True
    ):
        assert member.input_ids is not None
        assert member.labels is not None
        assert member.input_ids.tolist() == ids
        assert (member.labels != -100).tolist() == [bool(flag) for flag in mask]


def test_media_files_of_the_samples_of_a_group_are_replaced() -> None:
    prompt = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]}
    pair = normalize({"prompt": [prompt], "chosen": [HELLO], "rejected": [BYE]})
    changed = with_files(pair, lambda file: MediaReference(path=f"moved/{file.path}"))
    assert [file.path for file in changed.images] == ["moved/a.png", "moved/a.png"]
    assert [file.path for member in changed.members for file in member.images] == ["moved/a.png", "moved/a.png"]
