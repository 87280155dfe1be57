"""The batched game and its rule-based players: thousands of stag hunts as one tensor program.

The scripts at the top level carry copies of what they need of this text, and `python tests/copies.py` keeps
them the same; the rest of `envs/` and the tests take it from here. `stag_hunt.py` tells the same rules for
one game, one player and one cell at a time; in the tests the two play against each other step for step.
"""

import functools
import itertools
import math
import os
import random
import re
import runpy
from statistics import NormalDist

import torch
import torch.nn.functional as F

# ======================================================================================= state


class Refused(ValueError):
    """Flags or files that cannot be used: told in one line that names them, with exit code 2."""


class Failed(RuntimeError):
    """What a run cannot go on from: told in one line, with exit code 1."""


def flag(name):
    """A field's name as it is typed."""
    return "--" + name.replace("_", "-")


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

    def step(self, actions):
        """Plays one joint move [B, N] and begins new episodes where one ended.

        -> observation, reward [B, N], terminated [B, N], truncated [B, N], what `advance` gives. Where the
        episode ended, the observation is the first of the next one. A player's game is terminated in the step
        in which it leaves or the episode terminates; after that all is 0 for it until the next episode.
        """
        out = self.advance(actions)
        by_clock = out["over"] & (self.board.amax(0) >= STAG_BIT)  # for there is prey
        truncated = by_clock[:, None] & out["present"] & ~out["left"]
        terminated = out["ended"] & out["present"] & ~truncated
        self.reset(out["over"])
        return self.observe(), out["reward"], terminated, truncated, out

    @functools.cached_property
    def choice(self):
        """For each set of legal actions 420 of them in turn: a number that 1, 2, ... 7 all divide."""
        choices = [[a for a in range(NUM_ACTIONS) if bits >> a & 1] or [STAY] for bits in range(128)]
        return torch.tensor([c[n % len(c)] for c in choices for n in range(420)], dtype=torch.uint8,
                            device=self.device)

    def random_actions(self):
        """Uniformly drawn legal actions [B, N]."""
        number = torch.randint(420, self.cell.shape, generator=self.generator, dtype=torch.int32,
                               device=self.device)
        index = self.legal_bits().int() * 420 + number
        return self.choice.index_select(0, index.view(-1)).view_as(index).T


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
