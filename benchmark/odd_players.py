"""Players that nobody is trained with: strangers of kinds that stand nowhere else in this project.

    python ppo_single_player.py --players ppo benchmark/odd_players.py:Joiner ns ns
    python benchmark/adaptation.py --quick --odd --workers 2        what HOP+ earns among them

They are there to be met, not to be learned from: no script draws on them. All go the straight way, for the boards of
the benchmark have no obstacles.
"""

import torch

STAY, HUNT_STAG, HUNT_HARE = 4, 5, 6


class Odd:
    """What they have in common: act(observation, generator) looks, and asks `decide` where to go."""

    hunts = ()  # what it hunts whenever it stands on it

    def act(self, observation, generator):
        self.seen, self.generator = observation, generator
        planes = observation["observation"].bool().flatten(1, 2)  # [B, cells, N + 3]
        num = planes.shape[-1] - 3
        self.own, self.others = planes[..., 0], planes[..., 1:num]
        self.anybody = self.others.any(-1)
        self.stags, self.hares = planes[..., num + 1], planes[..., num + 2]
        action = self.decide()
        for hunt in self.hunts:
            action = torch.where(observation["action_mask"][:, hunt], hunt, action)
        return action

    def approach(self, target):
        """A move that shortens the way to the nearest cell of target [B, cells]; on it, or where there is none, stay."""
        height, width = self.seen["observation"].shape[1:3]
        cell = torch.arange(height * width, device=target.device)
        row, column = (torch.where(target, part, 1000)[:, None] for part in (cell // width, cell % width))
        here = self.own.int().argmax(1, keepdim=True)  # below: up, down, left, right of it, and itself [B, 5, cells]
        up, left = (torch.tensor(step, device=cell.device)[:, None] for step in ([-1, 1, 0, 0, 0], [0, 0, -1, 1, 0]))
        way = ((here // width)[..., None] + up - row).abs() + ((here % width)[..., None] + left - column).abs()
        way = way.amin(-1)
        nearer = (way[:, :4] < way[:, 4:]) & target.any(1, keepdim=True)
        return self.one_of(nearer & self.seen["action_mask"][:, :4])

    def one_of(self, choices):
        """One of the moves [B, 4] that are true, at random; where none is, stay."""
        number = torch.rand(choices.shape, generator=self.generator, device=choices.device)
        return torch.where(choices.any(1), (number * choices).argmax(1), STAY)

    def chance(self, *shape):
        """Numbers from 0 to 1: [.., B]."""
        return torch.rand(*shape, len(self.own), generator=self.generator, device=self.own.device)

    def go(self, prey, hunt):
        """Goes to the nearest of the cells `prey` [B, cells], and does `hunt` there."""
        return torch.where((prey & self.own).any(1), hunt, self.approach(prey))

    def hunt(self, stag):
        """Goes for the nearest stag where `stag` [B] is true, else for the nearest hare, and leaves the rest alone."""
        prey = torch.where(stag[:, None], self.stags, self.hares)
        return self.go(prey, torch.where(stag, HUNT_STAG, HUNT_HARE))


class Alternating(Odd):
    """Stag in one episode, hare in the next."""

    def reset(self, which):
        self.stag = which ^ getattr(self, "stag", torch.zeros_like(which))

    def decide(self):
        return self.hunt(self.stag)


class Moody(Odd):
    """Stag or hare, drawn anew for every episode."""

    def reset(self, which):
        self.new = which | getattr(self, "new", which)
        self.stag = getattr(self, "stag", which)

    def decide(self):
        self.stag, self.new = torch.where(self.new, self.chance() < 0.5, self.stag), torch.zeros_like(self.new)
        return self.hunt(self.stag)


class Reciprocal(Odd):
    """Stag as long as in the episode before somebody came to the stag; else hare."""

    def decide(self):
        step, trust = self.seen["step"], torch.ones_like(self.own[:, 0])
        came = getattr(self, "came", trust)
        self.trusts = torch.where(step == 0, came, getattr(self, "trusts", trust))
        self.came = came & (step != 1) | (self.stags & self.anybody).any(1)
        return self.hunt(self.trusts)


class Joiner(Odd):
    """Hare, until somebody else stands on the stag: then it comes to help."""

    def decide(self):
        return self.hunt((self.stags & self.anybody).any(1))


class Follower(Odd):
    """Goes where the next player goes, and hunts what it steps on."""

    hunts = HUNT_STAG, HUNT_HARE

    def decide(self):
        return self.approach(self.others[..., 0])


class Cautious(Odd):
    """Waits on the stag, and does not hunt before somebody stands there, too."""

    def decide(self):
        ready = (self.stags & self.own & self.anybody).any(1)
        return torch.where(ready, HUNT_STAG, self.approach(self.stags))


class Wanderer(Odd):
    """Walks straight on, turns at the wall, and hunts what it steps on."""

    hunts = HUNT_STAG, HUNT_HARE

    def decide(self):
        legal, last = self.seen["action_mask"][:, :4], self.seen["actions"][:, :1]
        on = legal.gather(1, last.clamp(max=3).long())[:, 0] & (last[:, 0] < STAY)
        return torch.where(on, last[:, 0].long(), self.one_of(legal))


class Reader(Odd):
    """The first hare, in the order in which one reads."""

    def decide(self):
        first = self.hares & (self.hares.int().cumsum(1) == 1)
        return self.go(first, HUNT_HARE)


class Sleeper(Odd):
    """Sleeps for half of the time, then goes for hares."""

    def decide(self):
        asleep = self.seen["step"] < self.seen["steps_left"]
        return torch.where(asleep, STAY, self.hunt(torch.zeros_like(asleep)))


class Shy(Odd):
    """Hares at which nobody stands."""

    def decide(self):
        return self.go(self.hares & ~self.anybody, HUNT_HARE)


class Undecided(Odd):
    """Makes up its mind at every step: in one of three it goes for the stag, else for a hare."""

    def decide(self):
        return self.hunt(self.chance() < 1 / 3)


class Imitator(Odd):
    """Hunts what it last saw somebody else hunt; before that, and where it sees both, stags. What is hunted in an
    episode's last step nobody sees."""

    def decide(self):
        did = self.seen["actions"][:, 1:]
        before = getattr(self, "stag", torch.ones_like(self.own[:, 0]))
        self.stag = (did == HUNT_STAG).any(1) | before & ~(did == HUNT_HARE).any(1)
        return self.hunt(self.stag)


class Polite(Odd):
    """Hare, where the stag is gone or two others are at one; until then stag."""

    def decide(self):
        crowd = (self.others & self.stags[..., None]).sum(2).amax(1)
        return self.hunt(self.stags.any(1) & (crowd < 2))


class Learner(Odd):
    """Stag or hare, whichever has paid more so far; in one episode of five, either."""

    def decide(self):
        if not hasattr(self, "paid"):
            self.paid = torch.full((len(self.own), 2), 2.0, device=self.own.device)  # of hare, of stag; it hopes for both
            self.gain, self.stag = self.paid[:, 0], torch.zeros_like(self.own[:, 0])
        new, was = (self.seen["step"] == 0)[:, None], self.stag[:, None].long()
        learned = self.paid.scatter_add(1, was, 0.3 * (self.gain[:, None] - self.paid.gather(1, was)))
        self.paid = torch.where(new, learned, self.paid)
        explore, either = self.chance(2)
        choice = torch.where(explore < 0.2, either < 0.5, self.paid[:, 1] > self.paid[:, 0])
        self.stag = torch.where(new[:, 0], choice, self.stag)
        action = self.hunt(self.stag)
        helped = (self.stags & self.own & self.anybody).any(1)
        gain = (action == HUNT_HARE) + 3.0 * ((action == HUNT_STAG) & helped)  # what this step seems to pay
        self.gain = torch.where(self.own.any(1), gain, self.gain)  # who has left keeps what it went with
        return action


class Nearest(Odd):
    """Goes for the nearest prey, whatever it is, and hunts what it stands on."""

    hunts = HUNT_STAG, HUNT_HARE

    def decide(self):
        return self.approach(self.stags | self.hares)


class Grim(Odd):
    """Stag, until it has seen somebody hunt a hare; from then on hare, for ever, also in the episodes to come."""

    def decide(self):
        did = self.seen["actions"][:, 1:]
        self.hare = getattr(self, "hare", torch.zeros_like(self.own[:, 0])) | (did == HUNT_HARE).any(1) & self.own.any(1)
        return self.hunt(~self.hare)


class Herd(Odd):
    """Goes where the most others are, and hunts what it steps on."""

    hunts = HUNT_STAG, HUNT_HARE

    def decide(self):
        crowd = self.others.sum(2)
        return self.approach((crowd == crowd.amax(1, keepdim=True)) & self.anybody)


class Late(Odd):
    """Hare in the first half of the time; who has got none by then goes for the stag."""

    def decide(self):
        return self.hunt(self.seen["step"] >= self.seen["steps_left"])
