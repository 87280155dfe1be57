"""The Markov stag hunt for other libraries: PettingZoo's `StagHunt`, and `StagHunt-v0` for Gymnasium."""

import gymnasium

from envs.stag_hunt import StagHunt, parallel_env

__all__ = ["StagHunt", "parallel_env"]

gymnasium.register(id="StagHunt-v0", entry_point="envs.one_seat:StagHuntSeat")
