"""Anthropic's Messages API (https://docs.anthropic.com/en/api/messages) over the same conversations as
OpenAI's."""
