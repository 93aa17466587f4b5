"""Print keys, parts and sizes of the first packs of tars: `python tools/inspect_tar.py SHARD.tar...`.

Problems of a tar are printed too, and the exit status is 1 if there are any.
"""

import argparse
import sys
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from energon_packed.errors import EnergonPackedError
from energon_packed.shards.scan import scan_tar


def show(tar: Path, limit: int) -> bool:
    """Print one tar, and return True if it has no problems."""
    scan = scan_tar(tar)
    packs = [(key, list(parts)) for key, parts in groupby(scan.members, key=lambda member: member.key)]
    print(f"{tar}: {len(packs):,} packs, {len(scan.members):,} members, {tar.stat().st_size:,} bytes")
    for key, parts in packs[:limit]:
        print(f"  {key or '(no key)'}: {', '.join(f'{m.part or m.name} {m.size:,}' for m in parts)}")
    if len(packs) > limit:
        print(f"  and {len(packs) - limit:,} more. Use --limit to show them.")
    for problem in scan.problems:
        print(f"  PROBLEM: {problem}")
    return not scan.problems


def main() -> None:
    """Show all given tars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tars", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=5, help="maximum number of packs to show per tar")
    options = parser.parse_args()
    try:
        passed = [show(tar, options.limit) for tar in options.tars]
    except (EnergonPackedError, OSError) as error:
        sys.exit(f"error: {error}")
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
