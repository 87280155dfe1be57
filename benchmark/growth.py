"""How the cost of the game, its views and the search grows with games, board, players and simulations.

    python benchmark/growth.py             a few minutes

Each curve changes one size and leaves the others. A line tells what an item costs (an agent's step; a simulation of one
position) in microseconds of one core's time, which other processes disturb less than a clock's: median and range of
`--repeats`. "Items" and "cost" tell how many times as many items there are as in the line before, and how many times
as much all of them cost together: nothing is worse than linear while cost stays at or below items. On a larger board an
item is a step of one agent, so cost beside cells; with more players an agent's step meets more others.
"""

import dataclasses
import statistics
import sys
import time

import torch

from common import run_command  # before the script: it puts the project on the path
import hopplus_selfplay as script


@dataclasses.dataclass
class Args:
    only: tuple[str, ...] = ()
    """names of the curves; none given: all"""
    repeats: int = 5
    """measurements of each line"""
    seconds: float = 0.3
    """processor time of each measurement"""


def game(games=1024, size=4, players=4, **more):
    """One step of games with uniform actions, new episodes included. -> what is to be measured, items"""
    played = script.BatchedStagHunt(games, size, size, players, seed=1, **more)
    actions = torch.randint(7, (16, games, players), generator=torch.Generator().manual_seed(1))
    turn = iter(range(1 << 60))

    def step():
        played.reset(played.advance(actions[next(turn) % 16])["over"])
        return played
    return step, games * players


def planes(dtype, **sizes):
    """The same, and what every player sees as planes."""
    step, items = game(dtype=dtype, **sizes)
    return lambda: step().observe(), items


def facts(games=1024, size=4, players=4):
    """The same, and what every player sees as the networks take it."""
    step, items = game(games, size, players)
    views = script.Views(size, size, players, 35)
    return lambda: views.look(step().state()), items


def searches(simulations=16, games=64, size=4, players=4):
    """A search of every player's position in games that have just begun, by the true rules."""
    flags = script.Args(players=("hop",) * players, num_envs=games, height=size, width=size)
    table, generator = script.Table(flags, games, 1), torch.Generator().manual_seed(1)
    goals = torch.randn(players * (players - 1), games, flags.goal_dim)
    searcher = script.Searcher(table.networks, table.views, table.look()["told"], goals)
    state = script.ego_first(table.game.state(), table.order)
    return lambda: script.search(table.model, searcher, state, simulations, flags, generator), games * players * simulations


GAMES, BOARDS = (64, 256, 1024, 4096, 16384), (4, 8, 16, 32)
CURVES = {
    "game": ("games", [(n, game, {"games": n}) for n in GAMES]),
    "facts": ("games", [(n, facts, {"games": n}) for n in GAMES]),
    "planes-bytes-8x8": ("games", [(n, planes, {"dtype": torch.uint8, "games": n, "size": 8}) for n in GAMES]),
    "planes-floats-8x8": ("games", [(n, planes, {"dtype": torch.float32, "games": n, "size": 8}) for n in GAMES]),
    "game-by-board": ("cells", [(n * n, game, {"size": n}) for n in BOARDS]),
    "facts-by-board": ("cells", [(n * n, facts, {"size": n}) for n in BOARDS]),
    "game-by-players": ("players", [(n, game, {"players": n, "size": 8}) for n in (2, 4, 8, 16)]),
    "facts-by-players": ("players", [(n, facts, {"players": n, "size": 8}) for n in (2, 4, 8, 16)]),
    "search": ("simulations", [(n, searches, {"simulations": n}) for n in (8, 16, 32, 64, 128, 256, 512)]),
    "search-by-games": ("games", [(n, searches, {"games": n}) for n in (4, 16, 64, 256, 1024)]),
    "search-by-board": ("cells", [(n * n, searches, {"size": n}) for n in BOARDS]),
    "search-by-players": ("players", [(n, searches, {"players": n, "size": 8}) for n in (2, 4, 8)]),
}


@torch.no_grad()
def measure(work, items, args):
    """Microseconds of processor time for each item, several times, in order."""
    for _ in range(3):
        work()
    costs = []
    for _ in range(args.repeats):
        done, begun = 0, time.process_time()
        while (passed := time.process_time() - begun) < args.seconds or not done:
            work()
            done += items
        costs.append(1e6 * passed / done)
    return sorted(costs)


def main(args):
    unknown = [name for name in args.only if name not in CURVES]
    if unknown:
        print(f"error: --only {unknown[0]} is not known; there are {', '.join(CURVES)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| curve | size | µs for each item (range) | items | cost |")
    print("|---|---|---|---|---|")
    for name in args.only or CURVES:
        what, points = CURVES[name]
        before = None
        for size, make, sizes in points:
            work, items = make(**sizes)
            costs = measure(work, items, args)
            cost = statistics.median(costs)
            grown = ("", "") if before is None else (f"x{items / before[0]:.3g}", f"x{items * cost / (before[0] * before[1]):.2f}")
            print(f"| {name} | {size:,} {what} | {cost:.3f} ({costs[0]:.3f} to {costs[-1]:.3f}) | {grown[0]} | {grown[1]} |", flush=True)
            before = items, cost
    return 0


if __name__ == "__main__":
    run_command(main, Args, __doc__)
