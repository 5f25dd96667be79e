"""The one idea (`reducer`), what a worker may know (Tensor, Moments, Factors), what it remembers, what all draw alike.

It may touch comm's protocol. It knows no method, no wire format and no training loop.
"""
