"""The batched game and its rule-based players: thousands of stag hunts as one tensor program.

Every script at the top level carries a copy of this text (`python tests/copies.py` keeps the copies
the same), so this file is where the rest of `envs/` and the tests take it from. `stag_hunt.py` tells
the same rules for one game, one player and one cell at a time; the two are played against each other
step for step in the tests.
"""

import importlib.util
import math
import os
import sys
from statistics import NormalDist

import torch

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
