"""Several answers to a prompt in; a group out, with a member for each answer.

Pair: the members `chosen` and `rejected`.

    TRL             {"prompt": "...", "chosen": "...", "rejected": "..."}, also lists of turns
                    {"chosen": [turns], "rejected": [turns]}, {"chosen": "...", "rejected": "..."}, with the same start
                    {"prompt_ids", "chosen_ids", "rejected_ids"}; older: {"chosen_input_ids", "chosen_labels", ...}
    UltraFeedback binarized, Argilla   {"prompt", "chosen": [turns], "rejected": [turns], "score_chosen", ...}
    HH-RLHF         {"chosen": "\\n\\nHuman: ...\\n\\nAssistant: ...", "rejected": "..."}
    Orca DPO        {"system", "question", "chosen", "rejected"}; RLAIF-V also {"image"}
    LLaMA-Factory   {"instruction", "input", "chosen", "rejected"},
                    {"conversations", "chosen": turn, "rejected": turn}
    ms-swift        {"messages", "rejected_response": "..." or [turns]}, {"messages", "rejected_messages"}, and
                    `rejected_images`, `rejected_videos`, `rejected_audios`, `rejected_tools`

Comparison: two answers and the choice, as a pair.

    SHP             {"history", "human_ref_A", "human_ref_B", "labels": 1 for A}
    PKU-SafeRLHF    {"prompt", "response_0", "response_1", "better_response_id"}
    HelpSteer2      {"prompt", "response_1", "response_2", "preference_strength": below 0 for the first}
    HelpSteer3      {"context": [turns], "response1", "response2", "overall_preference": below 0 for the first}
    Chatbot Arena   {"conversation_a": [turns], "conversation_b": [turns], "winner": "model_a"}

Ranking: members `completion` in the order of the record, whose label is the score; a rank becomes its negative.

    UltraFeedback   {"instruction", "completions": [{"response", "overall_score"}]}
    Nectar          {"prompt": "\\n\\nHuman: ...", "answers": [{"answer", "rank"}]}
    distilabel      {"instruction", "generations": ["..."], "ratings": [4, 2]}; RRHF: `responses` and `scores`

Only the answers are targets: earlier assistant turns are context, as in TRL. The turns with which both dialogs start
are the prompt. Two strings without a prompt are documents; their same start changes both log probabilities alike.

Members: {"members": [record, record]}, each in any record format, with `role` and `label`: for groups of other forms,
from an adapter.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from energon_packed.errors import Reason, RecordError
from energon_packed.records.fields import (
    COMMON_FIELDS,
    OBJECT,
    Record,
    given,
    is_given,
    joined_texts,
    missing_field,
    read_number,
    read_text,
    read_tokens,
    shown,
    unsupported_field,
)
from energon_packed.records.media.fields import Media
from energon_packed.records.record_formats.base import GroupFormat
from energon_packed.records.record_formats.messages import read_turn_list
from energon_packed.records.turns import CONTENT_FIELDS, ROLE_FIELDS, ROLE_NAMES, is_turn, read_history

PAIR = "preference pair: chosen and rejected in one row"
"""Note of a record with a chosen and a rejected answer."""
RANKING = "scored answers: all of a record in one row"
"""Note of a record with several answers and their scores."""
MEMBERS = "members: all of a record in one row"
"""Note of a record with a list of members."""
EQUAL = "chosen and rejected are equal"
"""Note of a pair without a difference."""

_TURN_LISTS = ("messages", "conversations", "conversation", "trajectory", "context", "prompt")
# Fields of a prompt that is text: the first with a value is used, with the fields that are joined to it.
_TEXTS: tuple[tuple[str, ...], ...] = (
    ("prompt",),
    ("context", "passage", "article", "hint", "question"),
    ("instruction", "input", "context"),
    ("query",),
    ("problem",),
    ("input",),
)
_QUESTIONS = ("prompt", "question", "instruction", "query", "problem", "input")  # the field that each of them needs
_PROMPT_FIELDS = frozenset((*_TURN_LISTS, *(name for names in _TEXTS for name in names), "history"))
_ANSWERS = ("response", "output", "answer", "completion")  # of ms-swift, beside rejected_response
_SIDES = ("chosen", "rejected")
_TOKENS = ("ids", "input_ids")
_OF_REJECTED = ("images", "videos", "audios", "tools")
_PAIR_MARKS = frozenset(
    (
        *(*_SIDES, "chosen_messages", "rejected_messages", "rejected_response"),
        *(f"rejected_{name}" for name in _OF_REJECTED if name != "tools"),
        *(f"{side}_{name}" for side in _SIDES for name in _TOKENS),
    )
)
_SCORES = (
    ("score_chosen", "score_rejected"),
    *((f"chosen{name}", f"rejected{name}") for name in ("_score", "_rating", "_reward", "-rating", "-score")),
)
_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant):[ ]?")  # Anthropic
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}

Prompt = str | list[Any] | None


class Pair(GroupFormat):
    """A chosen and a rejected answer."""

    key = "chosen"
    marks = _PAIR_MARKS
    fields: ClassVar[frozenset[str]] = (
        COMMON_FIELDS
        | _PAIR_MARKS
        | _PROMPT_FIELDS
        | {
            *(
                *_ANSWERS,
                "objects",
                "margin",
                "rejected_tools",
                "prompt_ids",
                "prompt_input_ids",
                "prompt_attention_mask",
            ),
            *(name for names in _SCORES for name in names),
            *(f"{side}_{name}" for side in _SIDES for name in ("labels", "attention_mask")),
        }
    )

    def matches(self, record: Record) -> bool:
        """Whether a field of a pair has a value."""
        return bool(given(record, _PAIR_MARKS))

    def expand(self, record: Record, media: Media) -> tuple[list[dict[str, Any]], set[str]]:
        """Make the members `chosen` and `rejected`."""
        used = set[str]()
        members = _token_sides(record, used) or _sides(record, used)
        media.notes.append(PAIR)
        if members[0] == members[1]:
            media.notes.append(EQUAL)
        labels = _pair_labels(record, used)
        return [
            {**member, "role": side, "label": label}
            for member, side, label in zip(members, _SIDES, labels, strict=True)
        ], used


def _pair_labels(record: Record, used: set[str]) -> tuple[float | None, float | None]:
    """Read the scores of both answers; of a margin, the label of the chosen answer, beside 0."""
    margin = read_number(record.get("margin"), "margin", float)
    used.add("margin")
    if margin is not None:
        return margin, 0.0
    for names in _SCORES:
        scores = [read_number(record.get(name), name, float) for name in names]
        if None not in scores:
            used.update(names)
            return scores[0], scores[1]
    return None, None


def _token_sides(record: Record, used: set[str]) -> list[dict[str, Any]]:
    """Make the members of a pair of tokens; [] for other records."""
    suffix = next((name for name in _TOKENS if any(is_given(record.get(f"{side}_{name}")) for side in _SIDES)), None)
    if suffix is None:
        return []
    prompt = next(iter(given(record, (f"prompt_{suffix}", "prompt_ids"))), None)
    members: list[dict[str, Any]] = []
    for side in _SIDES:
        name = f"{side}_{suffix}"
        if not is_given(record.get(name)):
            raise _one_side(side, record)
        ids = read_tokens(record[name], name).tolist()
        used.add(name)
        if is_given(record.get(f"{side}_labels")):  # with the prompt, whose labels are -100
            member = {"input_ids": ids, "labels": read_tokens(record[f"{side}_labels"], f"{side}_labels").tolist()}
            if is_given(record.get(f"{side}_attention_mask")):
                member["attention_mask"] = record[f"{side}_attention_mask"]
            used |= {f"{side}_labels", f"{side}_attention_mask", f"prompt_{suffix}", "prompt_attention_mask"}
        else:
            before = read_tokens(record[prompt], prompt).tolist() if prompt else []
            member = {"input_ids": before + ids, "labels": [-100] * len(before) + ids}
            used |= {prompt, "prompt_attention_mask", f"{side}_attention_mask"} if prompt else set()
        members.append(member)
    return members


def _sides(record: Record, used: set[str]) -> list[dict[str, Any]]:
    """Make the two members of a pair of strings or turns, without roles and labels."""
    chosen, rejected = (_answer(record, side, used) for side in _SIDES)
    prompt = _prompt(record, used)
    of_rejected = {
        name: record[f"rejected_{name}"] for name in _OF_REJECTED if is_given(record.get(f"rejected_{name}"))
    }
    used |= {f"rejected_{name}" for name in of_rejected}
    if chosen is None and (rejected is not None or of_rejected):
        prompt, chosen, rejected = _of_swift(record, prompt, rejected, used)
    for side, answer in zip(_SIDES, (chosen, rejected), strict=True):
        if not is_given(answer):
            raise _one_side(side, record)
    if _starts_dialog(chosen):  # a prompt beside whole dialogs repeats a turn, or is counted as unused
        texts = [name for name in _QUESTIONS if isinstance(record.get(name), str)]
        used.difference_update(texts)
        used.update(name for name in texts if _has_text(chosen, record[name]))
    members = pair_members(prompt, chosen, rejected)
    members[1] |= of_rejected
    return members


def _starts_dialog(answer: Any) -> bool:
    return (
        isinstance(answer, list | tuple)
        and bool(answer)
        and is_turn(answer[0])
        and _role(answer[0]) in ("system", "user")
    )


def _has_text(turns: Sequence[Any], text: str) -> bool:
    return any(turn.get(name) == text for turn in turns if is_turn(turn) for name in CONTENT_FIELDS)


def _answer(record: Record, side: str, used: set[str]) -> Any:
    """The value of a side; None without one. `rejected_response` replaces the turns after the last user turn."""
    names = given(record, (side, f"{side}_messages", f"{side}_response"))
    if len(names) > 1:
        raise unsupported_field(f"the record has {' and '.join(names)}; keep the field that is meant")
    used.update(names)
    return record[names[0]] if names else None


def _of_swift(record: Record, prompt: Prompt, rejected: Any, used: set[str]) -> tuple[Prompt, Any, Any]:
    """Prompt, chosen and rejected answer of ms-swift, whose record has the chosen dialog, or a question and answer."""
    if not isinstance(prompt, list):
        name = next(iter(given(record, _ANSWERS)), None)
        if prompt is None or name is None:
            raise _one_side("chosen", record)
        used.add(name)
        return prompt, record[name], record[name] if rejected is None else rejected
    if isinstance(rejected, str):
        rejected = [{"role": "assistant", "content": rejected}]
    start = 1 + max((index for index, turn in enumerate(prompt) if _role(turn) == "user"), default=-1)
    if is_given(record.get("rejected_messages")):
        return None, prompt, rejected
    return prompt[:start], prompt[start:], prompt[start:] if rejected is None else rejected


def _prompt(record: Record, used: set[str]) -> Prompt:
    """The prompt of a record: turns, a string, or None; the turns of a history precede it."""
    for name in _TURN_LISTS:
        value = record.get(name)
        if isinstance(value, list | tuple) and value and all(isinstance(turn, OBJECT) for turn in value):
            used.add(name)
            return list(value)
        if name in ("messages", "conversations") and isinstance(value, str) and is_given(value):
            used.add(name)
            return list(read_turn_list(value, name))
    for question, names in zip(_QUESTIONS, _TEXTS, strict=True):
        if is_given(record.get(question)):
            used |= {*names, "history"}
            text = joined_texts(record, names)
            history = [{"role": turn.role, "content": turn.content} for turn in read_history(record)]
            turns = transcript(text)
            if turns is not None:
                turns = turns[:-1] if not turns[-1]["content"] else turns
            return [*history, {"role": "user", "content": text}] if history else turns or text
    return None


def transcript(text: Any) -> list[Any] | None:
    """Read the turns of a transcript of Anthropic, which starts with `Human:`; None for other values."""
    if not isinstance(text, str) or not text.lstrip().startswith("Human:"):
        return None
    _, *pieces = _TRANSCRIPT.split(text.strip())
    return [
        {"role": _SPEAKERS[name], "content": content.strip()}
        for name, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def pair_members(prompt: Prompt, chosen: Any, rejected: Any) -> list[dict[str, Any]]:
    """Make the two members of a pair.

    Args:
        prompt: turns, a string, or None if both answers start with it.
        chosen, rejected: strings, turns, or a single turn.

    Raises:
        RecordError: the answers have different types, or are neither text nor turns.
    """
    answers: list[Any] = [[answer] if isinstance(answer, OBJECT) else answer for answer in (chosen, rejected)]
    if isinstance(prompt, list) and prompt and _role(prompt[-1]) == "assistant" and not _starts_dialog(answers[0]):
        raise unsupported_field("the turns before chosen and rejected end with an answer; end them with a user turn")
    if prompt is None and all(isinstance(answer, str) for answer in answers):
        transcripts = [transcript(answer) for answer in answers]
        if None in transcripts:
            return [{"text": answer} for answer in answers]
        answers = list(transcripts)
    for side, answer in zip(_SIDES, answers, strict=True):
        if isinstance(answer, list | tuple) and not (answer and all(is_turn(turn) for turn in answer)):
            raise missing_field(f"{side} is {shown(answer)}; use a string, or turns with a role and a content")
    if not all(isinstance(answer, list | tuple) for answer in answers):
        for side, answer in zip(_SIDES, answers, strict=True):
            if not isinstance(answer, str | int | float | list | tuple) or isinstance(answer, bool):
                raise missing_field(f"{side} is {shown(answer)}; use a string, or turns with a role and a content")
        if prompt is None:
            raise missing_field("a string and a list of turns are chosen and rejected; use two lists of turns")
        return [answered(prompt, answer) for answer in answers]
    dialogs = [list(answer) for answer in answers]
    if all(_starts_dialog(answer) for answer in dialogs):
        is_start = isinstance(prompt, list) and all(dialog[: len(prompt)] == prompt for dialog in dialogs)
        # `messages` of UltraFeedback binarized are the chosen dialog.
        if isinstance(prompt, list) and not is_start and prompt != dialogs[0]:
            raise missing_field("chosen and rejected start with other turns than the record; keep one of them")
        least = len(prompt) if is_start and prompt is not None else 0
    else:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        dialogs, least = [[*turns, *dialog] for dialog in dialogs], len(turns)
    # Without a prompt, as `extract_prompt` of TRL: equal turns, but not the last of a dialog.
    start, limit = least, 0 if least else min(len(dialog) for dialog in dialogs) - 1
    while start < limit and dialogs[0][start] == dialogs[1][start]:
        start += 1
    for side, dialog in zip(_SIDES, dialogs, strict=True):
        if not any(_role(turn) in ("assistant", "function_call") for turn in dialog[start:]):
            raise missing_field(f"{side} has no assistant turn after the prompt")
    return [answered(dialog[:start], dialog[start:]) for dialog in dialogs]


def _role(turn: Any) -> str | None:
    if not isinstance(turn, OBJECT):
        return None
    name = next((turn[field] for field in ROLE_FIELDS if turn.get(field) is not None), None)
    return ROLE_NAMES.get(name.strip().lower()) if isinstance(name, str) else None


def answered(prompt: Prompt, answer: Any) -> dict[str, Any]:
    """Make the record of a prompt and an answer; the turns of the prompt are context."""
    return {"prompt": prompt, "completion": answer} if prompt else {"messages": answer}


def _one_side(missing: str, record: Record) -> RecordError:
    names = [name for name in (missing, f"{missing}_messages", f"{missing}_response") if record.get(name) is not None]
    if names:
        return RecordError(Reason.EMPTY, f"{names[0]} is empty")
    other = "rejected" if missing == "chosen" else "chosen"
    return missing_field(
        f"the record has a {other} answer and no {missing} answer; a preference pair has both. To train on answers "
        "alone, return messages from an `adapter`"
    )


class _Choice(NamedTuple):
    """Fields of two answers, and the values of `choice` for the first and the second; None: by its sign."""

    first: str
    second: str
    choice: str
    values: tuple[Any, Any] | None = None
    prompt: str | None = "prompt"


_CHOICES = (
    _Choice("human_ref_A", "human_ref_B", "labels", (1, 0), "history"),
    _Choice("response_0", "response_1", "better_response_id", (0, 1)),
    _Choice("response_1", "response_2", "preference_strength"),
    _Choice("response1", "response2", "overall_preference", None, "context"),
    _Choice("conversation_a", "conversation_b", "winner", ("model_a", "model_b"), None),
)


class Comparison(GroupFormat):
    """Two answers, and which of them is better."""

    key = "choice"
    marks = frozenset(fields.choice for fields in _CHOICES)
    fields: ClassVar[frozenset[str]] = (
        COMMON_FIELDS
        | {"objects"}
        | {name for f in _CHOICES for name in (f.first, f.second, f.choice, f.prompt) if name is not None}
    )

    def matches(self, record: Record) -> bool:
        """Whether the record has the fields of one of the formats."""
        return _choice(record) is not None

    def expand(self, record: Record, media: Media) -> tuple[list[dict[str, Any]], set[str]]:
        """Make the members `chosen` and `rejected`."""
        fields = _choice(record)
        assert fields is not None
        value = record[fields.choice]
        if fields.values is None:
            number = read_number(value, fields.choice, float)
            is_first = number < 0 if number else None
        else:
            is_first = fields.values.index(value) == 0 if value in fields.values else None
        if is_first is None:
            raise unsupported_field(f"{fields.choice} is {shown(value)}: neither answer is chosen")
        names = (fields.first, fields.second) if is_first else (fields.second, fields.first)
        prompt: Prompt = None
        if fields.prompt is not None:
            value = record[fields.prompt]
            prompt = list(value) if isinstance(value, list | tuple) else read_text(value, fields.prompt)
        media.notes.append(PAIR)
        members = pair_members(prompt, *(record[name] for name in names))
        used = {name for name in (*names, fields.choice, fields.prompt) if name is not None}
        return [{**member, "role": side} for member, side in zip(members, _SIDES, strict=True)], used


def _choice(record: Record) -> _Choice | None:
    return next(
        (
            fields
            for fields in _CHOICES
            if record.get(fields.choice) is not None
            and all(is_given(record.get(name)) for name in (fields.first, fields.second))
            and (fields.prompt is None or is_given(record.get(fields.prompt)))
        ),
        None,
    )


_LISTS = ("completions", "generations", "responses", "answers", "candidates")
_LIST_SCORES = ("scores", "ratings", "rewards", "rank", "ranks")
_ENTRY_TEXTS = ("response", "answer", "completion", "content", "text")
_ENTRY_SCORES = ("overall_score", "score", "rating", "reward", "rank")
_RANKS = ("rank", "ranks")


class Ranking(GroupFormat):
    """Several answers to a prompt, with a score each."""

    key = "completions"
    marks = frozenset(_LISTS)
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | _PROMPT_FIELDS | {*_LISTS, *_LIST_SCORES, "objects"}

    def matches(self, record: Record) -> bool:
        """Whether the record has a prompt, a list of answers, and their scores."""
        return _answers_name(record) is not None

    def expand(self, record: Record, media: Media) -> tuple[list[dict[str, Any]], set[str]]:
        """Make a member for each answer."""
        name = _answers_name(record)
        assert name is not None
        if isinstance(record.get("labels"), list | tuple):
            raise unsupported_field(
                f"{name} with labels are steps of an answer (stepwise supervision), which are not read; write the "
                "answer as input_ids, with the label of each token as a column beside them"
            )
        used, answers = {name}, list(record[name])
        prompt = _prompt(record, used)
        if prompt is None:
            raise missing_field(f"{name} has no prompt")
        if len(answers) < 2:
            raise RecordError(Reason.EMPTY, f"{name} has {len(answers)} answer; a group has 2 or more")
        if all(isinstance(answer, str) for answer in answers):
            scores_name = given(record, _LIST_SCORES)[0]
            scores = list(record[scores_name])
            used.add(scores_name)
            if len(scores) != len(answers):
                raise missing_field(f"{scores_name} has {len(scores)} entries for {len(answers)} {name}")
        else:
            texts, scores = [], []
            for answer in answers:
                if not isinstance(answer, OBJECT):
                    raise missing_field(
                        f"an entry of {name} is {shown(answer)}; use objects with an answer and a score"
                    )
                scores_name = next((key for key in _ENTRY_SCORES if answer.get(key) is not None), "score")
                scores.append(answer.get(scores_name))
                texts.append(next((answer[key] for key in _ENTRY_TEXTS if answer.get(key) is not None), None))
                known = frozenset((*_ENTRY_TEXTS, scores_name))
                media.unused_fields.update(str(key) for key in answer if key not in known and is_given(answer[key]))
            answers = texts
        sign = -1.0 if scores_name in _RANKS else 1.0
        media.notes.append(RANKING)
        members = []
        for index, (answer, score) in enumerate(zip(answers, scores, strict=True)):
            number = read_number(score, f"{scores_name} of {name}", float)
            if number is None:
                raise missing_field(f"entry {index} of {name} has no score")
            text = read_text(answer, f"an answer of {name}")
            members.append({**answered(prompt, text), "role": "completion", "label": sign * number})
        return members, used


def _answers_name(record: Record) -> str | None:
    """The field with the answers, or with the steps of an answer; None for other records."""
    if not given(record, (*_QUESTIONS, *_TURN_LISTS)):
        return None
    lists = [*_LIST_SCORES, "labels"]
    for name in _LISTS:
        value = record.get(name)
        if not isinstance(value, list | tuple) or not value:
            continue
        if all(isinstance(answer, str) for answer in value):
            if any(isinstance(record.get(key), list | tuple) and is_given(record[key]) for key in lists):
                return name
        elif isinstance(value[0], OBJECT) and _has_score(value[0]):
            return name
    return None


def _has_score(answer: Mapping[str, Any]) -> bool:
    return any(answer.get(name) is not None for name in _ENTRY_SCORES) and any(
        isinstance(answer.get(name), str) for name in _ENTRY_TEXTS
    )


class Members(GroupFormat):
    """A list of records in any record format, with `role` and `label`."""

    key = "members"
    marks = frozenset(("members",))
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"members", "objects"}

    def matches(self, record: Record) -> bool:
        """Whether `members` is a list of objects."""
        members: Sequence[Any] | None = record.get("members")
        return isinstance(members, list | tuple) and bool(members) and all(isinstance(one, OBJECT) for one in members)

    def expand(self, record: Record, media: Media) -> tuple[list[dict[str, Any]], set[str]]:
        """Return the members."""
        media.notes.append(MEMBERS)
        return [dict(member) for member in record["members"]], {"members"}
