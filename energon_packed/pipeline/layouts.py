"""What a `layout` asks of the other options."""

import re
from typing import TYPE_CHECKING

from energon_packed.encoding.conversation_media import ImageCheck
from energon_packed.errors import ConfigError
from energon_packed.formats import LAYOUTS

if TYPE_CHECKING:
    from energon_packed.pipeline.options import InputOptions, PackOptions

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def image_check(options: "InputOptions") -> ImageCheck:
    """`check_images`, or `convert` where the layout converts images when they are written."""
    if options.check_images == "header" and options.layout is not None and not getattr(options, "keep_bytes", False):
        return "convert"
    return options.check_images


def check_layout(options: "InputOptions") -> None:
    """Give `sample_class` the flavor of the layout.

    Raises:
        ConfigError: another flavor, or supervision that the layout does not hold.
    """
    if options.layout is None:
        return
    flavor = LAYOUTS[options.layout].sample_class
    if options.sample_class not in ("auto", flavor):
        raise ConfigError(
            f"`layout` {options.layout} is a form of {flavor}, not of `sample_class` {options.sample_class}; leave "
            "one of them out"
        )
    if options.patch_order == "block":
        raise ConfigError(
            f"`patch_order` is 'block', but the reader of `layout` {options.layout} puts every .npy file into block "
            "order itself; it needs files in row order"
        )
    if options.loss_on != "assistant":
        raise ConfigError(
            f"`loss_on` is {options.loss_on!r}, but the reader of `layout` {options.layout} trains on every assistant "
            "turn; use 'assistant'"
        )
    object.__setattr__(options, "sample_class", flavor)


def check_layout_outputs(options: "PackOptions") -> None:
    """Refuse options that need a layout, or that its reader does not follow.

    Raises:
        ConfigError: the message names the option.
    """
    if options.layout is None:
        for name in ("keep_bytes", "dataset_module"):
            if getattr(options, name):
                raise ConfigError(f"`{name}` needs a `layout`; use {', '.join(LAYOUTS)}")
        return
    if options.overlong == "truncate":
        raise ConfigError(
            f"`overlong` is 'truncate', but the reader of `layout` {options.layout} reads samples whole; use 'drop'"
        )
    if options.dataset_module is not None and not _MODULE.fullmatch(options.dataset_module):
        raise ConfigError(
            f"`dataset_module` {options.dataset_module!r} is not the name of a package, such as "
            "aiak_training_llm.data.multimodal"
        )
