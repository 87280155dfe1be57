"""Trains world models over several seeds, tests each on many boards, and prints medians and ranges as Markdown tables.

    python benchmark/world_model.py                       everything, 5 seeds (about 40 minutes on one core)
    python benchmark/world_model.py --only default --seeds 1 2 3

Each training and each test is an ordinary run in `--folder`, by the scripts' own command lines. One that is finished is
not run again, so the benchmark can be stopped and started at will; the tables are printed after each model and kept in
`<folder>/world_model.md`.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys

import tyro

from ppo import any_unknown, keep

HERE = os.path.dirname(os.path.abspath(__file__))
FEW = " --rows 10000 --rollouts 500"
OWN_BOARD = {"4x4": ""}
# model: (flags of train_world_model.py, {test: flags of test_obs_reward_model.py})
MODELS = {
    "default": ("", {
        "4x4": "",
        "8x8": "--height 8 --width 8" + FEW,
        "8x8, 5 blocks": "--height 8 --width 8 --max-blocks 5" + FEW,
        "6x6": "--height 6 --width 6" + FEW,
        "5x7, 2 blocks": "--height 5 --width 7 --max-blocks 2" + FEW,
        "12x12": "--height 12 --width 12" + FEW,
        "4x4, 2 stags": "--stags 2" + FEW,
        "5x5, 6 players": "--height 5 --width 5 --num-players 6" + FEW,
        "4x4, actions of the wrong players": "--rotate-actions 1" + FEW,
    }),
    "stag needs 3 hunters": ("--stag-hunters 3", OWN_BOARD),
    "rewards 7 and 2": ("--stag-reward 7 --hare-reward 2", OWN_BOARD),
    "prosocial": ("--prosocial", OWN_BOARD),
    "strengths 1 2 3 4": ("--strengths 1 2 3 4", OWN_BOARD),
    "with 6 players": ("--boards 4x4 8x8 8x8b5 5x5p6", {"5x5, 6 players": "--height 5 --width 5 --num-players 6" + FEW}),
}


@dataclasses.dataclass
class Args:
    only: tuple[str, ...] = ()
    """names of the models to train (default: all)"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """seeds of each model"""
    folder: str = os.path.join("runs", "benchmark-world-model")
    """where the runs and the tables go"""


def run(script, folder, name, flags):
    """Makes one run, or what is missing of it. -> its results"""
    path = os.path.join(folder, name)
    if not os.path.isfile(os.path.join(path, "results.json")):
        resumes = os.path.isfile(os.path.join(path, "checkpoint.pt"))
        if not resumes and os.path.isdir(path):  # begun, and stopped before there was anything to go on with
            name += "-again"
            return run(script, folder, name, flags)
        where = ["--resume", path] if resumes else [*flags.split(), "--runs-dir", folder, "--run-name", name]
        subprocess.run([sys.executable, os.path.join(HERE, "..", script), *where], check=True)
    with open(os.path.join(path, "results.json"), encoding="utf-8") as file:
        return json.load(file) | {"path": path}


def spread(values, form):
    """Median and range."""
    low, middle, high = form(min(values)), form(statistics.median(values)), form(max(values))
    return middle if low == high else f"{middle} ({low} to {high})"


def tables(trained, tested):
    """The Markdown tables of all that is done."""
    percent = lambda share: f"{100 * share:.3f}".rstrip("0").rstrip(".") + " %"
    small = lambda value: f"{value:.1e}"
    lines = ["| model | seeds | training, s |", "|---|---|---|"]
    lines += [f"| {name} | {len(runs)} | {spread([r['seconds'] for r in runs], lambda v: f'{v:.0f}')} |"
              for name, runs in trained.items()]
    lines += ["", "| model | tested on | seeds | obs MSE | PSNR, dB | reward MSE | views exact | rewards right | ends right | "
              "breaches | 35 steps open loop exact | tables of the search exact |", "|" + "---|" * 12]
    for (model, board), runs in tested.items():
        column = lambda key, form: spread([r[key] for r in runs], form)
        lines.append("| " + " | ".join([
            model, board, str(len(runs)), column("obs_mse", small), column("psnr", lambda v: f"{v:.1f}"),
            column("reward_mse", small), column("exact", percent), column("reward_exact", percent),
            column("end_exact", percent), spread([r["breaches"]["total"] for r in runs], str),
            spread([r["rollout"]["35"] for r in runs], percent),
            column("tables_exact", percent) if "tables_exact" in runs[0] else ""]) + " |")
    return "\n".join(lines)


def main(args):
    if any_unknown(args.only, MODELS):
        return 2
    trained, tested = {}, {}
    for seed in args.seeds:
        for model in args.only or MODELS:
            flags, tests = MODELS[model]
            name = "".join(c if c.isalnum() else "-" for c in model)
            result = run("train_world_model.py", args.folder, f"{name}-{seed}", f"{flags} --seed {seed}")
            trained.setdefault(model, []).append(result)
            for board, more in tests.items():
                test = f"{name}-{seed}-test-" + "".join(c if c.isalnum() else "-" for c in board)
                checkpoint = os.path.join(result["path"], "checkpoint.pt")
                tested.setdefault((model, board), []).append(run(
                    "test_obs_reward_model.py", args.folder, test, f"--checkpoint {checkpoint} --seed {seed} {more}"))
            text = tables(trained, tested)
            keep(text, os.path.join(args.folder, "world_model.md"))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
