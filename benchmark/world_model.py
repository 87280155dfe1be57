"""Trains world models over several seeds, tests each on many boards, and prints medians and ranges as Markdown tables.

    python benchmark/world_model.py                       everything, 5 seeds (about 40 minutes on one core)
    python benchmark/world_model.py --only default --seeds 1 2 3

Each training and each test is an ordinary run in `--folder`, by the scripts' own command lines. One that is finished is
not run again, one that was stopped is resumed, and several machines that share the folder share the runs
(benchmark/workers.py); the tables of what is there are printed after each run and kept in `<folder>/world_model.md`.
"""

import dataclasses
import os
import statistics

from common import any_unknown, keep, markdown, results, run_command
from workers import Run, check_workers, work

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
    """names of the models to train; none given: all"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """seeds of each model"""
    folder: str = os.path.join("runs", "benchmark-world-model")
    """where the runs and the tables go"""
    workers: int = 1
    """runs side by side on this machine"""


def name_of(model, seed, board=None):
    """The name of the run that trains a model, or of that which tests it on a board."""
    plain = lambda text: "".join(c if c.isalnum() else "-" for c in text)
    return f"{plain(model)}-{seed}" + (f"-test-{plain(board)}" if board else "")


def all_runs(args):
    """The training runs, and after each of them its tests."""
    runs = []
    for seed in args.seeds:
        for model in args.only or MODELS:
            flags, tests = MODELS[model]
            name = name_of(model, seed)
            runs.append(Run(name, f"{flags} --seed {seed}", "train_world_model.py"))
            for board, more in tests.items():
                more += f" --seed {seed} --checkpoint {os.path.join(args.folder, name)}"
                runs.append(Run(name_of(model, seed, board), more, "test_obs_reward_model.py", (name,)))
    return runs


def spread(values, form):
    """Median and range."""
    low, middle, high = form(min(values)), form(statistics.median(values)), form(max(values))
    return middle if low == high else f"{middle} ({low} to {high})"


def tables(trained, tested):
    """The Markdown tables of all that is done."""
    percent = lambda share: f"{100 * share:.3f}".rstrip("0").rstrip(".") + " %"
    small = lambda value: f"{value:.1e}"
    trainings = [[name, str(len(runs)), spread([r["seconds"] for r in runs], lambda v: f"{v:.0f}")]
                 for name, runs in trained.items()]
    tests = []
    for (model, board), runs in tested.items():
        column = lambda key, form: spread([r[key] for r in runs], form)
        tests.append([
            model, board, str(len(runs)), column("obs_mse", small), column("psnr", lambda v: f"{v:.1f}"),
            column("reward_mse", small), column("exact", percent), column("reward_exact", percent),
            column("end_exact", percent), spread([r["breaches"]["total"] for r in runs], str),
            spread([r["rollout"]["35"] for r in runs], percent),
            column("tables_exact", percent) if "tables_exact" in runs[0] else ""])
    return markdown(["model", "seeds", "training, s"], trainings) + "\n\n" + markdown(
        ["model", "tested on", "seeds", "obs MSE", "PSNR, dB", "reward MSE", "views exact", "rewards right", "ends right",
         "breaches", "35 steps open loop exact", "tables of the search exact"], tests)


def write_tables(args):
    """The tables of the runs that are there."""
    trained, tested = {}, {}
    for model in args.only or MODELS:
        for seed in args.seeds:
            if result := results(args.folder, name_of(model, seed)):
                trained.setdefault(model, []).append(result)
            for board in MODELS[model][1]:
                if result := results(args.folder, name_of(model, seed, board)):
                    tested.setdefault((model, board), []).append(result)
    keep(tables(trained, tested), os.path.join(args.folder, "world_model.md"))


def main(args):
    if any_unknown(args.only, MODELS) or not check_workers(args.workers):
        return 2
    return work(args.folder, all_runs(args), args.workers, lambda: write_tables(args))


if __name__ == "__main__":
    run_command(main, Args, __doc__)
