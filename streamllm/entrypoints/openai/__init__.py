"""See :mod:`streamllm.entrypoints`."""
