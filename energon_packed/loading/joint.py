"""JointLoader: several loaders and their weights in, (name, batch) pairs in a seeded order and one state out."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from energon_packed.errors import ConfigError, EnergonPackedError
from energon_packed.loading.loaders import Loader, as_loader
from energon_packed.loading.state import (
    GATHERED,
    Position,
    check_identity,
    check_state,
    damage_named,
    is_left,
    iterate_epoch,
    make_state,
    states_of,
)
from energon_packed.options import check_choice

_BLOCK = 1024  # draws that are made together; part of the order, so it must never change
_END = object()  # of the batches of a loader
StopAt = Literal["first", "all", "never"]
_NAME = "JointLoader"  # in states, of subclasses too


class JointLoader(Loader):
    """Draw each batch from one of several loaders; each has its own data, packer and collator.

        joint = JointLoader({"text": text_loader, "images": image_loader}, {"text": 3, "images": 1})
        for name, batch in joint:
            ...

    The draws depend only on the seed and the step, so all ranks use the same loader at the same step. Each iterator
    continues after the last batch that any iterator returned: `next(iter(joint))` uses a batch.

    Args:
        loaders: DataflowLoaders, or other iterables with `state_dict`, by name.
        weights: expected share of the steps of each loader by name; they are normalized. Loaders with the weight 0 are
            left out.
        seed: seed of the draws.
        stop: `first` ends when a loader ends, `all` when every loader has ended once, `never` repeats indefinitely. A
            loader that ends earlier starts its next epoch.
        allow_changed_weights: accept a state with other weights: each loader continues at its position, and later
            batches are drawn by the new weights.
        order_log: folder of the order logs, with a folder of the name of each loader.

    Raises:
        ConfigError: the names differ, or a weight is invalid.

    Examples:
        >>> loaders = {name: DataflowLoader(MapDistributor([{"text": name}] * 3), encoder) for name in ("a", "b")}
        >>> [name for name, batch in JointLoader(loaders, {"a": 1, "b": 1})]
        ['b', 'a', 'a', 'a', 'b', 'b', 'b', 'b', 'b', 'b', 'b']
    """

    def __init__(
        self,
        loaders: Mapping[str, Any],
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        stop: StopAt = "all",
        allow_changed_weights: bool = False,
        order_log: str | Path | None = None,
    ) -> None:
        if not loaders or set(loaders) != set(weights):
            raise ConfigError(
                f"`weights` and `loaders` must have the same keys, got {sorted(weights)} and {sorted(loaders)}."
            )
        if bad := [name for name, weight in weights.items() if not (np.isfinite(weight) and weight >= 0)]:
            raise ConfigError(f"The weight of {bad[0]} must be at least 0, got {weights[bad[0]]}.")
        if not any(weights.values()):
            raise ConfigError("`weights` must have a weight above 0, got only 0.")
        loaders = {name: loader for name, loader in loaders.items() if weights[name]}
        check_choice("stop", stop, StopAt)
        if not np.isfinite(total := sum(map(float, weights.values()))):
            raise ConfigError(f"The sum of `weights` must be finite, got {total}. Make them smaller.")
        self.loaders = {name: as_loader(loader) for name, loader in loaders.items()}
        self._weights = {name: float(weights[name]) for name in loaders}
        self._seed, self._stop = seed, stop
        self._allow_changed_weights = allow_changed_weights
        self._step = 0
        self._ended: list[str] = []
        self._epoch = self._restores = 0  # epochs of this process, and states that were loaded
        if order_log is not None:
            self.log_order(order_log)

    def log_order(self, folder: str | Path) -> None:
        """Write a line for each batch into the folder of its loader in this folder."""
        for name, loader in self.loaders.items():
            loader.log_order(Path(folder) / name)

    def hold_log(self) -> None:
        """Hold the order logs of all loaders."""
        for loader in self.loaders.values():
            loader.hold_log()

    def release_log(self, position: Position) -> None:
        """Release the order log of each loader up to its part of the position."""
        for name, loader in self.loaders.items():
            loader.release_log(position.parts[name][0])

    @property
    def place(self) -> tuple[int, int] | None:
        """Rank and world size of the first loader that knows them."""
        return next((place for loader in self.loaders.values() if (place := loader.place) is not None), None)

    def batches(self) -> Iterator[Any]:
        """Iterate over the batches without the names of their loaders."""
        return (batch for _, batch in self)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Iterate over (name, batch) of the remaining steps of the epoch; after its last step, of the next epoch.

        Raises:
            ConfigError: a loader without any batch.
        """
        return iterate_epoch(self.rest_of_epoch, empty=len(self.loaders) if self._step else 0)

    def rest_of_epoch(self) -> Iterator[tuple[str, Any]]:
        """Iterate over (name, batch) of the remaining steps of the current epoch; empty after its last step.

        Raises:
            ConfigError: as iterating.
        """
        running: dict[str, Iterator[Any]] = {}
        started = (self._epoch, self._restores)
        while True:
            name = self._draw()
            if name not in running:
                running[name] = self.loaders[name].rest_of_epoch()  # the loader would start its next epoch
            if (batch := next(running[name], _END)) is _END:
                if self._ends(name):
                    break
                running[name] = self.loaders[name].rest_of_epoch()
                if (batch := next(running[name], _END)) is _END:
                    raise ConfigError(f"Loader {name!r} must have at least 1 batch, got 0. Remove it.")
            self._step += 1
            yield name, batch
            if is_left(started, (self._epoch, self._restores)):
                return
        self._ended = []
        self._epoch += 1

    def position(self) -> Position:
        """The position after the last batch that was returned: small, for a later `state_dict(position)`.

        Its parts are, by name, the position of each loader and whether the loader ended in this epoch.
        """
        parts = {name: (loader.position(), name in self._ended) for name, loader in self.loaders.items()}
        return Position(self._epoch, self._step, parts)

    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """Return the state of all loaders after the last batch, in plain types.

        Args:
            position: after an earlier batch, for a trainer that reads ahead.
        """
        here = position or self.position()
        inner = {name: loader.state_dict(here.parts[name][0]) for name, loader in self.loaders.items()}
        # A joint state belongs to a rank if the state of one of its loaders does.
        places = [(state["rank"], state["world_size"]) for state in inner.values() if "rank" in state]
        plain = {
            "step": here.step,
            "ended": [name for name, (_, ended) in here.parts.items() if ended],
            "loaders": inner,
        }
        return make_state(_NAME, self._identity(), plain, places[0] if places else None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was saved; call it before iterating.

        Args:
            state: the state of this rank, or the states of all ranks as `gather_state` returned them: then each loader
                continues with another number of ranks or workers, if it can.

        Raises:
            BatchError: the state belongs to other loaders, weights or data.
        """
        with damage_named():
            self._restore(states_of(state), is_gathered=isinstance(state, dict) and GATHERED in state)

    def _restore(self, states: list[dict[str, Any]], *, is_gathered: bool) -> None:
        for state in states:
            check_state(state, _NAME)
            check_identity(state["identity"], self._identity(), allow_changed_weights=self._allow_changed_weights)
        step, ended = states[0]["step"], list(states[0]["ended"])
        before = {name: loader.state_dict() for name, loader in self.loaders.items()}
        try:
            for name, loader in self.loaders.items():
                inner = [state["loaders"][name] for state in states]
                loader.load_state_dict({GATHERED: inner} if is_gathered else inner[0])
        except EnergonPackedError:
            # All or nothing: if a loader refuses its state, the loaders before it return to their positions.
            for name, loader in self.loaders.items():
                loader.load_state_dict(before[name])
            raise
        self._step, self._ended = step, ended
        self._restores += 1

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "weights": self._weights, "stop": self._stop}

    def _draw(self) -> str:
        """Name of the loader of this step."""
        # Drawn by block and step instead of by a running generator: a state is then the step alone.
        draws = np.random.default_rng([self._seed, self._step // _BLOCK]).random(_BLOCK)
        bounds = np.cumsum(list(self._weights.values()))
        index = int(np.searchsorted(bounds, draws[self._step % _BLOCK] * bounds[-1], side="right"))
        return list(self._weights)[min(index, len(bounds) - 1)]  # rounding may reach the last bound

    def _ends(self, name: str) -> bool:
        """Record that a loader ended, and return whether the joint epoch ends with it."""
        if name not in self._ended:
            self._ended.append(name)
        return self._stop == "first" or (self._stop == "all" and len(self._ended) == len(self.loaders))
