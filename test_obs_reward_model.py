"""Tests a world model on rows that it never saw: errors, breaches of the rules, open-loop rollouts, pictures.

    python test_obs_reward_model.py --checkpoint runs/<run name>/checkpoint.pt
    python test_obs_reward_model.py --checkpoint ... --height 12 --width 12 --max-blocks 2 --num-players 6
    python test_obs_reward_model.py --checkpoint ... --data rows.npz
    tensorboard --logdir runs                          the pictures and figures

The board and the number of players are given by flags; the other rules are taken over from the checkpoint
where a flag leaves them at their default. The rules of the game are checked here, and nowhere in the model.
Takes about a minute, and leaves `results.json` and `pictures/` in `runs/<run name>/`.

The file from top to bottom:
    flags         what can be chosen, and what is refused
    state         what a thing keeps, and random numbers
    testing       main, and what is printed
    measuring     errors, breaches of the rules, rollouts
    pictures      the worst rows, histograms, an imagined episode
    data          rows of mixed play, views of them, files
    world model   the model, and its tables for the search
    game          the batched stag hunt and its rules
    players       rule-based players
    outputs       run folder, checkpoints, tables

Letters in shapes:
    N players, the ego first     B, S states or rows     C cells of the board     H, W its height and width
    K tokens                     R rewards that are known
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

SCRIPT = os.path.basename(__file__)
VERSION = "0.3"


class Interrupt:
    """What Ctrl-C and SIGTERM do: they end the script at once, in one line, wherever it is. That is safe, for
    files are written whole or not at all. In a `with` block the first of them is but a wish, `wanted`, which
    the block grants as soon as all is saved."""

    advice = "nothing was written"  # told in the line; once there is a run, how to go on with it
    wanted = 0  # the number of the signal that came in a block

    @classmethod
    def watch(cls):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, cls.leave)

    @classmethod
    def leave(cls, number, _=None):
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: None)  # a second one has no more to tell
        if not Processes.rank:
            os.write(2, f"\nstopped; {cls.advice}\n".encode())
        os._exit(128 + number)

    def __enter__(self):
        numbers = (signal.SIGINT, signal.SIGTERM)
        self.before = [(number, signal.signal(number, self.wish)) for number in numbers]
        return self

    def wish(self, number, _):
        self.wanted = number
        self.__exit__()

    def __exit__(self, *_):
        for number, handler in self.before:
            signal.signal(number, handler)


class Processes:
    """The processes of a run that torchrun has started: each plays games of its own, with random numbers of
    its own, and all learn from the mean of their gradients. Only process 0 shows and writes anything. Without
    torchrun there is one, and nothing here does anything."""

    rank, size, store = 0, 1, None
    spent = []  # seconds of each message, and of the wait for whoever came last to it

    @classmethod
    @contextlib.contextmanager
    def together(cls):
        """Joins the others for a block. At its end they wait for process 0, which measures alone."""
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            yield
            return
        kind = "gloo"
        if torch.cuda.is_available():  # LOCAL_RANK begins anew on each machine: it names but a GPU
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            kind = "cpu:gloo,cuda:nccl"
        cls.store, cls.rank, cls.size = cls.call(lambda: next(torch.distributed.rendezvous("env://")))
        cls.call(torch.distributed.init_process_group, kind, store=cls.store, rank=cls.rank,
                 world_size=cls.size, timeout=timedelta(days=1))
        with contextlib.ExitStack() as silence:
            if cls.rank:
                nowhere = silence.enter_context(open(os.devnull, "w"))
                silence.enter_context(contextlib.redirect_stdout(nowhere))
                silence.enter_context(contextlib.redirect_stderr(nowhere))
            yield
            cls.most(0)
            cls.store.set(f"ended {cls.rank}", "")  # who leaves early breaks the others' connections
            cls.call(cls.store.wait, [f"ended {rank}" for rank in range(cls.size)])
        torch.distributed.destroy_process_group()

    @classmethod
    def call(cls, what, *args, **named):
        """Does what all do together, and notes the seconds."""
        begun = time.perf_counter()
        try:
            return what(*args, **named)
        except (RuntimeError, ValueError) as error:
            raise Failed("another process has ended, or cannot be reached") from error
        finally:
            cls.spent.append(time.perf_counter() - begun)

    @classmethod
    def first(cls):
        """Whether no other process has told yet why the run ends."""
        try:
            return cls.store is None or cls.store.add("told", 1) == 1
        except RuntimeError:  # whoever kept count is gone
            return True

    @classmethod
    def share(cls, value, by=0):
        """What one process has, for all."""
        box = [value]
        if cls.size > 1:
            cls.call(torch.distributed.broadcast_object_list, box, by)
        return box[0]

    @classmethod
    def most(cls, *numbers):
        """Whole numbers, each the largest that any process has."""
        told = torch.tensor([int(number) for number in numbers])
        if cls.size > 1:
            cls.call(torch.distributed.all_reduce, told, torch.distributed.ReduceOp.MAX)
        return told.tolist()


if __name__ == "__main__":
    Interrupt.watch()  # from here on, for the imports below take seconds

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from tqdm import tqdm

# ======================================================================================= flags


@dataclass
class FirstArgs:
    checkpoint: str = ""
    """checkpoint.pt of train_world_model.py"""
    data: str | None = None
    """.npz file of rows to test on, instead of play on the board of the flags"""
    num_players: int | None = None
    """players on the board; without it, as the model was trained"""
    rows: int = 50_000
    """rows to play"""
    rollouts: int = 2000
    """open-loop rollouts of each length"""
    rotate_actions: int = 0
    """hand the model the actions rotated by so many players against the planes: a fault, to see its effect"""
    seed: int = 1
    """seed of every random generator of the run"""
    device: str = "cpu"
    """where the tensors live: cpu, cuda, cuda:1, ..."""
    run_name: str | None = None
    """name of the run's folder; without it: board, script, players, choices, seed, time"""
    resume: str | None = None
    """folder of a run to go on with, exactly as if it had never stopped; its flags are taken over"""


@dataclass
class GameArgs:
    height: int = 4
    """rows of the board"""
    width: int = 4
    """columns of the board"""
    stags: int = 1
    """stags on the board"""
    hares: int = 4
    """hares on the board"""
    max_blocks: int = 0
    """obstacles tried at each reset, three or four cells each"""
    final_time: int = 35
    """steps after which an episode is over"""
    stag_reward: float = 10.0
    """reward of a stag, split among those who hunt it together"""
    hare_reward: float = 1.0
    """reward of a hare, split among those who hunt it together"""
    stag_hunters: int = 2
    """players that must hunt a stag in the same step to catch it"""
    time_reward: float = 0.0
    """added at each step to the reward of every player that is present"""
    strengths: tuple[float, ...] | None = None
    """one number for each player: a stag is split in proportion to them; without, equally"""
    prosocial: bool = False
    """each player gets the mean of all players' rewards instead of its own"""
    dynamic_final_time: bool = False
    """the episode also ends five steps after the first catch"""


@dataclass
class RunArgs:
    threads: int = 1
    """threads that PyTorch may use; more help with large networks, and change the last digits"""
    runs_dir: str = "runs"
    """folder under which each run has its own folder"""
    save_every: float = 120.0
    """seconds between two checkpoints"""


@dataclass
class MeasuringArgs:
    samples: int = 4
    """rows drawn cell by cell, the worst ones first"""


@dataclass
class Args(MeasuringArgs, RunArgs, GameArgs, FirstArgs):
    """All flags of the script; --help tells them in these groups, the last one first."""


RANGES = (
    (1, math.inf, ("rows",)),
    (1, 8, ("num_players",)),
    (0, math.inf, ("rollouts", "samples")),
)


def check_flags(args):
    """Refuses flags that make no sense, alone or together."""
    if not args.checkpoint:
        raise Refused("--checkpoint is missing: name the checkpoint.pt of a run of train_world_model.py")
    check_ranges(args, RANGES)
    cells = args.height * args.width
    check_memory(args, ((4 * cells**2, ("height", "width")), (2 * args.final_time, ("final_time",)),
                        (cells * args.rows / 2, ("rows", "height", "width")), (args.rollouts, ("rollouts",))))
    refuse_ignored(args, (
        ("a test, which is short and runs through", True, ("resume", "save_every")),
        ("--data, which says what to test on", args.data is not None,
         ("rows", "height", "width", "max_blocks", "stags", "hares", "num_players")),
    ))


def take_rules(args, trained):
    """The rules that the model was trained on, where a flag leaves them at their default; not the board."""
    values = {}
    for field in dataclasses.fields(GameArgs):
        if field.name not in ("height", "width", "max_blocks") and getattr(args, field.name) == field.default:
            values[field.name] = trained.get(field.name, field.default)
    if args.num_players is None:
        values["num_players"] = trained.get("num_players", 4)
    return dataclasses.replace(args, **values)


# ======================================================================================= state


class Refused(ValueError):
    """Flags or files that cannot be used: told in one line that names them, with exit code 2."""


class Failed(RuntimeError):
    """What a run cannot go on from: told in one line, with exit code 1."""


def flag(name):
    """A field's name as it is typed."""
    return "--" + name.replace("_", "-")


def typed(value):
    """A flag's value as one types it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def check_ranges(args, ranges):
    """Refuses numbers out of range; ranges are rows of (lowest, highest, names of flags)."""
    for low, high, names in ranges:
        for name in names:
            value = getattr(args, name)
            most = min(high, 1e15) if isinstance(value, int) else high  # beyond it no tensor can count
            if value is not None and not low <= value <= most:  # nan fails every comparison
                unbounded = high == math.inf and not value > most
                bounds = f"be at least {low:g}" if unbounded else f"lie between {low:g} and {most:g}"
                raise Refused(f"{flag(name)} {value} must {bounds}")


def refuse_ignored(args, ignored):
    """Refuses flags without effect; ignored are rows of (a choice, whether it is made, flags it ignores)."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for choice, made, names in ignored:
        for name in names:
            value = getattr(args, name)
            if made and value != defaults[name]:
                raise Refused(f"{flag(name)} {typed(value)} means nothing with {choice}")


def check_memory(args, needs):
    """Refuses what no memory holds; needs are rows of (numbers of four bytes, flags that ask for them)."""
    if not hasattr(os, "sysconf"):  # Windows does not tell in this way
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for numbers, names in needs:
        if 4 * numbers > memory:
            asked = " ".join(f"{flag(name)} {getattr(args, name)}" for name in names)
            raise Refused(f"{asked} would take {4 * numbers / 1e9:,.0f} GB of memory, here are "
                          f"{memory / 1e9:,.0f}")


class Saved:
    """A thing whose state is a few attributes, named in `saved`: values, or again things with a state."""


def seeded(seed, what, device="cpu"):
    """A random generator for one thing, `what`: from one seed, different things draw different numbers."""
    return torch.Generator(device).manual_seed(random.Random(f"{seed} {what}").getrandbits(63))


# ===================================================================================== testing


def main(args):
    check_flags(args)
    prepare_torch(args)
    model, checkpoint = load_world_model(args.checkpoint, f"--checkpoint {args.checkpoint}", args.device)
    args = take_rules(args, checkpoint["config"])
    rows, args = find_rows(args)
    run_folder(args)  # whatever is wrong with its name shows now
    print(f"[INFO] loaded model. obs_shape=({args.height}, {args.width}, {args.num_players + 3}), "
          f"action_dim={NUM_ACTIONS}")
    print(f"[INFO] dataset size={rows_of(rows)}, inferred n_agents={args.num_players}")

    totals = Totals(args)
    for begin in tqdm(range(0, rows_of(rows), 2048), desc="testing", leave=False, dynamic_ncols=True):
        totals.add(model, pick(rows, slice(begin, begin + 2048)))
    results = totals.results()
    print_metrics(results)
    if not args.rotate_actions:
        results["tables_exact"] = tables_exact(model, rows)
        print(f"tables of the search, state, reward and end together: {percent(results['tables_exact'])}")
    print("\n=== Breaches of the rules ===")
    for kind, count in results["breaches"].items():
        print(f"  {kind}: {count}")

    long = rollout_rows(args, rows)
    curve = roll_outs(args, model, long, results)
    bins, results["calibration_error"] = totals.calibration()
    table = [["predicted", "cells", "mean predicted", "came true"]]
    table += [[f"{low:.1f} to {low + 0.1:.1f}", cells, f"{mean:.6f}", f"{share:.6f}"]
              for low, cells, mean, share in bins]
    print_table("calibration of the cells", table)
    print(f"expected calibration error: {results['calibration_error']:.2e}")
    frames = imagined_episode(args, model, long)
    with Interrupt() as interrupt:  # what is written now takes a few seconds
        folder = open_run(args)
        Interrupt.advice = f"{folder} is not complete"  # it is not resumed
        save_json(os.path.join(folder, "results.json"), results)
        log_results(args, folder, totals, results, curve, frames)
    print(f"\nPictures and results.json are in {folder}")
    return 128 + interrupt.wanted if interrupt.wanted else 0


def find_rows(args):
    """The rows to test on, played or from --data. -> rows, args with the board of the rows"""
    if args.data is not None:
        rows = load_data(args.data, f"--data {args.data}", args.device)
        return rows, dataclasses.replace(args, height=rows["height"], width=rows["width"],
                                         num_players=len(rows["cell"]))
    return play_rows(args, args.rows, "test"), args


def play_rows(args, many, what):
    """Rows of mixed play on the board of the flags, with random numbers of their own."""
    board = {field.name: getattr(args, field.name) for field in dataclasses.fields(GameArgs)}
    return collect({**board, "num_players": args.num_players}, many, f"{args.seed} {what}", args.device)


def rollout_rows(args, rows):
    """Rows with enough episodes of the longest rollouts: those given, or more play of the same board."""
    many = rows_of(rows)
    for number in range(4):
        if args.data is not None or len(window_starts(rows, ROLLOUT_STEPS[-1])) >= args.rollouts:
            break
        many *= 2
        rows = play_rows(args, many, f"rollouts {number}")
    return rows


def percent(share):
    return f"{100 * share:.3f} %"


def print_metrics(results):
    print("\n=== Metrics ===")
    print(f"Obs  MSE (mean over B,C,H,W): {results['obs_mse']:.4g}")
    print(f"Obs  PSNR: {results['psnr']:.2f} dB")
    print(f"Rew  MSE:  {results['reward_mse']:.4g}")
    print("Per-channel MSE:")
    for plane, error in enumerate(results["plane_mse"]):
        print(f"  ch[{plane}]: {error:.6e}")
    print("\n=== Exactness ===")
    print(f"next views exact after rounding: {percent(results['exact'])}")
    print(f"rewards right to 0.01: {percent(results['reward_exact'])}")
    for kind, right in results["reward_exact_by_catch"].items():
        print(f"  {kind}: {percent(right['exact'])} of {right['rows']}")
    print(f"ends right: {percent(results['end_exact'])} (own game {percent(results['own_end'])}, "
          f"episode {percent(results['episode_end'])}, steps left {percent(results['steps_left'])})")
    print(f"legal actions of the predicted view right: {percent(results['legal_exact'])}")


def roll_outs(args, model, rows, results):
    """Rolls out each number of steps, and puts what came of it into the results.

    -> the share that is exact after each step of the longest
    """
    generator, curve = seeded(args.seed, "rollouts", args.device), []
    results |= {"rollout": {}, "rollout_breaches": {}, "rollouts": {}}
    print("\n=== Open-loop rollouts under the true actions ===")
    for steps in ROLLOUT_STEPS if args.rollouts else ():
        starts = window_starts(rows, steps)
        order = torch.randperm(len(starts), generator=generator, device=args.device)
        starts = starts[order[:args.rollouts]]
        if not len(starts):
            print(f"  {steps} steps: no episode is that long")
            continue
        exact, breached, _ = roll_out(model, rows, starts, steps, args)
        curve = exact.double().mean(1).tolist()
        results["rollout"][str(steps)] = curve[-1]
        results["rollout_breaches"][str(steps)] = int(breached.sum())
        results["rollouts"][str(steps)] = len(starts)
        print(f"  {steps} steps: {percent(curve[-1])} exact to the last cell, "
              f"{int(breached.sum())} breaches, {len(starts)} rollouts")
    return curve


def log_results(args, folder, totals, results, curve, frames):
    """Writes figures and pictures to the run folder and TensorBoard."""
    writer = open_writer(folder, args)
    for key in ("obs_mse", "psnr", "reward_mse", "exact", "reward_exact", "end_exact", "calibration_error"):
        writer.add_scalar(f"world_model_test/{key}", results[key], 0)
    for kind, count in results["breaches"].items():
        writer.add_scalar(f"world_model_test/breaches/{kind.replace(' ', '_')}", count, 0)
    for step, share in enumerate(curve, start=1):
        writer.add_scalar("world_model_test/rollout_exact", share, step)
    pictures = os.path.join(folder, "pictures")
    for tag, picture in draw_test(args, totals, curve).items():
        save = functools.partial(picture.savefig, dpi=80)
        add_image(writer, tag, save, 0, os.path.join(pictures, f"{tag}.png"))
    if frames:
        add_gif(writer, "imagined_episode", frames, 0, os.path.join(pictures, "imagined_episode.gif"))
    writer.close()


# =================================================================================== measuring

ROLLOUT_STEPS = (1, 5, 10, 20, 35)
KEPT_ROWS = 2000  # rows whose values are drawn, the first


def window_starts(rows, steps):
    """The rows from which `steps` rows of the same episode follow one another."""
    last = max(0, rows_of(rows) - steps + 1)
    following = rows["episode"][:last] == rows["episode"][steps - 1:]
    following &= rows["clock"][:last] + steps - 1 == rows["clock"][steps - 1:]
    return following.nonzero()[:, 0]


def psnr(mse):
    """Peak signal-to-noise ratio in dB, the peak being 1."""
    return 10 * math.log10(1 / max(mse, 1e-30))


def catches(rows, stag_hunters):
    """What the rules say of a step: who is caught up in a catch [N, B], how many hunt what the ego catches
    [B] (0: it catches nothing), and whether that is a stag [B]."""
    cell, legal = rows["cell"], rows["board"].gather(0, rows["cell"])
    stag = (rows["actions"] == HUNT_STAG) & (legal & STAG_BIT > 0)
    hare = (rows["actions"] == HUNT_HARE) & (legal & HARE_BIT > 0)
    together = cell[:, None] == cell  # [one, other, B]
    caught = stag & ((together & stag).sum(1) >= stag_hunters) | hare
    return caught, (together & caught).sum(1)[0] * caught[0], stag[0]


def count_breaches(rows, view, reward, args):
    """What in predicted views and rewards the rules forbid, given the rows: {kind: where [B]}."""
    width, cells = rows["width"], rows["height"] * rows["width"]
    caught, _, _ = catches(rows, args.stag_hunters)
    planes = view.flatten(1, 2).permute(2, 1, 0)  # [N+3, C, B]
    before = views_of(rows).flatten(1, 2).permute(2, 1, 0)[-3:] > 0
    players, ground = planes[:-3], planes[-3:] > 0.5
    present = rows["cell"] < cells
    places, cell, on_board = (players > 0.5).sum(1), players.argmax(1), players.sum(1)  # [N, B] each
    now = torch.where(present, rows["cell"], 0)
    far = (now // width - cell // width).abs() + (now % width - cell % width).abs() > 1
    seized = torch.zeros_like(rows["board"]).scatter(0, torch.where(caught, rows["cell"], cells), 1)[:-1] > 0
    always = args.time_reward * (present.float().mean(0) if args.prosocial else present[0])
    earns = caught.any(0) if args.prosocial else caught[0]
    placed, nowhere = places == 1, present & (places == 0)
    return {
        "moves further than one cell": (present & placed & far).any(0),
        "in two places": (places > 1).any(0) | (on_board > 1.5).any(0),
        "in no place": (nowhere & (on_board >= 0.5)).any(0),
        "vanishes without a catch": (nowhere & (on_board < 0.5) & ~caught).any(0),
        "player appears": (~present & (places > 0)).any(0),
        "walks into an obstacle": (placed & before[0].gather(0, cell)).any(0),
        "prey moves or appears": (ground[1:] & ~before[1:]).flatten(0, 1).any(0),
        "prey vanishes without a catch": (~ground[1:] & before[1:] & ~seized).flatten(0, 1).any(0),
        "obstacle changes": (ground[0] != before[0]).any(0),
        "reward without a catch": ((reward - always).abs() > 0.01) & ~earns,
    }


def catch_kind(number, is_stag):
    """The name of what the ego caught: how many did it together, and whether it was a stag."""
    if number == 0:
        return "none"
    return f"stag with {number}" if is_stag else "hare" if number == 1 else "shared hare"


def legal_actions(view):
    """The ego's legal actions in views [B, H, W, N+3]: [B, 7]."""
    cell, board = pack(view)
    return board.gather(0, cell[:1])[0][:, None] >> torch.arange(NUM_ACTIONS, device=view.device) & 1 > 0


class Totals:
    """Everything that is summed up over the rows."""

    def __init__(self, args):
        self.args, self.sums, self.breaches, self.by_catch = args, {}, {}, {}
        # by the predicted value of cells: how many, the sum of the values, how many came true
        self.bins = torch.zeros(3, 10, dtype=torch.float64)
        self.rows, self.kept, self.worst = 0, None, []

    @torch.no_grad()
    def add(self, model, rows):
        """Takes in rows and what `forward` says of them."""
        actions = rows["actions"].roll(self.args.rotate_actions, 0)
        out = model(views_of(rows), actions.T, rows["clock"], rows["deadline"] - rows["clock"])
        view, reward, true = out["view"], out["reward"], views_of(rows, after=True)
        error, reward_error = (view - true).double(), reward - rows["reward"][0]
        self.rows += len(view)
        right = reward_error.abs() <= 0.01
        own = (out["terminated"] > 0.5) == rows["terminated"][0]
        episode = (out["over"] > 0.5) == rows["over"]
        left = out["steps_left"] == rows["next_left"]
        for key, value in {
                "plane_mse": error.square().mean((1, 2)), "reward_mse": reward_error.double().square(),
                "exact": ((view > 0.5) == true).flatten(1).all(1), "reward_exact": right,
                "end_exact": own & episode & left, "own_end": own, "episode_end": episode,
                "steps_left": left,
                "legal_exact": (legal_actions(view) == legal_actions(true)).all(1)}.items():
            self.sums[key] = self.sums.get(key, 0) + value.double().sum(0).cpu()
        for kind, where in count_breaches(rows, view, reward, self.args).items():
            self.breaches[kind] = self.breaches.get(kind, 0) + int(where.sum())
        _, number, stag = catches(rows, self.args.stag_hunters)
        for name, good in zip(map(catch_kind, number.tolist(), stag.tolist()), right.tolist()):
            many, hits = self.by_catch.get(name, (0, 0))
            self.by_catch[name] = many + 1, hits + good

        value = view.flatten().double().clamp(0, 1)
        place, weights = (value * 10).long().clamp(max=9), (None, value, true.flatten().double())
        self.bins += torch.stack([torch.bincount(place, weight, 10) for weight in weights]).double().cpu()
        badness = error.abs().flatten(1).amax(1) + reward_error.abs()
        keep = {"before": views_of(rows), "true": true, "view": view, "reward": rows["reward"][0],
                "predicted": reward, "badness": badness, "actions": rows["actions"].T}
        self.kept = self.kept or {key: column[:KEPT_ROWS].cpu() for key, column in keep.items()}
        worst = badness.topk(min(self.args.samples, len(badness))).indices
        self.worst.append({key: column[worst].cpu() for key, column in keep.items()})

    def results(self):
        """Errors and shares of what is right, for results.json."""
        mean = {key: (value / self.rows).tolist() for key, value in self.sums.items()}
        mse = sum(mean["plane_mse"]) / len(mean["plane_mse"])
        by_catch = {kind: {"rows": many, "exact": hits / many}
                    for kind, (many, hits) in sorted(self.by_catch.items())}
        return {"obs_mse": mse, "psnr": psnr(mse), **mean, "reward_exact_by_catch": by_catch,
                "breaches": {**self.breaches, "total": sum(self.breaches.values())}}

    def calibration(self):
        """Rows of predicted from, cells, mean predicted, share that came true; expected calibration error."""
        rows = [(number / 10, int(cells), (values / cells).item(), (ones / cells).item())
                for number, (cells, values, ones) in enumerate(self.bins.T) if cells]
        error = sum(cells * abs(mean - share) for _, cells, mean, share in rows)
        return rows, error / sum(cells for _, cells, _, _ in rows)


@torch.no_grad()
def roll_out(model, rows, starts, steps, args):
    """The model's own way from some rows on, under the true actions, its views rounded and fed back.

    -> exact so far [step, B] (every cell of every view until then), breaches of any rule [B], the views [step
    + 1]
    """
    first = pick(rows, starts)
    view, left = views_of(first), first["deadline"] - first["clock"]
    exact, breached, views, so_far = [], 0, [view.float()], True
    for step in range(steps):
        true = pick(rows, starts + step)
        out = model(view, true["actions"].roll(args.rotate_actions, 0).T, true["clock"], left)
        cell, board = pack(view)
        breaches = count_breaches({**true, "cell": cell, "board": board}, out["view"], out["reward"], args)
        breached = breached + sum(where.long() for where in breaches.values())
        view, left = (out["view"] > 0.5).to(torch.uint8), out["steps_left"]
        so_far = so_far & (view == views_of(true, after=True)).flatten(1).all(1)
        exact.append(so_far)
        views.append(out["view"])
    return torch.stack(exact), breached, views


def tables_exact(model, rows):
    """The share of rows whose next state, reward and end are all right in the tables that a search uses."""
    tables = WorldTables(model, rows["height"], rows["width"], len(rows["cell"]))
    state, reward, over = tables.step(rows, rows["actions"])
    right = (state["cell"] == rows["next_cell"]).all(0) & (state["board"] == rows["next_board"]).all(0)
    right &= (reward - rows["reward"][0]).abs() <= 0.01
    right &= over == rows["terminated"][0] | rows["over"]
    right &= state["deadline"] - state["clock"] == rows["next_left"]
    return right.double().mean().item()


# ==================================================================================== pictures


def plot(rows, columns, size, title, paint):
    """A picture: a grid of axes that paint(axes) fills."""
    from matplotlib.figure import Figure  # here, for only pictures need it

    figure = Figure(size)
    axes = figure.subplots(rows, columns, squeeze=False)
    paint(axes)
    for axis in axes.flat:
        axis.set_visible(axis.has_data())
    figure.suptitle(title)
    figure.tight_layout()
    return figure


def draw_sample(sample):
    """One row cell by cell, a column each plane: true now and next, predicted with raw values, difference."""
    height, width, planes = sample["true"].shape
    names, difference = plane_names(planes - 3), sample["view"] - sample["true"]
    size = max(3.5, 26 / max(height, width))
    parts = (("true now", sample["before"], 0), ("true next", sample["true"], 0),
             ("predicted next", sample["view"], 0), ("predicted - true", difference, -1))

    def paint(axes):
        for row, (label, view, lowest) in enumerate(parts):
            for plane, values in enumerate(view.float().unbind(-1)):
                axis = axes[row][plane]
                axis.imshow(values, cmap="RdBu" if lowest else "Blues", vmin=lowest, vmax=1)
                for (r, c), value in np.ndenumerate(values.numpy()):
                    form = ".0f" if row < 2 or value == 0 else ".4f" if abs(value) >= 1e-3 else ".0e"
                    axis.text(c, r, f"{value:{form}}", ha="center", va="center", fontsize=size,
                              color="white" if abs(value) > 0.6 else "black")
                axis.set(xticks=[], yticks=[], title=names[plane] if row == 0 else "",
                         ylabel=label if plane == 0 else "")

    actions = ", ".join(ACTIONS[action] for action in sample["actions"].tolist())
    title = (f"asked for, ego first: {actions}\nreward {sample['reward'].item():.4f}, predicted "
             f"{sample['predicted'].item():.4f}; largest error of a cell {difference.abs().max().item():.2e}")
    return plot(4, planes, (1.9 * planes, 8), title, paint)


def draw_test(args, totals, curve):
    """All pictures but the GIF, by name."""
    kept = totals.kept
    worst = {key: torch.cat([part[key] for part in totals.worst]) for key in totals.worst[0]}
    names = plane_names(kept["view"].shape[-1] - 3)
    values, half = (kept["view"].unbind(-1), kept["true"].unbind(-1)), math.ceil(len(names) / 2)
    order = worst["badness"].argsort(descending=True)[:args.samples].tolist()
    pictures = {f"worst_{number}": draw_sample({key: column[row] for key, column in worst.items()})
                for number, row in enumerate(order, start=1)}

    def histograms(axes):
        for axis, name, predicted, true in zip(axes.flat, names, *values):
            axis.hist([true.flatten().float().numpy(), predicted.flatten().numpy()], bins=20, range=(0, 1),
                      log=True, label=["true", "predicted"])
            axis.set_title(name)
        axes.flat[0].legend()
    pictures["value_histograms"] = plot(2, half, (14, 6), "values of the cells of the next view", histograms)

    def scatter(axes):
        generator = torch.Generator().manual_seed(0)
        for axis, name, predicted, true in zip(axes.flat, names, *values):
            sideways = (torch.rand(true.numel(), generator=generator) - 0.5) * 0.2
            axis.scatter(true.flatten() + sideways, predicted.flatten(), s=2)
            axis.set(title=name, xlabel="true (spread sideways)", ylabel="predicted", xlim=(-0.3, 1.3))
    pictures["value_scatter"] = plot(2, half, (14, 6), "predicted against true value of each cell", scatter)

    def rewards(axes):
        left, right = axes[0]
        left.scatter(kept["reward"], kept["predicted"], s=12)
        left.set(xlabel="true reward", ylabel="predicted reward")
        right.hist((kept["predicted"] - kept["reward"]).numpy(), bins=41, log=True)
        right.set(xlabel="predicted - true", ylabel="rows")
    pictures["reward_scatter"] = plot(1, 2, (11, 4.5), "own reward", rewards)

    def exactness(axes):
        axes[0][0].plot(range(1, len(curve) + 1), curve, marker=".")
        axes[0][0].set(xlabel="steps without looking", ylabel="share exact to the last cell", ylim=(0, 1.02))
    pictures["rollout_exactness"] = plot(1, 1, (7, 4.5), "open-loop rollouts under the true actions",
                                         exactness)

    def calibration(axes):
        bins, error = totals.calibration()
        _, cells, means, shares = zip(*bins)
        axes[0][0].plot((0, 1), (0, 1), color="lightgrey")
        axes[0][0].scatter(means, shares, s=[8 * math.log10(count + 1) for count in cells])
        axes[0][0].set(xlabel="predicted probability", ylabel="share that came true",
                       title=f"expected error {error:.1e}")
    pictures["calibration"] = plot(1, 1, (6, 5), "calibration of the cells", calibration)
    return pictures


def draw_view(view, caption):
    """A view, rounded, as a board; the ego is player 1."""
    cell, board = pack(view[None].cpu())
    height, width = view.shape[:2]
    game = SimpleNamespace(height=height, width=width, cells=height * width, board=board, cell=cell)
    return draw_board(game, 0, caption)


def imagined_episode(args, model, rows):
    """Frames of an episode as it was, and as the model imagined it from its first view on, side by side.

    Of the longest rollouts it is the one in which most players leave, and among those they stay longest.
    """
    from PIL import Image

    steps = max((steps for steps in ROLLOUT_STEPS if len(window_starts(rows, steps))), default=0)
    if not steps:
        return []
    starts, later = window_starts(rows, steps), torch.arange(steps, device=args.device)
    there = (rows["cell"] < rows["height"] * rows["width"]).sum(0)[starts + later[:, None]]
    start = starts[((there[0] - there[-1]) * 1000 + there.sum(0)).argmax()]
    _, _, views = roll_out(model, rows, start[None], steps, args)
    first, last = pick(rows, start[None]), pick(rows, start + later)
    truth = torch.cat([views_of(first), views_of(last, after=True)])
    frames = []
    for step, (true, view) in enumerate(zip(truth, views)):
        off = (view[0] - true).abs().max().item()
        pair = draw_view(true, f"step {step}: true"), draw_view(view[0], f"imagined, off by {off:.0e}")
        frame = Image.new("RGB", (pair[0].width * 2 + 12, pair[0].height), "white")
        frame.paste(pair[0], (0, 0))
        frame.paste(pair[1], (pair[0].width + 12, 0))
        frames.append(frame)
    return frames


# ======================================================================================== data

# The data are rows, each a step of a game: tensors by name, the row last; and the board's height and width.
# The players stand in the order in which one of them, the ego, sees them:
#   cell [N, S], board [C+1, S], clock [S], deadline [S]   where the game stood, see BatchedStagHunt
#   actions [N, S]                what the players asked for
#   next_cell, next_board         where the game stands then
#   next_left [S]                 how many steps are left then
#   reward [N, S]                 what each player got
#   terminated [N, S], over [S]   whose own game ended in the step, and whether the episode did
#   episode [S]                   rows of one episode stand together, in order
BY_PLAYER = ("cell", "actions", "next_cell", "reward", "terminated")


class MixedPlay:
    """Games in which much happens, to learn a world from.

    Each episode draws a rule-based player for every seat, or one for all seats, so that crowds form; a share
    of uniform actions, legal or not; and whether its players hesitate: they then hunt only in one step of
    five, all in the same, so that prey is caught by many hands. Half of the episodes have an earlier
    deadline. Players that have left go on asking for something, which means nothing.

    A share of the episodes, `gathered`, begins with most players on one cell, mostly that of a prey, half of
    the other prey gone, and a few steps before the deadline: in plain play hardly any mixture of actions on
    one cell is met, and what is never met is what a model gets wrong.
    """

    def __init__(self, board, num_envs, seed, device, gathered):
        self.game = BatchedStagHunt(num_envs, device=device, seed=seed, **board)
        self.num_envs, self.device, self.gathered = num_envs, device, gathered
        self.generator = seeded(seed, "mixed play", device)
        rules = [*RULES.values()][:6] + [(self.game.final_time // 2, True, 0.0, False)]
        self.rules = torch.tensor(rules, device=device)
        self.shares = torch.tensor([0.0, 0.1, 0.5, 1.0], device=device)
        self.rule = torch.zeros(num_envs, self.game.num_players, 4, device=device)
        self.share, self.hesitates = torch.zeros(num_envs, device=device), self.draw(1) > 0
        self.begin(self.draw(1) == 0)

    def draw(self, most, *shape):
        """Whole numbers from 0 to most - 1: [B, ...]."""
        shape = (self.num_envs, *shape)
        return torch.randint(most, shape, generator=self.generator, device=self.device)

    def chance(self, *shape):
        """Numbers from 0 to 1."""
        return torch.rand(shape, generator=self.generator, device=self.device)

    def begin(self, new):
        """Begins new episodes where `new` [B] says so."""
        game = self.game
        game.reset(new)
        kind = self.draw(len(self.rules), game.num_players)
        kind = torch.where((self.draw(2) > 0)[:, None], kind, kind[:, :1])
        self.rule = torch.where(new[:, None, None], self.rules[kind], self.rule)
        self.share = torch.where(new, self.shares[self.draw(4)], self.share)
        self.hesitates = torch.where(new, self.draw(2) > 0, self.hesitates)
        deadline = torch.where(self.draw(2) > 0, 1 + self.draw(game.final_time), game.final_time)
        gathers = new & (self.chance(self.num_envs) < self.gathered)
        deadline = torch.where(gathers, 1 + self.draw(3), deadline)
        game.deadline = torch.where(new, deadline, game.deadline)

        ground = game.board[:-1]
        fits = (ground >= STAG_BIT) | (ground > 0) & (self.draw(4) == 0)
        spot = (fits * self.chance(*ground.shape)).argmax(0)
        joins = gathers & (self.draw(6, game.num_players).T > 0)
        game.cell = torch.where(joins, spot, game.cell)
        thinned = gathers & (self.chance(*game.board.shape) < 0.5)
        thinned = thinned.scatter(0, spot[None], False)
        game.board = torch.where(thinned, game.board & GEOGRAPHY_BITS, game.board)

    def act(self):
        """What all players ask for: [B, N]."""
        game = self.game
        actions = sample_actions(rule_probabilities(game, self.rule), self.generator)
        waits = (self.hesitates & (self.draw(5) > 0))[:, None] & (actions >= HUNT_STAG)
        actions = torch.where(waits, STAY, actions)
        uniform = self.chance(*actions.shape) < self.share[:, None]
        uniform |= game.cell.T == game.cells
        return torch.where(uniform, self.draw(NUM_ACTIONS, game.num_players), actions)


@torch.no_grad()
def collect(board, num_rows, seed, device="cpu", gathered=0.0):
    """Rows of mixed play on a board. The ego, drawn for each episode, is there in all of them: where it has
    left, the next episode begins."""
    play = MixedPlay(board, max(1, min(512, num_rows // 50)), seed, device, gathered)
    game, n, steps, count = play.game, board["num_players"], [], 0
    episode, ego = torch.arange(play.num_envs, device=device), play.draw(n)
    while count < num_rows:
        before, actions = game.state(), play.act()
        out = game.advance(actions)
        row = {"cell": before["cell"], "board": before["board"], "clock": before["clock"],
               "deadline": before["deadline"], "actions": actions.T, "next_cell": game.cell,
               "next_board": game.board, "next_left": game.deadline - game.clock, "reward": out["reward"].T,
               "terminated": out["ended"].T, "over": out["over"], "episode": episode}
        order = (ego + torch.arange(n, device=device)[:, None]) % n
        row |= {name: row[name].gather(0, order) for name in BY_PLAYER}
        steps.append(row)
        count += play.num_envs
        new = row["terminated"][0]
        play.begin(new)
        episode, ego = episode + new * play.num_envs, torch.where(new, play.draw(n), ego)
    rows = {name: torch.stack([step[name] for step in steps], -1).flatten(-2) for name in steps[0]}
    return {**pick(rows, slice(0, num_rows)), "height": board["height"], "width": board["width"]}


def places_of(rows):
    """Where players went, as a number of OFFSETS, or GONE; a jump is told as GONE + 1: [N, S]."""
    cell, next_cell, width = rows["cell"], rows["next_cell"], rows["width"]
    down, right = next_cell // width - cell // width, next_cell % width - cell % width
    place = torch.where((down.abs() <= 1) & (right.abs() <= 1), down * 3 + right + 4, GONE + 1)
    return torch.where(next_cell == rows["height"] * width, GONE, place)


def pick(rows, which):
    """Some of the rows: a slice, or their numbers."""
    return {name: part[..., which] if isinstance(part, torch.Tensor) else part for name, part in rows.items()}


def rows_of(rows):
    return len(rows["clock"])


def views_of(rows, after=False):
    """The ego's views [S, H, W, N+3] of rows, zeros and ones (uint8), before the step or after it."""
    cell, board = (rows["next_cell"], rows["next_board"]) if after else (rows["cell"], rows["board"])
    players = torch.zeros(len(cell), *board.shape, dtype=torch.uint8, device=board.device)
    players.scatter_(1, cell[:, None], 1)
    ground = torch.stack([board >> STAY & 1 ^ 1, board >> HUNT_STAG & 1, board >> HUNT_HARE])
    planes = torch.cat([players, ground])[:, :-1]
    return planes.unflatten(1, (rows["height"], rows["width"])).permute(3, 1, 2, 0)


def pack(view):
    """The reverse: views [B, H, W, N+3], rounded, as cell [N, B] and board [C+1, B], legal moves computed."""
    on = view > 0.5
    players = on[..., :-3].flatten(1, 2)  # [B, C, N]
    cell = torch.where(players.any(1), players.int().argmax(1), players.shape[1])
    free, stags, hares = ~on[..., -3], on[..., -2], on[..., -1]
    around = F.pad(free.to(torch.uint8), (1, 1, 1, 1))
    board = (around[:, :-2, 1:-1] | around[:, 2:, 1:-1] << 1 | around[:, 1:-1, :-2] << 2
             | around[:, 1:-1, 2:] << 3 | STAY_BIT | stags * STAG_BIT | hares * HARE_BIT) * free
    board = F.pad(board.to(torch.uint8).flatten(1), (0, 1), value=STAY_BIT)
    return cell.T.contiguous(), board.T.contiguous()


def plane_names(num_players):
    others = [f"co_player_{number}" for number in range(1, num_players)]
    return ["own", *others, "obstacles", "stags", "hares"]


# In a file (--data, --save-data) the rows are the planes that a player sees. A .npz holds, for each row:
#   observation, next_observation  uint8 [S, H, W, N+3]   players ego first, obstacles, stags, hares
#   actions                        int   [S, N]           what all asked for, in the order of the planes
#   step, steps_left               int   [S]              the clock before the step
#   next_steps_left                int   [S]              after it; where it is missing: one less
#   reward                         float [S] or [S, N]    one's own, or everybody's
#   terminated                     bool  [S] or [S, N]    whether one's own game, or whose, ended in the step
#   over                           bool  [S]              whether the episode did
#   episode                        int   [S]              rows of one episode stand together, in order
DATA_KEYS = ("observation", "actions", "step", "steps_left", "next_steps_left", "next_observation", "reward",
             "terminated", "over", "episode")


def load_data(path, asked, device="cpu"):
    """Reads rows from a .npz file; what does not fit is refused in one line, in the name of `asked`."""
    if not os.path.isfile(path):
        raise Refused(f"{asked}: there is no file {path}")
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
    except Exception as error:
        raise Refused(f"{asked}: {path} is no .npz file of arrays ({type(error).__name__})") from error
    if "steps_left" in columns:
        left = columns["steps_left"]  # what is no number is refused below
        columns.setdefault("next_steps_left", left - 1 if left.dtype.kind in "iuf" else left)
    check_data(columns, asked)
    height, width = columns["observation"].shape[1:3]
    read = lambda name, kind: torch.from_numpy(columns[name].astype(kind)).to(device)
    (cell, board), (next_cell, next_board) = (pack(read(name, np.uint8)) for name in
                                              ("observation", "next_observation"))
    rows = {"cell": cell, "board": board, "clock": read("step", np.int64),
            "deadline": read("step", np.int64) + read("steps_left", np.int64),
            "next_left": read("next_steps_left", np.int64), "actions": read("actions", np.int64).T,
            "next_cell": next_cell, "next_board": next_board,
            "reward": read("reward", np.float32).reshape(len(cell.T), -1).T,
            "terminated": read("terminated", bool).reshape(len(cell.T), -1).T, "over": read("over", bool),
            "episode": read("episode", np.int64), "height": height, "width": width}
    if ((places_of(rows) > GONE) & (cell < height * width)).any():
        raise Refused(f"{asked}: players jump further than to a neighbouring cell")
    return rows


def check_data(columns, asked):
    """Refuses arrays that are no rows; `asked` is the flag with its value."""
    missing = [name for name in DATA_KEYS if name not in columns]
    if missing:
        raise Refused(f"{asked} lacks {', '.join(missing)}")
    shape = columns["observation"].shape
    if len(shape) != 4 or not shape[0] or not 1 <= shape[3] - 3 <= MOST_PLAYERS:
        raise Refused(f"{asked}: observation is {shape}, not [rows, height, width, players + 3] with up to "
                      f"{MOST_PLAYERS} players")
    alone, each = shape[:1], (shape[0], shape[3] - 3)
    allowed = {"observation": (shape,), "next_observation": (shape,), "actions": (each,),
               "reward": (alone, each), "terminated": (alone, each)}
    for name in DATA_KEYS:
        column = columns[name]
        if column.shape not in allowed.get(name, (alone,)) or column.dtype.kind not in "biuf":
            raise Refused(f"{asked}: {name} is {column.dtype} {column.shape}, beside observation {shape}")
        if not np.isfinite(column).all():
            raise Refused(f"{asked}: {name} has a value that is no finite number")
    if np.abs(columns["reward"].astype(np.float64)).max() > 1e30:
        raise Refused(f"{asked}: a reward is beyond 1e+30")
    most = {"terminated": 1, "over": 1, "step": 1e9, "steps_left": 1e9, "next_steps_left": 1e9,
            "episode": 1e15}
    for name, limit in most.items():
        column = columns[name].astype(np.float64)
        if (column != column.round()).any() or not 0 <= column.min() <= column.max() <= limit:
            raise Refused(f"{asked}: {name} must be whole numbers from 0 to {limit:g}")
    if not np.isin(columns["actions"], range(NUM_ACTIONS)).all():
        raise Refused(f"{asked}: actions must be whole numbers from 0 to {NUM_ACTIONS - 1}")
    for name in ("observation", "next_observation"):
        if not np.isin(columns[name], (0, 1)).all() or (columns[name][..., :-3].sum((1, 2)) > 1).any():
            raise Refused(f"{asked}: {name} must be 0 or 1, with each player on one cell at most")


def load_world_model(path, asked, device="cpu"):
    """The model of a checkpoint of train_world_model.py, or of a run's folder. -> model, checkpoint"""
    path = os.path.join(path, "checkpoint.pt") if os.path.isdir(path) else path
    checkpoint = load_checkpoint(path, asked, device)
    if "world_model" not in checkpoint:
        raise Refused(f"{asked} holds no world model, it was written by {checkpoint['script']}")
    return make_world_model(checkpoint["world_model"], asked, device), checkpoint


def make_world_model(weights, asked, device="cpu"):
    """The model whose weights were saved, in a file that `asked` names."""
    check_weights(weights, asked)
    try:
        model = WorldModel(len(weights["local.0.bias"]), weights["rewards"].tolist(), weights["gives"].item())
        model.load_state_dict(weights)
    except (KeyError, TypeError, RuntimeError, AttributeError) as error:
        reason = type(error).__name__
        raise Refused(f"{asked}: its world model does not fit this script ({reason})") from error
    return model.to(device)


# ================================================================================= world model

MOST_PLAYERS = 8  # a token has three bits for the number of others
OFFSETS = tuple((down, right) for down in (-1, 0, 1) for right in (-1, 0, 1))  # number 4 is the cell itself
GONE = len(OFFSETS)  # a player's next place is one of the nine, or none
CLOCK_LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # how far the clock is told apart
ONE_LESS = CLOCK_LEVELS[-1] + 1  # so many steps left stands for: one less than before, whatever that was


def tokens(cell, board, actions):
    """All that the model sees of each player in a joint move [N, B], as one number: [N, B].

    Three bits for its own action, seven for the legal actions of its cell, and three for each action: how
    many others on the cell ask for it. The number means nothing for players that have left.
    """
    asks = 1 << 10 + 3 * actions.int()
    small = cell.to(torch.uint8) if len(board) <= 256 else cell  # long rows of bytes are fast
    others = ((small[:, None] == small) * asks[:, None]).sum(0, dtype=torch.int32) - asks
    return others + (board.gather(0, cell).int() << 3) + actions.int()


def what_is_left(cell, board):
    """Who is there [N, B]; and whether anybody, any stag and any hare is [3, B]."""
    own = cell < len(board) - 1
    return own, torch.stack([own.any(0), (board & STAG_BIT).amax(0) > 0, board.amax(0) >= HARE_BIT])


def perceptron(inputs, hidden, outputs):
    """Two hidden layers. At the beginning no input has any weight: what proves useless stays without."""
    net = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                        nn.Linear(hidden, outputs))
    nn.init.zeros_(net[0].weight)
    return net


def neighbours(height, width, device):
    """The cell at each offset from each cell, C beyond the border: [C+1, 9]. Cell C, nowhere, has none."""
    cells = torch.arange(height * width, device=device)
    down, right = torch.tensor(OFFSETS, device=device).T
    row, column = cells[:, None] // width + down, cells[:, None] % width + right
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return F.pad(torch.where(inside, row * width + column, len(cells)), (0, 0, 0, 1), value=len(cells))


def settle(reward, known):
    """Rewards [...] as the nearest of those that training has shown (known [R], in order), where that is
    within 4 % of the largest; others stay as they are."""
    nearest = look_up(known, torch.bucketize(reward, (known[1:] + known[:-1]) / 2))
    return torch.where((nearest - reward).abs() <= 0.04 * known.abs().max(), nearest, reward)


def look_up(table, index):
    """table[index] of a table of one dimension, the fastest way."""
    return table.index_select(0, index.flatten()).view(index.shape)


class WorldModel(nn.Module):
    """What a joint move leads to, learned from play: one model for every board and every player.

    Given, as to a player, is which actions are legal on each cell before the move. Given, too, is that all is
    local: what becomes of a player and of the prey on its cell depends on what is legal on that cell and on
    what those on it ask for; a player goes to one of the nine cells around it or leaves; where nobody stands
    nothing changes; the ends depend on the clock and on whether anybody, any stag and any hare is left, and
    how many steps are left on how many there were and on whether prey was caught. What the actions do, also
    where they are not legal, who catches what, what is paid and when a game is over is learned, by four small
    networks:

        local  token -> where the player goes; whether the stag and the hare of its cell stay
        pay    token -> what the player earns, and what it gives to each player on another cell
        end    who and what is left, the clock -> own game over, episode over
        left   whether prey was caught, the steps left -> the steps left then: 0 to 64, or one less
    """

    def __init__(self, hidden_size=64, rewards=(0.0, 1.0), gives=True):
        """rewards: those that training has shown; gives: whether those on other cells pay (`others_pay`)."""
        super().__init__()
        inputs = NUM_ACTIONS * (1 + 1 + MOST_PLAYERS - 1)
        self.local = perceptron(inputs, hidden_size, GONE + 1 + 2)
        self.pay = perceptron(inputs, hidden_size, 2)
        self.end = perceptron(4 + 2 * len(CLOCK_LEVELS), hidden_size, 2)
        self.left = perceptron(ONE_LESS, hidden_size, ONE_LESS + 1)
        self.register_buffer("rewards", torch.tensor(sorted(rewards)))
        self.register_buffer("scale", self.rewards.abs().max().clamp(min=1e-6))
        self.register_buffer("gives", torch.tensor(gives))

    def read(self, token):
        """Tokens [K] -> logits of the next place [K, 10] and of stag and hare staying [K, 2]; what the player
        earns and what it gives, in units of the largest reward [K, 2]."""
        bit, token = torch.arange(NUM_ACTIONS, device=token.device), token[:, None]
        others = token >> 10 + 3 * bit & 7  # [K, 7], as "at least 1, at least 2, ..."
        others = others[..., None] > torch.arange(MOST_PLAYERS - 1, device=token.device)
        x = torch.cat([token & 7 == bit, token >> 3 + bit & 1 > 0, others.flatten(1)], 1).float()
        places, prey = self.local(x).split((GONE + 1, 2), 1)
        return places, prey, self.pay(x)

    def read_end(self, own, left, clock, steps_left):
        """What is left after the move, own [N, B] and left [3, B], and the clock before it [B]
        -> logits [N, B, 2]: own game over, episode over."""
        level = torch.tensor(CLOCK_LEVELS, device=clock.device)
        x = torch.cat([left.T, clock[:, None] >= level, steps_left[:, None] >= level], 1)
        return self.end(torch.cat([own[..., None], x.expand(*own.shape, -1)], -1).float())

    def read_left(self, caught, steps_left):
        """Whether prey was caught [B], the steps left before -> logits of the steps left then [B, 66]."""
        level = torch.arange(1, ONE_LESS, device=steps_left.device)
        return self.left(torch.cat([caught[:, None], steps_left[:, None] >= level], 1).float())

    def earned(self, pay, cell, cells):
        """What each player gets, from pay [N, B, 2] of `read`: its own earnings and the gifts of those on
        other cells [N, B]."""
        present, (own, gift) = cell < cells, pay.unbind(-1)
        if self.gives:
            own = own + (gift * ((cell != cell[:, None]) & present)).sum(1)
        return own * present

    def forward(self, view, actions, step, steps_left):
        """What the ego sees next, from its view [B, H, W, N+3] and all players' actions [B, N], itself first.

        -> dict of view [B, H, W, N+3], reward [B], terminated [B] (own game), over [B] (episode), steps_left
        [B]; view and ends are probabilities. The view is rounded first, and its legal moves are computed
        (`pack`).
        """
        height, width = view.shape[1:3]
        cell, board = pack(view)
        kinds, which = tokens(cell, board, actions.T).unique(return_inverse=True)
        places, prey, pay = self.read(kinds)
        reach = neighbours(height, width, view.device)[cell]  # [N, B, 9]
        present = cell < height * width
        chance = places.softmax(1)[which][..., :GONE] * present[..., None]
        players = chance.new_zeros(*cell.shape, len(board)).scatter_add(2, reach, chance)  # [N, B, C+1]

        # Prey is gone if anybody on its cell says so.
        stays = prey.sigmoid()[which].permute(2, 0, 1)  # [stag or hare, N, B]
        prey = torch.stack([board >> HUNT_STAG & 1, board >> HUNT_HARE & 1]).float()
        prey = prey * torch.ones_like(prey).scatter_reduce(1, cell.expand_as(stays), stays, "amin")
        ground = torch.cat([(board >> STAY & 1 ^ 1)[None], prey]).transpose(1, 2)  # [3, B, C+1]
        planes = torch.cat([players, ground])[..., :-1].unflatten(2, (height, width)).permute(1, 2, 3, 0)

        reward = settle(self.earned(pay[which], cell, height * width)[0] * self.scale, self.rewards)
        next_cell, next_board = pack(planes)
        end = self.read_end(*what_is_left(next_cell, next_board), step, steps_left)[0].sigmoid()
        left = self.read_left(((board ^ next_board) >= STAG_BIT).any(0), steps_left).argmax(1)
        left = torch.where(left == ONE_LESS, steps_left - 1, left)
        return {"view": planes, "reward": reward, "terminated": end[:, 0], "over": end[:, 1],
                "steps_left": left}


class WorldTables:
    """A WorldModel's answers to every token that a board can hold: states in, states out, as a search asks.

    A row is (multiset of the others' actions, prey and moves of the cell, own action); the last one is for
    players that have left. A player goes where it is likeliest to go; prey is gone if anybody on its cell
    says so.
    """

    def __init__(self, model, height, width, num_players):
        if num_players > MOST_PLAYERS:
            raise Refused(f"--num-players {num_players} is more than the {MOST_PLAYERS} of a world model")
        device, n = model.rewards.device, num_players
        self.cells, self.rewards = height * width, model.rewards
        self.reach = F.pad(neighbours(height, width, device).T, (0, 0, 0, 1), value=self.cells).flatten()
        token = self.tabulate_tokens(n, torch.arange(NUM_ACTIONS, device=device))
        parts = [model.read(part) for part in token.split(1 << 15)]
        places, prey, pay = (torch.cat(part) for part in zip(*parts))
        absent = lambda table, value: F.pad(table, (0, 1), value=value)
        self.place = (absent(places.argmax(1), GONE) * (self.cells + 1)).int()  # where it begins in reach
        stays = (prey > 0) * torch.tensor([STAG_BIT, HARE_BIT], device=device)
        self.kept = absent(GEOGRAPHY_BITS + stays.sum(1), 127).to(torch.uint8)  # what stays legal on its cell
        own, gift = (pay * model.scale).T
        self.own, self.gift = absent(own, 0.0), absent(gift * model.gives, 0.0)

        self.times = CLOCK_LEVELS[-1] + 1
        number = torch.arange(16 * self.times**2, device=device)  # what is left, clock, steps left
        left = number // self.times**2 >> torch.arange(4, device=device)[:, None] & 1 > 0
        clock, steps_left = number // self.times % self.times, number % self.times
        self.over = (model.read_end(left[:1], left[1:], clock, steps_left)[0] > 0).any(1)
        number = torch.arange(2 * self.times, device=device)  # whether prey was caught, steps left
        self.left = model.read_left(number >= self.times, number % self.times).argmax(1)

    def tabulate_tokens(self, n, actions):
        """Tables that lead to the rows, and the token of each row: [rows]."""
        sets = [members for others in range(n)
                for members in itertools.combinations_with_replacement(range(NUM_ACTIONS), others)]
        count = torch.tensor([[members.count(a) for a in range(NUM_ACTIONS)] for members in sets]).to(actions)
        power = n**actions  # the powers of the others' actions add up to a number that tells the set
        self.power = power.to(torch.int16 if n**NUM_ACTIONS < 2**15 else torch.int32)
        ground = torch.arange(64, device=actions.device)  # moves, stag, hare
        self.first = torch.zeros(n**NUM_ACTIONS, dtype=torch.int32, device=actions.device)
        first = torch.arange(len(sets), dtype=torch.int32, device=actions.device) * (64 * NUM_ACTIONS)
        self.first[(count * power).sum(1)] = first
        legal = ground & 15 | STAY_BIT | ground >> 4 << HUNT_STAG
        others = (count << 10 + 3 * actions).sum(1)
        token = (others[:, None, None] + (legal << 3)[:, None] + actions).flatten()
        self.absent = len(token)
        return token

    def step(self, state, actions):
        """A joint move [N, B], ego first. -> the next state (the keys of STATE, which a tree holds), the
        ego's reward [B], and where its own game or the episode is over [B]"""
        cell, board, clock, deadline = (state[name] for name in ("cell", "board", "clock", "deadline"))
        legal, small = board.gather(0, cell), cell.to(torch.uint8 if self.cells < 256 else torch.int32)
        power = look_up(self.power, actions.int())
        others = ((small[:, None] == small) * power[:, None]).sum(0, dtype=power.dtype) - power
        ground = (legal & 15) + (legal >> HUNT_STAG << 4)
        row = look_up(self.first, others.int()) + ground.int() * NUM_ACTIONS + actions.int()
        row = torch.where(small < self.cells, row, self.absent)

        given = (look_up(self.gift, row[1:]) * (small[1:] != small[0])).sum(0) * (small[0] < self.cells)
        reward = settle(look_up(self.own, row[0]) + given, self.rewards)
        kept = legal & look_up(self.kept, row)
        board = board.scatter_reduce(0, cell, kept, "amin")
        cell = look_up(self.reach, look_up(self.place, row) + cell)

        own, left = what_is_left(cell, board)
        number = own[0] + 2 * left[0] + 4 * left[1] + 8 * left[2]
        time, steps_left = (part.clamp(0, self.times - 1) for part in (clock, deadline - clock))
        over = look_up(self.over, (number * self.times + time) * self.times + steps_left)
        left = look_up(self.left, (kept != legal).any(0) * self.times + steps_left)
        deadline = torch.where(left == ONE_LESS, deadline, clock + 1 + left)
        return {"cell": cell, "board": board, "previous": actions.to(torch.uint8), "clock": clock + 1,
                "deadline": deadline}, reward, over


# ======================================================================================== game

ACTIONS = ("up", "down", "left", "right", "stay", "hunt stag", "hunt hare")
NUM_ACTIONS = len(ACTIONS)
STAY, HUNT_STAG, HUNT_HARE = 4, 5, 6

# What one may do on a cell is a set of actions, kept as a byte: bit a is set where action a is legal.
STAY_BIT, STAG_BIT, HARE_BIT = 1 << STAY, 1 << HUNT_STAG, 1 << HUNT_HARE
GEOGRAPHY_BITS = STAG_BIT - 1  # the four moves and staying: what is left of a cell without its prey
STATE = ("cell", "board", "previous", "clock", "deadline")  # a position of the game, see BatchedStagHunt

# Straight tromino, corner tromino, straight tetromino, L tetromino: (row, column) of each cell.
BLOCK_SHAPES = (
    ((0, 0), (0, 1), (0, 2)),
    ((0, 0), (1, 0), (1, 1)),
    ((0, 0), (0, 1), (0, 2), (0, 3)),
    ((0, 0), (1, 0), (2, 0), (2, 1)),
)
FAR = 1000  # a path of this many steps or more does not exist


def tabulate_blocks(height, width):
    """The cells that an obstacle covers, by shape, turn and place: [16 C, C]; none where it sticks out."""
    table = torch.zeros(len(BLOCK_SHAPES), 4, height * width, height, width, dtype=torch.bool)
    for number, shape in enumerate(BLOCK_SHAPES):
        for turn in range(4):
            shape = [(column, -row) for row, column in shape]
            rows, columns = (torch.tensor(line) - min(line) for line in zip(*shape))
            for place in range(height * width):
                row, column = place // width + rows, place % width + columns
                if row.max() < height and column.max() < width:
                    table[number, turn, place, row, column] = True
    return table.flatten(0, 2).flatten(1)


def path_lengths(free, targets, height, width):
    """Steps from each cell to the nearest target around the obstacles, or FAR: all are [C, B]."""
    free = free.view(height, width, -1)
    length = torch.where(targets.view_as(free), 0, FAR).to(torch.int16)
    while True:
        near = F.pad(length, (0, 0, 1, 1, 1, 1), value=FAR)
        near = torch.minimum(torch.minimum(near[:-2, 1:-1], near[2:, 1:-1]),
                             torch.minimum(near[1:-1, :-2], near[1:-1, 2:]))
        shorter = torch.where(free, torch.minimum(length, near + 1), FAR)
        if torch.equal(shorter, length):
            return length.flatten(0, 1)
        length = shorter


class BatchedStagHunt(Saved):
    """Many stag hunts at once, played by the rules of `envs/stag_hunt.py`.

    Hunts are settled where the players stood, then all move. A caught prey and its hunters leave at once. An
    illegal action is played, and recorded, as stay. Where the games stand (STATE):

        cell      [N, B]    where each player stands; C once it has left
        board     [C+1, B]  the legal actions on each cell, as bits: none on an obstacle, hunting where there
                            is prey. The last row is for those that have left, who may only stay
        previous  [N, B]    the last action as it was played
        clock     [B]       steps played
        deadline  [B]       the step at which the clock ends the episode

    These tensors are replaced, never written into: one that was handed out stays as it is. B comes last, for
    operations on long rows are fast; what `advance` and `observe` hand out is turned to [B, N, ...].
    """

    def __init__(self, num_envs, height=4, width=4, num_players=4, stags=1, hares=4, max_blocks=0,
                 final_time=35, stag_reward=10.0, hare_reward=1.0, stag_hunters=2, time_reward=0.0,
                 strengths=None, prosocial=False, dynamic_final_time=False, device="cpu", seed=0,
                 dtype=torch.uint8):
        self.num_envs, self.height, self.width, self.num_players = num_envs, height, width, num_players
        self.stags, self.hares, self.max_blocks, self.final_time = stags, hares, max_blocks, final_time
        self.stag_reward, self.hare_reward, self.stag_hunters = stag_reward, hare_reward, stag_hunters
        self.time_reward, self.strengths, self.prosocial = time_reward, strengths, prosocial
        self.dynamic_final_time, self.device, self.dtype = dynamic_final_time, torch.device(device), dtype
        self.check()
        self.cells = height * width
        self.generator = seeded(seed, "game", device)
        self.moves = torch.tensor([-width, width, -1, 1, 0, 0, 0], device=device)
        self.action_bits = torch.arange(NUM_ACTIONS, dtype=torch.uint8, device=device)
        self.blocks = tabulate_blocks(height, width).to(device) if max_blocks else None
        self.tabulate_catches()
        self.pool_next = self.pool_size = max(num_envs, 256)  # nothing drawn yet
        self.cell = torch.zeros(num_players, num_envs, dtype=torch.int64, device=device)
        self.board = torch.zeros(self.cells + 1, num_envs, dtype=torch.uint8, device=device)
        self.previous = torch.zeros(num_players, num_envs, dtype=torch.uint8, device=device)
        self.clock, self.deadline = self.cell[0], self.cell[0]
        self.reset()

    def check(self):
        """Refuses a game that cannot be played."""
        largest, n = 1e30, self.num_players  # far inside the range of float32, so that no reward can overflow
        check_ranges(self, (
            (1, math.inf, ("num_envs", "height", "width", "final_time", "stag_hunters")),
            (1, 16, ("num_players",)), (0, math.inf, ("stags", "hares", "max_blocks")),
            (0, largest, ("stag_reward", "hare_reward")), (-largest, largest, ("time_reward",)),
        ))
        strengths = [1] * n if self.strengths is None else self.strengths
        if len(strengths) != n or not all(1 / largest <= strength <= largest for strength in strengths):
            raise Refused(f"--strengths {strengths} must be {n} positive and finite numbers, one a player")
        if self.stags + self.hares == 0:
            raise Refused("--stags 0 and --hares 0 leave no prey at all: a game needs at least one")
        if self.stags and n < self.stag_hunters:
            raise Refused(f"--num-players {n} can never catch a stag that needs --stag-hunters "
                          f"{self.stag_hunters}: play with more players or with --stags 0")
        cells, pieces = self.height * self.width - 4 * self.max_blocks, n + self.stags + self.hares
        if cells < pieces:
            raise Refused(f"--height {self.height} x --width {self.width} minus 4 cells for each of "
                          f"--max-blocks {self.max_blocks} leaves {cells} cells for {pieces} pieces")

    def tabulate_catches(self):
        """Tables of what each set of hunters on a cell catches and earns.

        A set of players is a number with a bit for each. Sums are in double precision, over values rounded to
        single: so they are exact, and the order of the players cannot show even in the last bit.
        """
        n, players = self.num_players, torch.arange(self.num_players)
        strength = torch.tensor(self.strengths or [1.0] * n).float().double()[:, None]
        member = (torch.arange(1 << n) >> players[:, None] & 1).double()  # [player, set]
        count = member.sum(0)
        stag = self.stag_reward * member * strength / (member * strength).sum(0).clamp(min=1e-300)
        stag = torch.where(count >= self.stag_hunters, stag, 0.0)
        hare = self.hare_reward * member / count.clamp(min=1)
        share = torch.stack([stag, hare], 1).float().double() + self.time_reward  # [player, prey, set]
        self.share = share.float().flatten().to(self.device)
        self.caught = torch.cat([count >= self.stag_hunters, count >= 1]).to(self.device)  # [prey and set]
        code = torch.uint8 if n <= 8 else torch.int32
        self.member_bit = (1 << players).to(code).to(self.device)[:, None]
        self.share_offset = (players << (n + 1)).int().to(self.device)[:, None]

    # ------------------------------------------------------------------------ drawing new boards

    def draw_free(self, n):
        """Draws the free cells of n boards: [n, C]. A piece that would overlap or stick out is left out."""
        free = torch.ones(n, self.cells, dtype=torch.bool, device=self.device)
        cut = torch.arange(n if self.max_blocks else 0, device=self.device)
        while len(cut):  # free cells must hang together: a draw that cuts the board is thrown away whole
            new = torch.ones(len(cut), self.cells, dtype=torch.bool, device=self.device)
            for _ in range(self.max_blocks):
                piece = self.blocks[torch.randint(len(self.blocks), (len(cut),), generator=self.generator,
                                                  device=self.device)]
                new &= ~(piece & (new | ~piece).all(1, keepdim=True))
            free[cut] = new
            somewhere = F.one_hot(new.int().argmax(1), self.cells)
            length = path_lengths(new.T, somewhere.T > 0, self.height, self.width)
            cut = cut[((length >= FAR) & new.T).any(0)]
        return free

    def draw_boards(self, n):
        """Draws n starts, prey and players on distinct free cells, uniformly: cell [N, n], board [C+1, n]."""
        free = self.draw_free(n)
        pieces = self.num_players + self.stags + self.hares
        number = torch.rand(n, self.cells, generator=self.generator, device=self.device)
        spot = number.masked_fill(~free, -1.0).topk(pieces, -1).indices  # [n, piece]
        around = F.pad(free.view(n, self.height, self.width).to(torch.uint8), (1, 1, 1, 1))
        board = (around[:, :-2, 1:-1] | around[:, 2:, 1:-1] << 1 | around[:, 1:-1, :-2] << 2
                 | around[:, 1:-1, 2:] << 3 | STAY_BIT).flatten(1) * free
        prey = torch.tensor([STAG_BIT] * self.stags + [HARE_BIT] * self.hares).to(board)
        board.scatter_add_(1, spot[:, self.num_players:], prey.expand(n, -1))
        board = F.pad(board, (0, 1), value=STAY_BIT)
        return spot[:, :self.num_players].T.contiguous(), board.T.contiguous()

    def reset(self, which=None):
        """Starts new episodes where `which` [B] says so, everywhere by default."""
        which = torch.arange(self.num_envs, device=self.device) if which is None else which.nonzero()[:, 0]
        if self.pool_next + len(which) > self.pool_size:  # boards are drawn in bulk and each is used once
            self.pool_cell, self.pool_board = self.draw_boards(self.pool_size)
            self.pool_next = 0
        pool = slice(self.pool_next, self.pool_next + len(which))
        self.pool_next = pool.stop
        self.cell = self.cell.index_copy(1, which, self.pool_cell[:, pool])
        self.board = self.board.index_copy(1, which, self.pool_board[:, pool])
        self.previous = self.previous.index_fill(1, which, STAY)
        self.clock = self.clock.index_fill(0, which, 0)
        self.deadline = self.deadline.index_fill(0, which, self.final_time)

    # ------------------------------------------------------------------------------------ playing

    def state(self):
        """Where the games stand: the tensors of STATE as they are."""
        return {name: getattr(self, name) for name in STATE}

    def legal_bits(self):
        """The legal actions of each player as bits: [N, B]."""
        return self.board.gather(0, self.cell)

    def advance(self, actions):
        """Plays one joint move [B, N] and does not reset.

        -> dict of reward, action as played, present when the step began, left in this step, ended (this
        player's own game is over, for it left or the episode is over): each [B, N]; over (the episode) [B]
        """
        bits = self.legal_bits()
        action = torch.where((actions >= 0) & (actions < NUM_ACTIONS), actions, STAY).T.to(torch.uint8)
        action = torch.where((bits >> action & 1).bool(), action, STAY)  # [N, B]
        present = self.cell < self.cells

        # Hunts, where the players stand. A cell holds at most one prey, so all who hunt there hunt it.
        hunting = action >= HUNT_STAG
        cell = self.cell.to(torch.uint8 if self.cells < 256 else torch.int32)  # long rows of bytes are fast
        together = cell[:, None] == cell  # [j, i, B]
        code = self.member_bit.dtype
        hunters = (together * (hunting * self.member_bit)[:, None]).sum(0, dtype=code)  # a set, [i, B]
        case = (bits >> HUNT_HARE).int() * (1 << self.num_players) + hunters.int()  # prey and set [N, B]
        caught = self.caught.index_select(0, case.view(-1)).view_as(case)  # the prey on my cell, by whomever
        reward = self.share.index_select(0, (case + self.share_offset).view(-1)).view_as(case) * present
        if self.prosocial:
            reward = (reward.double().sum(0) / self.num_players).float() * present
        left = caught & hunting
        self.board = self.board.scatter(0, self.cell, torch.where(caught, bits & GEOGRAPHY_BITS, bits))

        step = self.moves.index_select(0, action.view(-1).int()).view_as(self.cell)
        self.cell = torch.where(left, self.cells, self.cell + step)
        self.previous = action
        self.clock = self.clock + 1
        if self.dynamic_final_time:
            after_catch = torch.where(caught.any(0), self.clock + 5, self.final_time)
            self.deadline = torch.minimum(self.deadline, after_catch)
        nothing_left = (self.board.amax(0) < STAG_BIT) | (self.cell == self.cells).all(0)  # prey, players
        over = nothing_left | (self.clock >= self.deadline)
        return {"reward": reward.T, "action": action.T, "present": present.T, "left": left.T,
                "ended": (left | over).T, "over": over}


# ===================================================================================== players

# What a rule-based player does: (the step until which it seeks the stag, whether it turns to hares when no
# stag is left, the probability of a uniform legal action instead, whether it swaps prey half-way through
# a meeting, a row of episodes with the same players). "patient-K" seeks the stag until step K.
FOREVER = 1 << 30
RULES = {
    "random": (0, False, 1.0, False),
    "ns": (FOREVER, False, 0.0, False),
    "nh": (0, False, 0.0, False),
    "nsh": (FOREVER, True, 0.0, False),
    "noisy-ns": (FOREVER, False, 0.2, False),
    "noisy-nh": (0, False, 0.2, False),
    "switch-ns-nh": (FOREVER, False, 0.0, True),
    "switch-nh-ns": (0, False, 0.0, True),
}


def seeking_probabilities(game, prey_bit):
    """The action probabilities in each seat, [7, N, B], of a player that seeks the nearest prey of a kind."""
    here, bits = game.board[:-1], game.legal_bits()
    targets = here & prey_bit != 0
    length = path_lengths(here != 0, targets, game.height, game.width)
    length = F.pad(length, (0, 0, 0, 1), value=0)  # those that have left
    beyond = (game.cell + game.moves[:4, None, None]).clamp(0, game.cells)  # [4, N, B]
    shorter = length.gather(0, beyond.flatten(0, 1)).view_as(beyond) < length.gather(0, game.cell)
    legal = bits >> game.action_bits[:, None, None] & 1  # [7, N, B]
    weight = torch.zeros_like(legal)
    on_prey = bits & prey_bit != 0
    weight[:4] = legal[:4] * shorter * ~on_prey
    weight[HUNT_STAG if prey_bit == STAG_BIT else HUNT_HARE] = on_prey
    lost = ~targets.any(0) | (game.cell == game.cells)  # nothing left to seek, or the player itself has left
    weight[:STAY + 1] = torch.where(lost, legal[:STAY + 1], weight[:STAY + 1])
    weight = weight.float()
    return weight / weight.sum(0)


def rule_probabilities(game, rule, second_half=False):
    """The exact action probabilities of rule-based players: [B, N, 7].

    rule [B, N, 4] holds each seat's row of RULES, second_half [B] is true in the second half of a meeting.
    """
    until, falls_back, noise, swaps = rule.permute(2, 1, 0)  # each [N, B]
    stag_left = (game.board & STAG_BIT).amax(0) != 0
    seeks_stag = (game.clock < until) ^ (swaps.bool() & second_half)
    seeks_stag &= stag_left | ~falls_back.bool()
    to_stag, to_hare = seeking_probabilities(game, STAG_BIT), seeking_probabilities(game, HARE_BIT)
    goal = torch.where(seeks_stag, to_stag, to_hare)
    legal = (game.legal_bits() >> game.action_bits[:, None, None] & 1).float()
    return ((1 - noise) * goal + noise * (legal / legal.sum(0))).permute(2, 1, 0)


def sample_actions(probabilities, generator):
    """Draws an action from each row of probabilities [..., A]; one of probability 0 is never drawn."""
    total = probabilities.cumsum(-1)
    number = torch.rand(total.shape[:-1] + (1,), generator=generator, device=total.device) * (1 - 1e-6)
    return (total <= number * total[..., -1:]).sum(-1)


# =================================================================================== outputs


def prepare_torch(args):
    """Threads, device and seed."""
    check_ranges(args, ((1, 4096, ("threads",)), (0, math.inf, ("save_every",)), (0, 1e15, ("seed",))))
    try:
        torch.zeros(1, device=args.device).item()  # "meta" holds no numbers
    except (RuntimeError, AssertionError) as error:
        raise Refused(f"--device {args.device} cannot be used here: {str(error).splitlines()[0]}") from error
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)


def board_name(args):
    """The board in short: 4x4-4h1s, 8x8-b5-4h1s."""
    blocks = f"-b{args.max_blocks}" if args.max_blocks else ""
    return f"{args.height}x{args.width}{blocks}-{args.hares}h{args.stags}s"


def run_folder(args, number=0):
    """Where the run of these flags goes; a name that cannot be used is refused. Of itself it is named after
    the board, the script, the players, words chosen other than by default, the seed and the second."""
    chosen = [f"{field.name}-{getattr(args, field.name)}" for field in dataclasses.fields(args)
              if getattr(args, field.name) != field.default in getattr(field.type, "__args__", ())]
    players = "-".join(map(os.path.basename, getattr(args, "players", ())))
    words = "__".join(filter(None, [f"stag-hunt-{board_name(args)}", SCRIPT[:-3], players, *chosen]))
    automatic = f"{re.sub(r'[^a-zA-Z0-9_.-]+', '-', words)[:120]}__{args.seed}__{int(time.time())}"
    name = args.run_name or automatic + (f"-{number}" if number else "")
    reserved = r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?"  # names that Windows does not allow
    if re.search(r'[<>:"/\\|?*\0-\x1f]', name) or name.strip(". ") != name or re.fullmatch(reserved, name):
        raise Refused(f"--run-name {name!r} is no valid folder name")
    if len(os.fsencode(name)) > 240:
        raise Refused(f"--run-name {name} is too long for a folder name")
    folder = os.path.join(args.runs_dir, name)
    if not os.path.exists(folder):
        return folder
    if args.run_name is None:  # another run was begun in this very second
        return run_folder(args, number + 1)
    raise Refused(f"--run-name {name}: {folder} cannot be made: there is one")


def open_run(args):
    """Makes the folder of this run, or goes into that of --resume. -> folder"""
    if Processes.rank:
        folder = Processes.share(None)
        Interrupt.advice = f'go on with: python {SCRIPT} --resume "{folder}"'
        return folder
    folder = args.resume or run_folder(args)
    place = args.resume or folder + ".new"  # so that there is never a folder without its config.json
    config = {"script": SCRIPT, "version": VERSION, **dataclasses.asdict(args), "resume": None}
    with Interrupt() as interrupt:
        try:
            os.makedirs(place, exist_ok=True)
            for name in os.listdir(place):  # what was being written when the run was killed; old results
                if name.endswith(".new") or name == "results.json":
                    os.remove(os.path.join(place, name))
            save_json(os.path.join(place, "config.json"), config)
            if not args.resume:
                os.rename(place, folder)
        except (OSError, Failed) as error:
            if not args.resume:
                shutil.rmtree(place, ignore_errors=True)
            told = f"--run-name {os.path.basename(folder)}: {folder} cannot be made"
            told = f"--resume {folder} cannot be written into" if args.resume else told
            raise Refused(f"{told}: {getattr(error, 'strerror', error)}") from error
        Interrupt.advice = f'go on with: python {SCRIPT} --resume "{folder}"'
    if interrupt.wanted:
        Interrupt.leave(interrupt.wanted)
    return Processes.share(folder)


class Silent:
    """A writer that writes nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: None


def open_writer(folder, args, done=0):
    """The writer of TensorBoard events; what a resumed run wrote after step `done`, its last, is hidden."""
    if Processes.rank:
        return Silent()
    from torch.utils.tensorboard import SummaryWriter  # here, so that --help and tests need not wait for it

    def show(failure):  # what the writing thread cannot write is raised where the next point is written
        if not isinstance(failure.exc_value, OSError):
            threading.__excepthook__(failure)

    threading.excepthook = show
    writer = SummaryWriter(folder, purge_step=done + 1 if args.resume else None)
    if not done:
        flags = "\n".join(f"|{key}|{value}|" for key, value in dataclasses.asdict(args).items())
        writer.add_text("flags", "|flag|value|\n|-|-|\n" + flags)
    return writer


def save_json(path, content):
    """Writes a JSON file, whole or not at all."""
    write_file(path, json.dumps(content, indent=2).encode())


def write_file(path, content, before=None):
    """Writes a file to the disk, whole or not at all; what stood there may be kept, named `before`."""
    if Processes.rank:
        return
    new = path + ".new"
    try:
        with open(new, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if before and os.path.exists(path):
            os.replace(path, before)
        os.replace(new, path)
        if os.name != "nt":  # the folder's list of names is to be on the disk, too
            folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):  # a folder that is gone has no rest either
            os.remove(new)
        raise Failed(f"{path} cannot be written: {error.strerror}") from error


DIGEST = b"sha256:"  # stands before the last 64 bytes of a checkpoint, the SHA-256 of all before


def load_checkpoint(path, asked, device="cpu"):
    """Reads a checkpoint; what is none is refused in the name of what asked for it, a flag with its value."""
    if not os.path.isfile(path):
        raise Refused(f"{asked}: there is no {path}")
    try:
        with open(path, "rb") as file:
            data, _, digest = file.read().rpartition(DIGEST)
    except OSError as error:
        raise Refused(f"{asked}: {path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest().encode() != digest:
        raise Refused(f"{asked}: {path} is no checkpoint of these scripts, or damaged")
    return torch.load(io.BytesIO(data), map_location=device, weights_only=True)


def check_weights(weights, asked):
    """Refuses weights that no player and no model can have."""
    for name, value in weights.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise Refused(f"{asked}: the weights {name} are not all finite numbers")


COLOURS = ((0, 114, 178), (213, 94, 0), (0, 140, 100), (190, 95, 150), (90, 75, 170), (200, 150, 0),
           (60, 150, 215), (130, 40, 50))


def draw_board(game, env, caption="", size=64):
    """One game as a picture: numbered players, stags with antlers, hares with long ears, grey obstacles."""
    from PIL import Image, ImageDraw, ImageFont  # here, for only pictures need it

    image = Image.new("RGB", (max(game.width * size, 220), game.height * size + 26), (250, 248, 242))
    draw = ImageDraw.Draw(image)
    brown, grey, ink = (150, 92, 48), (176, 170, 162), (52, 54, 60)
    board, cells = game.board[:, env].tolist(), game.cell[:, env].tolist()

    def within(cell, *points):
        """Points given by their place in a cell, from 0 to 1."""
        return [(size * (cell % game.width + x), size * (cell // game.width + y)) for x, y in points]

    for cell, bits in enumerate(board[:-1]):
        draw.rectangle(within(cell, (0, 0), (1, 1)), "white" if bits else (104, 108, 118), (221, 216, 204))
        if bits & STAG_BIT:
            for side in (-1, 1):
                fork, tip = (0.5 + 0.2 * side, 0.22), (0.5 + 0.34 * side, 0.06)
                draw.line(within(cell, (0.5, 0.4), fork, tip), brown, 3)
                draw.line(within(cell, fork, (0.5 + 0.14 * side, 0.04)), brown, 3)
            draw.polygon(within(cell, (0.3, 0.34), (0.7, 0.34), (0.58, 0.9), (0.42, 0.9)), brown)
        elif bits & HARE_BIT:
            for ear in (0.32, 0.54):
                draw.ellipse(within(cell, (ear, 0.1), (ear + 0.14, 0.6)), grey)
            draw.ellipse(within(cell, (0.28, 0.45), (0.72, 0.9)), grey)
    for player, cell in enumerate(cells):
        if cell < game.cells:
            slot = cells[:player].count(cell)  # players of one cell stand beside its prey and one another
            x, y = 0.15 + 0.7 * (slot % 2), 0.85 - 0.29 * (slot // 2 % 3)
            colour, font = COLOURS[player % len(COLOURS)], ImageFont.load_default(size * 0.22)
            draw.ellipse(within(cell, (x - 0.14, y - 0.14), (x + 0.14, y + 0.14)), colour)
            draw.text(*within(cell, (x, y)), str(player + 1), "white", font, "mm")
    draw.text((4, game.height * size + 13), caption, ink, ImageFont.load_default(14), "lm")
    return image


def add_gif(writer, tag, frames, step, path):
    """Writes frames as a GIF into the run folder and TensorBoard, which plays it."""
    times = [1200] * (len(frames) - 1) + [3000]  # milliseconds
    more = {"save_all": True, "append_images": frames[1:], "duration": times, "loop": 0}
    add_image(writer, tag, lambda file: frames[0].save(file, "GIF", **more), step, path)


def add_image(writer, tag, save, step, path):
    """Writes the picture that `save` writes into a file into the run folder and TensorBoard."""
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary

    save(file := io.BytesIO())
    content, (width, height) = file.getvalue(), Image.open(file).size
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_file(path, content)
    picture = Summary.Image(encoded_image_string=content, width=width, height=height)
    writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=picture)]), step)


def print_table(title, rows):
    """Prints rows of text under a title, the first row being the head, in columns."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows)]
    print(f"\n{title}")
    for row in rows:
        cells = [str(cell).rjust(width) for cell, width in zip(row, widths)]
        print("  " + "  ".join([str(row[0]).ljust(widths[0]), *cells[1:]]))


def read_flags(args_class):
    """The flags that were typed; --help tells them in groups, which are the classes that args_class is made
    of. What tyro tells of a mistake in a box is made one line."""
    groups = [(group.__name__.removesuffix("Args").lower(), group, dataclasses.field(default_factory=group))
              for group in reversed(args_class.__mro__[1:-1])]
    told, flags = io.StringIO(), dataclasses.make_dataclass("flags", groups)
    about = (__doc__ or "").partition("\n\n")[0]
    try:
        with contextlib.redirect_stderr(told):
            given = tyro.cli(flags, description=about, config=(tyro.conf.OmitArgPrefixes,))
        return args_class(**{name: value for group in vars(given).values()
                             for name, value in vars(group).items()})
    except SystemExit as end:
        if not end.code:  # --help
            raise
        box = told.getvalue().split("\n", 1)[-1].split("──")[0]
        line = " ".join(box.replace("│", " ").split()).removeprefix("Error parsing ")
        line = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is no whole number", line)
        if wrong := re.match("Unrecognized options: (--[^ =,]+)", line):
            known = [flag(field.name) for field in dataclasses.fields(args_class)]
            near = difflib.get_close_matches(wrong[1], known, 1)
            line = f"there is no {wrong[1]}" + (f"; did you mean {near[0]}?" if near else "")
        raise Refused(line) from end


def run_script(args_class, main):
    """Reads the flags and runs main; what is refused is one line and exit code 2, what fails exit code 1."""
    code = 1
    try:
        if hasattr(sys.stdout, "reconfigure"):
            # Nothing is lost where the script ends at once, and what a terminal cannot show is no fault.
            sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
        with Processes.together():
            done = main(read_flags(args_class))
        for stream in filter(None, (sys.stdout, sys.stderr)):  # either may be closed
            stream.flush()
        os._exit(done or 0)  # at once: Python's own end hears no signal, and threads of torch's may spoil it
    except Refused as refusal:
        told, code = str(refusal), 2
    except Failed as failure:
        told = f"{failure}; {Interrupt.advice}"
    except OSError as error:  # of the disk or the folder: the scripts do nothing else that raises it
        told = f"{error.filename or 'a file'} cannot be used: {error.strerror or error}; {Interrupt.advice}"
    except RuntimeError as error:
        if "can't allocate memory" not in str(error) and not isinstance(error, torch.OutOfMemoryError):
            raise
        told = f"the memory is full: {str(error).rpartition(': ')[2].splitlines()[0]}; {Interrupt.advice}"
    if Processes.first():
        print(f"error: {told}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    run_script(Args, main)
