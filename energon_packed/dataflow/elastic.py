"""What is left of an epoch when the number of ranks or workers changes, and how it is dealt to the new ones.

The items of an epoch belong to shares, one for each worker of each rank, and each share has its items numbered. Of
every old share, the states say up to which number its items are used, and which of them a packer still holds:

    2 old shares   0: x x x h x . . . .     x used, h held by the packer
                   1: x x x x . . . . .
    3 new shares   the item n of old share i goes to (n + i) % 3; the held ones are dealt one by one, and come first

A change within such a rest adds a layer: how far each of the shares that it was dealt to had come.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from energon_packed.dataflow.distributors.base import Distributor, Item
from energon_packed.dataflow.share import Share
from energon_packed.errors import BatchError


class Held(NamedTuple):
    """An item that a packer had not made a row of.

    Attributes:
        piece: number of the piece that it is of.
        number: in the share of that piece.
        key: to read it again.
    """

    piece: int
    number: int
    key: Any


@dataclass(frozen=True, slots=True)
class Piece:
    """What is left of one share of an epoch.

    Attributes:
        rank, world_size, worker, num_workers, epoch: of the share.
        cursor, number: where reading begins.
        layers: for each number of shares that this piece was dealt to, how far each of them came: the number of the
            first item that is not used; None where everything is.
    """

    rank: int
    world_size: int
    worker: int
    num_workers: int
    epoch: int
    cursor: Any
    number: int
    layers: list[list[int | None]]

    def share(self, seed: int) -> Share:
        """The share that this is left of."""
        return Share(
            rank=self.rank,
            world_size=self.world_size,
            worker=self.worker,
            num_workers=self.num_workers,
            epoch=self.epoch,
            seed=seed,
        )

    def is_used(self, piece: int, number: int) -> bool:
        """Whether an item was given to one of the shares before; `piece` is the number of this piece."""
        for layer in self.layers:
            reached = layer[(number + piece) % len(layer)]
            if reached is None or number < reached:
                return True
        return False


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of an epoch.

    Attributes:
        pieces: of the old shares.
        held: items that packers held, of all pieces.
        weights: that the blend had until now, where they changed; None where they did not.
    """

    pieces: list[Piece]
    held: list[Held]
    weights: list[float] | None = None

    def to_plain(self) -> dict[str, Any]:
        """For loader states."""
        names = Piece.__slots__
        return {
            "pieces": [[getattr(piece, name) for name in names] for piece in self.pieces],
            "held": [list(one) for one in self.held],
            "weights": self.weights,
        }

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> "Rest":
        """The inverse of `to_plain`."""
        held = [Held(*one) for one in value["held"]]
        return cls([Piece(*one) for one in value["pieces"]], held, value["weights"])


class RestOfEpoch(Distributor):
    """Deals a rest to shares; each item of it to one.

    Until the epoch ends, a share reads through the items of old shares that others have, too, where the distributor
    cannot skip them (`Distributor.chosen`).

    Args:
        distributor: that the rest is of; it can seek.
        rest: what is left.
    """

    def __init__(self, distributor: Distributor, rest: Rest) -> None:
        self.distributor = distributor
        self.rest = rest
        self.read_ahead = distributor.read_ahead
        self.endless = distributor.endless

    def items(self, share: Share, start: Any) -> Iterator[Item]:
        """Held items, then those of the pieces; a cursor has how far this share came in each of them."""
        pieces = self.rest.pieces
        state = start or {"held": 0, "turn": 0, "of": [[one.cursor, one.number] for one in pieces], "number": 0}
        number, of, turn = int(state["number"]), [tuple(one) for one in state["of"]], int(state["turn"])
        mine = self.rest.held[share.index :: share.count]
        for place in range(int(state["held"]), len(mine)):
            held = mine[place]
            value = self.again(share, [list(held)])[0]
            cursor = {"held": place + 1, "turn": 0, "of": list(of), "number": number + 1}
            yield Item(number, value, key=list(held), cursor=cursor)
            number += 1
        order, endless, misses = self._order(share), self.distributor.endless, 0
        streams: dict[int, Iterator[Item]] = {}
        while misses < len(order) and (endless or turn < len(order)):
            piece = order[turn % len(order)]
            if piece not in streams:
                streams = streams if endless else {}  # one is open, unless they take turns
                streams[piece] = self._stream(share, piece, *of[piece])
            item = next(streams[piece], None)
            if item is None:
                turn, misses = turn + 1, misses + 1
                continue
            of[piece] = (item.cursor, item.number + 1)
            turn, misses = turn + endless, 0
            cursor = {"held": len(mine), "turn": turn, "of": list(of), "number": number + 1}
            yield Item(number, item.value, key=[piece, item.number, item.key], cursor=cursor)
            number += 1

    def again(self, share: Share, keys: Sequence[Any]) -> list[Any]:
        """By piece and its key."""
        found: dict[int, Any] = {}
        for piece in dict.fromkeys(key[0] for key in keys):
            places = [place for place, key in enumerate(keys) if key[0] == piece]
            old = self.rest.pieces[piece].share(share.seed)
            found |= zip(places, self.distributor.again(old, [keys[place][2] for place in places]), strict=True)
        return [found[place] for place in range(len(keys))]

    def _order(self, share: Share) -> list[int]:
        """Numbers of the pieces, one epoch after the other; each share begins with another one."""
        pieces = self.rest.pieces
        return sorted(range(len(pieces)), key=lambda one: (pieces[one].epoch, (one - share.index) % len(pieces)))

    def _stream(self, share: Share, number: int, cursor: Any, first: int) -> Iterator[Item]:
        """The items of a piece that are for a share."""
        piece = self.rest.pieces[number]

        def wanted(item: int) -> bool:
            return (item + number) % share.count == share.index and not piece.is_used(number, item)

        for item in self.distributor.read(piece.share(share.seed), cursor, first, wanted):
            if wanted(item.number):
                yield item


def check_elastic(states: Sequence[dict[str, Any]], distributor: Distributor, share: Share) -> None:
    """Refuse states that cannot be dealt to another number of ranks or workers.

    Args:
        states: as they were loaded: of one rank, or of all.
        distributor: of the loader.
        share: of the rank that loads them.

    Raises:
        BatchError: not all ranks are there, items cannot be read again, or weights changed in this epoch before.
    """
    saved = states[0]["world_size"]
    if len(states) != saved:
        raise BatchError(
            f"the saved state is of rank {states[0]['rank']} of world_size {saved} alone, and what is left of the "
            f"epoch is dealt anew to {share.world_size} ranks of {share.num_workers} workers: load what "
            "gather_state(loader) returned, which has the states of all ranks"
        )
    if any(state.get("schedule", {}).get("learner", {}).get("updates") for state in states):
        raise BatchError(
            "the weights of the mixture were updated, and each worker draws by those that it took up: finish the "
            "epoch with the same ranks and workers"
        )
    if any((state.get("rest") or {}).get("weights") for state in states):
        raise BatchError(
            "the weights of the blend changed in this epoch before, and what is left of it cannot be dealt once more: "
            "finish the epoch with the same ranks, workers and weights"
        )
    if not distributor.can_seek:
        raise BatchError(
            f"{type(distributor).__name__} over a one-shot iterator cannot go on with another number of ranks or "
            f"workers ({saved} ranks of {len(states[0]['workers'])} workers saved, {share.world_size} of "
            f"{share.num_workers} now): pass a function that returns a new iterator, or keep their number"
        )


def rest_of(states: Sequence[dict[str, Any]]) -> tuple[int, Rest | None]:
    """(epoch, what is left of it) of the states of all ranks of a DataflowLoader, in their order.

    Ranks may be in neighbouring epochs, where one has a batch less than another: the later epoch then begins with what
    is left of the earlier one. None where no rank has begun the epoch.
    """
    world_size, epoch = len(states), max(state["epoch"] for state in states)
    if all(state["epoch"] == epoch and not state.get("rest") and not any(state["workers"]) for state in states):
        return epoch, None
    rests = [None if state.get("rest") is None else Rest.from_plain(state["rest"]) for state in states]
    pieces, held = _of_a_rest([(state, rest) for state, rest in zip(states, rests, strict=True)])
    for rank, (state, rest) in enumerate(zip(states, rests, strict=True)):
        workers = state["workers"]
        for worker, saved in enumerate(workers):
            for at in range(state["epoch"] + (rest is not None), epoch + 1):
                now = saved if at == state["epoch"] else None
                cursor, number = (now["cursor"], now["number"]) if now else (0, 0)
                held += [Held(len(pieces), *ref) for ref in _held_refs(now)]
                pieces.append(Piece(rank, world_size, worker, len(workers), at, cursor, number, []))
    return epoch, Rest(pieces, held)


def _of_a_rest(states: list[tuple[dict[str, Any], Rest | None]]) -> tuple[list[Piece], list[Held]]:
    """What is left of a rest that was dealt before; nothing where there was none."""
    before = next((rest for _, rest in states if rest is not None), None)
    if before is None:
        return [], []
    held: list[Held] = []
    reached: list[list[tuple[Any, int] | None]] = []  # of each share, for each piece
    shares = sum(len(state["workers"]) for state, _ in states)
    index = count()
    for state, rest in states:
        for saved in state["workers"]:
            mine = before.held[next(index) :: shares]
            if rest is None:  # a rank that has begun the next epoch
                reached.append([None] * len(before.pieces))
                continue
            cursor: dict[str, Any] | None = (saved["cursor"] or None) if saved else None
            held += [Held(*key) for _, key in _held_refs(saved)]
            held += mine[cursor["held"] if cursor else 0 :]
            starts = [(piece.cursor, piece.number) for piece in before.pieces]
            reached.append([tuple(one) for one in cursor["of"]] if cursor else list(starts))
    pieces = []
    for number, piece in enumerate(before.pieces):
        # the item n of piece i is of share (n + i) % shares
        ends = [one[number] for one in reached]
        layer = [None if end is None else end[1] for end in ends]
        known = [end for end in ends if end is not None]
        cursor, first = min(known, key=lambda end: end[1]) if known else (piece.cursor, piece.number)
        pieces.append(replace(piece, cursor=cursor, number=first, layers=[*piece.layers, layer]))
    return pieces, held


def _held_refs(saved: dict[str, Any] | None) -> list[Any]:
    """[number, key] of what the packer of a worker held."""
    return [] if saved is None else [ref for group in [*saved["ready"], saved["waiting"]] for ref in group]
