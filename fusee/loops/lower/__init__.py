"""A functional ATen graph becomes a LoopGraph."""
