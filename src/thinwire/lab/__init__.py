"""The lab: real data, real processes, links that are really slow, and pages that show what happened.

A client of the library above it; nothing above imports it.
"""

from importlib.util import find_spec


class LabError(Exception):
    """Something the user can mend. Its text is one line that says what to do."""

    code = 2  # with which the command line ends


PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow"}  # that `pip install thinwire` leaves out


def require(*modules: str) -> None:
    """Say what to type where the lab's own packages are not installed; this loads none of them."""
    missing = [PACKAGES[module] for module in modules if find_spec(module) is None]
    if missing:
        raise LabError(f"{' and '.join(missing)} must be installed for this: pip install 'thinwire[lab]'")
