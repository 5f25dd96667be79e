"""The kind of link that a spelling needs: the kernel's own shaping for a rate, the forwarder for all else."""

from thinwire.lab.run.links import tun, veth
from thinwire.lab.run.links.namespaces import Hosts
from thinwire.lab.run.links.spelling import Link


def emulate(link: Link, workers: int) -> Hosts:
    """`with emulate(link, workers) as hosts:` puts every worker into a namespace behind its link."""
    return veth.Shaped(link, workers) if link.plain else tun.Routed(link, workers)


def missing_rights(link: Link) -> str | None:
    """Why such a link cannot be emulated here, in one line, or None where it can."""
    return veth.missing() if link.plain else tun.missing()
