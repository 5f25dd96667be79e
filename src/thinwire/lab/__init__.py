"""The lab: real data, real processes, links that are really slow, and pages that show what happened.

A client of the library above it; nothing above imports it.
"""


class LabError(Exception):
    """Something the user can mend. Its text is one line that says what to do."""
