"""benchmark/compare.py: what it says of runs whose figures are known, and what it refuses."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmark"))

import compare  # noqa: E402


def make_run(folder, script="hopplus_selfplay.py", seed=1, mean=2.9, first_at=(100, 5.0), **flags):
    """A folder like that of a finished run of four learners, with a return that rises in a straight line."""
    learner = compare.LEARNERS[script]
    config = {"script": script, "mode": "train", "seed": seed, "run_name": folder.name, "height": 4,
              "players": [learner] * 4, "search": "mcts", **flags}
    evaluation = {"mean": mean, "ci95": {"mean": 0.25}}
    reached = first_at and {"true_steps": first_at[0], "seconds": first_at[1]}
    results = {"true_steps": 1000, "seconds": 60.0, "thresholds": {"2.85": reached}}
    if learner == "hop":
        results["evaluation"] = {"searched": evaluation, "policy": {**evaluation, "mean": mean - 1}}
        results["curve"] = [{"true_steps": 10, "return": None},
                            *({"true_steps": at, "return": at * mean / 1000} for at in (100, 1000))]
    else:
        results["evaluation"] = {"sampled": evaluation, "greedy": {**evaluation, "mean": mean + 1}}
        write_events(folder, mean)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return str(folder)


def write_events(folder, mean):
    """TensorBoard's curves of four learners, of which two earn less than the mean, two more."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for at in (100, 1000):
            for player, more in enumerate((-0.5, -0.5, 0.5, 0.5), 1):
                writer.add_scalar(f"charts/episodic_return/player_{player}", at * mean / 1000 + more, at)


def run(capsys, *argv):
    """-> exit code, lines printed, lines of errors"""
    code = compare.main(compare.tyro.cli(compare.Args, args=[str(word) for word in argv]))
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err.splitlines()


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_seeds_of_one_configuration_are_one_row(tmp_path, capsys):
    runs = [make_run(tmp_path / f"a{seed}", seed=seed, mean=2.8 + 0.1 * seed, first_at=(100 * seed, seed))
            for seed in (1, 2, 3)]
    code, lines, _ = run(capsys, *runs)
    assert code == 0 and len(cells(lines[0])) <= 8
    label, seeds, played, alone, steps, to_threshold, seconds_to, seconds = cells(lines[2])
    assert (label, seeds, steps, seconds) == ("hopplus", "3", "1,000", "60")
    assert played == f"3.000 ± {4.303 * 0.1 / 3 ** 0.5:.3f}" and alone.startswith("2.000 ±")
    assert (to_threshold, seconds_to) == ("200 (100 to 300)", "2 (1 to 3)")
    assert not cells(lines[3])[1:]
    assert (tmp_path / "compare.png").stat().st_size > 5000


def test_groups_are_named_by_what_differs(tmp_path, capsys):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", height=8, first_at=None),
            make_run(tmp_path / "c", script="ppo_single_player.py")]
    code, lines, _ = run(capsys, *runs, "--out", tmp_path / "picture.png")
    assert code == 0 and (tmp_path / "picture.png").is_file() and not (tmp_path / "compare.png").exists()
    small, large, ppo = map(cells, lines[2:5])
    assert (small[0], large[0]) == ("hopplus --height 4", "hopplus --height 8") and ppo[0] == "ppo --height 4"
    assert large[5:7] == ["never", "never"]
    assert small[2] == "2.900 ± 0.250", "of one seed, the interval of its episodes"
    assert (small[3], ppo[3]) == ("1.900 ± 0.250", "3.900 ± 0.250"), "the policy alone, or greedy"


def test_a_run_without_a_curve_is_named(tmp_path, capsys):
    with_curve, without = make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=2)
    results = json.loads((tmp_path / "b" / "results.json").read_text())
    (tmp_path / "b" / "results.json").write_text(json.dumps({**results, "curve": []}))
    code, lines, _ = run(capsys, with_curve, without)
    assert code == 0 and [line for line in lines if line.endswith(without) and "Without a curve" in line]


def test_without_search_the_policy_alone_is_what_plays(tmp_path):
    of_one = compare.read_run(make_run(tmp_path / "a", search="none"))
    row = compare.make_table([[of_one]], ["a"], 2.85)[1]
    assert row[2] == row[3] == "1.900 ± 0.250"


@pytest.mark.parametrize("script", compare.LEARNERS)
def test_curves_are_those_of_the_runs(tmp_path, script):
    steps, returns = compare.read_curve(compare.read_run(make_run(tmp_path / "a", script=script, mean=2.0)))
    assert steps.tolist() == [100, 1000] and np.allclose(returns, [0.2, 2.0])


def test_the_average_of_curves_is_over_their_common_steps():
    one = np.array([[0, 100, 200], [0.0, 1.0, 2.0]])
    other = np.array([[100, 300], [3.0, 3.0]])
    steps, mean, low, high = compare.average([one, other], points=3)
    assert steps.tolist() == [100, 150, 200] and mean.tolist() == [2.0, 2.25, 2.5]
    assert low.tolist() == [1.0, 1.5, 2.0] and high.tolist() == [3.0, 3.0, 3.0]


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path, capsys):
    good, same = make_run(tmp_path / "good"), make_run(tmp_path / "same")
    met = make_run(tmp_path / "met", mode="adapt")
    world = make_run(tmp_path / "world")
    (tmp_path / "world" / "config.json").write_text(json.dumps({"script": "train_world_model.py"}))
    torn = make_run(tmp_path / "torn")
    (tmp_path / "torn" / "results.json").write_text("{")
    unfinished = make_run(tmp_path / "unfinished")
    (tmp_path / "unfinished" / "results.json").unlink()
    for argv, told in (([], "name the folder"), ([tmp_path / "none"], "no config.json"),
                       ([met], "--mode adapt"), ([world], "train_world_model.py"), ([torn], "cannot be read"),
                       ([unfinished], "no results.json"), ([good, same], "one run twice"),
                       ([good, "--threshold", "7"], "--threshold 7"),
                       ([good, "--out", tmp_path / "none" / "a.png"], "--out")):
        code, lines, errors = run(capsys, *argv)
        assert code == 2 and not lines and len(errors) == 1 and told in errors[0], argv
