"""Errors of samples.

| function | input and output |
|---|---|
| add_location, remedy_of | an error of a pack to the error with its tar, key and remedy |
| sendable | an error in a worker to an error that the main process can restore |
"""

import os
import pickle

from torch.utils.data import get_worker_info

from energon_packed.errors import EnergonPackedError, FormatError, Reason, RecordError
from energon_packed.loading.process import PackAt
from energon_packed.system import resource_error


def add_location(error: Exception, at: PackAt) -> Exception:
    """Add tar and pack to an error, if their content is the cause, and make it `sendable`."""
    place = f"{at.tars}, pack {at.key}"
    if isinstance(error, FormatError | RecordError) and at.tars:
        error = error.at(place, remedy_of(error, os.path.dirname(at.tars)))
    return resource_error(error, place) or sendable(error)


def sendable(error: Exception) -> Exception:
    """Return an error that a worker process can send: the error, or its type and text if it cannot be restored.

    The queue of torch drops a message that cannot be pickled, and the main process would miss its batches. A class
    whose constructor needs more than a message fails when it is restored, which hides the error.
    """
    if get_worker_info() is None:
        return error
    kind = type(error)
    try:
        if isinstance(error, EnergonPackedError):
            is_restored = type(pickle.loads(pickle.dumps(error))) is kind
        else:  # torch sends the class and the text, and passes the text as `message` if the class has this attribute
            is_restored = pickle.loads(pickle.dumps(kind)) is kind and not getattr(kind, "message", None)
    except Exception:  # pickling runs code of the class
        is_restored = False
    if is_restored:
        return error
    base = EnergonPackedError if isinstance(error, EnergonPackedError) else RuntimeError
    return base(f"{kind.__name__}: {error}").with_traceback(error.__traceback__)


def remedy_of(error: EnergonPackedError, folder: str) -> str:
    """Return the remedy for a pack that cannot be loaded."""
    # Packed by their headers, these media were damaged in the input: neither a copy nor the same command repairs them.
    if isinstance(error, RecordError) and error.reason in (Reason.CORRUPT_IMAGE, Reason.CORRUPT_VIDEO):
        return "pack again with --check-media full, which rejects records with damaged images or videos"
    return f"energon-packed verify {folder} checks whether files are damaged: copy or pack them again"
