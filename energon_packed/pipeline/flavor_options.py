"""What `sample_class` and `unpacked` mean together: `pack` writes packs, unless single samples are asked for."""

import logging
from typing import TYPE_CHECKING

from energon_packed.errors import ConfigError

if TYPE_CHECKING:
    from energon_packed.pipeline.options import InputOptions

AUTO, NARROW, WIDEST = "auto", "PackedCaptioningSample", "PackedMultiMixQASample"
SINGLE = "MultiMixQASample"
_log = logging.getLogger(__name__)


def check_flavor(options: "InputOptions") -> None:
    """Give `sample_class` the flavor that is written: that of single samples only with `unpacked`.

    Raises:
        ConfigError: `unpacked` with the flavor of a pack.
    """
    if options.unpacked:
        if options.sample_class not in (AUTO, SINGLE) or options.layout is not None:
            other = f"`layout` {options.layout}" if options.layout else f"`sample_class` {options.sample_class}"
            raise ConfigError(f"`unpacked` writes {SINGLE}, one sample a member, and {other} holds packs; omit one")
        object.__setattr__(options, "sample_class", SINGLE)
    elif options.sample_class == SINGLE:
        _log.warning(
            "`sample_class` %s names single samples; packs of them are written, as %s. `unpacked` writes one sample a "
            "member, for packing while training",
            SINGLE,
            WIDEST,
        )
        object.__setattr__(options, "sample_class", WIDEST)
