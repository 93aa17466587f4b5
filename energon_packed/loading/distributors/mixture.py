"""Several distributors and their weights to one stream of items, drawn in a sequence that the seed decides."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from energon_packed.errors import ConfigError
from energon_packed.loading.distributors.base import Distributor, Item
from energon_packed.loading.distributors.schedule import ExponentialWeights, WeightSchedule
from energon_packed.loading.ranks import ShardSpec, all_gather_object, broadcast_object, group_place

# Random numbers drawn together. Part of the sequence of draws: another value changes the order of every mixture.
_BLOCK = 4096
_log = logging.getLogger(__name__)


class MixtureDistributor(Distributor):
    """Draw each item from one of several distributors, with probability proportional to its weight.

    The draws depend on seed, epoch and item number alone, so the k-th item of every shard comes from the same
    distributor, as long as all of them have items. Weights can learn from rewards during training:

        mixture = MixtureDistributor([chats, code], [1, 1], repeat=True, names=["chats", "code"])
        for batch in DataflowLoader(mixture, num_workers=2):
            ...
            mixture.update({"chats": 2.1, "code": 0.9})         # on every rank, after the same batch

    Args:
        distributors: the distributors to mix.
        weights: one number for each distributor; distributors with the weight 0 are left out.
        repeat: True draws indefinitely: a distributor that ends starts its next epoch, so the weights are met. False
            yields every item once: a distributor that ends is no longer drawn, and the epoch ends with the last item.
        names: names of the distributors in `update`, such as the dataset names in `batch.loss_by_source`; by default
            their indices, "0", "1" and so on.
        smoothing: moving average of the rewards of `update`, 0 (only the newest reward counts) to below 1.

    Raises:
        ConfigError: weights or names do not match the distributors, or a number is out of range.

    Examples:
        >>> parts = [MapDistributor(["x", "y"]), MapDistributor(["z"])]
        >>> mixture = MixtureDistributor(parts, [2, 1])
        >>> sorted(item.value for item in mixture.items(ShardSpec(), 0))
        ['x', 'y', 'z']
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
                f"`weights` must have one weight for each of the {len(distributors)} distributors, got {len(weights)}."
            )
        if bad := [weight for weight in weights if not (weight >= 0 and np.isfinite(weight))]:
            raise ConfigError(f"All `weights` must be at least 0 and finite, got {bad[0]}.")
        if not any(weights):
            raise ConfigError("`weights` must have a weight above 0, got only 0.")
        given = [str(name) for name in (range(len(weights)) if names is None else names)]
        if len(set(given)) != len(distributors):
            raise ConfigError(
                f"`names` must have {len(distributors)} different names, got {len(set(given))}. Pass one name for "
                "each distributor."
            )
        read = [index for index, weight in enumerate(weights) if weight]
        if len(read) < len(weights):
            _log.info("left out by weight 0: %s", ", ".join(sorted(set(given) - {given[index] for index in read})))
        self.names = [given[index] for index in read]
        distributors = [distributors[index] for index in read]
        self.distributors = distributors
        self.weights = [float(weights[index]) for index in read]
        self.repeat = repeat
        self.can_seek = all(child.can_seek for child in distributors)
        self.infinite = repeat or any(child.infinite for child in distributors)
        self.repeats = repeat or any(child.repeats for child in distributors)
        self.readers = [reader for child in distributors for reader in child.readers]
        self.read_ahead = min(child.read_ahead for child in distributors)
        if not 0 <= smoothing < 1:
            raise ConfigError(f"`smoothing` must be at least 0 and below 1, got {smoothing}.")
        self.schedule: WeightSchedule = WeightSchedule(
            ExponentialWeights(self.weights, smoothing), read_ahead=self.read_ahead
        )
        for child in distributors:
            if child.schedule is not None:
                child.schedule.is_inner = True

    @property
    def current_weights(self) -> dict[str, float]:
        """Weights by name, with the sum 1: of the last `update`, or the `weights` of the constructor."""
        return dict(zip(self.names, self.schedule.learner.weights, strict=True))

    def update(
        self, rewards: Mapping[str, Any], *, counts: Mapping[str, int] | None = None, group: Any = None
    ) -> dict[str, float]:
        """Increase the weights of distributors with a high reward, by `ExponentialWeights`, and log them.

        The log has the rank, and weight, reward and count of each distributor.

        Every rank calls it after the same batch. With a torch.distributed process group, the reward of a name is the
        mean over the ranks that pass it, and every rank gets the same weights. Without a group, each process uses its
        own rewards. In DataflowLoader, new weights apply from a batch that no worker can have started: the next batch
        with `num_workers` 0, else after `prefetch_factor * num_workers` more batches of each worker. The worker's next
        `read_ahead` items, and the items that wait in a packer, are drawn already. Two runs with the same rewards draw
        the same items, and the loader state contains all of this.

        Args:
            rewards: numbers or scalar tensors by name, for instance `batch.loss_by_source(logits)`; names without a
                sample are left out. May be empty.
            counts: samples by name, for the log.
            group: process group; by default all processes.

        Returns:
            The weights by name, with the sum 1.

        Raises:
            ConfigError: an unknown name, or a reward that is not finite. It is raised on every rank.
        """
        if self.schedule.is_inner:
            raise ConfigError("this mixture is part of another mixture. Call `update` on the outer mixture.")
        own = {str(name): float(reward) for name, reward in rewards.items()}
        ranks = all_gather_object((own, self.schedule.next_step()), group)
        steps = [step for _, step in ranks]
        if max(steps) - min(steps) > 1:
            raise ConfigError(
                f"Ranks called `update` {max(steps) - min(steps)} batches apart. Call it after the same batch on "
                "every rank."
            )
        learner = self.schedule.learner
        means = self._mean_rewards([rewards_of_rank for rewards_of_rank, _ in ranks])
        learner.update(means)
        # All ranks computed the same; the broadcast removes differences in the last bit between machines.
        learner.load_state_dict(broadcast_object(learner.state_dict(), group))
        self.schedule.announce(max(steps), learner.weights)
        shown = []
        for index, (name, weight) in enumerate(self.current_weights.items()):
            reward = f", reward {means[index]:.4g}" if index in means else ""
            count = "" if counts is None else f", {counts.get(name, 0)} samples"
            shown.append(f"{name} {weight:.4f}{reward}{count}")
        _log.info(
            "rank %d: update %d of the mixture, from step %d of each worker: %s",
            group_place(group)[0],
            learner.updates,
            max(steps),
            "; ".join(shown),
        )
        return self.current_weights

    def _mean_rewards(self, ranks: Sequence[Mapping[str, float]]) -> dict[int, float]:
        """Return the mean over the ranks that pass a reward, by index of the distributor."""
        by_index: dict[int, list[float]] = {}
        for rank, rewards in enumerate(ranks):
            for name, reward in rewards.items():
                if name not in self.names:
                    raise ConfigError(
                        f"Unknown reward name {name!r}. Known names: {', '.join(self.names)}. Pass `names` to "
                        "MixtureDistributor."
                    )
                if not math.isfinite(reward):
                    raise ConfigError(
                        f"The reward of {name!r} must be finite, got {reward} on rank {rank}. Leave it out."
                    )
                by_index.setdefault(self.names.index(name), []).append(reward)
        return {index: math.fsum(by_index[index]) / len(by_index[index]) for index in sorted(by_index)}

    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        """Yield items by draw; a position lists (epoch, position, number, ended) of each distributor."""
        state = start or {"number": 0, "of": [[shard.epoch, 0, 0, False] for _ in self.distributors]}
        number, children = int(state["number"]), [list(child) for child in state["of"]]
        streams: list[Iterator[Item] | None] = [None] * len(children)
        draws: Any = None
        while not all(ended for _, _, _, ended in children):
            if draws is None or number % _BLOCK == 0:
                draws = shard.rng(number // _BLOCK, 2).random(_BLOCK)  # salt 2: no other order uses these numbers
            weights = self.schedule.weights_at(number)
            index = self._draw(float(draws[number % _BLOCK]), weights, [ended for _, _, _, ended in children])
            item = self._next(index, shard, children, streams)
            if item is None:
                children[index][3] = True
                continue
            epoch = children[index][0]
            children[index] = [epoch, item.position, item.number + 1, False]
            position = {"number": number + 1, "of": [list(child) for child in children]}
            yield Item(number, item.value, key=[index, epoch, item.key], position=position)
            number += 1

    def read_many(self, shard: ShardSpec, keys: Sequence[Any]) -> list[Any]:
        """Read items again by distributor, its epoch and its key."""
        values: dict[int, Any] = {}
        for child, epoch in dict.fromkeys((key[0], key[1]) for key in keys):
            places = [i for i, key in enumerate(keys) if (key[0], key[1]) == (child, epoch)]
            wanted = [keys[i][2] for i in places]
            values |= zip(places, self.distributors[child].read_many(replace(shard, epoch=epoch), wanted), strict=True)
        return [values[place] for place in range(len(keys))]

    def count(self, shard: ShardSpec) -> int | None:
        """Return the sum over all distributors; None if a count is not known, or with `repeat`."""
        counts = [child.count(shard) for child in self.distributors]
        return None if self.repeat or None in counts else sum(count for count in counts if count is not None)

    def identity(self) -> dict[str, Any]:
        """Return the weights, and the identity of each distributor."""
        inner = [child.identity() for child in self.distributors]
        return super().identity() | {"weights": self.weights, "repeat": self.repeat, "of": inner}

    def _draw(self, random: float, weights: Sequence[float], ended: list[bool]) -> int:
        """Return the index of a distributor that has not ended, for a random number in [0, 1)."""
        bounds = np.cumsum([0.0 if end else weight for weight, end in zip(weights, ended, strict=True)])
        last = max(index for index, end in enumerate(ended) if not end)  # rounding may reach the last bound
        return min(int(np.searchsorted(bounds, random * bounds[-1], side="right")), last)

    def _next(self, index: int, shard: ShardSpec, children: list[Any], streams: list[Any]) -> Item | None:
        """Return the next item of a distributor; None if it ended and does not repeat, or has no items."""
        epoch, position, number, _ = children[index]
        if streams[index] is None:
            streams[index] = self.distributors[index].read(replace(shard, epoch=epoch), position, number)
        item: Item | None = next(streams[index], None)
        if item is None and self.repeat and number > 0:
            children[index] = [epoch + 1, 0, 0, False]
            streams[index] = None
            return self._next(index, shard, children, streams)
        return item
