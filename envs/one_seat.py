"""One seat of the stag hunt as a Gymnasium environment, the other seats taken by rule-based players.

    import gymnasium, envs
    env = gymnasium.make("StagHunt-v0", seat=1, players=("ns", "ns", "ns"), height=6, width=6)

The observation is the dict of `envs/stag_hunt.py`. Single-agent libraries take it as it is where they know
dicts (Stable-Baselines3's MultiInputPolicy); for others `gymnasium.wrappers.FlattenObservation(env)` makes
one vector of it. The legal actions are in the observation, in `info["action_mask"]` and, for libraries that
ask the environment (the MaskablePPO of sb3-contrib), in `env.unwrapped.action_masks()`. An illegal action is
played as stay.
"""

import gymnasium

from envs.players import RuleBased, make_player
from envs.stag_hunt import StagHunt


class StagHuntSeat(gymnasium.Env):
    """The stag hunt as the player on one seat has it.

    seat: which seat is yours, from 1 on. players: who sits on the other seats, in their order: names of
    `envs/players.py`, or "file.py:Class". episodes: how many episodes make a meeting, in the middle of which
    the switch-players switch. A new meeting begins after that many, and with every reset(seed=...). The other
    arguments are those of the game. num_players is the number of players with you, and may be left out.

    The episode ends when your player leaves (terminated) or the game ends (terminated or truncated, as
    there).
    """

    metadata = dict(StagHunt.metadata)

    def __init__(self, seat=1, players=("ns", "ns", "ns"), episodes=1, render_mode=None, **board):
        if isinstance(players, str):
            raise ValueError(f"players {players!r} must be a list of names, one for each other seat")
        num_players = len(players) + 1
        if board.setdefault("num_players", num_players) != num_players:
            raise ValueError(f"num_players {board['num_players']} must be {num_players}: you and the {len(players)} "
                             f"of players {tuple(players)}")
        if seat not in range(1, num_players + 1):
            raise ValueError(f"seat {seat!r} must be a number from 1 to {num_players}, the number of players")
        if episodes < 1:
            raise ValueError(f"episodes {episodes} in a meeting must be at least 1")
        self.render_mode = render_mode
        self.game = StagHunt(render_mode=render_mode, **board)
        self.agent = f"player_{seat}"
        others = [agent for agent in self.game.possible_agents if agent != self.agent]
        self.others = {agent: make_player(name) for agent, name in zip(others, players)}
        self.episodes, self.episode = int(episodes), None
        self.observation_space = self.game.observation_space(self.agent)
        self.action_space = self.game.action_space(self.agent)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        new_meeting = seed is not None or self.episode is None
        self.episode = 0 if new_meeting else (self.episode + 1) % self.episodes
        self.observations, infos = self.game.reset(seed=int(self.np_random.integers(2 ** 63 - 1)))
        for player in self.others.values():
            if isinstance(player, RuleBased):
                player.episode, player.episodes = self.episode, self.episodes
            else:
                player.reset(self.np_random)
        return self.observations[self.agent], infos[self.agent]

    def step(self, action):
        if self.agent not in self.game.agents:
            raise RuntimeError("the episode of this seat is over: call reset() before the next step()")
        actions = {agent: player.act(self.observations[agent], self.np_random)
                   for agent, player in self.others.items() if agent in self.game.agents}
        self.observations, rewards, terminations, truncations, infos = self.game.step({**actions, self.agent: action})
        return (self.observations[self.agent], rewards[self.agent], terminations[self.agent],
                truncations[self.agent], infos[self.agent])

    def action_masks(self):
        """The legal actions now, as seven booleans."""
        return self.game.action_mask(self.agent).astype(bool)

    def render(self):
        return self.game.render()

    def close(self):
        self.game.close()
