"""Whether a chat template takes a message's content as one string or as a list of parts.

Nothing declares it. As vLLM does, the template's syntax tree is searched for a loop over a message's content.
"""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import nodes


@dataclass(frozen=True)
class ContentFormat:
    """What shape of ``content`` a template can take.

    Attributes:
        parts: a list of parts (it loops over the content).
        string: a plain string (it never loops, or asks whether the content is a string).
    """

    parts: bool
    string: bool


CONTENT_FORMATS = {
    "auto": None,
    "string": ContentFormat(parts=False, string=True),
    "openai": ContentFormat(parts=True, string=False),
}
"""vLLM's names: of plain strings, of lists of parts, and of whatever the template looks made for."""


def detect_content_format(template: nodes.Template) -> ContentFormat:
    """The content format of a parsed template."""
    names = _Names(template)
    loops = any(names.is_content(loop.iter) for loop in template.find_all(nodes.For))
    asks = any(
        test.name == "string" and names.is_content(test.node) for test in template.find_all(nodes.Test)
    )
    return ContentFormat(parts=loops, string=not loops or asks)


class _Names:
    """The variables that hold the messages, one message, or a message's content, wherever they are bound."""

    def __init__(self, template: nodes.Template) -> None:
        self.conversations = {"messages"}
        self.messages: set[str] = set()
        self.contents: set[str] = set()
        macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
        bindings: list[tuple[nodes.Node, nodes.Node]] = [
            (node.target, node.node) for node in template.find_all(nodes.Assign)
        ]
        for call in template.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                bindings += zip(macros[call.node.name].args, call.args, strict=False)
        loops = [(node.target, node.iter) for node in template.find_all(nodes.For)]
        # Names bound from names: repeated until nothing new turns up.
        while True:
            before = len(self.conversations) + len(self.messages) + len(self.contents)
            for target, value in bindings:
                self._bind(target, value)
            for target, iterated in loops:
                if isinstance(target, nodes.Name) and self._is_conversation(iterated):
                    self.messages.add(target.name)
            if before == len(self.conversations) + len(self.messages) + len(self.contents):
                break

    def _bind(self, target: nodes.Node, value: nodes.Node) -> None:
        if not isinstance(target, nodes.Name):
            return
        if self._is_conversation(value):
            self.conversations.add(target.name)
        elif self._is_message(value):
            self.messages.add(target.name)
        elif self.is_content(value):
            self.contents.add(target.name)

    def _is_conversation(self, node: nodes.Node | None) -> bool:
        """``messages``, a slice of it, or a filter over it."""
        if isinstance(node, nodes.Name):
            return node.name in self.conversations
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self._is_conversation(node.node)
        return isinstance(node, nodes.Filter) and self._is_conversation(node.node)

    def _is_message(self, node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self.messages
        return (
            isinstance(node, nodes.Getitem)
            and not isinstance(node.arg, nodes.Slice)
            and self._is_conversation(node.node)
        )

    def is_content(self, node: nodes.Node | None) -> bool:
        """``message.content``, a variable that holds it, or a slice or filter of either."""
        match node:
            case nodes.Name():
                return node.name in self.contents
            case nodes.Getattr(attr="content"):
                return self._is_message(node.node)
            case nodes.Getitem(arg=nodes.Const(value="content")):
                return self._is_message(node.node)
            case nodes.Getitem(arg=nodes.Slice()) | nodes.Filter():
                return self.is_content(node.node)
        return False
