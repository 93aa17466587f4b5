"""`cook_pack`: a pack from raw parts, for datasets that Energon loads crude.

The flavor comes from the subflavor `sample_class` where there is one, else from the parts of the sample.
"""

from megatron.energon import CrudeSample, basic_sample_keys, stateless

from energon_packed.flavors import PackSample, load_pack
from energon_packed.formats import codec_for, codec_of


@stateless
def cook_pack(sample: CrudeSample) -> PackSample:
    """A pack of its flavor from raw parts.

    Raises:
        FormatError: the parts match no flavor.
        ConfigError: the subflavor names an unknown one.
    """
    named = (sample.get("__subflavors__") or {}).get("sample_class")
    codec = codec_for(named) if named else codec_of(sample)
    return load_pack(codec, sample, **basic_sample_keys(sample))
