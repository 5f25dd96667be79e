#!/bin/bash
# Trains two workers through a WireGuard tunnel between two network namespaces, and tells what the tunnel adds in bytes:
#     bash benchmarks/tunnel.sh
# As root, with wireguard-tools and wireguard-go, so that it runs where the kernel has no WireGuard. The namespaces, keys
# and processes are its own, and are removed at its end.
set -euo pipefail
umask 077
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
one=thinwire-tunnel-1-$$ two=thinwire-tunnel-2-$$ files=$(mktemp -d) started=()
clean() {
    for process in "${started[@]}"; do kill "$process" 2>/dev/null || true; done
    for host in $one $two; do ip netns del "$host" 2>/dev/null || true; done
    rm -rf "$files"
}
trap clean EXIT

for host in $one $two; do
    ip netns add "$host"
    wg genkey >"$files/$host"
done
ip -n $one link add eth0 type veth peer name eth0 netns $two
for place in 1 2; do
    host=$([ $place = 1 ] && echo $one || echo $two)
    ip -n "$host" addr add 192.0.2.$place/24 dev eth0
    ip -n "$host" link set eth0 up
    ip -n "$host" link set lo up
    # Its control socket is a file, which namespaces share: hence a name for each.
    WG_I_PREFER_BUGGY_USERSPACE_TO_POLISHED_KMOD=1 ip netns exec "$host" wireguard-go -f wg$place-$$ >"$files/log$place" 2>&1 &
    started+=($!)
done
sleep 2
ip netns exec $one wg set wg1-$$ listen-port 51820 private-key "$files/$one" \
    peer "$(wg pubkey <"$files/$two")" allowed-ips 10.77.0.2/32
ip netns exec $two wg set wg2-$$ private-key "$files/$two" \
    peer "$(wg pubkey <"$files/$one")" allowed-ips 10.77.0.0/24 endpoint 192.0.2.1:51820 persistent-keepalive 25
cat >"$files/train.py" <<'TRAIN'
import torch
import torch.distributed as dist

import thinwire

dist.init_process_group("gloo")
torch.manual_seed(0)
model = thinwire.wrap(torch.nn.Linear(1000, 400), "Dense()")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(8, 1000)).square().mean().backward()
    optimizer.step()
weights = [torch.zeros_like(model.module.weight) for _ in range(2)]
dist.all_gather(weights, model.module.weight.detach())
assert torch.equal(*weights), "the replicas differ"
dist.destroy_process_group()
TRAIN
workers=()
for place in 1 2; do
    host=$([ $place = 1 ] && echo $one || echo $two)
    ip -n "$host" addr add 10.77.0.$place/24 dev wg$place-$$
    ip -n "$host" link set wg$place-$$ up
done
for place in 1 2; do
    host=$([ $place = 1 ] && echo $one || echo $two)
    ip netns exec "$host" env GLOO_SOCKET_IFNAME=wg$place-$$ RANK=$((place - 1)) WORLD_SIZE=2 MASTER_ADDR=10.77.0.1 \
        MASTER_PORT=29500 PYTHONPATH="$root/src" TORCH_CPP_LOG_LEVEL=ERROR timeout 120 "$python" "$files/train.py" &
    workers+=($!)
done
for worker in "${workers[@]}"; do wait "$worker"; done
inside=$(ip netns exec $two cat /sys/class/net/wg2-$$/statistics/tx_bytes)
outside=$(ip netns exec $two cat /sys/class/net/eth0/statistics/tx_bytes)
echo "replicas equal; $inside bytes into the tunnel, $outside bytes on the wire: $((100 * (outside - inside) / inside)) % more"
