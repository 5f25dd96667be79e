"""Kept results as Markdown: the command, the settings in a sentence, a row for each setting."""

import re
from collections.abc import Sequence

from thinwire.lab.pages.scales import in_bytes
from thinwire.lab.studies.kept import File, Kept

LONG = 14  # rows; a longer table is folded away


def command(file: File) -> str:
    return f"```\n{wrapped(file.command)}\n```"


def wrapped(text: str, width: int = 118) -> str:
    """A command in lines that can be pasted."""
    lines = [""]
    for part in re.split(r" (?=--)", text):  # an option stays with what it is given
        if lines[-1] and len(lines[-1]) + len(part) + 3 > width:
            lines.append("   ")
        lines[-1] += (" " if lines[-1] else "") + part
    return " \\\n".join(lines)


def settings(files: Sequence[File]) -> str:
    """What all rows have in common."""
    first = files[0]
    told = {key: v for key, v in first.settings.items() if all(file.settings.get(key) == v for file in files)}
    model = f" ({first.model})" if first.model else ""
    parts = [f"`{first.task}`{model}"]
    parts += [f"{told['workers']} workers"] if "workers" in told else []
    parts += [f"{told['steps']} steps"] if "steps" in told else []
    parts += [f"{told['batch']} samples a worker and step"] if "batch" in told else []
    parts += [str(told["optimizer"])] if "optimizer" in told else []
    seeds = sorted({len(cell.result.values) for file in files for cell in file.cells})
    few, most = ("one" if count == 1 else str(count) for count in (seeds[0], seeds[-1]))
    parts.append(f"{few if few == most else f'{few} to {most}'} seed{'s' if seeds[-1] > 1 else ''}")
    rehearsed = all(file.rehearsed for file in files)
    how = "Workers were threads (a rehearsal), so there are no times." if rehearsed else "Workers were processes."
    made = {", ".join(f"{name} {version}" for name, version in file.versions.items()) for file in files}
    if not any(map(chosen_rates, files)):
        how += " One learning rate was tried, so a difference may be the rate's."
    return f"{', '.join(parts)}. {how} Made with {'; '.join(sorted(made))}."


def chosen_rates(file: File) -> bool:
    """Whether learning rates were chosen among; without, a setting may be worse only because of its rate."""
    return any(cell.result.unchosen for cell in file.cells)


def table(files: Sequence[File]) -> str:
    cells = [cell for file in files for cell in file.cells]
    spelled = len(files) > 1  # what sets commands apart is in no factor: the whole spelling tells it
    names = [name for name in factors(cells) if not spelled or name == "optimizer"]
    metric = files[0].metric
    head = [*(["method"] if spelled else []), *names, f"validation {metric}", "of each seed", "test", "learning rate"]
    head += ["at others", "bytes a step", "of dense's"]
    lines = [_row(head), _row(["---"] * len(head))]
    for cell in cells:
        told = [*([f"`{cell.method}`"] if spelled else []), *(_factor(cell[name]) for name in names)]
        lines.append(_row([*told, *_told(cell, cells)]))
    text = "\n".join(lines)
    if len(cells) <= LONG:
        return text
    return f'<details markdown="1"><summary>All {len(cells)} settings</summary>\n\n{text}\n\n</details>'


def factors(cells: Sequence[Kept]) -> list[str]:
    """What tells the settings apart; a factor with one level alone does not, apart from the method."""
    names = dict.fromkeys(name for cell in cells for name in cell.result.factors)
    return [name for name in names if name == "method" or len({str(cell[name]) for cell in cells}) > 1]


def _factor(level: object) -> str:
    text = "" if level is None else str(level)
    return f"`{text}`" if "(" in text else text


def _told(cell: Kept, cells: Sequence[Kept]) -> list[str]:
    r = cell.result
    others = ", ".join(f"{rate}: {quality(value, r.metric)}" for rate, value in r.unchosen.items())
    seeds = ", ".join(quality(value, r.metric) for value in r.values)
    full = dense_for(cell, cells)
    share = "" if full is None or not r.wire else one_over(full.result.wire / r.wire)
    return [quality(r.validation, r.metric), seeds, quality(r.test, r.metric), r.rate, others, in_bytes(r.wire), share]


def quality(value: float | None, metric: str) -> str:
    if value is None:
        return "diverged"
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.3f}"


def one_over(ratio: float) -> str:
    return "1" if abs(ratio - 1) < 0.005 else f"1/{float(f'{ratio:.3g}'):g}"


def dense_for(cell: Kept, cells: Sequence[Kept]) -> Kept | None:
    """The dense exchange at every step, with as many workers; under the same optimizer where there is one."""
    dense = [one for one in cells if one.method in ("Dense()", "DDP") and one.workers == cell.workers]
    same = [one for one in dense if one["optimizer"] == cell["optimizer"]]
    return next(iter(same or dense), None)


def _row(parts: Sequence[str]) -> str:
    return f"| {' | '.join(part.replace('|', chr(92) + '|') for part in parts)} |"
