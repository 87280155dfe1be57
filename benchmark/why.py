"""Why does a trained player do what it does among others? Four pictures in the folder of its run.

    python benchmark/why.py runs/x

    beliefs.png    what it makes of three players that turn from hare hunters into stag hunters after half of a meeting, and
                   of three that turn the other way: the weights of the ways to play, and its return, episode by episode
    goals.png      what each other player is inferred to be after: how often that is what it then catches, by step
    exchanged.png  the same boards, met after a meeting with stag hunters and after one with hare hunters: whether it expects
                   the others to go for stag or hare, and what its policy and its search go for; the values are printed
    schelling.png  the Schelling diagram of the board: the return of a stag hunter, of a hare hunter and of the trained
                   player against how many of the three others hunt stag (episodes 11 to 20 of a meeting)
"""

import dataclasses
import os
import sys

import torch
import tyro

from common import run_command  # before the script: it puts the project on the path
import hopplus_selfplay as script

SWITCHERS = ("switch-nh-ns", "switch-ns-nh")


@dataclasses.dataclass
class Args:
    run: tyro.conf.Positional[str]
    """folder of a run of hopplus_selfplay.py"""
    meetings: int = 60
    """meetings of each kind"""
    episodes: int = 20
    """episodes of a meeting"""
    boards: int = 200
    """boards of exchanged.png"""
    threads: int = 1
    """threads that PyTorch may use"""


def seat(args, others, num_envs, seed=5):
    """A table with the run's first player in seat 1 and three others."""
    flags = script.Args(mode="adapt", checkpoint=args.run, players=("hop", *others), meeting_episodes=args.episodes)
    flags, saved = script.load_players(flags)
    return script.seat_players(flags, saved, num_envs, seed, args.episodes)


def play(table, episodes):
    """Plays meetings. -> returns of seat 1 [meeting, episode], weights at each episode's end [pair, meeting, episode, W]"""
    many = table.game.num_envs
    rows, episode = torch.arange(many), torch.zeros(many, dtype=torch.int64)
    returns = torch.zeros(many, episodes + 1)
    weights, others = torch.zeros(*table.memory.shape[:2], episodes + 1, table.args.hypotheses), table.networks.others
    while (episode < episodes).any():
        out = table.play(table.act(table.args.search))
        now = episode.clamp(max=episodes)
        returns[rows, now] += out["reward"][0]
        over = out["over"]
        weights[:, rows[over], now[over]] = others.weights(table.memory[:, over])[0]
        episode = episode + over
    return returns[:, :episodes], weights[:, :, :episodes]


def draw_beliefs(args, path, plt):
    figure, axes = plt.subplots(2, 2, figsize=(12, 6), sharex=True)
    for column, kind in enumerate(SWITCHERS):
        table = seat(args, [kind] * 3, args.meetings)
        returns, weights = play(table, args.episodes)
        number = range(1, args.episodes + 1)
        axes[0, column].stackplot(number, weights.mean((0, 1)).T.numpy())
        axes[0, column].set_title(f"among three {kind}")
        axes[1, column].plot(number, returns.mean(0).numpy(), marker="o", color="black")
        axes[1, column].set_xlabel("episode of the meeting")
        for row in (0, 1):
            axes[row, column].xaxis.set_major_locator(plt.MaxNLocator(integer=True))
            axes[row, column].axvline(args.episodes / 2 + 0.5, color="grey", linestyle="--")
    axes[0, 0].set_ylabel("weights of the ways to play")
    axes[1, 0].set_ylabel("return of the trained player")
    figure.suptitle(f"What it believes of players that change (dashed), mean of {args.meetings} meetings")
    save(figure, path, plt)


@torch.no_grad()
def follow_goals(table, episodes):
    """Plays on. At each step the inferred goals are imagined to the end of the episode: does each other catch what it does there?

    -> step of the episode [T, B]; what each is thought to catch, what it catches while the trained player is there (0 nothing,
    1 a stag, 2 a hare), and whether that can be said [T, N-1, B]
    """
    games, steps = torch.arange(table.game.num_envs)[None], []
    for number in range(episodes * table.args.final_time):
        seen, clock = table.act(table.args.search), table.game.clock.clone()
        guess = script.imagine_catches(table, seen, games, seed=number)[:, 0]
        out = table.play(seen)
        there = out["present"][1:] & out["present"][0]
        prey = torch.where(out["left"][1:] & there, out["action"][1:] - script.STAY, 0)
        steps.append((clock, guess, prey, there, out["over"].expand_as(there)))
    clock, guess, prey, there, over = map(torch.stack, zip(*steps))
    caught, ended = torch.zeros_like(prey), torch.zeros_like(over)
    for t in reversed(range(len(prey))):
        later = (caught[t + 1], ended[t + 1]) if t + 1 < len(prey) else (0, False)
        caught[t] = torch.where(over[t] | (prey[t] > 0), prey[t], later[0])
        ended[t] = over[t] | later[1]
    return clock, guess, caught, there & ended


def draw_followed(args, path, plt):
    """How often the others catch what they are inferred to be after."""
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for others in (["ns", "ns", "ns"], ["nh", "nh", "nh"], ["ns", "nh", "random"]):
        table = seat(args, others, args.meetings)
        play(table, args.episodes // 2)
        clock, guess, caught, counted = follow_goals(table, 3)
        hit = (guess == caught) & counted
        share = lambda part: (part.sum() / counted.sum().clamp(min=1)).item()
        commonest = max(share((caught == prey) & counted) for prey in range(3))
        print(f"among {' '.join(others)}: {share(hit):.1%} of the goals inferred come true, {commonest:.1%} would if the "
              f"commonest catch were always named")
        at = [(clock == step)[:, None] & counted for step in range(table.args.final_time)]
        shares = [((hit & those).sum() / those.sum()).item() if those.sum() >= 20 else float("nan") for those in at]
        axis.plot(range(table.args.final_time), shares, marker=".", label=" ".join(others))
    axis.set_xlabel("step of the episode")
    axis.set_ylabel("share that comes true")
    axis.set_ylim(0, 1.02)
    axis.legend()
    axis.set_title("What another player is inferred to be after: is it what it catches?")
    save(figure, path, plt)


@torch.no_grad()
def draw_exchanged(args, path, plt):
    """Beliefs of meetings with ns and with nh, put to the same boards."""
    memories = {}
    for kind in ("ns", "nh"):
        table = seat(args, [kind] * 3, args.boards)
        play(table, 2)
        memories[kind] = table.memory
    table = seat(args, ["ns"] * 3, args.boards, seed=77)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), sharey=True)
    for place, (kind, memory) in enumerate(memories.items()):
        table.memory = memory
        seen = table.look()
        improved, found = table.plan(seen, "mcts")
        parts = (("what it expects of the others", script.expectations(table, seen)[0], table.order[0, 1:]),
                 ("its policy", seen["policy"][:1].exp(), table.order[0, :1]),
                 ("what the search makes of it", improved[:1].exp(), table.order[0, :1]))
        for axis, (title, probs, seats) in zip(axes, parts):
            shares = leads_to(table.game, probs, seats)
            axis.bar([number + 0.4 * place for number in range(4)], shares.values(), 0.4, label=f"after three {kind}")
            axis.set_title(title)
            axis.set_xticks([number + 0.2 for number in range(4)], shares)
        value = seen["value"][0].mean().item() / script.REWARD_SCALE
        print(f"after a meeting with three {kind}: value {value:.2f}, return expected by the search "
              f"{(found['q'][0] * improved[0].exp()).sum(-1).mean().item():.2f}")
    axes[0].legend()
    axes[0].set_ylabel("share of probability")
    figure.suptitle(f"The first step of the same {args.boards} boards under two beliefs")
    save(figure, path, plt)


def leads_to(game, probs, seats):
    """Shares of probabilities [seat, B, 7] on actions that lead to the nearest stag, the nearest hare, both, neither."""
    stag, hare = (script.seeking_probabilities(game, bit)[:, seats].permute(1, 2, 0) > 0
                  for bit in (script.STAG_BIT, script.HARE_BIT))
    kinds = {"to the stag": stag & ~hare, "to a hare": hare & ~stag, "to both": stag & hare, "neither": ~stag & ~hare}
    return {name: (probs * those).sum(-1).mean().item() for name, those in kinds.items()}


def draw_schelling(args, path, plt):
    """Returns against the number of others that hunt stag."""
    lines = {"stag hunter": [], "hare hunter": [], "trained player": []}
    for stags in range(4):
        others = ["ns"] * stags + ["nh"] * (3 - stags)
        table = seat(args, others, args.meetings)
        lines["trained player"].append(play(table, args.episodes)[0][:, args.episodes // 2:].mean().item())
        for name, kind in (("stag hunter", "ns"), ("hare hunter", "nh")):
            game = script.make_game(table.args, 2000, 9)
            line_up = script.Lineup([kind, *others], game, 9)
            total, running = torch.zeros(2000), torch.ones(2000, dtype=torch.bool)
            while running.any():
                out = game.advance(line_up.act(game))
                total += out["reward"][:, 0] * running
                running &= ~out["over"]
            lines[name].append(total.mean().item())
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for (name, values), style in zip(lines.items(), ("o--", "s--", "D-")):
        axis.plot(range(4), values, style, label=name)
        print(f"{name} among 0, 1, 2, 3 stag hunters: " + ", ".join(f"{value:.2f}" for value in values))
    axis.set_xticks(range(4))
    axis.set_xlabel("stag hunters among the three others (the rest hunt hare)")
    axis.set_ylabel("return")
    axis.legend()
    axis.set_title(f"Schelling diagram, {script.board_name(table.args)}, {table.args.final_time} steps")
    save(figure, path, plt)


def save(figure, path, plt):
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
    print(path)


def main(args):
    import matplotlib  # here, so that --help is quick
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder = os.path.join(args.run, "pictures")
    try:
        script.check_ranges(args, ((1, 4096, ("threads",)), (1, 4096, ("meetings", "boards")), (2, 4096, ("episodes",))))
        seat(args, ["ns"] * 3, 1)
    except script.Refused as refusal:
        print(f"error: {str(refusal).removeprefix('--checkpoint ')}", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)
    os.makedirs(folder, exist_ok=True)
    draw_beliefs(args, os.path.join(folder, "beliefs.png"), plt)
    draw_followed(args, os.path.join(folder, "goals.png"), plt)
    draw_exchanged(args, os.path.join(folder, "exchanged.png"), plt)
    draw_schelling(args, os.path.join(folder, "schelling.png"), plt)
    return 0


if __name__ == "__main__":
    run_command(main, Args, __doc__)
