# Written by energon-packed.
from energon_packed.flavors.packed_captioning import part_filter as part_filter
from energon_packed.flavors.packed_captioning import sample_loader as sample_loader
