"""All that a run does, on a GPU that is not there: whole runs with --device cuda, on a machine without one.

PyTorch's FakeTensorMode was tried first: without CUDA it knows no random generators, no `.to("cuda")`, no indexing
by lists, and has no numbers, so that no game could be over. Here tensors are ordinary ones on the CPU, each with a
note of where it would be. What one asks for, by `device=` or `.to`, is noted and done on the CPU; what comes of
tensors is where they are; and tensors of two devices in one operation are refused, as CUDA does. So runs go from
their warm-up to their tables with real numbers, and all control that depends on data is as it is.

Not covered, for it needs a GPU: whether CUDA has each operation for each dtype, its speed and its memory,
numbers to the last bit, several GPUs, reading a checkpoint into the GPU's memory (torch.load is replaced), what happens
within an operation, and the backward pass where it is not written in Python. pretrain_vae.py is left out for time; its
runs passed by hand.
"""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch.overrides import TorchFunctionMode

import hopplus_selfplay
import ppo_single_player
import test_obs_reward_model
import train_world_model

TINY = dict(device="cuda", hidden_size=8, num_envs=4, seed=3)
HOP = dict(TINY, total_timesteps=16, final_time=5, num_steps=4, vae_size=8, warmup_meetings=2, eval_episodes=4,
           eval_policy_episodes=4, num_simulations=4, imagined_per_real=4.0, buffer_size=64, moa_minibatches=1,
           num_minibatches=1, horizon=5)
PPO = dict(TINY, total_timesteps=32, final_time=5, num_steps=4, eval_episodes=8, num_minibatches=1, update_epochs=1)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
Tensor = torch.Tensor
pytestmark = pytest.mark.filterwarnings("ignore:__array__")
TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
SETTERS = (Tensor.data.__set__, Tensor.grad.__set__)
TO_NUMPY = ("numpy", "__array__")
ANYWHERE = ("copy_", "to", "type_as", "_has_compatible_shallow_copy_type")  # these take tensors of two devices


class Mixed(RuntimeError):
    """Tensors of two devices where CUDA takes none."""


class Random(torch.Generator):
    """A generator of the CPU that is said to be on another device."""

    def __new__(cls, device="cpu"):
        self = super().__new__(cls, "cpu")
        self.where = named(device)
        return self

    def __init__(self, device="cpu"):
        pass


def named(device):
    return CUDA if torch.device(device).type == "cuda" else CPU


def parts(x, found=None):
    """The tensors in arguments or results, however nested."""
    found = [] if found is None else found
    if type(x) in TENSORS:
        found.append(x)
    elif isinstance(x, (list, tuple, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            parts(item, found)
    return found


class NoGpu(TorchFunctionMode):
    """Notes where tensors would be, and refuses what CUDA refuses."""

    def place(self, x):
        """Where a tensor is; None where its making was not seen (gradients, results of SumFacts)."""
        return getattr(x, "would_be", CPU if type(x) is torch.nn.Parameter else None)

    def put(self, x, place):
        for part in parts(x) if place else ():
            part.would_be = place
        return x

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__":
            return self.read(func, args)
        if func in SETTERS:
            self.put(args[0], self.place(args[1]) if isinstance(args[1], Tensor) else None)
            return func(*args)
        place = self.check(name, args, kwargs)
        asked = kwargs.pop("device", None)
        if asked is not None:
            place = named(asked)
        if name == "to":
            args, place = self.moved(args, place)
        place = CPU if name == "cpu" else place
        generator = kwargs.get("generator")
        if isinstance(generator, Random) and generator.where != (place or CPU):
            raise Mixed(f"{name}: a generator on {generator.where} for a tensor on {place or CPU}")
        out = func(*args, **kwargs)
        if name in ("to", "cpu") and place != self.place(args[0]):
            out = out.clone()  # what is moved is a copy
        return self.put(out, place or (None if parts((args, kwargs)) else CPU))

    def read(self, func, args):
        """What is asked of a tensor by the name of an attribute."""
        if func == Tensor.device.__get__:
            return self.place(args[0]) or CPU
        if func == Tensor.is_cuda.__get__:
            return self.place(args[0]) == CUDA
        return self.put(func(*args), self.place(args[0]))

    def moved(self, args, place):
        """The arguments of x.to(...) without a device, and where it leads."""
        first = args[1] if len(args) > 1 else None
        if isinstance(first, Tensor):
            return (args[0], first.dtype, *args[2:]), self.place(first)
        if isinstance(first, (str, torch.device)):
            return (args[0], "cpu", *args[2:]), named(first)
        return (args if len(args) < 2 or first is not None else (args[0], *args[2:])), place

    def check(self, name, args, kwargs):
        """-> where the result is; refuses tensors of two devices"""
        if name in TO_NUMPY and self.place(args[0]) == CUDA:
            raise Mixed(f"{name}: of a tensor on {CUDA}")
        plainly = name == "__setitem__" and not parts(args[1]) and not isinstance(args[1], list)
        if name in ANYWHERE or plainly:  # x[2:4] = y copies
            return self.place(args[0])
        tensors = [(part, self.place(part)) for part in parts((args, kwargs))]
        if name in ("__getitem__", "__setitem__") and tensors[0][1] == CUDA:  # numbers on the CPU are taken
            of_index = {id(part) for part in parts(args[1])}
            tensors = [(part, place) for part, place in tensors if id(part) not in of_index or place == CUDA]
        places = {place for part, place in tensors if place}
        if len(places) > 1:  # a single number on the CPU goes with everything
            places = {place for part, place in tensors if place and (part.dim() or place == CUDA)}
        if len(places) > 1:
            raise Mixed(f"{name}: tensors on {', '.join(sorted(map(str, places)))}")
        return places.pop() if places else None


@pytest.fixture
def gpu(monkeypatch):
    mode = NoGpu()
    load, save = torch.load, torch.save

    def load_there(file, map_location="cpu", **others):
        content, place = load(file, map_location="cpu", **others), named(map_location)
        mode.put(content, place)
        return content

    def save_plain(content, file):  # without the notes, for they are attributes
        notes = [(part, part.__dict__.pop("would_be", None)) for part in parts(content)]
        save(content, file)
        for part, place in notes:
            mode.put(part, place)

    def save_blank(_, file, **others):  # what is to be drawn has left the GPU by then
        Image.new("RGB", (1, 1)).save(file, "PNG")

    monkeypatch.setattr(Figure, "savefig", save_blank)
    monkeypatch.setattr(torch, "Generator", Random)
    monkeypatch.setattr(torch, "load", load_there)
    monkeypatch.setattr(torch, "save", save_plain)
    with mode:
        yield mode


@pytest.fixture(autouse=True)
def small_worlds(monkeypatch):
    for name, value in (("WORLD_STEPS", 300), ("WARMUP_EPOCHS", 1), ("WORLD_UPDATES", 3)):
        monkeypatch.setattr(hopplus_selfplay, name, value)
    record = hopplus_selfplay.record_meetings  # its first 24 steps
    monkeypatch.setattr(hopplus_selfplay, "record_meetings", lambda args: {
        key: part[..., :24, :].clone() for key, part in record(args).items()})
    for function, numbers in ((hopplus_selfplay.report_models, (30, 2)), (hopplus_selfplay.score_world, (300,))):
        monkeypatch.setattr(function.__wrapped__, "__defaults__", numbers)


@pytest.mark.parametrize("mix", [
    lambda cpu, gpu: cpu + gpu, lambda cpu, gpu: torch.cat([cpu, gpu]), lambda cpu, gpu: cpu[gpu.long()],
    lambda cpu, gpu: gpu.gather(0, cpu.long()), lambda cpu, gpu: gpu.numpy(),
    lambda cpu, gpu: gpu.__setitem__(gpu > 0, cpu), lambda cpu, gpu: gpu.add_(cpu),
    lambda cpu, gpu: torch.where(gpu > 0, cpu, gpu), lambda cpu, gpu: torch.rand(3, generator=Random("cuda")),
    lambda cpu, gpu: torch.rand(3, generator=Random(), device="cuda"),
    lambda cpu, gpu: torch.nn.Linear(3, 3)(gpu)])
def test_what_cuda_refuses_is_refused(gpu, mix):
    with pytest.raises(Mixed):
        mix(torch.zeros(3), torch.zeros(3, device="cuda"))


def test_what_cuda_takes_is_taken(gpu):
    cpu, there = torch.zeros(3), torch.zeros(3, device="cuda:0")
    for x in (there + 1, there + cpu[0], there[cpu.long()], there[[0, 1]], there[None].T, there.new_zeros(2),
              cpu.to("cuda"), cpu.to(there), torch.zeros_like(there), there.copy_(cpu), there.max(0).indices,
              torch.nn.Linear(3, 3).to("cuda")(there), torch.rand(3, generator=Random("cuda"), device="cuda")):
        assert x.device == CUDA
    assert there.cpu().device == cpu.device == torch.arange(3).device == CPU and there.tolist() == [0, 0, 0]


def run(script, tmp_path, name, expected=0, **flags):
    flags.setdefault("run_name", name)
    assert script.main(script.Args(runs_dir=str(tmp_path), **flags)) == expected
    with open(os.path.join(tmp_path, flags["run_name"], "results.json"), encoding="utf-8") as file:
        return json.load(file)


def test_hopplus(gpu, tmp_path):
    run(hopplus_selfplay, tmp_path, "run", **HOP, players=("hop", "hop", "hop", "ns"))
    Path(tmp_path, "run", "results.json").unlink()
    resume = hopplus_selfplay.Args(resume=str(tmp_path / "run"), total_timesteps=32)
    assert hopplus_selfplay.main(resume) == 0


def test_hopplus_with_other_flags_and_among_strangers(gpu, tmp_path):
    flags = dict(search_model="rules", goals="zero", prosocial=True, dynamic_final_time=True)
    run(hopplus_selfplay, tmp_path, "run", **{**HOP, "horizon": hopplus_selfplay.Args.horizon}, **flags,
        search="one-step", prize_floor=math.inf, players=("hop", "ns", "mix:nh,random", "hop"))
    few = dict(device="cuda", meetings=2, meeting_episodes=2, final_time=5, hidden_size=8, vae_size=8)
    run(hopplus_selfplay, tmp_path, "meets", mode="adapt", checkpoint=str(tmp_path / "run"),
        players=("hop", "nh", "nh", "nh"), **few, **flags)


@pytest.mark.parametrize("flags", [
    dict(players=("ppo", "ppo", "ns", "ppo")), dict(share_parameters=True, max_blocks=1, height=6, width=6, players=("ppo",) * 4),
    dict(memory="gru", meeting_episodes=2, players=("ppo", "mix:ns,nh", "noisy-ns", "random"), prize_floor=0.5),
    dict(buffer="episodes", buffer_size=100, num_steps=ppo_single_player.Args.num_steps)])
def test_ppo(gpu, tmp_path, flags):
    run(ppo_single_player, tmp_path, "run", **{**PPO, **flags})
    if "buffer" not in flags:
        Path(tmp_path, "run", "results.json").unlink()
        assert ppo_single_player.main(ppo_single_player.Args(resume=str(tmp_path / "run"), total_timesteps=64)) == 0


def test_the_world_model(gpu, tmp_path):
    small = dict(device="cuda", hidden_size=8, seed=3)
    run(train_world_model, tmp_path, "world", **small, boards=("4x4",), rows=300, held_out_rows=100, num_updates=2,
        check_every=1, batch_size=16)
    run(test_obs_reward_model, tmp_path, "tested", checkpoint=str(tmp_path / "world" / "checkpoint.pt"),
        device="cuda", rows=100, rollouts=4)
