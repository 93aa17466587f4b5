"""Dummy images: a row without images and videos in, the minimal image sample that it gets out; the same for audio.

    rank 0   |-- text --|-- image --|             forward and backward through the vision tower
    rank 1   |-- text --|-- text --|(dummy)       the same collective operations, with zero gradient

DDP and FSDP reduce gradients, and FSDP gathers weights, in operations that every rank must join. A rank whose row has
no image and no video skips the vision tower, and the other ranks wait for it forever. The dummy is the row's tail
segment: padding with its own boundaries, without a target.
"""

import logging
from typing import Literal, get_args

from energon_packed.encoding import EncodedSample
from energon_packed.errors import BatchError, ConfigError
from energon_packed.loading.ranks import is_distributed

DummyChoice = Literal["auto", "always", "never"]
_log = logging.getLogger(__name__)


class DummyImages:
    """Chooses the dummy image of each row: `encoder.dummy` of its samples, or the dummy passed as `choice`.

    Args:
        choice: `auto` (if several ranks train), `always`, `never`, or the dummy: `encoder.dummy`.

    Raises:
        ConfigError: an unknown choice, or a dummy without an image.
    """

    def __init__(self, choice: DummyChoice | EncodedSample) -> None:
        fixed = choice if isinstance(choice, EncodedSample) else None
        if fixed is None and choice not in (valid := get_args(DummyChoice)):
            raise ConfigError(f"`dummy_images` must be one of {', '.join(valid)}, or `encoder.dummy`, got {choice!r}.")
        if fixed is not None and fixed.num_images == fixed.num_audios == 0:
            raise ConfigError(
                "`dummy_images` must be a sample with an image, got a sample without. Pass `encoder.dummy` of a "
                "vision encoder."
            )
        self._fixed = fixed
        self._choice = choice
        self._is_warned = False
        self._is_distributed = is_distributed()  # asked here too: spawned workers do not know the process group

    def candidate(self, of_row: EncodedSample | None) -> EncodedSample | None:
        """The dummy for rows of these samples, if they have no image; None if they do not get a dummy.

        Args:
            of_row: the dummy of the row's samples.

        Raises:
            BatchError: `always`, but no sample comes from a vision encoder.
        """
        if self._choice == "never":
            return None
        dummy = self._fixed or of_row
        if dummy is not None and self._choice == "auto" and not (self._is_distributed or is_distributed()):
            return None
        if dummy is None and self._choice == "always":
            raise BatchError(
                "`dummy_images='always'` needs samples of an encoder with a vision family. Pass "
                "`dummy_images=encoder.dummy`."
            )
        return dummy

    def fit(
        self, dummy: EncodedSample | None, room: int | None, *, has_vision: bool = False, has_audio: bool = False
    ) -> list[EncodedSample]:
        """Return the dummy of each encoder that the row does not call, if the row has room for them.

        With `auto`, warn once and return [] if it has not.

        Args:
            dummy: result of `candidate`.
            has_vision, has_audio: whether the row has images or videos, and audio.
            room: tokens that the row may still get; None without a limit, negative if the row is too long already,
                which is reported elsewhere.

        Raises:
            BatchError: no room, and the choice is not `auto`.
        """
        of_encoders = [part for part in (dummy, dummy and dummy.dummy) if part is not None]
        parts = [part for part in of_encoders if not (has_audio if part.num_audios else has_vision)]
        tokens = sum([len(part) for part in parts])
        if room is None or room < 0 or tokens <= room:
            return parts
        reason = (
            f"A row without images has room for {room} tokens up to `pad_to`, but the dummy image that lets all ranks "
            f"run the vision tower needs {tokens}. Set `pad_to` to at least `seq_len` + {tokens}, or pack "
            "with a smaller `seq_len`"
        )
        if self._choice != "auto":
            raise BatchError(f"{reason}, or set `dummy_images` to 'never'.")
        if not self._is_warned:
            self._is_warned = True
            _log.warning("%s. Until then, ranks may wait for each other (DDP, FSDP).", reason)
        return []
