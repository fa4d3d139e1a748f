"""How the served model writes reasoning and tool calls, found out once at start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamllm.errors import InvalidRequestError
from streamllm.parsers.call_grammar import CallRules
from streamllm.parsers.events import OutputParser
from streamllm.parsers.reasoning import ReasoningFormat
from streamllm.parsers.registry import (
    FALLBACK_TOOL_PARSER,
    choose_reasoning_parser,
    choose_tool_parser,
    load_plugin,
    output_parser,
    reasoning_format,
    tool_parser,
)
from streamllm.parsers.tool_call_parser import ToolCallParser
from streamllm.server.tools import ToolUse
from streamllm.structured_outputs import Thinking

if TYPE_CHECKING:
    from streamllm.config import ServerConfig
    from streamllm.text.chat_template import ChatTemplate
    from streamllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class OutputFormat:
    """
    Attributes:
        calls: the notation of tool calls; ``None`` if it is not known.
        reasoning: the tags around reasoning; ``None`` if there are none, or if ``calls`` knows them.
        special_token_ids, token_ids: the special tokens, and all tokens, that the notations' marks are.
        template: the chat template's text.
    """

    calls: type[ToolCallParser] | None = None
    reasoning: ReasoningFormat | None = None
    special_token_ids: dict[str, int] = field(default_factory=dict)
    token_ids: dict[str, int] = field(default_factory=dict)
    template: str = ""

    @classmethod
    def of_model(
        cls, config: ServerConfig, template: ChatTemplate | None, tokenizer: Tokenizer
    ) -> OutputFormat:
        """What the configuration says, and otherwise what the model's template looks like.

        Raises:
            ConfigError: a parser that does not exist, or a plug-in that cannot be run.
        """
        if config.tool_parser_plugin is not None:
            load_plugin(config.tool_parser_plugin)
        source = template.source if template else ""
        calls = reasoning = None
        name = config.tool_call_parser or choose_tool_parser(source)
        if name is None and (template is None or not template.takes_tools):
            # The prompt tells it how (streamllm.text.tools_as_text).
            name = FALLBACK_TOOL_PARSER
        if name is not None:
            calls = tool_parser(name)
        if calls is None or not calls.handles_reasoning:
            name = config.reasoning_parser or choose_reasoning_parser(source)
            reasoning = None if name in (None, "none") else reasoning_format(name)
        texts = (*(calls.special_tokens if calls else ()), *(reasoning.special_tokens if reasoning else ()))
        ids = {text: token_id for text in texts if (token_id := tokenizer.token_id(text)) is not None}
        special = {text: token_id for text, token_id in ids.items() if tokenizer.is_special(token_id)}
        return cls(calls, reasoning, special, ids, source)

    def is_active(self, tools: ToolUse) -> bool:
        """Whether an answer's text has to be read at all."""
        return tools.may_call or self.reasoning is not None or self.calls_hold_reasoning

    @property
    def calls_hold_reasoning(self) -> bool:
        """Whether the notation of calls marks reasoning too."""
        return self.calls is not None and self.calls.handles_reasoning

    def parser(self, tools: ToolUse, prompt: str) -> OutputParser:
        """What reads one answer to a prompt."""
        functions = tools.functions if tools.may_call else ()
        return output_parser(self.calls, self.reasoning, functions, parallel=tools.parallel, prompt=prompt)

    def check_tools(self, tools: ToolUse) -> None:
        """
        Raises:
            InvalidRequestError: the notation of this model's calls is not known.
        """
        if tools.may_call and self.calls is None:
            raise InvalidRequestError(
                "tools: it is not known how this model writes tool calls; start the server with "
                '--tool-call-parser, or send tool_choice "none".',
                param="tools",
            )

    def calls_grammar(self, tools: ToolUse, *, required: bool) -> str:
        """Lark under which calls are what the tools' schemas say.

        Raises:
            InvalidRequestError: that cannot be enforced.
        """
        assert self.calls is not None
        return self.calls.grammar(self._rules(tools, required=required))

    def _rules(self, tools: ToolUse, *, required: bool) -> CallRules:
        return CallRules(
            tools.functions,
            required=required,
            parallel=tools.parallel and not tools.named,
            special_token_ids=self.special_token_ids,
            chat_template=self.template,
        )

    def thinking(self, prompt: str, budget: int | None) -> Thinking | None:
        """What may come before an answer to a prompt; ``None`` for nothing.

        Raises:
            InvalidRequestError: a budget that is no number of tokens, or that this model's reasoning cannot
                have.
        """
        if self.calls is not None and self.calls_hold_reasoning and budget is None:
            before = self.calls.before_answer(self._rules(ToolUse(), required=False))
            return Thinking(before) if before else None
        begin, end = None, None
        if self.reasoning is not None:
            begin, end = self._token_id(self.reasoning.begins), self._token_id(self.reasoning.ends)
        if self.reasoning is None or end is None:
            if budget is not None:
                raise InvalidRequestError(
                    "thinking_token_budget needs a model whose reasoning ends with a token of its own.",
                    param="thinking_token_budget",
                )
            return None
        if self.reasoning.is_opened_by(prompt):
            return Thinking.between_tokens(None, end, budget)
        if begin is None or prompt.rstrip().endswith(self.reasoning.ends):
            return None
        return Thinking.between_tokens(begin, end, budget)

    @property
    def can_end_thinking(self) -> bool:
        """Whether reasoning ends with a token of its own, which a budget can call for."""
        return self.reasoning is not None and self._token_id(self.reasoning.ends) is not None

    def _token_id(self, texts: tuple[str, ...]) -> int | None:
        return next((self.token_ids[text] for text in texts if text in self.token_ids), None)
