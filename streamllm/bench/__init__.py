"""The load generator: requests, their timing and the report, for ``streamllm bench`` and ``loadtest/``."""
