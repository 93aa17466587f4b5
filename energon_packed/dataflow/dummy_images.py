"""DummyImages: which rows without images get a dummy image, so that the vision tower runs on every rank.

    rank 0   |-- text --|-- image --|             forward and backward through the vision tower
    rank 1   |-- text --|-- text --|(dummy)       the same collective operations, with zero gradient

DDP and FSDP reduce gradients, and FSDP gathers weights, in operations that every rank must take part in. A rank whose
row has no image skips the vision tower, and the others wait for it. The dummy is the row's tail segment: padding with
its own boundaries, without a target.
"""

import logging
from typing import Literal

from energon_packed.dataflow.process_group import group_place, has_group, launched_processes
from energon_packed.encoding import EncodedSample
from energon_packed.errors import BatchError, ConfigError

_log = logging.getLogger(__name__)
DummyChoice = Literal["auto", "always", "never"]
DUMMY_CHOICES: tuple[DummyChoice, ...] = ("auto", "always", "never")


class DummyImages:
    """Decides for each row; the dummy is that of the row's samples, or one that is given.

    Args:
        choice: `auto` (several ranks train), `always`, `never`, or the dummy: `encoder.dummy`.

    Raises:
        ConfigError: an unknown choice, or a dummy without an image.
    """

    def __init__(self, choice: "DummyChoice | EncodedSample") -> None:
        given = choice if isinstance(choice, EncodedSample) else None
        if given is None and choice not in DUMMY_CHOICES:
            raise ConfigError(f"`dummy_images` is {choice!r}; use {', '.join(DUMMY_CHOICES)}, or `encoder.dummy`")
        if given is not None and given.num_images == 0:
            raise ConfigError("`dummy_images` is a sample without an image; pass `encoder.dummy` of a vision encoder")
        self._given = given
        self._choice = choice
        self._warned = False
        self._several = several_ranks()  # workers that are spawned do not know the process group

    def known(self, of_row: EncodedSample | None) -> EncodedSample | None:
        """The dummy that rows such as this one get if they have no image; None if they do not get a dummy.

        Args:
            of_row: the dummy of the row's samples.

        Raises:
            BatchError: `always`, and no sample is of a vision encoder.
        """
        if self._choice == "never":
            return None
        dummy = self._given or of_row
        if dummy is not None and self._choice == "auto" and not (self._several or several_ranks()):
            return None
        if dummy is None and self._choice == "always":
            raise BatchError(
                "`dummy_images` is 'always', but the samples do not come from an encoder with a vision family; "
                "pass `dummy_images=encoder.dummy`"
            )
        return dummy

    def fitting(self, dummy: EncodedSample | None, room: int | None) -> EncodedSample | None:
        """The dummy, where the row has room for it; with `auto`, a row without room has a warning in its place.

        Args:
            dummy: as `known` gives it.
            room: tokens that the row may still get; None where there is no limit, negative where it is too long.

        Raises:
            BatchError: no room, and the choice is not `auto`.
        """
        if dummy is None or room is None or room < 0 or len(dummy) <= room:
            return dummy
        why = (
            f"a row without images has room for {room} tokens up to `pad_to`, and the dummy image with which all "
            f"ranks run the vision tower takes {len(dummy)}: set `pad_to` to at least `seq_len` + {len(dummy)}, "
            "or pack with a smaller `seq_len`"
        )
        if self._choice != "auto":
            raise BatchError(f"{why}, or set `dummy_images` to 'never'")
        if not self._warned:
            self._warned = True
            _log.warning("%s; ranks may wait for each other (DDP, FSDP)", why)
        return None


def several_ranks() -> bool:
    """Whether several processes train."""
    return (group_place()[1] if has_group() else launched_processes()) > 1
