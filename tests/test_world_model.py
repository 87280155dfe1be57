"""train_world_model.py and test_obs_reward_model.py: rows, the model's make, what it learns, the report, resuming."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import test_obs_reward_model as tester
import train_world_model as script
from envs import batched

HERE = os.path.dirname(os.path.abspath(__file__))
SMALL = dict(boards=("4x4", "5x6b2"), rows=10_000, held_out_rows=1000, num_updates=400, batch_size=512,
             check_every=400, save_every=1e9)
BOARDS = ["4x4", "6x5b2p3", "5x5p6s2"]


def flags(tmp_path, **changes):
    return script.Args(**{**SMALL, "runs_dir": str(tmp_path), "run_name": "run", **changes})


def board(text="4x4", **changes):
    return script.parse_board(text, script.Args(**changes))


def state_of(rows):
    """The states of rows, as a search carries them."""
    previous = torch.zeros_like(rows["actions"], dtype=torch.uint8)
    return {**{name: rows[name] for name in ("cell", "board", "clock", "deadline")}, "previous": previous}


def predict(model, rows):
    with torch.no_grad():
        return model(script.views_of(rows), rows["actions"].T, rows["clock"], rows["deadline"] - rows["clock"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with a few updates on small boards."""
    folder = tmp_path_factory.mktemp("runs")
    assert script.main(flags(folder)) == 0
    return os.path.join(folder, "run")


@pytest.fixture(scope="module")
def model(trained):
    return tester.load_world_model(os.path.join(trained, "checkpoint.pt"), "--checkpoint")[0]


# ------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize("text", BOARDS)
def test_views_are_those_of_the_game(text):
    game = batched.BatchedStagHunt(200, seed=3, **board(text))
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        actions = torch.randint(7, game.cell.T.shape, generator=generator)
        game.reset(game.advance(actions)["over"])
    observation, n = game.observe(), game.num_players
    for ego in range(n):
        cell = game.cell[(ego + torch.arange(n)) % n]
        view = script.views_of({"cell": cell, "board": game.board, "height": game.height, "width": game.width})
        assert torch.equal(view, observation["observation"][:, ego])
        assert torch.equal(tester.legal_actions(view), observation["action_mask"][:, ego])
        packed, packed_board = script.pack(view)
        assert torch.equal(packed, cell) and torch.equal(packed_board, game.board)


@pytest.mark.parametrize("gathered", [0.0, 0.5])
def test_rows_of_an_episode_follow_one_another(gathered):
    rows = script.collect(board("4x4"), 5000, 1, gathered=gathered)
    now, after = script.pick(rows, slice(0, -1)), script.pick(rows, slice(1, None))
    same = now["episode"] == after["episode"]
    assert torch.equal(now["next_cell"][:, same], after["cell"][:, same])
    assert torch.equal(now["next_board"][:, same], after["board"][:, same])
    assert torch.equal(now["clock"][same] + 1, after["clock"][same])
    assert torch.equal(now["deadline"][same], after["deadline"][same])
    assert not now["terminated"][0, same].any()
    assert now["terminated"][0, ~same].float().mean() > 0.5  # the others were cut off by the end of the playing
    assert (rows["cell"][0] < 16).all()  # the player whose rows they are is there
    assert (rows["cell"][1:] == 16).any()  # others have left
    steps = torch.arange(5)
    for start in tester.window_starts(rows, 5).tolist():
        assert len(set(rows["episode"][start + steps].tolist())) == 1
    for few in (1, 2, 4):  # rows, fewer than are asked for
        assert not len(tester.window_starts(script.pick(rows, slice(few)), 5))


def test_rows_obey_the_rules_and_are_rich():
    """The checks of the tester find nothing in what really happened, and every kind of catch."""
    rows, args = script.collect(board("4x4"), 20_000, 2), tester.Args()
    view = script.views_of(rows, after=True).float()
    breaches = tester.count_breaches(rows, view, rows["reward"][0], args)
    assert not any(where.any() for where in breaches.values())
    _, number, stag = tester.catches(rows, 2)
    kinds = set(map(tester.catch_kind, number.tolist(), stag.tolist()))
    assert kinds == {"none", "hare", "shared hare", "stag with 2", "stag with 3", "stag with 4"}
    legal = rows["board"].gather(0, rows["cell"]) >> rows["actions"] & 1
    assert (legal[0] == 0).any() and (rows["over"] & (rows["deadline"] - rows["clock"] == 1)).any()


def test_a_place_is_where_a_player_went():
    rows = script.collect(board("6x5b2p3"), 3000, 3, gathered=0.5)
    reach = script.neighbours(6, 5, "cpu")[rows["cell"]]
    reach = torch.cat([reach, torch.full_like(reach[..., :1], 30)], -1)
    assert torch.equal(reach.gather(-1, script.places_of(rows)[..., None])[..., 0], rows["next_cell"])
    jumps = {"cell": torch.tensor([0, 0]), "next_cell": torch.tensor([2, 10]), "height": 6, "width": 5}
    assert script.places_of(jumps).tolist() == [script.GONE + 1] * 2


def test_rows_go_through_a_file(tmp_path):
    rows = script.collect(board("5x6b2"), 500, 3)
    path = str(tmp_path / "rows.npz")
    script.save_data(path, rows)
    again = script.load_data(path, "--data")
    assert rows.keys() == again.keys()
    for name, part in rows.items():
        assert torch.equal(part, again[name]) if isinstance(part, torch.Tensor) else part == again[name], name


def test_a_file_may_tell_the_own_reward_alone(tmp_path):
    rows = script.collect(board("4x4"), 500, 3)
    path = str(tmp_path / "rows.npz")
    script.save_data(path, {**rows, "reward": rows["reward"][:1], "terminated": rows["terminated"][:1]})
    with np.load(path) as file:
        columns = dict(file)
    columns |= {name: columns[name][:, 0] for name in ("reward", "terminated")}
    np.savez(path, **columns)
    again = script.load_data(path, "--data")
    assert torch.equal(again["reward"], rows["reward"][:1])
    assert torch.equal(again["terminated"], rows["terminated"][:1])
    net = script.WorldModel(16)
    alone, everybody = net.loss(again), net.loss(rows)
    assert torch.equal(alone["planes"], everybody["planes"]) and alone["reward"].isfinite()


# ------------------------------------------------------------------------------------ by its make


def random_model(seed=0):
    """Untrained, with large random weights: whatever holds for it holds by the model's make."""
    torch.manual_seed(seed)
    net = script.WorldModel(16, rewards=[0.0, 0.5, 5.0])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 1)
    return net


def test_a_token_is_its_formula():
    rows = script.collect(board("5x5p6s2"), 300, 4, gathered=0.8)
    token = script.tokens(rows["cell"], rows["board"], rows["actions"])
    for s, (cell, actions) in enumerate(zip(rows["cell"].T.tolist(), rows["actions"].T.tolist())):
        for i in range(6):
            if cell[i] < 25:
                others = [actions[j] for j in range(6) if j != i and cell[j] == cell[i]]
                slow = actions[i] + 8 * rows["board"][cell[i], s].item()
                slow += sum(others.count(a) << 10 + 3 * a for a in range(7))
                assert token[i, s] == slow


def test_the_network_sees_the_whole_token():
    """Tokens that differ are told apart: no two inputs of `read` are the same."""
    rows = script.collect(board("5x5p6s2"), 3000, 4, gathered=0.8)
    token = script.tokens(rows["cell"], rows["board"], rows["actions"])[rows["cell"] < 25].unique()
    seen = []
    net = random_model()
    net.pay.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    net.read(token)
    assert seen[0].shape == (len(token), 63) and len(seen[0].unique(dim=0)) == len(token) > 1000


@pytest.mark.parametrize("text", BOARDS)
def test_no_weights_can_move_a_player_by_two_cells(text):
    rows = script.collect(board(text), 500, 5)
    before = script.views_of(rows)[..., :-3].permute(0, 3, 1, 2).float()
    after = predict(random_model(), rows)["view"][..., :-3].permute(0, 3, 1, 2)
    near = torch.nn.functional.max_pool2d(before, 3, 1, 1)
    assert after[near == 0].abs().max() == 0
    total = after.sum((2, 3))
    assert (total <= 1 + 1e-5).all() and (total[before.sum((2, 3)) == 0] == 0).all()


def test_nothing_changes_where_nobody_stands():
    rows = script.collect(board("6x5b2p3"), 500, 5)
    before, after = script.views_of(rows), predict(random_model(), rows)["view"]
    empty = before[..., :-3].sum(-1) == 0
    assert torch.equal(after[..., -3:][empty], before[..., -3:][empty].float())
    assert torch.equal(after[..., -3], before[..., -3].float())  # obstacles anyhow
    assert (after[..., -2:] <= before[..., -2:]).all()  # prey never appears


def test_order_of_the_co_players_is_only_theirs(model):
    rows = script.collect(board("5x6b2"), 2000, 6, gathered=0.5)
    order, planes = [0, 3, 1, 2], [0, 3, 1, 2, 4, 5, 6]
    for net in (random_model(), model):
        out, turned = (predict(net, x) for x in (rows, {**rows, "cell": rows["cell"][order],
                                                         "actions": rows["actions"][order]}))
        assert (turned["view"] - out["view"][..., planes]).abs().max() <= 1e-5
        for key in ("reward", "terminated", "over"):
            torch.testing.assert_close(turned[key].float(), out[key].float(), atol=1e-4, rtol=1e-5)


def test_what_others_do_on_the_own_cell_is_no_gift():
    rows = script.collect(board("4x4"), 3000, 8, gathered=0.8)
    net, cell = random_model(1), rows["cell"]
    pay = torch.tensor([0.0, 1.0]).expand(*cell.shape, 2)
    given = net.earned(pay, cell, 16)
    elsewhere = ((cell[1:] != cell[:1]) & (cell[1:] < 16)).sum(0)
    assert torch.equal(given[0], elsewhere.float()) and elsewhere.max() > 1 and elsewhere.min() == 0
    assert (given[cell == 16] == 0).all()


def test_whether_others_pay_shows_in_the_rows():
    for changes, pays in (({}, False), (dict(prosocial=True), True), (dict(time_reward=-0.1), False)):
        assert script.others_pay(script.collect(board("4x4", **changes), 3000, 8, gathered=0.8)) == pays


@pytest.mark.parametrize("text", BOARDS)
@pytest.mark.parametrize("gives", [False, True])
def test_the_tables_are_the_networks(text, gives):
    rows = script.collect(board(text), 3000, 8, gathered=0.5)
    net = random_model(1)
    net.gives.fill_(gives)
    tables = tester.WorldTables(net, rows["height"], rows["width"], len(rows["cell"]))
    assert bool(tables.gift.any()) == gives
    state, reward, over = tables.step(state_of(rows), rows["actions"])
    out = predict(net, rows)

    token = script.tokens(rows["cell"], rows["board"], rows["actions"])
    with torch.no_grad():
        places = net.read(token.flatten())[0].argmax(1).view(token.shape)
    reach = script.neighbours(rows["height"], rows["width"], "cpu")[rows["cell"]]
    reach = torch.cat([reach, torch.full_like(reach[..., :1], tables.cells)], -1)
    assert torch.equal(state["cell"], reach.gather(-1, places[..., None])[..., 0])
    planes = script.views_of({**rows, "cell": state["cell"], "board": state["board"]})
    assert torch.equal(planes[..., -3:], (out["view"][..., -3:] > 0.5).to(torch.uint8))
    assert torch.allclose(reward, out["reward"], atol=1e-4)

    own, left = script.what_is_left(state["cell"], state["board"])
    with torch.no_grad():
        end = net.read_end(own, left, rows["clock"], rows["deadline"] - rows["clock"])[0] > 0
    assert torch.equal(over, end.any(1))
    assert torch.equal(state["previous"], rows["actions"].to(torch.uint8))
    assert torch.equal(state["clock"], rows["clock"] + 1)
    assert torch.equal(state["deadline"] - state["clock"], out["steps_left"])


@pytest.mark.parametrize("text", BOARDS)
def test_the_tables_of_a_trained_model_are_its_forward(model, text):
    rows = script.collect(board(text), 3000, 8, gathered=0.5)
    tables = tester.WorldTables(model, rows["height"], rows["width"], len(rows["cell"]))
    assert not tables.gift.any()  # nobody gives anything in this game
    state, reward, over = tables.step(state_of(rows), rows["actions"])
    out = predict(model, rows)
    cell, ground = script.pack(out["view"])
    assert torch.equal(state["cell"], cell) and torch.equal(state["board"], ground)
    assert torch.allclose(reward, out["reward"], atol=1e-5)
    assert torch.equal(over, (out["terminated"] > 0.5) | (out["over"] > 0.5))


def test_a_step_leaves_the_state_before_as_it_is(model):
    rows = script.collect(board("4x4"), 500, 8, gathered=0.5)
    state = state_of(rows)
    before = {name: part.clone() for name, part in state.items()}
    tester.WorldTables(model, 4, 4, 4).step(state, rows["actions"])
    assert all(torch.equal(part, state[name]) for name, part in before.items())


def test_settling_on_rewards_that_were_seen():
    known = torch.tensor([0.0, 0.25, 1 / 3, 0.5, 1.0, 5.0])
    reward = torch.tensor([0.04, -0.05, 0.3, 0.45, 5.18, 3.0, 7.0, 1.3])
    assert script.settle(reward, known).tolist() == pytest.approx([0.0, 0.0, 1 / 3, 0.5, 5.0, 3.0, 7.0, 1.3])


def test_a_token_counts_by_the_root_of_how_often_it_occurs():
    """Nine rows of one kind and one of another: the weights are 3 to 1."""
    rows = script.collect(board("4x4p1s0"), 400, 1)
    token = script.tokens(rows["cell"], rows["board"], rows["actions"])[0]
    one = (token == token.mode().values).nonzero()[:9, 0]
    other = (token != token.mode().values).nonzero()[:1, 0]
    assert len(one) == 9
    net = random_model()
    loss = lambda which: net.loss(script.pick(rows, which))["planes"].sum()
    mixed = (3 * loss(one) + loss(other)) / 4
    assert torch.allclose(loss(torch.cat([one, other])), mixed, rtol=1e-4)


# ---------------------------------------------------------------------------------------- learned


@pytest.mark.parametrize("text", ["4x4", "5x6b2", "7x6b1", "4x4s2"])
def test_next_views_are_exact(model, text):
    check = script.measure(model, script.collect(board(text), 5000, 11))
    assert check["exact"] >= 0.999 and check["end_exact"] >= 0.98 and check["obs_mse"] < 1e-4


def test_few_steps_make_an_exact_model_for_the_search():
    """10,000 steps of the game and 400 gradient steps: 99.9 % of fresh mixed steps are foreseen whole."""
    rows = script.collect(board("4x4"), 10_000, 1, gathered=0.8)
    run = script.Run(script.Args(), {"4x4": rows})
    for update in range(400):
        rate = 1e-2 * 0.5 * (1 + np.cos(np.pi * update / 400))
        run.optimizer.param_groups[0]["lr"] = rate
        terms = run.model.loss(script.pick(rows, torch.randint(10_000, (1024,), generator=run.generator)))
        run.optimizer.zero_grad()
        sum(term.sum() for term in terms.values()).backward()
        run.optimizer.step()
        run.model.shrink(0.06 * rate)
    assert tester.tables_exact(run.model, script.collect(board("4x4"), 10_000, 2)) >= 0.999


def test_actions_in_the_wrong_order_show(model):
    """The notes' fault: views rotated, actions not."""
    rows = script.collect(board("4x4"), 5000, 12)
    wrong = script.measure(model, {**rows, "actions": rows["actions"].roll(1, 0)})
    assert wrong["exact"] < 0.5 and wrong["obs_mse"] > 1e-3 < wrong["reward_mse"]
    assert script.measure(model, rows)["exact"] >= 0.999


@pytest.mark.parametrize("changes", [dict(stag_hunters=3, stag_reward=7.0, hare_reward=2.0, time_reward=-0.1),
                                     dict(prosocial=True)])
def test_another_game_is_learned_as_well(tmp_path, changes):
    assert script.main(flags(tmp_path, boards=("4x4",), **changes)) == 0
    net = tester.load_world_model(str(tmp_path / "run"), "--checkpoint")[0]
    rows = script.collect(board("4x4", **changes), 5000, 13)
    check = script.measure(net, rows)
    assert check["exact"] >= 0.999 and check["reward_exact"] >= 0.98
    other = script.measure(net, script.collect(board("4x4"), 5000, 13))
    assert min(other["exact"], other["reward_exact"]) < 0.999
    assert bool(tester.WorldTables(net, 4, 4, 4).gift.any()) == changes.get("prosocial", False)
    assert tester.tables_exact(net, rows) >= 0.98


def test_plane_weights_weigh(tmp_path):
    for name, weights in (("equal", (1.0,) * 7), ("none", (0.0,) * 7)):
        args = flags(tmp_path, boards=("4x4",), rows=2000, held_out_rows=100, num_updates=100, batch_size=256,
                     plane_weights=weights, run_name=name)
        assert script.main(args) == 0
    equal, none = (tester.load_world_model(str(tmp_path / name), "--checkpoint")[0] for name in ("equal", "none"))
    rows = script.collect(board("4x4"), 1000, 14)
    assert script.measure(equal, rows)["exact"] > 0.5 > script.measure(none, rows)["exact"]
    weights = script.plane_weights((2.0, 3.0, 1.0, 1.0, 1.0), 4, "cpu")
    assert weights.tolist() == [2, 3, 3, 3, 1, 1, 1]


def test_a_run_learns_from_the_rows_of_an_earlier_one(tmp_path):
    few = dict(num_updates=20, rows=2000, check_every=10, boards=("4x4",))
    assert script.main(flags(tmp_path, save_data=True, **few)) == 0
    few.pop("boards"), few.pop("rows")
    args = script.Args(**{**few, "runs_dir": str(tmp_path), "run_name": "second", "data": (str(tmp_path / "run"),),
                          "held_out_rows": 100})
    assert script.main(args) == 0
    with open(tmp_path / "second" / "results.json", encoding="utf-8") as file:
        check, = json.load(file)["boards"].values()
    assert set(check) == {"obs_mse", "psnr", "reward_mse", "exact", "reward_exact", "end_exact"}


# ----------------------------------------------------------------------------------------- report


def test_psnr_is_that_of_the_mse():
    assert script.psnr(1e-6) == pytest.approx(60)
    assert script.psnr(0.007402) == pytest.approx(21.31, abs=0.01)  # the notes print 24.08


def test_measure_is_its_formula(model):
    rows = script.collect(board("4x4"), 700, 14)
    check, out = script.measure(random_model(), rows), predict(random_model(), rows)
    true = script.views_of(rows, after=True).numpy()
    assert check["obs_mse"] == pytest.approx(np.mean((out["view"].numpy() - true) ** 2.0), rel=1e-5)
    error = out["reward"].numpy() - rows["reward"][0].numpy()
    assert check["reward_mse"] == pytest.approx(np.mean(error ** 2.0), rel=1e-5)


def one_row(players, prey=(), blocks=(), actions=(4, 4)):
    """A 3x3 row with two players: where they are, {cell: plane of its prey}, obstacles, actions."""
    planes = torch.zeros(1, 9, 3)  # obstacles, stags, hares
    for cell, plane in [*dict(prey).items(), *((cell, 0) for cell in blocks)]:
        planes[0, cell, plane] = 1
    return {"cell": torch.tensor(players)[:, None], "board": script.pack(planes.unflatten(1, (3, 3)))[1],
            "actions": torch.tensor(actions)[:, None], "height": 3, "width": 3}


def breaches_of(row, change, reward=0.0):
    """What the tester counts where the prediction is the row's own view, changed by change(view [3, 3, 5])."""
    view = script.views_of(row).float()
    change(view[0])
    counted = tester.count_breaches(row, view, torch.tensor([reward]), tester.Args())
    return [kind for kind, where in counted.items() if where.any()]


def test_each_breach_of_the_rules_is_counted():
    def put(plane, cell, value):
        def change(view):
            view[cell // 3, cell % 3, plane] = value
        return change

    def both(*changes):
        return lambda view: [change(view) for change in changes]

    row = one_row((0, 4), {1: 2, 5: 1}, [8])  # players on 0 and 4, a hare on 1, a stag on 5, an obstacle on 8
    nothing = lambda view: None
    assert breaches_of(row, nothing) == []
    assert breaches_of(row, both(put(0, 0, 0), put(0, 3, 1))) == []  # one cell down
    assert breaches_of(row, both(put(0, 0, 0), put(0, 4, 1))) == ["moves further than one cell"]  # across
    assert breaches_of(row, put(0, 1, 1)) == ["in two places"]
    assert breaches_of(row, both(put(0, 0, 0.4), put(0, 1, 0.4))) == ["in no place"]
    assert breaches_of(row, put(0, 0, 0.1)) == ["vanishes without a catch"]
    assert breaches_of(one_row((0, 9)), put(1, 4, 1)) == ["player appears"]
    assert breaches_of(one_row((0, 5), {}, [8]), both(put(1, 5, 0), put(1, 8, 1))) == ["walks into an obstacle"]
    assert breaches_of(row, both(put(4, 1, 0), put(4, 2, 1))) == ["prey moves or appears", "prey vanishes without a catch"]
    assert breaches_of(row, put(2, 8, 0)) == ["obstacle changes"]
    assert breaches_of(row, nothing, 0.042) == ["reward without a catch"]

    caught = one_row((1, 1), {1: 1}, (), (5, 5))  # both hunt the stag on 1
    assert breaches_of(caught, both(put(0, 1, 0), put(1, 1, 0), put(3, 1, 0)), 5.0) == []
    alone = one_row((1, 1), {1: 1}, (), (5, 4))
    assert breaches_of(alone, both(put(0, 1, 0), put(3, 1, 0)), 10.0) == [
        "vanishes without a catch", "prey vanishes without a catch", "reward without a catch"]


BREACHES = {"moves further than one cell", "in two places", "in no place", "vanishes without a catch",
            "player appears", "walks into an obstacle", "prey moves or appears", "prey vanishes without a catch",
            "obstacle changes", "reward without a catch"}


def test_the_report(trained, tmp_path, capsys):
    args = tester.Args(checkpoint=os.path.join(trained, "checkpoint.pt"), rows=3000, rollouts=50, samples=2,
                       runs_dir=str(tmp_path), run_name="test")
    assert tester.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["[INFO] loaded model. obs_shape=(4, 4, 7), action_dim=7",
                         "[INFO] dataset size=3000, inferred n_agents=4"]
    start = lines.index("=== Metrics ===")
    for line, begin in zip(lines[start + 1:], ("Obs  MSE (mean over B,C,H,W): ", "Obs  PSNR: ", "Rew  MSE:  ",
                                               "Per-channel MSE:", *(f"  ch[{plane}]: " for plane in range(7)))):
        assert line.startswith(begin)
    with open(tmp_path / "test" / "results.json", encoding="utf-8") as file:
        results = json.load(file)
    assert {"obs_mse", "psnr", "reward_mse", "exact", "reward_exact", "end_exact", "breaches", "rollout"} <= set(results)
    assert set(results["breaches"]) == BREACHES | {"total"}
    assert set(results["rollout"]) == {"1", "5", "10", "20", "35"}
    assert results["psnr"] == pytest.approx(10 * np.log10(1 / results["obs_mse"]))
    assert results["rollout"]["35"] >= 0.99 and results["tables_exact"] >= 0.95
    pictures = set(os.listdir(tmp_path / "test" / "pictures"))
    assert {"worst_1.png", "worst_2.png", "value_histograms.png", "value_scatter.png", "reward_scatter.png",
            "rollout_exactness.png", "calibration.png", "imagined_episode.gif"} <= pictures
    assert any(name.startswith("events") for name in os.listdir(tmp_path / "test"))


# --------------------------------------------------------------------------------- runs, refusals


def start(*arguments, script_name="train_world_model.py"):
    return subprocess.Popen([sys.executable, os.path.join(HERE, "..", script_name), *map(str, arguments)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def weights(folder):
    return torch.load(os.path.join(folder, "checkpoint.pt"), weights_only=True)["world_model"]


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_stopping_and_resuming_changes_nothing(tmp_path):
    """The run that is stopped is a program of its own; the whole one and the rest are not."""
    few = dict(boards=("4x4",), rows=2000, held_out_rows=200, num_updates=500, check_every=100,
               batch_size=128)
    assert script.main(flags(tmp_path, **few, run_name="whole")) == 0
    line = ("--boards 4x4 --rows 2000 --held-out-rows 200 --num-updates 500 --check-every 100 "
            "--batch-size 128 --save-every 1e9 --run-name broken")
    broken = start(*line.split(), "--runs-dir", tmp_path)
    until = time.time() + 200
    while not any(name.startswith("events") for name in
                  (os.listdir(tmp_path / "broken") if (tmp_path / "broken").is_dir() else ())):
        assert time.time() < until
        time.sleep(0.05)
    time.sleep(0.5)
    broken.send_signal(signal.SIGINT)
    output = broken.communicate(timeout=200)[0]
    assert broken.returncode == 130 and "--resume" in output
    assert script.main(script.Args(resume=str(tmp_path / "broken"))) == 0
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("changes, named", [
    (dict(boards=("4x",)), "--boards"), (dict(boards=("2x2",)), "--boards 2x2"), (dict(boards=("4x4", "4x4")), "--boards"),
    (dict(height=6), "--height 6"), (dict(num_updates=0), "--num-updates 0"), (dict(plane_weights=(1.0, 2.0)), "--plane-weights"),
    (dict(plane_weights=(1.0,) * 8), "--plane-weights"), (dict(data=("nothing.npz",)), "--data"),
    (dict(boards=("6x6p9",)), "--boards 6x6p9"), (dict(data=("x.npz",), rows=9), "--rows 9"),
    (dict(learning_rate=float("nan")), "--learning-rate"), (dict(device="nowhere"), "--device"),
    (dict(resume="nowhere"), "--resume"), (dict(gathered=2.0), "--gathered"), (dict(stag_hunters=9), "--boards 4x4"),
])
def test_refused_flags(tmp_path, changes, named):
    few = {} if "data" in changes else dict(rows=500, held_out_rows=100)
    args = script.Args(**{**few, "runs_dir": str(tmp_path), **changes})
    with pytest.raises(script.Refused) as refusal:
        script.main(args)
    assert named in str(refusal.value) and "\n" not in str(refusal.value)
    assert os.listdir(tmp_path) == []


def bad_file(path, kind):
    data = script.collect(board("4x4"), 100, 1)
    script.save_data(path, data)
    with np.load(path) as file:
        columns = dict(file)
    if kind == "text":
        with open(path, "w", encoding="utf-8") as file:
            file.write("no arrays")
        return
    if kind == "lacks":
        columns.pop("actions")
    if kind == "shape":
        columns["actions"] = columns["actions"][:, :2]
    if kind == "values":
        columns["actions"] = columns["actions"] + 7
    if kind == "soft":
        columns["observation"] = columns["observation"] * 0.5
    if kind == "pickle":
        columns["reward"] = np.array([None] * 100, dtype=object)
    if kind == "nan":
        columns["reward"][0] = np.nan
    if kind == "jump":
        columns["next_observation"] = np.roll(columns["next_observation"], 2, 1)
    np.savez(path, **columns)


@pytest.mark.parametrize("kind", ["text", "lacks", "shape", "values", "soft", "pickle", "nan", "jump"])
def test_refused_data(tmp_path, kind):
    path = str(tmp_path / "rows.npz")
    bad_file(path, kind)
    with pytest.raises(script.Refused, match="--data"):
        script.main(script.Args(data=(path,), runs_dir=str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


def test_refusals_are_one_line_and_exit_code_2(tmp_path, trained, monkeypatch, capsys):
    """All but the last in this process; the last as a program, as a user would start it."""
    (tmp_path / "text.pt").write_text("no checkpoint")
    script.save_checkpoint(str(tmp_path), {"script": "another.py"}, "foreign.pt")
    script.save_checkpoint(str(tmp_path), {"world_model": {}}, "broken.pt")
    good, runs = os.path.join(trained, "checkpoint.pt"), ["--runs-dir", tmp_path / "runs"]
    for arguments in (["--checkpoint", tmp_path / "none.pt"], ["--checkpoint", tmp_path / "text.pt"],
                      ["--checkpoint", tmp_path / "foreign.pt"], ["--checkpoint", tmp_path / "broken.pt"], [],
                      ["--checkpoint", good, "--data", tmp_path / "none.npz"],
                      ["--checkpoint", good, "--height", 0]):
        monkeypatch.setattr(sys, "argv", ["test_obs_reward_model.py", *map(str, arguments + runs)])
        with pytest.raises(SystemExit) as end:
            tester.run_script(tester.Args, tester.main)
        out, error = capsys.readouterr()
        assert end.value.code == 2 and out == "", error
        assert error.count("\n") == 1 and error.startswith("error: --"), error
    process = start("--checkpoint", good, "--data", "x.npz", "--height", 5, *runs,
                    script_name="test_obs_reward_model.py")
    out, error = process.communicate(timeout=120)
    assert process.returncode == 2 and out == "", error
    assert error.count("\n") == 1 and error.startswith("error: --"), error
    assert not (tmp_path / "runs").exists()
