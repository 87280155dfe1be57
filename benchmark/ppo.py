"""The runs of ppo_single_player.py over several seeds, and their table of median and spread as Markdown.

    python benchmark/ppo.py                     every run, 5 seeds (about an hour and a half on one core)
    python benchmark/ppo.py --only selfplay-4x4 --seeds 1 2 3

Each run is an ordinary one in `--folder`, by the script's own command line. One that is finished is not run
again, one that was stopped is resumed, so the benchmark can be stopped and started at will, and several machines
that share the folder share the runs (benchmark/workers.py); the table of what is there is printed after each run
and kept in `<folder>/ppo.md`.
"""

import dataclasses
import json
import os
import socket

import tyro

from common import any_unknown, keep, markdown, results, run_command, spread, write
from workers import Run, check_workers, work

SELF_PLAY = "--players ppo ppo ppo ppo"
MIXES = "--players ppo mix:ns,nh,random mix:ns,nh,random mix:ns,nh,random"
RUNS = {
    "selfplay-4x4": SELF_PLAY,
    "selfplay-4x4-shared": SELF_PLAY + " --share-parameters",
    "selfplay-8x8": SELF_PLAY + " --height 8 --width 8 --total-timesteps 3000000",
    "selfplay-8x8-5-blocks": SELF_PLAY + " --height 8 --width 8 --max-blocks 5 --total-timesteps 4000000",
    "seat-1-of-3-ns": "--players ppo ns ns ns",
    "seat-2-of-3-ns": "--players ns ppo ns ns",
    "seat-3-of-3-ns": "--players ns ns ppo ns",
    "seat-4-of-3-ns": "--players ns ns ns ppo",
    "among-3-nh-8x8": "--players ppo nh nh nh --height 8 --width 8",
    "among-mixes-8x8": MIXES + " --height 8 --width 8 --total-timesteps 6000000",
    "among-mixes-4x4": MIXES + " --total-timesteps 6000000",
    "episodes-5000": SELF_PLAY + " --buffer episodes --buffer-size 5000",
    "episodes-20000": SELF_PLAY + " --buffer episodes --buffer-size 20000",
    "seat-1-of-3-ns-episodes-5000": "--players ppo ns ns ns --buffer episodes --buffer-size 5000",
    "seat-1-of-3-ns-episodes-20000": "--players ppo ns ns ns --buffer episodes --buffer-size 20000",
}
# What a trained player earns among others: (run, players with {} for the trained one, further flags).
AMONG = {
    "among-mixes-8x8": [(f"{{}} {others}", "--height 8 --width 8") for others in
                        ("ns ns ns", "nh nh nh", "nh nh random", "random random random", "nh ns random")],
    "among-mixes-4x4": [(f"{{}} {others}", "") for others in
                        ("ns ns ns", "nh nh nh", "random random random", "nh nh random", "ns nh nh")],
}


@dataclasses.dataclass
class Args:
    only: tuple[str, ...] = ()
    """names of the runs to make; none given: all"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """seeds of each run"""
    folder: str = os.path.join("runs", "benchmark-ppo")
    """where the runs and the table go"""
    flags: str = ""
    """further flags for every run"""
    workers: int = 1
    """runs side by side on this machine"""


def among(folder, name, seed):
    """The trained player of a run among other line-ups, without learning. -> {line-up: mean return}"""
    path = os.path.join(folder, f"{name}-{seed}", "among.json")
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    import ppo_single_player as script

    answer = {}
    for players, flags in AMONG[name]:
        trained = os.path.join(folder, f"{name}-{seed}", "checkpoint.pt:player_1")
        args = tyro.cli(script.Args, args=["--players", *players.format(trained).split(), *flags.split()])
        returns, _ = script.evaluate(args, None, 20_000, False, seed)
        answer[players] = returns[:, 0].mean().item()
    write(path, json.dumps(answer, indent=2))
    return answer


def equal_together(folder, name, seeds):
    """Do the four players of self-play earn equally, over 20,000 episodes of each seed? -> a sentence"""
    import ppo_single_player as script
    import torch

    torch.set_num_threads(1)
    every = []
    for seed in seeds:
        checkpoint = os.path.join(folder, f"{name}-{seed}", "checkpoint.pt")
        players = [f"{checkpoint}:player_{seat}" for seat in (1, 2, 3, 4)]
        path = os.path.join(folder, f"{name}-{seed}", "returns.pt")
        if not os.path.isfile(path):
            args = tyro.cli(script.Args, args=["--players", *players])
            new = f"{path}.{socket.gethostname()}-{os.getpid()}.new"
            torch.save(script.evaluate(args, None, 20_000, False, 77_000 + seed)[0], new)
            os.replace(new, path)
        every.append(torch.load(path))
    score, limit, pair = script.equal_players_test(torch.cat(every), ["ppo"] * 4)
    verdict = "they earn equally"
    if score > limit:
        verdict = f"players {pair[0] + 1} and {pair[1] + 1} do not earn equally"
    return (f"{name}, {len(seeds)} seeds together, {sum(map(len, every))} episodes: largest |z| {score:.2f} "
            f"(limit {limit:.2f}), {verdict}.")


def table(done):
    """The Markdown table of all that is done: {run: [results of each seed]}."""
    rows = []
    for name, seeds in done.items():
        def losses(key):
            return spread([value for result in seeds for value in result["losses"][key].values()], 2)
        never = {"seconds": None, "true_steps": None}
        reached = [result["thresholds"].get("2.85") or never for result in seeds]
        equal = [result["evaluation"]["sampled"]["equal_players"]["equal"] for result in seeds]
        rows.append([
            name, str(len(seeds)), spread([result["evaluation"]["sampled"]["mean"] for result in seeds]),
            spread([result["evaluation"]["greedy"]["mean"] for result in seeds]),
            spread([at["seconds"] for at in reached], 1), spread([at["true_steps"] for at in reached], 0),
            spread([result["seconds"] for result in seeds], 0), losses("value_loss"), losses("entropy"),
            losses("explained_variance"), f"{sum(equal)} of {len(equal)}"])
    return markdown(["run", "seeds", "return, sampled", "greedy", "seconds to 2.85", "true steps to 2.85", "whole run, s",
                     "value loss", "entropy", "explained variance", "equal players"], rows)


def write_table(args):
    """The table of the runs that are there, and what their players earn among others."""
    done, strangers = {}, {}
    for name in args.only or RUNS:
        seeds = [seed for seed in args.seeds if results(args.folder, f"{name}-{seed}")]
        if seeds:
            done[name] = [results(args.folder, f"{name}-{seed}") for seed in seeds]
            if name in AMONG:
                strangers[name] = [among(args.folder, name, seed) for seed in seeds]
    text = table(done)
    for trained, answers in strangers.items():
        rows = [[line, spread([answer[line] for answer in answers])] for line in answers[0]]
        text += f"\n\nPlayer 1 of {trained} among others:\n\n{markdown(['line-up', 'return'], rows)}"
    if len(done.get("selfplay-4x4", ())) == len(args.seeds):
        text += "\n\n" + equal_together(args.folder, "selfplay-4x4", args.seeds)
    keep(text, os.path.join(args.folder, "ppo.md"))


def main(args):
    if any_unknown(args.only, RUNS) or not check_workers(args.workers):
        return 2
    runs = [Run(f"{name}-{seed}", f"{RUNS[name]} --seed {seed} {args.flags}")
            for seed in args.seeds for name in args.only or RUNS]
    return work(args.folder, runs, args.workers, lambda: write_table(args))


if __name__ == "__main__":
    run_command(main, Args, __doc__)
