"""A layer's inputs and deltas, exchanged in place of its weight's gradient."""
