"""HOP+ and what is left of it without each of its parts, over two seeds; and it among others and on larger boards.

    python benchmark/ablations.py                        every run, 2 seeds
    python benchmark/ablations.py --only full no-search --seeds 1 2 3

Each run is an ordinary one of hopplus_selfplay.py in `--folder`. One that is finished is not run again, one that was
stopped is resumed; the table is printed after each run and kept in `<folder>/ablations.md`. Players trained in self-play
on 4x4 also meet strangers (--mode adapt): three hare hunters, and those of the full and the scarce runs others, too.
"""

import dataclasses
import os
import sys

import tyro

from ppo import any_unknown, keep, run, spread

WIDE = "--height 8 --width 8"
SCARCE = "--hares 2 --final-time 12"
RUNS = {
    "full": "",
    "rules-as-model": "--search-model rules",
    "no-search": "--search none",
    "one-step": "--search one-step",
    "one-tree": "--num-trees 1",
    "no-imagination": "--imagined-per-real 0",
    "no-strangers": "--strangers 0",
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
    """names of the runs to make (default: all)"""
    seeds: tuple[int, ...] = (1, 2)
    """seeds of each run"""
    folder: str = os.path.join("runs", "benchmark-ablations")
    """where the runs and the table go"""
    strangers: bool = True
    """let a trained player meet strangers"""
    flags: str = ""
    """further flags for every training run"""


def table(done):
    """The Markdown table of all that is done: {run: [results of each seed]}."""
    lines = ["| run | seeds | searched | policy alone | by player | true steps to 2.85 | seconds to 2.85 | largest fall, last quarter | "
             "MOA top-1 / ceiling |", "|" + "---|" * 9]
    for name, seeds in done.items():
        played = [result["evaluation"].get("searched") or result["evaluation"]["policy"] for result in seeds]
        players = [key for key in played[0] if key.startswith("player_")]
        reached = [result["thresholds"].get("2.85") or {"seconds": None, "true_steps": None} for result in seeds]
        moa = [f"{kind} {spread([scores['moa'][kind]['top1'] for scores in seeds])} / "
               f"{spread([scores['moa'][kind]['top1_ceiling'] for scores in seeds])}" for kind in seeds[0]["moa"]]
        lines.append("| " + " | ".join([
            name, str(len(seeds)),
            spread([r["evaluation"]["searched"]["mean"] if "searched" in r["evaluation"] else None for r in seeds]),
            spread([result["evaluation"]["policy"]["mean"] for result in seeds]),
            " ".join(f"{sum(p[key] for p in played) / len(played):.2f}" for key in players),
            spread([at["true_steps"] for at in reached], 0), spread([at["seconds"] for at in reached], 0),
            spread([result["largest_fall_in_last_quarter"] for result in seeds]), ", ".join(moa)]) + " |")
    return "\n".join(lines)


def main(args):
    if any_unknown(args.only, RUNS):
        return 2
    done, met = {}, {}
    for seed in args.seeds:
        for name in args.only or RUNS:
            done.setdefault(name, []).append(run(args.folder, f"{name}-{seed}", f"{RUNS[name]} --seed {seed} {args.flags}",
                                                 "hopplus_selfplay.py"))
            for others in STRANGERS.get(name, ()) if args.strangers else ():
                checkpoint = os.path.join(args.folder, f"{name}-{seed}")
                results = run(args.folder, f"{name}-{seed}-meets-{others.replace(' ', '-')}",
                              f"--mode adapt --checkpoint {checkpoint} --players hop {others} --meetings 100 --seed {seed}",
                              "hopplus_selfplay.py")
                met.setdefault((name, others), []).append(results["second_half"]["mean"])
            text = table(done)
            if met:
                text += "\n\nA trained player among strangers, second half of a meeting of 20 episodes, all seats:\n\n"
                text += "| trained | among | return |\n|---|---|---|\n"
                text += "\n".join(f"| {name} | {others} | {spread(values)} |" for (name, others), values in met.items())
            keep(text, os.path.join(args.folder, "ablations.md"))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
