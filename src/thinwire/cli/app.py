"""The command that all others hang on."""

from typing import Annotated

import typer

app = typer.Typer(
    help="Train PyTorch models over slow networks with methods that send 10 to 1000 times fewer bytes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(asked: bool) -> None:
    if asked:
        import thinwire

        print(f"thinwire {thinwire.__version__}")
        raise typer.Exit


@app.callback()
def _thinwire(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass
