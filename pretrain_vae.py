"""Goals and models of others learned offline, from games of rule-based players.

    python pretrain_vae.py                                        goals, and a model of others (1 minute)
    python pretrain_vae.py --height 8 --width 8 --max-blocks 5    the same on 8x8 with obstacles
    python pretrain_vae.py --loss recon --kl-weight 1e-4          goals that hold the whole view
    python pretrain_vae.py --save-data games.npz                  keep the games; --data games.npz loads them
    python hopplus_selfplay.py --vae-checkpoint runs/x            play with what was learned here
    tensorboard --logdir runs                                     losses, scores and pictures

It plays games of rule-based players, whose kinds are drawn anew for each seat and episode, and learns

    the goal prior      a VAE: a player's view -> a goal, and back
    the model of others what a player is after (goal inference, from what it was seen to do in this episode),
                        and what it will do next, from its view and its goal (MOA)

What a player is really after is told in hindsight: its goal is the goal prior's embedding of the view of the
last step that it acts in, within --horizon steps. Goal inference is taught to foresee it.

After an epoch the run prints how well actions are predicted in games it never trained on, with the goal
inferred from the past and with the goal known in hindsight, beside the best that any predictor could score.
Everything is left in `runs/<run name>/`: results.json, checkpoint.pt, pictures, moa_eval_epochN.csv and .npz.

The file from top to bottom:
    flags       what can be chosen, and what is refused
    state       what a run keeps, and its random numbers
    training    the loop, what it logs, the final report
    games       played, kept and loaded; the samples in them
    learning    lessons, goals in hindsight, the losses
    scores      predictions beside their ceilings, what the goals tell of the players
    tables      what is printed, files for each epoch, pictures
    views       what a player sees, as a short list of facts
    networks    goal prior, its decoder, model of others
    game        the batched stag hunt and its rules
    players     rule-based players
    outputs     run folder, checkpoints, tables

Letters in shapes:
    N players    E episodes      S players' games, one for each seat and episode    M samples, or any rows
    C cells      T steps         B games of a lesson, side by side                  J kinds of players
    K facts      W ways to play  G numbers in a goal    H = 4 W hypotheses          L = P = 1 model
A sample is one player's view and action in a step in which it is on the board.
"""

import contextlib
import csv
import dataclasses
import difflib
import hashlib
import io
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
from typing import Literal, get_args, get_origin

START = time.perf_counter()  # seconds are counted from here, before the slow imports
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
    def times(cls):
        """The seconds of the messages since this was last asked, to be logged. Who comes last to a message
        waits for nobody: what that one needs is communication, what others need beyond it is waiting."""
        if cls.size == 1:
            return {}
        own, cls.spent = torch.tensor(cls.spent), []
        least = own.clone()
        cls.call(torch.distributed.all_reduce, least, torch.distributed.ReduceOp.MIN)
        return {"time/communication": least.sum().item(), "time/waiting": (own - least).sum().item()}

    @classmethod
    def first(cls):
        """Whether no other process has told yet why the run ends."""
        try:
            return cls.store is None or cls.store.add("told", 1) == 1
        except RuntimeError:  # whoever kept count is gone
            return True

    @classmethod
    def seed(cls, seed):
        """From one seed one for each process; that of process 0 is the seed itself."""
        return f"{seed} of process {cls.rank}" if cls.rank else seed

    @classmethod
    def share(cls, value, by=0):
        """What one process has, for all."""
        box = [value]
        if cls.size > 1:
            cls.call(torch.distributed.broadcast_object_list, box, by)
        return box[0]

    @classmethod
    def gather(cls, state):
        """The states of all but process 0, for process 0; for the others nothing."""
        states = [None] * cls.size
        if cls.size > 1:
            cls.call(torch.distributed.gather_object, state, None if cls.rank else states)
        return [] if cls.rank else states[1:]

    @classmethod
    def most(cls, *numbers):
        """Whole numbers, each the largest that any process has."""
        told = torch.tensor([int(number) for number in numbers])
        if cls.size > 1:
            cls.call(torch.distributed.all_reduce, told, torch.distributed.ReduceOp.MAX)
        return told.tolist()

    @classmethod
    def mean(cls, *parts):
        """Tensors, each the mean over all processes, in one message."""
        if cls.size == 1:
            return parts
        flat = torch.cat([part.detach().float().flatten() for part in parts])
        if cls.size == 2:  # they tell one another all: no more bytes than round a ring, in one round of two
            both = [torch.empty_like(flat) for _ in range(2)]
            cls.call(torch.distributed.all_gather, both, flat)
            flat = both[0] + both[1]
        else:
            cls.call(torch.distributed.all_reduce, flat)
        means = flat.div_(cls.size).split([part.numel() for part in parts])
        return [mean.view_as(part) for mean, part in zip(means, parts)]

    @classmethod
    def mean_gradients(cls, network, *figures):
        """Puts the mean over all processes in the place of each gradient. -> the means of the figures"""
        if cls.size == 1:
            return figures
        learning = [part for part in network.parameters() if part.grad is not None]
        means = cls.mean(*figures, *(part.grad for part in learning))
        for part, mean in zip(learning, means[len(figures):]):
            part.grad = mean
        return [figure.clone() for figure in means[:len(figures)]]  # without the gradients' memory


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
    num_players: int = 4
    """players of a game"""
    mix: tuple[str, ...] = ("ns", "nh")
    """the kinds of rule-based players that are drawn anew for each seat and episode: random, ns, nh, nsh,
    patient-28, noisy-ns, noisy-nh"""
    episodes: int = 15_000
    """episodes to train on; with the default board and mix each holds about 30 samples"""
    loss: Literal["moa", "recon", "both"] = "moa"
    """what shapes the goals, beside the KL term: predicting actions, rebuilding the view, or both. What does
    not shape them is still learned, on the goals as they are"""
    goal_dim: int = 16
    """numbers in a goal"""
    init_from: str | None = None
    """begin with the networks of this run or checkpoint; with --epochs 0 they are only scored"""
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
class SampleArgs:
    shares: tuple[float, ...] | None = None
    """how often each kind of the mix is drawn, in proportion; without it, equally"""
    held_out_episodes: int = 1_500
    """other episodes, to score on"""
    moa_samples: Literal["present", "rewarded"] = "present"
    """learn from all players, or only from those that ended with a catch"""
    data: str | None = None
    """load the games from this file instead of playing them; its board and mix are taken over"""
    save_data: str | None = None
    """keep the games in this file"""


@dataclass
class GoalArgs:
    kl_weight: float = 1e-3
    """weight of the KL divergence of the goals from a standard normal"""
    horizon: int = 35
    """steps within which a goal is looked for in hindsight"""
    hypotheses: int = 8
    """ways to play among which the inference of a goal tells"""
    hidden_size: int = 64
    """units in the hidden layers of the model of others"""
    vae_size: int = 128
    """units in the hidden layers of the goal prior and its decoder"""


@dataclass
class LearningArgs:
    epochs: int = 3
    """times that training goes through its games"""
    batch_size: int = 256
    """players' games in a minibatch, each from its first to its last step"""
    learning_rate: float = 1e-2
    """step size of Adam at the start; it falls to 0 over the epochs"""
    max_grad_norm: float = 0.5
    """gradients of a network longer than this are shortened to it"""


@dataclass
class MeasuringArgs:
    eval_every: int = 1
    """epochs between two scorings; the last is always scored"""


@dataclass
class Args(MeasuringArgs, LearningArgs, GoalArgs, SampleArgs, RunArgs, GameArgs, FirstArgs):
    """All flags of the script; --help tells them in these groups, the last one first."""


RANGES = (
    (1, math.inf, ("episodes", "held_out_episodes", "horizon", "goal_dim", "hypotheses", "hidden_size",
                   "vae_size", "batch_size", "eval_every")),
    (0, math.inf, ("epochs",)),
    (0, 1e6, ("kl_weight",)),
    (1e-9, 1e6, ("learning_rate", "max_grad_norm")),
)


def check_flags(args):
    """Refuses flags that make no sense, alone or together."""
    check_ranges(args, RANGES)
    refuse_ignored(args, (
        ("the goals of rule-based players, whom rewards do not move", True,
         ("stag_reward", "hare_reward", "time_reward", "strengths", "prosocial")),
        ("a --mix of one kind", len(args.mix) == 1, ("shares",)),
        ("--data", args.data is not None, ("save_data",)),
        ("--epochs 0", args.epochs == 0, ("batch_size", "learning_rate", "max_grad_norm", "eval_every")),
    ))
    for name in args.mix:
        if player_rule(name, "--mix")[3]:
            raise Refused(f"--mix {name}: here no meeting has a second half in which it could swap prey")
    if args.shares is not None:
        shares = f"--shares {' '.join(f'{share:g}' for share in args.shares)}"
        if len(args.shares) != len(args.mix) or not all(0 < share < math.inf for share in args.shares):
            raise Refused(f"{shares} must be positive numbers, one for each of --mix {' '.join(args.mix)}")
    if not args.mix:
        raise Refused("--mix names no kind of player")
    cells, n = args.height * args.width, args.num_players
    check_memory(args, (
        (4 * cells**2, ("height", "width")),
        (2 * n * args.final_time * args.episodes, ("episodes", "final_time")),
        (2 * n * args.final_time * args.held_out_episodes, ("held_out_episodes", "final_time")),
        (4 * args.hidden_size * (args.hidden_size + 49 * (n + 2)), ("hidden_size",)),
        (4 * args.vae_size * (49 * (n + 2) + args.goal_dim), ("vae_size", "goal_dim")),
        (4 * args.hidden_size * NUM_ACTIONS * args.hypotheses, ("hypotheses", "hidden_size")),
    ))
    if args.epochs == 0 and args.init_from is None:
        raise Refused("--epochs 0 trains nothing: name networks to score with --init-from")


# ======================================================================================= state


class Refused(ValueError):
    """Flags or files that cannot be used: told in one line that names them, with exit code 2."""


class Failed(RuntimeError):
    """What a run cannot go on from: told in one line, with exit code 1."""


class NotFinite(Failed):
    """Numbers that ceased to be finite."""


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


def check_finite(numbers, what, whose=()):
    """Ends the run before numbers that are not finite are learned from; whose are the names of the rows."""
    bad = ~numbers.detach().isfinite()
    if bad.any():
        rows = bad.reshape(len(bad), -1).any(1).nonzero()[:, 0].tolist() if len(whose) else []
        raise NotFinite(" ".join([what, *(f"of {whose[row]}" for row in rows[:1]), "is not finite"]))


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

    def state_dict(self):
        """The state by name, for a checkpoint."""
        state = {}
        for name in self.saved:
            part = getattr(self, name)
            get = getattr(part, "state_dict", None) or getattr(part, "get_state", None)
            state[name] = get() if get else part
        return state

    def load_state_dict(self, state):
        """Goes on from a state, or from a part of one."""
        for name, value in state.items():
            part = getattr(self, name)
            if isinstance(part, torch.Generator):
                part.set_state(value.cpu())
            elif hasattr(part, "load_state_dict"):
                part.load_state_dict(value)
            elif isinstance(part, torch.Tensor) and part.shape[1:] != value.shape[1:]:
                raise ValueError(f"{name}: {list(value.shape)} instead of {list(part.shape)}")
            else:
                setattr(self, name, value)


def seeded(seed, what, device="cpu"):
    """A random generator for one thing, `what`: from one seed, different things draw different numbers."""
    return torch.Generator(device).manual_seed(random.Random(f"{seed} {what}").getrandbits(63))


# ==================================================================================== training


class Run(Saved):
    """What a run is made of. What `saved` names is in its checkpoints, so that it can be gone on with."""

    saved = ("prior", "known", "decoder", "optimizer", "generator", "step", "losses", "history", "seconds")
    own = ("generator",)  # what each process has for itself

    def __init__(self, args, num_games):
        views, device = make_views(args), args.device
        self.prior = GoalPrior(1, views, args.vae_size, args.goal_dim, args.seed + 2)
        self.known = OtherModel(1, views, args.hidden_size, args.goal_dim, args.hypotheses, args.seed + 1)
        self.decoder = GoalDecoder(1, views, args.vae_size, args.goal_dim, args.seed + 3)
        if args.init_from is not None:
            asked = f"--init-from {args.init_from}"
            before = load_goals(args.init_from, asked, args, self.prior, self.known)
            self.decoder.load_state_dict(before["decoder"])
        self.networks = nn.ModuleList([self.prior, self.known, self.decoder]).to(device)
        self.networks.load_state_dict(Processes.share(self.networks.state_dict()))
        self.optimizer = torch.optim.Adam(self.networks.parameters(), eps=1e-5, fused=True)
        self.generator = seeded(Processes.seed(args.seed), "learning", device)
        self.batches = math.ceil(num_games / (args.batch_size * Processes.size))  # minibatches of an epoch
        if self.batches * Processes.size > num_games:
            raise Refused(f"--batch-size {args.batch_size}: {num_games} players' games are too few for "
                          f"{Processes.size} processes")
        self.last_step = args.epochs * self.batches
        self.step = 0  # minibatches learned from
        self.losses = []  # of this epoch's minibatches
        self.history = []  # of the epochs
        self.seconds = 0.0  # from the start of the script to the last minibatch

    def content(self, args):
        """What a checkpoint holds."""
        state = self.state_dict()
        return {"config": dataclasses.asdict(args), **state,
                "others": Processes.gather({name: state[name] for name in self.own})}


def main(args):
    args = resolve_flags(args)
    check_flags(args)
    prepare_torch(args)
    checkpoint = load_run(args)
    args, games, samples, held_out = make_samples(args)
    run = Run(args, len(samples["length"]))
    if checkpoint is not None:
        restore(run, checkpoint, args)
        if run.step >= run.last_step and os.path.isfile(f"{args.resume}/results.json"):
            print(f"{args.resume} had finished: nothing was changed")
            return 0
    elif args.save_data is not None:
        save_games(args, games)
    folder = open_run(args)
    writer = open_writer(folder, args, len(run.history))
    print(f"[VAE] {len(samples['x'])} samples of {args.episodes} episodes to train on, {len(held_out['x'])} "
          f"of {args.held_out_episodes} others held out ({board_name(args)}, {' '.join(args.mix)})")
    try:
        stopped, evaluation = train(args, run, folder, writer, samples, held_out)
    except NotFinite as failure:
        save_checkpoint(folder, run.content(args), "not-finite.pt")
        raise Failed(f"{failure}, after {run.step} minibatches, in epoch {len(run.history)}; the state is "
                     f"kept in {folder}/not-finite.pt, and the last good checkpoint stays") from failure
    if stopped:
        print(f'stopped in epoch {len(run.history)}; go on with: python {SCRIPT} --resume "{folder}"')
    elif not Processes.rank:
        report(args, run, folder, writer, evaluation or evaluate(args, run, held_out), samples, held_out)
    writer.close()
    return 128 + stopped if stopped else 0


def train(args, run, folder, writer, samples, held_out):
    """Learns. -> 0 at the end, or the signal that stopped the run before; the last evaluation, if any"""
    begun = saved = time.perf_counter()
    step_before, seconds_before, evaluation = run.step, run.seconds, None
    bar = tqdm(total=run.last_step, initial=run.step, unit=" minibatches", dynamic_ncols=True,
               mininterval=0.5, desc="training")
    stopped = 0
    with bar, Interrupt() as interrupt:
        while run.step < run.last_step and not stopped:
            epoch, number = divmod(run.step, run.batches)
            learning_rate = args.learning_rate * (1 - run.step / run.last_step)
            run.optimizer.param_groups[0]["lr"] = learning_rate
            order = seeded(args.seed, f"epoch {epoch}", args.device)
            games = torch.randperm(len(samples["length"]), generator=order, device=args.device)
            games = games[number::run.batches][Processes.rank::Processes.size]
            run.losses.append(learn(args, run, samples, games))
            run.step += 1
            run.seconds = seconds_before + time.perf_counter() - START
            bar.update()

            if number == run.batches - 1:  # an epoch is over
                scored = (epoch + 1) % args.eval_every == 0 or epoch + 1 == args.epochs
                evaluation = evaluate(args, run, held_out) if scored and not Processes.rank else None
                speed = (run.step - step_before) / (time.perf_counter() - begun) / run.batches
                end_epoch(run, folder, writer, evaluation, held_out, {
                    "charts/learning_rate": learning_rate, "charts/SPS": speed * len(samples["x"]),
                    **Processes.times()})
            stopped, due = Processes.most(interrupt.wanted, time.perf_counter() - saved > args.save_every)
            if due:
                saved = time.perf_counter()
                writer.flush()
                save_checkpoint(folder, run.content(args))
        writer.flush()
        save_checkpoint(folder, run.content(args))
    return stopped, evaluation


def end_epoch(run, folder, writer, evaluation, held_out, numbers):
    """Writes what there is to tell of an epoch: losses, scores beside their ceilings, other numbers."""
    epoch = len(run.history)
    row = {"epoch": epoch, "train": {name: torch.stack([each[name] for each in run.losses]).mean().item()
                                     for name in run.losses[0]}}
    if evaluation is not None:
        row["held_out"] = evaluation["losses"]
        numbers["vae/exact_views"] = evaluation["exact_views"]
        for predictor, scores in evaluation["moa"].items():
            numbers |= {f"moa/{key}/{predictor}": scores[key] for key in ("top1", "top3", "cross_entropy")}
        written = write_evaluation(folder, epoch, evaluation, held_out)
        tqdm.write(f"{epoch_lines(epoch, evaluation)}\n      by action: {written}.csv, .npz")
    for part in ("train", "held_out"):
        numbers |= {f"losses/{name}/{part}": value for name, value in row.get(part, {}).items()}
    for key, value in numbers.items():
        writer.add_scalar(key, value, epoch + 1)
    run.history.append(row)
    run.losses = []


def report(args, run, folder, writer, evaluation, samples, held_out):
    """Looks into the goals, writes results.json and the pictures, and prints the tables."""
    goals = meaning_of_goals(args, run, evaluation, samples, held_out) if len(args.mix) > 1 else None
    results = {"epochs": len(run.history), "samples": len(samples["x"]),
               "held_out_samples": len(held_out["x"]), "seconds": round(run.seconds, 2),
               "cpu_seconds": round(time.process_time(), 2), "moa": evaluation["moa"],
               "losses": evaluation["losses"], "exact_views": evaluation["exact_views"],
               "goals": goals, "history": run.history}
    write_pictures(folder, writer, results, evaluation, held_out)
    writer.flush()
    save_json(os.path.join(folder, "results.json"), results)
    print_results(args, results, held_out["action"])
    print(f"\n{len(run.history)} epochs on {len(samples['x'])} samples in {run.seconds:.0f} s. "
          f"Everything is in {folder}")


# ======================================================================================= games

# What a file of games holds: who played, the start, and all that was done; and the flags it was made with.
GAMES = ("kind", "cell", "board", "actions")  # [N, E], [N, E], [C+1, E], [T, N, E]
GAMES_FLAGS = ("num_players", "mix", "shares", "episodes", "held_out_episodes")  # beside those of the board


def board_flags(args):
    """The flags of the board."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(GameArgs)}


def make_views(args):
    return Views(args.height, args.width, args.num_players, args.final_time, args.device)


def make_samples(args):
    """Plays the games, or those of --data. -> flags, for they may be those of --data; the games, to be saved;
    samples to train on, held-out samples"""
    recorded = (None, None)
    try:
        if args.data is not None:
            args, *recorded = load_games(args)
        games, samples = play_games(args, args.episodes, args.seed, recorded[0])
        others, held_out = play_games(args, args.held_out_episodes, args.seed + 1_000_000, recorded[1])
    except (IndexError, RuntimeError, TypeError) as error:  # numbers and shapes that do not fit together
        if args.data is None:
            raise
        told = str(error).partition("\n")[0]
        raise Refused(f"--data {args.data} holds games that cannot be played: {told}") from error
    return args, {name: torch.cat([games[name], others[name]], -1) for name in GAMES}, samples, held_out


@torch.no_grad()
def play_games(args, episodes, seed, recorded=None):
    """Plays whole episodes, or recorded ones again. -> what it takes to play them again (GAMES), and samples

    The samples are dicts of tensors, one player's game after another:

        first, length [S]       a player's game: its first sample, and how many it has
        kind, caught [S]        who it is, and what it caught in the end (0 nothing, 1 a stag, 2 a hare)
        game, step, action [M]  a sample: which of the S games, which step of it, the action
        x [M, K]                the view
        kind_probs [M, J, 7]    the action probabilities of each kind of the mix there
        posterior [M, J]        how likely each kind is by Bayes' rule, from the actions before
    """
    game = BatchedStagHunt(episodes, num_players=args.num_players, device=args.device, seed=seed,
                           **board_flags(args))
    n, device, views = args.num_players, args.device, make_views(args)
    generator = seeded(seed, "players", device)
    rules = torch.tensor([player_rule(name) for name in args.mix], device=device)  # [J, 4]
    shares = torch.tensor(args.shares or [1.0] * len(args.mix), device=device)
    if recorded is None:
        kind = torch.multinomial(shares, n * episodes, True, generator=generator).view(n, episodes)
    else:
        kind, game.cell, game.board = recorded["kind"], recorded["cell"], recorded["board"]
    games = {"kind": kind, "cell": game.cell, "board": game.board,
             "actions": torch.full((args.final_time, n, episodes), STAY, device=device)}
    belief = (shares / shares.sum()).log().expand(n, episodes, -1)  # [N, E, J]
    number = torch.arange(n, device=device)[:, None] + n * torch.arange(episodes, device=device)
    running = torch.ones(episodes, dtype=torch.bool, device=device)
    caught, steps = torch.zeros_like(kind), []
    while running.any():
        state, t = game.state(), len(steps)
        probs = torch.stack([rule_probabilities(game, rule.expand(episodes, n, -1))
                             for rule in rules], 2).transpose(0, 1)  # [N, E, J, 7]
        own = probs.take_along_dim(kind[..., None, None], 2)[:, :, 0]
        action = sample_actions(own, generator) if recorded is None else recorded["actions"][t]
        out = game.advance(action.T)
        there = out["present"].T & running
        if not (own.take_along_dim(action[..., None], 2)[there] > 0).all():
            raise Refused(f"--data {args.data}: in step {t} a player does what its kind would not do")
        games["actions"][t] = torch.where(there, action, STAY)
        step = {"game": number, "step": torch.full_like(number, t), "action": action, "x": views.look(state),
                "kind_probs": probs, "posterior": belief.softmax(-1)}
        steps.append({name: part[there] for name, part in step.items()})
        belief = belief + probs.take_along_dim(action[..., None, None], 3)[..., 0].log()
        caught = caught + (out["left"].T & there) * (action - STAY)
        running = running & ~out["over"]
    samples = {name: torch.cat([step[name] for step in steps]) for name in steps[0]}
    return games, sort_samples(args, samples, kind.T.flatten(), caught.T.flatten())


def sort_samples(args, samples, kind, caught):
    """Lays samples out one player's game after another; or only games with a catch."""
    wanted = caught > 0 if args.moa_samples == "rewarded" else torch.ones_like(caught, dtype=torch.bool)
    order = samples["game"].argsort(stable=True)  # they came step by step
    order = order[wanted[samples["game"][order]]]
    samples = {name: part[order] for name, part in samples.items()}
    if not len(order):
        raise Refused(f"--moa-samples {args.moa_samples}: nobody caught anything in all episodes")
    samples["game"] = (wanted.cumsum(0) - 1)[samples["game"]]
    length = torch.bincount(samples["game"])
    return samples | {"first": length.cumsum(0) - length, "length": length, "kind": kind[wanted],
                      "caught": caught[wanted]}


def save_games(args, games):
    """Keeps games in a file that --data loads."""
    flags = board_flags(args) | {name: getattr(args, name) for name in GAMES_FLAGS}
    file = io.BytesIO()
    np.savez_compressed(file, flags=np.array(json.dumps(flags)),
                        **{name: part.short().cpu().numpy() for name, part in games.items()})
    try:
        write_file(args.save_data, file.getvalue())
    except Failed as failure:
        raise Refused(f"--save-data {failure}") from failure


def load_games(args):
    """Reads --data. -> the flags with its board and mix taken over, games to train on, held-out games"""
    asked = f"--data {args.data}"
    try:
        with np.load(args.data, allow_pickle=False) as file:
            if any(file[name].dtype.kind not in "iu" for name in GAMES):
                raise TypeError("not whole numbers")
            games = {name: torch.from_numpy(file[name].astype(np.int64)).to(args.device) for name in GAMES}
            flags = json.loads(str(file["flags"]))
        flags = {name: tuple(flags[name]) if isinstance(flags[name], list) else flags[name]
                 for name in (*board_flags(args), *GAMES_FLAGS)}
    except Exception as error:  # there are many ways in which a file can be another than it should be
        raise Refused(f"{asked} is no file of games ({type(error).__name__})") from error
    for field in dataclasses.fields(args):
        given, value = getattr(args, field.name), flags.get(field.name)
        if field.name in flags and given not in (value, field.default):
            raise Refused(f"{flag(field.name)} {given} does not fit {asked}, which was made with {value}")
    args = dataclasses.replace(args, **flags)
    check_flags(args)
    most = {"kind": len(args.mix) - 1, "cell": args.height * args.width - 1, "board": 127,
            "actions": NUM_ACTIONS - 1}
    for name, part in games.items():
        if not part.numel() or not 0 <= part.min() <= part.max() <= most[name]:
            raise Refused(f"{asked} is no file of games: {name} is not from 0 to {most[name]}")
    games["board"] = games["board"].to(torch.uint8)
    split = lambda part: {name: each[..., part] for name, each in games.items()}
    return args, split(slice(args.episodes)), split(slice(args.episodes, None))


# ==================================================================================== learning

INFERENCE_WEIGHT = 0.05  # of the inference's distance to the goal in hindsight, beside the predicted actions


HINDSIGHT = 0.25  # share of the steps whose action is to be told from the goal in hindsight, not the belief


def make_lesson(args, known, samples, games):
    """A lesson [P, T, B, ...]: some players' games [B] side by side, the shorter ones filled up at the end.
    rows [T, B] are the samples."""
    length = samples["length"][games]
    step = torch.arange(int(length.max()), device=length.device)[:, None]
    seen = step < length
    rows = torch.where(seen, samples["first"][games] + step, 0)
    return {"x": samples["x"][rows][None], "action": samples["action"][rows][None], "seen": seen[None],
            "weight": seen[None], "memory": known.start(len(games)),
            "goal_step": last_steps((step == length - 1)[None], args.horizon), "rows": rows}


def last_steps(ends, horizon):
    """For each step of a player's games the last one of that game within the horizon: numbers [.., T, B]."""
    steps = ends.shape[-2]
    last, end = torch.empty(ends.shape, dtype=torch.int64, device=ends.device), steps - 1
    for t in reversed(range(steps)):
        end = torch.where(ends[..., t, :], t, end)
        last[..., t, :] = end.clamp(max=t + horizon - 1)
    return last


def pick_goals(mean, logvar, goal_step):
    """The goals in hindsight, from the goals of all views [P, T * B, G] and the step of each [P, T, B]."""
    index = goal_step[..., None].expand(*goal_step.shape, mean.shape[-1])
    mean, logvar = (part.unflatten(1, goal_step.shape[1:]).gather(1, index) for part in (mean, logvar))
    return {"goal_mean": mean, "goal_logvar": logvar}


def draw_goals(mean, logvar, generator):
    """Goals drawn from beliefs."""
    return mean + (0.5 * logvar).exp() * torch.randn(mean.shape, generator=generator, device=mean.device)


def gaussian_kl(mean, logvar, other_mean, other_logvar):
    """KL(N(mean, var) || N(other)) of diagonal normals, summed over the last dimension."""
    distance = (logvar.exp() + (mean - other_mean).square()) * (-other_logvar).exp()
    return 0.5 * (distance - 1 + other_logvar - logvar).sum(-1)


def infer_goals(model, lesson):
    """What a model of others makes of stretches of play [P, T, B, ...].

    -> outputs of its first layer, mean and log-variance of the goal inferred before each step, and the
    log-probability of each action by the ways to play, weighted by that player's own past: [P, T * B, ...]
    """
    first, hidden, table = model.look(lesson["x"].flatten(1, 2))
    memories, taken = model.follow(lesson["memory"], table.unflatten(2, lesson["x"].shape[1:3]),
                                   lesson["action"], lesson["seen"])
    memory = torch.stack(memories[:-1], 1)
    alone = sum(memory.split(taken.shape[-1], -1)[:len(SLIPS)])  # each by itself [P, T, B, W]
    likely = (alone.clamp(min=1e-30).log() + taken).logsumexp(-1)
    weights, _ = model.weights(memory.flatten(1, 2))
    return first, *model.read(weights, hidden), likely.flatten(1)


def others_loss(model, lesson, generator):
    """What a model of others is taught on stretches of play: a dict of losses [P], "loss" being what is
    minimised, each added up over the samples.

    The ways to play, weighted by a player's own past, are to foresee each action. The goal read from them is
    to be near the goal in hindsight. Both that and a draw from the belief are to tell the action.
    """
    x, action = lesson["x"], lesson["action"]
    first, mean, logvar, likely = infer_goals(model, lesson)
    weight, action = lesson["weight"].float().flatten(1), action.flatten(1)
    goal = draw_goals(mean, logvar, generator)
    losses = {"hypotheses_loss": -(likely * weight).sum(-1)}
    if "goal_mean" in lesson:
        hindsight = lesson["goal_mean"].flatten(1, 2), lesson["goal_logvar"].flatten(1, 2)
        distance = gaussian_kl(*(part.detach() for part in hindsight), mean, logvar)
        losses["inference_loss"] = (distance * weight).sum(-1)
        told = torch.rand(weight.shape, generator=generator, device=x.device) < HINDSIGHT
        goal = torch.where(told[..., None], draw_goals(*hindsight, generator), goal)
    log_probs = model.act(first + goal @ model.goal, model.views.mask(x.flatten(1, 2)))
    taken = log_probs.gather(-1, action[..., None])[..., 0]
    losses["action_loss"] = -(taken * weight).sum(-1)
    losses["loss"] = (losses["hypotheses_loss"] + 2 * losses["action_loss"]
                      + INFERENCE_WEIGHT * losses.get("inference_loss", 0.0))
    return losses


def goal_losses(args, run, lesson):
    """All losses of a lesson, added up over its samples: a dict of [P], "loss" being what is minimised.

    --loss says what shapes the goals: the model of others (moa), the decoder (recon), or both. The other one
    learns from the goals as they are (detached).
    """
    x = lesson["x"].flatten(1, 2)
    mean, logvar = run.prior(x)
    goal, weight = draw_goals(mean, logvar, run.generator), lesson["weight"].flatten(1).float()
    rebuilt = run.decoder(goal.detach() if args.loss == "moa" else goal)
    shaping = (mean.detach(), logvar.detach()) if args.loss == "recon" else (mean, logvar)
    losses = others_loss(run.known, lesson | pick_goals(*shaping, lesson["goal_step"]), run.generator)
    distance = gaussian_kl(mean, logvar, torch.zeros_like(mean), torch.zeros_like(mean))
    losses["recon_loss"] = (rebuild_loss(rebuilt, run.decoder.target(x)) * weight).sum(-1)
    losses["kl_loss"] = (distance * weight).sum(-1)
    losses["loss"] = losses["loss"] + losses["recon_loss"] + args.kl_weight * losses["kl_loss"]
    return losses


def rebuild_loss(rebuilt, target):
    """What is lost of views rebuilt: the -log-likelihood of their facts [L, M]."""
    return F.binary_cross_entropy_with_logits(rebuilt, target, reduction="none").sum(-1)


def learn(args, run, samples, games):
    """One step of the optimiser, on the games of some players. -> the losses, means over their samples"""
    length, total = samples["length"][games], {}
    many, = Processes.mean(length.sum())
    run.optimizer.zero_grad()
    for part in length.argsort(stable=True).chunk(4):  # of like length, so that little must be filled up
        losses = goal_losses(args, run, make_lesson(args, run.known, samples, games[part]))
        (losses["loss"].sum() / many).backward()
        total = {name: total.get(name, 0.0) + loss.detach()[0] / many for name, loss in losses.items()}
    total = dict(zip(total, Processes.mean_gradients(run.networks, *total.values())))
    check_finite(total["loss"], "the loss")
    for network in run.networks:
        clip_gradients(network, args.max_grad_norm)
    run.optimizer.step()
    return total


def clip_gradients(agent, max_norm):
    """Shortens the gradient of each learner to max_norm, on its own."""
    gradients = [parameter.grad for parameter in agent.parameters() if parameter.grad is not None]
    norm = sum(gradient.flatten(1).square().sum(1) for gradient in gradients).sqrt()  # [L]
    check_finite(norm, f"the gradient of {type(agent).__name__}", getattr(agent, "owners", ()))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)[:, None, None]
    for gradient in gradients:
        gradient.mul_(factor)


def load_goals(path, asked, args, prior, known):
    """Loads goal prior and model of others from a run or checkpoint of pretrain_vae.py. -> the checkpoint"""
    path = os.path.join(path, "checkpoint.pt") if os.path.isdir(path) else path
    saved = load_checkpoint(path, asked, args.device)
    if "prior" not in saved:
        raise Refused(f"{asked}: {path} holds no goals, it was written by {saved['script']}")
    fitting = {"num_players": len(known.views.order)}
    for name in ("height", "width", "final_time", "goal_dim", "hypotheses", "hidden_size", "vae_size"):
        fitting[name] = getattr(args, name)
    for name, value in fitting.items():
        if value != saved["config"][name]:
            raise Refused(f"{flag(name)} {value} does not fit {asked}, which has {saved['config'][name]}")
    for part, weights in ((prior, saved["prior"]), (known, saved["known"])):
        check_weights(weights, asked)
        part.load_state_dict(weights)
    return saved


# ====================================================================================== scores

LOSSES = ("moa", "moa_inferred", "hypotheses", "recon", "recon_mse", "kl", "inference")  # of `predict_lesson`
DRAWS = 4  # of the inferred goal, over which predictions are averaged


@torch.no_grad()
def predict_lesson(run, lesson, generator):
    """What the networks make of a lesson, each [L, M, ...]: losses, probabilities of the actions, goals.

    moa             -log-probability of the action, with the goal known in hindsight
    moa_inferred    the same with draws of the goal inferred from the past
    hypotheses      the same by the inference's own weighted hypotheses
    recon, kl       of the view's own goal: -log-likelihood of the view; KL from the standard normal
    recon_mse       beside recon, the mean squared error of the view's facts
    inference       KL of the inferred goal from the one in hindsight
    """
    x, action = lesson["x"].flatten(1, 2), lesson["action"].flatten(1)[..., None]
    mean, logvar = run.prior(x)
    goal = pick_goals(mean, logvar, lesson["goal_step"])
    hindsight, hindsight_logvar = goal["goal_mean"].flatten(1, 2), goal["goal_logvar"].flatten(1, 2)
    first, inferred, inferred_logvar, likely = infer_goals(run.known, lesson)
    view = run.decoder.target(x)
    mask = run.known.views.mask(x)
    act = lambda goal: run.known.act(first + goal @ run.known.goal, mask).exp()
    by_hindsight = act(hindsight)
    by_inference = sum(act(draw_goals(inferred, inferred_logvar, generator)) for _ in range(DRAWS)) / DRAWS
    moa, moa_inferred = (-probs.take_along_dim(action, -1)[..., 0].clamp(min=1e-12).log()
                         for probs in (by_hindsight, by_inference))
    rebuilt = run.decoder(draw_goals(mean, logvar, generator))
    return {"moa": moa, "moa_inferred": moa_inferred, "hypotheses": -likely,
            "recon": rebuild_loss(rebuilt, view), "recon_mse": (rebuilt.sigmoid() - view).square().mean(-1),
            "kl": gaussian_kl(mean, logvar, torch.zeros_like(mean), torch.zeros_like(mean)),
            "inference": gaussian_kl(hindsight, hindsight_logvar, inferred, inferred_logvar),
            "prob_hindsight": by_hindsight, "prob_inferred": by_inference, "goal_hindsight": hindsight,
            "goal_inferred": inferred, "exact": ((run.decoder(mean) > 0) == (view > 0)).all(-1)}


def predict_all(args, run, samples, most=None):
    """What `predict_lesson` tells of the samples of the first games, in their order: a dict of [M, ...]."""
    length, each = samples["length"][:most], {}
    generator = seeded(0, "predictions", args.device)
    for games in length.argsort(descending=True, stable=True).split(512):
        lesson = make_lesson(args, run.known, samples, games)
        seen = lesson["seen"].flatten()
        for name, value in predict_lesson(run, lesson, generator).items():
            if name not in each:
                each[name] = value.new_empty(int(length.sum()), *value.shape[2:])
            each[name][lesson["rows"].flatten()[seen]] = value[0, seen]
    return each


def score(probs, action, truth, sees_future=False):
    """How well probabilities [M, 7] predict actions [M].

    truth [M, 7] are the true probabilities of the actions, given what the predictor may know: top1 is the
    mean true probability of the action it holds likeliest, top3 of its three likeliest, cross_entropy the
    mean over truth. This has the same expected value as counting hits and far less luck in it. A predictor
    that sees the future knows more than the truth given here: its cross-entropy is taken on the actions
    played. hit_rate, hit_rate_3 and cross_entropy_played are the plain counts.
    """
    best = probs.topk(3, -1).indices
    hit, value = best == action[:, None], truth.gather(1, best)
    log_probs = probs.clamp(min=1e-12).log()
    played = -log_probs.gather(1, action[:, None]).mean().item()
    expected = -(truth * log_probs).sum(-1).mean().item()
    taken, chosen = F.one_hot(action, NUM_ACTIONS), F.one_hot(best[:, 0], NUM_ACTIONS)
    hits, count = (taken * chosen).sum(0), taken.sum(0).clamp(min=1)
    by_name = lambda values: dict(zip(ACTIONS, values.tolist()))
    return {"top1": value[:, 0].mean().item(), "top3": value.sum(1).mean().item(),
            "cross_entropy": played if sees_future else expected, "cross_entropy_played": played,
            "hit_rate": hit[:, 0].float().mean().item(), "hit_rate_3": hit.any(1).float().mean().item(),
            "recall": by_name((taken * probs).sum(0) / count), "recall_of_likeliest": by_name(hits / count),
            "precision_of_likeliest": by_name(hits / chosen.sum(0).clamp(min=1))}


PREDICTORS = {"inferred": "goal inferred from the past", "history": "  ceiling: only the history known",
              "hindsight": "goal known in hindsight", "kind": "  beside it: the kind known",
              "trivial": "the same whatever the view"}


def evaluate(args, run, samples):
    """Scores the networks on held-out samples, beside the ceilings: a dict of what is listed at its end."""
    each, action = predict_all(args, run, samples), samples["action"]
    kind, by_kind = samples["kind"][samples["game"]], samples["kind_probs"]
    known = by_kind.take_along_dim(kind[:, None, None], 1)[:, 0]  # the true probabilities [M, 7]
    history = (samples["posterior"][..., None] * by_kind).sum(1)  # the same of who knows but the history
    each |= {"prob_kind": known, "prob_history": history}
    always = torch.bincount(action, minlength=NUM_ACTIONS) / len(action)
    moa = {"inferred": score(each["prob_inferred"], action, history),
           "history": score(history, action, history),
           "hindsight": score(each["prob_hindsight"], action, known, sees_future=True),
           "kind": score(known, action, known),
           "trivial": score(always.expand(len(action), -1), action, history)}
    losses = {name: each[name].mean().item() for name in LOSSES}
    shaping = sum(losses[name] for name in ("moa", "recon") if args.loss in (name, "both"))
    losses["total"] = shaping + args.kl_weight * losses["kl"]
    return {"moa": moa, "losses": losses, "exact_views": each["exact"].float().mean().item(), "each": each}


def read_out(goals, kind, num_kinds, new_goals):
    """Tells kinds from goals by the line that fits goals [M, G] and kinds [M] best: [M'], for other goals."""
    with_one = lambda goals: F.pad(goals.double(), (0, 1), value=1.0)
    weight = torch.linalg.lstsq(with_one(goals), F.one_hot(kind, num_kinds).double()).solution
    return (with_one(new_goals) @ weight).argmax(-1)


def meaning_of_goals(args, run, evaluation, samples, held_out):
    """How well a linear read-out tells the players' kinds from their goals, and what it is to be measured by.

    In hindsight: beside the best rule on what the player caught in the end. Inferred: beside Bayes' rule,
    step by step, both scored as the posterior probability of the kind they name, so that luck has no part.
    """
    learned_from, kinds = predict_all(args, run, samples, most=4000), len(args.mix)
    kind, caught = samples["kind"][samples["game"]], samples["caught"][samples["game"]]
    told = {}
    for name in ("hindsight", "inferred"):
        goals = learned_from[f"goal_{name}"]
        told[name] = read_out(goals, kind[:len(goals)], kinds, evaluation["each"][f"goal_{name}"])
    rule = torch.stack([torch.bincount(kind[caught == what], minlength=kinds) for what in range(3)]).argmax(1)
    kind, caught = held_out["kind"][held_out["game"]], held_out["caught"][held_out["game"]]
    posterior = held_out["posterior"].double()
    bayes, inferred = posterior.amax(1), posterior.take_along_dim(told["inferred"][:, None], 1)[:, 0]
    steps = []
    for step in range(int(held_out["step"].max()) + 1):
        there = held_out["step"] == step
        if there.sum() >= 100:
            steps.append({"step": step, "samples": int(there.sum()), "bayes": bayes[there].mean().item(),
                          "inferred": inferred[there].mean().item()})
    share = lambda right: right.double().mean().item()
    return {"hindsight": share(told["hindsight"] == kind), "caught_rule": share(rule[caught] == kind),
            "inferred": share(inferred), "bayes": share(bayes), "by_step": steps,
            "largest_gap": max((step["bayes"] - step["inferred"] for step in steps), default=0.0)}


# ====================================================================================== tables


def epoch_lines(epoch, evaluation):
    """The lines of an epoch: how well actions are predicted, beside the ceilings, and the losses."""
    lines = []
    for name, told in PREDICTORS.items():
        scores = evaluation["moa"][name]
        head = f"[MOA] epoch {epoch}" if name == "inferred" else f"      {told.strip()}"
        lines.append(f"{head}: top1={scores['top1']:.4f}, top3={scores['top3']:.4f}, "
                     f"hit rate={scores['hit_rate']:.4f}, cross-entropy={scores['cross_entropy']:.4f}")
    losses = ", ".join(f"{name}={value:.4f}" for name, value in evaluation["losses"].items())
    lines.append(f"[VAE] epoch {epoch}: {losses}, exact_views={evaluation['exact_views']:.4f}")
    return "\n".join(lines)


def print_results(args, results, action):
    """The tables at the end of a run, on held-out games whose actions are `action`."""
    moa, goals, losses = results["moa"], results["goals"], results["losses"]
    keys = ("top1", "hit_rate", "top3", "cross_entropy", "cross_entropy_played")
    rows = [["", "top1", "hit rate", "top3", "cross-entropy", "on those played"]]
    rows += [[told, *(f"{moa[name][key]:.4f}" for key in keys)] for name, told in PREDICTORS.items()]
    print_table(f"predicting actions in held-out games ({' '.join(args.mix)}, {board_name(args)})", rows)
    rows = [["", *ACTIONS]]
    for name, told in PREDICTORS.items():
        rows.append([told, *(f"{value:.3f}" for value in moa[name]["recall"].values())])
    print_table("recall: mean predicted probability of an action where it was taken", rows)
    rows = [[name, count, *(f"{value:.3f}" for value in row)]
            for name, count, *row in class_table(results["moa"], action)]
    print_table("the likeliest action, goal inferred from the past, against the one played",
                [["", *CLASS_SCORES], *rows])
    print(f"\nviews rebuilt: {results['exact_views']:.2%} without a fault, "
          f"recon {losses['recon']:.4f} nats (mean squared error of a fact {losses['recon_mse']:.1e}), "
          f"kl {losses['kl']:.2f} nats")
    if goals is not None:
        print(f"kinds told by a linear read-out: {goals['hindsight']:.2%} from the goal in hindsight (best "
              f"rule on the catch: {goals['caught_rule']:.2%}),\n  {goals['inferred']:.2%} from the inferred "
              f"goal (Bayes: {goals['bayes']:.2%}; largest gap: {100 * goals['largest_gap']:.2f} points)")
    if args.moa_samples == "rewarded":
        print("--moa-samples rewarded picks players by what they will catch: the ceilings know nothing of "
              "it, and may be exceeded")


CLASS_SCORES = ("count", "ratio", "precision", "recall", "f1")


def class_table(moa, action):
    """The likeliest action, foreseen from the past, against the actions played: for each action its name and
    CLASS_SCORES."""
    rows = []
    for name, count in zip(ACTIONS, torch.bincount(action, minlength=NUM_ACTIONS).tolist()):
        precision, recall = (moa["inferred"][f"{key}_of_likeliest"][name] for key in ("precision", "recall"))
        f1 = 2 * precision * recall / max(precision + recall, 1e-12)
        rows.append([name, count, count / len(action), precision, recall, f1])
    return rows


def write_evaluation(folder, epoch, evaluation, samples):
    """moa_eval_epochN.csv and .npz: scores by action; the confusion matrix, probabilities and labels. -> the
    path, without what ends it"""
    moa, each, action = evaluation["moa"], evaluation["each"], samples["action"]
    path = os.path.join(folder, f"moa_eval_epoch{epoch}")
    with io.StringIO(newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["action", *CLASS_SCORES, "recall_by_probability",
                         *(f"{part}_{key}" for part in ("history", "hindsight", "kind")
                           for key in ("recall", "recall_by_probability"))])
        for number, (name, count, *row) in enumerate(class_table(moa, action)):
            row += [moa["inferred"]["recall"][name]]
            row += [moa[part][key][name] for part in ("history", "hindsight", "kind")
                    for key in ("recall_of_likeliest", "recall")]
            writer.writerow([number, count, *(f"{value:.6f}" for value in row)])
        write_file(path + ".csv", file.getvalue().encode())
    arrays = {"confusion_matrix": confusion_matrix(each["prob_inferred"], action),
              "labels": action.to(torch.uint8), "probabilities": each["prob_inferred"],
              "probabilities_hindsight": each["prob_hindsight"], "history_known": each["prob_history"],
              "kind_known": each["prob_kind"], "step": samples["step"].to(torch.int16)}
    file = io.BytesIO()
    np.savez(file, **{name: array.cpu().numpy() for name, array in arrays.items()})
    write_file(path + ".npz", file.getvalue())
    return path


def confusion_matrix(probs, action):
    """How often each action played [row] was predicted as each [column]: [7, 7]."""
    pairs = torch.bincount(action * NUM_ACTIONS + probs.argmax(1), minlength=NUM_ACTIONS**2)
    return pairs.view(NUM_ACTIONS, NUM_ACTIONS)


BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8a8a8a"
CAUGHT = {"nothing": GREY, "a stag": ORANGE, "a hare": BLUE}


def figure(title, width, height, columns=1):
    """A new picture with its axes."""
    from matplotlib.figure import Figure  # here, so that --help and tests need not wait for it

    result = Figure(figsize=(width, height), layout="constrained", dpi=120)
    axes = result.subplots(1, columns, squeeze=False)[0]
    result.suptitle(title, fontsize=11)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return result, axes


def draw_losses(history):
    """The losses by epoch, term by term: on held-out samples, and as they were learned."""
    names = (*LOSSES, "total")
    result, axes = figure("Losses (nats a sample)", 16, 3, len(names))
    for ax, name in zip(axes, names):
        for part, key, colour in (("held_out", name, ORANGE), ("train", f"{name}_loss", BLUE)):
            points = [(row["epoch"], row[part][key]) for row in history if key in row.get(part, {})]
            ax.plot(*zip(*points or [(0, np.nan)]), color=colour, marker="o", markersize=3, label=part)
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("epoch")
    axes[0].legend(frameon=False, fontsize=8)
    return result


def draw_bars(title, panels):
    """Bars by action, several beside one another; panels are dicts of title -> label -> seven values."""
    result, axes = figure(title, 5.5 * len(panels), 4, len(panels))
    for ax, (name, bars) in zip(axes, panels.items()):
        for number, (label, values) in enumerate(bars.items()):
            place = np.arange(NUM_ACTIONS) + 0.4 * number - 0.2
            ax.bar(place, values, 0.4, color=(BLUE, GREY)[number], label=label)
        ax.set_xticks(range(NUM_ACTIONS), ACTIONS, rotation=30, ha="right")
        ax.set_title(name, fontsize=10)
        ax.legend(frameon=False)
    return result


def draw_confusion(matrix):
    """The confusion matrix [7, 7], each row summing to 1."""
    matrix = (matrix / matrix.sum(1, keepdim=True).clamp(min=1)).tolist()
    result, (ax,) = figure("Likeliest action by action played (goal inferred)", 5.6, 5)
    ax.imshow(matrix, cmap="Blues", vmin=0, vmax=1)
    for row in range(NUM_ACTIONS):
        for column in range(NUM_ACTIONS):
            ax.text(column, row, f"{matrix[row][column]:.2f}", ha="center", va="center", fontsize=8,
                    color="white" if matrix[row][column] > 0.5 else "black")
    ax.set_xticks(range(NUM_ACTIONS), ACTIONS, rotation=30, ha="right")
    ax.set_yticks(range(NUM_ACTIONS), ACTIONS)
    ax.set(xlabel="predicted", ylabel="played")
    return result


def draw_goal_map(each, caught):
    """A map of the goal space: its two main directions, coloured by what the player caught in the end [M]."""
    result, axes = figure("Goals by what the player caught in the end (two main directions)", 11, 5, 2)
    some = torch.linspace(0, len(caught) - 1, min(4000, len(caught))).long()
    room = (0, 1)  # for a second direction, where a goal is but one number
    goals = {name: F.pad(each[f"goal_{name}"].cpu().double()[some], room)
             for name in ("hindsight", "inferred")}
    centre = goals["hindsight"].mean(0)
    directions = torch.linalg.svd(goals["hindsight"] - centre, full_matrices=False)[2][:2].T
    for ax, name, title in zip(axes, goals, ("known in hindsight", "inferred from the past")):
        points = ((goals[name] - centre) @ directions).numpy()
        for number, (label, colour) in enumerate(CAUGHT.items()):
            those = (caught.cpu()[some] == number).numpy()
            ax.scatter(*points[those].T[:2], s=5, color=colour, alpha=0.5, linewidths=0, label=label)
        ax.set_title(title, fontsize=10)
    axes[0].legend(frameon=False, markerscale=3)
    return result


def write_pictures(folder, writer, results, evaluation, samples):
    """All pictures, as PNG in the run folder and in TensorBoard."""
    moa, each, action = results["moa"], evaluation["each"], samples["action"]
    recall = lambda *names: {PREDICTORS[name].strip(): list(moa[name]["recall"].values()) for name in names}
    pictures = {
        "class_distribution": draw_bars("Actions in the held-out samples", {"share of the samples": {
            "played": (torch.bincount(action, minlength=NUM_ACTIONS) / len(action)).tolist(),
            "predicted (mean probability)": each["prob_inferred"].mean(0).tolist()}}),
        "confusion_matrix": draw_confusion(confusion_matrix(each["prob_inferred"], action)),
        "recall": draw_bars("Mean predicted probability of an action where it was taken", {
            "goal inferred": recall("inferred", "history"),
            "goal in hindsight": recall("hindsight", "kind")}),
        "goal_map": draw_goal_map(each, samples["caught"][samples["game"]])}
    if results["history"]:
        pictures["losses"] = draw_losses(results["history"])
    for name, picture in pictures.items():
        path = os.path.join(folder, "pictures", f"{name}.png")
        add_image(writer, name, picture.savefig, results["epochs"], path)


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


# ==================================================================================== views

SIGHT = 3  # cells that a player sees exactly in each direction; further ones are at the rim of its window


class Views:
    """What the networks get to see: a player's view as a short list of facts, each the number of a table row.

    The facts of a view [K], in this order: what is on each cell; where each co-player is; everybody's
    previous action; and at the end, in JOINT, the player's own cell; which actions are legal; the step; the
    steps left. What is on a cell, and who, is told by where that cell is from the player's own: in a window
    of 7 x 7 around it, at whose rim stands what is further off. So the window has one size for every board,
    and "go there" looks the same wherever the player stands.

    Almost all of this is zeros and ones, so a first layer need not multiply: it adds up the rows that the
    facts name (`SumFacts`). The facts stand for the features [F] of a view, zeros but for a few: each plain
    fact for one of its own, those in JOINT for some together, `meaning`.
    """

    JOINT = slice(-4, None)

    def __init__(self, height, width, num_players, final_time, device="cpu"):
        n, cells, sight = num_players, height * width, 2 * SIGHT + 1
        # Facts: window [row, plane, column], previous action [player, action], nothing, cell, legal actions,
        # step, steps left.
        self.first_previous = sight * sight * (n + 2)
        self.nothing = self.first_previous + n * NUM_ACTIONS
        self.first_cell = self.nothing + 1
        self.first_legal = self.first_cell + cells + 1
        self.first_step = self.first_legal + (1 << NUM_ACTIONS)
        self.first_left = self.first_step + final_time + 1
        self.num_facts = self.first_left + final_time + 1

        # Where a cell is from another one, as a fact of plane 0; cell C, of those that have left, is nowhere.
        row, column = torch.arange(cells) // width, torch.arange(cells) % width
        offset = lambda line: (line - line[:, None]).clamp(-SIGHT, SIGHT) + SIGHT  # [own cell, other cell]
        nowhere = 1 << 14
        spot = F.pad(offset(row) * (n + 2) * sight + offset(column), (0, 1, 0, 1), value=nowhere)
        # The plane of what is on a cell, by what is legal there; a cell holds one thing, or nothing.
        bits = torch.arange(256)
        plane = torch.full((256,), nowhere)
        kinds = (bits & STAY_BIT == 0, bits & STAG_BIT > 0, bits & HARE_BIT > 0)
        for number, those in enumerate(kinds, n - 1):
            plane[those] = number * sight
        self.spot, self.plane = spot.to(torch.int16).to(device), plane.to(torch.int16).to(device)
        players = torch.arange(n)
        self.order = ((players[:, None] + players) % n).to(device)  # [viewer, k-th after it]
        self.co_player_plane = (players[:-1] * sight).to(torch.int16).to(device)
        self.previous = (self.first_previous + players * NUM_ACTIONS).to(torch.int16).to(device)
        self.action_bits = torch.arange(NUM_ACTIONS, device=device)

        # Facts that stand for other features: one-hot row and column, legal actions, the clock from 0 to 1.
        meaning = torch.zeros(self.num_facts - self.nothing, height + width + NUM_ACTIONS + 2)
        own, legal = meaning[1:cells + 1], meaning[cells + 2:cells + 2 + (1 << NUM_ACTIONS)]
        own[torch.arange(cells), row], own[torch.arange(cells), height + column] = 1, 1
        legal[:, height + width:-2] = bits[:128, None] >> torch.arange(NUM_ACTIONS) & 1
        time = torch.arange(final_time + 1) / final_time
        meaning[self.first_step - self.nothing:self.first_left - self.nothing, -2] = time
        meaning[self.first_left - self.nothing:, -1] = time
        self.meaning = meaning.to(device)  # [fact after the plain ones, feature after the plain ones]
        self.num_inputs = self.nothing + meaning.shape[1]

    def look(self, state):
        """The views of all players in a state, a dict of STATE: facts [N, B, K] (int16)."""
        cell, board, clock = state["cell"], state["board"], state["clock"]
        n, many = cell.shape
        from_own = self.spot.index_select(0, cell.flatten()).view(n, many, -1)  # [N, B, C+1]
        ground = self.plane.index_select(0, board[:-1].T.flatten().int()).view(many, -1) + from_own[..., :-1]
        others = cell[self.order[:, 1:]].transpose(1, 2)  # [N, B, N-1]
        others = from_own.gather(2, others) + self.co_player_plane
        previous = state["previous"][self.order].transpose(1, 2) + self.previous
        own = torch.stack([self.first_cell + cell, self.first_legal + board.gather(0, cell).short()], -1)
        latest = self.first_left - self.first_step - 1  # an imagined game may miss its end
        left = (state["deadline"] - clock).clamp(0, latest)
        clock = torch.stack([self.first_step + clock.clamp(max=latest), self.first_left + left], -1)
        clock = clock.expand(n, -1, -1)
        seen = torch.cat([ground, others], -1)
        seen = torch.where((seen >= self.first_previous) | (seen < 0), self.nothing, seen)
        return torch.cat([seen, previous, own.short(), clock.short()], -1)

    def tabulate(self, weight):
        """What each fact adds to the outputs of first layers with weights [L, F, D]: [L, fact, D]."""
        return torch.cat([weight[:, :self.nothing], self.meaning @ weight[:, self.nothing:]], 1)

    def mask(self, x):
        """Which actions are legal in views [..., K]: [..., 7]."""
        return ((x[..., -3, None] - self.first_legal) >> self.action_bits & 1).bool()


# ================================================================================= networks


def sum_rows(x, table):
    """Adds up rows of L tables [L, R, D] that facts [L, M, K] name: [L, M, D]."""
    first = torch.arange(0, len(table) * table.shape[1], table.shape[1], dtype=torch.int32, device=x.device)
    rows = (x + first[:, None, None]).flatten(0, 1)
    return F.embedding_bag(rows, table.flatten(0, 1), mode="sum").unflatten(0, x.shape[:2])


class SumFacts(torch.autograd.Function):
    """L first layers without their bias: facts [L, M, K], weights [L, F, D] -> [L, M, D].

    Forwards rows are added up, backwards it is a product with the features, of the plain facts how often each
    was named: either is the faster way on a CPU.
    """

    @staticmethod
    def forward(ctx, x, weight, views):
        ctx.save_for_backward(x)
        ctx.views = views
        return sum_rows(x, views.tabulate(weight))

    @staticmethod
    def backward(ctx, gradient):
        (x,), views = ctx.saved_tensors, ctx.views
        answer = gradient.new_zeros(len(x), views.nothing + 1, gradient.shape[2])
        # few rows at a time, to stay in the cache
        counts = gradient.new_empty(len(x), min(x.shape[1], 128), views.nothing + 1)
        for facts, part in zip(x[..., :Views.JOINT.start].split(128, 1), gradient.split(128, 1)):
            named = counts[:, :facts.shape[1]].zero_()
            named.scatter_add_(2, facts.long(), gradient.new_ones(1).expand(facts.shape))
            answer.baddbmm_(named.transpose(1, 2), part)
        told = sum_rows((x[..., Views.JOINT] - views.nothing).flatten(0, 1)[None], views.meaning[None])
        told = told.view(*x.shape[:2], -1).transpose(1, 2) @ gradient
        return None, torch.cat([answer[:, :-1], told], 1), None


def orthogonal(num_models, inputs, outputs, gain, seed):
    """Stacked orthogonal weights [L, inputs, outputs]; a model's depend on the seed and its number alone."""
    weight = torch.empty(num_models, inputs, outputs)
    for model in range(num_models):
        generator = torch.Generator().manual_seed(seed * 1000 + model)
        nn.init.orthogonal_(weight[model], gain, generator=generator)
    return nn.Parameter(weight)


class Linear(nn.Module):
    """L linear layers side by side: [L, M, inputs] -> [L, M, outputs]."""

    def __init__(self, num_models, inputs, outputs, gain, seed):
        super().__init__()
        self.weight = orthogonal(num_models, inputs, outputs, gain, seed)
        self.bias = nn.Parameter(torch.zeros(num_models, 1, outputs))

    def forward(self, x):
        return torch.baddbmm(self.bias, x, self.weight)


class FirstLayer(Linear):
    """L first layers side by side, from the facts of views: [L, M, K] -> [L, M, outputs]."""

    def __init__(self, num_models, views, outputs, seed):
        super().__init__(num_models, views.num_inputs, outputs, math.sqrt(2), seed)
        self.views = views

    def forward(self, x):
        return SumFacts.apply(x, self.weight, self.views) + self.bias


def legal_log_softmax(logits, mask):
    """Log-probabilities over legal actions [..., M, 7]; by columns, five times faster than by rows of 7."""
    columns = logits.masked_fill(~mask, -1e8).transpose(-1, -2).contiguous()
    return columns.log_softmax(-2).transpose(-1, -2)


class GoalPrior(nn.Module):
    """The encoder of L VAEs: a view -> a goal, as mean and log-variance [L, M, G]."""

    def __init__(self, num_models, views, vae_size, goal_dim, seed):
        super().__init__()
        self.view = FirstLayer(num_models, views, vae_size, seed)
        self.hidden = Linear(num_models, vae_size, vae_size, math.sqrt(2), seed)
        self.out = Linear(num_models, vae_size, 2 * goal_dim, 1.0, seed)

    def forward(self, x):
        mean, logvar = self.out(F.relu(self.hidden(F.relu(self.view(x))))).chunk(2, -1)
        return mean, logvar.clamp(-10, 4)


class GoalDecoder(nn.Module):
    """The decoders of L VAEs: a goal -> the view, that is, whether each of D facts is in it.

    Rebuilt are the facts that tell the board: what is where in the player's window, and its own cell.
    """

    def __init__(self, num_models, views, vae_size, goal_dim, seed):
        super().__init__()
        self.views = views
        num_facts = views.first_previous + views.first_legal - views.first_cell
        self.goal = Linear(num_models, goal_dim, vae_size, math.sqrt(2), seed)
        self.hidden = Linear(num_models, vae_size, vae_size, math.sqrt(2), seed)
        self.out = Linear(num_models, vae_size, num_facts, 1.0, seed)

    def forward(self, goal):
        """Goals [L, M, G] -> log-odds of the facts [L, M, D]."""
        return self.out(F.relu(self.hidden(F.relu(self.goal(goal)))))

    def target(self, x):
        """Which of the facts are in views [L, M, K]: 1 or 0 [L, M, D]."""
        views, there = self.views, torch.zeros(*x.shape[:-1], self.views.num_facts, device=x.device)
        there.scatter_(-1, x.long(), 1.0)
        parts = there[..., :views.first_previous], there[..., views.first_cell:views.first_legal]
        return torch.cat(parts, -1)


CHANGE = 2e-3  # the chance that a player becomes another one, at each step
SHARES = 0.78, 0.1, 0.1, 0.02  # of the players whose hand is steady, trembles, does anything, and is restless
SLIPS = 0.1, 0.5, 1.0, 0.1  # how often such a hand slips, to any legal action
TURN = 0.25  # the chance that a restless one goes another way, at each step


class OtherModel(nn.Module):
    """Models of other players, P side by side: what a player is after, from what it was seen to do (a CVAE's
    recognition from the past), and what it will do next, from its view and its goal (MOA).

    The inference weighs hypotheses as Bayes' rule does. Each is a way to play, learned here as action
    probabilities for every view, with a hand that is steady, trembles, does anything (SLIPS), or is restless
    and goes another way now and then (TURN). The memory [P, B, H] holds the weights, of all steady ones
    first. After each action seen they become w * p(action | view, hypothesis) / sum, then `drift`: the exact
    posterior if a player becomes another one with a chance of CHANGE at each step, so that no past makes a
    belief certain for ever. A goal is read from the weights of the ways and the present view. With `silent`
    all goals are 0 (mean 0, log-variance -inf).
    """

    def __init__(self, num_models, views, hidden_size, goal_dim, hypotheses, seed, silent=False):
        super().__init__()
        self.views, self.silent = views, silent
        self.view = FirstLayer(num_models, views, hidden_size, seed)
        self.glance = Linear(num_models, hidden_size, hidden_size, math.sqrt(2), seed + 1)
        self.likelihood = Linear(num_models, hidden_size, NUM_ACTIONS * hypotheses, 1.0, seed)
        self.prior = nn.Parameter(torch.zeros(num_models, 1, hypotheses))  # logits of how a player plays
        self.mix = Linear(num_models, hidden_size + hypotheses, hidden_size, math.sqrt(2), seed)
        self.out = Linear(num_models, hidden_size, 2 * goal_dim, 0.5, seed)
        self.goal = orthogonal(num_models, goal_dim, hidden_size, 1.0, seed)
        self.hidden = Linear(num_models, hidden_size, hidden_size, math.sqrt(2), seed)
        self.action = Linear(num_models, hidden_size, NUM_ACTIONS, 0.01, seed)

    def start(self, num):
        """The memory of `num` players that were never seen: [P, num, H]."""
        return self.before().expand(-1, num, -1)

    def before(self):
        """How likely each hypothesis is before anything was seen: [P, 1, H]."""
        prior = self.prior.softmax(-1)
        return torch.cat([share * prior for share in SHARES], -1)

    def see(self, x):
        """Views [P, M, K] -> outputs of the first layer and hidden units of the inference [P, M, hidden]."""
        first = self.view(x)
        return first, F.relu(self.glance(F.relu(first)))

    def look(self, x):
        """What `see` gives, and the log-probabilities of the actions by way to play [7, P, M, W]
        (actions first: twice as fast)."""
        first, hidden = self.see(x)
        logits = self.likelihood(hidden).unflatten(-1, (NUM_ACTIONS, -1)).movedim(-2, 0)
        illegal = ~self.views.mask(x).movedim(-1, 0)[..., None]
        return first, hidden, logits.masked_fill(illegal, -1e8).log_softmax(0)

    def weigh(self, memory, prior, likely, seen):
        """Bayes' rule: the memory [P, B, H] after actions that each hypothesis held so likely [P, B, H]; of
        those that were seen [P, B, 1] some change."""
        joint = memory * likely
        return self.drift(joint / joint.sum(-1, keepdim=True), prior, seen)

    def drift(self, memory, prior, seen):
        """The memory when restless hands may have gone another way, and players become others."""
        *hands, restless = memory.split(memory.shape[-1] // len(SLIPS), -1)
        ways = prior[..., -restless.shape[-1]:]
        ways = ways / ways.sum(-1, keepdim=True)
        turned = torch.lerp(restless, restless.sum(-1, keepdim=True) * ways, TURN * seen)
        return torch.lerp(torch.cat([*hands, turned], -1), prior, CHANGE * seen)

    def follow(self, memory, table, action, seen):
        """`weigh` for steps in order: actions [P, T, B], which of them were seen, table [7, P, T, B, W] of
        `look`. -> the memory before each step and after all [T + 1 of P, B, H], and the log-probabilities of
        the actions by way to play [P, T, B, W]"""
        taken = table.gather(0, action[None, ..., None].expand(1, *table.shape[1:]))[0]
        seen = seen[..., None]  # what is not seen is as likely by every hypothesis, and nobody changes
        any_legal = 1 / (table[..., :1] > -1e7).sum(0)
        likely = torch.cat([torch.lerp(taken.exp(), any_legal, slip) for slip in SLIPS], -1)
        likely, memories, prior = torch.where(seen, likely, 1.0), [memory], self.before()
        for step in zip(likely.unbind(1), seen.float().unbind(1)):
            memories.append(self.weigh(memories[-1], prior, *step))
        return memories, taken

    def weights(self, memory):
        """What a memory says: how likely each way to play is [.., W], each hand but the steady [.., 3]."""
        hands = memory.unflatten(-1, (len(SLIPS), -1))
        return hands.sum(-2), hands.sum(-1)[..., 1:]

    def read(self, weights, hidden):
        """Weights of the ways [P, M, W], hidden units of the present view -> mean, log-variance of the goal
        [P, M, G]."""
        mean, logvar = self.out(F.relu(self.mix(torch.cat([weights, hidden], -1)))).chunk(2, -1)
        if self.silent:
            return torch.zeros_like(mean), torch.full_like(mean, -math.inf)
        return mean, logvar.clamp(-10, 4)

    def act(self, first, mask):
        """First layer's outputs, of view and goal together [P, M, hidden] -> log-probabilities of the actions
        [P, M, 7]."""
        return legal_log_softmax(self.action(F.relu(self.hidden(F.relu(first)))), mask)


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

    saved = STATE + ("pool_cell", "pool_board", "pool_next", "generator")

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


def player_rule(name, asked="--players"):
    """The row of RULES for the name of a rule-based player, which a flag asked for."""
    prefix, _, number = name.partition("-")
    if prefix == "patient" and number.isdecimal():
        return (int(number), True, 0.0, False)
    if name not in RULES:
        raise Refused(f"{asked} {name!r} is not known; rule-based players are {', '.join(RULES)}, patient-K "
                      "(such as patient-28), mix:A,B and file.py:Class")
    return RULES[name]


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


ANYTHING_GOES = ("resume", "threads", "save_every")  # flags that a resumed run may be given anew
MAY_GROW = ("total_timesteps", "epochs")  # flags of which it may be given more


def is_of(value, kind):
    """Whether a value is of the kind that a flag's annotation names."""
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(is_of(item, parts[0]) for item in value)
    if get_origin(kind) is Literal:
        return value in parts
    if parts:
        return any(is_of(value, part) for part in parts)
    return type(value) is kind or kind is float and type(value) is int


def read_config(args):
    """The flags in the config.json of --resume, by name."""
    asked, path = f"--resume {args.resume}", os.path.join(args.resume, "config.json")
    if not os.path.isfile(path):
        raise Refused(f"{asked}: there is no run, {path} is missing")
    try:
        with open(path, encoding="utf-8") as file:
            saved = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{asked}: {path} cannot be read ({type(error).__name__})") from error
    kinds = {field.name: field.type for field in dataclasses.fields(args)}
    if isinstance(saved, dict):
        saved.pop("version", None)  # any that has the same flags will do
    if not isinstance(saved, dict) or saved.pop("script", None) != SCRIPT or saved.keys() != kinds.keys():
        raise Refused(f"{asked}: that run was begun by another script than this {SCRIPT}")
    saved = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    for name, value in saved.items():
        if not is_of(value, kinds[name]):
            raise Refused(f"{asked}: {path} says {value!r} for {flag(name)}, which cannot be")
    return saved


def resolve_flags(args):
    """With --resume, takes over that run's flags; one given again must be the same or one that may change."""
    if args.resume is None:
        return args
    saved, words = read_config(args), {word.partition("=")[0].replace("_", "-") for word in sys.argv[1:]}
    for field in dataclasses.fields(args):
        given, before = getattr(args, field.name), saved[field.name]
        left_out = given == field.default and words.isdisjoint((flag(field.name), flag("no_" + field.name)))
        if left_out or given == before:
            continue
        if field.name not in ANYTHING_GOES and (field.name not in MAY_GROW or given < before):
            raise Refused(f"{flag(field.name)} {typed(given)} does not go with the {typed(before)} of "
                          f"{args.resume}")
        saved[field.name] = given
    return dataclasses.replace(args, **saved)


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


def save_checkpoint(folder, content, name="checkpoint.pt"):
    """Writes a checkpoint, whole or not at all, and its SHA-256 behind it; the one before stays as well."""
    file, path = io.BytesIO(), os.path.join(folder, name)
    torch.save({"script": SCRIPT, "made_with": made_with(), **content}, file)
    data = file.getvalue()
    digest = DIGEST + hashlib.sha256(data).hexdigest().encode()
    write_file(path, data + digest, path.replace(".pt", "-before.pt") if name == "checkpoint.pt" else None)


def made_with():
    """What numbers depend on to the last bit, beside flags and random numbers."""
    with open(__file__, "rb") as file:
        text = hashlib.sha256(file.read().replace(b"\r\n", b"\n")).hexdigest()[:12]
    return {"torch": str(torch.__version__), "text of the script": text, "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability()}


def load_run(args):
    """The checkpoint of --resume; None without one, also where a run was left before its first."""
    if args.resume is None:
        return None
    asked, path = f"--resume {args.resume}", os.path.join(args.resume, "checkpoint.pt")
    before = path.replace(".pt", "-before.pt")
    try:
        if not os.path.isfile(path) and not os.path.isfile(before):
            print(f"{args.resume} has no checkpoint yet: it begins anew")
            return None
        checkpoint = load_checkpoint(path, asked, args.device)
    except Refused as refusal:
        if not os.path.isfile(before):
            raise
        checkpoint = load_checkpoint(before, asked, args.device)
        print(f"warning: {refusal}; the checkpoint before it is used", file=sys.stderr)
        if os.path.isfile(path) and not Processes.rank:
            os.replace(path, path.replace(".pt", "-damaged.pt"))  # so that the good one stays
    for name, value in checkpoint["config"].items():
        now = getattr(args, name, None)
        if now != value and name not in ANYTHING_GOES and (name not in MAY_GROW or now < value):
            raise Refused(f"{flag(name)} {now} in the config.json of {asked} does not go with its "
                          f"checkpoint, which has {value}")
    others = checkpoint.get("others", [])
    if len(others) + 1 != Processes.size:
        raise Refused(f"{asked}: that run has {len(others) + 1} processes, here are {Processes.size}")
    if Processes.rank:
        checkpoint.get("run", checkpoint).update(others[Processes.rank - 1])
    for what, now in made_with().items():
        if now != checkpoint["made_with"][what]:
            print(f"warning: {asked} was made with {what} {checkpoint['made_with'][what]}, here is {now}: "
                  "what follows will not be the same to the last bit", file=sys.stderr)
    return checkpoint


def restore(run, state, args):
    """Puts a run into the state that was saved."""
    try:
        run.load_state_dict({name: state[name] for name in run.saved})
    except (KeyError, RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise Refused(f"--resume {args.resume}: its checkpoint does not fit this script "
                      f"({type(error).__name__})") from error


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
