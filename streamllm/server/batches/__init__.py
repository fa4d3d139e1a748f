"""OpenAI's Files and Batches APIs (https://platform.openai.com/docs/api-reference/batch): files of requests
that are worked through beside live traffic, across restarts, each line answered once."""
