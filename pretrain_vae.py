"""Goals and opponent models learned offline: the MOA-VAE and goal inference, from rule-based players' games.

    python pretrain_vae.py                                             goals, action model and inference (1 minute)
    python pretrain_vae.py --height 8 --width 8 --max-blocks 5         the same on 8x8 with obstacles
    python pretrain_vae.py --loss recon --kl-weight 1e-4 --vae-size 256 --epochs 30 --eval-every 5
                                                                       goals that hold the whole view (2 minutes)
    python pretrain_vae.py --save-data games.npz                       keep the games; --data games.npz loads them
    tensorboard --logdir runs                                          losses, scores and pictures

It plays games of rule-based players whose kinds are drawn anew for each seat and episode, and learns from them
  - the goal prior: a VAE that embeds a view as a goal. The goal of a sample in hindsight is the embedding of the view
    that the player reaches within --horizon steps: the last one it acts in, where that is near enough;
  - the action model (MOA): a player's view, the step and its goal -> its action probabilities;
  - goal inference: everything seen of a player so far in this episode -> its goal, trained towards that embedding.

After each epoch it prints how well actions are predicted in games it never trained on, with the goal inferred from the
past and with the goal known in hindsight, beside the best that any predictor could score on exactly these samples.
Everything is left in `runs/<run name>/`: results.json, checkpoint.pt, pictures, moa_eval_epochN.csv and .npz.

The file from top to bottom:
    arguments   the flags
    game        the batched stag hunt and its rules
    players     rule-based players
    data        games played, kept and loaded; samples with their Bayes posterior over the players' kinds
    networks    views, goal prior, action model, goal inference
    learning    the losses, an epoch
    scores      predictions against their ceilings, linear read-outs
    outputs     run folder, tables, pictures
    main        the loop
"""

import csv
import dataclasses
import hashlib
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
    num_players: int = 4
    """players of a game"""
    mix: tuple[str, ...] = ("ns", "nh")
    """the kinds of rule-based players that are drawn anew for each seat and episode: random, ns, nh, nsh, patient-28,
    noisy-ns, noisy-nh"""
    shares: tuple[float, ...] | None = None
    """how often each kind of the mix is drawn, in proportion (default: equally)"""
    samples: int = 107_010
    """samples to train on; one is one player's view and action, while it is on the board"""
    held_out_samples: int = 40_000
    """samples of other episodes, to score on"""
    moa_samples: Literal["present", "rewarded"] = "present"
    """samples of all players on the board, or only of those that ended with a catch"""
    data: str | None = None
    """load the games from this file instead of playing them; its board and mix are taken over"""
    save_data: str | None = None
    """keep the games in this file"""
    init_from: str | None = None
    """begin with the networks of this checkpoint.pt; with --epochs 0 they are only scored"""
    loss: Literal["moa", "recon", "both"] = "moa"
    """what shapes the goals, beside the KL term: predicting actions, rebuilding the view, or both. Whatever does not
    shape them is still learned, on the goals as they are"""
    kl_weight: float = 3e-3
    """weight of the KL divergence of the goals from a standard normal"""
    kl_warmup: int = 0
    """epochs over which that weight rises from 0"""
    inference_weight: float = 0.1
    """weight of inferring the goal's mean and variance, beside predicting actions from the inferred goal (1)"""
    horizon: int | None = None
    """steps within which the view lies that is a sample's goal in hindsight (default: all up to the game's end)"""
    goal_dim: int = 16
    """numbers that make a goal"""
    hypotheses: int = 16
    """ways to play that goal inference weighs against each other"""
    hidden_size: int = 128
    """units in the hidden layers of the action model and of goal inference"""
    vae_size: int = 128
    """units in the hidden layers of the goal prior's encoder and decoder"""
    epochs: int = 10
    """times that training goes through its samples"""
    batch_size: int = 64
    """players' games in a minibatch, each from its first to its last step"""
    learning_rate: float = 5e-3
    """step size of Adam at the start; it falls to 0 over the epochs"""
    max_grad_norm: float = 1.0
    """gradients longer than this are shortened to it, for each of the three networks on its own"""
    augment: bool = True
    """turn and mirror the board and renumber the co-players at random in each minibatch"""
    eval_every: int = 1
    """epochs between two scorings; the last is always scored"""


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


# ======================================================================================== data

CAUGHT = ("nothing", "a stag", "a hare")
SOON = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])  # a view tells which of these the steps left do not exceed
DATA_FLAGS = ("mix", "shares", "samples", "held_out_samples")  # which a file of games has with it, beside the board's
RECORD = {  # what a file of games holds: name -> (kind of number, shape), E episodes of at most T steps
    "cell": ("i", "E T N"), "board": ("u", "E T C"), "deadline": ("i", "E T"), "present": ("b", "E T N"),
    "action": ("u", "E T N"), "kind": ("i", "E N"), "caught": ("u", "E N"), "held_out": ("b", "E")}


def game_flags(args):
    """The flags of the board, which a file of games and a checkpoint carry with them."""
    return {**{field.name: getattr(args, field.name) for field in dataclasses.fields(GameArgs)},
            "num_players": args.num_players}


def mix_rules(mix, device="cpu"):
    """The rows of RULES of the kinds of a mix: [K, 4]."""
    rules = []
    for name in mix:
        rule = player_rule(name)
        if rule is None or rule[3]:
            known = PLAYER_NAMES.partition(", switch")[0]
            raise Refused(f"--mix {name!r} is not known here, where no episode has a second half of a meeting; "
                          f"there are {known}" if rule else f"--mix {name!r} is not known; there are {known}")
        rules.append(rule)
    return torch.tensor(rules, device=device, dtype=torch.float64).float()


def mix_shares(args):
    """How often each kind is drawn: [K], summing to 1."""
    shares = torch.tensor(args.shares or [1.0] * len(args.mix), dtype=torch.float64)
    return shares / shares.sum()


@torch.no_grad()
def play_games(args, num_envs=1024):
    """Plays whole episodes until there are samples enough to train on, then others to hold out. -> a record"""
    device = torch.device(args.device)
    game = BatchedStagHunt(num_envs, device=args.device, seed=args.seed, **game_flags(args))
    generator = torch.Generator(device).manual_seed(args.seed)
    rules, shares = mix_rules(args.mix, device), mix_shares(args).to(device)
    never = torch.zeros(num_envs, dtype=torch.bool, device=device)
    parts = []
    for held_out, wanted in ((False, args.samples), (True, args.held_out_samples)):
        found = barren = 0
        while found < wanted:
            game.reset()
            kind = torch.multinomial(shares, num_envs * args.num_players, True, generator=generator)
            kind = kind.view(num_envs, args.num_players)
            steps = {name: [] for name in ("cell", "board", "deadline", "present", "action")}
            caught = torch.zeros(num_envs, args.num_players, dtype=torch.uint8, device=device)
            running = ~never
            while running.any():
                steps["cell"].append(game.cell.T.to(torch.int16))
                steps["board"].append(game.board.T.clone())
                steps["deadline"].append(game.deadline.to(torch.int32))
                out = game.advance(sample_actions(rule_probabilities(game, rules[kind], never), generator))
                steps["present"].append(out["present"] & running[:, None])
                steps["action"].append(out["action"])
                caught += (out["left"] & running[:, None]) * (out["action"] - STAY)
                running = running & ~(out["terminated"] | out["truncated"])
            part = {name: torch.stack(values, 1) for name, values in steps.items()}
            short = args.final_time - part["cell"].shape[1]
            part = {name: F.pad(value, (0, 0) * (value.dim() - 2) + (0, short)) for name, value in part.items()}
            part = {name: value.cpu() for name, value in part.items()}
            part.update(kind=kind.cpu(), caught=caught.cpu(), held_out=torch.full((num_envs,), held_out))
            each = samples_of(part, args).sum(1)  # [E]
            enough = int((each.cumsum(0) + found < wanted).sum()) + 20  # episodes, some more than fill the number
            parts.append({name: value[:enough] for name, value in part.items()})
            gained = int(each.sum())
            found, barren = found + gained, 0 if gained else barren + 1
            if barren == 10:
                raise Refused(f"--moa-samples {args.moa_samples}: {10 * num_envs} episodes of --mix "
                              f"{' '.join(args.mix)} hold no such sample")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def samples_of(record, args):
    """How many samples each player's game gives: its steps on the board, [E, N]."""
    steps = record["present"].sum(1)
    return steps * (record["caught"] > 0) if args.moa_samples == "rewarded" else steps


def save_games(path, record, args):
    """Keeps a record in a file that --data loads."""
    flags = json.dumps({name: getattr(args, name) for name in (*game_flags(args), *DATA_FLAGS)})
    try:
        with open(path, "wb") as file:
            np.savez_compressed(file, flags=np.array(flags), **{name: value.numpy() for name, value in record.items()})
    except OSError as error:
        raise Refused(f"--save-data {path} cannot be written: {error.strerror}") from error


def load_games(args):
    """Reads the games of --data. -> a record, and the flags with the file's board and mix taken over"""
    flag = f"--data {args.data}"
    try:
        with np.load(args.data, allow_pickle=False) as file:
            content = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise Refused(f"{flag}: there is no such file") from error
    except Exception as error:
        raise Refused(f"{flag} is no file of games ({type(error).__name__})") from error
    missing = [name for name in ("flags", *RECORD) if name not in content]
    if missing:
        raise Refused(f"{flag} is no file of games: it has no {', '.join(missing)}")
    try:
        flags = json.loads(str(content["flags"]))
        values = {name: tuple(flags[name]) if isinstance(flags[name], list) else flags[name]
                  for name in (*game_flags(args), *DATA_FLAGS)}
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"{flag} is no file of games: its flags cannot be read ({type(error).__name__})") from error
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, value in values.items():
        given, default = getattr(args, name), defaults[name]
        if default is not None and not isinstance(value, (int, float) if isinstance(default, float) else type(default)):
            raise Refused(f"{flag} is no file of games: its {name} is {value!r}")
        if given != value and given != defaults[name]:
            raise Refused(f"--{name.replace('_', '-')} {given} does not fit {flag}, which was made with {value}")
    args = dataclasses.replace(args, **values)
    check_vae_flags(args)
    sizes = {"E": len(content["held_out"]) if content["held_out"].ndim else 0, "T": args.final_time,
             "N": args.num_players, "C": args.height * args.width + 1}
    if sizes["E"] == 0:
        raise Refused(f"{flag} is empty: it holds no episode")
    for name, (number, shape) in RECORD.items():
        want = tuple(sizes[letter] for letter in shape.split())
        if content[name].shape != want or content[name].dtype.kind not in {"b": "b", "i": "iu", "u": "iu"}[number]:
            raise Refused(f"{flag}: {name} is {content[name].dtype} of shape {content[name].shape}, not "
                          f"{'true or false' if number == 'b' else 'whole numbers'} of shape {want}")
    for name, most in (("kind", len(args.mix) - 1), ("caught", 2), ("board", 127)):
        if not 0 <= content[name].min() <= content[name].max() <= most:
            raise Refused(f"{flag}: {name} holds {content[name].min()} to {content[name].max()}, not 0 to {most}")
    there = content["present"]
    for name, most in (("action", NUM_ACTIONS - 1), ("cell", sizes["C"] - 2)):
        of_those = content[name][there]
        if of_those.size and not 0 <= of_those.min() <= of_those.max() <= most:
            raise Refused(f"{flag}: {name} of players on the board holds {of_those.min()} to {of_those.max()}, "
                          f"not 0 to {most}")
    if (there[:, 1:] & ~there[:, :-1]).any():
        raise Refused(f"{flag}: present has players come back that had left")
    kinds = {"cell": np.int16, "board": np.uint8, "deadline": np.int32, "action": np.uint8, "kind": np.int64,
             "caught": np.uint8}
    return {name: torch.from_numpy(content[name].astype(kinds.get(name, bool))) for name in RECORD}, args


def fill(lengths, limit):
    """Picks games in order until their samples are just so many: what each gives, 0 where it is left out.

    Only where no game is left that fits, one is cut short: its goal in hindsight is not where it really ends.
    """
    picked = [0] * len(lengths)
    for spare in (1, None):  # no game has one step only: first, one is never what remains
        for number, length in enumerate(lengths):
            if not picked[number] and length <= limit and limit - length != spare:
                picked[number] = length
                limit -= length
    longer = [number for number, length in enumerate(lengths) if limit and not picked[number] and length]
    if longer:
        picked[longer[0]] = limit
    return picked


@torch.no_grad()
def make_samples(record, args, held_out):
    """Lays out the samples of the training or of the held-out episodes, one player's game after another.

    Only what was on the board counts: an absent player has no cell and its action is "stay", whatever the record
    holds of it. -> dict of tensors over M samples or S players' games:

        start, length, player_kind, caught [S]
        step, action, game [M]       game: which of the S
        x [M, F]                     what the networks see of the player's view (features)
        view [M, H*W*(N+3) + 15]     what is embedded: the planes of the view, how soon the clock ends, legal actions
        cells [M, N], ground [M, H*W]  the same as classes: where each player is (H*W: gone), what lies on each cell
        kind_probs [M, K, 7]         the action probabilities of each kind of the mix, there
        posterior [M, K]             of the kinds, from the actions before this step
    """
    record = {name: value[record["held_out"] == held_out].to(args.device) for name, value in record.items()}
    length = samples_of(record, args).flatten()  # [E * N]
    length = torch.tensor(fill(length.tolist(), args.held_out_samples if held_out else args.samples), device=args.device)
    if int(length.sum()) == 0:
        raise Refused(f"{'--data ' + args.data if args.data else '--samples'}: there are no "
                      f"{'held-out' if held_out else 'training'} samples with --moa-samples {args.moa_samples}")
    present, cells_of_board = record["present"], args.height * args.width
    cell = torch.where(present, record["cell"].long(), cells_of_board)
    action = torch.where(present, record["action"].long(), STAY)
    episodes, kinds, num_players = len(cell), len(args.mix), args.num_players
    game = BatchedStagHunt(episodes, device=args.device, seed=0, **game_flags(args))
    rules, never = mix_rules(args.mix, args.device), torch.zeros(episodes, dtype=torch.bool, device=args.device)
    start, total = length.cumsum(0) - length, int(length.sum())
    log_posterior = mix_shares(args).log().float().to(args.device).expand(episodes, num_players, kinds).clone()
    previous, flat = torch.full_like(action[:, 0], STAY), None
    for t in range(int(length.max())):
        game.set_state({"cell": cell[:, t], "board": record["board"][:, t], "previous": previous.to(torch.uint8),
                        "clock": torch.full((episodes,), t, device=args.device),
                        "deadline": record["deadline"][:, t].long()})
        observation = game.observe()
        probs = torch.stack([rule_probabilities(game, rules[k].expand(episodes, num_players, 4), never)
                             for k in range(kinds)], 2)  # [E, N, K, 7]
        planes = observation["observation"]  # [E, N, H, W, plane]
        ground = planes[..., num_players:] * torch.tensor([1, 2, 3], dtype=torch.uint8, device=args.device)
        players = planes[..., :num_players].flatten(2, 3).transpose(2, 3)  # [E, N, player, H*W]
        gone = players.amax(3, keepdim=True) == 0
        soon = (observation["steps_left"][:, None, None] <= SOON.to(args.device)).expand(-1, num_players, -1)
        view = torch.cat([planes.flatten(2), soon, observation["action_mask"]], 2)
        now = {"x": features(observation).transpose(0, 1), "view": view, "action": action[:, t],
               "cells": torch.cat([players, gone], 3).argmax(3).to(torch.int16), "ground": ground.amax(4).flatten(2),
               "kind_probs": probs, "posterior": log_posterior.softmax(-1),
               "step": torch.full((episodes, num_players), t, device=args.device)}
        if flat is None:
            flat = {name: torch.empty(total, *value.shape[2:], dtype=value.dtype, device=args.device)
                    for name, value in now.items()}
        rows = (length > t).nonzero()[:, 0]
        for name, value in now.items():
            flat[name][start[rows] + t] = value.flatten(0, 1)[rows]
        played = probs.gather(3, action[:, t, :, None, None].expand(-1, -1, kinds, 1))[..., 0].log()
        log_posterior = torch.where(present[:, t, :, None], log_posterior + played, log_posterior)
        log_posterior -= log_posterior.amax(-1, keepdim=True)
        previous = action[:, t]
    keep = length > 0
    flat.update(start=start[keep], length=length[keep], player_kind=record["kind"].flatten()[keep],
                caught=record["caught"].flatten()[keep].long(),
                game=torch.arange(int(keep.sum()), device=args.device).repeat_interleave(length[keep]))
    kind = flat["player_kind"][flat["game"]]
    played = flat["kind_probs"][torch.arange(total, device=args.device), kind, flat["action"]]
    if (played == 0).any():
        raise Refused(f"--data {args.data}: players play what their kind of --mix {' '.join(args.mix)} would not play")
    return flat


def fingerprint(samples):
    """A short text that changes with the samples, so that a run is gone on with on its own data only."""
    parts = [samples[name].cpu().numpy().tobytes() for name in ("x", "action", "length")]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def time_major(samples, games):
    """Lays the samples of some players' games out step after step, so that no step needs padding.

    games [S] are sorted by length here, longest first: at each step the ones still going on come first. ->
    rows [M] of the samples, before [M] (the place in this layout of the same game's step before; -1 at the first),
    counts (how many games go on at each step), place [T, S] (where each step of each game stands), length [S]
    """
    length = samples["length"][games]
    length, order = length.sort(descending=True, stable=True)
    games = games[order]
    step = torch.arange(int(length[0]), device=length.device)[:, None]
    going = step < length  # [T, S]
    rows = (samples["start"][games] + step)[going]
    place = going.flatten().cumsum(0).view_as(going) - 1
    before = F.pad(place[:-1], (0, 0, 1, 0), value=-1)[going]
    return rows, before, going.sum(1).tolist(), place, length


def goal_places(place, length, counts, horizon):
    """Where in a time-major layout the goal of each sample stands: the view of --horizon steps on, or the last. [M]"""
    step = torch.arange(len(counts), device=length.device)[:, None]
    last = length - 1 if horizon is None else torch.minimum(step + horizon, length - 1)
    return place.gather(0, last.expand(len(counts), -1))[step < length]


# ==================================================================================== networks

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


class Symmetry:
    """One way to turn and mirror the board and to renumber the co-players: the game is the same afterwards.

    Training on turned games is training on more games. As orders of columns: `x` of the features, `view` of the
    planes, `ground` of the cells; `cells` [H*W+1] says where a cell goes, `actions` [7] what an action becomes.
    """

    def __init__(self, args, upside_down=False, mirrored=False, transposed=False, others=None):
        height, width, n = args.height, args.width, args.num_players
        player = [0] + [1 + other for other in (others if others is not None else range(n - 1))]

        def turn(x, row, column):
            """Turns an array by its dimensions of rows and columns."""
            x = x.transpose(row, column) if transposed else x
            return x.flip([dim for dim, is_flipped in ((row, upside_down), (column, mirrored)) if is_flipped])

        rows, columns = torch.arange(height), height + torch.arange(width)
        rows, columns = (columns, rows) if transposed else (rows, columns)
        rows, columns = rows.flip(0) if upside_down else rows, columns.flip(0) if mirrored else columns
        moves = turn(torch.tensor([[-1, 0, -1], [2, -1, 3], [-1, 1, -1]]), 0, 1)
        comes_from = torch.cat([moves[[0, 2, 1, 1], [1, 1, 0, 2]], torch.tensor([STAY, HUNT_STAG, HUNT_HARE])])
        side, planes = 2 * SIGHT + 1, n + 2
        plane = torch.tensor([p - 1 for p in player[1:]] + [n - 1, n, n + 1])
        seen = turn(torch.arange(side * planes * side).view(side, planes, side), 0, 2)[:, plane].flatten()
        previous = torch.arange(n * NUM_ACTIONS).view(n, NUM_ACTIONS)[player][:, comes_from].flatten()
        parts = [seen, torch.cat([rows, columns]), previous, torch.arange(2), comes_from]
        begins = np.cumsum([0] + [len(part) for part in parts[:-1]]).tolist()
        self.x = torch.cat([part + begin for part, begin in zip(parts, begins)]).to(args.device)
        plane = torch.tensor(player + [n, n + 1, n + 2])
        self.view = turn(torch.arange(height * width * (n + 3)).view(height, width, n + 3), 0, 1)[..., plane].flatten()
        size = len(self.view)
        self.view = torch.cat([self.view, size + torch.arange(len(SOON)), size + len(SOON) + comes_from]).to(args.device)
        self.ground = turn(torch.arange(height * width).view(height, width), 0, 1).flatten().to(args.device)
        self.cells = F.pad(self.ground.argsort(), (0, 1), value=height * width)
        self.player, self.actions = player, comes_from.argsort().to(args.device)

    @classmethod
    def draw(cls, args, generator):
        """Any of them; a board that is not square is not transposed, players of different strength keep their place."""
        bits = torch.randint(2, (3,), generator=generator, device=generator.device).tolist()
        others = torch.randperm(args.num_players - 1, generator=generator, device=generator.device).tolist()
        return cls(args, bits[0], bits[1], bits[2] and args.height == args.width, None if args.strengths else others)


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


# ==================================================================================== learning


def gaussian_kl(mean, logvar, other_mean, other_logvar):
    """KL(N(mean, var) || N(other)) of diagonal normals, summed over the last dimension."""
    distance = (logvar.exp() + (mean - other_mean).square()) * (-other_logvar).exp()
    return 0.5 * (distance - 1 + other_logvar - logvar).sum(-1)


def make_batch(samples, games, horizon, symmetry=None):
    """The samples of some players' games in a time-major layout, as the networks want them (with L = 1 in front)."""
    rows, before, counts, place, length = time_major(samples, games)
    x, view, action = samples["x"][rows], samples["view"][rows], samples["action"][rows]
    cells, ground = samples["cells"][rows].long(), samples["ground"][rows]
    if symmetry is not None:
        x, view, action = x[:, symmetry.x], view[:, symmetry.view], symmetry.actions[action]
        cells, ground = symmetry.cells[cells[:, symmetry.player]], ground[:, symmetry.ground]
    return {"rows": rows, "before": before, "counts": counts, "goal": goal_places(place, length, counts, horizon),
            "x": x.float()[None], "view": view.float()[None], "action": action, "cells": cells, "ground": ground.long()}


def rebuilding(players, ground, batch):
    """What is lost in a view rebuilt: the -log-likelihood of its pieces [L, M]."""
    cells = batch["cells"].expand(len(players), -1, -1)[..., None]
    soil = batch["ground"].expand(len(ground), -1, -1)[..., None]
    return -(players.gather(-1, cells).sum((-2, -1)) + ground.gather(-1, soil).sum((-2, -1)))


def rebuilt_exactly(players, ground, batch):
    """Whether all pieces of a view are right after rounding, which takes the likeliest place of each: [L, M]."""
    return (players.argmax(-1) == batch["cells"]).all(-1) & (ground.argmax(-1) == batch["ground"]).all(-1)


def loss_terms(models, batch, loss, noise):
    """Every term on a batch, each [L, M], whatever of it is optimised; noise [L, M, G] is standard normal. Beside them,
    the mean of each view's goal, the mean of the inferred goals, and the actions' log-probabilities with those.

    moa             -log-probability of the action, with the goal known in hindsight
    moa_inferred    the same with the goal's mean inferred from the past
    evidence        the same by goal inference's own weighted hypotheses
    recon           -log-likelihood of the view
    kl              of the view's goal from the standard normal
    inference       KL of the inferred goal from the one in hindsight
    """
    mean, logvar = models.prior.encode(batch["view"])
    goal = mean + (0.5 * logvar).exp() * noise
    recon = rebuilding(*models.prior.decode(goal if loss != "moa" else goal.detach()), batch)
    hindsight = goal[:, batch["goal"]]
    if loss == "recon":
        hindsight = hindsight.detach()
    inferred, inferred_logvar, weighed = models.inference(batch["x"], batch["before"], batch["counts"])
    target, target_logvar = mean[:, batch["goal"]].detach(), logvar[:, batch["goal"]].detach()
    view_part, mask = models.moa.view_part(batch["x"]), batch["x"][..., -NUM_ACTIONS:] != 0
    action = batch["action"].expand(len(mean), -1)[..., None]
    log_probs = [models.moa.from_parts(view_part, models.moa.goal_part(z), mask) for z in (hindsight, inferred)]
    moa, moa_inferred, evidence = (-log_prob.gather(-1, action)[..., 0] for log_prob in (*log_probs, weighed))
    return {"moa": moa, "moa_inferred": moa_inferred, "evidence": evidence, "recon": recon,
            "kl": gaussian_kl(mean, logvar, torch.zeros_like(mean), torch.zeros_like(mean)),
            "inference": gaussian_kl(target, target_logvar, inferred, inferred_logvar)}, (mean, inferred, log_probs[1])


def total_loss(terms, loss, kl_weight):
    """What shapes the goals, from the terms' means."""
    return kl_weight * terms["kl"] + sum(terms[name] for name in ("moa", "recon") if loss in (name, "both"))


def clip_gradients(agent, max_norm):
    """Shortens the gradient of each learner to max_norm, on its own."""
    gradients = [parameter.grad for parameter in agent.parameters() if parameter.grad is not None]
    norm = sum(gradient.flatten(1).square().sum(1) for gradient in gradients).sqrt()  # [L]
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)[:, None, None]
    for gradient in gradients:
        gradient.mul_(factor)


def train_batch(models, optimizer, batch, args, kl_weight, generator):
    """One step of the optimiser. -> the means of the terms over the batch, each [L]"""
    noise = torch.randn(len(models.moa.goal), len(batch["rows"]), args.goal_dim, generator=generator,
                        device=batch["x"].device)
    terms, _ = loss_terms(models, batch, args.loss, noise)
    terms = {name: term.mean(-1) for name, term in terms.items()}
    # every network learns: what does not shape the goals is learned on the goals as they are (detached above)
    wanted = (terms["moa"] + terms["recon"] + kl_weight * terms["kl"] + terms["moa_inferred"]
              + terms["evidence"] + args.inference_weight * terms["inference"])
    optimizer.zero_grad()
    wanted.sum().backward()
    for part in (models.prior, models.moa, models.inference):
        clip_gradients(part, args.max_grad_norm)
    optimizer.step()
    terms["total"] = total_loss(terms, args.loss, kl_weight)
    return {name: term.detach() for name, term in terms.items()}


# ====================================================================================== scores


@torch.no_grad()
def predict(models, samples, args):
    """Runs the networks over samples. -> means of all terms, and per sample, in their order:

    probabilities with the goal "inferred" and in "hindsight" [M, 7], the goals themselves [M, G], exact [M].
    """
    generator = torch.Generator(args.device).manual_seed(0)
    each = {}
    for games in samples["length"].argsort(descending=True, stable=True).split(512):
        batch = make_batch(samples, games, args.horizon)
        noise = torch.randn(1, len(batch["rows"]), args.goal_dim, generator=generator, device=args.device)
        terms, (mean, inferred, log_probs) = loss_terms(models, batch, args.loss, noise)
        hindsight = mean[:, batch["goal"]]
        now = {**terms, "inferred": log_probs.exp(), "goal_inferred": inferred,
               "hindsight": models.moa(batch["x"], hindsight).exp(), "goal_hindsight": hindsight,
               "exact": rebuilt_exactly(*models.prior.decode(mean), batch)}
        for name, value in now.items():
            if name not in each:
                each[name] = torch.empty(len(samples["x"]), *value.shape[2:], dtype=value.dtype, device=args.device)
            each[name][batch["rows"]] = value[0]
    means = {name: each.pop(name).mean().item() for name in terms}
    kl_weight = args.kl_weight
    means["total"] = total_loss(means, args.loss, kl_weight)
    return means, each


def true_probabilities(samples):
    """The action probabilities [M, 7] where each player's kind is known, and where only its history is (Bayes)."""
    kind = samples["player_kind"][samples["game"]]
    known = samples["kind_probs"][torch.arange(len(kind), device=kind.device), kind]
    return known, (samples["posterior"][..., None] * samples["kind_probs"]).sum(1)


def score(probs, action, truth=None, sees_future=False):
    """How well probabilities [M, 7] predict actions [M].

    truth [M, 7] are the true probabilities of the actions, given what the predictor may know: top1 is the mean true
    probability of the action it holds likeliest, top3 of its three likeliest, cross_entropy the mean over truth. This
    has the same expected value as counting hits and far less luck in it. A predictor that sees the future knows more
    than the truth given here: its cross-entropy is taken on the actions played. hit_rate, hit_rate_3 and
    cross_entropy_played are the plain counts.
    """
    best = probs.topk(3, -1).indices
    hit = best == action[:, None]
    log_probs = probs.clamp(min=1e-12).log()
    played = -log_probs.gather(1, action[:, None]).mean().item()
    value = truth.gather(1, best)
    expected = -(truth * log_probs).sum(-1).mean().item()
    taken = F.one_hot(action, NUM_ACTIONS)
    recall = (taken * probs).sum(0) / taken.sum(0).clamp(min=1)
    chosen = F.one_hot(best[:, 0], NUM_ACTIONS)
    hits = (taken * chosen).sum(0)
    by_name = lambda values: dict(zip(ACTIONS, values.tolist()))
    return {"top1": value[:, 0].mean().item(), "top3": value.sum(1).mean().item(),
            "cross_entropy": played if sees_future else expected, "recall": by_name(recall),
            "hit_rate": hit[:, 0].float().mean().item(), "hit_rate_3": hit.any(1).float().mean().item(),
            "cross_entropy_played": played, "recall_of_likeliest": by_name(hits / taken.sum(0).clamp(min=1)),
            "precision_of_likeliest": by_name(hits / chosen.sum(0).clamp(min=1))}


def score_all(each, samples, frequencies):
    """The scores of the model, of both ceilings and of always naming the commonest action: results.json's "moa"."""
    action, (known, history) = samples["action"], true_probabilities(samples)
    trivial = frequencies.expand(len(action), -1)
    return {"hindsight": score(each["hindsight"], action, known, sees_future=True),
            "inferred": score(each["inferred"], action, history),
            "ceiling": {"kind": score(known, action, known), "history": score(history, action, history)},
            "trivial": score(trivial, action, history)}


def fit_readout(goals, kind, num_kinds):
    """A linear read-out of the kind, by logistic regression: goals [M, G] -> what read_out takes."""
    goals = goals.double()
    centre, spread = goals.mean(0), goals.std(0).clamp(min=1e-6)
    x = F.pad((goals - centre) / spread, (0, 1), value=1.0)
    weight = torch.zeros(x.shape[1], num_kinds, dtype=x.dtype, device=x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=300, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight, kind) + 1e-6 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return centre, spread, weight.detach()


def read_out(readout, goals):
    """The likeliest kind of each goal: [M]."""
    centre, spread, weight = readout
    return (F.pad((goals.double() - centre) / spread, (0, 1), value=1.0) @ weight).argmax(-1)


@torch.no_grad()
def goals_of(models, samples, args, most=30_000):
    """The goals of about that many samples, whole games evenly spread: their rows, goals in hindsight, inferred."""
    step = math.ceil(len(samples["x"]) / most)
    parts = []
    for games in torch.arange(0, len(samples["start"]), step, device=args.device).split(512):
        batch = make_batch(samples, games, args.horizon)
        hindsight = models.prior.encode(batch["view"])[0][0, batch["goal"]]
        parts.append((batch["rows"], hindsight, models.inference(batch["x"], batch["before"], batch["counts"])[0][0]))
    return [torch.cat(part) for part in zip(*parts)]


def meaning_of_goals(models, train, each, held_out, args):
    """How well a linear read-out tells the players' kinds from their goals, and what it is to be measured by.

    In hindsight: beside the best rule on what the player caught in the end. Inferred: beside Bayes' rule, step by
    step, both scored as the posterior probability of the kind they name, so that luck has no part in it.
    """
    num_kinds = len(args.mix)
    kind, train_kind = (x["player_kind"][x["game"]] for x in (held_out, train))
    caught, train_caught = (x["caught"][x["game"]] for x in (held_out, train))
    rows, *goals = goals_of(models, train, args)
    from_hindsight, from_inferred = (fit_readout(goal, train_kind[rows], num_kinds) for goal in goals)
    commonest = torch.stack([torch.bincount(train_kind[train_caught == c], minlength=num_kinds)
                             for c in range(len(CAUGHT))]).argmax(1)
    share = lambda right: right.double().mean().item()
    posterior = held_out["posterior"].double()
    bayes = posterior.amax(1)
    inferred = posterior.gather(1, read_out(from_inferred, each["goal_inferred"])[:, None])[:, 0]
    steps = []
    for t in range(int(held_out["step"].max()) + 1):
        there = held_out["step"] == t
        if there.sum() >= 100:
            steps.append({"step": t, "samples": int(there.sum()), "bayes": share(bayes[there]),
                          "inferred": share(inferred[there])})
    return {"hindsight": share(read_out(from_hindsight, each["goal_hindsight"]) == kind),
            "caught_rule": share(commonest[caught] == kind), "inferred": share(inferred), "bayes": share(bayes),
            "largest_gap": max((step["bayes"] - step["inferred"] for step in steps), default=0.0), "by_step": steps}


# ===================================================================================== outputs


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


BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8a8a8a"
TAGS = {"total": "vae/total", "recon": "vae/recon", "kl": "vae/kl", "inference": "vae/inference",
        "moa": "moa/loss_hindsight", "moa_inferred": "moa/loss_inferred",
        "evidence": "moa/loss_evidence"}


def epoch_line(epoch, moa):
    """The line of an epoch: as in the notes, and beside it the ceilings."""
    inferred, hindsight = moa["inferred"], moa["hindsight"]
    history, kind = moa["ceiling"]["history"], moa["ceiling"]["kind"]
    told = lambda scores: (f"top1={scores['top1']:.4f}, top3={scores['top3']:.4f}, hit rate={scores['hit_rate']:.4f}, "
                           f"cross-entropy={scores['cross_entropy']:.4f}")
    return (f"[MOA] epoch {epoch}: {told(inferred)}\n"
            f"      ceiling, only the history known: {told(history)}\n"
            f"      goal known in hindsight: {told(hindsight)}\n"
            f"      ceiling, the kind known: {told(kind)}\n"
            f"      always the commonest action: {told(moa['trivial'])}")


def log_scores(writer, moa, row, epoch):
    """The scores of an epoch as curves; each stands beside its ceiling."""
    for name, value in row["held_out"].items():
        writer.add_scalar(f"{TAGS[name]}/held_out", value, epoch)
    writer.add_scalar("vae/exact_views", row["exact_views"], epoch)
    for name, scores in (("hindsight", moa["hindsight"]), ("inferred", moa["inferred"]), ("trivial", moa["trivial"]),
                         ("ceiling_kind", moa["ceiling"]["kind"]), ("ceiling_history", moa["ceiling"]["history"])):
        for key in ("top1", "top3", "cross_entropy"):
            writer.add_scalar(f"moa/{key}/{name}", scores[key], epoch)


def print_results(args, moa, results, meaning):
    """The tables at the end of a run."""
    keys = ("top1", "hit_rate", "top3", "cross_entropy", "cross_entropy_played")
    rows = [["", "top1", "hit rate", "top3", "cross-entropy", "on those played"]]
    for name, scores in (("goal inferred from the past", moa["inferred"]),
                         ("  ceiling: only the history known", moa["ceiling"]["history"]),
                         ("goal known in hindsight", moa["hindsight"]),
                         ("  beside it: the kind known", moa["ceiling"]["kind"]),
                         ("always the commonest action", moa["trivial"])):
        rows.append([name, *(f"{scores[key]:.4f}" for key in keys)])
    print_table(f"predicting actions in held-out games ({' '.join(args.mix)}, {board_name(args)})", rows)
    rows = [["", *ACTIONS]]
    for name, scores in (("goal inferred", moa["inferred"]), ("  its ceiling", moa["ceiling"]["history"]),
                         ("goal in hindsight", moa["hindsight"]), ("  the kind known", moa["ceiling"]["kind"])):
        rows.append([name, *(f"{value:.3f}" for value in scores["recall"].values())])
    print_table("recall: mean predicted probability of an action where it was taken", rows)
    vae = results["vae"]
    print(f"\nviews rebuilt: {100 * vae['exact_views']:.2f} % with every piece in its cell, recon {vae['recon']:.4f} nats, "
          f"kl {vae['kl']:.2f} nats")
    if meaning is not None:
        percent = {name: f"{100 * value:.2f}" for name, value in meaning.items() if name != "by_step"}
        print(f"kinds told by a linear read-out: {percent['hindsight']} % from the goal in hindsight (best rule on what was "
              f"caught: {percent['caught_rule']} %),\n  {percent['inferred']} % from the inferred goal (Bayes: "
              f"{percent['bayes']} %; largest gap at any step: {percent['largest_gap']} points)")


def write_evaluation(folder, epoch, moa, each, samples):
    """moa_eval_epochN.csv and .npz: scores by action; the confusion matrix, probabilities and labels."""
    action, (known, history) = samples["action"].cpu(), true_probabilities(samples)
    counts = torch.bincount(action, minlength=NUM_ACTIONS).tolist()
    inferred, hindsight = moa["inferred"], moa["hindsight"]
    best, by_kind = moa["ceiling"]["history"], moa["ceiling"]["kind"]
    with open(os.path.join(folder, f"moa_eval_epoch{epoch}.csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["action", "count", "ratio", "precision", "recall", "f1", "recall_ceiling", "recall_by_probability",
                         "recall_by_probability_ceiling", "hindsight_recall", "hindsight_recall_by_probability",
                         "kind_known_recall", "kind_known_recall_by_probability"])
        for number, name in enumerate(ACTIONS):
            precision, recall = inferred["precision_of_likeliest"][name], inferred["recall_of_likeliest"][name]
            row = [precision, recall, 2 * precision * recall / max(precision + recall, 1e-12),
                   best["recall_of_likeliest"][name], inferred["recall"][name], best["recall"][name],
                   hindsight["recall_of_likeliest"][name], hindsight["recall"][name],
                   by_kind["recall_of_likeliest"][name], by_kind["recall"][name]]
            writer.writerow([number, counts[number], f"{counts[number] / len(action):.6f}", *(f"{x:.6f}" for x in row)])
    confusion = confusion_matrix(each["inferred"].cpu(), action)
    np.savez(os.path.join(folder, f"moa_eval_epoch{epoch}.npz"), confusion_matrix=confusion.numpy(),
             probabilities=each["inferred"].cpu().numpy(), labels=action.to(torch.uint8).numpy(),
             probabilities_hindsight=each["hindsight"].cpu().numpy(), history_known=history.cpu().numpy(),
             kind_known=known.cpu().numpy(), step=samples["step"].cpu().to(torch.int16).numpy())


def confusion_matrix(probs, action):
    """How often each action played [row] was predicted as each [column]: [7, 7]."""
    pairs = torch.bincount(action * NUM_ACTIONS + probs.argmax(1), minlength=NUM_ACTIONS**2)
    return pairs.view(NUM_ACTIONS, NUM_ACTIONS)


def figure(title, width=6.4, height=4.2, columns=1):
    """A new picture with its axes."""
    from matplotlib.figure import Figure  # here, so that --help and tests need not wait for it

    result = Figure(figsize=(width, height), layout="constrained", dpi=120)
    axes = result.subplots(1, columns)
    result.suptitle(title, fontsize=11)
    for ax in axes if columns > 1 else [axes]:
        ax.spines[["top", "right"]].set_visible(False)
    return result, axes


def draw_losses(history):
    """Every term by epoch, on training and held-out samples."""
    names = ("moa", "moa_inferred", "evidence", "recon", "kl", "inference", "total")
    result, axes = figure("Losses term by term (nats a sample)", 16, 3, len(names))
    for ax, name in zip(axes, names):
        for key, colour, label in (("train", BLUE, "training"), ("held_out", ORANGE, "held out")):
            points = [(row["epoch"], row[key][name]) for row in history if key in row]
            ax.plot(*zip(*points), color=colour, label=label, marker="o" if len(points) < 20 else None, markersize=3)
        ax.set(title=name, xlabel="epoch")
        ax.title.set_fontsize(10)
    axes[0].legend(frameon=False, fontsize=8)
    return result


def draw_classes(moa, each, samples):
    """How often each action was played and how often it was held likeliest."""
    result, ax = figure("Actions in the held-out samples")
    at = np.arange(NUM_ACTIONS)
    played = torch.bincount(samples["action"], minlength=NUM_ACTIONS).cpu().numpy() / len(samples["action"])
    mean = each["inferred"].mean(0).cpu().numpy()
    ax.bar(at - 0.2, played, 0.4, color=BLUE, label="played")
    ax.bar(at + 0.2, mean, 0.4, color=ORANGE, label="predicted (mean probability)")
    ax.set_xticks(at, ACTIONS)
    ax.set_ylabel("share of the samples")
    ax.legend(frameon=False)
    return result


def draw_confusion(moa, each, samples):
    """The confusion matrix, each row summing to 1."""
    matrix = confusion_matrix(each["inferred"].cpu(), samples["action"].cpu()).double()
    matrix = (matrix / matrix.sum(1, keepdim=True).clamp(min=1)).numpy()
    result, ax = figure("Likeliest action by action played (goal inferred)", 5.6, 5)
    ax.imshow(matrix, cmap="Blues", vmin=0, vmax=1)
    for row in range(NUM_ACTIONS):
        for column in range(NUM_ACTIONS):
            ax.text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center", fontsize=8,
                    color="white" if matrix[row, column] > 0.5 else "black")
    ax.set_xticks(range(NUM_ACTIONS), ACTIONS, rotation=30, ha="right")
    ax.set_yticks(range(NUM_ACTIONS), ACTIONS)
    ax.set(xlabel="predicted", ylabel="played")
    return result


def draw_recall(moa, each, samples):
    """Recall by probability of each action, beside its ceiling."""
    result, axes = figure("Mean predicted probability of an action where it was taken", 11, 4, 2)
    at = np.arange(NUM_ACTIONS)
    for ax, name, ceiling, title in ((axes[0], "inferred", "history", "goal inferred; ceiling: history known"),
                                     (axes[1], "hindsight", "kind", "goal in hindsight; beside it: kind known")):
        ax.bar(at - 0.2, list(moa[name]["recall"].values()), 0.4, color=BLUE, label="model")
        ax.bar(at + 0.2, list(moa["ceiling"][ceiling]["recall"].values()), 0.4, color=GREY, label=f"{ceiling} known")
        ax.set_xticks(at, ACTIONS, rotation=30, ha="right")
        ax.set_ylim(0, 1)
        ax.set_title(title, fontsize=10)
        ax.legend(frameon=False)
    return result


def draw_reliability(moa, each, samples):
    """Is what was said to be 70 % likely taken 70 % of the time?"""
    result, axes = figure("Reliability: share taken by predicted probability (all legal actions)", 9.5, 4, 2)
    edges = np.linspace(0, 1, 11)
    for ax, name in zip(axes, ("inferred", "hindsight")):
        probs = each[name].cpu().numpy()
        taken = np.eye(NUM_ACTIONS, dtype=bool)[samples["action"].cpu().numpy()]
        legal = samples["x"][:, -NUM_ACTIONS:].cpu().numpy() != 0
        said, happened = probs[legal], taken[legal]
        box = np.clip(np.digitize(said, edges) - 1, 0, 9)
        number = np.bincount(box, minlength=10)
        some = number > 0
        mean = np.bincount(box, said, 10)[some] / number[some]
        rate = np.bincount(box, happened, 10)[some] / number[some]
        error = 1.96 * np.sqrt(np.maximum(rate * (1 - rate), 1e-4) / number[some])
        ax.plot([0, 1], [0, 1], color=GREY, linewidth=1)
        ax.errorbar(mean, rate, error, color=BLUE, marker="o", markersize=4, linewidth=1.5)
        ax.set(xlabel="predicted probability", ylabel="share of the times it was taken", xlim=(0, 1), ylim=(0, 1))
        ax.set_title(f"goal {'inferred' if name == 'inferred' else 'in hindsight'}", fontsize=10)
    return result


def draw_goals(moa, each, samples):
    """A map of the goal space: its two main directions, coloured by what the player caught in the end."""
    result, axes = figure("Goals by what the player caught in the end (two main directions in hindsight)", 11, 5, 2)
    goals = each["goal_hindsight"].double().cpu()
    centre = goals.mean(0)
    _, _, directions = torch.pca_lowrank(goals[::max(1, len(goals) // 5000)] - centre, 2, center=False, niter=8)
    caught = samples["caught"][samples["game"]].cpu()
    rows = torch.linspace(0, len(goals) - 1, min(4000, len(goals))).long()
    for ax, name in zip(axes, ("hindsight", "inferred")):
        points = ((each[f"goal_{name}"].double().cpu()[rows] - centre) @ directions).numpy()
        for number, colour in enumerate((GREY, ORANGE, BLUE)):
            of_it = (caught[rows] == number).numpy()
            ax.scatter(*points[of_it].T, s=5, color=colour, alpha=0.5, linewidths=0, label=CAUGHT[number])
        ax.set_title("known in hindsight" if name == "hindsight" else "inferred from the past alone", fontsize=10)
    axes[0].legend(frameon=False, markerscale=3)
    return result


def draw_kinds(meaning):
    """How well kinds are told by step: Bayes' rule and the linear read-out of the inferred goal."""
    result, ax = figure("Kind told from the past, by steps seen")
    steps = meaning["by_step"]
    at = [step["step"] for step in steps]
    ax.plot(at, [step["bayes"] for step in steps], color=GREY, marker="s", markersize=4, label="Bayes' rule")
    ax.plot(at, [step["inferred"] for step in steps], color=BLUE, marker="o", markersize=3,
            label="linear read-out of the inferred goal")
    ax.axhline(meaning["hindsight"], color=ORANGE, linewidth=1, label="read-out of the goal in hindsight, all steps")
    ax.axhline(meaning["caught_rule"], color=ORANGE, linewidth=1, linestyle=":",
               label="best rule on what was caught, all steps")
    ax.set(xlabel="steps seen", ylabel="share right", ylim=(None, 1.01))
    ax.legend(frameon=False, fontsize=8)
    return result


def write_pictures(folder, writer, epoch, history, moa, each, samples, meaning):
    """All pictures, as PNG in the run folder and in TensorBoard."""
    pictures = {"losses": draw_losses(history)} if history else {}
    for name, draw in (("class_distribution", draw_classes), ("confusion_matrix", draw_confusion), ("recall", draw_recall),
                       ("reliability", draw_reliability), ("goal_map", draw_goals)):
        pictures[name] = draw(moa, each, samples)
    if meaning is not None:
        pictures["kinds_by_step"] = draw_kinds(meaning)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for name, picture in pictures.items():
        canvas = FigureCanvasAgg(picture)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3]
        writer.add_image(name, pixels, epoch, dataformats="HWC")
        picture.savefig(os.path.join(folder, "pictures", f"{name}.png"))


# ====================================================================================== main


def check_vae_flags(args):
    """Refuses flags that make no sense, alone or together."""
    for name, least in (("samples", 1), ("held_out_samples", 1), ("goal_dim", 1), ("hidden_size", 1), ("vae_size", 1),
                        ("batch_size", 1), ("hypotheses", 1), ("eval_every", 1), ("epochs", 0), ("kl_warmup", 0),
                        ("horizon", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise Refused(f"--{name.replace('_', '-')} {value} must be at least {least}")
    for name in ("kl_weight", "inference_weight", "save_every"):
        if not 0 <= getattr(args, name) < math.inf:
            raise Refused(f"--{name.replace('_', '-')} {getattr(args, name)} must be a number from 0 on")
    for name in ("learning_rate", "max_grad_norm"):
        if not 0 < getattr(args, name) < math.inf:
            raise Refused(f"--{name.replace('_', '-')} {getattr(args, name)} must be greater than 0")
    if not args.mix:
        raise Refused("--mix names no kind of player")
    mix_rules(args.mix)
    if args.shares is not None:
        shares = f"--shares {' '.join(f'{share:g}' for share in args.shares)}"
        if len(args.shares) != len(args.mix):
            raise Refused(f"{shares} must be {len(args.mix)} numbers, one for each of --mix {' '.join(args.mix)}")
        if not all(0 < share < math.inf for share in args.shares):
            raise Refused(f"{shares} must be greater than 0")
    if args.kl_warmup and not args.kl_weight:
        raise Refused(f"--kl-warmup {args.kl_warmup} means nothing with --kl-weight 0")
    if args.kl_warmup > args.epochs:
        raise Refused(f"--kl-warmup {args.kl_warmup} is longer than the {args.epochs} --epochs")
    if args.epochs == 0 and args.init_from is None:
        raise Refused("--epochs 0 trains nothing: name networks to score with --init-from")
    if args.data is not None and args.save_data is not None:
        raise Refused(f"--save-data {args.save_data} means nothing with --data {args.data}: the games are kept already")


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


def main(args):
    args = resolve_flags(args, free=("epochs",))
    check_vae_flags(args)
    prepare_torch(args)
    if args.data is not None:
        record, args = load_games(args)
    else:
        record = play_games(args)
    train, held_out = (make_samples(record, args, is_held_out) for is_held_out in (False, True))
    checkpoint = args.resume and on_device(load_checkpoint(os.path.join(args.resume, "checkpoint.pt"), f"--resume {args.resume}"),
                                           args.device)
    data = fingerprint(train)
    if checkpoint and checkpoint["data"] != data:
        raise Refused(f"--resume {args.resume}: the samples are not those it was trained on"
                      + (f"; --data {args.data} has changed" if args.data else ""))
    num_inputs = train["x"].shape[1]
    if args.init_from is not None and not checkpoint:
        models = load_goals(args.init_from, f"--init-from {args.init_from}", args, num_inputs)
    else:
        models = Goals(args, num_inputs)
    models.to(args.device)
    if args.save_data is not None and args.resume is None:
        save_games(args.save_data, record, args)
    folder = open_run(args)

    optimizer = torch.optim.Adam(models.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    num_games, num_samples = len(train["start"]), len(train["x"])
    batches = math.ceil(num_games / args.batch_size)
    frequencies = torch.bincount(train["action"], minlength=NUM_ACTIONS).float() / num_samples
    history, epoch, done, order, sums, seconds_before = [], 0, 0, None, {}, 0.0
    if checkpoint:
        models.load_state_dict(checkpoint["goals"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        generator.set_state(checkpoint["generator"])
        history, epoch, done = checkpoint["history"], checkpoint["epoch"], checkpoint["done"]
        order, seconds_before = checkpoint["order"], checkpoint["seconds"]
        sums = {name: value.to(args.device) for name, value in checkpoint["sums"].items()}

    def seconds():
        return seconds_before + time.perf_counter() - START

    def save():
        save_checkpoint(folder, {
            "script": "pretrain_vae.py", "config": dataclasses.asdict(args), "goals": models.state_dict(),
            "num_inputs": num_inputs, "optimizer": optimizer.state_dict(), "generator": generator.get_state(),
            "data": data, "history": history, "epoch": epoch, "done": done, "order": order, "sums": sums,
            "seconds": seconds()})

    from torch.utils.tensorboard import SummaryWriter  # here, so that --help and tests need not wait for it

    writer = SummaryWriter(folder, purge_step=epoch if checkpoint else None)
    flags = "\n".join(f"|{key}|{value}|" for key, value in dataclasses.asdict(args).items())
    writer.add_text("flags", "|flag|value|\n|-|-|\n" + flags)
    os.makedirs(os.path.join(folder, "pictures"), exist_ok=True)
    print(f"[VAE] {num_samples} samples of {num_games} players' games to train on, {len(held_out['x'])} of other "
          f"episodes held out ({board_name(args)}, {' '.join(args.mix)})")
    if args.moa_samples == "rewarded":
        print("[MOA] --moa-samples rewarded picks players by what they will catch; the ceilings know nothing of that, "
              "and may be exceeded")
    means, each, moa = None, None, None
    saved = time.perf_counter()
    bar = tqdm(total=args.epochs * num_samples, initial=epoch * num_samples, unit=" samples", unit_scale=True,
               dynamic_ncols=True, mininterval=0.5, desc="training")
    with Interrupt() as interrupt:
        while epoch < args.epochs and not interrupt.wanted:
            epoch_begun, begun_at = time.perf_counter(), done
            if order is None:
                order = torch.randperm(num_games, generator=generator, device=args.device)
            pieces = order.to(args.device).chunk(batches)
            while done < len(pieces) and not interrupt.wanted:
                progress = epoch + done / len(pieces)
                for group in optimizer.param_groups:
                    group["lr"] = args.learning_rate * (1 - progress / args.epochs)
                kl_weight = args.kl_weight * (min(1.0, progress / args.kl_warmup) if args.kl_warmup else 1.0)
                symmetry = Symmetry.draw(args, generator) if args.augment else None
                batch = make_batch(train, pieces[done], args.horizon, symmetry)
                losses = train_batch(models, optimizer, batch, args, kl_weight, generator)
                weight = len(batch["rows"]) / num_samples
                sums = {name: sums.get(name, 0.0) + value.double() * weight for name, value in losses.items()}
                done += 1
                bar.update(len(batch["rows"]))
                if time.perf_counter() - saved > args.save_every:
                    saved = time.perf_counter()
                    save()
            if done < len(pieces):
                break
            row = {"epoch": epoch, "train": {name: value.item() for name, value in sums.items()}}
            trained_seconds = time.perf_counter() - epoch_begun
            epoch, done, order, sums = epoch + 1, 0, None, {}
            if epoch % args.eval_every == 0 or epoch == args.epochs:
                means, each = predict(models, held_out, args)
                moa = score_all(each, held_out, frequencies)
                row.update(held_out=means, top1=moa["inferred"]["top1"], exact_views=each["exact"].double().mean().item())
                write_evaluation(folder, epoch - 1, moa, each, held_out)
                bar.clear()
                tqdm.write(epoch_line(epoch - 1, moa))
                tqdm.write(f"[VAE] epoch {epoch - 1}: " + ", ".join(
                    f"{name}={row['held_out'][name]:.4f}" for name in TAGS)
                    + f", exact_views={row['exact_views']:.4f}")
                log_scores(writer, moa, row, epoch)
            history.append(row)
            for name, value in row["train"].items():
                writer.add_scalar(f"{TAGS[name]}/train", value, epoch)
            writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], epoch)
            writer.add_scalar("vae/kl_weight", kl_weight, epoch)
            writer.add_scalar("charts/SPS", num_samples * (1 - begun_at / len(pieces)) / trained_seconds, epoch)
            writer.add_scalar("time/epoch", trained_seconds, epoch)
        save()
    bar.close()
    trained_seconds = seconds()
    if epoch < args.epochs:
        writer.close()
        print(f"stopped in epoch {epoch}; go on with: python pretrain_vae.py --resume {folder}")
        return 130

    if each is None:  # nothing was left to train
        means, each = predict(models, held_out, args)
        moa = score_all(each, held_out, frequencies)
    meaning = meaning_of_goals(models, train, each, held_out, args) if len(args.mix) > 1 else None
    write_pictures(folder, writer, epoch, history, moa, each, held_out, meaning)
    writer.close()
    exact = each["exact"].double().mean().item()
    results = {"epochs": epoch, "samples": num_samples, "held_out_samples": len(held_out["x"]), "moa": moa,
               "vae": {**{name: means[name] for name in ("recon", "kl", "total", "inference")}, "exact_views": exact},
               "goal": meaning, "training_seconds": round(trained_seconds, 2), "seconds": round(seconds(), 2),
               "cpu_seconds": round(time.process_time(), 2)}
    save_json(os.path.join(folder, "results.json"), results)
    print_results(args, moa, results, meaning)
    print(f"\n{epoch} epochs on {num_samples} samples in {results['seconds']:.0f} s. Everything is in {folder}")
    return 0


if __name__ == "__main__":
    run_script(Args, main)
