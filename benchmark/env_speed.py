"""How fast the game is on one core: the batched one with bytes and with floats, and the readable one.

    python benchmark/env_speed.py

Each loop draws random legal actions and plays them, with observations and masks of all players and automatic
reset. Prints a Markdown table: the median of 5 repeats, with the slowest and the fastest. Takes less than a
minute.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from envs import StagHunt  # noqa: E402
from envs.batched import BatchedStagHunt  # noqa: E402

SIZES = (4, 8)
BATCHES = (512, 2048, 8192)
REPEATS = 5
SECONDS = 0.3  # of each repeat
PLAYERS = 4


def batched_loop(size, num_envs, dtype):
    game = BatchedStagHunt(num_envs, height=size, width=size, dtype=dtype)

    def play():
        game.step(game.random_actions())
    return play


def readable_loop(size):
    game = StagHunt(height=size, width=size)
    _, infos = game.reset(seed=1)

    def play():
        nonlocal infos
        actions = {agent: game.action_space(agent).sample(infos[agent]["action_mask"]) for agent in game.agents}
        _, _, _, _, infos = game.step(actions)
        if not game.agents:
            _, infos = game.reset()
    return play


def calls_per_second(play):
    """[slowest, ..., fastest] of REPEATS."""
    for _ in range(5):
        play()
    speeds = []
    for _ in range(REPEATS):
        calls, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < SECONDS:
            play()
            calls += 1
        speeds.append(calls / passed)
    return sorted(speeds)


def main():
    torch.set_num_threads(1)
    print("| board | game | observations | batch | agent steps/s (slowest to fastest) | environment steps/s | "
          "times the readable game |")
    print("|---|---|---|---|---|---|---|")
    for size in SIZES:
        readable = calls_per_second(readable_loop(size))
        rows = [("readable", "uint8", 1, readable, "")]
        for dtype in (torch.uint8, torch.float32):
            name = str(dtype).removeprefix("torch.")
            group = [("batched", name, num_envs, [num_envs * speed for speed in
                                                  calls_per_second(batched_loop(size, num_envs, dtype))])
                     for num_envs in BATCHES]
            best = max(group, key=lambda row: statistics.median(row[3]))
            rows += [row + (" **best**" if row is best else "",) for row in group]
        for game, name, num_envs, speeds, mark in rows:
            median = statistics.median(speeds)
            ratio = median / statistics.median(readable)
            print(f"| {size}x{size} | {game} | {name} | {num_envs:,}{mark} | {PLAYERS * median:,.0f} "
                  f"({PLAYERS * speeds[0]:,.0f} to {PLAYERS * speeds[-1]:,.0f}) | {median:,.0f} | {ratio:,.0f} |",
                  flush=True)


if __name__ == "__main__":
    main()
