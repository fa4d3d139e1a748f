"""Model families: what a checkpoint says, its weights, and the forward pass of each architecture."""
