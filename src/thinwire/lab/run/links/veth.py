"""Links with a rate alone, shaped by the kernel.

    worker 0 [eth0 tbf] ---- [p0 tbf] +--------+
    worker 1 [eth0 tbf] ---- [p1 tbf] | switch |     the switch has a namespace too, so no route leads out
    ...                               +--------+

Both ends are shaped, so a worker neither sends nor receives faster than its link. The bucket of the shaper
holds 128 KiB at every rate: below the kernel's 64 KiB segments it would cut them up and lose most of a
gigabit, and one size for all rates keeps the interfaces' counters comparable.
"""

import shutil

from thinwire.lab.run.links.namespaces import INTERFACE, Hosts, refused, run, stem
from thinwire.lab.run.links.spelling import Link

SHAPER = ["burst", "128kb", "latency", "50ms"]


class Shaped(Hosts):
    """Workers on a switch."""

    def __init__(self, link: Link, workers: int) -> None:
        super().__init__(link, workers)
        self.switch = f"{stem()}-switch"
        self.namespaces = [*self.hosts, self.switch]

    def connect(self) -> None:
        run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "br0", "up")
        for i, host in enumerate(self.hosts):
            cable = ["type", "veth", "peer", "name", INTERFACE, "netns", host]
            run("ip", "-n", self.switch, "link", "add", f"p{i}", *cable)
            run("ip", "-n", self.switch, "link", "set", f"p{i}", "master", "br0", "up")
            run("ip", "-n", host, "addr", "add", f"{self.address(i)}/24", "dev", INTERFACE)
            run("ip", "-n", host, "link", "set", INTERFACE, "up")
            (now,) = self.link.timeline(i)
            self._shape(host, INTERFACE, now.up)
            self._shape(self.switch, f"p{i}", now.down)

    def _shape(self, namespace: str, interface: str, rate: float | None) -> None:
        run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", "rate", f"{rate:.0f}bit", *SHAPER)


def missing() -> str | None:
    """Why links cannot be shaped here, in one line, or None where they can."""
    if not (shutil.which("ip") and shutil.which("tc")):
        return "links are emulated with the commands ip and tc: install the package iproute2"
    shaper = ["tc", "-n", "NAMESPACE", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1gbit", *SHAPER]
    refusal = refused(shaper)
    return refusal and f"emulated links need Linux and the rights of root ({refusal})"
