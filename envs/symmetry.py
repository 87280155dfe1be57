"""Symmetry check: do equal players earn equally, whichever seat they sit on?

    python -m envs.symmetry --players random random random random
    python -m envs.symmetry --players ns nh nsh nsh --height 8 --width 8 --max-blocks 5 --episodes 50000

The players of a line-up play the batched game, and each seat's mean return is printed with its 95 % interval.
Then every pair of equal players (same name, same strength) is compared over the same episodes. The limit for
the largest difference takes account of the number of pairs: a fair game fails the check once in 1,000 runs.

Exit code: 0 where no bias was found, 1 on bias, 2 where the flags make no sense.
"""

import math
import sys
import time
from dataclasses import dataclass

import torch
import tyro
from tqdm import tqdm

from envs.batched import BatchedStagHunt, Lineup, equal_players_test

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


def report(returns, names, strengths=()):
    """Tells what each seat earned and whether equal players earned equally. -> (the text, whether there is bias)"""
    episodes, num_players = returns.shape
    equals = list(zip(names, strengths)) if strengths else list(names)
    half = 1.96 * returns.std(0) / math.sqrt(episodes)
    wide = max(len("player"), *map(len, names))
    lines = [f"{'seat':<10} {'player':<{wide}} " + ("strength " if strengths else "") + "mean return  95 % interval"]
    for seat, name in enumerate(names):
        mean, spread = returns[:, seat].mean().item(), half[seat].item()
        strength = f"{strengths[seat]:>8g} " if strengths else ""
        lines.append(f"{f'player_{seat + 1}':<10} {name:<{wide}} {strength}{mean:11.4f}  "
                     f"{mean - spread:.4f} to {mean + spread:.4f}")
    everyone = returns.mean(1)
    spread = 1.96 * everyone.std().item() / math.sqrt(episodes)
    lines += [f"{'all':<10} {'':<{wide}} {' ' * 9 if strengths else ''}{everyone.mean().item():11.4f}  "
              f"{everyone.mean().item() - spread:.4f} to {everyone.mean().item() + spread:.4f}", ""]

    score, limit, pair = equal_players_test(returns, equals)
    if pair is None:
        return "\n".join(lines + ["Nothing to compare: no two players are equal."]), False
    first, second = (f"player_{seat + 1}" for seat in pair)
    pairs = sum(equals[i] == equals[j] for i in range(num_players) for j in range(i))
    of_pairs = "the only pair of equal players" if pairs == 1 else f"the largest of {pairs} pairs of equal players"
    lines.append(f"{first} and {second} ({names[pair[0]]}) differ by |z| = {score:.2f}, {of_pairs}; the limit is "
                 f"{limit:.2f}.")
    biased = score >= limit
    lines.append(f"BIAS: {first} and {second} are equal players but do not earn equally." if biased
                 else "No bias: equal players earn equally.")
    return "\n".join(lines), biased


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
        returns = play(args.players, args.episodes, num_envs=args.num_envs, seed=args.seed, device=args.device,
                       strengths=args.strengths or None, **board)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(returns):,} episodes on {args.height} x {args.width} in {time.perf_counter() - started:.0f} s\n")
    text, biased = report(returns, args.players, args.strengths)
    print(text)
    return int(biased)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
