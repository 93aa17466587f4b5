"""JointLoader: several loaders, drawn by ratio, with one state."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from energon_packed.errors import ConfigError, EnergonPackedError
from energon_packed.loading.state import (
    GATHERED,
    check_identity,
    check_state,
    damage_named,
    iterate_epoch,
    make_state,
    position_of,
    state_at,
    states_of,
    without_weights,
)

_BLOCK = 1024  # draws that are made together
StopAt = Literal["first", "all", "never"]
_NAME = "JointLoader"
"""In states, of subclasses too."""


class JointPosition(NamedTuple):
    """A position of a JointLoader.

    Attributes:
        step: batches that were drawn.
        ended: names of the loaders that ended in this epoch.
        loaders: position of each loader.
    """

    step: int
    ended: tuple[str, ...]
    loaders: dict[str, Any]


class JointLoader:
    """Draws each batch from one of several loaders; each has its own data, packer and collator.

        joint = JointLoader({"text": text_loader, "images": image_loader}, {"text": 3, "images": 1})
        for name, batch in joint:
            ...

    The draws depend on the seed and the step alone, so all ranks take the same loader at the same step.

    Args:
        loaders: by name: DataflowLoader, PackedIterableDataset, PackedLoader, or others with `state_dict`.
        weights: by name, above 0.
        seed: of the draws.
        stop: `first` ends when a loader ends, `all` when every one ended once, `never` repeats indefinitely; a loader
            that ends before begins its next epoch.
        allow_changed_weights: a state of other weights is restored: each loader continues where it was, and later
            batches are drawn by the new weights.

    Raises:
        ConfigError: names that differ, or an invalid weight.
    """

    def __init__(
        self,
        loaders: Mapping[str, Any],
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        stop: StopAt = "all",
        allow_changed_weights: bool = False,
    ) -> None:
        if not loaders or set(loaders) != set(weights):
            raise ConfigError(f"`weights` names {sorted(weights)} and `loaders` {sorted(loaders)}; name the same ones")
        if bad := [name for name, weight in weights.items() if not (np.isfinite(weight) and weight > 0)]:
            raise ConfigError(f"the weight of {bad[0]} is {weights[bad[0]]}; it must be above 0")
        if stop not in ("first", "all", "never"):
            raise ConfigError(f"`stop` is {stop!r}; use first, all or never")
        self.loaders = dict(loaders)
        if not np.isfinite(sum(map(float, weights.values()))):
            raise ConfigError("the weights have no finite sum; make them smaller")
        self._weights = {name: float(weights[name]) for name in loaders}
        self._seed, self._stop = seed, stop
        self._allow_changed_weights = allow_changed_weights
        self._step = 0
        self._ended: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """(name, batch) of every step that was not given yet; after the last one, those of the next epoch.

        Raises:
            ConfigError: a loader without any batch.
        """
        return iterate_epoch(self.rest_of_epoch, empty=len(self.loaders) if self._step else 0)

    def rest_of_epoch(self) -> Iterator[tuple[str, Any]]:
        """(name, batch) of the steps of the current epoch that were not given yet: none after its last one.

        Raises:
            ConfigError: as iterating.
        """
        running: dict[str, Iterator[Any]] = {}
        while True:
            name = self._drawn()
            if name not in running:
                running[name] = self._rest_of(name)
            try:
                batch = next(running[name])
            except StopIteration:
                if self._ends(name):
                    break
                running[name] = self._rest_of(name)
                try:
                    batch = next(running[name])
                except StopIteration:
                    raise ConfigError(f"loader {name!r} has no batch; leave it out") from None
            self._step += 1
            yield name, batch
        self._ended = []

    def _rest_of(self, name: str) -> Iterator[Any]:
        """What is left of the epoch of a loader, so that its end is seen, also after its last batch."""
        loader = self.loaders[name]
        rest = getattr(loader, "rest_of_epoch", None)
        return iter(loader if rest is None else rest())

    def position(self) -> "JointPosition":
        """The position after the last batch that was given: small, for `state_dict` of later."""
        inner = {name: position_of(loader) for name, loader in self.loaders.items()}
        return JointPosition(self._step, tuple(self._ended), inner)

    def state_dict(self, position: "JointPosition | None" = None) -> dict[str, Any]:
        """State of all loaders after the last batch, in plain types.

        Args:
            position: after an earlier batch, for a trainer that reads ahead.
        """
        here = position or self.position()
        inner = {name: state_at(loader, here.loaders[name]) for name, loader in self.loaders.items()}
        places = [(one["rank"], one["world_size"]) for one in inner.values() if "rank" in one]
        plain = {"step": here.step, "ended": list(here.ended), "loaders": inner}
        return make_state(_NAME, self._identity(), plain, places[0] if places else None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved; call it before iterating.

        Args:
            state: of this rank, or of all ranks as `gather_state` returned it: then each loader continues with another
                number of ranks or workers, if it can.

        Raises:
            BatchError: it is of other loaders, weights or data.
        """
        with damage_named():
            self._restore(states_of(state), is_gathered=isinstance(state, dict) and GATHERED in state)

    def _restore(self, states: list[dict[str, Any]], *, is_gathered: bool) -> None:
        for one in states:
            check_state(one, _NAME)
            saved, expected = one["identity"], self._identity()
            if self._allow_changed_weights:
                saved, expected = without_weights(saved), without_weights(expected)
            check_identity(saved, expected)
        step, ended = states[0]["step"], list(states[0]["ended"])
        before = {name: loader.state_dict() for name, loader in self.loaders.items()}
        try:
            for name, loader in self.loaders.items():
                inner = [one["loaders"][name] for one in states]
                loader.load_state_dict({GATHERED: inner} if is_gathered else inner[0])
        except EnergonPackedError:
            for name, loader in self.loaders.items():  # one that refuses leaves all where they were
                loader.load_state_dict(before[name])
            raise
        self._step, self._ended = step, ended

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "weights": self._weights, "stop": self._stop}

    def _drawn(self) -> str:
        """The loader of this step."""
        draws = np.random.default_rng([self._seed, self._step // _BLOCK]).random(_BLOCK)
        bounds = np.cumsum(list(self._weights.values()))
        place = int(np.searchsorted(bounds, draws[self._step % _BLOCK] * bounds[-1], side="right"))
        return list(self._weights)[min(place, len(bounds) - 1)]

    def _ends(self, name: str) -> bool:
        """A loader ended: whether the joint epoch does, too."""
        if name not in self._ended:
            self._ended.append(name)
        return self._stop == "first" or (self._stop == "all" and len(self._ended) == len(self.loaders))
