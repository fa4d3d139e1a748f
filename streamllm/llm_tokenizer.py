"""The tokenizer that :meth:`streamllm.llm.LLM.get_tokenizer` hands out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

from streamllm.errors import InvalidRequestError
from streamllm.llm_inputs import check_tools
from streamllm.text.chat_renderer import ChatRenderer
from streamllm.text.chat_template import ChatTemplate
from streamllm.text.tokenizer import Tokenizer

Tokens = list[str] | tuple[str, ...]


class LLMTokenizer:
    """A model's tokenizer with the names, defaults and meanings of Transformers' tokenizers, as far as
    scripts around vLLM use them. All methods may be called from several threads at once.

    Attributes:
        vocab_size: the largest token id plus one, added tokens included (``len()`` is the same).
        bos_token_id: ``None`` where the model names none.
        eos_token_id: the first of ``eos_token_ids``; ``None`` where there is none.
        eos_token_ids: all tokens that end a generation as far as the tokenizer says.
        chat_template: the model's template (Jinja), if it has one.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer, template, lambda text, **_: None)
        self.vocab_size = tokenizer.vocab_size
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_ids = tokenizer.eos_token_ids
        self.eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None
        self.chat_template = None if template is None else template.source

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, with BOS (and EOS) where the model's tokenizer puts them.

        Raises:
            InvalidRequestError: the text has a lone surrogate, which no UTF-8 can hold.
        """
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of a whole sequence, or of one token; invalid UTF-8 shows as U+FFFD."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    @overload
    def convert_tokens_to_ids(self, tokens: Tokens) -> list[int | None]: ...

    def convert_tokens_to_ids(self, tokens: str | Tokens) -> int | list[int | None] | None:
        """The id of a token, or of each, by its exact spelling in the vocabulary; ``None`` where there is
        none."""
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """The prompt of a conversation, as :meth:`streamllm.llm.LLM.chat` writes it.

        Args:
            conversation: one conversation: OpenAI's messages.
            tools: functions in OpenAI's form.
            chat_template: Jinja to use instead of the model's template.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end inside the last message.
            tokenize: return the token ids, with one BOS if the model has one; else the text.
            kwargs: further variables for the template.

        Raises:
            InvalidRequestError: there is no template, or it refuses the conversation.
        """
        check_tools(tools)
        if isinstance(conversation, list) and conversation and isinstance(conversation[0], list):
            raise InvalidRequestError("conversation must be one list of messages.", param="conversation")
        text = self._renderer.text_of(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=kwargs,
            tools=tools,
        )
        return self._tokenizer.encode_chat(text) if tokenize else text
