"""``python -m streamllm.entrypoints.openai.api_server``: ``streamllm serve`` under vLLM's module path."""

from __future__ import annotations

import sys

from streamllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
