"""What a run writes down, and what is read out of it."""
