"""ppo_single_player.py: its formulas against slow ones, its symmetry, its exact resuming, and that it learns."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest
import torch

import ppo_single_player as script

HERE = os.path.dirname(os.path.abspath(__file__))
SMALL = dict(total_timesteps=600, num_envs=8, num_steps=16, hidden_size=16, eval_episodes=40, save_every=1e9,
             picture_every=1e9)


def flags(tmp_path, **changes):
    return script.Args(**{**SMALL, "runs_dir": str(tmp_path), "run_name": "run", **changes})


def weights(folder):
    return torch.load(os.path.join(folder, "checkpoint.pt"), weights_only=True)["agent"]


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


# -------------------------------------------------------------------------------------- formulas


def slow_gae(rewards, values, ends, present, gamma, lam, trace):
    """Advantages by the definition: the sum of discounted errors up to the end of the player's game, for one row."""
    steps = len(rewards)
    delta = [rewards[t] + (0 if ends[t] else gamma * values[t + 1]) - values[t] for t in range(steps)]
    advantages = []
    for t in range(steps):
        total, factor, k = 0.0, 1.0, t
        while present[t]:
            total += factor * delta[k]
            if ends[k] or k + 1 == steps or not present[k + 1]:
                break
            k += 1
            factor *= gamma * lam * trace[k]
        advantages.append(total)
    return advantages


def random_games(generator, steps, rows):
    """Random rewards and values of players that leave for a while: ends, then absence, then a new game."""
    ends = torch.rand(steps, rows, generator=generator) < 0.15
    present = torch.ones(steps, rows, dtype=torch.bool)
    for row in range(rows):
        away = 0
        for t in range(steps):
            present[t, row] = away == 0
            if away:
                ends[t, row] = False
                away -= 1
            elif ends[t, row]:
                away = int(torch.randint(4, (), generator=generator))
    return torch.randn(steps, rows, generator=generator), torch.randn(steps + 1, rows, generator=generator), ends, present


@pytest.mark.parametrize("stale", [False, True])
def test_gae_equals_the_slow_sum(stale):
    generator = torch.Generator().manual_seed(3)
    rewards, values, ends, present = random_games(generator, 40, 30)
    trace = torch.rand(40, 30, generator=generator) if stale else torch.ones(40, 30)
    advantages, returns = script.compute_gae(rewards, values, ends, present, 0.97, 0.9, trace if stale else None)
    for row in range(30):
        slow = slow_gae(*(x[:, row].tolist() for x in (rewards, values, ends, present)), 0.97, 0.9, trace[:, row].tolist())
        assert advantages[:, row].tolist() == pytest.approx(slow, abs=1e-5)
    assert torch.allclose(returns, values[:-1] + trace * advantages)
    assert not advantages[~present].any() and (~present).any()


def test_what_happens_while_absent_changes_no_advantage():
    generator = torch.Generator().manual_seed(4)
    rewards, values, ends, present = random_games(generator, 40, 30)
    changed_rewards = torch.where(present, rewards, 7.0)
    changed_values = values.clone()
    changed_values[:-1] = torch.where(present, values[:-1], -9.0)
    one, _ = script.compute_gae(rewards, values, ends, present, 0.97, 0.9)
    two, _ = script.compute_gae(changed_rewards, changed_values, ends, present, 0.97, 0.9)
    assert torch.equal(one, two)


def slow_ppo_loss(log_probs, value, batch, args, ent_coef, learner):
    """The loss of one learner, a sample at a time."""
    rows = [row for row in range(value.shape[1]) if batch["weight"][learner, row]]
    advantages = [batch["advantages"][learner, row].item() for row in rows]
    mean = sum(advantages) / len(rows)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in advantages) / len(rows))
    policy_loss = value_loss = entropy = 0.0
    for row, advantage in zip(rows, advantages):
        advantage = (advantage - mean) / (deviation + 1e-8) if args.norm_adv else advantage
        pick = lambda key: batch[key][learner, row].item()
        logprob = log_probs[learner, row, int(pick("actions"))].item()
        ratio = math.exp(logprob - pick("logprobs"))
        clipped = min(max(ratio, 1 - args.clip_coef), 1 + args.clip_coef)
        policy_loss -= pick("trace") * min(advantage * ratio, advantage * clipped)
        new = value[learner, row].item()
        error = (new - pick("returns")) ** 2
        if args.clip_vloss:
            near = pick("values") + min(max(new - pick("values"), -args.clip_coef), args.clip_coef)
            error = max(error, (near - pick("returns")) ** 2)
        value_loss += 0.5 * error
        entropy -= sum(p * math.log(p) for p in log_probs[learner, row].exp().tolist())
    return (policy_loss - ent_coef * entropy + args.vf_coef * value_loss) / len(rows)


@pytest.mark.parametrize("changes", [{}, {"clip_vloss": True}, {"norm_adv": False}])
def test_ppo_loss_equals_the_slow_one_and_ignores_the_absent(changes):
    args = script.Args(**changes)
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    log_probs, value = draw(3, 50, 7).log_softmax(-1), draw(3, 50)
    batch = {"actions": torch.randint(7, (3, 50), generator=generator), "logprobs": draw(3, 50) * 0.3 - 2,
             "values": draw(3, 50), "advantages": draw(3, 50), "returns": draw(3, 50),
             "trace": torch.rand(3, 50, generator=generator), "weight": (draw(3, 50) > 0).float()}
    loss, _ = script.ppo_loss(log_probs, value, batch, args, 0.01)
    for learner in range(3):
        assert loss[learner].item() == pytest.approx(slow_ppo_loss(log_probs, value, batch, args, 0.01, learner), abs=1e-5)
    absent = batch["weight"] == 0
    changed = {key: torch.where(absent, x * 3, x) if x.is_floating_point() and
               key != "weight" else x for key, x in batch.items()}
    assert torch.allclose(script.ppo_loss(log_probs, value, changed, args, 0.01)[0], loss, atol=1e-6)


# --------------------------------------------------------------------------------------- symmetry


def test_features_turn_with_the_players_and_show_the_nearest_cells():
    game = script.BatchedStagHunt(30, height=5, width=6, max_blocks=1, seed=2)
    for _ in range(5):
        game.step(game.random_actions())
    x = script.features(game.observe())
    state = game.get_state()
    turned = script.BatchedStagHunt(30, height=5, width=6, max_blocks=1)
    turned.set_state({**{key: state[key] for key in ("board", "clock", "deadline")},
                      "cell": state["cell"].roll(-1, 1), "previous": state["previous"].roll(-1, 1)})
    assert torch.equal(script.features(turned.observe()), x.roll(-1, 0))  # who is asked first changes nothing else
    side, planes = 2 * script.SIGHT + 1, 6
    window = x[..., :side * planes * side].unflatten(-1, (side, planes, side))
    observed = game.observe()["observation"]
    for env in range(30):
        for player in range(4):
            own = observed[env, player, ..., 0].nonzero()
            if not len(own):
                assert not window[player, env].any()
                continue
            row, column = own[0].tolist()
            expected = torch.zeros(side, planes, side, dtype=torch.int64)
            for r, c, plane in observed[env, player, ..., 1:].nonzero().tolist():
                place = [max(0, min(side - 1, offset + script.SIGHT)) for offset in (r - row, c - column)]
                expected[place[0], plane, place[1]] += 1
            assert torch.equal(window[player, env].long(), expected)


def test_relabelling_the_seats_relabels_learning(tmp_path, monkeypatch):
    """A learner in seat 3 ends with the parameters that it would have in seat 1, all draws relabelled with it."""
    turn = [2, 3, 0, 1]  # the player that sat in seat s sits in seat turn[s]
    boards, sample = script.BatchedStagHunt.draw_boards, script.sample_actions

    def turned_boards(self, n):
        cell, board = boards(self, n)
        return cell[turn], board

    def turned_sample(probabilities, generator):
        if probabilities.dim() == 3 and probabilities.shape[1] == 4:  # the other players', [B, N, 7]
            return sample(probabilities[:, turn], generator)[:, turn]
        return sample(probabilities, generator)

    script.main(flags(tmp_path, players=("ppo", "ns", "noisy-nh", "random"), run_name="seat1", eval_episodes=0))
    monkeypatch.setattr(script.BatchedStagHunt, "draw_boards", turned_boards)
    monkeypatch.setattr(script, "sample_actions", turned_sample)
    script.main(flags(tmp_path, players=("noisy-nh", "random", "ppo", "ns"), run_name="seat3", eval_episodes=0))
    one, three = weights(tmp_path / "seat1"), weights(tmp_path / "seat3")
    for key in one:
        assert torch.allclose(one[key], three[key], atol=1e-6), key
    assert not torch.allclose(one["w1"], script.Agent(1, one["w1"].shape[1], 16, 35, 1).w1)  # something was learned


def test_each_learner_learns_from_its_own_trajectory_alone(tmp_path):
    """The data that reaches learner k is what seat k saw, did and earned."""
    args = flags(tmp_path, players=("ppo", "ns", "ppo", "ppo"))
    table = script.Table(args, 8, 1)
    seen, done, earned = [], [], []
    play = table.play

    def watch(actions, restart=True):
        seen.append(script.features(table.observation)[[0, 2, 3]])
        done.append(actions.T[[0, 2, 3]])
        out = play(actions, restart)
        earned.append(out["reward"].T[[0, 2, 3]])
        return out

    table.play = watch
    data, _ = script.rollout(table, script.Returns(8, 4, "cpu"), 16, torch.Generator().manual_seed(1), 0.5)
    assert torch.equal(data["x"], torch.stack(seen)) and torch.equal(data["actions"], torch.stack(done))
    assert torch.equal(data["rewards"], torch.stack(earned) * 0.5) and data["rewards"].any()


# ------------------------------------------------------------------------------- runs from end to end


@pytest.mark.parametrize("changes", [
    {"players": ("ppo", "ns", "ns", "ns")},
    {"players": ("ns", "ppo", "mix:nh,random,patient-9", "ppo"), "share_parameters": True, "hares": 2},
    {"players": ("ppo", "ppo"), "buffer": "episodes", "num_steps": script.Args.num_steps, "buffer_size": 300, "height": 3, "width": 5},
    {"players": ("ppo",) * 4, "target_kl": 0.001, "clip_vloss": True, "max_blocks": 1, "height": 6, "width": 6, "prosocial": True},
])
def test_a_short_run_leaves_its_results(tmp_path, changes, capsys):
    args = flags(tmp_path, **changes)
    assert script.main(args) == 0
    folder = tmp_path / "run"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["timesteps"] >= 600 and results["seconds"] > 0 and results["sps"] > 0
    assert set(results["thresholds"]) == {"2.5", "2.7", "2.8", "2.85"}
    for mode in ("sampled", "greedy"):
        evaluation = results["evaluation"][mode]
        learners = [f"player_{seat + 1}" for seat, name in enumerate(args.players) if name == "ppo"]
        assert evaluation["episodes"] == 40
        assert evaluation["mean"] == pytest.approx(sum(evaluation[name] for name in learners) / len(learners))
        assert set(evaluation["ci95"]) == {*(f"player_{seat + 1}" for seat in range(len(args.players))), "mean"}
    assert {"config.json", "checkpoint.pt", "results.json", "pictures"} <= set(os.listdir(folder))
    assert any(name.startswith("events.out.tfevents") for name in os.listdir(folder))
    assert any(name.endswith(".gif") for name in os.listdir(folder / "pictures"))
    assert "mean return per episode" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        script.main(flags(tmp_path, run_name=name, seed=seed, eval_episodes=0))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.parametrize("changes", [{"players": ("ppo", "mix:ns,nh", "ppo", "random")},
                                     {"players": ("ppo", "ns"), "buffer": "episodes", "num_steps": script.Args.num_steps,
                                      "total_timesteps": 1200}])
def test_a_stopped_run_resumes_to_the_same_weights(tmp_path, monkeypatch, changes):
    script.main(flags(tmp_path, run_name="whole", eval_episodes=0, **changes))
    update, calls = script.update, []

    def stop_at_the_third(*arguments):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return update(*arguments)

    monkeypatch.setattr(script, "update", stop_at_the_third)
    assert script.main(flags(tmp_path, run_name="halves", eval_episodes=0, **changes)) == 130
    folder = str(tmp_path / "halves")
    assert not os.path.exists(os.path.join(folder, "results.json"))
    stopped = torch.load(os.path.join(folder, "checkpoint.pt"), weights_only=True)["timesteps"]
    assert stopped < changes.get("total_timesteps", 600)
    assert script.main(script.Args(resume=folder)) == 0
    assert same(weights(folder), weights(tmp_path / "whole"))
    results = [json.loads((tmp_path / name / "results.json").read_text(encoding="utf-8")) for name in ("whole", "halves")]
    assert results[0]["timesteps"] == results[1]["timesteps"]


def test_a_trained_player_takes_a_seat_and_does_not_learn(tmp_path):
    script.main(flags(tmp_path, run_name="first", players=("ppo", "ppo", "ns", "ns"), eval_episodes=0))
    name = f"{tmp_path / 'first' / 'checkpoint.pt'}:player_2"
    args = flags(tmp_path, players=(name, "ns", "ppo", "ns"))
    table = script.Table(args, 8, 1)
    assert torch.equal(table.trained.w1[0], weights(tmp_path / "first")["w1"][1])
    assert script.main(args) == 0
    assert torch.equal(table.trained.w1[0], weights(tmp_path / "first")["w1"][1])


def test_self_play_learns_to_hunt_together(tmp_path):
    """Well above 1.0, which everybody gets from hares alone, in some ten seconds."""
    script.main(script.Args(players=("ppo",) * 4, total_timesteps=200_000, num_envs=128, update_epochs=4, eval_episodes=2000,
                            runs_dir=str(tmp_path), run_name="run"))
    evaluation = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))["evaluation"]["sampled"]
    assert evaluation["mean"] > 2.0


# ------------------------------------------------------------------------------------ refused flags


@pytest.mark.parametrize("line, words", [
    ("--players ns ns ns ns", "nobody learns"),
    ("--players ppo ns ns lion", "'lion'"),
    ("--share-parameters", "--share-parameters needs two"),
    ("--buffer-size 5000", "--buffer-size 5000 means nothing"),
    ("--buffer episodes --num-steps 9", "--num-steps 9 means nothing"),
    ("--buffer episodes --buffer-size 20", "--buffer-size 20 is too small"),
    ("--num-envs 1 --num-steps 2 --num-minibatches 3", "--num-minibatches 3"),
    ("--height 2 --width 2", "--height 2"),
    ("--gamma 1.5", "--gamma 1.5"),
    ("--device nonsense", "--device nonsense"),
    ("--resume runs/there-is-none", "--resume runs/there-is-none"),
    ("--run-name a/b", "--run-name 'a/b'"),
    ("--players ppo ns ns runs/none/checkpoint.pt:player_1", "there is no file"),
    ("--players ppo ns ns README.md:Nobody", "README.md"),
    ("--threads 0", "--threads 0"),
])
def test_refused_flags_are_one_line_and_leave_nothing(tmp_path, line, words):
    command = [sys.executable, os.path.join(HERE, "..", "ppo_single_player.py"), "--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run(command + line.split(), capture_output=True, text=True, cwd=os.path.join(HERE, ".."))
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_existing_run_is_not_written_into(tmp_path):
    script.main(flags(tmp_path, eval_episodes=0))
    before = weights(tmp_path / "run")
    with pytest.raises(script.Refused, match="exists already"):
        script.main(flags(tmp_path, eval_episodes=0, seed=2))
    assert same(before, weights(tmp_path / "run"))
    with pytest.raises(script.Refused, match="--gamma 0.5 differs from 0.99"):
        script.main(script.Args(resume=str(tmp_path / "run"), gamma=0.5))
