"""LoRA adapters as requests name them, at vLLM's module path."""
