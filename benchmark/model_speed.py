"""How many transitions a second a trained world model predicts in batch: as tables, as networks, and against the game.

    python benchmark/model_speed.py                                  trains a model first (a minute)
    python benchmark/model_speed.py --checkpoint runs/x/checkpoint.pt --threads 2

One transition is one joint move of all players seen by one of them: next state, reward and end. "tables" are the
model of the search, states in and out; "network" takes a player's planes and gives probabilities; "game" is
BatchedStagHunt.advance, the true rules, with the same batch. Prints a Markdown table, the median of 5 repeats with the
slowest and the fastest, and writes each row as it comes to `--folder`; rows that are there are not measured again.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys

import torch

from common import run_command

HERE = os.path.dirname(os.path.abspath(__file__))

import test_obs_reward_model as tester  # noqa: E402
import train_world_model as script  # noqa: E402
from env_speed import calls_per_second  # noqa: E402

BOARDS = {"4x4": "4x4", "8x8": "8x8", "5x5, 6 players": "5x5p6"}
BATCHES = (256, 1024, 4096, 16384)


@dataclasses.dataclass
class Args:
    checkpoint: str = ""
    """checkpoint.pt of train_world_model.py; without it, one is trained in the folder"""
    threads: int = 1
    """threads that PyTorch may use"""
    folder: str = os.path.join("runs", "benchmark-model-speed")
    """where the results go"""


@torch.no_grad()
def calls(model, board, batch):
    """What is measured: {name: function}."""
    rows = script.collect(board, batch, seed=1)
    height, width, players = board["height"], board["width"], board["num_players"]
    tables = tester.WorldTables(model, height, width, players)
    view, actions, left = script.views_of(rows), rows["actions"], rows["deadline"] - rows["clock"]
    game = script.BatchedStagHunt(batch, **board)

    def play():
        game.cell, game.board, game.clock, game.deadline = (rows[name] for name in ("cell", "board", "clock", "deadline"))
        game.advance(actions.T)

    return {"tables": lambda: tables.step(rows, actions),
            "network": lambda: model(view, actions.T, rows["clock"], left), "game": play}


def table(done):
    batches = sorted({int(key.split("|")[2]) for key in done})
    lines = ["| board | what | threads | " + " | ".join(f"batch {batch}" for batch in batches) + " |",
             "|" + "---|" * (3 + len(batches))]
    for board, name, threads in dict.fromkeys((key.split("|")[0], key.split("|")[1], key.split("|")[3]) for key in done):
        cells = []
        for batch in batches:
            speeds = done.get(f"{board}|{name}|{batch}|{threads}")
            cells.append(f"{statistics.median(speeds):,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})" if speeds else "")
        lines.append(f"| {board} | {name} | {threads} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(args):
    torch.set_num_threads(args.threads)
    os.makedirs(args.folder, exist_ok=True)
    checkpoint = args.checkpoint or os.path.join(args.folder, "model", "checkpoint.pt")
    if not args.checkpoint and not os.path.isfile(os.path.join(args.folder, "model", "results.json")):
        subprocess.run([sys.executable, os.path.join(HERE, "..", "train_world_model.py"), "--runs-dir", args.folder,
                        "--run-name", "model"], check=True)
    path = os.path.join(args.folder, "model_speed.json")
    done = {}
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            done = json.load(file)
    try:
        model, _ = tester.load_world_model(checkpoint, "--checkpoint")
    except tester.Refused as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    for name, text in BOARDS.items():
        board = script.parse_board(text, script.Args())
        for batch in BATCHES:
            with torch.no_grad():
                for what, call in calls(model, board, batch).items():
                    key = f"{name}|{what}|{batch}|{args.threads}"
                    if key not in done:
                        done[key] = [batch * speed for speed in calls_per_second(call)]
                        script.save_json(path, done)
    print(table(done))
    return 0


if __name__ == "__main__":
    run_command(main, Args, __doc__)
