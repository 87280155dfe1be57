"""The copies are the same, each script runs alone, and tests/copies.py sees what it should and repairs it."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import copies

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(ROOT.glob("*.py"))
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)


def check(folder, *arguments, **files):
    """Writes files (their names without .py) into a folder and runs copies.py on it. -> exit code"""
    for name, text in files.items():
        (folder / f"{name}.py").write_bytes(text.encode())
    return copies.main(["--root", str(folder), *arguments])


ALONE = """
import contextlib, io, json, os, random, runpy, sys, traceback, numpy, torch

def world():
    return (torch.get_rng_state().tolist(), str(numpy.random.get_state()), random.getstate(),
            torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
            torch.backends.cudnn.deterministic, torch.are_deterministic_algorithms_enabled(),
            sorted(os.listdir('.')), os.getcwd(), list(sys.argv))

told = {}
for folder, script in json.loads(sys.argv[1]):
    os.chdir(folder)
    sys.argv, sys.path[0] = ["-c"], folder
    before, text, help, code = world(), io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            __import__(script.removesuffix(".py"))
        except BaseException:
            traceback.print_exc()
    changed = [was for was, now in zip(before, world()) if was != now]
    sys.argv = [script, "--help"]
    with contextlib.redirect_stdout(help):
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException as end:
            code = end.code if isinstance(end, SystemExit) else traceback.format_exc()
    told[script] = {"changed": str(changed), "text": text.getvalue(), "code": code, "help": help.getvalue()}
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What each script does alone in a folder of its own, when imported and when asked for help.

    One process for all, for it takes longer to start Python and torch than to do the rest. (In a process of
    its own each script runs in the test of its command line.)
    """
    places = []
    for script in SCRIPTS:
        folder = tmp_path_factory.mktemp("alone")
        (folder / script.name).write_bytes(script.read_bytes())
        places.append((str(folder), script.name))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-B", "-c", ALONE, json.dumps(places)]
    done = subprocess.run(command, cwd=places[0][0], env=environment, capture_output=True, text=True,
                          timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


# ------------------------------------------------------------------------------------- the project itself


def test_this_project_keeps_its_copies_the_same(capsys):
    code = copies.main([])
    assert code == 0, capsys.readouterr().out


def test_command_line():
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "copies.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def named(tree):
    """The names of all functions, methods, classes, imports and constants of a script."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


@each_script
def test_a_script_holds_nothing_that_it_never_calls(script):
    text = script.read_text(encoding="utf-8")
    words = re.findall(r"\w+", text)
    idle = {name for name in named(ast.parse(text)) if words.count(name) < 2 and not name.startswith("__")}
    assert not idle


@each_script
def test_script_alone_in_an_empty_folder_answers_help(script, alone):
    told = alone[script.name]
    assert told["code"] == 0, told["code"]
    assert told["help"]


@each_script
def test_importing_a_script_has_no_side_effect(script, alone):
    told = alone[script.name]
    assert (told["changed"], told["text"]) == ("[]", "")


# ------------------------------------------------------------------------------------- faults are seen

SAME = "import math\n\n\ndef area(r):\n    return math.pi * r * r\n"


def test_same_text_passes(tmp_path, capsys):
    assert check(tmp_path, a=SAME, b="X = 1\n" + SAME) == 0
    assert "1 names in common" in capsys.readouterr().out


def test_windows_line_ends_are_no_difference(tmp_path):
    assert check(tmp_path, a=SAME, b=SAME.replace("\n", "\r\n")) == 0


@pytest.mark.parametrize("mine, other", [
    ("def f():\n    return 1\n", "def f():\n    return 2\n"),
    ("def f():\n    return 1\n", "def f():\n    return 1  # one\n"),
    ("def f():\n    return 1\n", "async def f():\n    return 1\n"),
    ("def f():\n    return 1\n", "f = lambda: 1\n"),
    ("import functools\n\n\n@functools.cache\ndef f():\n    return 1\n", "def f():\n    return 1\n"),
    ("f = 1\n", "f = 1.0\n"),
    ("f: int = 1\n", "f = 1\n"),
    ("f = 1  # steps\n", "f = 1  # episodes\n"),
    ("# steps\nf = 1\n", "# episodes\nf = 1\n"),
    ("f, g = 1, 2\n", "f, g = 1, 3\n"),
], ids=str)
def test_drift_is_seen_and_repaired(tmp_path, capsys, mine, other):
    around = "# first line\nZ = 0\n\n\n{}\n\ndef last_{}():\n    pass\n"
    files = {"a": around.format(mine, "a"), "b": around.format(other, "b")}
    assert check(tmp_path, **files) == 1
    out = capsys.readouterr().out
    assert "f has 2 versions" in out and "a.py" in out and "b.py" in out and "\n  -" in out and "\n  +" in out
    assert check(tmp_path, "--from", "a.py") == 0
    assert "b.py takes from a.py: f" in capsys.readouterr().out
    assert (tmp_path / "a.py").read_bytes() == files["a"].encode()
    imports = "" if "import" not in mine else "import functools\n\n\n"  # only definitions are copied
    assert (tmp_path / "b.py").read_text() == around.format(mine.removeprefix(imports), "b")


HUNTER = '''class Hunter:
    """Hunts."""

    # in steps
    patience = 3
    """how long it waits"""

    def wait(self):
        return self.patience

    # -------------------------------- acting

    @staticmethod
    def act():
        return 5
'''


def without(text, part):
    """HUNTER without one of the parts of its body."""
    assert part in text
    return text.replace(part, "")


WAIT = "    def wait(self):\n        return self.patience\n\n"
ACT = "    @staticmethod\n    def act():\n        return 5\n"
PATIENCE = '    # in steps\n    patience = 3\n    """how long it waits"""\n\n'


@pytest.mark.parametrize("part", [WAIT, ACT, PATIENCE, "    # -------------------------------- acting\n\n"])
def test_a_class_may_leave_out_what_its_file_does_not_need(tmp_path, part):
    assert check(tmp_path, a=HUNTER, b=without(HUNTER, part)) == 0


@pytest.mark.parametrize("old, new, told", [
    ("class Hunter:", "class Hunter(dict):", "Hunter"), ("class Hunter:", "@final\nclass Hunter:", "Hunter"),
    ('"""Hunts."""', '"""Hunts stags."""', "Hunter"), ('    """Hunts."""\n\n', "", "Hunter"),
    ("patience = 3", "patience = 4", "Hunter.patience"), ("# in steps", "# in episodes", "Hunter.patience"),
    ("how long", "how often", "Hunter.patience"), ("return self", "return 1 + self", "Hunter.wait"),
    ("    @staticmethod\n", "", "Hunter.act"), ("return 5\n", "return 6\n", "Hunter.act"),
])
def test_what_both_classes_have_is_the_same(tmp_path, capsys, old, new, told):
    other = without(HUNTER, WAIT if "wait" not in told else PATIENCE if "patience" not in told else ACT)
    assert old in HUNTER and old in other
    assert check(tmp_path, a=HUNTER, b=other.replace(old, new)) == 1
    assert f"{told} has 2 versions" in capsys.readouterr().out
    assert check(tmp_path, "--from", "a.py") == 0
    assert f"b.py takes from a.py: {told}\n" in capsys.readouterr().out
    assert (tmp_path / "b.py").read_text().split() == other.split()  # and nothing of what it had left out


def test_a_class_is_not_copied_over_something_else(tmp_path, capsys):
    assert check(tmp_path, "--from", "a.py", a=HUNTER, b="def Hunter():\n    pass\n") == 1
    assert "it is not a class in both" in capsys.readouterr().out
    assert (tmp_path / "b.py").read_text() == "def Hunter():\n    pass\n"


def test_a_method_defined_twice(tmp_path, capsys):
    assert check(tmp_path, a=HUNTER + "\n    def wait(self):\n        return 0\n") == 1
    assert "a.py defines Hunter.wait 2 times" in capsys.readouterr().out


def test_versions_are_grouped(tmp_path, capsys):
    assert check(tmp_path, a="f = 1\n", b="f = 2\n", c="f = 1\n") == 1
    out = capsys.readouterr().out
    assert "version 1: a.py, c.py" in out and "version 2: b.py" in out


def test_long_differences_are_cut(tmp_path, capsys):
    long = [f"    x{line} = {{}}\n" for line in range(200)]
    assert check(tmp_path, a="def f():\n" + "".join(long).format(*[1] * 200),
                 b="def f():\n" + "".join(long).format(*[2] * 200)) == 1
    out = capsys.readouterr().out
    assert "more lines" in out and len(out.splitlines()) < 40


def test_the_batched_game_is_under_the_same_law(tmp_path, capsys):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "batched.py").write_text("f = 1\n")
    (tmp_path / "envs" / "other.py").write_text("f = 3\n")  # this one is not
    assert check(tmp_path, a="f = 2\n") == 1
    assert "envs/batched.py" in capsys.readouterr().out
    assert check(tmp_path, "--from", "envs/batched.py") == 0
    assert (tmp_path / "a.py").read_text() == "f = 1\n"
    assert (tmp_path / "envs" / "other.py").read_text() == "f = 3\n"


def test_names_that_differ_on_purpose(tmp_path, capsys):
    assert check(tmp_path, a="class Args:\n    x = 1\n", b="class Args:\n    x = 2\n") == 0
    assert check(tmp_path, "--from", "a.py") == 0
    assert (tmp_path / "b.py").read_text() == "class Args:\n    x = 2\n"
    assert check(tmp_path, a="class Args:\n    x = 1\n", b="class Args:\n    x = 1\n") == 1
    assert "Args is the same in all 2 files" in capsys.readouterr().out
    (tmp_path / "b.py").unlink()
    assert check(tmp_path) == 0  # one script alone has nothing to differ from


def test_a_name_defined_twice_in_one_file(tmp_path, capsys):
    assert check(tmp_path, a="f = 1\nf = 2\n", b="f = 1\n") == 1
    assert "a.py defines f 2 times (lines 1, 2)" in capsys.readouterr().out


@pytest.mark.parametrize("statement", [
    "import b", "import b as c", "import os, b", "from b import g", "from . import b", "from .b import g",
    "import envs", "import envs.batched", "from envs import batched", "from envs.batched import f",
    "__import__('b')", "importlib.import_module('envs.batched')", "import_module('b')", "runpy.run_module('b')",
])
@pytest.mark.parametrize("inside", ["{}\n", "def h():\n    if h:\n        {}\n", "class H:\n    {}\n"],
                         ids=["top", "function", "class"])
def test_scripts_must_stand_alone(tmp_path, capsys, statement, inside):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("")
    assert check(tmp_path, a=inside.format(statement), b="g = 1\n") == 1
    assert "a script must run alone" in capsys.readouterr().out


def test_other_imports_are_fine(tmp_path):
    assert check(tmp_path, a="import os\nfrom math import pi\nimport bb\nimport a\n", b="import torch.nn as b\n") == 0


def test_a_file_that_is_no_python(tmp_path, capsys):
    assert check(tmp_path, a="def f(:\n", b="f = 1\n") == 1
    assert "a.py cannot be read" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- repair


def test_repair_leaves_the_rest_alone(tmp_path, capsys):
    giver = "f = 1\n\n\n# g does it\ndef g(x):\n    '''é'''\n    return x\n\n\nonly_mine = 5\n"
    taker = '"""Tälk."""\r\n\r\nf = 1\r\ndef g(x):\r\n    return 0\r\n\x0c\r\nonly_theirs = "\\r\\n"   \r\ndef g2(): pass'
    assert check(tmp_path, "--from", "a.py", a=giver, b=taker) == 0
    assert capsys.readouterr().out.startswith("b.py takes from a.py: g\n")
    assert (tmp_path / "a.py").read_bytes() == giver.encode()
    expected = taker.replace("def g(x):\r\n    return 0", "# g does it\r\ndef g(x):\r\n    '''é'''\r\n    return x")
    assert (tmp_path / "b.py").read_bytes() == expected.encode()


def test_repair_at_the_end_of_a_file_without_a_last_line_end(tmp_path):
    assert check(tmp_path, "--from", "a.py", a="f = 1\ng = 2\n", b="g = 3\nf = 4") == 0
    assert (tmp_path / "b.py").read_bytes() == b"g = 2\nf = 1"


def test_repair_does_not_take_apart_a_statement_with_other_names(tmp_path, capsys):
    assert check(tmp_path, "--from", "a.py", a="f = 1\ng = 2\n", b="f, g = 3, 4\n") == 1
    assert "f cannot be copied from a.py to b.py" in capsys.readouterr().out
    assert (tmp_path / "b.py").read_text() == "f, g = 3, 4\n"


def test_repair_from_an_unknown_script(tmp_path, capsys):
    assert check(tmp_path, "--from", "c.py", a="f = 1\n") == 2
    assert "there are a.py" in capsys.readouterr().err
