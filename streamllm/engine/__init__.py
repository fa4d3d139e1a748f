"""The engine: requests in, deltas out. Scheduler and memory manager are plain data structures."""
