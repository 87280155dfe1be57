"""Runs side by side: one table of what they came to, and their learning curves as a picture.

    python benchmark/compare.py runs/a runs/b runs/c
    python benchmark/compare.py runs/a runs/b --out curves.png

Takes finished training runs of hopplus_selfplay.py and ppo_single_player.py. Runs that differ in the seed alone (and
in their names) are one row of the table and one curve. Returns are means over the seeds with 95 % intervals
(Student's t); of one seed the interval is that of its evaluation's episodes. Steps and times are medians with their
range. A curve is the mean return of the learners' last 500 episodes by true steps, averaged over the seeds, with
their range around it.

In the table, "policy alone" is HOP+ without its search, "greedy" is PPO taking the likeliest action.
"""

import dataclasses
import json
import logging
import os
import statistics
import sys
from typing import Annotated

import numpy as np
import tyro

from common import run_command

LEARNERS = {"hopplus_selfplay.py": "hop", "ppo_single_player.py": "ppo"}
# Runs of one group may differ in these.
NAMES = ("seed", "run_name", "runs_dir", "resume", "save_every", "picture_every", "eval_episodes", "eval_policy_episodes")
# Groups of different scripts are told apart by these, groups of one script by all their flags.
GAME = ("height", "width", "stags", "hares", "max_blocks", "final_time", "stag_reward", "hare_reward", "stag_hunters",
        "time_reward", "strengths", "prosocial", "dynamic_final_time")
# 0.975 quantiles of Student's t with 1, 2, ... degrees of freedom; beyond them that of the normal distribution.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Refused(ValueError):
    """Runs that cannot be compared: told in one line, with exit code 2."""


@dataclasses.dataclass
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """folders of finished training runs"""
    threshold: float = 2.85
    """the return whose first reaching is told; one of those that the runs have timed"""
    out: str | None = None
    """file of the picture; without it, compare.png beside the folder of the first run"""


@dataclasses.dataclass
class Run:
    """A finished training run: what is in its folder."""

    folder: str
    config: dict
    results: dict

    @property
    def script(self):
        return self.config["script"]


# ---------------------------------------------------------------------------------------- reading


def read_json(folder, name):
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return json.load(file)
    except OSError:
        raise Refused(f"{folder} has no {name}: name folders of finished runs") from None
    except ValueError:
        raise Refused(f"{folder}: {name} cannot be read") from None


def read_run(folder):
    """The run in a folder. -> Run"""
    config = read_json(folder, "config.json")
    script, mode = config.get("script"), config.get("mode", "train")
    if script not in LEARNERS or mode != "train":
        raise Refused(f"{folder} is a run of {script} --mode {mode}: only training runs of "
                      f"{' and '.join(LEARNERS)} can be compared")
    results = read_json(folder, "results.json")
    if not results.keys() >= {"evaluation", "thresholds", "true_steps", "seconds"}:
        raise Refused(f"{folder}: its results.json is not that of a training run")
    return Run(folder, config, results)


def group_runs(runs):
    """Brings runs together that differ in nothing but NAMES. -> lists of runs"""
    groups, known = {}, {}
    for run in runs:
        flags = json.dumps({key: value for key, value in run.config.items() if key not in NAMES}, sort_keys=True)
        same = known.setdefault((flags, run.config["seed"]), run)
        if same is not run:
            raise Refused(f"{same.folder} and {run.folder} are one run twice: all flags and the seed are the same")
        groups.setdefault(flags, []).append(run)
    return list(groups.values())


def line_up(run):
    """Who sits where, the learners of either script called by one name."""
    return ["learner" if name == LEARNERS[run.script] else name for name in run.config["players"]]


def label_groups(groups):
    """What tells the groups apart, the script and flags in which they differ. -> a name for each"""
    firsts, labels = [group[0] for group in groups], []
    for run in firsts:
        words = [run.script.partition("_")[0]] if len({first.script for first in firsts}) > 1 else []
        for key, value in run.config.items():
            rivals = [first for first in firsts if first.script == run.script or key in GAME]
            differs = key not in NAMES and any(first.config.get(key) != value for first in rivals)
            if key == "players":
                differs = any(line_up(first) != line_up(run) for first in firsts)
            if differs:
                words.append(typed(key, value))
        labels.append(" ".join(words) or run.script.partition("_")[0])
    return labels


def typed(key, value):
    """A flag as one would type it."""
    flag = "--" + key.replace("_", "-")
    if value is None or isinstance(value, bool):
        return flag if value else f"no {flag}"
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def read_curve(run):
    """-> true steps, and the mean return of the learners' last 500 episodes there"""
    if "curve" in run.results:
        points = [(at["true_steps"], at["return"]) for at in run.results["curve"] if at["return"] is not None]
        return np.array(points, dtype=float).reshape(-1, 2).T
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # it takes a second

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it would tell that a resumed run's events overlap
    events = EventAccumulator(run.folder, size_guidance={"scalars": 0}).Reload()
    seats = [seat for seat, name in enumerate(run.config["players"], 1) if name == LEARNERS[run.script]]
    tags = [f"charts/episodic_return/player_{seat}" for seat in seats]
    if not set(tags) <= set(events.Tags()["scalars"]):
        return np.zeros((2, 0))
    curves = [{event.step: event.value for event in events.Scalars(tag)} for tag in tags]
    steps = sorted(set.intersection(*map(set, curves)))
    return np.array([steps, [statistics.mean(curve[step] for curve in curves) for step in steps]], dtype=float)


# -------------------------------------------------------------------------------------- the table


def interval(evaluations):
    """The mean of the learners' returns over seeds and its 95 % interval, as text."""
    if None in evaluations:
        return "–"
    means = [evaluation["mean"] for evaluation in evaluations]
    half = evaluations[0]["ci95"]["mean"]
    if len(means) > 1:
        student = STUDENT[len(means) - 2] if len(means) - 2 < len(STUDENT) else 1.96
        half = student * statistics.stdev(means) / len(means) ** 0.5
    return f"{statistics.mean(means):.3f} ± {half:.3f}"


def spread(values):
    """Median and range, as text; None stands for what never came."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "never"
    text = f"{statistics.median(known):,.0f}"
    if known[0] < known[-1]:
        text += f" ({known[0]:,.0f} to {known[-1]:,.0f})"
    return text if len(known) == len(values) else f"{text}, {len(values) - len(known)} never"


def make_table(groups, labels, threshold):
    """-> rows of text, the first being the head"""
    rows = [["run", "seeds", "return", "policy alone, or greedy", "true steps", f"true steps to {threshold:g}",
             f"seconds to {threshold:g}", "seconds"]]
    for group, label in zip(groups, labels):
        results = [run.results for run in group]
        first, second = ("searched", "policy") if LEARNERS[group[0].script] == "hop" else ("sampled", "greedy")
        alone = [result["evaluation"].get(second) for result in results]
        played = [result["evaluation"].get(first) for result in results]
        if group[0].config.get("search") == "none":  # as the policy alone plays, so they play
            played = alone
        reached = [result["thresholds"].get(f"{threshold:g}", {}) for result in results]
        timed = {} not in reached
        rows.append([label, str(len(group)), interval(played), interval(alone),
                     spread([result["true_steps"] for result in results]),
                     *(spread([at and at[key] for at in reached]) if timed else "–" for key in ("true_steps", "seconds")),
                     spread([result["seconds"] for result in results])])
    return rows


def print_rows(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")


# ------------------------------------------------------------------------------------ the picture


def average(curves, points=400):
    """Curves of several seeds brought to common steps. -> steps, mean, lowest, highest"""
    begin, end = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    steps = np.linspace(begin, max(begin, end), points)
    returns = np.array([np.interp(steps, *curve) for curve in curves])
    return steps, returns.mean(0), returns.min(0), returns.max(0)


def draw(groups, labels, path):
    """The learning curves of all groups in one picture. -> folders of which no curve was left"""
    import matplotlib  # here, for only the picture needs it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5.5), layout="constrained")
    without, ends = [], []
    for group, label in zip(groups, labels):
        curves = [read_curve(run) for run in group]
        without += [run.folder for run, curve in zip(group, curves) if not curve.shape[1]]
        curves = [curve for curve in curves if curve.shape[1]]
        if not curves:
            continue
        steps, mean, low, high = average(curves)
        line, = axis.plot(steps, mean, linewidth=1.6, label=f"{label}, {len(curves)} seed{'s' * (len(curves) > 1)}")
        axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        ends.append(steps[-1])
    if ends and max(ends) > 4 * min(ends):
        axis.set_xscale("log")
    axis.set(xlabel="true steps of the game", ylabel="mean return of the learners' last 500 episodes")
    axis.grid(alpha=0.3)
    if ends:
        axis.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise Refused(f"--out {path} cannot be written: {error}") from error
    finally:
        plt.close(figure)
    return without


def compare(args):
    if not args.runs:
        raise Refused("name the folder of one run or more, such as runs/a runs/b")
    runs = [read_run(os.path.normpath(folder)) for folder in args.runs]
    if not any(f"{args.threshold:g}" in run.results["thresholds"] for run in runs):
        there = ", ".join(dict.fromkeys(value for run in runs for value in run.results["thresholds"]))
        raise Refused(f"--threshold {args.threshold:g}: these runs have timed {there or 'none'}")
    groups = group_runs(runs)
    labels = label_groups(groups)
    path = args.out or os.path.join(os.path.dirname(runs[0].folder), "compare.png")
    without = draw(groups, labels, path)
    print_rows(make_table(groups, labels, args.threshold))
    print()
    for number, group in enumerate(groups, 1):
        print(f"Row {number}: {', '.join(run.folder for run in group)}")
    print("Returns: means over seeds ± 95 %, of one seed ± that of its episodes. Steps and seconds: medians (range).")
    if without:
        print(f"Without a curve (shorter than 500 episodes, or without TensorBoard's events): {', '.join(without)}")
    print(f"Learning curves: {path}")
    return 0


def main(args):
    try:
        return compare(args)
    except Refused as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run_command(main, Args, __doc__)
