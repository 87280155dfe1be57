"""Learns the world model of the Markov stag hunt from data: what each joint action does to a player's own view.

    python train_world_model.py                                 collects data, trains on three boards (under a minute)
    python train_world_model.py --boards 4x4 6x6b1p6            other boards: 6x6 with one block and six players
    python train_world_model.py --stag-hunters 3                another game, learned from its data alone
    python test_obs_reward_model.py --checkpoint runs/<run name>/checkpoint.pt
    tensorboard --logdir runs                                   losses by term and plane, exactness

The model gets a player's own view, the clock and what every player asks for, and predicts the next view, the player's
reward, and whether its own game and the episode end. No rule of the game is written into it. The run prints one
moving line, then a table of what it gets right on rows that it never saw, and leaves everything in `runs/<run name>/`.

The file from top to bottom:
    arguments     the flags
    game          the batched stag hunt and its rules
    players       rule-based players
    data          rows of mixed play, and their files
    world model   the local model, its tables for the search, and the plain model
    learning      losses, rollouts, what is right
    outputs       run folder, progress
    main          the loop
"""

import dataclasses
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from typing import Literal

START = time.perf_counter()  # seconds are counted from here, before the slow imports

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from tqdm import tqdm

# =================================================================================== arguments


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
    boards: tuple[str, ...] = ("4x4", "8x8", "8x8b5")
    """boards to collect data on, as height x width and, where they differ from the game's flags, bB blocks, pP players,
    sS stags, hH hares: 5x7b2p6s2"""
    num_players: int = 4
    """players on the boards that do not say otherwise"""
    rows: int = 300_000
    """rows collected on each board; one is one step seen by one player"""
    gathered: float = 0.8
    """share of the episodes learned from that begin with most players on one cell; those held out are plain play"""
    held_out_rows: int = 5_000
    """further rows of each board that are never learned from, to measure with"""
    data: tuple[str, ...] = ()
    """.npz files, or folders of runs that hold some, to learn from instead of collecting"""
    save_data: bool = False
    """write the rows collected into the run folder, as data-<board>.npz"""
    model: Literal["local", "mlp"] = "local"
    """the local model, or a plain perceptron for one size of board, to compare with"""
    hidden_size: int | None = None
    """units in a hidden layer (default: 64, with --model mlp 256)"""
    num_updates: int = 2000
    """gradient steps"""
    batch_size: int = 1024
    """rows of each gradient step, taken in turn from the boards in equal parts"""
    learning_rate: float = 4e-3
    """step size of Adam at the start; it falls to 0 along half a cosine"""
    plane_weights: tuple[float, ...] = (2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0)
    """weight of each plane's loss: own, co-players, obstacles, stags, hares; further co-players take the last one's"""
    reward_coef: float = 10.0
    """weight of the reward's loss"""
    end_coef: float = 1.0
    """weight of the loss of the two ends"""
    shrink: float = 0.03
    """pull on the weights of the counted inputs towards 0, as a share of each step of Adam (local model)"""
    rollout_steps: int = 1
    """steps that the model is trained through: beyond the first it goes on from its own predictions"""
    check_every: int = 250
    """gradient steps between two measurements on the rows held out"""


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


# ====================================================================================== data

# The data are rows, one for each step of one player's own game. In memory a view is two small tensors, ego first:
#   cell   [S, N]  where each player stands, H*W once it has left
#   ground [S, C]  what is on each of the C = H*W cells, as bits: 1 obstacle, 2 stag, 4 hare
# In a file (--data, --save-data) it is the planes that a player sees. A .npz holds, for each row:
#   observation, next_observation  uint8 [S, H, W, N+3]   players ego first, obstacles, stags, hares
#   actions                        int   [S, N]           what all players asked for, in the order of the planes
#   step, steps_left               int   [S]              the clock before the step
#   reward                         float [S]              one's own
#   terminated, over               bool  [S]              whether one's own game, and the episode, ended in the step
#   episode                        int   [S]              rows of one episode stand together, in order
DATA_KEYS = ("observation", "actions", "step", "steps_left", "next_observation", "reward", "terminated", "over",
             "episode")


def parse_board(text, args):
    """Reads a board such as 8x8, 8x8b5 or 5x7b2p6s2h3 (b blocks, p players, s stags, h hares): the game's arguments."""
    found = re.fullmatch(r"(\d+)x(\d+)(?:b(\d+))?(?:p(\d+))?(?:s(\d+))?(?:h(\d+))?", text)
    if not found:
        raise Refused(f"--boards {text!r} is no board; write height x width and what differs, such as 4x4, 8x8b5, 5x7b2p6")
    board = {field.name: getattr(args, field.name) for field in dataclasses.fields(GameArgs)}
    board["num_players"] = args.num_players
    names = ("height", "width", "max_blocks", "num_players", "stags", "hares")
    board.update({name: int(value) for name, value in zip(names, found.groups()) if value is not None})
    try:
        check_board(**{key: value for key, value in board.items() if key not in ("prosocial", "dynamic_final_time")})
    except Refused as refusal:
        raise Refused(f"--boards {text}: {refusal}") from refusal
    return board


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


def save_data(path, data):
    """Writes rows as a .npz file of planes."""
    columns = {key: data[key].cpu().numpy() for key in DATA_KEYS if key in data}
    for prefix in ("", "next_"):
        view = unpack(data[prefix + "cell"], data[prefix + "ground"], data["height"], data["width"])
        columns[prefix + "observation"] = view.cpu().numpy()
    np.savez_compressed(path, **columns)


def load_data(path, flag, device="cpu"):
    """Reads rows from a .npz file; what is none, or does not fit together, is refused in one line."""
    if not os.path.isfile(path):
        raise Refused(f"{flag} {path}: there is no such file")
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {key: file[key] for key in file.files}
    except Exception as error:
        raise Refused(f"{flag} {path} is no .npz file of arrays ({type(error).__name__})") from error
    missing = [key for key in DATA_KEYS if key not in columns]
    if missing:
        raise Refused(f"{flag} {path} lacks {', '.join(missing)}")
    shape = columns["observation"].shape
    if len(shape) != 4 or shape[3] < 4 or not shape[0]:
        raise Refused(f"{flag} {path}: observation is {shape}, not [rows, height, width, players + 3]")
    rows, height, width, planes = shape
    for key in DATA_KEYS:
        want = shape if "observation" in key else (rows, planes - 3) if key == "actions" else (rows,)
        if columns[key].shape != want or columns[key].dtype.kind not in "biuf":
            raise Refused(f"{flag} {path}: {key} is {columns[key].dtype} {columns[key].shape}, not numbers {want}")
        if not np.isfinite(columns[key]).all():
            raise Refused(f"{flag} {path}: {key} has a value that is no finite number")
    actions = columns["actions"]
    if actions.min() < 0 or actions.max() >= NUM_ACTIONS or (actions != actions.astype(np.int64)).any():
        raise Refused(f"{flag} {path}: actions must be whole numbers from 0 to {NUM_ACTIONS - 1}")
    data = {"height": height, "width": width}
    for prefix in ("", "next_"):
        view = columns[prefix + "observation"]
        if ((view != 0) & (view != 1)).any() or (view[..., :-3].sum((1, 2)) > 1).any():
            raise Refused(f"{flag} {path}: {prefix}observation must be 0 or 1, with each player on one cell at most")
        cell, data[prefix + "ground"] = pack(torch.from_numpy(view.astype(np.uint8)).to(device))
        data[prefix + "cell"] = cell.to(torch.int16)
    kinds = {"actions": torch.uint8, "reward": torch.float32, "terminated": torch.bool, "over": torch.bool}
    for key in ("actions", "step", "steps_left", "reward", "terminated", "over", "episode"):
        data[key] = torch.from_numpy(columns[key].astype(np.float64)).to(device).to(kinds.get(key, torch.int64))
    return data


def pick_rows(data, rows):
    """Some rows of the data, ready for the model. -> dict of [B, ...]"""
    batch = {key: value[rows] if isinstance(value, torch.Tensor) else value for key, value in data.items()}
    for key in ("cell", "next_cell", "actions"):
        batch[key] = batch[key].long()
    return batch


def rows_of(data):
    return len(data["reward"])


# =============================================================================== world model

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


def look_up(table, index):
    """table[index] of a table of one dimension, the fastest way."""
    return table.index_select(0, index.flatten().int()).view(index.shape)


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


# ================================================================================== learning


def common_rewards(tables, most=256):
    """The rewards that the rows hold most often: a list of numbers, and 0."""
    values, counts = torch.cat([data["reward"] for data in tables]).double().mul(1e4).round().unique(return_counts=True)
    values = values[counts.argsort(descending=True, stable=True)[:most]] / 1e4
    return sorted({0.0, *values.tolist()} | ({1.0} if len(values) < 2 else set()))


def seen_kinds(tables):
    """The ground bits of a cell that the rows hold."""
    return torch.cat([data["ground"].unique() for data in tables]).unique().tolist()


def plane_weights(weights, num_players, device):
    """The weight of each plane's loss on a board: further co-players take the last co-player's."""
    players = [weights[min(player, len(weights) - 4)] for player in range(num_players)]
    return torch.tensor(players + list(weights[-3:]), device=device)


def rarity(data):
    """How rare what happens on the players' cells is in each row [S], to see the rare more often: the sum over the
    players of 1 / sqrt(how often a player does the same, on the same ground, among others who do the same)."""
    cell = data["cell"].long()
    present = cell < data["height"] * data["width"]
    _, case, counts = cases(cell, data["ground"], data["actions"].long()).unique(return_inverse=True, return_counts=True)
    return (counts[case].double().rsqrt() * present).sum(1)


def draw_rows(starts, weight, number, generator):
    """Draws the first rows of windows: half of them uniformly, half by the running sum of their weight."""
    uniform = torch.randint(len(starts), (number // 2,), generator=generator, device=starts.device)
    spot = torch.rand(number - number // 2, generator=generator, device=starts.device, dtype=torch.float64) * weight[-1]
    return starts[torch.cat([uniform, torch.searchsorted(weight, spot).clamp(max=len(starts) - 1)])]


def window_starts(data, steps):
    """The rows from which `steps` rows of the same episode follow one another."""
    episode = data["episode"]
    last = len(episode) - steps + 1
    following = (episode[:last] == episode[steps - 1:]) & (data["step"][:last] + steps - 1 == data["step"][steps - 1:])
    return following.nonzero()[:, 0]


def rollout_terms(model, data, rows, steps):
    """The losses of the model's own steps 2 to `steps`, one dict each as loss_terms gives: it goes on from its own
    probabilities, not from what was seen."""
    batch = pick_rows(data, rows)
    view = unpack(batch["cell"], batch["ground"], data["height"], data["width"])
    out = model(view, batch["actions"], batch["step"], batch["steps_left"])
    terms = []
    for step in range(1, steps):
        batch = pick_rows(data, rows + step)
        out = model(out["view"], batch["actions"], batch["step"], batch["steps_left"], soft=True)
        view = out["view"].flatten(1, 2).transpose(1, 2).clamp(1e-6, 1 - 1e-6)  # [B, N+3, C]
        players, ground = view[:, :-3], view[:, -3:]
        chance = torch.cat([players, (1 - players.sum(2, keepdim=True)).clamp(min=1e-6)], 2)
        chance = chance.gather(2, batch["next_cell"][..., None]).squeeze(-1)
        after = bits_of(batch["next_ground"]).transpose(1, 2)
        planes = torch.cat([-chance.log().mean(0), F.binary_cross_entropy(ground, after, reduction="none").sum(2).mean(0)])
        ends = torch.stack([out["terminated"], out["over"]], 1).clamp(1e-6, 1 - 1e-6)
        terms.append({"planes": planes, "end": F.binary_cross_entropy(
            ends, torch.stack([batch["terminated"], batch["over"]], 1).float()),
            "reward": F.mse_loss(out["reward"] / model.reward_scale, batch["reward"] / model.reward_scale)})
    return terms


def weigh(terms, weights, args):
    """The loss that is minimised, of one board's terms."""
    return (terms["planes"] * weights).sum() + args.reward_coef * terms["reward"] + args.end_coef * terms["end"]


@torch.no_grad()
def predict_rows(model, data, chunk=2048):
    """The model's answers to all rows, chunk by chunk: yields the rows as picked and what forward gives."""
    for rows in torch.arange(rows_of(data), device=data["reward"].device).split(chunk):
        batch = pick_rows(data, rows)
        view = unpack(batch["cell"], batch["ground"], data["height"], data["width"])
        yield batch, model(view, batch["actions"], batch["step"], batch["steps_left"])


def measure(model, data):
    """What the model gets right on the rows: obs_mse, psnr, reward_mse, exact, reward_exact, end_exact."""
    total, rows = {}, 0
    for batch, out in predict_rows(model, data):
        true = unpack(batch["next_cell"], batch["next_ground"], data["height"], data["width"])
        ends = ((out["terminated"] > 0.5) == batch["terminated"]) & ((out["over"] > 0.5) == batch["over"])
        sums = {"obs_mse": (out["view"] - true).double().square().mean((1, 2, 3)),
                "reward_mse": (out["reward"] - batch["reward"]).double().square(),
                "exact": ((out["view"] > 0.5) == true).flatten(1).all(1),
                "reward_exact": (out["reward"] - batch["reward"]).abs() <= 0.01, "end_exact": ends}
        total = {key: total.get(key, 0.0) + value.sum().item() for key, value in sums.items()}
        rows += len(true)
    result = {key: value / rows for key, value in total.items()}
    return {"obs_mse": result["obs_mse"], "psnr": psnr(result["obs_mse"]), **result}


def psnr(mse):
    """Peak signal-to-noise ratio in dB, the peak being 1."""
    return 10 * math.log10(1 / max(mse, 1e-30))


# =================================================================================== outputs


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
    """Refuses flags that make no sense, alone or together. -> the boards by name"""
    for name in ("rows", "held_out_rows", "num_updates", "batch_size", "rollout_steps", "check_every", "num_players"):
        if getattr(args, name) < 1:
            raise Refused(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.hidden_size is not None and args.hidden_size < 1:
        raise Refused(f"--hidden-size {args.hidden_size} must be at least 1")
    if not 0 <= args.gathered <= 1:
        raise Refused(f"--gathered {args.gathered} must lie between 0 and 1")
    if args.model == "mlp" and args.shrink != Args.shrink:
        raise Refused(f"--shrink {args.shrink} means nothing with --model mlp")
    for name in ("learning_rate", "reward_coef", "end_coef", "shrink", "save_every"):
        if not 0 <= getattr(args, name) < math.inf:
            raise Refused(f"--{name.replace('_', '-')} {getattr(args, name)} must be 0 or more, and finite")
    if len(args.plane_weights) < 4 or not all(0 <= weight < math.inf for weight in args.plane_weights):
        raise Refused(f"--plane-weights {' '.join(f'{w:g}' for w in args.plane_weights)} must be four numbers or more, "
                      "none below 0: own plane, co-players, obstacles, stags, hares")
    for name in ("height", "width", "max_blocks"):
        if getattr(args, name) != getattr(Args, name):
            raise Refused(f"--{name.replace('_', '-')} {getattr(args, name)} means nothing here: --boards says it")
    if args.data:
        for name in ("boards", "rows", "gathered", "save_data", "num_players"):
            if getattr(args, name) != getattr(Args, name):
                raise Refused(f"--{name.replace('_', '-')} means nothing with --data, which says what to learn from")
        return {}
    if not args.boards or len(set(args.boards)) < len(args.boards):
        raise Refused(f"--boards {' '.join(args.boards)} must name one board or more, each once")
    boards = {text: parse_board(text, args) for text in args.boards}
    most = max(board["num_players"] for board in boards.values())
    if args.plane_weights != Args.plane_weights and len(args.plane_weights) > most + 3:
        raise Refused(f"--plane-weights has {len(args.plane_weights)} numbers, but no board has more than {most + 3} planes")
    return boards


def find_data(args):
    """The .npz files that --data names. -> {name: path}"""
    found = {}
    for path in args.data:
        inside = sorted(name for name in os.listdir(path) if name.endswith(".npz")) if os.path.isdir(path) else None
        if inside == []:
            raise Refused(f"--data {path}: the folder holds no .npz file")
        for file in [os.path.join(path, name) for name in inside] if inside else [path]:
            name = os.path.splitext(os.path.basename(file))[0]
            found[name if name not in found else file] = file
    return found


def split_data(data, held_out, name):
    """Cuts the last rows off, at the end of an episode. -> rows to learn from, rows held out"""
    cut = rows_of(data) - min(held_out, rows_of(data) // 5)
    while 0 < cut < rows_of(data) and data["episode"][cut] == data["episode"][cut - 1]:
        cut -= 1
    if cut < 1:
        raise Refused(f"--data {name}: {rows_of(data)} rows are too few, or one episode, to hold some out")
    part = lambda rows: {key: value[rows] if isinstance(value, torch.Tensor) else value for key, value in data.items()}
    return part(slice(0, cut)), part(slice(cut, None))


def gather_data(args, boards):
    """Collects or reads the rows. -> {name: rows to learn from}, {name: rows held out}"""
    learned, held_out = {}, {}
    if args.data:
        for name, path in find_data(args).items():
            data = load_data(path, "--data", args.device)
            reach = neighbours(data["height"], data["width"], args.device)[data["cell"].long()]
            there, next_cell = data["cell"] < data["height"] * data["width"], data["next_cell"].long()
            known = (reach == next_cell[..., None]).any(-1) | (next_cell == data["height"] * data["width"])
            if args.model == "local" and not known[there].all():
                raise Refused(f"--data {path}: players jump further than to a neighbouring cell in "
                              f"{int((there & ~known).any(1).sum())} rows, which --model local cannot learn")
            learned[name], held_out[name] = split_data(data, args.held_out_rows, path)
        return learned, held_out
    for number, (name, board) in enumerate(tqdm(boards.items(), desc="collecting", leave=False, dynamic_ncols=True)):
        seed = args.seed + 1000 * number
        learned[name] = collect(board, args.rows, seed, args.device, args.gathered)
        held_out[name] = collect(board, args.held_out_rows, seed + 500_000, args.device)
    return learned, held_out


def draw_curve(curve, path):
    """Draws the learning curve: errors and inexact views on the rows held out, and the losses."""
    import matplotlib  # here, for only pictures need it
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(17, 4))
    updates = [point["update"] for point in curve]
    for axis, key, title in zip(axes, ("obs_mse", "reward_mse", "exact"),
                                ("obs MSE", "reward MSE", "share of next views that are not exact")):
        for name in curve[-1]["boards"]:
            values = [point["boards"][name][key] for point in curve]
            axis.plot(updates, [1 - value for value in values] if key == "exact" else values, marker=".", label=name)
        axis.set(title=title + "\non rows held out", xlabel="gradient steps", yscale="linear" if key == "exact" else "log")
    for name in curve[-1]["losses"]:
        axes[3].plot(updates, [point["losses"][name] for point in curve], marker=".", label=name)
    axes[3].set(title="losses", xlabel="gradient steps", yscale="log")
    axes[0].legend()
    axes[3].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def add_picture(writer, tag, path, step):
    """Shows a PNG file in TensorBoard."""
    from PIL import Image

    writer.add_image(tag, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC")


def plane_names(num_players):
    return ["own", *(f"co_player_{number}" for number in range(1, num_players)), "obstacles", "stags", "hares"]


def main(args):
    args = resolve_flags(args)
    boards = check_flags(args)
    prepare_torch(args)
    checkpoint = args.resume and on_device(load_checkpoint(os.path.join(args.resume, "checkpoint.pt"), f"--resume {args.resume}"),
                                           args.device)
    learned, held_out = gather_data(args, boards)
    starts = {name: window_starts(data, args.rollout_steps) for name, data in learned.items()}
    for name, data in learned.items():
        if not len(starts[name]):
            raise Refused(f"--rollout-steps {args.rollout_steps} is longer than any episode of {name}")
    rare = {name: rarity(data)[starts[name]].cumsum(0) for name, data in learned.items()}
    shapes = {(data["height"], data["width"], data["cell"].shape[1]) for data in learned.values()}
    config = {"kind": args.model, "hidden_size": args.hidden_size or (64 if args.model == "local" else 256),
              "rewards": common_rewards(learned.values())}
    if args.model == "local":
        config["kinds"] = seen_kinds(learned.values())
    else:
        if len(shapes) > 1:
            raise Refused("--model mlp learns one size of board with one number of players, but the data have "
                          + ", ".join(f"{height}x{width} with {players}" for height, width, players in sorted(shapes)))
        config |= dict(zip(("height", "width", "num_players"), shapes.pop()))
    folder = open_run(args)
    if args.save_data and not checkpoint:
        for name, data in learned.items():
            save_data(os.path.join(folder, f"data-{name}.npz"), data)

    model = make_model(config).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, fused=True)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    updates, seconds_before, curve = 0, 0.0, []
    checked, totals = 0, {}  # the losses summed up since the last measurement
    if checkpoint:
        model.load_state_dict(checkpoint["world_model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        generator.set_state(checkpoint["generator"])
        updates, seconds_before, curve = checkpoint["updates"], checkpoint["seconds"], checkpoint["curve"]
        checked, totals = checkpoint["totals"]

    def seconds():
        return seconds_before + time.perf_counter() - START

    def save():
        save_checkpoint(folder, {
            "script": "train_world_model.py", "config": dataclasses.asdict(args), "world_model_config": config,
            "world_model": model.state_dict(), "optimizer": optimizer.state_dict(),
            "generator": generator.get_state(), "updates": updates, "seconds": seconds(), "curve": curve,
            "totals": (checked, totals)})

    from torch.utils.tensorboard import SummaryWriter  # here, so that --help and tests need not wait for it

    writer = SummaryWriter(folder, purge_step=updates if checkpoint else None)
    flags = "\n".join(f"|{key}|{value}|" for key, value in dataclasses.asdict(args).items())
    writer.add_text("flags", "|flag|value|\n|-|-|\n" + flags)
    os.makedirs(os.path.join(folder, "pictures"), exist_ok=True)
    weights = {name: plane_weights(args.plane_weights, data["cell"].shape[1], args.device)
               for name, data in learned.items()}
    share = max(1, args.batch_size // len(learned))  # rows of each board in a gradient step
    saved = begun = time.perf_counter()
    begun_at = updates
    bar = tqdm(total=args.num_updates, initial=updates, unit=" updates", dynamic_ncols=True, mininterval=0.5,
               desc="training")
    with Interrupt() as interrupt:
        while updates < args.num_updates and not interrupt.wanted:
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * 0.5 * (1 + math.cos(math.pi * updates / args.num_updates))
            loss = 0.0
            for name, data in learned.items():
                rows = draw_rows(starts[name], rare[name], share, generator)
                terms = model.loss_terms(pick_rows(data, rows))
                loss = loss + weigh(terms, weights[name], args) / len(learned)
                if args.rollout_steps > 1:
                    own = rollout_terms(model, data, rows[:max(1, share // 8)], args.rollout_steps)
                    loss = loss + sum(weigh(term, weights[name], args) for term in own) / len(own) / len(learned)
                    terms["rollout_planes"] = torch.stack([term["planes"].sum() for term in own]).mean()
                for key, value in terms.items():
                    totals[name, key] = totals.get((name, key), 0.0) + value.detach()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.shrink(args.shrink * optimizer.param_groups[0]["lr"])
            updates += 1
            bar.update()

            last = updates == args.num_updates
            if updates % args.check_every == 0 or updates in (25, 50, 100) or last:
                steps, checked = updates - checked, updates
                losses, parts = {}, {}
                for (name, key), value in totals.items():
                    value = value / steps
                    if key == "planes":
                        for plane, term in zip(plane_names(len(value) - 3), value.tolist()):
                            writer.add_scalar(f"world_model/loss_{plane}/{name}", term, updates)
                        value = value.sum()
                    writer.add_scalar(f"world_model/loss_{key}/{name}", value.item(), updates)
                    parts.setdefault(key, []).append(value.item())
                losses = {key: sum(values) / len(values) for key, values in parts.items()}
                totals = {}
                checks = {name: measure(model, data) for name, data in held_out.items()}
                for name, check in checks.items():
                    for key, value in check.items():
                        writer.add_scalar(f"world_model/{key}/{name}", value, updates)
                writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], updates)
                writer.add_scalar("charts/UPS", (updates - begun_at) / (time.perf_counter() - begun), updates)
                curve.append({"update": updates, "seconds": round(seconds(), 2), "losses": losses, "boards": checks})
                bar.set_postfix_str("exact " + " ".join(f"{name} {100 * check['exact']:.2f}%"
                                                        for name, check in checks.items()), refresh=False)
            if last or interrupt.wanted or time.perf_counter() - saved > args.save_every:
                saved = time.perf_counter()
                save()
    bar.close()
    if interrupt.wanted and updates < args.num_updates:
        writer.close()
        print(f"stopped at {updates} updates; go on with: python train_world_model.py --resume {folder}")
        return 130

    trained_seconds = seconds()
    path = os.path.join(folder, "pictures", "learning_curve.png")
    draw_curve(curve, path)
    add_picture(writer, "learning_curve", path, updates)
    writer.close()
    checks = curve[-1]["boards"]
    save_json(os.path.join(folder, "results.json"), {"updates": updates, "seconds": round(trained_seconds, 2),
                                                     "losses": curve[-1]["losses"], "boards": checks})
    rows = [["board", "obs MSE", "PSNR", "reward MSE", "views exact", "rewards exact", "ends exact", "rows"]]
    rows += [[name, f"{check['obs_mse']:.2e}", f"{check['psnr']:.1f} dB", f"{check['reward_mse']:.2e}",
              *(f"{100 * check[key]:.3f} %" for key in ("exact", "reward_exact", "end_exact")),
              str(rows_of(held_out[name]))] for name, check in checks.items()]
    print_table("rows held out", rows)
    print(f"\n{updates} updates in {trained_seconds:.0f} s. Everything is in {folder}")
    return 0


if __name__ == "__main__":
    run_script(Args, main)
