"""The ``streamllm`` command."""
