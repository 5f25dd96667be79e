"""Options that are made from the settings of a run, and those that several commands share."""

import inspect
from collections.abc import Callable
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.lab.records.run import Setting, check, settings
from thinwire.lab.tasks import check_task

Asked = dict[str, Any]  # the settings of a run that somebody gave, and None for the others

Out = Annotated[Path | None, typer.Option(help="folder to write to; a new one under runs/ if not given")]
Resume = Annotated[bool, typer.Option("--resume", help="continue the run in --out")]
Port = Annotated[int | None, typer.Option(help="port of the workers' rendezvous; a free one if not given")]
Methods = Annotated[
    list[str] | None, typer.Option("--method", help="a method, as `thinwire methods` spells it; can be repeated")
]
Data = Annotated[Path | None, typer.Option(help="where data sets are kept; a cache folder if not given")]


def with_settings(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting of a run, but for some; it gets what was asked for as one argument.

    What no run can have is refused before the command begins.
    """
    taken = [(f, s) for f, s in settings() if f.name not in left_out]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            asked = {f.name: given.pop(f.name) for f, _ in taken}
            check(asked)
            check_task(asked["task"], asked["model"])
            command(asked, **given)

        own = list(inspect.signature(command).parameters.values())[1:]
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        arguments = [p for p in own if isinstance(_info(p), typer.models.ArgumentInfo)]
        options = [p for p in own if p not in arguments]
        made = [_option(f, s) for f, s in taken]
        run.__signature__ = inspect.Signature([*arguments, *made, *options])  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _option(f: Field[Any], s: Setting) -> inspect.Parameter:
    kind: Any = f.type | None if s.by_task else f.type  # type: ignore[operator]
    option = typer.Option(*s.names, help=s.help)
    default = None if s.by_task else f.default
    return inspect.Parameter(
        f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _info(parameter: inspect.Parameter) -> Any:
    return next(iter(getattr(parameter.annotation, "__metadata__", ())), None)
