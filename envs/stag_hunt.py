"""The readable Markov stag hunt: a PettingZoo parallel environment, one player and one cell at a time.

    from envs import StagHunt
    env = StagHunt(render_mode="ansi")
    observations, infos = env.reset(seed=1)
    while env.agents:
        actions = {agent: env.action_space(agent).sample(infos[agent]["action_mask"]) for agent in env.agents}
        observations, rewards, terminations, truncations, infos = env.step(actions)
        print(env.render())

The board. A grid of height x width cells with players, stags, hares and perhaps obstacles. Prey never move. A
reset puts all players and prey on distinct free cells, uniformly. Afterwards players may share a cell with
one another and with prey.

Obstacles. max_blocks pieces are tried one after another: a straight tromino, a corner tromino, a straight
tetromino or an L tetromino, each as likely, turned by 0, 1, 2 or 3 quarter turns, each as likely (the L is
never mirrored). The top-left corner of the turned piece's bounding box is put on any cell of the board, each
as likely; a piece that then sticks out or overlaps an earlier one is left out, so that there may be fewer
than max_blocks. If the free cells do not hang together (up, down, left, right), the whole draw is thrown away
and made again.

Actions. 0 up, 1 down, 2 left, 3 right, 4 stay, 5 hunt stag, 6 hunt hare. A move is legal when it ends on a
free cell of the board, hunting when a prey of that kind stands in the player's own cell, staying always.
Anything else that is handed in (an illegal action, a number that is no action, something that is no whole
number, nothing at all) is played, and recorded, as stay. Actions of players that have left are ignored; only
a name that no player of the game has is an error.

A step. All players act at once. Hunts are settled on the cells that the players stood on before the step;
then the others move. The order of the players changes nothing.
- A stag is caught when at least stag_hunters players standing on it hunt it in the same step. stag_reward is
  split among exactly those hunters in proportion to their strengths. Too few hunters just stay; their
  recorded action is still the hunt, for it was legal.
- A hare is caught when at least one player standing on it hunts it. hare_reward is split equally among its
  hunters.
- A caught prey and its hunters leave the board at once.
- Every player that was there when the step began also gets time_reward.
- With prosocial, each player that was there when the step began gets instead the mean, over all num_players
  players, of that step's rewards, where those who had left before count 0. Rewards are numbers of 32-bit
  precision (strengths too): shares, sums and means are computed in 64 bits and rounded.

The end. A player's own game ends when it leaves: it is terminated and is gone from `agents`. The episode ends
for all that are still there when no prey is left (terminated), or at the deadline (truncated), which is step
final_time. With dynamic_final_time the first catch, in step number s, moves the deadline to s + 5 if that is
earlier. Where both ends hold, the players are terminated, not truncated; a player that leaves in the last
step is terminated as well.

The observation of a player, a dict. Players are always listed from the observer on: itself, the next, ... and
round to the one before it.
- observation: height x width x (num_players + 3) planes of 0 and 1: the players, obstacles, stags, hares.
- action_mask: 1 for each of the 7 actions that is legal (also in the info).
- actions: what each player did in the step before; stay before the first step and for players that were
  already gone. In the observation after a catch, the hunters are thus gone from the planes, but their hunt
  can be seen here.
- step: the number of steps played. steps_left: how many can still be played. The last observation of an
episode shows the board as it is. A player that left has an empty plane and only stay in its mask, in the
observations of others as in its own last one.
"""

import math
import operator

import gymnasium
import numpy as np
import pettingzoo

# ---------------------------------------------------------------------------------------------------- constants

UP, DOWN, LEFT, RIGHT, STAY, HUNT_STAG, HUNT_HARE = range(7)
ACTION_NAMES = ("up", "down", "left", "right", "stay", "hunt stag", "hunt hare")
MOVES = {UP: (-1, 0), DOWN: (1, 0), LEFT: (0, -1), RIGHT: (0, 1)}  # row and column added by each move

BLOCK_SHAPES = (  # cells (row, column) before the turn
    ((0, 0), (0, 1), (0, 2)),  # straight tromino
    ((0, 0), (1, 0), (1, 1)),  # corner tromino
    ((0, 0), (0, 1), (0, 2), (0, 3)),  # straight tetromino
    ((0, 0), (1, 0), (2, 0), (2, 1)),  # L tetromino
)

STEPS_AFTER_FIRST_CATCH = 5  # with dynamic_final_time

# -------------------------------------------------------------------------------------------------------- board


def check_board(height, width, num_players, stags, hares, max_blocks, final_time, stag_reward, hare_reward,
                stag_hunters, time_reward, strengths):
    """Refuse a game that cannot be played, with one line that names the arguments and their values."""
    largest = 1e30  # far inside the range of float32, so that no reward can overflow
    for flag, value, least in (("--height", height, 1), ("--width", width, 1), ("--num-players", num_players, 1),
                               ("--stags", stags, 0), ("--hares", hares, 0), ("--max-blocks", max_blocks, 0),
                               ("--final-time", final_time, 1), ("--stag-hunters", stag_hunters, 1)):
        if not hasattr(value, "__index__"):
            raise ValueError(f"{flag} {value!r} must be a whole number")
        if value < least:
            raise ValueError(f"{flag} {value} must be at least {least}")
    for flag, value, least in (("--stag-reward", stag_reward, 0), ("--hare-reward", hare_reward, 0),
                               ("--time-reward", time_reward, -largest)):
        if not hasattr(value, "__float__") or not least <= value <= largest:  # nan fails every comparison
            raise ValueError(f"{flag} {value!r} must be a finite number from {least:g} to {largest:g}")
    if strengths is not None:
        if not hasattr(strengths, "__len__") or len(strengths) != num_players:
            raise ValueError(f"--strengths {strengths!r} must be {num_players} numbers, one for each of "
                             f"--num-players {num_players}")
        for strength in strengths:
            if not hasattr(strength, "__float__") or not 1 / largest <= strength <= largest:
                raise ValueError(f"--strengths {strengths!r} must be positive and finite numbers, "
                                 f"but one of them is {strength!r}")
    if stags + hares == 0:
        raise ValueError("--stags 0 and --hares 0 leave no prey at all: a game needs at least one")
    if stags > 0 and num_players < stag_hunters:
        raise ValueError(f"--num-players {num_players} can never catch a stag that needs --stag-hunters "
                         f"{stag_hunters}: play with more players or with --stags 0")
    cells, pieces = height * width - 4 * max_blocks, num_players + stags + hares
    if cells < pieces:
        raise ValueError(f"--height {height} x --width {width} minus 4 cells for each of --max-blocks {max_blocks} "
                         f"leaves {cells} cells for {pieces} pieces ({num_players} players, {stags} stags, "
                         f"{hares} hares)")


def float32(value):
    """Round a Python float to 32 bits, so that the readable and the batched game pay exactly the same."""
    return float(np.float32(value))


def turned(shape, quarter_turns):
    """Turn a piece clockwise and move its bounding box back to (0, 0)."""
    for _ in range(quarter_turns):
        shape = [(column, -row) for row, column in shape]
    top, left = min(row for row, _ in shape), min(column for _, column in shape)
    return [(row - top, column - left) for row, column in shape]


def steps_to_nearest(targets, free):
    """How many moves each free cell is away from the nearest target, around obstacles: {cell: steps}."""
    steps = {cell: 0 for cell in targets}
    frontier = list(targets)
    for row, column in frontier:  # grows while it is read: breadth first
        for down, right in MOVES.values():
            cell = (row + down, column + right)
            if cell in free and cell not in steps:
                steps[cell] = steps[row, column] + 1
                frontier.append(cell)
    return steps


def hang_together(cells):
    """Whether every cell of a set can be reached from every other by moves inside the set."""
    return steps_to_nearest(list(cells)[:1], cells).keys() == cells


def draw_blocks(height, width, max_blocks, rng):
    """Draw obstacles that leave the free cells of the board connected; returns the set of blocked cells."""
    board = {(row, column) for row in range(height) for column in range(width)}
    while True:
        blocks = set()
        for _ in range(max_blocks):
            shape = BLOCK_SHAPES[rng.integers(len(BLOCK_SHAPES))]
            piece = turned(shape, rng.integers(4))
            top, left = rng.integers(height), rng.integers(width)
            cells = {(int(top) + row, int(left) + column) for row, column in piece}
            if cells <= board - blocks:
                blocks |= cells
        if hang_together(board - blocks):
            return blocks


# --------------------------------------------------------------------------------------------------------- game


class StagHunt(pettingzoo.ParallelEnv):
    """The Markov stag hunt for `player_1` ... `player_N`; its rules are told at the top of this file."""

    metadata = {"name": "stag_hunt_v0", "render_modes": ["ansi", "rgb_array"], "render_fps": 4}

    def __init__(self, height=4, width=4, num_players=4, stags=1, hares=4, max_blocks=0, final_time=35,
                 stag_reward=10.0, hare_reward=1.0, stag_hunters=2, time_reward=0.0, strengths=None, prosocial=False,
                 dynamic_final_time=False, render_mode=None):
        check_board(height, width, num_players, stags, hares, max_blocks, final_time, stag_reward, hare_reward,
                    stag_hunters, time_reward, strengths)
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode {render_mode!r} must be one of None, 'ansi', 'rgb_array'")
        self.height, self.width, self.num_players = int(height), int(width), int(num_players)
        self.num_stags, self.num_hares, self.max_blocks = int(stags), int(hares), int(max_blocks)
        self.final_time, self.stag_hunters = int(final_time), int(stag_hunters)
        self.stag_reward, self.hare_reward = float(stag_reward), float(hare_reward)
        self.time_reward = float(time_reward)
        self.strengths = [float32(strength) for strength in (strengths if strengths is not None else [1] * num_players)]
        self.prosocial, self.dynamic_final_time = bool(prosocial), bool(dynamic_final_time)
        self.render_mode = render_mode

        self.possible_agents = [f"player_{number + 1}" for number in range(self.num_players)]
        self.agents = []
        self.rng = np.random.default_rng()
        self.players = None  # the cell of each player, None for one that has left; no list before the first reset

        self.observation_spaces = {agent: self._make_observation_space() for agent in self.possible_agents}
        self.action_spaces = {agent: gymnasium.spaces.Discrete(len(ACTION_NAMES)) for agent in self.possible_agents}

    def _make_observation_space(self):
        spaces = gymnasium.spaces
        planes = (self.height, self.width, self.num_players + 3)
        return spaces.Dict({
            "observation": spaces.Box(0, 1, planes, np.uint8),
            "action_mask": spaces.Box(0, 1, (len(ACTION_NAMES),), np.int8),
            "actions": spaces.MultiDiscrete([len(ACTION_NAMES)] * self.num_players),
            "step": spaces.Discrete(self.final_time + 1),
            "steps_left": spaces.Discrete(self.final_time + 1),
        })

    def observation_space(self, agent):
        return self.observation_spaces[agent]

    def action_space(self, agent):
        return self.action_spaces[agent]

    # ---- playing

    def reset(self, seed=None, options=None):
        """Draw a new board; a seed starts the environment's own generator anew. There are no options."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.blocks = draw_blocks(self.height, self.width, self.max_blocks, self.rng)
        free = [cell for cell in self.all_cells() if cell not in self.blocks]
        pieces = self.num_players + self.num_stags + self.num_hares
        cells = [free[index] for index in self.rng.permutation(len(free))[:pieces]]
        self.players = cells[:self.num_players]
        self.stags = set(cells[self.num_players:self.num_players + self.num_stags])
        self.hares = set(cells[self.num_players + self.num_stags:])
        self.step_number, self.deadline = 0, self.final_time
        self.last_actions = [STAY] * self.num_players
        self._forget_last_step()
        self.agents = list(self.possible_agents)
        return self._observations(self.agents), self._infos(self.agents)

    def step(self, actions):
        """Play one step; `actions` maps the agents to their actions."""
        if self.players is None:
            raise RuntimeError("reset() must be called before the first step()")
        for agent in actions:
            if agent not in self.possible_agents:
                raise ValueError(f"{agent!r} is no player of this game of {', '.join(self.possible_agents)}")
        acting = list(self.agents)  # those that are there when the step begins
        present = [index for index, agent in enumerate(self.possible_agents) if agent in acting]
        self.last_actions = [STAY] * self.num_players
        for index in present:
            self.last_actions[index] = self._legal_or_stay(index, actions.get(self.possible_agents[index], STAY))

        # Hunts, on the cells of before the step.
        self.catches = []  # (kind, cell, the hunters' indices)
        rewards = [0.0] * self.num_players
        for cell in sorted(self.stags):
            hunters = self._hunters(cell, HUNT_STAG)
            if len(hunters) >= self.stag_hunters:
                total = math.fsum(self.strengths[hunter] for hunter in hunters)
                for hunter in hunters:
                    rewards[hunter] = float32(self.stag_reward * self.strengths[hunter] / total)
                self.catches.append(("stag", cell, hunters))
        for cell in sorted(self.hares):
            hunters = self._hunters(cell, HUNT_HARE)
            if hunters:
                for hunter in hunters:
                    rewards[hunter] = float32(self.hare_reward / len(hunters))
                self.catches.append(("hare", cell, hunters))

        # Moves.
        for index in present:
            if self.last_actions[index] in MOVES:
                self.players[index] = self._target(index, self.last_actions[index])

        # What was caught leaves, and who caught it.
        for kind, cell, hunters in self.catches:
            (self.stags if kind == "stag" else self.hares).remove(cell)
            for hunter in hunters:
                self.players[hunter] = None

        # Rewards.
        for index in present:
            rewards[index] = float32(rewards[index] + self.time_reward)
        if self.prosocial:
            mean = float32(math.fsum(rewards) / self.num_players)
            for index in present:
                rewards[index] = mean
        self.last_rewards = rewards

        # The clock and the end.
        self.step_number += 1
        if self.dynamic_final_time and self.catches:
            self.deadline = min(self.deadline, self.step_number + STEPS_AFTER_FIRST_CATCH)
        all_over = self._nothing_to_play_for()
        out_of_time = self.step_number >= self.deadline
        terminations = {self.possible_agents[index]: all_over or self.players[index] is None for index in present}
        truncations = {agent: out_of_time and not terminations[agent] for agent in acting}
        self.agents = [agent for agent in acting if not terminations[agent] and not truncations[agent]]
        rewards = {self.possible_agents[index]: rewards[index] for index in present}
        return self._observations(acting), rewards, terminations, truncations, self._infos(acting)

    def action_mask(self, agent):
        """The legal actions of a player: seven numbers, 1 for legal."""
        index = self.possible_agents.index(agent)
        return np.array([self._is_legal(index, action) for action in range(len(ACTION_NAMES))], dtype=np.int8)

    def _is_legal(self, index, action):
        if action == STAY:
            return True
        if self.players[index] is None:
            return False
        if action == HUNT_STAG:
            return self.players[index] in self.stags
        if action == HUNT_HARE:
            return self.players[index] in self.hares
        return self._is_free(self._target(index, action))

    def _legal_or_stay(self, index, action):
        try:
            action = operator.index(action)  # whole numbers of any library
        except TypeError:
            return STAY
        return action if action in range(len(ACTION_NAMES)) and self._is_legal(index, action) else STAY

    def _target(self, index, move):
        (row, column), (down, right) = self.players[index], MOVES[move]
        return row + down, column + right

    def _is_free(self, cell):
        row, column = cell
        return 0 <= row < self.height and 0 <= column < self.width and cell not in self.blocks

    def _hunters(self, cell, hunt):
        return [index for index in range(self.num_players)
                if self.players[index] == cell and self.last_actions[index] == hunt]

    def _nothing_to_play_for(self):
        return not self.stags | self.hares or all(cell is None for cell in self.players)

    def all_cells(self):
        return [(row, column) for row in range(self.height) for column in range(self.width)]

    # ---- observations

    def _ego_first(self, index):
        """The indices of all players from one on: itself, the next, ... and round to the one before it."""
        return [(index + turn) % self.num_players for turn in range(self.num_players)]

    def _observation(self, agent):
        order = self._ego_first(self.possible_agents.index(agent))
        planes = np.zeros((self.height, self.width, self.num_players + 3), dtype=np.uint8)
        for plane, index in enumerate(order):
            if self.players[index] is not None:
                planes[self.players[index]][plane] = 1
        for plane, cells in enumerate((self.blocks, self.stags, self.hares), start=self.num_players):
            for cell in cells:
                planes[cell][plane] = 1
        return {
            "observation": planes,
            "action_mask": self.action_mask(agent),
            "actions": np.array([self.last_actions[index] for index in order], dtype=np.int64),
            "step": self.step_number,
            "steps_left": self.deadline - self.step_number,
        }

    def _observations(self, agents):
        return {agent: self._observation(agent) for agent in agents}

    def _infos(self, agents):
        return {agent: {"action_mask": self.action_mask(agent)} for agent in agents}

    # ---- state

    def get_state(self):
        """Everything that decides how the episode goes on, in plain values; the generator, which only a reset
        uses, is not part of it."""
        return {"players": list(self.players), "blocks": sorted(self.blocks), "stags": sorted(self.stags),
                "hares": sorted(self.hares), "step": self.step_number, "deadline": self.deadline,
                "last_actions": list(self.last_actions)}

    def set_state(self, state):
        """Go on from a state as `get_state` gives it; cells are (row, column), a player that has left is None."""
        if len(state["players"]) != self.num_players or len(state["last_actions"]) != self.num_players:
            raise ValueError(f"a state of {len(state['players'])} players and {len(state['last_actions'])} last "
                             f"actions does not fit a game of {self.num_players} players")
        self.players = [None if cell is None else self._cell(cell) for cell in state["players"]]
        self.blocks = {self._cell(cell) for cell in state["blocks"]}
        self.stags = {self._cell(cell) for cell in state["stags"]}
        self.hares = {self._cell(cell) for cell in state["hares"]}
        self.step_number, self.deadline = int(state["step"]), int(state["deadline"])
        self.last_actions = [int(action) for action in state["last_actions"]]
        self._forget_last_step()
        over = self._nothing_to_play_for() or self.step_number >= self.deadline
        self.agents = [agent for agent, cell in zip(self.possible_agents, self.players)
                       if cell is not None and not over]

    @staticmethod
    def _cell(cell):
        row, column = cell
        return int(row), int(column)

    def _forget_last_step(self):
        """Nothing was caught or earned just now, as far as a picture is concerned."""
        self.catches = []
        self.last_rewards = [0.0] * self.num_players

    # ---- pictures

    def render(self):
        """The board as text ("ansi") or as an array of height x width x 3 colours ("rgb_array")."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() shows nothing without a render_mode: StagHunt(render_mode='ansi')")
            return None
        if self.players is None:
            raise RuntimeError("reset() must be called before the first render()")
        return board_as_text(self) if self.render_mode == "ansi" else board_as_picture(self)

    def close(self):
        """There is nothing to close."""


def parallel_env(**kwargs):
    """Make the game by the name that PettingZoo's tools expect."""
    return StagHunt(**kwargs)


# ----------------------------------------------------------------------------------------------------- pictures


def pieces_in(env, cell):
    """What a picture shows in a cell, as (kind, player number or None, whether it has just left)."""
    pieces = []
    for kind, place, hunters in env.catches:
        if place == cell:
            pieces += [(kind, None, True)] + [("player", hunter + 1, True) for hunter in hunters]
    for kind, cells in (("stag", env.stags), ("hare", env.hares)):
        if cell in cells:
            pieces.append((kind, None, False))
    return pieces + [("player", index + 1, False) for index, place in enumerate(env.players) if place == cell]


def board_as_text(env):
    """The board for a terminal; pieces that leave are shown once more, in brackets."""
    letters = {"stag": "S", "hare": "h"}
    between = "" if env.num_players < 10 else " "

    def shown(cell):
        if cell in env.blocks:
            return "###"
        here, leaving = [], []
        for kind, number, has_left in pieces_in(env, cell):
            (leaving if has_left else here).append(letters.get(kind, str(number)))
        return (f"({between.join(leaving)})" if leaving else "") + between.join(here) or "."

    cells = [[shown((row, column)) for column in range(env.width)] for row in range(env.height)]
    room = max(3, max(len(text) for row in cells for text in row))
    border = "+" + ("-" * (room + 2) + "+") * env.width
    lines = [f"step {env.step_number}, {env.deadline - env.step_number} left", border]
    for row in cells:
        lines += ["|" + "|".join(f" {text:^{room}} " for text in row) + "|", border]
    numbers = "1 player" if env.num_players == 1 else f"1-{env.num_players} players"
    lines.append(f"{numbers}  S stag  h hare  ### block  (...) just caught and left")
    for index, agent in enumerate(env.possible_agents):
        leaves = any(index in hunters for _, _, hunters in env.catches)
        remark = "leaves" if leaves else "has left" if env.players[index] is None else ""
        lines.append(f"{agent:<10} {ACTION_NAMES[env.last_actions[index]]:<10} "
                     f"reward {env.last_rewards[index]:<8.4g} {remark}".rstrip())
    return "\n".join(lines) + "\n"


PAPER, INK, GRID, BLOCK = (250, 248, 242), (52, 54, 60), (221, 216, 204), (104, 108, 118)
STAG_COAT, STAG_ANTLERS, HARE_COAT, HARE_EARS = (150, 92, 48), (92, 58, 34), (176, 170, 162), (232, 178, 178)
PLAYER_COLOURS = ((0, 114, 178), (213, 94, 0), (0, 140, 100), (190, 95, 150), (90, 75, 170), (200, 150, 0),
                  (60, 150, 215), (130, 40, 50), (85, 120, 30), (90, 90, 90))
CROSS = (196, 40, 40)
FINER = 3  # drawn three times as large, then scaled down: smooth edges


def board_as_picture(env):
    """The board as an RGB array; pieces that leave are shown once more, faded and crossed out."""
    from PIL import Image, ImageDraw  # here, for only those who look need it

    size = max(40, min(96, 960 // max(env.height, env.width)))  # of a cell, in pixels of the finished picture
    margin, footer = 12, 30
    wide, high = max(env.width * size, 150) + 2 * margin, env.height * size + margin + footer
    image = Image.new("RGB", (wide * FINER, high * FINER), PAPER)
    draw = ImageDraw.Draw(image)
    unit = size * FINER
    origin = margin * FINER
    for row, column in env.all_cells():
        x, y = origin + column * unit, origin + row * unit
        if (row, column) in env.blocks:
            draw.rectangle((x, y, x + unit, y + unit), fill=BLOCK)
            continue
        draw.rectangle((x, y, x + unit, y + unit), fill=(255, 255, 255), outline=GRID, width=FINER)
        pieces = pieces_in(env, (row, column))
        across = max(1, math.ceil(math.sqrt(len(pieces))))  # so many side by side, in as many rows as are needed
        rows = max(1, math.ceil(len(pieces) / across))
        part = unit / across
        for place, (kind, number, has_left) in enumerate(pieces):
            centre_x = x + (place % across + 0.5) * part
            centre_y = y + unit / 2 + (place // across + 0.5 - rows / 2) * part
            draw_piece(draw, kind, number, has_left, centre_x, centre_y, part * 0.40)
    draw.rectangle((origin, origin, origin + env.width * unit, origin + env.height * unit), outline=INK,
                   width=FINER * 2)
    draw.text((origin, (high - footer / 2) * FINER), f"step {env.step_number}   {env.deadline - env.step_number} left",
              fill=INK, font=picture_font(15 * FINER), anchor="lm")
    return np.array(image.resize((wide, high), Image.BOX))


def picture_font(size):
    """Pillow's own font, for it is there on every machine."""
    from PIL import ImageFont

    return ImageFont.load_default(size=max(1, int(size)))


def draw_piece(draw, kind, number, has_left, x, y, radius):
    """Draw a stag, a hare or a player around (x, y), inside a circle of the given radius."""
    def tint(colour):
        return tuple((part + 2 * 255) // 3 for part in colour) if has_left else colour

    def ellipse(across, down, half_width, half_height, colour):
        centre_x, centre_y = x + across * radius, y + down * radius
        draw.ellipse((centre_x - half_width * radius, centre_y - half_height * radius,
                      centre_x + half_width * radius, centre_y + half_height * radius), fill=tint(colour))

    def line(points, colour, width):
        draw.line([(x + across * radius, y + down * radius) for across, down in points], fill=tint(colour),
                  width=max(1, round(width * radius)), joint="curve")

    if kind == "player":
        colour = PLAYER_COLOURS[(number - 1) % len(PLAYER_COLOURS)]
        ellipse(0, 0, 0.95, 0.95, colour)
    elif kind == "stag":
        for side in (-1, 1):
            line([(side * 0.18, -0.15), (side * 0.55, -0.5), (side * 0.62, -1.0)], STAG_ANTLERS, 0.12)
            line([(side * 0.55, -0.5), (side * 0.95, -0.72)], STAG_ANTLERS, 0.12)
            line([(side * 0.34, -0.3), (side * 0.26, -0.75)], STAG_ANTLERS, 0.12)
            ellipse(side * 0.55, 0.02, 0.24, 0.12, STAG_COAT)  # ears
        draw.polygon([(x + across * radius, y + down * radius) for across, down in
                      ((-0.4, -0.2), (0.4, -0.2), (0.42, 0.15), (0.22, 0.75), (-0.22, 0.75), (-0.42, 0.15))],
                     fill=tint(STAG_COAT))
        ellipse(0, -0.16, 0.4, 0.2, STAG_COAT)
        ellipse(0, 0.75, 0.24, 0.2, STAG_ANTLERS)  # muzzle
        for side in (-1, 1):
            ellipse(side * 0.2, 0.1, 0.07, 0.09, INK)
    else:
        for side in (-1, 1):
            ellipse(side * 0.3, -0.5, 0.19, 0.5, HARE_COAT)
            ellipse(side * 0.3, -0.5, 0.09, 0.36, HARE_EARS)
        ellipse(0, 0.35, 0.62, 0.55, HARE_COAT)
        for side in (-1, 1):
            ellipse(side * 0.25, 0.22, 0.08, 0.1, INK)
        ellipse(0, 0.48, 0.1, 0.07, HARE_EARS)
    if has_left:
        for side in (-1, 1):
            draw.line((x - 0.8 * radius, y - side * 0.8 * radius, x + 0.8 * radius, y + side * 0.8 * radius),
                      fill=tint(CROSS), width=max(1, round(0.14 * radius)))
    if kind == "player":  # the number comes last, so that no cross hides who it was
        draw.text((x, y), str(number), fill=colour if has_left else (255, 255, 255), anchor="mm",
                  font=picture_font(radius * (1.15 if number < 10 else 0.9)))
