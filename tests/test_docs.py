"""What the README and docs/ say is so: commands are taken, flags and files exist, tables are narrow."""

import argparse
import contextlib
import functools
import importlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import tyro

from tests import flags

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmark"))

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
MADE = ROOT / "docs" / "flags.md"  # made by tests/flags.py
# What a text may name that is not there: files that a run leaves or that the reader writes, and placeholders.
OF_THE_READER = {"my_player.py", "file.py", "games.npz", "rows.npz", "curves.png"}
OF_A_RUN = {"config.json", "checkpoint.pt", "checkpoint-before.pt", "checkpoint-damaged.pt", "not-finite.pt", "players.pt",
            "results.json", "references.json", "adaptation.md",
            "adaptation.csv", "compare.png", "moa_eval_epochN.csv", "models_of_others.png", "symmetry.png"}
OTHER_PROGRAMS = {"pip": {"-r"}, "tensorboard": {"--logdir"}, "pytest": {"-s", "-k", "-q", "-n"},
                  "torchrun": {"--nproc-per-node", "--nnodes", "--rdzv-id", "--rdzv-backend", "--rdzv-endpoint",
                               "--ntasks-per-node"}}


def pieces(page):
    """A page taken apart. -> its prose, with code in line, and its blocks of code, each (language, text)"""
    text = page.read_text(encoding="utf-8")
    parts = re.split(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(parts[::3]), list(zip(parts[1::3], parts[2::3]))


def commands_in(page):
    """All commands of a page, in its blocks or in line, as one would type them."""
    prose, blocks = pieces(page)
    lines = [line for language, block in blocks if language != "python" for line in block.splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    return [line for line in lines if re.match(r"(python|pip|tensorboard) ", line) and "<" not in line]


def parser_of(program):
    """What reads the flags of a program of this project: a function of the words after its name."""
    if program in flags.SCRIPTS:
        script = importlib.import_module(program[:-3])

        def read(words):
            args = tyro.cli(script.Args, args=words)
            if args.resume is None:  # else the flags are those of that run
                script.check_flags(args)
        return read
    module = importlib.import_module(program.removesuffix(".py").replace("/", ".").removeprefix("benchmark."))
    if hasattr(module, "Args"):
        return lambda words: tyro.cli(module.Args, args=words)
    return lambda words: read_argparse(module, words)


class Read(Exception):
    """The flags were read."""


def read_argparse(module, words):
    """Lets a program's main read its flags, and go no further; one without argparse takes none."""
    if "argparse" not in vars(module):
        assert not words, "it takes no flags"
        return

    def parse_args(parser, *_):
        parse(parser, words)
        raise Read

    parse = argparse.ArgumentParser.parse_args
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Read):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        module.main()


def check(command):
    """Fails where a command could not be typed as it is."""
    program, *words = shlex.split(command, comments=True)
    bare = re.sub(r'"[^"]*"|#.*', "", command)  # PowerShell takes a comma for a list, && and \\ not at all
    assert "," not in bare and "&&" not in bare and not bare.rstrip().endswith("\\"), "PowerShell stumbles"
    if program == "python" and words[:1] == ["-m"]:
        program, words = words[1], words[2:]
        program = program.replace(".", "/") + ".py" if program.startswith("envs.") else program
    elif program == "python":
        program, words = words[0], words[1:]
    if program in OTHER_PROGRAMS:
        for word in words:
            assert not word.startswith("-") or word in OTHER_PROGRAMS[program]
            assert not word.endswith((".txt", ".py")) or (ROOT / word).is_file()
        return
    assert (ROOT / program).is_file()
    for word in words:
        file = re.fullmatch(r"([\w/]+\.py)(:\w+)?", word)
        assert not file or file[1] in OF_THE_READER or (ROOT / file[1]).is_file()
    parser_of(program)(["SCRIPT.py" if word == "SCRIPT" else word for word in words])


COMMANDS = [pytest.param(command, id=f"{page.name}: {command}") for page in PAGES
            for command in dict.fromkeys(commands_in(page)) if page != MADE]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_taken(command):
    try:
        check(command)
    except SystemExit as stop:  # how tyro and argparse refuse
        pytest.fail(f"{command}: exit code {stop.code}")


@pytest.mark.parametrize("command", [
    "python ppo_single_player.py --no-such-flag 1", "python ppo_single_player.py --buffer-size 20000",
    "python hopplus_selfplay.py --mode adapt", "python no_such_script.py",
    "python benchmark/vae.py --file none", "python benchmark/ppo.py --seed 1",
    "python benchmark/env_speed.py --fast", "python tests/copies.py --to x.py",
    "python -m envs.symmetry --seats 3", "python -m pytest tests/none.py", "pip install -r none.txt",
    "python ppo_single_player.py && tensorboard --logdir runs", "tensorboard --dir runs",
    "python ppo_single_player.py --players ppo none.py:Me ns ns", "python ppo_single_player.py \\",
    "python ppo_single_player.py --players ppo mix:ns,nh ns ns"])
def test_wrong_commands_are_found(command):
    with pytest.raises((AssertionError, SystemExit, ValueError)), contextlib.redirect_stderr(io.StringIO()):
        check(command)


@functools.cache
def known_flags():
    """Every flag of every program of this project."""
    known = {"--help", *(flag for of in OTHER_PROGRAMS.values() for flag in of)}
    for script in flags.SCRIPTS:
        known |= {flag for group in flags.flags_of(script).values() for flag, *_ in group}
    for path in (path for folder in ("benchmark", "envs", "tests") for path in (ROOT / folder).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        known |= set(re.findall(r'add_argument\("(--[\w-]+)"', text))
        for body in re.findall(r"^class Args:\n(.*?)^(?=\S)", text, re.MULTILINE | re.DOTALL):
            fields = re.findall(r"^    (\w+):", body, re.MULTILINE)
            known |= {"--" + field.replace("_", "-") for field in fields}
    return known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", page.read_text(encoding="utf-8")))
    assert named <= known_flags()


def anchors(page):
    """The names of a page's headings, as links write them."""
    heads = re.findall(r"^#+ (.*)$", pieces(page)[0], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page):
    prose, _ = pieces(page)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        assert not link.startswith("http"), "links go to files here"
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link
    for code in re.findall(r"`([^`]+)`", prose):
        path = code.partition(":")[0]
        if path.startswith("runs/"):
            continue
        if re.fullmatch(r"[\w./-]+\.(py|md|txt|cff|png|gif|csv|json|npz|pt)", path):
            there = (ROOT / path).is_file() or (page.parent / path).is_file()
            assert there or path in OF_THE_READER | OF_A_RUN, code
        elif re.fullmatch(r"(envs|benchmark|tests|docs)/[\w/]*", code):
            assert (ROOT / code).is_dir(), code


def test_every_page_can_be_found():
    readme = PAGES[0].read_text(encoding="utf-8")
    assert not [page for page in PAGES[1:] if f"]({page.relative_to(ROOT).as_posix()})" not in readme]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_and_lines_are_narrow(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    columns = 0
    for line in lines:
        if line.startswith("|"):
            cells = len(re.findall(r"(?<!\\)\|", line)) - 1
            assert cells <= 8 and columns in (0, cells), f"{cells} columns: {line}"
            columns = cells
        else:
            columns = 0
            assert len(line) <= 120, line
        assert line == line.rstrip()


def test_the_readme_is_short():
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 180


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_places_of_tables_are_closed(page):
    marks = re.findall(r"^<!-- (.*) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert all(mark.startswith("table: ") for mark in marks[::2])
    assert marks[1::2] == ["end"] * (len(marks) // 2) and len(marks) % 2 == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_can_be_read(page):
    for language, block in pieces(page)[1]:
        if language == "python":
            compile(block, str(page), "exec")


@pytest.mark.parametrize("page", [PAGES[0], ROOT / "docs" / "game.md"], ids=lambda page: page.name)
def test_the_player_of_ones_own_plays(page, tmp_path, monkeypatch, capsys):
    """The example is written to a file, as the text asks, and sits down."""
    from envs import symmetry

    [block] = [block for language, block in pieces(page)[1] if language == "python" and "class Lazy" in block]
    (tmp_path / "my_player.py").write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    players = ("ns", "ns", "ns", f"{tmp_path / 'my_player.py'}:Lazy")
    assert symmetry.main(symmetry.Args(players=players, episodes=200, num_envs=200)) == 0
    assert "Lazy" in capsys.readouterr().out
