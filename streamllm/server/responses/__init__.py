"""OpenAI's Responses API (https://platform.openai.com/docs/api-reference/responses) over the same
conversations as its chats."""
