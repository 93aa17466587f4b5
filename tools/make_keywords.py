"""Write energon_packed/keywords.pyi from the declared options: `python tools/make_keywords.py [--check]`.

The file has a TypedDict for each function that accepts the fields of a class of options as keyword arguments. With
--check, it is not written, and the exit status is 1 if it is out of date.
"""

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from energon_packed import EncoderSettings, LoaderOptions, PackedLoaderOptions, PackOptions, PoolPacker
from energon_packed.integrations.megatron.provider import DECIDED
from energon_packed.options import Declaration, declared

FILE = Path(__file__).resolve().parents[1] / "energon_packed" / "keywords.pyi"
_REQUIRED = tuple(field.name for field in dataclasses.fields(Declaration) if field.default is dataclasses.MISSING)
# TypedDict -> class with the arguments, arguments that it leaves out, and what the docstring says of the others
KEYWORDS: dict[str, tuple[type[Any], tuple[str, ...], str]] = {
    "EncoderKeywords": (EncoderSettings, ("tokenizer", "processor"), "Fields of EncoderSettings."),
    "LoaderKeywords": (LoaderOptions, (), "Fields of LoaderOptions."),
    "OptionKeywords": (Declaration, _REQUIRED, "Attributes of a Declaration that have a default."),
    "PackKeywords": (PackOptions, ("inputs", "encoder"), "Fields of PackOptions."),
    "PackedLoaderKeywords": (PackedLoaderOptions, (), "Fields of PackedLoaderOptions."),
    "PoolKeywords": (PoolPacker, ("max_tokens", "group_by", "size_fn"), "Arguments of PoolPacker."),
    "ProviderKeywords": (PackedLoaderOptions, DECIDED, "Fields of PackedLoaderOptions that Megatron does not decide."),
}


def stub() -> str:
    """Return the text of the file."""
    imports: dict[str, set[str]] = {"typing": {"TypedDict"}}
    classes = []
    for name, (cls, left_out, docstring) in KEYWORDS.items():
        lines = [f"class {name}(TypedDict, total=False):", f'    """{docstring}"""', ""]
        for argument, hints in _arguments(cls):
            if argument not in left_out:
                accepted = dict.fromkeys(_source(hint, imports) for hint in hints)
                accepted = {text: None for text in accepted if text != "None"} | accepted  # None is the last
                lines.append(f"    {argument}: {' | '.join(accepted)}")
        classes.append("\n".join(lines))
    blocks = [_import_block(imports, is_own=False), _import_block(imports, is_own=True), *classes]
    return "# Written by tools/make_keywords.py from the declared options.\n" + "\n\n".join(blocks) + "\n"


def _import_block(imports: Mapping[str, set[str]], *, is_own: bool) -> str:
    """Return the import statements of the standard library, or of this package, as ruff sorts them."""
    modules = [module for module in sorted(imports) if module.startswith("energon_packed.") == is_own]
    return "\n".join(f"from {module} import {', '.join(sorted(imports[module]))}" for module in modules)


def _arguments(cls: type[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of each argument of a class, and the types that it accepts."""
    options = {option.name: option for option in declared(cls)} if dataclasses.is_dataclass(cls) else {}
    hints = typing.get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)
    for name, hint in hints.items():
        if name == "return" or typing.get_origin(hint) is typing.ClassVar:
            continue
        if name in options and (parse := options[name].parse) is not None:
            (parsed, *_) = typing.get_type_hints(parse).values()
            accepted = [*_members(parsed), *([type(None)] if options[name].or_none else [])]
        else:
            accepted = _members(hint)
        if Path in accepted:  # `check` converts strings
            accepted.append(str)
        yield name, accepted


def _members(hint: Any) -> list[Any]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return list(typing.get_args(hint)) if is_union else [hint]


def _source(hint: Any, imports: dict[str, set[str]]) -> str:
    """Return a type as source text, and add the imports that it needs."""
    if hint is None or hint is type(None):
        return "None"
    if len(members := _members(hint)) > 1:
        return " | ".join(_source(member, imports) for member in members)
    if isinstance(hint, list):  # arguments of a Callable
        return f"[{', '.join(_source(member, imports) for member in hint)}]"
    if hint is Ellipsis:
        return "..."
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        imports["typing"].add("Literal")
        return "Literal[" + ", ".join(f'"{value}"' for value in args) + "]"
    if origin is not None:
        return f"{_source(origin, imports)}[{', '.join(_source(member, imports) for member in args)}]"
    name: str = hint.__name__
    module = "pathlib" if hint is Path else hint.__module__  # Python 3.13 defines it elsewhere
    if module != "builtins":
        imports.setdefault(module, set()).add(name)
    return name


def main() -> int:
    """Write or check the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is out of date")
    check = parser.parse_args().check
    text = stub()
    if FILE.is_file() and FILE.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print(f"{FILE} is out of date. Run python tools/make_keywords.py.", file=sys.stderr)
        return 1
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
