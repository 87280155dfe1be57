"""How many simulations a second the search of hopplus_selfplay.py makes, on one core.

    python benchmark/search_speed.py            about a minute

The work: 4x4, four players, trees that start from fresh boards; in each simulation three models of other agents, one
policy and value, and one step of the board, by the rules and by a world model. Beside it a plain search in Python, one
node and one network call at a time, on the same networks. Where mctx is installed (it is not required), its search runs
with the same four networks in each simulation; its board step is left out, for its own would have to be written in JAX.
Median of `--repeats` and the range.
"""

import dataclasses
import os
import statistics
import time

import torch

from common import run_command  # before the script: it puts the project on the path
import hopplus_selfplay as script


@dataclasses.dataclass
class Args:
    trees: int = 1024
    """trees searched at once"""
    simulations: int = 32
    """simulations in each tree"""
    repeats: int = 5
    """measurements of each row"""
    plain_seconds: float = 5.0
    """how long the plain search runs"""


def plain_search(model, searcher, state, simulations, flags):
    """One tree, a Python object for each node and batch 1 for each network: what one writes first."""
    def node(state, reward, over):
        log_probs, value, chances = searcher.think(state)
        return {"state": state, "reward": reward, "over": over, "policy": log_probs[0].tolist(), "value": value.item(),
                "chances": chances[0], "visits": [0] * 7, "totals": [0.0] * 7, "children": {}}

    root = node(state, 0.0, False)
    beta = flags.beta / (abs(root["value"]) + flags.prize_floor * script.REWARD_SCALE)
    for _ in range(simulations):
        here, path = root, []
        while True:
            total = sum(here["visits"])
            q = [t / n if n else here["value"] for t, n in zip(here["totals"], here["visits"])]
            action = max((a for a in range(7) if here["policy"][a] > -1e7),
                         key=lambda a: here["policy"][a] + beta * q[a] - here["visits"][a] / (1 + total))
            moves = torch.multinomial(here["chances"], 1)[:, 0]
            key = (action, *moves.tolist())
            path.append((here, action))
            if key not in here["children"]:
                after, reward, over = model.step(here["state"], torch.tensor(key)[:, None])
                here["children"][key] = node(after, reward.item() * script.REWARD_SCALE, bool(over))
                here = here["children"][key]
                break
            here = here["children"][key]
            if here["over"]:
                break
        value = 0.0 if here["over"] else here["value"]
        for parent, action in reversed(path):
            value = here["reward"] + flags.gamma * value
            parent["visits"][action] += 1
            parent["totals"][action] += value
            here = parent
    return root["visits"]


def measure(work, simulations, repeats):
    """Simulations a second of a piece of work, several times."""
    work()
    speeds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        speeds.append(simulations / (time.perf_counter() - begun))
    return speeds


def mctx_speed(args, hidden, inputs):
    """The same number of simulations by mctx with four networks of the same size in each; None where it is missing."""
    try:
        import jax
        import jax.numpy as jnp
        import mctx
    except ImportError:
        return None
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    net = lambda key: [jax.random.normal(k, shape) * 0.05 for k, shape in
                       zip(jax.random.split(key, 3), ((inputs, hidden), (hidden, hidden), (hidden, 8)))]
    nets = [net(key) for key in keys]
    apply = lambda w, x: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) @ w[2]

    def step(nets, key, action, x):
        x = x + action[:, None] * 1e-3
        moves = sum(jax.random.categorical(key, apply(w, x)[:, :7]) for w in nets[1:])
        out = apply(nets[0], x + moves[:, None] * 1e-3)
        zeros = jnp.zeros(len(x))
        return mctx.RecurrentFnOutput(reward=zeros, discount=zeros + 0.99, prior_logits=out[:, :7], value=out[:, 7]), x

    @jax.jit
    def run(nets, key, x):
        out = apply(nets[0], x)
        root = mctx.RootFnOutput(prior_logits=out[:, :7], value=out[:, 7], embedding=x)
        return mctx.gumbel_muzero_policy(nets, key, root, step, args.simulations).action

    x = jax.random.normal(keys[0], (args.trees, inputs))
    return measure(lambda: run(nets, keys[1], x).block_until_ready(), args.trees * args.simulations, args.repeats)


def main(args):
    if hasattr(os, "sched_setaffinity"):  # Linux: one core for everything, the threads of JAX too
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    flags = script.Args(players=("hop",) * 4, num_envs=max(args.trees // 4, 1))
    table, many = script.Table(flags, flags.num_envs, 1), flags.num_envs
    state, generator = script.ego_first(table.game.state(), table.order), torch.Generator().manual_seed(1)
    told, goals = table.look()["told"], torch.randn(12, many, flags.goal_dim)
    world = script.WorldTables(script.warm_up_world(flags)[0], flags.height, flags.width, 4)
    with torch.no_grad():
        rows = {}
        for name, model in (("batched, rules", table.model), ("batched, world model", world)):
            work = lambda: script.search(model, script.Searcher(table.networks, table.views, told, goals), state,
                                         args.simulations, flags, generator)
            rows[name] = measure(work, 4 * many * args.simulations, args.repeats)
        inputs = table.views.num_inputs + told.shape[-1]
        rows["mctx, the same four networks, no board"] = mctx_speed(args, flags.hidden_size, inputs)

        one = {name: part[..., :1] for name, part in state.items()}
        single = script.Table(dataclasses.replace(flags, players=("hop", "ns", "ns", "ns")), 1, 1)
        begun, done = time.perf_counter(), 0
        while time.perf_counter() - begun < args.plain_seconds:
            searcher = script.Searcher(single.networks, single.views, told[:1, :1], goals[:3, :1])
            plain_search(single.model, searcher, one, args.simulations, flags)
            done += args.simulations
        rows["plain Python, rules"] = [done / (time.perf_counter() - begun)]
    plain = rows["plain Python, rules"][0]
    print(f"{args.trees} trees, {args.simulations} simulations in each, one core\n")
    print("| search | simulations/s | times the plain one |\n|---|---|---|")
    for name, speeds in rows.items():
        if speeds is None:
            print(f"| {name} | mctx is not installed | |")
        else:
            middle = statistics.median(speeds)
            print(f"| {name} | {middle:,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f}) | {middle / plain:,.0f} |")


if __name__ == "__main__":
    run_command(main, Args, __doc__)
