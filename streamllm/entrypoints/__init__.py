"""vLLM's module paths, so that its command lines move over by changing one word."""
