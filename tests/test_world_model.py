"""train_world_model.py and test_obs_reward_model.py: the rows, the model's make, what it learns, the report, resuming."""

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

HERE = os.path.dirname(os.path.abspath(__file__))
SMALL = dict(boards=("4x4", "5x6b2"), rows=20_000, held_out_rows=1000, num_updates=600, batch_size=512, check_every=400,
             save_every=1e9)


def flags(tmp_path, **changes):
    return script.Args(**{**SMALL, "runs_dir": str(tmp_path), "run_name": "run", **changes})


def board(text="4x4", **changes):
    return script.parse_board(text, script.Args(**changes))


def view_of(batch, prefix=""):
    return script.unpack(batch[prefix + "cell"], batch[prefix + "ground"], batch["height"], batch["width"])


def predict(model, batch):
    with torch.no_grad():
        return model(view_of(batch), batch["actions"], batch["step"], batch["steps_left"])


def all_rows(data):
    return script.pick_rows(data, torch.arange(script.rows_of(data)))


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


def test_what_others_do_on_the_own_cell_is_no_gift():
    batch = all_rows(script.collect(board("4x4"), 3000, 8, gathered=0.8))
    net, other = random_model(1), random_model(1)
    with torch.no_grad():
        other.gift[-1].bias.add_(1.0)  # whoever is elsewhere, and there, now gives one more
        reward = [model.hard_step(batch["cell"], batch["ground"], batch["actions"], 4, 4)[2] for model in (net, other)]
    difference, cell = (reward[1] - reward[0]) / net.reward_scale, batch["cell"]
    elsewhere = ((cell[:, 1:] != cell[:, :1]) & (cell[:, 1:] < 16) & (cell[:, :1] < 16)).sum(1)
    assert (difference - elsewhere).abs().max() < 1e-4 and elsewhere.max() > 1 and elsewhere.min() == 0


@pytest.mark.parametrize("text", ["4x4", "6x5b2p3", "5x5p6s2"])
def test_views_are_those_of_the_game(text):
    game = script.BatchedStagHunt(200, seed=3, **board(text))
    for _ in range(8):
        game.reset(game.advance(game.random_actions())["terminated"])
    observation, n = game.observe(), game.num_players
    for ego in range(n):
        order = (ego + torch.arange(n)) % n
        view = script.unpack(game.cell.T[:, order], script.ground_bits(game), game.height, game.width)
        assert torch.equal(view, observation["observation"][:, ego])
        assert torch.equal(tester.legal_actions(view), observation["action_mask"][:, ego])
        cell, ground = script.pack(view)
        assert torch.equal(cell, game.cell.T[:, order]) and torch.equal(ground, script.ground_bits(game))


@pytest.mark.parametrize("gathered", [0.0, 0.5])
def test_rows_of_an_episode_follow_one_another(gathered):
    data = script.collect(board("4x4"), 5000, 1, gathered=gathered)
    now, after = slice(0, -1), slice(1, None)
    same = data["episode"][now] == data["episode"][after]
    assert torch.equal(data["next_cell"][now][same], data["cell"][after][same])
    assert torch.equal(data["next_ground"][now][same], data["ground"][after][same])
    assert torch.equal(data["step"][now][same] + 1, data["step"][after][same])
    assert not data["terminated"][now][same].any()
    assert data["terminated"][now][~same].float().mean() > 0.5  # the others were cut off by the end of the collecting
    assert (data["cell"][:, 0] < 16).all()  # the player whose rows they are is there
    assert (data["cell"][:, 1:] == 16).any()  # others have left
    starts = script.window_starts(data, 5)
    for step in range(5):
        assert torch.equal(data["episode"][starts], data["episode"][starts + step])


def test_rows_obey_the_rules_and_are_rich():
    """The checks of the tester find nothing in what really happened, and every kind of catch."""
    data = script.collect(board("4x4"), 20_000, 2)
    batch, args = all_rows(data), tester.Args()
    breaches = tester.count_breaches(batch, view_of(batch, "next_").float(), batch["reward"], args)
    assert {kind: int(rows.sum()) for kind, rows in breaches.items()} == dict.fromkeys(tester.BREACHES, 0)
    _, number, stag, _ = tester.rules_of_catch(batch, 2)
    kinds = {tester.catch_kind(*key) for key in tester.group_rows(number, stag)}
    assert kinds == {"none", "hare", "shared hare", "stag with 2", "stag with 3", "stag with 4"}
    legal = tester.legal_actions(view_of(batch))
    illegal = ~legal.gather(1, batch["actions"][:, :1])[:, 0]
    assert illegal.any() and (data["over"] & (data["steps_left"] == 1)).any()


def test_rows_go_through_a_file(tmp_path):
    data = script.collect(board("5x6b2"), 500, 3)
    path = str(tmp_path / "rows.npz")
    script.save_data(path, data)
    again = script.load_data(path, "--data")
    for key, value in data.items():
        assert torch.equal(value, again[key]) if isinstance(value, torch.Tensor) else value == again[key]


def test_rarity_is_its_formula():
    data = script.collect(board("4x4"), 300, 4, gathered=0.5)
    cases = []
    for cell, ground, actions in zip(data["cell"].tolist(), data["ground"].tolist(), data["actions"].tolist()):
        cases.append([(ground[c] if c < 16 else 0, actions[i],
                       tuple(sorted(actions[j] for j in range(4) if j != i and cell[j] == c)), c < 16)
                      for i, c in enumerate(cell)])
    number = {}
    for case in sum(cases, []):
        number[case[:3]] = number.get(case[:3], 0) + 1
    slow = [sum(number[case[:3]] ** -0.5 for case in row if case[3]) for row in cases]
    assert torch.allclose(script.rarity(data), torch.tensor(slow, dtype=torch.float64))


# ------------------------------------------------------------------------------------ by its make


def random_model(seed=0):
    """Untrained, with large random weights: whatever holds for it holds by the model's make."""
    torch.manual_seed(seed)
    net = script.WorldModel(16, rewards=[0.0, 0.5, 5.0])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 1)
    return net


@pytest.mark.parametrize("text", ["4x4", "6x5b2p3"])
def test_no_weights_can_move_a_player_by_two_cells(text):
    batch = all_rows(script.collect(board(text), 500, 5))
    view, out = view_of(batch), predict(random_model(), batch)
    before, after = view[..., :-3].permute(0, 3, 1, 2).float(), out["view"][..., :-3].permute(0, 3, 1, 2)
    near = torch.nn.functional.max_pool2d(before, 3, 1, 1)
    assert after[near == 0].abs().max() == 0
    total = after.sum((2, 3))
    assert (total <= 1 + 1e-5).all() and (total[before.sum((2, 3)) == 0] == 0).all()


def test_order_of_the_co_players_is_only_theirs():
    batch = all_rows(script.collect(board("5x6b2"), 500, 6))
    net = random_model()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.3)  # so that rounding does not show
    order = [0, 3, 1, 2]
    planes = order + [4, 5, 6]
    soft = torch.rand(view_of(batch).shape, generator=torch.Generator().manual_seed(1)) * view_of(batch)
    with torch.no_grad():
        out = net(soft, batch["actions"], batch["step"], batch["steps_left"], soft=True)
        turned = net(soft[..., planes], batch["actions"][:, order], batch["step"], batch["steps_left"], soft=True)
    assert (turned["view"] - out["view"][..., planes]).abs().max() <= 1e-6
    for key in ("reward", "terminated", "over"):
        assert (turned[key] - out[key]).abs().max() <= 1e-6


def test_order_of_the_co_players_in_the_trained_model(model):
    batch = all_rows(script.collect(board("4x4"), 2000, 7))
    order, planes = [0, 2, 3, 1], [0, 2, 3, 1, 4, 5, 6]
    out = predict(model, batch)
    turned = predict(model, batch | {"cell": batch["cell"][:, order], "actions": batch["actions"][:, order]})
    assert (turned["view"] - out["view"][..., planes]).abs().max() <= 1e-6
    for key in ("reward", "terminated", "over"):
        assert (turned[key] - out[key]).abs().max() <= 1e-6


@pytest.mark.parametrize("text", ["4x4", "6x5b2p3", "5x5p6s2"])
def test_the_tables_are_the_networks(text):
    batch = all_rows(script.collect(board(text), 3000, 8, gathered=0.5))
    net = random_model(1)
    tables = net.tabulate(batch["height"], batch["width"], batch["cell"].shape[1])
    rest = batch["actions"], batch["step"], batch["steps_left"]
    with torch.no_grad():
        scores, shares, here, reach, present, _ = net.look(batch["cell"], batch["ground"], batch["actions"],
                                                           batch["height"], batch["width"])
        best = scores.argmax(-1)
        reward = script.settle(net.add_shares(shares, present, batch["cell"][:, 1:] != batch["cell"][:, :1]), net.rewards)
    place = torch.cat([reach, torch.full_like(reach[..., :1], tables.cells)], -1).gather(2, best[..., None])[..., 0]
    place = torch.where(present > 0, place, tables.cells)
    cell, ground, table_reward, terminated, over = tables.step(batch["cell"], batch["ground"], *rest)
    assert torch.equal(cell, place)
    assert torch.allclose(table_reward, reward, atol=1e-4)
    planes = predict(net, batch)["view"]
    assert torch.equal(ground, script.pack(planes)[1])
    prey = script.bits_of(ground).sum(1)
    left = (cell < tables.cells).float()
    with torch.no_grad():
        end = net.read_end(left[:, 0], left.sum(1), prey[:, 1], prey[:, 2], batch["step"], batch["steps_left"]) > 0
    assert torch.equal(terminated, end[:, 0]) and torch.equal(over, end[:, 1])
    view, *more = tables.step_view(view_of(batch), *rest)
    assert torch.equal(view, script.unpack(cell, ground, batch["height"], batch["width"]))
    assert all(torch.equal(one, two) for one, two in zip(more, (table_reward, terminated, over)))


@pytest.mark.parametrize("text", ["4x4", "6x5b2p3", "5x5p6s2"])
def test_the_short_cuts_of_a_trained_model_are_exact(model, text):
    batch = all_rows(script.collect(board(text), 3000, 8, gathered=0.5))
    tables = model.tabulate(batch["height"], batch["width"], batch["cell"].shape[1])
    assert tables.one_look and tables.empty_stays
    rows = batch["cell"], batch["ground"], batch["actions"], batch["step"], batch["steps_left"]
    short = tables.step(*rows)
    tables.one_look = tables.empty_stays = False
    assert all(torch.equal(one, two) for one, two in zip(short, tables.step(*rows)))
    cell, ground = script.pack(predict(model, batch)["view"])
    assert torch.equal(short[0], cell) and torch.equal(short[1], ground)


def test_a_soft_view_of_zeros_and_ones_is_a_hard_one():
    batch = all_rows(script.collect(board("6x5b2p3"), 300, 9))
    net = random_model(2)
    hard = predict(net, batch)
    with torch.no_grad():
        soft = net(view_of(batch).float(), batch["actions"], batch["step"], batch["steps_left"], soft=True)
    for key in hard:
        assert torch.allclose(hard[key], soft[key], atol=1e-5)


def test_gradients_pass_through_own_steps():
    data = script.collect(board("4x4"), 2000, 10)
    net = random_model(3)
    rows = script.window_starts(data, 3)[:50]
    terms = script.rollout_terms(net, data, rows, 3)
    assert len(terms) == 2
    batch = script.pick_rows(data, rows)
    view = view_of(batch).float().requires_grad_()
    out = net(view, batch["actions"], batch["step"], batch["steps_left"], soft=True)
    net(out["view"], batch["actions"], batch["step"], batch["steps_left"], soft=True)["view"][..., 0].square().sum().backward()
    assert view.grad.abs().sum() > 0


def test_settling_on_rewards_that_were_seen():
    known = torch.tensor([0.0, 0.25, 1 / 3, 0.5, 1.0, 5.0])
    reward = torch.tensor([0.04, -0.05, 0.3, 0.45, 5.08, 3.0, 7.0], requires_grad=True)
    settled = script.settle(reward, known)
    assert settled.tolist() == pytest.approx([0.0, 0.0, 1 / 3, 0.5, 5.0, 3.0, 7.0])
    settled.sum().backward()
    assert reward.grad.tolist() == [1.0] * 7


def test_inputs_never_met_stay_silent(model):
    """Four others on a cell never occur among four players: their weights are exactly 0."""
    weight = model.token[0].weight[:, -script.NUM_ACTIONS * script.COUNT_LEVELS:]
    weight = weight.unflatten(1, (script.NUM_ACTIONS, script.COUNT_LEVELS))
    assert (weight[:, :, 3:] == 0).all() and (weight[:, :, 0] != 0).any()


# ---------------------------------------------------------------------------------------- learned


@pytest.mark.parametrize("text", ["4x4", "5x6b2", "7x6b1", "4x4s2"])
def test_next_views_are_exact(model, text):
    check = script.measure(model, script.collect(board(text), 5000, 11))
    assert check["exact"] >= 0.999 and check["end_exact"] >= 0.98 and check["obs_mse"] < 1e-5


def test_actions_in_the_wrong_order_show(model):
    """The notes' fault: views rotated, actions not."""
    data = script.collect(board("4x4"), 5000, 12)
    wrong = script.measure(model, data | {"actions": data["actions"].roll(1, 1)})
    assert wrong["exact"] < 0.5 and wrong["obs_mse"] > 1e-3 < wrong["reward_mse"]
    assert script.measure(model, data)["exact"] >= 0.999


def test_another_game_is_learned_as_well(tmp_path):
    args = dict(stag_hunters=3, stag_reward=7.0, hare_reward=2.0)
    assert script.main(flags(tmp_path, boards=("4x4",), **args)) == 0
    net = tester.load_world_model(str(tmp_path / "run" / "checkpoint.pt"), "--checkpoint")[0]
    check = script.measure(net, script.collect(board("4x4", **args), 5000, 13))
    assert check["exact"] >= 0.999 and check["reward_exact"] >= 0.99
    assert script.measure(net, script.collect(board("4x4"), 5000, 13))["exact"] < 0.999


@pytest.mark.parametrize("changes", [dict(model="mlp", boards=("4x4",)), dict(rollout_steps=3, boards=("4x4",))])
def test_other_ways_to_train_run(tmp_path, changes):
    assert script.main(flags(tmp_path, num_updates=20, rows=2000, check_every=10, **changes)) == 0
    with open(tmp_path / "run" / "results.json", encoding="utf-8") as file:
        assert set(json.load(file)["boards"]["4x4"]) == {"obs_mse", "psnr", "reward_mse", "exact", "reward_exact",
                                                         "end_exact"}


def test_a_run_learns_from_the_rows_of_an_earlier_one(tmp_path):
    few = dict(num_updates=20, rows=2000, check_every=10, boards=("4x4",))
    assert script.main(flags(tmp_path, save_data=True, **few)) == 0
    few.pop("boards"), few.pop("rows")
    args = script.Args(**{**few, "runs_dir": str(tmp_path), "run_name": "second", "data": (str(tmp_path / "run"),),
                          "held_out_rows": 100})
    assert script.main(args) == 0


# ----------------------------------------------------------------------------------------- report


def test_psnr_is_that_of_the_mse():
    assert script.psnr(1e-6) == pytest.approx(60)
    assert script.psnr(0.007402) == pytest.approx(21.31, abs=0.01)  # the notes print 24.08


def test_measure_is_its_formula(model):
    data = script.collect(board("4x4"), 700, 14)
    batch, check = all_rows(data), script.measure(random_model(), data)
    out = predict(random_model(), batch)
    true = view_of(batch, "next_").numpy()
    assert check["obs_mse"] == pytest.approx(np.mean((out["view"].numpy() - true) ** 2.0), rel=1e-5)
    assert check["reward_mse"] == pytest.approx(np.mean((out["reward"].numpy() - batch["reward"].numpy()) ** 2.0), rel=1e-5)


def one_row(players, ground=(), actions=(4, 4)):
    """A 3x3 row with two players: cells, {cell: bits}, actions."""
    bits = torch.zeros(1, 9, dtype=torch.uint8)
    for cell, value in dict(ground).items():
        bits[0, cell] = value
    return {"cell": torch.tensor([players]), "ground": bits, "actions": torch.tensor([actions]), "height": 3, "width": 3}


def breaches_of(row, change, reward=0.0):
    """What the tester counts where the prediction is the row's own view, changed by change(view [3, 3, 5])."""
    view = view_of(row).float()
    change(view[0])
    counted = tester.count_breaches(row, view, torch.tensor([reward]), tester.Args())
    return [kind for kind, rows in counted.items() if rows.any()]


def test_each_breach_of_the_rules_is_counted():
    def put(plane, cell, value):
        def change(view):
            view[cell // 3, cell % 3, plane] = value
        return change

    def both(*changes):
        return lambda view: [change(view) for change in changes]

    row = one_row((0, 4), {1: 4, 8: 1, 5: 2})  # players on 0 and 4, a hare on 1, a stag on 5, an obstacle on 8
    nothing = lambda view: None
    assert breaches_of(row, nothing) == []
    assert breaches_of(row, both(put(0, 0, 0), put(0, 3, 1))) == []  # one cell down
    assert breaches_of(row, both(put(0, 0, 0), put(0, 4, 1))) == ["moves further than one cell"]  # across
    assert breaches_of(row, put(0, 1, 1)) == ["in two places"]
    assert breaches_of(row, both(put(0, 0, 0.4), put(0, 1, 0.4))) == ["in no place"]
    assert breaches_of(row, put(0, 0, 0.1)) == ["vanishes without a catch"]
    assert breaches_of(one_row((0, 9)), put(1, 4, 1)) == ["player appears"]
    assert breaches_of(one_row((0, 5), {8: 1}), both(put(1, 5, 0), put(1, 8, 1))) == ["walks into an obstacle"]
    assert breaches_of(row, both(put(4, 1, 0), put(4, 2, 1))) == ["prey moves or appears", "prey vanishes without a catch"]
    assert breaches_of(row, put(2, 8, 0)) == ["obstacle changes"]
    assert breaches_of(row, nothing, 0.042) == ["reward without a catch"]

    caught = one_row((1, 1), {1: 2}, (5, 5))  # both hunt the stag on 1
    assert breaches_of(caught, both(put(0, 1, 0), put(1, 1, 0), put(3, 1, 0)), 5.0) == []
    alone = one_row((1, 1), {1: 2}, (5, 4))
    assert breaches_of(alone, both(put(0, 1, 0), put(3, 1, 0)), 10.0) == [
        "vanishes without a catch", "prey vanishes without a catch", "reward without a catch"]


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
    assert set(results["breaches"]) == {*tester.BREACHES, "total"}
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
    few = ["--boards", "4x4", "--rows", 2000, "--held-out-rows", 200, "--num-updates", 700, "--check-every", 100,
           "--batch-size", 128, "--runs-dir", tmp_path]
    whole = start(*few, "--run-name", "whole")
    assert whole.wait(300) == 0
    broken = start(*few, "--run-name", "broken")
    until = time.time() + 200
    while not any(name.startswith("events") for name in
                  (os.listdir(tmp_path / "broken") if (tmp_path / "broken").is_dir() else ())):
        assert time.time() < until
        time.sleep(0.05)
    time.sleep(0.5)
    broken.send_signal(signal.SIGINT)
    output = broken.communicate(timeout=200)[0]
    assert broken.returncode == 130 and "--resume" in output
    assert start("--resume", tmp_path / "broken").wait(300) == 0
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("changes, named", [
    (dict(boards=("4x",)), "--boards"), (dict(boards=("2x2",)), "--boards 2x2"), (dict(boards=("4x4", "4x4")), "--boards"),
    (dict(height=6), "--height 6"), (dict(num_updates=0), "--num-updates 0"), (dict(plane_weights=(1.0, 2.0)), "--plane-weights"),
    (dict(plane_weights=(1.0,) * 8), "--plane-weights"), (dict(data=("nothing.npz",)), "--data"),
    (dict(model="mlp"), "--model mlp"), (dict(rollout_steps=36), "--rollout-steps 36"),
    (dict(learning_rate=float("nan")), "--learning-rate"), (dict(device="nowhere"), "--device"),
    (dict(resume="nowhere"), "--resume"), (dict(gathered=2.0), "--gathered"), (dict(stag_hunters=9), "--boards 4x4"),
])
def test_refused_flags(tmp_path, changes, named):
    few = {key: value for key, value in dict(rows=500, held_out_rows=100).items() if "data" not in changes}
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


def test_refusals_are_one_line_and_exit_code_2(tmp_path, trained):
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save({"script": "another.py"}, tmp_path / "foreign.pt")
    torch.save({"script": "train_world_model.py", "world_model": {}, "world_model_config": {"kind": "local"}},
               tmp_path / "broken.pt")
    good = os.path.join(trained, "checkpoint.pt")
    for arguments in (["--checkpoint", tmp_path / "none.pt"], ["--checkpoint", tmp_path / "text.pt"],
                      ["--checkpoint", tmp_path / "foreign.pt"], ["--checkpoint", tmp_path / "broken.pt"], [],
                      ["--checkpoint", good, "--data", tmp_path / "none.npz"], ["--checkpoint", good, "--height", 0],
                      ["--checkpoint", good, "--data", "x.npz", "--height", 5]):
        process = start(*arguments, "--runs-dir", tmp_path / "runs", script_name="test_obs_reward_model.py")
        out, error = process.communicate(timeout=120)
        assert process.returncode == 2 and out == "" and error.count("\n") == 1 and error.startswith("error: --"), error
    assert not (tmp_path / "runs").exists()
