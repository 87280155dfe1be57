"""HOP+ and what is left of it without each of its parts, over two seeds; and it among others and on larger boards.

    python benchmark/ablations.py                        every run, 2 seeds
    python benchmark/ablations.py --only full no-search --seeds 1 2 3

Each run is an ordinary one of hopplus_selfplay.py in `--folder`. What no flag leaves out is left out of a copy of the
script there. A run that is finished is not run again, one that was stopped is resumed, and several machines that share
the folder share the runs (benchmark/workers.py); the table of what is there is printed after each run and kept in
`<folder>/ablations.md`. Players trained in self-play also meet strangers (--mode adapt): three hare hunters, and those
of the full run and of all runs on the scarce board others, too.
"""

import dataclasses
import os

from common import any_unknown, keep, markdown, results, run_command, spread, write
from workers import HERE, Run, check_workers, work

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
    "scarce-no-search": f"{SCARCE} --search none",
    "scarce-one-tree": f"{SCARCE} --num-trees 1",
    "scarce-no-imagination": f"{SCARCE} --imagined-per-real 0",
    "scarce-no-prize-floor": f"{SCARCE} --prize-floor inf",
}
EDITS = {  # text of the script, and what stands in its place
    "scarce-no-slips": ("SLIPS = 0.1, 0.5, 1.0, 0.1", "SLIPS = 0.0, 0.5, 1.0, 0.0"),
    "scarce-none-trembles": ("SHARES = 0.78, 0.1, 0.1,", "SHARES = 0.88, 1e-6, 0.1,"),
    "scarce-none-like-nobody": ("SHARES = 0.78, 0.1, 0.1,", "SHARES = 0.88, 0.1, 1e-6,"),
    "scarce-none-restless": ("SHARES = 0.78, 0.1, 0.1, 0.02", "SHARES = 0.8, 0.1, 0.1, 1e-6"),
    "scarce-no-change": ("CHANGE = 2e-3", "CHANGE = 1e-5"),
    "scarce-never-alike": ("apart * (1 - alike.sum(-1, keepdim=True)) + alike", "apart"),
    "scarce-prior-learns-on": ("prior.requires_grad_(False)", "prior.requires_grad_(True)"),
    "scarce-no-record-in-lessons": ("STRETCHES, RECORDED = 64, 12", "STRETCHES, RECORDED = 76, 0"),
    "scarce-late-as-likely": ("device=pairs.device).square()", "device=pairs.device)"),
}
RUNS |= {name: SCARCE for name in EDITS}
OTHERS = ("nh nh nh", "random random random", "nh nh random", "switch-ns-nh switch-ns-nh switch-ns-nh",
          "noisy-nh noisy-nh noisy-nh")
STRANGERS = {name: OTHERS[:1] for name, flags in RUNS.items() if "--players" not in flags and "max-blocks" not in flags}
STRANGERS |= {name: OTHERS for name in RUNS if name == "full" or name.startswith("scarce")}


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


def copy_of(kind, folder):
    """Where the script is from which something is left out that has no flag."""
    return os.path.join(os.path.abspath(folder), "scripts", kind, "hopplus_selfplay.py")


def edit(kind, folder):
    """Writes that copy of the script."""
    with open(os.path.join(HERE, "..", "hopplus_selfplay.py"), encoding="utf-8") as file:
        text = file.read()
    before, after = EDITS[kind]
    if text.count(before) != 1:
        raise ValueError(f"{kind}: {before!r} stands {text.count(before)} times in the script")
    os.makedirs(os.path.dirname(copy_of(kind, folder)), exist_ok=True)
    write(copy_of(kind, folder), text.replace(before, after))


def all_runs(args):
    """The training runs, and after each of them the strangers that its player meets."""
    runs = []
    for seed in args.seeds:
        for kind in args.only or RUNS:
            name, script = f"{kind}-{seed}", "hopplus_selfplay.py"
            if kind in EDITS:
                script = copy_of(kind, args.folder)
            runs.append(Run(name, f"{RUNS[kind]} --seed {seed} {args.flags}", script))
            for others in STRANGERS.get(kind, ()) if args.strangers else ():
                flags = (f"--mode adapt --checkpoint {os.path.join(args.folder, name)} --players hop {others} "
                         f"--meetings 50 --seed {seed}")
                runs.append(Run(meeting(name, others), flags, script, (name,)))
    return runs


def write_table(args):
    """The tables of the runs that are there."""
    kinds = args.only or tuple(RUNS)
    done = {kind: [results(args.folder, f"{kind}-{seed}") for seed in args.seeds] for kind in kinds}
    text = table({kind: list(filter(None, seeds)) for kind, seeds in done.items() if any(seeds)})
    met = {}
    for kind in kinds if args.strangers else ():
        for others in STRANGERS.get(kind, ()):
            found = [results(args.folder, meeting(f"{kind}-{seed}", others)) for seed in args.seeds]
            if found := [result["second_half"]["mean"] for result in found if result]:
                met.setdefault(kind, {})[others] = spread(found)
    if met:
        text += "\n\nA trained player among strangers, second half of a meeting of 20 episodes, all seats:\n\n"
        text += markdown(["trained", *OTHERS], [[kind, *(row.get(others, "") for others in OTHERS)]
                                                for kind, row in met.items()])
    keep(text, os.path.join(args.folder, "ablations.md"))


def main(args):
    if any_unknown(args.only, RUNS) or not check_workers(args.workers):
        return 2
    for kind in set(args.only or RUNS) & set(EDITS):
        edit(kind, args.folder)
    return work(args.folder, all_runs(args), args.workers, lambda: write_table(args))


if __name__ == "__main__":
    run_command(main, Args, __doc__)
