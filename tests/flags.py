"""Writes docs/flags.md, the tables of all flags, from the scripts themselves: python tests/flags.py"""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = ("hopplus_selfplay.py", "ppo_single_player.py", "pretrain_vae.py", "train_world_model.py", "test_obs_reward_model.py")
COMMON = ("GameArgs", "RunArgs")


def typed(default):
    """A default as one would type it."""
    if isinstance(default, tuple):
        return " ".join(typed(item) for item in default)
    return "" if default is None else f"{default:.10g}" if isinstance(default, float) else str(default)


def flags_of(script):
    """{class: its flags in order, each (name, default, what it does)} of the groups of flags"""
    found = {}
    for node in ast.parse((ROOT / script).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Args") and node.name != "Args":
            fields = zip(node.body[::2], node.body[1::2])
            found[node.name] = [
                ("--" + field.target.id.replace("_", "-"), typed(ast.literal_eval(field.value)),
                 " ".join(text.value.value.split())) for field, text in fields]
    return found


def table(flags):
    cell = lambda text: text.replace("|", "\\|")
    return "\n".join(["| flag | default | what it does |", "|---|---|---|",
                      *(f"| `{name}` | {cell(default)} | {cell(text)} |" for name, default, text in flags)])


def section(script, names):
    """The tables of some groups of a script's flags."""
    of = flags_of(script)
    return [f"### {name.removesuffix('Args').lower()}\n\n{table(of[name])}" for name in names]


def document():
    """The whole page."""
    parts = ["# Flags\n\nMade from the scripts by `python tests/flags.py`; `python <script> --help` tells the same in the "
             "same groups.", "## Every script", *section(SCRIPTS[0], COMMON)]
    for script in SCRIPTS:
        parts += [f"## `{script}`", *section(script, [name for name in flags_of(script) if name not in COMMON])]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "flags.md").write_text(document(), encoding="utf-8", newline="\n")
