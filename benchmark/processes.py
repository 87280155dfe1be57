"""What a second process brings: steps a second of one run, of two runs side by side, and of one run of two processes.

    python benchmark/processes.py                          two minutes on two idle cores
    python benchmark/processes.py --only hop --seconds 60
    python benchmark/processes.py --paper                  what is sent per update, for larger networks (no runs)

Every run has the flags of its script, with `--num-envs` for each process, and is stopped when it has learned for
`--seconds`; its speed is that of its last updates (the first half is left out). What was measured stays in
`--folder`; the same command goes on with what is missing. Machines that do other things give other figures.
"""

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time

from common import run_command

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")

SCRIPTS = {
    "ppo": ("ppo_single_player.py", "--players ppo ppo ppo ppo --total-timesteps 1000000000", "charts/SPS"),
    "hop": ("hopplus_selfplay.py", "--total-timesteps 1000000000", "charts/SPS"),
    "vae": ("pretrain_vae.py", "--epochs 1000", "charts/SPS"),
    "world": ("train_world_model.py", "--num-updates 1000000", "charts/UPS"),
}
WAYS = {"one run": (1, 1), "two runs side by side": (2, 1), "one run of two processes": (1, 2)}  # runs, processes


@dataclasses.dataclass
class Args:
    only: tuple[str, ...] = ("ppo", "hop")
    """which scripts: ppo, hop"""
    seconds: float = 20.0
    """for which each run learns"""
    repeats: int = 1
    """measurements of each row"""
    folder: str = "runs/processes"
    """where runs and figures are kept"""
    paper: bool = False
    """count parameters, and compute from which size on a network would be held up by what is sent"""


def begin(script, flags, processes, runs_dir, name):
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    with open(os.path.join(runs_dir, name + ".out"), "w", encoding="utf-8") as out:
        return subprocess.Popen([*start, os.path.join(ROOT, script), *flags.split(), "--run-name", name, "--runs-dir",
                                 runs_dir], stdout=out, stderr=out)


def points(folder):
    """What a run has told TensorBoard so far: {tag: [(step, wall time, value)]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.wall_time, event.value) for event in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]}


def measure(name, runs, processes, seconds, folder, number):
    """-> steps a second of all runs together, the shares of the time that are communication and waiting"""
    script, flags, tag = SCRIPTS[name]
    names = [f"{name}-{runs}-{processes}-{number}-{run}-{int(time.time())}" for run in range(runs)]
    started = [begin(script, f"{flags} --seed {run + 1}", processes, folder, each) for run, each in enumerate(names)]
    until, learning = None, {}
    while until is None or time.time() < until:
        time.sleep(1)
        if any(process.poll() is not None for process in started):
            raise SystemExit(f"a run has ended too early: see {os.path.join(folder, names[0])}.out")
        if until is None and all(os.path.isdir(os.path.join(folder, each)) for each in names):
            learning = {each: points(os.path.join(folder, each)) for each in names}
            if all(tag in told for told in learning.values()):
                until = time.time() + seconds
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        process.wait(120)
    speed, shares = 0.0, [0.0, 0.0]
    for each in names:
        told = points(os.path.join(folder, each))
        half = told[tag][len(told[tag]) // 2:]
        last = told[tag][-1]
        if last is half[0]:
            raise SystemExit(f"--seconds {seconds:g} is too short: {each} has told its speed {len(told[tag])} times")
        speed += (last[0] - half[0][0]) / (last[1] - half[0][1])
        since = half[0][1]
        for part, what in enumerate(("time/communication", "time/waiting")):
            spent = sum(value for _, wall, value in told.get(what, ()) if wall > since)
            shares[part] += spent / (last[1] - since) / runs
    return speed, *shares


def table(args, measured):
    for name in args.only:
        rows = {way: measured.get(f"{name} {way}", []) for way in WAYS}
        if not all(rows.values()):
            continue
        speeds = {way: statistics.median(measure[0] for measure in row) for way, row in rows.items()}
        one, two, joined = speeds.values()
        print(f"\n{SCRIPTS[name][0]}, median of {min(map(len, rows.values()))}")
        for way, speed in speeds.items():
            print(f"  {way:26}{speed:9.0f} steps/s  {speed / one:5.2f} times one run")
        communication, waiting = (statistics.median(measure[number] for measure in rows["one run of two processes"])
                                  for number in (1, 2))
        print(f"  two processes reach {joined / two:.2f} of what two runs reach; communication {communication:.1%} of the "
              f"time, process 0's waiting for the slower one {waiting:.1%}")


def main(args):
    if args.paper:
        return paper()
    os.makedirs(args.folder, exist_ok=True)
    path = os.path.join(args.folder, "measured.json")
    measured = json.load(open(path, encoding="utf-8")) if os.path.isfile(path) else {}
    for number in range(args.repeats):
        for name in args.only:
            for way, (runs, processes) in WAYS.items():
                row = measured.setdefault(f"{name} {way}", [])
                if len(row) <= number:
                    row.append(measure(name, runs, processes, args.seconds, args.folder, number))
                    with open(path + ".new", "w", encoding="utf-8") as file:
                        json.dump(measured, file, indent=2)
                    os.replace(path + ".new", path)
                    print(f"{name}, {way}: {row[-1][0]:.0f} steps/s")
    table(args, measured)


def count(*networks):
    return sum(part.numel() for network in networks for part in network.parameters())


def cases():
    """The lessons of the scripts: name -> (make, times), where make(hidden_size) gives networks and a function that
    learns once from a minibatch of today's size, and `times` is how often an update (or a step) does that."""
    import torch

    import hopplus_selfplay as hop
    import ppo_single_player as ppo
    import pretrain_vae as vae
    import train_world_model as world

    torch.set_num_threads(1)

    def learner(network, losses):
        def learn():
            losses().sum().backward()
        return network, learn

    def policies(size):
        args = ppo.Args(players=("ppo",) * 4, hidden_size=size)
        table = ppo.Table(args, 256, 1)
        x = table.views.look(table.game.state()).repeat(1, 8, 1)  # 2,048 samples of each learner
        return learner(table.agent, lambda: sum(part.sum() for part in table.agent(x)))

    def hop_policies(size):
        args = hop.Args(hidden_size=size)
        table = hop.Table(args, 484, 1)
        seen = table.look()
        x, told = seen["x"].repeat(1, 6, 1), seen["told"].repeat(1, 6, 1)  # 2,904 samples of each learner
        policy = table.networks.policy
        return learner(policy, lambda: sum(part.sum() for part in policy(x, told)))

    def hop_others(size):
        args = hop.Args(hidden_size=size)
        table = hop.Table(args, 44, 1)  # 44 stretches
        others = table.networks.others
        pairs, steps = len(table.pairs), args.num_steps
        lesson = {"x": table.views.look(table.game.state())[table.pairs][:, None].expand(-1, steps, -1, -1),
                  "action": torch.full((pairs, steps, 44), hop.STAY), "memory": table.memory,
                  "seen": torch.ones(pairs, steps, 44, dtype=torch.bool), "goal_mean": torch.zeros(pairs, steps, 44, 16),
                  "goal_logvar": torch.zeros(pairs, steps, 44, 16)}
        lesson["weight"] = lesson["seen"]
        return learner(others, lambda: hop.others_loss(others, lesson, torch.Generator())["loss"])

    def goals(size):
        args = vae.Args(hidden_size=size, vae_size=2 * size, episodes=64)
        samples = vae.make_samples(dataclasses.replace(args, held_out_episodes=8))[2]
        run = vae.Run(args, 256)
        return run.networks, lambda: vae.learn(args, run, samples, torch.arange(len(samples["length"])))

    def world_model(size):
        board = world.parse_board("4x4", world.Args())
        rows = world.collect(board, 1024, 1)
        model = world.WorldModel(size, world.common_rewards(rows["reward"]), world.others_pay(rows))
        return learner(model, lambda: sum(part.sum() for part in model.loss(rows).values()))

    return {"ppo_single_player.py, four learners": [(policies, 8)],
            "hopplus_selfplay.py, four players": [(hop_policies, 24), (hop_others, 16)],
            "pretrain_vae.py": [(goals, 1)], "train_world_model.py": [(world_model, 1)]}


def hidden_size(make, larger):
    """The hidden size with which a network has so many times the parameters that it has with 64."""
    import numpy as np

    sizes = (32, 64, 128)  # their number is a polynomial of the second degree
    square, line, rest = np.polyfit(sizes, [count(make(size)[0]) for size in sizes], 2)
    return round(max(np.roots([square, line, rest - larger * np.polyval([square, line, rest], 64)]).real))


def paper():
    """What is sent in an update beside the CPU seconds of one thread that its learning takes.

    A ring of n processes sends 2 (n - 1) / n times the gradient: once with two of them, almost twice with many,
    which is what is counted here. 1 Gbit/s are 125 MB/s."""
    for name, parts in cases().items():
        for larger in (1, 10, 100):
            parameters = sent = seconds = 0.0
            for make, times in parts:
                network, learn = make(64 if larger == 1 else hidden_size(make, larger))
                learn()
                repeats = 5 if larger == 1 else 1
                begun = time.process_time()
                for _ in range(repeats):
                    learn()
                seconds += times * (time.process_time() - begun) / repeats
                parameters += count(network)
                sent += 2 * 4 * count(network) * times
            gigabit = sent / 125e6
            print(f"{name:38}{parameters:14,.0f} parameters{sent / 1e6:10.2f} MB sent{seconds:9.3f} s to learn, "
                  f"1 Gbit/s {gigabit:8.3f} s ({gigabit / (gigabit + seconds):.0%}); 5 % needs "
                  f"{sent * 8 / (seconds * 0.05 / 0.95) / 1e9:.1f} Gbit/s", flush=True)


if __name__ == "__main__":
    run_command(main, Args, __doc__)
