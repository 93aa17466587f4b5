"""`content_guard`: the Jinja source of a chat template -> the contents that it only joins (ContentGuard), or None.

For these contents, a text can be joined from fixed pieces without Jinja (`skeleton.py`). The check is an abstract
interpretation of the syntax tree. Each expression has a class:

    FIXED     the same for all conversations with the same roles
    CONTENT   a content, unchanged
    TEXT      contents and fixed pieces, joined
    OTHER     anything else

If only FIXED values decide the branches and only the first three classes are printed, the text is fixed pieces around
contents. Templates of reasoning models also search contents for `</think>` or white space. Such a search has the same
result for all contents without its literals, which ContentGuard checks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from energon_packed.records import EXTRA_FIELDS

FIXED, CONTENT, TEXT, OTHER = range(4)
_CONSTANT_TESTS = ("string", "defined", "none", "undefined", "mapping", "iterable", "sequence", "number", "boolean")
_BETWEEN = "\0"
_NEIGHBOURS = ("previtem", "nextitem")


@dataclass(frozen=True, slots=True)
class ContentGuard:
    """Condition for the contents that a template only joins.

    Attributes:
        literals: strings that it searches for; contents must not contain any of them.
        filled: it branches on empty contents; contents must not be empty.
        stripped: characters that it strips; contents must not start or end with any of them. " " means all white
            space.
    """

    literals: tuple[str, ...] = ()
    filled: bool = False
    stripped: str = ""

    def accepts(self, contents: Sequence[str]) -> bool:
        """Whether the template only joins all of these contents."""
        if self.filled and not all(contents):
            return False
        if self.stripped and any([content and self._strips(content) for content in contents]):
            return False
        # Searching all contents at once is faster. A literal across two contents is a false alarm: Jinja renders them.
        joined = _BETWEEN.join(contents) if self.literals else ""
        return not any([literal in joined for literal in self.literals])

    def _strips(self, content: str) -> bool:
        first, last = content[0], content[-1]
        if " " in self.stripped and (first.isspace() or last.isspace()):
            return True
        return first in self.stripped or last in self.stripped


def content_guard(source: str) -> ContentGuard | None:
    """Compute the contents that a template only joins; None if it may change any content.

    If a conversation of such a template is not rejected, all conversations with the same roles, without tools and tool
    calls, and with contents that the guard accepts have the same spans and are not rejected either. The check is
    conservative: it returns None for syntax that it does not know.
    """
    from jinja2 import Environment
    from jinja2.exceptions import TemplateSyntaxError

    try:
        return _Purity(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)).guard()
    except TemplateSyntaxError:
        return None


class _Purity:
    """Walks a template's syntax tree for `content_guard`."""

    def __init__(self, tree: Any) -> None:
        from jinja2 import nodes

        self._nodes = nodes
        self._tree = tree
        self._lists = {"messages"}  # names of lists of messages
        self._holders: set[str] = set()  # names of messages, the variables of loops over lists
        self._classes: dict[str, int] = {}  # of variables, by name: the highest of all assignments
        self._echoes: set[str] = set()  # macros that print their first argument if it is a string
        self._literals: set[str] = set()
        self._filled = False
        self._stripped: set[str] = set()

    def guard(self) -> ContentGuard | None:
        """Return the guard of the whole template."""
        # Repeat until no class changes: a variable may be read in a loop before a later statement assigns it.
        known = None
        while known != (known := self._state()):
            pure = self._pure(self._tree.body)
            if self._state() == known:
                if not pure:
                    return None
                return ContentGuard(tuple(sorted(self._literals)), self._filled, "".join(sorted(self._stripped)))
        return None

    def _state(self) -> tuple[Any, ...]:
        return (dict(self._classes), set(self._lists), set(self._holders), set(self._echoes))

    # --- statements ------------------------------------------------------------------------------------------------

    def _pure(self, statements: Iterable[Any]) -> bool:
        return all([self._is_pure(statement) for statement in statements])  # all of them: each may assign

    def _is_pure(self, node: Any) -> bool:
        nodes = self._nodes
        if isinstance(node, nodes.Output):
            return all([self._class(child) <= TEXT for child in node.nodes])
        if isinstance(node, nodes.If):
            return self._is_pure_if(node)
        if isinstance(node, nodes.For):
            return self._is_pure_loop(node)
        if isinstance(node, nodes.Assign):
            return self._assigns(node)
        if isinstance(node, nodes.Macro):
            return self._is_pure_macro(node)
        if isinstance(node, nodes.ExprStmt):
            return self._class(node.node) == FIXED
        return isinstance(node, nodes.Continue | nodes.Break)

    def _is_pure_if(self, node: Any) -> bool:
        test = node.test
        if isinstance(test, self._nodes.Test) and test.name == "string" and self._is_content(test.node):
            return self._pure(node.body)  # a content is a string
        decided = self._truth(test) <= CONTENT
        return all([decided, self._pure(node.body), self._pure(node.elif_), self._pure(node.else_)])

    def _is_pure_loop(self, node: Any) -> bool:
        if node.test is not None:
            return False
        if self._is_messages(node.iter):
            if not isinstance(node.target, self._nodes.Name) or node.target.name in self._classes:
                return False
            self._holders.add(node.target.name)
        elif self._class(node.iter) != FIXED or self._holders & self._targets(node):
            return False
        return all([self._pure(node.body), self._pure(node.else_)])

    def _targets(self, loop: Any) -> set[str]:
        """Names of the variables of a loop."""
        inner = loop.target.find_all(self._nodes.Name)
        return {node.name for node in (loop.target, *inner) if isinstance(node, self._nodes.Name)}

    def _assigns(self, node: Any) -> bool:
        if isinstance(node.target, self._nodes.NSRef):
            name = f"{node.target.name}.{node.target.attr}"
        elif isinstance(node.target, self._nodes.Name):
            name = node.target.name
        else:
            return self._class(node.node) == FIXED  # several at once
        if self._is_messages(node.node):
            self._lists.add(name)
            return name not in self._classes
        if name in self._lists or name in self._holders:
            return False
        self._classes[name] = max(self._classes.get(name, FIXED), self._class(node.node))
        return self._classes[name] <= TEXT

    def _is_pure_macro(self, node: Any) -> bool:
        """Whether a macro prints fixed text for fixed arguments; a macro that echoes a string is remembered."""
        names = [argument.name for argument in node.args]
        outer = {name: self._classes.pop(name) for name in names if name in self._classes}
        shadowed = any(name in self._holders or name in self._lists for name in names)
        printed = [child for output in node.find_all(self._nodes.Output) for child in output.nodes]
        pure = not shadowed and self._pure(node.body) and all(self._class(child) == FIXED for child in printed)
        for name in names:
            self._classes.pop(name, None)
        self._classes |= outer
        if pure and self._is_echo(node):
            self._echoes.add(node.name)
        return pure

    def _is_echo(self, macro: Any) -> bool:
        """Whether a macro is `{% if x is string %}{{ x }}`, with anything in its else branches."""
        nodes = self._nodes
        body = [child for child in macro.body if not self._is_blank(child)]
        if len(body) != 1 or not isinstance(body[0], nodes.If) or not macro.args:
            return False
        name, test = macro.args[0].name, body[0].test
        statements = [child for child in body[0].body if not self._is_blank(child)]
        shown = [child for statement in statements for child in getattr(statement, "nodes", [None])]
        is_string = isinstance(test, nodes.Test) and test.name == "string"
        return is_string and [self._named(child) for child in (test.node, *shown)] == [name, name]

    def _is_blank(self, node: Any) -> bool:
        nodes = self._nodes
        return isinstance(node, nodes.Output) and all(
            isinstance(child, nodes.TemplateData) and not child.data for child in node.nodes
        )

    def _named(self, node: Any) -> str | None:
        return node.name if isinstance(node, self._nodes.Name) else None

    # --- expressions -----------------------------------------------------------------------------------------------

    def _truth(self, node: Any) -> int:
        """Class of a value that is only tested: messages are never empty, and contents are not if `filled` is set."""
        if self._is_message(node) or self._is_messages(node):
            return FIXED
        tested = self._class(node)
        self._filled |= tested == CONTENT
        return tested

    def _class(self, node: Any) -> int:
        """Class of an expression; OTHER for anything unknown that contains more than FIXED values."""
        nodes = self._nodes
        if isinstance(node, nodes.Name):
            bare = node.name in self._holders or node.name in self._lists
            full = any(key.startswith(f"{node.name}.") and kind for key, kind in self._classes.items())  # a namespace
            return OTHER if bare or full else self._classes.get(node.name, FIXED)
        if isinstance(node, nodes.Add | nodes.Concat):
            classes = [self._class(child) for child in node.iter_child_nodes()]
            return FIXED if not any(classes) else TEXT if max(classes) <= TEXT else OTHER
        if isinstance(node, nodes.And | nodes.Or):
            classes = [self._truth(node.left), self._truth(node.right)]
            return max(classes) if max(classes) <= CONTENT else OTHER
        if isinstance(node, nodes.Not):
            return FIXED if self._truth(node.node) <= CONTENT else OTHER
        if isinstance(node, nodes.CondExpr):
            branches = [self._class(child) for child in (node.expr1, node.expr2) if child is not None]
            return max(branches) if self._truth(node.test) <= CONTENT else OTHER
        if isinstance(node, nodes.Getattr | nodes.Getitem):
            return self._class_of_item(node)
        if isinstance(node, nodes.Compare) and (found := self._class_of_search(node)) is not None:
            return found
        if isinstance(node, nodes.Test) and node.name in _CONSTANT_TESTS and self._class(node.node) == CONTENT:
            return FIXED
        if isinstance(node, nodes.Filter) and (found := self._class_of_filter(node)) is not None:
            return found
        if isinstance(node, nodes.Call) and (found := self._class_of_call(node)) is not None:
            return found
        return FIXED if not any([self._class(child) for child in node.iter_child_nodes()]) else OTHER

    def _is_content(self, node: Any) -> bool:
        """Whether a node is `message.content` itself; a variable may have other values in other branches."""
        return bool(self._name_of(node) == "content" and self._is_message(node.node))

    def _class_of_item(self, node: Any) -> int:
        """Class of `message.content`, `content.split('x')[-1]`, `loop.index0` and similar expressions."""
        nodes = self._nodes
        key = self._name_of(node)
        if key in ("role", "content", *EXTRA_FIELDS) and self._is_message(node.node):
            return CONTENT if key == "content" else FIXED
        if key in _NEIGHBOURS:
            return OTHER
        owner = node.node
        if f"{self._named(owner)}.{key}" in self._classes:
            return self._classes[f"{self._named(owner)}.{key}"]
        if key in (0, -1) and isinstance(owner, nodes.Call) and self._method(owner) == "split":
            literal = self._literal(owner)
            if literal and self._class(owner.node.node) == CONTENT:
                self._literals.add(literal)
                return CONTENT
        return FIXED if not any([self._class(child) for child in node.iter_child_nodes()]) else OTHER

    def _class_of_search(self, node: Any) -> int | None:
        """Class of `'x' in content` and `'tool_calls' in message`."""
        nodes = self._nodes
        if len(node.ops) != 1 or node.ops[0].op not in ("in", "notin") or not isinstance(node.expr, nodes.Const):
            return None
        if isinstance(node.ops[0].expr, nodes.Name) and node.ops[0].expr.name in self._holders:
            return FIXED
        if not node.expr.value or not isinstance(node.expr.value, str) or self._class(node.ops[0].expr) != CONTENT:
            return None
        self._literals.add(node.expr.value)
        return FIXED

    def _class_of_filter(self, node: Any) -> int | None:
        if node.name in ("length", "count") and self._is_messages(node.node):
            return FIXED
        if node.node is None or self._class(node.node) != CONTENT:
            return None
        if node.name == "string" or (node.name == "trim" and not node.args and not node.kwargs):
            self._stripped |= {" "} if node.name == "trim" else set()
            return CONTENT
        if node.name in ("default", "d") and not any([self._class(argument) for argument in node.args]):
            self._filled = True
            return CONTENT
        return None

    def _class_of_call(self, node: Any) -> int | None:
        if self._named(node.node) in self._echoes and node.args and self._class(node.args[0]) == CONTENT:
            others = [*node.args[1:], *(keyword.value for keyword in node.kwargs)]
            return CONTENT if not any([self._class(other) for other in others]) else OTHER
        method = self._method(node)
        if method is None or self._class(node.node.node) != CONTENT:
            return None
        literal = self._literal(node)
        if method in ("strip", "lstrip", "rstrip") and (literal is None or literal.isspace()):
            self._stripped |= set(literal or " ")
            return CONTENT if literal or not node.args else None
        if method in ("startswith", "endswith") and literal:
            self._literals.add(literal)
            return FIXED
        return None

    def _method(self, call: Any) -> str | None:
        return call.node.attr if isinstance(call.node, self._nodes.Getattr) else None

    def _literal(self, call: Any) -> str | None:
        """The only argument of a call, if it is a string literal."""
        if len(call.args) != 1 or call.kwargs or call.dyn_args or call.dyn_kwargs:
            return None
        value = call.args[0].value if isinstance(call.args[0], self._nodes.Const) else None
        return value if isinstance(value, str) else None

    def _name_of(self, node: Any) -> Any:
        """`x` of `owner.x` and `owner['x']`; None if the key is computed, or `node` is neither."""
        if isinstance(node, self._nodes.Getattr):
            return node.attr
        if not isinstance(node, self._nodes.Getitem):
            return None
        sign, value = (-1, node.arg.node) if isinstance(node.arg, self._nodes.Neg) else (1, node.arg)
        if not isinstance(value, self._nodes.Const):
            return None
        return sign * value.value if isinstance(value.value, int) else value.value

    def _is_message(self, node: Any) -> bool:
        """Whether a node is a message: `message`, `messages[0]`, `loop.previtem`."""
        nodes = self._nodes
        if isinstance(node, nodes.Name):
            return node.name in self._holders
        if isinstance(node, nodes.Getitem) and self._is_messages(node.node):
            return not isinstance(node.arg, nodes.Slice) and self._class(node.arg) == FIXED
        return isinstance(node, nodes.Getattr) and node.attr in _NEIGHBOURS and self._named(node.node) == "loop"

    def _is_messages(self, node: Any) -> bool:
        """Whether a node is a list of messages: `messages`, another name for it, or a slice of it."""
        nodes = self._nodes
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            bounds = (node.arg.start, node.arg.stop, node.arg.step)
            if any(bound is not None and self._class(bound) != FIXED for bound in bounds):
                return False
            node = node.node
        return isinstance(node, nodes.Name) and node.name in self._lists
