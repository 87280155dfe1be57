"""HOP+ in the Markov stag hunt: infer the others' goals, predict their moves, imagine the world, search it,
and learn.

    python hopplus_selfplay.py                             four HOP+ players learn to hunt together
    python hopplus_selfplay.py --players hop ns ns ns      one among three stag hunters; any mix in any seat
    python hopplus_selfplay.py --mode adapt --checkpoint runs/x --players hop nh nh nh
                                                           a trained one among strangers
    python hopplus_selfplay.py --mode watch --checkpoint runs/x
                                                           look into their heads
    python hopplus_selfplay.py --mode play --checkpoint runs/x
                                                           take a seat among them, in the terminal
    tensorboard --logdir runs                              watch a run while it learns

Every seat that says `hop` is a player with a policy and a value of its own, and with a model of each other
player: it infers that player's goal from what it was seen to do, and its actions from that goal (MOA). All
players' networks are stacked and run as one batched program. All share the goal prior (what a goal is) and
the world model, both learned in the warm-up and frozen then. Two things are given: which actions are legal
where, and that players meet from a board drawn anew when an episode is over.

A run first warms up on games of rule-based players (goals, models of others, world model), then plays itself:

    play      believe something about each other player's goal; search the position in several trees, each
              with a draw of the goals from the belief; play the improved policy that the search returns
    imagine   go on in the head from the warm-up's positions, with strangers like those that it met
    learn     the models of others from stretches of play, real ones and the warm-up's; policy and value from
              the search's result where there was a search, and by PPO elsewhere

The run prints one moving line, then tables of returns with and without search, and leaves everything in
`runs/<run name>/`. All true-game steps that it has used are counted in `true_steps`, also the warm-up's.

Letters in shapes:
    N  players                    B  games           K  facts of a view
    L  HOP+ players (learners)    T  steps           W  ways to play; H = 4 W hypotheses
    P  = L * (N-1) pairs          M  any rows        G  numbers in a goal
Pair l * (N-1) + k - 1 is what player l makes of the k-th player after it.

The file from top to bottom, in the order in which things happen:
    flags         what can be asked for, and what is refused
    state         what is refused, saved and drawn at random, in every script
    training      the loop; what is saved; what is logged and reported
    warm-up       games of rule-based players, and what is learned from them
    play          who sits where, what each believes of the others, one joint move
    search        Monte-Carlo tree search in all trees at once
    imagination   games that go on in the players' heads
    learning      the replay, the lesson for the models of others, the lesson for policy and value
    measuring     evaluation, how well the models of others predict, pictures
    adapt, watch  a trained player among others; a game step by step, with a person in it or not
    views         what the networks see of a state
    networks      goal prior, model of others, policy and value
    world model   from a state and a joint move to the next state: learned, or the true rules
    game          the batched stag hunt and its rules
    players       rule-based players, mixes of them, players from a file
    outputs       run folder, pictures, tables

Where to change what: what the search tries next, `choose`; what is played and what the policy is taught,
`Table.plan`; what is played alone, `Table.act` (then `report_models`, too); who imagined partners are,
`Imagination.draw_types`, and how they move, `Imagination.think`; what a policy is told, `told` in `Networks`;
what all see, `Views`; what the world model predicts, `WorldModel` and `WorldTables`.
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
    mode: Literal["train", "adapt", "watch", "play"] = "train"
    """train; put a trained player of --checkpoint among others (adapt); look on step by step (watch); or take
    a seat in the terminal (play)"""
    players: tuple[str, ...] = ("hop", "hop", "hop", "hop")
    """who sits where: hop, random, ns, nh, nsh, patient-28, noisy-ns, noisy-nh, switch-ns-nh, switch-nh-ns,
    mix:A,B (drawn anew each meeting), file.py:Class (your own), runs/x/checkpoint.pt:player_1 (by
    ppo_single_player.py); beside a trained player also runs/y:player_1 (HOP+ of another run); in --mode play
    one human. Without this, --mode watch and play take who was trained (a human sits in the first seat)"""
    checkpoint: str | None = None
    """folder of the run whose players are taken for --mode adapt, watch and play"""
    total_timesteps: int = 102_400
    """real environment steps of the training; one is one joint move of all players"""
    goals: Literal["latent", "zero"] = "latent"
    """what the players go by: a learned goal of each other player (HOP+); or nothing, every goal being 0"""
    search: Literal["mcts", "one-step", "none"] = "mcts"
    """plan by tree search, by looking one move ahead, or not at all"""
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
class BeliefArgs:
    goal_dim: int = 16
    """numbers in a goal"""
    hypotheses: int = 8
    """ways to play among which the inference of a goal tells"""
    selector: Literal["max", "min"] = "max"
    """the goal in hindsight is the state within the horizon that the reader values most, or least"""
    horizon: int = 35
    """steps within which a goal is looked for in hindsight"""
    moa_samples: Literal["present", "rewarded"] = "present"
    """in real games models of others learn from all who are there, or from those that go on to catch prey"""
    hidden_size: int = 64
    """units in the hidden layers"""


@dataclass
class SearchArgs:
    search_model: Literal["learned", "rules"] = "learned"
    """what moves the board in a search and in imagined games"""
    num_simulations: int = 16
    """simulations of a decision, all its trees together"""
    num_trees: int = 2
    """trees of a decision, each with a draw of the others' goals from the belief"""
    beta: float = 6.0
    """the search plays softmax(log-policy + beta * Q), Q divided by the return expected plus --prize-floor"""
    prize_floor: float = 0.5
    """Q and advantages are divided by the return expected plus this: prizes count by how they compare, not by
    their size; inf leaves them as they are"""


@dataclass
class ImaginationArgs:
    imagined_per_real: float = 64.0
    """imagined steps for each real one, of all HOP+ players together; 0 for none"""


@dataclass
class WarmupArgs:
    warmup_meetings: int = 512
    """meetings of rule-based players in the warm-up, each of two episodes or more"""
    warmup_players: tuple[str, ...] = ("ns", "nh")
    """who plays in the warm-up"""
    vae_checkpoint: str | None = None
    """run folder or checkpoint of pretrain_vae.py, in place of that part of the warm-up"""
    world_model_checkpoint: str | None = None
    """run folder or checkpoint of train_world_model.py, in place of that part of the warm-up"""
    vae_size: int = 128
    """units in the hidden layers of the goal prior"""


@dataclass
class LearningArgs:
    num_envs: int = 64
    """games played side by side"""
    num_steps: int = 16
    """real steps of each game between two updates"""
    buffer_size: int = 32_768
    """real steps that the replay holds, the last ones; those of the warm-up stay beside them"""
    learning_rate: float = 4e-3
    """step size of Adam for policy and value; it falls to 0 over the run"""
    moa_learning_rate: float = 3e-3
    """step size of Adam for the models of others; it falls to 0, and does so late in the run"""
    moa_minibatches: int = 8
    """steps of the models of others for each update, each on stretches of play drawn anew"""
    gamma: float = 0.99
    """discount of later rewards"""
    num_minibatches: int = 12
    """pieces into which the steps of an update are cut, each for one step of policy and value"""
    update_epochs: int = 2
    """times that an update of policy and value goes through its steps"""
    clip_coef: float = 0.2
    """how far the ratio of new to old probability may move before the policy loss is flat"""
    ent_coef: float = 0.02
    """weight of the entropy bonus at the start; it falls to 0 over the run"""


@dataclass
class MeasuringArgs:
    eval_episodes: int = 2_000
    """episodes of the evaluation with search; 0 for none"""
    eval_policy_episodes: int = 5_000
    """episodes of the evaluation without search; 0 for none"""


@dataclass
class AdaptArgs:
    meeting_episodes: int = 20
    """--mode adapt: episodes of a meeting, a row of episodes with the same players"""
    meetings: int = 500
    """--mode adapt: meetings in each seat"""
    keys: str | None = None
    """--mode play: a file of keys that plays in place of the keyboard; w a s d (or arrow keys) move, space
    stays, e hunts what is on one's cell (also g a stag, h a hare), q leaves"""


@dataclass
class Args(AdaptArgs, MeasuringArgs, LearningArgs, WarmupArgs, ImaginationArgs, SearchArgs, BeliefArgs,
            RunArgs, GameArgs, FirstArgs):
    """All flags of the script; --help tells them in these groups, the last one first."""


GAE_LAMBDA = 0.95  # of the generalised advantage estimate
VALUE_WEIGHT = 0.5  # of the value loss
REWARD_SCALE = 0.2  # rewards are multiplied by this for learning; what is logged is in the units of the game
MAX_GRAD_NORM = 0.5  # gradients of a model longer than this are shortened to it

AT_LEAST_1 = ("total_timesteps", "num_envs", "num_steps", "goal_dim", "hypotheses", "horizon",
              "num_simulations", "num_trees", "warmup_meetings", "hidden_size", "vae_size",
              "moa_minibatches", "num_minibatches", "update_epochs", "meeting_episodes", "meetings")
RANGES = ((1, math.inf, AT_LEAST_1),
          (0, 1, ("gamma",)),
          (1e-6, math.inf, ("prize_floor",)),
          (0, 1e6, ("beta", "imagined_per_real", "learning_rate", "moa_learning_rate", "clip_coef",
                    "ent_coef", "eval_episodes", "eval_policy_episodes")))
OF_TRAINING = ("total_timesteps", "horizon", "selector", "imagined_per_real", "buffer_size",
               "warmup_meetings", "warmup_players", "vae_checkpoint", "world_model_checkpoint",
               "learning_rate", "num_minibatches", "update_epochs", "clip_coef", "ent_coef", "num_envs",
               "num_steps", "moa_samples", "moa_learning_rate", "moa_minibatches", "eval_episodes",
               "eval_policy_episodes", "resume", "save_every")
OF_MEETINGS = ("meeting_episodes", "meetings")


def ignored_flags(args):
    """Which flags mean nothing when: (what was chosen, whether it was, the flags that are then ignored)."""
    unsearched, unimagined = args.search == "none", args.imagined_per_real == 0
    return (
        ("--mode train", args.mode == "train", OF_MEETINGS + ("checkpoint", "keys")),
        ("--mode adapt", args.mode == "adapt", OF_TRAINING + ("keys",)),
        ("--mode watch", args.mode == "watch", ("keys",)),
        (f"--mode {args.mode}", args.mode in ("watch", "play"),
         OF_TRAINING + OF_MEETINGS + ("runs_dir", "run_name")),
        ("--search none", unsearched, ("num_simulations", "num_trees", "beta", "eval_episodes")),
        ("--search none --imagined-per-real 0", unsearched and unimagined,
         ("search_model", "world_model_checkpoint")),
        ("--search-model rules", args.search_model == "rules", ("world_model_checkpoint",)),
        ("--imagined-per-real 0, for all real steps are searched", unimagined and not unsearched,
         ("clip_coef",)),
        ("--goals zero", args.goals == "zero", ("selector", "horizon")),
    )


def check_flags(args):
    """Refuses flags that make no sense, alone or together."""
    check_ranges(args, RANGES)
    refuse_ignored(args, ignored_flags(args))
    asked, hops = f"--players {' '.join(args.players)}", args.players.count("hop")
    if not hops:
        raise Refused(f"{asked}: nobody is a HOP+ player; write hop in at least one seat")
    if len(args.players) < 2:
        raise Refused(f"{asked}: HOP+ models others, so there must be two players or more")
    if args.mode == "adapt" and hops != 1:
        raise Refused(f"{asked}: --mode adapt takes one hop among others, here are {hops}; "
                      "such as --players hop nh nh nh")
    humans = args.players.count("human")
    if args.mode == "play" and humans != 1 and args.players != Args.players:
        raise Refused(f"{asked}: --mode play takes one human, here are {humans}")
    if args.mode != "play" and humans:
        raise Refused(f"{asked}: a human can sit down with --mode play, not with --mode {args.mode}")
    if args.keys and not os.path.isfile(args.keys):
        raise Refused(f"--keys {args.keys}: there is no such file")
    if args.mode != "train" and not args.checkpoint:
        raise Refused(f"--mode {args.mode} needs the run of a trained player: --checkpoint runs/x")
    if args.mode == "train":
        check_search(args)
        if hops < sum(map(is_hop, args.players)):
            raise Refused(f"{asked}: players of another run can sit beside trained ones, in --mode adapt")
    for name in args.warmup_players:
        player_rule(name, "--warmup-players")
    check_sizes(args)
    played = args.num_envs * args.num_steps
    if args.buffer_size < played:
        raise Refused(f"--buffer-size {args.buffer_size} is less than the {played} steps between two updates "
                      f"(--num-envs {args.num_envs} x --num-steps {args.num_steps})")
    learned = played + imagined_games(args, hops) * args.num_steps
    if learned < args.num_minibatches:
        raise Refused(f"--num-minibatches {args.num_minibatches} are more than the {learned} steps that a "
                      f"player learns from in an update (--num-envs {args.num_envs} x --num-steps "
                      f"{args.num_steps}, --imagined-per-real {args.imagined_per_real})")


def check_sizes(args):
    """Refuses what no memory holds."""
    cells, n = args.height * args.width, len(args.players)
    played = args.num_envs * args.num_steps
    check_memory(args, (
        (4 * cells**2, ("height", "width")), (2 * cells * args.num_envs, ("num_envs", "height", "width")),
        (8 * n * played, ("num_envs", "num_steps")), (2 * args.final_time, ("final_time",)),
        (50 * args.imagined_per_real * played / n, ("imagined_per_real", "num_envs", "num_steps")),
        ((cells + n) * args.buffer_size / 4, ("buffer_size", "height", "width")),
        (36 * cells * args.warmup_meetings, ("warmup_meetings", "height", "width")),
        (4 * args.hidden_size * (args.hidden_size + 49 * (n + 2)), ("hidden_size",)),
        (4 * args.vae_size * (49 * (n + 2) + args.goal_dim), ("vae_size", "goal_dim")),
        (4 * n * args.hidden_size * NUM_ACTIONS * args.hypotheses, ("hypotheses", "hidden_size")),
        (2 * cells * args.meetings, ("meetings", "height", "width")),
        (args.num_simulations, ("num_simulations",)), (args.eval_episodes, ("eval_episodes",)),
        (args.eval_policy_episodes, ("eval_policy_episodes",)),
        (args.meetings * args.meeting_episodes, ("meetings", "meeting_episodes")),
    ))


def check_search(args):
    """Refuses flags of the search that do not go together, as given or as taken over from a trained run."""
    if args.num_simulations % args.num_trees:
        raise Refused(f"--num-simulations {args.num_simulations} must be divisible by "
                      f"--num-trees {args.num_trees}")
    if len(set(args.strengths or (1,))) > 1:
        strengths = " ".join(map(str, args.strengths))
        raise Refused(f"--strengths {strengths}: searches and imagined games take all for equally strong")


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
    """All that a run is made of: `saved` is in its checkpoints, so that it goes on as if never stopped."""

    saved = ("networks", "optimizer", "others_optimizer", "generator", "table", "replay", "imagination",
             "returns", "timesteps", "seconds", "warmup_steps", "warmup_seconds", "simulations",
             "imagined_steps", "curve", "fresh")
    own = ("generator", "table", "replay", "imagination", "returns")  # what each process has for itself

    def __init__(self, args, checkpoint=None):
        """Makes the players and warms them up; a run that is resumed has had its warm-up."""
        self.timesteps = self.warmup_steps = 0  # real steps of self-play, and before it
        self.seconds = self.warmup_seconds = 0.0  # from the start of the script
        self.simulations = self.imagined_steps = 0
        self.curve, self.fresh = [], {}  # by update; the last one's scores, on steps not yet learned from
        self.table = Table(args, args.num_envs, Processes.seed(args.seed))
        self.networks, record, self.world = self.table.networks, None, None
        learned = args.search_model == "learned"
        if checkpoint is None:
            last = Processes.size - 1  # of several processes this one learns the world, meanwhile 0 goals
            made = warm_up_world(args) if learned and Processes.rank == last else (None, 0)
            record = record_meetings(args)
            if not Processes.rank:
                warm_up_goals(args, self.table, record)
            self.world, steps = Processes.share(made, last)
            self.networks.load_state_dict(Processes.share(self.networks.state_dict()))
            self.table.meet_anew(1)  # with the prior that the warm-up leaves
            self.warmup_steps += record["over"].numel() + steps
        elif learned:
            weights = checkpoint["world_model"]
            self.world = make_world_model(weights, f"--resume {args.resume}", args.device)
        if self.world:
            self.table.model = WorldTables(self.world, args.height, args.width, len(args.players))
        self.replay = Replay(args, self.table, record)
        self.imagination = Imagination(args, self.table, self.replay) if args.imagined_per_real else None
        adam = lambda part, rate: torch.optim.Adam(part.parameters(), lr=rate, eps=1e-5, fused=True)
        self.optimizer = adam(self.networks.policy, args.learning_rate)
        self.others_optimizer = adam(self.networks.others, args.moa_learning_rate)
        self.generator = seeded(Processes.seed(args.seed), "learning", args.device)
        self.returns = Returns(args.num_envs, len(args.players), args.device)
        names = self.table.names
        self.networks.policy.owners = [names[seat] for seat in self.table.hop_seats]
        self.networks.others.owners = [f"{names[reader]} for {names[other]}" for reader, other in
                                       zip(self.table.readers.tolist(), self.table.pairs.tolist())]
        if checkpoint is not None:
            restore(self, checkpoint["run"], args)

    @property
    def true_steps(self):
        """All true-game steps from which something was learned."""
        return self.warmup_steps + self.timesteps

    def players(self, args):
        """What is needed to play, and no more."""
        networks = {"policy": self.networks.policy.state_dict(), "others": self.networks.others.state_dict()}
        players = {"config": dataclasses.asdict(args), "networks": networks}
        return players | ({"world_model": self.world.state_dict()} if self.world else {})

    def save(self, args, folder):
        state = self.state_dict()
        others = Processes.gather({name: state[name] for name in self.own})
        save_checkpoint(folder, self.players(args), "players.pt")
        save_checkpoint(folder, {**self.players(args), "run": state, "others": others})


def main(args):
    args = resolve_flags(args)
    check_flags(args)
    prepare_torch(args)
    return {"train": train, "adapt": adapt, "watch": watch, "play": watch}[args.mode](args)


def train(args):
    checkpoint = load_run(args)
    if args.resume is None:
        run_folder(args)  # whatever is wrong with its name shows now
    run = Run(args, checkpoint)
    if run.timesteps >= args.total_timesteps and os.path.isfile(f"{args.resume}/results.json"):
        print(f"{args.resume} had finished: nothing was changed")
        return 0
    folder = open_run(args)
    log = Log(args, folder, run)
    if checkpoint is None:
        run.save(args, folder)  # so that nobody needs to warm up again
    try:
        stopped = play_and_learn(args, folder, run, log)
    except NotFinite as failure:
        save_checkpoint(folder, {**run.players(args), "run": run.state_dict()}, "not-finite.pt")
        raise Failed(f"{failure}, after {run.timesteps} steps; the state is kept in {folder}/not-finite.pt, "
                     "and the last good checkpoint stays") from failure
    log.bar.close()
    if stopped:
        print(f'stopped at {run.timesteps} steps; go on with: python {SCRIPT} --resume "{folder}"')
    elif not Processes.rank:
        report(args, folder, run, log)
    log.writer.close()
    return 128 + stopped if stopped else 0


def play_and_learn(args, folder, run, log):
    """Plays, imagines and learns in turns. -> 0 at the end, or the signal that stopped the run before"""
    saved, stopped = time.perf_counter(), 0
    with Interrupt() as interrupt:
        while run.timesteps < args.total_timesteps and not stopped:
            left = 1 - run.timesteps / args.total_timesteps  # the share of the run that is still to come
            run.optimizer.param_groups[0]["lr"] = args.learning_rate * left
            run.others_optimizer.param_groups[0]["lr"] = args.moa_learning_rate * left**0.25

            run.table.meet_anew(1 / MEETING)
            real = play_steps(run.table, run.returns, args.num_steps, args.search)
            run.timesteps += args.num_steps * args.num_envs * Processes.size
            run.returns.take()
            run.returns.show(log.bar)
            log.bar.refresh()  # the first return is told as soon as it is known
            log.clock("real_games")
            run.replay.add(real)
            figures, *_ = score_models(run.table, real)
            log.clock("scores")
            dream = run.imagination.play(args.num_steps) if run.imagination else None
            steps = real["policy"]
            if dream:  # real and imagined games side by side
                steps = {key: torch.cat([part, dream[key]], 2) for key, part in steps.items()}
            log.clock("imagination")
            figures |= learn_others(args, run.networks.others, run.replay, run.others_optimizer,
                                    run.generator)
            log.clock("others")
            figures |= learn_policy(args, run.networks.policy, steps, run.optimizer, args.ent_coef * left,
                                    run.generator)
            log.clock("policy")

            log.update(real, dream, figures)
            stopped, due = Processes.most(interrupt.wanted, time.perf_counter() - saved > args.save_every)
            if run.timesteps >= args.total_timesteps or stopped or due:
                if not Processes.rank:
                    log.picture()  # before the checkpoint: a run that goes on from there draws it no more
                log.writer.flush()
                run.save(args, folder)
                saved = time.perf_counter()
    return stopped


PLOTS = ("charts/episodic_return", "losses/.*explained_variance", "losses/.*value_loss", "losses/.*entropy",
         "moa/top1", "moa/top3", "moa/cross_entropy", "moa/.*loss", "mcts/(gain|changed)", "time/.*")


class Log:
    """What a run shows while it learns: the moving line, TensorBoard, pictures, the curve for the results."""

    def __init__(self, args, folder, run):
        self.args, self.folder, self.run = args, folder, run
        self.writer = open_writer(folder, args, run.timesteps)
        add_plots(self.writer, PLOTS)
        self.bar = tqdm(total=args.total_timesteps, initial=run.timesteps, unit=" steps", unit_scale=True,
                        dynamic_ncols=True, mininterval=0.5, desc="training")
        self.seconds_before = run.seconds
        self.begun, self.begun_at = time.perf_counter(), run.timesteps
        self.ticked = self.begun
        self.spent = {}
        run.warmup_seconds = run.warmup_seconds or self.begun - START

    def clock(self, part):
        """Notes the time since the last call as spent on a part of the update."""
        now = time.perf_counter()
        self.spent[part], self.ticked = now - self.ticked, now
        self.run.seconds = self.seconds_before + now - START

    def add(self, tag, value):
        self.writer.add_scalar(tag, value, self.run.timesteps)

    def update(self, real, dream, figures):
        """Takes in an update. Figures [L] are shown as their mean, those of moa/ [P] by kind of co-player."""
        args, run, table, last = self.args, self.run, self.run.table, self.run.returns.last
        mean = last[:, table.hop_seats].mean().item() if len(last) == 500 else None
        run.curve.append({"timesteps": run.timesteps, "seconds": round(run.seconds, 2),
                          "true_steps": run.true_steps, "return": mean})
        run.fresh = {tag: value.nanmean().item() for tag, value in figures.items()
                     if tag.endswith(("explained_variance", "belief_accuracy"))}
        if len(last):
            for name, value in zip(table.names, last.mean(0).tolist()):
                self.add(f"charts/episodic_return/{name}", value)
        for tag, value in figures.items():
            if tag.startswith("moa/"):
                for kind, pairs in table.pairs_by_kind().items():
                    self.add(f"{tag}/{kind.replace(os.sep, '-').replace('/', '-')}", value[pairs].nanmean())
            else:
                self.add(tag, value.nanmean())
        if dream is not None:
            run.imagined_steps += dream["actions"].numel() * Processes.size
        if "search" in real:
            for key, value in real["search"].items():
                self.add(f"mcts/{key}", value)
            decisions, = Processes.mean(real["decisions"])
            simulations = round(decisions.item() * Processes.size) * args.num_simulations
            run.simulations += simulations
            self.add("mcts/simulations_per_second", simulations / self.spent["real_games"])
        for part, spent in self.spent.items():
            self.add(f"time/{part}", spent)
        self.spent.clear()  # pictures are not drawn in each update
        for tag, spent in Processes.times().items():
            self.add(tag, spent)
        self.add("charts/SPS", (run.timesteps - self.begun_at) / (time.perf_counter() - self.begun))
        self.bar.update(run.timesteps - self.bar.n)
        self.clock("logging")

    def picture(self):
        steps = self.run.timesteps
        path = os.path.join(self.folder, "pictures", f"episode_{steps}.gif")
        frames = record_game(self.args, self.run.table, self.args.seed + steps)
        add_gif(self.writer, "a_game", frames, steps, path)
        self.clock("picture")


def report(args, folder, run, log):
    """Evaluates the trained players, prints the tables and writes results.json."""
    print("measuring what was learned ...")
    table, measured = run.table, 0  # measured: true-game steps from which nothing was learned
    speed = run.timesteps / max(run.seconds - run.warmup_seconds, 1e-3)
    results = {"timesteps": run.timesteps, "true_steps": run.true_steps, "warmup_steps": run.warmup_steps,
               "seconds": round(run.seconds, 2), "warmup_seconds": round(run.warmup_seconds, 2),
               "sps": round(speed), "fresh": run.fresh, "evaluation": {},
               "simulations": run.simulations, "imagined_steps": run.imagined_steps, "curve": run.curve}
    rows = [["evaluation", *table.names, "HOP+ mean", "episodes", "equals earn equally?"]]
    for mode, told, episodes, search in (("searched", "with search", args.eval_episodes, args.search),
                                         ("policy", "policy alone", args.eval_policy_episodes, "none")):
        if episodes and (mode == "policy" or search != "none"):
            played, steps = evaluate(args, table, episodes, search, args.seed + 1_000_000)
            measured += steps
            summary = results["evaluation"][mode] = summarise(played.cpu(), table.hop_seats, args.players)
            means = (f"{summary[name]:.3f} ± {summary['ci95'][name]:.3f}" for name in table.names + ["mean"])
            rows.append([told, *means, summary["episodes"], equality(summary)])
            log.add(f"a_result/{mode}", summary["mean"])
    if len(rows) > 1:
        print_table(f"mean return per episode ({' '.join(args.players)}, {board_name(args)})", rows)
    results |= tell_curve(run.curve, args.total_timesteps)
    results["moa"], results["moa_by_pair"], steps = report_models(args, table)
    drawn = os.path.join(folder, "pictures", "models_of_others.png")
    add_image(log.writer, "models_of_others", draw_models(results["moa"]).savefig, run.timesteps, drawn)
    measured += steps
    if args.search_model == "learned":
        results["world_model"], steps = score_world(args, table.model)
        measured += steps
        for what, share in results["world_model"].items():
            log.add(f"world_model/exact_{what}", share)
        print("\nworld model, on fresh mixed games: " + ", ".join(
            f"{share:.3%} of {what} exact" for what, share in results["world_model"].items()))
    results["evaluation_steps"] = measured
    add_hparams(log.writer, args)
    log.writer.flush()
    save_json(os.path.join(folder, "results.json"), results)
    last = os.path.join(folder, "pictures", f"episode_{run.timesteps}.gif")
    print(f"\n{run.true_steps} true steps ({run.warmup_steps} of them to warm up; {run.imagined_steps} "
          f"imagined, {run.simulations} simulations) in {run.seconds:.0f} s, of which "
          f"{run.warmup_seconds:.0f} s to warm up; {measured} more steps only to measure. Everything is "
          f"in {folder}, the last episode in {last}")
    print(f"What they predict of one another, as a picture: {drawn}")
    strangers = ("hop", *["nh"] * (len(args.players) - 1))
    print_next(args, look_into_their_heads=command(mode="watch", checkpoint=folder),
               take_a_seat_yourself=command(mode="play", checkpoint=folder),
               meet_hare_hunters=command(mode="adapt", checkpoint=folder, players=strangers))


def tell_curve(curve, total_timesteps):
    """Prints when the mean return first reached some values, and how far it fell. -> for results.json"""
    known = [point for point in curve if point["return"] is not None]
    reached, rows, best, fall = {}, [["return", "after", ""]], 0.0, 0.0
    for value in (2.5, 2.7, 2.8, 2.85):
        at = next((point for point in known if point["return"] >= value), None)
        rows.append([value, f"{at['seconds']:.1f} s", f"{at['true_steps']} true steps"] if at else
                    [value, "not reached" if known else "fewer than 500 episodes", ""])
        reached[f"{value:g}"] = at and {key: at[key] for key in ("seconds", "true_steps")}
    for point in known:
        best = max(best, point["return"])
        if point["timesteps"] > 0.75 * total_timesteps and best > 0:
            fall = max(fall, 1 - point["return"] / best)
    print_table("mean return of the last 500 episodes first reached", rows)
    print(f"largest fall of that mean in the run's last quarter: {fall:.1%}")
    return {"thresholds": reached, "largest_fall_in_last_quarter": fall}


# ===================================================================================== warm-up

WARMUP_EPOCHS = 3  # times that goals and models of others learn from the meetings
WARMUP_RATE = 8e-3  # step size of Adam at the start of the warm-up
INFERENCE_WEIGHT = 0.05  # of the inference's distance to the goal in hindsight, beside the predicted actions
HINDSIGHT = 0.25  # share of the steps whose action is to be told from the goal in hindsight, not the belief
PRIOR_WEIGHT = 1e-3  # of the goal prior's distance to the standard normal, in the warm-up


@torch.no_grad()
def record_meetings(args):
    """Plays meetings of the --warmup-players, the data of the warm-up. -> dict of [.., T, B]

    The same players meet for the whole record, two episodes or more. In half of the meetings all are of one
    kind, in the others each is drawn for itself.
    """
    device, game = args.device, make_game(args, args.warmup_meetings, args.seed + 7)
    generator = seeded(args.seed, "meetings", device)
    rules = torch.tensor([player_rule(name) for name in args.warmup_players], device=device)
    kind = torch.randint(len(rules), (game.num_envs, game.num_players), generator=generator, device=device)
    alike = torch.arange(game.num_envs, device=device)[:, None] % 2 == 0
    rule = rules[torch.where(alike, kind[:, :1], kind)].float()
    steps = []
    for _ in range(2 * max(args.final_time, 36)):
        state = game.state()
        out = game.advance(sample_actions(rule_probabilities(game, rule), generator))
        steps.append({**state, "actions": out["action"].T, "present": out["present"].T, "over": out["over"],
                      "ends": out["ended"].T})
        game.reset(out["over"])
    return {key: torch.stack([step[key] for step in steps], -2) for key in steps[0]}


def warm_up_goals(args, table, record):
    """Leaves a goal prior and one model of others, learned or loaded: both stay as they are from then on, and
    each player's own models begin as copies of the latter."""
    prior, known, others = table.networks.prior, table.networks.known, table.networks.others
    if args.vae_checkpoint:
        load_goals(args.vae_checkpoint, f"--vae-checkpoint {args.vae_checkpoint}", args, prior, known)
    else:
        learn_goals(args, prior, known, record)
    own = others.state_dict()
    others.load_state_dict({name: value.expand_as(own[name]) for name, value in known.state_dict().items()})


def learn_goals(args, prior, known, record):
    """Trains the goal prior and one model of others on the record, eight players' meetings at a time."""
    parameters = [*prior.parameters(), *known.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=WARMUP_RATE, eps=1e-5, fused=True)
    generator = seeded(args.seed, "warm-up", args.device)
    # a player is a row of its own here: [1, T, B * N, ..]
    row = lambda part: part.movedim(0, 2).flatten(1, 2)[None]
    x, seen = row(look_back(known.views, record)), row(record["present"])
    action = row(record["actions"]).long()
    goal_step = row(last_steps(record["ends"], args.horizon))
    pieces = [piece for _ in range(WARMUP_EPOCHS) for piece in
              torch.randperm(x.shape[2], generator=generator, device=x.device).split(8)]
    for done, piece in enumerate(tqdm(pieces, desc="warming up: goals", leave=False, dynamic_ncols=True)):
        optimizer.param_groups[0]["lr"] = WARMUP_RATE * (1 - done / len(pieces))
        lesson = {"x": x[:, :, piece], "action": action[:, :, piece], "seen": seen[:, :, piece],
                  "weight": seen[:, :, piece], "memory": known.start(len(piece))}
        mean, logvar = prior(lesson["x"].flatten(1, 2))
        distance = gaussian_kl(mean, logvar, torch.zeros_like(mean), torch.zeros_like(mean))
        lesson |= pick_goals(mean, logvar, goal_step[:, :, piece])
        weight = lesson["weight"].flatten(1)
        loss = others_loss(known, lesson, generator)["loss"] + PRIOR_WEIGHT * (distance * weight).sum(-1)
        optimizer.zero_grad()
        (loss.sum() / weight.sum()).backward()
        clip_gradients(prior, MAX_GRAD_NORM)
        clip_gradients(known, MAX_GRAD_NORM)
        optimizer.step()


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


WORLD_STEPS, WORLD_UPDATES = 6_000, 500  # true-game steps, and steps of Adam, that teach the world model
WORLD_RATE = 1e-2  # step size of Adam at the start
WORLD_SHRINK = 0.06  # pull on the first weights towards 0, as a share of it


def warm_up_world(args):
    """Learns the world model of this board from mixed games. -> WorldModel, true-game steps played for it"""
    if args.world_model_checkpoint:
        asked = f"--world-model-checkpoint {args.world_model_checkpoint}"
        model, trained = load_world_model(args.world_model_checkpoint, asked, args.device)
        for name in ("stag_reward", "hare_reward", "stag_hunters", "time_reward", "prosocial"):
            if not trained["config"].get("data") and trained["config"][name] != getattr(args, name):
                raise Refused(f"{flag(name)} {getattr(args, name)} does not fit {asked}, which has "
                              f"{trained['config'][name]}")
        return model, 0
    rows = collect(board_of(args), WORLD_STEPS, args.seed, args.device, gathered=0.8)
    torch.manual_seed(args.seed)
    model = WorldModel(args.hidden_size, common_rewards(rows["reward"]), others_pay(rows)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    generator = seeded(args.seed, "world model", args.device)
    for number in tqdm(range(WORLD_UPDATES), desc="warming up: world model", leave=False, dynamic_ncols=True):
        rate = WORLD_RATE * 0.5 * (1 + math.cos(math.pi * number / WORLD_UPDATES))
        optimizer.param_groups[0]["lr"] = rate
        which = torch.randint(WORLD_STEPS, (1024,), generator=generator, device=args.device)
        terms = model.loss(pick(rows, which))
        optimizer.zero_grad()
        loss = sum(term.sum() for term in terms.values())
        check_finite(loss, "the loss of the world model")
        loss.backward()
        optimizer.step()
        model.shrink(WORLD_SHRINK * rate)
    return model, WORLD_STEPS


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


def others_pay(rows):
    """Whether what a player gets depends on more than its token: then those on other cells pay, too."""
    egos = len(rows["reward"])
    present = (rows["cell"] < len(rows["board"]) - 1)[:egos]
    token, reward = tokens(rows["cell"], rows["board"], rows["actions"])[:egos], rows["reward"][present]
    kinds, which = token[present].unique(return_inverse=True)
    low, high = (torch.zeros(len(kinds)).to(reward).scatter_reduce(0, which, reward, how, include_self=False)
                 for how in ("amin", "amax"))
    return bool((high - low).max() > 1e-3)


def common_rewards(reward, most=256):
    """The rewards that occur most often, to the fourth digit, and 0: a list of numbers."""
    values, counts = reward.double().mul(1e4).round().unique(return_counts=True)
    values = values[counts.argsort(descending=True, stable=True)[:most]] / 1e4
    return sorted({0.0, *values.tolist()} | ({1.0} if len(values) < 2 else set()))


# ======================================================================================== play


MEETING = 10  # episodes that an imagined meeting lasts on average, and updates that a real one does


class Table(Saved):
    """Games played side by side, who sits where, and what each HOP+ player remembers of each other player.

    The memory [P, B, 2 H] holds how likely each of the inference's hypotheses, a way to play and a hand, is
    for a player, and for all at the table together (`CompanyModel`), by all that was seen, slowly forgetting;
    it goes on from episode to episode. A belief is read from it and from the present view: mean and
    log-variance of that player's goal. A player that has left sees nothing until the next episode, and of a
    player that has left nothing is seen.
    """

    saved = ("game", "lineup", "memory", "generator")

    def __init__(self, args, num_envs, seed, networks=None, model=None, episodes=1):
        n, device = len(args.players), args.device
        self.args, self.names = args, [f"player_{seat + 1}" for seat in range(n)]
        self.hop_seats = [seat for seat, name in enumerate(args.players) if is_hop(name)]
        self.trained_seats = [seat for seat, name in enumerate(args.players) if ".pt:" in name]
        self.game = make_game(args, num_envs, seed)
        names = [None if is_hop(name) or ".pt:" in name or name == "human" else name for name in args.players]
        self.lineup = Lineup(names, self.game, seed, episodes, episodes)
        self.known = self.lineup.known.clone()  # [N] whose chances are known: all but those from files
        self.known[self.hop_seats + self.trained_seats] = True
        self.views = Views(args.height, args.width, n, args.final_time, device)
        self.seats = torch.tensor(self.hop_seats, device=device)  # [L]
        self.order = (self.seats[:, None] + torch.arange(n, device=device)) % n  # [L, N], oneself first
        self.readers = self.for_pairs(self.seats)  # [P] the seat that models
        self.pairs = self.order[:, 1:].flatten()  # [P] the seat that is modelled
        self.networks = networks or Networks(args, self.views, len(self.hop_seats)).to(device)
        self.model = model or Rules(make_game(args, 1, 0))
        if self.trained_seats:
            names = [args.players[seat] for seat in self.trained_seats]
            self.trained = load_policies(names, self.views).to(device)
        self.generator = seeded(seed, "table", device)
        self.memory = self.networks.others.start(num_envs).detach()

    def for_pairs(self, part):
        """What each HOP+ player has, once for each player that it models: [L, ...] -> [P, ...]."""
        return part.repeat_interleave(len(self.names) - 1, 0)

    @torch.no_grad()
    def look(self):
        """What the HOP+ players make of what they see now: all views x [N, B, K], and what Networks give."""
        x = self.views.look(self.game.state())
        return {"x": x, **self.networks(x[self.seats], x[self.pairs], self.memory)}

    @torch.no_grad()
    def act(self, search):
        """One joint move of all players: what `look` gives, and what is listed at the end."""
        seen = self.look()
        improved, found = self.plan(seen, search) if search != "none" else (seen["policy"], None)
        action = sample_actions(improved.exp(), self.generator)
        actions = self.lineup.act(self.game)
        true_probs = self.lineup.probabilities(self.game).transpose(0, 1).clone()
        if self.trained_seats:
            log_probs, _ = self.trained(seen["x"][self.trained_seats])
            true_probs[self.trained_seats] = log_probs.exp()
            actions[:, self.trained_seats] = sample_actions(log_probs.exp(), self.generator).T
        true_probs[self.seats], actions[:, self.seats] = improved.exp(), action.T
        return {**seen, "actions": actions,  # [B, N]
                "true_probs": true_probs,  # [N, B, 7], true of those that are `known`
                "improved": improved, "search": found}  # [L, B, 7]; what the search found, if there was one

    def pairs_by_kind(self):
        """The numbers of the pairs [P] by what --players calls the one that is modelled."""
        kinds = [self.args.players[seat] for seat in self.pairs.tolist()]
        return {kind: [pair for pair, other in enumerate(kinds) if other == kind] for kind in kinds}

    def plan(self, seen, search_mode):
        """Searches the positions of those that are there. -> log of the improved policies, what was found"""
        args, trees, depth_limit = self.args, self.args.num_trees, 1 if search_mode == "one-step" else 64
        present = (self.game.cell < self.game.cells)[self.seats]  # [L, B]
        most = max(int(present.sum(1).max()), 1)
        # for each player the games where it is there, filled up with others: [L, M]
        games = (~present).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
        spread = games.repeat_interleave(trees, 1)  # [L, M * trees]
        belief = (take(seen[key], self.for_pairs(spread)) for key in ("mean", "logvar"))  # [P, M * trees, G]
        goals = draw_goals(*belief, self.generator)
        searcher = Searcher(self.networks, self.views, take(seen["told"], spread), goals)
        state = ego_first(self.game.state(), self.order, spread)
        visits, totals, depth = search(self.model, searcher, state, args.num_simulations // trees, args,
                                       self.generator, depth_limit)
        visits, totals = (part.unflatten(0, (*games.shape, trees)).sum(2) for part in (visits, totals))

        policy, value = seen["policy"], take(seen["value"][..., None], games)
        before, q = take(policy, games), totals / visits.clamp(min=1)
        better, completed = improved_policy(before, q, visits, value, sharpness(args, value))
        there, nothing = present.gather(1, games), torch.zeros_like(policy)
        put = lambda whole, part: whole.scatter(1, games[..., None].expand_as(part), part)
        return put(policy, torch.where(there[..., None], better, before)), {
            "gain": ((better.exp() - before.exp()) * completed).sum(-1)[there].mean() / REWARD_SCALE,
            "changed": (better.argmax(-1) != before.argmax(-1))[there].float().mean(),
            "depth": depth.mean(), "decisions": there.sum(),
            "q": put(nothing, completed / REWARD_SCALE), "visits": put(nothing, visits)}

    def meet_anew(self, share):
        """Lets some of the games go on as if their players had never met."""
        number = torch.rand(self.game.num_envs, generator=self.generator, device=self.memory.device)
        nobody = self.networks.others.start(self.game.num_envs).detach()
        self.memory = torch.where((number < share)[:, None], nobody, self.memory)

    @torch.no_grad()
    def play(self, seen, restart=True):
        """Plays the joint move of `act`; begins new episodes where one is over, unless told not to.

        -> what `advance` returns, of players [N, B], of games [B]; and seen [P, B], who saw whom
        """
        out = self.game.advance(seen["actions"])
        out = {key: part.T if part.dim() == 2 else part for key, part in out.items()}
        out["seen"] = out["present"][self.readers] & out["present"][self.pairs]
        action = out["action"][self.pairs].long()
        self.memory = self.networks.others.remember(self.memory, seen["table"], action, out["seen"])
        if restart:
            self.game.reset(out["over"])
            self.lineup.reset(out["over"])
        return out


def is_hop(name):
    """Whether a HOP+ player sits there: hop, or runs/y:player_2, which another run has trained."""
    run, trained, _ = name.rpartition(":")
    return name == "hop" or bool(trained) and os.path.isfile(os.path.join(run, "players.pt"))


def board_of(args):
    """The flags of the game, as BatchedStagHunt takes them."""
    board = {field.name: getattr(args, field.name) for field in dataclasses.fields(GameArgs)}
    return board | {"num_players": len(args.players)}


def make_game(args, num_envs, seed):
    return BatchedStagHunt(num_envs, device=args.device, seed=seed, **board_of(args))


def draw_goals(mean, logvar, generator):
    """Goals drawn from beliefs."""
    return mean + (0.5 * logvar).exp() * torch.randn(mean.shape, generator=generator, device=mean.device)


def take(part, index):
    """Rows of each list by their numbers: part [L, M, D], index [L, K] -> [L, K, D]."""
    return part.gather(1, index[..., None].expand(-1, -1, part.shape[-1]))


def play_steps(table, returns, num_steps, search):
    """Plays num_steps real steps. -> dict of [.., T, B] for the replay, [T, .., B] for policy and scores"""
    steps = []
    for _ in range(num_steps):
        before = {**table.game.state(), "memory": table.memory}
        seen = table.act(search)
        out = table.play(seen)
        returns.add(out["reward"].T, out["over"])
        steps.append({**before, **seen, **out})
    stack = lambda key, dim=0: torch.stack([step[key] for step in steps], dim)
    real = {key: stack(key, -2) for key in STATE + ("over", "ended", "present", "seen", "left")}
    real |= {key: stack(key) for key in ("x", "true_probs", "mean", "logvar", "reward")}
    real |= {"actions": stack("action", -2), "memory": steps[0]["memory"]}
    own = {key: stack(key)[:, table.seats] for key in ("x", "ended", "present")}
    played = torch.stack([step["actions"].T[table.seats] for step in steps])  # [T, L, B]
    last = table.look()["value"][None]  # the value of what comes next
    real["policy"] = {**own, "told": stack("told"), "actions": played, "target": stack("improved").exp(),
                      "logprobs": stack("policy").gather(-1, played[..., None]).squeeze(-1),
                      "values": torch.cat([stack("value"), last]),
                      "rewards": stack("reward")[:, table.seats] * REWARD_SCALE,
                      "searched": torch.full_like(own["ended"], search != "none")}
    if search != "none":
        found = [step["search"] for step in steps]
        real["search"] = {key: torch.stack([each[key] for each in found]).nanmean()
                          for key in ("gain", "changed", "depth")}
        real["decisions"] = sum(each["decisions"] for each in found)
    return real


# ====================================================================================== search


class Searcher:
    """What a search asks of the networks, for L players and M states each: [L * M] in a row.

    Goals stay the same in a search: the policy is told of the others [L, M, (N-1) * (G+3)] as in a real
    game, and each model of others goes by one draw of a goal [P, M, G]. So what they add to the first layers'
    outputs is computed once, and so are the tables of these layers.
    """

    def __init__(self, networks, views, told, goals):
        self.policy, self.others, self.views = networks.policy, networks.others, views
        self.length, self.many = told.shape[:2]
        first = self.policy.view, self.others.view
        self.table = torch.cat([views.tabulate(layer.weight) for layer in first])  # [L + P, fact, hidden]
        self.added = torch.cat([first[0].bias + told @ self.policy.goals,
                                first[1].bias + goals @ self.others.goal])  # [L + P, M, hidden]

    def think(self, state):
        """-> own log-probabilities [L * M, 7], value [L * M], the others' probabilities [L * M, N-1, 7]"""
        length = self.length
        x = self.views.look(state).unflatten(1, (length, self.many))  # [N, L, M, K]
        x = torch.cat([x[0], x[1:].transpose(0, 1).flatten(0, 1)])  # [L + P, M, K]
        first, mask = sum_rows(x, self.table) + self.added, self.views.mask(x)
        log_probs, value = self.policy.decide(first[:length], mask[:length])
        others = self.others.act(first[length:], mask[length:]).exp()
        others = others.unflatten(0, (length, -1)).transpose(1, 2)  # [L, M, N-1, 7]
        return log_probs.flatten(0, 1), value.flatten(), others.flatten(0, 1)


def improved_policy(log_probs, q, visits, value, sharp):
    """softmax(log-policy + sharp * Q), where an action never tried counts with the value of what was tried.

    log_probs, q, visits [.., 7]; value, sharp [.., 1] -> log of the improved policy, the completed Q [.., 7].
    Both are those of Gumbel MuZero (Danihelka et al. 2022, eq. 10-11, app. D).
    """
    policy, tried = log_probs.exp(), (visits > 0).float()
    total, chance = visits.sum(-1, keepdim=True), (policy * tried).sum(-1, keepdim=True)
    weighted = (policy * q * tried).sum(-1, keepdim=True) / chance.clamp(min=1e-9)
    mixed = torch.where(total > 0, (value + total * weighted) / (1 + total), value)
    completed = torch.where(visits > 0, q, mixed)
    return (log_probs + sharp * completed).log_softmax(-1), completed


def sharpness(args, value):
    """beta for scaled rewards in positions of some value, divided by what is expected there: so a small prize
    is sought as keenly in a poor game as a large one in a rich game."""
    if math.isinf(args.prize_floor):
        return torch.full_like(value, args.beta / REWARD_SCALE)
    return args.beta / (value.abs() + args.prize_floor * REWARD_SCALE)


class Tree:
    """Q trees side by side. Simulation k makes node k of each, so node k of tree t stands in row k * Q + t.

        state           what the model moves, each [.., row]
        prior           own log-probabilities [row, 7]
        others          the others' probabilities, summed up for drawing [row, N-1, 7]
        value           of the node [row], 0 where it is over
        reward, over    of the step to the node: what it pays, whether the player's game ended with it [row]
        visits, totals  of each own action [row, 7]
        parent, key     the row that a node comes from, and by which joint move [node, Q]: a child is found by
                        comparing
    """

    def __init__(self, root, simulations, num_others):
        device, self.trees = root["clock"].device, len(root["clock"])
        rows = (simulations + 1) * self.trees
        zeros = lambda *shape: torch.zeros(rows, *shape, device=device)
        self.state = {name: part.new_empty(*part.shape[:-1], rows) for name, part in root.items()}
        self.prior, self.others = zeros(NUM_ACTIONS), zeros(num_others, NUM_ACTIONS)
        self.value, self.reward, self.over = zeros(), zeros(), zeros().bool()
        self.visits, self.totals = zeros(NUM_ACTIONS), zeros(NUM_ACTIONS)
        self.parent = torch.full((simulations + 1, self.trees), -1, device=device)
        self.key = self.parent.clone()
        self.power = NUM_ACTIONS ** torch.arange(num_others + 1, device=device)  # a joint move as one number

    def put(self, node, state, thought):
        """Writes a node of each tree: its state, and what the networks think of it. -> its rows"""
        rows = slice(node * self.trees, (node + 1) * self.trees)
        for name, part in state.items():
            self.state[name][..., rows] = part
        self.prior[rows], self.value[rows], others = thought
        self.others[rows] = others.cumsum(-1)
        return rows


@torch.no_grad()
def search(model, searcher, state, simulations, args, generator, max_depth=64):
    """Monte-Carlo tree search in Q trees at once, from Q states.

    Own actions follow the improved policy (Danihelka et al. 2022, eq. 14). The others' moves are drawn anew
    at each visit, so that an own action leads to several outcomes, one for each joint move met.
    -> visits [Q, 7], sums of returns [Q, 7] (scaled rewards), mean depth [Q]
    """
    thought = searcher.think(state)
    tree = Tree(state, simulations, thought[2].shape[1])
    tree.put(0, state, thought)
    sharp = sharpness(args, tree.value[:tree.trees, None])
    depth = torch.zeros(tree.trees, device=state["clock"].device)
    for node in range(1, simulations + 1):
        path, row, moves = descend(tree, node, sharp, max_depth, generator)
        expand(tree, node, row, moves, model, searcher)
        backup(tree, node, path, args.gamma)
        depth += sum(going for _, _, going in path)
    return tree.visits[:tree.trees], tree.totals[:tree.trees], depth / simulations


def choose(prior, q, visits, value, sharp):
    """The action tried next in positions of a tree [Q]: the one whose visits lack most of what the improved
    policy would give it. prior (log-policy, below -1e7 where illegal), q, visits [Q, 7]; value, sharp [Q, 1]
    (q and value are scaled rewards, sharp * q is in units of the log-policy)"""
    improved, _ = improved_policy(prior, q, visits, value, sharp)
    lacking = improved.exp() - visits / (1 + visits.sum(-1, keepdim=True))
    return lacking.masked_fill(prior < -1e7, -torch.inf).argmax(-1)  # legal ones only


def descend(tree, node, sharp, max_depth, generator):
    """Walks down each tree, until a joint move leads to no node yet, or to one that is over.

    -> path: for each level the rows [Q], own actions [Q] and which trees came so far [Q]; the row of the last
    node of each path [Q]; the joint move from there [Q, N], one's own first
    """
    device, path = sharp.device, []
    row = root = torch.arange(tree.trees, device=device)
    last_row, last_moves = row, torch.zeros(tree.trees, len(tree.power), dtype=torch.int64, device=device)
    going = torch.ones(tree.trees, dtype=torch.bool, device=device)
    for _ in range(min(node, max_depth)):
        visits, totals, prior, value, others = (part.index_select(0, row) for part in (
            tree.visits, tree.totals, tree.prior, tree.value, tree.others))
        action = choose(prior, totals / visits.clamp(min=1), visits, value[:, None], sharp)
        number = torch.rand(*others.shape[:2], 1, generator=generator, device=device) * (1 - 1e-6)
        moves = torch.cat([action[:, None], (others <= number * others[..., -1:]).sum(-1)], 1)  # [Q, N]
        path.append((row, action, going))
        last_row = torch.where(going, row, last_row)
        last_moves = torch.where(going[:, None], moves, last_moves)
        key = (moves * tree.power).sum(1)
        child = (tree.parent[:node] == row) & (tree.key[:node] == key) & going  # [node, Q]
        number = child.to(torch.uint8).argmax(0)
        next_row = number * tree.trees + root
        going = (number > 0) & ~tree.over[next_row]
        row = torch.where(going, next_row, row)
        if not going.any():
            break
    return path, last_row, last_moves


def expand(tree, node, row, moves, model, searcher):
    """Plays the joint moves [Q, N] from the nodes in rows [Q]; where they lead is the next node of each tree.

    Where a path ended at a node that is over, that node is made once more; only the first one is ever found.
    """
    before = {name: part.index_select(-1, row) for name, part in tree.state.items()}
    after, reward, over = model.step(before, moves.T)
    rows = tree.put(node, after, searcher.think(after))
    tree.value[rows] *= ~over
    tree.reward[rows], tree.over[rows] = reward * REWARD_SCALE, over
    tree.parent[node], tree.key[node] = row, (moves * tree.power).sum(1)


def backup(tree, node, path, gamma):
    """Adds the new node's value, discounted, and the rewards on the way to the actions that led to it."""
    reached = torch.arange(node * tree.trees, (node + 1) * tree.trees, device=tree.value.device)
    value = tree.value[reached]
    for row, action, going in reversed(path):  # where a path had ended higher up, this step was not taken
        value = torch.where(going, tree.reward[reached] + gamma * value, value)
        edge = row * NUM_ACTIONS + action
        tree.visits.view(-1).index_add_(0, edge, going.float())
        tree.totals.view(-1).index_add_(0, edge, value * going)
        reached = torch.where(going, row, reached)


def ego_first(state, order, games=None):
    """A state as each of L players sees it, itself first, one after the other: [.., L * M].

    order [L, N] are the seats in each one's order, games [L, M] those that each one sees (by default all).
    """
    if games is None:
        games = torch.arange(len(state["clock"]), device=order.device).expand(len(order), -1)
    turned = lambda part: part[order[:, :, None], games[:, None]].transpose(0, 1).flatten(1)
    return {name: turned(state[name]) if name in ("cell", "previous") else state[name][..., games.flatten()]
            for name in STATE}


# ================================================================================= imagination


def imagined_games(args, hops):
    """How many games each of the HOP+ players imagines side by side."""
    return math.ceil(args.imagined_per_real * args.num_envs / hops)


class Imagination(Saved):
    """Games that go on in the players' heads, from positions of the warm-up's record: each plays its own
    policy, and the warm-up's model of others moves its partners.

    A partner is a type, weights of ways to play [W] (`cast`): what the warm-up's inference knew of a player
    at the end of a recorded meeting. Type and present view give its goal, the goal its action; but its hand
    may slip: some tremble, and some do anything, like nobody on record. And some are restless: at each step
    they draw types anew with a chance of TURN, those of a game together. A partner stays from episode to
    episode, MEETING on average, and the player's belief about it follows what it does, as in real games.

    (Models that self-play trains come to expect that whoever stands on the stag hunts it; one such hunt in
    twenty games makes waiting among hare hunters look worth while. So they move nobody here.)
    """

    BEGINS = 0.5  # share of the drawn positions that are the begin of an episode, or more
    saved = ("state", "memory", "types", "slips", "turns", "generator")

    def __init__(self, args, table, replay):
        self.table, self.replay = table, replay
        hops = len(table.hop_seats)
        self.shape = hops, imagined_games(args, hops)  # players, games of each
        self.generator = seeded(Processes.seed(args.seed), "imagination", args.device)
        self.state = self.memory = self.types = self.slips = self.turns = None

    @functools.cached_property
    @torch.no_grad()
    def cast(self):
        """What the warm-up's inference knows of each player at the end of each recorded meeting [N, B, W]."""
        known, record, answer = self.table.networks.known, self.replay.record, []
        row = lambda part: part.transpose(0, 1).flatten(1, 2)[None]  # players side by side: [1, T, N * B, ..]
        for first in range(0, record["over"].shape[-1], 32):
            part = {name: each[..., first:first + 32] for name, each in record.items()}
            x, action = row(look_back(self.table.views, part)), row(part["actions"]).long()
            seen, memory = row(part["present"]), known.start(x.shape[2])
            for t in range(x.shape[1]):
                memory = known.remember(memory, known.look(x[:, t])[2], action[:, t], seen[:, t])
            answer.append(known.weights(memory)[0][0].unflatten(0, (len(part["cell"]), -1)))
        return torch.cat(answer, 1)

    def draw_starts(self, num_steps):
        """Draws a position of recorded games for each player, game and step to come: [.., T, L * games]."""
        table, record = self.table, self.replay.record
        present = record["present"][table.seats].flatten(1).float()  # [L, T * B]
        first = present * (record["clock"].flatten() == 0)
        share = first.sum(1, keepdim=True).clamp(min=1) / present.sum(1, keepdim=True).clamp(min=1)
        chance = present + first * self.BEGINS / (share * (1 - self.BEGINS) + 1e-9) + 1e-9
        drawn = torch.multinomial(chance, num_steps * self.shape[1], True, generator=self.generator)
        state = ego_first({name: record[name].flatten(-2) for name in STATE}, table.order, drawn)
        rows = lambda part: part.unflatten(-1, (self.shape[0], num_steps, -1)).transpose(-3, -2).flatten(-2)
        return {name: rows(part) for name, part in state.items()}

    def draw_types(self):
        """Partners for every game, should a meeting begin: their types [P, games, W], how often the hand of
        each slips [P, games, 1], a trembling one in any share of the steps, and how often they draw another
        type [P, games, 1]."""
        cast = self.cast[self.table.pairs]
        meeting = torch.randint(cast.shape[1], self.shape, generator=self.generator, device=cast.device)
        number = torch.rand(len(cast), self.shape[1], generator=self.generator, device=cast.device)
        others = len(cast) // self.shape[0]
        number[:, ::2] = self.table.for_pairs(number[::others, ::2])  # in every other game for all partners
        number = number[..., None]  # it falls into one of the shares
        restless = number >= 1 - SHARES[-1]
        slips = ((number - SHARES[0]) / SHARES[1]).clamp(0, 1) * ~restless
        return take(cast, self.table.for_pairs(meeting)), slips, TURN * restless

    @torch.no_grad()
    def play(self, num_steps):
        """num_steps more steps of all games. -> the steps as `play_steps` gives them to the policy"""
        table, others, steps = self.table, self.table.networks.others, []
        starts, nobody = self.draw_starts(num_steps), others.start(self.shape[1])
        start = lambda t: {name: part[..., t, :] for name, part in starts.items()}
        if self.state is None:
            self.state, self.memory = start(0), nobody
            self.types, self.slips, self.turns = self.draw_types()
        for t in range(num_steps):
            seen = self.think()
            policy = seen["policy"].exp()
            action = sample_actions(policy, self.generator)  # [L, games]
            moves = sample_actions(seen["moved"], self.generator)  # [P, games]
            in_seats = lambda part: part.unflatten(0, (self.shape[0], -1)).transpose(0, 1).flatten(1)
            there = (self.state["cell"][1:] < table.game.cells).unflatten(1, self.shape)  # [N-1, L, games]
            there = there.transpose(0, 1).flatten(0, 1)  # [P, games]
            joint = torch.cat([action.flatten()[None], in_seats(moves)])  # [N, L * games]
            self.state, reward, over = table.model.step(self.state, joint)
            over = over.view(self.shape)
            self.memory = others.remember(self.memory, seen["table"], moves, there)
            steps.append({"x": seen["x"], "told": seen["told"], "actions": action, "values": seen["value"],
                          "ended": over, "logprobs": seen["policy"].gather(-1, action[..., None])[..., 0],
                          "rewards": reward.view(self.shape) * REWARD_SCALE, "target": policy})
            self.begin_again(over, start(t), nobody)
        out = {key: torch.stack([step[key] for step in steps]) for key in steps[0]}
        out["values"] = torch.cat([out["values"], self.think()["value"][None]])
        present = torch.ones_like(out["ended"])
        return out | {"present": present, "searched": ~present}

    def think(self):
        """What is thought of the present states: the own views x [L, games, K], what Networks give, and with
        which probabilities the partners move, `moved` [P, games, 7]."""
        networks, views = self.table.networks, self.table.views
        x = views.look(self.state).unflatten(1, self.shape)  # [N, L, games, K]
        partners = x[1:].transpose(0, 1).flatten(0, 1)  # [P, games, K]
        known, row = networks.known, lambda part: part.flatten(0, 1)[None]  # one network moves all partners
        first, hidden = known.see(row(partners))
        goal, _ = known.read(row(self.types), hidden)
        mask = views.mask(partners)
        moved = known.act(first + goal @ known.goal, row(mask)).view(mask.shape).exp()
        moved = torch.lerp(moved, mask / mask.sum(-1, keepdim=True), self.slips)
        return {"x": x[0], **networks(x[0], partners, self.memory), "moved": moved}

    def begin_again(self, over, state, nobody):
        """Other positions where a game is over [L, games], other partners where a meeting is, and other types
        where the restless turn."""
        self.state = {name: torch.where(over.flatten(), state[name], self.state[name]) for name in STATE}
        number = torch.rand(self.shape, generator=self.generator, device=over.device)
        number, over = (self.table.for_pairs(part)[..., None] for part in (number, over))  # [P, games, 1]
        new = over & (number < 1 / MEETING)
        self.memory = torch.where(new, nobody, self.memory)
        types, slips, turns = self.draw_types()
        self.types = torch.where(new | (number < self.turns), types, self.types)
        self.slips, self.turns = torch.where(new, slips, self.slips), torch.where(new, turns, self.turns)


# ==================================================================================== learning

STRETCHES, RECORDED = 64, 12  # in a lesson: real ones, ones of the record


class Replay(Saved):
    """Stretches of play of some steps each, from which the models of others learn: the last real ones, and
    beside them the record of the warm-up, which stays.

    real      dict of [.., T, stretch], the newest last: STATE and actions of all players; of each pair
              [P, ..] seen, weight (whether it is learned from), and goal_step, the step whose view holds the
              goal in hindsight; memory [P, 2 H, stretch], as it was before the stretch
    recorded  the same of the record
    record    the whole games of the warm-up, dict of [.., T, B]
    """

    saved = ("real", "record")

    def __init__(self, args, table, record):
        self.args, self.table, self.record, self.real = args, table, record, {}

    @functools.cached_property
    def recorded(self):
        """The record cut into stretches. It is what an onlooker saw, who has known nobody before."""
        record, steps, pairs = self.record, self.args.num_steps, self.table.pairs
        most = record["over"].shape[0] // steps * steps
        cut = lambda part: part[..., :most, :].unflatten(-2, (-1, steps)).transpose(-3, -2).flatten(-2)
        columns = {name: cut(record[name]) for name in STATE + ("actions",)}
        seen = cut(record["present"])[pairs]
        goal_step = last_steps(cut(record["ends"])[pairs], self.args.horizon)
        memory = self.table.networks.others.start(seen.shape[-1]).detach().transpose(1, 2)
        return columns | {"seen": seen, "weight": seen, "goal_step": goal_step, "memory": memory}

    def add(self, real):
        """Takes in the stretches that were just played [.., T, B], drops the oldest that are too many, and
        tells `real` their goal_step."""
        args, table, policy = self.args, self.table, real["policy"]
        # what acting in each view is worth [T, L, B], to the one who reads the goal from it [P, T, B]
        worth = policy["rewards"] + args.gamma * ~policy["ended"] * policy["values"][1:]
        worth = table.for_pairs((worth if args.selector == "max" else -worth).transpose(0, 1))
        worth = worth.masked_fill(~real["present"][table.readers], -math.inf)
        real["goal_step"] = best_steps(worth, real["ended"][table.pairs], args.horizon)
        weight = real["seen"]
        if args.moa_samples == "rewarded":
            weight = weight & later_catch(real["left"], real["ended"])[table.pairs]
        columns = {name: real[name] for name in STATE + ("actions", "seen", "goal_step")}
        columns |= {"weight": weight, "memory": real["memory"].transpose(1, 2)}
        for name, part in columns.items():
            held = torch.cat([self.real.get(name, part[..., :0]), part], -1)
            self.real[name] = held[..., -(args.buffer_size // args.num_steps):]

    def draw(self, real, kept, generator):
        """A lesson [P, T, B, ..]: stretches drawn at random, `real` of real games and `kept` of the record,
        with their goals in hindsight."""
        pairs = self.table.pairs
        late = torch.rand(real, generator=generator, device=pairs.device).square()  # late ones more often
        held = self.real["clock"].shape[-1]
        drawn = {name: part[..., held - 1 - (late * held).long()] for name, part in self.real.items()}
        if self.record is not None:
            where = torch.randint(self.recorded["clock"].shape[-1], (kept,), generator=generator,
                                  device=pairs.device)
            drawn = {name: torch.cat([part, self.recorded[name][..., where]], -1)
                     for name, part in drawn.items()}
        x = look_back(self.table.views, drawn)  # [N, T, B, K]
        lesson = {"x": x[pairs], "action": drawn["actions"][pairs].long(), "seen": drawn["seen"],
                  "weight": drawn["weight"], "memory": drawn["memory"].transpose(1, 2)}
        if self.args.goals == "latent":
            lesson |= goals_in_hindsight(self.table, x, drawn["goal_step"])
        return lesson


@torch.no_grad()
def goals_in_hindsight(table, x, goal_step):
    """`pick_goals` for all pairs, from all players' views [N, T, B, K] and the step of each [P, T, B]."""
    goals = table.networks.prior(x.flatten(0, 2)[None])
    goals = (part[0].unflatten(0, (len(x), -1))[table.pairs] for part in goals)  # [P, T * B, G]
    return pick_goals(*goals, goal_step)


def look_back(views, data):
    """All views of recorded states [.., T, B]: [N, T, B, K]."""
    shape = data["clock"].shape
    return views.look({name: data[name].flatten(-2) for name in STATE}).unflatten(1, shape)


def best_steps(worth, ends, horizon):
    """For each step the best one to come, within the horizon and the player's game: worth [P, T, B], which
    games end [P, T, B] -> step numbers [P, T, B]."""
    last = last_steps(ends, horizon)
    step = torch.arange(worth.shape[1], device=worth.device)
    within = (step[:, None, None] <= step[:, None]) & (step[:, None] <= last[:, :, None])  # [P, T, T', B]
    return worth[:, None].masked_fill(~within, -math.inf).argmax(2)


def later_catch(left, ends):
    """Whether each player goes on to catch something in its game, as far as the data tell: [N, T, B]."""
    caught = left.long().cumsum(1)
    return caught.gather(1, last_steps(ends, left.shape[1])) - caught + left.long() > 0


def gaussian_kl(mean, logvar, other_mean, other_logvar):
    """KL(N(mean, var) || N(other)) of diagonal normals, summed over the last dimension."""
    distance = (logvar.exp() + (mean - other_mean).square()) * (-other_logvar).exp()
    return 0.5 * (distance - 1 + other_logvar - logvar).sum(-1)


def masked_mean(x, weight):
    """The mean of each row over its samples: [L, M] -> [L]."""
    return (x * weight).sum(-1) / weight.sum(-1).clamp(min=1e-8)


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


def learn_others(args, others, replay, optimizer, generator):
    """Trains the models of others on stretches of real games and of the record. -> means of the losses over
    the update, each [P]"""
    totals = []
    for _ in range(args.moa_minibatches):
        lesson = replay.draw(STRETCHES, RECORDED, generator)
        losses = others_loss(others, lesson, generator)
        optimizer.zero_grad()
        (losses["loss"].sum() / lesson["weight"][0].numel()).backward()
        Processes.mean_gradients(others)
        clip_gradients(others, MAX_GRAD_NORM)
        optimizer.step()
        totals.append({**losses, "samples": lesson["weight"].sum((1, 2)).float()})
    sums = (torch.stack([total[key].detach() for total in totals]).sum(0) for key in totals[0])
    *sums, samples = Processes.mean(*sums)
    return {f"moa/{key}": part / samples.clamp(min=1) for key, part in zip(totals[0], sums)}


def compute_gae(rewards, values, ends, present, gamma, gae_lambda):
    """Generalised advantages (Schulman et al. 2016, eq. 16) and value targets of [T, ...]; values [T+1, ...].

    Where a player's game ends nothing comes after: no value, no later advantage. Where it is absent all is 0.
    """
    advantages, later = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * values[t + 1] * ~ends[t] - values[t]
        later = advantages[t] = present[t] * (delta + gamma * gae_lambda * ~ends[t] * later)
    return advantages, values[:-1] + advantages


def share_out(samples):
    """Weights [T, L, M] of samples: all of a learner's equal, adding up to 1 in the mean of all processes, so
    that sums by these weights are means."""
    total, = Processes.mean(samples.sum((0, 2), keepdim=True))
    return samples / total.clamp(min=1e-8)


def standardise(x, weight):
    """x [T, L, M] less each learner's mean, divided by its spread; the weights are those of `share_out`."""
    mean, square = Processes.mean(*((part * weight).sum((0, 2), keepdim=True) for part in (x, x.square())))
    return (x - mean) / ((square - mean.square()).clamp(min=0).sqrt() + 1e-8)


def learn_policy(args, policy, data, optimizer, ent_coef, generator):
    """One update of all policies and values on steps [T, L, B, ...]. -> means of the losses, each [L]

    Where an action was searched for, the policy learns the search's result by cross-entropy: the result is
    the target, not the action that was drawn from it, so no ratio of probabilities enters. Elsewhere it is
    PPO (Schulman et al. 2017). Each step counts the same: real ones, of which there are few, would
    otherwise drown what imagined games tell of strangers.
    """
    values = data["values"][:-1]
    advantages, returns = compute_gae(data["rewards"], data["values"], data["ended"], data["present"],
                                      args.gamma, GAE_LAMBDA)
    if not math.isinf(args.prize_floor):  # a small prize in a poor game counts as a large one in a rich game
        advantages = advantages / (values.abs() + args.prize_floor * REWARD_SCALE)
    weight = share_out(data["present"].float())
    steps = {**data, "returns": returns, "values": values, "advantages": standardise(advantages, weight),
             "weight": weight * args.num_minibatches}
    flat = {key: part.transpose(0, 1).flatten(0, 2) for key, part in steps.items()}  # [L * M, ...]
    weight, searched, returned, expected = (flat[key].view(values.shape[1], -1)  # [L, M]
                                            for key in ("weight", "searched", "returns", "values"))
    there, means = weight > 0, {}
    for kind, part in (("", there & ~searched), ("real_", there & searched)):
        if part.any():
            unexplained = variance(returned - expected, part) / variance(returned, part).clamp(min=1e-8)
            means[f"losses/{kind}explained_variance"] = 1 - unexplained
    offset = torch.arange(0, weight.numel(), weight.shape[1], device=weight.device)[:, None]
    most, totals = max(int(there.sum(1).max()), args.num_minibatches), []
    for _ in range(args.update_epochs):
        # a random order with the absent at the end: the longest list of samples is as far as one need go
        number = torch.rand(weight.shape, generator=generator, device=weight.device)
        for rows in (number - there.float()).argsort(1)[:, :most].tensor_split(args.num_minibatches, 1):
            index = (rows + offset).flatten()
            batch = {key: part.index_select(0, index).unflatten(0, rows.shape) for key, part in flat.items()}
            loss, parts = policy_loss(args, policy, batch, ent_coef)
            optimizer.zero_grad()
            loss.sum().backward()
            check_finite(*Processes.mean_gradients(policy, loss), "the loss of the policy",
                         getattr(policy, "owners", ()))
            clip_gradients(policy, MAX_GRAD_NORM)
            optimizer.step()
            totals.append({key: part.detach() for key, part in parts.items()})
    figures = (torch.stack([each[key] for each in totals]).mean(0) for key in parts)
    *sums, drawn, planned = Processes.mean(*figures)
    share = lambda key: planned if key.startswith(("search_", "real_")) else drawn
    return means | {f"losses/{key}": part / share(key).clamp(min=1e-8) for key, part in zip(parts, sums)}


def policy_loss(args, policy, batch, ent_coef):
    """The loss of each learner on a batch [L, M, ...]: [L], and what it is made of: sums over the samples by
    their weights; and last the weights of those that were drawn and of those that were searched for."""
    drawn, planned = batch["weight"] * ~batch["searched"], batch["weight"] * batch["searched"]
    log_probs, value = policy(batch["x"], batch["told"])
    logratio = log_probs.gather(-1, batch["actions"][..., None]).squeeze(-1) - batch["logprobs"]
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    surrogate = torch.minimum(batch["advantages"] * ratio, batch["advantages"] * clipped)
    search_loss = -(batch["target"] * log_probs.clamp(min=-30)).sum(-1)
    error = 0.5 * (value - batch["returns"]).square()
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    parts = {"policy_loss": -surrogate * drawn, "search_loss": search_loss * planned,
             "value_loss": error * drawn, "real_value_loss": error * planned,
             "entropy": entropy * drawn, "real_entropy": entropy * planned,
             "approx_kl": (ratio - 1 - logratio) * drawn,  # joschu.net/blog/kl-approx.html
             "clipfrac": ((ratio - 1).abs() > args.clip_coef) * drawn, "drawn": drawn, "planned": planned}
    parts = {key: part.sum(-1) for key, part in parts.items()}
    loss = (parts["policy_loss"] + parts["search_loss"]
            + VALUE_WEIGHT * (parts["value_loss"] + parts["real_value_loss"])
            - ent_coef * (parts["entropy"] + parts["real_entropy"]))
    for key in ("value_loss", "real_value_loss"):
        parts[key] = parts[key] / REWARD_SCALE**2  # in the units of the game
    return loss, parts


def variance(x, weight):
    """The variance of each row over its samples: [L, M] -> [L]."""
    return masked_mean((x - masked_mean(x, weight)[:, None]).square(), weight)


def clip_gradients(agent, max_norm):
    """Shortens the gradient of each learner to max_norm, on its own."""
    gradients = [parameter.grad for parameter in agent.parameters() if parameter.grad is not None]
    norm = sum(gradient.flatten(1).square().sum(1) for gradient in gradients).sqrt()  # [L]
    check_finite(norm, f"the gradient of {type(agent).__name__}", getattr(agent, "owners", ()))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)[:, None, None]
    for gradient in gradients:
        gradient.mul_(factor)


# =================================================================================== measuring


@torch.no_grad()
def evaluate(args, table, episodes, search, seed):
    """Plays fresh episodes, each a meeting of its own. -> returns [episodes, N], true-game steps played"""
    played, steps = [], 0
    for first in range(0, episodes, 1000):
        num = min(episodes - first, 1000)
        fresh = Table(args, num, seed + first, table.networks, table.model)
        total = torch.zeros(num, len(args.players), device=args.device)
        running = torch.ones(num, dtype=torch.bool, device=args.device)
        while running.any():
            steps += int(running.sum())
            out = fresh.play(fresh.act(search), restart=False)
            total += out["reward"].T * running[:, None]
            running &= ~out["over"]
        played.append(total)
    return torch.cat(played), steps


@torch.no_grad()
def score_models(table, real, draws=4):
    """How well the models of others predict, from x, true_probs, mean, logvar [T, .., B, ..] and seen
    [P, T, B].

    -> scores beside the best that one could do, dict of [P]: top1 is the true probability of the action held
    most likely; nan where the true ones are not known (players from files), or nobody was seen. And two
    tables [P, 7, 7] of the share of all steps in which an action is taken (row) and another is predicted
    (column): by the models, and by who knows the true probabilities
    """
    others, pairs = table.networks.others, table.pairs
    x = real["x"].transpose(0, 1)[pairs].flatten(1, 2)  # [P, T * B, K]
    mean, logvar = (real[key].transpose(0, 1).flatten(1, 2) for key in ("mean", "logvar"))
    generator = torch.Generator(x.device).manual_seed(0)
    first, mask = others.view(x), table.views.mask(x)
    drawn = lambda: others.act(first + draw_goals(mean, logvar, generator) @ others.goal, mask).exp()
    predicted = sum(drawn() for _ in range(draws)) / draws
    truth = real["true_probs"].transpose(0, 1)[pairs].flatten(1, 2)  # [P, T * B, 7]
    weight = real["seen"].float().flatten(1)
    best = lambda probs: truth.gather(-1, probs.topk(3, -1).indices).cumsum(-1)
    each = {"top1": best(predicted)[..., 0], "top3": best(predicted)[..., 2],
            "cross_entropy": -(truth * predicted.clamp(min=1e-9).log()).sum(-1),
            "top1_ceiling": best(truth)[..., 0], "top3_ceiling": best(truth)[..., 2],
            "cross_entropy_floor": -(truth * truth.clamp(min=1e-9).log()).sum(-1)}
    scores = {f"moa/{key}": masked_mean(value, weight) for key, value in each.items()}
    if "goal_step" in real and table.args.goals == "latent":
        goal = goals_in_hindsight(table, real["x"].transpose(0, 1), real["goal_step"])["goal_mean"]
        scores["moa/belief_accuracy"] = belief_accuracy(mean, logvar, goal, weight)
    known = table.known[pairs] & (weight.sum(1) > 0)
    taken = (truth * weight[..., None]).mT / weight.sum(1)[:, None, None].clamp(min=1)  # [P, 7, T * B]
    scores = {key: torch.where(known, value, torch.nan) for key, value in scores.items()}
    return scores, taken @ predicted, taken @ truth


def belief_accuracy(mean, logvar, goal, weight):
    """How often a belief [P, T * B, G] holds the goal in hindsight [P, T, B, G] likelier than that of another
    game: [P], a half if it knows nothing."""
    distance = lambda point: ((point.flatten(1, 2) - mean).square() * (-logvar).exp()).sum(-1)
    return masked_mean((distance(goal) < distance(goal.roll(1, 2))).float(), weight)


@torch.no_grad()
def report_models(args, table, decisions=2_000, searches=16):
    """The models of others on fresh games; what a searching player does is averaged over repeated searches.

    The decisions are every sixth step of meetings, so that they come from all parts of an episode, and from
    later episodes as well as from the first. Of players from files what they did stands for their chances.
    -> for results.json, by kind of player and by pair of players; true-game steps played
    """
    fresh = Table(args, args.num_envs, args.seed + 2_000_000, table.networks, table.model)
    steps, found, played = [], 0, 0
    while found < decisions:
        for _ in range(5):
            fresh.play(fresh.act(args.search))
        seen = fresh.act(args.search)
        if args.search != "none":
            again = [fresh.plan(seen, args.search)[0].exp() for _ in range(searches - 1)]
            seen["true_probs"][fresh.seats] = (seen["improved"].exp() + sum(again)) / searches
        out, unknown = fresh.play(seen), ~fresh.known
        seen["true_probs"][unknown] = F.one_hot(out["action"][unknown].long(), NUM_ACTIONS).float()
        played += 6 * args.num_envs
        steps.append({**seen, **out})
        found += int(out["present"][fresh.seats].sum())
    data = {key: torch.stack([step[key] for step in steps]) for key in ("x", "true_probs", "mean", "logvar")}
    data["seen"] = torch.stack([step["seen"] for step in steps], 1)
    scores, told, ceiling = score_models(fresh, data, draws=16)
    scores = {key.removeprefix("moa/"): value for key, value in scores.items()}
    finite = lambda score: None if math.isnan(score) else score
    results, rows = {}, [["others", "top-1", "ceiling", "top-3", "ceiling", "cross-entropy", "floor"]]
    columns = ("top1", "top1_ceiling", "top3", "top3_ceiling", "cross_entropy", "cross_entropy_floor")
    for kind, pairs in fresh.pairs_by_kind().items():
        means = {key: value[pairs].nanmean().item() for key, value in scores.items()}
        results[kind] = {key: finite(mean) for key, mean in means.items()}
        where, best = told[pairs].sum(0), ceiling[pairs].sum(0)
        share, named = where.sum(1), lambda values: dict(zip(ACTIONS, values.tolist()))
        taken, total = share[:, None].clamp(min=1e-9), share.sum().clamp(min=1e-9)
        results[kind] |= {"share": named(share / total), "predicted": named(where.sum(0) / total),
                          "recall": named((where / taken).diagonal()),
                          "recall_ceiling": named((best / taken).diagonal()),
                          "predicted_where_taken": dict(zip(ACTIONS, map(named, where / taken)))}
        rows.append([kind, *(f"{means[key]:.3f}".replace("nan", "–") for key in columns)])
    print_table("models of others, on fresh games", rows)
    by_pair = {}
    for pair, (reader, other) in enumerate(zip(fresh.readers.tolist(), fresh.pairs.tolist())):
        loss, hits = (finite(scores[key][pair].item()) for key in ("cross_entropy", "top1"))
        share, both = told[pair].sum(1).tolist(), told[pair].diagonal().tolist()
        by_pair[f"{fresh.names[reader]}_of_{fresh.names[other]}"] = {
            "loss": loss, "hits": hits,
            "recall": {action: part / met for action, part, met in zip(ACTIONS, both, share) if met > 0}}
    return results, by_pair, played


def draw_models(moa):
    """A picture of what report_models tells by kind of player: what is predicted where each action is taken,
    and how often each is taken and is predicted over all."""
    from matplotlib.figure import Figure  # here, for only pictures need it

    ticks, picture = range(NUM_ACTIONS), Figure((10.5, 0.5 + 4.2 * len(moa)), layout="constrained", dpi=100)
    picture.suptitle("What the HOP+ players predict of the others, on fresh games")
    for (kind, scores), (left, right) in zip(moa.items(), picture.subplots(len(moa), 2, squeeze=False)):
        name = os.path.basename(kind)  # of a player from a file
        left.set(title=f"of {name}: where it takes an action", ylabel="taken")
        left.set_xlabel("predicted, mean chance in %")
        right.set(title=f"of {name}: in the steps that others saw", ylabel="% of the steps")
        chances = [[100 * chance if scores["share"][action] > 1e-4 else math.nan for chance in row.values()]
                   for action, row in scores["predicted_where_taken"].items()]
        left.imshow(chances, cmap="Blues", vmin=0, vmax=100)
        for row, column in itertools.product(ticks, ticks):
            chance = chances[row][column]
            text = f"{chance:.0f}" if chance >= 0 else "–"  # never taken
            left.text(column, row, text, ha="center", va="center", color="white" if chance > 50 else "black")
        left.set_yticks(ticks, ACTIONS)
        for side, label, colour in ((-0.2, "share", "#8a8a8a"), (0.2, "predicted", "#0072b2")):
            shares = [100 * share for share in scores[label].values()]
            bars = right.bar([tick + side for tick in ticks], shares, 0.4, color=colour)
            bars.set_label("taken" if label == "share" else "predicted, mean chance")
            right.bar_label(bars, fmt="%.0f", fontsize=8)
        right.margins(y=0.3)  # room for the legend
        right.legend(loc="upper left", ncols=2, frameon=False)
        right.spines[["top", "right"]].set_visible(False)
        for axes in (left, right):
            axes.set_xticks(ticks, ACTIONS, rotation=30, ha="right")
    return picture


@torch.no_grad()
def score_world(args, model, rows=20_000):
    """The share of the steps of fresh mixed games that the learned model foresees exactly. Crowds and failed
    hunts are among them: real games hold few of these, imagined ones all.

    -> shares of whole steps and of rewards, steps played (the first player is there in all of them)
    """
    data = collect(board_of(args), rows, args.seed + 1_000_000, args.device)
    after, reward, over = model.step(data, data["actions"])
    paid = (reward - data["reward"][0]).abs() < 0.01
    whole = paid & (after["cell"] == data["next_cell"]).all(0) & (after["board"] == data["next_board"]).all(0)
    whole &= over == (data["terminated"][0] | data["over"])
    whole &= after["deadline"] - after["clock"] == data["next_left"]
    return {"steps": whole.float().mean().item(), "rewards": paid.float().mean().item()}, rows


def expectations(table, seen):
    """What each HOP+ player expects each other to do now, at the middle of its belief: [L, N-1, B, 7]."""
    others, x = table.networks.others, seen["x"][table.pairs]
    probs = others.act(others.view(x) + seen["mean"] @ others.goal, table.views.mask(x)).exp()
    return probs.unflatten(0, (len(table.hop_seats), -1))


def expected(table, seen, out, who):
    """What each HOP+ player that saw `who` act in the first game had expected: [(its seat, chances [7])]."""
    probs, n = expectations(table, seen)[:, :, 0], len(table.names)
    return [(seat, probs[hop, (who - seat) % n - 1]) for hop, seat in enumerate(table.hop_seats)
            if seat != who and out["present"][seat, 0] and out["present"][who, 0]]


def likeliest(probs, many):
    """The likeliest actions, of probabilities [7], in words: hunt stag 80%, stay 15%."""
    likely = zip(*(part.tolist() for part in probs.topk(many)))
    return ", ".join(f"{ACTIONS[action]} {chance:.0%}" for chance, action in likely if chance > 0.005)


def deed(out, seat):
    """What a player did in a step of the first game, and what it got, in words: hunt stag +5."""
    action, got = int(out["action"][seat, 0]), out["reward"][seat, 0].item()
    in_vain = action >= HUNT_STAG and not out["left"][seat, 0]
    return ACTIONS[action] + " in vain" * in_vain + (f" {got:+.4g}" if got else "")


@torch.no_grad()
def imagine_catches(table, seen, games, seed=0):
    """How games go on under the beliefs of the HOP+ players, each until it is over for that player: what the
    others catch there, 0 nothing, 1 a stag, 2 a hare [N-1, L, M].

    games [L, M] are the numbers of the table's games to begin with.
    """
    generator = torch.Generator(table.game.device).manual_seed(seed)
    goals = draw_goals(*(take(seen[key], table.for_pairs(games)) for key in ("mean", "logvar")), generator)
    searcher = Searcher(table.networks, table.views, take(seen["told"], games), goals)
    state, gone = ego_first(table.game.state(), table.order, games), table.game.cells
    over = torch.zeros(games.numel(), dtype=torch.bool, device=games.device)
    caught = torch.zeros_like(state["cell"])
    for _ in range(int((state["deadline"] - state["clock"]).max())):
        log_probs, _, others = searcher.think(state)
        joint = sample_actions(torch.cat([log_probs.exp()[:, None], others], 1), generator).T
        after, _, ended = table.model.step(state, joint)
        left = (after["cell"] == gone) & (state["cell"] < gone) & ~over  # [N, L * M]
        caught = torch.where(left & (joint >= HUNT_STAG), joint - STAY, caught)
        state, over = after, over | ended
    return caught[1:].unflatten(1, games.shape)


def aims(table, seen):
    """What each HOP+ player believes each other to be after, in words, [L][N-1]: after a stag (80%).

    Named is the prey that the other catches most often in 64 imagined ends of the first game, with its share
    of all that the other catches there.
    """
    first = torch.zeros(len(table.hop_seats), 64, dtype=torch.int64, device=table.game.device)
    caught = imagine_catches(table, seen, first)
    counts = torch.stack([(caught == prey).sum(2) for prey in (1, 2)], -1)  # [N-1, L, 2]
    word = lambda stags, hares: "catching nothing soon" if not stags + hares else (
        f"after {'a stag' if stags > hares else 'a hare'} ({max(stags, hares) / (stags + hares):.0%})")
    return [[word(*count) for count in row] for row in counts.transpose(0, 1).tolist()]


@torch.no_grad()
def record_game(args, table, seed):
    """Plays an episode for a picture, beside the board what each does and how far the others expected it.
    -> frames"""
    from PIL import Image, ImageDraw, ImageFont  # here, for only pictures need it

    table, font = Table(args, 1, seed, table.networks, table.model), ImageFont.load_default(13)
    total, frames, over = torch.zeros(len(args.players)), [], False

    def add_frame(caption):
        returns = " ".join(f"{value:g}" for value in total.round(decimals=2).tolist())
        board = draw_board(table.game, 0, f"{caption}  returns {returns}")
        size = (board.width + 290, max(board.height, 30 + 20 * (len(args.players) + 1)))
        frames.append(Image.new("RGB", size, (250, 248, 242)))
        frames[-1].paste(board, (0, 0))
        return ImageDraw.Draw(frames[-1]), board.width + 10

    while not over:
        picture, x = add_frame(f"step {int(table.game.clock)}")
        seen = table.act(args.search)
        out = table.play(seen, restart=False)
        picture.text((x, 8), "what each does (chances the others gave it)", (52, 54, 60), font)
        for seat in out["present"][:, 0].nonzero()[:, 0].tolist():
            action = int(out["action"][seat, 0])
            chances = ", ".join(f"{probs[action]:.0%}" for _, probs in expected(table, seen, out, seat))
            text = f"{seat + 1} {deed(out, seat)}" + (f" ({chances})" if chances else "")
            picture.text((x, 30 + 20 * seat), text, COLOURS[seat % len(COLOURS)], font)
        total, over = total + out["reward"][:, 0].cpu(), bool(out["over"])
    add_frame("over")
    return frames


# ================================================================================ adapt, watch


def load_players(args):
    """The trained players of --checkpoint. -> args as they were trained, what players.pt holds"""
    path = asked = args.checkpoint
    for name in ("checkpoint.pt", "players.pt"):  # the latter, if the run has come so far
        path = os.path.join(asked, name) if os.path.isfile(os.path.join(asked, name)) else path
    saved = load_checkpoint(path, f"--checkpoint {asked}")
    if "policy" not in saved.get("networks", ()):
        raise Refused(f"--checkpoint {asked} holds no HOP+ players, it was written by {saved['script']}")
    config = saved["config"]
    fixed = [field.name for field in dataclasses.fields(GameArgs)]
    fixed += ["goals", "goal_dim", "hypotheses", "hidden_size", "vae_size", "gamma", "search_model"]
    for name in fixed:
        given, trained = getattr(args, name), config[name]
        if given not in (trained, getattr(Args, name)):
            raise Refused(f"{flag(name)} {given} differs from {trained}, with which {asked} was trained")
    if args.mode in ("watch", "play") and args.players == Args.players:  # not told
        lines = [config["players"]]
        if args.mode == "play":  # a human in the first seat that leaves a hop
            lines = [(*lines[0][:seat], "human", *lines[0][seat + 1:]) for seat in range(len(lines[0]))]
        args = dataclasses.replace(args, players=next(names for names in lines if "hop" in names))
    free = ("beta", "prize_floor", "num_simulations", "num_trees", "search")  # as trained, if not asked for
    taken = fixed + [name for name in free if getattr(args, name) == getattr(Args, name)]
    args = dataclasses.replace(args, **{name: config[name] for name in taken})
    check_search(args)
    return args, saved


def seat_players(args, saved, num_envs, seed, episodes=1):
    """A table of trained players; those of other runs bring their own networks, but not their world model."""
    table = Table(args, num_envs, seed, episodes=episodes)
    weights = [load_weights(args, saved, seat) for seat in table.hop_seats]
    try:
        for part in ("policy", "others"):
            network = getattr(table.networks, part)
            network.load_state_dict({key: torch.cat([each[part][key] for each in weights])
                                     for key in network.state_dict()})
    except (KeyError, RuntimeError) as error:
        asked = f"--checkpoint {args.checkpoint} --players {' '.join(args.players)}"
        raise Refused(f"{asked}: not all trained ones fit this script ({type(error).__name__})") from error
    table.memory = table.networks.others.start(num_envs).detach()
    if args.search_model == "learned":
        world = make_world_model(saved["world_model"], f"--checkpoint {args.checkpoint}", args.device)
        table.model = WorldTables(world, args.height, args.width, len(args.players))
    return table


def load_weights(args, saved, seat):
    """The networks of the HOP+ player of a seat: those that were trained in it, or others where none were; or
    those of a player of another run, runs/y:player_2."""
    name = args.players[seat]
    path, _, player = name.rpartition(":")
    if path:
        saved = load_checkpoint(os.path.join(path, "players.pt"), f"--players {name}", args.device)
    config = saved["config"]
    there = [f"player_{number}" for number, kind in enumerate(config["players"], 1) if kind == "hop"]
    if path and player not in there:
        raise Refused(f"--players {name}: {path} holds {', '.join(there)}, not {player!r}")
    for field in ("height", "width", "final_time", "goals", "goal_dim", "hypotheses", "hidden_size"):
        if config[field] != getattr(args, field):
            raise Refused(f"--players {name} was trained with {flag(field)} {config[field]}, here it is "
                          f"{getattr(args, field)}")
    if len(config["players"]) != len(args.players):
        raise Refused(f"--players {name} was trained with {len(config['players'])} players, here are "
                      f"{len(args.players)}")
    player = player if path else f"player_{seat + 1}"
    learner = there.index(player) if player in there else seat % len(there)
    return {part: {key: value.unflatten(0, (len(there), -1))[learner] for key, value in weights.items()}
            for part, weights in saved["networks"].items()}


def play_meetings(args, saved, seat, seed):
    """--meetings of --meeting-episodes, the trained player in one seat. -> its returns [meeting, episode]"""
    strangers = [name for name in args.players if name != "hop"]
    args = dataclasses.replace(args, players=(*strangers[:seat], "hop", *strangers[seat:]))
    table = seat_players(args, saved, args.meetings, seed, args.meeting_episodes)
    rows = torch.arange(args.meetings, device=args.device)
    episode = torch.zeros_like(rows)
    answer = torch.zeros(args.meetings, args.meeting_episodes, device=args.device)
    while (episode < args.meeting_episodes).any():
        out = table.play(table.act(args.search))
        counted = episode < args.meeting_episodes
        answer[rows, episode.clamp(max=args.meeting_episodes - 1)] += out["reward"][seat] * counted
        episode = episode + out["over"]
    return answer


def adapt(args):
    """A trained player among others, in each seat: its networks stay, beliefs go on within and across
    episodes."""
    args, saved = load_players(args)
    seat_players(args, saved, 1, args.seed)  # whatever is wrong with the players shows now
    run_folder(args)  # and whatever is wrong with its name
    seats = tqdm(range(len(args.players)), desc="meetings", unit=" seat", leave=False, dynamic_ncols=True)
    answer = [play_meetings(args, saved, seat, args.seed + seat) for seat in seats]
    report_meetings(args, torch.stack(answer))
    return 0


def watch(args):
    """One episode in the terminal, step by step: the board, what each player believes, what it searched; in
    --mode play a person is among them, and sees what the others expected of it."""
    args, saved = load_players(args)
    table, keys = seat_players(args, saved, 1, args.seed), sys.stdin
    if args.keys:
        try:
            with open(args.keys, encoding="utf-8-sig") as file:
                keys = io.StringIO(file.read())
        except UnicodeDecodeError as error:
            raise Refused(f"--keys {args.keys} is not text in UTF-8") from error
    try:
        show_episode(args, table, keys, args.players.index("human") if args.mode == "play" else None)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; the rest goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def show_episode(args, table, keys, person):
    """Plays and prints an episode; person is the seat whose actions come from the keys, or None."""
    names = ["you" if seat == person else f"player {seat + 1}" for seat in range(len(args.players))]
    total, over, judged = torch.zeros(len(names)), False, {}
    print("S is a stag, h a hare, ### an obstacle; numbers are the players: S23, 2 and 3 are at the stag.")
    if person is not None:
        print(f"You are player {person + 1}. {KEYS_HELP}")
    while not over:
        print_board(table)
        seen = table.act(args.search)
        if person is None:
            print_minds(table, seen)
        elif table.game.cell[person, 0] < table.game.cells:
            action = ask_person(table, person, keys)
            if action is None:
                return
            seen["actions"][0, person] = action
        out = table.play(seen, restart=False)
        there = out["present"][:, 0].nonzero()[:, 0].tolist()
        print("  all did: " + "; ".join(f"{names[seat]} {deed(out, seat)}" for seat in there))
        if person in there:
            print_judgement(expected(table, seen, out, person), int(out["action"][person, 0]), judged)
        total, over = total + out["reward"][:, 0].cpu(), bool(out["over"])
        if person is None and sys.stdin.isatty() and not over:
            print("  (any key for the next step, q leaves)")
            if press(sys.stdin) in LEAVE:
                return
    print("\nreturns: " + ", ".join(f"{name} {value:.4g}" for name, value in zip(names, total.tolist())))
    table.game.reset()
    words = aims(table, table.look())  # on another board
    for seat, row in judged.items():
        word = words[table.hop_seats.index(seat)][(person - seat) % len(names) - 1]
        hits, chance = (sum(column) for column in zip(*row))
        print(f"player {seat + 1} foresaw {hits} of your {len(row)} moves (it gave them "
              f"{chance / len(row):.0%} on average) and would now, met on a new board, take you to be {word}")
    print(f"another episode: --seed {args.seed + 1}")


def print_judgement(rows, action, judged):
    """What each player expected of a person, and whether it was right; all is added to what is `judged`."""
    told = []
    for seat, probs in rows:
        right = int(probs.argmax()) == action
        judged.setdefault(seat, []).append((right, probs[action].item()))
        likely = likeliest(probs, 1) + ("" if right else f", this {probs[action]:.0%}")
        told.append(f"player {seat + 1} was {'right' if right else 'wrong'} ({likely})")
    if told:  # somebody is left
        print("  of you they expected: " + "; ".join(told))


KEYS = dict(zip("wsad gh", range(7)))  # in the order of ACTIONS
KEYS_HELP = ("w a s d or the arrow keys move, space stays, e hunts what is on your cell (also g: a stag, "
             "h: a hare), q leaves.")
ARROWS = dict(zip("ABCDHPMK", "wsdawsda"))  # the last character of an arrow key; from H on, on Windows
LEAVE = ("q", "Q", "", "\x04")  # also the end of a file, and Ctrl-D


def press(keys):
    """The next key: at once from a terminal, else the next character of a file, "" at its end."""
    if not keys.isatty():
        key = keys.read(1)
        return ARROWS.get(keys.read(2)[-1:], "?") if key == "\x1b" else key
    if os.name == "nt":
        import msvcrt

        key = msvcrt.getwch()
        key = ARROWS.get(msvcrt.getwch(), "?") if key in "\0\xe0" else key
    else:
        import termios
        import tty

        before = termios.tcgetattr(keys)
        try:
            tty.setraw(keys, termios.TCSADRAIN)
            key = os.read(keys.fileno(), 1).decode(errors="replace")
            if key == "\x1b":  # an arrow key is three characters
                key = ARROWS.get(os.read(keys.fileno(), 2).decode(errors="replace")[-1:], "?")
        finally:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
    if key == "\x03":  # Ctrl-C
        Interrupt.leave(signal.SIGINT)
    return key


def ask_person(table, seat, keys):
    """The action of a person, by the first key that means something on its cell; None once it leaves."""
    bits = int(table.game.legal_bits()[seat, 0])
    legal = [action for action in range(NUM_ACTIONS) if bits >> action & 1]
    print("  your move: ", end="", flush=True)
    while (key := press(keys)) not in LEAVE:
        action = legal[-1] if key in "eE" and legal[-1] > STAY else KEYS.get(key.lower())
        if action in legal:
            print(ACTIONS[action])
            return action
        if key not in "\r\n":
            print(f"{key!r} does nothing here; you can {', '.join(ACTIONS[action] for action in legal)}.\n"
                  f"  ({KEYS_HELP})\n  your move: ", end="", flush=True)
    print(f"stopped after {int(table.game.clock[0])} steps")
    return None


def print_board(table):
    """The board of the first game: S a stag, h a hare, numbers the players, ### an obstacle."""
    game = table.game
    board, cells = game.board[:, 0].tolist(), game.cell[:, 0].tolist()
    print(f"\nstep {int(game.clock[0])}, {int(game.deadline[0] - game.clock[0])} left")
    for row in range(game.height):
        line = []
        for cell in range(row * game.width, (row + 1) * game.width):
            here = "".join(str(player + 1) for player, place in enumerate(cells) if place == cell)
            prey = "S" if board[cell] & STAG_BIT else "h" if board[cell] & HARE_BIT else ""
            line.append("###" if not board[cell] else (prey + here or "."))
        print("  " + " ".join(f"{text:^5}" for text in line))


@torch.no_grad()
def print_minds(table, seen):
    """Of the first game: what each HOP+ player's policy, its search and its beliefs say."""
    moves, words = expectations(table, seen)[:, :, 0], aims(table, seen)
    cells = table.game.cell[:, 0].tolist()
    for hop, seat in enumerate(table.hop_seats):
        if cells[seat] == table.game.cells:
            continue
        before, after = (seen[key][hop, 0].exp() for key in ("policy", "improved"))
        print(f"  player {seat + 1}: its policy says: {likeliest(before, 3)}")
        if seen["search"]:
            q, visits = (seen["search"][key][hop, 0].tolist() for key in ("q", "visits"))
            value = lambda a: f"Q {q[a]:.2f}, visits {visits[a]:.0f}" if visits[a] else "not tried"
            legal = table.views.mask(seen["x"][seat, 0]).nonzero()[:, 0].tolist()
            print("    its search makes of it: " + "; ".join(
                f"{ACTIONS[a]} {before[a]:.0%} -> {after[a]:.0%} ({value(a)})" for a in legal
                if visits[a] or max(before[a], after[a]) >= 0.01))
        for who, other in sorted(zip(table.order[hop, 1:].tolist(), range(len(cells)))):
            if cells[who] < table.game.cells:
                print(f"    believes of player {who + 1}: {words[hop][other]}; expects "
                      f"{likeliest(moves[hop, other], 3)}")


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

    def remember(self, memory, table, action, seen):
        """The memory [P, B, H] after an action [P, B], if it was seen; table [7, P, B, W] is of `look`."""
        return self.follow(memory, table.unsqueeze(2), action[:, None], seen[:, None])[0][1]

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


class CompanyModel(OtherModel):
    """Models of all others that players meet, `together` for each player: a goal is read from what all of
    them did, as if at half of all tables they played alike.

    Behind the weights of each player by itself the memory [P, B, 2 H] holds what its table may be as one:
    how likely it is that all play as one hypothesis says, and the rest to 1 that each plays its own way. Who
    plays alike also changes together; where a table ceases to be alike, each is taken to play as its own past
    says, which is nearly Bayes' rule. (A hypothesis is taken for the same way to play in all models of a
    reader, which begin as copies.)

    The prior stays as the warm-up leaves it: self-play, among one's like, does not tell who may come.
    """

    def __init__(self, together, *sizes, silent):
        super().__init__(*sizes, silent=silent)
        self.together = together
        self.prior.requires_grad_(False)

    def start(self, num):
        prior = super().start(num)
        return torch.cat([prior, prior / 2], -1)

    def weigh(self, memory, prior, likely, seen):
        apart, alike = memory.chunk(2, -1)
        # players of a table side by side [L, M, B, H]
        apart, alike, prior, likely, seen = (part.unflatten(0, (-1, self.together))
                                             for part in (apart, alike, prior, likely, seen))
        with torch.no_grad():  # what a hypothesis is, is learned from each player by itself
            as_one = alike * likely.prod(1, keepdim=True)
            as_many = (apart * likely).sum(-1, keepdim=True).prod(1, keepdim=True)
            as_many = as_many * (1 - alike.sum(-1, keepdim=True))
            alike = as_one / (as_one.sum(-1, keepdim=True) + as_many)
            alike = self.drift(alike, prior / 2, seen.amax(1, keepdim=True))
        apart = super().weigh(apart, prior, likely, seen)
        return torch.cat([apart, alike], -1).flatten(0, 1)

    def weights(self, memory):
        """What a memory says of each player, by all that was seen at its table."""
        apart, alike = memory.chunk(2, -1)
        return super().weights(apart * (1 - alike.sum(-1, keepdim=True)) + alike)


class Policy(Agent):
    """An Agent that is told of the others beside its view: each one's goal, and how likely each hand."""

    def __init__(self, num_learners, views, hidden_size, num_told, seed):
        super().__init__(num_learners, views, hidden_size, seed)
        self.goals = orthogonal(num_learners, num_told, hidden_size, 0.5, seed)

    def forward(self, x, told):
        """Views [L, M, K], what is told of the others [L, M, D] -> log-probabilities of the actions
        [L, M, 7], values [L, M]."""
        return self.decide(self.view(x) + told @ self.goals, self.views.mask(x))


class Networks(nn.Module):
    """All networks of L HOP+ players, and what the warm-up leaves for all of them: the goal prior, and its
    model of others, by which imagined strangers play; these two learn no more."""

    def __init__(self, args, views, num_hops):
        super().__init__()
        others, size, dim = len(args.players) - 1, args.hidden_size, args.goal_dim
        self.policy = Policy(num_hops, views, size, others * (dim + len(SLIPS) - 1), args.seed)
        self.others = CompanyModel(others, num_hops * others, views, size, dim, args.hypotheses,
                                   args.seed + 1, silent=args.goals == "zero")
        self.known = OtherModel(1, views, size, dim, args.hypotheses, args.seed + 1)
        self.prior = GoalPrior(1, views, args.vae_size, dim, args.seed + 2)

    def forward(self, own, others, memory):
        """What players make of their own views [L, M, K], those of the others [P, M, K] and what they
        remember of these [P, M, 2 H]: a dict of what is listed at the end."""
        _, hidden, table = self.others.look(others)
        weights, hands = self.others.weights(memory)
        mean, logvar = self.others.read(weights, hidden)
        told = torch.cat([mean, hands * (not self.others.silent)], -1)
        told = told.unflatten(0, (len(own), -1)).transpose(1, 2).flatten(2)
        policy, value = self.policy(own, told)
        return {"mean": mean, "logvar": logvar,  # the others' goals [P, M, G]
                "table": table,  # [7, P, M, W]
                "told": told,  # to the policies, the same for a whole search [L, M, (N-1) * (G+3)]
                "policy": policy, "value": value}  # log-probabilities [L, M, 7], and [L, M]


# ================================================================================= world model


class Rules:
    """The true rules as the model of a search or of imagined games: states in, states out, oneself first."""

    def __init__(self, game):
        self.scratch = game  # a game of its own, into which states are put to be played

    def step(self, state, actions):
        """Plays joint moves [N, B]. -> the next state, the first player's reward [B], and where its game is
        over [B]"""
        game = self.scratch
        game.num_envs = len(state["clock"])
        for name in STATE:
            setattr(game, name, state[name])
        out = game.advance(actions.T)
        return game.state(), out["reward"][:, 0], out["ended"][:, 0]


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

    def loss(self, rows):
        """The losses of rows of `collect`, to be added up: dict of planes [N+3], reward, end.

        Means over the players that are there. A token that occurs k times counts as sqrt(k) that occur once:
        crowds are rare, and so are hunts that fail.
        """
        cell, board = rows["cell"], rows["board"]
        present, _ = what_is_left(cell, board)
        token = tokens(cell, board, rows["actions"])
        kinds, which, count = token.unique(return_inverse=True, return_counts=True)
        places, prey, pay = self.read(kinds)  # each kind goes through the networks once
        prey, pay = (x.index_select(0, which.flatten()).unflatten(0, which.shape) for x in (prey, pay))
        weight = present / count[which].sqrt()
        weight = weight / weight.sum()  # [N, B]

        place = -look_up(places.log_softmax(1).flatten(), which * (GONE + 1) + places_of(rows))
        bits = torch.tensor([HUNT_STAG, HUNT_HARE], device=cell.device)
        before, after = (x.gather(0, cell)[..., None] >> bits & 1 for x in (board, rows["next_board"]))
        prey = F.binary_cross_entropy_with_logits(prey, after.float(), reduction="none") * before
        planes = [(place * weight).sum(1), weight.new_zeros(1), (prey * weight[..., None]).sum((0, 1))]

        egos = len(rows["reward"])  # all players, or the first alone
        reward = self.earned(pay, cell, len(board) - 1)[:egos] - rows["reward"] / self.scale
        reward = (reward.square() * weight[:egos]).sum() / weight[:egos].sum()

        steps_left = rows["deadline"] - rows["clock"]
        end = self.read_end(*what_is_left(rows["next_cell"], rows["next_board"]), rows["clock"],
                            steps_left)[:egos]
        target = torch.stack([rows["terminated"], rows["over"].expand(egos, -1)], -1).float()
        end = F.binary_cross_entropy_with_logits(end, target, reduction="none").sum(-1)[present[:egos]].mean()
        left = self.read_left((board != rows["next_board"]).any(0), steps_left)
        left_then = torch.where(rows["next_left"] == steps_left - 1, ONE_LESS, rows["next_left"])
        return {"planes": torch.cat(planes), "reward": reward,
                "end": end + F.cross_entropy(left, left_then.clamp(max=ONE_LESS))}

    @torch.no_grad()
    def shrink(self, size):
        """Pulls the first weights of local and pay towards 0 by `size`: what does not matter falls silent, so
        that mixtures of actions never met in training are mostly predicted right."""
        for net in (self.local, self.pay):
            net[0].weight.sub_(net[0].weight.clamp(-size, size))


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
