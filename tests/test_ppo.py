"""ppo_single_player.py: its formulas against slow ones, its symmetry, exact resuming, and that it learns."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest
import torch

import hopplus_selfplay
import ppo_single_player as script

HERE = os.path.dirname(os.path.abspath(__file__))
SMALL = dict(total_timesteps=600, num_envs=8, num_steps=16, hidden_size=16, eval_episodes=40, save_every=1e9,
             picture_every=1e9)


def flags(tmp_path, **changes):
    return script.Args(**{**SMALL, "runs_dir": str(tmp_path), "run_name": "run", **changes})


def weights(folder):
    return torch.load(os.path.join(folder, "checkpoint.pt"), weights_only=True)["run"]["agent"]


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


# -------------------------------------------------------------------------------------- formulas


def slow_gae(rewards, values, ends, present, gamma, lam, trace):
    """Advantages by the definition: the sum of discounted errors up to the end of the player's game; one row."""
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
    rewards = torch.randn(steps, rows, generator=generator)
    return rewards, torch.randn(steps + 1, rows, generator=generator), ends, present


@pytest.mark.parametrize("stale", [False, True])
def test_gae_equals_the_slow_sum(stale):
    generator = torch.Generator().manual_seed(3)
    rewards, values, ends, present = random_games(generator, 40, 30)
    trace = torch.rand(40, 30, generator=generator) if stale else torch.ones(40, 30)
    data = rewards, values, ends, present
    advantages, returns = script.traced_gae(*data, 0.97, 0.9, trace)
    for row in range(30):
        slow = slow_gae(*(x[:, row].tolist() for x in data), 0.97, 0.9, trace[:, row].tolist())
        assert advantages[:, row].tolist() == pytest.approx(slow, abs=1e-5)
    assert torch.allclose(returns, values[:-1] + trace * advantages)
    assert not advantages[~present].any() and (~present).any()
    if not stale:  # HOP+ has no others
        assert all(map(torch.allclose, hopplus_selfplay.compute_gae(*data, 0.97, 0.9), (advantages, returns)))


def test_what_happens_while_absent_changes_no_advantage():
    generator = torch.Generator().manual_seed(4)
    rewards, values, ends, present = random_games(generator, 40, 30)
    changed_rewards = torch.where(present, rewards, 7.0)
    changed_values = values.clone()
    changed_values[:-1] = torch.where(present, values[:-1], -9.0)
    trace = torch.ones_like(rewards)
    one, _ = script.traced_gae(rewards, values, ends, present, 0.97, 0.9, trace)
    two, _ = script.traced_gae(changed_rewards, changed_values, ends, present, 0.97, 0.9, trace)
    assert torch.equal(one, two)


def slow_ppo_loss(log_probs, value, batch, args, ent_coef, learner):
    """The loss of one learner, a sample at a time."""
    rows = [row for row in range(value.shape[1]) if batch["weight"][learner, row]]
    advantages = [batch["advantages"][learner, row].item() for row in rows]
    mean = sum(advantages) / len(rows)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in advantages) / len(rows))
    policy_loss = value_loss = entropy = 0.0
    for row, advantage in zip(rows, advantages):
        advantage = (advantage - mean) / (deviation + 1e-8)
        pick = lambda key: batch[key][learner, row].item()
        logprob = log_probs[learner, row, int(pick("actions"))].item()
        ratio = math.exp(logprob - pick("logprobs"))
        clipped = min(max(ratio, 1 - args.clip_coef), 1 + args.clip_coef)
        policy_loss -= pick("trace") * min(advantage * ratio, advantage * clipped)
        value_loss += 0.5 * (value[learner, row].item() - pick("returns")) ** 2
        entropy -= sum(p * math.log(p) for p in log_probs[learner, row].exp().tolist())
    return (policy_loss - ent_coef * entropy + args.vf_coef * value_loss) / len(rows)


def test_ppo_loss_equals_the_slow_one_and_ignores_the_absent():
    args = script.Args()
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    log_probs, value = draw(3, 50, 7).log_softmax(-1), draw(3, 50)
    batch = {"actions": torch.randint(7, (3, 50), generator=generator), "logprobs": draw(3, 50) * 0.3 - 2,
             "advantages": draw(3, 50), "returns": draw(3, 50),
             "trace": torch.rand(3, 50, generator=generator), "weight": (draw(3, 50) > 0).float()}
    given, weight = batch, script.share_out(batch["weight"][None])[0]
    advantages = script.standardise(batch["advantages"][None], weight[None])[0]
    batch = {**given, "advantages": advantages, "weight": weight, "value_weight": weight}
    loss, _ = script.ppo_loss(log_probs, value, batch, args, 0.01)
    for learner in range(3):
        slow = slow_ppo_loss(log_probs, value, given, args, 0.01, learner)
        assert loss[learner].item() == pytest.approx(slow, abs=1e-5)
    absent = batch["weight"] == 0
    changed = {key: torch.where(absent, x * 3, x) if x.is_floating_point() and
               "weight" not in key else x for key, x in batch.items()}
    assert torch.allclose(script.ppo_loss(log_probs, value, changed, args, 0.01)[0], loss, atol=1e-6)


# --------------------------------------------------------------------------------------- symmetry


def features_of(views, x):
    """The features that the facts of views [..., K] stand for, each a count or a share: [..., F]."""
    counts = torch.zeros(*x.shape[:-1], views.num_facts)
    counts.scatter_add_(-1, x.long(), torch.ones_like(x, dtype=counts.dtype))
    return torch.cat([counts[..., :views.nothing], counts[..., views.nothing:] @ views.meaning], -1)


def test_views_turn_with_the_players_and_show_the_nearest_cells():
    game = script.BatchedStagHunt(30, height=5, width=6, max_blocks=1, hares=2, seed=2)
    players = script.Lineup(["random", "nh", "random", "random"], game)
    for _ in range(5):
        game.advance(players.act(game))
    views = script.Views(5, 6, 4, 35)
    x, state = views.look(game.state()), game.state()
    assert x.shape[:2] == (4, 30) and x.dtype == torch.int16
    turned = {name: tensor.roll(-1, 0) if name in ("cell", "previous") else tensor
              for name, tensor in state.items()}
    assert torch.equal(views.look(turned), x.roll(-1, 0))  # who is asked first changes nothing else
    observed = game.observe()
    assert torch.equal(views.mask(x), observed["action_mask"].transpose(0, 1))
    side, planes = 2 * script.SIGHT + 1, 6
    features = features_of(views, x)
    window = features[..., :side * planes * side].unflatten(-1, (side, planes, side))
    previous = features[..., side * planes * side:][..., :4 * 7].unflatten(-1, (4, 7))
    assert torch.equal(previous.argmax(-1).transpose(0, 1), observed["actions"].long())
    assert torch.allclose(features[..., -2] * 35, observed["step"].float())
    assert torch.allclose(features[..., -1] * 35, observed["steps_left"].float())
    gone = 0
    for env in range(30):
        for player in range(4):
            own = observed["observation"][env, player, ..., 0].nonzero()
            if not len(own):
                gone += 1
                assert not window[player, env].any()
                continue
            row, column = own[0].tolist()
            expected = torch.zeros(side, planes, side)
            for r, c, plane in observed["observation"][env, player, ..., 1:].nonzero().tolist():
                place = [max(0, min(side - 1, offset + script.SIGHT)) for offset in (r - row, c - column)]
                expected[place[0], plane, place[1]] += 1
            assert torch.equal(window[player, env], expected)
    assert gone


def test_a_first_layer_is_the_product_with_the_features():
    game = script.BatchedStagHunt(200, seed=3)
    views = script.Views(4, 4, 4, 35)
    x = views.look(game.state())
    layer = script.FirstLayer(4, views, 8, seed=1)
    torch.nn.init.normal_(layer.bias)
    dense = torch.baddbmm(layer.bias, features_of(views, x), layer.weight)
    assert torch.allclose(layer(x), dense, atol=1e-5)
    weight = torch.randn(4, 200, 8)
    one = torch.autograd.grad((layer(x) * weight).sum(), layer.parameters())
    two = torch.autograd.grad((dense * weight).sum(), layer.parameters())
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(one, two))


@pytest.mark.parametrize("changes", [{}, {"memory": "gru", "meeting_episodes": 3, "prize_floor": 0.5}])
def test_relabelling_the_seats_relabels_learning(tmp_path, monkeypatch, changes):
    """A learner in seat 3 ends with the parameters that it would have in seat 1, all draws relabelled too."""
    turn = [2, 3, 0, 1]  # the player that sat in seat s sits in seat turn[s]
    boards, sample = script.BatchedStagHunt.draw_boards, script.sample_actions

    def turned_boards(self, n):
        cell, board = boards(self, n)
        return cell[turn], board

    def turned_sample(probabilities, generator):
        if probabilities.dim() == 3 and probabilities.shape[1] == 4:  # the other players', [B, N, 7]
            return sample(probabilities[:, turn], generator)[:, turn]
        return sample(probabilities, generator)

    first, third = ("ppo", "ns", "noisy-nh", "random"), ("noisy-nh", "random", "ppo", "ns")
    script.main(flags(tmp_path, players=first, run_name="seat1", eval_episodes=0, **changes))
    monkeypatch.setattr(script.BatchedStagHunt, "draw_boards", turned_boards)
    monkeypatch.setattr(script, "sample_actions", turned_sample)
    script.main(flags(tmp_path, players=third, run_name="seat3", eval_episodes=0, **changes))
    one, three = weights(tmp_path / "seat1"), weights(tmp_path / "seat3")
    for key in one:
        assert torch.allclose(one[key], three[key], atol=1e-6), key
    untrained = script.Agent(1, script.Views(4, 4, 4, 35), 16, 1).view.weight
    assert not torch.allclose(one["view.weight"], untrained)  # something was learned
    assert changes == {} or not torch.allclose(one["recall.bias"], torch.zeros(16))


def test_each_learner_learns_from_its_own_trajectory_alone(tmp_path):
    """The data that reaches learner k is what seat k saw, did and earned."""
    args = flags(tmp_path, players=("ppo", "ns", "ppo", "ppo"), num_steps=30)
    table = script.Table(args, 8, 1)
    seen, done, earned = [], [], []
    play = table.play

    def watch(actions, restart=True):
        seen.append(table.views.look(table.game.state())[[0, 2, 3]])
        done.append(actions.T[[0, 2, 3]])
        out = play(actions, restart)
        earned.append(out["reward"].T[[0, 2, 3]])
        return out

    table.play = watch
    data, _ = script.rollout(args, table, script.Returns(8, 4, "cpu"))
    assert torch.equal(data["x"], torch.stack(seen)) and torch.equal(data["actions"], torch.stack(done))
    assert torch.equal(data["rewards"], torch.stack(earned) * args.reward_scale) and data["rewards"].any()


def test_fewer_samples_than_minibatches_are_cut_into_as_many_none_of_them_empty():
    weight = torch.zeros(2, 1, 6)
    weight[0, 0, 2] = weight[1, 0, 3] = 0.5
    data = {"weight": weight, "x": torch.arange(12.0).view(2, 1, 6)}
    cut = list(script.cut_samples(data, 4, torch.Generator().manual_seed(0)))
    assert len(cut) == 4 and all(part["x"].numel() for part in cut)
    together = {key: torch.cat([part[key] for part in cut], 1) for key in data}
    assert sorted(together["x"][together["weight"] > 0].tolist()) == [2.0, 9.0]


# ----------------------------------------------------------------------------------------- memory


REMEMBERS = dict(memory="gru", meeting_episodes=3, players=("ppo", "nh", "mix:ns,nh,random", "ppo"), final_time=9)


def test_memory_outlasts_episodes_but_not_meetings_and_the_absent_see_nothing(tmp_path):
    table = script.Table(flags(tmp_path, **REMEMBERS), 20, 1)
    times = {"an episode ends": 0, "a meeting ends": 0, "away": 0}
    with torch.no_grad():
        for _ in range(120):
            before, told = table.memory, table.told
            here = table.learner_rows((table.game.cell < table.game.cells).T)  # [L, B]
            actions, _ = table.act()
            after, kinds, episode = table.memory, table.lineup.kind, table.lineup.episode
            out = table.play(actions)
            parted, over = out["parted"], out["over"] & ~out["parted"]
            assert torch.equal(before[~here], after[~here])
            assert not (before == after).all(-1)[here].any()
            assert torch.equal(table.memory[:, ~parted], after[:, ~parted])
            assert not table.memory[:, parted].any() and not table.told[:, parted].any()
            assert (table.told[:, over, -1] == 1).all()
            assert torch.equal(table.told[..., -1][~here & ~out["over"]], told[..., -1][~here & ~out["over"]])
            assert torch.equal(parted, out["over"] & (episode % 3 == 2))
            assert torch.equal(kinds[~parted], table.lineup.kind[~parted])  # mixes are drawn at meetings
            reward = out["reward"].T[[0, 3]] * table.reward_scale
            goes_on = here & ~parted
            assert torch.equal(table.told[..., -2][goes_on], reward[goes_on])
            for key, which in zip(times, (over, parted, ~here)):
                times[key] += int(which.sum())
    assert min(times.values()) > 20, times


def test_a_stretch_answers_as_it_did_step_by_step(tmp_path):
    """What is stored of a rollout is all that the networks need: the same policies and values come out."""
    args = flags(tmp_path, **REMEMBERS, num_steps=40)
    table = script.Table(args, 20, 1)
    for _ in range(2):  # the second rollout begins in the middle of meetings
        data, _ = script.rollout(args, table, script.Returns(20, 4, "cpu"))
    assert data["memory"].any() and data["parted"].any()
    steps = {key: data[key] for key in ("x", "told", "awake", "parted", "actions", "logprobs")}
    steps["values"] = data["values"][:-1]
    for batch in script.cut_sequences(steps, data["memory"], 3, torch.Generator().manual_seed(1)):
        log_probs, value, batch = script.answer(table.agent, batch)
        assert torch.allclose(value, batch["values"], atol=1e-5)
        logprobs = log_probs.gather(-1, batch["actions"][..., None]).squeeze(-1)
        assert torch.allclose(logprobs, batch["logprobs"], atol=1e-5)


def test_gradients_reach_back_to_the_beginning_of_the_meeting_and_no_further():
    views = script.Views(4, 4, 4, 35)
    x = views.look(script.BatchedStagHunt(6, seed=3).state())[:1, :, None].repeat(1, 1, 5, 1)  # [L, M, T, K]
    agent, awake = script.RecurrentAgent(1, views, 16, 1), torch.ones(1, 6, 5, dtype=torch.bool)
    goes_on = torch.ones(1, 6, 5)
    goes_on[:, :3, 1] = 0  # in three games a new meeting begins with the third step
    told = torch.zeros(1, 6, 5, script.TOLD, requires_grad=True)
    _, value, _ = agent(x, told, awake, goes_on, torch.zeros(1, 6, 16))
    value.view(6, 5)[:, -1].sum().backward()
    reached = told.grad[0].abs().sum(-1) > 0  # [M, T]
    assert reached[3:].all() and reached[:3, 2:].all() and not reached[:3, :2].any()


def test_gae_over_the_episodes_of_meetings_equals_a_plain_loop():
    generator = torch.Generator().manual_seed(7)
    clock_ends, gamma, lam, steps, rows = 6, 0.9, 0.8, 60, 12
    rewards, values = torch.randn(steps, rows, generator=generator), torch.randn(steps + 1, rows, generator=generator)
    over, parted = torch.zeros(2, steps, rows, dtype=torch.bool)
    left = torch.zeros(steps, rows, dtype=torch.int64)
    for row in range(rows):
        clock = episode = 0
        for t in range(steps):
            clock += 1
            left[t, row] = clock_ends - clock
            if clock == clock_ends or torch.rand((), generator=generator) < 0.2:
                over[t, row], parted[t, row] = True, episode % 3 == 2
                clock, episode = 0, episode + 1
    ends = script.meeting_ends(over, parted, left, gamma)
    answer, _ = script.traced_gae(rewards, values, ends, torch.ones_like(over), gamma, lam, torch.ones_like(rewards))
    for row in range(rows):
        for begin in range(steps):
            expected, factor = 0.0, 1.0
            for t in range(begin, steps):
                later = 0.0 if parted[t, row] else gamma ** (1 + int(left[t, row])) if over[t, row] else gamma
                expected += factor * (rewards[t, row] + later * values[t + 1, row] - values[t, row]).item()
                factor *= later * lam
            assert answer[begin, row].item() == pytest.approx(expected, abs=1e-4)
    assert parted.any() and (over & ~parted).any()


def test_each_advantage_is_divided_by_what_was_expected(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(script, "standardise", lambda x, weight: x)
    monkeypatch.setattr(script, "ppo_loss", lambda log_probs, value, batch, *rest: given.append(batch) or (
        value.sum(1), {"policy_loss": value.sum(1).detach()}))
    for floor in (None, 0.5):
        args = flags(tmp_path, prize_floor=floor, update_epochs=1, num_minibatches=1)
        run = script.Run(args)
        data, _ = script.rollout(args, run.table, run.returns)
        data["values"] = data["values"] + 0.3
        script.update(args, run.agent, run.optimizer, data, 0.0, 0.0, run.table.generator)
    plain, divided = (batch["advantages"][batch["weight"] > 0] for batch in given)
    value = (given[0]["returns"] - given[0]["advantages"])[given[0]["weight"] > 0]
    assert torch.allclose(divided, plain / (value.abs() + 0.5 * args.reward_scale), atol=1e-5)
    assert divided.abs().max() > plain.abs().max()


@pytest.mark.parametrize("changes", [{}, {"memory": "gru", "meeting_episodes": 2, "num_minibatches": 2}])
def test_a_trained_learner_among_others_in_each_seat(tmp_path, capsys, changes):
    """--mode adapt leaves what HOP+'s leaves; the seats' means are those of the learner's own seat."""
    script.main(flags(tmp_path, players=("ns", "ppo", "ns"), eval_episodes=0, hares=2, **changes))
    before = weights(tmp_path / "run")
    args = script.Args(mode="adapt", checkpoint=str(tmp_path / "run"), players=("ppo", "nh", "ns"), meetings=30,
                       meeting_episodes=4, runs_dir=str(tmp_path), run_name="adapt")
    assert script.main(args) == 0
    assert same(before, weights(tmp_path / "run")) and "checkpoint.pt" not in os.listdir(tmp_path / "adapt")
    results = json.loads((tmp_path / "adapt" / "results.json").read_text(encoding="utf-8"))
    assert results.keys() == {"players", "episodes", "second_half"} and results["players"] == ["ppo", "nh", "ns"]
    assert len(results["episodes"]) == 4 and results["episodes"][0].keys() == {"return", "ci95"}
    later = results["second_half"]
    assert later.keys() == {"mean", "ci95", "seats"} and len(later["seats"]) == 3
    assert later["mean"] == pytest.approx(sum(later["seats"]) / 3)
    assert later["mean"] == pytest.approx(sum(row["return"] for row in results["episodes"][2:]) / 2)
    agent = script.Table(script.load_learners(args)[0], 1, 1).agent
    agent.load_state_dict(before)
    seated = script.dataclasses.replace(script.load_learners(args)[0], players=("nh", "ppo", "ns"))
    returns, _ = script.play_episodes(seated, agent, 30, 4, False, 2)  # seat 2 has seed 1 + 1
    assert later["seats"][1] == pytest.approx(returns[2:, :, 1].mean().item(), abs=1e-6)
    out = capsys.readouterr().out
    assert "episodes 3 to 4:" in out.splitlines()[-1] and "(ppo nh ns, 4x4-2h1s, 90 meetings, all seats)" in out


def test_players_with_a_memory_and_other_boards_are_refused(tmp_path):
    script.main(flags(tmp_path, players=("ppo", "ns"), memory="gru", eval_episodes=0))
    path = str(tmp_path / "run" / "checkpoint.pt")
    with pytest.raises(script.Refused, match="a player with --memory gru"):
        script.main(flags(tmp_path, players=(f"{path}:player_1", "ppo"), run_name="other"))
    for changes, told in (({"width": 5}, "--width 5 differs from 4"), ({"players": ("ppo", "ns", "ns")}, "names 3"),
                          ({"checkpoint": str(tmp_path)}, "there is no ")):
        with pytest.raises(script.Refused, match=told):
            script.main(script.Args(**{"mode": "adapt", "checkpoint": path, "players": ("ppo", "ns"), **changes}))
    assert os.listdir(tmp_path) == ["run"]


# ------------------------------------------------------------------------------- runs from end to end


@pytest.mark.parametrize("changes", [
    {"players": ("ppo", "ns", "ns", "ns")},
    {"players": ("ns", "ppo", "mix:nh,random,patient-9", "ppo"), "share_parameters": True, "hares": 2},
    {"players": ("ppo", "ppo"), "buffer": "episodes", "num_steps": script.Args.num_steps, "buffer_size": 300,
     "height": 3, "width": 5},
    {"players": ("ppo", "ppo", "ns"), "share_parameters": True, "buffer": "episodes", "buffer_size": 300,
     "num_steps": script.Args.num_steps},
    {"players": ("ppo",) * 4, "max_blocks": 1, "height": 6, "width": 6, "prosocial": True},
    {"players": ("ppo", "ns", "ppo", "mix:ns,nh"), "memory": "gru", "meeting_episodes": 4, "prize_floor": 0.5},
    {"players": ("ppo", "ns", "ppo"), "share_parameters": True, "memory": "gru", "dynamic_final_time": True},
])
def test_a_short_run_leaves_its_results(tmp_path, changes, capsys):
    args = flags(tmp_path, **changes)
    assert script.main(args) == 0
    folder = tmp_path / "run"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["true_steps"] >= 600 and results["seconds"] > 0 and results["sps"] > 0
    assert 2 * 40 < results["evaluation_steps"] <= 2 * 40 * 35
    assert set(results["thresholds"]) == {"2.5", "2.7", "2.8", "2.85"}
    for mode in ("sampled", "greedy"):
        evaluation = results["evaluation"][mode]
        learners = [f"player_{seat + 1}" for seat, name in enumerate(args.players) if name == "ppo"]
        assert evaluation["episodes"] == 40
        assert evaluation["mean"] == pytest.approx(sum(evaluation[name] for name in learners) / len(learners))
        everybody = [f"player_{seat + 1}" for seat in range(len(args.players))]
        assert set(evaluation["ci95"]) == {*everybody, "mean"}
    assert {"config.json", "checkpoint.pt", "results.json", "pictures"} <= set(os.listdir(folder))
    assert any(name.startswith("events.out.tfevents") for name in os.listdir(folder))
    assert any(name.endswith(".gif") for name in os.listdir(folder / "pictures"))
    out = capsys.readouterr().out
    assert f'--mode adapt --checkpoint {folder} --players ppo {" ".join(["nh"] * (len(args.players) - 1))}' in out
    assert "mean return per episode" in out
    assert f"\n{results['true_steps']} true steps" in out and f"{results['evaluation_steps']} to evaluate" in out


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        script.main(flags(tmp_path, run_name=name, seed=seed, eval_episodes=0))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.parametrize("changes", [
    {"players": ("ppo", "mix:ns,nh", "ppo", "random")},
    {"players": ("ppo", "ns"), "buffer": "episodes", "num_steps": script.Args.num_steps, "total_timesteps": 1200},
    {"players": ("ppo", "mix:ns,nh", "ppo", "random"), "memory": "gru", "meeting_episodes": 3},
])
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
    stopped = torch.load(os.path.join(folder, "checkpoint.pt"), weights_only=True)["run"]["true_steps"]
    assert stopped < changes.get("total_timesteps", 600)
    assert script.main(script.Args(resume=folder)) == 0
    assert same(weights(folder), weights(tmp_path / "whole"))
    results = [json.loads((tmp_path / name / "results.json").read_text(encoding="utf-8"))
               for name in ("whole", "halves")]
    assert results[0]["true_steps"] == results[1]["true_steps"]
    assert results[0]["losses"] == results[1]["losses"]
    assert results[0]["thresholds"].keys() == results[1]["thresholds"].keys()


def test_a_trained_player_takes_a_seat_and_does_not_learn(tmp_path):
    script.main(flags(tmp_path, run_name="first", players=("ppo", "ppo", "ns", "ns"), eval_episodes=0))
    name = f"{tmp_path / 'first' / 'checkpoint.pt'}:player_2"
    args = flags(tmp_path, players=(name, "ns", "ppo", "ns"))
    table = script.Table(args, 8, 1)
    assert torch.equal(table.trained.view.weight[0], weights(tmp_path / "first")["view.weight"][1])
    assert script.main(args) == 0
    assert torch.equal(table.trained.view.weight[0], weights(tmp_path / "first")["view.weight"][1])


def test_trained_players_that_cannot_sit_here_are_refused(tmp_path):
    script.main(flags(tmp_path, run_name="first", players=("ppo", "ns"), eval_episodes=0))
    path = str(tmp_path / "first" / "checkpoint.pt")
    for players, changes, told in (
            ((f"{path}:player_2", "ppo"), {}, "holds player_1, not 'player_2'"),
            ((f"{path}:player_1", "ppo", "ns"), {}, "views of"),
            ((f"{path}:player_1", "ppo"), {"width": 5}, "views of")):
        with pytest.raises(script.Refused, match=told):
            script.main(flags(tmp_path, players=players, **changes))
    checkpoint = torch.load(path, weights_only=True)
    script.save_checkpoint(os.path.dirname(path), {**checkpoint, "script": "another.py"})
    with pytest.raises(script.Refused, match="holds no policies"):
        script.main(flags(tmp_path, players=(f"{path}:player_1", "ppo")))
    assert os.listdir(tmp_path) == ["first"]


def test_the_losses_of_a_run_are_those_of_its_last_tenth(tmp_path):
    """Also where it is resumed with more steps: what was its last tenth is not any more."""
    script.main(flags(tmp_path, run_name="run", eval_episodes=0))
    assert script.main(script.Args(resume=str(tmp_path / "run"), total_timesteps=2000)) == 0
    run = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["run"]
    assert run["true_steps"] == 2048 and len(run["losses"]) == 2  # after 1,920 and 2,048 steps
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    mean = torch.stack([losses["entropy"] for losses in run["losses"]]).mean(0)
    assert results["losses"]["entropy"] == {"player_1": pytest.approx(mean.item())}


def test_self_play_learns_to_hunt_together(tmp_path):
    """Well above 1.0, which everybody gets from hares alone, in some ten seconds."""
    script.main(script.Args(players=("ppo",) * 4, total_timesteps=200_000, num_envs=128, update_epochs=4,
                            eval_episodes=2000, runs_dir=str(tmp_path), run_name="run"))
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert results["evaluation"]["sampled"]["mean"] > 2.0


# ------------------------------------------------------------------------------------ refused flags


@pytest.mark.parametrize("line, words", [
    ("--players ns ns ns ns", "nobody learns"),
    ("--players ppo ns ns lion", "'lion'"),
    ("--share-parameters", "--share-parameters needs two"),
    ("--buffer-size 5000", "--buffer-size 5000 means nothing with --buffer transitions"),
    ("--buffer episodes --num-steps 9", "--num-steps 9 means nothing with --buffer episodes"),
    ("--hares 0 --hare-reward 2", "--hare-reward 2.0 means nothing with --hares 0"),
    ("--stags 0 --strengths 1 2 1 1", "--strengths 1.0 2.0 1.0 1.0 means nothing with --stags 0"),
    ("--prosocial --strengths 1 2 1 1", "means nothing with --prosocial"),
    ("--buffer episodes --buffer-size 20", "--buffer-size 20 holds no episode"),
    ("--num-envs 1 --num-steps 2 --num-minibatches 3", "--num-minibatches 3"),
    ("--height 2 --width 2", "--height 2"),
    ("--memory gru --buffer episodes", "--buffer episodes does not go with --memory gru"),
    ("--memory gru --num-envs 3", "--num-minibatches 4 are more than the 3 sequences"),
    ("--meeting-episodes 5", "--meeting-episodes 5 means nothing with --memory none"),
    ("--memory gru --meeting-episodes 0", "--meeting-episodes 0 must be at least 1"),
    ("--meetings 9", "--meetings 9 means nothing with --mode train"),
    ("--checkpoint runs/x", "--checkpoint runs/x means nothing with --mode train"),
    ("--mode adapt --checkpoint runs/x --gamma 0.5", "--gamma 0.5 means nothing with --mode adapt"),
    ("--mode adapt", "--mode adapt takes one ppo of --checkpoint"),
    ("--mode adapt --checkpoint runs/x --players ppo ppo ns ns", "--mode adapt takes one ppo"),
    ("--mode adapt --checkpoint runs/there-is-none", "--checkpoint runs/there-is-none: there is no runs"),
    ("--prize-floor 0", "--prize-floor 0.0 must lie between 1e-06 and 1e+06"),
    ("--gamma 1.5", "--gamma 1.5"),
    ("--device nonsense", "--device nonsense"),
    ("--resume runs/there-is-none", "--resume runs/there-is-none"),
    ("--run-name a/b", "--run-name 'a/b'"),
    ("--players ppo ns ns runs/none/checkpoint.pt:player_1", "there is no "),
    ("--players ppo ns ns README.md:Nobody", "README.md"),
    ("--threads 0", "--threads 0"),
])
def test_refused_flags_are_one_line_and_leave_nothing(tmp_path, line, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ppo_single_player.py", "--runs-dir", str(tmp_path / "runs"), *line.split()])
    monkeypatch.chdir(os.path.join(HERE, ".."))
    with pytest.raises(SystemExit) as end:
        script.run_script(script.Args, script.main)
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert words in error and len(error.strip().splitlines()) == 1, error
    assert not (tmp_path / "runs").exists()


def test_command_line(tmp_path, monkeypatch, capsys):
    """What is refused, in this process; a run, in one of its own."""
    monkeypatch.setattr(sys, "argv", ["ppo_single_player.py", "--gamma", "1.5"])
    with pytest.raises(SystemExit) as end:
        script.run_script(script.Args, script.main)
    assert end.value.code == 2 and capsys.readouterr().err == "error: --gamma 1.5 must lie between 0 and 1\n"
    command = [sys.executable, os.path.join(HERE, "..", "ppo_single_player.py"), "--runs-dir", str(tmp_path / "runs")]
    flags = "--total-timesteps 100 --num-envs 4 --num-steps 8 --eval-episodes 10 --run-name run"
    done = subprocess.run([*command, *flags.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\n128 true steps" in done.stdout


def test_an_existing_run_is_not_written_into(tmp_path):
    script.main(flags(tmp_path, eval_episodes=0))
    before = weights(tmp_path / "run")
    with pytest.raises(script.Refused, match="cannot be made"):
        script.main(flags(tmp_path, eval_episodes=0, seed=2))
    assert same(before, weights(tmp_path / "run"))
    with pytest.raises(script.Refused, match="--gamma 0.5 does not go with the 0.99"):
        script.main(script.Args(resume=str(tmp_path / "run"), gamma=0.5))
    with pytest.raises(script.Refused, match="--total-timesteps 500 does not go with the 600"):
        script.main(script.Args(resume=str(tmp_path / "run"), total_timesteps=500))


# ---------------------------------------------------------------------------------------- the shared parts


def test_what_shares_a_seed_draws_different_numbers():
    draws = [torch.rand(4, generator=script.seeded(seed, what)).tolist()
             for seed in (1, 2) for what in ("game", "lineup", "actions")]
    assert len({tuple(numbers) for numbers in draws}) == 6
    assert torch.rand(4, generator=script.seeded(1, "game")).tolist() == draws[0]


def test_thresholds_keep_what_they_are_told(tmp_path):
    args = flags(tmp_path, thresholds=(2.5, 2.85))
    run, other = script.Run(args), script.Run(args)
    run.reach(torch.full((499, 1), 3.0))
    assert run.thresholds == {"2.5": None, "2.85": None}  # too few episodes to tell
    run.seconds, run.true_steps = 2, 20
    run.reach(torch.full((500, 1), 2.6))
    other.load_state_dict(run.state_dict())
    other.seconds, other.true_steps = 3, 30
    other.reach(torch.full((500, 1), 3.6))
    assert other.thresholds == {"2.5": {"seconds": 2, "true_steps": 20}, "2.85": {"seconds": 3, "true_steps": 30}}
    assert run.thresholds["2.85"] is None


def test_returns_are_summed_up_to_the_end_of_each_episode():
    returns = script.Returns(2, 1, "cpu")
    for step in range(700):
        returns.add(torch.tensor([[1.0], [0.5]]), torch.tensor([step % 3 == 2, False]))
        if step % 100 == 99:
            returns.take()
    assert len(returns.last) == 233 and (returns.last == 3).all()
    assert returns.running.tolist() == [[1.0], [350.0]]


def test_pictures_show_players_of_one_cell_beside_one_another():
    game = script.BatchedStagHunt(1, num_players=3)
    game.cell = torch.tensor([[5], [5], [16]])  # the third has left
    picture = script.draw_board(game, 0, "caption")
    colours = {colour for _, colour in picture.getcolors(1 << 20)}
    assert set(script.COLOURS[:2]) <= colours and script.COLOURS[2] not in colours
