"""The recipes as a table for the documents."""

from thinwire.recipes import RECIPES


def table() -> str:
    if not RECIPES:
        return "\nNone is measured yet.\n\n"
    lines = ["| name | method | optimizer | use | measured |", "| --- | --- | --- | --- | --- |"]
    for name, one in RECIPES.items():
        rates = ", ".join(f"{key} {value:g}" for key, value in one.settings.items())
        optimizer = ". ".join(filter(None, [f"{one.optimizer}, {rates}" if rates else one.optimizer, one.advice]))
        constant = name.upper().replace("-", "_")
        row = [f"`{name}`, `{constant}`", f"`{one.spelling}`", optimizer, one.use, one.told]
        lines.append(f"| {' | '.join(row)} |")
    by_command: dict[str, list[str]] = {}
    for name, one in RECIPES.items():
        by_command.setdefault(one.measured, []).append(name)
    commands = "\n".join(f"{command}  # {', '.join(names)}" for command, names in by_command.items())
    return "\n" + "\n".join(lines) + f"\n\nMeasured by:\n\n```bash\n{commands}\n```\n\n"
