"""`supervised_turns`: a conversation and its tokens -> a flag per turn, whether it has a target.

The flags are computed from the labels that training uses, not from roles, so that reports show what is trained.
"""

from itertools import pairwise

import numpy as np

from energon_packed.encoding.chat import ChatEncoder
from energon_packed.encoding.completeness import turn_places
from energon_packed.encoding.rendering import Renderer
from energon_packed.encoding.sample import IGNORE_INDEX, EncodedSample
from energon_packed.encoding.skeleton import Span
from energon_packed.encoding.vision.media import measure_media
from energon_packed.errors import EnergonPackedError
from energon_packed.records import Conversation


def supervised_turns(encoder: ChatEncoder, conversation: Conversation, sample: EncodedSample) -> list[bool]:
    """Whether each turn has a target.

    Args:
        encoder: encoder that the sample was packed with.
        conversation: messages, or a document, which counts as a single turn.
        sample: its tokens, which may be truncated.
    """
    if conversation.text is not None:
        return [bool(sample.num_supervised)]
    if conversation.objects is not None and encoder.vision is not None:
        conversation = measure_media(encoder.vision, conversation).spelled or conversation
    escaped = encoder.renderer.escaped(conversation)
    renderer = encoder.renderer.of_record(escaped)
    by_template = renderer.by_template(escaped)
    turns = by_template._replace(spans=_turns(renderer, escaped, by_template.text))
    spans = renderer.with_placeholders(turns, escaped).spans or ()
    text = encoder.renderer.render(conversation).text
    targets = _without_runs(sample)
    # The number of its turn is the weight of a token. A truncated sample has fewer targets than the text has tokens.
    numbers = encoder.text_tokenizer.encode([text], [spans], weights=[[*range(1, len(spans) + 1)]]).weights
    assert numbers is not None
    supervised = set(numbers[: len(targets)][targets[: len(numbers)]].tolist())
    return [number in supervised for number in range(1, len(spans) + 1)]


def _turns(renderer: Renderer, conversation: Conversation, text: str) -> list[Span]:
    """Characters of each turn, reasoning and calls included: from the end of the turns before it."""
    messages = renderer.messages(conversation)
    starts: list[int] = []
    for turn in range(len(messages)):
        try:
            start = renderer.template.turn_start(turn, text, messages, conversation.tools)
        except EnergonPackedError:  # the template does not render these turns alone
            contents = [message["content"] for message in messages]
            start = turn_places(text, contents, [*renderer.template.tokens.values()])[turn][0]
        starts.append(max([start, *starts[-1:]]))
    return list(pairwise([*starts, len(text)]))


def _without_runs(sample: EncodedSample) -> np.ndarray:
    """Targets before tokens of media were repeated, bool (L,): a single entry for each run of these tokens."""
    tokens = (sample.image_token_id, sample.video_token_id, sample.audio_token_id)
    ids = sample.input_ids
    is_media = np.isin(ids, [token for token in tokens if token is not None])
    repeated = is_media & np.concatenate([[False], ids[1:] == ids[:-1]])
    return np.asarray((sample.labels != IGNORE_INDEX)[~repeated])
