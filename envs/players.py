"""Rule-based players for the readable game, and players from a user's own file.

A rule-based player sees what every player sees, the observation dict of `envs/stag_hunt.py`, and can tell the
exact probability of each of its actions, so that the best that any predictor could do against it is known.

    random        uniform over its legal actions
    ns            nearest stag: on a stag, hunts; else moves uniformly among the moves that shorten the path, around
                  obstacles, to any nearest stag; with no stag left, uniform over its legal actions 0 to 4
    nh            nearest hare: the same for hares
    nsh           ns while a stag is left, then nh
    patient-K     nsh before step K, from then on nh (patient-10, for instance)
    noisy-ns      ns, but each action is with probability 0.2 uniform over the legal ones
    noisy-nh      nh, in the same way
    switch-ns-nh  ns until the middle of a meeting (a row of episodes with the same players), then nh
    switch-nh-ns  nh, then ns
A player that has left stays, whatever its name.
"""

import importlib.machinery
import importlib.util
import os
import re
import sys

import numpy as np

from envs.stag_hunt import ACTION_NAMES, HUNT_HARE, HUNT_STAG, MOVES, STAY, steps_to_nearest

NAMES = ("random", "ns", "nh", "nsh", "patient-K", "noisy-ns", "noisy-nh", "switch-ns-nh", "switch-nh-ns")
NOISE = 0.2  # how often a noisy player acts at random


def check_name(name):
    """Refuse a name that no rule-based player has."""
    if name not in NAMES and not re.fullmatch(r"patient-[0-9]+", str(name)) or name == "patient-K":
        raise ValueError(f"there is no player {name!r}: known are {', '.join(NAMES)} (K a number, as in patient-10), "
                         "and file.py:Class")


def action_probabilities(name, observation, num_players, *, episode=0, episodes=1):
    """The probability of each of the 7 actions of the player called `name`, seen from its observation dict.

    Only the switch-players look at `episode`, counted from 0, and `episodes`, how many there are in the
    meeting.
    """
    check_name(name)
    planes, mask = observation["observation"], observation["action_mask"]
    if not planes[:, :, 0].any():  # has left
        return uniform({STAY})
    legal = {action for action in range(len(ACTION_NAMES)) if mask[action]}
    stag_left = bool(planes[:, :, num_players + 1].any())

    if name == "random":
        return uniform(legal)
    if name.startswith("noisy-"):
        certain = action_probabilities(name.removeprefix("noisy-"), observation, num_players)
        return [(1 - NOISE) * p + NOISE * q for p, q in zip(certain, uniform(legal))]
    if name.startswith("switch-"):
        first, second = name.removeprefix("switch-").split("-")
        name = first if 2 * episode < episodes else second
    if name.startswith("patient-"):
        patience = int(name.removeprefix("patient-"))
        name = "nsh" if observation["step"] < patience else "nh"
    if name == "nsh":
        name = "ns" if stag_left else "nh"
    return nearest_prey(planes, legal, num_players, "stag" if name == "ns" else "hare")


def nearest_prey(planes, legal, num_players, kind):
    """The action probabilities of a player that is after the nearest prey of one kind."""
    plane, hunt = (num_players + 1, HUNT_STAG) if kind == "stag" else (num_players + 2, HUNT_HARE)
    prey = cells_of(planes[:, :, plane])
    if not prey:
        return uniform(legal - {HUNT_STAG, HUNT_HARE})
    (row, column), = cells_of(planes[:, :, 0])
    if (row, column) in prey:
        return uniform({hunt})
    steps = steps_to_nearest(prey, free=cells_of(1 - planes[:, :, num_players]))
    return uniform({action for action, (down, right) in MOVES.items()
                    if steps.get((row + down, column + right)) == steps[row, column] - 1})


def cells_of(plane):
    """The cells (row, column) that a plane marks."""
    return {(int(row), int(column)) for row, column in np.argwhere(plane)}


def uniform(actions):
    """Seven probabilities: equal ones for these actions, 0 for the others."""
    return [1 / len(actions) if action in actions else 0.0 for action in range(len(ACTION_NAMES))]


class RuleBased:
    """A player that acts by one of the rules above.

    Whoever plays several episodes in a row with it sets `episode` and `episodes`, for the switch-players.
    """

    def __init__(self, name):
        check_name(name)
        self.name, self.episode, self.episodes = name, 0, 1

    def act(self, observation, rng):
        """Draw an action for an observation dict with a numpy Generator."""
        num_players = observation["observation"].shape[-1] - 3
        probabilities = action_probabilities(self.name, observation, num_players,
                                             episode=self.episode, episodes=self.episodes)
        return int(rng.choice(len(ACTION_NAMES), p=probabilities))


# ------------------------------------------------------------------------------------- players from a user's file


def load_player(spec):
    """Load the player "file.py:Class"; the last colon splits, so that Windows paths work."""
    path, _, class_name = str(spec).rpartition(":")
    if not path or not class_name:
        raise ValueError(f"player {spec!r} must be written file.py:Class")
    if not os.path.isfile(path):
        raise ValueError(f"player {spec!r}: there is no file {path!r}")
    module_name = f"player_file_{os.path.abspath(path)}"
    module_spec = importlib.util.spec_from_file_location(
        module_name, path, loader=importlib.machinery.SourceFileLoader(module_name, path))
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # before it runs: dataclasses look their module up
    module_spec.loader.exec_module(module)
    player_class = getattr(module, class_name, None)
    if not isinstance(player_class, type):
        raise ValueError(f"player {spec!r}: the file {path!r} has no class {class_name!r}")
    if not callable(getattr(player_class, "act", None)):
        raise ValueError(f"player {spec!r}: the class {class_name!r} has no method "
                         "act(observation, generator)")
    return FilePlayer(spec, player_class())


class FilePlayer:
    """A user's player, with what it returns checked.

    `act` gets one batch of torch tensors by name, what a player sees: ego-first planes `observation`
    [B, H, W, N+3] uint8, legal actions `action_mask` [B, 7] bool, everybody's last `actions` [B, N] ego first,
    `step` [B] and `steps_left` [B]; and a torch.Generator. It returns whole numbers [B]. A number that is no legal action is
    played as stay by the game. `reset`, which the user's class may leave out, is told with a mask [B] where
    episodes begin.
    """

    def __init__(self, spec, player):
        self.spec, self.player = spec, player

    def reset(self, which):
        if hasattr(self.player, "reset"):
            self.player.reset(which)

    def act(self, observation, generator):
        import torch  # here, for rule-based players do without it

        step, actions = observation["step"], self.player.act(observation, generator)
        if not isinstance(actions, torch.Tensor):
            raise ValueError(f"player {self.spec!r}: act returned a {type(actions).__name__}, "
                             f"but must return a torch.Tensor of shape [{len(step)}]")
        if actions.shape != step.shape:
            raise ValueError(f"player {self.spec!r}: act returned shape {list(actions.shape)}, "
                             f"but must return one action for each of the batch, shape {list(step.shape)}")
        if actions.is_floating_point() or actions.is_complex() or actions.dtype == torch.bool:
            raise ValueError(f"player {self.spec!r}: act returned {actions.dtype}, but must return whole numbers")
        return actions.to(torch.int64)


class OneFilePlayer:
    """A user's player at one table: the same `act` as `RuleBased`, so that a seat need not know which it holds."""

    def __init__(self, spec):
        self.player, self.generator = load_player(spec), None

    def reset(self, rng):
        """An episode begins; the player's torch generator is seeded from a numpy Generator."""
        import torch

        self.generator = torch.Generator().manual_seed(int(rng.integers(2 ** 63 - 1)))
        self.player.reset(torch.ones(1, dtype=torch.bool))

    def act(self, observation, rng):
        import torch

        if self.generator is None:
            self.reset(rng)
        seen = {key: torch.tensor(part)[None] for key, part in observation.items()}
        seen["action_mask"] = seen["action_mask"].bool()
        return int(self.player.act(seen, self.generator)[0])


def make_player(name):
    """The player of a name: a rule-based one, or one from a user's file where the name has a colon."""
    return OneFilePlayer(name) if ":" in str(name) else RuleBased(name)
