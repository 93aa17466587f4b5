"""Texts of embedding models and rerankers in; a group out, with a member for each text.

Embedding: the members `query`, `positive` and `negative`, in this order.

    Sentence Transformers   {"anchor", "positive"}, {"anchor", "positive", "negative"}, also `query`, `negative_1`, ...
    FlagEmbedding (BGE)     {"query", "pos": ["..."], "neg": ["..."], "pos_scores", "neg_scores", "prompt"}
    Tevatron, MS MARCO      {"query", "positive_passages": [{"title", "text"}], "negative_passages": [...]}
    DPR                     {"question", "positive_ctxs": [{"title", "text"}], "hard_negative_ctxs", "negative_ctxs"}
    NeMo                    {"query", "pos_doc": "...", "neg_doc": ["..."]}
    ms-swift                {"messages", "positive_messages": [[turns]], "negative_messages": [[turns]], and images,
                            positive_images, negative_images}

Reranker: a `query`, and a `document` for each text, whose label is its score.

    Sentence Transformers   {"query", "docs": ["..."], "labels": [1, 0]}, also `documents`, `passages`; `scores`
    MS MARCO                {"query", "passages": {"passage_text": ["..."], "is_selected": [0, 1]}}
    STS                     {"sentence1", "sentence2", "score"}
    NLI, QQP, PAWS          {"premise", "hypothesis", "label"}, {"question1", "question2", "label"}

Texts are documents, without a chat template. A `title` precedes its text, after a space, as in Tevatron. `prompt` of
FlagEmbedding precedes the query. Media and settings of the record belong to the query.
"""

import re
from typing import Any, ClassVar

from energon_packed.records.fields import (
    COMMON_FIELDS,
    OBJECT,
    Record,
    given,
    is_given,
    missing_field,
    read_list,
    read_number,
    read_text,
    unsupported_field,
)
from energon_packed.records.media.fields import Media
from energon_packed.records.record_formats.base import GroupFormat

TEXTS = "query and documents of a record in one row"
"""Note of a record with a query and documents."""

_QUERIES = ("query", "anchor", "question")
_WEAK = ("positive", "positives", "pos")  # also metadata of records with an answer
_POSITIVES = (*_WEAK, "positive_ctxs", "positive_passages", "pos_doc", "positive_messages")
_NEGATIVES = (
    *("negative", "negatives", "neg", "hard_negative_ctxs", "negative_ctxs", "negative_passages", "neg_doc"),
    "negative_messages",
)
_NUMBERED = re.compile(r"negative_\d+")  # Sentence Transformers
_MEDIA = ("images", "videos", "audios")
_TARGETS = ("response", "answer", "completion", "output")
_TEXT_FIELDS = ("text", "passage_text", "passage", "content", "document")


class Embedding(GroupFormat):
    """A query, texts that match it, and texts that do not."""

    key = "positive"
    marks = frozenset(_POSITIVES)
    shares = False
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {
        *(*_QUERIES, *_POSITIVES, *_NEGATIVES, "pos_scores", "neg_scores", "prompt", "label", "messages", "objects"),
        *(f"{side}_{name}" for side in ("positive", "negative") for name in _MEDIA),
    }

    def matches(self, record: Record) -> bool:
        """Whether the record has a query and a positive text."""
        names = _POSITIVES if not given(record, _TARGETS) else _POSITIVES[len(_WEAK) :]
        texts = any(
            isinstance(record.get(name), str | list | tuple | dict) and is_given(record.get(name)) for name in names
        )
        return texts and bool(given(record, (*_QUERIES, "messages")))

    def expand(self, record: Record, media: Media) -> tuple[list[dict[str, Any]], set[str]]:
        """Make the members `query`, `positive` and `negative`."""
        used = {"objects"}
        query = self._query(record, used)
        numbered = sorted((n for n in record if _NUMBERED.fullmatch(str(n))), key=lambda n: int(n.rpartition("_")[2]))
        members = [{**query, "role": "query"}]
        for side, names, scores_name in (
            ("positive", _POSITIVES, "pos_scores"),
            ("negative", (*_NEGATIVES, *numbered), "neg_scores"),
        ):
            found = [text for name in names if is_given(record.get(name)) for text in _texts(record, name, side, used)]
            used.update(names)
            scores = _scores(record, scores_name, len(found), used)
            label = read_number(record.get("label"), "label", float) if side == "positive" else None
            members += [
                {**text, "role": side, "label": label if score is None else score}
                for text, score in zip(found, scores, strict=True)
            ]
        used.add("label")
        media.notes.append(TEXTS)
        return members, used

    def _query(self, record: Record, used: set[str]) -> dict[str, Any]:
        shared = self.shared(record)
        if is_given(record.get("messages")):
            used.add("messages")
            return {**shared, "messages": record["messages"]}
        name = given(record, _QUERIES)[0]
        prompt = read_text(record["prompt"], "prompt") if is_given(record.get("prompt")) else ""
        used |= {name, "prompt"}
        return {**shared, "text": prompt + read_text(record[name], name)}


def _texts(record: Record, name: str, side: str, used: set[str]) -> list[dict[str, Any]]:
    """Read the texts of a field: a text, a list of texts, or lists of turns with their media."""
    value = record[name]
    if name.endswith("_messages"):
        dialogs = read_list(value, name)
        if dialogs and isinstance(dialogs[0], OBJECT):  # a single list of turns
            dialogs = [dialogs]
        members = [{"messages": dialog} for dialog in dialogs]
        for kind in _MEDIA:
            field = f"{side}_{kind}"
            if not is_given(record.get(field)):
                continue
            used.add(field)
            media = read_list(record[field], field)
            if len(media) != len(members):
                raise missing_field(f"{field} has {len(media)} lists for {len(members)} {name}")
            for member, files in zip(members, media, strict=True):
                member[kind] = files
        return members
    values = value if isinstance(value, list | tuple) else [value]
    return [{"text": _text(entry, name)} for entry in values]


def _text(value: Any, name: str) -> str:
    """Read a text, or an object with a title and a text."""
    if not isinstance(value, OBJECT):
        return read_text(value, f"a text of {name}")
    text = next((value[field] for field in _TEXT_FIELDS if value.get(field) is not None), None)
    title = read_text(value["title"], f"a title of {name}") if is_given(value.get("title")) else ""
    return " ".join([part for part in (title, read_text(text, f"a text of {name}")) if part])


def _scores(record: Record, name: str, count: int, used: set[str]) -> list[float | None]:
    """Read the scores of texts; None for each without scores."""
    if not is_given(record.get(name)):
        return [None] * count
    used.add(name)
    scores = read_list(record[name], name)
    if len(scores) != count:
        raise missing_field(f"{name} has {len(scores)} entries for {count} texts")
    return [read_number(score, name, float) for score in scores]


_DOCUMENTS = ("documents", "passages", "docs", "candidates")
_LABELS = ("labels", "scores", "relevance", "label")


class Reranker(GroupFormat):
    """A query and documents, with a label each."""

    key = "documents"
    marks = frozenset(_DOCUMENTS)
    shares = False
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"query", "question", *_DOCUMENTS, *_LABELS, "objects"}

    def matches(self, record: Record) -> bool:
        """Whether the record has a query, documents and their labels."""
        if given(record, _TARGETS):
            return False
        return bool(given(record, ("query", "question"))) and _labeled(record) is not None

    def expand(self, record: Record, media: Media) -> tuple[list[dict[str, Any]], set[str]]:
        """Make the members `query` and `document`."""
        found = _labeled(record)
        assert found is not None
        name, labels_name, texts, labels = found
        query = given(record, ("query", "question"))[0]
        if len(texts) != len(labels):
            raise missing_field(f"{labels_name} has {len(labels)} entries for {len(texts)} {name}")
        members = [{**self.shared(record), "text": read_text(record[query], query), "role": "query"}]
        for text, label in zip(texts, labels, strict=True):
            number = float(label) if isinstance(label, bool) else read_number(label, labels_name, float)
            members.append({"text": _text(text, name), "role": "document", "label": number})
        media.notes.append(TEXTS)
        return members, {query, name, labels_name, "objects"}


def _labeled(record: Record) -> tuple[str, str, list[Any], list[Any]] | None:
    """Field of the documents, field of their labels, documents and labels; None without a list of labels."""
    for name in _DOCUMENTS:
        value = record.get(name)
        if isinstance(value, OBJECT):  # MS MARCO
            texts, labels = value.get("passage_text"), value.get("is_selected")
            if isinstance(texts, list | tuple) and isinstance(labels, list | tuple) and texts:
                return name, "is_selected", list(texts), list(labels)
        if not isinstance(value, list | tuple) or not value:
            continue
        for labels_name in _LABELS:
            labels = record.get(labels_name)
            if isinstance(labels, list | tuple) and labels:
                return name, labels_name, list(value), list(labels)
    return None


_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("sentence_A", "sentence_B"),
    ("query", "document"),
    ("query", "passage"),
)
_PAIR_LABELS = ("label", "score", "labels", "similarity_score", "relatedness_score", "similarity")


class SentencePair(GroupFormat):
    """Two texts with a label."""

    key = "sentence2"
    marks = frozenset(second for _, second in _PAIRS)
    shares = False
    fields: ClassVar[frozenset[str]] = (
        COMMON_FIELDS | {*_PAIR_LABELS, "objects"} | {n for pair in _PAIRS for n in pair}
    )

    def matches(self, record: Record) -> bool:
        """Whether the record has two texts and a number."""
        if given(record, _TARGETS):
            return False
        return self._pair(record) is not None and self._label(record) is not None

    def expand(self, record: Record, media: Media) -> tuple[list[dict[str, Any]], set[str]]:
        """Make the members `query` and `document`."""
        pair, name = self._pair(record), self._label(record)
        assert pair is not None
        assert name is not None
        label = float(record[name])
        if name == "label" and label == -1:
            raise unsupported_field("label is -1: the pair has no label")
        first, second = ({"text": read_text(record[field], field)} for field in pair)
        media.notes.append(TEXTS)
        members = [{**self.shared(record), **first, "role": "query"}, {**second, "role": "document", "label": label}]
        return members, {*pair, name, "objects"}

    @staticmethod
    def _pair(record: Record) -> tuple[str, str] | None:
        return next((pair for pair in _PAIRS if all(is_given(record.get(name)) for name in pair)), None)

    @staticmethod
    def _label(record: Record) -> str | None:
        return next((name for name in _PAIR_LABELS if isinstance(record.get(name), int | float)), None)
