"""How well goals and actions are learned, against their ceilings, over five seeds.

    python benchmark/vae.py                            all cases, about an hour on an idle core
    python benchmark/vae.py --only 4x4 8x8-b5          some of them

Each run is an ordinary one of pretrain_vae.py in `--folder`. One that is finished is not run again, one that was
stopped is resumed, and several machines that share the folder share the runs (benchmark/workers.py). The tables of
what is there are printed after each run and kept in `<folder>/vae.md`: means over the seeds, ± standard deviation.
"""

import dataclasses
import os
import statistics

from common import any_unknown, keep, markdown, results, run_command
from workers import Run, check_workers, work

RECON = "--loss recon --vae-size 256 --kl-weight 1e-4 --batch-size 64 --learning-rate 5e-3 --epochs 2"
BLOCKS = "--height 8 --width 8 --max-blocks 5"
RUNS = {
    "4x4": "",
    "8x8-b5": BLOCKS,
    "4x4-recon": RECON,
    "4x4-goal-dim-8": "--goal-dim 8",
    "4x4-both": "--loss both",
    "4x4-few-games": "--episodes 3600 --epochs 12 --eval-every 4",
    "8x8-b5-10-epochs": f"{BLOCKS} --epochs 10 --eval-every 5",
    "8x8-b5-recon": f"{BLOCKS} {RECON}",
}
ACTIONS = ("up", "down", "left", "right", "stay", "hunt stag", "hunt hare")


@dataclasses.dataclass
class Args:
    only: tuple[str, ...] = ()
    """names of the cases to run; none given: all"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """seeds of each case"""
    folder: str = os.path.join("runs", "benchmark-vae")
    """where the runs and the tables go"""
    flags: str = ""
    """further flags for every run"""
    workers: int = 1
    """runs side by side on this machine"""


def spread(values, digits, factor=1.0):
    values = [value * factor for value in values]
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def table(head, rows):
    return markdown(head, rows) + "\n"


def tables(cases):
    """The Markdown tables of all that is done: {case: [results of each seed]}."""
    inferred, history, hindsight, kind = (lambda r, name=name: r["moa"][name]
                                          for name in ("inferred", "history", "hindsight", "kind"))
    recall = lambda part, action, of_it: f"{statistics.mean(part(r)['recall'][action] for r in of_it):.3f}"
    return "\n".join((
        "Actions predicted from the inferred goal\n",
        table(["case", "seeds", "top1", "ceiling", "top1 / ceiling, %", "top3", "ceiling", "cross-entropy",
               "above its floor", "recall furthest below its ceiling", "always the commonest"],
              [[case, str(len(of_it)), *(spread(values, digits, factor) for values, digits, factor in (
                  ([inferred(r)["top1"] for r in of_it], 4, 1), ([history(r)["top1"] for r in of_it], 4, 1),
                  ([inferred(r)["top1"] / history(r)["top1"] for r in of_it], 2, 100),
                  ([inferred(r)["top3"] for r in of_it], 4, 1), ([history(r)["top3"] for r in of_it], 4, 1),
                  ([inferred(r)["cross_entropy"] for r in of_it], 4, 1),
                  ([inferred(r)["cross_entropy"] - history(r)["cross_entropy"] for r in of_it], 4, 1),
                  ([max(history(r)["recall"][a] - inferred(r)["recall"][a] for a in ACTIONS)
                    for r in of_it], 4, 1),
                  ([r["moa"]["trivial"]["top1"] for r in of_it], 4, 1)))] for case, of_it in cases.items()]),
        "Actions predicted from the goal known in hindsight\n",
        table(["case", "top1", "kind known", "top3", "kind known", "cross-entropy", "kind known"],
              [[case, *(spread([part(r)[key] for r in of_it], 4) for key in ("top1", "top3", "cross_entropy")
                        for part in (hindsight, kind))] for case, of_it in cases.items()]),
        "Recall by probability, goal inferred / its ceiling\n",
        table(["case", *ACTIONS],
              [[case, *(f"{recall(inferred, a, of_it)} / {recall(history, a, of_it)}" for a in ACTIONS)]
               for case, of_it in cases.items()]),
        "What the goals mean, views rebuilt, and time\n",
        table(["case", "seeds", "kind from hindsight, %", "rule on the catch, %", "kind from inferred, %",
               "Bayes, %", "largest gap at a step, points", "exact views, %", "recon, nats", "kl, nats", "total",
               "epochs", "seconds", "CPU seconds"],
              [[case, str(len(of_it)), *(spread([r["goals"][key] for r in of_it], 2, 100)
                        for key in ("hindsight", "caught_rule", "inferred", "bayes", "largest_gap")),
                spread([r["exact_views"] for r in of_it], 2, 100),
                *(spread([r["losses"][key] for r in of_it], 3) for key in ("recon", "kl", "total")),
                str(of_it[0]["epochs"]),
                *(spread([r[key] for r in of_it], 0) for key in ("seconds", "cpu_seconds"))]
               for case, of_it in cases.items()])))


def all_runs(args):
    return [Run(f"{case}-{seed}", f"{RUNS[case]} --seed {seed} {args.flags}", "pretrain_vae.py")
            for seed in args.seeds for case in args.only or RUNS]


def write_tables(args):
    """The tables of the runs that are there."""
    done = {case: [result for seed in args.seeds if (result := results(args.folder, f"{case}-{seed}"))]
            for case in args.only or RUNS}
    keep(tables({case: of_it for case, of_it in done.items() if of_it}), os.path.join(args.folder, "vae.md"))


def main(args):
    if any_unknown(args.only, RUNS) or not check_workers(args.workers):
        return 2
    return work(args.folder, all_runs(args), args.workers, lambda: write_tables(args))


if __name__ == "__main__":
    run_command(main, Args, __doc__)
