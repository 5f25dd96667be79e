"""Where the modules of version 0.1 live now, so that imports written for it go on working.

An old name stands for its new module, or for several where one was split; nothing is imported before it is asked for.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

MOVED = {
    "reducer": "core.reducer core.draws",
    "memory": "core.memory",
    "factors": "core.factors exchange.factors",
    "rules": "core.products",
    "introspect": "methods.dad.spectrum",
    "wire": "exchange.bytes",
    "feedback": "wrappers.feedback wrappers.momentum wrappers.adam",
    "compose": "wrappers.warmup wrappers.route wrappers.cast",
    "agree": "step.agreement",
    "lane": "step.lanes",
    "checkpoint": "step.checkpoints step.files step.sets",
    "ddp": "doors.ddp",
    "local": "doors.local",
    "capture.anchor": "wrappers.anchored",
    "capture.buckets": "capture.gradients.buckets",
    "capture.engine": "capture.layers.factors.backward",
    "capture.moments": "capture.layers.squares.second_moments",
    "comm.base": "comm.protocol comm.ledger comm.table",
    "comm.crew": "comm.threads",
    **{f"lab.{name}": f"lab.records.{name}" for name in ("record", "summary")},
    **{f"lab.{name}": f"lab.run.{name}" for name in ("launch", "loop", "probe", "ranks", "rehearsal", "worker")},
    **{f"lab.{name}": f"lab.pages.{name}" for name in ("catalogue", "figures", "report", "show")},
    **{f"lab.{name}": f"lab.studies.{name}" for name in ("compare", "study")},
    "methods.auto_dad": "methods.dad.auto_dad",
    "methods.edad": "methods.dad.edad",
    "methods.rank_dad": "methods.dad.rank_dad",
    "methods.variance_strom": "methods.variance.variance_strom",
}
RENAMED = {
    "crew": "in_threads",
    "Crew": "ThreadWorkers",
    "CrewComm": "ThreadComm",
    "Room": "MessageRoom",
    "Engine": "BackwardExchange",
}


class Moved(ModuleType):
    """A module of old that answers with what its new places hold."""

    def __init__(self, name: str, places: str):
        super().__init__(name)
        self.__dict__["_places"] = [f"thinwire.{place}" for place in places.split()]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # whoever walks through sys.modules must not load anything
        for place in self.__dict__["_places"]:
            found = getattr(import_module(place), RENAMED.get(name, name), None)
            if found is not None:
                return found
        raise AttributeError(f"{self.__name__} has no {name}: it lives in {', '.join(self.__dict__['_places'])} now")


def keep_old_names() -> None:
    for old, places in MOVED.items():
        sys.modules.setdefault(f"thinwire.{old}", Moved(f"thinwire.{old}", places))
