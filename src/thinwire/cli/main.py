"""The command line: `thinwire train | compare | study | plan | probe | report | methods | data | doctor`.

Nothing heavy is imported here: a command loads torch once its arguments are known to be good.
"""

import os
import sys
from typing import cast

import typer

from thinwire.cli import compare as compare
from thinwire.cli import doctor as doctor
from thinwire.cli import pages as pages
from thinwire.cli import plan as plan
from thinwire.cli import probe as probe
from thinwire.cli import study as study
from thinwire.cli import train as train
from thinwire.cli.app import app
from thinwire.cli.talk import told
from thinwire.lab import LabError


def main() -> None:
    """What users meet when something is wrong is one line that says what to do."""
    # The common base of what typer raises about arguments, whichever click it carries.
    refused = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])
    try:
        code = app(standalone_mode=False)
    except LabError as error:
        _leave(str(error), error.code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read the answer had enough of it
        code = 1
    except (ValueError, OSError) as error:
        _leave(str(error), 2)
    except refused as error:
        _leave(f"{error.format_message()} (see thinwire --help)", 2)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:  # typer turns Ctrl-C into this
        _leave(f"stopped; all workers have ended. {told.kept()}", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(text: str, code: int) -> None:
    told.error(f"thinwire: {' '.join(text.split())}")
    sys.exit(code)


if __name__ == "__main__":
    main()
