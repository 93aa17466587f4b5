"""Option values from text: the command line, config files and Python take the same forms."""

import math
import os
import re
from pathlib import Path

from energon_packed.errors import ConfigError
from energon_packed.options import short
from energon_packed.shards.nv_meta import SPLITS

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_TOKENS = re.compile(r"(-?\d+(?:\.\d+)?)\s*(k?)", re.IGNORECASE)
_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST_PREFIX = 64


def parse_part(text: str) -> tuple[int, int]:
    """`2/8` as (2, 8); `auto` takes both numbers from SLURM.

    Raises:
        ConfigError: the text has another form, or there is no SLURM task.
    """
    if text == "auto":
        try:
            return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        except (KeyError, ValueError) as error:
            raise ConfigError(
                "`part=auto` needs SLURM_PROCID and SLURM_NTASKS, which srun sets; pass `part=I/N`"
            ) from error
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not found:
        raise ConfigError(f"invalid `part` {text!r}; use the form 0/4, or auto")
    return int(found[1]), int(found[2])


def checked_part(part: object) -> tuple[int, int]:
    """(I, N) with 0 <= I < N.

    Raises:
        ConfigError: it is something else.
    """
    pair = part if isinstance(part, list | tuple) and len(part) == 2 else ()
    numbers = [one for one in pair if isinstance(one, int) and not isinstance(one, bool)]
    if len(numbers) != 2:
        raise ConfigError(f"`part` is {short(part)}; it must be two integers, or a text such as 0/4")
    number, count = numbers
    if not 0 <= number < count:
        raise ConfigError(f"`part` is {number}/{count}; the first number must be from 0 to below the second")
    return number, count


def parse_split(text: str) -> dict[str, float]:
    """`train=0.98,val=0.02` as a dict.

    Raises:
        ConfigError: the text has another form.
    """
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = (one.strip() for one in part.partition("="))
        if name in shares:
            raise ConfigError(f"`split` {text!r} names {name} twice; name each split once")
        try:
            shares[name] = float(share)
        except ValueError as error:
            raise ConfigError(f"invalid `split` {text!r}; use the form train=0.98,val=0.02") from error
    return shares


def parse_size(text: str) -> int:
    """Bytes of `512M`, `1GB` or `1073741824`; K, M, G and T are powers of 1024.

    Raises:
        ConfigError: the text has another form.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"invalid size {text!r}; use bytes or a unit, such as 512M or 1G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_seq_len(text: str) -> int:
    """Tokens of `8192` or `8k`; k is 1024.

    Raises:
        ConfigError: the text has another form.
    """
    match = _TOKENS.fullmatch(text.strip())
    tokens = float(match[1]) * _UNITS[match[2].upper()] if match is not None else math.nan
    if not tokens.is_integer():
        raise ConfigError(f"`seq_len` is {text!r}; it must be an integer, such as 8192 or 8k")
    return int(tokens)


def checked_split(split: dict[str, float]) -> dict[str, float]:
    """The shares in the order of `SPLITS`, so that the same shares always make the same shards.

    Shares add up to 1. Percentages (that add up to 100) and whole numbers are divided by their sum.

    Raises:
        ConfigError: no share, an unknown split, or fractions with another sum.
    """
    if not isinstance(split, dict):
        raise ConfigError(f"`split` is {short(split)}; use shares such as train=0.98,val=0.02")
    if not split or not all(_is_share(share) for share in split.values()):
        raise ConfigError("`split` must name shares >= 0, such as train=0.98,val=0.02")
    if unknown := set(split) - set(SPLITS):
        raise ConfigError(f"unknown split {', '.join(sorted(map(str, unknown)))}; use {', '.join(SPLITS)}")
    total = sum(split.values())
    ordered = {name: float(split[name]) for name in SPLITS if name in split}
    if abs(total - 1) <= 1e-6:
        return ordered
    whole = all(share.is_integer() for share in ordered.values())
    if total == 0 or not (whole or abs(total - 100) <= 1e-4):
        raise ConfigError(
            f"the shares of `split` add up to {total:g}; they must add up to 1 or 100, or be whole numbers"
        )
    return {name: share / total for name, share in ordered.items()}


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def prefix_of(folder: Path) -> str:
    """Start of shard names for an output folder: its name, so that outputs of different names can be blended.

    `{part}` and what joins it are left out, as the number of the part follows the prefix anyway; where nothing else
    remains, the folder above gives the name.
    """
    resolved = Path(os.path.abspath(folder))
    for part in (resolved.name, resolved.parent.name):
        name = _NOT_IN_KEYS.sub("_", part.replace("{part}", "")).strip("_-")
        if name:
            return name[:_LONGEST_PREFIX]
    return "pack"


def part_suffix(number: int | None) -> str:
    """`_p003` for part 3, nothing for the complete input."""
    return "" if number is None else f"_p{number:03d}"
