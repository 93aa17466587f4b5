"""`energon-packed nv-meta` from a checkout: `python tools/make_nv_meta.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from energon_packed.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["nv-meta"]
    main()
