"""A model in several processes: workers that each hold a shard of it, and the executor that drives them."""
