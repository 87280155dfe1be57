"""A short form of benchmark/resilience.py, which tells what is tried; and the single parts that it rests on."""

import dataclasses
import importlib
import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.utils.tensorboard  # here, so that no trial needs to import it

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, os.path.join(ROOT, "benchmark"))

import ppo_single_player as script  # noqa: E402
import resilience  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the trials are forked processes")


@pytest.fixture(scope="session")
def trials(tmp_path_factory):
    """The arguments of resilience.py, with one folder for the undisturbed runs of all tests."""
    return resilience.Args(folder=str(tmp_path_factory.mktemp("resilience")))


@pytest.mark.parametrize("claim, name, number", [
    ("SIGTERM", "train_world_model", 1), ("full", "train_world_model", 1), ("full", "train_world_model", 5),
    ("gone", "train_world_model", 8),
    *(("damaged", "train_world_model", number) for number in range(20)),
    *(("configs", "train_world_model", number) for number in (0, 2, 6, 8, 15, 16)),
    *(("data", "train_world_model", number) for number in (2, 4, 27)),
    *(("players", "ppo_single_player", number) for number in (3, 13, 16)),
    *(("flags", "ppo_single_player", number) for number in range(2, 6)), ("game", "the game", 1)])
def test_trial(trials, claim, name, number):
    wrong = resilience.CLAIMS[claim][3](trials, name, number)
    assert not isinstance(wrong, str) or wrong == ""
    assert wrong is not None


def test_a_killed_run_ends_as_if_nothing_had_been(trials):
    """A fast machine may end the run before the last kill."""
    assert isinstance(resilience.killed(trials, "train_world_model", 0), dict)


def test_a_trial_sees_what_is_wrong(trials):
    """Two runs of other seeds differ in all that is compared."""
    whole, _ = resilience.reference(trials, "train_world_model")
    other = os.path.join(trials.folder, "other-seed")
    assert resilience.finish("train_world_model", resilience.command("train_world_model", other, "--seed", "2"), other)[0] == 0
    found = resilience.differences(other, whole)
    assert sorted(found) == ["TensorBoard", "checkpoint.pt", "config.json", "results.json"]


def test_a_finished_run_is_left_as_it_is(trials):
    folder, _ = resilience.reference(trials, "train_world_model")
    look = lambda: {name: os.stat(os.path.join(folder, name)).st_mtime_ns for name in os.listdir(folder)}
    before = look()
    assert resilience.finish("train_world_model", ["--resume", folder], folder) == (0, [])
    with open(folder + ".out", encoding="utf-8") as file:
        assert file.read() == f"{folder} had finished: nothing was changed\n"
    assert look() == before


@pytest.mark.parametrize("name, line, words", [
    ("pretrain_vae", "--learning-rate 1e6", "is not finite, after "),
    ("train_world_model", "--learning-rate 1e9", " is not finite, after "),
])
def test_numbers_that_are_not_finite_end_a_run_and_stay_beside_it(trials, name, line, words):
    folder = os.path.join(trials.folder, "not-finite-" + name)
    if name == "pretrain_vae":
        line += " --max-grad-norm 1e6"
    code, lines = resilience.finish(name, resilience.command(name, folder, *line.split()), folder)
    assert resilience.one_line(code, lines, (1,)) and words in lines[0], lines
    assert os.path.isfile(os.path.join(folder, "not-finite.pt")) and not os.path.exists(os.path.join(folder, "results.json"))


def test_a_second_signal_has_no_more_to_tell():
    """It comes just after the first one's line. (It is heard, for Python complains of one that is on its way at the
    moment when it comes to be ignored.)"""
    ear, mouth = os.pipe()
    process = os.fork()
    if not process:
        leave = os._exit
        os.dup2(mouth, 2)
        script.Interrupt.advice = "nothing was written"
        script.Interrupt.watch()
        heard = lambda: all(map(callable, map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))))
        script.os._exit = lambda code: (os.kill(os.getpid(), signal.SIGTERM), leave(code if heard() else 70))
        os.kill(os.getpid(), signal.SIGINT)
    os.close(mouth)
    with os.fdopen(ear) as lines:
        assert lines.read() == "\nstopped; nothing was written\n"
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130


def test_only_finite_numbers_are_learned_from():
    script.check_finite(torch.tensor(1.0), "the loss")
    with pytest.raises(script.NotFinite, match="^the loss is not finite$"):
        script.check_finite(torch.tensor(float("nan")), "the loss")
    with pytest.raises(script.NotFinite, match="^the loss of b is not finite$"):
        script.check_finite(torch.tensor([[1.0, 2.0], [1.0, float("inf")]]), "the loss", ("a", "b"))


def test_two_runs_of_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(script.time, "time", lambda: 7.0)
    args = script.Args(runs_dir=str(tmp_path))
    assert len({script.open_run(args) for _ in range(3)}) == 3


def test_a_name_too_long_for_a_folder_leaves_nothing(tmp_path):
    with pytest.raises(script.Refused, match="is too long for a folder name"):
        script.open_run(script.Args(runs_dir=str(tmp_path / "runs"), run_name="x" * 300))
    assert os.listdir(tmp_path) == []


def test_what_no_memory_holds_is_refused():
    with pytest.raises(script.Refused, match="^--hidden-size 1000000000 would take 16,000,004,704 GB of memory"):
        script.check_flags(script.Args(hidden_size=10**9))


def test_a_player_cannot_harm_the_game(tmp_path):
    path = tmp_path / "vandal.py"
    path.write_text("class Vandal:\n    def act(self, observation, generator):\n        actions = observation['step'] * 0 + 4\n"
                    "        for part in observation.values():\n            part.zero_()\n        generator.manual_seed(0)\n"
                    "        return actions\n    def reset(self, which):\n        which.zero_()\n", encoding="utf-8")
    quiet = tmp_path / "quiet.py"
    quiet.write_text("class Quiet:\n    def act(self, observation, generator):\n        return observation['step'] * 0 + 4\n", encoding="utf-8")
    states = []
    for name in (f"{path}:Vandal", f"{quiet}:Quiet"):
        game = script.BatchedStagHunt(16, num_players=3, seed=1)
        lineup = script.Lineup([name, "random", "mix:ns,nh"], game)
        for _ in range(50):
            out = game.advance(lineup.act(game))
            game.reset(out["over"])
            lineup.reset(out["over"])
        states.append([game.state()[key] for key in ("cell", "board", "clock")] + [lineup.kind])
    assert all(map(torch.equal, *states))


def test_weights_that_are_no_numbers_take_no_seat(tmp_path):
    small = dict(total_timesteps=64, num_envs=4, num_steps=8, eval_episodes=0, runs_dir=str(tmp_path))
    script.main(script.Args(run_name="first", **small))
    path = str(tmp_path / "first" / "checkpoint.pt")
    checkpoint = script.load_checkpoint(path, "x")
    checkpoint["run"]["agent"]["actor.weight"].fill_(float("nan"))
    script.save_checkpoint(str(tmp_path), checkpoint, "nan.pt")
    players = (f"{tmp_path / 'nan.pt'}:player_1", "ppo", "ns", "ns")
    with pytest.raises(script.Refused, match="the weights actor.weight are not all finite"):
        script.main(script.Args(players=players, **small))
    with pytest.raises(script.Refused, match="--final-time 12 does not fit --players .* which has 35"):
        script.main(script.Args(players=(f"{path}:player_1", "ppo", "ns", "ns"), final_time=12, **small))


def test_a_note_tells_what_makes_the_last_bit_differ(trials, monkeypatch, capsys):
    folder, _ = resilience.reference(trials, "train_world_model")
    world = importlib.import_module("train_world_model")
    made = world.made_with()
    monkeypatch.setattr(world, "made_with", lambda: {**made, "torch": "1.0"})
    assert world.load_run(world.resolve_flags(world.Args(resume=folder))) is not None
    assert "here is 1.0: what follows will not be the same to the last bit" in capsys.readouterr().err


def test_a_device_without_numbers_is_refused():
    with pytest.raises(script.Refused, match="^--device meta cannot be used here: "):
        script.main(script.Args(device="meta"))


@pytest.mark.parametrize("line, words", [("--gama 1", "there is no --gama; did you mean --gamma?")])
def test_flags_that_cannot_be_read_are_one_line(line, words):
    done = subprocess.run([sys.executable, os.path.join(ROOT, "ppo_single_player.py"), *line.split()], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ") and words in done.stderr


@pytest.mark.parametrize("of", ["train_world_model", "hopplus_selfplay"])
def test_a_world_model_of_another_game_is_refused(trials, tmp_path, of):
    import hopplus_selfplay as hop

    world, _ = resilience.reference(trials, of)
    args = hop.Args(world_model_checkpoint=world, stag_reward=100.0, runs_dir=str(tmp_path), run_name="x", warmup_meetings=2)
    with pytest.raises(hop.Refused, match="--stag-reward 100.0 does not fit --world-model-checkpoint .* which has 10.0"):
        hop.main(args)
    assert hop.warm_up_world(dataclasses.replace(args, stag_reward=10.0))[1] == 0
    assert os.listdir(tmp_path) == []
