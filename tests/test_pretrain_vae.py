"""pretrain_vae.py: its formulas against slow ones, its samples against the readable game's rules, and whole short runs."""

import csv
import dataclasses
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pretrain_vae as vae
from pretrain_vae import NUM_ACTIONS, STAY, Args, Goals, Refused, Symmetry

SMALL = dict(samples=1500, held_out_samples=600, hidden_size=32, vae_size=32, batch_size=32, epochs=2)


@pytest.fixture(scope="module")
def args():
    return Args(**SMALL)


@pytest.fixture(scope="module")
def record(args):
    return vae.play_games(args)


@pytest.fixture(scope="module")
def samples(record, args):
    return vae.make_samples(record, args, False)


def make_models(samples, args, num_models=1):
    return Goals(args, samples["x"].shape[1], num_models)


def batch_of(samples, games=range(20), horizon=None, symmetry=None):
    return vae.make_batch(samples, torch.tensor(list(games)), horizon, symmetry)


def rows_of(samples, game):
    start, length = samples["start"][game], samples["length"][game]
    return range(int(start), int(start + length))


# -------------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("moa_samples", ["present", "rewarded"])
def test_just_so_many_samples_of_separate_episodes(moa_samples):
    args = Args(**SMALL, moa_samples=moa_samples)
    record = vae.play_games(args)
    for held_out, wanted in ((False, 1500), (True, 600)):
        samples = vae.make_samples(record, args, held_out)
        assert len(samples["x"]) == int(samples["length"].sum()) == wanted
        if moa_samples == "rewarded":
            assert (samples["caught"] > 0).all()
    assert 0 < record["held_out"].sum() < len(record["held_out"])


def test_picked_games_fill_the_number():
    rng = np.random.default_rng(0)
    for _ in range(300):
        lengths = rng.integers(0, 9, rng.integers(1, 40)).tolist()
        limit = int(rng.integers(1, 100))
        picked = vae.fill(lengths, limit)
        assert sum(picked) <= limit
        assert all(0 <= p <= length for p, length in zip(picked, lengths))
        assert sum(0 < p < length for p, length in zip(picked, lengths)) <= 1
        if sum(lengths) >= limit:
            assert sum(picked) == limit


def test_only_players_on_the_board_are_samples(samples, args):
    own = samples["view"][:, :16 * 7].view(-1, 16, 7)[..., 0]
    assert (own.sum(1) == 1).all()
    assert (samples["cells"][:, 0] < 16).all()
    mask = samples["x"][:, -NUM_ACTIONS:]
    assert (mask.gather(1, samples["action"][:, None]) == 1).all()


def test_views_as_classes_are_the_planes(samples):
    planes = samples["view"][:50, :16 * 7].view(-1, 16, 7)
    for row, plane in enumerate(planes):
        for player in range(4):
            where = plane[:, player].nonzero().flatten().tolist()
            assert samples["cells"][row, player] == (where[0] if where else 16)
        for cell in range(16):
            kinds = [number for number, p in ((1, 4), (2, 5), (3, 6)) if plane[cell, p]]
            assert samples["ground"][row, cell] == (kinds[0] if kinds else 0)


def test_the_posterior_is_bayes_rule(samples):
    for game in range(60):
        belief = [0.5, 0.5]
        for row in rows_of(samples, game):
            np.testing.assert_allclose(samples["posterior"][row].numpy(), belief, atol=1e-5)
            played = samples["kind_probs"][row, :, samples["action"][row]].tolist()
            belief = [b * p for b, p in zip(belief, played)]
            belief = [b / sum(belief) for b in belief]


def test_the_shares_are_the_prior():
    args = Args(**{**SMALL, "samples": 6000}, mix=("ns", "nh", "random"), shares=(1.0, 2.0, 1.0))
    samples = vae.make_samples(vae.play_games(args), args, False)
    first = samples["step"] == 0
    np.testing.assert_allclose(samples["posterior"][first].numpy(), [[0.25, 0.5, 0.25]] * int(first.sum()), atol=1e-6)
    share = (samples["player_kind"] == 1).double().mean()
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / len(samples["start"]))


def test_what_absent_players_hold_changes_nothing(record, args):
    garbled = {name: value.clone() for name, value in record.items()}
    absent = ~record["present"]
    generator = torch.Generator().manual_seed(1)
    garbled["cell"][absent] = torch.randint(-5, 40, (int(absent.sum()),), generator=generator).to(torch.int16)
    garbled["action"][absent] = torch.randint(0, 250, (int(absent.sum()),), generator=generator).to(torch.uint8)
    assert not torch.equal(garbled["cell"], record["cell"])
    for loss in ("moa", "recon", "both"):
        losses = []
        for content in (record, garbled):
            samples = vae.make_samples(content, args, False)
            models = make_models(samples, args)
            optimizer = torch.optim.Adam(models.parameters(), lr=1e-3)
            noise = torch.Generator().manual_seed(0)
            changed = dataclasses.replace(args, loss=loss)
            losses.append([vae.train_batch(models, optimizer, batch_of(samples, games), changed, 1e-3, noise)
                           for games in (range(30), range(30, 60))])
        assert losses[0] == losses[1]


def test_a_file_of_games_gives_the_same_samples(tmp_path, record, args):
    path = str(tmp_path / "games.npz")
    vae.save_games(path, record, args)
    loaded, taken_over = vae.load_games(Args(data=path, **{k: v for k, v in SMALL.items() if "samples" not in k}))
    assert (taken_over.samples, taken_over.held_out_samples) == (1500, 600)
    for held_out in (False, True):
        mine, theirs = vae.make_samples(record, args, held_out), vae.make_samples(loaded, taken_over, held_out)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("height, width, blocks", [(4, 4, 0), (3, 5, 0), (8, 8, 4)])
def test_a_turned_game_is_a_game(height, width, blocks):
    args = Args(height=height, width=width, max_blocks=blocks, hares=3)
    game = vae.BatchedStagHunt(32, seed=3, **vae.game_flags(args))
    other = vae.BatchedStagHunt(32, seed=4, **vae.game_flags(args))
    for _ in range(3):
        game.advance(game.random_actions())
    state = game.get_state()
    generator = torch.Generator().manual_seed(0)
    rules, never = vae.mix_rules(["nh"] * 4).expand(32, 4, 4), torch.zeros(32, dtype=torch.bool)
    seen = set()
    for _ in range(40):
        symmetry = Symmetry.draw(args, generator)
        seen.add((tuple(symmetry.actions.tolist()), tuple(symmetry.player)))
        board = state["board"].clone()
        for cell in range(height * width):
            bits = state["board"][:, symmetry.ground[cell]]
            board[:, cell] = sum((bits >> a & 1) << int(symmetry.actions[a]) for a in range(NUM_ACTIONS))
        previous = symmetry.actions[state["previous"].long()][:, symmetry.player].to(torch.uint8)
        other.set_state({**{name: state[name] for name in ("clock", "deadline")}, "board": board,
                         "cell": symmetry.cells[state["cell"][:, symmetry.player]], "previous": previous})
        before, after = game.observe(), other.observe()
        assert torch.equal(vae.features(before)[0][:, symmetry.x], vae.features(after)[0])
        planes = before["observation"][:, 0].flatten(1)
        assert torch.equal(planes[:, symmetry.view[:planes.shape[1]]], after["observation"][:, 0].flatten(1))
        assert torch.equal(before["action_mask"][:, 0][:, symmetry.x[-NUM_ACTIONS:] - symmetry.x[-NUM_ACTIONS:].min()],
                           after["action_mask"][:, 0])
        expected = torch.empty(32, 4, NUM_ACTIONS)
        expected[..., symmetry.actions] = vae.rule_probabilities(game, rules, never)
        torch.testing.assert_close(vae.rule_probabilities(other, rules, never), expected[:, symmetry.player])
    assert len(seen) > 15


# ------------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize("horizon", [None, 0, 3])
def test_the_goal_is_the_view_reached_within_the_horizon(samples, horizon):
    games = list(range(25))
    batch = batch_of(samples, games, horizon)
    place = {int(row): place for place, row in enumerate(batch["rows"])}
    for game in games:
        rows = rows_of(samples, game)
        for row in rows:
            goal = rows[-1] if horizon is None else min(row + horizon, rows[-1])
            assert batch["goal"][place[row]] == place[goal]
            assert batch["before"][place[row]] == (place[row - 1] if row > rows[0] else -1)
    assert sum(batch["counts"]) == len(batch["rows"]) == len(place)


def test_inference_step_by_step_is_inference_at_once(samples, args):
    models = make_models(samples, args, num_models=2)
    torch.nn.init.normal_(models.inference.prior)
    batch = batch_of(samples, range(8))
    x = batch["x"].expand(2, -1, -1)
    mean, logvar, _ = models.inference(x, batch["before"], batch["counts"])
    place = {int(row): place for place, row in enumerate(batch["rows"])}
    for game in range(8):
        carry = models.inference.start(1)
        for row in rows_of(samples, game):
            at = place[row]
            carry, step_mean, step_logvar = models.inference.step(carry, x[:, at:at + 1])
            torch.testing.assert_close(step_mean[:, 0], mean[:, at], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(step_logvar[:, 0], logvar[:, at], atol=1e-5, rtol=1e-4)


def test_inference_weighs_hypotheses_by_bayes_rule(samples, args):
    models = make_models(samples, args)
    torch.nn.init.normal_(models.inference.prior)
    torch.nn.init.constant_(models.inference.keep, 50.0)  # nothing is forgotten
    batch = batch_of(samples, range(8))
    weighed = models.inference(batch["x"], batch["before"], batch["counts"])[2][0].exp()
    _, table = models.inference.look(batch["x"])
    place = {int(row): place for place, row in enumerate(batch["rows"])}
    for game in range(8):
        belief = models.inference.prior[0, 0].softmax(-1)
        for row in rows_of(samples, game):
            likelihood = table[0, place[row]].exp()  # [7, K]
            torch.testing.assert_close(weighed[place[row]], likelihood @ belief, atol=1e-5, rtol=1e-4)
            belief = belief * likelihood[samples["action"][row]]
            belief = belief / belief.sum()


def test_only_the_past_enters_the_inferred_goal(samples, args):
    models = make_models(samples, args)
    game = int(samples["length"].argmax())
    changed = {name: value.clone() for name, value in samples.items()}
    rows = rows_of(samples, game)
    cut = rows[len(rows) // 2]
    changed["action"][cut:] = STAY  # what is played at this step and later, and every later view
    changed["x"][cut + 1:] = 1
    changed["view"][cut + 1:] = 0
    means = [models.inference(batch["x"], batch["before"], batch["counts"])[0][0, :cut + 1 - rows[0]]
             for batch in (batch_of(samples, [game]), batch_of(changed, [game]))]
    assert torch.equal(*means)


def test_models_side_by_side_are_models_alone(samples, args):
    together = make_models(samples, args, num_models=3)
    batch = batch_of(samples)
    noise = torch.randn(3, len(batch["rows"]), args.goal_dim)
    wide = {**batch, **{name: batch[name].expand(3, -1, -1) for name in ("x", "view")}}
    terms, _ = vae.loss_terms(together, wide, "both", noise)
    for member in range(3):
        alone = make_models(samples, args)
        alone.load_state_dict({name: value if name.endswith("scale") else value[member:member + 1]
                               for name, value in together.state_dict().items()})
        mine, _ = vae.loss_terms(alone, batch, "both", noise[member:member + 1])
        for name in terms:
            torch.testing.assert_close(terms[name][member], mine[name][0], atol=1e-4, rtol=1e-4)
    assert not torch.equal(together.moa.goal[0], together.moa.goal[1])


def test_illegal_actions_have_no_probability(samples, args):
    models = make_models(samples, args)
    batch = batch_of(samples)
    probs = models.moa(batch["x"], torch.randn(1, len(batch["rows"]), args.goal_dim)).exp()[0]
    assert (probs[batch["x"][0, :, -NUM_ACTIONS:] == 0] == 0).all()
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)))


# ------------------------------------------------------------------------------------------------- learning


def test_the_kl_of_two_normals():
    generator = torch.Generator().manual_seed(0)
    mean, logvar, other_mean, other_logvar = torch.randn(4, 5, 3, generator=generator)
    normal = lambda mean, logvar: torch.distributions.Normal(mean, (0.5 * logvar).exp())
    expected = torch.distributions.kl_divergence(normal(mean, logvar), normal(other_mean, other_logvar)).sum(-1)
    torch.testing.assert_close(vae.gaussian_kl(mean, logvar, other_mean, other_logvar), expected)


def test_recon_is_the_likelihood_of_the_pieces(samples, args):
    models, batch = make_models(samples, args), batch_of(samples)
    players, ground = models.prior.decode(torch.randn(1, len(batch["rows"]), args.goal_dim))
    recon, exact = vae.rebuilding(players, ground, batch), vae.rebuilt_exactly(players, ground, batch)
    for row in range(10):
        slow = -sum(players[0, row, player, batch["cells"][row, player]] for player in range(4))
        slow -= sum(ground[0, row, cell, batch["ground"][row, cell]] for cell in range(16))
        assert recon[0, row].item() == pytest.approx(slow.item(), rel=1e-5)
        right = [players[0, row, p].argmax() == batch["cells"][row, p] for p in range(4)]
        right += [ground[0, row, c].argmax() == batch["ground"][row, c] for c in range(16)]
        assert bool(exact[0, row]) == all(right)
    perfect = tuple(torch.nn.functional.one_hot(batch[name], classes)[None].float().clamp(min=1e-9).log()
                    for name, classes in (("cells", 17), ("ground", 4)))
    recon, exact = vae.rebuilding(*perfect, batch), vae.rebuilt_exactly(*perfect, batch)
    assert exact.all() and recon.abs().max() < 1e-5


@pytest.mark.parametrize("loss, shapes", [("moa", {"moa", "kl"}), ("recon", {"recon", "kl"}), ("both", {"moa", "recon", "kl"})])
def test_only_the_loss_asked_for_shapes_the_goals(samples, args, loss, shapes):
    models, batch = make_models(samples, args), batch_of(samples)
    torch.nn.init.normal_(models.moa.action.weight)
    noise = torch.randn(1, len(batch["rows"]), args.goal_dim)
    for name in ("moa", "moa_inferred", "evidence", "recon", "kl", "inference"):
        terms, _ = vae.loss_terms(models, batch, loss, noise)
        models.zero_grad()
        terms[name].sum().backward()
        gradient = models.prior.encoder[0].weight.grad
        assert (gradient is not None and bool(gradient.abs().sum() > 0)) == (name in shapes)
    total = vae.total_loss({name: 1.0 for name in ("moa", "recon", "kl")}, loss, 0.5)
    assert total == 0.5 + len(shapes) - 1


# --------------------------------------------------------------------------------------------------- scores


def test_scores_are_what_they_say():
    generator = torch.Generator().manual_seed(0)
    probs, truth = (torch.rand(40, NUM_ACTIONS, generator=generator).softmax(-1) for _ in range(2))
    action = torch.multinomial(truth, 1, generator=generator)[:, 0]
    got = vae.score(probs, action, truth)
    order = probs.argsort(1, descending=True)
    rows = range(40)
    assert got["top1"] == pytest.approx(sum(truth[r, order[r, 0]].item() for r in rows) / 40)
    assert got["top3"] == pytest.approx(sum(truth[r, order[r, k]].item() for r in rows for k in range(3)) / 40)
    assert got["hit_rate"] == pytest.approx(sum(bool(order[r, 0] == action[r]) for r in rows) / 40)
    assert got["hit_rate_3"] == pytest.approx(sum(action[r].item() in order[r, :3].tolist() for r in rows) / 40)
    assert got["cross_entropy"] == pytest.approx(
        -sum(truth[r, a].item() * math.log(probs[r, a]) for r in rows for a in range(NUM_ACTIONS)) / 40, rel=1e-5)
    assert got["cross_entropy_played"] == pytest.approx(-sum(math.log(probs[r, action[r]]) for r in rows) / 40, rel=1e-5)
    assert vae.score(probs, action, truth, sees_future=True)["cross_entropy"] == got["cross_entropy_played"]
    for number, name in enumerate(vae.ACTIONS):
        taken = [r for r in rows if action[r] == number]
        named = [r for r in rows if order[r, 0] == number]
        both = len(set(taken) & set(named))
        assert got["recall"][name] == pytest.approx(sum(probs[r, number].item() for r in taken) / max(len(taken), 1))
        assert got["recall_of_likeliest"][name] == pytest.approx(both / max(len(taken), 1))
        assert got["precision_of_likeliest"][name] == pytest.approx(both / max(len(named), 1))


def test_nothing_beats_the_ceiling(samples, args):
    known, history = vae.true_probabilities(samples)
    each = {"inferred": torch.rand(len(history), NUM_ACTIONS), "hindsight": known}
    moa = vae.score_all(each, samples, torch.full((NUM_ACTIONS,), 1 / NUM_ACTIONS))
    best = moa["ceiling"]["history"]
    for name in ("inferred", "trivial"):
        assert moa[name]["top1"] <= best["top1"]
        assert moa[name]["top3"] <= best["top3"] + 1e-6
        assert moa[name]["cross_entropy"] >= best["cross_entropy"]
    assert moa["ceiling"]["kind"]["cross_entropy"] < best["cross_entropy"]
    # the luck-free scores and the plain counts have the same expected value
    spread = 4 * math.sqrt(0.25 / len(history))
    assert abs(best["top1"] - best["hit_rate"]) < spread


def test_the_read_out_finds_a_line():
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(3, (600,), generator=generator)
    goals = torch.randn(600, 5, generator=generator) * 0.3
    goals[torch.arange(600), kind] += 2
    readout = vae.fit_readout(goals, kind, 3)
    assert (vae.read_out(readout, goals) == kind).double().mean() > 0.98


# ----------------------------------------------------------------------------------------------- whole runs


def run(tmp_path, name, **flags):
    code = vae.main(Args(**{**SMALL, "runs_dir": str(tmp_path), "run_name": name, **flags}))
    return code, tmp_path / name


def test_a_run_leaves_what_it_promises(tmp_path, capsys):
    code, folder = run(tmp_path, "a")
    assert code == 0
    out = capsys.readouterr().out
    assert "[MOA] epoch 0: top1=" in out and "top3=" in out
    results = json.loads((folder / "results.json").read_text())
    for scores in (results["moa"]["hindsight"], results["moa"]["inferred"], results["moa"]["ceiling"]["kind"],
                   results["moa"]["ceiling"]["history"], results["moa"]["trivial"]):
        assert {"top1", "top3", "cross_entropy", "recall"} <= scores.keys()
        assert list(scores["recall"]) == list(vae.ACTIONS)
    assert {"recon", "kl", "exact_views"} <= results["vae"].keys()
    for epoch in range(2):
        with open(folder / f"moa_eval_epoch{epoch}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["action"] for row in rows] == list("0123456")
        assert sum(int(row["count"]) for row in rows) == 600
        content = np.load(folder / f"moa_eval_epoch{epoch}.npz")
        assert content["confusion_matrix"].sum() == len(content["labels"]) == len(content["probabilities"]) == 600
    pictures = {path.stem for path in (folder / "pictures").glob("*.png")}
    assert pictures == {"losses", "class_distribution", "confusion_matrix", "recall", "reliability", "goal_map",
                        "kinds_by_step"}
    trained = vae.load_goals(str(folder / "checkpoint.pt"), "--init-from x", Args(**SMALL), results_inputs(folder))
    assert results["moa"]["inferred"]["top1"] > results["moa"]["trivial"]["top1"]
    assert sum(p.numel() for p in trained.parameters()) > 0


def results_inputs(folder):
    return vae.load_checkpoint(str(folder / "checkpoint.pt"), "x")["num_inputs"]


@pytest.mark.parametrize("flags", [dict(loss="recon", mix=("nh",), moa_samples="rewarded"),
                                   dict(loss="both", kl_warmup=1, horizon=3, goal_dim=8, height=5, width=6, max_blocks=2,
                                        mix=("nsh", "noisy-nh", "patient-5"), num_players=3, eval_every=2)])
def test_other_flags_run(tmp_path, flags):
    code, folder = run(tmp_path, "a", **flags)
    assert code == 0 and json.loads((folder / "results.json").read_text())["epochs"] == 2


def test_an_interrupted_run_goes_on_exactly(tmp_path, monkeypatch, capsys):
    _, whole = run(tmp_path, "whole")
    steps = []
    train_batch = vae.train_batch

    def interrupted(*args):
        steps.append(1)
        if len(steps) == 9:
            signal.raise_signal(signal.SIGINT)
        return train_batch(*args)

    monkeypatch.setattr(vae, "train_batch", interrupted)
    code, broken = run(tmp_path, "broken")
    assert code == 130 and "--resume" in capsys.readouterr().out
    assert not (broken / "results.json").exists()
    assert vae.main(Args(resume=str(broken))) == 0
    mine, theirs = (vae.load_checkpoint(str(folder / "checkpoint.pt"), "x") for folder in (whole, broken))
    assert all(torch.equal(mine["goals"][name], theirs["goals"][name]) for name in mine["goals"])
    assert mine["history"] == theirs["history"]
    results = [json.loads((folder / "results.json").read_text()) for folder in (whole, broken)]
    assert results[0]["moa"] == results[1]["moa"] and results[0]["goal"] == results[1]["goal"]


def test_networks_of_before_can_be_scored_alone(tmp_path):
    _, first = run(tmp_path, "a")
    code, second = run(tmp_path, "b", init_from=str(first / "checkpoint.pt"), epochs=0)
    scores = [json.loads((folder / "results.json").read_text())["moa"] for folder in (first, second)]
    assert code == 0 and scores[0] == scores[1]


# ------------------------------------------------------------------------------------------ what is refused


def change(content, **changes):
    return {**content, **changes}


BAD_DATA = {
    "no cell": lambda c: {name: value for name, value in c.items() if name != "cell"},
    "no flags": lambda c: {name: value for name, value in c.items() if name != "flags"},
    "flags no JSON": lambda c: change(c, flags=np.array("{")),
    "no episode": lambda c: {name: value if name == "flags" else value[:0] for name, value in c.items()},
    "another shape": lambda c: change(c, board=c["board"][:, :, :-1]),
    "another length": lambda c: change(c, kind=c["kind"][:-1]),
    "another type": lambda c: change(c, action=c["action"].astype(float)),
    "no such action": lambda c: change(c, action=c["action"] + 7),
    "no such cell": lambda c: change(c, cell=np.where(c["present"], 16, c["cell"])),
    "no such kind": lambda c: change(c, kind=c["kind"] + 2),
    "nobody plays so": lambda c: change(c, action=np.where(c["present"], 6, c["action"])),
    "back again": lambda c: change(c, present=np.concatenate([c["present"][:, :1] & False, c["present"][:, 1:]], 1)),
    "a flag of no sense": lambda c: change(c, flags=np.array(str(c["flags"]).replace('"height": 4', '"height": "4"'))),
    "nobody there": lambda c: change(c, present=c["present"] & False),
    "nothing held out": lambda c: change(c, held_out=c["held_out"] & False),
}


@pytest.mark.parametrize("fault", BAD_DATA)
def test_bad_data_is_refused(tmp_path, record, args, fault):
    vae.save_games(str(tmp_path / "games.npz"), record, args)
    with np.load(tmp_path / "games.npz") as file:
        content = BAD_DATA[fault](dict(file))
    np.savez(tmp_path / "bad.npz", **content)
    with pytest.raises(Refused) as refusal:
        vae.main(Args(data=str(tmp_path / "bad.npz"), runs_dir=str(tmp_path / "runs"), epochs=1))
    assert "\n" not in str(refusal.value) and "--data" in str(refusal.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("content", [b"", b"no numbers at all", b"PK\x03\x04 cut short"])
def test_unreadable_data_is_refused(tmp_path, content):
    (tmp_path / "games.npz").write_bytes(content)
    for path in (tmp_path / "games.npz", tmp_path / "none.npz", tmp_path):
        with pytest.raises(Refused, match="--data"):
            vae.main(Args(data=str(path), runs_dir=str(tmp_path / "runs")))


@pytest.mark.parametrize("flags, words", [
    (dict(goal_dim=8), "--goal-dim 8 does not fit"), (dict(height=5), "--height 5 does not fit"),
    (dict(num_players=3), "--num-players 3 does not fit"), (dict(hidden_size=16), "--hidden-size 16 does not fit")])
def test_networks_that_do_not_fit_are_refused(tmp_path, flags, words):
    _, first = run(tmp_path, "a", epochs=1)
    with pytest.raises(Refused, match=words):
        run(tmp_path, "b", init_from=str(first / "checkpoint.pt"), **flags)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("flags, words", [
    (dict(samples=0), "--samples 0"), (dict(goal_dim=0), "--goal-dim 0"), (dict(mix=("ppo",)), "--mix 'ppo'"),
    (dict(mix=("switch-ns-nh",)), "switch-ns-nh"), (dict(shares=(1.0,)), "--shares 1"), (dict(shares=(1.0, 0.0)), "--shares"),
    (dict(kl_weight=-1.0), "--kl-weight"), (dict(kl_weight=0.0, kl_warmup=1), "--kl-warmup 1"),
    (dict(kl_warmup=3), "--kl-warmup 3"), (dict(epochs=0), "--epochs 0"), (dict(learning_rate=0.0), "--learning-rate"),
    (dict(data="a.npz", save_data="b.npz"), "--save-data"), (dict(height=2, width=2), "--height 2"),
    (dict(init_from="none.pt"), "--init-from none.pt"), (dict(resume="nowhere"), "--resume nowhere"),
    (dict(mix=("ns",), hares=0, stags=1, num_players=2, moa_samples="rewarded", stag_hunters=2, final_time=1), "no such sample")])
def test_flags_that_make_no_sense_are_refused(tmp_path, flags, words):
    with pytest.raises(Refused) as refusal:
        run(tmp_path, "a", **flags)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
    assert not (tmp_path / "a").exists()


def test_a_refusal_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "games.npz").write_bytes(b"nothing")
    script = Path(vae.__file__)
    done = subprocess.run([sys.executable, script, "--data", str(tmp_path / "games.npz")], capture_output=True, text=True,
                          cwd=tmp_path, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: --data")


def test_data_made_with_other_flags_is_refused(tmp_path, record, args):
    path = str(tmp_path / "games.npz")
    vae.save_games(path, record, args)
    for flags, words in ((dict(height=6), "--height 6 does not fit"), (dict(mix=("nh",)), "--mix"), (dict(samples=7), "--samples 7")):
        with pytest.raises(Refused, match=words):
            vae.load_games(Args(data=path, **flags))
