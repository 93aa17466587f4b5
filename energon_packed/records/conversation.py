"""Conversation: the output of `normalize` and the input of measuring, packing and encoding.

The position of each image is an `<image>` placeholder in the text; `images[k]` belongs to the k-th placeholder. The
same is true of `<video>` and `videos[k]`, and of `<audio>` and `audios[k]`. A placeholder without an
entry is an error.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from energon_packed.errors import Reason, RecordError
from energon_packed.records.columns import check_columns
from energon_packed.records.media.audio import AudioReference
from energon_packed.records.media.kinds import MEDIA_KINDS
from energon_packed.records.media.reference import MediaReference
from energon_packed.records.media.video import VideoReference
from energon_packed.records.objects import read_objects

ROLES = ("system", "user", "assistant", "tool")
EXTRA_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""Keys of a message, beside role and content, that are passed to the chat template."""
# The product of the weights of a record and of its turns must stay a normal float32.
_LEAST_WEIGHT, _LARGEST_WEIGHT = 1e-9, 1e9
LOSS_WEIGHTS = "from 1e-9 to 1e9"
"""Range of loss weights above 0, for messages."""
_NO_EXTRA: Mapping[str, Any] = {}
_ROLES = frozenset(ROLES)
_PLACEHOLDERS = [(kind.placeholder, kind.field, kind) for kind in MEDIA_KINDS.values()]


class Message(NamedTuple):
    """One turn.

    Attributes:
        role: one of `ROLES`.
        content: text with one `<image>` per image.
        extra: any of `EXTRA_FIELDS`, unchanged from the record.
        weight: loss weight of the tokens of an assistant turn, from 1e-9 to 1e9; 0 makes the turn context, not a
            target.
        values: per-token values of the targets of an assistant turn, such as `advantage`, by name.

    Examples:
        >>> Message("user", "What is it?").as_dict()
        {'role': 'user', 'content': 'What is it?'}
    """

    role: str
    content: str
    extra: Mapping[str, Any] = _NO_EXTRA
    weight: float = 1.0
    values: Mapping[str, float] = _NO_EXTRA

    def as_dict(self) -> dict[str, Any]:
        """The message as chat templates and JSON files need it."""
        return {"role": self.role, "content": self.content, **self.extra}


# Not frozen, which would triple the time of the constructor; nothing changes a conversation after it.
@dataclass(kw_only=True, eq=False)
class Conversation:
    """One sample, before encoding. Exactly one of `messages`, `text`, `input_ids` and `members` is set.

    Attributes:
        id: name of the sample in reports; None if the record has no id.
        messages: turns in order; a system prompt is the first.
        text: plain text without a chat template, every token supervised.
        input_ids: int64 (L,), already tokenized; `labels` int64 (L,) with -100 for tokens that are not supervised.
        loss_weights: float32 (L,), loss weight of each of the `input_ids`; None if all weights are 1.
        weight: factor of the loss weights of all targets.
        columns: further columns of the `input_ids` by name, each (L,) or (L, k); None without columns.
        group: key of the samples that must share a row with this sample; None if it may be in any row.
        role: role of the sample in its group, such as `chosen`.
        label: label of the whole sample, a value or a value for each class; None without a label.
        members: the samples of a record that is a group, in order, such as the chosen and the rejected answer. The
            record itself has no messages, text and tokens then, and the media of all members in order.
        images: one per `<image>` placeholder, in order.
        videos: video files, one per `<video>` placeholder, in order.
        audios: audio files or parts of them, one per `<audio>` placeholder, in order.
        patch_positions: .npy files, int (patches, 3) as (t, h, w): one per image, or fewer that have the patches of
            all images together, such as one of a video; empty when absent.
        tools: JSON schemas of functions, passed to the chat template.
        chat_template_kwargs: variables of the chat template for this record, such as `enable_thinking`, by name; None
            without variables.
        objects: names and boxes that replace `<ref-object>` and `<bbox>` in the messages: `ref`, `bbox`, `bbox_type`
            and `image_id`, as `read_objects` returns them; None without objects.
        video: the images are frames of a video.
        fps: frames per second of the source video, for images that are its frames.
        timestamp_decimal: decimals of frame timestamps, 1 by default.
        timestamps: whether the length of a packed sample with `fps` has timestamps of its frames, which some families
            write into the text; None for a sample without a recorded length: the family decides.
        unused_fields: names of fields of the record and of its turns that nothing reads, for the counts of a run.
        notes: what was decided for the record, such as "several answers: one is the target", for the counts of a run.

    Two conversations are equal if all attributes except `timestamps`, `unused_fields` and `notes` are equal.

    Examples:
        >>> record = {"prompts": ["2 + 2?"], "captions": ["4"]}
        >>> conversation = normalize({"id": "a"} | record)
        >>> conversation.id, conversation.kind, len(conversation.messages)
        ('a', 'text', 2)
    """

    id: str | None = None
    messages: tuple[Message, ...] = ()
    text: str | None = None
    input_ids: npt.NDArray[np.int64] | None = None
    labels: npt.NDArray[np.int64] | None = None
    loss_weights: npt.NDArray[np.float32] | None = None
    weight: float = 1.0
    columns: Mapping[str, npt.NDArray[Any]] | None = None
    group: str | None = None
    role: str | None = None
    label: tuple[float, ...] | None = None
    members: "tuple[Conversation, ...]" = ()
    images: tuple[MediaReference, ...] = ()
    videos: tuple[VideoReference, ...] = ()
    audios: tuple[AudioReference, ...] = ()
    patch_positions: tuple[MediaReference, ...] = ()
    tools: Sequence[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    objects: Mapping[str, Any] | None = None
    video: bool = False
    fps: float | None = None
    timestamp_decimal: int | None = None
    timestamps: bool | None = None
    unused_fields: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.members:
            self._take_media()
            return  # each member has been checked
        if not self.messages and not self.text and (self.input_ids is None or len(self.input_ids) == 0):
            raise RecordError(Reason.EMPTY, "no message, text or token")
        if self.messages:
            self._check_messages()
        elif self.text is not None:
            self._check_placeholders([self.text])
        if self.objects is not None:
            contents = [message.content for message in self.messages]
            self.objects = read_objects(self.objects, contents, len(self.images))
        tokens = 0 if self.input_ids is None else len(self.input_ids)
        if self.labels is not None and (self.input_ids is None or len(self.labels) != tokens):
            raise RecordError(
                Reason.MISSING_FIELD,
                f"labels has {len(self.labels)} entries for {tokens} input_ids; one label per token is needed",
            )
        if not is_loss_weight(self.weight):
            raise RecordError(
                Reason.UNSUPPORTED_FIELD,
                f"the record has the loss weight {self.weight!r}; use 0, or a number {LOSS_WEIGHTS}",
            )
        if self.loss_weights is not None:
            _check_loss_weights(self.loss_weights, tokens)
        if self.columns is not None:
            check_columns(self.columns, tokens)
        # Fewer files than images are valid: the frames of a video may share a file.
        if len(self.patch_positions) > len(self.images):
            raise RecordError(
                Reason.MISSING_PATCH_POSITIONS,
                f"{len(self.patch_positions)} patch_positions for {len(self.images)} images; one per "
                "image is needed, or one for all frames",
            )

    @classmethod
    def of_checked(cls, ident: str | None, messages: tuple[Message, ...]) -> "Conversation":
        """Make a conversation of messages alone, without checks: the fast path for callers that checked them."""
        # The class attributes are the defaults of all other fields, so only these two are set.
        new = object.__new__(cls)
        vars(new).update(id=ident, messages=messages)  # the class has the default of every other attribute
        return new

    def named(self, ident: str) -> "Conversation":
        """Copy the conversation with another id; the checks of the constructor are not repeated."""
        new = object.__new__(Conversation)
        vars(new).update(vars(self), id=ident)
        return new

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Conversation):
            return NotImplemented
        # Unused fields and notes describe the source record, not the sample; timestamps describe a pack.
        names = [field.name for field in fields(self) if field.name not in ("timestamps", "unused_fields", "notes")]
        return all(_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]  # arrays are not hashable

    @property
    def kind(self) -> str:
        """`text`, `image`, `video` or `audio` (without images and videos), the groups of `group_by='media'`."""
        if self.video or self.videos:
            return "video"
        return "image" if self.images else "audio" if self.audios else "text"

    @property
    def needs_targets(self) -> bool:
        """Whether a token must be a target: losses over samples with a role or a label need none."""
        return self.role is None and self.label is None

    @property
    def per_token_values(self) -> list[str]:
        """Names of its columns, and of the numbers of its turns."""
        return sorted({*(self.columns or ()), *(name for turn in self.messages for name in turn.values)})

    @property
    def media_files(self) -> tuple[MediaReference, ...]:
        """Images, then the files of the videos and audio files: all media but `patch_positions`."""
        if not (self.videos or self.audios):
            return self.images
        videos = [file for video in self.videos for file in video.files]
        return (*self.images, *videos, *[audio.file for audio in self.audios])

    @property
    def files(self) -> tuple[MediaReference, ...]:
        """Its `media_files` and `patch_positions`."""
        return (*self.media_files, *self.patch_positions)

    def _take_media(self) -> None:
        """Take the media of the members.

        Raises:
            RecordError: `unsupported_media` for videos and audio, `unsupported_field` for a group in a group.
        """
        for name in ("images", "videos", "audios", "patch_positions"):
            setattr(self, name, tuple([file for member in self.members for file in getattr(member, name)]))
        self.video = any([member.video for member in self.members])
        if self.videos or self.audios:
            raise RecordError(
                Reason.UNSUPPORTED_MEDIA,
                "a record with several samples has videos or audio; pass frames as images, or write a record for each "
                "sample and set `group_field`",
            )
        if self.group is not None or any([member.members for member in self.members]):
            raise RecordError(
                Reason.UNSUPPORTED_FIELD,
                "a record with several samples is a group, and in a group; write a record for each sample",
            )

    def _check_placeholders(self, texts: Sequence[str]) -> None:
        """Compare placeholders and media: a missing placeholder would shift all later media, an extra one is text."""
        joined = "\0".join(texts)  # no placeholder has a NUL
        for placeholder, field, kind in _PLACEHOLDERS:
            count, media = joined.count(placeholder), getattr(self, field)
            if count != len(media):
                detail = f"{count} {placeholder} placeholders for {len(media)} {kind.plural}"
                raise RecordError(kind.mismatch, detail)

    def _check_messages(self) -> None:
        roles = [message.role for message in self.messages]
        if not _ROLES.issuperset(roles):
            role = next(role for role in roles if role not in _ROLES)
            raise RecordError(Reason.BAD_ROLE, f"role {role!r}; use one of {', '.join(ROLES)}")
        # Many chat templates raise for a system message elsewhere, or drop it.
        if "system" in roles[1:]:
            index = roles.index("system", 1)
            raise RecordError(Reason.BAD_ROLE, f"message {index} is a system message; only the first may be one")
        self._check_placeholders([message.content for message in self.messages])
        # Without an assistant turn nothing is supervised, but the conversation can still be encoded as a prompt.
        has_answers = "assistant" in roles
        for message in self.messages:
            if (message.role == "assistant" or not has_answers) and (
                (message.content and not message.content.isspace()) or message.extra.get("tool_calls")
            ):
                return
        raise RecordError(Reason.EMPTY, "every assistant turn is empty" if has_answers else "every turn is empty")


def with_files(conversation: Conversation, change: Callable[[MediaReference], MediaReference]) -> Conversation:
    """Replace each media file of a conversation and of its members by `change(file)`."""
    if not (conversation.media_files or conversation.patch_positions):
        return conversation
    return replace(
        conversation,
        images=tuple([change(image) for image in conversation.images]),
        videos=tuple(
            [
                replace(video, file=video.file and change(video.file), images=tuple(map(change, video.images)))
                for video in conversation.videos
            ]
        ),
        audios=tuple([replace(audio, file=change(audio.file)) for audio in conversation.audios]),
        patch_positions=tuple([change(file) for file in conversation.patch_positions]),
        members=tuple([with_files(member, change) for member in conversation.members]),
    )


def is_loss_weight(weight: float) -> bool:
    """Whether a loss weight is 0 or in the range of `LOSS_WEIGHTS`; false for NaN."""
    return weight == 0 or _LEAST_WEIGHT <= weight <= _LARGEST_WEIGHT


def _check_loss_weights(weights: npt.NDArray[np.float32], tokens: int) -> None:
    if len(weights) != tokens:
        raise RecordError(
            Reason.MISSING_FIELD,
            f"loss_weights has {len(weights)} entries for {tokens} input_ids; one weight per token is needed",
        )
    wrong = ~((weights == 0) | ((weights >= _LEAST_WEIGHT) & (weights <= _LARGEST_WEIGHT)))
    if wrong.any():
        at = int(wrong.argmax())
        raise RecordError(
            Reason.UNSUPPORTED_FIELD, f"loss_weights[{at}] is {weights[at]:g}; use 0, or a number {LOSS_WEIGHTS}"
        )


def plain_messages(roles: Iterable[str], contents: Iterable[str]) -> tuple[Message, ...]:
    """Make messages that have a role and a content, and nothing else."""
    return tuple(map(_message, zip(roles, contents, repeat(_NO_EXTRA), repeat(1.0), repeat(_NO_EXTRA))))


# Several times as fast as calling the class, whose constructor is a Python function.
_message = partial(tuple.__new__, Message)


def _equal(left: Any, right: Any) -> bool:
    # `==` of arrays is elementwise and has no truth value.
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return left is not None and right is not None and np.array_equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(left[name], right[name]) for name in left)
    return bool(left == right)
