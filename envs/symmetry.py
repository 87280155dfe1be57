"""Symmetry check: do equal players earn equally, whichever seat they sit on?

    python -m envs.symmetry --players random random random random
    python -m envs.symmetry --players ns nh nsh nsh --height 8 --width 8 --max-blocks 5 --episodes 50000

The players of a line-up play the batched game, and each seat's mean return is printed with its 95 % interval.
Then every pair of equal players (same name, same strength) is compared over the same episodes. The limit for
the largest difference takes account of the number of pairs: a fair game fails the check once in 1,000 runs.

What was found goes to runs/<run name>/: symmetry.png draws each seat's mean and interval, results.json tells them.

Exit code: 0 where no bias was found, 1 on bias, 2 where the flags make no sense.
"""

import json
import math
import os
import re
import sys
import time
from dataclasses import asdict, dataclass

import torch
from tqdm import tqdm

from envs.batched import BatchedStagHunt, Lineup, equal_players_test
from envs.command import run_command

LEAST_EPISODES = 100  # the test takes mean returns to be normally distributed


@dataclass
class Args:
    """Check that equal players earn equally on every seat of the stag hunt."""

    players: tuple[str, ...] = ("random", "random", "random", "random")
    """who sits on seats 1, 2, ...: random, ns, nh, nsh, patient-K, noisy-ns, noisy-nh, switch-ns-nh, switch-nh-ns,
    mix:A,B (drawn anew each episode) or file.py:Class"""
    episodes: int = 20_000
    """how many episodes to play at least; rounded up so that each environment plays as many as every other"""
    num_envs: int = 1024
    """how many games run side by side; never more than there are episodes"""
    seed: int = 1
    """where the random numbers of the boards and the players start"""
    device: str = "cpu"
    """where the tensors live, such as cpu or cuda"""
    runs_dir: str = "runs"
    """folder under which the check has its own folder"""
    run_name: str | None = None
    """name of that folder; without it: players, board, seed and time"""

    height: int = 4
    """rows of the board"""
    width: int = 4
    """columns of the board"""
    stags: int = 1
    """stags on the board"""
    hares: int = 4
    """hares on the board"""
    max_blocks: int = 0
    """obstacles that are tried, each of 3 or 4 cells"""
    final_time: int = 35
    """steps after which an episode ends"""
    stag_reward: float = 10.0
    """what a stag is worth, split among its hunters in proportion to their strengths"""
    hare_reward: float = 1.0
    """what a hare is worth, split equally among its hunters"""
    stag_hunters: int = 2
    """how many players it takes to catch a stag"""
    time_reward: float = 0.0
    """what each player gets for every step that it is on the board"""
    strengths: tuple[float, ...] = ()
    """strength of each seat when a stag is split; none given: all equal"""
    prosocial: bool = False
    """whether each player on the board gets the mean of the step's rewards instead of its own"""
    dynamic_final_time: bool = False
    """whether the episode also ends 5 steps after the first catch"""


def play(names, episodes, *, num_envs=1024, seed=1, device="cpu", **board):
    """Plays a line-up against itself. -> the return of each seat in each episode, [E, N] in double precision

    Every environment plays the same number of episodes, for otherwise the short ones would be counted too
    often; E is `episodes` rounded up to a multiple of num_envs. The episodes of one environment make one
    meeting, in the middle of which the switch-players switch.
    """
    if episodes < 1:
        raise ValueError(f"--episodes {episodes} must be at least 1")
    if num_envs < 1:
        raise ValueError(f"--num-envs {num_envs} must be at least 1")
    num_envs = min(num_envs, episodes)
    each = math.ceil(episodes / num_envs)
    game = BatchedStagHunt(num_envs, num_players=len(names), device=device, seed=seed, **board)
    lineup = Lineup(names, game, seed=seed, episodes=each)
    returns = torch.zeros(each, num_envs, len(names), dtype=torch.float64, device=game.device)
    episode = torch.zeros(num_envs, dtype=torch.int64, device=game.device)  # how many each environment has finished
    env = torch.arange(num_envs, device=game.device)
    with tqdm(total=each * num_envs, unit=" episodes", leave=False, disable=None) as bar:
        while (episode < each).any():
            out = game.advance(lineup.act(game))
            game.reset(out["over"])
            lineup.reset(out["over"])
            counts = episode < each  # those that are through go on playing, uncounted, until all are
            returns[episode.clamp(max=each - 1), env] += out["reward"] * counts[:, None]
            episode += out["over"] & counts
            bar.update(int((out["over"] & counts).sum()))
    return returns.flatten(0, 1).cpu()


def measure(returns, names, strengths=()):
    """What each seat earned, with 95 % intervals, and whether equal players earned equally: for results.json."""
    def mean(column):
        return {"mean": column.mean().item(), "ci95": 1.96 * column.std().item() / math.sqrt(len(column))}

    equals = list(zip(names, strengths)) if strengths else list(names)
    score, limit, pair = equal_players_test(returns, equals)
    seats = [{"player": name, "strength": strengths[seat] if strengths else None, **mean(returns[:, seat])}
             for seat, name in enumerate(names)]
    return {"episodes": len(returns), "seats": seats, "all": mean(returns.mean(1)),
            "pairs": sum(equals[i] == equals[j] for i in range(len(names)) for j in range(i)),
            "largest": None if pair is None else {"seats": [seat + 1 for seat in pair], "z": score, "limit": limit},
            "biased": pair is not None and score >= limit}


def verdict(found):
    """Whether equal players earn equally, in a sentence."""
    if found["largest"] is None:
        return "Nothing to compare: no two players are equal."
    first, second = (f"player_{seat}" for seat in found["largest"]["seats"])
    return (f"BIAS: {first} and {second} are equal players but do not earn equally." if found["biased"]
            else "No bias: equal players earn equally.")


def report(found):
    """What was found, as a text."""
    strengths = found["seats"][0]["strength"] is not None
    wide = max(len("player"), *(len(seat["player"]) for seat in found["seats"]))

    def line(label, seat, name=""):
        low, high = seat["mean"] - seat["ci95"], seat["mean"] + seat["ci95"]
        strength = f"{seat.get('strength') or '':>8} " if strengths else ""
        return f"{label:<10} {name:<{wide}} {strength}{seat['mean']:11.4f}  {low:.4f} to {high:.4f}"

    lines = [f"{'seat':<10} {'player':<{wide}} " + ("strength " if strengths else "") + "mean return  95 % interval"]
    lines += [line(f"player_{number}", seat, seat["player"]) for number, seat in enumerate(found["seats"], 1)]
    lines += [line("all", found["all"]), ""]
    if found["largest"]:
        first, second = found["largest"]["seats"]
        of_pairs = ("the only pair of equal players" if found["pairs"] == 1
                    else f"the largest of {found['pairs']} pairs of equal players")
        lines.append(f"player_{first} and player_{second} ({found['seats'][first - 1]['player']}) differ by |z| = "
                     f"{found['largest']['z']:.2f}, {of_pairs}; the limit is {found['largest']['limit']:.2f}.")
    return "\n".join(lines + [verdict(found)])


def draw(found, path):
    """Draws what each seat earned: means with their intervals, equal players in one colour."""
    from matplotlib.figure import Figure  # here, so that --help need not wait for it

    picture = Figure((max(5, 1.5 * len(found["seats"])), 4.2), layout="constrained", dpi=120)
    axes = picture.subplots()
    kinds = [(seat["player"], seat["strength"]) for seat in found["seats"]]
    for number, (seat, kind) in enumerate(zip(found["seats"], kinds)):
        axes.errorbar(number, seat["mean"], seat["ci95"], fmt="o", capsize=6, color=f"C{kinds.index(kind) % 10}")
        axes.annotate(f"{seat['mean']:.3f}", (number, seat["mean"]), (8, 0), textcoords="offset points", va="center")
    names = [os.path.basename(name) + (f"\nstrength {strength:g}" if strength else "") for name, strength in kinds]
    axes.set_xticks(range(len(names)), [f"player_{number}\n{name}" for number, name in enumerate(names, 1)])
    axes.margins(x=0.2, y=0.3)
    axes.set(ylabel="return of an episode", title=verdict(found))
    axes.title.set_fontsize(10)
    axes.spines[["top", "right"]].set_visible(False)
    told = f"means of {found['episodes']:,} episodes with 95 % intervals; equal players in one colour"
    picture.supxlabel(told, fontsize=9)
    picture.savefig(path)


def folder_of(args):
    """Where the check puts what it finds; a name that cannot be used is refused."""
    players = "-".join(re.sub(r"[^\w.-]+", "-", os.path.basename(name)) for name in args.players)
    name = args.run_name or f"symmetry__{players}__{args.height}x{args.width}__{args.seed}__{int(time.time())}"
    if re.search(r'[<>:"/\\|?*\0]', name) or name.strip(". ") != name:  # Windows takes none of these
        raise ValueError(f"--run-name {name!r} is no valid folder name")
    folder = os.path.join(args.runs_dir, name)
    if args.run_name and os.path.exists(folder):
        raise ValueError(f"--run-name {name}: there is a folder {folder}")
    return folder


def main(args):
    torch.set_num_threads(1)  # the tensors are small: more threads would wait for one another on a busy machine
    started = time.perf_counter()
    board = {name: getattr(args, name) for name in (
        "height", "width", "stags", "hares", "max_blocks", "final_time", "stag_reward", "hare_reward", "stag_hunters",
        "time_reward", "prosocial", "dynamic_final_time")}
    try:
        if args.episodes < LEAST_EPISODES:
            raise ValueError(f"--episodes {args.episodes} must be at least {LEAST_EPISODES}: fewer tell nothing")
        if not 0 <= args.seed < 2 ** 63 - 1:
            raise ValueError(f"--seed {args.seed} must be from 0 to 2^63 - 2")
        try:
            torch.empty(0, device=args.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device {args.device} cannot be used: {str(error).splitlines()[0]}") from error
        folder = folder_of(args)
        returns = play(args.players, args.episodes, num_envs=args.num_envs, seed=args.seed, device=args.device,
                       strengths=args.strengths or None, **board)
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        print(f"error: {folder} cannot be made: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - started
    found = measure(returns, args.players, args.strengths)
    told = report(found)
    if found["largest"] and math.isinf(found["largest"]["z"]):  # always the same difference; JSON knows no infinity
        found["largest"]["z"] = None
    with open(os.path.join(folder, "results.json"), "w", encoding="utf-8") as file:
        json.dump({"flags": asdict(args), **found}, file, indent=2)
    draw(found, os.path.join(folder, "symmetry.png"))
    print(f"{len(returns):,} episodes on {args.height} x {args.width} in {seconds:.0f} s\n\n{told}")
    print(f"Drawn in {os.path.join(folder, 'symmetry.png')}")
    return int(found["biased"])


if __name__ == "__main__":
    run_command(main, Args, __doc__)
