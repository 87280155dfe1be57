"""The symmetry check's verdicts and exit codes."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from envs import symmetry
from envs.symmetry import Args, main, measure, report

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The checks leave their folders in runs/ of where they are."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("players", [("random",) * 4, ("ns",) * 4, ("ns", "nh", "nsh", "nsh")], ids=" ".join)
def test_a_fair_game_passes(players, capsys):
    assert main(Args(players=players, episodes=1_000, num_envs=250)) == 0
    out = capsys.readouterr().out
    assert out.startswith("1,000 episodes") and "No bias" in out
    folder, = Path("runs").iterdir()
    assert (folder / "symmetry.png").stat().st_size > 5000 and str(folder / "symmetry.png") in out
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert [seat["player"] for seat in found["seats"]] == list(players) and found["biased"] is False
    for seat, name in enumerate(players, start=1):
        assert any(line.split()[:2] == [f"player_{seat}", name] for line in out.splitlines())


def test_the_number_of_episodes_is_what_was_played(capsys):
    assert main(Args(players=("ns",) * 4, episodes=110, num_envs=50)) == 0
    assert capsys.readouterr().out.startswith("150 episodes")


def test_a_planted_bias_is_found(monkeypatch, capsys):
    honest = symmetry.play

    def favour_the_first(*args, **kwargs):
        return honest(*args, **kwargs) + torch.tensor([0.5, 0, 0, 0])

    monkeypatch.setattr(symmetry, "play", favour_the_first)
    assert main(Args(players=("random",) * 4, episodes=2_000)) == 1
    assert "BIAS: player_1 and player_" in capsys.readouterr().out


def test_players_of_unequal_strength_are_not_equal(capsys):
    args = dict(players=("ns",) * 4, episodes=1_000, strengths=(1.0, 1.0, 3.0, 3.0))
    assert main(Args(**args)) == 0
    assert "2 pairs of equal players" in capsys.readouterr().out
    returns = symmetry.play(args["players"], 1_000, strengths=args["strengths"])
    found = measure(returns, args["players"])  # as if strengths were not known
    assert found["biased"] and "BIAS" in report(found)


def test_nothing_to_compare(capsys):
    assert main(Args(players=("ns", "nh"), episodes=200)) == 0
    assert "Nothing to compare" in capsys.readouterr().out


@pytest.mark.parametrize("flags, told", [
    (dict(players=("ns", "foo")), "'foo'"), (dict(players=("ns",)), "--num-players 1"),
    (dict(players=("no_file.py:Lazy", "ns")), "no_file.py"), (dict(episodes=3), "--episodes 3"),
    (dict(num_envs=0), "--num-envs 0"), (dict(seed=-1), "--seed -1"), (dict(device="nowhere"), "--device nowhere"),
    (dict(strengths=(1.0,)), "--strengths"), (dict(height=2, width=2), "--height 2"), (dict(run_name="a/b"), "--run-name 'a/b'"),
    (dict(run_name=".."), "--run-name '..'"),
], ids=str)
def test_wrong_flags_give_one_line(flags, told, capsys):
    assert main(Args(**flags)) == 2
    captured = capsys.readouterr()
    assert told in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert not Path("runs").exists()


@pytest.mark.parametrize("flags, code", [(["ns", "foo"], 2), (["ns", "ns", "--no-such-flag"], 2)], ids=str)
def test_exit_codes(flags, code, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["symmetry.py", "--players", *flags])
    monkeypatch.delitem(sys.modules, "envs.symmetry")  # or runpy would warn that it is run twice
    with pytest.raises(SystemExit) as end:
        runpy.run_module("envs.symmetry", run_name="__main__", alter_sys=True)
    assert end.value.code == code


def test_command_line(tmp_path):
    command = [sys.executable, "-m", "envs.symmetry", "--players", "ns", "ns", "--episodes", "200", "--runs-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
