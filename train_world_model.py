"""Learns the world model of the Markov stag hunt from play: what a joint move does to a player's own view.

    python train_world_model.py                        plays, and trains on three boards (a minute)
    python train_world_model.py --boards 4x4 6x6b1p6   other boards: 6x6 with one block and six players
    python train_world_model.py --stag-hunters 3       another game, learned from its play alone
    python test_obs_reward_model.py --checkpoint runs/<run name>/checkpoint.pt
    tensorboard --logdir runs                          losses by term and plane, exactness

The model gets a player's own view, the clock and what every player asks for, and predicts the next view, the
player's reward, and whether its own game and the episode end. `WorldModel` tells what is given to it and what
it learns. The run prints one moving line, then a table of what it gets right on rows that it never saw, and
leaves everything in `runs/<run name>/`.

The file from top to bottom:
    flags         what can be chosen, and what is refused
    state         what a run keeps, and its random numbers
    training      the loop, what it logs, the final report
    data          rows of mixed play, views of them, files
    measuring     what is right on rows held out
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
    boards: tuple[str, ...] = ("4x4", "8x8", "8x8b5")
    """boards to play on, as height x width and, where they differ from the game's flags, bB blocks, pP
    players, sS stags, hH hares: 5x7b2p6s2"""
    num_players: int = 4
    """players on the boards that do not say otherwise"""
    rows: int = 50_000
    """steps of the game played on each board, seen by all players"""
    num_updates: int = 2000
    """gradient steps"""
    data: tuple[str, ...] = ()
    """.npz files, or folders of runs that hold some, to learn from instead of playing"""
    save_data: bool = False
    """write the rows into the run folder, as data-<board>.npz"""
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
    gathered: float = 0.8
    """share of the episodes learned from that begin with most players on one cell; those held out are plain
    play"""
    held_out_rows: int = 5_000
    """further rows of each board that are never learned from, to measure with"""


@dataclass
class LearningArgs:
    hidden_size: int = 64
    """units in each of the two hidden layers of each network"""
    batch_size: int = 1024
    """rows of each gradient step, from all boards in equal parts"""
    learning_rate: float = 1e-2
    """step size of Adam at the start; it falls to 0 along half a cosine"""
    plane_weights: tuple[float, ...] = (2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0)
    """weight of each plane's loss: own, co-players, obstacles (nothing to learn there), stags, hares; further
    co-players take the last one's"""
    shrink: float = 0.06
    """pull on the weights of the inputs towards 0, as a share of each step of Adam"""


@dataclass
class MeasuringArgs:
    check_every: int = 250
    """gradient steps between two measurements on the rows held out"""


@dataclass
class Args(MeasuringArgs, LearningArgs, SampleArgs, RunArgs, GameArgs, FirstArgs):
    """All flags of the script; --help tells them in these groups, the last one first."""


RANGES = (
    (1, math.inf, ("rows", "held_out_rows", "num_updates", "batch_size", "check_every", "hidden_size")),
    (1, 8, ("num_players",)),
    (0, 1, ("gathered",)),
    (0, 1e9, ("learning_rate", "shrink")),
)


def check_flags(args):
    """Refuses flags that make no sense, alone or together. -> the boards by name"""
    check_ranges(args, RANGES)
    refuse_ignored(args, (
        ("--boards, which says it", True, ("height", "width", "max_blocks")),
        ("--data, which says what to learn from", bool(args.data),
         ("boards", "rows", "gathered", "save_data", "num_players")),
    ))
    if len(args.plane_weights) < 4 or not all(0 <= weight <= 1e6 for weight in args.plane_weights):
        weights = " ".join(f"{weight:g}" for weight in args.plane_weights)
        raise Refused(f"--plane-weights {weights} must be four numbers or more, from 0 to 1e6: own plane, "
                      "co-players, obstacles, stags, hares")
    check_memory(args, ((12 * args.hidden_size**2, ("hidden_size",)),
                        (20 * max(args.rows, args.held_out_rows), ("rows", "held_out_rows")),
                        (40 * args.batch_size, ("batch_size",)), (2 * args.final_time, ("final_time",))))
    if args.data:
        return {}
    if not args.boards or len(set(args.boards)) < len(args.boards):
        raise Refused(f"--boards {' '.join(args.boards)} must name one board or more, each once")
    for text in args.boards:  # before its tables are made
        cells = math.prod(int(side) for side in re.findall(r"\d+", text)[:2])
        check_memory(args, ((max(4 * cells**2, cells * args.rows // 2), ("boards", "rows")),))
    boards = {text: parse_board(text, args) for text in args.boards}
    most = max(board["num_players"] for board in boards.values())
    if most > MOST_PLAYERS:
        raise Refused(f"--boards {' '.join(args.boards)} have up to {most} players, the model counts up to "
                      f"{MOST_PLAYERS}")
    if args.plane_weights != Args.plane_weights and len(args.plane_weights) > most + 3:
        raise Refused(f"--plane-weights has {len(args.plane_weights)} numbers, but no board has more than "
                      f"{most + 3} planes")
    return boards


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

    saved = ("model", "optimizer", "generator", "updates", "seconds", "totals", "checked")
    own = ("generator",)  # what each process has for itself

    def __init__(self, args, learned):
        rewards = common_rewards(torch.cat([rows["reward"].flatten() for rows in learned.values()]))
        gives = any(others_pay(rows) for rows in learned.values())
        torch.manual_seed(args.seed)
        self.model = WorldModel(args.hidden_size, rewards, gives).to(args.device)
        self.model.load_state_dict(Processes.share(self.model.state_dict()))
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)
        self.generator = seeded(Processes.seed(args.seed), "batches", args.device)
        self.updates = 0
        self.seconds = 0.0  # from the start of the script to the last update
        self.totals = {}  # board -> sums of its losses since the last measurement
        self.checked = {}  # the last measurement

    def content(self, args):
        """What a checkpoint holds."""
        state = self.state_dict()
        return {"config": dataclasses.asdict(args), "run": state, "world_model": self.model.state_dict(),
                "others": Processes.gather({name: state[name] for name in self.own})}


def main(args):
    args = resolve_flags(args)
    boards = check_flags(args)
    prepare_torch(args)
    checkpoint = load_run(args)
    over = checkpoint is not None and checkpoint["run"]["updates"] >= args.num_updates
    if over and os.path.isfile(f"{args.resume}/results.json"):
        print(f"{args.resume} had finished: nothing was changed")
        return 0
    learned, held_out = load_files(args) if args.data else play_boards(args, boards)
    run = Run(args, learned)
    if checkpoint is not None:
        restore(run, checkpoint["run"], args)
    folder = open_run(args)
    if args.save_data and checkpoint is None:
        for name, rows in learned.items():
            save_data(os.path.join(folder, f"data-{name}.npz"), rows)
    writer = open_writer(folder, args, run.updates)
    try:
        stopped = train(args, run, learned, held_out, folder, writer)
    except NotFinite as failure:
        save_checkpoint(folder, run.content(args), "not-finite.pt")
        raise Failed(f"{failure}, after {run.updates} updates; the state is kept in {folder}/not-finite.pt, "
                     "and the last good checkpoint stays") from failure
    if stopped:
        print(f'stopped at {run.updates} updates; go on with: python {SCRIPT} --resume "{folder}"')
    elif not Processes.rank:
        report(run, held_out, folder)
    writer.close()
    return 128 + stopped if stopped else 0


def train(args, run, learned, held_out, folder, writer):
    """Draws rows and learns from them. -> 0 at the end, or the signal that stopped the run before"""
    model, optimizer = run.model, run.optimizer
    many = max(1, args.batch_size // len(learned))  # rows of each board in a gradient step
    saved, seconds_before = time.perf_counter(), run.seconds
    bar = tqdm(total=args.num_updates, initial=run.updates, unit=" updates", dynamic_ncols=True,
               mininterval=0.5, desc="training")
    stopped = 0
    with bar, Interrupt() as interrupt:
        while run.updates < args.num_updates and not stopped:
            rate = args.learning_rate * 0.5 * (1 + math.cos(math.pi * run.updates / args.num_updates))
            optimizer.param_groups[0]["lr"] = rate
            loss = 0.0
            for name, rows in learned.items():
                drawn = torch.randint(rows_of(rows), (many,), generator=run.generator, device=args.device)
                terms = model.loss(pick(rows, drawn))
                weights = plane_weights(args.plane_weights, len(rows["cell"]), args.device)
                loss = loss + (terms["planes"] * weights).sum() + terms["reward"] + terms["end"]
                each = torch.cat([terms["planes"], terms["reward"][None], terms["end"][None]])
                run.totals[name] = run.totals.get(name, 0.0) + each.detach()
            optimizer.zero_grad()
            loss.backward()
            check_finite(*Processes.mean_gradients(model, loss), "the loss")
            for part, parameter in model.named_parameters():
                check_finite(parameter.grad, f"the gradient of {part}")
            optimizer.step()
            model.shrink(args.shrink * rate)

            run.updates += 1
            run.seconds = seconds_before + time.perf_counter() - START
            bar.update()
            last = run.updates == args.num_updates
            checked = run.updates % args.check_every == 0 or run.updates in (25, 50, 100) or last
            times = Processes.times() if checked else {}
            if checked and not Processes.rank:
                checks = {name: measure(model, rows) for name, rows in held_out.items()}
                log_check(writer, run, checks, rate, times)
                exact = " ".join(f"{name} {100 * check['exact']:.2f}%" for name, check in checks.items())
                bar.set_postfix_str(f"exact {exact}", refresh=False)
            wishes = interrupt.wanted, time.perf_counter() - saved > args.save_every
            asked = last or Processes.size == 1 or run.updates % 8 == 0  # a message costs a part of an update
            stopped, due = Processes.most(*wishes) if asked else (0, 0)
            if last or stopped or due:
                saved = time.perf_counter()
                writer.flush()
                save_checkpoint(folder, run.content(args))
    return stopped


def plane_weights(weights, num_players, device):
    """The weight of each plane's loss on a board: [N+3]. Further co-players take the last co-player's."""
    players = [weights[min(player, len(weights) - 4)] for player in range(num_players)]
    return torch.tensor(players + list(weights[-3:]), device=device)


def log_check(writer, run, checks, rate, times):
    """Writes the mean losses since the last measurement, the measurement of each board, and some seconds."""
    losses, many = {}, run.updates - run.checked.get("updates", 0)
    for board, total in run.totals.items():
        names = (*plane_names(len(total) - 5), "reward", "end")
        losses |= {f"{name}/{board}": value for name, value in zip(names, (total / many).tolist())}
    numbers = {"charts/learning_rate": rate, "charts/UPS": run.updates / run.seconds, **times}
    numbers |= {f"world_model/loss_{name}": value for name, value in losses.items()}
    numbers |= {f"world_model/{key}/{board}": value for board, check in checks.items()
                for key, value in check.items()}
    for tag, value in numbers.items():
        writer.add_scalar(tag, value, run.updates)
    run.totals = {}
    run.checked = {"updates": run.updates, "seconds": round(run.seconds, 2), "losses": losses,
                   "boards": checks}


def report(run, held_out, folder):
    """Writes results.json, and prints the table of what is right on the rows held out."""
    save_json(os.path.join(folder, "results.json"), run.checked)
    rows = [["board", "obs MSE", "PSNR", "reward MSE", "views exact", "rewards exact", "ends exact", "rows"]]
    for name, check in run.checked["boards"].items():
        exact = [f"{100 * check[key]:.3f} %" for key in ("exact", "reward_exact", "end_exact")]
        rows.append([name, f"{check['obs_mse']:.2e}", f"{check['psnr']:.1f} dB", f"{check['reward_mse']:.2e}",
                     *exact, rows_of(held_out[name])])
    print_table("rows held out", rows)
    print(f"\n{run.updates} updates in {run.seconds:.0f} s. Everything is in {folder}")


# ======================================================================================== data


def parse_board(text, args):
    """The game's arguments for a board such as 8x8, 8x8b5 or 5x7b2p6s2h3: blocks, players, stags, hares."""
    found = re.fullmatch(r"(\d+)x(\d+)(?:b(\d+))?(?:p(\d+))?(?:s(\d+))?(?:h(\d+))?", text)
    if not found:
        raise Refused(f"--boards {text!r} is no board; write height x width and what differs, such as 4x4, "
                      "8x8b5, 5x7b2p6")
    board = {field.name: getattr(args, field.name) for field in dataclasses.fields(GameArgs)}
    names = ("height", "width", "max_blocks", "num_players", "stags", "hares")
    given = {name: int(value) for name, value in zip(names, found.groups()) if value is not None}
    board = {**board, "num_players": args.num_players, **given}
    try:
        BatchedStagHunt(1, **board)
    except Refused as refusal:
        raise Refused(f"--boards {text}: {refusal}") from refusal
    return board


def play_boards(args, boards):
    """Rows of mixed play on each board. -> {name: rows to learn from}, {name: rows held out}"""
    learned, held_out = {}, {}
    for name, board in tqdm(boards.items(), desc="playing", leave=False, dynamic_ncols=True):
        learned[name] = collect(board, args.rows, f"{args.seed} {name}", args.device, args.gathered)
        held_out[name] = collect(board, args.held_out_rows, f"{args.seed} {name} held out", args.device)
    return learned, held_out


def load_files(args):
    """The rows of --data; of each file the last are held out. -> {name: rows}, {name: rows held out}"""
    learned, held_out = {}, {}
    for path in args.data:
        files = [path]
        if os.path.isdir(path):
            files = sorted(os.path.join(path, name) for name in os.listdir(path) if name.endswith(".npz"))
        if not files:
            raise Refused(f"--data {path}: the folder holds no .npz file")
        for file in files:
            name = os.path.splitext(os.path.basename(file))[0]
            name = file if name in learned else name
            rows = load_data(file, f"--data {file}", args.device)
            learned[name], held_out[name] = split_rows(rows, args.held_out_rows, file)
    return learned, held_out


def split_rows(rows, many, name):
    """Cuts the last rows off, where an episode ends. -> rows to learn from, rows held out"""
    cut, episode = rows_of(rows) - min(many, rows_of(rows) // 5), rows["episode"]
    while 0 < cut < rows_of(rows) and episode[cut] == episode[cut - 1]:
        cut -= 1
    if not 0 < cut < rows_of(rows):
        raise Refused(f"--data {name}: {rows_of(rows)} rows are too few, or one episode, to hold some out")
    return pick(rows, slice(0, cut)), pick(rows, slice(cut, None))


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


def common_rewards(reward, most=256):
    """The rewards that occur most often, to the fourth digit, and 0: a list of numbers."""
    values, counts = reward.double().mul(1e4).round().unique(return_counts=True)
    values = values[counts.argsort(descending=True, stable=True)[:most]] / 1e4
    return sorted({0.0, *values.tolist()} | ({1.0} if len(values) < 2 else set()))


def others_pay(rows):
    """Whether what a player gets depends on more than its token: then those on other cells pay, too."""
    egos = len(rows["reward"])
    present = (rows["cell"] < len(rows["board"]) - 1)[:egos]
    token, reward = tokens(rows["cell"], rows["board"], rows["actions"])[:egos], rows["reward"][present]
    kinds, which = token[present].unique(return_inverse=True)
    low, high = (torch.zeros(len(kinds)).to(reward).scatter_reduce(0, which, reward, how, include_self=False)
                 for how in ("amin", "amax"))
    return bool((high - low).max() > 1e-3)


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


def save_data(path, rows):
    """Writes rows as a .npz file of planes."""
    columns = {"observation": views_of(rows), "next_observation": views_of(rows, after=True),
               "step": rows["clock"], "steps_left": rows["deadline"] - rows["clock"],
               "next_steps_left": rows["next_left"]}
    columns |= {name: rows[name].T for name in ("actions", "reward", "terminated")}
    columns |= {name: rows[name] for name in ("over", "episode")}
    file = io.BytesIO()
    np.savez_compressed(file, **{name: part.cpu().numpy() for name, part in columns.items()})
    write_file(path, file.getvalue())


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


# =================================================================================== measuring


@torch.no_grad()
def measure(model, rows):
    """What `forward` gets right on rows: obs_mse, psnr, reward_mse, exact, reward_exact, end_exact."""
    total = {}
    for begin in range(0, rows_of(rows), 2048):  # what fits into the memory
        part = pick(rows, slice(begin, begin + 2048))
        out = model(views_of(part), part["actions"].T, part["clock"], part["deadline"] - part["clock"])
        true, reward_error = views_of(part, after=True), out["reward"] - part["reward"][0]
        ends = (out["terminated"] > 0.5) == part["terminated"][0]
        ends &= (out["over"] > 0.5) == part["over"]
        ends &= out["steps_left"] == part["next_left"]
        sums = {"obs_mse": (out["view"] - true).double().square().mean((1, 2, 3)),
                "reward_mse": reward_error.double().square(),
                "exact": ((out["view"] > 0.5) == true).flatten(1).all(1),
                "reward_exact": reward_error.abs() <= 0.01, "end_exact": ends}
        total = {name: total.get(name, 0.0) + value.sum().item() for name, value in sums.items()}
    result = {name: value / rows_of(rows) for name, value in total.items()}
    return {**result, "psnr": psnr(result["obs_mse"])}


def psnr(mse):
    """Peak signal-to-noise ratio in dB, the peak being 1."""
    return 10 * math.log10(1 / max(mse, 1e-30))


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
