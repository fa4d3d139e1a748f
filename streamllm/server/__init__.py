"""The HTTP server: OpenAI's routes over Starlette, server-sent events, metrics."""
