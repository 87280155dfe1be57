"""How fast ppo_single_player.py plays and learns on one core, and where the time goes.

    python benchmark/ppo_speed.py            about a minute

Four learners on 4x4. A step of the environment counts as four agent steps. The first row is the script's
default; the rows below it, at one and at four epochs, are for comparison with trainers of about 17,000
parameters a policy (here each of the four learners has that many, but for the last row). Median of
`--repeats` and the range.
"""

import dataclasses
import statistics
import time

import torch

from common import run_command  # before the script: it puts the project on the path
import ppo_single_player as script


@dataclasses.dataclass
class Args:
    repeats: int = 5
    """measurements of each row"""
    updates: int = 8
    """updates in each measurement"""


def measure(flags, repeats, updates):
    """Agent steps a second, and the seconds that an update spends playing and learning. -> three lists"""
    args = script.Args(players=("ppo",) * 4, **flags)
    table = script.Table(args, args.num_envs, args.seed)
    returns = script.Returns(args.num_envs, 4, "cpu")
    optimizer = torch.optim.Adam(table.agent.parameters(), lr=args.learning_rate, fused=True)
    speeds, playing, learning = [], [], []
    for repeat in range(repeats + 1):
        played = learned = 0.0
        for _ in range(updates):
            begun = time.perf_counter()
            data, _ = script.rollout(args, table, returns)
            middle = time.perf_counter()
            script.update(args, table.agent, optimizer, data, args.ent_coef, args.soft_coef, table.generator)
            played, learned = played + middle - begun, learned + time.perf_counter() - middle
        if repeat:  # the first is for warming up
            speeds.append(4 * args.num_envs * args.num_steps * updates / (played + learned))
            playing.append(played / updates)
            learning.append(learned / updates)
    parameters = sum(parameter[0].numel() for parameter in table.agent.parameters())
    return parameters, speeds, playing, learning


def main(args):
    torch.set_num_threads(1)
    small, many = {"hidden_size": 46}, {"hidden_size": 46, "num_envs": 512}
    rows = {"default": {}, "1 epoch": {**small, "update_epochs": 1}, "4 epochs": {**small, "update_epochs": 4},
            "1 epoch, 512 games": {**many, "update_epochs": 1}, "4 epochs, 512 games": {**many, "update_epochs": 4},
            "1 epoch, 512 games, one network for all": {**many, "update_epochs": 1, "share_parameters": True}}
    print("| setting | parameters of a learner | agent steps/s | playing, ms an update | learning, ms an update |")
    print("|---|---|---|---|---|")
    for name, flags in rows.items():
        parameters, speeds, playing, learning = measure(flags, args.repeats, args.updates)
        print(f"| {name} | {parameters:,} | {statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f}) | "
              f"{1e3 * statistics.median(playing):.0f} | {1e3 * statistics.median(learning):.0f} |", flush=True)


if __name__ == "__main__":
    run_command(main, Args, __doc__)
