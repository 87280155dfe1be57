"""Kills workers again and again while they make runs, and looks whether one was ever made twice at once.

    python benchmark/kill_workers.py                20 kills, about a minute
    python benchmark/kill_workers.py --kills 100

Three workers with two runs each share a folder. In place of training, a stand-in counts to a number, notes each
step, and each time that it saves, which is at every tenth step. In turns a worker is told to stop, killed alone, killed together with
its runs (as when the power fails), and one of its runs is held up until others take it over, and let go on then.
A worker that has gone is replaced at once. Where workers end by themselves while others have runs left, the killing
goes on with a new folder. Exit code 0 if every run came to its end, no two processes ever worked on one at once, and
no run lost more than the steps since it last saved. One that was held up may go on for a moment until it sees that
its run is another's (half a second is allowed), but must not save.
"""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from common import run_command
from workers import Run, Timing, work

SAVES = 10  # steps between two of the stand-in's checkpoints
TIMING = Timing(beat=0.2, stale=2.0, look=0.3)
STAND_IN = f'''
import json, os, signal, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = words.get("--resume") or os.path.join(words["--runs-dir"], words["--run-name"])
os.makedirs(folder, exist_ok=True)
step, path = 0, os.path.join(folder, "checkpoint.pt")

def note(what):
    with open(os.path.join(folder, "..", "steps-" + os.path.basename(folder)), "a") as file:
        file.write(f"{{os.getpid()}} {{step}} {{time.time()}} {{what}}\\n")

def save(name="checkpoint.pt"):
    with open(path + ".new", "w") as file:
        json.dump(step, file)
    os.replace(path + ".new", os.path.join(folder, name))
    note("saved")

def leave(*_):
    save()
    os._exit(143)

if os.path.exists(path):
    with open(path) as file:
        step = json.load(file)
signal.signal(signal.SIGTERM, leave)
while True:
    note("stepped")
    if step == int(os.environ["STEPS"]):
        save("results.json")
        break
    time.sleep(0.05)
    step += 1
    if step % {SAVES} == 0:
        save()
'''


@dataclasses.dataclass
class Args:
    kills: int = 20
    """workers or runs to kill"""
    steps: int = 100
    """steps of each run, twenty a second"""
    runs: int = 6
    """runs in a folder"""
    seed: int = 1
    """seed of who is killed when"""
    worker: str | None = None
    """be one of the workers, in this folder (what this program itself starts)"""


def runs_of(args, folder):
    return [Run(f"run-{number}", "", os.path.join(folder, "stand_in.py")) for number in range(args.runs)]


def start(args, folder):
    """A worker, a process of its own."""
    words = ["--worker", folder, "--runs", str(args.runs)]
    return subprocess.Popen([sys.executable, os.path.abspath(__file__), *words], stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL, env={**os.environ, "STEPS": str(args.steps)})


def trace(folder, name):
    """What the processes of a run did: [(process, step, time, what)], in order of their writing."""
    path = os.path.join(folder, f"steps-{name}")
    if not os.path.isfile(path):
        return []
    with open(path, encoding="utf-8") as file:
        lines = [line.split() for line in file if line.endswith("\n")]
    return [(int(process), int(step), float(at), what) for process, step, at, what in lines]


def at_work(args, folder):
    """The processes that make a run now, by run."""
    last = {run.name: trace(folder, run.name)[-1:] for run in runs_of(args, folder)}
    return {name: row[0][0] for name, row in last.items()
            if row and time.time() - row[0][2] < 0.3 and row[0][1] < args.steps - 5}


def strike(args, folder, workers, how, chance):
    """Kills somebody. -> whether there was anybody to kill"""
    busy = at_work(args, folder)
    if not busy:
        return False
    name, process = chance.choice(sorted(busy.items()))
    worker = chance.choice(workers)
    if how == "held up" and os.name != "nt":
        os.kill(process, signal.SIGSTOP)
        time.sleep(TIMING.stale + 1.5)
        os.kill(process, signal.SIGCONT)
    elif how == "stopped":
        worker.terminate()
    else:
        worker.kill()
        if how == "with its runs":
            os.kill(process, signal.SIGTERM if os.name == "nt" else signal.SIGKILL)
    return True


def spans_of(rows):
    """When each process of a run was at work, and at which steps: [[first time, last time, first step, last
    step]] in order; and whether one that was held up did more than to notice it."""
    spans, woke, wrong = {}, {}, False
    for process, step, at, what in rows:
        span = spans.setdefault(process, [at, at, step, step])
        if at - span[1] > TIMING.stale and process not in woke and any(span[1] < row[2] < at and row[0] != process
                                                                        for row in rows):
            woke[process] = at  # it was held up, and another has the run
        if process in woke:
            wrong = wrong or what == "saved" or at - woke[process] > 0.5
        else:
            span[1], span[3] = at, step
    return sorted(spans.values()), wrong


def faults(args, folder):
    """What is wrong with the runs of a folder that is done: a list of sentences."""
    found = []
    for run in runs_of(args, folder):
        spans, wrong = spans_of(trace(folder, run.name))
        if wrong:
            found.append(f"{run.name} was held up, and then went on although it was another's")
        for before, after in zip(spans, spans[1:]):
            if after[0] < before[1]:
                found.append(f"{run.name} was made twice at once")
            if after[2] < before[3] // SAVES * SAVES or after[2] > before[3] + 1:
                found.append(f"{run.name} went on at {after[2]} after {before[3]}")
        if not os.path.isfile(os.path.join(folder, run.name, "results.json")):
            found.append(f"{run.name} did not come to its end")
    return found


def kill(args, folder, left, chance):
    """Lets workers make the runs of a folder, with kills. -> how many there were"""
    with open(os.path.join(folder, "stand_in.py"), "w", encoding="utf-8") as file:
        file.write(STAND_IN)
    kinds, killed = ("stopped", "alone", "with its runs", "held up"), 0
    workers = [start(args, folder) for _ in range(3)]
    while any(worker.poll() is None for worker in workers):
        time.sleep(chance.uniform(0.5, 1.5))
        if killed < left and strike(args, folder, workers, kinds[(left - killed) % len(kinds)], chance):
            killed += 1
        done = all(os.path.isfile(os.path.join(folder, run.name, "results.json")) for run in runs_of(args, folder))
        if not done:
            workers = [start(args, folder) if worker.poll() is not None else worker for worker in workers]
    return killed


def main(args):
    if args.worker:
        return work(args.worker, runs_of(args, args.worker), 2, timing=TIMING)
    chance, killed, found, folders, begun = random.Random(args.seed), 0, [], 0, time.perf_counter()
    while killed < args.kills and folders < args.kills:
        folder = tempfile.mkdtemp()
        killed += kill(args, folder, args.kills - killed, chance)
        found += faults(args, folder)
        folders += 1
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{killed} kills, {folders * args.runs} runs, {time.perf_counter() - begun:.0f} s: "
          + ("; ".join(found) or "none was made twice at once, none lost more than what was not saved"))
    return 1 if found or killed < args.kills else 0


if __name__ == "__main__":
    run_command(main, Args, __doc__)
