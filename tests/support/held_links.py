"""A run of test_network.py that has links as they are spelled, guarded or not, and holds them until it is ended."""

import os
import subprocess
import sys
import time

from thinwire.lab.run.links.emulated import emulate
from thinwire.lab.run.links.spelling import Link


def main() -> None:
    with emulate(Link.parse(sys.argv[1]), 2) as links:
        inside = subprocess.Popen(links.command(1, ["sleep", "300"]))
        if sys.argv[2] == "unguarded":
            os.killpg(links.guard.pid, 9)
        print(f"inside {inside.pid}", flush=True)
        time.sleep(300)
