"""PPO in the Markov stag hunt: any number of learners in any seats, all trained as one batched program.

    python ppo_single_player.py                                  one learner among three stag hunters (1 minute)
    python ppo_single_player.py --players ppo ppo ppo ppo        self-play of four independent learners (1 minute)
    tensorboard --logdir runs                                    curves, boards and action histograms

Every seat that says `ppo` is a learner of its own: its own parameters, its own trajectory, its own losses. Their
parameters are stacked, so that four learners cost little more than one. The run prints one moving line, then a
table of returns over 20,000 fresh episodes, and leaves everything in `runs/<run name>/`.

The file from top to bottom:
    arguments   the flags
    game        the batched stag hunt and its rules
    players     rule-based players, mixes of them, players from a file
    networks    what a learner sees, and the stacked policy and value networks
    learning    the rollout, generalised advantages, the episode buffer, the PPO loss
    outputs     run folder, pictures, progress
    main        the loop
"""

import dataclasses
import importlib.util
import json
import math
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

START = time.perf_counter()  # seconds are counted from here, before the slow imports

import numpy as np
import torch
import torch.nn as nn
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
    players: tuple[str, ...] = ("ppo", "ns", "ns", "ns")
    """who sits where: ppo (a learner), random, ns, nh, nsh, patient-28, noisy-ns, noisy-nh, switch-ns-nh, switch-nh-ns,
    mix:A,B (drawn anew each episode), file.py:Class (your own), runs/x/checkpoint.pt:player_1 (trained before)"""
    share_parameters: bool = False
    """all learners are one: the same parameters, trained on the data of all their seats"""
    total_timesteps: int = 1_500_000
    """environment steps of the run; one is one joint move of all players"""
    num_envs: int = 256
    """games played side by side"""
    num_steps: int = 32
    """steps of each game between two updates (with --buffer transitions)"""
    buffer: Literal["transitions", "episodes"] = "transitions"
    """learn from the steps just taken, or from whole episodes held in a buffer"""
    buffer_size: int | None = None
    """steps that the episode buffer holds (default with --buffer episodes: 5000)"""
    hidden_size: int = 64
    """units in each of the two hidden layers"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """numbers of the first layer's product; bfloat16 is faster where the processor knows it, and rounds to three digits"""
    learning_rate: float = 2.5e-3
    """step size of Adam"""
    anneal_lr: bool = True
    """lower the step size to 0 over the run"""
    gamma: float = 0.99
    """discount of later rewards"""
    gae_lambda: float = 0.95
    """lambda of the generalised advantage estimate"""
    num_minibatches: int = 4
    """pieces into which the data of an update is cut"""
    update_epochs: int = 2
    """times that an update goes through its data"""
    prize_floor: float | None = None
    """divide each advantage by what the player expects then and this on top: prizes count by how they compare, not by
    their size; None leaves them as they are"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch, for each learner on its own"""
    clip_coef: float = 0.2
    """how far the ratio of new to old probability may move before the policy loss is flat"""
    clip_vloss: bool = False
    """clip the change of the value as well, by clip_coef in units of the scaled reward"""
    ent_coef: float = 0.02
    """weight of the entropy bonus at the start"""
    ent_coef_end: float = 0.0
    """weight of the entropy bonus at the end; in between it changes linearly"""
    soft_coef: float = 0.05
    """at the start, what a player earns on top for each nat of its policy's entropy, in every step it is there: it
    stays on the board and tries things (maximum-entropy reinforcement learning); never part of what is logged"""
    soft_until: float = 0.5
    """share of the run over which soft_coef falls to 0"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    reward_scale: float = 0.2
    """rewards are multiplied by this for learning; whatever is logged is in the units of the game"""
    max_grad_norm: float = 0.5
    """gradients of a learner longer than this are shortened to it"""
    target_kl: float | None = None
    """a learner whose policy moved further than this in an update sits out the rest of it"""
    compile: bool = False
    """pass the networks through torch.compile"""
    eval_episodes: int = 20_000
    """episodes of each evaluation at the end, sampled and greedy; 0 for none"""
    thresholds: tuple[float, ...] = (2.5, 2.7, 2.8, 2.85)
    """mean returns whose first reaching is timed, by the mean of the last 500 episodes"""
    picture_every: float = 30.0
    """seconds between two pictures of an episode"""


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


# ================================================================================== networks


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


# ================================================================================== learning


class Table:
    """The game, and who sits where: learners, trained players, and all the others (a Lineup)."""

    def __init__(self, args, num_envs, seed, agent=None):
        players = list(args.players)
        self.names = [f"player_{seat + 1}" for seat in range(len(players))]
        self.learner_seats = [seat for seat, name in enumerate(players) if name == "ppo"]
        self.trained_seats = [seat for seat, name in enumerate(players) if ".pt:" in name]
        self.game = BatchedStagHunt(num_envs, num_players=len(players), device=args.device, seed=seed,
                                    **{field.name: getattr(args, field.name) for field in dataclasses.fields(GameArgs)})
        own = set(self.learner_seats + self.trained_seats)
        self.lineup = Lineup([None if seat in own else name for seat, name in enumerate(players)], self.game, seed)
        self.observation = self.game.observe()
        num_learners = min(1, len(self.learner_seats)) if args.share_parameters else len(self.learner_seats)
        # [learner, seat of that learner]: one seat each, or all of them where the parameters are shared
        self.seats = torch.tensor(self.learner_seats, dtype=torch.int64, device=args.device)
        self.seats = self.seats.view(num_learners, len(self.learner_seats) // max(num_learners, 1))
        num_inputs = features(self.observation).shape[-1]
        self.agent = agent or Agent(num_learners, num_inputs, args.hidden_size, args.final_time, args.seed)
        self.agent.to(args.device)
        self.agent.precision = getattr(torch, args.precision)
        self.trained = None
        if self.trained_seats:
            trained = [players[seat] for seat in self.trained_seats]
            self.trained = load_policies(trained, num_inputs).to(args.device)

    def learner_view(self, x):
        """Picks the learners' rows of [N, B, ...] and lays them out as [L, seats * B, ...]."""
        return x[self.seats].flatten(1, 2)

    def act(self, generator, greedy=False):
        """One joint move [B, N], and for the learners what they saw and chose, its log-probability, the entropy and the value: each [L, M]."""
        x = features(self.observation)
        actions = self.lineup.act(self.game, self.observation)
        if self.trained is not None:
            log_probs, _ = self.trained(x[self.trained_seats])
            actions[:, self.trained_seats] = sample_actions(log_probs.exp(), generator).T
        view = self.learner_view(x)
        log_probs, value = self.agent(view)
        chances = log_probs.exp()
        action = log_probs.argmax(-1) if greedy else sample_actions(chances, generator)
        actions[:, self.seats.flatten()] = action.view(self.seats.numel(), self.game.num_envs).T
        return (actions, view, action, log_probs.gather(-1, action[..., None]).squeeze(-1),
                -(chances * log_probs).sum(-1), value)

    def play(self, actions, restart=True):
        """Plays a joint move; begins new episodes where one is over, unless told not to. -> what advance returns"""
        out = self.game.advance(actions)
        out["over"] = out["terminated"] | out["truncated"]
        out["ended"] = out["left"] | out["over"][:, None]  # this player's own game is over [B, N]
        if restart:
            self.observation = self.game.reset(out["over"])
            self.lineup.reset(out["over"])
        else:
            self.observation = self.game.observe()
        return out

    def restart(self):
        """Begins a new episode everywhere."""
        self.observation = self.game.reset()
        self.lineup.reset(torch.ones(self.game.num_envs, dtype=torch.bool, device=self.game.device))


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


@torch.no_grad()
def rollout(table, returns, num_steps, generator, reward_scale, whole_episodes=False):
    """Plays num_steps steps, or one whole episode in each environment. -> dict of [T, L, M], values [T+1, L, M]

    `present` says which of these are samples: the player was there, and the episode not yet over.
    """
    steps = {key: [] for key in ("x", "actions", "logprobs", "entropy", "values", "rewards", "ends", "present")}
    if whole_episodes:
        table.restart()
    running = torch.ones(table.game.num_envs, dtype=torch.bool, device=table.game.device)
    played = torch.zeros(table.game.num_envs, dtype=torch.int64, device=table.game.device)
    for _ in range(num_steps):
        actions, x, action, logprob, entropy, value = table.act(generator)
        out = table.play(actions, restart=not whole_episodes)
        returns.add(out["reward"] * running[:, None], out["over"] & running)
        steps["x"].append(x)
        steps["actions"].append(action)
        steps["logprobs"].append(logprob)
        steps["entropy"].append(entropy)
        steps["values"].append(value)
        steps["rewards"].append(table.learner_view(out["reward"].T) * reward_scale)
        steps["ends"].append(table.learner_view(out["ended"].T))
        steps["present"].append(table.learner_view((out["present"] & running[:, None]).T))
        played += running
        if whole_episodes:
            running = running & ~out["over"]
    steps["values"].append(table.agent(table.learner_view(features(table.observation)))[1])
    return {key: torch.stack(value) for key, value in steps.items()}, played


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


class EpisodeBuffer:
    """Whole episodes, newest last; the oldest go when the steps in it would exceed its size."""

    def __init__(self, size):
        self.size, self.data, self.length = size, None, None

    def add(self, data, length):
        """data as a rollout gives it, [T, L, seats * B]; length [B], the steps of each episode."""
        if self.data is not None:
            seats = data["rewards"].shape[2] // len(length)
            old, new = len(self.length), len(length)
            data = {key: torch.cat([self.data[key].unflatten(2, (seats, old)), value.unflatten(2, (seats, new))], 3)
                    .flatten(2, 3) for key, value in data.items()}
            length = torch.cat([self.length, length])
        newest_first = length.flip(0).cumsum(0).flip(0)
        keep = newest_first <= max(self.size, length[-1])
        seats = data["rewards"].shape[2] // len(length)
        self.data = {key: value[:, :, keep.repeat(seats)] for key, value in data.items()}
        self.length = length[keep]
        return self.data


@torch.no_grad()
def bring_up_to_date(agent, data):
    """What the present policy thinks of stored data: its log-probabilities, values, and the truncated ratio to the old.

    The stored log-probability is the one the action was drawn with. PPO's ratio is taken to the present policy,
    and each sample counts by min(1, present / drawn), as in decoupled PPO (Hilton et al. 2022).
    """
    log_probs, values = zip(*(agent(x) for x in data["x"]))
    logprobs = torch.stack(log_probs[:-1] if len(log_probs) > len(data["actions"]) else log_probs)
    logprobs = logprobs.gather(-1, data["actions"][..., None]).squeeze(-1)
    values = torch.cat([torch.stack(values), data["values"][-1:]])
    trace = (logprobs - data["logprobs"]).exp().clamp(max=1)
    return {**data, "logprobs": logprobs, "values": values}, trace


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


@torch.no_grad()
def evaluate(args, agent, episodes, greedy, seed):
    """Plays fresh episodes with the learners as they are. -> returns [episodes, N]"""
    num_envs = min(episodes, 2000)
    table = Table(args, num_envs, seed, agent)
    generator = torch.Generator(args.device).manual_seed(seed)
    finished = []
    for _ in range(math.ceil(episodes / num_envs)):
        total = torch.zeros(num_envs, len(args.players), device=args.device)
        running = torch.ones(num_envs, dtype=torch.bool, device=args.device)
        while running.any():
            out = table.play(table.act(generator, greedy)[0], restart=False)
            total += out["reward"] * running[:, None]
            running &= ~out["over"]
        finished.append(total)
        table.restart()
    return torch.cat(finished)[:episodes]


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
    whole = ("total_timesteps", "num_envs", "num_steps", "hidden_size", "num_minibatches", "update_epochs")
    for name in whole:
        if getattr(args, name) < 1:
            raise Refused(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    for name, low, high in (("gamma", 0, 1), ("gae_lambda", 0, 1), ("learning_rate", 0, math.inf),
                            ("ent_coef", 0, math.inf), ("ent_coef_end", 0, math.inf),
                            ("soft_coef", 0, math.inf), ("soft_until", 0, 1), ("vf_coef", 0, math.inf),
                            ("clip_coef", 0, math.inf), ("eval_episodes", 0, math.inf), ("save_every", 0, math.inf)):
        if not low <= getattr(args, name) <= high:
            raise Refused(f"--{name.replace('_', '-')} {getattr(args, name)} must lie between {low} and {high}")
    for name in ("reward_scale", "max_grad_norm", "target_kl", "prize_floor"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise Refused(f"--{name.replace('_', '-')} {getattr(args, name)} must be greater than 0")
    learners = list(args.players).count("ppo")
    if not learners:
        raise Refused(f"--players {' '.join(args.players)}: nobody learns; write ppo in at least one seat")
    if args.share_parameters and learners == 1:
        raise Refused(f"--share-parameters needs two learners or more, --players {' '.join(args.players)} has 1")
    if args.buffer == "transitions" and args.buffer_size is not None:
        raise Refused(f"--buffer-size {args.buffer_size} means nothing with --buffer transitions")
    if args.buffer == "episodes" and args.num_steps != Args.num_steps:
        raise Refused(f"--num-steps {args.num_steps} means nothing with --buffer episodes: episodes are played whole")
    if args.buffer == "episodes" and (args.buffer_size or 5000) < args.final_time:
        raise Refused(f"--buffer-size {args.buffer_size} is too small for one episode of --final-time {args.final_time}")
    samples = args.num_envs * (args.num_steps if args.buffer == "transitions" else 1)
    if samples < args.num_minibatches:
        raise Refused(f"--num-minibatches {args.num_minibatches} are more than the {samples} samples of an update "
                      f"(--num-envs {args.num_envs})")


def progress_line(bar, table, returns):
    """Shows each player's mean return over the last episodes on the one moving line."""
    if len(returns.last):
        bar.set_postfix_str("return " + " ".join(f"{value:.2f}" for value in returns.last.mean(0).tolist()), refresh=False)


def record_episode(args, agent, seed):
    """Plays one episode for a picture. -> frames"""
    table = Table(args, 1, seed, agent)
    generator = torch.Generator(args.device).manual_seed(seed)
    total, frames, over = torch.zeros(len(args.players)), [], False
    while not over:
        returns = " ".join(f"{value:g}" for value in total.round(decimals=2).tolist())
        frames.append(draw_board(table.game, 0, f"step {int(table.game.clock)}  returns {returns}"))
        with torch.no_grad():
            out = table.play(table.act(generator)[0], restart=False)
        total, over = total + out["reward"][0].cpu(), bool(out["over"])
    returns = " ".join(f"{value:g}" for value in total.round(decimals=2).tolist())
    return frames + [draw_board(table.game, 0, f"over  returns {returns}")]


def main(args):
    args = resolve_flags(args)
    check_flags(args)
    prepare_torch(args)
    table = Table(args, args.num_envs, args.seed)
    checkpoint = args.resume and on_device(load_checkpoint(os.path.join(args.resume, "checkpoint.pt"), f"--resume {args.resume}"),
                                           args.device)
    folder = open_run(args)

    agent = table.agent
    network = torch.compile(agent) if args.compile else agent
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    returns = Returns(args.num_envs, len(args.players), args.device)
    buffer = EpisodeBuffer(args.buffer_size or 5000) if args.buffer == "episodes" else None
    thresholds = Thresholds(args.thresholds)
    learner_names = [table.names[seat] for seat in table.learner_seats]
    learner_of = {name: 0 if args.share_parameters else learner for learner, name in enumerate(learner_names)}
    timesteps, seconds_before = 0, 0.0
    tail = []  # the losses of the last tenth of the run, whose means are its final ones
    if checkpoint:
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        table.game.set_state(checkpoint["game"])
        table.lineup.set_state(checkpoint["lineup"])
        table.observation = table.game.observe()
        generator.set_state(checkpoint["generator"])
        returns.running, returns.last = checkpoint["returns"]
        timesteps, seconds_before, tail = checkpoint["timesteps"], checkpoint["seconds"], checkpoint["tail"]
        thresholds.reached.update(checkpoint["thresholds"])
        if buffer:
            buffer.data, buffer.length = checkpoint["buffer"]

    def seconds():
        return seconds_before + time.perf_counter() - START

    def save():
        save_checkpoint(folder, {
            "script": "ppo_single_player.py", "config": dataclasses.asdict(args), "agent": agent.state_dict(),
            "learner_of": learner_of, "optimizer": optimizer.state_dict(), "game": table.game.get_state(),
            "lineup": table.lineup.get_state(), "generator": generator.get_state(),
            "returns": (returns.running, returns.last), "timesteps": timesteps, "seconds": seconds(),
            "tail": tail, "thresholds": thresholds.reached, "buffer": (buffer.data, buffer.length) if buffer else None})

    from torch.utils.tensorboard import SummaryWriter  # here, so that --help and tests need not wait for it

    writer = SummaryWriter(folder, purge_step=timesteps if checkpoint else None)
    flags = "\n".join(f"|{key}|{value}|" for key, value in dataclasses.asdict(args).items())
    writer.add_text("flags", "|flag|value|\n|-|-|\n" + flags)
    os.makedirs(os.path.join(folder, "pictures"), exist_ok=True)
    saved = pictured = time.perf_counter()
    begun, begun_at = time.perf_counter(), timesteps
    bar = tqdm(total=args.total_timesteps, initial=timesteps, unit=" steps", unit_scale=True, dynamic_ncols=True,
               mininterval=0.5, desc="training")
    with Interrupt() as interrupt:
        while timesteps < args.total_timesteps and not interrupt.wanted:
            part_begun = time.perf_counter()
            left = 1 - timesteps / args.total_timesteps  # the share of the run that is still to come
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * (left if args.anneal_lr else 1)
            ent_coef = args.ent_coef_end + (args.ent_coef - args.ent_coef_end) * left
            soft_coef = args.soft_coef * max(0.0, 1 - (1 - left) / args.soft_until) if args.soft_until else 0.0

            whole_episodes = buffer is not None
            data, played = rollout(table, returns, args.final_time if whole_episodes else args.num_steps, generator,
                                   args.reward_scale, whole_episodes)
            timesteps += int(played.sum())
            taken = data["actions"], data["present"]
            rollout_seconds, part_begun = time.perf_counter() - part_begun, time.perf_counter()

            trace = None
            if whole_episodes:
                data, trace = bring_up_to_date(agent, buffer.add(data, played))
            losses = update(agent, network, optimizer, data, trace, args, ent_coef, soft_coef, generator)
            learning_seconds = time.perf_counter() - part_begun
            if timesteps > 0.9 * args.total_timesteps:
                tail.append(losses)

            thresholds.check(returns.last, table.learner_seats, seconds(), timesteps)
            for seat, name in enumerate(table.names):
                if len(returns.last):
                    writer.add_scalar(f"charts/episodic_return/{name}", returns.last[:, seat].mean(), timesteps)
            for name in learner_names:
                for key, value in losses.items():
                    writer.add_scalar(f"losses/{key}/{name}", value[learner_of[name]], timesteps)
            writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], timesteps)
            writer.add_scalar("charts/ent_coef", ent_coef, timesteps)
            writer.add_scalar("charts/soft_coef", soft_coef, timesteps)
            writer.add_scalar("charts/SPS", (timesteps - begun_at) / (time.perf_counter() - begun), timesteps)
            writer.add_scalar("time/rollout", rollout_seconds, timesteps)
            writer.add_scalar("time/learning", learning_seconds, timesteps)
            bar.update(timesteps - bar.n)
            progress_line(bar, table, returns)

            last = timesteps >= args.total_timesteps or interrupt.wanted
            if last or time.perf_counter() - pictured > args.picture_every:
                pictured = time.perf_counter()
                add_gif(writer, "episode", record_episode(args, agent, args.seed + timesteps), timesteps,
                        os.path.join(folder, "pictures", f"episode_{timesteps}.gif"))
                actions, present = taken
                for name in learner_names:
                    learner = learner_of[name]
                    writer.add_histogram(f"actions/{name}", actions[:, learner][present[:, learner]], timesteps)
            if last or time.perf_counter() - saved > args.save_every:
                saved = time.perf_counter()
                save()
    bar.close()
    trained_seconds = seconds()
    if interrupt.wanted and timesteps < args.total_timesteps:
        writer.close()
        print(f"stopped at {timesteps} steps; go on with: python ppo_single_player.py --resume {folder}")
        return 130

    results = {"timesteps": timesteps, "seconds": round(trained_seconds, 2),
               "sps": round((timesteps - begun_at) / max(time.perf_counter() - begun, 1e-9)),
               "evaluation": {}, "thresholds": thresholds.reached,
               "losses": {}}
    for key in tail[0] if tail else ():
        mean = torch.stack([losses[key] for losses in tail]).mean(0)
        results["losses"][key] = {name: mean[learner_of[name]].item() for name in learner_names}
    rows = [["evaluation", *table.names, "learners' mean", "episodes"]]
    for mode in ("sampled", "greedy") if args.eval_episodes else ():
        played = evaluate(args, agent, args.eval_episodes, mode == "greedy", args.seed + 1_000_000).cpu()
        summary = summarise(played, table.learner_seats)
        names = [f"{name} {strength}" for name, strength in zip(args.players, args.strengths or [1] * len(args.players))]
        score, limit, _ = equal_players_test(played, names)
        summary["equal_players"] = {"largest_z": score if math.isfinite(score) else None,
                                    "limit": limit if math.isfinite(limit) else None, "equal": score <= limit}
        results["evaluation"][mode] = summary
        rows.append([mode, *(f"{summary[name]:.3f} ± {summary['ci95'][name]:.3f}" for name in table.names + ["mean"]),
                     str(summary["episodes"])])
        writer.add_scalar(f"evaluation/{mode}", summary["mean"], timesteps)
    writer.close()
    save_json(os.path.join(folder, "results.json"), results)
    if args.eval_episodes:
        print_table(f"mean return per episode ({' '.join(args.players)}, {board_name(args)})", rows)
    reached = [[value, *((f"{at['seconds']:.1f} s", f"{at['timesteps']} steps") if at else ("not reached", ""))]
               for value, at in thresholds.reached.items()]
    print_table("mean return of the last 500 episodes first reached", [["return", "after", ""], *reached])
    print(f"\n{timesteps} steps in {trained_seconds:.0f} s, {results['sps']} a second. Everything is in {folder}")
    return 0


if __name__ == "__main__":
    run_script(Args, main)
