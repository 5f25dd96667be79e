"""Reducers around reducers: memories before a method, other bits, other densities, parameters instead of gradients.

They may touch methods, exchange and below. They know no training loop.
"""
