"""One run of several processes: equal updates, stopping, dying, resuming. The processes are forks of the test, which
stands in for torchrun (it keeps the store and sets the variables); one run is torchrun's own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import matplotlib.pyplot  # noqa: F401  here, so that not every fork has to
import pytest
import torch
from matplotlib.figure import Figure
import torch._dynamo  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
from tqdm import tqdm

import hopplus_selfplay as hop
import ppo_single_player as ppo
import pretrain_vae as vae
import train_world_model as world

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forks")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LINES = {
    ppo: "--players ppo ppo ns ppo --total-timesteps 512 --num-envs 4 --num-steps 16 --hidden-size 16 "
         "--eval-episodes 8 --save-every 1e9",
    hop: "--total-timesteps 192 --num-envs 2 --num-steps 16 --hidden-size 16 --vae-size 16 --warmup-meetings 4 "
         "--eval-episodes 4 --eval-policy-episodes 4 --num-simulations 2 --imagined-per-real 8 --buffer-size 64 "
         "--moa-minibatches 2 --num-minibatches 6 --save-every 1e9 --search-model rules",
    vae: "--episodes 60 --held-out-episodes 10 --batch-size 16 --epochs 2 --hidden-size 16 --vae-size 16 --mix ns",
    world: "--boards 4x4 --rows 400 --held-out-rows 60 --num-updates 40 --batch-size 64 --hidden-size 16",
}


class Fork:
    """A forked process that does some work as one of several; it leaves what the work returns, and its words."""

    def __init__(self, folder, port, rank, size, work):
        self.result, self.words = (os.path.join(folder, f"{kind}-{port}-{rank}") for kind in ("result", "words"))
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            tqdm.set_lock(threading.RLock())  # forks share the one they begin with: who is killed holds it for ever
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            words = open(self.words, "w", buffering=1)
            os.dup2(words.fileno(), 1)
            os.dup2(words.fileno(), 2)
            sys.stdout = sys.stderr = words
            torch.save(work(rank), self.result)
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)

    def end(self, patience=60):
        """-> exit code (minus the signal's number), what it said"""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                with open(self.words, encoding="utf-8") as words:
                    return os.waitstatus_to_exitcode(status), words.read()
            time.sleep(0.01)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise TimeoutError(open(self.words, encoding="utf-8").read())


def together(folder, work, size=2):
    """Lets `size` processes do work(rank). -> exit codes, what they said, what work returned"""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    forks = [Fork(folder, store.port, rank, size, work) for rank in range(size)]
    codes, words = zip(*(fork.end() for fork in forks))
    results = [torch.load(fork.result, weights_only=False) if os.path.exists(fork.result) else None for fork in forks]
    return list(codes), list(words), results


def run(folder, script, line, before=lambda rank: None, size=2):
    """A whole run of a script, its flags given as they are typed. -> exit codes, what the processes said"""

    def work(rank):
        hop.report_models, hop.draw_models = lambda *_: ({}, {}, 0), lambda *_: Figure()  # they take long
        hop.Log.picture = vae.write_pictures = lambda *_: None
        before(rank)
        sys.argv = [script.SCRIPT, *line.split(), *([] if "--resume" in line else ["--runs-dir", str(folder)])]
        script.run_script(script.Args, script.main)

    return together(folder, work, size)[:2]


def at_call(script, function, number, what):
    """Lets a function of a script do something else first, the first time it is called after `number` times."""
    before, calls = getattr(script, function), []

    def instead(*args, **named):
        calls.append(0)
        if len(calls) == number + 1:
            what()
        return before(*args, **named)

    setattr(script, function, instead)


def checkpoint(folder):
    return ppo.load_checkpoint(os.path.join(folder, "checkpoint.pt"), "test")


def differences(one, two, path=""):
    """Where two checkpoints differ, times aside."""
    if isinstance(one, dict):
        if one.keys() != two.keys():
            return [path]
        return [found for key in one if key not in ("seconds", "made_with", "config", "warmup_seconds", "checked")
                for found in differences(one[key], two[key], f"{path}/{key}")]
    if isinstance(one, (list, tuple)):
        found = [differences(*pair, f"{path}/{number}") for number, pair in enumerate(zip(one, two))]
        return sum(found, [path] * (len(one) != len(two)))
    return [] if (torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two) else [path]


# ----------------------------------------------------------------------------------- equal updates


def ppo_case(memory):
    """-> the data of an update of PPO, and a function that makes it: data -> the weights after it, the losses"""
    args = ppo.Args(players=("ppo", "ppo", "ns", "ppo"), num_envs=12, num_steps=24, hidden_size=16, num_minibatches=3,
                    memory=memory)
    table = ppo.Table(args, args.num_envs, 1)
    data, _ = ppo.rollout(args, table, ppo.Returns(12, 4, "cpu"))
    data["present"][:, 0, :4] = False  # those of one process have far fewer samples than those of the other

    def learn(data):
        agent = ppo.Table(args, args.num_envs, 1).agent
        agent.owners = ["a", "b", "c"]
        optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
        # a minibatch is every third row of games, so that it does not matter who has which
        rows = lambda part, k: part.movedim(0, 2)[:, k::3]
        ppo.cut_samples = lambda data, many, _: (
            {key: rows(part, k).flatten(1, 2) for key, part in data.items()} for k in range(many))
        ppo.cut_sequences = lambda data, memory, many, _: (
            {**{key: rows(part, k) for key, part in data.items()}, "memory": memory[:, k::3]} for k in range(many))
        losses = ppo.update(args, agent, optimizer, data, 0.02, 0.05, None)
        losses.pop("explained_variance")  # it is each process's own, averaged
        return agent.state_dict(), losses

    return data, learn


def hop_case():
    """The same of HOP+: the data of the policy's update and the lesson of the models of others."""
    args = hop.Args(num_envs=8, num_steps=8, hidden_size=16, vae_size=16, num_minibatches=1,
                    moa_minibatches=2, num_simulations=4)
    table = hop.Table(args, 8, 1)
    real = hop.play_steps(table, hop.Returns(8, 4, "cpu"), 8, "full")
    policy = real["policy"]
    policy["searched"][:, :, ::2] = False
    policy["present"][:, 1, :3] = False
    shape = real["seen"].shape  # [P, T, B]
    lesson = {"x": real["x"].transpose(0, 1)[table.pairs], "action": real["actions"][table.pairs].long(),
              "seen": real["seen"], "weight": real["seen"], "memory": real["memory"],
              "goal_mean": torch.randn(*shape, 16), "goal_logvar": torch.randn(*shape, 16)}
    hop.draw_goals = lambda mean, logvar, generator: mean
    hop.HINDSIGHT = 1.0

    def learn(data):
        policy, lesson = data
        networks = hop.Table(args, 8, 1).networks
        adam = lambda part: torch.optim.Adam(part.parameters(), lr=1e-2, eps=1e-5)
        replay = type("Replay", (), {"draw": lambda *_: lesson})
        figures = hop.learn_others(args, networks.others, replay, adam(networks.others), torch.Generator())
        figures |= hop.learn_policy(args, networks.policy, policy, adam(networks.policy), 0.02, torch.Generator())
        return networks.state_dict(), {key: part for key, part in figures.items() if "explained" not in key}

    return (policy, lesson), learn


def games(data, which):
    """The part of an update's data that comes from some of the games."""
    if isinstance(data, tuple):
        policy, lesson = data
        cut = lambda key, part: part[:, which] if key == "memory" else part[which] if part.dim() == 1 else part[:, :, which]
        return games(policy, which), {key: cut(key, part) for key, part in lesson.items()}
    return {key: part[:, which] if key == "memory" else part[:, :, which] for key, part in data.items()}


@pytest.mark.parametrize("case, script, share", [
    (lambda: ppo_case("none"), ppo, 6), (lambda: ppo_case("gru"), ppo, 6), (hop_case, hop, 4)],
    ids=["ppo", "ppo with a memory", "hop+"])
def test_an_update_of_two_processes_is_that_of_one_with_all_data(tmp_path, case, script, share):
    """The first has `share` of the games, the second all others. (What is drawn for a lesson is as much in each.)"""

    def work(rank):
        data, learn = case()
        if rank is None:
            return learn(data)
        with script.Processes.together():
            return learn(games(data, slice(share, None) if rank else slice(share)))

    torch.manual_seed(0)  # the forks begin with this state, too
    codes, words, results = together(tmp_path, work)
    assert codes == [0, 0], words
    alone = Fork(tmp_path, 0, 0, 1, lambda _: work(None))  # a fork, too, for it changes the script
    assert alone.end() == (0, "")
    weights, figures = torch.load(alone.result, weights_only=False)
    for mine, told in results:
        for key, value in weights.items():
            assert (mine[key] - value).abs().max() < 1e-6, key
        for key, value in figures.items():
            assert torch.allclose(told[key], value, rtol=1e-4, atol=1e-5), key
    assert not differences(*(mine for mine, _ in results))


@pytest.mark.parametrize("size", [2, 3])  # two tell one another all, more go round a ring
def test_means_are_those_of_all_processes(tmp_path, size):
    def work(rank):
        with ppo.Processes.together():
            agent = torch.nn.Linear(3, 2)
            parts = torch.full((2, 3), float(rank)), torch.tensor(rank + 0.5)
            for parameter in agent.parameters():
                parameter.grad = torch.full_like(parameter, 10.0 * rank)
            (told,) = ppo.Processes.mean_gradients(agent, torch.tensor([rank**2]))
            grads = [parameter.grad.flatten().tolist() for parameter in agent.parameters()]
            return [part.tolist() for part in ppo.Processes.mean(*parts)], told.item(), sum(grads, [])

    codes, words, results = together(tmp_path, work, size)
    middle = (size - 1) / 2
    squares = sum(rank**2 for rank in range(size)) / size
    assert codes == [0] * size, words
    for parts, told, grads in results:
        assert parts == [[[middle] * 3] * 2, middle + 0.5]
        assert told == pytest.approx(squares) and grads == [10 * middle] * 8


# ------------------------------------------------------------------------------------ whole runs


def test_all_begin_with_the_same_weights_and_other_games(tmp_path):
    def work(rank):
        args, before = ppo.Args(num_envs=16, hidden_size=16), ppo.orthogonal
        ppo.orthogonal = lambda *sizes: before(*sizes[:-1], rank)  # weights that differ, were they not shared
        with ppo.Processes.together():
            made = ppo.Run(args)
            return made.agent.state_dict(), made.table.game.cell, made.table.generator.get_state()

    codes, words, ((agent, cell, draws), (agent_1, cell_1, draws_1)) = together(tmp_path, work)
    assert codes == [0, 0], words
    assert not differences(agent, agent_1)
    assert not torch.equal(cell, cell_1) and not torch.equal(draws, draws_1)


def test_two_processes_share_a_warm_up_and_have_what_one_has(tmp_path, monkeypatch):
    """The first learns goals, the last the world model; all know what both have learned."""
    monkeypatch.setattr(hop, "WORLD_STEPS", 300)
    monkeypatch.setattr(hop, "WORLD_UPDATES", 5)
    args = hop.Args(num_envs=2, hidden_size=16, vae_size=16, warmup_meetings=4, buffer_size=64)

    def warm_up(rank=0):
        done = []
        for name in ("learn_goals", "warm_up_world"):
            made = getattr(hop, name)
            monkeypatch.setattr(hop, name, lambda *args, name=name, made=made: (done.append(name), made(*args))[1])
        with hop.Processes.together():
            made = hop.Run(args)
            return done, made.networks.state_dict(), made.world.state_dict(), made.warmup_steps

    codes, words, (first, last) = together(tmp_path, warm_up)
    assert codes == [0, 0], words
    assert (first[0], last[0]) == (["learn_goals"], ["warm_up_world"])
    alone = warm_up()
    assert alone[0] == ["warm_up_world", "learn_goals"]
    assert not differences(first[1:], last[1:]) and not differences(first[1:], alone[1:])


@pytest.mark.parametrize("script, learn", [(ppo, "update"), (hop, "learn_policy"), (vae, "learn"),
                                           (world, "plane_weights")], ids=lambda part: getattr(part, "SCRIPT", ""))
def test_a_run_that_one_process_was_told_to_stop_resumes_exactly(tmp_path, script, learn):
    """Only the second gets the signal, in the second update. All stop after it, and go on to the same end."""

    def stop(rank):
        if rank == 1:
            at_call(script, learn, 1, lambda: signal.raise_signal(signal.SIGTERM))

    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    codes, words = run(tmp_path, script, LINES[script] + " --run-name whole")
    assert codes == [0, 0], words
    assert words[0] and not words[1] and os.path.isfile(os.path.join(whole, "results.json"))
    codes, words = run(tmp_path, script, LINES[script] + " --run-name parts", stop)
    assert codes == [143, 143], words
    assert "go on with: python" in words[0] and not words[1]
    assert differences(checkpoint(whole), checkpoint(parts))
    codes, words = run(tmp_path, script, f"--resume {parts}")
    assert codes == [0, 0], words
    assert not differences(checkpoint(whole), checkpoint(parts))
    assert len(checkpoint(whole)["others"]) == 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a short run of two processes."""
    folder = tmp_path_factory.mktemp("finished")
    line = LINES[ppo].replace("512", "128") + " --run-name x"
    assert run(folder, ppo, line)[0] == [0, 0]
    return str(folder / "x")


def test_returns_are_those_of_all_processes(tmp_path):
    def work(rank):
        with ppo.Processes.together():
            returns = ppo.Returns(2, 1, "cpu")
            for reward in (1.0, 2.0):
                returns.add(torch.tensor([[reward + 10 * rank], [0.0]]), torch.tensor([True, False]))
                returns.take()
            return returns.last.flatten().tolist()

    codes, words, results = together(tmp_path, work)
    assert codes == [0, 0] and results[0] == [1, 11, 2, 12], words


def test_another_number_of_processes_is_refused(tmp_path, finished):
    os.remove(os.path.join(finished, "results.json"))
    for size, are in ((1, 1), (3, 3)):
        codes, words = run(tmp_path, ppo, f"--resume {finished}", size=size)
        assert codes == [2] * size
        assert "".join(words) == f"error: --resume {finished}: that run has 2 processes, here are {are}\n"


def test_what_is_refused_is_told_once(tmp_path):
    codes, words = run(tmp_path, ppo, "--gamma 2")
    assert codes == [2, 2] and "".join(words) == "error: --gamma 2.0 must lie between 0 and 1\n"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_run(tmp_path, victim):
    """Within seconds, in one line; what was saved before is sound."""

    def die(rank):
        if rank == victim:
            at_call(ppo, "update", 2, lambda: os.kill(os.getpid(), signal.SIGKILL))

    begun = time.monotonic()
    codes, words = run(tmp_path, ppo, LINES[ppo] + " --save-every 0 --run-name x", die)
    assert time.monotonic() - begun < 20
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 1
    line = words[1 - victim].splitlines()[-1]
    assert line.endswith(f"go on with: python ppo_single_player.py --resume \"{tmp_path / 'x'}\"")
    assert "error: another process has ended, or cannot be reached" in line and "Traceback" not in "".join(words)
    assert checkpoint(tmp_path / "x")["run"]["true_steps"] == 256
    assert run(tmp_path, ppo, f"--resume {tmp_path / 'x'}")[0] == [0, 0]


def test_numbers_that_are_not_finite_in_one_process_end_all(tmp_path):
    def spoil(rank):
        before = ppo.ppo_loss
        if rank == 1:
            ppo.ppo_loss = lambda *args: [part * torch.nan if torch.is_tensor(part) else part for part in before(*args)]

    codes, words = run(tmp_path, ppo, LINES[ppo] + " --run-name x", spoil)
    assert codes == [1, 1] and sum("is not finite" in text for text in words) == 1
    assert os.path.isfile(tmp_path / "x" / "not-finite.pt")


def test_episodes_that_differ_in_number_by_process(tmp_path):
    line = LINES[ppo].replace("--num-steps 16", "--buffer episodes --buffer-size 200") + " --run-name x"
    codes, words = run(tmp_path, ppo, line)
    assert codes == [0, 0], words
    saved = checkpoint(tmp_path / "x")
    assert saved["run"]["true_steps"] >= 512


def test_torchrun(tmp_path):
    """Whatever OMP_NUM_THREADS says, which torchrun sets where nobody else does: --threads counts."""
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                           os.path.join(ROOT, "train_world_model.py"), *LINES[world].split(), "--run-name", "x",
                           "--runs-dir", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Everything is in") == 1
    assert sorted(os.listdir(tmp_path)) == ["x"] and checkpoint(tmp_path / "x")["made_with"]["threads"] == 1
    with open(tmp_path / "x" / "results.json", encoding="utf-8") as file:
        assert json.load(file)["updates"] == 40
