# Written by energon-packed.
from energon_packed.flavors.packed_multi_mix_qa import part_filter as part_filter
from energon_packed.flavors.packed_multi_mix_qa import sample_loader as sample_loader
