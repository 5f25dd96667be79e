"""`thinwire doctor`: what is here, what is missing, and what that costs."""

from thinwire.cli.app import app
from thinwire.cli.talk import Json, loading, told

MARKS = {"fine": "[green]fine[/green]   ", "note": "[yellow]note[/yellow]   ", "missing": "[red]missing[/red]"}


@app.command(epilog="Examples:\n\nthinwire doctor\n\nthinwire doctor --json")
def doctor(json: Json = False) -> None:
    """Look at this machine: versions, network, kernels, rights. What is missing is said with what to type."""
    loading()
    from rich.markup import escape

    from thinwire.lab.run.checkup import look

    found = look()
    shown = [f"{MARKS[f.verdict]} {escape(f.what)}: {escape(f.told)}" for f in found]
    told.answer([vars(f) for f in found], *shown, as_json=json)
