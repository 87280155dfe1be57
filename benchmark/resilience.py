"""Kills, damages and misleads short runs of all scripts, and counts what is lost or goes wrong without a word.

    python benchmark/resilience.py                             every claim, with its full count (some hours)
    python benchmark/resilience.py --only killed --count 5     one claim, five kills in each script

Each trial's outcome is appended to `<folder>/trials.jsonl` as it comes; what stands there is not tried again. The
table is printed at the end and kept in `<folder>/resilience.md`. Every run is a process of its own, forked from this
one, which has the slow imports behind it (so this needs Linux or macOS); it is a whole run of a script, but short: a
few updates of small networks, small pictures, and a checkpoint after each update. The moments of kills and signals
are counted in seconds of the processor, so that they fall into the run however busy the machine is.
"""

import builtins
import copy
import dataclasses
import errno
import functools
import gc
import glob
import importlib
import inspect
import io
import itertools
import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import types
import typing

os.environ.setdefault("TQDM_DISABLE", "1")
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import numpy as np
import torch
import tyro
from PIL import Image
from tqdm import tqdm

TESTER = "test_obs_reward_model"
SMALL = {
    "ppo_single_player": "--total-timesteps 384 --num-envs 8 --num-steps 16 --eval-episodes 20 --hidden-size 8",
    "pretrain_vae": "--episodes 40 --held-out-episodes 20 --epochs 2 --batch-size 64 --hidden-size 8 --vae-size 8",
    "train_world_model": "--boards 4x4 --rows 1000 --held-out-rows 200 --num-updates 20 --check-every 10 "
                         "--batch-size 64 --hidden-size 8",
    "hopplus_selfplay": "--total-timesteps 128 --num-envs 8 --num-steps 8 --warmup-meetings 8 --eval-episodes 8 "
                        "--eval-policy-episodes 16 --hidden-size 8 --vae-size 8 --num-simulations 4 --num-trees 2 "
                        "--imagined-per-real 2 --moa-minibatches 2 --num-minibatches 2 --buffer-size 256",
    TESTER: "--rows 500 --rollouts 20 --samples 1",
}
TRAINERS = tuple(name for name in SMALL if name != TESTER)
TIMES = {"seconds", "warmup_seconds", "sps", "cpu_seconds"}  # what two runs of one seed may differ in
NAMES = {"run_name", "runs_dir", "resume", "checkpoint"}
TIME_TAGS = ("time/", "charts/SPS", "charts/UPS", "mcts/simulations_per_second")
SAID = ("go on with: python", "nothing was written", "is not complete")  # how to go on, in the line of a signal


@dataclasses.dataclass
class Args:
    only: tuple[str, ...] = ()
    """names of the claims to try; none given: all"""
    scripts: tuple[str, ...] = ()
    """names of the scripts to try them on; none given: all"""
    count: int | None = None
    """trials of each claim and script; without it, the full count"""
    folder: str = os.path.join("runs", "benchmark-resilience")
    """where the trials' outcomes and the table go, and the runs, under runs/"""


# ------------------------------------------------------------------------------------------------- short runs


@functools.cache
def get_ready():
    """Does once what each run would else do again: slow imports."""
    for name in ("torch._dynamo", "torch.utils.tensorboard", "torch.utils.tensorboard.summary", "matplotlib.pyplot",
                 "matplotlib.backends.backend_agg", "PIL.GifImagePlugin", "PIL.PngImagePlugin", "PIL.ImageDraw",
                 "PIL.ImageFont"):
        importlib.import_module(name)
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    gc.freeze()


source_of = functools.cache(inspect.findsource)


PICTURE = b"GIF89a\1\0\1\0\0\0\0,\0\0\0\0\1\0\1\0\0\2\1\0\0;"  # one point


def plain_figure(title, width, height, columns=1):
    """What pretrain_vae draws on, small and without letters."""
    from matplotlib.figure import Figure

    result = Figure(figsize=(2, 1), dpi=30)
    axes = result.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.set_axis_off()
    return result, axes


def shorten(module, script):
    """Shortens a script's warm-up and last scores, and makes its pictures small; only in the processes of runs."""
    if hasattr(module, "draw_board"):
        module.draw_board.__defaults__ = ("", 16)
    if script == "pretrain_vae":
        module.figure = plain_figure
    if script == TESTER:
        module.plot = lambda *_: types.SimpleNamespace(savefig=lambda file, dpi: file.write(PICTURE))
    if script == "hopplus_selfplay":
        module.record_game = lambda *_: [Image.new("RGB", (8, 8))]
        module.WORLD_STEPS, module.WORLD_UPDATES, module.WARMUP_EPOCHS = 200, 10, 1
        module.report_models.__wrapped__.__defaults__, module.score_world.__wrapped__.__defaults__ = (40, 2), (200,)
    return module


def start(script, line, log, fault=None, place=None):
    """Begins a run in a process of its own, its output in `log`.out and `log`.err. -> number of the process"""
    get_ready()
    module = importlib.import_module(script)
    for group in module.Args.__mro__[:-1]:  # which tyro reads for --help at every start
        source_of(group)
    stops = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    process = os.fork()
    if process:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        return process
    code = 70
    try:
        for number, end in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{log}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout = open(1, "w", closefd=False, encoding="utf-8")
        sys.stderr = open(2, "w", closefd=False, encoding="utf-8", errors="backslashreplace")
        tqdm.set_lock(threading.RLock())  # forks share the one they begin with: who is killed holds it for ever
        torch.set_num_threads(1)
        os.chdir(place or ".")
        shorten(module, script)
        inspect.findsource = source_of
        module.Interrupt.watch()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
        sys.argv = [f"{script}.py", *line]
        if fault:
            fault(module)
        module.run_script(module.Args, module.main)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def worked(process, since):
    """The seconds that a process has had of the processor (of the clock, where that is not told)."""
    try:
        return time.clock_gettime(-8 * process - 6)  # Linux: the clock of another process
    except OSError:
        return time.monotonic() - since


def wait(process, seconds=300, work=math.inf):
    """-> the exit code, minus the signal's number where one killed it; None if it goes on after so many seconds,
    or after so many of the processor's"""
    since = time.monotonic()
    while time.monotonic() < since + seconds:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if worked(process, since) > work:
            return None
        time.sleep(0.002)
    return None


def finish(script, line, log, fault=None, seconds=300, place=None):
    """A whole run. -> exit code, what it told on stderr"""
    process = start(script, line, log, fault, place)
    code = wait(process, seconds)
    if code is None:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return code, told(log)


def told(log):
    """The lines on stderr, without progress bars."""
    with open(f"{log}.err", encoding="utf-8", errors="replace") as file:
        lines = file.read().replace("\r", "\n").split("\n")
    return [line for line in lines if line.strip() and "%|" not in line]


def one_line(code, lines, codes=(2,)):
    """Whether a script ended as it should that was given something wrong."""
    return code in codes and len(lines) == 1 and lines[0].startswith("error: ")


def noise(lines):
    """What a run that went well should not have told."""
    return [line for line in lines if not line.startswith("warning: ")]


def runs_of(args, name):
    """Where a run of this name goes."""
    os.makedirs(os.path.join(args.folder, "runs"), exist_ok=True)
    return os.path.join(args.folder, "runs", name)


def command(script, folder, *more):
    """The flags of a short run into a folder; the tester tests the undisturbed run beside it."""
    where = ["--checkpoint", os.path.join(os.path.dirname(folder), "train_world_model-undisturbed")]
    where = where if script == TESTER else ["--save-every", "0", "--final-time", "10"]
    return [*SMALL[script].split(), *where, "--runs-dir", os.path.dirname(folder), "--run-name",
            os.path.basename(folder), *more]


def go_on(script, folder):
    """The command that goes on with a run: the first again where it had left nothing."""
    return ["--resume", folder] if os.path.isdir(folder) else command(script, folder)


def reference(args, script):
    """A run that nothing disturbs. -> its folder, the processor's seconds that it takes"""
    folder = runs_of(args, f"{script}-undisturbed")
    if not os.path.isfile(folder + ".json"):
        if script == TESTER:
            reference(args, "train_world_model")
        shutil.rmtree(folder, ignore_errors=True)
        before = os.times()
        code, lines = finish(script, command(script, folder), folder)
        if code or lines:
            raise SystemExit(f"{script} does not run: exit code {code}, {lines}")
        after = os.times()
        with open(folder + ".json", "w", encoding="utf-8") as file:
            json.dump(after.children_user + after.children_system - before.children_user - before.children_system, file)
    with open(folder + ".json", encoding="utf-8") as file:
        return folder, json.load(file)


def timeless(part):
    """Content without times and without the run's own name."""
    if isinstance(part, dict):
        return {key: timeless(value) for key, value in part.items() if key not in TIMES | NAMES}
    return [timeless(value) for value in part] if isinstance(part, (list, tuple)) else part


def equal(one, two):
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return isinstance(two, list) and len(one) == len(two) and all(map(equal, one, two))
    return one == two or one != one and two != two


def points(folder):
    """What TensorBoard shows of a run: (tag, step, value) of all scalars that tell no times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(folder, size_guidance={"scalars": 0, "images": 1, "tensors": 1})
    events.Reload()
    return {(tag, point.step, repr(point.value)) for tag in events.Tags()["scalars"]
            if not tag.startswith(TIME_TAGS) for point in events.Scalars(tag)}


def read(folder, name):
    """A file of a run, without times."""
    path = os.path.join(folder, name)
    if name.endswith(".json"):
        with open(path, encoding="utf-8") as file:
            return timeless(json.load(file))
    if name.endswith(".pt"):
        return timeless(torch.load(path, weights_only=True))
    with open(path, "rb") as file:
        return file.read()


def files(folder):
    """The files of a run by name, but for those of TensorBoard, of which there are more after a resume."""
    found = glob.glob("**", root_dir=folder, recursive=True)
    return sorted(name for name in found if os.path.isfile(os.path.join(folder, name)) and "tfevents" not in name)


@functools.lru_cache(8)
def undisturbed(folder):
    """What a run left: its files and its points; kept, for every trial compares with it."""
    return {name: read(folder, name) for name in files(folder)}, points(folder)


def differences(folder, other):
    """What a run differs in from another that should be the same. It may have more pictures, of the moment when it was
    stopped; and its checkpoint before the last the last's content, where it was resumed just before its end."""
    theirs, shown = undisturbed(other)
    found = [name for name in files(folder) if name not in theirs and not name.startswith("pictures")]
    found += [name for name in theirs if name != "checkpoint-before.pt" and not (
        os.path.isfile(os.path.join(folder, name)) and equal(read(folder, name), theirs[name]))]
    return found + ([] if points(folder) == shown else ["TensorBoard"])


# ------------------------------------------------------------------------------------------------- trials
# Each takes (args, script, number) -> what went wrong, "" if nothing, None if there is no such trial; or, where it
# tries many times in a run, how often by the moment. A trial is reproducible from its number but for the very
# moments of kills and signals.


def at_writes(calls, act):
    """A fault: act(number, path, go_on, half) is called in place of the number-th of those calls, named in
    `calls`, by which something comes to the disk. go_on() does what the script asked, half() writes half of it."""
    def fault(module):
        count, real = itertools.count(1), builtins.open

        def watched(name, own):
            if name not in calls:
                return own
            return lambda *parts, **named: act(next(count), parts[0], lambda: own(*parts, **named), lambda: None)

        class Watched(io.FileIO):
            def write(self, data):
                write = super().write
                data = bytes(data)
                if "write" not in calls:
                    return write(data)
                return act(next(count), self.name, lambda: write(data), lambda: write(data[:len(data) // 2]))

        def opened(path, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **named):
            if not set(mode) & set("wax+") or str(path).endswith((".out", ".err")):
                return real(path, mode, buffering, encoding, errors, newline, **named)
            if "open" in calls:
                act(next(count), path, lambda: None, lambda: None)
            raw = Watched(path, mode.replace("b", "").replace("t", ""))
            file = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return file if "b" in mode else io.TextIOWrapper(file, encoding, errors, newline)

        builtins.open = io.open = opened
        for name in ("fsync", "replace", "rename", "mkdir"):
            setattr(os, name, watched(name, getattr(os, name)))
    return fault


def dies_while_saving(number):
    """A fault: the process kills itself at some call by which something comes to the disk, half of it written."""
    def act(count, path, go_on, half):
        if count == number:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        return go_on()
    return at_writes(("open", "write", "fsync", "replace", "rename", "mkdir"), act)


def dies_in_the_evaluation(work):
    """A fault: the process kills itself when it has worked for so many seconds on its evaluation."""
    def fault(module):
        def deadly(until):
            while time.process_time() < until:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

        def report(*parts, own=module.report):
            threading.Thread(target=deadly, args=(time.process_time() + work,), daemon=True).start()
            return own(*parts)
        module.report = report
    return fault


def moment(folder, whole):
    """Where a run was left, told from what it left."""
    path = os.path.join(folder, "checkpoint.pt")
    if not os.path.isfile(path):
        early = not os.path.isfile(path.replace(".pt", "-before.pt"))
        return "before the first checkpoint" if early else "in training"
    over = equal(read(folder, "checkpoint.pt"), undisturbed(whole)[0]["checkpoint.pt"])
    return "in the evaluation" if over else "in training"


def killed(args, script, number, kills=5):
    """SIGKILL, `kills` times in a run, a third of them during a write, a sixth in the evaluation. -> how often by the
    moment"""
    whole, work = reference(args, script)
    draw, folder = random.Random(f"killed {script} {number}"), runs_of(args, f"{script}-killed")
    shutil.rmtree(folder, ignore_errors=True)
    count = {}
    while sum(count.values()) < kills:
        saving, when = draw.random() < 1 / 3, draw.uniform(0.1, 0.6)
        fault = dies_while_saving(draw.randint(1, 30)) if saving else None
        if not saving and draw.random() < 1 / 4:
            fault = dies_in_the_evaluation(0.2 * when * work)
        process = start(script, go_on(script, folder), folder, fault)
        code = wait(process, work=math.inf if fault else when * work)
        if code is None:
            os.kill(process, signal.SIGKILL)
            code = wait(process)
        if code == 0:
            break
        if code != -signal.SIGKILL or noise(told(folder)):
            return f"exit code {code}: {told(folder)}"
        when = "in a write" if saving else moment(folder, whole)
        count[when] = count.get(when, 0) + 1
    code, lines = finish(script, go_on(script, folder), folder)
    wrong = [f"exit code {code}: {lines}"] if code or noise(lines) else differences(folder, whole)
    return ", ".join(wrong) or count


def listens(process):
    """Waits until a process has handlers of its own for signals, which Python itself needs a while for."""
    for _ in range(1000):
        try:
            with open(f"/proc/{process}/status", encoding="utf-8") as file:
                caught = next(line for line in file if line.startswith("SigCgt:"))
            if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
                return
        except OSError:  # not Linux, which alone tells
            return time.sleep(1)
        time.sleep(0.01)


def signalled(args, script, number, which, twice, signals=8):
    """Ctrl-C or SIGTERM at random moments, once or twice, `signals` times in a run; the first of every fifth run in
    a process that begins with its imports. -> how often by the moment"""
    whole, work = reference(args, script)
    draw, folder = random.Random(f"signalled {script} {number} {which} {twice}"), runs_of(args, f"{script}-signalled")
    shutil.rmtree(folder, ignore_errors=True)
    count, fresh = {}, number % 5 == 0
    while sum(count.values()) < signals:
        if fresh:
            line = [sys.executable, os.path.join(ROOT, script + ".py"), *command(script, folder)]
            with open(folder + ".err", "wb") as err, open(folder + ".out", "wb") as out:
                process = subprocess.Popen(line, stdout=out, stderr=err).pid
            listens(process)
        else:
            process = start(script, go_on(script, folder), folder)
        code = wait(process, work=draw.uniform(0, 3) if fresh else draw.uniform(0, 0.4) * work)
        if code == 0 and not fresh:
            break
        pause = draw.choice((0, 0.01, 0.1))
        sent = time.monotonic()
        for _ in range(1 + twice) if code is None else ():
            try:
                os.kill(process, which)
            except ProcessLookupError:
                break
            time.sleep(pause)
        code = wait(process) if code is None else code
        took, lines = time.monotonic() - sent, noise(told(folder))
        with open(folder + ".out", encoding="utf-8") as file:
            said = lines + [line for line in file.read().split("\n") if line.startswith("stopped")]
        if code not in (0, 128 + which) or code and (len(said) != 1 or not any(words in said[0] for words in SAID)):
            return f"exit code {code}: {said}"
        if took > 30:
            return f"it took {took:.0f} s to stop"
        if code:
            when = "in the imports" if fresh and "nothing was written" in said[0] else moment(folder, whole)
            count[when] = count.get(when, 0) + 1
        if fresh:  # what it has written is not as short as that of the others
            shutil.rmtree(folder, ignore_errors=True)
        fresh = False
    code, lines = finish(script, go_on(script, folder), folder)
    wrong = [f"exit code {code}: {lines}"] if code or noise(lines) else differences(folder, whole)
    return ", ".join(wrong) or count


def damaged(args, script, number):
    """One bit of a checkpoint is turned, or its end cut off: refused, or the one before is used with a warning."""
    whole, _ = reference(args, script)
    draw, folder = random.Random(f"damaged {script} {number}"), runs_of(args, f"{script}-damaged")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    before = number % 2 == 0
    for name in ("config.json", "checkpoint.pt") + ("checkpoint-before.pt",) * before:
        shutil.copy(os.path.join(whole, name), folder)
    path = os.path.join(folder, "checkpoint.pt")
    with open(path, "rb") as file:
        content = bytearray(file.read())
    if draw.random() < 0.5:
        content = content[:draw.randrange(len(content))]
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    with open(path, "wb") as file:
        file.write(content)
    module = importlib.import_module(script)
    error, sys.stderr = sys.stderr, io.StringIO()
    try:
        module.load_run(module.resolve_flags(module.Args(resume=folder)))
        good = before and sys.stderr.getvalue().startswith("warning: ")
    except module.Refused as refusal:
        good = not before and "\n" not in str(refusal)
    finally:
        error, sys.stderr = sys.stderr, error
    return "" if good else "taken without a word"


def bad_configs(config):
    """What could stand in a run's config.json instead of what does: the whole file, then field by field (missing,
    of a wrong type, out of range, another one than the checkpoint's)."""
    for text in ("", "{", "[]", "null", "17", '"x"', json.dumps({**config, "script": "x.py"}), "\0\0", "[" * 100_000,
                 '{"height": ' + "9" * 5000 + "}", json.dumps({**config, "unknown": 1}), json.dumps([config]),
                 json.dumps({key: value for key, value in config.items() if key != "script"})):
        yield text
    for key, value in config.items():
        if key in ("script", "version"):  # done; and any version that has the same flags will do
            continue
        if key == "resume":
            others = [5, {"x": 1}]
        elif key in ("threads", "save_every", "total_timesteps", "epochs"):  # which may change within reason
            others = [{"x": 1}, "x", None, -1, math.nan, [None], True]
            others += [value - 1] if key in ("total_timesteps", "epochs") else []
        else:
            others = [{"x": 1}, "x", "\udc80", -1, math.nan, 1e300, 10**30, [None], [[]], not value]
            others += [None] if value is not None else []
            others += [value + 1, float(value)] if type(value) is int else []
            others += [value * 1.5 + 1] if type(value) is float else []
            others += [value + value[-1:], value[1:]] if value and isinstance(value, list) else []
        yield json.dumps({name: each for name, each in config.items() if name != key})
        for other in random.Random(key).sample(others, 2):
            yield json.dumps({**config, key: other})


def configured(args, script, number):
    """A config.json that is damaged, of another script, or does not fit the checkpoint."""
    whole, _ = reference(args, script)
    folder = runs_of(args, f"{script}-configured")
    with open(os.path.join(whole, "config.json"), encoding="utf-8") as file:
        texts = list(bad_configs({**json.load(file), "run_name": os.path.basename(folder)}))
    if number >= len(texts):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        file.write(texts[number])
    before = sorted(os.listdir(folder))
    code, lines = finish(script, ["--resume", folder], folder)
    if one_line(code, lines) and sorted(os.listdir(folder)) == before:
        return ""
    with open(os.path.join(whole, "config.json"), encoding="utf-8") as file:
        config, text = json.load(file), texts[number]
    changed = [part for part in text[1:-1].split(', "') if part not in json.dumps(config)]
    return f"{str(changed if len(text) > 300 else text)[:200]}: exit code {code}: {lines[-3:]}"


ROWS = {
    "one row": lambda c: {name: part[:1] for name, part in c.items()},
    "no rows": lambda c: {name: part[:0] for name, part in c.items()},
    "rewards of 1e38": lambda c: {**c, "reward": c["reward"] + np.float32(1e38)},
    "rewards not finite": lambda c: {**c, "reward": c["reward"] * np.nan},
    "terminated 0.5": lambda c: {**c, "terminated": c["terminated"] * 0.5},
    "over 2": lambda c: {**c, "over": c["over"] + 2},
    "steps_left 1e12": lambda c: {**c, "steps_left": c["steps_left"] * 10**12 + 10**12},
    "step -1": lambda c: {**c, "step": c["step"] - 1},
    "no actions": lambda c: {name: part for name, part in c.items() if name != "actions"},
    "action 7": lambda c: {**c, "actions": c["actions"] + 7},
    "half a cell": lambda c: {**c, "observation": c["observation"] * 0.5},
    "text": lambda c: {**c, "reward": np.array(["x"] * len(c["reward"]))},
    "pickle": lambda c: {**c, "reward": np.array([None] * len(c["reward"]), dtype=object)},
    "jumps": lambda c: {**c, "next_observation": np.roll(c["next_observation"], 2, 1)},
    "other shape": lambda c: {**c, "step": c["step"][:, None]},
}


def misled(args, script, number):
    """Data files that are no data: wrong contents, arrays that are missing or text or too short, files cut short or
    with one bit turned."""
    folder, draw = runs_of(args, f"{script}-misled"), random.Random(f"misled {number}")
    world, path = importlib.import_module("train_world_model"), folder + ".npz"
    game = {field.name: field.default for field in dataclasses.fields(world.GameArgs)}
    world.save_data(path, world.collect({**game, "num_players": 4}, 200, number))
    with np.load(path) as file:
        content = dict(file)
    cases = {**ROWS}
    for name in content:
        if name != "next_steps_left":  # which is told from steps_left
            cases[f"no {name}"] = lambda c, name=name: {key: part for key, part in c.items() if key != name}
        cases |= {f"text in {name}": lambda c, name=name: {**c, name: np.full(c[name].shape, "x")},
                  f"{name} too short": lambda c, name=name: {**c, name: c[name][:-1]},
                  f"{name} of another shape": lambda c, name=name: {**c, name: c[name][..., None]}}
    names = [*cases, "empty", *(f"cut {trial}" for trial in range(10)), *(f"bit {trial}" for trial in range(10))]
    if number >= len(names):
        return None
    if names[number] in cases:
        np.savez(path, **cases[names[number]](content))
    else:
        with open(path, "rb+") as file:
            data = bytearray(file.read())
            if names[number].startswith("bit"):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            else:
                data = data[:draw.randrange(len(data)) if names[number] != "empty" else 0]
            file.seek(0)
            file.truncate()
            file.write(data)
    shutil.rmtree(folder, ignore_errors=True)
    line = ["--data", path, "--runs-dir", folder]
    line += ["--checkpoint", reference(args, "train_world_model")[0]] if script == TESTER else ["--num-updates", "5"]
    code, lines = finish(script, line, folder)
    fine = one_line(code, lines) and not os.path.exists(folder)
    if code == 0 and names[number].startswith("bit"):  # of a date or a name that nobody reads
        with np.load(path) as file:
            fine = all(np.array_equal(file[name], content[name]) for name in content)
    if script == TESTER and names[number] == "one row":  # which is enough to test on
        fine = fine or code == 0
    return "" if fine else f"{names[number]}: exit code {code}: {lines[-3:]}"


LATER = "    n = 0\n    def act(self, o, g):\n        self.n += 1\n        s = o['step']\n        if self.n > 10:\n" \
        "            {}\n        return s * 0\n"
AT_ONCE = "    def act(self, o, g):\n        s = o['step']\n        {}\n        return s * 0\n"
FAULTS = ("raise KeyError('x')", "1 / 0", "import sys; sys.exit(0)", "raise KeyboardInterrupt", "raise GeneratorExit",
          "raise MemoryError", "self.act(o, g)", "torch.zeros(10**15)", "return s * 0.5", "return s[1:]", "return None",
          "return [4] * len(s)", "return s[:, None]", "return torch.zeros(len(s), dtype=torch.int64, device='meta')",
          "raise ValueError('two\\nlines')", "raise type('E', (Exception,), {'__repr__': lambda self: 'two\\nlines'})",
          "raise type('E', (Exception,), {'__repr__': None})", "import nothing_such", "o['nothing']")
PLAYERS = {  # what is wrong -> (the exit codes that are right, the file)
    **{f"at once: {fault}": ((2,), AT_ONCE.format(fault)) for fault in FAULTS},
    **{f"later: {fault}": ((1,), LATER.format(fault)) for fault in FAULTS},
    "raises as it is made": ((2,), "    def __init__(self):\n        raise SystemExit(0)\n" + AT_ONCE.format("pass")),
    "no act": ((2,), "    pass\n"),
    "act is no function": ((2,), "    act = 5\n"),
    "no Python": ((2,), "    def act(self\n"),
    "other arguments": ((2,), "    def act(self):\n        return 4\n"),
    "needs something": ((2,), "    def __init__(self, x):\n        pass\n" + AT_ONCE.format("pass")),
    "not UTF-8": ((2,), "    x = '\udcff'\n" + AT_ONCE.format("pass")),
    "a zero byte": ((2,), "    x = '\0'\n" + AT_ONCE.format("pass")),
    "reset raises later": ((1,), "    n = 0\n    def reset(self, w):\n        self.n += 1\n        if self.n > 3:\n"
                           "            1 / 0\n    def act(self, o, g):\n        return o['step'] * 0\n"),
    "reset is no function": ((2,), "    reset = 5\n" + AT_ONCE.format("pass")),
    "reset takes nothing": ((2,), "    def reset(self):\n        pass\n" + AT_ONCE.format("pass")),
    "nothing": ((2,), None),
}


def played(args, script, number):
    """Player files that raise, end the script, or answer nonsense: theirs in one line, and the run goes on to its end
    with the file mended."""
    names, folder = list(PLAYERS), runs_of(args, f"{script}-played")
    if script == "hopplus_selfplay":  # the same code asks them there, at a greater price
        names = [name for place, name in enumerate(names) if not name.startswith("later") or place % 5 == 0]
    if number >= len(names):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    path, (codes, body) = folder + ".py", PLAYERS[names[number]]
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"import torch\n\n\nclass Me:\n{body}" if body else "")
    learner = {"ppo_single_player": "ppo", "hopplus_selfplay": "hop"}[script]
    code, lines = finish(script, command(script, folder, "--players", learner, learner, "ns", f"{path}:Me"), folder)
    if not one_line(code, lines, codes) or path not in lines[0]:
        return f"{names[number]}: exit code {code}: {lines[-3:]}"
    if os.path.exists(folder) != (code == 1):
        return f"{names[number]}: what is left is wrong"
    if code == 1:
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"class Me:\n{AT_ONCE.format('pass')}")
        code, lines = finish(script, ["--resume", folder], folder)
    return "" if code in (0, 2) else f"{names[number]}, mended: exit code {code}: {lines[-3:]}"


WORDS = ("-1", "0", "nan", "inf", "-inf", "1e40", "-1e40", str(10**30), "x", "", "1000000000", "0.5", "1", "2", "7",
         "True", "{}", "-0", "1e-300", "None", "3.0", "1_000", "0x10", "é", "a b", "1e6", "-0.0001", "--", "64")
STRINGS = {
    "players": ("ppo", "hop", "ns", "nh", "nsh", "random", "patient-3", "patient-x", "mix:ns,nh", "mix:", "mix:ns,",
                "mix:mix:ns,nh", "switch-ns-nh", "human", "no.py:Me", "ppo:1", "a.pt:player_1", ":", "noisy-ns"),
    "mix": ("ns", "nh", "random", "patient-3", "mix:ns,nh", "x"),
    "boards": ("4x4", "5x4", "4x4b1", "0x4", "4x4p3", "x", "99x99", "1x1", "4x4s2h2", "4x4p0", "100000x100000"),
    "run_name": ("a", "..", "a/b", "/", "CON", "x" * 300, " a", "a:b", "é", "-x"),
    "device": ("cpu", "cuda", "cuda:7", "mps", "meta", "cpu:0", "x"),
}


def some_words(draw, module, field, places):
    """Words that somebody could type behind a flag: right ones, half of the time; other ones of every sort."""
    kind = field.type
    if typing_args := typing.get_args(kind):
        kind = next((part for part in typing_args if part not in (type(None), ...)), kind)
    many = draw.choice((1, 1, 2, 3, 4, 5)) if "tuple" in str(field.type) else draw.choice((1, 1, 1, 1, 1, 1, 0, 2))
    if draw.random() < 0.5:
        return draw.choices(WORDS, k=many)
    if field.type is bool:
        return []
    if "Literal" in str(field.type):
        return [draw.choice(typing.get_args(field.type))]
    if field.name in STRINGS:
        return draw.choices(STRINGS[field.name], k=many if "tuple" in str(field.type) else 1)
    if kind is int:
        return [draw.choice(("1", "2", "3", "4", "5", "8", "16", "20"))] * max(many, 1)
    if kind is float:
        return [draw.choice(("0", "0.1", "0.5", "1", "2", "10", "1e3"))] * max(many, 1)
    return [draw.choice(places)]


def flagged(args, script, number):
    """Flags drawn at random with values of every sort: refused in one line with nothing written, or a proper run, which
    is stopped after a while. -> which of these"""
    draw, folder = random.Random(f"flagged {script} {number}"), runs_of(args, f"{script}-flagged")
    shutil.rmtree(folder, ignore_errors=True)
    place = os.path.join(folder, "here")
    os.makedirs(place)
    module, wholes = importlib.import_module(script), [runs_of(args, f"{each}-undisturbed") for each in SMALL]
    places = [*wholes, *(os.path.join(whole, name) for whole in wholes for name in ("checkpoint.pt", "config.json")),
              "nowhere", place, folder + ".err", "/proc/nowhere", "", os.path.join(place, "new")]
    line = SMALL[script].split() + ["--runs-dir", os.path.join(folder, "runs")]
    line += ["--checkpoint", reference(args, "train_world_model")[0]] if script == TESTER else ["--final-time", "10"]
    fields = {field.name: field for field in dataclasses.fields(module.Args)}
    typed = []
    for name in draw.sample(sorted(fields), draw.choice((1, 1, 2, 3, 4))):
        words = some_words(draw, module, fields[name], places)
        if name == "resume" and words and os.path.isdir(words[0]) and words[0] in wholes:  # a copy, for it may go on
            shutil.copytree(words[0], os.path.join(folder, "whole"))
            words[0] = os.path.join(folder, "whole")
        prefix = "no-" if fields[name].type is bool and draw.random() < 0.1 else ""
        typed += [module.flag(prefix + name), *words]
    look = lambda: sorted(glob.glob("**", root_dir=folder, recursive=True))
    before = look()

    def little_memory(module):
        import resource  # here, for Windows has none
        resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))  # so that no other process is in need

    process = start(script, line + typed, folder, little_memory, place)
    code, stopped = wait(process, work=1), 0
    for patience in (5, 60):  # a run, and a long one; a second signal does not wait for an update's end
        if code is None:
            os.kill(process, signal.SIGINT)
            code, stopped = wait(process, patience), 1
    if code is None:
        os.kill(process, signal.SIGKILL)
        wait(process)
    lines = told(folder)
    with open(folder + ".out", encoding="utf-8") as file:
        said = lines + [text for text in file.read().split("\n") if text.startswith("stopped")]
    if one_line(code, lines) and look() == before:
        return {"refused": 1}
    if code == 0 and not noise(lines) and not any(name.endswith(".new") for name in look()):
        return {"ran to its end": 1}
    if code == 130 and stopped and len(said) == 1 and any(words in said[0] for words in SAID):
        return {"ran until it was stopped": 1}
    for sort in ("not finite", "the memory is full"):
        if one_line(code, lines, (1,)) and sort in lines[0]:
            return {f"ended in one line ({sort})": 1}
    left = sorted({*look()} - {*before})
    return f"{' '.join(map(repr, typed))}: exit code {code}: {said[-3:]}, left: {left[:3]}"


def fails_from(number, calls, code, log):
    """A fault: from the number-th of those calls on, each fails; that it came to this is noted in `log`.hit."""
    def act(count, path, go_on, half):
        if count < number:
            return go_on()
        os.close(os.open(log + ".hit", os.O_CREAT | os.O_WRONLY))
        half()
        raise OSError(code, os.strerror(code), path)
    return at_writes(calls, act)


def broken(args, script, number, calls, code):
    """A disk that fails from the number-th call on: one line; then the run goes on as if nothing had been."""
    folder, whole = runs_of(args, f"{script}-broken"), reference(args, script)[0]
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.exists(folder + ".hit"):
        os.remove(folder + ".hit")
    ended, lines = finish(script, command(script, folder), folder, fails_from(number, calls, code, folder))
    if not os.path.exists(folder + ".hit"):
        return None  # there are not so many writes
    what = f"{errno.errorcode[code]} at write {number}: "
    if not one_line(ended, lines, (1, 2)):
        return f"{what}exit code {ended}: {lines[-3:]}"
    if glob.glob(os.path.join(folder, "**", "*.new"), recursive=True) or os.path.exists(folder + ".new"):
        return f"{what}a half-written file is left"
    if script == TESTER:
        return ""
    ended, lines = finish(script, go_on(script, folder), folder)
    wrong = [f"exit code {ended}: {lines}"] if ended or noise(lines) else differences(folder, whole)
    return ", ".join(what + part for part in wrong)


def full(args, script, number):
    """From some write on there is no place on the disk; half of that write still is on it."""
    return broken(args, script, number + 1, ("write", "mkdir"), errno.ENOSPC)


def gone(args, script, number):
    """From some change of a folder on it is read-only, or gone."""
    code = (errno.EROFS, errno.ENOENT)[number % 2]
    return broken(args, script, number + 1, ("open", "replace", "rename", "mkdir"), code)


def repeated(args, script, number):
    """The same seed a second time: the same files but for times."""
    folder = runs_of(args, f"{script}-repeated")
    shutil.rmtree(folder, ignore_errors=True)
    code, lines = finish(script, command(script, folder), folder)
    return ", ".join([f"exit code {code}: {lines}"] if code else differences(folder, reference(args, script)[0]))


def lawful(args, script, number, steps=20_000, games=400):
    """A board drawn at random, random actions on it: pieces, masks, rewards, relabelled players."""
    module, draw = importlib.import_module("hopplus_selfplay"), random.Random(f"lawful {number}")
    n, blocks = draw.randint(2, 6), draw.randint(0, 2)
    board = dict(num_players=n, height=draw.randint(4, 8), width=draw.randint(5, 8), stags=draw.randint(0, 3),
                 hares=draw.randint(1, 5), max_blocks=blocks, final_time=draw.randint(1, 40))
    try:
        game = module.BatchedStagHunt(games, seed=number, **board)
    except module.Refused:  # no room for so many pieces
        return lawful(args, script, number + 1000, steps, games)
    draws = torch.Generator().manual_seed(number)
    for _ in range(steps // games):
        before, bits, actions = game.state(), game.legal_bits(), torch.randint(-1, 8, (games, n), generator=draws)
        order = torch.randperm(n, generator=draws)
        other = copy.copy(game)
        other.cell, other.previous = game.cell[order], game.previous[order]
        out, relabelled = game.advance(actions), other.advance(actions[:, order])
        if not torch.equal(out["reward"][:, order], relabelled["reward"]) or not torch.equal(game.board, other.board):
            return f"{board}: the order of the players matters"
        prey = lambda state, bit: (state["board"] & bit != 0).sum(0)
        after = game.state()
        caught = [prey(before, bit) - prey(after, bit) for bit in (module.STAG_BIT, module.HARE_BIT)]
        paid = caught[0] * 10.0 + caught[1]
        if min(part.min() for part in caught) < 0 or not torch.allclose(out["reward"].sum(1), paid, atol=1e-3):
            return f"{board}: rewards do not add up to what was caught"
        if not torch.equal(out["left"].any(1), paid > 0) or not (bits >> out["action"].T & 1).all():
            return f"{board}: somebody left without prey, or did what is not legal"
        if (after["board"].gather(0, after["cell"]) == 0).any() or (game.observe()["action_mask"].sum(2) == 0).any():
            return f"{board}: somebody stands in an obstacle, or can do nothing"
        game.reset(out["over"])
    return ""


# ------------------------------------------------------------------------------------------------- the table

CLAIMS = {  # name -> (the claim, full count for each script, scripts, the trial)
    "repeated": ("two runs of one seed: the same but for times", 1, (*TRAINERS, TESTER), repeated),
    "game": ("boards with 20,000 random steps each", 50, ("the game",), lawful),
    "damaged": ("checkpoints cut short or with a bit turned", 250, TRAINERS, damaged),
    "configs": ("wrong config.json", math.inf, TRAINERS, configured),
    "data": ("wrong data files", math.inf, ("train_world_model", TESTER), misled),
    "players": ("wrong player files", math.inf, ("ppo_single_player", "hopplus_selfplay"), played),
    "flags": ("generated flags", 100, (*TRAINERS, TESTER), flagged),
    "killed": ("SIGKILL, resumed", 100, TRAINERS, killed),
    **{f"{name}{' twice' * twice}": (f"{name}{', twice' * twice}, resumed", 40, TRAINERS,
                                     functools.partial(signalled, which=which, twice=twice))
       for twice in (False, True) for name, which in (("Ctrl-C", signal.SIGINT), ("SIGTERM", signal.SIGTERM))},
    "full": ("disk full from each write on, resumed", math.inf, (*TRAINERS, TESTER), full),
    "gone": ("disk read-only or folder gone, resumed", math.inf, (*TRAINERS, TESTER), gone),
}


def read_trials(args):
    """{(claim, script): {number: (what went wrong, "" if nothing, None if there is no such trial; seconds)}}"""
    trials = {}
    path = os.path.join(args.folder, "trials.jsonl")
    for line in open(path, encoding="utf-8") if os.path.exists(path) else ():
        claim, script, number, wrong, seconds = json.loads(line)
        trials.setdefault((claim, script), {})[number] = wrong, seconds
    return trials


def tried(wrong):
    """How many trials an outcome stands for."""
    return sum(wrong.values()) if isinstance(wrong, dict) else wrong is not None


def table(trials):
    """The table of all claims that were tried, and below it what the trials were that are of several sorts."""
    lines, sorts = ["| claim | trials | by script | wrong | minutes |", "|---|---:|---|---:|---:|"], []
    for claim, (text, _, scripts, _) in CLAIMS.items():
        own = {script: [wrong for wrong, _ in trials.get((claim, script), {}).values()] for script in scripts}
        counts = {script: sum(map(tried, wrongs)) for script, wrongs in own.items()}
        if not sum(counts.values()):
            continue
        wrongs, by_sort = sum(own.values(), []), {}
        seconds = sum(took for script in scripts for _, took in trials.get((claim, script), {}).values())
        for wrong in wrongs:
            for sort, count in wrong.items() if isinstance(wrong, dict) else ():
                by_sort[sort] = by_sort.get(sort, 0) + count
        faults = sum(isinstance(wrong, str) and wrong != "" for wrong in wrongs)
        parts = ", ".join(str(counts.get(script) or "–") for script in SMALL) if scripts[0] in SMALL else ""
        lines.append(f"| {text} | {sum(counts.values()):,} | {parts} | {faults} | {seconds / 60:.0f} |")
        if by_sort:
            counted = ", ".join(f"{count} {sort}" for sort, count in sorted(by_sort.items()))
            sorts.append(textwrap.fill(f"- {text}: {counted}.", 119, subsequent_indent="  "))
    names = textwrap.fill(f"By script: {', '.join(f'`{script}`' for script in SMALL)}.", 119)
    return "\n".join([*lines, "", names, "", *sorts])


def try_claim(args, claim):
    """Makes the trials of a claim that have not been made."""
    _, most, scripts, trial = CLAIMS[claim]
    for script in scripts:
        if args.scripts and script not in args.scripts:
            continue
        done = read_trials(args).get((claim, script), {})
        for number in itertools.count():
            if number not in done:
                begun = time.monotonic()
                wrong = trial(args, script, number)
                done[number] = wrong, round(time.monotonic() - begun, 2)
                with open(os.path.join(args.folder, "trials.jsonl"), "a", encoding="utf-8") as file:
                    file.write(json.dumps([claim, script, number, *done[number]]) + "\n")
                if isinstance(wrong, str) and wrong:
                    print(f"{claim} {script} {number}: {wrong}", flush=True)
            if done[number][0] is None or sum(tried(wrong) for wrong, _ in done.values()) >= (args.count or most):
                break


def main(args):
    for name, known in (*((name, CLAIMS) for name in args.only), *((name, SMALL) for name in args.scripts)):
        if name not in known:
            sys.exit(f"{name}: there are {', '.join(known)}")
    args.folder = os.path.abspath(args.folder)
    os.makedirs(args.folder, exist_ok=True)
    torch.set_num_threads(1)
    get_ready()
    for script in SMALL:
        reference(args, script)
    for claim in args.only or CLAIMS:
        try_claim(args, claim)
    trials = read_trials(args)
    with open(os.path.join(args.folder, "resilience.md"), "w", encoding="utf-8") as file:
        file.write(table(trials) + "\n")
    print(table(trials))
    return trials


if __name__ == "__main__":
    main(tyro.cli(Args))
