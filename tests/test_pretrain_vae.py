"""pretrain_vae.py: its formulas against slow ones, its samples against the rules, and whole short runs."""

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
from pretrain_vae import NUM_ACTIONS, STAY, Args, Refused

SMALL = dict(episodes=60, held_out_episodes=25, hidden_size=32, vae_size=32, batch_size=32, epochs=2)


@pytest.fixture(scope="module")
def args():
    return Args(**SMALL)


@pytest.fixture(scope="module")
def played(args):
    return vae.play_games(args, 60, 1)


@pytest.fixture(scope="module")
def samples(played):
    return played[1]


@pytest.fixture(autouse=True)
def few_pictures(request, monkeypatch):
    """Pictures take longer than a short run: only the tests that are about them draw any."""
    if request.node.originalname not in ("test_a_run_leaves_what_it_promises", "test_other_flags_run"):
        monkeypatch.setattr(vae, "write_pictures", lambda *_: None)


@pytest.fixture
def run_of(args, samples):
    return vae.Run(args, len(samples["length"]))


def lesson_of(args, run, samples, games=range(20)):
    return vae.make_lesson(args, run.known, samples, torch.tensor(list(games)))


def rows_of(samples, game):
    first, length = int(samples["first"][game]), int(samples["length"][game])
    return range(first, first + length)


# -------------------------------------------------------------------------------------------------- samples


def test_each_players_game_is_whole_and_in_order(samples):
    assert len(samples["length"]) == 60 * 4 and int(samples["length"].sum()) == len(samples["x"])
    assert set(samples["caught"].tolist()) == {0, 1, 2}
    for game in range(60 * 4):
        rows = rows_of(samples, game)
        assert samples["step"][rows].tolist() == list(range(len(rows)))
        assert (samples["game"][rows] == game).all()
        hunts = (samples["action"][rows] > STAY).tolist()
        caught = int(samples["caught"][game])
        assert caught == 0 or (hunts[-1] and samples["action"][rows[-1]] == STAY + caught)


def test_rewarded_samples_are_those_of_players_with_a_catch(args, samples):
    _, rewarded = vae.play_games(dataclasses.replace(args, moa_samples="rewarded"), 60, 1)
    wanted = samples["caught"] > 0
    assert 0 < len(rewarded["x"]) < len(samples["x"]) and (rewarded["caught"] > 0).all()
    assert torch.equal(rewarded["x"], samples["x"][wanted[samples["game"]]])
    assert torch.equal(rewarded["length"], samples["length"][wanted])
    for game in range(len(rewarded["length"])):
        assert (rewarded["game"][rows_of(rewarded, game)] == game).all()


def test_only_players_on_the_board_are_samples(args, samples):
    views = vae.make_views(args)
    own = samples["x"][:, -4] - views.first_cell  # before the legal actions and the clock
    assert ((own >= 0) & (own < 16)).all()
    assert views.mask(samples["x"]).gather(1, samples["action"][:, None]).all()


def test_the_posterior_is_bayes_rule(samples):
    for game in range(60):
        belief = [0.5, 0.5]
        for row in rows_of(samples, game):
            np.testing.assert_allclose(samples["posterior"][row].numpy(), belief, atol=1e-5)
            played = samples["kind_probs"][row, :, samples["action"][row]].tolist()
            belief = [b * p for b, p in zip(belief, played)]
            belief = [b / sum(belief) for b in belief]


def test_the_shares_are_the_prior():
    args = Args(**SMALL, mix=("ns", "nh", "random"), shares=(1.0, 2.0, 1.0))
    _, samples = vae.play_games(args, 200, 1)
    first = samples["step"] == 0
    prior = [[0.25, 0.5, 0.25]] * int(first.sum())
    np.testing.assert_allclose(samples["posterior"][first].numpy(), prior, atol=1e-6)
    share = (samples["kind"] == 1).double().mean()
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / len(samples["length"]))


def same(mine, theirs):
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_what_absent_players_do_changes_nothing(args, played):
    games, samples = played
    garbled = {name: part.clone() for name, part in games.items()}
    lengths = samples["length"].view(60, 4).T  # [seat, episode]
    absent = torch.arange(args.final_time)[:, None, None] >= lengths
    garbled["actions"][absent] = torch.randint(0, 7, (int(absent.sum()),))
    assert not torch.equal(garbled["actions"], games["actions"])
    again, theirs = vae.play_games(args, 60, 99, garbled)
    assert same(samples, theirs) and same(games, again)


def test_a_file_of_games_gives_the_same_samples(tmp_path, args):
    path = str(tmp_path / "games.npz")
    _, games, *mine = vae.make_samples(args)
    vae.save_games(dataclasses.replace(args, save_data=path), games)
    taken_over, again, *theirs = vae.make_samples(Args(data=path, seed=5))
    assert (taken_over.episodes, taken_over.held_out_episodes) == (60, 25)
    assert same(games, again) and all(map(same, mine, theirs))


# ------------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize("horizon", [1, 3, 35])
def test_the_goal_is_that_of_the_last_view_acted_in_within_the_horizon(samples, args, run_of, horizon):
    lesson = lesson_of(dataclasses.replace(args, horizon=horizon), run_of, samples)
    mean, logvar = run_of.prior(lesson["x"].flatten(1, 2))
    goals = vae.pick_goals(mean, logvar, lesson["goal_step"])["goal_mean"][0]
    for place, game in enumerate(range(20)):
        rows = rows_of(samples, game)
        for step, row in enumerate(rows):
            goal = min(row + horizon - 1, rows[-1])
            assert lesson["rows"][step, place] == row and bool(lesson["seen"][0, step, place])
            expected = run_of.prior(samples["x"][None, goal:goal + 1])[0][0, 0]
            torch.testing.assert_close(goals[step, place], expected, atol=1e-5, rtol=1e-4)
        assert not lesson["seen"][0, len(rows):, place].any()


def test_what_fills_up_a_lesson_changes_nothing(samples, args, run_of):
    """The losses of games side by side are the means over each game on its own, weighted by its samples."""
    games = [int(samples["length"].argmax()), int(samples["length"].argmin()), 7]
    lesson = lambda part: lesson_of(args, run_of, samples, part)
    predict = lambda part: vae.predict_lesson(run_of, lesson(part), vae.seeded(0, ""))
    together = predict(games)
    for place, game in enumerate(games):
        alone = predict([game])
        for name in ("moa", "hypotheses", "inference", "kl", "goal_inferred", "prob_hindsight", "exact"):
            mine = together[name].unflatten(1, (-1, 3))[0, :len(rows_of(samples, game)), place]
            torch.testing.assert_close(mine, alone[name][0], atol=1e-4, rtol=1e-3)


def test_inference_weighs_hypotheses_by_bayes_rule(samples, args, run_of):
    known, clear = run_of.known, 0
    torch.nn.init.normal_(known.prior)
    with torch.no_grad():
        known.likelihood.weight.mul_(10)  # hypotheses that disagree
    likely = vae.infer_goals(known, lesson_of(args, run_of, samples))[3][0].exp().view(-1, 20)
    for place in range(20):
        before = belief = known.before()[0, 0].detach()
        for step, row in enumerate(rows_of(samples, place)):
            likelihood = known.look(samples["x"][None, row:row + 1])[2][:, 0, 0].exp()  # [7, W]
            torch.testing.assert_close(likelihood.sum(0), torch.ones(args.hypotheses))
            of_action = likelihood[samples["action"][row]]
            torch.testing.assert_close(likely[step, place], of_action @ sum(belief.chunk(4)), atol=1e-5, rtol=1e-3)
            legal = int((likelihood[:, 0] > 0).sum())
            counted = torch.cat([(1 - slip) * of_action + slip / legal for slip in vae.SLIPS])
            belief, clear = belief * counted / (belief * counted).sum(), clear + int((of_action < 0.02).any())
            restless, ways = belief[-args.hypotheses:], known.prior[0, 0].softmax(-1).detach()
            restless += vae.TURN * (restless.sum() * ways - restless)  # in place
            belief = (1 - vae.CHANGE) * belief + vae.CHANGE * before
    assert clear > 20


def test_only_the_past_enters_the_inferred_goal(samples, args, run_of):
    game = int(samples["length"].argmax())
    changed = {name: value.clone() for name, value in samples.items()}
    rows = rows_of(samples, game)
    cut = rows[len(rows) // 2]
    changed["action"][cut:] = STAY  # what is played at this step and later, and every later view
    changed["x"][cut + 1:] = samples["x"][0]
    means = [vae.infer_goals(run_of.known, lesson_of(args, run_of, content, [game]))[1][0, :cut + 1 - rows[0]]
             for content in (samples, changed)]
    assert torch.equal(*means)


def test_models_side_by_side_are_models_alone(samples, args, run_of, monkeypatch):
    monkeypatch.setattr(vae, "draw_goals", lambda mean, logvar, generator: mean)
    monkeypatch.setattr(vae, "HINDSIGHT", 2.0)  # always told
    make = lambda number: vae.OtherModel(number, vae.make_views(args), 32, args.goal_dim, args.hypotheses, 1)
    together, alone = make(3), make(1)
    lesson = lesson_of(args, run_of, samples)
    lesson |= vae.pick_goals(*run_of.prior(lesson["x"].flatten(1, 2)), lesson["goal_step"])
    three = {name: part if name == "rows" else part.expand(3, *part.shape[1:])
             for name, part in lesson.items()}
    losses = vae.others_loss(together, three | {"memory": together.start(20)}, run_of.generator)
    for member in range(3):
        alone.load_state_dict({name: part[member:member + 1] for name, part in together.state_dict().items()})
        mine = vae.others_loss(alone, lesson | {"memory": alone.start(20)}, run_of.generator)
        for name in losses:
            torch.testing.assert_close(losses[name][member], mine[name][0], atol=1e-3, rtol=1e-4)
    assert not torch.equal(together.goal[0], together.goal[1])


def test_illegal_actions_have_no_probability(samples, args, run_of):
    known, x = run_of.known, samples["x"][None, :200]
    mask = known.views.mask(x)
    probs = known.act(known.look(x)[0] + torch.randn(1, 200, args.goal_dim) @ known.goal, mask).exp()
    assert (probs[~mask] == 0).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(1, 200))


# ------------------------------------------------------------------------------------------------- learning


def test_the_kl_of_two_normals():
    generator = torch.Generator().manual_seed(0)
    mean, logvar, other_mean, other_logvar = torch.randn(4, 5, 3, generator=generator)
    normal = lambda mean, logvar: torch.distributions.Normal(mean, (0.5 * logvar).exp())
    expected = torch.distributions.kl_divergence(normal(mean, logvar), normal(other_mean, other_logvar))
    torch.testing.assert_close(vae.gaussian_kl(mean, logvar, other_mean, other_logvar), expected.sum(-1))


def test_recon_is_the_likelihood_of_the_board(samples, args, run_of):
    views, x = vae.make_views(args), samples["x"][None, :10]
    target, rebuilt = run_of.decoder.target(x), run_of.decoder(torch.randn(1, 10, args.goal_dim))
    facts = [*range(views.first_previous), *range(views.first_cell, views.first_legal)]
    recon = vae.rebuild_loss(rebuilt, target)
    for row in range(10):
        named = set(x[0, row].tolist())
        probability = rebuilt[0, row].double().sigmoid()
        assert target[0, row].tolist() == [float(fact in named) for fact in facts]
        slow = -sum(math.log(p if fact in named else 1 - p) for p, fact in zip(probability.tolist(), facts))
        assert recon[0, row].item() == pytest.approx(slow, rel=1e-4)
    # two views with the same facts of the board show the same board: 4x4 lies in the window
    assert len(facts) == 49 * 6 + 17 and vae.rebuild_loss(40 * target - 20, target).max() < 1e-4


@pytest.mark.parametrize("loss, shapes", [("moa", {"action", "kl"}), ("recon", {"recon", "kl"}),
                                          ("both", {"action", "recon", "kl"})])
def test_only_the_loss_asked_for_shapes_the_goals(samples, args, run_of, loss, shapes):
    torch.nn.init.normal_(run_of.known.action.weight)
    for name in ("action", "recon", "kl", "hypotheses", "inference"):
        lesson = lesson_of(args, run_of, samples)
        losses = vae.goal_losses(dataclasses.replace(args, loss=loss), run_of, lesson)
        run_of.networks.zero_grad()
        losses[f"{name}_loss"].sum().backward()
        gradient = run_of.prior.hidden.weight.grad
        assert (gradient is not None and bool(gradient.abs().sum() > 0)) == (name in shapes)
        own = {"recon": run_of.decoder.out, "kl": run_of.prior.out}.get(name, run_of.known.view).weight.grad
        assert own.abs().sum() > 0


def test_a_minibatch_in_parts_is_a_minibatch(samples, args, run_of, monkeypatch):
    """What one step learns does not depend on how the games are laid side by side."""
    monkeypatch.setattr(vae, "draw_goals", lambda mean, logvar, generator: mean)
    monkeypatch.setattr(vae, "HINDSIGHT", 2.0)  # always told
    games = torch.arange(24)
    whole = vae.goal_losses(args, run_of, lesson_of(args, run_of, samples, games))
    parts = vae.learn(args, run_of, samples, games)
    assert whole.keys() == parts.keys()
    for name in whole:
        mean = whole[name][0] / samples["length"][games].sum()
        torch.testing.assert_close(mean, parts[name], atol=1e-4, rtol=1e-4)


# --------------------------------------------------------------------------------------------------- scores


def test_scores_are_what_they_say():
    generator = torch.Generator().manual_seed(0)
    probs, truth = (torch.rand(40, NUM_ACTIONS, generator=generator).softmax(-1) for _ in range(2))
    action = torch.multinomial(truth, 1, generator=generator)[:, 0]
    got = vae.score(probs, action, truth)
    order = probs.argsort(1, descending=True)
    rows = range(40)
    assert got["top1"] == pytest.approx(sum(truth[r, order[r, 0]].item() for r in rows) / 40)
    assert got["top3"] == pytest.approx(sum(truth[r, order[r, :3]].sum().item() for r in rows) / 40)
    assert got["hit_rate"] == pytest.approx(sum(bool(order[r, 0] == action[r]) for r in rows) / 40)
    assert got["hit_rate_3"] == pytest.approx(sum(bool(action[r] in order[r, :3]) for r in rows) / 40)
    expected = -sum(truth[r, a].item() * math.log(probs[r, a]) for r in rows for a in range(NUM_ACTIONS))
    assert got["cross_entropy"] == pytest.approx(expected / 40, rel=1e-5)
    played = -sum(math.log(probs[r, action[r]]) for r in rows)
    assert got["cross_entropy_played"] == pytest.approx(played / 40, rel=1e-5)
    assert vae.score(probs, action, truth, sees_future=True)["cross_entropy"] == got["cross_entropy_played"]
    for number, name in enumerate(vae.ACTIONS):
        taken = [r for r in rows if action[r] == number]
        named = [r for r in rows if order[r, 0] == number]
        both = len(set(taken) & set(named))
        recall = sum(probs[r, number].item() for r in taken) / max(len(taken), 1)
        assert got["recall"][name] == pytest.approx(recall)
        assert got["recall_of_likeliest"][name] == pytest.approx(both / max(len(taken), 1))
        assert got["precision_of_likeliest"][name] == pytest.approx(both / max(len(named), 1))


def test_nothing_beats_the_ceiling(samples, args, run_of):
    evaluation = vae.evaluate(args, run_of, samples)
    moa, best = evaluation["moa"], evaluation["moa"]["history"]
    for name in ("inferred", "trivial"):
        assert moa[name]["top1"] <= best["top1"]
        assert moa[name]["top3"] <= best["top3"] + 1e-6
        assert moa[name]["cross_entropy"] >= best["cross_entropy"]
    assert moa["kind"]["cross_entropy"] < best["cross_entropy"]
    # the luck-free scores and the plain counts have the same expected value
    assert abs(best["top1"] - best["hit_rate"]) < 4 * math.sqrt(0.25 / len(samples["x"]))
    losses = evaluation["losses"]
    assert losses["total"] == pytest.approx(losses["moa"] + args.kl_weight * losses["kl"])
    assert losses["moa"] == pytest.approx(moa["hindsight"]["cross_entropy_played"], rel=1e-4)
    assert losses["moa_inferred"] == pytest.approx(moa["inferred"]["cross_entropy_played"], rel=1e-4)


def test_the_read_out_finds_a_line():
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(3, (600,), generator=generator)
    goals = torch.randn(600, 5, generator=generator) * 0.3
    goals[torch.arange(600), kind] += 2
    assert (vae.read_out(goals[:400], kind[:400], 3, goals[400:]) == kind[400:]).double().mean() > 0.98


# ----------------------------------------------------------------------------------------------- whole runs


def run(tmp_path, name, **flags):
    code = vae.main(Args(**{**SMALL, "runs_dir": str(tmp_path), "run_name": name, **flags}))
    return code, tmp_path / name


def test_a_run_leaves_what_it_promises(tmp_path, capsys):
    code, folder = run(tmp_path, "a", episodes=300, learning_rate=8e-3)
    assert code == 0
    out = capsys.readouterr().out
    assert "[MOA] epoch 0: top1=" in out and "top3=" in out
    results = json.loads((folder / "results.json").read_text())
    assert results["moa"].keys() == vae.PREDICTORS.keys()
    for scores in results["moa"].values():
        assert {"top1", "top3", "hit_rate", "cross_entropy", "recall"} <= scores.keys()
        assert list(scores["recall"]) == list(vae.ACTIONS)
    assert {"recon", "kl", "moa", "total"} <= results["losses"].keys() and len(results["history"]) == 2
    for epoch in range(2):
        with open(folder / f"moa_eval_epoch{epoch}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["action"] for row in rows] == list("0123456")
        held_out = results["held_out_samples"]
        assert sum(int(row["count"]) for row in rows) == held_out
        content = np.load(folder / f"moa_eval_epoch{epoch}.npz")
        assert content["confusion_matrix"].sum() == len(content["labels"]) == held_out
        labels = torch.from_numpy(content["labels"]).long()
        probs, truth = (torch.from_numpy(content[name]) for name in ("probabilities", "history_known"))
        again = vae.score(probs, labels, truth)
    assert again["top1"] == pytest.approx(results["moa"]["inferred"]["top1"])
    pictures = {path.stem for path in (folder / "pictures").glob("*.png")}
    assert pictures == {"losses", "class_distribution", "confusion_matrix", "recall", "goal_map"}
    assert results["moa"]["inferred"]["top1"] > results["moa"]["trivial"]["top1"]


def test_what_a_default_run_leaves_is_loaded_by_default(tmp_path):
    """With the default sizes: load_goals gives modules that answer as the trained ones do."""
    args = Args(runs_dir=str(tmp_path), run_name="a", episodes=40, held_out_episodes=20, epochs=1)
    assert vae.main(args) == 0
    run = vae.Run(args, 100)
    for part in (run.prior, run.known):
        torch.nn.init.zeros_(part.out.weight)
    for path in (tmp_path / "a", tmp_path / "a" / "checkpoint.pt"):
        saved = vae.load_goals(str(path), f"--vae-checkpoint {path}", args, run.prior, run.known)
    run.decoder.load_state_dict(saved["decoder"])
    _, held_out = vae.play_games(args, 20, args.seed + 1_000_000)
    mine = vae.evaluate(args, run, held_out)
    theirs = json.loads((tmp_path / "a" / "results.json").read_text())
    assert mine["moa"] == theirs["moa"] and mine["losses"] == theirs["losses"]


@pytest.mark.parametrize("flags", [
    dict(loss="recon", mix=("nh",), moa_samples="rewarded", goal_dim=1),
    dict(loss="both", horizon=3, goal_dim=8, height=5, width=6, max_blocks=2, num_players=3, eval_every=2,
         mix=("nsh", "noisy-nh", "patient-5"), dynamic_final_time=True)])
def test_other_flags_run(tmp_path, flags):
    code, folder = run(tmp_path, "a", **flags)
    assert code == 0 and json.loads((folder / "results.json").read_text())["epochs"] == 2


@pytest.mark.parametrize("steps", [5, 8])  # in the middle of an epoch, and at the end of one
def test_an_interrupted_run_goes_on_exactly(tmp_path, monkeypatch, capsys, steps):
    _, whole = run(tmp_path, "whole")
    learn, learned = vae.learn, []

    def interrupted(*args):
        learned.append(1)
        if len(learned) == steps:
            signal.raise_signal(signal.SIGINT)
        return learn(*args)

    monkeypatch.setattr(vae, "learn", interrupted)
    code, broken = run(tmp_path, "broken")
    assert code == 130 and "--resume" in capsys.readouterr().out
    assert not (broken / "results.json").exists()
    assert vae.load_checkpoint(str(broken / "checkpoint.pt"), "x")["step"] == steps
    assert vae.main(Args(resume=str(broken))) == 0
    mine, theirs = (vae.load_checkpoint(str(folder / "checkpoint.pt"), "x") for folder in (whole, broken))
    for part in ("prior", "known", "decoder"):
        assert same(mine[part], theirs[part])
    assert mine["history"] == theirs["history"]
    results = [json.loads((folder / "results.json").read_text()) for folder in (whole, broken)]
    assert results[0]["moa"] == results[1]["moa"] and results[0]["goals"] == results[1]["goals"]


def test_a_longer_run_goes_on(tmp_path):
    _, folder = run(tmp_path, "a", epochs=1)
    assert vae.main(Args(resume=str(folder), epochs=4)) == 0
    assert json.loads((folder / "results.json").read_text())["epochs"] == 4


def test_networks_of_before_can_be_scored_alone(tmp_path):
    _, first = run(tmp_path, "a")
    code, second = run(tmp_path, "b", init_from=str(first), epochs=0, batch_size=Args.batch_size)
    scores = [json.loads((folder / "results.json").read_text()) for folder in (first, second)]
    assert code == 0 and scores[0]["moa"] == scores[1]["moa"] and scores[0]["losses"] == scores[1]["losses"]


# ------------------------------------------------------------------------------------------ what is refused


def change(content, **changes):
    return {**content, **changes}


BAD_DATA = {
    "no cell": lambda c: {name: value for name, value in c.items() if name != "cell"},
    "no flags": lambda c: {name: value for name, value in c.items() if name != "flags"},
    "flags no JSON": lambda c: change(c, flags=np.array("{")),
    "a flag of no sense": lambda c: change(c, flags=np.array(str(c["flags"]).replace('t": 4', 't": "4"'))),
    "no episode": lambda c: {name: value if name == "flags" else value[..., :0] for name, value in c.items()},
    "another board": lambda c: change(c, board=c["board"][:-1]),
    "another length": lambda c: change(c, actions=c["actions"][:1]),
    "fewer kinds": lambda c: change(c, kind=c["kind"][..., :-1]),
    "no such action": lambda c: change(c, actions=c["actions"] + 7),
    "no such cell": lambda c: change(c, cell=c["cell"] + 17),
    "no such kind": lambda c: change(c, kind=c["kind"] + 2),
    "all obstacles": lambda c: change(c, board=c["board"] * 0),
    "no bits of a board": lambda c: change(c, board=c["board"] + 128),
    "nobody plays so": lambda c: change(c, actions=c["actions"] * 0 + 6),
}


@pytest.mark.parametrize("fault", BAD_DATA)
def test_bad_data_is_refused(tmp_path, played, args, fault):
    games = {name: torch.cat([part, part[..., :25]], -1) for name, part in played[0].items()}
    vae.save_games(dataclasses.replace(args, save_data=str(tmp_path / "games.npz")), games)
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
    (dict(goal_dim=8), "--goal-dim 8 does not fit --init-from"), (dict(height=5), "--height 5 does not fit"),
    (dict(num_players=3), "--num-players 3 does not fit"),
    (dict(hidden_size=16), "--hidden-size 16 does not fit"),
    (dict(hypotheses=4), "which has 8")])
def test_networks_that_do_not_fit_are_refused(tmp_path_factory, tmp_path, flags, words):
    first = tmp_path_factory.getbasetemp() / "first"
    if not first.exists():
        run(tmp_path_factory.getbasetemp(), "first", epochs=1)
    with pytest.raises(Refused, match=words):
        run(tmp_path, "b", init_from=str(first), **flags)
    assert not (tmp_path / "b").exists()


def test_what_holds_no_goals_is_refused(tmp_path, args, run_of):
    vae.save_checkpoint(str(tmp_path), {"script": "ppo_single_player.py"})
    with pytest.raises(Refused, match="--vae-checkpoint x: .* holds no goals, it was written by ppo"):
        vae.load_goals(str(tmp_path), "--vae-checkpoint x", args, run_of.prior, run_of.known)


@pytest.mark.parametrize("flags, words", [
    (dict(episodes=0), "--episodes 0"), (dict(goal_dim=0), "--goal-dim 0"), (dict(mix=("ppo",)), "'ppo'"),
    (dict(mix=("switch-ns-nh",)), "switch-ns-nh"), (dict(mix=()), "--mix"),
    (dict(shares=(1.0,)), "--shares 1"), (dict(shares=(1.0, 0.0)), "--shares"),
    (dict(kl_weight=-1.0), "--kl-weight"), (dict(horizon=0), "--horizon 0"),
    (dict(epochs=0, batch_size=Args.batch_size), "--epochs 0"), (dict(learning_rate=0.0), "--learning-rate"),
    (dict(data="a.npz", save_data="b.npz"), "--save-data"), (dict(height=2, width=2), "--height 2"),
    (dict(init_from="none.pt"), "--init-from none.pt"), (dict(resume="nowhere"), "--resume nowhere"),
    (dict(stag_reward=5.0), "--stag-reward 5.0 means nothing"), (dict(prosocial=True), "--prosocial"),
    (dict(epochs=0, init_from="x"), "--batch-size 32 means nothing with --epochs 0"),
    (dict(mix=("ns",), hares=0, num_players=2, moa_samples="rewarded", final_time=1), "nobody caught")])
def test_flags_that_make_no_sense_are_refused(tmp_path, flags, words):
    with pytest.raises(Refused) as refusal:
        run(tmp_path, "a", **flags)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
    assert not (tmp_path / "a").exists()


def test_a_refusal_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "games.npz").write_bytes(b"nothing")
    script = Path(vae.__file__)
    command = [sys.executable, script, "--data", str(tmp_path / "games.npz")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: --data")


def test_data_made_with_other_flags_is_refused(tmp_path, args):
    path = str(tmp_path / "games.npz")
    _, games, *_ = vae.make_samples(args)
    vae.save_games(dataclasses.replace(args, save_data=path), games)
    for flags, words in ((dict(height=6), "--height 6 does not fit"), (dict(mix=("nh",)), "--mix"),
                         (dict(episodes=7), "--episodes 7")):
        with pytest.raises(Refused, match=words):
            vae.load_games(Args(data=path, **flags))
