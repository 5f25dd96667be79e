"""What was public in 0.1 goes on working: every name, every parameter with its place and its default."""

import inspect
from functools import reduce

import pytest
import torch

import thinwire

# As `inspect.signature` had them, without `self`; what has no parentheses is no function, or not for users to call.
NAMES_OF_0_1 = """
Adam(inner, betas=(0.9, 0.999), eps=1e-08)
AutoDAD(exact=True, rank=4, iterations=1, unroll=False)
CLTK(density, beta=1.0)
Cast(inner, dtype='bfloat16')
CheckpointError
DAD(unroll=False)
DEFT(density)
DGC(density=0.001, momentum=0.9, nesterov=False, clip=None, sample=0.01, agree=False)
Dense()
Disagreement
EDAD(replay=False, strict=True)
ErrorFeedback(inner, decay=1.0)
ExDyna(density, topology='recut', control='fast', blocks=None)
ExDyna.official(density)
GTopK(density)
Handle.detach()
Handle.ledger
Handle.load(folder)
Handle.load_state_dict(states)
Handle.metrics()
Handle.residual_norm()
Handle.save(folder)
Handle.state_dict()
Layout(names, shapes, dtype=torch.float32, device=torch.device('cpu'))
Layout.numel
Layout.sizes
Layout.views(flat)
Layout.working
Layout.zeros()
LocalHandle.anchored()
LocalHandle.detach()
LocalHandle.due
LocalHandle.finish()
LocalHandle.ledger
LocalHandle.load(folder)
LocalHandle.load_state_dict(states)
LocalHandle.metrics()
LocalHandle.residual_norm()
LocalHandle.restart()
LocalHandle.save(folder)
LocalHandle.state_dict()
METHODS
MethodWarning
MiCRO(density, control='fast')
Momentum(inner, momentum=0.9, nesterov=False, masking=True)
OkTopk(density, refresh=32)
Outer(lr=1.0, momentum=0.0, nesterov=False)
PowerSGD(rank=4, seed=0)
QSGD(bits=4, bucket=512, rounding='stochastic', norm='max', seed=0)
RandomBlock(density, agree=True, order='random', rescale=False, seed=0)
RandomK(density, agree=True, rescale=False, seed=0)
RankDAD(rank=4, iterations=1, tolerance=0.001, warm_start=True, feedback=False, seed=0, unroll=False)
RankDAD.published(rank=10, iterations=1, tolerance=0.001)
Reducer
Reducer.conserves
Reducer.init(layout, /)
Reducer.metrics(state, /)
Reducer.needs_memory
Reducer.reduce(local, state, comm, out, /)
Reducer.wants
Route(matrices, rest=Dense(), smallest=1024)
SIDCo(density, fit='exponential')
SignSGD()
Strom(tau)
Threshold(threshold=None, density=None, agree=False)
TopK(density, agree=False)
Variance(alpha=2.0, zeta=0.999, quantise=True, on_underflow='keep', feedback=False, packing='gaps')
VarianceStrom(alpha=2.0, zeta=0.999, tau=0.1)
Warmup(inner, steps, densities=())
Warmup.density_at(step)
attach(ddp_model, reducer, *, grain=None, overlap=None, check_every=100, scaler=None)
handle(ddp_model)
local(model, optimizer, reducer, every, *, outer=Outer(lr=1.0, momentum=0.0, nesterov=False), ahead=False,
    fragments=1, delay=0, average_buffers=True, optimizer_state='local', check_edits=True, process_group=None,
    comm=None)
parse(text)
wrap(model, reducer, *, grain=None, overlap=None, share=None, boundary=None, check_every=100, scaler=None,
    process_group=None, **ddp)
"""
METHODS_OF_0_1 = """
AutoDAD CLTK DAD DEFT DGC Dense EDAD ExDyna GTopK MiCRO OkTopk PowerSGD PublishedRankDAD QSGD RandomBlock RandomK
RankDAD SIDCo SignSGD Strom Threshold TopK Variance VarianceStrom
"""
CHANGED = {  # on purpose, and told in the changelog
    "RankDAD": ["feedback was False by default, and is True"],
    "local": ["average_buffers was True by default, and is 'finish'"],
}
ENTRIES = NAMES_OF_0_1.replace("\n    ", " ").split("\n")[1:-1]


def signature_then(parameters: str) -> inspect.Signature:
    """Of a function written as it was; its defaults are values."""
    space = {name: getattr(thinwire, name) for name in thinwire.__all__} | {"torch": torch}
    exec(f"def then{parameters}: ...", space)
    return inspect.signature(space["then"])


def complaints(then: inspect.Signature, now: inspect.Signature) -> list[str]:
    """Why a call that worked then might not work now, or mean something else."""
    wrong, new = [], {name: parameter for name, parameter in now.parameters.items() if name != "self"}
    for place, (name, old) in enumerate(then.parameters.items()):
        if name not in new:
            wrong.append(f"{name} is gone")
            continue
        today = new.pop(name)
        if today.kind != old.kind and today.kind != inspect.Parameter.POSITIONAL_OR_KEYWORD:
            wrong.append(f"{name} was {old.kind.description}, and is {today.kind.description}")
        if old.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD:
            order = [other for other in now.parameters if other != "self"]
            if order[place] != name:
                wrong.append(f"{order[place]} has taken the place of {name}")
        if old.default is not inspect.Parameter.empty and old.default != today.default:
            wrong.append(f"{name} was {old.default!r} by default, and is {today.default!r}")
    for name, extra in new.items():
        if extra.default is inspect.Parameter.empty and extra.kind not in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        ):
            wrong.append(f"{name} is new and must be given")
    return wrong


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.split("(")[0])
def test_a_public_name_of_0_1_goes_on_working(entry):
    path, opened, parameters = entry.partition("(")
    assert path.split(".")[0] in thinwire.__all__
    thing = reduce(getattr, path.split("."), thinwire)
    if opened:
        assert complaints(signature_then("(" + parameters), inspect.signature(thing)) == CHANGED.get(path, [])


def test_every_method_of_0_1_is_still_spelled_by_its_name():
    assert set(METHODS_OF_0_1.split()) <= thinwire.METHODS.keys()


def test_complaints_are_made():
    then = signature_then("(a, b=1, *, c=2)")
    for now, words in {
        "(a, *, c=2)": "b is gone",
        "(b=1, a=0, *, c=2)": "b has taken the place of a",
        "(a, b=2, *, c=2)": "b was 1 by default, and is 2",
        "(a, *, b=1, c=2)": "b was positional or keyword, and is keyword-only",
        "(a, b=1, *, d, c=2)": "d is new and must be given",
    }.items():
        assert words in str(complaints(then, signature_then(now)))
    assert complaints(then, signature_then("(a, b=1, d=None, *, c=2, e=None, **more)")) == []


def test_old_import_paths_and_names_lead_to_the_new_ones():
    from thinwire.comm.crew import Crew, crew  # as 0.1 had them

    from thinwire.comm import threads

    assert Crew is threads.ThreadWorkers and crew is threads.in_threads
