"""What takes from a training loop what a worker knows, and hands it to the step.

A capture imports no method and no other capture.
"""
