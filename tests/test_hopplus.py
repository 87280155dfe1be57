"""hopplus_selfplay.py: its search against a slow one and exact solutions, its beliefs, its runs from end to end."""

import dataclasses
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading

import pytest
import torch
from matplotlib.figure import Figure

import hopplus_selfplay as script

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = dict(total_timesteps=256, num_envs=4, num_steps=16, hidden_size=16, vae_size=16, warmup_meetings=8,
             eval_episodes=8, eval_policy_episodes=8, num_simulations=4, imagined_per_real=8.0,
             buffer_size=128, moa_minibatches=2, save_every=1e9, search_model="rules")


@pytest.fixture(autouse=True)
def small_worlds(request, monkeypatch):
    """World models and reports small enough for tests; the test that is about pictures alone draws a figure."""
    if request.node.originalname != "test_what_a_run_shows":
        monkeypatch.setattr(script, "draw_models", lambda _: Figure((1, 1)))
    monkeypatch.setattr(script, "WORLD_STEPS", 500)
    monkeypatch.setattr(script, "WARMUP_EPOCHS", 1)
    monkeypatch.setattr(script, "WORLD_UPDATES", 20)
    for function, numbers in ((script.report_models, (30, 2)), (script.score_world, (300,))):
        # under @torch.no_grad(): the defaults of what it returns are nobody's
        monkeypatch.setattr(function.__wrapped__, "__defaults__", numbers)


def flags(tmp_path, **changes):
    return script.Args(**{**SMALL, "runs_dir": str(tmp_path), "run_name": "run", **changes})


def table_of(args, num_envs, seed, opinions=100):
    """A table whose networks have opinions: fresh policies and models are nearly uniform."""
    torch.manual_seed(seed)
    table = script.Table(args, num_envs, seed)
    with torch.no_grad():
        table.networks.policy.actor.weight.mul_(opinions)
        table.networks.others.action.weight.mul_(opinions)
        for part in (table.networks.others, table.networks.policy):  # models of one kind begin alike
            for weight in part.parameters():
                weight.add_(0.05 * torch.randn(weight.shape))
    return table


def returns(args):
    return script.Returns(args.num_envs, len(args.players), "cpu")


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def saved_weights(folder):
    return torch.load(os.path.join(folder, "checkpoint.pt"), weights_only=True)["run"]["networks"]


# ------------------------------------------------------------------------------------ the search


class SlowSearch:
    """The same search in one tree, a node at a time, as one would write it down."""

    def __init__(self, model, searcher, state, args, draws):
        self.model, self.searcher, self.args, self.draws = model, searcher, args, draws
        self.root = self.node(state, 0.0, False)
        floor = args.prize_floor
        scale = script.REWARD_SCALE if math.isinf(floor) else abs(self.root["value"]) + floor * script.REWARD_SCALE
        self.beta = args.beta / scale

    def node(self, state, reward, over):
        log_probs, value, others = self.searcher.think(state)
        return {"state": state, "reward": reward, "over": over, "policy": log_probs[0].tolist(),
                "value": 0.0 if over else value.item(), "others": others[0].cumsum(-1).double().tolist(),
                "visits": [0] * 7, "totals": [0.0] * 7, "children": {}}

    def choose(self, node):
        policy = [math.exp(p) for p in node["policy"]]
        tried = [a for a in range(7) if node["visits"][a]]
        mixed, total = node["value"], sum(node["visits"])
        if tried:
            mass = sum(policy[a] for a in tried)
            mean = sum(policy[a] * node["totals"][a] / node["visits"][a] for a in tried) / max(mass, 1e-9)
            mixed = (node["value"] + total * mean) / (1 + total)
        q = [node["totals"][a] / node["visits"][a] if node["visits"][a] else mixed for a in range(7)]
        scores = [p + self.beta * value for p, value in zip(node["policy"], q)]
        improved = [math.exp(s - max(scores)) for s in scores]
        lacking = [i / sum(improved) - n / (1 + total) for i, n in zip(improved, node["visits"])]
        return max((a for a in range(7) if node["policy"][a] > -1e7), key=lacking.__getitem__)

    def simulate(self, number, tree):
        node, path = self.root, []
        for depth in range(number):
            action = self.choose(node)
            moves = tuple(sum(c <= draw * (1 - 1e-6) * chance[-1] for c in chance)
                          for chance, draw in zip(node["others"], self.draws[number - 1][depth][tree]))
            fresh = (action, moves) not in node["children"]
            if fresh:
                state, reward, over = self.model.step(node["state"], torch.tensor([action, *moves])[:, None])
                node["children"][action, moves] = self.node(state, reward.item() * script.REWARD_SCALE, bool(over))
            child = node["children"][action, moves]
            path.append((node, action, child))
            node = child
            if fresh or node["over"]:
                break
        value = node["value"]
        for parent, action, child in reversed(path):
            value = child["reward"] + self.args.gamma * value
            parent["visits"][action] += 1
            parent["totals"][action] += value


@pytest.mark.parametrize("floor", [math.inf, 0.5])
def test_search_equals_the_slow_one_node_for_node(monkeypatch, tmp_path, floor):
    args = flags(tmp_path, players=("hop", "ns", "ns"), hares=2, height=3, width=3, final_time=6, prize_floor=floor,
                 beta=2.4, gamma=0.97)
    table = table_of(args, 12, 3)
    state = script.ego_first(table.game.state(), table.order)
    told, goals = torch.randn(1, 12, 2 * (args.goal_dim + len(script.SHARES) - 1)), torch.randn(2, 12, args.goal_dim)
    searcher = script.Searcher(table.networks, table.views, told, goals)
    draws, drawn, rand, expand = [], [], torch.rand, script.expand
    monkeypatch.setattr(script.torch, "rand", lambda *shape, **kw: drawn.append(rand(*shape, **kw)) or drawn[-1])

    def expand_and_cut(*arguments):
        draws.append([number[..., 0].double().tolist() for number in drawn])
        drawn.clear()
        return expand(*arguments)

    monkeypatch.setattr(script, "expand", expand_and_cut)
    visits, totals, depth = script.search(table.model, searcher, state, 60, args, torch.Generator().manual_seed(5))
    monkeypatch.undo()
    assert len(draws) == 60 and max(map(len, draws)) >= 3 and depth.mean() > 1.2
    with torch.no_grad():
        for tree in range(12):
            one = {name: part[..., tree:tree + 1] for name, part in state.items()}
            alone = script.Searcher(table.networks, table.views, told[:, tree:tree + 1], goals[:, tree:tree + 1])
            slow = SlowSearch(table.model, alone, one, args, draws)
            for number in range(1, 61):
                slow.simulate(number, tree)
            assert visits[tree].tolist() == slow.root["visits"], tree
            assert totals[tree].tolist() == pytest.approx(slow.root["totals"], abs=1e-3)


def test_the_searcher_answers_as_the_networks_do(tmp_path):
    """What a search computes once for all positions changes nothing, and each model is asked about the right player."""
    args = flags(tmp_path, players=("hop", "ns", "hop"), height=5, width=9, stags=2, hares=9, max_blocks=2)
    table = table_of(args, 7, 1)
    for _ in range(6):
        table.game.advance(torch.randint(7, (7, 3), generator=torch.Generator().manual_seed(1)))
    state = script.ego_first(table.game.state(), table.order)
    x = table.views.look(state).unflatten(1, (2, 7))  # [3, 2, 7, K]
    told, goals = torch.randn(2, 7, 2 * (args.goal_dim + len(script.SHARES) - 1)), torch.randn(4, 7, args.goal_dim)
    with torch.no_grad():
        log_probs, value, others = script.Searcher(table.networks, table.views, told, goals).think(state)
        expected, expected_value = table.networks.policy(x[0], told)
        assert torch.allclose(log_probs, expected.flatten(0, 1), atol=1e-4)
        assert torch.allclose(value, expected_value.flatten(), atol=1e-5)
        model = table.networks.others
        seen = x[1:].transpose(0, 1).flatten(0, 1)  # [P, 7, K]
        expected = model.act(model.view(seen) + goals @ model.goal, table.views.mask(seen)).exp()
        assert torch.allclose(others.unflatten(0, (2, 7)).transpose(1, 2).flatten(0, 1), expected, atol=1e-5)
        assert not torch.allclose(expected[0], expected[1], atol=1e-2)


def exact_values(model, views, state, gamma, known):
    """The exact value of each own action against a co-player that draws uniformly from its legal actions.

    `known` keeps what was solved: most positions are reached in many ways.
    """
    key = tuple(tuple(state[name].flatten().tolist()) for name in ("cell", "board", "clock", "deadline"))
    if key not in known:
        mask = views.mask(views.look(state))
        legal = [mask[player, 0].nonzero()[:, 0].tolist() for player in range(2)]
        values = [-math.inf] * 7
        for action in legal[0]:
            total = 0.0
            for move in legal[1]:
                after, reward, over = model.step(state, torch.tensor([[action], [move]]))
                later = 0.0 if over else max(exact_values(model, views, after, gamma, known))
                total += (reward.item() + gamma * later) / len(legal[1])
            values[action] = total
        known[key] = values
    return known[key]


def test_the_best_action_is_found_as_simulations_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "REWARD_SCALE", 1.0)
    args = flags(tmp_path, players=("hop", "random"), stags=1, hares=1, height=2, width=2, final_time=3, beta=5.0,
                 prize_floor=math.inf, gamma=0.9)
    table = script.Table(args, 16, 2)
    with torch.no_grad():
        for part in table.networks.others.action.parameters():
            part.zero_()  # the co-player is taken to be uniform, as it is
    state = script.ego_first(table.game.state(), table.order)
    alone = [{name: part[..., env:env + 1] for name, part in state.items()} for env in range(16)]
    known = {}
    exact = torch.tensor([exact_values(table.model, table.views, one, 0.9, known) for one in alone])
    best, share = exact.amax(1), []
    searcher = script.Searcher(table.networks, table.views, torch.zeros(1, 16, args.goal_dim + len(script.SHARES) - 1), torch.zeros(1, 16, args.goal_dim))
    for simulations in (4, 64, 1024):
        visits, totals, _ = script.search(table.model, searcher, state, simulations, args, torch.Generator().manual_seed(1))
        picked = torch.where(visits > 0, totals / visits, -math.inf).argmax(1, keepdim=True)
        share.append((exact.gather(1, picked)[:, 0] > best - 0.02).float().mean().item())
    assert share[2] == 1.0 and share[0] < share[2], share


def test_each_player_searches_its_own_view_of_the_same_game(tmp_path):
    """Relabelling the players relabels the states that the search starts from, and so its result."""
    args = flags(tmp_path, height=4, width=5, max_blocks=1)
    table, turned = script.Table(args, 20, 2), script.Table(args, 20, 9)
    for _ in range(4):
        table.game.advance(torch.randint(7, (20, 4)))
    state = table.game.state()
    turned.game.load_state_dict(state | {name: state[name].roll(1, 0) for name in ("cell", "previous")})
    one, two = (script.ego_first(each.game.state(), each.order) for each in (table, turned))
    rows = lambda x: x.unflatten(-1, (4, 20))
    for name in one:
        for seat in range(4):
            assert torch.equal(rows(one[name])[..., seat, :], rows(two[name])[..., (seat + 1) % 4, :]), name
    x, observed = table.views.look(one).unflatten(1, (4, 20)), table.views.look(state)
    for seat in range(4):
        for other in range(4):
            assert torch.equal(x[other, seat], observed[(seat + other) % 4])


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_with_a_small_floor_the_size_of_the_prizes_means_nothing_to_the_search(tmp_path, scale):
    value = torch.tensor([0.3, 0.02]) * scale
    assert torch.allclose(script.sharpness(flags(tmp_path, prize_floor=1e-6), value) * value, torch.full((2,), 6.0), rtol=1e-3)
    assert torch.allclose(script.sharpness(flags(tmp_path, prize_floor=math.inf), value), torch.tensor(30.0))


# ------------------------------------------------------------------------- what is seen and believed


def put(table, cells, stags=(), hares=()):
    """Places players [N] and prey in all games of a table."""
    game = table.game
    game.cell = torch.tensor(cells)[:, None].expand(-1, game.num_envs).clone()
    board = game.board & script.GEOGRAPHY_BITS
    for cell in stags:
        board[cell] |= script.STAG_BIT
    for cell in hares:
        board[cell] |= script.HARE_BIT
    game.board = board


def moved(table, actions):
    """Plays given actions [N] in all games, as `act` hands them over. -> what `play` returns"""
    seen = table.look() | {"actions": torch.tensor(actions).expand(table.game.num_envs, -1)}
    return table.play(seen)


def test_a_player_that_has_left_sees_nothing_until_the_next_episode(tmp_path):
    table = table_of(flags(tmp_path), 3, 1)
    put(table, [0, 5, 9, 15], stags=[15], hares=[0, 5])
    before = table.memory.clone()
    out = moved(table, [script.HUNT_HARE, script.STAY, 0, script.STAY])  # player 1 leaves; in this step it still watched
    assert out["left"][0].all() and out["seen"].all()
    assert not torch.equal(table.memory[:3], before[:3])
    before = table.memory.clone()
    out = moved(table, [script.STAY, script.STAY, 0, script.STAY])
    mine = table.readers == 0
    assert not out["seen"][mine].any()
    torch.testing.assert_close(table.memory[mine], before[mine], atol=1e-7, rtol=1e-6)
    about_it = table.pairs == 0
    assert not out["seen"][about_it].any()
    before, after = (memory.chunk(2, -1)[0] for memory in (before, table.memory))  # what each player is by itself
    torch.testing.assert_close(after[about_it], before[about_it], atol=1e-7, rtol=1e-6)
    others = ~mine & ~about_it
    assert out["seen"][others].all() and ((after - before)[others].abs().amax((1, 2)) > 1e-3).all()
    table.game.deadline = table.game.clock + 1
    assert moved(table, [script.STAY] * 4)["over"].all()
    assert moved(table, [script.STAY] * 4)["seen"].all()  # the next episode


def test_some_games_go_on_as_if_their_players_had_never_met(tmp_path):
    table = table_of(flags(tmp_path), 400, 1)
    table.memory = table.memory + 1
    before = table.memory.clone()
    table.meet_anew(0.25)
    nobody = (table.memory == table.networks.others.start(400)).all(-1)
    assert (nobody == nobody[:1]).all() and 60 < int(nobody[0].sum()) < 140
    assert torch.equal(table.memory[:, ~nobody[0]], before[:, ~nobody[0]])


def test_the_last_actions_of_an_episode_reach_the_belief(tmp_path):
    table = table_of(flags(tmp_path), 3, 1)
    memories = []
    for hunts in (False, True):
        put(table, [15, 15, 3, 12], stags=[15])
        table.memory = table.networks.others.start(3).detach().clone()
        table.game.clock, table.game.deadline = torch.full((3,), 34), torch.full((3,), 35)
        table.game.previous = torch.full((4, 3), script.STAY, dtype=torch.uint8)
        out = moved(table, [script.HUNT_STAG if hunts else script.STAY] * 2 + [script.STAY] * 2)
        assert out["over"].all()
        memories.append(table.memory)
    about_hunters = (table.pairs < 2)
    assert not (memories[0] == memories[1])[about_hunters].all((1, 2)).any()
    apart = [memory.chunk(2, -1)[0][~about_hunters] for memory in memories]  # what each player is by itself
    assert torch.equal(*apart)


def test_the_goal_in_hindsight_is_the_best_step_to_come():
    generator = torch.Generator().manual_seed(2)
    worth, ends = torch.randn(3, 12, 5, generator=generator), torch.rand(3, 12, 5, generator=generator) < 0.15
    gone = torch.rand(3, 12, 5, generator=generator) < 0.3
    found = script.best_steps(worth.masked_fill(gone, -math.inf), ends, 4)
    last = script.last_steps(ends, 4)
    for pair in range(3):
        for env in range(5):
            for t in range(12):
                steps = []
                for ahead in range(t, min(t + 4, 12)):
                    steps.append(ahead)
                    if ends[pair, ahead, env]:
                        break
                assert last[pair, t, env] == steps[-1]
                steps = [step for step in steps if not gone[pair, step, env]]  # a value that was never trained chooses nothing
                if steps:
                    assert found[pair, t, env] == max(steps, key=lambda step: worth[pair, step, env])


def test_steps_seen_one_by_one_are_steps_seen_together(tmp_path):
    """`follow` is `remember` step by step, and nothing unseen changes anything."""
    args = flags(tmp_path)
    table = table_of(args, 4, 1)
    real = script.play_steps(table, returns(args), 12, "none")
    model, pairs = table.networks.others, table.pairs
    x, action, seen = real["x"].transpose(0, 1)[pairs], real["actions"][pairs].long(), real["seen"]
    assert not seen.all()
    with torch.no_grad():
        tables = model.look(x.flatten(1, 2))[2].unflatten(2, x.shape[1:3])
        memories, likely = model.follow(real["memory"], tables, action, seen)
        again, _ = model.follow(real["memory"], tables, torch.where(seen, action, 2), seen)
        assert all(map(torch.equal, memories, again))
        one = real["memory"]
        for t in range(12):
            assert torch.allclose(memories[t], one, atol=1e-5)
            chance = tables[:, :, t].gather(0, action[None, :, t, :, None].expand(1, *likely[:, t].shape))[0]
            assert torch.equal(likely[:, t], chance)
            one = model.remember(one, tables[:, :, t], action[:, t], seen[:, t])
        assert torch.allclose(one, table.memory, atol=1e-5) and torch.allclose(one, memories[-1], atol=1e-5)
        # and actions are foretold by what each player did itself, whatever the others at the table did
        *_, likely = script.infer_goals(model, {"x": x, "action": action, "seen": seen, "memory": real["memory"]})
        weights, prior = real["memory"].chunk(2, -1)[0], model.before()
        for t, foretold in enumerate(likely.unflatten(1, (12, -1)).unbind(1)):
            chance, legal = tables[:, :, t].exp(), table.views.mask(x[:, t]).sum(-1, keepdim=True)
            chance = chance.gather(0, action[None, :, t, :, None].expand(1, *chance.shape[1:]))[0]
            torch.testing.assert_close(foretold.exp(), (sum(weights.chunk(4, -1)) * chance).sum(-1), atol=1e-5, rtol=1e-4)
            after = weights * torch.cat([(1 - slip) * chance + slip / legal for slip in script.SLIPS], -1)
            after = after / after.sum(-1, keepdim=True)
            restless, ways = after[..., -args.hypotheses:], model.prior.softmax(-1)
            restless += script.TURN * (restless.sum(-1, keepdim=True) * ways - restless)
            after = (1 - script.CHANGE) * after + script.CHANGE * prior
            weights = torch.where(seen[:, t, :, None], after, weights)


def test_what_is_unseen_teaches_nothing(tmp_path):
    args, losses = flags(tmp_path), []
    for other in (False, True):
        table = table_of(args, 4, 1)
        replay = script.Replay(args, table, None)
        real = script.play_steps(table, returns(args), 16, "none")
        away = ~real["present"]
        assert away.any() and not real["seen"].all()
        replay.add(real)
        if other:  # what is recorded of those that have left is changed
            replay.real["actions"][away] = 2
        lesson = replay.draw(6, 0, torch.Generator().manual_seed(3))
        losses.append(script.others_loss(table.networks.others, lesson, torch.Generator().manual_seed(4)))
    for key in losses[0]:
        assert torch.allclose(losses[0][key], losses[1][key], atol=1e-6), key


def test_only_those_that_catch_teach_with_moa_samples_rewarded(tmp_path):
    args = flags(tmp_path, moa_samples="rewarded", players=("hop", "ns", "nh", "random"))
    table = table_of(args, 4, 1)
    replay = script.Replay(args, table, None)
    real = script.play_steps(table, returns(args), 16, "none")
    replay.add(real)
    weight = replay.real["weight"]
    for pair, seat in enumerate(table.pairs.tolist()):
        for env in range(4):
            for t in range(16):
                catches = False
                for later in range(t, 16):
                    catches |= bool(real["left"][seat, later, env])
                    if real["ended"][seat, later, env]:
                        break
                assert weight[pair, t, env] == (catches and bool(real["seen"][pair, t, env]))
    assert weight.any() and torch.equal(replay.real["seen"], real["seen"])


def test_the_replay_keeps_the_record_and_the_last_stretches(tmp_path):
    args = flags(tmp_path, buffer_size=192)  # 12 stretches of 16 steps
    table = table_of(args, 4, 1)
    record = script.record_meetings(args)
    replay = script.Replay(args, table, record)
    played, before = [], {name: part.clone() for name, part in replay.recorded.items()}
    assert before["clock"].shape == (16, 8 * (record["over"].shape[0] // 16))
    for _ in range(5):
        played.append(script.play_steps(table, returns(args), 16, "none"))
        replay.add(played[-1])
    assert replay.real["clock"].shape == (16, 12)
    held = {tuple(clock.tolist()) + tuple(cells.flatten().tolist()) for clock, cells in zip(
        replay.real["clock"].T, replay.real["cell"].permute(2, 0, 1))}
    for number, real in enumerate(played):
        last = {tuple(real["clock"][:, env].tolist()) + tuple(real["cell"][..., env].flatten().tolist()) for env in range(4)}
        assert last <= held if number >= 2 else not last & held
    lesson = replay.draw(5, 3, torch.Generator().manual_seed(0))
    assert lesson["x"].shape[:3] == (12, 16, 8) and lesson["memory"].shape == (12, 8, 8 * args.hypotheses)
    again = script.Replay(args, table, None)
    again.load_state_dict(replay.state_dict())
    assert same(again.recorded, before) and same(replay.recorded, before)
    assert same(again.draw(5, 3, torch.Generator().manual_seed(0)), lesson)


# ----------------------------------------------------------------------------------- imagined games


def test_imagined_games_are_played_as_real_ones_are(tmp_path, monkeypatch):
    """Beliefs and partners' moves, worked out for each player, game and partner one by one."""
    monkeypatch.setattr(script, "MEETING", 2)
    monkeypatch.setattr(script, "SHARES", (0.4, 0.2, 0.2, 0.2))  # so that all kinds of hands are met
    args = flags(tmp_path, final_time=5, players=("hop", "ns", "hop"), num_steps=12, buffer_size=96, imagined_per_real=4.0)
    table = table_of(args, 4, 1)
    script.warm_up_goals(args, table, record := script.record_meetings(args))
    networks, hops, others, dim = table.networks, 2, 2, args.goal_dim
    with torch.no_grad():
        for part in networks.others.parameters():
            part.add_(0.1 * torch.randn(part.shape))
    imagination = script.Imagination(args, table, script.Replay(args, table, record))
    num = imagination.shape[1]
    assert imagination.shape == (2, 8)
    seen, moves, think, remember = [], [], imagination.think, networks.others.remember

    def spy():
        answer = think()
        x = table.views.look(imagination.state).unflatten(1, imagination.shape)
        kinds = torch.cat([imagination.types, imagination.slips, imagination.turns], -1)
        seen.append((imagination.memory.clone(), kinds, x, answer))
        return answer

    def spy_on_moves(memory, tables, action, there):
        moves.append((action, there))
        return remember(memory, tables, action, there)

    imagination.think = spy
    kept, met, turned, slipping, known = 0, 0, 0, set(), networks.known
    for _ in range(3):
        seen.clear(), moves.clear()
        monkeypatch.setattr(networks.others, "remember", spy_on_moves)
        steps = imagination.play(12)
        monkeypatch.setattr(networks.others, "remember", remember)
        for t in range(12):
            memory, kinds, x, thought = seen[t]
            told, chances = thought["told"], thought["moved"]
            assert torch.equal(thought["x"], x[0])
            for hop in range(hops):
                for game in range(num):
                    for other in range(others):
                        pair = hop * others + other
                        view = x[1:, :, game].transpose(0, 1).flatten(0, 1)[:, None]
                        with torch.no_grad():
                            _, hidden, tables = networks.others.look(view)
                            weights, hands = networks.others.weights(memory[:, game:game + 1])
                            mean, _ = networks.others.read(weights, hidden)
                            expected = torch.cat([mean, hands], -1)[pair, 0]
                            assert torch.allclose(told[hop, game].view(others, -1)[other], expected, atol=1e-4)
                            first, hidden, _ = known.look(view[pair:pair + 1])
                            goal, _ = known.read(kinds[pair, game, :-2][None, None], hidden)
                            mask = table.views.mask(view[pair:pair + 1])
                            expected = known.act(first + goal @ known.goal, mask).exp()[0, 0]
                            slip, turn = kinds[pair, game, -2:].tolist()
                            expected = (1 - slip) * expected + slip * mask[0, 0] / mask.sum()
                            slipping.add(slip)
                        assert torch.allclose(chances[pair, game], expected, atol=1e-4)
                        after, after_kinds = seen[t + 1][0][pair, game], seen[t + 1][1][pair, game]
                        over = bool(steps["ended"][t, hop, game])
                        action, there = (part[:, game:game + 1] for part in moves[t])
                        follows = remember(memory[:, game:game + 1], tables, action, there)[pair, 0]
                        new = torch.equal(after, networks.others.start(1)[pair, 0])
                        assert new or torch.allclose(after, follows, atol=1e-4)
                        assert new or torch.equal(after_kinds[-2:], kinds[pair, game, -2:])
                        same_type = torch.equal(after_kinds[:-2], kinds[pair, game, :-2])
                        assert new or same_type or turn == script.TURN and slip == 0
                        turned += not new and not same_type
                        met, kept = met + (over and new), kept + (over and not new)
    assert met > 10 and kept > 10 and {0.0, 1.0} < slipping  # steady ones, some that do anything, and trembling ones
    assert turned > 10  # and restless ones


# ----------------------------------------------------------------------------------------- learning


def steps_for(args, num, seed, searched):
    """Made-up steps of policies, as `learn_policy` gets them."""
    table = table_of(args, num, seed)
    real = script.play_steps(table, returns(args), 8, "none")["policy"]
    generator = torch.Generator().manual_seed(seed)
    real["target"] = torch.softmax(3 * torch.randn(real["target"].shape, generator=generator), -1) * (real["target"] > 0)
    real["target"] = real["target"] / real["target"].sum(-1, keepdim=True)
    return table, real | {"searched": torch.full_like(real["searched"], searched)}


def test_searched_steps_teach_the_target_and_drawn_ones_by_their_advantage(tmp_path, monkeypatch):
    """The gradient of a mixed batch is that of the cross-entropy of the searched steps and of PPO's loss of the others."""
    monkeypatch.setattr(script, "VALUE_WEIGHT", 0.0)
    args = flags(tmp_path)
    table, planned = steps_for(args, 4, 1, True)
    _, drawn = steps_for(args, 4, 2, False)
    row = lambda data: {key: (part[:-1] if key == "values" else part).transpose(0, 1).flatten(1, 2) for key, part in data.items()}
    batch = {key: torch.cat([row(planned)[key], row(drawn)[key]], 1) for key in planned}
    many = row(planned)["actions"].shape[1]
    batch["advantages"], batch["returns"] = torch.randn(batch["logprobs"].shape), torch.zeros_like(batch["logprobs"])
    ready = lambda function, name, *more: function(batch[name].float()[None], *more)[0]
    batch["weight"] = ready(script.share_out, "present")
    raw, batch["advantages"] = batch["advantages"], ready(script.standardise, "advantages", batch["weight"][None])
    loss, parts = script.policy_loss(args, table.networks.policy, batch, 0.0)
    policy = table.networks.policy
    gradients = torch.autograd.grad(loss.sum(), list(policy.parameters()), allow_unused=True)

    log_probs, _ = policy(batch["x"], batch["told"])
    expected = 0.0
    for learner in range(4):
        present, searched = batch["present"][learner], batch["searched"][learner]
        assert searched[:many].all() and not searched[many:].any()
        each = -(batch["target"][learner] * log_probs[learner].clamp(min=-30)).sum(-1)
        advantage = raw[learner]
        advantage = (advantage - advantage[present].mean()) / (advantage[present].std(unbiased=False) + 1e-8)
        ratio = (log_probs[learner].gather(-1, batch["actions"][learner][:, None])[:, 0] - batch["logprobs"][learner]).exp()
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        expected = expected + torch.where(searched, each, surrogate)[present].mean()  # each step counts the same
        assert torch.isclose(parts["planned"][learner], (present & searched).sum() / present.sum())
    for one, two in zip(gradients, torch.autograd.grad(expected, list(policy.parameters()), allow_unused=True)):
        assert (one is None and two is None) or torch.allclose(one if one is not None else torch.zeros(1), two if two is not None
                                                               else torch.zeros(1), atol=1e-5)


def test_each_learner_is_taught_by_its_own_steps(tmp_path):
    args = flags(tmp_path, num_minibatches=2)
    results = []
    for changed in (False, True):
        table, data = steps_for(args, 4, 1, False)
        if changed:
            data["rewards"] = data["rewards"].clone()
            data["rewards"][:, 2] += torch.randn(data["rewards"][:, 2].shape)
        policy = table.networks.policy
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
        script.learn_policy(args, policy, data, optimizer, 0.0, torch.Generator().manual_seed(0))
        results.append(policy.state_dict())
    for key in results[0]:
        same_rows = [torch.equal(one, two) for one, two in zip(results[0][key], results[1][key])]
        assert same_rows[0] and same_rows[1] and same_rows[3], key
    assert not torch.equal(results[0]["actor.weight"][2], results[1]["actor.weight"][2])


def test_beliefs_that_know_are_told_from_those_that_do_not():
    goal = torch.randn(2, 5, 40, 3, generator=torch.Generator().manual_seed(0))
    flat, weight = goal.flatten(1, 2), torch.ones(2, 200)
    sure = script.belief_accuracy(flat + 0.01, torch.zeros_like(flat), goal, weight)
    blind = script.belief_accuracy(torch.zeros_like(flat), torch.zeros_like(flat), goal, weight)
    assert (sure > 0.99).all() and ((blind - 0.5).abs() < 0.15).all()


LAZY = "import torch\n\nclass Lazy:\n    def act(self, observation, generator):\n        return torch.full_like(observation['step'], 4)\n"


def test_ceilings_are_true_where_they_are_known_and_none_elsewhere(tmp_path):
    import ppo_single_player

    (tmp_path / "lazy.py").write_text(LAZY)
    ppo_single_player.main(ppo_single_player.Args(
        total_timesteps=256, num_envs=8, num_steps=16, eval_episodes=4, runs_dir=str(tmp_path), run_name="ppo"))
    trained, lazy = f"{tmp_path / 'ppo' / 'checkpoint.pt'}:player_1", f"{tmp_path / 'lazy.py'}:Lazy"
    args = flags(tmp_path, players=("hop", "ns", trained, lazy))
    table = table_of(args, 6, 1)
    assert table.known.tolist() == [True, True, True, False]
    real = script.play_steps(table, script.Returns(6, 4, "cpu"), 16, "none")
    script.Replay(args, table, None).add(real)
    scores, *_ = script.score_models(table, real)
    for value in scores.values():
        assert value.isnan().tolist() == [False, False, True]
    with torch.no_grad():
        expected = table.trained(real["x"][:, 2].flatten(0, 1)[None])[0][0].exp().unflatten(0, (16, 6))
    assert torch.allclose(real["true_probs"][:, 2], expected, atol=1e-5)
    results = script.report_models(args, table)[0]
    assert results[lazy]["share"]["stay"] == 1  # all that it does
    assert results[lazy]["top1_ceiling"] is None and 0 < results[trained]["top1"] <= results[trained]["top1_ceiling"] + 1e-6


# -------------------------------------------------------------------------------- runs from end to end


@pytest.mark.parametrize("changes", [
    {"search_model": "learned"},
    {"players": ("ns", "hop", "ns", "ns"), "goals": "zero", "search": "none", "imagined_per_real": 0.0, "num_simulations": 16,
     "eval_episodes": script.Args.eval_episodes, "search_model": "learned"},
    {"players": ("hop", "hop"), "search": "one-step", "height": 5, "width": 4, "max_blocks": 1, "hares": 2},
    {"players": ("hop", "ns", "mix:nh,random", "hop"), "selector": "min", "moa_samples": "rewarded", "num_trees": 1,
     "imagined_per_real": 0.0},
    {"goals": "zero"},
])
def test_a_short_run_leaves_its_results(tmp_path, changes, monkeypatch):
    games, advance = [], script.BatchedStagHunt.advance
    monkeypatch.setattr(script.BatchedStagHunt, "advance",
                        lambda game, actions: games.append((game, len(game.clock))) or advance(game, actions))
    args = flags(tmp_path, **changes)
    assert script.main(args) == 0
    folder = tmp_path / "run"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["timesteps"] == 256 and (results["simulations"] > 0) == (args.search != "none")
    assert results["true_steps"] == results["warmup_steps"] + 256
    assert results["warmup_steps"] == 8 * 72 + (500 if args.search_model == "learned" else 0)
    assert (results["imagined_steps"] > 0) == (args.imagined_per_real > 0)
    assert set(results["evaluation"]) == ({"policy"} if args.search == "none" else {"searched", "policy"})
    hops = [seat for seat, name in enumerate(args.players) if name == "hop"]  # one alone is modelled by nobody
    assert set(results["moa"]) == {name for seat, name in enumerate(args.players) if [seat] != hops}
    for moa in results["moa"].values():
        assert 0 < moa["top1"] <= moa["top1_ceiling"] + 1e-6 and moa["cross_entropy"] >= moa["cross_entropy_floor"] - 1e-6
        where, taken = moa["predicted_where_taken"], [name for name, share in moa["share"].items() if share > 1e-6]
        assert all(sum(where[name].values()) == pytest.approx(1, abs=1e-4) for name in taken)
        assert all(where[name][name] == pytest.approx(moa["recall"][name], abs=1e-4) for name in taken)
        for key in ("share", "predicted"):
            assert sum(moa[key].values()) == pytest.approx(1, abs=1e-4)
    assert {"models_of_others.png", "episode_256.gif"} <= set(os.listdir(folder / "pictures"))
    assert ("world_model" in results) == (args.search_model == "learned")
    assert all(0 <= share <= 1 for share in results.get("world_model", {}).values())
    pairs = [(hop, other) for hop in hops for other in range(len(args.players)) if other != hop]
    assert set(results["moa_by_pair"]) == {f"player_{hop + 1}_of_player_{other + 1}" for hop, other in pairs}
    for kind, moa in results["moa"].items():
        told = [results["moa_by_pair"][f"player_{hop + 1}_of_player_{other + 1}"] for hop, other in pairs
                if args.players[other] == kind]
        for key, by_pair in (("cross_entropy", "loss"), ("top1", "hits")):
            seen = [pair[by_pair] for pair in told if pair[by_pair] is not None]  # one may never have seen another
            assert sum(seen) / len(seen) == pytest.approx(moa[key], abs=1e-5)
        assert all(0 <= share <= 1 for pair in told for share in pair["recall"].values())


def test_a_picture_is_there_before_the_checkpoint_after_which_it_is_drawn_no_more(tmp_path, monkeypatch):
    done, save = [], script.Run.save
    monkeypatch.setattr(script.Log, "picture", lambda log: done.append(("picture", log.run.timesteps)))
    monkeypatch.setattr(script.Run, "save", lambda run, *rest: (done.append(("save", run.timesteps)), save(run, *rest)))
    monkeypatch.setattr(script, "report", lambda *_: None)
    assert script.main(flags(tmp_path, save_every=0.0)) == 0
    assert done[0] == ("save", 0) and len(done) > 2
    assert [word for word, _ in done[1:]] == ["picture", "save"] * (len(done) // 2)
    assert [step for _, step in done[1::2]] == [step for _, step in done[2::2]]


def test_what_a_run_shows(tmp_path, capsys, monkeypatch):
    """Few curves and one run in TensorBoard, beside the flags and results; commands that can be pasted."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    args = flags(tmp_path, run_name="a run", prosocial=True, search_model="learned")
    assert script.main(args) == 0
    folder = tmp_path / "a run"
    assert [path for path in folder.iterdir() if path.is_dir()] == [folder / "pictures"]
    events = EventAccumulator(str(folder)).Reload()
    told, tags = events.PluginTagToContent("hparams"), events.Tags()
    assert len(tags["scalars"]) <= 40 and tags["images"] == ["a_game", "models_of_others"]
    assert all(any(re.match(pattern, tag) for tag in tags["scalars"]) for pattern in script.PLOTS)
    assert "custom_scalars__config__" in tags["tensors"]
    compared = HParamsPluginData.FromString(told["_hparams_/session_start_info"]).session_start_info.hparams
    assert compared["prosocial"].number_value and compared["seed"].number_value == args.seed
    assert "beta" not in compared and "players" not in compared  # as by default
    assert "_hparams_/experiment" not in told  # it would choose the columns of all runs
    assert sorted(tags["scalars"])[:2] == ["a_result/policy", "a_result/searched"]  # what is shown of many figures

    out = capsys.readouterr().out
    assert "largest fall" in out and "equals earn equally?" in out
    lines = out.partition("What next:")[2].splitlines()
    assert os.path.isfile(re.search("the last episode in (.*)", out)[1])
    assert os.path.isfile(re.search("as a picture: (.*)", out)[1])
    commands = [shlex.split(line[line.index("python"):])[1:] for line in lines if "python" in line]
    typed = []
    for words in commands:
        monkeypatch.setattr(sys, "argv", words)
        typed.append(script.read_flags(script.Args))
        script.check_flags(typed[-1])
    watch, play, adapt, again = typed
    assert watch.mode == "watch" and play.mode == "play" and adapt.players == ("hop", "nh", "nh", "nh")
    assert watch.checkpoint == play.checkpoint == adapt.checkpoint == str(folder)
    assert again == dataclasses.replace(args, seed=2, run_name=None)


def test_commands_are_quoted_where_a_shell_would_change_them():
    line = script.command(players=("hop", "mix:ns,nh"), prosocial=True, checkpoint="my runs/x", beta=2.0)
    assert line == ('python hopplus_selfplay.py --players hop "mix:ns,nh" --prosocial --checkpoint "my runs/x" --beta 2.0')


def test_true_steps_are_all_that_are_played(tmp_path, monkeypatch):
    """Every step of every true game is counted, in what was learned from or in what was only measured."""
    played, advance = [], script.BatchedStagHunt.advance
    monkeypatch.setattr(script.BatchedStagHunt, "advance",
                        lambda game, actions: played.append(game.num_envs) or advance(game, actions))
    args = flags(tmp_path, search_model="learned", eval_episodes=0, eval_policy_episodes=0)
    monkeypatch.setattr(script, "record_game", lambda *_: [script.draw_board(script.make_game(args, 1, 0), 0)] * 2)
    script.main(args)
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert abs(sum(played) - results["true_steps"] - results["evaluation_steps"]) < 20  # mixed games end with a whole row of them


def test_a_stopped_run_resumes_to_the_same_weights_without_another_warm_up(tmp_path, monkeypatch):
    small = dict(eval_episodes=0, eval_policy_episodes=0, search_model="learned")
    script.main(flags(tmp_path, run_name="whole", **small))
    learn, calls = script.learn_policy, []

    def stop_at_the_second(*arguments):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return learn(*arguments)

    monkeypatch.setattr(script, "learn_policy", stop_at_the_second)
    assert script.main(flags(tmp_path, run_name="halves", **small)) == 130
    for name in ("record_meetings", "warm_up_goals", "warm_up_world"):
        monkeypatch.setattr(script, name, lambda *_: pytest.fail("another warm-up"))
    assert script.main(script.Args(resume=str(tmp_path / "halves"))) == 0
    weights = saved_weights(tmp_path / "halves")
    assert same(weights, saved_weights(tmp_path / "whole"))
    # self-play moved the models of others, but not what the warm-up knew of who may come
    assert torch.equal(weights["others.prior"], weights["known.prior"].expand_as(weights["others.prior"]))
    assert weights["known.prior"].any() and not torch.equal(weights["others.action.weight"][:1], weights["known.action.weight"])
    one, two = (json.loads((tmp_path / name / "results.json").read_text(encoding="utf-8")) for name in ("whole", "halves"))
    assert one["true_steps"] == two["true_steps"] and one["moa"] == two["moa"]


def test_players_are_saved_small_and_can_play(tmp_path, capsys):
    script.main(flags(tmp_path, run_name="trained", search_model="learned", final_time=9, eval_episodes=0,
                      eval_policy_episodes=0))
    trained = tmp_path / "trained"
    assert (trained / "players.pt").stat().st_size < 0.5 * (trained / "checkpoint.pt").stat().st_size
    (trained / "checkpoint.pt").unlink()  # not needed to play
    args = script.Args(mode="adapt", checkpoint=str(trained), players=("hop", "nh", "nh", "random"),
                       meeting_episodes=3, meetings=2, runs_dir=str(tmp_path), run_name="adapt")
    assert script.main(args) == 0
    results = json.loads((tmp_path / "adapt" / "results.json").read_text(encoding="utf-8"))
    assert len(results["episodes"]) == 3 and len(results["second_half"]["seats"]) == 4
    guests = script.Args(mode="adapt", checkpoint=str(trained), players=("hop", "nh", f"{trained}:player_3", f"{trained}:player_2"))
    guests, saved = script.load_players(guests)
    table = script.seat_players(guests, saved, 2, 5)
    assert table.hop_seats == [0, 2, 3] and not table.trained_seats
    for part, per in (("policy", 1), ("others", 3)):
        for name, value in getattr(table.networks, part).state_dict().items():
            whole = saved["networks"][part][name].unflatten(0, (4, per))
            assert torch.equal(value, whole[[0, 2, 1]].flatten(0, 1)), name
    table.play(table.act("mcts"))
    for players, words in ((("hop", "nh", "nh", f"{trained}:player_7"), "holds player_1, player_2, player_3, player_4, not 'player_7'"),
                           (("hop", "nh", f"{trained}:player_1"), "--players hop was trained with 4 players, here are 3")):
        with pytest.raises(script.Refused, match=words):
            script.main(script.Args(mode="adapt", checkpoint=str(trained), players=players, runs_dir=str(tmp_path)))
    with pytest.raises(script.Refused, match="beside trained ones"):
        script.check_flags(flags(tmp_path, players=("hop", f"{trained}:player_1", "nh", "nh")))
    capsys.readouterr()
    assert script.main(script.Args(mode="watch", checkpoint=str(trained))) == 0
    printed = capsys.readouterr().out
    assert "step 0, 9 left" in printed and "its search makes of it" in printed
    assert re.search("believes of player 2: (after a |catching nothing)", printed)


@pytest.fixture
def players(tmp_path):
    """A folder with players that have opinions, as a run leaves them: three HOP+ players and a stag hunter."""
    args = flags(tmp_path, players=("hop", "hop", "ns", "hop"), final_time=6)
    networks = table_of(args, 1, 0).networks
    weights = {"policy": networks.policy.state_dict(), "others": networks.others.state_dict()}
    script.save_checkpoint(str(tmp_path), {"config": vars(args), "networks": weights}, "players.pt")
    return str(tmp_path)


def recorded(monkeypatch):
    """What happens at the tables from now on: a list of (table's seen, out)."""
    happened, play = [], script.Table.play
    monkeypatch.setattr(script.Table, "play", lambda table, seen, **kind: happened.append((seen, play(table, seen, **kind)))
                        or happened[-1][1])
    return happened


@pytest.mark.parametrize("asked, seat", [({}, 0), ({"players": ("hop", "nh", "human", "hop")}, 2)])
def test_a_person_plays_by_a_file_of_keys(players, tmp_path, monkeypatch, capsys, asked, seat):
    keys, happened = tmp_path / "keys", recorded(monkeypatch)
    keys.write_text("x \nWasd" + 40 * "e ", encoding="utf-8")
    args = script.Args(mode="play", checkpoint=players, keys=str(keys), **asked)
    script.check_flags(args)
    assert script.main(args) == 0
    printed = capsys.readouterr().out
    typed = [line.split(": ")[1] for line in printed.splitlines() if "your move" in line and "nothing here" not in line]
    there = [(seen, out) for seen, out in happened if out["present"][seat, 0]]
    played = [script.ACTIONS[int(out["action"][seat, 0])] for _, out in there]
    assert typed == played and played[0] == "stay" and "'x' does nothing here" in printed
    assert f"You are player {seat + 1}" in printed and printed.count("\nstep") == len(happened)
    table = script.seat_players(*script.load_players(args), 1, 1)
    looked, missed, total = 0, 0, 0.0
    for seen, out in there:
        hop, action = table.hop_seats.index(3), int(out["action"][seat, 0])
        probs = script.expectations(table, seen)[hop, (seat - 3) % 4 - 1, 0]
        if out["present"][3, 0]:
            looked, missed, total = looked + 1, missed + (probs.argmax() != action).item(), total + probs[action].item()
    assert printed.count("player 4 was wrong") == missed and printed.count("player 4 was right") == looked - missed
    told = f"player 4 foresaw {looked - missed} of your {looked} moves (it gave them {total / looked:.0%} on average)"
    assert told in printed and re.search("take you to be (after a |catching nothing)", printed)


def test_a_person_may_leave_and_what_cannot_be_played_is_refused(players, tmp_path, capsys):
    (tmp_path / "keys").write_text(" q ", encoding="utf-8")
    args = script.Args(mode="play", checkpoint=players, keys=str(tmp_path / "keys"))
    assert script.main(args) == 0
    assert capsys.readouterr().out.endswith("your move: stopped after 1 steps\n")
    for changes, words in (({"players": ("hop", "human", "human", "hop")}, "takes one human, here are 2"),
                           ({"players": ("hop", "ns", "ns", "ns")}, "takes one human, here are 0"),
                           ({"mode": "watch", "players": ("human", "hop", "hop", "hop"), "keys": None}, "not with --mode watch"),
                           ({"mode": "watch"}, "--keys .* means nothing with --mode watch"),
                           ({"keys": "none"}, "--keys none: there is no such file")):
        with pytest.raises(script.Refused, match=words):
            script.check_flags(script.dataclasses.replace(args, **changes))


@pytest.mark.skipif(os.name == "nt", reason="terminals of Windows are not files")
def test_a_terminal_gives_each_key_at_once(monkeypatch):
    import termios

    typist, terminal = os.openpty()
    left = []
    monkeypatch.setattr(script.Interrupt, "leave", left.append)
    with open(terminal, encoding="utf-8") as keys:
        before = termios.tcgetattr(keys)
        for typed, key in ((b"w", "w"), (b"\x1b[D", "a"), (b"\x1bOC", "d"), (b" ", " "), (b"\x03", "\x03")):
            assert not left
            typing = threading.Timer(0.05, os.write, (typist, typed))
            typing.start()
            assert script.press(keys) == key
            typing.join()
            assert termios.tcgetattr(keys) == before
    assert left == [signal.SIGINT]
    os.close(typist)


def test_those_who_watch_see_the_trained_line_up_and_no_value_where_nothing_was_tried(players, monkeypatch, capsys):
    happened = recorded(monkeypatch)
    assert script.main(script.Args(mode="watch", checkpoint=players)) == 0
    printed = capsys.readouterr().out
    untried = tried = 0
    for seen, out in happened:
        for hop, seat in enumerate((0, 1, 3)):
            if out["present"][seat, 0]:
                visits, legal = seen["search"]["visits"][hop, 0], seen["policy"][hop, 0] > -1e7
                likely = torch.maximum(seen["policy"], seen["improved"])[hop, 0].exp() >= 0.01
                tried += int((visits[legal] > 0).sum())
                untried += int((visits[legal & likely] == 0).sum())
    assert (printed.count("(not tried)"), printed.count("(Q ")) == (untried, tried) and untried and tried
    assert "player 3: its policy" not in printed
    assert re.search("believes of player 3: (after a |catching nothing)", printed)
    earned = sum(out["reward"].sum().item() for _, out in happened)
    line, more = printed.splitlines()[-2:]
    assert line.startswith("returns: player 1 ") and more == "another episode: --seed 2"
    assert sum(float(part.split()[-1]) for part in line.split(", ")) == pytest.approx(earned, abs=1e-3)


def test_a_reader_that_has_seen_enough_ends_it_quietly(players, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as shown:
        monkeypatch.setattr(sys, "stdout", shown)
        assert script.main(script.Args(mode="watch", checkpoint=players)) == 0
        print("and nothing that is printed then, nor the end of the script, fails")


def test_what_others_are_after_is_what_they_catch_in_the_games_imagined(tmp_path):
    table = table_of(flags(tmp_path), 1, 0)
    with torch.no_grad():  # all are held to hunt wherever they can
        table.networks.others.action.bias[..., script.HUNT_STAG:] = 1e4
        table.networks.policy.actor.bias[..., script.STAY] = 1e4
    put(table, [0, 5, 10, 10], stags=[10], hares=[5])
    words = script.aims(table, table.look())
    assert words[0] == ["after a hare (100%)", "after a stag (100%)", "after a stag (100%)"]
    put(table, [0, 5, 10, 16], stags=[10], hares=[5])  # one alone catches no stag
    assert script.aims(table, table.look())[0][:2] == ["after a hare (100%)", "catching nothing soon"]


def test_pictures_tell_who_did_what_and_hide_no_stag(tmp_path):
    args = flags(tmp_path, final_time=4)
    table = table_of(args, 1, 0)
    frames = script.record_game(args, table, 3)
    assert 2 <= len(frames) <= 5 and len({frame.size for frame in frames}) == 1
    drawn = []
    for cells in ([1, 2, 3, 4], [10, 10, 10, 10]):
        put(table, cells, stags=[10], hares=[])
        drawn.append(script.draw_board(table.game, 0).crop((2 * 64, 2 * 64, 3 * 64, 3 * 64)))
    counts = [{colour: count for count, colour in picture.getcolors(1 << 20)} for picture in drawn]
    brown = [count[(150, 92, 48)] for count in counts]
    assert brown[0] == brown[1] > 300 and set(script.COLOURS[:4]) <= counts[1].keys()


def test_what_the_default_pretraining_writes_is_taken_over_by_default(tmp_path):
    import pretrain_vae

    pretrain_vae.main(pretrain_vae.Args(runs_dir=str(tmp_path), run_name="vae", episodes=60, held_out_episodes=30, epochs=1))
    args = flags(tmp_path, vae_checkpoint=str(tmp_path / "vae"), hidden_size=64, vae_size=128)
    script.check_flags(args)
    run = script.Run(args)
    goals = torch.load(tmp_path / "vae" / "checkpoint.pt", weights_only=True)
    assert same(run.networks.prior.state_dict(), goals["prior"]) and same(run.networks.known.state_dict(), goals["known"])
    for name, value in run.networks.others.state_dict().items():
        assert torch.equal(value, goals["known"][name].expand_as(value))
    # the first games begin with what the warm-up knows of who may come
    assert goals["known"]["prior"].any() and torch.equal(run.table.memory, run.networks.others.start(args.num_envs))


@pytest.mark.parametrize("version", [{"version": script.VERSION}, {"version": "0.1"}, {}])
def test_any_version_with_the_same_flags_is_resumed(tmp_path, version):
    config = {"script": "hopplus_selfplay.py", **version, **vars(script.Args(beta=3.0))}
    script.save_json(str(tmp_path / "config.json"), config)
    assert script.resolve_flags(script.Args(resume=str(tmp_path))).beta == 3.0


def test_a_run_left_before_its_first_checkpoint_begins_anew(tmp_path, capsys):
    folder = script.open_run(flags(tmp_path, run_name="left"))
    assert script.main(script.Args(resume=folder)) == 0
    assert "it begins anew" in capsys.readouterr().out and (tmp_path / "left" / "results.json").is_file()


def test_a_state_of_another_form_is_not_resumed(tmp_path):
    args = flags(tmp_path, resume="x")
    state = script.Run(flags(tmp_path)).state_dict()
    state["table"]["memory"] = state["table"]["memory"].chunk(2, -1)[0]  # as it was before version 0.3
    with pytest.raises(script.Refused, match="--resume x: its checkpoint does not fit this script"):
        script.Run(args, {"run": state})


def test_what_another_version_began_is_not_resumed(tmp_path):
    config = {"script": "hopplus_selfplay.py", **{key: value for key, value in vars(script.Args()).items() if key != "beta"}}
    script.save_json(str(tmp_path / "config.json"), config)
    with pytest.raises(script.Refused, match="was begun by another"):
        script.resolve_flags(script.Args(resume=str(tmp_path)))


@pytest.mark.parametrize("changes, words", [
    ({"search": "none", "beta": 3.0}, "--beta 3.0 means nothing with --search none"),
    ({"meetings": 3}, "--meetings 3 means nothing with --mode train"),
    ({"imagined_per_real": 0.0, "clip_coef": 0.1}, "--clip-coef 0.1 means nothing with --imagined-per-real 0"),
    ({"search_model": "rules", "world_model_checkpoint": "x"}, "--world-model-checkpoint x means nothing with --search-model rules"),
    ({"mode": "watch", "checkpoint": "x", "total_timesteps": 5}, "--total-timesteps 5 means nothing with --mode watch"),
    ({"mode": "adapt", "checkpoint": "x", "num_steps": 5}, "--num-steps 5 means nothing with --mode adapt"),
    ({"goals": "zero", "selector": "min"}, "--selector min means nothing with --goals zero"),
])
def test_a_flag_that_would_be_ignored_is_refused(changes, words):
    with pytest.raises(script.Refused, match=words):
        script.check_flags(script.Args(**changes))


def test_every_flag_stands_in_the_tables_of_what_is_checked():
    """No flag without a range, unless it is a choice, a name or a switch; none in a table that is no flag."""
    fields = {field.name for field in script.dataclasses.fields(script.Args)}
    in_ranges = {name for _, _, names in script.RANGES for name in names}
    ignored = {name for _, _, names in script.ignored_flags(script.Args()) for name in names}
    numbers = {name for name, value in vars(script.Args()).items() if type(value) in (int, float)}
    own = numbers - {field.name for base in (script.GameArgs, script.RunArgs) for field in script.dataclasses.fields(base)}
    assert in_ranges <= fields and ignored <= fields and own - in_ranges <= {"buffer_size", "seed"}


@pytest.mark.parametrize("line, words", [
    ("--players ns ns ns ns", "nobody is a HOP+ player"),
    ("--players hop", "two players or more"),
    ("--strengths 1 1 2 1", "equally strong"),
    ("--num-simulations 5 --num-trees 2", "--num-simulations 5 must be divisible by --num-trees 2"),
    ("--buffer-size 500", "--buffer-size 500 is less than the 1024"),
    ("--num-envs 1 --num-steps 2 --imagined-per-real 0", "--num-minibatches 12 are more than the 2 steps"),
    ("--mode adapt --players hop ns ns ns", "--mode adapt needs"),
    ("--checkpoint runs/x", "--checkpoint runs/x means nothing with --mode train"),
    ("--mode watch --checkpoint runs/none", "there is no "),
    ("--vae-checkpoint runs/none/checkpoint.pt", "there is no "),
    ("--world-model-checkpoint README.md", "is no checkpoint"),
    ("--players hop ns ns wolf", "'wolf'"),
    ("--warmup-players ns wolf", "'wolf'"),
    ("--beta -1", "--beta -1"),
])
def test_refused_flags_are_one_line_and_leave_nothing(tmp_path, line, words, monkeypatch, capsys):
    command = ["hopplus_selfplay.py", *line.split()]
    command += [] if "--mode watch" in line else ["--runs-dir", str(tmp_path / "runs")]
    command += [] if "--mode" in line else ["--total-timesteps", "1", "--warmup-meetings", "4"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        script.run_script(script.Args, script.main)
    error = capsys.readouterr().err
    lines = [text for text in error.replace("\r", "\n").splitlines()
             if text.strip() and "warming up" not in text]
    assert end.value.code == 2
    assert words in error and len(lines) == 1, error
    assert not (tmp_path / "runs").exists()


def test_command_line(tmp_path):
    """The script itself, as it is started: what is refused is one line and exit code 2."""
    command = [sys.executable, os.path.join(ROOT, "hopplus_selfplay.py")]
    command += ["--runs-dir", str(tmp_path / "runs"), "--beta", "-1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --beta -1.0 must lie between 0 and 1e+06\n"
    assert not (tmp_path / "runs").exists()


def test_the_learned_model_foresees_a_deadline_that_moves(monkeypatch):
    for name, value in (("WORLD_STEPS", 3000), ("WORLD_UPDATES", 300)):
        monkeypatch.setattr(script, name, value)
    args = script.Args(dynamic_final_time=True)
    model, _ = script.warm_up_world(args)
    tables = script.WorldTables(model, args.height, args.width, len(args.players))
    data = script.collect(script.board_of(args), 5_000, 77)
    after, _, _ = tables.step(data, data["actions"])
    right = after["deadline"] - after["clock"] == data["next_left"]
    moved = data["next_left"] < data["deadline"] - data["clock"] - 1
    assert moved.any() and right[moved].float().mean() > 0.98 and right.float().mean() > 0.995


def test_beliefs_follow_a_player_that_changes():
    """After any past a belief is open to another one: evidence of ten steps outweighs that of a thousand."""
    views = script.Views(4, 4, 4, 35)
    model = script.OtherModel(1, views, 16, 4, 2, seed=1)
    table = torch.log(torch.tensor([[0.9, 0.1], [0.1, 0.9]]))[:, None, None]  # [action, 1, 1, W]
    memory = model.start(1)
    seen = torch.ones(1, 1, dtype=torch.bool)
    for _ in range(1000):
        memory = model.remember(memory, table, torch.zeros(1, 1, dtype=torch.int64), seen)
    assert model.weights(memory)[0][0, 0, 0] > 0.99
    for _ in range(10):
        memory = model.remember(memory, table, torch.ones(1, 1, dtype=torch.int64), seen)
    assert model.weights(memory)[0][0, 0, 1] > 0.99


def test_hands_are_known_by_what_they_do():
    """Of two that play the same way, the one whose hand slips at every third step; neither is taken for another. One
    that does whatever is least likely of every way. And one that goes another way every four steps."""
    model = script.OtherModel(1, script.Views(4, 4, 4, 35), 16, 4, 2, seed=1)
    table = torch.log(torch.tensor([[0.98, 0.01], [0.01, 0.98], [0.01, 0.01]]))[:, None, None]  # [action, 1, 1, W]
    seen = torch.ones(1, 1, dtype=torch.bool)
    for hand, actions in enumerate(([0] * 30, [0, 0, 2] * 10, [2] * 30, [1, 1, 1, 1, 0, 0, 0, 0] * 4)):
        memory = model.start(1)
        for action in actions:
            memory = model.remember(memory, table, torch.full((1, 1), action), seen)
        ways, hands = model.weights(memory)
        hands = torch.cat([1 - hands.sum(-1, keepdim=True), hands], -1)[0, 0]
        assert hands[hand] > 0.9 and (ways[0, 0, 0] > (0.8 if hand == 3 else 0.99) or hand == 2), (ways, hands)


@pytest.mark.parametrize("change, mean, most", [(0.0, 5e-6, 5e-5), (0.002, 0.02, 0.2)])
def test_beliefs_about_a_table_are_bayes_rule(monkeypatch, change, mean, most):
    """Against a chain of all that a table of three may be: 8 states in which all play one of two ways with one of
    four hands, 512 in which each plays its own way with a hand of its own. Who is alike changes at once, and as
    likely turns to itself; each by itself changes, or all turn alike. Who is restless goes another way when it is
    seen, all that are alike the same when anybody is. Without change the rule is exact, with today's chance of change
    nearly so."""
    monkeypatch.setattr(script, "CHANGE", change)
    torch.manual_seed(0)
    games, steps = 40, 30
    model = script.CompanyModel(3, 3, script.Views(4, 4, 4, 35), 16, 4, 2, 1, silent=False)
    model.prior.data[:] = torch.tensor([0.3, -0.5])
    prior = model.before()[0, 0].detach().double()
    tables, seen = (2 * torch.randn(7, 3, steps, games, 2)).log_softmax(0), torch.rand(3, steps, games) < (1 if change else 0.7)
    way = torch.randint(2, (3, games)) * torch.tensor([1, 0] * (games // 2))  # at half of the tables all play the first way
    played = tables.exp().gather(-1, way[None, :, None, :, None].expand(7, -1, steps, -1, 1))[..., 0].movedim(0, -1)
    action = script.sample_actions(played, torch.Generator().manual_seed(1))
    with torch.no_grad():
        memories, taken = model.follow(model.start(games), tables, action, seen)
        found = torch.cat(model.weights(torch.stack(memories[1:])), -1).double()  # two ways, three hands [T, 3, B, 5]
    likely = torch.cat([(1 - slip) * taken.double().exp() + slip / 7 for slip in script.SLIPS], -1)
    each = torch.cartesian_prod(*[torch.arange(8)] * 3)  # [512, 3], what each plays
    begin = torch.cat([prior / 2, prior[each].prod(1) / 2])
    move = torch.zeros(520, 520, dtype=torch.float64)
    move[:, :8] = change * prior / 2  # the table turns alike
    move[:8, :8] += (1 - change) * torch.eye(8)
    move[range(8), [8 + number * 73 for number in range(8)]] += change / 2  # where all three play the same
    turned = (1 - change) * (each[:, None] == each) + change * prior[each]
    move[8:, 8:] = (1 - change / 2) * turned.prod(2)
    turns = torch.eye(8, dtype=torch.float64).repeat(2, 1, 1)  # whether it was seen, before, after
    turns[1, 6:, 6:] = (1 - script.TURN) * torch.eye(2) + script.TURN * prior[6:] / prior[6:].sum()
    assert torch.allclose(move.sum(1), torch.ones(520, dtype=torch.float64))
    plays = torch.cat([torch.arange(8).expand(3, -1), each.T], 1)  # [3, 520]
    truths = torch.stack([plays % 2 == 0, plays % 2 == 1, *(plays // 2 == hand for hand in (1, 2, 3))])  # as in `found`
    apart = torch.zeros(games)  # the largest difference in each game
    for game in range(games):
        state = begin.clone()
        for t in range(steps):
            chance, saw = likely[:, t, game], seen[:, t, game].long()  # [3, 8], [3]
            chance = torch.where(saw[:, None] > 0, chance, 1.0)
            state *= torch.cat([chance.prod(0), chance[torch.arange(3), each].prod(1)])
            state /= state.sum()
            many = torch.einsum("abc,ai,bj,ck->ijk", state[8:].view(8, 8, 8), *turns[saw])  # each turns by itself
            state = torch.cat([state[:8] @ turns[saw.amax()], many.flatten()]) @ move
            apart[game] = max(apart[game], (found[t, :, game] - (truths * state).sum(-1).T).abs().max())
    assert apart.mean() < mean and apart.max() < most, (apart.mean(), apart.max())


def test_what_a_table_is_as_one_teaches_hypotheses_nothing():
    model = script.CompanyModel(3, 3, script.Views(4, 4, 4, 35), 16, 4, 2, 1, silent=False)
    logits = torch.randn(7, 3, 5, 4, 2, requires_grad=True)
    action, seen = torch.randint(7, (3, 5, 4)), torch.ones(3, 5, 4, dtype=torch.bool)
    memories, _ = model.follow(model.start(4), logits.log_softmax(0), action, seen)
    apart, alike = memories[-1].chunk(2, -1)
    weight = torch.randn(4, 8)
    assert torch.autograd.grad((apart * weight).sum(), logits, retain_graph=True)[0].abs().max() > 1e-3
    assert torch.autograd.grad((alike * weight).sum(), logits)[0].abs().max() == 0


def test_players_of_a_table_that_change_together_are_believed_sooner():
    """Three that turn at once, and one that does while two go on: the first is seen after fewer steps."""
    model = script.CompanyModel(3, 3, script.Views(4, 4, 4, 35), 16, 4, 2, 1, silent=False)
    table = torch.log(torch.tensor([[0.7, 0.3], [0.3, 0.7]]))[:, None, None].expand(2, 3, 1, 2)  # [action, P, B, W]
    seen = torch.ones(3, 1, dtype=torch.bool)
    needed = []
    for turned in ([1, 1, 1], [1, 0, 0]):
        memory = model.start(1)
        for _ in range(100):
            memory = model.remember(memory, table, torch.zeros(3, 1, dtype=torch.int64), seen)
        assert (model.weights(memory)[0][..., 0] > 0.99).all()
        steps = 0
        while model.weights(memory)[0][0, 0, 1] < 0.5 and steps < 100:
            memory, steps = model.remember(memory, table, torch.tensor(turned)[:, None], seen), steps + 1
        needed.append(steps)
    assert needed[0] * 2 < needed[1] < 30, needed
    order = [2, 0, 1]  # players are interchangeable
    action = torch.tensor([[0], [1], [1]])
    mixed = model.remember(memory, table, action, seen)
    torch.testing.assert_close(model.remember(memory[order], table, action[order], seen), mixed[order])


def test_a_table_of_two_is_one_player():
    """Where there is one to be read, it is alike with itself."""
    views = script.Views(4, 4, 2, 35)
    model = script.CompanyModel(1, 1, views, 16, 4, 3, 1, silent=False)
    alone = script.OtherModel(1, views, 16, 4, 3, 1)
    tables, action = torch.rand(7, 1, 9, 5, 3).log_softmax(0), torch.randint(7, (1, 9, 5))
    seen = torch.rand(1, 9, 5) < 0.8
    with torch.no_grad():
        mine, _ = model.follow(model.start(5), tables, action, seen)
        other, _ = alone.follow(alone.start(5), tables, action, seen)
    for one, two in zip(mine, other):
        torch.testing.assert_close(model.weights(one), alone.weights(two))
