"""PPO in the Markov stag hunt: any number of learners in any seats, all trained as one batched program.

    python ppo_single_player.py                              one learner among three stag hunters (1 minute)
    python ppo_single_player.py --players ppo ppo ppo ppo    self-play of four independent learners (1 minute)
    python ppo_single_player.py --mode adapt --checkpoint runs/x --players ppo nh nh nh    a trained one
    tensorboard --logdir runs                                curves, boards and action histograms

Every seat that says `ppo` is a learner of its own: its own parameters, its own trajectory, its own losses.
Their parameters are stacked, so that four learners cost little more than one. The run prints one moving line,
then a table of returns over 20,000 fresh episodes, and leaves everything in `runs/<run name>/`.

With `--memory gru` a learner remembers a whole meeting, a row of episodes with the same players, and learns
to find out who they are (RL^2). Such as on the scarce board, among players like those of HOP+'s warm-up:

    python ppo_single_player.py --players ppo MIX MIX MIX --hares 2 --final-time 12 --memory gru
        --meeting-episodes 20 --num-envs 512 --num-steps 64 --num-minibatches 8 --prize-floor 0.5
        --gamma 0.97 --learning-rate 3e-3 --total-timesteps 14000000
    with mix:ns,nh,noisy-ns,noisy-nh for each MIX

The file from top to bottom:
    flags       what can be chosen, and what is refused
    state       what a run keeps, and its random numbers
    training    the loop, what it logs, the final report, a trained learner among others
    playing     who sits where, the rollout, the buffer of episodes
    learning    advantages, the loss of PPO, the update
    views       what a player sees, as a short list of facts
    networks    the stacked policies and values
    game        the batched stag hunt and its rules
    players     rule-based players, mixes of them, players from a file
    outputs     run folder, checkpoints, tables, pictures

Letters in shapes:
    N players     B games side by side     C cells of the board     T steps of a rollout
    L learners    M rows of a batch        K facts of a view        F features of a view     E episodes
    D numbers of a memory
"""

import contextlib
import dataclasses
import difflib
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from statistics import NormalDist
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

import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from tqdm import tqdm

# ======================================================================================= flags

@dataclass
class FirstArgs:
    mode: Literal["train", "adapt"] = "train"
    """train; or put a trained learner of --checkpoint among others, in each seat (adapt)"""
    players: tuple[str, ...] = ("ppo", "ns", "ns", "ns")
    """who sits where: ppo (a learner), random, ns, nh, nsh, patient-28, noisy-ns, noisy-nh, switch-ns-nh,
    switch-nh-ns, mix:A,B (drawn anew each meeting), file.py:Class (your own), runs/x/checkpoint.pt:player_1
    (trained before)"""
    checkpoint: str | None = None
    """folder of the run whose learner is taken for --mode adapt"""
    total_timesteps: int = 1_500_000
    """environment steps of the run; one is one joint move of all players"""
    memory: Literal["none", "gru"] = "none"
    """what a learner remembers of a meeting: nothing; or what a recurrent network keeps (gru)"""
    buffer: Literal["transitions", "episodes"] = "transitions"
    """learn from the steps just taken, or from whole episodes held in a buffer"""
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
class MeetingArgs:
    meeting_episodes: int | None = None
    """episodes of a meeting, a row of episodes with the same players; without it 1, with --mode adapt 20"""
    meetings: int = 500
    """--mode adapt: meetings in each seat"""


@dataclass
class LearningArgs:
    share_parameters: bool = False
    """all learners are one: the same parameters, trained on the data of all their seats"""
    num_envs: int = 256
    """games played side by side"""
    num_steps: int = 32
    """steps of each game between two updates (with --buffer transitions)"""
    buffer_size: int | None = None
    """steps that the episode buffer holds; without it, --buffer episodes takes 5000"""
    hidden_size: int = 64
    """units in each of the two hidden layers"""
    learning_rate: float = 2.5e-3
    """step size of Adam at the start; it falls to 0 over the run"""
    gamma: float = 0.99
    """discount of later rewards"""
    gae_lambda: float = 0.95
    """lambda of the generalised advantage estimate"""
    num_minibatches: int = 4
    """pieces into which the data of an update is cut"""
    update_epochs: int = 2
    """times that an update goes through its data"""
    clip_coef: float = 0.2
    """how far the ratio of new to old probability may move before the policy loss is flat"""
    ent_coef: float = 0.02
    """weight of the entropy bonus at the start; it falls to 0 over the run"""
    soft_coef: float = 0.05
    """at the start, what a player earns on top for each nat of its policy's entropy in each step it is there,
    so that it stays and tries things (maximum-entropy reinforcement learning); falls to 0 over the first half
    of the run, and is in no return that is logged"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    reward_scale: float = 0.2
    """rewards are multiplied by this for learning; whatever is logged is in the units of the game"""
    prize_floor: float | None = None
    """advantages are divided by the return expected plus this: prizes count by how they compare, not by their
    size; without it they are left as they are"""
    max_grad_norm: float = 0.5
    """gradients of a learner longer than this are shortened to it"""


@dataclass
class MeasuringArgs:
    eval_episodes: int = 20_000
    """episodes of each evaluation at the end, sampled and greedy; 0 for none"""
    thresholds: tuple[float, ...] = (2.5, 2.7, 2.8, 2.85)
    """mean returns whose first reaching is timed, by the mean of the last 500 episodes"""
    picture_every: float = 30.0
    """seconds between two pictures of an episode"""


@dataclass
class Args(MeasuringArgs, LearningArgs, MeetingArgs, RunArgs, GameArgs, FirstArgs):
    """All flags of the script; --help tells them in these groups, the last one first."""


RANGES = (
    (1, math.inf, ("total_timesteps", "num_envs", "num_steps", "hidden_size", "num_minibatches",
                   "update_epochs", "meeting_episodes", "meetings")),
    (0, 1, ("gamma", "gae_lambda")),
    (0, 1e6, ("learning_rate", "clip_coef", "ent_coef", "soft_coef", "vf_coef")),
    (0, math.inf, ("eval_episodes", "picture_every")),
    (1e-9, 1e6, ("reward_scale", "max_grad_norm")), (1e-6, 1e6, ("prize_floor",)),
)
OF_TRAINING = ("share_parameters", "total_timesteps", "num_envs", "num_steps", "buffer", "buffer_size",
               "learning_rate", "gamma", "gae_lambda", "num_minibatches", "update_epochs", "clip_coef",
               "ent_coef", "soft_coef", "vf_coef", "reward_scale", "prize_floor", "max_grad_norm",
               "eval_episodes", "thresholds", "picture_every", "resume")


def check_flags(args):
    """Refuses flags that make no sense, alone or together."""
    check_ranges(args, RANGES)
    episodes = args.buffer == "episodes"
    unchanging = args.mode == "train" and args.memory == "none" and not any(
        name.startswith(("mix:", "switch-")) for name in args.players)
    refuse_ignored(args, (
        ("--mode train", args.mode == "train", ("checkpoint", "meetings")),
        ("--mode adapt", args.mode == "adapt", OF_TRAINING),
        ("--memory none and players that never change", unchanging, ("meeting_episodes",)),
        ("--buffer transitions", not episodes, ("buffer_size",)),
        ("--buffer episodes, for they are played whole", episodes, ("num_steps",)),
        ("--stags 0", args.stags == 0, ("stag_reward", "stag_hunters", "strengths")),
        ("--hares 0", args.hares == 0, ("hare_reward",)),
        ("--prosocial", args.prosocial, ("strengths",)),
    ))
    learners, players = args.players.count("ppo"), " ".join(args.players)
    if not learners:
        raise Refused(f"--players {players}: nobody learns; write ppo in at least one seat")
    if args.share_parameters and learners == 1:
        raise Refused(f"--share-parameters needs two learners or more, --players {players} has 1")
    if args.buffer_size is not None and args.buffer_size < args.final_time:
        raise Refused(f"--buffer-size {args.buffer_size} holds no episode of --final-time {args.final_time}")
    if not all(map(math.isfinite, args.thresholds)):
        raise Refused(f"--thresholds {' '.join(map(str, args.thresholds))} must be finite numbers")
    cells, n = args.height * args.width, len(args.players)
    check_memory(args, (
        (4 * cells**2, ("height", "width")), (2 * cells * args.num_envs, ("num_envs", "height", "width")),
        (8 * n * args.num_envs * args.num_steps, ("num_envs", "num_steps")),
        (4 * args.hidden_size * (args.hidden_size + 49 * (n + 2)), ("hidden_size",)),
        (2 * args.final_time, ("final_time",)), (3 * n * args.eval_episodes, ("eval_episodes",)),
    ))
    if args.memory == "gru" and episodes:
        raise Refused("--buffer episodes does not go with --memory gru: what was remembered in old "
                      "episodes is not what would be now")
    if args.mode == "adapt" and (learners != 1 or not args.checkpoint):
        raise Refused(f"--mode adapt takes one ppo of --checkpoint runs/x among others, here are "
                      f"--players {players} and --checkpoint {args.checkpoint}")
    whole = episodes or args.memory == "gru"  # what is cut into minibatches: whole sequences, or steps
    samples, what = (args.num_envs, "sequences") if whole else (args.num_envs * args.num_steps, "samples")
    if samples < args.num_minibatches:
        raise Refused(f"--num-minibatches {args.num_minibatches} are more than the {samples} {what} of an "
                      f"update (--num-envs {args.num_envs})")


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
    """What a run is made of: all of it is in the checkpoints, so it can go on as if it had never stopped."""

    saved = ("agent", "optimizer", "table", "returns", "thresholds", "buffer", "losses", "true_steps",
             "seconds")
    own = ("table", "returns", "buffer")  # what each process has for itself

    def __init__(self, args):
        self.table = Table(args, args.num_envs, Processes.seed(args.seed))
        self.agent = self.table.agent
        self.agent.load_state_dict(Processes.share(self.agent.state_dict()))
        self.optimizer = torch.optim.Adam(self.agent.parameters(), eps=1e-5, fused=True)
        self.returns = Returns(args.num_envs, len(args.players), args.device)
        # when the mean return of the last 500 episodes first reached each of these values
        self.thresholds = {f"{value:g}": None for value in args.thresholds}
        self.buffer = EpisodeBuffer(args.buffer_size or 5000)
        self.true_steps = 0  # of the game, played for learning
        self.seconds = 0.0  # from the start of the script to the last update
        self.losses = []  # of the last tenth of the run: their means go into the results
        self.agent.owners = [" and ".join(self.table.names[seat] for seat in seats)
                             for seats in self.table.seats.tolist()]

    def reach(self, last):
        """Notes which thresholds the mean of the last returns [<=500, L] reaches for the first time."""
        mean = last.mean().item() if len(last) == 500 else -math.inf
        now = {"seconds": round(self.seconds, 2), "true_steps": self.true_steps}
        self.thresholds = {value: now if at is None and mean >= float(value) else at
                           for value, at in self.thresholds.items()}

    def content(self, args):
        """What a checkpoint holds."""
        state = self.state_dict()
        return {"config": dataclasses.asdict(args), "learner_of": self.table.learner_of, "run": state,
                "others": Processes.gather({name: state[name] for name in self.own})}


def main(args):
    args = resolve_flags(args)
    check_flags(args)
    prepare_torch(args)
    if args.mode == "adapt":
        return adapt(args)
    checkpoint = load_run(args)
    run = Run(args)
    if checkpoint is not None:
        restore(run, checkpoint["run"], args)
        if run.true_steps >= args.total_timesteps and os.path.isfile(f"{args.resume}/results.json"):
            print(f"{args.resume} had finished: nothing was changed")
            return 0
    folder = open_run(args)
    writer = open_writer(folder, args, run.true_steps)
    add_plots(writer, PLOTS)
    try:
        stopped = train(args, run, folder, writer)
    except NotFinite as failure:
        save_checkpoint(folder, run.content(args), "not-finite.pt")
        raise Failed(f"{failure}, after {run.true_steps} steps; the state is kept in {folder}/not-finite.pt, "
                     "and the last good checkpoint stays") from failure
    if stopped:
        print(f'stopped at {run.true_steps} steps; go on with: python {SCRIPT} --resume "{folder}"')
    elif not Processes.rank:
        report(args, run, folder, writer)
    writer.close()
    return 128 + stopped if stopped else 0


def train(args, run, folder, writer):
    """Plays and learns in turns. -> 0 at the end, or the signal that stopped the run before"""
    table = run.table
    begun = saved = pictured = time.perf_counter()
    steps_before, seconds_before = run.true_steps, run.seconds
    bar = tqdm(total=args.total_timesteps, initial=run.true_steps, unit=" steps", unit_scale=True,
               dynamic_ncols=True, mininterval=0.5, desc="training")
    stopped = 0
    with bar, Interrupt() as interrupt:
        while run.true_steps < args.total_timesteps and not stopped:
            left = 1 - run.true_steps / args.total_timesteps  # the share of the run that is still to come
            learning_rate, ent_coef = args.learning_rate * left, args.ent_coef * left
            soft_coef = args.soft_coef * max(0.0, 2 * left - 1)
            run.optimizer.param_groups[0]["lr"] = learning_rate

            started = time.perf_counter()
            taken, played = rollout(args, table, run.returns)
            data, middle = taken, time.perf_counter()
            if args.buffer == "episodes":
                data = run.buffer.add(taken, played)
                most = -Processes.most(-data["rewards"].shape[2])[0]  # all learn from as many, the newest
                data = {key: part[:, :, -most:] for key, part in data.items()}
                data = bring_up_to_date(run.agent, data)
            losses = update(args, run.agent, run.optimizer, data, ent_coef, soft_coef, table.generator)
            ended = time.perf_counter()

            run.true_steps += round(Processes.mean(played.sum())[0].item() * Processes.size)
            run.seconds = seconds_before + time.perf_counter() - START
            run.returns.take()
            run.reach(run.returns.last[:, table.learner_seats])
            run.returns.show(bar)
            bar.update(run.true_steps - bar.n)
            run.losses = run.losses + [losses] if run.true_steps > 0.9 * args.total_timesteps else []
            log_update(writer, run, losses, {
                "charts/SPS": (run.true_steps - steps_before) / (ended - begun), "charts/ent_coef": ent_coef,
                "charts/learning_rate": learning_rate, "charts/soft_coef": soft_coef,
                "time/rollout": middle - started, "time/learning": ended - middle, **Processes.times()})
            stopped, due = Processes.most(interrupt.wanted, ended - saved > args.save_every)
            last = run.true_steps >= args.total_timesteps or stopped
            if not Processes.rank and (last or ended - pictured > args.picture_every):
                pictured = ended
                log_pictures(args, writer, run, taken, folder)
            if last or due:
                saved = ended
                writer.flush()
                save_checkpoint(folder, run.content(args))
    return stopped


PLOTS = ("charts/episodic_return", "losses/explained_variance", "losses/value_loss", "losses/policy_loss",
         "losses/entropy", "losses/approx_kl", "losses/clipfrac", "time/.*")


def log_update(writer, run, losses, numbers):
    """Writes what there is to tell of an update: returns, each learner's losses [L], and other numbers."""
    if len(run.returns.last):
        for name, value in zip(run.table.names, run.returns.last.mean(0).tolist()):
            writer.add_scalar(f"charts/episodic_return/{name}", value, run.true_steps)
    for name, learner in run.table.learner_of.items():
        for key, value in losses.items():
            writer.add_scalar(f"losses/{key}/{name}", value[learner], run.true_steps)
    for key, value in numbers.items():
        writer.add_scalar(key, value, run.true_steps)


def log_pictures(args, writer, run, data, folder):
    """Writes a GIF of an episode, and a histogram of the actions that each learner took in a rollout."""
    path = os.path.join(folder, "pictures", f"episode_{run.true_steps}.gif")
    frames = record_episode(args, run.agent, args.seed + run.true_steps)
    add_gif(writer, "a_game", frames, run.true_steps, path)
    for name, learner in run.table.learner_of.items():
        actions = data["actions"][:, learner][data["present"][:, learner]]
        if len(actions):
            writer.add_histogram(f"actions/{name}", actions, run.true_steps)


def record_episode(args, agent, seed):
    """Plays one episode for a picture. -> frames"""
    table = Table(args, 1, seed, agent)
    total, frames = torch.zeros(len(args.players)), []
    returns = lambda: "returns " + " ".join(f"{value:.4g}" for value in total.tolist())
    while not table.over:
        frames.append(draw_board(table.game, 0, f"step {int(table.game.clock)}  {returns()}"))
        with torch.no_grad():
            total += table.play(table.act()[0], restart=False)["reward"][0].cpu()
    return frames + [draw_board(table.game, 0, f"over  {returns()}")]


def evaluate(args, agent, episodes, greedy, seed):
    """Plays fresh meetings with the learners as they are. -> returns [E, N], the steps that this took"""
    num_envs = min(math.ceil(episodes / (args.meeting_episodes or 1)), 2000)
    returns, steps = play_episodes(args, agent, num_envs, math.ceil(episodes / num_envs), greedy, seed)
    return returns.flatten(0, 1)[:episodes], steps


@torch.no_grad()
def play_episodes(args, agent, num_envs, episodes, greedy, seed):
    """Plays some episodes of each of num_envs games. -> returns [episode, B, N], the steps that this took"""
    table = Table(args, num_envs, seed, agent)
    finished, steps = [], 0
    for _ in range(episodes):
        total = 0.0
        while not table.over.all():
            running = ~table.over
            total = total + table.play(table.act(greedy)[0], restart=False)["reward"] * running[:, None]
            steps += int(running.sum())
        finished.append(total)
        table.begin(table.over)
    return torch.stack(finished), steps


def report(args, run, folder, writer):
    """Measures the learners on fresh episodes, writes results.json and prints the tables."""
    table, evaluation, evaluation_steps = run.table, {}, 0
    rows = [["evaluation", *table.names, "learners' mean", "episodes", "equals earn equally?"]]
    names = list(zip(args.players, args.strengths or [1] * len(args.players)))  # who is whose equal
    for mode in ("sampled", "greedy") if args.eval_episodes else ():
        seed = args.seed + 1_000_000
        returns, steps = evaluate(args, run.agent, args.eval_episodes, mode == "greedy", seed)
        evaluation_steps += steps
        evaluation[mode] = result = summarise(returns, table.learner_seats, names)
        columns = [f"{result[name]:.3f} ± {result['ci95'][name]:.3f}" for name in (*table.names, "mean")]
        rows.append([mode, *columns, result["episodes"], equality(result)])
        writer.add_scalar(f"a_result/{mode}", result["mean"], run.true_steps)
    losses = {}
    for key in run.losses[0]:
        mean = torch.stack([update[key] for update in run.losses]).mean(0)
        losses[key] = {name: mean[learner].item() for name, learner in table.learner_of.items()}
    add_hparams(writer, args)
    writer.flush()
    save_json(os.path.join(folder, "results.json"), {
        "true_steps": run.true_steps, "evaluation_steps": evaluation_steps, "seconds": round(run.seconds, 2),
        "sps": round(run.true_steps / run.seconds), "evaluation": evaluation,
        "thresholds": run.thresholds, "losses": losses})
    if args.eval_episodes:
        print_table(f"mean return per episode ({' '.join(args.players)}, {board_name(args)})", rows)
    rows = [["return", "after", ""]]
    rows += [[value, f"{at['seconds']:.1f} s", f"{at['true_steps']} true steps"] if at else
             [value, "not reached", ""] for value, at in run.thresholds.items()]
    print_table("mean return of the last 500 episodes first reached", rows)
    print(f"\n{run.true_steps} true steps in {run.seconds:.0f} s, and {evaluation_steps} to evaluate. "
          f"Everything is in {folder}, the last episode in "
          f"{os.path.join(folder, 'pictures', f'episode_{run.true_steps}.gif')}")
    strangers = ("ppo", *["nh"] * (len(args.players) - 1))
    print_next(args, meet_hare_hunters=command(mode="adapt", checkpoint=folder, players=strangers))


def load_learners(args):
    """The learners of --checkpoint. -> args as they were trained, their weights [L, ...]"""
    path = asked = args.checkpoint
    path = os.path.join(path, "checkpoint.pt") if os.path.isdir(path) else path
    saved = load_checkpoint(path, f"--checkpoint {asked}", args.device)
    if not saved.keys() >= {"learner_of", "config"}:
        raise Refused(f"--checkpoint {asked} holds no learners, it was written by {saved['script']}")
    fixed = [field.name for field in dataclasses.fields(GameArgs)] + ["memory", "hidden_size"]
    for name in fixed:
        given, trained = getattr(args, name), saved["config"][name]
        if given not in (trained, getattr(Args, name)):
            raise Refused(f"{flag(name)} {given} differs from {trained}, with which {asked} was trained")
    given, trained = len(args.players), len(saved["config"]["players"])
    if given != trained:
        raise Refused(f"--players names {given} players, {asked} was trained with {trained}")
    args = dataclasses.replace(args, meeting_episodes=args.meeting_episodes or 20,
                               **{name: saved["config"][name] for name in fixed})
    return args, saved["run"]["agent"]


def adapt(args):
    """A trained learner among others, in each seat, as it is: what it remembers lasts for a meeting."""
    args, weights = load_learners(args)
    table = Table(args, 1, args.seed)  # whatever is wrong with the players shows now
    run_folder(args)  # and whatever is wrong with its name
    strangers, answer = [name for name in args.players if name != "ppo"], []
    for seat in tqdm(range(len(args.players)), desc="meetings in each seat", leave=False, dynamic_ncols=True):
        learner = seat % len(weights["view.weight"])
        table.agent.load_state_dict({key: value[learner, None] for key, value in weights.items()})
        seated = dataclasses.replace(args, players=(*strangers[:seat], "ppo", *strangers[seat:]))
        returns, _ = play_episodes(seated, table.agent, args.meetings, args.meeting_episodes, False,
                                   args.seed + seat)
        answer.append(returns[..., seat].T)
    report_meetings(args, torch.stack(answer))
    return 0


# ===================================================================================== playing


class Table(Saved):
    """The game, and who sits where: learners, trained players, and all the others (a Lineup).

    With --memory gru, learners carry from step to step of a meeting: their memory [L, M, D], and what they
    were told last [L, M, TOLD]: an action (one-hot), its reward, and whether an episode has ended since. A
    learner that has left sees nothing until the next episode; when a meeting is over, all is forgotten.
    """

    saved = ("game", "lineup", "generator", "memory", "told")

    def __init__(self, args, num_envs, seed, agent=None):
        players, device = list(args.players), args.device
        board = {field.name: getattr(args, field.name) for field in dataclasses.fields(GameArgs)}
        self.game = BatchedStagHunt(num_envs, num_players=len(players), device=device, seed=seed, **board)
        self.generator = seeded(seed, "actions", device)
        self.views = Views(args.height, args.width, len(players), args.final_time, device)
        self.names = [f"player_{seat + 1}" for seat in range(len(players))]
        self.learner_seats = [seat for seat, name in enumerate(players) if name == "ppo"]
        self.trained_seats = [seat for seat, name in enumerate(players) if ".pt:" in name]
        others = [None if name == "ppo" or ".pt:" in name else name for name in players]
        episodes = args.meeting_episodes or 1
        self.lineup = Lineup(others, self.game, seed, episodes, episodes)
        # [learner, seat of that learner]: one seat each, or all of them where the parameters are shared
        self.seats = torch.tensor(self.learner_seats, device=device)[:, None]
        if args.share_parameters:
            self.seats = self.seats.T
        self.learner_of = {self.names[seat]: learner for learner, seats in enumerate(self.seats.tolist())
                           for seat in seats}
        kind = {"none": Agent, "gru": RecurrentAgent}[args.memory]
        self.agent = agent or kind(len(self.seats), self.views, args.hidden_size, args.seed).to(device)
        if self.trained_seats:
            self.trained = load_policies([name for name in players if ".pt:" in name], self.views).to(device)
        self.memory = self.told = None
        if args.memory == "gru":
            many = len(self.seats), num_envs * self.seats.shape[1]
            self.memory = torch.zeros(*many, args.hidden_size, device=device)
            self.told = torch.zeros(*many, TOLD, device=device)
        self.reward_scale = args.reward_scale
        self.over = torch.zeros(num_envs, dtype=torch.bool, device=device)  # episodes played to their end

    def learner_rows(self, x):
        """Picks the learners' rows of [B, N, ...] and lays them out as [L, B * seats of a learner, ...]."""
        return x[:, self.seats].transpose(0, 1).flatten(1, 2)

    def think(self, x):
        """What learners make of views [N, B, K]. -> dict of [L, M], log-probabilities, the memory after it"""
        step = {"x": self.learner_rows(x.transpose(0, 1))}
        if self.memory is None:
            log_probs, step["values"] = self.agent(step["x"])
            return step, log_probs, None
        awake = (self.game.cell < self.game.cells) & ~self.over
        step |= {"told": self.told, "awake": self.learner_rows(awake.T)}
        once = [step[key][:, :, None] for key in ("x", "told", "awake")]
        log_probs, step["values"], memory = self.agent(*once, torch.ones_like(once[-1]), self.memory)
        return step, log_probs, memory

    def act(self, greedy=False):
        """-> one joint move [B, N], and what learners saw, did and thought of it: a dict of [L, M]"""
        x = self.views.look(self.game.state())  # [N, B, K]
        actions = self.lineup.act(self.game)
        if self.trained_seats:
            log_probs, _ = self.trained(x[self.trained_seats])
            actions[:, self.trained_seats] = sample_actions(log_probs.exp(), self.generator).T
        step, log_probs, self.memory = self.think(x)
        probs = log_probs.exp()
        step["actions"] = log_probs.argmax(-1) if greedy else sample_actions(probs, self.generator)
        step["logprobs"] = log_probs.gather(-1, step["actions"][..., None]).squeeze(-1)
        step["entropy"] = -(probs * log_probs).sum(-1)
        actions[:, self.seats] = step["actions"].unflatten(1, (-1, self.seats.shape[1])).transpose(0, 1)
        return actions, step

    def play(self, actions, restart=True):
        """Plays a joint move, and begins new episodes where one is over, unless told not to.

        -> what the game's advance gives, and `parted` [B], where a meeting is over
        """
        out = self.game.advance(actions)
        if self.memory is not None:
            self.tell(out)
        self.over = self.over | out["over"]
        out["parted"] = self.begin(self.over) if restart else torch.zeros_like(self.over)
        return out

    def tell(self, out):
        """Tells learners what they did and earned in a step that they were there for, and that it ended."""
        reward = out["reward"][..., None] * self.reward_scale
        action = F.one_hot(out["action"].long(), NUM_ACTIONS)
        done = torch.cat([action, reward, torch.zeros_like(reward)], -1)  # [B, N, TOLD]
        there = out["present"] & ~self.over[:, None]
        told = torch.where(self.learner_rows(there)[..., None], self.learner_rows(done), self.told)
        ended = self.learner_rows(out["over"][:, None].expand_as(there)).float()
        self.told = torch.cat([told[..., :-1], torch.maximum(told[..., -1], ended)[..., None]], -1)

    def begin(self, which):
        """Begins a new episode where `which` [B] says so. -> where it is the first of a meeting [B]"""
        self.game.reset(which)
        self.lineup.reset(which)
        self.over = self.over & ~which
        first = which & (self.lineup.episode % self.lineup.episodes == 0)
        if self.memory is not None:
            goes_on = self.learner_rows(~first[:, None].expand(-1, len(self.names)))[..., None]
            self.memory, self.told = self.memory * goes_on, self.told * goes_on
        return first


def load_policies(names, views):
    """Stacks the trained players named `runs/x/checkpoint.pt:player_1` into one Agent that does not learn."""
    policies = []
    for name in names:
        path, _, player = name.rpartition(":")
        checkpoint = load_checkpoint(path, f"--players {name}")
        by_ppo = checkpoint["script"] == "ppo_single_player.py"
        learner_of = checkpoint.get("learner_of", {}) if by_ppo else {}
        if player not in learner_of:
            there = ", ".join(learner_of) or "no policies"
            raise Refused(f"--players {name}: {path} holds {there}, not {player!r}")
        if "recall.weight" in checkpoint["run"]["agent"]:
            raise Refused(f"--players {name}: a player with --memory gru sits down with --mode adapt only")
        trained, now = checkpoint["config"]["final_time"], views.num_facts - views.first_left - 1
        if trained != now:
            raise Refused(f"--final-time {now} does not fit --players {name}, which has {trained}")
        check_weights(checkpoint["run"]["agent"], f"--players {name}")
        policies.append({key: value[learner_of[player]] for key, value in checkpoint["run"]["agent"].items()})
        (inputs, size), hidden_size = policies[-1]["view.weight"].shape, len(policies[0]["hidden.weight"])
        if (inputs, size) != (views.num_inputs, hidden_size):
            raise Refused(f"--players {name}: a policy for views of {inputs} numbers of --hidden-size {size} "
                          f"does not go with views of {views.num_inputs} and --hidden-size {hidden_size}")
    agent = Agent(len(names), views, hidden_size, 0)
    agent.load_state_dict({key: torch.stack([policy[key] for policy in policies]) for key in policies[0]})
    return agent


@torch.no_grad()
def rollout(args, table, returns):
    """Plays --num-steps steps of each game, or with --buffer episodes one whole episode of each.

    -> dict of [T, L, M], where values are [T+1, L, M], and the steps played of each game [B]. `present` says
    which of these are samples: the player was there, and the episode not yet over. With --memory gru,
    `memory` [L, M, D] is what was remembered at the beginning.
    """
    whole_episodes = args.buffer == "episodes"
    if whole_episodes:
        table.begin(torch.ones_like(table.over))
    steps, played, memory = [], torch.zeros_like(table.game.clock), table.memory
    for _ in range(args.final_time if whole_episodes else args.num_steps):
        actions, step = table.act()
        left, running = args.final_time - 1 - table.game.clock, ~table.over  # left: after this step
        out = table.play(actions, restart=not whole_episodes)
        returns.add(out["reward"] * running[:, None], out["over"] & running)
        step["rewards"] = table.learner_rows(out["reward"]) * args.reward_scale
        step["present"] = table.learner_rows(out["present"] & running[:, None])
        if memory is None:
            step["ends"] = table.learner_rows(out["ended"])
        else:
            ends = meeting_ends(out["over"], out["parted"], left, args.gamma)
            ends = torch.stack([ends, out["parted"].float()], -1)[:, None].expand(-1, len(table.names), -1)
            step["ends"], step["parted"] = table.learner_rows(ends).unbind(-1)
        steps.append(step)
        played += running
    data = {key: torch.stack([step[key] for step in steps]) for key in steps[0]}
    last, _, _ = table.think(table.views.look(table.game.state()))
    data["values"] = torch.cat([data["values"], last["values"][None]])
    return data | ({} if memory is None else {"memory": memory}), played


def meeting_ends(over, parted, left, gamma):
    """What is lost of all that comes after a step, from 0 to 1, for learners that remember: [B].

    Nothing within an episode, and all where a meeting is over. Between two of its episodes it is as if the
    clock had run down, `left` steps: a later episode counts as much however long the one before it took.
    """
    return torch.where(parted, 1.0, (1 - gamma ** left) * over)


class EpisodeBuffer(Saved):
    """Whole episodes, newest last; the oldest go when the steps in it would exceed its size."""

    saved = ("data", "length")

    def __init__(self, size):
        self.size, self.data, self.length = size, None, None

    def add(self, data, length):
        """data is a rollout's, length [B] the steps of each episode. -> all that is held, as a rollout's"""
        seats = data["rewards"].shape[2] // len(length)
        if self.data is not None:
            data = {key: torch.cat([self.data[key], value], 2) for key, value in data.items()}
            length = torch.cat([self.length, length])
        newest_first = length.flip(0).cumsum(0).flip(0)
        keep = newest_first <= max(self.size, length[-1])
        self.data = {key: value[:, :, keep.repeat_interleave(seats)] for key, value in data.items()}
        self.length = length[keep]
        return self.data


@torch.no_grad()
def bring_up_to_date(agent, data):
    """Stored data with the log-probabilities and values of the present policy, and each sample's `trace`.

    The stored log-probability is the one that the action was drawn with. PPO's ratio is taken to the present
    policy, and each sample counts by its trace, min(1, present / drawn): decoupled PPO (Hilton et al. 2022).
    """
    answers = [agent(x) for x in data["x"]]
    log_probs, values = (torch.stack(answer) for answer in zip(*answers))
    logprobs = log_probs.gather(-1, data["actions"][..., None]).squeeze(-1)
    trace = (logprobs - data["logprobs"]).exp().clamp(max=1)
    values = torch.cat([values, data["values"][-1:]])
    return {**data, "logprobs": logprobs, "values": values, "trace": trace}


# ==================================================================================== learning


def traced_gae(rewards, values, ends, present, gamma, gae_lambda, trace):
    """Generalised advantages (Schulman et al. 2016, eq. 16) and value targets of [T, ...]; values [T+1, ...].

    Where a player's game ends nothing comes after: no value, no later advantage. Where it is absent all is 0.
    ends [T, ...] is true there, or says how much of what comes after is lost, from 0 to 1.
    trace [T, ...], for actions drawn by an older policy: min(1, probability now / probability then). A later
    advantage counts by the trace of the action that led to it, as in V-trace (Espeholt et al. 2018) and
    Retrace.
    """
    goes_on = 1 - ends.to(rewards.dtype)
    advantages = torch.zeros_like(rewards)
    later = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * values[t + 1] * goes_on[t] - values[t]
        advantages[t] = present[t] * (delta + gamma * gae_lambda * goes_on[t] * later)
        later = trace[t] * advantages[t]
    return advantages, values[:-1] + trace * advantages


def masked_mean(x, weight):
    """The mean of each row over its samples: [L, M] -> [L]."""
    return (x * weight).sum(-1) / weight.sum(-1).clamp(min=1e-8)


def variance(x, weight):
    """The variance of each row over its samples: [L, M] -> [L]."""
    return masked_mean((x - masked_mean(x, weight)[:, None]).square(), weight)


def share_out(samples):
    """Weights [T, L, M] of samples: all of a learner's equal, adding up to 1 in the mean of all processes, so
    that sums by these weights are means."""
    total, = Processes.mean(samples.sum((0, 2), keepdim=True))
    return samples / total.clamp(min=1e-8)


def standardise(x, weight):
    """x [T, L, M] less each learner's mean, divided by its spread; the weights are those of `share_out`."""
    mean, square = Processes.mean(*((part * weight).sum((0, 2), keepdim=True) for part in (x, x.square())))
    return (x - mean) / ((square - mean.square()).clamp(min=0).sqrt() + 1e-8)


def ppo_loss(log_probs, value, batch, args, ent_coef):
    """The clipped loss of PPO (Schulman et al. 2017) of each learner: [L], and what it is made of.

    log_probs [L, M, 7] and value [L, M] are what the networks answer now; batch holds [L, M] of actions,
    logprobs, advantages, returns, trace; and weight and value_weight, which make sums over the samples means.
    """
    weight, advantages = batch["weight"], batch["advantages"]
    logratio = log_probs.gather(-1, batch["actions"][..., None]).squeeze(-1) - batch["logprobs"]
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    surrogate = torch.minimum(advantages * ratio, advantages * clipped)
    policy_loss = -(surrogate * batch["trace"] * weight).sum(-1)
    value_loss = 0.5 * ((value - batch["returns"]).square() * batch["value_weight"]).sum(-1)
    entropy = -((log_probs.exp() * log_probs).sum(-1) * weight).sum(-1)
    loss = policy_loss - ent_coef * entropy + args.vf_coef * value_loss
    with torch.no_grad():
        approx_kl = ((ratio - 1 - logratio) * weight).sum(-1)  # http://joschu.net/blog/kl-approx.html
        clipfrac = (((ratio - 1).abs() > args.clip_coef) * weight).sum(-1)
    parts = {"policy_loss": policy_loss, "value_loss": value_loss / args.reward_scale**2, "entropy": entropy,
             "approx_kl": approx_kl, "clipfrac": clipfrac}
    return loss, {key: value.detach() for key, value in parts.items()}


def clip_gradients(agent, max_norm):
    """Shortens the gradient of each learner to max_norm, on its own."""
    gradients = [parameter.grad for parameter in agent.parameters() if parameter.grad is not None]
    norm = sum(gradient.flatten(1).square().sum(1) for gradient in gradients).sqrt()  # [L]
    check_finite(norm, f"the gradient of {type(agent).__name__}", getattr(agent, "owners", ()))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)[:, None, None]
    for gradient in gradients:
        gradient.mul_(factor)


def cut_samples(data, num_minibatches, generator):
    """Cuts data [T, L, M, ...] into minibatches [L, samples, ...] in a random order, without the absent."""
    flat = {key: value.transpose(0, 1).flatten(0, 2) for key, value in data.items()}  # [L * samples, ...]
    weight = flat["weight"].view(data["weight"].shape[1], -1)  # [L, samples]
    offset = torch.arange(len(weight), device=weight.device)[:, None] * weight.shape[1]
    most = max(int((weight > 0).sum(1).max()), num_minibatches)
    # a random order with the absent at the end: the longest list of samples is as far as one need go
    number = torch.rand(weight.shape, generator=generator, device=weight.device)
    for rows in (number - (weight > 0).float()).argsort(1)[:, :most].tensor_split(num_minibatches, 1):
        index = (rows + offset).flatten()
        yield {key: x.index_select(0, index).unflatten(0, rows.shape) for key, x in flat.items()}


def cut_sequences(data, memory, num_minibatches, generator):
    """Cuts data [T, L, M, ...] into minibatches of sequences [L, m, T, ...] with their memory [L, m, D]."""
    data = {key: value.movedim(0, 2) for key, value in data.items()} | {"memory": memory}  # [L, M, ...]
    number = torch.rand(memory.shape[:2], generator=generator, device=memory.device)
    learner = torch.arange(len(memory), device=memory.device)[:, None]
    for rows in number.argsort(1).tensor_split(num_minibatches, 1):
        yield {key: value[learner, rows] for key, value in data.items()}


def answer(agent, batch):
    """What the networks make of a minibatch. -> log-probabilities [L, M, 7], values [L, M], its samples"""
    if "memory" not in batch:
        return *agent(batch["x"]), batch
    goes_on = 1 - batch["parted"]
    log_probs, value, _ = agent(batch["x"], batch["told"], batch["awake"], goes_on, batch["memory"])
    return log_probs, value, {key: part.flatten(1, 2) for key, part in batch.items()}


def update(args, agent, optimizer, data, ent_coef, soft_coef, generator):
    """One PPO update of all learners on data [T, L, M]. -> the means of the losses over it, each [L]"""
    rewards = data["rewards"] + soft_coef * args.reward_scale * data["entropy"]
    trace = data.get("trace", torch.ones_like(rewards))  # of steps just taken: 1
    memory, counts, weight = data.get("memory"), data["present"], share_out(data["present"].float())
    value_weight = weight
    if memory is not None:  # they also value the time that they are away, for the meeting goes on
        counts = torch.ones_like(counts)
        value_weight = share_out(counts.float())
    advantages, returns = traced_gae(rewards, data["values"], data["ends"], counts, args.gamma,
                                     args.gae_lambda, trace)
    values = data["values"][:-1]
    if args.prize_floor:  # a small prize in a poor game counts as a large one in a rich game
        advantages = advantages / (values.abs() + args.prize_floor * args.reward_scale)
    seen = {key: data[key] for key in ("x", "told", "awake", "parted") if key in data}
    data = {**seen, "actions": data["actions"], "logprobs": data["logprobs"], "returns": returns,
            "advantages": standardise(advantages, weight),
            "weight": weight * args.num_minibatches, "trace": trace,
            "value_weight": value_weight * args.num_minibatches}
    totals = []
    for _ in range(args.update_epochs):
        batches = (cut_samples(data, args.num_minibatches, generator) if memory is None else
                   cut_sequences(data, memory, args.num_minibatches, generator))
        for batch in batches:
            log_probs, value, batch = answer(agent, batch)
            loss, parts = ppo_loss(log_probs, value, batch, args, ent_coef)
            optimizer.zero_grad()
            loss.sum().backward()
            check_finite(*Processes.mean_gradients(agent, loss), "the loss", agent.owners)
            clip_gradients(agent, args.max_grad_norm)
            optimizer.step()
            totals.append(parts)
    means = {key: torch.stack([parts[key] for parts in totals]).mean(0) for key in totals[0]}
    returns, values, weight = (part.transpose(0, 1).flatten(1) for part in (returns, values, weight))
    unexplained = variance(returns - values, weight) / variance(returns, weight).clamp(min=1e-8)
    means["explained_variance"] = 1 - unexplained
    return dict(zip(means, Processes.mean(*means.values())))


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


def tanh(x):
    """torch.tanh by another formula, on a CPU five times as fast."""
    return 2 * torch.sigmoid(2 * x) - 1


class Agent(nn.Module):
    """The policies and values of L learners as one stacked network: nothing is shared between them."""

    def __init__(self, num_learners, views, hidden_size, seed):
        super().__init__()
        self.views = views
        self.view = FirstLayer(num_learners, views, hidden_size, seed)
        self.hidden = Linear(num_learners, hidden_size, hidden_size, math.sqrt(2), seed)
        self.actor = Linear(num_learners, hidden_size, NUM_ACTIONS, 0.01, seed)
        self.critic = Linear(num_learners, hidden_size, 1, 1.0, seed)

    def decide(self, first, mask):
        """First layer's sums [L, M, hidden], legal actions [L, M, 7] -> what `forward` gives."""
        hidden = tanh(self.hidden(tanh(first)))
        return legal_log_softmax(self.actor(hidden), mask), self.critic(hidden).squeeze(-1)

    def forward(self, x):
        """Views [L, M, K] -> log-probabilities of the actions [L, M, 7], values [L, M]."""
        return self.decide(self.view(x), self.views.mask(x))


TOLD = 9  # numbers that a learner with a memory is told beside its view: see Table


class RecurrentAgent(Agent):
    """The policies and values of L learners with a memory, a gated recurrent unit (Cho et al. 2014) each.

    The memory lasts as long as the caller hands it on, such as a meeting (RL^2, Duan et al. 2016).
    """

    def __init__(self, num_learners, views, hidden_size, seed):
        super().__init__(num_learners, views, hidden_size, seed)
        size = num_learners, hidden_size
        self.told = Linear(num_learners, TOLD, hidden_size, 1.0, seed)
        self.gates = Linear(*size, 3 * hidden_size, 1.0, seed)  # from what is seen: reset, update, new
        self.recurrent = Linear(*size, 3 * hidden_size, 1.0, seed + 1)  # from the memory
        self.recall = Linear(*size, hidden_size, 1.0, seed + 1)
        self.present = Linear(*size, hidden_size, math.sqrt(2), seed + 2)

    def step(self, gates, memory):
        """One step of the unit: what is seen, through `gates` [L, M, 3 D], and memory [L, M, D] -> memory"""
        size, recurrent = memory.shape[-1], self.recurrent(memory)
        reset, keep = torch.sigmoid(gates[..., :2 * size] + recurrent[..., :2 * size]).chunk(2, -1)
        new = tanh(gates[..., 2 * size:] + reset * recurrent[..., 2 * size:])
        return new + keep * (memory - new)

    def forward(self, x, told, awake, goes_on, memory):
        """Sequences of views [L, M, T, K], what was told [L, M, T, TOLD], memory [L, M, D] at the beginning.

        awake [L, M, T] is false where nothing is seen, goes_on [L, M, T] is 0 where all is forgotten after
        the step. -> log-probabilities [L, M * T, 7], values [L, M * T], memory after the last step
        """
        first = self.view(x.flatten(1, 2)) + self.told(told.flatten(1, 2))
        hidden = tanh(self.hidden(tanh(first)))
        gates = self.gates(hidden).unflatten(1, x.shape[1:3])
        memories, parts = [], (gates, awake[..., None], goes_on[..., None])
        for seen, sees, lasts in zip(*(part.unbind(2) for part in parts)):
            memory = torch.where(sees, self.step(seen, memory), memory)
            memories.append(memory)
            memory = memory * lasts
        recalled = torch.stack(memories, 2).flatten(1, 2)
        hidden = tanh(self.present(hidden) + self.recall(recalled))
        log_probs = legal_log_softmax(self.actor(hidden), self.views.mask(x).flatten(1, 2))
        return log_probs, self.critic(hidden).squeeze(-1), memory


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

    def observe(self):
        """What each player sees, itself first: the dict of the PettingZoo game with [B, N] in front."""
        n, cells, b = self.num_players, self.cells, self.num_envs
        # Player boards 0, 1, ... N-1, 0, 1, ... N-2: any N of them in a row are one player's, itself first.
        boards = torch.zeros(2 * n - 1, cells + 1, b, dtype=self.dtype, device=self.device)
        boards[:n].scatter_(1, self.cell[:, None], 1)
        boards[n:] = boards[:n - 1]
        planes = torch.empty(n, n + 3, cells, b, dtype=self.dtype, device=self.device)
        planes[:, :n] = boards[:, :cells].unfold(0, n, 1).permute(0, 3, 1, 2)
        ground = self.board[:cells]
        planes[:, n] = ground >> STAY & 1 ^ 1
        planes[:, n + 1] = ground >> HUNT_STAG & 1
        planes[:, n + 2] = ground >> HUNT_HARE
        mask = (self.legal_bits()[:, None] >> self.action_bits[:, None]) & 1  # [N, 7, B]
        previous = torch.cat([self.previous, self.previous[:-1]]).unfold(0, n, 1)  # [N, B, N]
        return {"observation": planes.view(n, n + 3, self.height, self.width, b).permute(4, 0, 2, 3, 1),
                "action_mask": mask.view(torch.bool).permute(2, 0, 1), "actions": previous.transpose(0, 1),
                "step": self.clock, "steps_left": self.deadline - self.clock}


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


class UserPlayer:
    """A player from the user's own file, `file.py:Class`, asked in batches and checked at every answer."""

    def __init__(self, name, game):
        self.name = name
        path, _, class_name = name.rpartition(":")
        if not os.path.isfile(path):
            raise Refused(f"--players {name}: there is no {path}")
        try:  # what is wrong with it shows here, before anything has been written
            player_class = runpy.run_path(path).get(class_name)
            if not hasattr(player_class, "act"):
                raise TypeError(f"no class {class_name} with act(observation, generator)")
            self.player = player_class()
            self.reset(torch.ones(game.num_envs, dtype=torch.bool, device=game.device))
            self.act(game.observe(), 0, seeded(0, name, game.device))
            self.player = player_class()  # that was a trial: it plays as if it had seen nothing
        except Failed as failure:
            raise Refused(str(failure)) from failure
        except BaseException as error:
            raise Refused(f"--players {name} cannot play: {self.describe(error)}") from error

    @staticmethod
    def describe(error):
        """What somebody else's code raised, in one line whatever it says of itself."""
        try:
            return " ".join(repr(error).split())
        except BaseException:
            return type(error).__name__

    def ask(self, method, *parts):
        """Lets the player do something; what it raises is its own fault."""
        try:
            return getattr(self.player, method)(*parts)
        except BaseException as error:  # also what it raises to end the script: Ctrl-C raises nothing
            raise Failed(f"--players {self.name}: its {method} raised {self.describe(error)}") from error

    def reset(self, which):
        if hasattr(self.player, "reset"):
            self.ask("reset", which.clone())  # copies: what a player does to them is nobody else's

    def act(self, observation, seat, generator):
        """The actions [B] of this player, who gets of all players' observations those of its seat."""
        step = observation["step"]
        own = {key: (part[:, seat] if part.dim() > 1 else part).clone() for key, part in observation.items()}
        action = self.ask("act", own, generator)
        got = type(action).__name__
        if isinstance(action, torch.Tensor) and action.layout == torch.strided and not action.is_meta:
            got = f"{action.dtype} {list(action.shape)}"
        if not re.fullmatch(rf"torch.u?int\d+ \[{len(step)}\]", got):
            raise Failed(f"--players {self.name}: act gave {got}, not a tensor of {len(step)} whole numbers")
        return action


class Lineup(Saved):
    """Who sits where: rule-based players, mixes of them drawn anew now and then, and players from files.

    names: one for each seat, in order. A seat named None is left to the caller, who overwrites its actions.
    episodes: how many episodes make a meeting (a row of episodes with the same players).
    mix_for: for how many episodes a draw of the mixes holds, such as 1 or those of a meeting.
    known [N]: whose exact probabilities `probabilities` tells: those of rule-based players and mixes.
    """

    saved = ("kind", "episode", "generator", "users_generator")

    def __init__(self, names, game, seed=0, episodes=1, mix_for=1):
        if len(names) != game.num_players:
            raise Refused(f"--players names {len(names)} players, but the game has {game.num_players}")
        self.names, self.episodes, self.mix_for = list(names), episodes, mix_for
        self.generator = seeded(seed, "lineup", game.device)
        self.users_generator = seeded(seed, "players from files", game.device)  # for them to use
        is_rule = [name is not None and (":" not in name or name.startswith("mix:")) for name in names]
        self.known = torch.tensor(is_rule, device=game.device)
        self.users = {seat: UserPlayer(name, game) for seat, name in enumerate(names)
                      if name is not None and not is_rule[seat]}
        mixes = [name.removeprefix("mix:").split(",") if rule else ["random"]
                 for name, rule in zip(names, is_rule)]
        self.kinds = [name for mix in mixes for name in mix]  # one for each member of each seat's mix
        self.rules = torch.tensor([player_rule(name) for name in self.kinds], device=game.device)  # [kind, 4]
        self.sizes = torch.tensor([len(mix) for mix in mixes], device=game.device)
        self.first = self.sizes.cumsum(0) - self.sizes
        self.kind = torch.zeros(game.num_envs, game.num_players, dtype=torch.int64, device=game.device)
        self.episode = torch.full((game.num_envs,), -1, device=game.device)
        self.reset(torch.ones(game.num_envs, dtype=torch.bool, device=game.device))

    def reset(self, which):
        """Begins an episode where `which` [B] says so: mixes are drawn anew where their draw is used up."""
        self.episode = self.episode + which
        anew = which & (self.episode % self.mix_for == 0)
        number = torch.rand(self.kind.shape, generator=self.generator, device=self.kind.device)
        drawn = self.first + (number.double() * self.sizes).long()
        self.kind = torch.where(anew[:, None], drawn, self.kind)
        for player in self.users.values():
            player.reset(which)

    def probabilities(self, game):
        """The exact action probabilities [B, N, 7] of the seats that are `known`; uniform for the others."""
        second_half = 2 * (self.episode % self.episodes) >= self.episodes
        return rule_probabilities(game, self.rules[self.kind], second_half)

    def act(self, game):
        """The actions [B, N] of all seats; the caller puts its own into those that are left to it."""
        actions = torch.full_like(self.kind, STAY)
        if self.known.any():
            actions = sample_actions(self.probabilities(game), self.generator)
        if self.users:
            observation = game.observe()
        for seat, player in self.users.items():
            actions[:, seat] = player.act(observation, seat, self.users_generator)
        return actions


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


def add_plots(writer, patterns):
    """Lays out the page "Custom Scalars": the tags of each pattern, "group/which", as one plot."""
    layout = {}
    for pattern in patterns:
        group, _, which = pattern.partition("/")
        title = " and ".join(re.findall(r"[\w ]+", which.replace(".*", "all "))).strip()
        layout.setdefault(group, {})[title] = ["Multiline", [pattern]]
    writer.add_custom_scalars(layout)


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


class Returns(Saved):
    """Sums up the episodes' returns as they are played, and keeps the last 500 of all processes."""

    saved = ("running", "last")

    def __init__(self, num_envs, num_players, device):
        self.running = torch.zeros(num_envs, num_players, device=device)
        self.new = self.last = torch.zeros(0, num_players, device=device)

    def add(self, reward, over):
        """Takes in the rewards [B, N] of a step, and where an episode is over [B]."""
        total = self.running + reward
        self.new = torch.cat([self.new, total[over]])
        self.running = total * ~over[:, None]

    def take(self):
        """Moves the episodes that have ended in any process since this was last called to the last ones."""
        others = [part.to(self.new.device) for part in Processes.gather(self.new)]
        self.last = torch.cat([self.last, self.new, *others])[-500:]
        self.new = self.new[:0]

    def show(self, bar):
        """Shows each player's mean return on the one moving line."""
        if len(self.last):
            means = " ".join(f"{value:.2f}" for value in self.last.mean(0).tolist())
            bar.set_postfix_str(f"return {means}", refresh=False)


def equal_players_test(returns, names):
    """Do players of the same name earn equally? Paired tests over episodes, corrected for their number.

    returns [E, N], names one for each seat. -> (largest |z| of all pairs, the limit it must stay under,
    the pair). The limit keeps the chance of a false alarm over all pairs at 1 in 1,000 (Bonferroni).
    """
    scores = []
    for i, j in itertools.combinations(range(len(names)), 2):
        if names[i] == names[j] is not None:
            difference = returns[:, i].double() - returns[:, j].double()
            mean = abs(difference.mean().item())
            spread = difference.std().item() / math.sqrt(len(difference))
            scores.append((mean / spread if spread > 0 else math.inf if mean > 0 else 0.0, (i, j)))
    if not scores:
        return 0.0, math.inf, None
    score, pair = max(scores)
    return score, NormalDist().inv_cdf(1 - 0.001 / (2 * len(scores))), pair


def summarise(returns, seats, names):
    """What results.json tells of episodes' returns [E, N].

    Means with 95 % intervals, of each player and of the seats that count, and whether players of the same
    name earn equally.
    """
    half = lambda x: 1.96 * x.std().item() / math.sqrt(len(x)) if len(x) > 1 else 0.0
    finite = lambda x: x if math.isfinite(x) else None
    columns = {f"player_{seat + 1}": column for seat, column in enumerate(returns.double().T)}
    columns["mean"] = returns[:, seats].double().mean(1)
    score, limit, _ = equal_players_test(returns, names)
    return {**{name: column.mean().item() for name, column in columns.items()},
            "ci95": {name: half(column) for name, column in columns.items()}, "episodes": len(returns),
            "equal_players": {"largest_z": finite(score), "limit": finite(limit), "equal": score <= limit}}


def add_hparams(writer, args):
    """Sets the seed, and the flags that are not as by default, beside the run's last scalars on TensorBoard's
    page that compares runs, which shows the first five by name: those of a_result."""
    from torch.utils.tensorboard.summary import hparams

    changed = changed_flags(args) | {"seed": args.seed}
    flags = {name: value if isinstance(value, (bool, int, float, str)) else str(value)
             for name, value in changed.items() if name != "runs_dir"}
    # Not add_hparams, which makes a run of its own; nor the first part, that would choose all runs' columns.
    for summary in hparams(flags, {})[1:]:
        writer._get_file_writer().add_summary(summary)


def changed_flags(args):
    """The flags that are not as by default, but for those that name one run."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args)
            if getattr(args, field.name) != field.default and field.name not in ("run_name", "resume")}


def command(**flags):
    """A line that starts this script with some flags, to be pasted into bash or PowerShell."""
    words = ["python", SCRIPT]
    for name, value in flags.items():
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        words += [flag(name), *map(str, values)]
    return " ".join(word if re.fullmatch(r"[\w./:+-]+", word) else f'"{word}"' for word in words)


def print_next(args, **steps):
    """Tells what to try next, by name a line to paste."""
    steps["try another seed"] = command(**changed_flags(args) | {"seed": args.seed + 1})
    steps["see all curves"] = f'tensorboard --logdir "{args.runs_dir}"'
    print("\nWhat next:")
    for what, line in steps.items():
        print(f"  {what.replace('_', ' '):24}{line}")


def equality(summary):
    """Whether players of the same name earned equally, in a word, of what summarise gives."""
    z, limit, equal = summary["equal_players"].values()
    return "–" if limit is None else f"{'yes' if equal else 'no'} (z {z or 0:.1f}, limit {limit:.1f})"


def report_meetings(args, answer):
    """Writes results.json and prints the table of a trained player's returns [seat, meeting, episode]."""
    answer, half = answer.double(), args.meeting_episodes // 2
    flat = answer.flatten(0, 1)
    later = flat[:, half:].mean(1)
    interval = lambda part: (1.96 * part.std(0) / math.sqrt(len(part))).tolist()
    episodes = [{"return": mean, "ci95": ci} for mean, ci in zip(flat.mean(0).tolist(), interval(flat))]
    second_half = {"mean": later.mean().item(), "ci95": interval(later),
                   "seats": answer[:, :, half:].mean((1, 2)).tolist()}
    results = {"players": list(args.players), "episodes": episodes, "second_half": second_half}
    folder = open_run(args)
    Interrupt.advice = f"{folder} is not complete"  # it is not resumed
    save_json(os.path.join(folder, "results.json"), results)
    rows = [["episode", "return", "95 %"]]
    for number, row in enumerate(episodes, 1):
        rows.append([number, f"{row['return']:.3f}", f"± {row['ci95']:.3f}"])
    print_table(f"return of the trained player by episode of a meeting ({' '.join(args.players)}, "
                f"{board_name(args)}, {len(flat)} meetings, all seats)", rows)
    print(f"\nepisodes {half + 1} to {args.meeting_episodes}: {second_half['mean']:.3f} ± "
          f"{second_half['ci95']:.3f}. Everything is in {folder}")


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
