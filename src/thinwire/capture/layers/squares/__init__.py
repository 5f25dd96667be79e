"""The sum over a batch of squared per-sample gradients, at the price of one more product a layer."""
