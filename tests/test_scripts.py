"""What holds for every script alike: no name is used that the file does not have, and docs/flags.md tells its flags."""

import builtins
import importlib
import os
import symtable
import sys

import pytest

from tests import flags

HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPTS = sorted(name for name in os.listdir(os.path.join(HERE, "..")) if name.endswith(".py"))


def missing_names(source, path):
    """Global names that some scope reads and nothing at the top level defines."""
    top = symtable.symtable(source, path, "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()
               or symbol.is_namespace()} | set(dir(builtins)) | {"__file__", "__name__"}
    missing, scopes = set(), [top]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        missing |= {symbol.get_name() for symbol in scope.get_symbols()
                    if symbol.is_global() and symbol.is_referenced() and symbol.get_name() not in defined}
    return missing


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_name_is_missing(script):
    """A definition copied without the helper that it calls would only be noticed when it runs."""
    path = os.path.join(HERE, "..", script)
    with open(path, encoding="utf-8") as file:
        assert not missing_names(file.read(), path)


def test_a_missing_name_is_found():
    assert missing_names("def one():\n    return two(len(three))\n\nthree = 3\n", "made up") == {"two"}


def test_the_page_of_flags_is_that_of_the_scripts():
    assert (flags.ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == flags.document(), "run: python tests/flags.py"


def test_the_flags_that_one_needs_first_are_ten():
    for name in flags.SCRIPTS:
        groups = flags.flags_of(name)
        assert list(groups)[:3] == ["FirstArgs", "GameArgs", "RunArgs"]
        first = groups["FirstArgs"]
        assert len(first) == 10 and first[-4:] == flags.flags_of(flags.SCRIPTS[0])["FirstArgs"][-4:]


def test_help_tells_the_flags_in_their_groups(monkeypatch, capsys):
    script = importlib.import_module("hopplus_selfplay")  # what reads the flags is the same text in all scripts
    monkeypatch.setattr(sys, "argv", ["hopplus_selfplay.py", "--help"])
    with pytest.raises(SystemExit):
        script.read_flags(script.Args)
    told, groups = capsys.readouterr().out, flags.flags_of("hopplus_selfplay.py")
    titles = [f" {group.removesuffix('Args').lower()} options " for group in groups]
    assert all(name in told for typed in groups.values() for name, _, _ in typed)
    assert sorted(titles, key=told.index) == titles


@pytest.mark.parametrize("word, told", [
    ("--gama=1", "there is no --gama; did you mean --gamma?"), ("--xyzzy", "there is no --xyzzy")])
def test_the_nearest_flag_is_named(monkeypatch, word, told):
    script = importlib.import_module("ppo_single_player")
    monkeypatch.setattr(sys, "argv", ["ppo_single_player.py", word])
    with pytest.raises(script.Refused) as refusal:
        script.read_flags(script.Args)
    assert str(refusal.value) == told


def test_a_flag_typed_at_its_default_counts_when_a_run_is_resumed(monkeypatch, tmp_path):
    script = importlib.import_module("ppo_single_player")
    config = {"script": "ppo_single_player.py", **vars(script.Args(gamma=0.9, threads=2, prosocial=True))}
    script.save_json(str(tmp_path / "config.json"), config)
    args = script.Args(resume=str(tmp_path))
    for words, told in ((["--gamma=0.99"], "--gamma 0.99 does not go"), (["--no-prosocial"], "--prosocial False does not go")):
        monkeypatch.setattr(sys, "argv", ["ppo_single_player.py", *words])
        with pytest.raises(script.Refused, match=told):
            script.resolve_flags(args)
    monkeypatch.setattr(sys, "argv", ["ppo_single_player.py", "--threads", "1"])
    assert script.resolve_flags(args).threads == 1 and script.resolve_flags(args).gamma == 0.9


def test_a_script_ends_well_where_nobody_listens(monkeypatch):
    """With a closed output there is no stream to be flushed."""
    script = importlib.import_module("ppo_single_player")
    monkeypatch.setattr(sys, "argv", ["ppo_single_player.py"])
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(script.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as end:
        script.run_script(script.Args, lambda args: 0)
    assert end.value.code == 0


def test_flags_keep_flat_names(monkeypatch):
    script = importlib.import_module("hopplus_selfplay")
    typed = ["--beta", "2", "--players", "hop", "ns", "--height", "5", "--prosocial", "--vae-checkpoint", "runs/x"]
    monkeypatch.setattr(sys, "argv", ["hopplus_selfplay.py", *typed])
    assert script.read_flags(script.Args) == script.Args(
        beta=2.0, players=("hop", "ns"), height=5, prosocial=True, vae_checkpoint="runs/x")
