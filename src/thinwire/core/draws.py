"""Random choices that all workers share: counter based, from (seed, step, group)."""

from thinwire.core.reducer import Layout

_MASK = (1 << 64) - 1


def mix64(*words: int) -> int:
    """Sixty-four well-mixed bits from any integers, the same on every machine.

    Choices that workers must share come from (seed, step, group) through this, so that no generator is
    stepped that one of them might step once more than the others. The mixer is splitmix64.
    """
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def group_key(layout: Layout) -> int:
    """A number for this layout's parameters, alike on all workers and in all runs."""
    key = 0
    for name in layout.names:
        key = mix64(key, *name.encode())
    return key
