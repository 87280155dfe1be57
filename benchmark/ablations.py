"""HOP+ and what is left of it without each of its parts, over two seeds; and it among others and on larger boards.

    python benchmark/ablations.py                        every run, 2 seeds
    python benchmark/ablations.py --only full no-search --seeds 1 2 3

Each run is an ordinary one of hopplus_selfplay.py in `--folder`. One that is finished is not run again, one that was
stopped is resumed, and several machines that share the folder share the runs (benchmark/workers.py); the table of what
is there is printed after each run and kept in `<folder>/ablations.md`. Players trained in self-play
on 4x4 also meet strangers (--mode adapt): three hare hunters, and those of the full and the scarce runs others, too.
"""

import dataclasses
import os

from common import any_unknown, keep, markdown, results, run_command, spread
from workers import Run, check_workers, work

WIDE = "--height 8 --width 8"
SCARCE = "--hares 2 --final-time 12"
RUNS = {
    "full": "",
    "rules-as-model": "--search-model rules",
    "no-search": "--search none",
    "one-step": "--search one-step",
    "one-tree": "--num-trees 1",
    "no-imagination": "--imagined-per-real 0",
    "no-prize-floor": "--prize-floor inf",
    "goals-zero": "--goals zero",
    "selector-min": "--selector min",
    "samples-rewarded": "--moa-samples rewarded",
    "buffer-5000": "--buffer-size 5000",
    "among-3-ns": "--players hop ns ns ns",
    "among-ns-nh-nh": "--players hop ns nh nh",
    "8x8": WIDE,
    "8x8-5-blocks": f"{WIDE} --max-blocks 5",
    "scarce": SCARCE,
    "scarce-goals-zero": f"{SCARCE} --goals zero",
    "scarce-no-prize-floor": f"{SCARCE} --prize-floor inf",
    "scarce-no-search": f"{SCARCE} --search none",
    "scarce-one-tree": f"{SCARCE} --num-trees 1",
}
ALL = ("ns ns ns", "nh nh nh", "random random random")
STRANGERS = {name: ("nh nh nh",) for name, flags in RUNS.items() if "--players" not in flags and "max-blocks" not in flags}
STRANGERS |= {"full": (*ALL, "ns nh nh"), "scarce": ALL, "scarce-goals-zero": ALL}


@dataclasses.dataclass
class Args:
    only: tuple[str, ...] = ()
    """names of the runs to make; none given: all"""
    seeds: tuple[int, ...] = (1, 2)
    """seeds of each run"""
    folder: str = os.path.join("runs", "benchmark-ablations")
    """where the runs and the table go"""
    strangers: bool = True
    """let a trained player meet strangers"""
    flags: str = ""
    """further flags for every training run"""
    workers: int = 1
    """runs side by side on this machine"""


def table(done):
    """The Markdown table of all that is done: {run: [results of each seed]}."""
    rows = []
    for name, seeds in done.items():
        played = [result["evaluation"].get("searched") or result["evaluation"]["policy"] for result in seeds]
        players = [key for key in played[0] if key.startswith("player_")]
        reached = [result["thresholds"].get("2.85") or {"seconds": None, "true_steps": None} for result in seeds]
        moa = [f"{kind} {spread([scores['moa'][kind]['top1'] for scores in seeds])} / "
               f"{spread([scores['moa'][kind]['top1_ceiling'] for scores in seeds])}" for kind in seeds[0]["moa"]]
        rows.append([
            name, str(len(seeds)),
            spread([r["evaluation"]["searched"]["mean"] if "searched" in r["evaluation"] else None for r in seeds]),
            spread([result["evaluation"]["policy"]["mean"] for result in seeds]),
            " ".join(f"{sum(p[key] for p in played) / len(played):.2f}" for key in players),
            spread([at["true_steps"] for at in reached], 0), spread([at["seconds"] for at in reached], 0),
            spread([result["largest_fall_in_last_quarter"] for result in seeds]), ", ".join(moa)])
    return markdown(["run", "seeds", "searched", "policy alone", "by player", "true steps to 2.85", "seconds to 2.85",
                     "largest fall, last quarter", "MOA top-1 / ceiling"], rows)


def meeting(name, others):
    """The name of a run in which a trained player meets three others."""
    return f"{name}-meets-{others.replace(' ', '-')}"


def all_runs(args):
    """The training runs, and after each of them the strangers that its player meets."""
    runs, script = [], "hopplus_selfplay.py"
    for seed in args.seeds:
        for kind in args.only or RUNS:
            name = f"{kind}-{seed}"
            runs.append(Run(name, f"{RUNS[kind]} --seed {seed} {args.flags}", script))
            for others in STRANGERS.get(kind, ()) if args.strangers else ():
                flags = (f"--mode adapt --checkpoint {os.path.join(args.folder, name)} --players hop {others} "
                         f"--meetings 100 --seed {seed}")
                runs.append(Run(meeting(name, others), flags, script, (name,)))
    return runs


def write_table(args):
    """The tables of the runs that are there."""
    done, met = {}, {}
    for kind in args.only or RUNS:
        for seed in args.seeds:
            name = f"{kind}-{seed}"
            if result := results(args.folder, name):
                done.setdefault(kind, []).append(result)
            for others in STRANGERS.get(kind, ()) if args.strangers else ():
                if result := results(args.folder, meeting(name, others)):
                    met.setdefault((kind, others), []).append(result["second_half"]["mean"])
    text = table(done)
    if met:
        text += "\n\nA trained player among strangers, second half of a meeting of 20 episodes, all seats:\n\n"
        text += markdown(["trained", "among", "return"],
                         [[kind, others, spread(values)] for (kind, others), values in met.items()])
    keep(text, os.path.join(args.folder, "ablations.md"))


def main(args):
    if any_unknown(args.only, RUNS) or not check_workers(args.workers):
        return 2
    return work(args.folder, all_runs(args), args.workers, lambda: write_table(args))


if __name__ == "__main__":
    run_command(main, Args, __doc__)
