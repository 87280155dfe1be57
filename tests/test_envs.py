"""The readable game, its rule-based players and the one-seat environment, rule by rule."""

import itertools
import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from pettingzoo.test import parallel_api_test, parallel_seed_test

from envs import StagHunt, parallel_env
from envs.players import RuleBased, action_probabilities, load_player
from envs.stag_hunt import draw_blocks, hang_together

UP, DOWN, LEFT, RIGHT, STAY, HUNT_STAG, HUNT_HARE = range(7)


def place(players, stags=(), hares=(), blocks=(), step=0, **arguments):
    """A game set up by hand; `players` are cells, None for one that has left."""
    arguments = {"height": 3, "width": 3, "stags": 1, "hares": 1, **arguments}
    env = StagHunt(num_players=len(players), **arguments)
    env.reset(seed=0)
    env.set_state({"players": players, "blocks": blocks, "stags": stags, "hares": hares, "step": step,
                   "deadline": env.final_time, "last_actions": [STAY] * len(players)})
    return env


def play(env, *actions):
    """Play one step in which the players, those that have left too, act in this order."""
    return env.step(dict(zip(env.possible_agents, actions, strict=True)))


def values(mapping):
    return list(mapping.values())


# ------------------------------------------------------------------------------------------------- the libraries

OPTIONS = [
    {},
    {"height": 6, "width": 3, "num_players": 1, "stags": 0, "max_blocks": 1},
    {"height": 6, "width": 7, "stags": 2, "max_blocks": 4, "strengths": (1, 2, 3, 4), "time_reward": -0.1,
     "prosocial": True, "dynamic_final_time": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_pettingzoo_api(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(parallel_env(**options), num_cycles=150)
        parallel_seed_test(lambda: parallel_env(**options), num_cycles=30)


@pytest.mark.parametrize("options", OPTIONS)
def test_every_observation_is_in_its_space_and_repeats_with_the_seed(options):
    first, second = parallel_env(**options), parallel_env(**options)
    first.reset(seed=5), second.reset(seed=5)
    rng = np.random.default_rng(0)
    for _ in range(200):
        if not first.agents:
            first.reset(), second.reset()
            assert first.get_state() == second.get_state()
        actions = {agent: int(rng.integers(7)) for agent in first.agents}
        outcome, again = first.step(actions), second.step(actions)
        assert outcome[1:4] == again[1:4]
        for agent, observation in outcome[0].items():
            assert first.observation_space(agent).contains(observation)
            assert all(np.array_equal(observation[key], again[0][agent][key]) for key in observation)
            assert np.array_equal(outcome[4][agent]["action_mask"], observation["action_mask"])
            assert isinstance(outcome[1][agent], float)
    assert first.reset(seed=5)[0]["player_1"]["observation"].tolist() \
        != first.reset(seed=6)[0]["player_1"]["observation"].tolist()


@pytest.mark.parametrize("options", [
    {},
    {"seat": 4, "players": ("nh", "random", "nsh"), "render_mode": "ansi"},
    {"seat": 2, "players": ("patient-10", "switch-ns-nh", "noisy-nh"), "render_mode": "rgb_array", "height": 6,
     "max_blocks": 2, "episodes": 4},
    {"players": (), "stags": 0},
])
def test_gymnasium_api(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make("StagHunt-v0", **options)
        check_env(env.unwrapped)
        env.reset(seed=1)
        while not any(env.step(env.action_space.sample())[2:4]):  # with gymnasium's own checks around each step
            pass
        env.close()


def test_importing_the_package_does_not_load_torch():
    program = "import sys, envs, envs.one_seat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("arguments, parts", [
    ({"height": 0}, ["--height 0"]),
    ({"width": -3}, ["--width -3"]),
    ({"height": 2.5}, ["--height 2.5"]),
    ({"num_players": 0}, ["--num-players 0"]),
    ({"stags": -1}, ["--stags -1"]),
    ({"hares": -2}, ["--hares -2"]),
    ({"max_blocks": -1}, ["--max-blocks -1"]),
    ({"final_time": 0}, ["--final-time 0"]),
    ({"stag_hunters": 0}, ["--stag-hunters 0"]),
    ({"stag_reward": float("nan")}, ["--stag-reward nan"]),
    ({"stag_reward": -1.0}, ["--stag-reward -1.0"]),
    ({"hare_reward": float("inf")}, ["--hare-reward inf"]),
    ({"hare_reward": "much"}, ["--hare-reward 'much'"]),
    ({"time_reward": float("-inf")}, ["--time-reward -inf"]),
    ({"strengths": (1, 2, 3)}, ["--strengths (1, 2, 3)", "--num-players 4"]),
    ({"strengths": (1, 2, 3, 0)}, ["--strengths (1, 2, 3, 0)", "positive"]),
    ({"strengths": (1, 2, 3, float("nan"))}, ["--strengths", "nan"]),
    ({"strengths": 3.0}, ["--strengths 3.0"]),
    ({"stags": 0, "hares": 0}, ["--stags 0", "--hares 0"]),
    ({"num_players": 1}, ["--num-players 1", "--stag-hunters 2"]),
    ({"stag_hunters": 5}, ["--num-players 4", "--stag-hunters 5"]),
    ({"height": 2, "width": 4}, ["--height 2 x --width 4", "8 cells for 9 pieces"]),
    ({"height": 2, "width": 2, "max_blocks": 1},
     ["--height 2 x --width 2 minus 4 cells for each of --max-blocks 1 leaves 0 cells for 9 pieces "
      "(4 players, 1 stags, 4 hares)"]),
    ({"render_mode": "human"}, ["render_mode 'human'"]),
])
def test_a_game_that_makes_no_sense_is_refused_in_one_line(arguments, parts):
    with pytest.raises(ValueError) as refusal:
        StagHunt(**arguments)
    assert all(part in str(refusal.value) for part in parts) and "\n" not in str(refusal.value)


def test_the_smallest_boards_that_hold_their_pieces_are_played():
    StagHunt(height=3, width=3).reset(seed=0)
    StagHunt(height=1, width=2, num_players=1, stags=0, hares=1).reset(seed=0)
    StagHunt(num_players=1, stags=1, stag_hunters=1).reset(seed=0)
    StagHunt(height=13, width=1, max_blocks=1).reset(seed=0)


def test_misuse_has_a_clear_message():
    with pytest.raises(RuntimeError, match="reset"):
        StagHunt().step({})
    with pytest.raises(RuntimeError, match="reset"):
        StagHunt(render_mode="ansi").render()
    env = StagHunt()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="player_9.*player_1, player_2, player_3, player_4"):
        env.step({"player_9": STAY})
    with pytest.raises(ValueError, match="1 players.*game of 4"):
        env.set_state({**env.get_state(), "players": [(0, 0)]})


# --------------------------------------------------------------------------------------------------------- hunts


def test_one_hunter_of_a_stag_just_stays():
    env = place([(0, 0), (2, 2)], stags=[(0, 0)], hares=[(1, 1)])
    observations, rewards, terminations, truncations, _ = play(env, HUNT_STAG, STAY)
    assert values(rewards) == [0, 0] and not any(values(terminations)) and not any(values(truncations))
    assert env.players[0] == (0, 0) and env.stags == {(0, 0)}
    assert observations["player_2"]["actions"].tolist() == [STAY, HUNT_STAG]  # the legal hunt is recorded


def test_a_stag_is_shared_by_exactly_those_who_hunt_it():
    env = place([(0, 0)] * 3, stags=[(0, 0)], hares=[(1, 1)])
    _, rewards, terminations, _, _ = play(env, HUNT_STAG, STAY, HUNT_STAG)
    assert rewards == {"player_1": 5.0, "player_2": 0.0, "player_3": 5.0}
    assert values(terminations) == [True, False, True] and env.agents == ["player_2"] and env.stags == set()

    env = place([(0, 0)] * 3, stags=[(0, 0)], hares=[(1, 1)])
    _, rewards, terminations, _, _ = play(env, HUNT_STAG, HUNT_STAG, HUNT_STAG)
    assert values(rewards) == [float(np.float32(10 / 3))] * 3 and env.agents == []


def test_stag_hunters_sets_how_many_a_stag_needs():
    env = place([(0, 0)] * 4, stags=[(0, 0)], hares=[(1, 1)], stag_hunters=3)
    assert values(play(env, HUNT_STAG, HUNT_STAG, STAY, STAY)[1]) == [0, 0, 0, 0]
    assert values(play(env, HUNT_STAG, HUNT_STAG, HUNT_STAG, STAY)[1])[3] == 0 and env.agents == ["player_4"]

    env = place([(0, 0), (1, 1)], stags=[(0, 0)], hares=[(1, 2)], stag_hunters=1)
    assert values(play(env, HUNT_STAG, STAY)[1]) == [10, 0]


def test_strengths_split_the_stag_but_not_the_hare():
    env = place([(0, 0)] * 3, stags=[(0, 0)], hares=[(1, 1)], strengths=(1, 3, 100), stag_reward=8.0)
    assert values(play(env, HUNT_STAG, HUNT_STAG, STAY)[1]) == [2, 6, 0]  # who does not hunt does not count

    env = place([(1, 1)] * 2, stags=[(0, 0)], hares=[(1, 1)], strengths=(1, 3))
    assert values(play(env, HUNT_HARE, HUNT_HARE)[1]) == [0.5, 0.5]


def test_shares_are_rounded_to_32_bits():
    env = place([(0, 0)] * 2, stags=[(0, 0)], hares=[(1, 1)], strengths=(0.1, 0.3), stag_reward=0.7, time_reward=0.01)
    strengths = [float(np.float32(0.1)), float(np.float32(0.3))]
    shares = [float(np.float32(0.7 * strength / sum(strengths))) for strength in strengths]
    assert values(play(env, HUNT_STAG, HUNT_STAG)[1]) == [float(np.float32(share + 0.01)) for share in shares]


def test_strengths_are_rounded_to_32_bits():
    env = place([(0, 0)] * 2, stags=[(0, 0)], hares=[(1, 1)], strengths=(0.1, 0.5))
    assert values(play(env, HUNT_STAG, HUNT_STAG)[1])[0] == float(np.float32(1.66666675)) != float(np.float32(10 / 6))


def test_a_hare_is_shared_by_exactly_those_who_hunt_it():
    env = place([(1, 1)] * 4, stags=[(0, 0)], hares=[(1, 1), (2, 2)], hare_reward=3.0)
    _, rewards, terminations, _, _ = play(env, HUNT_HARE, STAY, HUNT_HARE, HUNT_HARE)
    assert values(rewards) == [1, 0, 1, 1] and values(terminations) == [True, False, True, True]
    assert env.hares == {(2, 2)} and env.stags == {(0, 0)}
    env = place([(1, 1), (2, 0)], stags=[(0, 0)], hares=[(1, 1), (2, 2)])
    assert values(play(env, HUNT_HARE, STAY)[1]) == [1, 0]


def test_each_player_hunts_the_prey_of_its_own_cell():
    env = place([(0, 0), (2, 2), (0, 0), (2, 2), (1, 1)], stags=[(0, 0), (2, 2), (1, 1)], hares=[(0, 2)])
    _, rewards, _, _, _ = play(env, HUNT_STAG, HUNT_STAG, HUNT_STAG, STAY, HUNT_STAG)
    assert values(rewards) == [5, 0, 5, 0, 0] and env.stags == {(2, 2), (1, 1)}


def test_hunts_are_settled_before_moves():
    # The second player steps onto the stag and the third off it: neither shares in it.
    env = place([(0, 0), (0, 1), (0, 0), (0, 0)], stags=[(0, 0)], hares=[(1, 1)])
    _, rewards, _, _, _ = play(env, HUNT_STAG, LEFT, RIGHT, HUNT_STAG)
    assert values(rewards) == [5, 0, 0, 5]
    assert env.players == [None, (0, 0), (0, 1), None]


# -------------------------------------------------------------------------------------------- moves and legality


def test_moves_and_masks():
    env = place([(1, 1), (0, 0), (1, 1)], stags=[(0, 0)], hares=[(1, 1)], blocks=[(0, 1)])
    assert env.action_mask("player_1").tolist() == [0, 1, 1, 1, 1, 0, 1]  # a block above, a hare here
    assert env.action_mask("player_2").tolist() == [0, 1, 0, 0, 1, 1, 0]  # a corner, a block beside, a stag here
    for action, cell in ((DOWN, (2, 1)), (LEFT, (1, 0)), (RIGHT, (1, 2)), (STAY, (1, 1))):
        env = place([(1, 1), (0, 0), (1, 1)], stags=[(0, 0)], hares=[(1, 1)], blocks=[(0, 1)])
        play(env, action, STAY, action)
        assert env.players == [cell, (0, 0), cell]  # players may share a cell
    env = place([(1, 1), (0, 0)], stags=[(0, 2)], hares=[(2, 2)])
    play(env, UP, DOWN)
    assert env.players == [(0, 1), (1, 0)]


@pytest.mark.parametrize("action", [UP, LEFT, HUNT_STAG, HUNT_HARE, 7, -1, 10 ** 30, None, 2.0, "down", [DOWN],
                                    np.array([DOWN]), np.float64(1)])
def test_an_illegal_action_is_played_and_recorded_as_stay(action):
    env = place([(0, 0), (2, 2)], stags=[(0, 2)], hares=[(2, 0)])
    observations, rewards, _, _, _ = play(env, action, LEFT)
    assert env.players == [(0, 0), (2, 1)] and values(rewards) == [0, 0]
    assert observations["player_1"]["actions"].tolist() == [STAY, LEFT]


def test_whole_numbers_of_any_kind_are_actions_and_a_missing_one_is_stay():
    for action in (DOWN, np.int64(DOWN), np.uint8(DOWN), np.array(DOWN)):
        env = place([(0, 0), (2, 2)], stags=[(0, 2)], hares=[(2, 0)])
        env.step({"player_1": action})
        assert env.players == [(1, 0), (2, 2)]


# ----------------------------------------------------------------------------------------------- leaving and end


def test_a_player_that_leaves():
    env = place([(1, 1), (0, 0), (0, 1)], stags=[(0, 0)], hares=[(1, 1), (2, 2)], time_reward=-1.0)
    observations, rewards, terminations, truncations, infos = play(env, HUNT_HARE, STAY, STAY)
    assert values(rewards) == [0, -1, -1] and values(terminations) == [True, False, False]
    assert not any(values(truncations)) and env.agents == ["player_2", "player_3"]
    last = observations["player_1"]
    assert not last["observation"][:, :, 0].any() and last["observation"][0, 0, 1] == 1
    assert last["action_mask"].tolist() == infos["player_1"]["action_mask"].tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert observations["player_3"]["actions"].tolist() == [STAY, HUNT_HARE, STAY]  # 3, then 1, then 2

    outcome = play(env, DOWN, STAY, STAY)  # what is handed in for the first player is ignored
    assert all(set(part) == {"player_2", "player_3"} for part in outcome)
    assert outcome[0]["player_3"]["actions"].tolist() == [STAY, STAY, STAY]
    assert not outcome[0]["player_3"]["observation"][:, :, 1].any() and env.players[0] is None


def test_the_observation_lists_players_from_the_observer_on():
    env = place([(0, 0), (0, 1), (2, 2)], stags=[(1, 0)], hares=[(2, 0)], blocks=[(1, 1)], step=7)
    observations, _, _, _, _ = play(env, STAY, RIGHT, UP)
    for start, agent in enumerate(env.agents):
        planes = observations[agent]["observation"]
        assert planes.shape == (3, 3, 6) and planes.dtype == np.uint8
        for plane in range(3):
            assert np.argwhere(planes[:, :, plane]).tolist() == [list(env.players[(start + plane) % 3])]
        assert [np.argwhere(planes[:, :, plane]).tolist() for plane in (3, 4, 5)] == [[[1, 1]], [[1, 0]], [[2, 0]]]
        assert observations[agent]["actions"].tolist() == [[STAY, RIGHT, UP][(start + plane) % 3] for plane in range(3)]
        assert observations[agent]["step"] == 8 and observations[agent]["steps_left"] == 27


def test_time_reward_and_prosocial():
    cells = [None, (1, 1), (0, 0), (0, 0)]
    for prosocial, expected in ((False, [1.5, 0.5, 0.5]), (True, [0.625] * 3)):  # (0 + 1.5 + 0.5 + 0.5) / 4
        env = place(cells, stags=[(0, 0)], hares=[(1, 1)], time_reward=0.5, prosocial=prosocial)
        assert env.agents == ["player_2", "player_3", "player_4"]
        assert values(play(env, STAY, HUNT_HARE, STAY, STAY)[1]) == expected


def test_the_deadline_truncates_those_that_are_left():
    env = place([(1, 1), (0, 0)], stags=[(0, 0)], hares=[(1, 1), (2, 2)], step=33)
    observations, _, terminations, truncations, _ = play(env, STAY, STAY)
    assert not any(values(truncations)) and observations["player_1"]["steps_left"] == 1
    observations, _, terminations, truncations, _ = play(env, HUNT_HARE, STAY)
    assert values(terminations) == [True, False] and values(truncations) == [False, True] and env.agents == []
    assert observations["player_2"]["steps_left"] == 0 and observations["player_2"]["observation"][0, 0, 0] == 1
    assert env.step({}) == ({}, {}, {}, {}, {})


def test_a_whole_game_lasts_final_time_steps():
    env = StagHunt(final_time=6)
    env.reset(seed=0)
    lasted = 0
    while env.agents:
        truncations = env.step({})[3]
        lasted += 1
    assert lasted == 6 and all(values(truncations))


def test_the_episode_ends_when_no_prey_is_left_and_terminated_wins():
    for step in (0, 34):
        env = place([(1, 1), (0, 0)], hares=[(1, 1)], step=step)
        observations, rewards, terminations, truncations, _ = play(env, HUNT_HARE, DOWN)
        assert values(terminations) == [True, True] and values(truncations) == [False, False] and env.agents == []
        assert observations["player_2"]["observation"][1, 0, 0] == 1 and values(rewards) == [1, 0]


def test_the_episode_ends_when_all_have_left():
    env = place([(1, 1), None], stags=[(0, 0)], hares=[(1, 1), (2, 2)], step=34)
    _, _, terminations, truncations, _ = play(env, HUNT_HARE, STAY)
    assert terminations == {"player_1": True} and truncations == {"player_1": False} and env.agents == []


def test_dynamic_final_time_ends_five_steps_after_the_first_catch():
    env = place([(1, 1), (2, 2), (0, 1)], stags=[(0, 0)], hares=[(1, 1), (2, 2)], step=10, dynamic_final_time=True)
    assert play(env, HUNT_HARE, STAY, STAY)[0]["player_2"]["steps_left"] == 5
    assert play(env, STAY, HUNT_HARE, STAY)[0]["player_3"]["steps_left"] == 4  # a later catch changes nothing
    for left in (3, 2, 1, 0):
        assert env.agents == ["player_3"]
        observations, _, _, truncations, _ = env.step({})
        assert observations["player_3"]["steps_left"] == left
    assert env.step_number == 16 and truncations == {"player_3": True} and env.agents == []

    env = place([(1, 1), (2, 2)], stags=[(0, 0)], hares=[(1, 1)], step=32, dynamic_final_time=True)
    assert play(env, HUNT_HARE, STAY)[0]["player_2"]["steps_left"] == 2  # the catch never lengthens a game
    env = place([(1, 1), (2, 2)], stags=[(0, 0)], hares=[(1, 1)], step=10)
    assert play(env, HUNT_HARE, STAY)[0]["player_2"]["steps_left"] == 24  # without the option


# ------------------------------------------------------------------------------------------------------ symmetry


def play_relabelled(order, seed):
    """Play a game and its copy, in which player i of the first is player order[i]; compare all they give."""
    rng = np.random.default_rng(seed)
    count = len(order)
    strengths = rng.uniform(0.1, 3, count).tolist()
    options = {"height": 4, "width": 3, "num_players": count, "stags": 2, "hares": 3, "final_time": 40,
               "time_reward": -0.03, "prosocial": bool(seed % 2), "dynamic_final_time": bool(seed % 3 == 0)}
    back = [order.index(number) for number in range(count)]  # of the copy's players, who they are in the first
    first = StagHunt(strengths=strengths, **options)
    copy = StagHunt(strengths=[strengths[index] for index in back], **options)
    first.reset(seed=seed), copy.reset(seed=seed)
    state = first.get_state()
    copy.set_state({**state, "players": [state["players"][index] for index in back]})
    agents = first.possible_agents
    caught = 0
    while first.agents:
        actions = [int(rng.choice(7, p=[0.1, 0.1, 0.1, 0.1, 0.1, 0.25, 0.25])) for _ in range(count)]
        outcome = play(first, *actions)
        mirrored = play(copy, *[actions[index] for index in back])
        caught += len(first.catches)
        assert len(outcome[0]) == len(mirrored[0])
        for index in range(count):
            mine, theirs = agents[index], agents[order[index]]
            if mine not in outcome[0]:
                continue
            assert all(part[mine] == other[theirs] for part, other in zip(outcome[1:4], mirrored[1:4]))
            seen, seen_there = outcome[0][mine], mirrored[0][theirs]
            assert seen["action_mask"].tolist() == seen_there["action_mask"].tolist()
            assert (seen["step"], seen["steps_left"]) == (seen_there["step"], seen_there["steps_left"])
            for other in range(count):
                plane, plane_there = (other - index) % count, (order[other] - order[index]) % count
                assert np.array_equal(seen["observation"][:, :, plane], seen_there["observation"][:, :, plane_there])
                assert seen["actions"][plane] == seen_there["actions"][plane_there]
            assert np.array_equal(seen["observation"][:, :, count:], seen_there["observation"][:, :, count:])
        state, state_there = first.get_state(), copy.get_state()
        assert state["players"] == [state_there["players"][order[index]] for index in range(count)]
        assert all(state[key] == state_there[key] for key in ("stags", "hares", "blocks", "step", "deadline"))
    return caught


def test_relabelling_the_players_relabels_everything():
    caught = sum(play_relabelled(order, seed) for seed, order in enumerate(itertools.permutations(range(4))))
    assert caught > 20  # else the comparison would say little


def test_a_state_can_be_taken_and_put_back():
    env = StagHunt(max_blocks=2, height=6, width=6)
    env.reset(seed=3)
    for _ in range(4):
        env.step({agent: LEFT for agent in env.agents})
    twin = StagHunt(max_blocks=2, height=6, width=6)
    twin.set_state(env.get_state())
    assert twin.get_state() == env.get_state() and twin.agents == env.agents
    play(env, UP, UP, UP, UP), play(twin, UP, UP, UP, UP)
    assert twin.get_state() == env.get_state()


# --------------------------------------------------------------------------------------------------------- draws


def test_reset_puts_every_piece_on_its_own_free_cell():
    env = StagHunt(height=5, width=4, max_blocks=2, stags=2, hares=3)
    for seed in range(100):
        env.reset(seed=seed)
        state = env.get_state()
        taken = state["players"] + state["stags"] + state["hares"] + state["blocks"]
        assert len(taken) == len(set(taken)) and set(taken) <= set(env.all_cells())
        assert len(state["players"]) == 4 and len(state["stags"]) == 2 and len(state["hares"]) == 3


def test_reset_draws_uniformly():
    env = StagHunt(height=2, width=3, num_players=2, stags=1, hares=1)
    env.reset(seed=0)
    counts = np.zeros((4, 2, 3))
    for _ in range(3000):
        env.reset()
        state = env.get_state()
        for piece, cell in enumerate(state["players"] + state["stags"] + state["hares"]):
            counts[piece][cell] += 1
    assert np.abs(counts - 500).max() < 4.5 * (3000 * 1 / 6 * 5 / 6) ** 0.5  # 4.5 standard deviations


def test_obstacles_leave_the_free_cells_connected():
    most = 0
    for seed in range(150):
        blocks = draw_blocks(7, 5, 5, np.random.default_rng(seed))
        free = {(row, column) for row in range(7) for column in range(5)} - blocks
        start = min(free)
        reached, frontier = {start}, [start]
        while frontier:
            row, column = frontier.pop()
            for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
                if cell in free - reached:
                    reached.add(cell)
                    frontier.append(cell)
        assert reached == free and len(blocks) <= 20
        most = max(most, len(blocks))
    assert most >= 12  # several pieces do find room
    assert not hang_together({(0, 0), (1, 1)}) and hang_together({(0, 0), (0, 1), (1, 1)})


def test_obstacles_never_overlap():
    numbers = {len(draw_blocks(4, 4, 2, np.random.default_rng(seed))) for seed in range(400)}
    assert numbers == {0, 3, 4, 6, 7, 8}  # whole pieces only; an overlap would leave 5


def test_a_single_obstacle_has_one_of_the_twelve_outlines():
    drawings = ["###", "#/#/#", "####", "#/#/#/#",  # straight
                "#./##", "##/#.", "##/.#", ".#/##",  # corner
                "#./#./##", "###/#..", "##/.#/.#", "..#/###"]  # L, turned but never mirrored
    outlines = {frozenset((row, column) for row, line in enumerate(drawing.split("/"))
                          for column, mark in enumerate(line) if mark == "#"): 0 for drawing in drawings}
    rng = np.random.default_rng(1)
    missing, draws = 0, 4000
    for _ in range(draws):
        blocks = draw_blocks(9, 8, 1, rng)
        if not blocks:
            missing += 1
            continue
        top, left = min(row for row, _ in blocks), min(column for _, column in blocks)
        outlines[frozenset((row - top, column - left) for row, column in blocks)] += 1  # a KeyError is a failure
    # How likely each is, by hand: 1/4 for the shape, by the share of its turns, by the share of anchors that fit.
    # Four of those 1152 equal cases (shape, turn, anchor) cut off a corner of the board and are drawn again: the 0.003.
    def share(outline):
        rows, columns = len({row for row, _ in outline}), len({column for _, column in outline})
        turns = 2 if rows == 1 or columns == 1 else 4
        return 1 / 4 / turns * (10 - rows) / 9 * (9 - columns) / 8

    expected = [share(outline) for outline in outlines] + [1 - sum(map(share, outlines))]
    for count, chance in zip([*outlines.values(), missing], expected, strict=True):
        assert abs(count / draws - chance) < 4.5 * (chance * (1 - chance) / draws) ** 0.5 + 0.003


# ------------------------------------------------------------------------------------------------------- players


def probabilities(name, env, agent="player_1", **meeting):
    env.last_actions = [STAY] * env.num_players
    return action_probabilities(name, env._observation(agent), env.num_players, **meeting)


def shares(**actions):
    """Seven probabilities, by the names of the actions."""
    names = ["up", "down", "left", "right", "stay", "hunt_stag", "hunt_hare"]
    assert set(actions) <= set(names)
    return pytest.approx([actions.get(name, 0.0) for name in names], abs=1e-12)


def test_players_go_to_the_nearest_prey():
    env = place([(1, 1), (4, 4)], stags=[(3, 3)], hares=[(0, 1), (4, 0)], height=5, width=5)
    assert probabilities("ns", env) == shares(down=0.5, right=0.5)
    assert probabilities("nh", env) == shares(up=1.0)
    assert probabilities("nsh", env) == shares(down=0.5, right=0.5)
    assert probabilities("random", env) == shares(up=0.2, down=0.2, left=0.2, right=0.2, stay=0.2)
    assert probabilities("noisy-ns", env) == shares(up=0.04, down=0.44, left=0.04, right=0.44, stay=0.04)
    assert probabilities("noisy-nh", env) == shares(up=0.84, down=0.04, left=0.04, right=0.04, stay=0.04)


def test_any_nearest_prey_will_do():
    env = place([(2, 2), (0, 0)], stags=[(2, 4), (0, 2), (4, 1)], hares=[(0, 4)], height=5, width=5)
    assert probabilities("ns", env) == shares(up=0.5, right=0.5)  # two stags two steps away, one three steps away


def test_players_go_around_blocks():
    # . . . . .      The hare is two cells right of the player, behind a wall.
    # . # # # .
    # . P # h .
    # . . # . .
    # . . # . .
    # S . . . .
    wall = [(1, 1), (1, 2), (1, 3), (2, 2), (3, 2), (4, 2)]
    env = place([(2, 1), (0, 0)], stags=[(5, 0)], hares=[(2, 3)], blocks=wall, height=6, width=5)
    assert probabilities("nh", env) == shares(down=1.0)  # 3 down, 2 right, 3 up: 8 steps; over the top they are 10
    env = place([(1, 0), (0, 0)], stags=[(5, 0)], hares=[(2, 3)], blocks=wall, height=6, width=5)
    assert probabilities("nh", env) == shares(up=1.0)  # 1 up, 4 right, 2 down, 1 left: 8 steps; under it they are 10
    env = place([(2, 0), (0, 0)], stags=[(5, 0)], hares=[(2, 3)], blocks=wall, height=6, width=5)
    assert probabilities("nh", env) == shares(up=1 / 3, down=1 / 3, right=1 / 3)  # 9 steps either way
    assert probabilities("ns", env) == shares(down=1.0)


def test_players_on_their_prey_hunt_it():
    env = place([(0, 0), (1, 1)], stags=[(0, 0)], hares=[(1, 1)])
    assert probabilities("ns", env) == probabilities("nsh", env) == shares(hunt_stag=1.0)
    assert probabilities("nh", env, "player_2") == shares(hunt_hare=1.0)
    assert probabilities("nsh", env, "player_2") == shares(up=0.5, left=0.5)
    assert probabilities("random", env) == shares(down=0.25, right=0.25, stay=0.25, hunt_stag=0.25)
    assert probabilities("noisy-ns", env) == shares(down=0.05, right=0.05, stay=0.05, hunt_stag=0.85)


def test_players_whose_prey_is_gone():
    env = place([(0, 0), (0, 0)], stags=[], hares=[(0, 0)])
    assert probabilities("ns", env) == shares(down=1 / 3, right=1 / 3, stay=1 / 3)  # no hunting
    assert probabilities("nsh", env) == shares(hunt_hare=1.0)
    env = place([(0, 0), (0, 0)], stags=[(0, 0)], hares=[])
    assert probabilities("nh", env) == shares(down=1 / 3, right=1 / 3, stay=1 / 3)
    assert probabilities("patient-0", env) == shares(down=1 / 3, right=1 / 3, stay=1 / 3)


def test_players_that_change_their_mind():
    env = place([(0, 0), (0, 0)], stags=[(0, 2)], hares=[(2, 0)], step=9)
    to_stag, to_hare = shares(right=1.0), shares(down=1.0)
    assert probabilities("patient-10", env) == to_stag and probabilities("patient-9", env) == to_hare
    for episode, episodes, first_half in ((0, 1, True), (0, 2, True), (1, 2, False), (1, 3, True), (2, 3, False),
                                          (4, 10, True), (5, 10, False)):
        meeting = {"episode": episode, "episodes": episodes}
        assert probabilities("switch-ns-nh", env, **meeting) == (to_stag if first_half else to_hare)
        assert probabilities("switch-nh-ns", env, **meeting) == (to_hare if first_half else to_stag)


@pytest.mark.parametrize("name", ["random", "ns", "nh", "nsh", "patient-3", "noisy-ns", "noisy-nh", "switch-ns-nh",
                                  "switch-nh-ns"])
def test_probabilities_are_legal_and_a_player_that_has_left_stays(name):
    env = StagHunt(height=5, width=5, max_blocks=2)
    rng = np.random.default_rng(0)
    player = RuleBased(name)
    for seed in range(3):
        observations, _ = env.reset(seed=seed)
        while env.agents:
            for agent in env.agents:
                chances = action_probabilities(name, observations[agent], 4)
                legal = observations[agent]["action_mask"]
                assert sum(chances) == pytest.approx(1) and all(p >= 0 for p in chances)
                assert all(p == 0 for p, allowed in zip(chances, legal) if not allowed)
                assert chances[player.act(observations[agent], rng)] > 0
            observations = env.step({agent: player.act(observations[agent], rng) for agent in env.agents})[0]
    env = place([None, (0, 0)], stags=[(0, 0)], hares=[(1, 1)])
    assert probabilities(name, env) == shares(stay=1.0)


@pytest.mark.parametrize("name", ["foo", "", "patient-", "patient-K", "patient--1", "noisy-random", "switch-ns-ns",
                                  "NS", None])
def test_an_unknown_player_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="random, ns, nh, nsh, patient-K, noisy-ns") as refusal:
        RuleBased(name)
    assert repr(name) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("name, mean, margin", [("random", 0.65, 0.15), ("ns", 2.50, 1e-6), ("nh", 0.85, 0.06),
                                                ("nsh", 2.84, 0.06)])
def test_equal_players_earn_what_is_known(name, mean, margin):
    # Margins of at least four standard errors of this many episodes.
    env, player, rng = StagHunt(), RuleBased(name), np.random.default_rng(0)
    observations, _ = env.reset(seed=0)
    earned, episodes = 0.0, 300
    for _ in range(episodes):
        observations, _ = env.reset()
        while env.agents:
            observations, rewards, _, _, _ = env.step({agent: player.act(observations[agent], rng)
                                                       for agent in env.agents})
            earned += sum(rewards.values())
    assert abs(earned / episodes / 4 - mean) <= margin


# ------------------------------------------------------------------------------------------ players from a file

PLAYER_FILE = """
import torch

class Recorder:
    seen, begun = [], 0
    def reset(self, which):
        assert which.dtype == torch.bool and which.shape == (1,)
        Recorder.begun += 1
    def act(self, observation, generator):
        Recorder.seen.append((observation, generator))
        return torch.multinomial(observation["action_mask"].float(), 1, generator=generator)[:, 0]

class Eager:
    def act(self, observation, generator):
        return torch.full_like(observation["step"], 99)

class WrongShape:
    def act(self, observation, generator):
        return torch.zeros(3, 2, dtype=torch.int64)

class Fractions:
    def act(self, observation, generator):
        return torch.zeros(len(observation["step"]))

class NoTensor:
    def act(self, observation, generator):
        return [4] * len(observation["step"])

class NoAct:
    pass

number = 3
"""


@pytest.fixture
def player_file(tmp_path):
    path = tmp_path / "odd:name.py" if sys.platform != "win32" else tmp_path / "my_player.py"
    path.write_text(PLAYER_FILE)
    return str(path)


def test_a_player_from_a_file_takes_seats(player_file):
    import torch

    env = gymnasium.make("StagHunt-v0", players=(f"{player_file}:Recorder", f"{player_file}:Eager"), seat=2)
    env.reset(seed=1)
    env.step(STAY)
    env.reset()
    recorder = type(env.unwrapped.others["player_1"].player.player)
    assert recorder.begun == 2
    seen, generator = recorder.seen[0]
    assert seen["actions"].shape == (1, 3) and seen["steps_left"].tolist() == [35]
    planes, mask, step = seen["observation"], seen["action_mask"], seen["step"]
    assert planes.shape == (1, 4, 4, 6) and planes.dtype == torch.uint8 and planes[0, :, :, 0].sum() == 1
    assert mask.shape == (1, 7) and mask.dtype == torch.bool and step.tolist() == [0] and step.dtype == torch.int64
    assert isinstance(generator, torch.Generator)


def test_a_player_from_a_file_repeats_with_the_seed(player_file):
    env = gymnasium.make("StagHunt-v0", players=(f"{player_file}:Recorder",) * 3)

    def positions():
        env.reset(seed=4)
        return [env.step(STAY)[0]["actions"].tolist() for _ in range(5)]

    first = positions()
    assert positions() == first and len({tuple(actions) for actions in first}) > 1


def test_what_a_player_file_lacks_is_named(player_file, tmp_path):
    missing = str(tmp_path / "nowhere.py")
    for spec, words in ((f"{missing}:Lazy", "no file"), (f"{player_file}:Lazy", "no class 'Lazy'"),
                        (f"{player_file}:number", "no class 'number'"), (f"{player_file}:NoAct", "no method act"),
                        ("my_player.py", "file.py:Class"), (":Lazy", "file.py:Class"),
                        (f"{player_file}:", "file.py:Class")):
        with pytest.raises(ValueError) as refusal:
            load_player(spec)
        assert words in str(refusal.value) and repr(spec) in str(refusal.value) and "\n" not in str(refusal.value)


def test_what_a_player_returns_is_checked(player_file):
    import torch

    seen = {"observation": torch.zeros(5, 4, 4, 7, dtype=torch.uint8), "action_mask": torch.ones(5, 7, dtype=torch.bool),
            "step": torch.zeros(5, dtype=torch.int64)}
    batch = (seen, torch.Generator())
    actions = load_player(f"{player_file}:Recorder").act(*batch)
    assert actions.shape == (5,) and actions.dtype == torch.int64
    for name, words in (("WrongShape", r"\[3, 2\].*\[5\]"), ("Fractions", "float32.*whole numbers"),
                        ("NoTensor", "list.*Tensor")):
        with pytest.raises(ValueError, match=words):
            load_player(f"{player_file}:{name}").act(*batch)


# ------------------------------------------------------------------------------------------------------ one seat


def test_the_seat_sees_and_earns_what_its_player_does():
    env = gymnasium.make("StagHunt-v0", seat=2, players=("ns", "nh"), height=3, width=3, hares=2).unwrapped
    env.reset(seed=0)
    env.game.set_state({"players": [(0, 0), (0, 0), (2, 2)], "blocks": [], "stags": [(0, 0)], "hares": [(2, 2), (2, 0)],
                        "step": 0, "deadline": 35, "last_actions": [STAY] * 3})
    env.observations = {agent: env.game._observation(agent) for agent in env.game.agents}
    assert env.action_masks().tolist() == [False, True, False, True, True, True, False]
    observation, reward, terminated, truncated, info = env.step(HUNT_STAG)
    assert (reward, terminated, truncated) == (5.0, True, False)
    assert observation["actions"].tolist() == [HUNT_STAG, HUNT_HARE, HUNT_STAG]  # seat 2, then 3, then 1
    assert info["action_mask"].tolist() == [0, 0, 0, 0, 1, 0, 0]
    with pytest.raises(RuntimeError, match="reset"):
        env.step(STAY)


def test_the_seat_is_truncated_with_the_game():
    env = gymnasium.make("StagHunt-v0", seat=2, players=("ns",), num_players=2, final_time=4)
    env.reset(seed=0)
    ends = [env.step(STAY)[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(False, True)]


def test_the_players_of_a_seat_switch_in_the_middle_of_a_meeting():
    env = gymnasium.make("StagHunt-v0", players=("switch-ns-nh", "ns"), episodes=4).unwrapped
    env.reset(seed=0)
    counted = [env.others["player_2"].episode]
    for _ in range(5):
        env.reset()
        counted.append(env.others["player_2"].episode)
    assert counted == [0, 1, 2, 3, 0, 1] and env.others["player_2"].episodes == 4
    env.reset(seed=0)
    assert env.others["player_2"].episode == 0


@pytest.mark.parametrize("arguments, words", [
    ({"seat": 0}, "seat 0 .* 1 to 4"), ({"seat": 5}, "seat 5 .* 1 to 4"),
    ({"players": ("ns", "nh"), "num_players": 4}, "num_players 4 must be 3"),
    ({"players": ("ns", "foo", "nh")}, "'foo'"), ({"players": "ns"}, "'ns' must be a list"),
    ({"episodes": 0}, "episodes 0"), ({"height": 1}, "--height 1"),
])
def test_a_seat_that_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        gymnasium.make("StagHunt-v0", **arguments)


def test_the_seat_works_with_gymnasiums_wrappers_and_vectors():
    flat = gymnasium.wrappers.FlattenObservation(gymnasium.make("StagHunt-v0"))
    assert flat.reset(seed=0)[0].shape == flat.observation_space.shape
    several = gymnasium.make_vec("StagHunt-v0", num_envs=2, vectorization_mode="sync")
    observations, _ = several.reset(seed=0)
    assert observations["observation"].shape == (2, 4, 4, 7) and observations["step"].tolist() == [0, 0]
    several.close()


# ------------------------------------------------------------------------------------------------------ pictures


def catch_scene(render_mode):
    return place([(0, 0), (0, 0), (1, 1), (1, 1)], stags=[(0, 0)], hares=[(1, 1), (2, 0)], blocks=[(0, 2)],
                 render_mode=render_mode)


def test_the_board_as_text():
    env = catch_scene("ansi")
    text = env.render()
    assert "step 0, 35 left" in text and "| S12 |  .  | ### |" in text and "|  h  |  .  |  .  |" in text
    play(env, HUNT_STAG, HUNT_STAG, HUNT_HARE, STAY)
    lines = env.render().splitlines()
    assert lines[0] == "step 1, 34 left"
    assert "(S12)" in lines[2] and "(h3)4" in lines[4]
    assert lines[-4].split() == ["player_1", "hunt", "stag", "reward", "5", "leaves"]
    assert lines[-1].split() == ["player_4", "stay", "reward", "0"]
    env.step({"player_4": DOWN})
    lines = env.render().splitlines()
    assert "(" not in "".join(lines[1:8]) and "4" in lines[6]
    assert lines[-4].split() == ["player_1", "stay", "reward", "0", "has", "left"]


def test_the_board_as_a_picture():
    env = catch_scene("rgb_array")

    def cell(picture, row, column, size=96, margin=12):  # without its border
        return picture[margin + row * size + 3:margin + (row + 1) * size - 3,
                       margin + column * size + 3:margin + (column + 1) * size - 3].astype(int)

    before = env.render()
    assert before.dtype == np.uint8 and before.ndim == 3 and before.shape[2] == 3
    play(env, HUNT_STAG, HUNT_STAG, HUNT_HARE, STAY)
    leaving = env.render()
    env.step({})
    after = env.render()
    assert before.shape == leaving.shape == after.shape
    assert (cell(before, 0, 1) == 255).all() and (cell(after, 0, 0) == 255).all()  # empty cells are white
    assert np.ptp(cell(before, 0, 2).reshape(-1, 3), axis=0).max() == 0 and cell(before, 0, 2).max() < 150  # a block
    paler = cell(leaving, 0, 0).mean()  # those that leave are still there, but faded
    assert cell(before, 0, 0).mean() + 10 < paler < 254
    pieces = {tuple(cell(before, row, column).mean(axis=(0, 1)).round(3)) for row, column in ((0, 0), (1, 1), (2, 0))}
    assert len(pieces) == 3
    assert (cell(before, 2, 0) == cell(leaving, 2, 0)).all()  # the hare that nobody hunted


def test_a_picture_needs_a_render_mode():
    env = StagHunt()
    env.reset(seed=0)
    with pytest.warns(UserWarning, match="render_mode"):
        assert env.render() is None
