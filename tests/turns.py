"""Which turns of a conversation are supervised, as reports show them."""

from energon_packed import ChatEncoder, Conversation, StoredSample
from tests.internals import view_samples


def supervised_turns(
    encoder: ChatEncoder, conversation: Conversation, truncate: int | None = None
) -> list[bool | None]:
    """A flag per turn; None for a conversation that cannot be encoded."""
    (sample,) = view_samples([StoredSample(conversation, None, truncate)], encoder)
    return [turn.supervised for turn in sample.turns if turn.role != "tools"]
