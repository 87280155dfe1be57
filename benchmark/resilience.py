"""Kills, damages and misleads short runs of all scripts, and counts what is lost or goes wrong without a word.

    python benchmark/resilience.py                             every claim, with its full count (many hours)
    python benchmark/resilience.py --only killed --count 5     one claim, five trials of each script

Each trial's outcome is appended to `<folder>/trials.jsonl` as it comes; what stands there is not tried again. The
table is printed at the end and kept in `<folder>/resilience.md`. Every run is a process of its own, forked from this
one, which has the slow imports behind it (so this needs Linux or macOS); it is a whole run of a script, but short: a
few updates of small networks, a warm-up of 20 steps, and a checkpoint after each update.
"""

import builtins
import copy
import dataclasses
import errno
import glob
import importlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback

os.environ.setdefault("TQDM_DISABLE", "1")
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, ROOT)

import numpy as np
import torch
import tyro

SMALL = {
    "ppo_single_player": "--total-timesteps 384 --num-envs 8 --num-steps 16 --eval-episodes 20 --hidden-size 8",
    "pretrain_vae": "--episodes 40 --held-out-episodes 20 --epochs 2 --batch-size 64 --hidden-size 8 --vae-size 8",
    "train_world_model": "--boards 4x4 --rows 1000 --held-out-rows 200 --num-updates 60 --check-every 20 "
                         "--batch-size 64 --hidden-size 8",
    "hopplus_selfplay": "--total-timesteps 128 --num-envs 8 --num-steps 8 --warmup-meetings 8 --eval-episodes 16 "
                        "--eval-policy-episodes 40 --hidden-size 8 --vae-size 8 --num-simulations 4 --num-trees 2 "
                        "--imagined-per-real 2 --moa-minibatches 2 --num-minibatches 2 --buffer-size 256",
}
TRAINERS = tuple(SMALL)
TESTER = "test_obs_reward_model"
TIMES = {"seconds", "warmup_seconds", "sps", "cpu_seconds"}  # what two runs of one seed may differ in
TIME_TAGS = ("time/", "charts/SPS", "charts/UPS", "mcts/simulations_per_second")
SAID = ("go on with: python", "nothing was written", "is not complete")  # how to go on, in the line of a signal


@dataclasses.dataclass
class Args:
    only: tuple[str, ...] = ()
    """names of the claims to try; none given: all"""
    count: int | None = None
    """trials of each claim and script; without it, the full count"""
    folder: str = os.path.join("runs", "benchmark-resilience")
    """where the runs, the trials' outcomes and the table go"""


# ------------------------------------------------------------------------------------------------- short runs


def module_of(script):
    """A script, imported, with its warm-up and its last scores shortened."""
    module = importlib.import_module(script)
    if script == "hopplus_selfplay":
        module.WORLD_STEPS, module.WORLD_UPDATES, module.WARMUP_EPOCHS = 500, 20, 1
        module.report_models.__wrapped__.__defaults__, module.score_world.__wrapped__.__defaults__ = (100, 2), (500,)
    return module


def start(script, line, log, fault=None):
    """Begins a run in a process of its own, its output in `log`.out and `log`.err. -> number of the process"""
    module = module_of(script)
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
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        torch.set_num_threads(1)
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


def wait(process, seconds=300):
    """-> the exit code, minus the signal's number where one killed it, None if it goes on"""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def finish(script, line, log, fault=None, seconds=300):
    """A whole run. -> exit code, what it told on stderr"""
    process = start(script, line, log, fault)
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


def command(script, folder, *more):
    return [*SMALL[script].split(), "--save-every", "0", "--runs-dir", os.path.dirname(folder), "--run-name",
            os.path.basename(folder), *more]


def go_on(script, folder):
    """The command that goes on with a run: the first again where it had left nothing."""
    return ["--resume", folder] if os.path.isdir(folder) else command(script, folder)


def reference(args, script):
    """A run that nothing disturbs. -> its folder, the seconds that it takes"""
    folder = os.path.join(args.folder, f"{script}-undisturbed")
    if not os.path.isfile(folder + ".json"):
        shutil.rmtree(folder, ignore_errors=True)
        begun = time.monotonic()
        code, lines = finish(script, command(script, folder), folder)
        if code:
            raise SystemExit(f"{script} does not run: {lines}")
        with open(folder + ".json", "w", encoding="utf-8") as file:
            json.dump(time.monotonic() - begun, file)
    with open(folder + ".json", encoding="utf-8") as file:
        return folder, json.load(file)


def timeless(part):
    """Content without times and without the run's own name."""
    if isinstance(part, dict):
        return {key: timeless(value) for key, value in part.items() if key not in TIMES | {"run_name", "runs_dir", "resume"}}
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
    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    return {(tag, point.step, repr(point.value)) for tag in events.Tags()["scalars"]
            if not tag.startswith(TIME_TAGS) for point in events.Scalars(tag)}


def differences(folder, other):
    """What two runs that should be the same differ in."""
    found = []
    for name in ("results.json", "config.json"):
        one, two = (timeless(json.load(open(os.path.join(each, name), encoding="utf-8"))) for each in (folder, other))
        found += [] if equal(one, two) else [name]
    one, two = (timeless(torch.load(os.path.join(each, "checkpoint.pt"), weights_only=True)) for each in (folder, other))
    found += [] if equal(one, two) else ["checkpoint.pt"]
    found += [] if points(folder) == points(other) else ["TensorBoard"]
    left = glob.glob(os.path.join(folder, "**", "*.new"), recursive=True)
    return found + [os.path.basename(name) for name in left]


# ------------------------------------------------------------------------------------------------- trials
# Each yields (script, number) -> what went wrong, "" if nothing. A trial is reproducible from its number but for
# the moment of a kill.


def dies_while_saving(number):
    """The process kills itself at some call that brings a file to the disk."""
    def fault(module):
        calls = [0]
        for name in ("fsync", "replace"):
            def deadly(*parts, real=getattr(os, name)):
                calls[0] += 1
                if calls[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*parts)
            setattr(os, name, deadly)
    return fault


def killed(args, script, number, kills=3):
    """SIGKILL, `kills` times in a run, a third of them during a save."""
    whole, seconds = reference(args, script)
    draw, folder = random.Random(f"killed {script} {number}"), os.path.join(args.folder, f"{script}-killed")
    shutil.rmtree(folder, ignore_errors=True)
    count = 0
    for attempt in range(12 * kills):
        if count == kills:
            break
        saving = draw.random() < 1 / 3
        process = start(script, go_on(script, folder), folder, dies_while_saving(draw.randint(1, 40)) if saving else None)
        code = wait(process, 300 if saving else draw.uniform(0, 0.9 * seconds))
        if code is None:
            os.kill(process, signal.SIGKILL)
            code = wait(process)
        if code == -signal.SIGKILL:
            count += 1
        elif code == 0:
            break
        else:
            return f"exit code {code}: {told(folder)}"
    code, lines = finish(script, go_on(script, folder), folder)
    wrong = [f"exit code {code}: {lines}"] if code else differences(folder, whole)
    return ", ".join(wrong) or count


def signalled(args, script, number, twice):
    """Ctrl-C or SIGTERM at a random moment, once or twice; every eighth in a process that begins with its imports."""
    whole, seconds = reference(args, script)
    draw, folder = random.Random(f"signalled {script} {number} {twice}"), os.path.join(args.folder, f"{script}-signalled")
    shutil.rmtree(folder, ignore_errors=True)
    which = (signal.SIGINT, signal.SIGTERM)[number % 2]
    if number % 8 == 7:
        with open(folder + ".err", "w", encoding="utf-8") as err, open(folder + ".out", "w", encoding="utf-8") as out:
            process = subprocess.Popen([sys.executable, os.path.join(ROOT, script + ".py"), *command(script, folder)],
                                       stdout=out, stderr=err).pid
            time.sleep(0.3)  # Python itself needs a while before it reads the first line of a script
    else:
        process = start(script, command(script, folder), folder)
    code = wait(process, draw.uniform(0, seconds))
    sent = time.monotonic()
    for _ in range(1 + twice) if code is None else ():
        try:
            os.kill(process, which)
        except ProcessLookupError:
            break
        time.sleep(0.01)
    code = wait(process) if code is None else code
    took, lines = time.monotonic() - sent, told(folder)
    with open(folder + ".out", encoding="utf-8") as file:
        said = lines + [line for line in file.read().split("\n") if line.startswith("stopped")]
    if code not in (0, 128 + which) or code and (len(said) != 1 or not any(words in said[0] for words in SAID)):
        return f"exit code {code}: {said}"
    if took > 20:
        return f"it took {took:.0f} s to stop"
    code, lines = finish(script, go_on(script, folder), folder)
    return ", ".join([f"exit code {code}: {lines}"] if code else differences(folder, whole))


def damaged(args, script, number):
    """One bit of a checkpoint is turned, or its end cut off: refused, or the one before is used with a warning."""
    whole, _ = reference(args, script)
    draw, folder = random.Random(f"damaged {script} {number}"), os.path.join(args.folder, f"{script}-damaged")
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
    module = module_of(script)
    free = ("epochs",) if script == "pretrain_vae" else ("total_timesteps",)
    error, sys.stderr = sys.stderr, io.StringIO()
    try:
        module.load_run(module.resolve_flags(module.Args(resume=folder), free), free)
        good = before and sys.stderr.getvalue().startswith("warning: ")
    except module.Refused as refusal:
        good = not before and "\n" not in str(refusal)
    finally:
        error, sys.stderr = sys.stderr, error
    return "" if good else "taken without a word"


def bad_configs(script, config):
    """What could stand in a run's config.json instead of what does."""
    for text in ("", "{", "[]", "null", "17", '"x"', json.dumps({**config, "script": "x.py"}), "\0\0",
                 json.dumps({key: value for key, value in config.items() if key != "script"})):
        yield text
    for key, value in config.items():
        if key not in ("script", "version", "resume", "threads", "save_every", "total_timesteps", "epochs", "runs_dir",
                       "run_name"):
            yield json.dumps({**config, key: {"x": 1}})
            yield json.dumps({name: each for name, each in config.items() if name != key})
            if type(value) in (int, float):
                yield json.dumps({**config, key: value + 1})
                yield json.dumps({**config, key: "x"})


def configured(args, script, number):
    """A config.json that is damaged, of another script, or does not fit the checkpoint."""
    whole, _ = reference(args, script)
    folder = os.path.join(args.folder, f"{script}-configured")
    with open(os.path.join(whole, "config.json"), encoding="utf-8") as file:
        texts = list(bad_configs(script, json.load(file)))
    if number >= len(texts):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        file.write(texts[number])
    code, lines = finish(script, ["--resume", folder], folder)
    return "" if one_line(code, lines) else f"{texts[number][:80]}: exit code {code}: {lines}"


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
    """Data files that are no data."""
    names, folder = [*ROWS, "empty", "cut"], os.path.join(args.folder, f"{script}-misled")
    if number >= len(names):
        return None
    world, path = module_of("train_world_model"), folder + ".npz"
    game = {field.name: field.default for field in dataclasses.fields(world.GameArgs)}
    world.save_data(path, world.collect({**game, "num_players": 4}, 200, number))
    if names[number] in ROWS:
        with np.load(path) as file:
            content = ROWS[names[number]](dict(file))
        np.savez(path, **content)
    else:
        with open(path, "rb+") as file:
            file.truncate(0 if names[number] == "empty" else 700)
    shutil.rmtree(folder, ignore_errors=True)
    line = ["--data", path, "--runs-dir", folder]
    if script == TESTER:
        line += ["--checkpoint", reference(args, "train_world_model")[0]]
    else:
        line += ["--num-updates", "5"]
    code, lines = finish(script, line, folder)
    fine = one_line(code, lines) and not os.path.exists(folder)
    if script == TESTER and names[number] == "one row":  # which is enough to test on
        fine = fine or code == 0
    return "" if fine else f"{names[number]}: exit code {code}: {lines}"


PLAYERS = {  # class body -> whether it plays at all, for some steps
    "raises at once": "    def act(self, o, m, s, g):\n        raise KeyError('x')\n",
    "raises later": "    n = 0\n    def act(self, o, m, s, g):\n        self.n += 1\n        return s // (self.n < 30)\n"
                    "    def reset(self, w):\n        if self.n > 30:\n            raise ValueError('later')\n",
    "ends the script": "    n = 0\n    def act(self, o, m, s, g):\n        self.n += 1\n        if self.n > 20:\n"
                       "            import sys; sys.exit(0)\n        return s * 0\n",
    "ends it at once": "    def __init__(self):\n        raise SystemExit(0)\n    def act(self, *a):\n        pass\n",
    "no act": "    pass\n",
    "floats": "    def act(self, o, m, s, g):\n        return s * 0.5\n",
    "too few": "    def act(self, o, m, s, g):\n        return s[1:]\n",
    "a list": "    def act(self, o, m, s, g):\n        return [4] * len(s)\n",
    "no Python": "    def act(self\n",
    "other arguments": "    def act(self):\n        return 4\n",
    "raises in reset": "    n = 0\n    def reset(self, w):\n        self.n += 1\n        if self.n > 3:\n            1 / 0\n"
                       "    def act(self, o, m, s, g):\n        return s * 0\n",
}


def played(args, script, number):
    """Player files that raise, end the script, or answer nonsense: theirs in one line, the run can go on."""
    names, folder = list(PLAYERS), os.path.join(args.folder, f"{script}-played")
    if number >= len(names):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    path = folder + ".py"
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"import torch\n\n\nclass Me:\n{PLAYERS[names[number]]}")
    learner = {"ppo_single_player": "ppo", "hopplus_selfplay": "hop"}[script]
    code, lines = finish(script, command(script, folder, "--players", learner, learner, "ns", f"{path}:Me"), folder)
    if not one_line(code, lines, (1, 2)) or path not in lines[0]:
        return f"{names[number]}: exit code {code}: {lines}"
    return "" if os.path.exists(folder) == (code == 1) else f"{names[number]}: what is left is wrong"


WORDS = ("-1", "0", "nan", "inf", "-inf", "1e40", "-1e40", str(10**30), "x", "", "1000000000", "0.5", "1", "7", "True",
         "{}", "-0", "1e-300", "None")


def flagged(args, script, number):
    """Flags drawn at random with values of every sort: refused in one line with nothing written, or a proper run."""
    draw, folder = random.Random(f"flagged {script} {number}"), os.path.join(args.folder, f"{script}-flagged")
    shutil.rmtree(folder, ignore_errors=True)
    module = module_of(script)
    fields = [field.name for field in dataclasses.fields(module.Args) if field.name not in ("runs_dir", "resume")]
    line = SMALL.get(script, "--rows 500 --rollouts 20 --samples 1").split() + ["--runs-dir", folder]
    if script == TESTER:
        line += ["--checkpoint", reference(args, "train_world_model")[0]]
    for name in draw.sample(fields, draw.choice((1, 1, 2))):
        line += [module.flag(name), *draw.choices(WORDS, k=draw.choice((1, 1, 1, 2)))]
    process = start(script, line, folder)
    code = wait(process, 30)
    if code is None:  # a run, and a long one
        os.kill(process, signal.SIGINT)
        code = wait(process, 60)
    lines = told(folder)
    fine = one_line(code, lines) and not os.path.exists(folder)
    fine = fine or code == 1 and one_line(code, lines, (1,)) and "finite" in lines[0]  # numbers that overflow
    fine = fine or code in (0, 130) and not any("Traceback" in text for text in lines)
    return "" if fine else f"{' '.join(line[-6:])}: exit code {code}: {lines[-3:]}"


def fills_up(number, code):
    """From the number-th opening of a file to write on, there is no place (or no folder, or no right to write)."""
    def fault(module):
        openings, real = [0], builtins.open

        def full(path, mode="r", *parts, **named):
            if any(letter in mode for letter in "wax+") and not str(path).endswith((".out", ".err")):
                openings[0] += 1
                if openings[0] >= number:
                    if code == errno.ENOSPC and "a" not in mode:
                        real(path, mode, *parts, **named).close()  # the empty file is made before there is no place
                    raise OSError(code, os.strerror(code), path)
            return real(path, mode, *parts, **named)
        builtins.open = io.open = full
    return fault


def full(args, script, number):
    """A disk that is full from some write on (or read-only, or gone): one line; then the run goes on as if never."""
    folder = os.path.join(args.folder, f"{script}-full")
    shutil.rmtree(folder, ignore_errors=True)
    code = (errno.ENOSPC, errno.EROFS, errno.ENOENT)[number % 3]
    line = command(script, folder) if script != TESTER else [
        "--rows", "500", "--rollouts", "20", "--samples", "1", "--runs-dir", args.folder, "--run-name",
        os.path.basename(folder), "--checkpoint", reference(args, "train_world_model")[0]]
    ended, lines = finish(script, line, folder, fills_up(number + 1, code))
    if ended == 0:
        return None  # there are not so many writes
    if not one_line(ended, lines, (1, 2)):
        return f"write {number + 1}: exit code {ended}: {lines[-3:]}"
    if glob.glob(os.path.join(folder, "**", "*.new"), recursive=True) or os.path.exists(folder + ".new"):
        return f"write {number + 1}: a half-written file is left"
    if script == TESTER:
        return ""
    ended, lines = finish(script, go_on(script, folder), folder)
    wrong = [f"exit code {ended}: {lines}"] if ended else differences(folder, reference(args, script)[0])
    return ", ".join(f"write {number + 1}: {part}" for part in wrong)


def repeated(args, script, number):
    """The same seed a second time: the same files but for times."""
    folder = os.path.join(args.folder, f"{script}-repeated")
    shutil.rmtree(folder, ignore_errors=True)
    code, lines = finish(script, command(script, folder), folder)
    return ", ".join([f"exit code {code}: {lines}"] if code else differences(folder, reference(args, script)[0]))


def lawful(args, script, number, steps=20_000, games=400):
    """A board drawn at random, random actions on it: pieces, masks, rewards, relabelled players."""
    module, draw = module_of("hopplus_selfplay"), random.Random(f"lawful {number}")
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
    "killed": ("SIGKILL at random moments, a third of them during a save, resumed (3 kills in each run)", 34, TRAINERS, killed),
    "once": ("Ctrl-C or SIGTERM, resumed", 40, TRAINERS, lambda *parts: signalled(*parts, False)),
    "twice": ("Ctrl-C or SIGTERM twice, resumed", 40, TRAINERS, lambda *parts: signalled(*parts, True)),
    "damaged": ("checkpoints cut short or with one bit turned: refused, or the older one with a warning", 250, TRAINERS, damaged),
    "configs": ("wrong config.json: one line, exit code 2", 500, TRAINERS, configured),
    "data": ("wrong data files: one line, exit code 2", 500, ("train_world_model", TESTER), misled),
    "players": ("wrong player files: one line, and the run can go on", 500, ("ppo_single_player", "hopplus_selfplay"), played),
    "flags": ("generated flags: one line and nothing written, or a proper run", 100, (*TRAINERS, TESTER), flagged),
    "full": ("disk full, read-only or gone from some write on: one line, then resumed", 5000, (*TRAINERS, TESTER), full),
    "game": ("20,000 steps of random actions on a random board", 50, ("the game",), lawful),
    "repeated": ("two runs of one seed", 1, TRAINERS, repeated),
}


def read_trials(args):
    """{(claim, script): {number: what went wrong, "" if nothing, None if there is no such trial}}"""
    trials = {}
    path = os.path.join(args.folder, "trials.jsonl")
    for line in open(path, encoding="utf-8") if os.path.exists(path) else ():
        claim, script, number, wrong = json.loads(line)
        trials.setdefault((claim, script), {})[number] = wrong
    return trials


def table(trials):
    """The table of all claims that were tried."""
    lines = ["| claim | trials | wrong | by script (trials, wrong) |", "|---|---|---|---|"]
    for claim, (text, _, scripts, _) in CLAIMS.items():
        parts, total, faults, kills = [], 0, 0, 0
        for script in scripts:
            own = [wrong for wrong in trials.get((claim, script), {}).values() if wrong is not None]
            bad = sum(isinstance(wrong, str) and wrong != "" for wrong in own)
            kills += sum(wrong for wrong in own if isinstance(wrong, int))
            total, faults = total + len(own), faults + bad
            parts += [f"`{script}` {len(own)}, {bad}"] if own else []
        if total:
            said = f"{total:,} ({kills} kills)" if kills else f"{total:,}"
            lines.append(f"| {text} | {said} | {faults} | {'; '.join(parts)} |")
    return "\n".join(lines)


def try_claim(args, claim):
    """Makes the trials of a claim that have not been made."""
    _, most, scripts, trial = CLAIMS[claim]
    for script in scripts:
        for number in range(args.count or most):
            done = read_trials(args).get((claim, script), {})
            if None in done.values() and number > min(done, key=lambda key: done[key] is not None):
                break  # there are no more
            if number in done:
                continue
            wrong = trial(args, script, number)
            with open(os.path.join(args.folder, "trials.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps([claim, script, number, wrong]) + "\n")
            if isinstance(wrong, str) and wrong:
                print(f"{claim} {script} {number}: {wrong}", flush=True)
            if wrong is None:
                break


def main(args):
    unknown = [name for name in args.only if name not in CLAIMS]
    if unknown:
        sys.exit(f"--only {' '.join(unknown)}: there are {', '.join(CLAIMS)}")
    args.folder = os.path.abspath(args.folder)
    os.makedirs(args.folder, exist_ok=True)
    torch.set_num_threads(1)
    importlib.import_module("torch.utils.tensorboard")  # so that no run needs to import it
    for claim in args.only or CLAIMS:
        try_claim(args, claim)
    trials = read_trials(args)
    with open(os.path.join(args.folder, "resilience.md"), "w", encoding="utf-8") as file:
        file.write(table(trials) + "\n")
    print(table(trials))
    return trials


if __name__ == "__main__":
    main(tyro.cli(Args))
