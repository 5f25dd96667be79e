"""What only layers know: squares of per-sample gradients, and gradients that are not multiplied out."""
