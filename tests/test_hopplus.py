"""hopplus_selfplay.py: its search against a slow one and exact solutions, its beliefs, its runs from end to end."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest
import torch

import hopplus_selfplay as script

HERE = os.path.dirname(os.path.abspath(__file__))
SMALL = dict(total_timesteps=256, num_envs=4, num_steps=16, hidden_size=16, vae_size=16, warmup_games=8, warmup_epochs=1,
             warmup_updates=20, compare_episodes=4, eval_episodes=8, eval_policy_episodes=8, simulations=4, imagined_ratio=2.0, save_every=1e9,
             picture_every=1e9, search_model="rules", moa_decisions=30)


def flags(tmp_path, **changes):
    return script.Args(**{**SMALL, "runs_dir": str(tmp_path), "run_name": "run", **changes})


def weights(folder):
    return torch.load(os.path.join(folder, "checkpoint.pt"), weights_only=True)["minds"]


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def sharpen(minds):
    """Networks that have opinions: fresh policies and models are nearly uniform."""
    with torch.no_grad():
        minds.agent.w_actor.mul_(100)
        minds.moa.action.weight.mul_(100)


# ------------------------------------------------------------------------------------ the search


class SlowSearch:
    """The same search in one tree, a node at a time, as one would write it down."""

    def __init__(self, model, mind, state, beta, floor, gamma, scale, widening, draws, outcomes=8):
        self.model, self.mind, self.gamma, self.scale = model, mind, gamma, scale
        self.widening, self.draws, self.outcomes = widening, draws, outcomes
        self.root = self.node(state, 0.0, False)
        self.beta = beta / scale if floor is None else beta / (abs(self.root["value"]) + floor * scale)

    def node(self, state, reward, over):
        log_probs, value, chances = self.mind.think(self.model.see(state))
        return {"state": state, "reward": reward, "over": over, "policy": log_probs[0].tolist(),
                "value": 0.0 if over else value.item(), "chances": chances[0].double().cumsum(-1).tolist(),
                "visits": [0] * 7, "totals": [0.0] * 7, "children": [[] for _ in range(7)]}

    def choose(self, node):
        policy = [math.exp(p) for p in node["policy"]]
        tried = [a for a in range(7) if node["visits"][a]]
        mixed = node["value"]
        if tried:
            mass = sum(policy[a] for a in tried)
            mean = sum(policy[a] * node["totals"][a] / node["visits"][a] for a in tried) / max(mass, 1e-9)
            total = sum(node["visits"])
            mixed = (node["value"] + total * mean) / (1 + total)
        q = [node["totals"][a] / node["visits"][a] if node["visits"][a] else mixed for a in range(7)]
        scores = [p + self.beta * value for p, value in zip(node["policy"], q)]
        top = max(scores)
        improved = [math.exp(s - top) for s in scores]
        share = [i / sum(improved) - n / (1 + sum(node["visits"])) for i, n in zip(improved, node["visits"])]
        legal = [a for a in range(7) if node["policy"][a] > -1e7]
        return max(legal, key=lambda a: share[a])

    def simulate(self, number):
        node, path = self.root, []
        for depth in range(number):
            action = self.choose(node)
            move_draws, again_draw = self.draws[number - 1][depth]
            moves = []
            for chance, draw in zip(node["chances"], move_draws):
                moves.append(sum(c <= draw * (1 - 1e-6) * chance[-1] for c in chance))
            children = node["children"][action]
            found = [child for child in children if child["moves"] == moves]
            if found:
                child, fresh = found[0], False
            elif len(children) < self.outcomes and len(children) < self.widening * math.sqrt(node["visits"][action] + 1):
                actions = torch.tensor([action, *moves])[:, None]
                state, reward, over = self.model.step(node["state"], actions)
                child = {"moves": moves, "count": 0, "node": self.node(state, reward.item() * self.scale, bool(over))}
                children.append(child)
                fresh = True
            else:
                place, total = again_draw * (1 - 1e-6) * sum(c["count"] for c in children), 0
                for child in children:
                    total += child["count"]
                    if total > place:
                        break
                fresh = False
            path.append((node, action, child))
            node = child["node"]
            if fresh or node["over"]:
                break
        value = 0.0 if node["over"] else node["value"]
        for parent, action, child in reversed(path):
            value = child["node"]["reward"] + self.gamma * value
            parent["visits"][action] += 1
            parent["totals"][action] += value
            child["count"] += 1


@pytest.mark.parametrize("floor", [None, 0.5])
def test_search_equals_the_slow_one_node_for_node(monkeypatch, tmp_path, floor):
    args = flags(tmp_path, players=("hop", "ns", "ns"), stags=1, hares=2, height=3, width=3, final_time=6)
    torch.manual_seed(0)
    meeting = script.Meeting(args, 12, 3)
    sharpen(meeting.minds)
    state = script.ego_first(meeting.game, meeting.seats)
    told, goals = torch.randn(1, 12, 2 * args.goal_dim), torch.randn(1, 12, 2, args.goal_dim)
    agent, moa, model = meeting.minds.agent, meeting.minds.moa, meeting.model
    drawn, per_simulation, rand, step = [], [], torch.rand, model.step
    monkeypatch.setattr(script.torch, "rand", lambda *shape, **kw: drawn.append(rand(*shape, **kw)) or drawn[-1])

    def step_and_cut(*arguments):
        per_simulation.append(list(drawn))
        drawn.clear()
        return step(*arguments)

    monkeypatch.setattr(model, "step", step_and_cut)
    visits, q, *_ = script.search(model, script.Mind(agent, moa, told, goals), state, 60, 2.4, floor, 0.97, 0.2, 1.0,
                                  torch.Generator().manual_seed(5))
    monkeypatch.undo()
    assert len(per_simulation) == 60 and max(len(draws) for draws in per_simulation) >= 6  # three levels deep and more
    with torch.no_grad():
        for tree in range(12):
            draws = [[(moves[tree, :, 0].double().tolist(), again[tree, 0].double().item())
                      for moves, again in zip(draws[::2], draws[1::2])] for draws in per_simulation]
            one = {name: part[..., tree:tree + 1] for name, part in state.items()}
            mind = script.Mind(agent, moa, told[:, tree:tree + 1], goals[:, tree:tree + 1])
            slow = SlowSearch(model, mind, one, 2.4, floor, 0.97, 0.2, 1.0, draws)
            for number in range(1, 61):
                slow.simulate(number)
            assert visits[tree].tolist() == slow.root["visits"], tree
            mean = [t / max(n, 1) for t, n in zip(slow.root["totals"], slow.root["visits"])]
            assert q[tree].tolist() == pytest.approx(mean, abs=1e-4)


def test_the_mind_of_a_search_answers_as_the_networks_do(tmp_path):
    """What a search computes once for all positions changes nothing, and each model is asked about the right player."""
    args = flags(tmp_path, players=("hop", "ns", "hop"), height=5, width=9, stags=2, hares=9, max_blocks=2)
    meeting = script.Meeting(args, 7, 1)
    sharpen(meeting.minds)
    for _ in range(6):
        meeting.game.advance(meeting.game.random_actions())
    assert (meeting.game.cell == 45).any() and (meeting.game.board == 0).any()  # somebody has left, there are obstacles
    state = script.ego_first(meeting.game, meeting.seats)
    x = meeting.model.features(state)  # [3, 2 * 7, F]
    told, goals = torch.randn(2, 7, 2 * args.goal_dim), torch.randn(2, 7, 2, args.goal_dim)
    with torch.no_grad():
        mind = script.Mind(meeting.minds.agent, meeting.minds.moa, told, goals)
        log_probs, value, chances = mind.think(meeting.model.see(state))
        rows = x.float().unflatten(1, (2, 7))
        expected, expected_value = meeting.minds.agent(torch.cat([told, rows[0]], -1))
        assert torch.allclose(log_probs, expected.flatten(0, 1), atol=1e-4)
        assert torch.allclose(value, expected_value.flatten(), atol=1e-5)
        for hop in range(2):
            for other in range(2):
                seen = torch.zeros(4, 7, rows.shape[-1])
                goal = torch.zeros(4, 7, args.goal_dim)
                pair = hop * 2 + other
                seen[pair], goal[pair] = rows[1 + other, hop], goals[hop, :, other]
                expected = meeting.minds.moa(seen, goal).exp()[pair]
                assert torch.allclose(chances.unflatten(0, (2, 7))[hop, :, other], expected, atol=1e-5)


@pytest.mark.parametrize("board", [{}, {"height": 9, "width": 5, "stags": 3, "hares": 7, "max_blocks": 3},
                                   {"players": ("hop", "hop"), "height": 1, "width": 12}, {"final_time": 300}])
@pytest.mark.parametrize("learned", [False, True])
def test_what_the_search_looks_up_are_the_features(tmp_path, board, learned):
    """Row numbers, clock and mask of `see` tell the same as the features, count by count."""
    meeting = script.Meeting(flags(tmp_path, **board), 9, 4)
    torch.manual_seed(1)
    model = script.LearnedModel(meeting.model.scratch, script.WorldModel(hidden_size=8)) if learned else meeting.model
    state, gone = script.ego_first(meeting.game, meeting.seats), False
    for step in range(12):
        x = model.features(state).long()
        rows, clock, mask = model.see(state)
        assert rows.max() <= x.shape[-1]
        counts = torch.zeros(*x.shape[:2], x.shape[-1] + 1, dtype=torch.int64).scatter_add_(2, rows.long(), torch.ones_like(rows).long())
        counts[..., -10:-8] += clock.long()
        assert torch.equal(counts[..., :-1], x) and torch.equal(mask, x[..., -7:] != 0)
        gone |= bool((state["cell"] == meeting.game.cells).any())
        state = model.step(state, torch.randint(7, state["cell"].shape))[0]
        if step == 8:
            state["clock"] = state["clock"] + 250  # more than a byte holds
    assert gone or learned


def exact_values(model, state, gamma):
    """The value of each own action against a co-player that draws uniformly from its legal actions, solved exactly."""
    values, mask = [-math.inf] * 7, model.see(state)[2]
    legal = [mask[player, 0].nonzero()[:, 0].tolist() for player in range(2)]
    for action in legal[0]:
        total = 0.0
        for move in legal[1]:
            after, reward, over = model.step(state, torch.tensor([[action], [move]]))
            later = 0.0 if over else max(exact_values(model, after, gamma))
            total += (reward.item() + gamma * later) / len(legal[1])
        values[action] = total
    return values


def test_the_best_action_is_found_as_simulations_grow(tmp_path):
    args = flags(tmp_path, players=("hop", "random"), stags=1, hares=1, height=2, width=2, final_time=3, goals="none")
    meeting = script.Meeting(args, 16, 2)
    state = script.ego_first(meeting.game, meeting.seats)
    exact = torch.tensor([exact_values(meeting.model, {name: part[..., env:env + 1] for name, part in state.items()}, 0.9)
                          for env in range(16)])
    best, share = exact.amax(1), []
    told, goals = torch.zeros(1, 16, args.goal_dim), torch.zeros(1, 16, 1, args.goal_dim)
    mind = script.Mind(meeting.minds.agent, meeting.minds.moa, told, goals, uniform=True)
    for simulations in (4, 64, 1024):
        visits, q, policy, *_ = script.search(meeting.model, mind, state, simulations, 5.0, None, 0.9, 1.0, 8.0,
                                              torch.Generator().manual_seed(1), outcomes=16)
        picked = torch.where(visits > 0, q, -math.inf).argmax(1, keepdim=True)
        share.append((exact.gather(1, picked)[:, 0] > best - 0.02).float().mean().item())
    assert share[2] == 1.0 and share[0] < share[2], share


def test_each_player_searches_its_own_view_of_the_same_game(tmp_path):
    """Relabelling the players relabels the states that the search starts from, and so its result."""
    args = flags(tmp_path, height=4, width=5, max_blocks=1)
    meeting = script.Meeting(args, 20, 2)
    for _ in range(4):
        meeting.game.step(meeting.game.random_actions())
    state, turned = meeting.game.get_state(), script.Meeting(args, 20, 9)
    turned.game.set_state({**{key: state[key] for key in ("board", "clock", "deadline")},
                           "cell": state["cell"].roll(1, 1), "previous": state["previous"].roll(1, 1)})
    one, two = (script.ego_first(m.game, m.seats) for m in (meeting, turned))
    for name in one:
        rows = lambda x: x.unflatten(-1, (4, 20))
        assert torch.equal(rows(one[name])[..., 0, :], rows(two[name])[..., 1, :]), name
    x = meeting.model.features(one)
    observed = script.features(meeting.game.observe())
    for seat in range(4):
        for other in range(4):
            assert torch.equal(x[other].unflatten(0, (4, 20))[seat], observed[(seat + other) % 4])


def test_the_learned_model_and_the_rules_say_the_same_about_a_board(tmp_path):
    game = script.BatchedStagHunt(50, height=5, width=4, max_blocks=2, stags=1, hares=2)
    for _ in range(3):
        game.step(game.random_actions())
    board = game.board[:-1]
    ground = ((board == 0).to(torch.uint8) | (board & script.STAG_BIT) >> 4 | (board & script.HARE_BIT) >> 4).T
    assert torch.equal(script.board_from_ground(ground, 5, 4), game.board)


# ------------------------------------------------------------------------------- beliefs and learning


def test_goals_in_hindsight_are_the_best_states_that_were_reached(tmp_path):
    args = flags(tmp_path, horizon=4, goals="latent")
    meeting = script.Meeting(args, 4, 1)
    generator = torch.Generator().manual_seed(2)
    data = script.play_steps(meeting, script.Returns(4, 4, "cpu"), 12, generator, "none")
    data["values"] = torch.randn(data["values"].shape, generator=generator)
    mean, _ = script.goals_in_hindsight(meeting, data)
    for pair, seat in enumerate(meeting.pairs.tolist()):
        hop = pair // 3
        for env in range(4):
            for t in range(12):
                worth, states = [], []
                for ahead in range(t, min(t + 4, 12)):
                    reader = meeting.hop_seats[hop]
                    goes_on = not data["ends"][ahead, reader, env]
                    worth.append(data["rewards"][ahead, reader, env] * args.reward_scale
                                 + args.gamma * goes_on * data["values"][ahead + 1, hop, env])
                    states.append(data["after"][ahead, seat, env].float())
                    if data["ends"][ahead, seat, env]:
                        break
                view = states[max(range(len(worth)), key=lambda k: worth[k])]
                expected = meeting.minds.prior.encode(view.expand(4, 1, -1))[0][hop, 0]
                assert torch.allclose(mean[pair, t, env], expected, atol=1e-5)


@pytest.mark.parametrize("goals", ["latent", "prey"])
def test_a_belief_is_about_the_one_who_acted(tmp_path, goals):
    """Relabelling the others relabels what is believed of them: the seats behind the beliefs are the right ones."""
    args = flags(tmp_path, goals=goals)
    meeting = script.Meeting(args, 6, 1)
    assert meeting.pairs.tolist() == [1, 2, 3, 2, 3, 0, 3, 0, 1, 0, 1, 2]
    generator = torch.Generator().manual_seed(3)
    carry = meeting.carry.clone()
    actions, seen = meeting.act(generator, "none")
    for pair, seat in enumerate(meeting.pairs.tolist()):
        if goals == "latent":
            x = seen["x"][[seat] * 12].float()
            mean = meeting.minds.inference.step(carry, x)[1][pair]
            assert torch.allclose(mean, seen["mean"][pair // 3, pair % 3], atol=1e-6)
    game = meeting.game
    on_hare = (game.board & script.HARE_BIT).T.bool()
    game.cell[:, :] = on_hare.float().argmax(1)  # everybody on a hare
    meeting.observation = game.observe()
    x = script.features(meeting.observation)
    move = torch.full((6, 4), script.STAY)
    move[:, 2] = script.HUNT_HARE
    meeting.play(move, x)
    if goals == "prey":
        hunted = meeting.counts[:, :, 1] > 1
        assert hunted.any(1).tolist() == [seat == 2 for seat in meeting.pairs.tolist()]


def test_absent_players_teach_nothing(tmp_path):
    args = flags(tmp_path)
    losses = []
    for other in (False, True):
        torch.manual_seed(0)
        meeting = script.Meeting(args, 4, 1)
        generator = torch.Generator().manual_seed(2)
        data = script.play_steps(meeting, script.Returns(4, 4, "cpu"), 16, generator, "none")
        away = ~data["present"]
        assert away.any()
        if other:  # what is recorded of those that have left is changed
            data["joint"][away] = 2
        optimizer = torch.optim.Adam([*meeting.minds.moa.parameters(), *meeting.minds.inference.parameters()])
        chunk = data | {"carry": data["carry"][0]}
        losses.append(script.learn_others(meeting, [chunk], optimizer, torch.Generator().manual_seed(4)))
    for key in losses[0]:
        assert torch.allclose(losses[0][key], losses[1][key], atol=1e-6), key


def test_a_buffer_draws_what_was_added_last_and_the_absent_at_the_end():
    pairs = torch.tensor([1, 2, 2])
    memory = script.Recent(10, pairs)
    for begin in range(0, 24, 4):  # 24 steps, of which the last 10 are kept
        number = torch.arange(begin, begin + 4)
        weight = (number % 3 != 0).expand(3, -1)
        memory.add({"x": number.to(torch.uint8)[None, :, None].expand(3, -1, 5) + torch.tensor([0, 50, 100])[:, None, None].to(torch.uint8),
                    "action": number.expand(3, -1), "weight": weight,
                    "mean": number[None, :, None].expand(3, -1, 2).half() + torch.arange(3)[:, None, None],
                    "logvar": -number[None, :, None].expand(3, -1, 2).half()})
    rows = memory.draw(40, torch.Generator().manual_seed(0))
    x, action, weight, mean, logvar = memory.pick(rows)
    for pair, seat in enumerate(pairs.tolist()):
        assert set(action[pair].tolist()) <= set(range(14, 24)) and len(set(action[pair].tolist())) >= 7
        assert torch.equal(x[pair, :, 0], action[pair] + 50.0 * seat) and torch.equal(mean[pair, :, 0], action[pair] + float(pair))
        assert torch.equal(logvar[pair, :, 1], -action[pair].float())
        assert torch.equal(weight[pair], (action[pair] % 3 != 0).float())
        assert (weight[pair].diff() <= 0).all() and weight[pair, :30].all()
    again = script.Recent(10, pairs)
    again.set_state(memory.get_state())
    assert again.added == memory.added and all(torch.equal(again.columns[key], memory.columns[key]) for key in memory.columns)


def test_imagined_strangers_are_met_as_real_ones_are(tmp_path):
    """Belief and strangers' moves, worked out for each player, game and other one by one."""
    args = flags(tmp_path, final_time=5, players=("hop", "ns", "hop"), mix=("ns", "nh"))
    meeting, record, goals = script.build_players(args)
    minds, hops, others, num, dim = meeting.minds, 2, 2, 3, args.goal_dim
    sharpen(minds)
    seen, chances = [], []
    dreamer = script.Strangers(meeting, num, torch.Generator().manual_seed(1), record, goals)
    dreamer.MEETING = 2
    think, states = dreamer.think, []

    def spy(x):
        states.append((dreamer.types.clone(), dreamer.tremble.clone(), dreamer.carry.clone()))
        answer = think(x)
        seen.append(x)
        chances.append(answer[3])
        return answer

    dreamer.think = spy
    plays, lessons, steps = [], [], 48
    for _ in range(steps // 8):
        plays.append(dreamer.play(8))
        lessons.append(dreamer.lesson)
        for part in (seen, chances, states):
            part.pop()  # the look at what comes after the last step
    data = {key: torch.cat([play[key][:8] for play in plays]) for key in plays[0]}
    new_ones = 0
    for hop in range(hops):
        for game in range(num):
            carry = minds.inference.start(1).detach()
            for t in range(steps):
                row = hop * num + game
                types, tremble, before = states[t]
                own = slice(hop * others, (hop + 1) * others)
                nobody_known = torch.equal(before[own, game], minds.inference.start(1)[own, 0])
                if t > 0 and nobody_known:
                    assert t % 8 == 0
                    carry, new_ones = minds.inference.start(1).detach(), new_ones + 1
                elif t > 0:
                    assert torch.equal(types[own, game], states[t - 1][0][own, game])
                    assert torch.equal(tremble[hop, game], states[t - 1][1][hop, game])
                x = torch.zeros(hops * others, 1, seen[t].shape[-1])
                for other in range(others):
                    x[hop * others + other] = seen[t][1 + other, row].float()
                if t % 8 == 0:
                    assert torch.allclose(lessons[t // 8]["carry"][own, game], carry[own, 0], atol=1e-5)
                carry, mean, _ = minds.inference.step(carry, x)
                told = mean[hop * others:(hop + 1) * others, 0].flatten()
                assert torch.allclose(data["x"][t, hop, game, :others * dim], told, atol=1e-5), (hop, game, t)
                for other in range(others):
                    pair = hop * others + other
                    one = x[pair][None]
                    lesson = {key: part[pair, t % 8, game] for key, part in lessons[t // 8].items() if key != "carry"}
                    assert torch.equal(lesson["x"], one[0, 0]) and lesson["over"] == data["ends"][t, hop, game]
                    goal, _ = goals.inference.read(types[pair, game][None, None], goals.inference.glance(one))
                    legal = (one[0, 0, -7:] != 0).float()
                    mixed = (1 - tremble[hop, game]) * goals.moa(one, goal).exp()[0, 0] + tremble[hop, game] * legal / legal.sum()
                    assert torch.allclose(chances[t][row, other], mixed, atol=1e-5)
                    assert chances[t][row, other, lesson["action"]] > 0 and lesson["there"] >= (legal.sum() > 1)
                    if t + 1 < steps and (t + 1) % 8 and not lesson["over"]:  # the next view shows what was done
                        assert minds.inference.played(seen[t + 1][1 + other, row][None, None]) == lesson["action"]
                if data["ends"][t, hop, game]:
                    carry = script.next_episode(carry, torch.ones(1, dtype=torch.bool), args.hypotheses)
    assert new_ones > 3 and (states[-1][1] > 0).any()
    # a type is what is known of that seat's player at the end of one recorded meeting
    pair, seat, which = 3, int(meeting.pairs[3]), 2
    x = record["x"][:, seat, which][None, :, None].float()
    carry = goals.inference.start(1)
    for t in range(x.shape[1]):
        carry, _, _ = goals.inference.step(carry, x[:, t])
        carry = script.next_episode(carry, record["over"][t, which:which + 1], args.hypotheses)
    assert torch.allclose(dreamer.cast[pair, which], carry[0, 0, :args.hypotheses], atol=1e-3)


def test_beliefs_that_know_are_told_from_those_that_do_not():
    goal = torch.randn(2, 5, 40, 3, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(2, 200)
    sure = script.belief_accuracy(goal + 0.01, torch.zeros_like(goal), goal, weight, False)
    blind = script.belief_accuracy(torch.zeros_like(goal), torch.zeros_like(goal), goal, weight, False)
    assert (sure > 0.99).all() and ((blind - 0.5).abs() < 0.15).all()
    prey = torch.tensor([1.0, 0.0]).expand(1, 1, 4, 2)
    mean = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.9, 0.1]])[None, None]
    weight = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert script.belief_accuracy(mean, mean, prey, weight, True).item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_with_a_floor_of_0_the_size_of_the_prizes_means_nothing_to_the_search(scale):
    value = torch.tensor([0.3, 0.02]) * scale
    assert torch.allclose(script.sharpness(6.0, 0.0, value, 0.2)[:, 0] * value, torch.full((2,), 6.0))
    assert torch.allclose(script.sharpness(6.0, None, value, 0.2), torch.tensor(30.0))


# -------------------------------------------------------------------------------- runs from end to end


@pytest.mark.parametrize("changes", [
    {"search_model": "learned"},
    {"players": ("hop", "ns", "mix:nh,random", "hop"), "goals": "prey", "buffer": "episodes"},
    {"players": ("ns", "hop", "ns", "ns"), "goals": "zero", "search": "none", "imagined_ratio": 0.0},
    {"players": ("hop", "hop"), "goals": "none", "search": "one-step", "height": 5, "width": 4, "max_blocks": 1, "hares": 2},
    {"selector": "min", "moa_samples": "rewarded", "trees": 1, "rehearse": False},
    {"goals": "zero"},
])
def test_a_short_run_leaves_its_results(tmp_path, changes):
    args = flags(tmp_path, **changes)
    assert script.main(args) == 0
    folder = tmp_path / "run"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["timesteps"] == 256 and (results["simulations"] > 0) == (args.search != "none")
    assert (results["imagined_steps"] > 0) == (args.imagined_ratio > 0)
    assert set(results["evaluation"]) == ({"policy"} if args.search == "none" else {"searched", "policy"})
    hops = [seat for seat, name in enumerate(args.players) if name == "hop"]  # one alone is modelled by nobody
    assert set(results["moa"]) == {name for seat, name in enumerate(args.players) if [seat] != hops}
    for moa in results["moa"].values():
        assert 0 < moa["top1"] <= moa["top1_ceiling"] + 1e-6 and moa["cross_entropy"] >= moa["cross_entropy_floor"] - 1e-6
    assert any(name.endswith(".gif") for name in os.listdir(folder / "pictures"))
    assert (folder / "pictures" / "learning.png").stat().st_size > 5000
    if args.search != "none":
        updates = 256 // (args.num_envs * args.num_steps)
        assert len(results["search_curve"]) == updates.bit_length()
        assert all({"timesteps", "searched", "policy"} == set(point) for point in results["search_curve"])
    assert ("world_model" in results) == (args.search_model == "learned")
    assert all(0 <= share <= 1 for share in results.get("world_model", {}).values())
    assert (results["belief_accuracy"] is not None) == (args.goals in ("latent", "prey"))


def test_a_stopped_run_resumes_to_the_same_weights(tmp_path, monkeypatch):
    script.main(flags(tmp_path, run_name="whole", eval_episodes=0, eval_policy_episodes=0))
    learn, calls = script.learn_others, []

    def stop_at_the_second(*arguments):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return learn(*arguments)

    monkeypatch.setattr(script, "learn_others", stop_at_the_second)
    assert script.main(flags(tmp_path, run_name="halves", eval_episodes=0, eval_policy_episodes=0)) == 130
    assert script.main(script.Args(resume=str(tmp_path / "halves"))) == 0
    assert same(weights(tmp_path / "halves"), weights(tmp_path / "whole"))


def test_what_another_version_began_is_not_resumed(tmp_path):
    config = {"script": "hopplus_selfplay.py", **{key: value for key, value in vars(script.Args()).items() if key != "tremble"}}
    script.save_json(str(tmp_path / "config.json"), config)
    with pytest.raises(script.Refused, match="begun by another version of hopplus_selfplay.py"):
        script.resolve_flags(script.Args(resume=str(tmp_path)))


def test_a_checkpoint_moves_to_a_device_but_for_random_generators():
    state = {"generator": torch.ones(2), "parts": [(torch.ones(3), None), {"clock": torch.ones(1), "generator": torch.ones(1)}], "n": 3}
    moved = script.on_device(state, "meta")
    assert moved["generator"].device.type == moved["parts"][1]["generator"].device.type == "cpu" and moved["n"] == 3
    assert moved["parts"][0][0].is_meta and moved["parts"][0][1] is None and moved["parts"][1]["clock"].is_meta


def test_a_trained_player_meets_strangers_and_can_be_watched(tmp_path, capsys):
    script.main(flags(tmp_path, run_name="trained", eval_episodes=0, eval_policy_episodes=0))
    trained = str(tmp_path / "trained")
    for changes in ({}, {"adapt_moa": True}):
        args = flags(tmp_path, mode="adapt", checkpoint=trained, players=("hop", "nh", "nh", "random"), episodes=3, repeats=4,
                     run_name=f"adapt{len(changes)}", **changes)
        assert script.main(args) == 0
        results = json.loads((tmp_path / f"adapt{len(changes)}" / "results.json").read_text(encoding="utf-8"))
        assert len(results["episodes"]) == 3 and len(results["second_half"]["seats"]) == 4
    capsys.readouterr()
    assert script.main(flags(tmp_path, mode="watch", checkpoint=trained)) == 0
    printed = capsys.readouterr().out
    assert "step 0, 35 left" in printed and "believes of player" in printed and "search expects" in printed


@pytest.mark.parametrize("changes, words", [
    ({"goals": "prey", "tremble": 0.3}, "--tremble 0.3 means nothing with --goals prey"),
    ({"goals": "prey", "mix": ("ns",)}, "means nothing with --goals prey"),
    ({"imagined_ratio": 0.0, "strangers": 0.5}, "--strangers 0.5 means nothing with --imagined-ratio 0"),
    ({"strangers": 0.0, "tremble": 0.0}, "--tremble 0.0 means nothing with --strangers 0"),
])
def test_a_flag_that_would_be_ignored_is_refused(tmp_path, changes, words):
    with pytest.raises(script.Refused, match=words):
        script.check_flags(script.Args(**changes))


@pytest.mark.parametrize("line, words", [
    ("--players ns ns ns ns", "nobody is a HOP+ player"),
    ("--players hop", "two players or more"),
    ("--simulations 5 --trees 2", "--simulations 5 must be divisible by --trees 2"),
    ("--buffer-size 500", "--buffer-size 500 is less than the 1024"),
    ("--mode adapt --players hop ns ns ns", "--mode adapt needs"),
    ("--checkpoint runs/x", "--checkpoint runs/x is for"),
    ("--mode watch --checkpoint runs/none", "there is no file"),
    ("--vae-checkpoint runs/none/checkpoint.pt", "there is no file"),
    ("--world-model-checkpoint README.md", "is no checkpoint"),
    ("--players hop ns ns wolf", "'wolf'"),
    ("--mix ns wolf", "--mix 'wolf'"),
    ("--beta -1", "--beta -1"),
])
def test_refused_flags_are_one_line_and_leave_nothing(tmp_path, line, words):
    command = [sys.executable, os.path.join(HERE, "..", "hopplus_selfplay.py"), "--runs-dir", str(tmp_path / "runs"),
               "--warmup-games", "4", "--warmup-epochs", "1", "--total-timesteps", "1"]
    done = subprocess.run(command + line.split(), capture_output=True, text=True, cwd=os.path.join(HERE, ".."))
    lines = [text for text in done.stderr.replace("\r", "\n").splitlines() if text.strip() and "warming up" not in text]
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and len(lines) == 1, done.stderr
    assert not (tmp_path / "runs").exists()
