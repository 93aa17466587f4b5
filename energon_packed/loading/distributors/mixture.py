"""MixtureDistributor: items of several distributors by ratio, in a sequence that the seed decides."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from energon_packed.errors import ConfigError
from energon_packed.loading.distributors.base import Distributor, Item
from energon_packed.loading.distributors.schedule import ExponentialWeights, WeightSchedule
from energon_packed.loading.ranks import ShardSpec, all_gather_object, broadcast_object

_BLOCK = 4096  # random numbers that are drawn together
_log = logging.getLogger(__name__)


class MixtureDistributor(Distributor):
    """Draws the next item from one of several distributors, with probability proportional to its weight.

    The draws depend on seed, epoch and number of the item alone, so the k-th item of every share comes from the same
    distributor, as long as none of them has ended. Weights can learn from what training sees:

        mixture = MixtureDistributor([chats, code], [1, 1], repeat=True, names=["chats", "code"])
        for batch in DataflowLoader(mixture, num_workers=2):
            ...
            mixture.update({"chats": 2.1, "code": 0.9})         # on every rank, after the same batch

    Args:
        distributors: what is mixed.
        weights: one number above 0 for each.
        repeat: True draws indefinitely: a distributor that ends begins its next epoch, and the shares of the weights
            hold. False gives every item once: one that ends leaves the draw, and the epoch ends with the last one.
        names: of the distributors, for `update`: those of their data sets, as in `batch.loss_by_source`; by default
            their numbers, "0", "1" and so on.
        smoothing: of the rewards of `update`, 0 (only the newest counts) to below 1.

    Raises:
        ConfigError: weights or names that do not fit.
    """

    def __init__(
        self,
        distributors: Sequence[Distributor],
        weights: Sequence[float],
        *,
        repeat: bool = False,
        names: Sequence[str] | None = None,
        smoothing: float = 0.9,
    ) -> None:
        if not distributors or len(distributors) != len(weights):
            raise ConfigError(
                f"{len(distributors)} distributors have {len(weights)} `weights`; pass one weight for each"
            )
        if bad := [one for one in weights if not (one > 0 and np.isfinite(one))]:
            raise ConfigError(f"`weights` has {bad[0]}; each must be above 0, leave out what is not read")
        self.distributors = list(distributors)
        self.weights = [float(one) for one in weights]
        self.repeat = repeat
        self.can_seek = all(one.can_seek for one in distributors)
        self.infinite = repeat or any(one.infinite for one in distributors)
        self.readers = [reader for one in distributors for reader in one.readers]
        self.read_ahead = min(one.read_ahead for one in distributors)
        self.names = [str(one) for one in (range(len(weights)) if names is None else names)]
        if len(set(self.names)) != len(self.distributors):
            raise ConfigError(
                f"`names` has {len(set(self.names))} different names for {len(distributors)} distributors; pass one "
                "for each"
            )
        if not 0 <= smoothing < 1:
            raise ConfigError(f"`smoothing` is {smoothing}; it must be at least 0 and below 1")
        self.schedule: WeightSchedule = WeightSchedule(
            ExponentialWeights(self.weights, smoothing), read_ahead=self.read_ahead
        )
        for one in distributors:
            if one.schedule is not None:
                one.schedule.is_inner = True

    @property
    def current_weights(self) -> dict[str, float]:
        """By name, with the sum 1: what the last `update` decided, or the `weights` of the beginning."""
        return dict(zip(self.names, self.schedule.learner.weights, strict=True))

    def update(self, rewards: Mapping[str, Any], *, group: Any = None) -> dict[str, float]:
        """Give sources of a high reward a larger weight, by `ExponentialWeights`; the weights are logged.

        Every rank calls it after the same batch; with a torch.distributed process group, the reward of a source is
        the mean over the ranks that have one, and every rank gets the same weights. Without, each process decides by
        its own rewards. In DataflowLoader, new weights hold from a batch of every worker on that none can have begun:
        the next one with `num_workers` 0, else after `prefetch_factor * num_workers` more of each worker. The worker's
        next `read_ahead` items, and those that wait in a packer, are drawn already. Nothing of this differs between
        two runs, and the loader's state has all of it.

        Args:
            rewards: by name, numbers or scalar tensors, for instance `batch.loss_by_source(logits)`; a source
                without a sample is left out. May be empty.
            group: process group; by default all processes.

        Returns:
            The weights by name, with the sum 1.

        Raises:
            ConfigError: an unknown name, or a reward that is not finite; on every rank, whichever has it.
        """
        if self.schedule.is_inner:
            raise ConfigError("this mixture is part of another one; call `update` on the outer mixture")
        own = {str(name): float(reward) for name, reward in rewards.items()}
        ranks = all_gather_object((own, self.schedule.next_step()), group)
        steps = [step for _, step in ranks]
        if max(steps) - min(steps) > 1:
            raise ConfigError(
                f"ranks are {max(steps) - min(steps)} batches apart; call `update` after the same batch on each"
            )
        learner = self.schedule.learner
        learner.update(self._mean_rewards([found for found, _ in ranks]))
        learner.load_state_dict(broadcast_object(learner.state_dict(), group))
        self.schedule.announce(max(steps), learner.weights)
        shown = ", ".join(f"{name} {weight:.4f}" for name, weight in self.current_weights.items())
        _log.info("update %d of the mixture, from step %d of each worker: %s", learner.updates, max(steps), shown)
        return self.current_weights

    def _mean_rewards(self, ranks: Sequence[Mapping[str, float]]) -> dict[int, float]:
        """By number of the distributor, over the ranks that have one."""
        found: dict[int, list[float]] = {}
        for rank, rewards in enumerate(ranks):
            for name, reward in rewards.items():
                if name not in self.names:
                    raise ConfigError(
                        f"a reward names {name!r}, and the mixture has {', '.join(self.names)}; pass `names` to "
                        "MixtureDistributor as the rewards name its data sets"
                    )
                if not math.isfinite(reward):
                    raise ConfigError(
                        f"the reward of {name!r} is {reward} on rank {rank}; leave out what is not finite"
                    )
                found.setdefault(self.names.index(name), []).append(reward)
        return {source: math.fsum(found[source]) / len(found[source]) for source in sorted(found)}

    def items(self, share: ShardSpec, start: Any) -> Iterator[Item]:
        """Items by draw; a cursor holds, of each distributor, its epoch, cursor, number, and whether it ended."""
        state = start or {"number": 0, "of": [[share.epoch, 0, 0, False] for _ in self.distributors]}
        number, of = int(state["number"]), [list(one) for one in state["of"]]
        streams: list[Iterator[Item] | None] = [None] * len(of)
        draws: Any = None
        while not all(one[3] for one in of):
            if draws is None or number % _BLOCK == 0:
                draws = share.rng(number // _BLOCK, 2).random(_BLOCK)
            weights = self.schedule.weights_at(number)
            child = self._drawn(float(draws[number % _BLOCK]), weights, [one[3] for one in of])
            item = self._next(child, share, of, streams)
            if item is None:
                of[child][3] = True
                continue
            epoch = of[child][0]
            of[child] = [epoch, item.resume_state, item.number + 1, False]
            cursor = {"number": number + 1, "of": [list(one) for one in of]}
            yield Item(number, item.value, key=[child, epoch, item.key], resume_state=cursor)
            number += 1

    def read_many(self, share: ShardSpec, keys: Sequence[Any]) -> list[Any]:
        """By distributor, its epoch and its key."""
        found: dict[int, Any] = {}
        for child, epoch in dict.fromkeys((key[0], key[1]) for key in keys):
            places = [i for i, key in enumerate(keys) if (key[0], key[1]) == (child, epoch)]
            wanted = [keys[i][2] for i in places]
            found |= zip(places, self.distributors[child].read_many(replace(share, epoch=epoch), wanted), strict=True)
        return [found[place] for place in range(len(keys))]

    def count(self, share: ShardSpec) -> int | None:
        """The sum over all distributors; None where one does not know, or with `repeat`."""
        counts = [one.count(share) for one in self.distributors]
        return None if self.repeat or None in counts else sum(one for one in counts if one is not None)

    def identity(self) -> dict[str, Any]:
        """Weights, and the identity of each."""
        inner = [one.identity() for one in self.distributors]
        return super().identity() | {"weights": self.weights, "repeat": self.repeat, "of": inner}

    def _drawn(self, draw: float, weights: Sequence[float], ended: list[bool]) -> int:
        """The distributor for a random number in [0, 1), among those that have not ended."""
        left = np.cumsum([0.0 if end else weight for weight, end in zip(weights, ended, strict=True)])
        last = max(place for place, end in enumerate(ended) if not end)  # where rounding reaches the end
        return min(int(np.searchsorted(left, draw * left[-1], side="right")), last)

    def _next(self, child: int, share: ShardSpec, of: list[Any], streams: list[Any]) -> Item | None:
        """The next item of a distributor; None where it ended, and has nothing to repeat."""
        epoch, cursor, number, _ = of[child]
        if streams[child] is None:
            streams[child] = self.distributors[child].read(replace(share, epoch=epoch), cursor, number)
        item: Item | None = next(streams[child], None)
        if item is None and self.repeat and of[child][2] > 0:
            of[child] = [epoch + 1, 0, 0, False]
            streams[child] = None
            return self._next(child, share, of, streams)
        return item
