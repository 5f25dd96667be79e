"""Gradients, as DDP hands them out in buckets."""
