"""VideoReference: a video file of a record, and the frames of it that a sample has (FrameSelection).

A record names a file. Measuring selects its frames from the packets of the file, without decoding, by the settings of
the vision family. A pack stores the file and the selection, so that training decodes exactly these frames, whatever
the settings of the encoder are then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from energon_packed.records.media.reference import MediaReference


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSelection:
    """Frames of a video file.

    Attributes:
        indices: frames in order of presentation, from 0; not decreasing.
        timestamps: time of presentation of each of them in seconds after frame 0.
        fps: average frames per second of the file.
        num_frames: frames of the file.
        height, width: pixels of an upright frame.
        resized: (height, width) that frames are resized to; None for families that resize them as images.
        settings: resolved settings that selected them, by the names of the processors, such as {"fps": 2.0}.

    Examples:
        >>> size = {"height": 480, "width": 640}
        >>> frames = FrameSelection(indices=(0, 15), timestamps=(0.0, 0.5), fps=30.0, num_frames=45, **size)
        >>> frames.num_frames / frames.fps
        1.5
    """

    indices: tuple[int, ...]
    timestamps: tuple[float, ...]
    fps: float
    num_frames: int
    height: int
    width: int
    resized: tuple[int, int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoReference:
    """A video of a sample: a video file, or its selected frames as images (`pack --extract-frames`).

    Attributes:
        file: the video file; None if only the frames are stored.
        frames: the selected frames; None in a record, before it is measured. Always set if there is no `file`.
        images: without a `file`, an image for each of the `frames`, of their height and width. They are frames of a
            video: the model gets them as it gets the frames of a file.
        settings: settings of the record for this video, by the names of the processors, such as {"fps": 1.0}; they
            win over the settings of the vision family.
        images_before: number of images of the conversation before this video; for stored tokens, whose text has no
            placeholders. None if it is unknown, or if placeholders have the order.

    Examples:
        >>> record = {"videos": ["cat.mp4"], "prompts": ["What is it?"], "captions": ["A cat."]}
        >>> video = normalize(record).videos[0]
        >>> video.file.label, video.frames
        ('cat.mp4', None)
    """

    file: MediaReference | None
    frames: FrameSelection | None = None
    images: tuple[MediaReference, ...] = ()
    images_before: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> tuple[MediaReference, ...]:
        """The video file, or the images of its frames."""
        return self.images if self.file is None else (self.file,)
