"""benchmark/odd_players.py: each of them does what it says, and nothing illegal."""

import os
import sys

import pytest
import torch

import hopplus_selfplay as script

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "benchmark")
sys.path.insert(0, FOLDER)
import adaptation  # noqa: E402
import odd_players  # noqa: E402

KINDS = sorted(kind.__name__ for kind in odd_players.Odd.__subclasses__())
STAG, HARE = odd_players.HUNT_STAG, odd_players.HUNT_HARE


def play(names, steps=72, num_envs=32, **board):
    """-> for each step the observation of the last seat, its actions, and where an episode is over [B]"""
    game = script.BatchedStagHunt(num_envs, num_players=4, seed=1, **board)
    players = script.Lineup([f"{FOLDER}/odd_players.py:{name}" if name in KINDS else name for name in names], game, 1)
    told = []
    for _ in range(steps):
        seen, actions = game.observe(), players.act(game)
        out = game.advance(actions)
        told.append(({key: part[:, 3] if part.dim() > 1 else part for key, part in seen.items()}, actions[:, 3],
                     out["over"]))
        game.reset(out["over"])
        players.reset(out["over"])
    return told


def test_every_one_of_them_is_met():
    met = {name for others in adaptation.ODD for name in others.split() if name.istitle()}
    assert met == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("board", [{}, {"height": 8, "width": 8, "hares": 2}])
def test_it_plays_legal_actions_and_hunts(kind, board):
    told = play(["random", "random", "random", kind], **board)
    assert all(seen["action_mask"].gather(1, action[:, None]).all() for seen, action, _ in told)
    hunted = torch.stack([action >= STAG for _, action, _ in told])
    assert hunted.any() and not hunted.all()


def stands_with_somebody(seen):
    planes = seen["observation"].bool().flatten(1, 2)
    return (planes[..., 0] & planes[..., 1:4].any(-1)).any(1)


def test_the_cautious_one_hunts_no_stag_alone_and_no_hare_ever():
    for seen, action, _ in play(["ns", "random", "random", "Cautious"]):
        assert not (action == HARE).any() and stands_with_somebody(seen)[action == STAG].all()


def test_the_sleeper_sleeps_for_half_of_the_time():
    for seen, action, _ in play(["random", "random", "random", "Sleeper"]):
        assert (action[seen["step"] < seen["steps_left"]] == script.STAY).all()


def test_the_joiner_hunts_stags_only_with_others_there():
    told = play(["ns", "random", "random", "Joiner"])
    assert any((action == STAG).any() for _, action, _ in told)
    assert all(stands_with_somebody(seen)[action == STAG].all() for seen, action, _ in told)


@pytest.mark.parametrize("kind", ["Alternating", "Moody"])
def test_who_changes_by_episode_keeps_to_one_prey_in_each(kind):
    told = play(["random", "random", "random", kind], steps=300, num_envs=8)
    seen_both = torch.zeros(8, 2, dtype=torch.bool)
    now = torch.zeros(8, 2, dtype=torch.bool)
    for _, action, over in told:
        now |= torch.stack([action == STAG, action == HARE], 1)
        assert not now.all(1).any()
        seen_both |= now
        now &= ~over[:, None]
    assert seen_both.all(1).any()


def test_who_returns_trust_hunts_stag_after_an_episode_with_company_at_the_stag():
    trusted = play(["ns", "ns", "ns", "Reciprocal"])
    alone = play(["nh", "nh", "nh", "Reciprocal"])
    assert not any((action == HARE).any() for _, action, _ in trusted[36:])
    assert sum((action == HARE).sum() for _, action, _ in alone) > 20


def test_the_polite_one_leaves_the_stag_to_two_others():
    hares = 0
    for seen, action, _ in play(["random", "ns", "ns", "Polite"], steps=300):
        planes = seen["observation"].bool().flatten(1, 2)
        gone, crowd = ~planes[..., 5].any(1), (planes[..., 1:4] & planes[..., 5:6]).flatten(1).sum(1) > 1
        assert not (action[crowd | gone] == STAG).any() and not (action[~crowd & ~gone] == HARE).any()
        hares += (action[gone] == HARE).sum()
    assert hares > 0


def test_the_imitator_hunts_what_others_were_seen_to_hunt():
    assert not any((action == HARE).any() for _, action, _ in play(["ns", "ns", "ns", "Imitator"]))
    late = play(["nh", "nh", "nh", "Imitator"])[36:]
    assert sum((action == HARE).sum() for _, action, _ in late) > sum((action == STAG).sum() for _, action, _ in late)


def test_the_grim_one_forgives_nothing():
    assert not any((action == HARE).any() for _, action, _ in play(["ns", "ns", "ns", "Grim"]))
    offended = torch.zeros(32, dtype=torch.bool)
    for seen, action, _ in play(["ns", "ns", "nh", "Grim"], steps=200):
        here = seen["observation"][..., 0].bool().flatten(1).any(1)  # who has left sees nothing
        offended |= (seen["actions"][:, 1:] == HARE).any(1) & here
        assert not (action[offended] == STAG).any() and not (action[~offended] == HARE).any()
    assert offended.all()


def test_the_late_one_hunts_hares_first():
    told = play(["ns", "ns", "nsh", "Late"], steps=200, hares=1, final_time=6)
    early = [seen["step"] < seen["steps_left"] for seen, _, _ in told]
    assert not any((action[now] == STAG).any() for now, (_, action, _) in zip(early, told))
    assert not any((action[~now] == HARE).any() for now, (_, action, _) in zip(early, told))
    assert any((action == STAG).any() for _, action, _ in told)


def test_the_nearest_and_the_herd_go_straight():
    """What they go to is not further off than anything else of its kind, step by step."""
    place = lambda cells: torch.stack([torch.arange(16) // 4, torch.arange(16) % 4], 1)[cells]
    for kind in ("Nearest", "Herd"):
        for seen, action, _ in play(["random", "ns", "nh", kind]):
            planes = seen["observation"].bool().flatten(1, 2)
            crowd, on_prey = planes[..., 1:4].sum(2), (planes[..., 0] & planes[..., 5:7].any(2)).any(1)
            assert (action[on_prey] >= STAG).all() and not (action[~on_prey] >= STAG).any()
            goal = (planes[..., 5:7].any(2) if kind == "Nearest" else (crowd == crowd.amax(1, keepdim=True)) & (crowd > 0))
            for game in (planes[..., 0].any(1) & goal.any(1) & (action < STAG)).nonzero()[:, 0].tolist():
                own, goals = place(planes[game, :, 0].int().argmax()), place(goal[game].nonzero()[:, 0])
                step = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1], [0, 0]])[action[game]]
                now, then = ((goals - where).abs().sum(1).min() for where in (own, own + step))
                assert then == max(now - 1, 0)


def test_the_learner_hunts_what_pays():
    """What it takes an episode to have paid is what it earned there, but that hunters with company may be too late."""
    game = script.BatchedStagHunt(64, num_players=4, seed=1, hares=9)
    stags = {}
    for others in ("ns", "nh"):
        players = script.Lineup([others] * 3 + [f"{FOLDER}/odd_players.py:Learner"], game, 1)
        learner = players.users[3].player
        earned, chosen, right = torch.zeros(64), [], []
        for step in range(1000):
            out = game.advance(players.act(game))
            earned += out["reward"][:, 3]
            over = out["over"]
            if step > 500:
                chosen.append(learner.stag[over]), right.append((learner.gain > 0)[over] == (earned > 0)[over])
            earned[over] = 0
            game.reset(over), players.reset(over)
        stags[others] = torch.cat(chosen).float().mean()
        assert torch.cat(right).float().mean() > 0.9, torch.cat(right).float().mean()
    assert stags["nh"] < 0.2 and stags["ns"] > 2 * stags["nh"], stags
