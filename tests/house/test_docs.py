"""What README and the pages tell people to type exists: commands, options, files, links; what is marked is run.

A block of shell commands with `<!-- run -->` above it is run. A block with `<!-- file: examples/x.py -->` above it is
that file.
"""

import itertools
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from typer.main import get_command

import forked
from processes import free_port
from thinwire.cli.main import app
from thinwire.lab.records.run import check, settings
from thinwire.lab.records.spellings import method_of
from thinwire.lab.run.links.spelling import read_link
from thinwire.lab.tasks import check_task
from thinwire.plan import parse_rate, parse_seconds

ALL = bool(os.environ.get("THINWIRE_TEST_ALL"))
ROOT = Path(__file__).parents[2]
LAST_RUNS = ROOT / "docs" / "commands.md"  # lists what the other pages tell, so it tells nothing itself
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*(ROOT / "docs").glob("*.md")} - {LAST_RUNS})]
BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^>]+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`(thinwire \w+[^`]*|torchrun [^`]+\.py[^`]*|python benchmarks/[^`]+|make [\w-]+)`(?!`)")
SHELL = {"cd", "export", "git", "ip", "nc", "python3", "wg-quick"}  # of the system, not ours to check
COMMANDS = get_command(app)


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text()))


def commands(text: str) -> list[list[str]]:
    """The words of each command; a comment and what stands for "and so on" are not commands."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True)) and "..." not in words]


def told() -> list[tuple[str, list[str]]]:
    """Every command of every page, with the page's name."""
    found = []
    for page in PAGES:
        shell = [b["text"] for b in blocks(page) if b["kind"] == "bash" or b["text"].startswith(("make ", "thinwire "))]
        prose = BLOCK.sub("", page.read_text())
        shell += [" ".join(text.split()) for text in INLINE.findall(prose) if "MODEL" not in text]
        found += [(page.name, words) for text in shell for words in commands(text)]
    return found


TOLD = told()
MARKED = [(page, b) for page in PAGES for b in blocks(page) if b["mark"]]
RUN = sorted({tuple(words) for _, b in MARKED if b["mark"] == "run" for words in commands(b["text"])})
# torchrun starts its workers here; with the others only what they start is another, and interpreters are slow to begin.
FIRST = ("torchrun", "--nproc-per-node", "2", "examples/quickstart_sgd.py")


def by_hand() -> set[str]:
    """The commands that no test runs: of the library, with arguments, and of a script that is here."""
    found = set()
    for _, words in TOLD:
        named = len(words) < 3 and words[0] == "thinwire"  # a command that prose names
        named = named or not {"FILE", "NAME", "module:function"}.isdisjoint(words)
        if words[0] in ("thinwire", "torchrun", "python") and not named and words[-1] != "train.py":
            found.add(shlex.join(words))
    return found - {shlex.join(words) for words in RUN}


def figures(text: str) -> tuple[float, str]:
    """Accuracy, and bytes a step, of what an example prints."""
    accuracy, sent = re.search(r"accuracy ([\d.]+)%.*?([\d.]+ kB) a step", text).groups()
    return float(accuracy), sent


def shown() -> dict[tuple[str, ...], list[tuple[float, str]]]:
    """What the pages say that an example prints: the block right after the command's."""
    found: dict[tuple[str, ...], list[tuple[float, str]]] = {}
    for page in PAGES:
        for block, after in itertools.pairwise(blocks(page)):
            if block["mark"] == "run" and after["text"].startswith("accuracy"):
                found.setdefault(tuple(commands(block["text"])[0]), []).append(figures(after["text"]))
    return found


SHOWN = shown()
# With other words for torchrun, which are checked below, a script does the same: without `--all` it is not run twice.
RUN_HERE = [words for words in RUN if ALL or words == FIRST or words in SHOWN or words[-1] != FIRST[-1]]


def check_thinwire(words: list[str]) -> None:
    """As the command line checks its arguments, up to where work would begin."""
    name, *rest = words
    if name.startswith("--"):
        assert any(name in option.opts for option in COMMANDS.params), f"there is no thinwire {name}"
        return
    assert name in COMMANDS.commands, f"there is no thinwire {name}"
    if not rest:
        return  # a command that prose names
    given = COMMANDS.commands[name].make_context(name, rest).params
    for text in [given["method"]] if isinstance(given.get("method"), str) else given.get("method") or []:
        method_of(text)
    if name == "plan":
        parse_rate(given["link"]), parse_seconds(given["rtt"])
        if ":" not in given["model"]:
            task, _, size = given["model"].partition("/")
            check_task(task, size or None)
    elif given.get("task"):
        check({f.name: given.get(f.name) for f, _ in settings()})
        check_task(given["task"], given.get("model"))
        read_link(given.get("link"), given.get("rtt"))


def check_torchrun(words: list[str]) -> None:
    asked = get_args_parser().parse_args(words)
    assert asked.rdzv_backend == "static" and not asked.standalone, "other ways to meet unpickle (docs/security.md)"
    if asked.module:
        assert asked.training_script == "thinwire"
        check_thinwire(asked.training_script_args)
    else:
        assert asked.training_script == "train.py" or (ROOT / asked.training_script).exists()


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        assert words[1] == "torch.distributed.run"
        check_torchrun(words[2:])
        return
    script = ROOT / words[0]
    source = script.read_text() + (ROOT / "benchmarks" / "_ratio.py").read_text()
    for option in (word.split("=")[0] for word in words if word.startswith("--")):
        assert f'"{option}"' in source, f"{words[0]} has no {option}"


def check_make(words: list[str]) -> None:
    assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"there is no make {words[0]}"


def check_pip(words: list[str]) -> None:
    project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = re.findall(r"^(\w+) = ", project.partition("\n[")[0], re.MULTILINE)
    assert words[0] == "install"
    assert all(extra in extras for extra in re.findall(r"\[(\w+)\]", words[-1])), f"no such extra: {words[-1]}"


def check_pytest(words: list[str]) -> None:
    for word in words:
        assert not word.startswith("tests/") or (ROOT / word).exists()


CHECKS = {
    "thinwire": check_thinwire,
    "torchrun": check_torchrun,
    "python": check_python,
    "make": check_make,
    "pip": check_pip,
    "pytest": check_pytest,
}


def test_there_are_commands_to_check():
    assert len(TOLD) > 60 and len(RUN) >= 4 and FIRST in RUN and len(SHOWN) >= 2


@pytest.mark.parametrize(("page", "words"), TOLD, ids=[f"{page}: {shlex.join(words)[:90]}" for page, words in TOLD])
def test_a_command_that_a_page_tells_exists_with_its_options(page, words):
    first, *rest = words
    if first not in SHELL:
        assert first in CHECKS, f"{page} tells people to type {first}: say here how to check it"
        CHECKS[first](rest)


@pytest.mark.parametrize("words", [["thinwire", "compare", "--turbo"], ["thinwire", "race", "now"], ["make", "tea"]])
def test_a_command_that_does_not_exist_is_noticed(words):
    with pytest.raises(Exception, match=r"turbo|race|tea"):
        CHECKS[words[0]](words[1:])


@pytest.mark.parametrize("words", RUN_HERE, ids=[shlex.join(words) for words in RUN_HERE])
def test_a_marked_command_runs(words, monkeypatch):
    port = str(free_port())
    programs = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1"],
        "thinwire": [sys.executable, "-m", "thinwire.cli.main"],
    }
    command = programs[words[0]] + [port if word == "29500" else word for word in words[1:]]
    if words[0] == "torchrun" and "--master-port" not in words:
        command[3:3] = ["--master-port", port]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]), "OMP_NUM_THREADS": "1"}
    monkeypatch.chdir(ROOT)
    if words[0] != "torchrun" or words == FIRST:
        done = forked.Popen(command, env=where, stderr=forked.PIPE)
        _, said = done.communicate(timeout=240)
        code = done.poll()
    else:
        asked = get_args_parser().parse_args(words[1:])
        script = [str(ROOT / asked.training_script), *asked.training_script_args]
        code, said = forked.workers(int(asked.nproc_per_node), script, where)
    assert code == 0, said
    if words[0] == "torchrun":
        accuracy, sent = figures(said)
        assert accuracy > 94, said
        for shown in SHOWN.get(tuple(words), []):  # accuracy differs between machines, bytes do not
            assert abs(shown[0] - accuracy) <= 3 and shown[1] == sent, f"a page shows {shown}, this is {said}"


@pytest.mark.parametrize(
    "name", ["quickstart_sgd.py", "quickstart_adamw.py", "resume.py", "my_task.py", "ray_train.py"]
)
def test_a_script_on_a_page_is_the_file(name):
    code = (ROOT / "examples" / name).read_text()
    shown = [b["text"] for page, b in MARKED if b["mark"] == f"file: examples/{name}"]
    assert shown and all(text in code for text in shown), f"a page shows another examples/{name}"


def test_the_method_that_a_page_shows_obeys_the_laws():
    shown = blocks(ROOT / "docs" / "write-a-method.md")[0]["text"]
    assert "testing.check(" in shown
    exec(compile(shown, "write-a-method.md", "exec"), {"__name__": "page"})


def test_every_command_that_no_test_runs_says_when_it_last_ran():
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \|$", LAST_RUNS.read_text(), re.MULTILINE)
    listed = [command for _, command in rows]
    missing, stale = by_hand() - set(listed), set(listed) - by_hand()
    assert not missing, "docs/commands.md: run these, and say when: " + "; ".join(sorted(missing))
    assert not stale, "docs/commands.md: no page tells these any more: " + "; ".join(sorted(stale))
    assert len(listed) == len(set(listed))
    for when, command in rows:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d|not recorded, told since \d{4}-\d\d-\d\d|not run yet", when), command


def test_marks_mean_something():
    for page, b in MARKED:
        assert b["mark"] == "run" or b["mark"].startswith("file: "), f"{page.name}: {b['mark']}"


def test_links_of_the_readme_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_and_tables_are_shown_as_such(page):
    """GitHub begins a list or a table right under a paragraph; the site takes it for a part of the paragraph."""
    text = BLOCK.sub(lambda b: "\n" * b[0].count("\n"), page.read_text())
    kinds = {"list": r"(?:[-*] |\d+\. )", "table": r"\|"}
    lines = text.splitlines()
    for number, (above, line) in enumerate(itertools.pairwise(lines), 2):
        for kind, begins in kinds.items():
            if re.match(begins, line) and above.strip() and not re.match(rf"{begins}|#|\s|<!--", above):
                item = kind == "list" and _in_list(lines[: number - 1], begins)
                assert item, f"{page.name}, line {number}: leave a line free above a {kind}"


def _in_list(above: list[str], begins: str) -> bool:
    """Whether the paragraph that ends here began as an item of a list."""
    for line in reversed(above):
        if re.match(begins, line):
            return True
        if not line.strip():
            return False
    return False


def test_the_picture_is_up_to_date():
    docs = ROOT / "docs"
    maker = {"__name__": "make_picture", "__file__": str(docs / "make_picture.py")}
    exec(compile((docs / "make_picture.py").read_text(), "make_picture.py", "exec"), maker)
    assert len(maker["rows"]()) >= 5
    assert (docs / "images" / "steps.svg").read_text() == maker["picture"](), "run python docs/make_picture.py"


def test_the_site_has_every_page():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w-]+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md")), "mkdocs.yml, nav"
