"""Every command in a block of the README and docs/ runs: as it is typed, but short, and on runs made for it.

A command is read by the script's own reading of flags, and what it asks for is checked as it stands. Then flags that
say how long it takes are replaced by small ones, and the script's main is called in this process. What stands for a
run of the reader, such as runs/x, is a small run. Where a benchmark would make runs, its list of runs is looked at
instead, and the flags of some of them are read. Commands of programs of others (pip, tensorboard, pytest) are parsed in
test_docs.py alone.
"""

import dataclasses
import functools
import importlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch.utils.tensorboard  # noqa: F401 (here, so that no single command waits for it)
import tyro
from matplotlib.figure import Figure
from PIL import Image

import hopplus_selfplay
import ppo_single_player
import pretrain_vae
import test_obs_reward_model as tester
import train_world_model
from tests.test_docs import PAGES, ROOT, pieces

TINY = {  # what makes a run short
    hopplus_selfplay: dict(
        total_timesteps=16, num_envs=4, num_steps=4, hidden_size=8, vae_size=8, warmup_meetings=2, eval_episodes=4,
        eval_policy_episodes=4, num_simulations=2, imagined_per_real=4.0, moa_minibatches=1, num_minibatches=1,
        final_time=5, meetings=2, meeting_episodes=2),
    ppo_single_player: dict(
        total_timesteps=32, num_envs=4, num_steps=4, hidden_size=8, eval_episodes=8, num_minibatches=1, update_epochs=1,
        final_time=5, meeting_episodes=2, meetings=2),
    pretrain_vae: dict(
        episodes=40, held_out_episodes=20, epochs=1, batch_size=32, hidden_size=8, vae_size=8, final_time=5),
    train_world_model: dict(rows=300, held_out_rows=100, num_updates=2, check_every=2, batch_size=16, hidden_size=8),
    tester: dict(rows=100, rollouts=4, samples=1),
}
LENGTHS = ("total_timesteps", "epochs", "meeting_episodes", "vae_size", "batch_size")  # replaced also where they are typed
SHORT = {"envs.symmetry": "--episodes 200", "benchmark/why.py": "--meetings 2 --episodes 2 --boards 4",
         "benchmark/search_speed.py": "--trees 4 --simulations 2 --repeats 1 --plain-seconds 0.1",
         "benchmark/growth.py": "--only facts-by-players search-by-players --repeats 1 --seconds 0.01"}


def commands():
    """All commands in blocks, each once, as (place, words)."""
    found = {}
    for page in PAGES:
        for language, block in pieces(page)[1]:
            for line in block.replace("\\\n", " ").splitlines() if language != "python" else ():
                words = shlex.split(line, comments=True)
                if words[:1] == ["python"] and words[1:3] != ["-m", "pytest"]:
                    found.setdefault(tuple(words[3:] if words[1] == "-m" else words[1:]), (page.name, words))
    return found.values()


def player_of_ones_own():
    return next(block for language, block in pieces(PAGES[0])[1] if "class Lazy" in block)


def make_small(monkeypatch):
    """Warm-ups and last scores are short, and pictures blank: other tests look at them."""
    monkeypatch.setattr(Figure, "savefig", lambda _, file, **others: Image.new("RGB", (1, 1)).save(file, "PNG"))
    monkeypatch.setattr(hopplus_selfplay, "draw_models", lambda _: Figure((1, 1)))
    for script in (hopplus_selfplay, ppo_single_player):
        monkeypatch.setattr(script, "draw_board", lambda *_: Image.new("RGB", (1, 1)), raising=False)
    monkeypatch.setattr(tester, "draw_test", lambda *_: {})
    for name, value in (("WORLD_STEPS", 300), ("WARMUP_EPOCHS", 1), ("WORLD_UPDATES", 2)):
        monkeypatch.setattr(hopplus_selfplay, name, value)
    for function, numbers in ((hopplus_selfplay.report_models, (30, 2)), (hopplus_selfplay.score_world, (300,))):
        monkeypatch.setattr(function.__wrapped__, "__defaults__", numbers)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of the reader, with runs of all sorts in it: made/hop, made/ppo, made/vae, made/world."""
    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        patch.chdir(folder)
        for script, name, more in ((hopplus_selfplay, "hop", {}), (ppo_single_player, "ppo", {}),
                                   (pretrain_vae, "vae", {"save_data": "games.npz"}),
                                   (train_world_model, "world", {"boards": ("4x4",), "save_data": True})):
            few = {key: value for key, value in TINY[script].items() if not key.startswith("meeting")}
            assert script.main(script.Args(runs_dir="made", run_name=name, **few, **more)) == 0
    (folder / "my_player.py").write_text(player_of_ones_own(), encoding="utf-8")
    return folder


def placed(folder, script, words):
    """The words of a command, with the run meant by each runs/...; runs to compare differ in their seeds."""
    kinds = {hopplus_selfplay: "hop", ppo_single_player: "ppo", pretrain_vae: "vae", train_world_model: "world",
             tester: "world"}
    by_flag = {"--vae-checkpoint": "vae", "--world-model-checkpoint": "world"}
    last, answer = None, []
    for word in words:
        last = word if word.startswith("--") else last
        if word.startswith("runs/"):
            path, colon, who = word.partition(":")
            run, _, file = path.removeprefix("runs/").partition("/")
            kind = "ppo" if file and script is hopplus_selfplay else by_flag.get(last, kinds.get(script, "hop"))
            place = folder / "made" / f"{kind}-{run}"
            if not place.is_dir():
                shutil.copytree(folder / "made" / kind, place)
                config = json.loads((place / "config.json").read_text(encoding="utf-8"))
                seed = {"seed": 1 + ord(run)} if script is None else {}
                (place / "config.json").write_text(json.dumps(config | seed), encoding="utf-8")
            word = str(place / file) + colon + who
        answer.append(word)
    return answer


def shortened(script, args):
    """The flags of a command, with those that say how long it takes made small."""
    few, adapts = dict(TINY[script]), getattr(args, "mode", "train") == "adapt"
    if script is hopplus_selfplay:
        left_out = {name for _, made, names in script.ignored_flags(args) if made for name in names}
    elif script is ppo_single_player:
        left_out = set(script.OF_TRAINING if adapts else ()) | ({"num_steps"} if args.buffer == "episodes" else set())
        left_out |= {"meetings"} if not adapts else set()
        left_out |= {"meeting_episodes"} if not adapts and args.memory == "none" else set()
    else:
        left_out = {"rows"} if getattr(args, "data", None) else set()
        left_out |= {"batch_size", "epochs"} if getattr(args, "epochs", 1) == 0 else set()
    if script is hopplus_selfplay and args.mode != "train":  # the board and the networks are the trained player's
        left_out |= {"final_time", "hidden_size", "vae_size", "num_simulations"}
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    return dataclasses.replace(args, **{
        name: value for name, value in few.items() if name not in left_out
        and (name in LENGTHS or getattr(args, name) == defaults[name])})


def run_script(script, words, monkeypatch):
    """What the command line does, but short. -> exit code"""
    monkeypatch.setattr(sys, "argv", [script.SCRIPT, *words])
    args = script.read_flags(script.Args)
    if args.resume is None:
        script.check_flags(args)
        args = shortened(script, args)
    return script.main(args)


def run_benchmark(program, words, monkeypatch):
    """What a benchmark does; the runs that it would make are listed, and the flags of some are read."""
    module = importlib.import_module(program.removesuffix(".py").removeprefix("benchmark/").replace("/", "."))
    listed = []

    def look(folder, runs, workers, then):
        listed.extend(runs)
        return 0

    for name, stand_in in (("work", look), ("play_rules", lambda *_: {})):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)  # this process has tests to run yet
    args = tyro.cli(module.Args, args=[*words, *SHORT.get(program, "").split()])
    code = module.main(args)
    for run in listed[::max(1, len(listed) // 6)]:
        script = importlib.import_module(Path(run.script).stem)  # also where a copy of it is changed
        monkeypatch.setattr(sys, "argv", [run.script, *run.flags.split()])
        script.read_flags(script.Args)
    assert listed or not hasattr(module, "work")
    return code


@pytest.mark.parametrize("words", [pytest.param(words, id=f"{page}: {' '.join(words)}") for page, words in commands()])
def test_a_command_of_the_docs_runs(words, made, monkeypatch, capsys):
    make_small(monkeypatch)
    monkeypatch.chdir(made)
    program, words = (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])
    script = {f"{script.__name__}.py": script for script in TINY}.get(program)
    words = placed(made, script, words)
    if "play" in words:
        (made / "keys").write_text(40 * "e ", encoding="utf-8")
        words += ["--keys", "keys"]
    run = functools.partial(run_script, script) if script else functools.partial(run_benchmark, program)
    assert not run(words, monkeypatch)


def test_no_command_is_left_out():
    assert len(commands()) > 50 and {words[1] for _, words in commands()} >= {f"{script.__name__}.py" for script in TINY}
    assert all((ROOT / words[1]).is_file() or words[1] == "-m" for _, words in commands())
