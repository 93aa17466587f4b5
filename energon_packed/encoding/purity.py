"""Whether a chat template only joins contents, so that its text can be joined without Jinja."""

from collections.abc import Iterable
from typing import Any

from energon_packed.records import EXTRA_FIELDS

_CONSTANT_TESTS = ("string", "defined", "none", "undefined")  # of a content, which is always a string


def only_joins_content(source: str) -> bool:
    """True when a template's text is fixed pieces, chosen by roles alone, around the unchanged contents of messages.

    What holds for one conversation of such a template (its prefixes nest, it is not rejected) then holds for every
    conversation with the same roles, no tools and no tool calls. The check reads the template's syntax tree and is
    conservative: `content` may be printed, joined to other text, or tested for being a string; messages may be looped
    over, sliced and asked for their role. Anything else, such as a filter or comparison of contents, gives False.
    """
    from jinja2 import Environment
    from jinja2.exceptions import TemplateSyntaxError

    try:
        return _Purity(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)).holds()
    except TemplateSyntaxError:
        return False


class _Purity:
    """Walks a template's syntax tree for `only_joins_content`."""

    def __init__(self, tree: Any) -> None:
        from jinja2 import nodes

        self._nodes = nodes
        # What may hand rendered text on to something that changes it.
        blocks = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
        self._rewriting = (*blocks, nodes.Include, nodes.Import, nodes.FromImport)
        self._tree = tree
        loops = [loop for loop in tree.find_all(nodes.For) if self._is_messages(loop.iter)]
        self._holders = {"messages"} | {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name)}

    def holds(self) -> bool:
        return self._safe(self._tree, printed=False)

    def _safe(self, node: Any, *, printed: bool = False) -> bool:
        nodes = self._nodes
        if isinstance(node, self._rewriting):
            return False
        if isinstance(node, nodes.Getattr | nodes.Getitem) and self._name_of(node) in ("previtem", "nextitem"):
            return False  # a message by another way
        if isinstance(node, nodes.Name):
            return node.name not in self._holders  # a message as a whole, where no case below knows what is done to it
        if isinstance(node, nodes.For) and self._is_messages(node.iter):
            return node.test is None and self._all_safe((*node.body, *node.else_))
        if isinstance(node, nodes.If) and (taken := self._branch(node)) is not None:
            return self._all_safe(taken)
        if isinstance(node, nodes.Output):
            return all(self._safe(child, printed=True) for child in node.nodes)
        if isinstance(node, nodes.Add | nodes.Concat):
            return all(self._safe(child, printed=printed) for child in node.iter_child_nodes())
        if isinstance(node, nodes.Test) and node.name in _CONSTANT_TESTS and self._key(node.node):
            return True
        if key := self._key(node):
            return printed or key != "content"
        if isinstance(node, nodes.Filter) and node.name in ("length", "count") and self._is_messages(node.node):
            return True
        return self._all_safe(node.iter_child_nodes())

    def _all_safe(self, children: Iterable[Any]) -> bool:
        return all(self._safe(child) for child in children)

    def _branch(self, node: Any) -> Any:
        """The branch that `if content is string` always takes; None for any other condition."""
        test = node.test
        if isinstance(test, self._nodes.Test) and test.name == "string" and self._key(test.node) == "content":
            return node.body
        return None

    def _name_of(self, node: Any) -> Any:
        """`x` of `owner.x` and `owner['x']`; None where it is computed, or `node` is neither."""
        if isinstance(node, self._nodes.Getattr):
            return node.attr
        computed = not isinstance(node, self._nodes.Getitem) or not isinstance(node.arg, self._nodes.Const)
        return None if computed else node.arg.value

    def _key(self, node: Any) -> str | None:
        """`content`, `role` or an extra field, of `message['content']`, `messages[0].role` and the like."""
        nodes = self._nodes
        key = self._name_of(node)
        if key is None:
            return None
        owner = node.node
        if key not in ("role", "content", *EXTRA_FIELDS):
            return None
        if isinstance(owner, nodes.Getitem) and self._is_messages(owner.node):
            return key if self._safe(owner.arg) else None
        return key if isinstance(owner, nodes.Name) and owner.name in self._holders - {"messages"} else None

    def _is_messages(self, node: Any) -> bool:
        """`messages`, or a slice of it."""
        nodes = self._nodes
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node = node.node
        return isinstance(node, nodes.Name) and node.name == "messages"
