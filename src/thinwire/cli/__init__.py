"""The command line: one file a command, each of which says its first word before torch is loaded.

It reads words, calls the lab or the planner, and prints. Nothing imports it.
"""
