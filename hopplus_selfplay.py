"""HOP+ in the Markov stag hunt: infer the others' goals, predict their moves, imagine the world, search it, and learn.

    python hopplus_selfplay.py                              four HOP+ players learn to hunt together
    python hopplus_selfplay.py --players hop ns ns ns       one among three stag hunters; any mix in any seat
    python hopplus_selfplay.py --mode adapt --checkpoint runs/x --players hop nh nh nh      a trained one among strangers
    python hopplus_selfplay.py --mode watch --checkpoint runs/x                             look into their heads
    tensorboard --logdir runs

Every seat that says `hop` is a player with networks of its own: policy and value, for each other player a model of its
actions (MOA) and an inference of its goal, a goal prior, a world model. All of them are stacked and run as one batched
program. A run first warms up offline on rule-based play (goals, models of others, world model), then plays itself:

    act       believe something about each other player's goal; search the position in several trees, each with a draw
              of the goals from the belief; play the improved policy that the search returns
    learn     the models of others and the beliefs from what was really played, and from imagined meetings with
              strangers; the policy and the value from the search's result, and by PPO from imagined games

The run prints one moving line, then tables of returns with and without search, and leaves everything in
`runs/<run name>/`.

The file from top to bottom:
    arguments    the flags
    game         the batched stag hunt and its rules
    players      rule-based players, mixes of them, players from a file
    networks     what a player sees; policy and value; goal prior, goal inference, model of other agents
    world model  from a view and a joint move to the next view: learned, or the true rules
    search       Monte-Carlo tree search in all trees at once
    beliefs      who sits where, what each believes of the others, one joint move
    learning     warm-up, real games, imagined games, the losses
    outputs      run folder, pictures, progress
    main         training, adaptation, watching
"""

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import time
import zlib
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist
from types import SimpleNamespace
from typing import Literal

START = time.perf_counter()  # seconds are counted from here, before the slow imports

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from tqdm import tqdm


# ================================================================================ arguments


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
    """one number for each player: a stag is split in proportion to them (default: equally)"""
    prosocial: bool = False
    """each player gets the mean of all players' rewards instead of its own"""
    dynamic_final_time: bool = False
    """the episode also ends five steps after the first catch"""


@dataclass
class RunArgs:
    seed: int = 1
    """seed of every random generator of the run"""
    device: str = "cpu"
    """where the tensors live: cpu, cuda, cuda:1, ..."""
    threads: int = 1
    """threads that PyTorch may use; more help on a large network and an idle machine, and change the last digits"""
    runs_dir: str = "runs"
    """folder under which each run has its own folder"""
    run_name: str | None = None
    """name of the run's folder (default: board, script, seed and time)"""
    resume: str | None = None
    """folder of a run to go on with, exactly as if it had never stopped; its flags are taken over"""
    save_every: float = 120.0
    """seconds between two checkpoints"""


@dataclass
class Args(RunArgs, GameArgs):
    mode: Literal["train", "adapt", "watch"] = "train"
    """train; or take a trained player of --checkpoint among others (adapt); or look at a game step by step (watch)"""
    players: tuple[str, ...] = ("hop", "hop", "hop", "hop")
    """who sits where: hop, random, ns, nh, nsh, patient-28, noisy-ns, noisy-nh, switch-ns-nh, switch-nh-ns, mix:A,B
    (drawn anew each episode), file.py:Class (your own), runs/x/checkpoint.pt:player_1 (by ppo_single_player.py)"""
    checkpoint: str | None = None
    """folder of the run whose players are taken for --mode adapt and watch"""
    total_timesteps: int = 160_000
    """real environment steps of the run; one is one joint move of all players"""
    num_envs: int = 64
    """games played side by side"""
    num_steps: int = 16
    """real steps of each game between two updates"""
    goals: Literal["latent", "prey", "zero", "none"] = "latent"
    """what is inferred of the others: a learned goal (HOP+); stag or hare (HOP); nothing, every goal being 0; or nothing
    at all, the others being predicted to act at random"""
    goal_dim: int = 16
    """numbers in a goal"""
    hypotheses: int = 8
    """ways to play among which the inference of a goal tells"""
    selector: Literal["max", "min"] = "max"
    """the goal in hindsight is the state within the horizon that the reader values most, or least"""
    horizon: int = 35
    """steps within which a goal is looked for in hindsight"""
    moa_samples: Literal["present", "rewarded"] = "present"
    """of what is really played, the models of others learn from all who are there, or only from those that went on to
    catch something"""
    search: Literal["mcts", "one-step", "none"] = "mcts"
    """plan by tree search, by looking one move ahead, or not at all"""
    search_model: Literal["learned", "rules"] = "learned"
    """what moves the board in a search and in imagined games"""
    simulations: int = 16
    """simulations of a decision, all its trees together"""
    trees: int = 2
    """trees of a decision, each with a draw of the others' goals from the belief"""
    beta: float = 6.0
    """the search plays softmax(log-policy + beta * Q), Q divided by what is expected and --prize-floor on top (or, if that
    is None, in the units of the game)"""
    widening: float = 1.5
    """an action tried n times has at most widening * sqrt(n) outcomes"""
    imagined_ratio: float = 12.0
    """imagined steps for each real one, for every player; 0 for none"""
    strangers: float = 0.75
    """share of the imagined games that are meetings with players like those of the warm-up, and do not go on from real games"""
    tremble: float = 0.2
    """share of the imagined meetings with strangers in which these draw some of their actions, up to all, at random"""
    fresh: float = 0.5
    """share of the imagined games that start with an episode, further to those that start anywhere in one"""
    buffer: Literal["transitions", "episodes"] = "transitions"
    """the models of others learn from single steps of a buffer; with episodes the inference does, too, from whole stretches"""
    buffer_size: int = 32_768
    """real steps that the buffer holds, the last ones"""
    vae_checkpoint: str | None = None
    """run folder or checkpoint of pretrain_vae.py, in place of that part of the warm-up"""
    world_model_checkpoint: str | None = None
    """run folder or checkpoint of train_world_model.py, in place of that part of the warm-up"""
    warmup_games: int = 256
    """meetings of rule-based players played side by side for the warm-up, each of four episodes or more"""
    warmup_epochs: int = 8
    """times that the warm-up of goals and models of others goes through them"""
    warmup_updates: int = 1_200
    """gradient steps of the world model in the warm-up"""
    mix: tuple[str, ...] = ("ns", "nh")
    """rule-based players of the warm-up"""
    rehearse: bool = True
    """go on learning from the games of the warm-up beside the real ones, so that they are not forgotten"""
    hidden_size: int = 64
    """units in the hidden layers"""
    vae_size: int = 128
    """units in the hidden layers of the goal prior"""
    learning_rate: float = 2.5e-3
    """step size of Adam for policy and value; it falls to 0 over the run"""
    moa_learning_rate: float = 2e-3
    """step size of Adam for the models of others and the inference of goals; the latter's falls to a tenth over the run,
    the former's to 0 with the fourth root of what is left of it"""
    moa_epochs: int = 2
    """times that the models of others go through the steps just played"""
    moa_minibatches: int = 12
    """further steps of the models alone for each update, on minibatches from the buffer"""
    moa_minibatch_size: int = 512
    """samples of such a minibatch, for each model"""
    inference_weight: float = 0.05
    """weight of the goal inference's own loss beside that of the predicted actions"""
    gamma: float = 0.99
    """discount of later rewards"""
    gae_lambda: float = 0.95
    """lambda of the generalised advantage estimate"""
    num_minibatches: int = 6
    """pieces into which the imagined steps of an update are cut"""
    update_epochs: int = 4
    """times that an update goes through its data"""
    prize_floor: float | None = 0.5
    """divide each advantage by what the player expects then and this on top: prizes count by how they compare, not by
    their size; None leaves them as they are"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch, for each learner on its own"""
    clip_coef: float = 0.2
    """how far the ratio of new to old probability may move before the policy loss is flat"""
    clip_vloss: bool = False
    """clip the change of the value as well, by clip_coef in units of the scaled reward"""
    ent_coef: float = 0.02
    """weight of the entropy bonus at the start; it falls to 0 over the run"""
    soft_coef: float = 0.05
    """at the start, what a player earns on top for each nat of its policy's entropy, in every imagined step in
    which others are there, strangers apart"""
    soft_until: float = 0.4
    """share of the run over which soft_coef falls to 0"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    search_coef: float = 1.0
    """weight of learning the search's result"""
    reward_scale: float = 0.2
    """rewards are multiplied by this for learning; whatever is logged is in the units of the game"""
    max_grad_norm: float = 0.5
    """gradients of a player longer than this are shortened to it"""
    target_kl: float | None = None
    """a player whose policy moved further than this in an update sits out the rest of it"""
    compare_episodes: int = 200
    """episodes played with search and as many without, after 1, 2, 4, 8, ... updates: what search is worth; 0 for none"""
    eval_episodes: int = 4_000
    """episodes of the evaluation with search; 0 for none"""
    eval_policy_episodes: int = 20_000
    """episodes of the evaluation without search; 0 for none"""
    moa_decisions: int = 2_000
    """decisions of HOP+ players on which the models of others are scored at the end, each searched 16 times"""
    thresholds: tuple[float, ...] = (2.5, 2.7, 2.8, 2.85)
    """mean returns whose first reaching is timed, by the mean of the last 500 episodes"""
    picture_every: float = 60.0
    """seconds between two pictures of an episode"""
    episodes: int = 20
    """--mode adapt: episodes of a meeting, a row of episodes with the same players"""
    repeats: int = 500
    """--mode adapt: meetings of each line-up"""
    adapt_moa: bool = False
    """--mode adapt: the models of others go on learning, too"""


# ======================================================================================== game


class Refused(ValueError):
    """Flags or files that cannot be used: told in one line that names them, with exit code 2."""


ACTIONS = ("up", "down", "left", "right", "stay", "hunt stag", "hunt hare")
NUM_ACTIONS = len(ACTIONS)
STAY, HUNT_STAG, HUNT_HARE = 4, 5, 6
# What one may do on a cell is a set of actions, kept as a byte: bit a is set where action a is legal.
STAY_BIT, STAG_BIT, HARE_BIT = 1 << STAY, 1 << HUNT_STAG, 1 << HUNT_HARE
GEOGRAPHY_BITS = STAG_BIT - 1  # the four moves and staying: what is left of a cell without its prey

# Straight tromino, corner tromino, straight tetromino, L tetromino: (row, column) of each cell.
BLOCK_SHAPES = (
    ((0, 0), (0, 1), (0, 2)),
    ((0, 0), (1, 0), (1, 1)),
    ((0, 0), (0, 1), (0, 2), (0, 3)),
    ((0, 0), (1, 0), (2, 0), (2, 1)),
)


def turned_blocks():
    """Every block shape in its four turns, corner at (0, 0): [shape * turn, 4 cells, (row, column)]."""
    table = []
    for shape in BLOCK_SHAPES:
        for _ in range(4):
            shape = [(column, -row) for row, column in shape]
            top, left = min(r for r, _ in shape), min(c for _, c in shape)
            shape = [(r - top, c - left) for r, c in shape]
            table.append(shape + shape[-1:] * (4 - len(shape)))  # a tromino names its last cell twice
    return torch.tensor(table)


def check_board(height, width, num_players, stags, hares, max_blocks, final_time, stag_reward, hare_reward,
                stag_hunters, time_reward, strengths):
    """Refuse a game that cannot be played, with one line that names the arguments and their values."""
    largest = 1e30  # far inside the range of float32, so that no reward can overflow
    for flag, value, least in (("--height", height, 1), ("--width", width, 1), ("--num-players", num_players, 1),
                               ("--stags", stags, 0), ("--hares", hares, 0), ("--max-blocks", max_blocks, 0),
                               ("--final-time", final_time, 1), ("--stag-hunters", stag_hunters, 1)):
        if not hasattr(value, "__index__"):
            raise Refused(f"{flag} {value!r} must be a whole number")
        if value < least:
            raise Refused(f"{flag} {value} must be at least {least}")
    for flag, value, least in (("--stag-reward", stag_reward, 0), ("--hare-reward", hare_reward, 0),
                               ("--time-reward", time_reward, -largest)):
        if not hasattr(value, "__float__") or not least <= value <= largest:  # nan fails every comparison
            raise Refused(f"{flag} {value!r} must be a finite number from {least:g} to {largest:g}")
    if strengths is not None:
        if not hasattr(strengths, "__len__") or len(strengths) != num_players:
            raise Refused(f"--strengths {strengths!r} must be {num_players} numbers, one for each of "
                             f"--num-players {num_players}")
        for strength in strengths:
            if not hasattr(strength, "__float__") or not 1 / largest <= strength <= largest:
                raise Refused(f"--strengths {strengths!r} must be positive and finite numbers, "
                                 f"but one of them is {strength!r}")
    if stags + hares == 0:
        raise Refused("--stags 0 and --hares 0 leave no prey at all: a game needs at least one")
    if stags > 0 and num_players < stag_hunters:
        raise Refused(f"--num-players {num_players} can never catch a stag that needs --stag-hunters "
                         f"{stag_hunters}: play with more players or with --stags 0")
    cells, pieces = height * width - 4 * max_blocks, num_players + stags + hares
    if cells < pieces:
        raise Refused(f"--height {height} x --width {width} minus 4 cells for each of --max-blocks {max_blocks} "
                         f"leaves {cells} cells for {pieces} pieces ({num_players} players, {stags} stags, "
                         f"{hares} hares)")


class BatchedStagHunt:
    """Many stag hunts at once, each tensor running over (environment, player).

    The rules are those of `envs/stag_hunt.py`: hunts are settled where the players stood, then all move;
    a caught prey and its hunters leave at once; an illegal action is played, and recorded, as stay.

    Inside, the environment is the last dimension, so that every operation runs over long rows; what is
    handed out is turned round to [environment, player, ...] as a view.

        cell      [N, B]      where each player stands; H*W once it has left
        board     [H*W+1, B]  the actions that are legal on each cell, as bits; 0 on an obstacle. The prey
                              is told by its hunting bit, and the last row, for those that left, is "stay"
        previous  [N, B]      the last action as it was played
        clock     [B]         steps played
        deadline  [B]         the step at which the clock ends the episode
    """

    def __init__(self, num_envs, height=4, width=4, num_players=4, stags=1, hares=4, max_blocks=0, final_time=35,
                 stag_reward=10.0, hare_reward=1.0, stag_hunters=2, time_reward=0.0, strengths=None,
                 prosocial=False, dynamic_final_time=False, device="cpu", seed=0, dtype=torch.uint8):
        check_board(height, width, num_players, stags, hares, max_blocks, final_time, stag_reward, hare_reward,
                    stag_hunters, time_reward, strengths)
        if num_envs < 1:
            raise Refused(f"--num-envs {num_envs} must be at least 1")
        if num_players > 16:
            raise Refused(f"--num-players {num_players} is more than the 16 that the batched game can hold")
        self.num_envs, self.height, self.width, self.num_players = num_envs, height, width, num_players
        self.cells, self.stags, self.hares, self.max_blocks = height * width, stags, hares, max_blocks
        self.final_time, self.prosocial, self.dynamic_final_time = final_time, prosocial, dynamic_final_time
        self.device, self.dtype = torch.device(device), dtype
        self.generator = torch.Generator(self.device).manual_seed(seed)

        self.moves = torch.tensor([-width, width, -1, 1, 0, 0, 0], device=self.device)
        self.action_bits = torch.arange(NUM_ACTIONS, dtype=torch.uint8, device=self.device)
        # 420 numbers can be shared out evenly among 1, 2, ... 7 legal actions: [bits * 420 + number] -> action.
        choices = [[a for a in range(NUM_ACTIONS) if bits >> a & 1] or [STAY] for bits in range(128)]
        self.choice = torch.tensor([c[n % len(c)] for c in choices for n in range(420)], dtype=torch.uint8,
                                   device=self.device)
        self.blocks = turned_blocks().to(self.device)
        self._tabulate_catches(stag_reward, hare_reward, stag_hunters, time_reward, strengths)
        self.pool_next = self.pool_size = max(num_envs, 256)  # nothing drawn yet
        self.cell = torch.empty(num_players, num_envs, dtype=torch.int64, device=self.device)
        self.board = torch.empty(self.cells + 1, num_envs, dtype=torch.uint8, device=self.device)
        self.previous = torch.empty(num_players, num_envs, dtype=torch.uint8, device=self.device)
        self.clock = torch.empty(num_envs, dtype=torch.int64, device=self.device)
        self.deadline = torch.empty(num_envs, dtype=torch.int64, device=self.device)
        self.reset()

    def _tabulate_catches(self, stag_reward, hare_reward, stag_hunters, time_reward, strengths):
        """Tables of what each set of hunters on a cell catches and earns.

        A set of players is a number with a bit for each. Sums are taken in double precision over values
        rounded to single, which is exact, so the order of the players cannot show even in the last bit.
        """
        n = self.num_players
        strength = torch.tensor([1.0] * n if strengths is None else list(strengths), dtype=torch.float32).double()
        sets = torch.arange(1 << n)
        member = (sets >> torch.arange(n)[:, None] & 1).double()  # [player, set]
        count = member.sum(0)
        stag = member * stag_reward * strength[:, None] / (member * strength[:, None]).sum(0).clamp(min=1e-300)
        stag = torch.where(count >= stag_hunters, stag, 0.0)
        hare = member * hare_reward / count.clamp(min=1)
        share = torch.stack([stag, hare], 1).float().double() + time_reward  # [player, prey, set]
        caught = torch.stack([count >= stag_hunters, count >= 1])  # [prey, set]
        code = torch.uint8 if n <= 8 else torch.int32
        self.member_bit = (1 << torch.arange(n)).to(code).to(self.device)[:, None]
        self.share = share.float().flatten().to(self.device)
        self.share_offset = (torch.arange(n, dtype=torch.int32) << (n + 1))[:, None].to(self.device)
        self.caught = caught.flatten().to(self.device)

    # ------------------------------------------------------------------------ drawing new boards

    def draw_boards(self, n):
        """Draws n starts: prey and players on distinct free cells, uniformly. -> cell [N, n], board [H*W+1, n]"""
        free = self.draw_free(n)
        pieces = self.num_players + self.stags + self.hares
        keys = torch.rand(n, self.cells, generator=self.generator, device=self.device)
        spot = keys.masked_fill_(~free.flatten(1), -1.0).topk(pieces, -1).indices  # [n, piece]
        padded = torch.nn.functional.pad(free, (1, 1, 1, 1))
        board = torch.full((n, self.height, self.width), STAY_BIT, dtype=torch.uint8, device=self.device)
        board |= padded[:, :-2, 1:-1].to(torch.uint8) << 0
        board |= padded[:, 2:, 1:-1].to(torch.uint8) << 1
        board |= padded[:, 1:-1, :-2].to(torch.uint8) << 2
        board |= padded[:, 1:-1, 2:].to(torch.uint8) << 3
        board = (board * free).flatten(1)
        prey = torch.tensor([STAG_BIT] * self.stags + [HARE_BIT] * self.hares, dtype=torch.uint8, device=self.device)
        board.scatter_add_(1, spot[:, self.num_players:], prey.expand(n, -1))
        board = torch.nn.functional.pad(board, (0, 1), value=STAY_BIT)
        return spot[:, :self.num_players].T.contiguous(), board.T.contiguous()

    def place_blocks(self, free):
        """Tries max_blocks obstacles on each of the boards [n, H, W], leaving out those that do not fit."""
        n = len(free)
        for _ in range(self.max_blocks):
            shape = torch.randint(len(self.blocks), (n,), generator=self.generator, device=self.device)
            place = torch.randint(self.cells, (n, 1), generator=self.generator, device=self.device)
            row = place // self.width + self.blocks[shape, :, 0]  # [n, 4]
            column = place % self.width + self.blocks[shape, :, 1]
            inside = (row < self.height) & (column < self.width)
            spot = row.clamp(max=self.height - 1) * self.width + column.clamp(max=self.width - 1)
            empty = free.flatten(1).gather(1, spot)
            fits = (inside & empty).all(1, keepdim=True)
            free = free.flatten(1).scatter(1, spot, ~fits & empty).view_as(free)
        return free

    def cut_boards(self, free):
        """Which of the boards [n, H, W] have free cells that cannot reach one another: [n]."""
        reached = torch.zeros_like(free).flatten(1)
        reached.scatter_(1, free.flatten(1).to(torch.uint8).argmax(1, keepdim=True), True)
        reached = reached.view_as(free)
        while True:  # flood from the first free cell
            wider = reached.clone()
            wider[:, 1:] |= reached[:, :-1]
            wider[:, :-1] |= reached[:, 1:]
            wider[:, :, 1:] |= reached[:, :, :-1]
            wider[:, :, :-1] |= reached[:, :, 1:]
            wider &= free
            if torch.equal(wider, reached):
                return (reached != free).flatten(1).any(1)
            reached = wider

    def draw_free(self, n):
        """Draws the free cells of n boards: [n, H, W]."""
        free = self.place_blocks(torch.ones(n, self.height, self.width, dtype=torch.bool, device=self.device))
        if not self.max_blocks:
            return free
        cut = self.cut_boards(free).nonzero()[:, 0]
        while len(cut):  # the free cells must stay connected: such a draw is thrown away whole
            again = torch.ones(len(cut), self.height, self.width, dtype=torch.bool, device=self.device)
            free[cut] = self.place_blocks(again)
            cut = cut[self.cut_boards(free[cut])]
        return free

    def reset(self, which=None):
        """Starts new episodes where `which` [B] says so (everywhere by default) and returns the observation."""
        which = torch.arange(self.num_envs, device=self.device) if which is None else which.nonzero()[:, 0]
        start, n = self.pool_next, len(which)
        if start + n > self.pool_size:  # boards are drawn in bulk and each is used once
            self.pool_cell, self.pool_board = self.draw_boards(self.pool_size)
            start = 0
        self.pool_next = start + n
        self.cell.index_copy_(1, which, self.pool_cell[:, start:start + n])
        self.board.index_copy_(1, which, self.pool_board[:, start:start + n])
        self.previous = self.previous.index_fill(1, which, STAY)
        self.clock = self.clock.index_fill(0, which, 0)
        self.deadline = self.deadline.index_fill(0, which, self.final_time)
        return self.observe()

    # ------------------------------------------------------------------------------------ playing

    def legal_bits(self):
        """The legal actions of each player as bits: [N, B]."""
        return self.board.gather(0, self.cell)

    def advance(self, actions):
        """Plays one joint move [B, N] and does not reset.

        -> dict of reward [B, N], action as played [B, N], present when the step began [B, N], left in this
        step [B, N], still here after it [B, N], terminated [B] and truncated [B] (the episode).
        """
        bits = self.legal_bits()
        action = torch.where((actions >= 0) & (actions < NUM_ACTIONS), actions, STAY).T.to(torch.uint8)  # [N, B]
        action = torch.where((bits >> action & 1).bool(), action, STAY)
        present = self.cell < self.cells

        # Hunts, settled where the players stand. A cell holds at most one prey, so all who hunt there hunt it.
        hunting = action >= HUNT_STAG
        # Up to 256 cells fit a byte, with room for "has left"; long rows of bytes are what is fast here.
        cell = self.cell.to(torch.uint8 if self.cells < 256 else torch.int32)
        together = cell[:, None] == cell  # [j, i, B]
        hunters = (together * (hunting * self.member_bit)[:, None]).sum(0, dtype=self.member_bit.dtype)  # a set, [i, B]
        case = (bits >> HUNT_HARE).int() * (1 << self.num_players) + hunters.int()
        caught = self.caught.index_select(0, case.view(-1)).view_as(case)  # the prey on my cell, by whomever
        reward = self.share.index_select(0, (case + self.share_offset).view(-1)).view_as(case) * present
        if self.prosocial:
            reward = (reward.double().sum(0) / self.num_players).float() * present
        left = caught & hunting
        self.board.scatter_(0, self.cell, torch.where(caught, bits & GEOGRAPHY_BITS, bits))

        step = self.moves.index_select(0, action.view(-1).int()).view_as(self.cell)
        self.cell = torch.where(left, self.cells, self.cell + step)
        self.previous = action
        self.clock = self.clock + 1
        if self.dynamic_final_time:
            after_catch = torch.where(caught.any(0), self.clock + 5, self.final_time)
            self.deadline = torch.minimum(self.deadline, after_catch)
        here = self.cell < self.cells
        terminated = (self.board.amax(0) < STAG_BIT) | ~here.any(0)
        truncated = (self.clock >= self.deadline) & ~terminated
        return {"reward": reward.T, "action": action.T, "present": present.T, "left": left.T,
                "here": here.T, "terminated": terminated, "truncated": truncated}

    def step(self, actions):
        """Plays one joint move [B, N] and begins new episodes where one ended.

        -> observation, reward [B, N], terminated [B, N], truncated [B, N], info. Where the episode ended, the
        observation is the first of the next one. A player's game is terminated in the step in which it
        leaves or the episode terminates; once it has left, all is 0 for it until the next episode.
        """
        out = self.advance(actions)
        terminated = out["left"] | (out["terminated"][:, None] & out["here"])
        truncated = out["truncated"][:, None] & out["here"]
        out["over"] = out["terminated"] | out["truncated"]
        return self.reset(out["over"]), out["reward"], terminated, truncated, out

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
        return {
            "observation": planes.view(n, n + 3, self.height, self.width, b).permute(4, 0, 2, 3, 1),
            "action_mask": mask.view(torch.bool).permute(2, 0, 1),
            "actions": previous.transpose(0, 1),
            "step": self.clock,
            "steps_left": self.deadline - self.clock,
        }

    def random_actions(self):
        """Uniformly drawn legal actions [B, N]."""
        number = torch.randint(420, self.cell.shape, generator=self.generator, dtype=torch.int32, device=self.device)
        index = self.legal_bits().int() * 420 + number
        return self.choice.index_select(0, index.view(-1)).view_as(index).T

    # -------------------------------------------------------------------------------------- state

    def get_state(self):
        """All that the future depends on, as a dict of copies; the environment first in each tensor."""
        return {"cell": self.cell.T.clone(), "board": self.board.T.clone(), "previous": self.previous.T.clone(),
                "clock": self.clock.clone(), "deadline": self.deadline.clone(),
                "pool": (self.pool_cell.clone(), self.pool_board.clone(), self.pool_next),
                "generator": self.generator.get_state()}

    def set_state(self, state):
        """Goes on from what get_state gave; without "pool" and "generator", from that position alone."""
        for name in ("cell", "board", "previous"):
            setattr(self, name, state[name].T.to(self.device).clone(memory_format=torch.contiguous_format))
        self.clock, self.deadline = state["clock"].to(self.device).clone(), state["deadline"].to(self.device).clone()
        if "pool" in state:
            self.pool_cell, self.pool_board, self.pool_next = state["pool"]
            self.generator.set_state(state["generator"])


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
PLAYER_NAMES = "random, ns, nh, nsh, patient-K (such as patient-28), noisy-ns, noisy-nh, switch-ns-nh, switch-nh-ns"


def player_rule(name):
    """The row of RULES for a rule-based player's name; None where it is no such name."""
    prefix, _, number = name.partition("-")
    if prefix == "patient" and number.isdecimal():
        return (int(number), True, 0.0, False)
    return RULES.get(name)


def path_lengths(board, targets, height, width):
    """Steps from each cell to the nearest target around the obstacles: [H*W, B]; 1000 and more where there is none."""
    far = 1000
    free = (board[:height * width] != 0).view(height, width, -1)
    length = torch.where(targets.view_as(free), 0, far).to(torch.int16)
    while True:
        near = torch.nn.functional.pad(length, (0, 0, 1, 1, 1, 1), value=far)
        near = torch.minimum(torch.minimum(near[:-2, 1:-1], near[2:, 1:-1]),
                             torch.minimum(near[1:-1, :-2], near[1:-1, 2:]))
        shorter = torch.where(free, torch.minimum(length, near + 1), far)
        if torch.equal(shorter, length):
            return length.flatten(0, 1)
        length = shorter


def seeking_probabilities(game, prey_bit):
    """The action probabilities of a player that seeks the nearest prey of one kind, in every seat: [7, N, B]."""
    here = game.board[:game.cells]
    targets = here & prey_bit != 0
    length = path_lengths(game.board, targets, game.height, game.width)
    length = torch.nn.functional.pad(length, (0, 0, 0, 1), value=0)  # those that have left
    bits = game.legal_bits()
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


def rule_probabilities(game, rule, second_half):
    """The exact action probabilities of rule-based players: [B, N, 7].

    rule [B, N, 4] holds each seat's row of RULES, second_half [B] is true in the second half of a meeting.
    """
    until, falls_back, noise, swaps = rule.permute(2, 1, 0)  # each [N, B]
    stag_left = (game.board & STAG_BIT).amax(0) != 0
    seeks_stag = (game.clock < until) ^ (swaps.bool() & second_half)
    seeks_stag &= stag_left | ~falls_back.bool()
    goal = torch.where(seeks_stag, seeking_probabilities(game, STAG_BIT), seeking_probabilities(game, HARE_BIT))
    legal = (game.legal_bits() >> game.action_bits[:, None, None] & 1).float()
    return ((1 - noise) * goal + noise * (legal / legal.sum(0))).permute(2, 1, 0)


def sample_actions(probabilities, generator):
    """Draws an action from each row of probabilities [..., A]; one of probability 0 is never drawn."""
    total = probabilities.cumsum(-1)
    number = torch.rand(total.shape[:-1] + (1,), generator=generator, device=total.device) * (1 - 1e-6)
    return (total <= number * total[..., -1:]).sum(-1)


def load_player_class(name):
    """Loads the class named by `file.py:Class` from a user's own file."""
    path, _, class_name = name.rpartition(":")
    if not os.path.isfile(path):
        raise Refused(f"--players {name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"player_file_{os.path.abspath(path)}", path)
    if spec is None:
        raise Refused(f"--players {name}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Refused(f"--players {name}: {path} does not run: {type(error).__name__}: {error}") from error
    if not isinstance(getattr(module, class_name, None), type):
        raise Refused(f"--players {name}: {path} has no class {class_name}")
    if not callable(getattr(module, class_name)) or not hasattr(getattr(module, class_name), "act"):
        raise Refused(f"--players {name}: class {class_name} has no method act(observation, action_mask, step, "
                         "generator)")
    return getattr(module, class_name)


class UserPlayer:
    """A player from the user's own file in one seat, asked in batches and checked at every answer."""

    def __init__(self, name, game):
        player_class = load_player_class(name)
        try:
            self.player = player_class()
        except Exception as error:
            raise Refused(f"--players {name}: {player_class.__name__}() fails: {error}") from error
        self.name = name
        probe = game.observe()  # a wrong answer shows before anything has been written
        try:
            self.reset(torch.ones(game.num_envs, dtype=torch.bool, device=game.device))
            self.act(probe, 0, torch.Generator(game.device).manual_seed(0))
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"--players {name}: fails in its first answer: {type(error).__name__}: {error}") from error

    def reset(self, which):
        if hasattr(self.player, "reset"):
            self.player.reset(which)

    def act(self, observation, seat, generator):
        """The actions [B] of this player in a seat, from the observations of all players."""
        action = self.player.act(observation["observation"][:, seat], observation["action_mask"][:, seat],
                                 observation["step"], generator)
        expected = (len(observation["step"]),)
        if not isinstance(action, torch.Tensor) or action.shape != expected:
            shape = tuple(action.shape) if isinstance(action, torch.Tensor) else type(action).__name__
            raise Refused(f"--players {self.name}: act returned {shape}, not a tensor of shape {expected}")
        if action.dtype.is_floating_point or action.dtype.is_complex or action.dtype == torch.bool:
            raise Refused(f"--players {self.name}: act returned {action.dtype}, not a tensor of integers")
        return action


class Lineup:
    """Who sits where: rule-based players, mixes of them drawn anew each episode, and players from files.

    names: one for each seat, in order. A seat named None is left to the caller, who overwrites its actions.
    episodes: how many episodes make a meeting (a row of episodes with the same players).
    """

    def __init__(self, names, game, seed=0, episodes=1):
        if len(names) != game.num_players:
            raise Refused(f"--players names {len(names)} players, but the game has --num-players {game.num_players}")
        self.names, self.episodes = list(names), episodes
        self.generator = torch.Generator(game.device).manual_seed(seed)
        self.users, mixes = {}, []
        for seat, name in enumerate(self.names):
            is_mix = (name or "").startswith("mix:")
            mixes.append(name[4:].split(",") if is_mix else [name])
            if name is not None and ":" in name and not is_mix:
                self.users[seat] = UserPlayer(name, game)
                mixes[-1] = [None]
        rules = []
        for name in [name for mix in mixes for name in mix]:
            rule = player_rule("random" if name is None else name)
            if rule is None:
                raise Refused(f"--players {name!r} is not known; there are {PLAYER_NAMES}, mix:A,B and file.py:Class")
            rules.append(rule)
        self.kinds = [name for mix in mixes for name in mix]  # one for each member of each seat's mix
        self.rules = torch.tensor(rules, device=game.device, dtype=torch.float64)  # [kind, 4]; exact up to FOREVER
        sizes = torch.tensor([len(mix) for mix in mixes], device=game.device)
        self.sizes, self.first = sizes, sizes.cumsum(0) - sizes
        self.kind = torch.zeros(game.num_envs, game.num_players, dtype=torch.int64, device=game.device)
        self.episode = torch.full((game.num_envs,), -1, device=game.device)
        self.reset(torch.ones(game.num_envs, dtype=torch.bool, device=game.device))

    def reset(self, which):
        """Begins an episode where `which` [B] says so: mixes are drawn anew."""
        self.episode += which
        number = torch.rand(self.kind.shape, generator=self.generator, device=self.kind.device, dtype=torch.float64)
        drawn = self.first + (number * self.sizes).long()
        self.kind = torch.where(which[:, None], drawn, self.kind)
        for player in self.users.values():
            player.reset(which)

    def probabilities(self, game):
        """The exact action probabilities [B, N, 7] of the rule-based seats; uniform over legal actions elsewhere."""
        second_half = 2 * (self.episode % self.episodes) >= self.episodes
        return rule_probabilities(game, self.rules[self.kind].float(), second_half)

    def act(self, game, observation):
        """The actions [B, N] of all seats; the caller puts its own into those that are left to it."""
        if all(name is None for name in self.names):
            return torch.full_like(self.kind, STAY)
        actions = sample_actions(self.probabilities(game), self.generator)
        for seat, player in self.users.items():
            actions[:, seat] = player.act(observation, seat, self.generator)
        return actions

    def get_state(self):
        return {"kind": self.kind.clone(), "episode": self.episode.clone(), "generator": self.generator.get_state()}

    def set_state(self, state):
        self.kind, self.episode = state["kind"].clone(), state["episode"].clone()
        self.generator.set_state(state["generator"])


def equal_players_test(returns, names):
    """Do players of the same name earn equally? Paired tests over episodes, corrected for their number.

    returns [E, N], names one for each seat. -> (largest |z| of all pairs, the limit it must stay under,
    the pair). The limit keeps the chance of a false alarm over all pairs at 1 in 1,000 (Bonferroni).
    """
    pairs = [(i, j) for i in range(len(names)) for j in range(i) if names[i] == names[j] is not None]
    if not pairs:
        return 0.0, math.inf, None
    limit = NormalDist().inv_cdf(1 - 0.001 / (2 * len(pairs)))
    scores = []
    for i, j in pairs:
        difference = returns[:, i].double() - returns[:, j].double()
        spread = difference.std().item() / math.sqrt(len(difference))
        mean = abs(difference.mean().item())
        scores.append(mean / spread if spread > 0 else (math.inf if mean > 0 else 0.0))
    worst = max(range(len(pairs)), key=scores.__getitem__)
    return scores[worst], limit, (pairs[worst][1], pairs[worst][0])


# ================================================================================= networks

SOON = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])  # a view tells which of these the steps left do not exceed
SIGHT = 3  # cells that a player sees exactly in each direction; further ones are seen at the rim, in theirs


def window(size, device):
    """Which line of its window a player in line i sees line j in: one-hot [line of the window, j, i]."""
    line = torch.arange(size, device=device)
    offset = (line[:, None] - line).clamp(-SIGHT, SIGHT) + SIGHT  # [j, i]
    return (offset == torch.arange(2 * SIGHT + 1, device=device)[:, None, None]).to(torch.uint8)


def features(observation):
    """What the networks get of an observation: whole numbers [N, B, F], a row for each player.

    The board as seen from the player's own cell: its co-players, obstacles, stags and hares counted in a window of
    7 x 7 around it. What is further off is counted at the rim, so that the window has one size for every board and
    "go there" looks the same wherever the player stands. Then its own row and column, everybody's previous action
    (all one-hot), the step and the steps left (at most 255 each), and as the last seven the action mask.
    """
    planes = observation["observation"].permute(1, 4, 2, 3, 0)  # [N, plane, H, W, B]
    mask = observation["action_mask"].transpose(0, 1).to(torch.uint8)  # [N, B, 7]
    row, column = planes[:, 0].amax(2), planes[:, 0].amax(1)  # one-hot [N, H, B], [N, W, B]; empty once it has left
    see_row = (window(row.shape[1], mask.device)[..., None] * row[:, None, None]).sum(3, dtype=torch.uint8)
    see_column = (window(column.shape[1], mask.device)[..., None] * column[:, None, None]).sum(3, dtype=torch.uint8)
    # [N, window row, plane, H, W, B], summed over H; then the same for the columns
    seen = (see_row[:, :, None, :, None] * planes[:, None, 1:]).sum(3, dtype=torch.uint8)
    seen = (see_column[:, None, None] * seen[:, :, :, None]).sum(4, dtype=torch.uint8)  # [N, row, plane, column, B]
    previous = observation["actions"].permute(1, 2, 0)[:, :, None] == torch.arange(NUM_ACTIONS, device=mask.device)[:, None]
    clock = torch.stack([observation["step"], observation["steps_left"]]).clamp(0, 255).to(torch.uint8)
    parts = [seen.flatten(1, 3), row, column, previous.flatten(1, 2), clock.expand(len(mask), -1, -1), mask.transpose(1, 2)]
    return torch.cat([part.to(torch.uint8) for part in parts], 1).transpose(1, 2)


def legal_log_softmax(logits, mask):
    """Log-probabilities over the legal actions, [..., M, 7]; computed by columns, five times faster than by rows of 7."""
    columns = logits.masked_fill(~mask, -1e8).transpose(-1, -2).contiguous()
    return columns.log_softmax(-2).transpose(-1, -2)


def orthogonal(num_learners, inputs, outputs, gain, seed):
    """Stacked orthogonal weights [L, inputs, outputs]; each learner's depend on the seed and its number alone."""
    weight = torch.empty(num_learners, inputs, outputs)
    for learner in range(num_learners):
        generator = torch.Generator().manual_seed(seed * 1000 + learner)
        nn.init.orthogonal_(weight[learner], gain, generator=generator)
    return nn.Parameter(weight)


class Agent(nn.Module):
    """The policies and values of L learners as one stacked network: nothing is shared between them."""

    precision = torch.float32  # of the first layer's product, the largest by far

    def __init__(self, num_learners, num_inputs, hidden_size, final_time, seed):
        super().__init__()
        scale = torch.ones(num_inputs, 1)
        scale[-NUM_ACTIONS - 2:-NUM_ACTIONS] = 1 / min(final_time, 255)  # the clock, from 0 to 1
        self.register_buffer("scale", scale)
        biases = lambda size: nn.Parameter(torch.zeros(num_learners, 1, size))
        self.w1, self.b1 = orthogonal(num_learners, num_inputs, hidden_size, math.sqrt(2), seed), biases(hidden_size)
        self.w2, self.b2 = orthogonal(num_learners, hidden_size, hidden_size, math.sqrt(2), seed), biases(hidden_size)
        self.w_actor, self.b_actor = orthogonal(num_learners, hidden_size, NUM_ACTIONS, 0.01, seed), biases(NUM_ACTIONS)
        self.w_critic, self.b_critic = orthogonal(num_learners, hidden_size, 1, 1.0, seed), biases(1)

    def forward(self, x):
        """Features [L, M, F] -> log-probabilities of the actions [L, M, 7], values [L, M]."""
        mask = x[..., -NUM_ACTIONS:] != 0
        hidden = torch.baddbmm(*(part.to(self.precision) for part in (self.b1, x, self.w1 * self.scale)))
        hidden = torch.tanh(torch.baddbmm(self.b2, torch.tanh(hidden).float(), self.w2))
        logits = torch.baddbmm(self.b_actor, hidden, self.w_actor)
        value = torch.baddbmm(self.b_critic, hidden, self.w_critic)
        return legal_log_softmax(logits, mask), value.squeeze(-1)


def load_policies(names, num_inputs):
    """Stacks the trained players named `runs/x/checkpoint.pt:player_1` into one Agent: nobody learns in these seats."""
    weights = []
    for name in names:
        path, _, player = name.rpartition(":")
        checkpoint = load_checkpoint(path, f"--players {name}")
        if "learner_of" not in checkpoint:
            raise Refused(f"--players {name}: {path} holds no policies, it was written by {checkpoint['script']}")
        learner = checkpoint["learner_of"].get(player)
        if learner is None:
            raise Refused(f"--players {name}: {path} holds {', '.join(checkpoint['learner_of'])}, not {player!r}")
        weights.append({k: v if k == "scale" else v[learner] for k, v in checkpoint["agent"].items()})
        got, want = weights[-1]["w1"].shape[0], num_inputs
        if got != want:
            raise Refused(f"--players {name}: that policy was trained on views of {got} numbers, this game gives {want}")
        if weights[-1]["w1"].shape != weights[0]["w1"].shape:
            raise Refused(f"--players {name}: its --hidden-size {weights[-1]['w1'].shape[1]} differs from "
                          f"{weights[0]['w1'].shape[1]} of {names[0]}; trained players of one game must have one size")
    agent = Agent(len(names), num_inputs, weights[0]["w1"].shape[1], 1, 0)
    agent.load_state_dict({k: v if k == "scale" else torch.stack([w[k] for w in weights])
                           for k, v in weights[0].items()})
    return agent


class Linear(nn.Module):
    """L linear layers side by side: [L, M, inputs] -> [L, M, outputs]."""

    def __init__(self, num_models, inputs, outputs, gain, seed):
        super().__init__()
        self.weight = orthogonal(num_models, inputs, outputs, gain, seed)
        self.bias = nn.Parameter(torch.zeros(num_models, 1, outputs))

    def forward(self, x):
        return torch.baddbmm(self.bias, x, self.weight)


class GoalPrior(nn.Module):
    """The VAE of L models: a view -> a goal, as mean and log-variance; a goal -> the view.

    What is rebuilt is a choice, so its likelihood is one: each player stands on one of the H*W cells or is gone, and
    each cell is empty or holds an obstacle, a stag or a hare.
    """

    def __init__(self, num_models, num_players, cells, vae_size, goal_dim, seed):
        super().__init__()
        self.num_players, self.cells = num_players, cells
        num_inputs = cells * (num_players + 3) + len(SOON) + NUM_ACTIONS
        self.encoder = nn.ModuleList([
            Linear(num_models, num_inputs, vae_size, math.sqrt(2), seed),
            Linear(num_models, vae_size, vae_size, math.sqrt(2), seed),
            Linear(num_models, vae_size, 2 * goal_dim, 1.0, seed)])
        self.decoder = nn.ModuleList([
            Linear(num_models, goal_dim, vae_size, math.sqrt(2), seed),
            Linear(num_models, vae_size, vae_size, math.sqrt(2), seed),
            Linear(num_models, vae_size, num_players * (cells + 1) + 4 * cells, 1.0, seed)])

    def encode(self, view):
        """Views [L, M, H*W*(N+3) + 15] -> mean and log-variance of the goal, each [L, M, G].

        A view is its planes, how soon the clock runs out (SOON) and the legal actions.
        """
        hidden = F.relu(self.encoder[0](view))
        hidden = F.relu(self.encoder[1](hidden))
        mean, logvar = self.encoder[2](hidden).chunk(2, -1)
        return mean, logvar.clamp(-10, 4)

    def decode(self, goal):
        """Goals [L, M, G] -> log-probabilities of the players' cells [L, M, N, H*W+1], of the ground [L, M, H*W, 4]."""
        hidden = F.relu(self.decoder[0](goal))
        hidden = F.relu(self.decoder[1](hidden))
        players, ground = self.decoder[2](hidden).split([self.num_players * (self.cells + 1), 4 * self.cells], -1)
        ground = ground.unflatten(-1, (self.cells, 4)).transpose(-1, -2)  # long rows last: seven times faster on a CPU
        return (players.unflatten(-1, (self.num_players, self.cells + 1)).log_softmax(-1),
                ground.log_softmax(-2).transpose(-1, -2))


class ActionModel(nn.Module):
    """The models of other agents (MOA) of L models: (a player's view with the step, its goal) -> action probabilities.

    In a search a view is met with many goals, or a goal with many views: the parts of the first layer can be
    computed once each, and `from_parts` does the rest.
    """

    def __init__(self, num_models, num_inputs, hidden_size, goal_dim, final_time, seed):
        super().__init__()
        scale = torch.ones(num_inputs)
        scale[-NUM_ACTIONS - 2:-NUM_ACTIONS] = 1 / min(final_time, 255)  # the clock
        self.register_buffer("scale", scale)
        self.view = Linear(num_models, num_inputs, hidden_size, math.sqrt(2), seed)
        self.goal = orthogonal(num_models, goal_dim, hidden_size, 1.0, seed)
        self.hidden = Linear(num_models, hidden_size, hidden_size, math.sqrt(2), seed)
        self.action = Linear(num_models, hidden_size, NUM_ACTIONS, 0.01, seed)

    def view_part(self, x):
        return self.view(x * self.scale)

    def goal_part(self, goal):
        return torch.bmm(goal, self.goal)

    def from_parts(self, view_part, goal_part, mask):
        """-> log-probabilities over the legal actions [L, M, 7]"""
        hidden = F.relu(view_part + goal_part)
        hidden = F.relu(self.hidden(hidden))
        return legal_log_softmax(self.action(hidden), mask)

    def forward(self, x, goal):
        """Features [L, M, F], goals [L, M, G] -> log-probabilities over the legal actions [L, M, 7]."""
        return self.from_parts(self.view_part(x), self.goal_part(goal), x[..., -NUM_ACTIONS:] != 0)


class GoalInference(nn.Module):
    """The goals of a co-player from its views and actions so far (a CVAE's recognition from the past), of L models.

    It weighs hypotheses as Bayes' rule does. Each hypothesis is a way to play, learned here: action probabilities for
    every view. The memory holds their log-weights and adds the log-likelihood of each action seen, after forgetting a
    little: h' = f * h + log p(action | view before), a linear recurrence (as in Feng et al. 2024, "Were RNNs all we
    needed?"). The goal is read from the weights and the present view.

    Step by step it is `step(carry, x)`: the carry holds the memory and what each hypothesis makes of each action.
    """

    def __init__(self, num_models, num_inputs, num_players, hidden_size, goal_dim, hypotheses, final_time, seed):
        super().__init__()
        scale = torch.ones(num_inputs)
        scale[-NUM_ACTIONS - 2:-NUM_ACTIONS] = 1 / min(final_time, 255)  # the clock
        self.register_buffer("scale", scale)
        self.hypotheses, self.previous = hypotheses, num_inputs - 2 - (num_players + 1) * NUM_ACTIONS
        self.view = Linear(num_models, num_inputs, hidden_size, math.sqrt(2), seed)
        self.hidden = Linear(num_models, hidden_size, hidden_size, math.sqrt(2), seed)
        self.likelihood = Linear(num_models, hidden_size, NUM_ACTIONS * hypotheses, 1.0, seed)
        self.prior = nn.Parameter(torch.zeros(num_models, 1, hypotheses))
        self.keep = nn.Parameter(torch.full((num_models, 1, hypotheses), 5.0))  # f before the sigmoid
        self.mix = Linear(num_models, hidden_size + hypotheses, hidden_size, math.sqrt(2), seed)
        self.out = Linear(num_models, hidden_size, 2 * goal_dim, 0.5, seed)

    def glance(self, x):
        """Features [L, M, F] -> hidden units."""
        return F.relu(self.hidden(F.relu(self.view(x * self.scale))))

    def look(self, x):
        """Features [L, M, F] -> hidden units, and the log-probabilities of the actions by hypothesis [L, M, 7, K]."""
        hidden = self.glance(x)
        logits = self.likelihood(hidden).unflatten(-1, (NUM_ACTIONS, self.hypotheses))
        return hidden, logits.masked_fill(x[..., -NUM_ACTIONS:, None] == 0, -1e8).log_softmax(-2)

    def played(self, x):
        """The player's action just before a view, as the view tells it: [L, M]."""
        return x[..., self.previous:self.previous + NUM_ACTIONS].argmax(-1)

    def read(self, h, hidden):
        """Memory and hidden units -> mean and log-variance of the goal [L, M, G]."""
        mean, logvar = self.out(F.relu(self.mix(torch.cat([h.softmax(-1), hidden], -1)))).chunk(2, -1)
        return mean, logvar.clamp(-10, 4)

    def start(self, num):
        """The carry before the first view of `num` games: [L, num, K + 7 * K]."""
        return F.pad(self.prior.expand(-1, num, -1), (0, NUM_ACTIONS * self.hypotheses))

    def step(self, carry, x):
        """(carry, features [L, B, F]) -> the next carry, mean and log-variance of the goal [L, B, G]."""
        h, table = carry[..., :self.hypotheses], carry[..., self.hypotheses:].unflatten(-1, (NUM_ACTIONS, -1))
        action = self.played(x)[..., None, None].expand(-1, -1, 1, self.hypotheses)
        h = torch.sigmoid(self.keep) * h + table.gather(2, action)[:, :, 0]
        hidden, table = self.look(x)
        return torch.cat([h, table.flatten(2)], -1), *self.read(h, hidden)

    def forward(self, x, before, counts):
        """Features [L, M, F] in a time-major layout -> at each step mean and log-variance of the goal [L, M, G], and
        the log-probabilities of the actions by the weighted hypotheses [L, M, 7]."""
        hidden, table = self.look(x)
        action = self.played(x)[..., None, None].expand(-1, -1, 1, self.hypotheses)
        seen = F.pad(table, (0, 0, 0, 0, 0, 1))[:, before].gather(2, action)[:, :, 0]  # row -1: nothing was before
        keep, h, memory = torch.sigmoid(self.keep), self.prior, []
        for now in seen.split(counts, 1):
            h = keep * (h if len(memory) == 0 else h[:, :now.shape[1]]) + now
            memory.append(h)
        h = torch.cat(memory, 1)
        return *self.read(h, hidden), (h.log_softmax(-1)[:, :, None] + table).logsumexp(-1)


class Goals(nn.Module):
    """All that is learned here, for L models side by side: nothing is shared between them."""

    def __init__(self, args, num_inputs, num_models=1):
        super().__init__()
        self.prior = GoalPrior(num_models, args.num_players, args.height * args.width, args.vae_size, args.goal_dim,
                               args.seed)
        self.moa = ActionModel(num_models, num_inputs, args.hidden_size, args.goal_dim, args.final_time, args.seed + 1)
        self.inference = GoalInference(num_models, num_inputs, args.num_players, args.hidden_size, args.goal_dim,
                                       args.hypotheses, args.final_time, args.seed + 2)


# ============================================================================== world model

OFFSETS = tuple((down, right) for down in (-1, 0, 1) for right in (-1, 0, 1))  # number 4 is the cell itself
NUM_OFFSETS = len(OFFSETS)
GONE = NUM_OFFSETS  # a player's next place is one of the nine, or none
OUTSIDE = 8  # the kind of a cell beyond the border; 0 to 7 are the ground bits
COUNT_LEVELS = 6  # how far players and prey are told apart by number: 6 is "6 or more"
CLOCK_LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # the same for the clock
TABLE_PLAYERS = 8  # the tables of the fast path grow with the number of players; this is as far as they go


def levels(count, most=COUNT_LEVELS):
    """A number as `most` features, at least 1, at least 2, ...: [..., K] -> [..., K * most]; soft for a soft number."""
    return (count[..., None] - torch.arange(most, device=count.device)).clamp(0, 1).flatten(-2)


def clock_levels(step, steps_left):
    """The clock as features [B, 2 * len(CLOCK_LEVELS)]."""
    level = torch.tensor(CLOCK_LEVELS, device=step.device)
    return torch.cat([step[:, None] >= level, steps_left[:, None] >= level], 1).float()


def perceptron(inputs, hidden, outputs, counted=0):
    """Two hidden layers. The last `counted` inputs begin without weight: a number never met changes nothing."""
    net = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                        nn.Linear(hidden, outputs))
    with torch.no_grad():
        net[0].weight[:, inputs - counted:] = 0
    return net


def neighbours(height, width, device):
    """The number of the cell at each offset from each cell: [C+1, 9]; C is beyond the border and nowhere."""
    cells = height * width
    row, column = torch.arange(cells, device=device) // width, torch.arange(cells, device=device) % width
    table = torch.full((cells + 1, NUM_OFFSETS), cells, device=device)
    for number, (down, right) in enumerate(OFFSETS):
        inside = (row + down >= 0) & (row + down < height) & (column + right >= 0) & (column + right < width)
        table[:cells, number] = torch.where(inside, torch.arange(cells, device=device) + down * width + right, cells)
    return table


def settle(reward, known):
    """Takes a predicted reward as the nearest one that training has shown (known, in order), where that lies within
    2 % of the largest; others stay as they are. Gradients pass."""
    above = torch.bucketize(reward.detach(), known).clamp(1, len(known) - 1)
    lower, upper = known[above - 1], known[above]
    nearest = torch.where(reward - lower < upper - reward, lower, upper)
    near = (nearest - reward).abs() <= 0.02 * known.abs().max()
    return reward + torch.where(near, nearest - reward, 0.0).detach()


def cases(cell, ground, actions):
    """A number [B, N] for all that a player's token sees: who else on its cell does what, what is on it, its own action.

    Packed views; each action of another counts for a power of the number of players in the sum that names them all.
    """
    n = cell.shape[1]
    power = n**torch.arange(NUM_ACTIONS, device=cell.device)[actions]
    together = cell[:, :, None] == cell[:, None]
    others = (together * power[:, None]).sum(2) - power
    return (others * 8 + F.pad(ground, (0, 1)).gather(1, cell)) * NUM_ACTIONS + actions


def look_up(table, index):
    """table[index] of a table of one dimension, the fastest way."""
    return table.index_select(0, index.flatten().int()).view(index.shape)


class WorldModel(nn.Module):
    """What comes next, from a player's own view and everybody's action: learned, local, the same for every board.

    Six small networks, whose weights are the same for every cell, every board and every player:
        token   of each player: its action, what is on its cell, how many others on the cell do what
                -> a score for each of nine next places and for being gone
        share   of the same -> what the player earns itself, and by all that others do on its cell
        gift    of the same -> what the ego earns by this player's action, where it is on another cell
        target  of each player and each place within reach: its action, the offset, what is there -> a score
        ground  of each cell: what is on it, how many on it do what -> what will be on it
        end     of the view that comes out: who and what is left of it, the clock -> own game over, episode over
    A player's next place is a softmax over token + target scores: it cannot jump, fade or be in two places, and one
    that is absent stays so. Who is who is known only by the ego's reward and the ego's end.

    A reward is the sum of the shares, taken as the nearest one that training has shown if that is near (`settle`).

    All inputs are small whole numbers, so that `tabulate` can hold the networks' answers to every possible input:
    the same model, without arithmetic.
    """

    def __init__(self, hidden_size=64, rewards=(0.0, 1.0), kinds=(0, 1, 2, 4)):
        """rewards and kinds: the rewards and the ground bits of a cell that training has shown."""
        super().__init__()
        self.kinds = list(kinds)
        counts, small = NUM_ACTIONS * COUNT_LEVELS, max(hidden_size // 2, 8)
        self.token = perceptron(NUM_ACTIONS + 3 + counts, hidden_size, NUM_OFFSETS + 1, counts)
        self.share = perceptron(NUM_ACTIONS + 3 + counts, hidden_size, 1, counts)
        self.gift = perceptron(NUM_ACTIONS + 3 + counts, small, 1, counts)
        self.target = perceptron(NUM_ACTIONS + NUM_OFFSETS + 4, small, 1)
        self.ground = perceptron(3 + counts, hidden_size, 3, counts)
        counted = 3 * COUNT_LEVELS + 2 * len(CLOCK_LEVELS)
        self.end = perceptron(1 + counted, small, 2, counted)
        self.register_buffer("rewards", torch.tensor(sorted(rewards)))
        self.register_buffer("reward_scale", torch.tensor(max(map(abs, rewards)) or 1.0))

    def target_scores(self):
        """The score of going to each offset with each action, by the kind of cell there: [action, offset, kind]."""
        device = self.reward_scale.device
        kind = torch.arange(OUTSIDE + 1, device=device)
        bits = torch.stack([kind == OUTSIDE] + [(kind >> bit & 1 == 1) & (kind < OUTSIDE) for bit in range(3)], 1).float()
        shape = (NUM_ACTIONS, NUM_OFFSETS, OUTSIDE + 1)
        parts = (torch.eye(NUM_ACTIONS, device=device)[:, None, None], torch.eye(NUM_OFFSETS, device=device)[:, None],
                 bits)
        return self.target(torch.cat([part.expand(*shape, -1) for part in parts], -1)).squeeze(-1)

    def scores_of_targets(self, actions, kind):
        """The target scores [..., 9] of actions [...] where the cells at the offsets are of some kinds [..., 9]."""
        chosen = F.one_hot(actions, NUM_ACTIONS).float() @ self.target_scores().flatten(1)  # sums faster than an index
        return chosen.unflatten(-1, (NUM_OFFSETS, OUTSIDE + 1)).gather(-1, kind[..., None]).squeeze(-1)

    def read_token(self, action, content, others):
        """One-hot action [..., 7], what is on the cell [..., 3], counts of the others' actions there [..., 7]
        -> scores [..., 10], shares of reward [..., 2] in the units of the game."""
        token = torch.cat([action, content, levels(others)], -1)
        return self.token(token), torch.cat([self.share(token), self.gift(token)], -1) * self.reward_scale

    def read_ground(self, content, counts):
        """What is on a cell [..., 3] and the counts of the actions on it [..., 7] -> logits of what will be [..., 3]."""
        return self.ground(torch.cat([content, levels(counts)], -1))

    def empty_ground(self):
        """Logits [8, 3] of what will be on a cell where nobody stands, by its bits."""
        content = bits_of(torch.arange(8, dtype=torch.uint8, device=self.reward_scale.device))
        return self.read_ground(content, torch.zeros(8, NUM_ACTIONS, device=content.device))

    def read_end(self, own, players, stags, hares, step, steps_left):
        """The end of one's own game and of the episode, as logits [B, 2]: from whether one is there, from how many
        players, stags and hares are (all [B], after the step), and from the clock before it."""
        counts = levels(torch.stack([players, stags, hares], -1))
        return self.end(torch.cat([own[:, None], counts, clock_levels(step, steps_left)], -1))

    def look(self, cell, ground, actions, height, width):
        """Each player's scores and shares, and the ground where it stands, from packed views.

        -> scores [B, N, 10], shares [B, N, 2], ground logits there [B, N, 3], places in reach [B, N, 9],
        present [B, N] and how many stand there [B, N]
        """
        present = (cell < height * width).float()
        action = F.one_hot(actions, NUM_ACTIONS).float()
        together = (cell[:, :, None] == cell[:, None]).float() * present[:, None]
        counts = together @ action  # [B, N, 7], on its cell, itself among them
        content = bits_of(F.pad(ground, (0, 1)).gather(1, cell))
        others = counts - action * present[..., None]
        # Most players are in the same few cases: each case goes through the networks once.
        case, which = (cases(cell, ground, actions) * 2 + present.long()).unique(return_inverse=True)
        which = which.flatten()
        row = torch.empty_like(case).scatter_(0, which, torch.arange(len(which), device=cell.device))
        action, content, others, counts = (x.flatten(0, 1)[row] for x in (action, content, others, counts))
        shape = cell.shape
        scores, shares, here = (x.index_select(0, which).unflatten(0, shape) for x in
                                (*self.read_token(action, content, others), self.read_ground(content, counts)))
        kinds = F.pad(ground, (0, 1), value=OUTSIDE)
        reach = neighbours(height, width, cell.device)[cell]  # [B, N, 9]
        kind = kinds.gather(1, reach.flatten(1)).view(reach.shape).long()
        scores = scores + F.pad(self.scores_of_targets(actions, kind), (0, 1))
        return scores, shares, here, reach, present, together.sum(-1)

    def forward(self, view, actions, step, steps_left, soft=False):
        """The step from a view [B, H, W, N+3] under all players' actions [B, N], ego first.

        -> dict of view [B, H, W, N+3] (probabilities), reward [B], terminated [B] (own game) and over [B] (episode),
        both probabilities. soft: the view is a prediction itself, to be taken as probabilities and not rounded.
        """
        height, width = view.shape[1:3]
        if soft:
            players, ground, reward = self.soft_step(view, actions)
        else:
            players, ground, reward = self.hard_step(*pack(view), actions, height, width)
        present = players.sum(2)
        prey = ground[:, 1:].sum(2)
        end = self.read_end(present[:, 0], present.sum(1), prey[:, 0], prey[:, 1], step, steps_left).sigmoid()
        planes = torch.cat([players, ground], 1).unflatten(2, (height, width)).permute(0, 2, 3, 1)
        return {"view": planes, "reward": settle(reward, self.rewards), "terminated": end[:, 0], "over": end[:, 1]}

    def hard_step(self, cell, ground, actions, height, width):
        """The next planes of players [B, N, C] and ground [B, 3, C], and the reward [B], from packed views."""
        scores, shares, here, reach, present, _ = self.look(cell, ground, actions, height, width)
        elsewhere = cell[:, 1:] != cell[:, :1]
        batch, n = cell.shape
        chance = scores.softmax(-1)[..., :GONE] * present[..., None]
        players = chance.new_zeros(batch, n, height * width + 1).scatter_add(2, reach, chance)[..., :-1]
        after = F.pad(self.empty_ground()[ground.long()], (0, 0, 0, 1))
        after = after.scatter(1, cell[..., None].expand(-1, -1, 3), here)[:, :-1].sigmoid().transpose(1, 2)
        return players, after, self.add_shares(shares, present, elsewhere)

    def add_shares(self, shares, present, elsewhere):
        """The ego's reward: its own share, and what others on other cells give it; nothing once it has left.

        What others do on the ego's own cell is part of its own share: otherwise the two could not be told apart where
        the ego always has a hand in a catch, and larger crowds than those of training would catch without it and pay.
        """
        return (shares[:, 0, 0] + (shares[:, 1:, 1] * present[:, 1:] * elsewhere).sum(1)) * present[:, 0]

    def soft_step(self, view, actions):
        """hard_step for a view of probabilities, through which gradients flow: every player is looked at on every cell."""
        batch, height, width, planes = view.shape
        view = view.flatten(1, 2).transpose(1, 2)  # [B, N+3, C]
        players, ground = view[:, :-3], view[:, -3:]
        n, cells = players.shape[1:]
        action = F.one_hot(actions, NUM_ACTIONS).float()
        each = players[..., None] * action[:, :, None]  # [B, N, C, 7]
        counts = each.sum(1)  # [B, C, 7]
        content = ground.transpose(1, 2)  # [B, C, 3]
        scores, shares = self.read_token(action[:, :, None].expand(-1, -1, cells, -1),
                                         content[:, None].expand(-1, n, -1, -1), counts[:, None] - each)
        reach = neighbours(height, width, view.device)[:-1]  # [C, 9]
        kinds = F.pad(pack(view.transpose(1, 2).unflatten(1, (height, width)))[1], (0, 1), value=OUTSIDE).long()
        kind = kinds[:, reach][:, None]  # [B, 1, C, 9]
        scores = scores + F.pad(self.scores_of_targets(actions[:, :, None].expand(-1, -1, cells),
                                                       kind.expand(-1, n, -1, -1)), (0, 1))
        chance = scores.softmax(-1)[..., :GONE] * players[..., None]  # [B, N, C, 9]
        moved = chance.new_zeros(batch, n, cells + 1)
        moved = moved.scatter_add(2, reach.flatten().expand(batch, n, -1), chance.flatten(2))[..., :-1]
        after = self.read_ground(content, counts).sigmoid().transpose(1, 2)
        own = (shares[:, 0, :, 0] * players[:, 0]).sum(1)
        given = (shares[:, 1:, :, 1] * players[:, 1:] * (1 - players[:, :1])).sum((1, 2))
        reward = own + given * players[:, 0].sum(1)
        return moved, after, reward

    def shrink(self, size):
        """Moves the weights of the counted inputs towards 0: what does not matter falls silent, so that numbers and
        mixtures never met in training change nothing either."""
        for net in (self.token, self.share, self.gift, self.ground):
            weight = net[0].weight.data[:, -NUM_ACTIONS * COUNT_LEVELS:]
            weight.sub_(weight.clamp(-size, size))

    def loss_terms(self, batch):
        """The losses of one step on packed rows: dict of planes [N+3] (mean over rows, summed over cells), reward, end.

        A player's plane counts by cross-entropy over its next places, the ground by that of each cell.
        """
        height, width, cell = batch["height"], batch["width"], batch["cell"]
        scores, shares, here, reach, present, crowd = self.look(cell, batch["ground"], batch["actions"], height, width)
        place = (reach == batch["next_cell"][..., None]).float()
        place = torch.where((batch["next_cell"] == height * width)[..., None], 0.0, place)
        place = torch.cat([place, 1 - place.sum(-1, keepdim=True)], -1)  # one-hot [B, N, 10]
        players = (-(place * scores.log_softmax(-1)).sum(-1) * present).mean(0)

        after = bits_of(batch["next_ground"])  # [B, C, 3]
        # Of the cells where nobody stands it matters only how often which bits become which: [before, after].
        free = torch.ones(len(cell), height * width + 1, device=cell.device).scatter(1, cell, 0.0)[:, :-1]
        change = batch["ground"].flatten().long() * 8 + batch["next_ground"].flatten()
        change = change.bincount(weights=free.flatten(), minlength=64).view(8, 8).float()
        empty, bits = self.empty_ground(), bits_of(torch.arange(8, dtype=torch.uint8, device=cell.device))
        ground = (F.softplus(empty) * change.sum(1, keepdim=True) - empty * (change @ bits)).sum(0) / len(cell)
        there = F.pad(after, (0, 0, 0, 1)).gather(1, cell[..., None].expand(-1, -1, 3))
        there = F.binary_cross_entropy_with_logits(here, there, reduction="none")
        ground = ground + (there * (present / crowd.clamp(min=1))[..., None]).sum(1).mean(0)

        reward = self.add_shares(shares, present, cell[:, 1:] != cell[:, :1])
        reward_loss = F.mse_loss(reward / self.reward_scale, batch["reward"] / self.reward_scale)
        left = (batch["next_cell"] < height * width).float()
        prey = after.sum(1)
        end = self.read_end(left[:, 0], left.sum(1), prey[:, 1], prey[:, 2], batch["step"], batch["steps_left"])
        return {"planes": torch.cat([players, ground]), "reward": reward_loss,
                "end": end_loss(end, batch)}

    @torch.no_grad()
    def tabulate(self, height, width, num_players):
        """The same model for one board as tables: what the search calls. -> ModelTables"""
        return ModelTables(self, height, width, num_players)


def bits_of(ground):
    """Ground bits [...] as floats [..., 3]: obstacle, stag, hare."""
    return torch.stack([ground & 1, ground >> 1 & 1, ground >> 2 & 1], -1).float()


def end_loss(logits, batch):
    """Cross-entropy of the ends of one's own game and of the episode."""
    target = torch.stack([batch["terminated"], batch["over"]], 1).float()
    return F.binary_cross_entropy_with_logits(logits, target)


class ModelTables:
    """A WorldModel's answers to every input that a board of this size can hold, looked up instead of computed.

    A player's row number says what the token network sees: who on its cell does what, what is on it, its own action.
    The decisions are the network's own in float32, rounded as the most probable. Packed views in and out:

        step(cell [B, N], ground [B, C], actions [B, N], step [B], steps_left [B])
            -> cell [B, N], ground [B, C], reward [B], terminated [B], over [B]
        step_view(view [B, H, W, N+3], ...) -> the same for planes
    """

    def __init__(self, model, height, width, num_players):
        if num_players > TABLE_PLAYERS:
            raise Refused(f"--num-players {num_players} is more than the {TABLE_PLAYERS} that the tables can hold")
        device = model.reward_scale.device
        self.height, self.width, self.cells, n = height, width, height * width, num_players
        # Multisets of the others' actions on a cell: each action counts for a power of n in the sum that names one.
        sets = [()]
        for others in range(1, n):
            sets += itertools.combinations_with_replacement(range(NUM_ACTIONS), others)
        short = torch.int16 if n**NUM_ACTIONS < 2**15 else torch.int32
        self.power = torch.tensor([n**a for a in range(NUM_ACTIONS)], dtype=short, device=device)
        names = torch.tensor([sum(n**a for a in members) for members in sets], device=device)
        self.number = torch.zeros(n**NUM_ACTIONS, dtype=torch.int32, device=device)
        self.number[names] = torch.arange(len(sets), dtype=torch.int32, device=device)
        others = torch.zeros(len(sets), NUM_ACTIONS, device=device)
        for row, members in enumerate(sets):
            for action in members:
                others[row, action] += 1
        shape = (len(sets), 8, NUM_ACTIONS)  # row number = (set * 8 + bits) * 7 + action
        action = torch.eye(NUM_ACTIONS, device=device).expand(*shape, -1)
        content = bits_of(torch.arange(8, dtype=torch.uint8, device=device))[:, None].expand(*shape, -1)
        others = others[:, None, None].expand(*shape, -1)
        scores, shares, after = [], [], []
        for a, c, o in zip(action.split(1000), content.split(1000), others.split(1000)):
            s, r = model.read_token(a, c, o)
            scores.append(s.reshape(-1, GONE + 1))
            shares.append(r.reshape(-1, 2))
            after.append(model.read_ground(c, o + a).reshape(-1, 3))
        weights = torch.tensor([1, 2, 4], dtype=torch.uint8, device=device)
        self.scores = torch.cat(scores).T.contiguous()  # [10, row]
        self.own, self.gift = torch.cat(shares).T.contiguous()  # [row] each
        self.after = ((torch.cat(after) > 0) * weights).sum(1, dtype=torch.uint8)  # [row]
        self.empty = ((model.empty_ground() > 0) * weights).sum(1, dtype=torch.uint8)  # [8]
        self.empty_stays = self.empty[model.kinds].tolist() == model.kinds
        self.rewards = model.rewards
        target = model.target_scores().permute(1, 0, 2)  # [offset, action, kind]
        self.target = target.flatten(1).contiguous()  # [9, action * 9 + kind]
        # Which offsets can become the best one: of each row, whatever stands there of the kinds that training has shown.
        known = target[..., [*model.kinds, OUTSIDE]]
        scores = self.scores.view(GONE + 1, len(sets), 8, NUM_ACTIONS)
        low, high = (scores[:GONE] + edge[:, None, None] for edge in (known.amin(-1), known.amax(-1)))
        low[4] = high[4] = scores[4] + target[4, :, :8].T  # what is on one's own cell is in the row already
        sure = torch.cat([low, scores[GONE:]]).amax(0)
        # Players stand where they can get to: on a kind of cell that a player on bare ground can enter.
        enter = scores[:GONE, :, 0, :, None] + target[:, None] >= sure[:, 0, :, None]  # [offset, set, action, kind]
        enter[4] = False
        stood = [kind for kind in model.kinds if kind == 0 or enter[..., kind].any()]
        can_win = (high >= sure)[:, :, stood]  # [offset, set, bits, action]
        self.offsets = can_win.flatten(1).any(1).nonzero()[:, 0].tolist()
        reach = neighbours(height, width, device).T  # [9, C+1]
        self.reach = torch.cat([reach, torch.full_like(reach[:1], self.cells)]).flatten().int()  # and GONE
        can_win[4] = False
        self.one_look = bool((can_win.sum(0) <= 1).all())
        if self.one_look:  # it is enough to look at one place: [row], and what is best by what is there: [row * 9 + kind]
            watched = torch.zeros(len(sets), 8, NUM_ACTIONS, dtype=torch.int64, device=device)
            watched[:, stood] = can_win.int().argmax(0)
            watched = watched.flatten()
            row = torch.arange(len(watched), device=device)
            action, bits = row % NUM_ACTIONS, row // NUM_ACTIONS % 8
            stay = self.scores[4] + target[4, action, bits]
            leave = self.scores[GONE]
            go = self.scores[watched, row][:, None] + target[watched, action]  # [row, kind]
            go = torch.where((watched == 4)[:, None], -torch.inf, go)
            choice = torch.where(go > stay[:, None], watched[:, None], 4)
            choice = torch.where((leave > torch.maximum(go, stay[:, None]).T).T, GONE, choice)
            self.watched, self.choice = (watched * (self.cells + 1)).int(), (choice * (self.cells + 1)).flatten().int()
        self.tabulate_ends(model, device)

    def tabulate_ends(self, model, device):
        """[own there, players, stags, hares, level of the step, level of the steps left] -> two bits, flattened."""
        times = torch.tensor((0,) + CLOCK_LEVELS, device=device)
        axes = (torch.arange(2, device=device), *[torch.arange(COUNT_LEVELS + 1, device=device)] * 3, times, times)
        self.clock_level = (torch.arange(CLOCK_LEVELS[-1] + 1, device=device)[:, None] >= times[1:]).sum(1)
        grid = [axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")]
        bits = [(model.read_end(*(axis.float() for axis in chunk[:4]), *chunk[4:]) > 0).to(torch.uint8)
                for chunk in zip(*(axis.split(65536) for axis in grid))]
        bits = torch.cat(bits)
        self.ends = bits[:, 0] | bits[:, 1] << 1

    def step(self, cell, ground, actions, step, steps_left):
        batch = len(cell)
        cell, actions = cell.T.int(), actions.T.int()  # [N, B]: long rows are what is fast here
        first = torch.arange(0, batch * (self.cells + 1), self.cells + 1, dtype=torch.int32, device=cell.device)
        kinds = F.pad(ground, (0, 1), value=OUTSIDE).flatten()  # those of environment b begin at first[b]
        present, spot = cell < self.cells, cell + first
        kind = look_up(kinds, spot)
        power = look_up(self.power, actions)
        small = cell.to(torch.uint8) if self.cells < 256 else cell
        others = ((small[:, None] == small) * power[:, None]).sum(0, dtype=power.dtype) - power
        row = (look_up(self.number, others * present) * 8 + (kind & 7)) * NUM_ACTIONS + actions
        if self.one_look:
            place = look_up(self.reach, look_up(self.watched, row) + cell)
            choice = look_up(self.choice, row * (OUTSIDE + 1) + look_up(kinds, place + first))
            best = look_up(self.reach, choice + cell)
        else:
            best = self.best_of_all(cell, actions, row, kinds, first, present)
        given = (look_up(self.gift, row[1:]) * (present[1:] & (cell[1:] != cell[0]))).sum(0)
        reward = (look_up(self.own, row[0]) + given) * present[0]
        after = look_up(self.after, row)
        if not self.empty_stays:
            kinds = look_up(torch.cat([self.empty, kinds.new_tensor([OUTSIDE])]), kinds)
        kinds.scatter_(0, spot.flatten().long(), after.flatten())
        ground = kinds.view(batch, -1)[:, :-1]
        return (best.T.long(), ground, settle(reward, self.rewards), *self.read_ends(best, ground, step, steps_left))

    def best_of_all(self, cell, actions, row, kinds, first, present):
        """The best next place, where one look is not enough: every offset that can win is scored."""
        best, scores = torch.full_like(cell, self.cells), look_up(self.scores[GONE], row)
        for offset in self.offsets:
            place = look_up(self.reach, cell + offset * (self.cells + 1))
            kind = look_up(kinds, place + first)
            score = look_up(self.scores[offset], row) + look_up(self.target[offset], actions * (OUTSIDE + 1) + kind)
            better = score >= scores
            scores, best = torch.where(better, score, scores), torch.where(better, place, best)
        return torch.where(present, best, self.cells)

    def read_ends(self, cell, ground, step, steps_left):
        there = cell < self.cells
        size = COUNT_LEVELS + 1
        columns = ground.T.contiguous()
        index = there[0].int()
        for count in (there.sum(0), (columns >> 1 & 1).sum(0, dtype=torch.int32), (columns >> 2 & 1).sum(0, dtype=torch.int32)):
            index = index * size + count.clamp(max=COUNT_LEVELS)
        for clock in (step, steps_left):
            index = index * (len(CLOCK_LEVELS) + 1) + look_up(self.clock_level, clock.clamp(0, CLOCK_LEVELS[-1]))
        ends = look_up(self.ends, index)
        return ends & 1 != 0, ends >> 1 != 0

    def step_view(self, view, actions, step, steps_left):
        """step for planes [B, H, W, N+3]; the next ones are uint8."""
        cell, ground, *rest = self.step(*pack(view), actions, step, steps_left)
        return (unpack(cell, ground, self.height, self.width), *rest)


class WorldMLP(nn.Module):
    """The plain model to compare with: all planes and actions of one board side by side into one perceptron."""

    def __init__(self, height, width, num_players, hidden_size=256, rewards=(0.0, 1.0)):
        super().__init__()
        self.height, self.width, self.num_players = height, width, num_players
        self.cells = height * width
        inputs = (num_players + 3) * self.cells + num_players * NUM_ACTIONS + 2 * len(CLOCK_LEVELS)
        self.net = perceptron(inputs, hidden_size, num_players * (self.cells + 1) + 3 * self.cells + 3)
        self.register_buffer("rewards", torch.tensor(sorted(rewards)))
        self.register_buffer("reward_scale", torch.tensor(max(map(abs, rewards)) or 1.0))

    def read(self, view, actions, step, steps_left):
        """-> scores of places [B, N, C+1], ground logits [B, 3, C], reward [B], end logits [B, 2]"""
        planes = view.flatten(1, 2).transpose(1, 2).flatten(1).float()
        out = self.net(torch.cat([planes, F.one_hot(actions, NUM_ACTIONS).flatten(1).float(),
                                  clock_levels(step, steps_left)], 1))
        players, ground, reward, end = out.split((self.num_players * (self.cells + 1), 3 * self.cells, 1, 2), 1)
        return (players.unflatten(1, (self.num_players, -1)), ground.unflatten(1, (3, -1)),
                reward[:, 0] * self.reward_scale, end)

    def forward(self, view, actions, step, steps_left, soft=False):
        """As WorldModel.forward."""
        view = view if soft else unpack(*pack(view), self.height, self.width)
        players, ground, reward, end = self.read(view, actions, step, steps_left)
        planes = torch.cat([players.softmax(-1)[..., :-1], ground.sigmoid()], 1)
        planes = planes.unflatten(2, (self.height, self.width)).permute(0, 2, 3, 1)
        end = end.sigmoid()
        return {"view": planes, "reward": settle(reward, self.rewards), "terminated": end[:, 0], "over": end[:, 1]}

    def shrink(self, size):
        """Nothing here: no input is a count."""

    def loss_terms(self, batch):
        """As WorldModel.loss_terms."""
        view = unpack(batch["cell"], batch["ground"], self.height, self.width)
        players, ground, reward, end = self.read(view, batch["actions"], batch["step"], batch["steps_left"])
        players = F.cross_entropy(players.flatten(0, 1), batch["next_cell"].flatten(), reduction="none")
        after = bits_of(batch["next_ground"]).transpose(1, 2)
        ground = F.binary_cross_entropy_with_logits(ground, after, reduction="none").sum(2)
        reward_loss = F.mse_loss(reward / self.reward_scale, batch["reward"] / self.reward_scale)
        return {"planes": torch.cat([players.view(batch["cell"].shape).mean(0), ground.mean(0)]),
                "reward": reward_loss, "end": end_loss(end, batch)}


def make_model(config):
    """The model that a checkpoint's "world_model_config" describes, with fresh weights."""
    config = dict(config)
    return {"local": WorldModel, "mlp": WorldMLP}[config.pop("kind")](**config)


def load_world_model(path, flag, device="cpu"):
    """Loads the model of a checkpoint that train_world_model.py wrote. -> model, checkpoint"""
    checkpoint = load_checkpoint(path, f"{flag} {path}")
    if "world_model" not in checkpoint:
        raise Refused(f"{flag} {path} holds no world model, it was written by {checkpoint['script']}")
    try:
        model = make_model(checkpoint["world_model_config"])
        model.load_state_dict(checkpoint["world_model"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise Refused(f"{flag} {path}: its world model does not fit this script ({type(error).__name__})") from error
    return model.to(device).eval(), checkpoint


def ground_bits(game):
    """What is on each cell of a game, as bits: [B, C]."""
    board = game.board[:game.cells]
    return ((board == 0).to(torch.uint8) | (board & STAG_BIT) >> 4 | (board & HARE_BIT) >> 4).T


def collect(board, num_rows, seed, device="cpu", gathered=0.0):
    """Plays mixed games on a board until one player's view in each gave num_rows rows. -> dict of [S, ...]

    Each episode draws for every seat a rule-based player, for the game a share of uniform actions, legal or not
    (0, 0.1, 0.5 or 1), and whether its players hesitate: they then hunt only in one step of five, all in the same,
    so that prey is caught by many hands at once; half of the games have one rule in all seats, so that crowds form.
    Half of the episodes begin with an earlier deadline. Those that have left go on asking for random actions, which
    mean nothing. A share of the episodes, `gathered`, begins with most players on one cell, mostly that of a prey,
    half of the other prey gone, and a few steps before the deadline: crowds are rare in play, and every mixture of their
    actions is to be met.
    """
    num_envs = max(1, min(512, num_rows // 50))
    game = BatchedStagHunt(num_envs, device=device, seed=seed, **board)
    generator = torch.Generator(device).manual_seed(seed)
    n, cells, everybody = game.num_players, game.cells, torch.ones(num_envs, dtype=torch.bool, device=device)
    rules = torch.tensor([*RULES.values()][:6] + [(game.final_time // 2, True, 0.0, False)], device=device)
    shares = torch.tensor([0.0, 0.1, 0.5, 1.0], device=device)
    draw = lambda most, *shape: torch.randint(most, (num_envs, *shape), generator=generator, device=device)
    rule = torch.zeros(num_envs, n, 4, device=device)
    ego, share, hesitates, episode = draw(1), shares[draw(1)], draw(1) > 0, draw(1)
    columns, rows, new, num_episodes = [], 0, everybody, 0
    while rows < num_rows:
        kind = draw(len(rules), n)
        kind = torch.where((draw(2) > 0)[:, None], kind, kind[:, :1])
        rule = torch.where(new[:, None, None], rules[kind], rule)
        ego, share = torch.where(new, draw(n), ego), torch.where(new, shares[draw(4)], share)
        hesitates = torch.where(new, draw(2) > 0, hesitates)
        deadline = torch.where(draw(2) > 0, 1 + draw(game.final_time), game.final_time)
        gathers = new & (torch.rand(num_envs, generator=generator, device=device) < gathered)
        if gathered:
            fits = (game.board[:cells] >= STAG_BIT) | (game.board[:cells] > 0) & (draw(4) == 0)
            spot = (fits * torch.rand(cells, num_envs, generator=generator, device=device)).argmax(0)
            joins = gathers & (draw(6, n).T > 0)
            game.cell = torch.where(joins, spot, game.cell)
            thinned = gathers & (torch.rand(game.board.shape, generator=generator, device=device) < 0.5)
            thinned[:cells] &= torch.arange(cells, device=device)[:, None] != spot
            game.board = torch.where(thinned, game.board & GEOGRAPHY_BITS, game.board)
            deadline = torch.where(gathers, 1 + draw(3), deadline)
        game.deadline = torch.where(new, deadline, game.deadline)
        episode = torch.where(new, num_episodes + new.cumsum(0), episode)
        num_episodes += num_envs

        actions = sample_actions(rule_probabilities(game, rule, ~everybody), generator)
        waits = (hesitates & (draw(5) > 0))[:, None] & (actions >= HUNT_STAG)
        actions = torch.where(waits, STAY, actions)
        uniform = torch.rand(num_envs, n, generator=generator, device=device) < share[:, None]
        uniform |= game.cell.T == cells
        actions = torch.where(uniform, draw(NUM_ACTIONS, n), actions)

        order = (ego[:, None] + torch.arange(n, device=device)) % n  # ego first, as in the view
        row = {"cell": game.cell.T.gather(1, order), "ground": ground_bits(game), "actions": actions.gather(1, order),
               "step": game.clock, "steps_left": game.deadline - game.clock, "episode": episode}
        out = game.advance(actions)
        over = out["terminated"] | out["truncated"]
        own = over | out["left"].gather(1, ego[:, None])[:, 0]
        row |= {"next_cell": game.cell.T.gather(1, order), "next_ground": ground_bits(game),
                "reward": out["reward"].gather(1, ego[:, None])[:, 0], "terminated": own, "over": over}
        columns.append({key: value.clone() for key, value in row.items()})
        rows += num_envs
        new = own
        game.reset(new)
    data = {key: torch.stack([row[key] for row in columns], 1).flatten(0, 1)[:num_rows] for key in columns[0]}
    small = {"cell": torch.int16, "next_cell": torch.int16, "actions": torch.uint8}
    data = {key: value.to(small.get(key, value.dtype)) for key, value in data.items()}
    return data | {"height": board["height"], "width": board["width"]}


def pack(view):
    """A view [B, H, W, N+3], hard or soft, as cells [B, N] (int64) and ground bits [B, C]; soft ones are rounded."""
    planes = view.flatten(1, 2).transpose(1, 2)  # [B, N+3, C]
    players, ground = planes[:, :-3], planes[:, -3:] > 0.5
    most, cell = players.max(2)
    cell = torch.where(most > 0.5, cell, players.shape[2])
    return cell, ground[:, 0].to(torch.uint8) | ground[:, 1].to(torch.uint8) << 1 | ground[:, 2].to(torch.uint8) << 2


def unpack(cell, ground, height, width):
    """Cells [B, N] and ground bits [B, C] as a view [B, H, W, N+3] of zeros and ones (uint8)."""
    batch, n = cell.shape
    players = torch.zeros(batch, n, height * width + 1, dtype=torch.uint8, device=cell.device)
    players.scatter_(2, cell.long()[..., None], 1)
    ground = torch.stack([ground >> bit & 1 for bit in range(3)], 1).to(torch.uint8)
    return torch.cat([players[..., :-1], ground], 1).unflatten(2, (height, width)).permute(0, 2, 3, 1)


def pick_rows(data, rows):
    """Some rows of the data, ready for the model. -> dict of [B, ...]"""
    batch = {key: value[rows] if isinstance(value, torch.Tensor) else value for key, value in data.items()}
    for key in ("cell", "next_cell", "actions"):
        batch[key] = batch[key].long()
    return batch


def rows_of(data):
    return len(data["reward"])


def common_rewards(tables, most=256):
    """The rewards that the rows hold most often: a list of numbers, and 0."""
    values, counts = torch.cat([data["reward"] for data in tables]).double().mul(1e4).round().unique(return_counts=True)
    values = values[counts.argsort(descending=True, stable=True)[:most]] / 1e4
    return sorted({0.0, *values.tolist()} | ({1.0} if len(values) < 2 else set()))


def seen_kinds(tables):
    """The ground bits of a cell that the rows hold."""
    return torch.cat([data["ground"].unique() for data in tables]).unique().tolist()


# ==================================================================================== search


class RulesModel:
    """The true rules as the model of a search or an imagined episode: states in, states out, ego first."""

    def __init__(self, game):
        self.scratch = game  # a game of its own, into which states are put to be played and looked at
        # Tables for `see`: which feature tells what, in the order of `features`; those from `nothing` on are none.
        n, device, sight = game.num_players, game.device, 2 * SIGHT + 1
        first_place = sight * sight * (n + 2)  # after the window [row, plane, column]
        first_previous = first_place + game.height + game.width
        first_legal = first_previous + NUM_ACTIONS * n + 2  # the clock is in between
        self.nothing, far = first_legal + NUM_ACTIONS, 1 << 20
        cells = torch.arange(game.cells, device=device)
        row, column = cells // game.width, cells % game.width
        offset = lambda line: (line - line[:, None]).clamp(-SIGHT, SIGHT) + SIGHT  # [viewer's cell, other cell]
        spot = offset(row) * (n + 2) * sight + offset(column)
        self.spot = F.pad(spot, (0, 1, 0, 1), value=far).int()  # [C+1, C+1]: who is on the last cell has left
        place = torch.stack([first_place + row, first_place + game.height + column], 1)
        self.place = F.pad(place, (0, 0, 0, 1), value=far).int()  # [C+1, 2]
        # By what is legal on a cell [256], which holds one thing: a hare, where a model says that it holds a stag, too.
        bits = torch.arange(256, device=device)
        self.ground = torch.full((256,), far, dtype=torch.int32, device=device)
        for plane, those in enumerate((bits & STAY_BIT == 0, bits & STAG_BIT > 0, bits & HARE_BIT > 0), n - 1):
            self.ground[those] = plane * sight
        players, actions = torch.arange(n, device=device), torch.arange(NUM_ACTIONS, device=device)
        self.order = (players[:, None] + players) % n  # [viewer, k-th after it]
        self.others = (players[:-1] * sight).int()
        self.previous = (first_previous + players * NUM_ACTIONS).int()
        self.legal, self.bits = (first_legal + actions).int(), actions.to(torch.uint8)

    def put(self, state):
        self.scratch.num_envs = len(state["clock"])
        for name, value in state.items():
            setattr(self.scratch, name, value)
        return self.scratch

    def features(self, state):
        """Features of each player [N, B, F], the one in row 0 first in each state."""
        return features(self.put(state).observe())

    def see(self, state):
        """The same in fewer numbers. All features but the clock are small counts, most of them 0, so that what a first
        layer makes of them is the sum of a few of its rows: on a CPU, in a tenth of the product's time.

        -> the numbers of these rows [N, B, K] (the one after the last: nothing), step and steps left [B, 2], action
        masks [N, B, 7]
        """
        cell, board, clock = state["cell"], state["board"], state["clock"]
        n, many, cells = *cell.shape, len(board) - 1
        viewer = cell.flatten()
        ground = self.ground.index_select(0, board[:-1].T.flatten().int()).view(many, cells)
        ground = self.spot[:, :-1].index_select(0, viewer).view(n, many, cells) + ground
        others = cell[self.order[:, 1:]].transpose(1, 2)  # [N, B, N-1]
        others = self.spot.flatten().index_select(0, (cell[..., None] * (cells + 1) + others).flatten()).view(others.shape)
        previous = state["previous"][self.order].transpose(1, 2) + self.previous
        mask = (board.gather(0, cell)[..., None] >> self.bits & 1).view(torch.bool)
        place = self.place.index_select(0, viewer).view(n, many, 2)
        rows = torch.cat([ground, others + self.others, place, previous, torch.where(mask, self.legal, self.nothing)], -1)
        clock = torch.stack([clock, state["deadline"] - clock], -1).clamp(0, 255).float()
        return rows.clamp(max=self.nothing), clock, mask

    def step(self, state, actions):
        """Plays joint moves [N, B]. -> the next state, the first player's reward [B], and where its game is over [B]"""
        game = self.put({**state, "board": state["board"].clone()})  # the one that is changed in place
        out = game.advance(actions.T)
        state = {name: getattr(game, name) for name in state}
        over = out["terminated"] | out["truncated"] | ~out["here"][:, 0]
        return state, out["reward"][:, 0], over


class LearnedModel(RulesModel):
    """A learned world model, as tables, in the same place: no rule of the game moves these boards."""

    def __init__(self, game, model):
        super().__init__(game)
        self.tables = model.tabulate(game.height, game.width, game.num_players)
        self.weights, self.config = model.state_dict(), {
            "kind": "local", "hidden_size": model.ground[0].out_features, "rewards": model.rewards.tolist(),
            "kinds": list(model.kinds)}

    def step(self, state, actions):
        board, clock = state["board"][:-1], state["clock"]
        ground = ((board == 0).to(torch.uint8) | (board & STAG_BIT) >> 4 | (board & HARE_BIT) >> 4).T
        cell, ground, reward, terminated, over = self.tables.step(state["cell"].T, ground, actions.T, clock,
                                                                  state["deadline"] - clock)
        state = {"cell": cell.T.contiguous(), "board": board_from_ground(ground, self.scratch.height, self.scratch.width),
                 "previous": actions.to(torch.uint8), "clock": clock + 1, "deadline": state["deadline"]}
        return state, reward, terminated | over


def board_from_ground(ground, height, width):
    """What is legal on each cell, from what is said to be there [B, C]: a predicted board has its legal actions. [C+1, B]"""
    ground = ground.T.contiguous()
    free = F.pad((ground & 1 ^ 1).view(height, width, -1), (0, 0, 1, 1, 1, 1))
    board = STAY_BIT | free[:-2, 1:-1] | free[2:, 1:-1] << 1 | free[1:-1, :-2] << 2 | free[1:-1, 2:] << 3
    board = (board.flatten(0, 1) | (ground & 2) << 4 | (ground & 4) << 4) * (ground & 1 ^ 1)
    return F.pad(board, (0, 0, 0, 1), value=STAY_BIT)


STATE = ("cell", "board", "previous", "clock", "deadline")


def ego_first(game, seats, columns=None):
    """The states of a game as each of some seats [L] sees them, itself first; the environment last in each tensor.

    columns [L, M] picks environments for each seat (all by default). -> dict of [.., L * M]
    """
    n, length = game.num_players, len(seats)
    order = (seats[:, None] + torch.arange(n, device=seats.device)) % n  # [L, N]
    if columns is None:
        columns = torch.arange(game.num_envs, device=seats.device).expand(length, -1)
    flat = columns.flatten()
    turned = {name: getattr(game, name)[order[:, :, None], columns[:, None]].transpose(0, 1).flatten(1)
              for name in ("cell", "previous")}
    return {"cell": turned["cell"], "board": game.board[:, flat], "previous": turned["previous"],
            "clock": game.clock[flat], "deadline": game.deadline[flat]}


class Mind:
    """What the search and the imagination ask of the networks, for L players and M states each: [L * M] in a row.

    told [L, M, (N-1) * G] is what the policy knows of the others' goals: the middle of the belief, as in a real game.
    goals [L, M, N-1, G] is one hypothesis about them for each state, by which they act: a draw from the belief.
    """

    def __init__(self, agent, moa, told, goals, uniform=False):
        self.uniform, self.shape = uniform, goals.shape[:3]
        length, _, others = self.shape
        # What stays the same for all positions is computed once: the goals' part of the first layers, their scaled rows.
        # The models of others are laid out [other, L], as the views' rows [other, L * M] are.
        order = torch.arange(length * others, device=goals.device).view(length, others).T.flatten()
        pairs = goals.permute(2, 0, 1, 3).flatten(0, 1)  # [(N-1) * L, M, G]
        w1, split = agent.w1 * agent.scale, told.shape[-1]
        self.goals = torch.cat([torch.baddbmm(agent.b1, told, w1[:, :split]),
                                torch.baddbmm(moa.view.bias[order], pairs, moa.goal[order])])  # [N * L, M, hidden], itself first
        weight = torch.cat([w1[:, split:], moa.view.weight[order] * moa.scale[:, None]])  # [N * L, F, hidden]
        self.clock = weight[:, -NUM_ACTIONS - 2:-NUM_ACTIONS]
        self.view = F.pad(weight, (0, 0, 0, 1)).flatten(0, 1)  # with a row of zeros after each one's
        self.begin = (torch.arange(len(weight), device=goals.device) * (weight.shape[1] + 1)).to(torch.int32)[:, None, None]
        self.hidden = moa.hidden.bias[order], moa.hidden.weight[order]
        self.action = moa.action.bias[order], moa.action.weight[order]
        self.own = agent

    def think(self, seen):
        """What RulesModel.see gives -> own log-probabilities [L * M, 7], value [L * M], the others' [L * M, N-1, 7]."""
        length, many, others = self.shape
        rows, clock, mask = seen
        rows = (rows.unflatten(1, (length, many)).flatten(0, 1) + self.begin).flatten(0, 1)  # [N * L * M, K]
        clock = clock.unflatten(0, (length, many)).repeat(others + 1, 1, 1)
        first = F.embedding_bag(rows, self.view, mode="sum").view_as(self.goals)
        first = first.add_(self.goals).baddbmm_(clock, self.clock)
        mask = mask.unflatten(1, (length, many)).flatten(0, 1)  # [N * L, M, 7]
        agent = self.own
        hidden = torch.tanh(torch.baddbmm(agent.b2, torch.tanh(first[:length]), agent.w2))
        log_probs = legal_log_softmax(torch.baddbmm(agent.b_actor, hidden, agent.w_actor), mask[:length])
        value = torch.baddbmm(agent.b_critic, hidden, agent.w_critic)
        mask = mask[length:]
        if self.uniform:
            chances = mask / mask.sum(-1, keepdim=True).clamp(min=1)
        else:
            hidden = F.relu(torch.baddbmm(self.hidden[0], F.relu(first[length:]), self.hidden[1]))
            chances = legal_log_softmax(torch.baddbmm(self.action[0], hidden, self.action[1]), mask).exp()
        chances = chances.unflatten(0, (others, length)).permute(1, 2, 0, 3).flatten(0, 1)
        return log_probs.flatten(0, 1), value.flatten(), chances


def improved_policy(log_probs, q, visits, value, beta):
    """softmax(log-policy + beta * Q), where an action never tried counts with the value of what was tried.

    The completed values and the improved policy are those of Gumbel MuZero (Danihelka et al. 2022, eq. 10-11, app. D).
    """
    policy = log_probs.exp()
    tried = (visits > 0).float()
    total = visits.sum(-1, keepdim=True)
    weighted = (policy * q * tried).sum(-1, keepdim=True) / (policy * tried).sum(-1, keepdim=True).clamp(min=1e-9)
    mixed = torch.where(total > 0, (value[..., None] + total * weighted) / (1 + total), value[..., None])
    return (log_probs + beta * torch.where(visits > 0, q, mixed)).log_softmax(-1), torch.where(visits > 0, q, mixed)


def sharpness(beta, floor, value, reward_scale):
    """beta for scaled rewards, for each position: divided by what is expected there, so that a small prize is sought as
    keenly in a poor game as a large one in a rich game."""
    if floor is None:
        return beta / reward_scale * torch.ones_like(value)[..., None]
    return beta / (value.abs() + floor * reward_scale)[..., None]


@torch.no_grad()
def search(model, mind, state, simulations, beta, floor, gamma, reward_scale, widening, generator, max_depth=64, outcomes=8):
    """Monte-Carlo tree search in many trees at once: one row of [T] for each.

    Node k of every tree is made in simulation k, so the arrays are [node * T + tree]. An action of one's own leads to
    several outcomes, one for each joint move met: a visit draws the others' actions anew; a new joint move adds a child
    while there are fewer than widening * sqrt(visits), else a child met before is taken by how often it was.
    -> visits [T, 7], Q [T, 7] (scaled rewards), root log-policy [T, 7], root value [T], depth reached [T]
    """
    trees, device = len(state["clock"]), state["clock"].device
    tree = torch.arange(trees, device=device)
    size = (simulations + 1) * trees
    log_probs, value, chances = mind.think(model.see(state))
    others = chances.shape[1]
    store = {name: torch.empty(*part.shape[:-1], size, dtype=part.dtype, device=device) for name, part in state.items()}
    policy = torch.empty(size, NUM_ACTIONS, device=device)
    values = torch.empty(size, device=device)
    drawn = torch.empty(size, others, NUM_ACTIONS, device=device)  # the others' chances, summed up for drawing
    rewards = torch.zeros(size, device=device)
    ended = torch.zeros(size, dtype=torch.bool, device=device)
    visits = torch.zeros(size, NUM_ACTIONS, device=device)
    totals = torch.zeros(size, NUM_ACTIONS, device=device)
    # [(node * T + tree) * 7 + action, outcome]: the child's number, -1 where there is none (and its moves mean nothing)
    child = torch.full((size * NUM_ACTIONS, outcomes), -1, dtype=torch.int32, device=device)
    child_moves = torch.empty(size * NUM_ACTIONS, outcomes, dtype=torch.int64, device=device)
    child_visits = torch.zeros(size * NUM_ACTIONS, outcomes, device=device)
    power = NUM_ACTIONS ** torch.arange(others, device=device)

    def put(number, state, log_probs, value, chances, reward=None, over=None):
        rows = slice(number * trees, (number + 1) * trees)
        for name, part in state.items():
            store[name][..., rows] = part
        policy[rows], values[rows], drawn[rows] = log_probs, value, chances.cumsum(-1)
        if reward is not None:
            rewards[rows], ended[rows] = reward * reward_scale, over
            values[rows] = torch.where(over, 0.0, value)

    put(0, state, log_probs, value, chances)
    beta = sharpness(beta, floor, value, reward_scale)
    depth_reached = torch.zeros(trees, device=device)
    for number in range(1, simulations + 1):
        row, path = tree, []  # the row of the node each tree stands at
        going = torch.ones(trees, dtype=torch.bool, device=device)
        parent, parent_action, parent_place, parent_moves = row, torch.zeros_like(row), torch.zeros_like(row), None
        leaf_row, is_new = row, torch.zeros_like(going)
        for depth in range(min(number, max_depth)):
            count, prior, total, value, chance = (part.index_select(0, row) for part in (visits, policy, totals, values, drawn))
            improved, _ = improved_policy(prior, total / count.clamp(min=1), count, value, beta)
            action = (improved.exp() - count / (1 + count.sum(-1, keepdim=True))).masked_fill(prior < -1e7, -9).argmax(-1)
            number_drawn = torch.rand(trees, others, 1, generator=generator, device=device) * (1 - 1e-6)
            moves = (chance <= number_drawn * chance[..., -1:]).sum(-1)  # [T, others]
            code = (moves * power).sum(-1)
            edge = row * NUM_ACTIONS + action
            known, known_moves, met = (part.index_select(0, edge) for part in (child, child_moves, child_visits))
            same = (known_moves == code[:, None]) & (known >= 0)  # [T, outcomes]
            children = (known >= 0).sum(-1)
            room = (children < outcomes) & (children < widening * (count.gather(1, action[:, None])[:, 0] + 1).sqrt())
            again = (met.cumsum(-1) <= torch.rand(trees, 1, generator=generator, device=device) * (1 - 1e-6)
                     * met.sum(-1, keepdim=True)).sum(-1).clamp(max=outcomes - 1)
            found = same.any(-1)
            slot = torch.where(found, same.to(torch.uint8).argmax(-1), torch.where(room, children, again))
            fresh = ~found & room & going
            place = edge * outcomes + slot  # of the outcome among all
            path.append((row, edge, place, going))
            parent = torch.where(going, row, parent)
            parent_action = torch.where(going, action, parent_action)
            parent_place = torch.where(going, place, parent_place)
            parent_moves = moves if parent_moves is None else torch.where(going[:, None], moves, parent_moves)
            is_new |= fresh
            reached = known.gather(1, slot[:, None])[:, 0]
            reached_row = torch.where(fresh, number * trees + tree, reached * trees + tree)
            leaf_row = torch.where(going, reached_row, leaf_row)
            depth_reached += going
            going = going & ~fresh & ~ended[reached_row.clamp(min=0)]
            row = torch.where(going, reached_row, row)
            if not going.any():
                break
        before = {name: part.index_select(-1, parent) for name, part in store.items()}
        after, reward, over = model.step(before, torch.cat([parent_action[None], parent_moves.T]))
        put(number, after, *mind.think(model.see(after)), reward, over)
        value = values[leaf_row]
        reached_row = leaf_row
        for row, edge, place, valid in reversed(path):
            # where the path ended higher up, this step was not taken
            value = torch.where(valid, rewards[reached_row] + gamma * value, value)
            once = valid.float()
            visits.view(-1).index_add_(0, edge, once)
            totals.view(-1).index_add_(0, edge, value * once)
            child_visits.view(-1).index_add_(0, place, once)
            reached_row = torch.where(valid, row, reached_row)
        for kept, new in ((child.view(-1), number), (child_moves.view(-1), (parent_moves * power).sum(-1))):
            kept[parent_place] = torch.where(is_new, new, kept[parent_place])
    root = slice(0, trees)
    q = totals[root] / visits[root].clamp(min=1)
    return visits[root], q, policy[root], values[root], depth_reached / simulations


# =================================================================================== beliefs

PREY_MEMORY = 0.9  # an episode's catch counts this much less with each episode that follows, in --goals prey


class Minds(nn.Module):
    """All networks of L HOP+ players, stacked: nothing is shared between them.

    Pair l * (N-1) + k - 1 is player l's model of the k-th player after it.
    """

    def __init__(self, args, num_inputs, num_hops):
        super().__init__()
        others = len(args.players) - 1
        size, dim, final = args.hidden_size, args.goal_dim, args.final_time
        self.agent = Agent(num_hops, others * dim + num_inputs, size, final, args.seed)
        self.prior = GoalPrior(num_hops, len(args.players), args.height * args.width, args.vae_size, dim, args.seed)
        self.moa = ActionModel(num_hops * others, num_inputs, size, dim, final, args.seed + 1)
        self.inference = GoalInference(num_hops * others, num_inputs, len(args.players), size, dim, args.hypotheses, final,
                                       args.seed + 2)

    def take_over(self, goals):
        """Starts every player's goal prior, inference and models of others from those of the warm-up (Goals, L = 1)."""
        for part in ("prior", "moa", "inference"):
            mine, given = getattr(self, part).state_dict(), getattr(goals, part).state_dict()
            getattr(self, part).load_state_dict({
                name: value if value.shape == mine[name].shape else value.expand_as(mine[name]).clone()
                for name, value in given.items()})


def views(observation):
    """Each player's view as the goal prior takes it: planes, how soon the clock ends, legal actions: [N, B, V]."""
    planes = observation["observation"].permute(1, 0, 2, 3, 4).flatten(2)
    mask = observation["action_mask"].transpose(0, 1).to(torch.uint8)
    soon = (observation["steps_left"][:, None] <= SOON.to(mask.device)).to(torch.uint8)
    return torch.cat([planes, soon.expand(len(mask), -1, -1), mask], -1)


def next_episode(carry, over, hypotheses):
    """Where an episode is over [.., B], what is known of a player stays in the memory, its last view goes."""
    is_memory = torch.arange(carry.shape[-1], device=carry.device) < hypotheses
    return torch.where(over[..., None] & ~is_memory, 0.0, carry)


class Meeting:
    """The game and who sits where: HOP+ players with their beliefs, trained players, and all the others (a Lineup).

    A belief is a mean and a log-variance of each other player's goal, [L, N-1, B, G]. Within an episode it follows from
    what was seen so far; across episodes the inference keeps its memory of a player: how likely each of its hypotheses,
    ways to play that it has learned, makes all that was seen, slowly forgetting. With --goals prey the mean holds the probabilities of stag and hare instead.
    """

    def __init__(self, args, num_envs, seed, minds=None, model=None, episodes=1):
        players = list(args.players)
        self.args, self.device = args, args.device
        self.names = [f"player_{seat + 1}" for seat in range(len(players))]
        self.hop_seats = [seat for seat, name in enumerate(players) if name == "hop"]
        self.trained_seats = [seat for seat, name in enumerate(players) if ".pt:" in name]
        self.seats = torch.tensor(self.hop_seats, dtype=torch.int64, device=args.device)
        make_game = lambda num, seed: BatchedStagHunt(
            num, num_players=len(players), device=args.device, seed=seed,
            **{field.name: getattr(args, field.name) for field in dataclasses.fields(GameArgs)})
        self.game = make_game(num_envs, seed)
        own = set(self.hop_seats + self.trained_seats)
        self.lineup = Lineup([None if seat in own else name for seat, name in enumerate(players)], self.game, seed, episodes)
        self.observation = self.game.observe()
        n, hops = len(players), len(self.hop_seats)
        self.order = (self.seats[:, None] + torch.arange(n, device=args.device)) % n  # [L, N], each player first for itself
        self.pairs = self.order[:, 1:].flatten()  # [P] the seat that is modelled
        num_inputs = features(self.observation).shape[-1]
        self.minds = minds or Minds(args, num_inputs, hops).to(args.device)
        self.model = model or RulesModel(make_game(1, 0))
        self.trained = None
        if self.trained_seats:
            self.trained = load_policies([players[seat] for seat in self.trained_seats], num_inputs).to(args.device)
        self.carry = self.minds.inference.start(num_envs).detach().clone()
        self.counts = torch.ones(len(self.pairs), num_envs, 2, device=args.device)  # what each was seen to catch
        self.log_prey = self.counts.log()
        self.hop_of = torch.tensor([self.hop_seats.index(seat) if seat in self.hop_seats else -1
                                    for seat in self.pairs.tolist()], dtype=torch.int64, device=args.device)

    # ---------------------------------------------------------------------------- what is believed

    def believe(self, x):
        """Takes in what is seen now, features [N, B, F]. -> mean and log-variance of the others' goals [L, N-1, B, G]"""
        seen = x[self.pairs].float()
        if self.args.goals == "prey":
            mean = F.pad(self.log_prey.softmax(-1), (0, self.args.goal_dim - 2))
            logvar = torch.zeros_like(mean)
        else:
            self.carry, mean, logvar = self.minds.inference.step(self.carry, seen)
        shape = (len(self.hop_seats), x.shape[0] - 1)
        return mean.unflatten(0, shape), logvar.unflatten(0, shape)

    def update_belief(self, x, out):
        """Takes in what was just played; where an episode is over, the next one begins with what is remembered."""
        over = out["over"]
        if self.args.goals == "prey":
            action, present = out["action"].T[self.pairs].long(), out["present"].T[self.pairs]
            seen = x[self.pairs].float()
            part, mask = self.minds.moa.view_part(seen), seen[..., -NUM_ACTIONS:] != 0
            for prey in range(2):  # how likely does each goal make the action just seen?
                goal = torch.zeros(*seen.shape[:2], self.args.goal_dim, device=seen.device)
                goal[..., prey] = 1
                log_probs = self.minds.moa.from_parts(part, self.minds.moa.goal_part(goal), mask)
                likely = log_probs.gather(-1, action[..., None])[..., 0].clamp(min=-5)
                self.log_prey[..., prey] += torch.where(present, likely, 0.0)
            caught = out["left"].T[self.pairs][..., None] & (action[..., None] == torch.tensor(
                [HUNT_STAG, HUNT_HARE], device=action.device))
            self.counts += caught
            faded = 1 + (self.counts - 1) * PREY_MEMORY
            self.counts = torch.where(over[:, None], faded, self.counts)
            prior = (self.counts / self.counts.sum(-1, keepdim=True)).log()
            self.log_prey = torch.where(over[:, None], prior, self.log_prey)
        else:
            self.carry = next_episode(self.carry, over, self.args.hypotheses)

    def draw_goals(self, mean, logvar, generator):
        """One hypothesis of the others' goals from the belief, of the same shape."""
        if self.args.goals in ("zero", "none"):
            return torch.zeros_like(mean)
        if self.args.goals == "prey":
            hare = torch.rand(mean.shape[:-1], generator=generator, device=mean.device) >= mean[..., 0]
            return F.pad(F.one_hot(hare.long(), 2).to(mean.dtype), (0, mean.shape[-1] - 2))
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        return mean + (0.5 * logvar).exp() * noise

    def told(self, mean):
        """What the policy is told of the others' goals: [L, N-1, B, G] -> [L, B, (N-1) * G]."""
        if self.args.goals in ("zero", "none"):
            mean = torch.zeros_like(mean)
        return mean.transpose(1, 2).flatten(2)

    # ------------------------------------------------------------------------------- one joint move

    @torch.no_grad()
    def act(self, generator, how, greedy=False):
        """One joint move [B, N], and a dict of what led to it, each [L, B, ...]."""
        x = features(self.observation)
        out = {"x": x, "carry": self.carry}
        mean, logvar = self.believe(x)
        told = self.told(mean)
        log_probs, value = self.minds.agent(torch.cat([told, x[self.seats].float()], -1))
        improved = log_probs
        if how != "none" and len(self.hop_seats):
            improved, out["search"] = self.plan(mean, logvar, log_probs, generator, how)
        action = improved.argmax(-1) if greedy else sample_actions(improved.exp(), generator)
        actions = self.lineup.act(self.game, self.observation)
        if self.trained is not None:
            chances, _ = self.trained(x[self.trained_seats])
            actions[:, self.trained_seats] = sample_actions(chances.exp(), generator).T
        actions[:, self.seats] = action.T
        out |= {"told": told, "actions": action, "values": value, "mean": mean, "logvar": logvar, "policy": log_probs,
                "improved": improved, "logprobs": log_probs.gather(-1, action[..., None]).squeeze(-1),
                "entropy": -(log_probs.exp() * log_probs).sum(-1)}
        return actions, out

    def plan(self, mean, logvar, log_probs, generator, how):
        """Searches the positions of those that are there. -> log of the improved policy [L, B, 7], and what was found"""
        args, trees = self.args, self.args.trees
        present = (self.game.cell < self.game.cells)[self.seats]  # [L, B]
        most = max(int(present.sum(1).max()), 1)
        columns = (~present).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]  # those that are there come first
        length, many = columns.shape
        index = columns[:, None, :, None].expand(-1, mean.shape[1], -1, mean.shape[3])
        mean, logvar = (part.gather(2, index).transpose(1, 2) for part in (mean, logvar))  # [L, M, N-1, G]
        mean, logvar = (part[:, :, None].expand(-1, -1, trees, -1, -1).flatten(1, 2) for part in (mean, logvar))
        goals = self.draw_goals(mean, logvar, generator)  # [L, M * trees, N-1, G]
        state = ego_first(self.game, self.seats, columns.repeat_interleave(trees, 1))
        told = self.told(mean.transpose(1, 2))
        mind = Mind(self.minds.agent, self.minds.moa, told, goals, args.goals == "none")
        found = search(self.model, mind, state, max(args.simulations // trees, 1), args.beta, args.prize_floor, args.gamma,
                       args.reward_scale, args.widening, generator, 1 if how == "one-step" else 64)
        # over the trees: visits added, values averaged by them, the policies averaged
        visits, q, policy, value, depth = (part.unflatten(0, (length, many, trees)) for part in found)
        total = visits.sum(2)
        q = (q * visits).sum(2) / total.clamp(min=1)
        policy = policy.exp().mean(2)
        mask = policy > 0
        value = value.mean(2)
        beta = sharpness(args.beta, args.prize_floor, value, args.reward_scale)
        better, completed = improved_policy(policy.clamp(min=1e-9).log(), q, total, value, beta)
        better = better.masked_fill(~mask, -1e8).log_softmax(-1)
        there = present.gather(1, columns)
        gain = ((better.exp() - policy) * completed).sum(-1) / args.reward_scale
        changed = better.argmax(-1) != policy.argmax(-1)
        spread = columns[..., None].expand(-1, -1, NUM_ACTIONS)
        improved = log_probs.scatter(1, spread, torch.where(there[..., None], better, log_probs.gather(1, spread)))
        full = torch.zeros_like(log_probs)
        return improved, {"gain": gain[there].mean(), "changed": changed[there].float().mean(), "depth": depth.mean(),
                          "q": full.scatter(1, spread, completed / args.reward_scale),
                          "visits": full.scatter(1, spread, total), "decisions": there.sum()}

    def play(self, actions, x, restart=True):
        """Plays a joint move; begins new episodes where one is over, unless told not to. -> what advance returns"""
        out = self.game.advance(actions)
        out["over"] = out["terminated"] | out["truncated"]
        out["ended"] = out["left"] | out["over"][:, None]  # this player's own game is over [B, N]
        self.observation = out["after"] = self.game.observe()
        if restart:
            self.observation = self.game.reset(out["over"])
            self.lineup.reset(out["over"])
        self.update_belief(x, out)
        return out

    def get_state(self):
        return {"game": self.game.get_state(), "lineup": self.lineup.get_state(), "carry": self.carry.clone(),
                "counts": self.counts.clone(), "log_prey": self.log_prey.clone()}

    def set_state(self, state):
        self.game.set_state(state["game"])
        self.lineup.set_state(state["lineup"])
        self.carry, self.counts, self.log_prey = (state[name].clone() for name in ("carry", "counts", "log_prey"))
        self.observation = self.game.observe()


# ================================================================================== learning


class Returns:
    """Sums up the episodes' returns as they are played, and keeps the last 500."""

    def __init__(self, num_envs, num_players, device):
        self.running = torch.zeros(num_envs, num_players, device=device)
        self.last = torch.zeros(0, num_players, device=device)

    def add(self, reward, over):
        """Takes in the rewards [B, N] of a step, and where an episode is over [B]."""
        self.running += reward
        self.last = torch.cat([self.last, self.running[over]])[-500:]
        self.running *= ~over[:, None]


def compute_gae(rewards, values, ends, present, gamma, gae_lambda, trace=None):
    """Generalised advantages (Schulman et al. 2016, eq. 16) and value targets of [T, ...]; values are [T+1, ...].

    Where a player's game ends nothing comes after: no value, no later advantage. Where it is absent all is 0.
    trace [T, ...], for actions drawn by an older policy: min(1, probability now / probability then). A later
    advantage counts by the trace of the action that led to it, as in V-trace (Espeholt et al. 2018) and Retrace.
    """
    trace = torch.ones_like(rewards) if trace is None else trace
    goes_on = (~ends).to(rewards.dtype)
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


def ppo_loss(log_probs, value, batch, args, ent_coef):
    """The clipped loss of PPO (Schulman et al. 2017) of each learner: [L], and what it is made of.

    log_probs [L, M, 7] and value [L, M] are the networks' answers now; batch holds [L, M] of actions, logprobs,
    values, advantages, returns, trace, and weight: 1 for a sample, 0 for a step at which the player was absent.
    """
    weight = batch["weight"]
    logratio = log_probs.gather(-1, batch["actions"][..., None]).squeeze(-1) - batch["logprobs"]
    ratio = logratio.exp()
    advantages = batch["advantages"]
    if args.norm_adv:
        centred = advantages - masked_mean(advantages, weight)[:, None]
        advantages = centred / (masked_mean(centred.square(), weight).sqrt()[:, None] + 1e-8)
    surrogate = torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef))
    policy_loss = -masked_mean(surrogate * batch["trace"], weight)
    error = (value - batch["returns"]).square()
    if args.clip_vloss:
        clipped = batch["values"] + (value - batch["values"]).clamp(-args.clip_coef, args.clip_coef)
        error = torch.maximum(error, (clipped - batch["returns"]).square())
    value_loss = 0.5 * masked_mean(error, weight)
    entropy = masked_mean(-(log_probs.exp() * log_probs).sum(-1), weight)
    loss = policy_loss - ent_coef * entropy + args.vf_coef * value_loss
    with torch.no_grad():
        approx_kl = masked_mean(ratio - 1 - logratio, weight)  # http://joschu.net/blog/kl-approx.html
        clipfrac = masked_mean(((ratio - 1).abs() > args.clip_coef).float(), weight)
    parts = {"policy_loss": policy_loss, "value_loss": value_loss / args.reward_scale**2, "entropy": entropy,
             "approx_kl": approx_kl, "clipfrac": clipfrac}
    return loss, {key: value.detach() for key, value in parts.items()}


def clip_gradients(agent, max_norm):
    """Shortens the gradient of each learner to max_norm, on its own."""
    gradients = [parameter.grad for parameter in agent.parameters() if parameter.grad is not None]
    norm = sum(gradient.flatten(1).square().sum(1) for gradient in gradients).sqrt()  # [L]
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)[:, None, None]
    for gradient in gradients:
        gradient.mul_(factor)


def update(agent, network, optimizer, data, trace, args, ent_coef, soft_coef, generator):
    """One PPO update of all learners on data [T, L, M]. -> the means of the losses over the update, each [L]"""
    rewards = data["rewards"] + soft_coef * args.reward_scale * data["entropy"]
    advantages, returns = compute_gae(rewards, data["values"], data["ends"], data["present"], args.gamma,
                                      args.gae_lambda, trace)
    if args.prize_floor is not None:  # in a poor game a small prize counts as much as a large one in a rich game
        advantages = advantages / (data["values"][:-1].abs() + args.prize_floor * args.reward_scale)
    data = {**data, "values": data["values"][:-1], "advantages": advantages, "returns": returns,
            "trace": torch.ones_like(advantages) if trace is None else trace,
            "weight": data["present"].to(advantages.dtype)}
    columns = ("x", "actions", "logprobs", "values", "advantages", "returns", "trace", "weight")
    flat = {key: data[key].transpose(0, 1).flatten(0, 2) for key in columns}  # [L * samples, ...]
    weight = flat["weight"].view(advantages.shape[1], -1)  # [L, samples]
    num_learners, samples = weight.shape
    offset = torch.arange(num_learners, device=weight.device)[:, None] * samples
    most = max(int(weight.sum(1).max()), args.num_minibatches)
    active = torch.ones(num_learners, dtype=torch.bool, device=weight.device)
    totals = []
    for _ in range(args.update_epochs):
        # a random order with the absent at the end: the longest list of samples is as far as one need go
        order = (torch.rand(weight.shape, generator=generator, device=weight.device) - weight).argsort(1)[:, :most]
        for rows in order.chunk(args.num_minibatches, 1):
            index = (rows + offset).flatten()
            batch = {key: value.index_select(0, index).unflatten(0, rows.shape) for key, value in flat.items()}
            log_probs, value = network(batch["x"])
            loss, parts = ppo_loss(log_probs, value, batch, args, ent_coef)
            optimizer.zero_grad()
            loss.sum().backward()
            clip_gradients(agent, args.max_grad_norm)
            if args.target_kl is None:
                optimizer.step()
            else:
                active = active & (parts["approx_kl"] <= args.target_kl)
                step_some(agent, optimizer, active)
            totals.append(parts)
    means = {key: torch.stack([parts[key] for parts in totals]).mean(0) for key in totals[0]}
    value_error = flat["returns"] - flat["values"]
    spread = [variance(column.view(num_learners, -1), weight) for column in (value_error, flat["returns"])]
    means["explained_variance"] = 1 - spread[0] / spread[1].clamp(min=1e-8)
    return means


def variance(x, weight):
    """The variance of each row over its samples: [L, M] -> [L]."""
    return masked_mean((x - masked_mean(x, weight)[:, None]).square(), weight)


def step_some(agent, optimizer, active):
    """Lets the optimiser step, and takes the step back for the learners that are not active [L]."""
    tensors = [*agent.parameters()] + [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    before = [tensor.detach().clone() for tensor in tensors]
    optimizer.step()
    with torch.no_grad():
        for tensor, old in zip(tensors, before):
            tensor.copy_(torch.where(active[:, None, None], tensor, old))


def gaussian_kl(mean, logvar, other_mean, other_logvar):
    """KL(N(mean, var) || N(other)) of diagonal normals, summed over the last dimension."""
    distance = (logvar.exp() + (mean - other_mean).square()) * (-other_logvar).exp()
    return 0.5 * (distance - 1 + other_logvar - logvar).sum(-1)


def load_goals(path, flag, args, num_inputs):
    """The networks of a checkpoint of this script; ones that do not fit the flags are refused."""
    checkpoint = load_checkpoint(path, flag)
    if checkpoint["script"] != "pretrain_vae.py":
        raise Refused(f"{flag}: {path} holds no goals, it was written by {checkpoint['script']}")
    for name in ("height", "width", "num_players", "goal_dim", "hidden_size", "vae_size", "hypotheses"):
        trained, given = checkpoint["config"][name], getattr(args, name)
        if trained != given:
            raise Refused(f"--{name.replace('_', '-')} {given} does not fit {flag}, which was trained with {trained}")
    models = Goals(args, num_inputs)
    models.load_state_dict(checkpoint["goals"])
    return models


@torch.no_grad()
def record_meetings(args, num_envs, num_steps):
    """Plays meetings of rule-based players of --mix, the data of the warm-up: dict of [T, ...] as play_steps gives it.

    The same players meet for the whole record; in half of the meetings all of one kind, else each drawn for itself.
    """
    game = BatchedStagHunt(num_envs, num_players=len(args.players), device=args.device, seed=args.seed + 7,
                           **{field.name: getattr(args, field.name) for field in dataclasses.fields(GameArgs)})
    generator = torch.Generator(args.device).manual_seed(args.seed)
    rules = []
    for name in args.mix:
        if player_rule(name) is None:
            raise Refused(f"--mix {name!r} is not known; there are {PLAYER_NAMES}")
        rules.append(player_rule(name))
    kind = torch.randint(len(rules), (num_envs, game.num_players), generator=generator, device=args.device)
    kind = torch.where(torch.arange(num_envs, device=args.device)[:, None] % 2 == 0, kind[:, :1], kind)
    rule = torch.tensor(rules, dtype=torch.float64, device=args.device)[kind].float()
    never, steps = torch.zeros(num_envs, dtype=torch.bool, device=args.device), []
    for _ in range(num_steps):
        step = {"x": features(game.observe()), "state": {name: getattr(game, name).clone() for name in STATE}}
        out = game.advance(sample_actions(rule_probabilities(game, rule, never), generator))
        over = out["terminated"] | out["truncated"]
        step |= {"joint": out["action"].T.long(), "rewards": out["reward"].T, "left": out["left"].T, "over": over,
                 "ends": (out["left"] | over[:, None]).T, "present": out["present"].T, "after": views(game.observe())}
        steps.append(step)
        game.reset(over)
    data = {key: torch.stack([step[key] for step in steps]) for key in steps[0] if key != "state"}
    data["state"] = {name: torch.stack([step["state"][name] for step in steps], -2) for name in STATE}  # [.., T, B]
    return data


def cut_steps(data, begin, end, envs=slice(None)):
    """Some steps and environments of a dict of play_steps or record_meetings."""
    cut = {}
    for key, value in data.items():
        if key == "state":
            cut[key] = {name: part[..., begin:end, envs] for name, part in value.items()}
        else:  # the environment is the last dimension, or the last but one
            value = value[begin:end]
            cut[key] = value[:, envs] if key == "over" else value[:, :, envs]
    return cut


WARMUP_RATE = 4e-3  # step size of Adam at the start of both parts of the warm-up


def warm_up_goals(args, num_inputs, record):
    """Learns goals, their inference and a model of others from the meetings of the record. -> Goals (L = 1)"""
    flags = SimpleNamespace(**vars(args) | {"num_players": len(args.players)})
    if args.vae_checkpoint:
        path = args.vae_checkpoint
        path = os.path.join(path, "checkpoint.pt") if os.path.isdir(path) else path
        return load_goals(path, f"--vae-checkpoint {args.vae_checkpoint}", flags, num_inputs).to(args.device)
    goals = Goals(flags, num_inputs).to(args.device)
    optimizer = torch.optim.Adam(goals.parameters(), lr=WARMUP_RATE, eps=1e-5, fused=True)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    steps, envs = record["over"].shape
    pieces = [piece for _ in range(args.warmup_epochs) for piece in torch.randperm(envs, generator=generator, device=args.device).split(16)]
    for done, piece in enumerate(tqdm(pieces, desc="warming up: goals", leave=False, dynamic_ncols=True)):
        for group in optimizer.param_groups:
            group["lr"] = WARMUP_RATE * (1 - done / len(pieces))
        carry = None
        for begin in range(0, steps, args.final_time):
            data = cut_steps(record, begin, begin + args.final_time, piece)
            players = len(data["x"][0])
            row = lambda key: data[key].transpose(1, 2).flatten(1, 2)[None]  # [1, T, B * N, ...]
            x, action, weight = row("x").float(), row("joint"), row("present").float().flatten(1)
            where = last_steps(row("ends"), args.horizon)
            mean, logvar = goals.prior.encode(row("after").float().flatten(1, 2))
            noise = torch.randn(2, *mean.shape, generator=generator, device=mean.device)
            goal = mean + (0.5 * logvar).exp() * noise[0]
            recon = rebuild_loss(goals.prior.decode(goal.detach()), row("after"), goals.prior.cells, players)
            index = where.flatten(1)[..., None].expand_as(goal)
            over = data["over"].repeat_interleave(players, 1)
            carry = goals.inference.start(over.shape[1]) if carry is None else carry.detach()
            inferred, inferred_logvar, likely, carry = infer_goals(goals.inference, x, carry, action, over)
            inferred, inferred_logvar = inferred.flatten(1, 2), inferred_logvar.flatten(1, 2)
            guess = inferred + (0.5 * inferred_logvar).exp() * noise[1]
            loss = args.inference_weight * masked_mean(gaussian_kl(
                mean.gather(1, index).detach(), logvar.gather(1, index).detach(), inferred, inferred_logvar), weight)
            loss = loss + 1e-3 * masked_mean(gaussian_kl(mean, logvar, torch.zeros_like(mean), torch.zeros_like(mean)), weight)
            loss = loss + action_loss(goals.moa, x.flatten(1, 2), (goal.gather(1, index), guess, inferred), action.flatten(1),
                                      weight) + masked_mean(recon, weight) - masked_mean(likely.flatten(1), weight)
            optimizer.zero_grad()
            loss.sum().backward()
            for part in (goals.prior, goals.moa, goals.inference):
                clip_gradients(part, args.max_grad_norm)
            optimizer.step()
    return goals


def last_steps(ends, horizon):
    """For each step of a player's game [P, T, B] the last one within the horizon, as rows of [T * B] laid out flat."""
    pairs, steps, envs = ends.shape
    column = torch.arange(envs, device=ends.device)
    where = torch.empty(ends.shape, dtype=torch.int64, device=ends.device)
    end = torch.full((pairs, envs), steps - 1, device=ends.device)
    for t in reversed(range(steps)):
        end = torch.where(ends[:, t], t, end)
        where[:, t] = end.clamp(max=t + horizon - 1) * envs + column
    return where


def rebuild_loss(rebuilt, view, cells, players):
    """-log-likelihood of views [1, T, B, V], as the decoder rebuilds them: [1, T * B]."""
    planes = view[..., :cells * (players + 3)].flatten(1, 2).unflatten(-1, (cells, players + 3))
    each = planes[..., :players].transpose(2, 3).float()  # [1, M, N, C]
    each = torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1)
    ground = planes[..., players:].float()
    ground = torch.cat([1 - ground.sum(-1, keepdim=True), ground], -1)  # [1, M, C, 4]
    return -(rebuilt[0] * each).sum((-2, -1)) - (rebuilt[1] * ground).sum((-2, -1))


def action_loss(moa, x, goals, action, weight):
    """-log-probability of the actions [P, M] under the model of others, summed over several versions of the goals: [P]."""
    part, mask, loss = moa.view_part(x), x[..., -NUM_ACTIONS:] != 0, 0.0
    for goal in goals:
        log_probs = moa.from_parts(part, moa.goal_part(goal), mask)
        loss = loss - masked_mean(log_probs.gather(-1, action[..., None])[..., 0], weight)
    return loss


def warm_up_world(args, game):
    """Learns the world model of this board from mixed games. -> WorldModel"""
    if args.world_model_checkpoint:
        path = args.world_model_checkpoint
        path = os.path.join(path, "checkpoint.pt") if os.path.isdir(path) else path
        model, _ = load_world_model(path, "--world-model-checkpoint", args.device)
        if not isinstance(model, WorldModel):
            raise Refused(f"--world-model-checkpoint {path} holds a model of --model mlp, the search needs --model local")
        return model
    board = {field.name: getattr(args, field.name) for field in dataclasses.fields(GameArgs)}
    data = collect(board | {"num_players": len(args.players)}, 150 * args.warmup_updates, args.seed, args.device)
    torch.manual_seed(args.seed)
    model = WorldModel(args.hidden_size, common_rewards([data]), seen_kinds([data])).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=WARMUP_RATE, fused=True)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    for number in tqdm(range(args.warmup_updates), desc="warming up: world model", leave=False, dynamic_ncols=True):
        for group in optimizer.param_groups:
            group["lr"] = WARMUP_RATE * 0.5 * (1 + math.cos(math.pi * number / args.warmup_updates))
        rows = torch.randint(rows_of(data), (1024,), generator=generator, device=args.device)
        terms = model.loss_terms(pick_rows(data, rows))
        loss = terms["planes"].sum() + 10 * terms["reward"] + terms["end"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def play_steps(meeting, returns, num_steps, generator, how):
    """Plays num_steps real steps. -> dict of [T, ...]: what the players saw, believed, did and got."""
    steps = []
    for _ in range(num_steps):
        state = {name: getattr(meeting.game, name).clone() for name in STATE}
        actions, seen = meeting.act(generator, how)
        seen["chances"] = meeting.lineup.probabilities(meeting.game).transpose(0, 1)  # of rule-based players, exactly
        out = meeting.play(actions, seen["x"])
        returns.add(out["reward"], out["over"])
        seen |= {"state": state, "joint": out["action"].T.long(), "rewards": out["reward"].T, "ends": out["ended"].T,
                 "left": out["left"].T, "present": out["present"].T, "over": out["over"], "after": views(out["after"])}
        steps.append(seen)
    x = features(meeting.observation)
    carry, counts = meeting.carry, meeting.log_prey
    mean, _ = meeting.believe(x)
    meeting.carry, meeting.log_prey = carry, counts  # only a look ahead
    last = meeting.minds.agent(torch.cat([meeting.told(mean), x[meeting.seats].float()], -1))[1]
    data = {key: torch.stack([step[key] for step in steps]) for key in steps[0] if key not in ("state", "search")}
    data["state"] = {name: torch.stack([step["state"][name] for step in steps], -2) for name in STATE}  # [.., T, B]
    data["values"] = torch.cat([data["values"], last[None]])
    if "search" in steps[0]:
        data["search"] = {key: torch.stack([step["search"][key] for step in steps]).float().mean()
                          for key in ("gain", "changed", "depth")}
        data["decisions"] = sum(step["search"]["decisions"] for step in steps)
    return data


class Imagination:
    """Games that go on in the players' heads: each one's own policy against models of the others.

    A game starts from a state of a real game, with a draw of the others' goals from what is believed of them there. It
    ends as real ones end, and another begins.
    """

    def __init__(self, meeting, num, generator):
        self.meeting, self.num, self.generator = meeting, num, generator
        self.state = self.told = self.goals = self.data = None

    def start_from(self, data):
        """Takes recorded games to start from, each at any step at which the player is there, more often at its begin (--fresh)."""
        meeting, args = self.meeting, self.meeting.args
        self.data, self.starts = data, {name: part.flatten(-2) for name, part in data["state"].items()}  # [.., T * B]
        present = data["present"][:, meeting.seats].transpose(0, 1).flatten(1).float()  # [L, T * B]
        first = present * (self.starts["clock"] == 0)
        share = first.sum(1, keepdim=True).clamp(min=1) / present.sum(1, keepdim=True).clamp(min=1)
        self.chance = present + first * args.fresh / (share * (1 - args.fresh) + 1e-9) + 1e-9

    def draw_states(self):
        """Draws steps of the recorded games. -> rows [L, num], states there"""
        picked, flat = torch.multinomial(self.chance, self.num, replacement=True, generator=self.generator), self.starts
        turned = {name: flat[name][self.meeting.order[:, :, None], picked[:, None]].transpose(0, 1).flatten(1)
                  for name in ("cell", "previous")}
        column = picked.flatten()
        return picked, {"cell": turned["cell"], "board": flat["board"][:, column], "previous": turned["previous"],
                        "clock": flat["clock"][column], "deadline": flat["deadline"][column]}

    def go_on(self, over, moves):
        """Begins other games where one is over [L, num]; moves [L * num, N-1] is what the others just did."""
        picked, state = self.draw_states()
        each = torch.arange(len(picked), device=picked.device)[:, None]
        at = lambda belief: belief.permute(1, 0, 3, 2, 4).flatten(1, 2)[each, picked]  # [L, num, N-1, G]
        mean, logvar = at(self.data["mean"]), at(self.data["logvar"])
        told, goals = self.meeting.told(mean.transpose(1, 2)), self.meeting.draw_goals(mean, logvar, self.generator)
        if self.state is None:
            self.state, self.told, self.goals = state, told, goals
        self.state = {name: torch.where(over.flatten(), state[name], part) for name, part in self.state.items()}
        self.told = torch.where(over[:, :, None], told, self.told)
        self.goals = torch.where(over[:, :, None, None], goals, self.goals)

    def think(self, x):
        """Of the present states, whose features are x [N, L * num, F]: what the policy is told [L, num, ..], its
        log-probabilities [L * num, 7], values [L * num], and the others' chances [L * num, N-1, 7]."""
        minds = self.meeting.minds
        mind = Mind(minds.agent, minds.moa, self.told, self.goals, self.meeting.args.goals == "none")
        return self.told, *mind.think(self.meeting.model.see(self.state))

    @torch.no_grad()
    def play(self, data, num_steps):
        """num_steps more steps of all games. -> data as PPO's update takes it"""
        meeting, args = self.meeting, self.meeting.args
        shape = (len(meeting.hop_seats), self.num)
        if data is not self.data:
            self.start_from(data)
        if self.state is None:
            self.go_on(torch.ones(shape, dtype=torch.bool, device=meeting.seats.device), None)
        out = {key: [] for key in ("x", "actions", "logprobs", "entropy", "values", "rewards", "ends")}
        for _ in range(num_steps):
            x = meeting.model.features(self.state)
            told, log_probs, value, chances = self.think(x)
            action, moves = sample_actions(log_probs.exp(), self.generator), sample_actions(chances, self.generator)
            out["x"].append(torch.cat([told, x[0].float().unflatten(0, shape)], -1))
            accompanied = (self.state["cell"][1:] < meeting.game.cells).any(0)  # alone, nothing is left to be tried out together
            self.state, reward, over = meeting.model.step(self.state, torch.cat([action[None], moves.T]))
            for key, part in (("actions", action), ("logprobs", log_probs.gather(-1, action[:, None])[:, 0]),
                              ("entropy", -(log_probs.exp() * log_probs).sum(-1) * accompanied), ("values", value),
                              ("rewards", reward * args.reward_scale), ("ends", over)):
                out[key].append(part.unflatten(0, shape))
            self.go_on(over.view(shape), moves)
        out["values"].append(self.think(meeting.model.features(self.state))[2].unflatten(0, shape))
        out = {key: torch.stack(value) for key, value in out.items()}
        return out | {"present": torch.ones_like(out["ends"])}

    def get_state(self):
        return self.state, self.told, self.goals

    def set_state(self, state):
        self.state, self.told, self.goals = state


class Strangers(Imagination):
    """Meetings with strangers, imagined: episode after episode with the same others, who play like those of the warm-up.

    What the warm-up's inference knew of a player at the end of a recorded meeting is taken as its type: with it and its
    present view a stranger has a goal at each step, and acts by the warm-up's model of others. In some meetings (--tremble)
    their hands tremble: a share of their actions, from none to all, is drawn at random from the legal ones, so that
    there are more ways to play than the record shows. The player's own belief about them follows what they do while it is
    there itself, within the episode and on to the next; the policy learns what to make of each, and the inference to
    tell them apart (`learn_strangers`).

    The strangers' networks stay as the warm-up left them: those of self-play learn that whoever stands on the stag hunts it,
    and one such hunt in twenty games makes waiting among hare hunters look worth while.
    """

    MEETING = 8  # calls of `play` that a meeting lasts, on average
    LESSON = 64  # games of which the models of others learn

    def __init__(self, meeting, num, generator, record, goals):
        super().__init__(meeting, num, generator)
        self.networks = goals  # of the warm-up
        self.start_from({key: record[key] for key in ("state", "present")})
        self.cast = self.types_of(record)[meeting.pairs]  # [P, meetings, K]
        self.types = self.tremble = self.carry = None

    @torch.no_grad()
    def types_of(self, record):
        """What the inference knows of each player at the end of each recorded meeting: [N, meetings, K]."""
        answer, inference = [], self.networks.inference
        steps, meetings = record["over"].shape
        for first in range(0, meetings, 32):
            part = cut_steps(record, 0, steps, slice(first, first + 32))
            players = part["x"].shape[1]
            row = lambda key: part[key].transpose(1, 2).flatten(1, 2)[None]  # [1, T, B * N, ...]
            over = part["over"].repeat_interleave(players, 1)
            carry = infer_goals(inference, row("x").float(), inference.start(over.shape[1]), row("joint"), over)[3]
            answer.append(carry[0, :, :inference.hypotheses].unflatten(0, (-1, players)).transpose(0, 1))
        return torch.cat(answer, 1)

    @torch.no_grad()
    def play(self, num_steps):
        """As Imagination.play, from the games of the record; some of the meetings are with others than before. What
        `learn_strangers` takes is in `lesson` after it."""
        length, others = len(self.meeting.hop_seats), len(self.cast) // len(self.meeting.hop_seats)
        rand = lambda: torch.rand(length, self.num, generator=self.generator, device=self.cast.device)
        new = rand() < (1 if self.state is None else 1 / self.MEETING)
        shaken = (rand() < self.meeting.args.tremble) * (1.5 * rand()).clamp(max=1)
        start = self.meeting.minds.inference.start(self.num)
        game = (rand() * self.cast.shape[1]).long().repeat_interleave(others, 0)[..., None]
        types = self.cast.gather(1, game.expand(-1, -1, self.cast.shape[2]))
        if self.state is None:
            self.state, self.carry, self.types, self.tremble = self.draw_states()[1], start, types, shaken
        self.renew(new)
        self.tremble = torch.where(new, shaken, self.tremble)
        new = new.repeat_interleave(others, 0)[..., None]
        self.carry, self.types = torch.where(new, start, self.carry), torch.where(new, types, self.types)
        self.shown, carry = [], self.carry[:, :self.LESSON]
        dream = super().play(self.data, num_steps)
        # strangers do not learn, so nobody is paid for trying things out with them: while that was paid (soft_coef), players
        # idled among hare hunters instead of taking the last hare
        dream["entropy"] = torch.zeros_like(dream["entropy"])
        self.lesson = {key: torch.stack([step[key] for step in self.shown], 1) for key in self.shown[0]}  # [P, T, ..]
        self.lesson["carry"] = carry
        return dream

    def renew(self, over):
        """Other boards where an episode is over [L, num]."""
        _, state = self.draw_states()
        self.state = {name: torch.where(over.flatten(), state[name], part) for name, part in self.state.items()}

    def go_on(self, over, moves):
        """Begins the next episode where one is over [L, num], with the same others."""
        pairs = over.repeat_interleave(len(self.cast) // len(over), 0)  # [P, num]
        moves = moves.unflatten(0, over.shape).transpose(1, 2).flatten(0, 1)  # [P, num]
        self.shown.append({key: part[:, :self.LESSON].clone() for key, part in (
            ("x", self.seen), ("there", self.there), ("action", moves), ("over", pairs))})
        self.carry = next_episode(self.known, pairs, self.networks.inference.hypotheses)
        self.renew(over)

    def think(self, x):
        """As Imagination.think; what is known after this look counts once a step has been played."""
        minds, length = self.meeting.minds, len(self.meeting.hop_seats)
        x = x.float().unflatten(1, (length, -1))  # [N, L, num, F]
        seen = x[1:].transpose(0, 1)  # [L, N-1, num, F]
        shape = seen.shape[:3]
        self.seen = seen.flatten(0, 1)
        there = self.state["cell"][1:] < self.meeting.game.cells  # [N-1, L * num]
        self.there = there.unflatten(1, (length, -1)).transpose(0, 1).flatten(0, 1)
        self.known, mean, _ = minds.inference.step(self.carry, self.seen)
        told = self.meeting.told(mean.unflatten(0, shape[:2]))
        log_probs, value = minds.agent(torch.cat([told, x[0]], -1))
        # all strangers are moved by the same networks: one long row of them
        row = seen.flatten(0, 2)[None]
        goal, _ = self.networks.inference.read(self.types.flatten(0, 1)[None], self.networks.inference.glance(row))
        mask = row[..., -NUM_ACTIONS:] != 0
        chances = self.networks.moa(row, goal).exp().view(*shape, NUM_ACTIONS)
        uniform = (mask / mask.sum(-1, keepdim=True).clamp(min=1)).view(chances.shape)
        tremble = self.tremble[:, None, :, None]
        chances = ((1 - tremble) * chances + tremble * uniform).transpose(1, 2).flatten(0, 1)  # [L * num, N-1, 7]
        return told, log_probs.flatten(0, 1), value.flatten(), chances

    def get_state(self):
        return self.state, self.carry, self.types, self.tremble

    def set_state(self, state):
        self.state, self.carry, self.types, self.tremble = state


@torch.no_grad()
def goals_in_hindsight(meeting, data):
    """What each other player was heading for at each step, as mean and log-variance [P, T, B, G].

    Latent: the embedding of the state after one of the next `horizon` steps of the co-player's game, the one whose
    reward and value is the highest (--selector max) or lowest for the reader. Prey: what it caught in this game.
    """
    args, pairs, minds = meeting.args, meeting.pairs, meeting.minds
    length, others = meeting.order.shape[0], meeting.order.shape[1] - 1
    steps, envs = data["over"].shape
    stops = data["ends"].transpose(0, 1)[pairs]  # [P, T, B] after this step the co-player's game is over
    if args.goals == "prey":
        joint, left = data["joint"].transpose(0, 1)[pairs], data["left"].transpose(0, 1)[pairs]
        goal = torch.full((*joint.shape, 2), 0.5, device=joint.device)  # unknown where the data end before the game
        later = goal[:, 0]
        for t in reversed(range(steps)):
            caught = F.one_hot((joint[:, t] == HUNT_HARE).long(), 2).to(goal.dtype)
            later = torch.where(left[:, t, :, None], caught, torch.where(stops[:, t, :, None], 0.5, later))
            goal[:, t] = later
        goal = F.pad(goal, (0, args.goal_dim - 2))
        return goal, torch.full_like(goal, -10)
    after = data["after"].transpose(0, 1)[pairs].float()  # [P, T, B, V]
    mean, logvar = minds.prior.encode(after.unflatten(0, (length, others)).flatten(1, 3))  # [L, (N-1) * T * B, G]
    mean, logvar = (part.reshape(length * others, steps, envs, -1) for part in (mean, logvar))
    if "values" not in data:  # games of others, which the reader has no share in: where they ended
        where = last_steps(stops, args.horizon).flatten(1)[..., None].expand(-1, -1, mean.shape[-1])
        return mean.flatten(1, 2).gather(1, where).view_as(mean), logvar.flatten(1, 2).gather(1, where).view_as(mean)
    goes_on = ~data["ends"][:, meeting.seats]
    worth = data["rewards"][:, meeting.seats] * args.reward_scale + args.gamma * goes_on * data["values"][1:]
    worth = worth.transpose(0, 1)[:, None].expand(-1, others, -1, -1).flatten(0, 1)  # [P, T, B]
    worth = worth if args.selector == "max" else -worth
    last = last_steps(stops, args.horizon) // envs
    step = torch.arange(steps, device=worth.device)
    within = (step[:, None, None] <= step[:, None]) & (step[:, None] <= last[:, :, None])  # [P, T, T, B]
    where = worth[:, None].masked_fill(~within, -math.inf).argmax(2)
    index = where[..., None].expand(-1, -1, -1, mean.shape[-1])
    return mean.gather(1, index), logvar.gather(1, index)


def later_catch(data, pairs):
    """Whether the other player goes on to catch something in its game, as far as the data tell: [P, T, B]."""
    left, stops = data["left"].transpose(0, 1)[pairs], data["ends"].transpose(0, 1)[pairs]
    caught, later = torch.zeros_like(left), torch.zeros_like(left[:, 0])
    for t in reversed(range(left.shape[1])):
        later = left[:, t] | (~stops[:, t] & later)
        caught[:, t] = later
    return caught


def infer_goals(inference, x, carry, action, over):
    """The inference over steps in order, features [P, T, B, F] and the actions taken there [P, T, B]; over is [T, B] or [P, T, B].

    What `inference.step` does, step by step: only the memory waits for the step before, all else is done for all at once.
    -> mean and log-variance of the goals [P, T, B, G], the log-probability of the actions by the weighted hypotheses
    [P, T, B], the next carry
    """
    steps, kinds = x.shape[1], inference.hypotheses
    hidden, table = (part.unflatten(1, x.shape[1:3]) for part in inference.look(x.flatten(1, 2)))
    taken = table.gather(3, action[..., None, None].expand(-1, -1, -1, 1, kinds))[:, :, :, 0]  # [P, T, B, K]
    h, before = carry[..., :kinds], carry[..., kinds:].unflatten(-1, (NUM_ACTIONS, kinds))
    seen = before.gather(2, inference.played(x[:, 0])[..., None, None].expand(-1, -1, 1, kinds))[:, :, 0]
    keep, memory = torch.sigmoid(inference.keep), []
    for t in range(steps):
        h = keep * h + seen
        memory.append(h)
        seen = taken[:, t] * ~over[..., t, :, None]  # the first view of an episode tells of no action
    memory = torch.stack(memory, 1)
    mean, logvar = inference.read(memory.flatten(1, 2), hidden.flatten(1, 2))
    likely = (memory.log_softmax(-1) + taken).logsumexp(-1)
    carry = next_episode(torch.cat([h, table[:, -1].flatten(2)], -1), over[..., -1, :], kinds)
    return mean.unflatten(1, x.shape[1:3]), logvar.unflatten(1, x.shape[1:3]), likely, carry


@torch.no_grad()
def belief_accuracy(mean, logvar, goal, weight, prey):
    """How often a belief [P, T, B, G] holds the goal in hindsight likelier than that of another game: [P]; half of the
    time if it knew nothing. With --goals prey, how often it names the prey."""
    if prey:
        right, weight = (mean[..., 0] > 0.5) == (goal[..., 0] > 0.5), weight * (goal[..., 0] != 0.5).flatten(1)
    else:
        distance = lambda point: ((point - mean).square() * (-logvar).exp()).sum(-1)
        right = distance(goal) < distance(goal.roll(1, 2))
    return masked_mean(right.flatten(1).float(), weight)


def learn_others(meeting, chunks, optimizer, generator):
    """Trains the models of the others, and the inference of their goals, on what was really played.

    chunks are dicts of play_steps, or of the warm-up's record to keep what was learned there; "carry" is the inference's
    memory before each. The models learn to predict with the goal in hindsight and with what is believed. Each chunk is
    given the samples that a buffer takes in, with the belief held now. -> dict of means over the chunks [P]
    """
    args, minds, pairs = meeting.args, meeting.minds, meeting.pairs
    totals = []
    prepared = []
    for data in chunks:
        weight = data["present"].transpose(0, 1)[pairs]
        if args.moa_samples == "rewarded":
            weight = weight & later_catch(data, pairs)
        prepared.append((data, data["x"].transpose(0, 1)[pairs].float(), data["joint"].transpose(0, 1)[pairs],
                         weight.float().flatten(1), *goals_in_hindsight(meeting, data)))
    for _ in range(args.moa_epochs):
        for data, x, action, weight, goal, goal_logvar in prepared:
            noise = torch.randn(2, *goal.shape, generator=generator, device=goal.device)
            hindsight, losses = goal + (0.5 * goal_logvar).exp() * noise[0], {}
            if args.goals == "latent":
                mean, logvar, likely, data["carry_after"] = infer_goals(minds.inference, x, data["carry"], action, data["over"])
                losses["hypotheses_loss"] = -masked_mean(likely.flatten(1), weight)
                goals = (hindsight, mean, mean + (0.5 * logvar).exp() * noise[1])
                losses["inference_loss"] = masked_mean(gaussian_kl(goal, goal_logvar, mean, logvar).flatten(1), weight)
            else:
                goals = (goal if args.goals == "prey" else torch.zeros_like(goal),)
            losses["loss"] = action_loss(minds.moa, x.flatten(1, 2), [part.flatten(1, 2) for part in goals],
                                         action.flatten(1), weight) / len(goals)
            loss = len(goals) * losses["loss"] + args.inference_weight * losses.get("inference_loss", 0.0)
            loss = loss + losses.get("hypotheses_loss", 0.0)
            optimizer.zero_grad()
            loss.sum().backward()
            clip_gradients(minds.moa, args.max_grad_norm)
            if args.goals == "latent":
                clip_gradients(minds.inference, args.max_grad_norm)
            optimizer.step()
            data["belief"] = (mean.detach(), logvar.detach()) if args.goals == "latent" else (
                goals[0], torch.full_like(goals[0], -math.inf))
            totals.append({key: value.detach() for key, value in losses.items()})
    for data, _, _, weight, *_ in prepared:
        data["samples"] = {"x": data["x"].transpose(0, 1).flatten(1, 2), "action": data["joint"].transpose(0, 1).flatten(1),
                           "weight": weight.bool(),
                           **{key: part.flatten(1, 2).half() for key, part in zip(("mean", "logvar"), data["belief"])}}
    losses = {key: torch.stack([total[key] for total in totals]).mean(0) for key in totals[0]}
    if args.goals in ("latent", "prey"):
        data, _, _, weight, goal, _ = prepared[0]
        held = data["belief"] if args.goals == "latent" else [
            data[key].permute(1, 2, 0, 3, 4).flatten(0, 1) for key in ("mean", "logvar")]
        losses["belief_accuracy"] = belief_accuracy(*held, goal, weight, args.goals == "prey")
    return losses


def learn_strangers(meeting, lesson, optimizer, generator):
    """Trains the inference and the models of others on imagined meetings with strangers: who plays as nobody in the record does
    is to be told from those who do. -> dict of losses [P]"""
    args, minds, action = meeting.args, meeting.minds, lesson["action"]
    x, weight, losses = lesson["x"].flatten(1, 2), lesson["there"].float().flatten(1), {}
    goals = [torch.zeros(*x.shape[:2], args.goal_dim, device=x.device)]
    if args.goals == "latent":
        mean, logvar, likely, _ = infer_goals(minds.inference, lesson["x"], lesson["carry"], action, lesson["over"])
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        goals = [part.flatten(1, 2) for part in (mean, mean + (0.5 * logvar).exp() * noise)]
        losses["strangers_loss"] = -masked_mean(likely.flatten(1), weight)
    optimizer.zero_grad()
    (action_loss(minds.moa, x, goals, action.flatten(1), weight) + losses.get("strangers_loss", 0.0)).sum().backward()
    clip_gradients(minds.moa, args.max_grad_norm)
    if args.goals == "latent":
        clip_gradients(minds.inference, args.max_grad_norm)
    optimizer.step()
    return {key: value.detach() for key, value in losses.items()}


class Recent:
    """The steps played last, from which single ones are drawn for the models of others, so that minibatches are mixed."""

    def __init__(self, capacity, pairs):
        self.capacity, self.pairs = capacity, pairs
        self.columns, self.added = None, 0

    def add(self, columns):
        """Takes in steps, x and action of each seat [N, M, ..], weight and belief of each pair [P, M, ..], for the oldest."""
        columns = {key: value[:, -self.capacity:] for key, value in columns.items()}
        weight = columns["weight"]
        if self.columns is None:
            self.columns = {key: value.new_zeros(len(value), self.capacity, *value.shape[2:]) for key, value in columns.items()}
        at = (self.added + torch.arange(weight.shape[1], device=weight.device)) % self.capacity
        for key, value in columns.items():
            self.columns[key][:, at] = value
        self.added += weight.shape[1]

    def draw(self, count, generator):
        """`count` steps drawn at random for each pair, rows [P, count]: of twice as many those at which the other was there,
        and at the end, where they are too few, some at which it was not."""
        weight = self.columns["weight"]
        filled = min(self.added, self.capacity)
        rows = torch.randint(filled, (len(weight), 2 * count), generator=generator, device=weight.device)
        there = weight.gather(1, rows).to(torch.uint8)
        return rows.gather(1, there.argsort(dim=1, descending=True, stable=True)[:, :count])

    def pick(self, rows):
        """-> x [P, M, F], action [P, M], weight [P, M], mean and log-variance of the belief [P, M, G]"""
        pair = torch.arange(len(self.pairs), device=rows.device)[:, None]
        seat = self.pairs[:, None]
        return (self.columns["x"][seat, rows].float(), self.columns["action"][seat, rows],
                *(self.columns[key][pair, rows].float() for key in ("weight", "mean", "logvar")))

    def get_state(self):
        """For a checkpoint; what was seen is mostly zeros and is kept compressed."""
        if self.columns is None:
            return None
        x = self.columns["x"]
        packed = torch.frombuffer(bytearray(zlib.compress(x.cpu().numpy().tobytes(), 1)), dtype=torch.uint8)
        return {**self.columns, "x": packed}, x.shape, self.added

    def set_state(self, state):
        if state is not None:
            columns, shape, self.added = state
            x = torch.frombuffer(bytearray(zlib.decompress(columns["x"].cpu().numpy().tobytes())), dtype=torch.uint8)
            self.columns = {**columns, "x": x.view(shape).to(self.pairs.device)}


def polish_models(meeting, memories, optimizer, generator):
    """Trains the models of others alone on steps of the buffers, fifteen of sixteen from the first one, of real games:
    predicting takes more data than the last few steps hold.

    Each time a step comes up its latent goals are drawn anew from the belief, as a search draws them. With the same goal each
    time a model learns to know the step again by it, and predicts new ones worse.
    """
    args, moa = meeting.args, meeting.minds.moa
    few = args.moa_minibatch_size // 16 * (len(memories) - 1)
    drawn = [memory.draw(size * args.moa_minibatches, generator).split(size, 1)
             for memory, size in zip(memories, (args.moa_minibatch_size - few, few))]
    for rows in zip(*drawn):
        x, action, weight, mean, logvar = (torch.cat(parts, 1) for parts in zip(*(
            memory.pick(picked) for memory, picked in zip(memories, rows))))
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        loss = action_loss(moa, x, (mean + (0.5 * logvar).exp() * noise,), action, weight)
        optimizer.zero_grad()
        loss.sum().backward()
        clip_gradients(moa, args.max_grad_norm)
        optimizer.step()


class Rehearsal:
    """The record of the warm-up, chunk after chunk, with the memory that the inference would have there."""

    GAMES = 64  # meetings at a time

    def __init__(self, record, meeting, num_steps):
        self.record, self.meeting, self.num_steps = record, meeting, num_steps
        self.step, self.first, self.carry = 0, 0, None

    def next(self):
        """The next chunk, as learn_others takes it."""
        steps, envs = self.record["over"].shape
        if self.step + self.num_steps > steps:  # on to other meetings
            self.step, self.carry = 0, None
            self.first = self.first + self.GAMES if self.first + self.GAMES < envs else 0
        chunk = cut_steps(self.record, self.step, self.step + self.num_steps, slice(self.first, self.first + self.GAMES))
        if self.carry is None:
            self.carry = self.meeting.minds.inference.start(chunk["over"].shape[1]).detach()
        self.step += self.num_steps
        return chunk | {"carry": self.carry}

    def done(self, chunk):
        """Takes over the memory at the end of the chunk."""
        if "carry_after" in chunk:
            self.carry = chunk["carry_after"].detach()

    def get_state(self):
        return self.step, self.first, self.carry

    def set_state(self, state):
        self.step, self.first, self.carry = state


def learn_policy(meeting, data, optimizer, args, ent_coef):
    """Fits policy and value to what was really played: the policy to the search's result, the value to the returns.

    The target is what the search would play, not the action that was drawn, so no ratio of probabilities enters.
    """
    agent, seats = meeting.minds.agent, meeting.seats
    x = torch.cat([data["told"], data["x"][:, seats].float()], -1).transpose(0, 1).flatten(1, 2)
    rewards = data["rewards"][:, seats] * args.reward_scale
    _, returns = compute_gae(rewards, data["values"], data["ends"][:, seats], data["present"][:, seats], args.gamma,
                             args.gae_lambda)
    weight = data["present"][:, seats].float().transpose(0, 1).flatten(1)
    returns, target = returns.transpose(0, 1).flatten(1), data["improved"].exp().transpose(0, 1).flatten(1, 2)
    for _ in range(args.update_epochs):
        log_probs, value = agent(x)
        search_loss = masked_mean(-(target * log_probs.clamp(min=-30)).sum(-1), weight)
        value_loss = 0.5 * masked_mean((value - returns).square(), weight)
        entropy = masked_mean(-(log_probs.exp() * log_probs).sum(-1), weight)
        optimizer.zero_grad()
        (args.search_coef * search_loss + args.vf_coef * value_loss - ent_coef * entropy).sum().backward()
        clip_gradients(agent, args.max_grad_norm)
        optimizer.step()
    error, spread = (variance(part, weight) for part in (returns - value.detach(), returns))
    return {"search_loss": search_loss.detach(), "value_loss": value_loss.detach() / args.reward_scale**2,
            "entropy": entropy.detach(), "explained_variance": 1 - error / spread.clamp(min=1e-8)}


# ================================================================================== outputs


def resolve_flags(args, free=("total_timesteps",)):
    """With --resume, takes over the flags of that run; one given again must be the same, except a larger of `free`."""
    if args.resume is None:
        return args
    path = os.path.join(args.resume, "config.json")
    if not os.path.isfile(path):
        raise Refused(f"--resume {args.resume}: there is no run, {path} is missing")
    with open(path, encoding="utf-8") as file:
        saved = json.load(file)
    script = os.path.basename(sys.modules[type(args).__module__].__file__)
    if saved.pop("script") != script:
        raise Refused(f"--resume {args.resume}: that run was made by another script than {script}")
    values = {}
    for field in dataclasses.fields(args):
        if field.name not in saved:
            raise Refused(f"--resume {args.resume}: that run was begun by another version of {script}")
        given, before = getattr(args, field.name), saved[field.name]
        before = tuple(before) if isinstance(before, list) else before
        values[field.name] = before
        if given == field.default or given == before or field.name == "resume":
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.name not in free:
            raise Refused(f"{flag} {given} differs from {before}, with which {args.resume} was begun")
        if given < before:
            raise Refused(f"{flag} {given} is less than {before}, with which {args.resume} was begun")
        values[field.name] = given
    return dataclasses.replace(args, **{**values, "resume": args.resume})


def prepare_torch(args):
    """Threads, device and seeds."""
    if args.threads < 1:
        raise Refused(f"--threads {args.threads} must be at least 1")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise Refused(f"--device {args.device} cannot be used here: {str(error).splitlines()[0]}") from error
    torch.set_num_threads(args.threads)
    random.seed(args.seed)
    np.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)


def board_name(args):
    """The board in short, as in the notes of stag hunters: 4x4-4h1s, 8x8-b5-4h1s."""
    blocks = f"-b{args.max_blocks}" if args.max_blocks else ""
    return f"{args.height}x{args.width}{blocks}-{args.hares}h{args.stags}s"


def open_run(args):
    """Makes the folder of this run, or goes into that of --resume. -> folder"""
    script = os.path.basename(sys.modules[type(args).__module__].__file__)
    if args.resume is not None:
        folder = args.resume
    else:
        name = args.run_name or f"stag-hunt-{board_name(args)}__{script[:-3]}__{args.seed}__{int(time.time())}"
        if re.search(r'[<>:"/\\|?*]', name) or name.strip(". ") != name or not name:
            raise Refused(f"--run-name {name!r} is no valid folder name")
        folder = os.path.join(args.runs_dir, name)
        try:
            os.makedirs(folder)
        except FileExistsError as error:
            raise Refused(f"--run-name {name}: {folder} exists already; go on with --resume {folder} or choose another "
                          "name") from error
        except OSError as error:
            raise Refused(f"--runs-dir {args.runs_dir}: {folder} cannot be made: {error.strerror}") from error
    save_json(os.path.join(folder, "config.json"), {"script": script, **dataclasses.asdict(args), "resume": None})
    return folder


def save_json(path, content):
    """Writes a JSON file whole or not at all."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
    os.replace(path + ".new", path)


def save_checkpoint(folder, content):
    """Writes checkpoint.pt whole or not at all."""
    path = os.path.join(folder, "checkpoint.pt")
    torch.save(content, path + ".new")
    os.replace(path + ".new", path)


def load_checkpoint(path, flag):
    """Reads a checkpoint onto the CPU; what is none is refused in the name of the flag that asked for it."""
    if not os.path.isfile(path):
        raise Refused(f"{flag}: there is no file {path}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise Refused(f"{flag}: {path} is no checkpoint ({type(error).__name__})") from error
    if not isinstance(checkpoint, dict) or "script" not in checkpoint:
        raise Refused(f"{flag}: {path} is no checkpoint of these scripts")
    return checkpoint


def on_device(state, device):
    """The tensors of a checkpoint on a device, all but those of random generators, whose state stays on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {key: value if key == "generator" else on_device(value, device) for key, value in state.items()}
    return type(state)(on_device(value, device) for value in state) if isinstance(state, (list, tuple)) else state


class Interrupt:
    """Turns the first Ctrl-C into a wish to stop, to be granted between two updates; the second stops at once."""

    def __enter__(self):
        self.wanted = False
        self.before = signal.signal(signal.SIGINT, self.handle)
        return self

    def handle(self, number, frame):
        self.wanted = True
        signal.signal(signal.SIGINT, self.before)

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self.before)


class Thresholds:
    """When the mean return of the last 500 episodes first reached each of some values."""

    def __init__(self, values):
        self.reached = {f"{value:g}": None for value in values}

    def check(self, last, seats, seconds, timesteps):
        """last [<=500, N] are the returns of the last episodes, seats those whose mean counts."""
        if len(last) < 500:
            return
        mean = last[:, seats].mean().item()
        for value, reached in self.reached.items():
            if reached is None and mean >= float(value):
                self.reached[value] = {"seconds": round(seconds, 2), "timesteps": timesteps}


def summarise(returns, seats):
    """The mean return of each player and of the seats that count, with 95 % intervals: for results.json."""
    half = lambda x: 1.96 * x.std().item() / math.sqrt(max(len(x), 1))
    names = [f"player_{seat + 1}" for seat in range(returns.shape[1])]
    columns = dict(zip(names, returns.double().T)) | {"mean": returns[:, seats].double().mean(1)}
    return {**{name: column.mean().item() for name, column in columns.items()},
            "ci95": {name: half(column) for name, column in columns.items()}, "episodes": len(returns)}


COLOURS = ((0, 114, 178), (213, 94, 0), (0, 140, 100), (190, 95, 150), (90, 75, 170), (200, 150, 0),
           (60, 150, 215), (130, 40, 50))


def draw_board(game, env, caption="", size=56):
    """One environment as a picture: numbered players, the stag with antlers, hares with long ears, grey obstacles."""
    from PIL import Image, ImageDraw, ImageFont  # here, for only pictures need it

    height, width = game.height, game.width
    image = Image.new("RGB", (max(width * size, 220), height * size + 26), (250, 248, 242))
    draw = ImageDraw.Draw(image)
    board, cells = game.board[:, env].tolist(), game.cell[:, env].tolist()
    for cell in range(game.cells):
        x, y = cell % width * size, cell // width * size
        draw.rectangle((x, y, x + size, y + size), fill="white" if board[cell] else (104, 108, 118), outline=(221, 216, 204))
        if board[cell] & STAG_BIT:
            for side in (-1, 1):
                tip, fork = x + size * (0.5 + 0.34 * side), x + size * (0.5 + 0.2 * side)
                draw.line((x + size * 0.5, y + size * 0.4, fork, y + size * 0.22, tip, y + size * 0.06), (92, 58, 34), 3)
                draw.line((fork, y + size * 0.22, fork - side * 3, y + size * 0.04), (92, 58, 34), 3)
            draw.polygon([(x + size * a, y + size * b) for a, b in ((0.3, 0.34), (0.7, 0.34), (0.58, 0.9), (0.42, 0.9))],
                         fill=(150, 92, 48))
        elif board[cell] & HARE_BIT:
            for side in (-1, 1):
                middle = x + size * (0.5 + 0.11 * side)
                draw.ellipse((middle - 4, y + size * 0.1, middle + 4, y + size * 0.6), fill=(176, 170, 162))
            draw.ellipse((x + size * 0.28, y + size * 0.45, x + size * 0.72, y + size * 0.9), fill=(176, 170, 162))
    for player, cell in enumerate(cells):
        if cell < game.cells:
            together = [other for other in range(len(cells)) if cells[other] == cell]
            slot, radius = together.index(player), size * 0.21
            x = cell % width * size + size * (0.26 + 0.48 * (slot % 2))
            y = cell // width * size + size * (0.26 + 0.48 * (slot // 2 % 2))
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[player % len(COLOURS)])
            draw.text((x, y), str(player + 1), fill="white", anchor="mm", font=ImageFont.load_default(size * 0.28))
    draw.text((4, height * size + 13), caption, fill=(52, 54, 60), anchor="lm", font=ImageFont.load_default(14))
    return image


def add_gif(writer, tag, frames, step, path):
    """Writes frames as a GIF into the run folder and TensorBoard, which plays it."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    frames[0].save(path, save_all=True, append_images=frames[1:], duration=[350] * (len(frames) - 1) + [1500], loop=0)
    with open(path, "rb") as file:
        picture = Summary.Image(encoded_image_string=file.read(), width=frames[0].width, height=frames[0].height)
    writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=picture)]), step)


def print_table(title, rows):
    """Prints rows of text under a title, the first row being the head, in columns."""
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    print(f"\n{title}")
    for row in rows:
        print("  " + "  ".join(str(cell).ljust(width) if column == 0 else str(cell).rjust(width)
                               for column, (cell, width) in enumerate(zip(row, widths))))


def run_script(args_class, main):
    """Reads the flags and runs main; what is refused is one line and exit code 2."""
    try:
        sys.exit(main(tyro.cli(args_class)))
    except Refused as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)


# ====================================================================================== main


def check_flags(args):
    """Refuses flags that make no sense, alone or together."""
    for name in ("total_timesteps", "num_envs", "num_steps", "hidden_size", "vae_size", "goal_dim", "num_minibatches",
                 "update_epochs", "simulations", "trees", "horizon", "warmup_games", "warmup_epochs", "warmup_updates",
                 "moa_epochs", "moa_minibatches", "moa_decisions", "episodes", "repeats"):
        if getattr(args, name) < 1:
            raise Refused(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    for name, low, high in (("gamma", 0, 1), ("gae_lambda", 0, 1), ("learning_rate", 0, math.inf), ("beta", 0, math.inf),
                            ("moa_learning_rate", 0, math.inf), ("ent_coef", 0, math.inf), ("soft_coef", 0, math.inf),
                            ("soft_until", 0, 1), ("imagined_ratio", 0, math.inf), ("strangers", 0, 1), ("tremble", 0, 1), ("fresh", 0, 1),
                            ("eval_episodes", 0, math.inf), ("eval_policy_episodes", 0, math.inf),
                            ("compare_episodes", 0, math.inf), ("widening", 1, math.inf)):
        if not low <= getattr(args, name) <= high:
            raise Refused(f"--{name.replace('_', '-')} {getattr(args, name)} must lie between {low} and {high}")
    if "hop" not in args.players:
        raise Refused(f"--players {' '.join(args.players)}: nobody is a HOP+ player; write hop in at least one seat")
    if len(args.players) < 2:
        raise Refused(f"--players {' '.join(args.players)}: HOP+ models others, so there must be two players or more")
    if args.prize_floor is not None and not 0 < args.prize_floor < math.inf:
        raise Refused(f"--prize-floor {args.prize_floor} must be greater than 0 and finite, or None")
    for reason, unused in ((args.goals in ("prey", "none") and f"--goals {args.goals}",
                            ("strangers", "tremble", "mix", "rehearse", "vae_checkpoint")),
                           (args.imagined_ratio == 0 and "--imagined-ratio 0", ("strangers", "tremble", "fresh")),
                           (args.strangers == 0 and "--strangers 0", ("tremble",))):
        for name in unused if reason else ():
            if getattr(args, name) != getattr(Args, name):
                raise Refused(f"--{name.replace('_', '-')} {getattr(args, name)} means nothing with {reason}")
    if args.goals == "prey" and args.goal_dim < 2:
        raise Refused(f"--goal-dim {args.goal_dim} must be at least 2 with --goals prey")
    if args.simulations % args.trees:
        raise Refused(f"--simulations {args.simulations} must be divisible by --trees {args.trees}")
    if args.moa_minibatch_size < 16:
        raise Refused(f"--moa-minibatch-size {args.moa_minibatch_size} must be at least 16")
    if args.buffer_size < args.num_envs * args.num_steps:
        raise Refused(f"--buffer-size {args.buffer_size} is less than the {args.num_envs * args.num_steps} steps between two "
                      f"updates (--num-envs {args.num_envs} x --num-steps {args.num_steps})")
    if args.search_model == "rules" and args.world_model_checkpoint:
        raise Refused(f"--world-model-checkpoint {args.world_model_checkpoint} means nothing with --search-model rules")
    if args.search_model == "learned" and args.dynamic_final_time:
        raise Refused("--dynamic-final-time needs --search-model rules: the learned model does not foresee the deadline")
    if args.mode == "train" and args.checkpoint:
        raise Refused(f"--checkpoint {args.checkpoint} is for --mode adapt and watch; go on training with --resume")
    if args.mode != "train" and not args.checkpoint:
        raise Refused(f"--mode {args.mode} needs the run of a trained player: --checkpoint runs/x")
    if args.mode != "train" and args.resume:
        raise Refused(f"--resume {args.resume} means nothing with --mode {args.mode}")


@torch.no_grad()
def score_models(meeting, data, chances, draws=4):
    """How well the models of the others predict [P] each: against what they really play, and the best one could do.

    chances [T, N, B, 7] are the true action probabilities of each seat. top1 is the true probability of the action
    held most likely; recall of an action the mean predicted probability of it over the steps in which it is taken.
    """
    minds, pairs, args = meeting.minds, meeting.pairs, meeting.args
    x = data["x"].transpose(0, 1)[pairs].float().flatten(1, 2)  # [P, T * B, F]
    mean, logvar = (data[key].permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1, 2) for key in ("mean", "logvar"))
    generator = torch.Generator(x.device).manual_seed(0)
    part, mask = minds.moa.view_part(x), x[..., -NUM_ACTIONS:] != 0
    predicted = 0.0
    for _ in range(draws):
        goal = meeting.draw_goals(mean, logvar, generator)
        predicted = predicted + minds.moa.from_parts(part, minds.moa.goal_part(goal), mask).exp() / draws
    if args.goals == "none":
        predicted = mask / mask.sum(-1, keepdim=True)
    truth = chances.transpose(0, 1)[pairs].flatten(1, 2)  # [P, T * B, 7]
    weight = data["present"].transpose(0, 1)[pairs].float().flatten(1)
    best = lambda x: truth.gather(-1, x.topk(3, -1).indices).cumsum(-1)
    each = {"top1": best(predicted)[..., 0], "top3": best(predicted)[..., 2],
            "cross_entropy": -(truth * predicted.clamp(min=1e-9).log()).sum(-1),
            "top1_ceiling": best(truth)[..., 0], "top3_ceiling": best(truth)[..., 2],
            "cross_entropy_floor": -(truth * truth.clamp(min=1e-9).log()).sum(-1)}
    scores = {key: masked_mean(value, weight) for key, value in each.items()}
    taken = (truth * weight[..., None]).sum(1)  # [P, 7]
    scores["share"] = taken / taken.sum(-1, keepdim=True).clamp(min=1e-9)
    scores["recall"] = (truth * predicted * weight[..., None]).sum(1) / taken.clamp(min=1e-9)
    scores["recall_ceiling"] = (truth * truth * weight[..., None]).sum(1) / taken.clamp(min=1e-9)
    return scores


def average_scores(scores, pairs):
    """The mean over some pairs, as plain numbers for results.json; by action for the recalls."""
    answer = {key: scores[key][pairs].mean().item() for key in scores if scores[key].dim() == 1}
    for key in ("share", "recall", "recall_ceiling"):
        share = scores["share"][pairs]
        value = share.mean(0) if key == "share" else (scores[key][pairs] * share).sum(0) / share.sum(0).clamp(min=1e-9)
        answer[key] = dict(zip(ACTIONS, value.tolist()))
    return answer


@torch.no_grad()
def report_models(args, meeting, seed, searches=16):
    """The models of others on fresh games: against searching players, whose policy is averaged over repeated searches.

    The decisions are every seventh step of meetings, so that they come from all parts of an episode, and from later
    episodes as well as from the first."""
    meeting = Meeting(args, args.num_envs, seed, meeting.minds, meeting.model)
    generator = torch.Generator(args.device).manual_seed(seed)
    steps, found = [], 0
    while found < args.moa_decisions:
        for _ in range(6):
            actions, seen = meeting.act(generator, args.search)
            meeting.play(actions, seen["x"])
        chances = meeting.lineup.probabilities(meeting.game).transpose(0, 1).clone()
        actions, seen = meeting.act(generator, args.search)
        improved = seen["improved"].exp()
        if args.search != "none":
            for _ in range(searches - 1):
                again, _ = meeting.plan(seen["mean"], seen["logvar"], seen["policy"], generator, args.search)
                improved = improved + again.exp()
            improved = improved / searches
        chances[meeting.seats] = improved
        out = meeting.play(actions, seen["x"])
        steps.append({key: seen[key] for key in ("x", "mean", "logvar")} | {"chances": chances, "present": out["present"].T})
        found += int(out["present"].T[meeting.seats].sum())
    data = {key: torch.stack([step[key] for step in steps]) for key in steps[0]}
    return score_models(meeting, data, data["chances"], draws=16)


@torch.no_grad()
def evaluate_hops(args, meeting, episodes, how, seed, greedy=False):
    """Plays fresh episodes with the players as they are, each meeting of one episode. -> returns [episodes, N]"""
    num_envs = min(episodes, 1000)
    generator = torch.Generator(args.device).manual_seed(seed)
    table = Meeting(args, num_envs, seed, meeting.minds, meeting.model)
    finished = []
    for _ in range(math.ceil(episodes / num_envs)):
        total = torch.zeros(num_envs, len(args.players), device=args.device)
        running = torch.ones(num_envs, dtype=torch.bool, device=args.device)
        while running.any():
            actions, seen = table.act(generator, how, greedy)
            out = table.play(actions, seen["x"], restart=False)
            total += out["reward"] * running[:, None]
            running &= ~out["over"]
        finished.append(total)
        table.observation = table.game.reset()
        table.lineup.reset(torch.ones_like(out["over"]))
        table.carry = table.minds.inference.start(num_envs).detach().clone()
        table.counts.fill_(1.0)
        table.log_prey = table.counts.log()
    return torch.cat(finished)[:episodes]


@torch.no_grad()
def predicted_moves(meeting, x, mean):
    """What each HOP+ player expects each other to do now, at the middle of its belief: [L, N-1, B, 7]."""
    seen = x[meeting.pairs].float()
    goal = torch.zeros_like(mean) if meeting.args.goals in ("zero", "none") else mean
    return meeting.minds.moa(seen, goal.flatten(0, 1)).exp().unflatten(0, mean.shape[:2])


def record_game(args, meeting, seed):
    """Plays one episode for a picture, each player's belief about the others drawn beside the board. -> frames"""
    from PIL import Image, ImageDraw, ImageFont  # here, for only pictures need it

    table = Meeting(args, 1, seed, meeting.minds, meeting.model)
    generator = torch.Generator(args.device).manual_seed(seed)
    total, frames, over, lines = torch.zeros(len(args.players)), [], False, []
    font = ImageFont.load_default(13)

    def frame(caption):
        board = draw_board(table.game, 0, caption)
        picture = Image.new("RGB", (board.width + 300, max(board.height, 24 + 17 * len(lines))), (250, 248, 242))
        picture.paste(board, (0, 0))
        draw = ImageDraw.Draw(picture)
        for row, (text, colour) in enumerate(lines):
            draw.text((board.width + 10, 8 + 17 * row), text, fill=colour, font=font)
        return picture

    while not over:
        returns = " ".join(f"{value:g}" for value in total.round(decimals=2).tolist())
        actions, seen = table.act(generator, args.search)
        moves = predicted_moves(table, seen["x"], seen["mean"])[:, :, 0]
        lines = []
        for hop, seat in enumerate(table.hop_seats):
            if table.game.cell[seat, 0] >= table.game.cells:
                continue
            lines.append((f"player {seat + 1} expects", COLOURS[seat % len(COLOURS)]))
            for other, who in enumerate(table.order[hop, 1:].tolist()):
                if table.game.cell[who, 0] < table.game.cells:
                    first, second = moves[hop, other].topk(2)[1].tolist()
                    lines.append((f"   of {who + 1}: {ACTIONS[first]} {moves[hop, other, first]:.0%}, {ACTIONS[second]} "
                                  f"{moves[hop, other, second]:.0%}", (52, 54, 60)))
        frames.append(frame(f"step {int(table.game.clock)}  returns {returns}"))
        out = table.play(actions, seen["x"], restart=False)
        total, over = total + out["reward"][0].cpu(), bool(out["over"])
    lines = []
    returns = " ".join(f"{value:g}" for value in total.round(decimals=2).tolist())
    frames.append(frame(f"over  returns {returns}"))
    size = (frames[0].width, max(picture.height for picture in frames))
    canvases = [Image.new("RGB", size, (250, 248, 242)) for _ in frames]
    for canvas, picture in zip(canvases, frames):
        canvas.paste(picture, (0, 0))
    return canvases


def build_players(args):
    """The game, the players as they begin, the games of the warm-up and the networks that it trained (Goals)."""
    meeting = Meeting(args, args.num_envs, args.seed)
    num_inputs = features(meeting.observation).shape[-1]
    record = goals = None
    if args.goals in ("latent", "zero"):
        record = record_meetings(args, args.warmup_games, 4 * max(args.final_time, 36))
        goals = warm_up_goals(args, num_inputs, record)
        meeting.minds.take_over(goals)
    if args.search_model == "learned":
        meeting.model = LearnedModel(meeting.model.scratch, warm_up_world(args, meeting.game))
    return meeting, record, goals


def load_players(args):
    """The trained players of --checkpoint, one in each HOP+ seat. -> args as they were trained, a function to seat them"""
    path = os.path.join(args.checkpoint, "checkpoint.pt") if os.path.isdir(args.checkpoint) else args.checkpoint
    checkpoint = load_checkpoint(path, f"--checkpoint {args.checkpoint}")
    if "minds" not in checkpoint:
        raise Refused(f"--checkpoint {args.checkpoint} holds no HOP+ players, it was written by {checkpoint['script']}")
    config = checkpoint["config"]
    board = [field.name for field in dataclasses.fields(GameArgs)]
    for name in board:
        given, trained = getattr(args, name), config[name]
        trained = tuple(trained) if isinstance(trained, list) else trained
        if given not in (trained, getattr(Args, name)):
            raise Refused(f"--{name.replace('_', '-')} {given} differs from {trained}, with which {args.checkpoint} was trained")
    if len(args.players) != len(config["players"]):
        raise Refused(f"--players names {len(args.players)} players, {args.checkpoint} was trained with {len(config['players'])}")
    kept = ("goals", "goal_dim", "hypotheses", "hidden_size", "vae_size", "reward_scale", "gamma", "search_model", *board)
    kept += tuple(name for name in ("beta", "prize_floor", "widening", "simulations", "trees", "search")
                  if getattr(args, name) == getattr(Args, name))  # not asked for otherwise
    values = {name: tuple(config[name]) if isinstance(config[name], list) else config[name] for name in kept}
    return dataclasses.replace(args, **values), checkpoint


def seat_players(args, checkpoint, num_envs, seed, episodes, networks=None):
    """A meeting in which each HOP+ seat has the networks of one trained player: networks[k], or the one of its seat."""
    meeting = Meeting(args, num_envs, seed, episodes=episodes)
    trained_seats = [seat for seat, name in enumerate(checkpoint["config"]["players"]) if name == "hop"]
    networks = networks or [trained_seats.index(seat) if seat in trained_seats else 0 for seat in meeting.hop_seats]
    others, state = len(args.players) - 1, {}
    for name, value in checkpoint["minds"].items():
        if name.endswith("scale"):
            state[name] = value
        else:
            per = others if name.startswith(("moa.", "inference.")) else 1
            state[name] = value.unflatten(0, (-1, per))[networks].flatten(0, 1)
    meeting.minds.load_state_dict(state)
    if args.search_model == "learned":
        model = make_model(checkpoint["world_model_config"])
        if model.state_dict().keys() != checkpoint["world_model"].keys():
            raise Refused(f"--checkpoint {args.checkpoint} holds a world model of another version of this script")
        model.load_state_dict(checkpoint["world_model"])
        meeting.model = LearnedModel(meeting.model.scratch, model.to(args.device))
    return meeting


def play_meetings(args, checkpoint, seat, network, seed):
    """--repeats meetings of --episodes episodes, the trained player in one seat. -> its returns [repeats, episodes]"""
    focal = args.players.index("hop")
    strangers = [name for place, name in enumerate(args.players) if place != focal]
    players = strangers[:seat] + ["hop"] + strangers[seat:]
    args = dataclasses.replace(args, players=tuple(players))
    meeting = seat_players(args, checkpoint, args.repeats, seed, args.episodes, [network])
    generator = torch.Generator(args.device).manual_seed(seed)
    rows = torch.arange(args.repeats, device=args.device)
    answer = torch.zeros(args.repeats, args.episodes, device=args.device)
    episode = torch.zeros(args.repeats, dtype=torch.int64, device=args.device)
    optimizer = torch.optim.Adam([*meeting.minds.moa.parameters(), *meeting.minds.inference.parameters()],
                                 lr=args.moa_learning_rate / 10, eps=1e-5, fused=True)
    while (episode < args.episodes).any():
        if args.adapt_moa:
            returns = Returns(args.repeats, len(players), args.device)
            data = play_steps(meeting, returns, args.num_steps, generator, args.search)
            learn_others(meeting, [data | {"carry": data["carry"][0]}], optimizer, generator)
            rewards, overs = data["rewards"][:, seat], data["over"]
        else:
            with torch.no_grad():
                actions, seen = meeting.act(generator, args.search)
                out = meeting.play(actions, seen["x"])
            rewards, overs = out["reward"][None, :, seat], out["over"][None]
        for reward, over in zip(rewards, overs):
            counted = episode < args.episodes
            answer[rows, episode.clamp(max=args.episodes - 1)] += reward * counted
            episode = episode + over
    return answer


def adapt(args):
    """A trained player among others: policy, value and world model stay, beliefs within and across episodes go on."""
    if args.players.count("hop") != 1:
        raise Refused(f"--mode adapt takes one hop among others, --players {' '.join(args.players)} has {args.players.count('hop')}")
    args, checkpoint = load_players(args)
    Meeting(args, 1, args.seed)  # whatever is wrong with the players shows now
    trained = [seat for seat, name in enumerate(checkpoint["config"]["players"]) if name == "hop"]
    folder = open_run(args)
    seats = range(len(args.players))
    answer = torch.stack([play_meetings(args, checkpoint, seat, seat % len(trained), args.seed + seat)
                          for seat in tqdm(seats, desc="meetings in each seat", leave=False, dynamic_ncols=True)])
    flat = answer.flatten(0, 1).double()  # [seats * repeats, episodes]
    half = 1.96 * flat.std(0) / math.sqrt(len(flat))
    later = flat[:, args.episodes // 2:].mean(1)
    results = {"players": list(args.players), "episodes": [{"return": mean, "ci95": ci} for mean, ci in
                                                            zip(flat.mean(0).tolist(), half.tolist())],
               "second_half": {"mean": later.mean().item(), "ci95": 1.96 * later.std().item() / math.sqrt(len(later)),
                               "seats": answer[:, :, args.episodes // 2:].double().mean((1, 2)).tolist()}}
    save_json(os.path.join(folder, "results.json"), results)
    rows = [["episode", "return", "95 %"]] + [[str(number + 1), f"{row['return']:.3f}", f"± {row['ci95']:.3f}"]
                                              for number, row in enumerate(results["episodes"])]
    print_table(f"return of the HOP+ player by episode of a meeting ({' '.join(args.players)}, {board_name(args)}, "
                f"{len(flat)} meetings, all seats)", rows)
    second = results["second_half"]
    print(f"\nepisodes {args.episodes // 2 + 1} to {args.episodes}: {second['mean']:.3f} ± {second['ci95']:.3f}. Everything is in {folder}")
    return 0


def watch(args):
    """One episode in the terminal, step by step: the board, what each player believes, what search expects."""
    args, checkpoint = load_players(args)
    meeting = seat_players(args, checkpoint, 1, args.seed, 1)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    total, over = torch.zeros(len(args.players)), False
    while not over:
        game = meeting.game
        actions, seen = meeting.act(generator, args.search)
        moves = predicted_moves(meeting, seen["x"], seen["mean"])[:, :, 0]
        print(f"\nstep {int(game.clock)}, {int(game.deadline - game.clock)} left")
        board, cells = game.board[:, 0].tolist(), game.cell[:, 0].tolist()
        for row in range(game.height):
            line = []
            for cell in range(row * game.width, (row + 1) * game.width):
                here = "".join(str(player + 1) for player, place in enumerate(cells) if place == cell)
                prey = "S" if board[cell] & STAG_BIT else "h" if board[cell] & HARE_BIT else ""
                line.append("###" if not board[cell] else (prey + here or "."))
            print("  " + " ".join(f"{text:^5}" for text in line))
        for hop, seat in enumerate(meeting.hop_seats):
            if cells[seat] >= game.cells:
                continue
            print(f"  player {seat + 1} plays {ACTIONS[int(actions[0, seat])]}")
            if "search" in seen:
                legal = (seen["x"][seat, 0, -NUM_ACTIONS:] != 0).nonzero()[:, 0].tolist()
                found = [f"{ACTIONS[a]} Q {seen['search']['q'][hop, 0, a]:.2f}, {int(seen['search']['visits'][hop, 0, a])} visits, "
                         f"plays {seen['improved'][hop, 0, a].exp():.0%}" for a in legal]
                print("    search expects: " + "; ".join(found))
            for other, who in enumerate(meeting.order[hop, 1:].tolist()):
                if cells[who] < game.cells:
                    chance, action = moves[hop, other].topk(3)
                    text = ", ".join(f"{ACTIONS[a]} {c:.0%}" for c, a in zip(chance.tolist(), action.tolist()) if c > 0.005)
                    width = seen["logvar"][hop, other, 0].mul(0.5).exp().mean()
                    if args.goals == "prey":
                        text += f" (after the stag: {seen['mean'][hop, other, 0, 0]:.0%})"
                    elif args.goals == "latent":
                        text += f" (spread of the goal believed: {width:.2f})"
                    print(f"    believes of player {who + 1}: {text}")
        with torch.no_grad():
            out = meeting.play(actions, seen["x"], restart=False)
        total, over = total + out["reward"][0].cpu(), bool(out["over"])
        if sys.stdin.isatty() and not over:
            input("  (return for the next step) ")
    print("\nreturns: " + ", ".join(f"{name} {value:g}" for name, value in zip(meeting.names, total.tolist())))
    return 0


def train(args):
    checkpoint = args.resume and on_device(load_checkpoint(os.path.join(args.resume, "checkpoint.pt"), f"--resume {args.resume}"),
                                           args.device)
    meeting, record, goals = build_players(args)
    if checkpoint and goals:
        goals.load_state_dict(checkpoint["goals"])
    folder = open_run(args)
    minds = meeting.minds
    warm_seconds = time.perf_counter() - START
    optimizer = torch.optim.Adam(minds.agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    others_optimizer = torch.optim.Adam([{"params": [*part.parameters()]} for part in (minds.moa, minds.inference)],
                                        lr=args.moa_learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    returns = Returns(args.num_envs, len(args.players), args.device)
    thresholds = Thresholds(args.thresholds)
    imagined = round(args.imagined_ratio * args.num_envs)
    rehearsal = Rehearsal(record, meeting, args.num_steps) if record is not None and args.rehearse else None
    kept = deque(maxlen=args.buffer_size // (args.num_envs * args.num_steps) if args.buffer == "episodes" else 1)
    strange = round(imagined * args.strangers) if goals is not None else 0
    imagination = Imagination(meeting, imagined - strange, generator) if imagined > strange else None
    strangers = Strangers(meeting, strange, generator, record, goals) if strange else None
    memories = [Recent(args.buffer_size, meeting.pairs) for _ in range(1 if rehearsal is None else 2)]
    hop_names = [meeting.names[seat] for seat in meeting.hop_seats]
    others = len(args.players) - 1
    timesteps, seconds_before, best, worst_fall = 0, 0.0, 0.0, 0.0
    simulated, imagined_steps, curve, comparisons = 0, 0, [], []
    if checkpoint:
        minds.load_state_dict(checkpoint["minds"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        others_optimizer.load_state_dict(checkpoint["others_optimizer"])
        meeting.set_state(checkpoint["meeting"])
        generator.set_state(checkpoint["generator"])
        returns.running, returns.last = checkpoint["returns"]
        timesteps, seconds_before = checkpoint["timesteps"], checkpoint["seconds"]
        best, worst_fall, simulated, imagined_steps = checkpoint["counts"]
        curve, comparisons = checkpoint["curves"]
        thresholds.reached.update(checkpoint["thresholds"])
        kept.extend(checkpoint["kept"])
        for memory, state in zip(memories, checkpoint["memories"]):
            memory.set_state(state)
        for dreamer, state in ((imagination, checkpoint["imagination"]), (strangers, checkpoint["strangers"])):
            if dreamer:
                dreamer.set_state(state)
        if rehearsal:
            rehearsal.set_state(checkpoint["rehearsal"])

    def seconds():
        return seconds_before + time.perf_counter() - START

    def save():
        save_checkpoint(folder, {
            "script": "hopplus_selfplay.py", "config": dataclasses.asdict(args), "minds": minds.state_dict(),
            "optimizer": optimizer.state_dict(), "others_optimizer": others_optimizer.state_dict(),
            "meeting": meeting.get_state(), "generator": generator.get_state(), "returns": (returns.running, returns.last),
            "timesteps": timesteps, "seconds": seconds(), "counts": (best, worst_fall, simulated, imagined_steps),
            "curves": (curve, comparisons),
            "thresholds": thresholds.reached, "kept": list(kept),
            "memories": [memory.get_state() for memory in memories],
            "imagination": imagination.get_state() if imagination else None,
            "strangers": strangers.get_state() if strangers else None, "goals": goals.state_dict() if goals else None,
            "rehearsal": rehearsal.get_state() if rehearsal else None,
            "world_model": meeting.model.weights if args.search_model == "learned" else None,
            "world_model_config": meeting.model.config if args.search_model == "learned" else None})

    from torch.utils.tensorboard import SummaryWriter  # here, so that --help and tests need not wait for it

    writer = SummaryWriter(folder, purge_step=timesteps if checkpoint else None)
    flags = "\n".join(f"|{key}|{value}|" for key, value in dataclasses.asdict(args).items())
    writer.add_text("flags", "|flag|value|\n|-|-|\n" + flags)
    os.makedirs(os.path.join(folder, "pictures"), exist_ok=True)
    saved = pictured = begun = time.perf_counter()
    begun_at, spent, losses = timesteps, {}, {}
    bar = tqdm(total=args.total_timesteps, initial=timesteps, unit=" steps", unit_scale=True, dynamic_ncols=True,
               mininterval=0.5, desc="training")

    def clocked(name, part_begun):
        spent[name] = time.perf_counter() - part_begun
        writer.add_scalar(f"time/{name}", spent[name], timesteps)
        return time.perf_counter()

    with Interrupt() as interrupt:
        while timesteps < args.total_timesteps and not interrupt.wanted:
            left = 1 - timesteps / args.total_timesteps  # the share of the run that is still to come
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * left
            # those whom the models predict change until the end: their rate falls late
            for group, share in zip(others_optimizer.param_groups, (left**0.25, max(left, 0.1))):
                group["lr"] = args.moa_learning_rate * share
            ent_coef = args.ent_coef * left
            soft_coef = args.soft_coef * max(0.0, 1 - (1 - left) / args.soft_until) if args.soft_until else 0.0

            part_begun = time.perf_counter()
            data = play_steps(meeting, returns, args.num_steps, generator, args.search)
            timesteps += args.num_steps * args.num_envs
            part_begun = clocked("real_games", part_begun)

            chances = data["chances"].clone()
            chances[:, meeting.seats] = data["improved"].exp()
            scores = score_models(meeting, data, chances)
            exact = model_exactness(meeting, data)
            part_begun = clocked("metrics", part_begun)

            kept.append({key: value for key, value in data.items() if key in (
                "x", "joint", "present", "left", "ends", "over", "after", "rewards", "values", "carry")})
            chunks = [data | {"carry": data["carry"][0]}]
            if len(kept) > 1:
                older = kept[int(torch.randint(len(kept) - 1, (), generator=generator, device=args.device))]
                chunks.append(older | {"carry": older["carry"][0]})
            if rehearsal is not None:
                chunks.append(rehearsal.next())
            losses = {}
            if args.goals != "none":
                losses = learn_others(meeting, chunks, others_optimizer, generator)
                for memory, chunk in zip(memories, (chunks[0], chunks[-1])):
                    memory.add(chunk["samples"])
                polish_models(meeting, memories, others_optimizer, generator)
            if rehearsal is not None:
                rehearsal.done(chunks[-1])
            part_begun = clocked("others", part_begun)

            policy_losses = {}
            dreams = [imagination.play(data, args.num_steps)] if imagination else []
            if strangers:
                dreams.append(strangers.play(args.num_steps))
                losses |= learn_strangers(meeting, strangers.lesson, others_optimizer, generator)
            if dreams:
                dream = {key: torch.cat([part[key] for part in dreams], 2) for key in dreams[0]}
                imagined_steps += dream["actions"].numel()
                part_begun = clocked("imagination", part_begun)
                policy_losses = update(minds.agent, minds.agent, optimizer, dream, None, args, ent_coef, soft_coef, generator)
            if args.search != "none":
                real_losses = learn_policy(meeting, data, optimizer, args, ent_coef)
            else:
                x = torch.cat([data["told"], data["x"][:, meeting.seats].float()], -1)
                real = {key: data[key] for key in ("actions", "logprobs", "entropy", "values")}
                real |= {key: data[key][:, meeting.seats] for key in ("ends", "present")}
                real |= {"x": x, "rewards": data["rewards"][:, meeting.seats] * args.reward_scale}
                real_losses = update(minds.agent, minds.agent, optimizer, real, None, args, ent_coef, soft_coef, generator)
            part_begun = clocked("learning", part_begun)

            thresholds.check(returns.last, meeting.hop_seats, seconds(), timesteps)
            mean = returns.last[:, meeting.hop_seats].mean().item() if len(returns.last) == 500 else None
            best = max(best, mean or 0.0)
            if left < 0.25 and mean is not None and best > 0:
                worst_fall = max(worst_fall, 1 - mean / best)
            for seat, name in enumerate(meeting.names):
                if len(returns.last):
                    writer.add_scalar(f"charts/episodic_return/{name}", returns.last[:, seat].mean(), timesteps)
            for hop, name in enumerate(hop_names):
                for key, value in {**policy_losses, **real_losses}.items():
                    writer.add_scalar(f"losses/{key}/{name}", value[hop], timesteps)
                own = slice(hop * others, (hop + 1) * others)
                for key, value in losses.items():
                    writer.add_scalar(f"moa/{key}/{name}", value[own].mean(), timesteps)
                for key in ("top1", "top3", "cross_entropy", "top1_ceiling", "top3_ceiling", "cross_entropy_floor"):
                    writer.add_scalar(f"moa/{key}/{name}", scores[key][own].mean(), timesteps)
                for action, text in enumerate(ACTIONS):
                    for key in ("recall", "recall_ceiling"):
                        writer.add_scalar(f"moa/{key}_{text.replace(' ', '_')}/{name}", scores[key][own, action].mean(), timesteps)
                if args.goals == "latent":
                    spread = 0.5 * data["logvar"][:, hop].mean().item()
                    writer.add_scalar(f"vae/belief_entropy/{name}",
                                      args.goal_dim * (0.5 * math.log(2 * math.pi * math.e) + spread), timesteps)
            if "search" in data:
                for key, value in data["search"].items():
                    writer.add_scalar(f"mcts/{key}", value, timesteps)
                simulated += int(data["decisions"]) * args.simulations
                writer.add_scalar("mcts/simulations_per_second", int(data["decisions"]) * args.simulations / spent["real_games"],
                                  timesteps)
            writer.add_scalar("world_model/exact", exact, timesteps)
            writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], timesteps)
            writer.add_scalar("charts/SPS", (timesteps - begun_at) / (time.perf_counter() - begun), timesteps)
            curve.append({"timesteps": timesteps, "seconds": round(seconds(), 2), "return": mean})
            bar.update(timesteps - bar.n)
            if len(returns.last):
                bar.set_postfix_str("return " + " ".join(f"{value:.2f}" for value in returns.last.mean(0).tolist()), refresh=False)

            updates = timesteps // (args.num_steps * args.num_envs)
            if args.compare_episodes and args.search != "none" and updates & (updates - 1) == 0:  # after 1, 2, 4, 8, ... of them
                comparisons.append({"timesteps": timesteps})
                for mode, how in (("searched", args.search), ("policy", "none")):
                    played = evaluate_hops(args, meeting, args.compare_episodes, how, args.seed + 3_000_000)
                    comparisons[-1][mode] = played[:, meeting.hop_seats].mean().item()
                    writer.add_scalar(f"evaluation/curve_{mode}", comparisons[-1][mode], timesteps)

            last = timesteps >= args.total_timesteps or interrupt.wanted
            if last or time.perf_counter() - pictured > args.picture_every:
                pictured = time.perf_counter()
                add_gif(writer, "episode", record_game(args, meeting, args.seed + timesteps), timesteps,
                        os.path.join(folder, "pictures", f"episode_{timesteps}.gif"))
            if last or time.perf_counter() - saved > args.save_every:
                saved = time.perf_counter()
                save()
    bar.close()
    trained_seconds = seconds()
    if interrupt.wanted and timesteps < args.total_timesteps:
        writer.close()
        print(f"stopped at {timesteps} steps; go on with: python hopplus_selfplay.py --resume {folder}")
        return 130

    results = {"timesteps": timesteps, "seconds": round(trained_seconds, 2),
               "sps": round((timesteps - begun_at) / max(time.perf_counter() - begun, 1e-9)), "evaluation": {},
               "thresholds": thresholds.reached, "warmup_seconds": round(warm_seconds, 2), "simulations": simulated,
               "imagined_steps": imagined_steps, "largest_fall_in_last_quarter": worst_fall, "curve": curve,
               "search_curve": comparisons}
    rows = [["evaluation", *meeting.names, "HOP+ mean", "episodes"]]
    modes = [("searched", args.eval_episodes, args.search)] if args.search != "none" else []
    for mode, episodes, how in modes + [("policy", args.eval_policy_episodes, "none")]:
        if episodes:
            played = evaluate_hops(args, meeting, episodes, how, args.seed + 1_000_000).cpu()
            summary = summarise(played, meeting.hop_seats)
            names = [f"{name} {strength}" for name, strength in zip(args.players, args.strengths or [1] * len(args.players))]
            score, limit, _ = equal_players_test(played, names)
            summary["equal_players"] = {"largest_z": score if math.isfinite(score) else None,
                                        "limit": limit if math.isfinite(limit) else None, "equal": score <= limit}
            results["evaluation"][mode] = summary
            rows.append([mode, *(f"{summary[name]:.3f} ± {summary['ci95'][name]:.3f}" for name in meeting.names + ["mean"]),
                         str(summary["episodes"])])
            writer.add_scalar(f"evaluation/{mode}", summary["mean"], timesteps)
    writer.close()
    if args.eval_episodes or args.eval_policy_episodes:
        print_table(f"mean return per episode ({' '.join(args.players)}, {board_name(args)})", rows)
    reached = [[value, *((f"{at['seconds']:.1f} s", f"{at['timesteps']} steps") if at else ("not reached", ""))]
               for value, at in thresholds.reached.items()]
    print_table("mean return of the last 500 episodes first reached", [["return", "after", ""], *reached])
    scores = report_models(args, meeting, args.seed + 2_000_000)
    kinds = {}
    for pair, seat in enumerate(meeting.pairs.tolist()):
        kinds.setdefault(args.players[seat], []).append(pair)
    results["moa"] = {kind: average_scores(scores, pairs) for kind, pairs in kinds.items()}
    rows = [["others", "top-1", "ceiling", "top-3", "ceiling", "cross-entropy", "floor"]]
    rows += [[kind, *(f"{moa[key]:.3f}" for key in ("top1", "top1_ceiling", "top3", "top3_ceiling", "cross_entropy",
                                                  "cross_entropy_floor"))] for kind, moa in results["moa"].items()]
    print_table("models of others, on fresh games", rows)
    results["belief_accuracy"] = losses["belief_accuracy"].mean().item() if "belief_accuracy" in losses else None
    if args.search_model == "learned":
        results["world_model"] = score_world(args, meeting)
        print("\nworld model, on fresh mixed games: " + ", ".join(
            f"{share:.3%} of {what} exact" for what, share in results["world_model"].items()))
    draw_curves(results, os.path.join(folder, "pictures", "learning.png"))
    save_json(os.path.join(folder, "results.json"), results)
    print(f"\n{timesteps} real steps ({imagined_steps} imagined, {simulated} simulations) in {trained_seconds:.0f} s, of which "
          f"{warm_seconds:.0f} s to warm up. Everything is in {folder}")
    return 0


def draw_curves(results, path):
    """The return as learning goes on, and what search adds to the policy on the way: a picture."""
    import matplotlib  # here, for only the picture needs it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    points = [point for point in results["curve"] if point["return"] is not None]
    axes.plot([point["timesteps"] for point in points], [point["return"] for point in points], color="#8a8f98",
              label="as it learns (last 500 episodes)")
    for mode, colour in (("searched", "#c8553d"), ("policy", "#28666e")):
        points = [(point["timesteps"], point[mode]) for point in results["search_curve"]]
        if mode in results["evaluation"]:
            points.append((results["timesteps"], results["evaluation"][mode]["mean"]))
        if points:
            axes.plot(*zip(*points), marker="o", color=colour, label={"searched": "policy with search", "policy": "policy alone"}[mode])
    axes.set(xscale="log", xlabel="real environment steps", ylabel="mean return of the HOP+ players")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


@torch.no_grad()
def model_exactness(meeting, data):
    """The share of the real steps just played that the model of the search foresees exactly, first HOP+ player's view."""
    if not isinstance(meeting.model, LearnedModel):
        return 1.0
    order = meeting.order[0]
    state = {name: part.flatten(-2) for name, part in data["state"].items()}  # [.., T * B]
    state = {**state, "cell": state["cell"][order], "previous": state["previous"][order]}
    joint = data["joint"].transpose(0, 1).flatten(1)[order]
    guess, reward, over = meeting.model.step(state, joint)
    true, true_reward, true_over = RulesModel(meeting.model.scratch).step(state, joint)
    same = (guess["cell"] == true["cell"]).all(0) & (guess["board"] == true["board"]).all(0)
    same &= ((reward - true_reward).abs() < 0.01) & (over == true_over)
    present = data["present"][:, meeting.hop_seats[0]].flatten()
    return same[present].float().mean().item()


@torch.no_grad()
def score_world(args, meeting, rows=20_000):
    """The share of the steps of fresh mixed games, crowds and failed hunts among them, that the learned model foresees
    exactly; real games meet few of these, imagined ones learn from all. -> shares of whole steps and of rewards"""
    board = {field.name: getattr(args, field.name) for field in dataclasses.fields(GameArgs)}
    data = collect(board | {"num_players": len(args.players)}, rows, args.seed + 1_000_000, args.device)
    data = pick_rows(data, torch.arange(rows, device=args.device))
    cell, ground, reward, terminated, over = meeting.model.tables.step(data["cell"], data["ground"], data["actions"], data["step"],
                                                                       data["steps_left"])
    paid = (reward - data["reward"]).abs() < 0.01
    whole = paid & (cell == data["next_cell"]).all(1) & (ground == data["next_ground"]).all(1)
    whole &= (terminated == data["terminated"]) & (over == data["over"])
    there = data["cell"][:, 0] < meeting.game.cells
    return {"steps": whole[there].float().mean().item(), "rewards": paid[there].float().mean().item()}


def main(args):
    args = resolve_flags(args)
    check_flags(args)
    prepare_torch(args)
    return {"train": train, "adapt": adapt, "watch": watch}[args.mode](args)


if __name__ == "__main__":
    run_script(Args, main)
