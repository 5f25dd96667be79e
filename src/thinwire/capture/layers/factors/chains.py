"""Chains of Linear layers, found in Sequential modules: what EDAD can compute deltas through by itself."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from thinwire.capture.layers.factors.slots import Slot
from thinwire.core.factors import Chain

# A row of their output depends on the same row of their input and on nothing else, so they can be run again on the rows
# of all workers. Dropout draws random numbers, batch norms look at other rows: those cannot.
REPLAYED = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.LayerNorm,
    nn.RMSNorm,
)


def find_chains(model: nn.Module, slots: list[Slot], *, strict: bool) -> list[tuple[list[Slot], Chain]]:
    """Runs of at least two Linear layers with nothing between them but what can be replayed; the last run first."""
    by_layer = {slot.names[0].removesuffix(".weight"): slot for slot in slots if len(slot.names) == 1}
    chains: list[tuple[list[Slot], Chain]] = []
    inside: set[str] = set()  # Sequentials that are part of one seen before
    for path, module in model.named_modules():
        if _runs_in_order(module) and path not in inside:
            inside |= {f"{path}.{name}".strip(".") for name, _ in module.named_modules()}
            chains += _chains_of(list(_leaves(path, module)), by_layer, strict)
    if strict and not chains:
        raise ValueError(
            "EDAD finds no two Linear layers in a row: it sees chains in nn.Sequential modules only. Use DAD, which "
            "needs none, or EDAD(strict=False), which is DAD wherever there is no chain"
        )
    return chains[::-1]


def _chains_of(
    leaves: list[tuple[str, nn.Module]], by_layer: dict[str, Slot], strict: bool
) -> list[tuple[list[Slot], Chain]]:
    chains: list[tuple[list[Slot], Chain]] = []
    run: list[tuple[Slot, nn.Module]] = []
    gaps: list[list[nn.Module]] = []  # the modules after each layer of the run
    obstacle = ""

    def close() -> None:
        if len(run) > 1:
            members = [slot for slot, _ in run]
            biases = [layer.bias for _, layer in run]
            between = [_replay(gap) for gap in gaps[: len(run) - 1]]
            chains.append((members, Chain([slot.weight for slot in members], biases, between)))  # type: ignore[arg-type]
        run.clear()
        gaps.clear()

    for path, module in leaves:
        slot = by_layer.get(path) if isinstance(module, nn.Linear) else None
        if slot is not None:
            if obstacle and strict:
                raise ValueError(
                    f"EDAD cannot compute deltas through {obstacle}, which lies between two Linear layers: use DAD, or "
                    "EDAD(strict=False), which starts a new chain there"
                )
            obstacle = ""
            run.append((slot, module))
            gaps.append([])
        elif isinstance(module, REPLAYED) or (isinstance(module, nn.Dropout) and module.p == 0):
            if run:
                gaps[-1].append(module)
        else:
            obstacle = f"{type(module).__name__} at '{path}'" if run else ""
            close()
    close()
    return chains


def _replay(modules: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for module in modules:
            x = module(x)
        return x

    return run


def _runs_in_order(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _leaves(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        below = f"{path}.{name}".lstrip(".")
        if _runs_in_order(child):
            yield from _leaves(below, child)
        else:
            yield below, child
