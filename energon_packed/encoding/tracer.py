"""Tracer: renders messages with contents that watch their use -> the text, and the contents that have the same text.

The template runs in Jinja itself, on strings of a class that knows what is done with it:

    {{ content }}, '<' + content + '>'      joined with fixed text: the same for all contents
    '</think>' in content, content.strip()  a question, answered as for a content without `</think>` or white space at
                                            its ends, and remembered: ContentGuard accepts such contents only
    content | upper, content[0], ...        any other use: NotJoined is raised

For all contents that the guard accepts, the same statements run with the same answers, so the text is the same fixed
text around the contents (`skeleton.py`). The environment notices the uses that a string does not, such as
`content in 'abc'`. The caller also compares the text with the text that Transformers renders.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import TemplateError
from jinja2.runtime import Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from energon_packed.encoding.skeleton import ContentGuard

# Tests that have the same result for all strings, and filters of lists that do not change the items.
_TYPE_TESTS = ("string", "defined", "none", "undefined", "mapping", "iterable", "sequence", "number", "boolean")
_LIST_FILTERS = ("length", "count", "first", "last", "list", "reverse", "selectattr", "rejectattr")
_PLAIN = (str, int, float, type(None), Undefined)


class NotJoined(Exception):
    """The template may do more with a content than join it."""


def _not_joined(*args: object, **options: object) -> Any:
    raise NotJoined


class _Text(str):
    """Contents joined with fixed text, which can be joined with more text; any other use raises NotJoined."""

    def __str__(self) -> "_Text":
        return self

    def __add__(self, other: Any) -> "_Text":
        return _join((self, other if isinstance(other, str) else _not_joined()))  # type: ignore[return-value]

    def __radd__(self, other: Any) -> "_Text":
        return _join((other if isinstance(other, str) else _not_joined(), self))  # type: ignore[return-value]


_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__", "__format__")
for _name in {*dir(str), *_COMPARISONS} - ({*dir(object), *vars(_Text)} - {*_COMPARISONS}):
    setattr(_Text, _name, _not_joined)


class _Content(_Text):
    """A content, which also answers the questions that a guard can express."""

    _asked: set[tuple[str, str]]  # ("literal" or "stripped", string) or ("filled", "")

    def _ask(self, kind: str, value: Any) -> "_Content":
        if not isinstance(value, str):
            raise NotJoined
        self._asked.add((kind, value))
        return self

    def __contains__(self, literal: Any) -> bool:
        self._ask("literal", literal)
        return False

    def __bool__(self) -> bool:
        self._asked.add(("filled", ""))
        return True

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) and other is not self:
            return not self if str.__len__(other) == 0 else _not_joined()
        return other is self

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = _not_joined

    def split(self, literal: Any = None, *more: object) -> list["_Content"]:  # type: ignore[override]
        """Split at a literal that the content does not contain."""
        return [self._ask("literal", literal)]

    def strip(self, characters: Any = None) -> "_Content":
        """Strip characters that the content does not start or end with."""
        return self._ask("stripped", " " if characters is None else characters)

    lstrip = rstrip = strip

    def startswith(self, literal: Any, *more: object) -> bool:
        """Answer for a content that does not contain the literal."""
        return literal in self

    endswith = startswith


class _Length:
    """Length of a content, which can only be compared with 0; Python raises TypeError for other uses."""

    def __init__(self, content: _Content) -> None:
        self._content = content

    def __bool__(self) -> bool:
        return bool(self._content)

    def __eq__(self, other: object) -> bool:
        return not self > other

    def __gt__(self, other: object) -> bool:
        return bool(self) if other == 0 else _not_joined()


def _join(parts: Any) -> str:
    """Join strings: a content and empty strings are the content, and contents with other strings are a _Text."""
    filled = [part for part in parts if isinstance(part, _Text) or part]
    if len(filled) == 1:
        return filled[0]
    text = "".join(filled)
    return _Text(text) if any([isinstance(part, _Text) for part in filled]) else text


def _has_content(value: Any) -> bool:
    """Whether a value is or may contain a content."""
    if isinstance(value, _PLAIN) and not isinstance(value, _Text):
        return False
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return items is None or any(map(_has_content, items))


class _Generator(CodeGenerator):
    """Code in which `~` and `in` see contents: Python's own join and search would read their characters."""

    def visit_Concat(self, node: Any, frame: Any) -> None:  # noqa: N802
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_Compare(self, node: Any, frame: Any) -> None:  # noqa: N802
        operators = {operand.op for operand in node.ops}
        if not operators & {"in", "notin"}:
            super().visit_Compare(node, frame)
            return
        if len(node.ops) > 1:  # a < b in c
            raise NotJoined
        self.write(f"({'not ' * ('notin' in operators)}environment.is_in(")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(node.ops[0].expr, frame)
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    concat = staticmethod(_join)
    intercepted_binops = frozenset("%")

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.filters = {name: _watched(name, apply, _filtered) for name, apply in self.filters.items()}
        self.tests = {name: _watched(name, apply, _tested) for name, apply in self.tests.items()}
        self.globals["raise_exception"] = _reject

    @staticmethod
    def is_in(item: Any, container: Any) -> bool:
        return _not_joined() if isinstance(item, _Text) and isinstance(container, str) else item in container

    def getitem(self, obj: Any, argument: Any) -> Any:
        return _not_joined() if isinstance(argument, _Text | _Length) else super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return _not_joined() if _has_content([left, right]) else super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        own = [value for name, value in options.items() if name not in ("_loop_vars", "_block_vars")]  # of Jinja
        if not (isinstance(function, Macro) or function is Namespace) and _has_content([*args, *own]):
            raise NotJoined
        return super().call(context, function, *args, **options)


def _watched(name: str, apply: Any, of_contents: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that calls `of_contents` if an argument has contents."""
    first = hasattr(apply, "jinja_pass_arg")  # the environment or context comes first

    @wraps(apply)
    def watched(*args: Any, **options: Any) -> Any:
        if not _has_content([*args[first:], *options.values()]):
            return apply(*args, **options)
        if _has_content([*args[first + 1 :], *options.values()]):
            raise NotJoined
        return of_contents(name, args[first], lambda value: apply(*args[:first], value, *args[first + 1 :], **options))

    return watched


def _filtered(name: str, value: Any, apply: Callable[[Any], Any]) -> Any:
    if not isinstance(value, _Text) and name in _LIST_FILTERS:
        return apply(value)
    if isinstance(value, _Content) and name in ("trim", "string", "default", "d"):
        return apply(value)
    if isinstance(value, _Content) and name in ("length", "count"):
        return _Length(value)
    raise NotJoined


def _tested(name: str, value: Any, apply: Callable[[Any], Any]) -> Any:
    if name not in _TYPE_TESTS or isinstance(value, _Length):
        raise NotJoined
    return apply("x" if isinstance(value, _Text) else value)


def _reject(message: str) -> None:
    raise TemplateError(message)


@lru_cache  # not an attribute of the tracer or of the encoder, which are pickled: compiled templates cannot be
def _compiled(source: str) -> Template | None:
    environment = _Environment()
    tree = environment.parse(source)
    try:
        return None if tree.find(nodes.EvalContextModifier) else environment.from_string(tree)  # autoescape
    except NotJoined:
        return None


class Tracer:
    """Renders a template with contents that watch their use.

    Args:
        source: Jinja source.
        variables: of the template, beside the messages.
    """

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        self._source = source
        self._variables = {"tools": None, "documents": None, **variables}
        self._asked: set[tuple[str, str]] = set()

    def render(self, messages: Sequence[dict[str, Any]], *, prompt: bool) -> str:
        """Render messages whose contents are strings or lists of text parts; with `prompt`, and the generation prompt.

        Raises:
            NotJoined: the template may do more with a content than join it.
            Exception: any error of the template.
        """
        if (template := _compiled(self._source)) is None:
            raise NotJoined
        watched = [{**message, "content": self._watch(message["content"])} for message in messages]
        text = template.render(messages=watched, add_generation_prompt=prompt, **self._variables)
        return "".join((text, ""))  # a str, no longer a _Text

    def _watch(self, content: Any) -> Any:
        if isinstance(content, list):
            return [{**part, "text": self._watch(part["text"])} for part in content]
        watched = _Content(content)
        watched._asked = self._asked
        return watched

    @property
    def guard(self) -> ContentGuard:
        """The contents around which all renderings so far wrote the same text."""
        literals = sorted([value for kind, value in self._asked if kind == "literal"])
        stripped = sorted({*"".join([value for kind, value in self._asked if kind == "stripped"])})
        return ContentGuard(tuple(literals), ("filled", "") in self._asked, "".join(stripped))
