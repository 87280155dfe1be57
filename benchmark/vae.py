"""How well goals and actions are learned, against their ceilings, over five seeds.

    python benchmark/vae.py                            all cases, about an hour on an idle core
    python benchmark/vae.py --cases 4x4 8x8-b5         some of them
    python benchmark/vae.py --table                    only print what is there

Each result goes to runs/benchmark_vae.jsonl as it comes, and a run that is there is not done again: stop
it and go on as you like. Prints Markdown tables: means over the seeds, ± their standard deviation.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECON = ["--loss", "recon", "--vae-size", "256", "--kl-weight", "1e-4", "--batch-size", "64",
         "--learning-rate", "5e-3", "--epochs", "2"]
BLOCKS = ["--height", "8", "--width", "8", "--max-blocks", "5"]
CASES = {
    "4x4": [],
    "8x8-b5": BLOCKS,
    "4x4 recon": RECON,
    "4x4 goal-dim 8": ["--goal-dim", "8"],
    "4x4 both": ["--loss", "both"],
    "4x4 few games": ["--episodes", "3600", "--epochs", "12", "--eval-every", "4"],
    "8x8-b5 10 epochs": [*BLOCKS, "--epochs", "10", "--eval-every", "5"],
    "8x8-b5 recon": [*BLOCKS, *RECON],
}
ACTIONS = ("up", "down", "left", "right", "stay", "hunt stag", "hunt hare")


def run(case, seed, file, threads):
    """Does one run and writes its figures."""
    folder = ROOT / "runs" / f"benchmark-vae-{case.replace(' ', '-')}-{seed}"
    command = [sys.executable, "pretrain_vae.py", "--seed", str(seed), "--run-name", folder.name,
               "--threads", str(threads), *CASES[case]]
    if (folder / "checkpoint.pt").exists():
        command = [sys.executable, "pretrain_vae.py", "--resume", str(folder)]
    elif folder.exists():
        raise SystemExit(f"{folder} was stopped before its first checkpoint: delete it first")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    results = json.loads((folder / "results.json").read_text())
    results["goals"].pop("by_step")
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps({"case": case, "seed": seed, **results}) + "\n")


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def spread(values, digits, factor=1.0):
    values = [value * factor for value in values]
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def print_tables(results):
    cases = {case: [result for result in results if result["case"] == case] for case in CASES}
    cases = {case: of_it for case, of_it in cases.items() if of_it}
    inferred, history, hindsight, kind = (lambda r, name=name: r["moa"][name]
                                          for name in ("inferred", "history", "hindsight", "kind"))
    print("Actions predicted from the inferred goal\n")
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
              ([r["moa"]["trivial"]["top1"] for r in of_it], 4, 1)))] for case, of_it in cases.items()])
    print("Actions predicted from the goal known in hindsight\n")
    table(["case", "top1", "kind known", "top3", "kind known", "cross-entropy", "kind known"],
          [[case, *(spread([part(r)[key] for r in of_it], 4) for key in ("top1", "top3", "cross_entropy")
                    for part in (hindsight, kind))] for case, of_it in cases.items()])
    print("Recall by probability, goal inferred / its ceiling\n")
    recall = lambda part, action, of_it: f"{statistics.mean(part(r)['recall'][action] for r in of_it):.3f}"
    table(["case", *ACTIONS],
          [[case, *(f"{recall(inferred, a, of_it)} / {recall(history, a, of_it)}" for a in ACTIONS)]
           for case, of_it in cases.items()])
    print("What the goals mean, views rebuilt, and time\n")
    table(["case", "seeds", "kind from hindsight, %", "rule on the catch, %", "kind from inferred, %",
           "Bayes, %", "largest gap at a step, points", "exact views, %", "recon, nats", "kl, nats", "total",
           "epochs", "seconds", "CPU seconds"],
          [[case, str(len(of_it)), *(spread([r["goals"][key] for r in of_it], 2, 100)
                    for key in ("hindsight", "caught_rule", "inferred", "bayes", "largest_gap")),
            spread([r["exact_views"] for r in of_it], 2, 100),
            *(spread([r["losses"][key] for r in of_it], 3) for key in ("recon", "kl", "total")),
            str(of_it[0]["epochs"]),
            *(spread([r[key] for r in of_it], 0) for key in ("seconds", "cpu_seconds"))]
           for case, of_it in cases.items()])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--file", type=Path, default=ROOT / "runs" / "benchmark_vae.jsonl")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    args = parser.parse_args()
    args.file.parent.mkdir(exist_ok=True)
    for case in args.cases if not args.table else []:
        for seed in args.seeds:
            if not any(result["case"] == case and result["seed"] == seed for result in read(args.file)):
                run(case, seed, args.file, args.threads)
                print(f"{case}, seed {seed}: done", file=sys.stderr, flush=True)
    print_tables(read(args.file))


if __name__ == "__main__":
    main()
