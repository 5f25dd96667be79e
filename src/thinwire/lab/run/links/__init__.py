"""Links that are really slow, between workers on one machine.

spelling    what a link is, as it is written: "100mbit, 40ms, 0.1% loss"
namespaces  a network namespace for every worker, removed again however a run ends
veth        links with a rate alone, shaped by the kernel
tun         links with latency, loss and moods, kept by a process of ours (forwarder, packets)
emulated    the one of the two that a link needs

The forwarder starts with every run, so nothing here may be imported by it that loads torch.
"""
