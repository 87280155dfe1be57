"""Does a trained player get on with whoever comes? HOP+ and its rivals among fifteen line-ups on four boards.

    python benchmark/adaptation.py --quick --workers 2         HOP+ alone, one seed, fewer and shorter meetings
    python benchmark/adaptation.py                             everything, over night
    python benchmark/adaptation.py --only hop ppo-mixes --boards open scarce --seeds 1 2 3
    python benchmark/adaptation.py --quick --odd               among players that stand nowhere else (odd_players.py)

Every figure comes from an ordinary run in `--folder`: a training run, or one of `--mode adapt`, in which the trained
player meets the same three others for fifty episodes (twenty with --quick), in each seat. A run that is finished is
not made again, one that was stopped is resumed, and several machines that share the folder share the runs
(benchmark/workers.py). What is known so far is in `<folder>/adaptation.md` and `.csv` after every run; at the end, a
picture of the return by episode for each board.

The score of a player in a line-up is 0 at what a random player earns in its place, and 1 at the most that anybody
was seen to earn there: the rules (stag hunters, hare hunters, the patient ones), PPO trained among exactly these
three, or whoever of this table does better. `<folder>/references.json` holds both, and who it was, for each half of a
meeting: among players that switch in the middle the halves differ, among others not. It begins as a copy of
benchmark/references.json, the most that anybody was seen to earn before. Among trained players the 0 is that of a
random player among three stag hunters, for that is what they are.
"""

import csv
import dataclasses
import itertools
import json
import os

import numpy as np
import tyro

from common import any_unknown, keep, markdown, results, run_command, write
from workers import Run, check_workers, work

HERE = os.path.dirname(os.path.abspath(__file__))
BOARDS = {
    "open": "",
    "scarce": "--hares 2 --final-time 12",
    "wide": "--height 8 --width 8",
    "hurried": "--height 8 --width 8 --dynamic-final-time",
}
PPO = "ppo_single_player.py"
HOP = "hopplus_selfplay.py"
KNOWN = " ".join(["mix:ns,nh,noisy-ns,noisy-nh"] * 3)
EVERYBODY = " ".join(["mix:ns,nh,nsh,random,noisy-ns,noisy-nh,switch-ns-nh,switch-nh-ns"] * 3)
LONG = "--num-envs 512 --num-steps 64 --num-minibatches 8 --prize-floor 0.5 --learning-rate 3e-3 --total-timesteps 14000000"
MEMORY = f"{LONG} --memory gru --meeting-episodes 20 --gamma 0.97"
# The trained players: script, flags of the training, flags of --mode adapt.
AGENTS = {
    "hop": (HOP, "", ""),
    "goals-zero": (HOP, "--goals zero", ""),
    "no-search": (HOP, "--search none", ""),
    "no-imagination": (HOP, "--imagined-per-real 0", ""),
    "ppo-mixes": (PPO, f"--players ppo {KNOWN} {LONG}", ""),
    "ppo-memory": (PPO, f"--players ppo {KNOWN} {MEMORY}", ""),
    "upper-bound": (PPO, f"--players ppo {EVERYBODY} {MEMORY}", ""),
}
# The rules as they are, and the patient ones of which the best K of the board counts.
RULES = ("ns", "nh", "nsh", *(f"patient-{steps}" for steps in (4, 8, 16, 28)))
POOR = ("nh nh nh", "nh nh random", "random random random", "switch-ns-nh switch-ns-nh switch-ns-nh",
        "switch-nh-ns switch-nh-ns switch-nh-ns")
TRAINED = ("PPO PPO PPO", "HOP HOP HOP")  # in self-play, on the seeds that come next
LINE_UPS = ("ns ns ns", "nh ns random", "ns ns random", "ns nh nh", "ns random random", "nsh nsh nsh",
            "noisy-ns noisy-ns noisy-ns", "noisy-nh noisy-nh noisy-nh", *POOR, *TRAINED)
ODD = (*(" ".join([kind] * 3) for kind in ("Alternating", "Moody", "Joiner", "Follower", "Cautious", "Wanderer", "Reader",
                                           "Sleeper", "Shy", "Undecided", "Imitator", "Polite", "Learner", "Nearest",
                                           "Grim", "Herd", "Late")),
       "Reciprocal nh nh", "Joiner Moody Sleeper", "Follower ns Shy")
SPANS = {"zero-shot": slice(0, 1), "after 10": slice(10, 20), "after 50": slice(40, 50)}


@dataclasses.dataclass
class Args:
    only: tuple[str, ...] = ()
    """trained players of the table; none given: all"""
    boards: tuple[str, ...] = tuple(BOARDS)
    """boards of the table"""
    seeds: tuple[int, ...] = ()
    """seeds of each training; none given: 1 2 3, with --quick 1"""
    meetings: int = 100
    """meetings in each seat"""
    episodes: int = 50
    """episodes of a meeting"""
    quick: bool = False
    """a quarter of the meetings, of 20 episodes each; only HOP+ (or --only), no trained co-players, no PPO
    trained for each line-up; all in a folder of its own, which ends in -quick"""
    odd: bool = False
    """others that were made for this alone, benchmark/odd_players.py, in place of those of the table, and PPO trained
    for each line-up; all in the same folder, the table under names of its own"""
    folder: str = os.path.join("runs", "benchmark-adaptation")
    """where the runs, the table and the pictures go"""
    flags: str = ""
    """further flags for every training run"""
    workers: int = 1
    """runs side by side on this machine"""


def named(args, name):
    """Names of what is made of others that nobody knows, apart from those of the ordinary table."""
    return f"odd-{name}" if args.odd else name


class Table:
    """All that is known so far: by board, player, seed and line-up the mean return of each episode."""

    def __init__(self, args):
        self.args, self.returns, self.references = args, {}, {}
        self.path = os.path.join(args.folder, named(args, "references.json"))
        stored = self.path if args.odd or os.path.isfile(self.path) else os.path.join(HERE, "references.json")
        if os.path.isfile(stored):
            with open(stored, encoding="utf-8") as file:
                self.references = json.load(file)
        stored_rules = args.quick and not args.odd  # they are of more meetings than --quick has
        self.settled = ("random", *RULES) if stored_rules else ()

    def add(self, board, agent, seed, others, episodes):
        """Takes in a player's returns; who earns more than anybody before is the new 1."""
        self.returns[board, agent, seed, others] = episodes = np.array(episodes)
        if agent in self.settled and others in self.references[board]:
            return
        lowest = self.references[board]["ns ns ns"]["random"] if others in TRAINED else None
        known = self.references[board].setdefault(others, {"random": lowest, "best": [-1e9] * 2, "by": [None] * 2})
        halves = [half.mean() for half in np.split(episodes, [len(episodes) // 2])]
        later = halves if "switch" in others else [episodes[10:].mean()] * 2
        if agent == "random":
            known["random"] = later
        for half, mean in enumerate(later):
            if agent != "random" and mean > known["best"][half]:
                known["best"][half], known["by"][half] = mean, agent

    def score(self, key):
        """The scores of a player by episode, of one board, player, seed and line-up."""
        known, returns = self.references[key[0]][key[3]], self.returns[key]
        low, high = (np.repeat(known[what], [len(returns) // 2, len(returns) - len(returns) // 2])
                     for what in ("random", "best"))
        return (returns - low) / np.maximum(high - low, 1e-9)

    def scores(self, board, agent, span, others=None):
        """Scores of one span of episodes: [seed, line-up]."""
        keys = [key for key in self.returns if key[:2] == (board, agent) and (not others or key[3] in others)]
        seeds, met = sorted({key[2] for key in keys}), list(dict.fromkeys(key[3] for key in keys))
        rows = [[self.score((board, agent, seed, other))[span].mean() for other in met
                 if (board, agent, seed, other) in self.returns] for seed in seeds]
        return np.array([row for row in rows if len(row) == len(met)])


def middle_mean(values):
    """The interquartile mean: that of the middle half of all values."""
    values = np.sort(values, axis=None)
    cut = len(values) // 4
    return values[cut:len(values) - cut].mean()


def interval(scores, mean, draws=2000):
    """A mean of scores [seed, line-up], and its 95 % interval by drawing both anew: 0.97 (0.95 to 0.99)."""
    generator = np.random.default_rng(0)
    seeds, line_ups = scores.shape
    drawn = [mean(scores[generator.integers(seeds, size=seeds)][:, generator.integers(line_ups, size=line_ups)])
             for _ in range(draws)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f"{mean(scores):.2f} ({low:.2f} to {high:.2f})"


def play_rules(args, board, seed=77):
    """The mean return by episode of each rule in each line-up without trained players, as --mode adapt measures it.

    Rules play side by side, in one batch of games, in each seat; among players from a file one line-up comes after
    the other. -> {others: {rule: returns by episode}}, kept in a file of the board
    """
    path = os.path.join(args.folder, named(args, f"{board}-rules.json"))
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    import ppo_single_player as script
    import torch

    torch.set_num_threads(1)  # as the scripts do; more stand in each other's way where other runs are made
    flags = tyro.cli(script.Args, args=["--players", "ppo", "ns", "ns", "ns", *BOARDS[board].split()])
    fields = {field.name: getattr(flags, field.name) for field in dataclasses.fields(script.GameArgs)}
    rules, met = ("random", *RULES), [others for others in met_by(args) if others not in TRAINED]
    new_game = lambda games: script.BatchedStagHunt(games, num_players=4, seed=seed, **fields)
    answer = {others: {} for others in met}
    if args.odd:  # the rule in the first seat
        seat = torch.zeros(16 * args.meetings, dtype=torch.int64)
        for others, rule in itertools.product(met, rules):
            game, names = new_game(len(seat)), [rule, *companions(args, board, others, seed)[0].split()]
            returns = play(game, script.Lineup(names, game, seed, args.episodes), seat, args.episodes)
            answer[others][rule] = returns.mean(0).tolist()
    else:
        line_ups = []
        for others, rule, seat in itertools.product(met, rules, range(4)):
            line_ups.append(others.split())
            line_ups[-1].insert(seat, rule)
        kinds = sorted({name for names in line_ups for name in names})
        game = new_game(len(line_ups) * args.meetings)  # all meetings of a line-up stand together
        players = script.Lineup([f"mix:{','.join(kinds)}"] * 4, game, seed, args.episodes, mix_for=1 << 40)
        kind = torch.tensor([[kinds.index(name) for name in names] for names in line_ups])
        players.kind = kind.repeat_interleave(args.meetings, 0) + players.first
        seat = torch.arange(4).repeat(len(met) * len(rules)).repeat_interleave(args.meetings)
        returns = play(game, players, seat, args.episodes).view(len(met), len(rules), -1, args.episodes).mean(2)
        for others, means in zip(met, returns.tolist()):
            answer[others] = dict(zip(rules, means))
    write(path, json.dumps(answer))
    return answer


def play(game, players, seat, episodes):
    """Plays one meeting in each game. -> what one seat of each [B] earns, by episode: [B, episodes]"""
    import torch

    rows, episode = torch.arange(game.num_envs), torch.zeros(game.num_envs, dtype=torch.int64)
    total = torch.zeros(game.num_envs, episodes + 1)
    while (episode < episodes).any():
        out = game.advance(players.act(game))
        total[rows, episode.clamp(max=episodes)] += out["reward"][rows, seat]
        episode = episode + out["over"]
        game.reset(out["over"])
        players.reset(out["over"])
    return total[:, :episodes]


def training(args, board, agent, seed):
    """The run that trains a player."""
    script, flags, _ = AGENTS[agent]
    return Run(f"{board}-{agent}-{seed}", f"{flags} {BOARDS[board]} --seed {seed} {args.flags}", script)


def met_by(args):
    """The line-ups of this table."""
    return ODD if args.odd else [others for others in LINE_UPS if not args.quick or others not in TRAINED]


def companions(args, board, others, seed):
    """Three others as --players takes them, trained ones being of the next seeds; and the runs that train them."""
    if others == "PPO PPO PPO":
        flags = f"--players ppo ppo ppo ppo {BOARDS[board]} --seed {seed + 1}"
        run = Run(f"{board}-ppo-selfplay-{seed + 1}", flags, PPO)
        path = os.path.join(args.folder, run.name, "checkpoint.pt")
        return " ".join(f"{path}:player_{number}" for number in (1, 2, 3)), [run]
    if others == "HOP HOP HOP":
        runs = [training(args, board, "hop", seed + number) for number in (1, 2, 3)]
        paths = [os.path.join(args.folder, run.name) for run in runs]
        return " ".join(f"{path}:player_{number}" for number, path in enumerate(paths, 1)), runs
    odd = os.path.join(HERE, "odd_players.py")
    return " ".join(f"{odd}:{name}" if name.istitle() else name for name in others.split()), []


def meeting(args, board, agent, seed, others):
    """The runs that lead to a trained player among three others, the last being their meeting; none where it
    cannot sit with them."""
    script, _, flags = AGENTS[agent]
    if others == "HOP HOP HOP" and script == PPO:
        return []
    me, trained = "hop" if script == HOP else "ppo", training(args, board, agent, seed)
    players, runs = companions(args, board, others, seed)
    flags = (f"--mode adapt --checkpoint {os.path.join(args.folder, trained.name)} --players {me} {players} "
             f"--meetings {args.meetings} --meeting-episodes {args.episodes} --seed {seed} "
             f"{BOARDS[board] if script == PPO else ''} {flags}")
    before = [trained, *runs]
    return [*before, Run(f"{trained.name}-meets-{others.replace(' ', '-')}", flags, script,
                         tuple(run.name for run in before))]


def exact(args, board, others):
    """The run of PPO among exactly these three: what it earns is the most one can hope for."""
    return Run(f"{board}-exact-{others.replace(' ', '-')}", f"--players ppo {companions(args, board, others, 0)[0]} "
               f"{BOARDS[board]} --total-timesteps 1000000", PPO)


def all_runs(args):
    """Every run that is needed, those that others need before them."""
    runs = {}
    for board in args.boards:
        wanted = []
        if args.odd or not args.quick:
            wanted = [exact(args, board, others) for others in met_by(args) if others not in TRAINED]
        for seed in args.seeds:
            for agent in args.only or AGENTS:
                for others in met_by(args):
                    wanted += meeting(args, board, agent, seed, others)
        runs |= {run.name: run for run in wanted}
    return list(runs.values())


def read(args):
    """All that is there. -> Table"""
    table = Table(args)
    for board in args.boards:
        table.references.setdefault(board, {})
        for others, rules in play_rules(args, board).items():
            for rule, returns in rules.items():
                table.add(board, rule, 0, others, returns)
            if result := results(args.folder, exact(args, board, others).name):
                table.add(board, "exact", 0, others, [result["evaluation"]["sampled"]["mean"]] * args.episodes)
        for seed in args.seeds:
            for agent in args.only or AGENTS:
                for others in met_by(args):
                    runs = meeting(args, board, agent, seed, others)
                    if runs and (result := results(args.folder, runs[-1].name)):
                        returns = [episode["return"] for episode in result["episodes"]]
                        table.add(board, agent, seed, others, returns)
    return table


def write_all(args):
    """references.json, adaptation.md and .csv, of all that is known."""
    table = read(args)
    write(table.path, json.dumps(table.references, indent=2))
    boards = [board for board in args.boards if board in table.references]
    agents = list(dict.fromkeys(key[1] for key in table.returns if key[1] not in ("random", "exact")))
    texts = []
    for title, others in (("all line-ups", None), *(() if args.odd else (("the poor ones", POOR),))):
        rows = []
        for agent in agents:
            for span, which in ((span, which) for span, which in SPANS.items() if which.stop <= args.episodes):
                cells = []
                for board in boards:
                    scores = table.scores(board, agent, which, others)
                    cells.append("" if not scores.size else f"{interval(scores, middle_mean)} "
                                 f"[{interval(scores, np.mean)}, {scores.mean(0).min():.2f}]")
                rows.append([agent, span, *cells])
        texts.append(f"Scores, {title}: interquartile mean over seeds and line-ups (95 %); in brackets the mean (95 %) and "
                     f"the worst line-up.\n\n{markdown(['player', 'episodes', *boards], rows)}")
    for board in boards:
        rows = []
        for others, known in table.references[board].items():
            cells = []
            for agent in agents:
                values = [table.returns[key][10:20].mean() for key in table.returns
                          if key[:2] == (board, agent) and key[3] == others]
                cells.append(f"{np.mean(values):.2f}" if values else "")
            half = int(10 >= args.episodes // 2)
            rows.append([others, f"{known['random'][half]:.2f}", f"{known['best'][half]:.2f} ({known['by'][half]})", *cells])
        texts.append(f"Returns on {board}, episodes 11 to 20, mean over seeds.\n\n"
                     + markdown(["line-up", "random", "best (who)", *agents], rows))
    keep("\n\n".join(texts), os.path.join(args.folder, named(args, "adaptation.md")))
    with open(os.path.join(args.folder, named(args, "adaptation.csv")), "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["board", "player", "seed", "others", "episode", "return", "score"])
        for key, returns in table.returns.items():
            for episode, (value, score) in enumerate(zip(returns, table.score(key)), 1):
                rows.writerow([*key, episode, f"{value:.4f}", f"{score:.4f}"])


def draw(table, board, path):
    """A picture of the return by episode in each line-up, one line for each trained player."""
    import matplotlib  # here, for only pictures need it
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    met = list(table.references[board])
    figure, axes = plt.subplots(3, 5, figsize=(18, 9), squeeze=False)
    for axis, others in zip(axes.flat, met):
        known = table.references[board][others]
        for value, style in ((known["random"], ":"), (known["best"], "--")):
            axis.axhline(value[-1], color="grey", linestyle=style, linewidth=1)
        for agent in AGENTS:
            lines = [table.returns[key] for key in table.returns if key[:2] == (board, agent) and key[3] == others]
            if lines:
                axis.plot(range(1, len(lines[0]) + 1), np.mean(lines, 0), label=agent, linewidth=1.2)
        axis.set_title(others, fontsize=9)
        axis.set_ylim(bottom=min(0.0, *known["random"]))
    for axis in axes.flat[len(met):]:
        axis.set_visible(False)
    if axes[0, 0].get_legend_handles_labels()[0]:
        axes[0, 0].legend(fontsize=8)
    figure.suptitle(f"{board}: return by episode of a meeting (dashed: the most anybody earned in the second half, dotted: a random player)")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(args):
    if (any_unknown(args.only, AGENTS) or any_unknown(args.boards, BOARDS, "--boards")
            or not check_workers(args.workers)):
        return 2
    args = dataclasses.replace(args, seeds=args.seeds or ((1,) if args.quick else (1, 2, 3)))
    if args.quick:
        args = dataclasses.replace(args, meetings=max(args.meetings // 4, 1), episodes=20,
                                   only=args.only or ("hop",), folder=f"{args.folder}-quick")
    os.makedirs(args.folder, exist_ok=True)
    code = work(args.folder, all_runs(args), args.workers, lambda: write_all(args))
    table = read(args)
    for board in (board for board in args.boards if table.references[board]):
        draw(table, board, os.path.join(args.folder, named(args, f"{board}.png")))
    return code


if __name__ == "__main__":
    run_command(main, Args, __doc__)
