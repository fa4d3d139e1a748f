"""What a model thinks before it answers, split from the answer by the tags around it."""

from __future__ import annotations

from dataclasses import dataclass

from streamllm.parsers.events import Content, Event, OutputParser, Reasoning
from streamllm.parsers.json_reader import skip_whitespace
from streamllm.parsers.text_reader import EndOfOutput, Steps, TextReader, Trimmed


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags of a family.

    Attributes:
        name: what ``--reasoning-parser`` calls it.
        begins, ends: the tags; the first of each is the one to write.
        opened: whether a text starts inside of reasoning if its prompt is not known, since the model's
            template opens the tag.
    """

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    opened: bool = False

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that the parser must see in the text even where special tokens are skipped."""
        return (*self.begins, *self.ends)

    def is_opened_by(self, prompt: str) -> bool:
        """Whether the text that follows a prompt starts inside of reasoning: the prompt ends with the tag."""
        return prompt.rstrip().endswith(self.begins)

    def parser(self, *, opened: bool | None = None) -> ReasoningParser:
        """A parser for one text.

        Args:
            opened: the text starts inside of reasoning; ``None``: as the family's templates have it.
        """
        return ReasoningParser(self, self.opened if opened is None else opened)


class ReasoningParser:
    """Splits one text into reasoning and content (an :class:`~streamllm.parsers.events.OutputParser`).

    Reasoning comes first or not at all: a tag further on is content. Whitespace next to the tags belongs to
    neither side. A text that ends inside is all reasoning.

    Args:
        tags: the family's.
        opened: the text starts inside of reasoning; a tag that opens it again is ignored.
    """

    def __init__(self, tags: ReasoningFormat, opened: bool) -> None:
        self._tags = tags
        self._opened = opened
        self._reader = TextReader()
        self._events: list[Event] = []
        self._steps = self._main()

    def feed(self, text: str) -> list[Event]:
        self._reader.feed(text)
        return self._advance()

    def finish(self, truncated: bool) -> list[Event]:
        self._reader.end()
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def _main(self) -> Steps[None]:
        try:
            yield from skip_whitespace(self._reader)
            if (yield from self._reader.accept(*self._tags.begins)) or self._opened:
                yield from self._reader.until(self._tags.ends, Trimmed(self._add_reasoning, start=True))
                yield from skip_whitespace(self._reader)
            else:
                self._add_content("".join(self._reader.taken))
            yield from self._reader.until((), self._add_content)
        except EndOfOutput:
            pass

    def _add_reasoning(self, text: str) -> None:
        self._reader.forget()
        self._events.append(Reasoning(text))

    def _add_content(self, text: str) -> None:
        self._reader.forget()
        if text:
            self._events.append(Content(text))


class ChainedParser:
    """Two parsers one behind the other: the content that the first finds is the text of the second (an
    :class:`~streamllm.parsers.events.OutputParser`)."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Event]:
        return self._pass_on(self._first.feed(text))

    def finish(self, truncated: bool) -> list[Event]:
        return self._pass_on(self._first.finish(truncated)) + self._second.finish(truncated)

    def _pass_on(self, events: list[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            passed += self._second.feed(event.text) if isinstance(event, Content) else [event]
        return passed


class PlainParser:
    """Every text is content (an :class:`~streamllm.parsers.events.OutputParser`)."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self, truncated: bool) -> list[Event]:
        return []
