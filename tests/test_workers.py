"""benchmark/workers.py: runs are claimed by exactly one, taken over when left, and told when they fail."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmark"))

import ablations  # noqa: E402
import adaptation  # noqa: E402
import kill_workers  # noqa: E402
import ppo  # noqa: E402
import vae  # noqa: E402
import world_model  # noqa: E402
from workers import LOST, Locks, Run, Timing, command, free, work  # noqa: E402

QUICK = Timing(beat=0.1, stale=1.0, look=0.1)
SCRIPT = """
import os, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = os.path.join(words["--runs-dir"], words["--run-name"])
os.makedirs(folder)
open(os.path.join(words["--runs-dir"], "order"), "a").write(words["--run-name"] + "\\n")
if "bad" in folder:
    sys.exit(2)
open(os.path.join(folder, "results.json"), "w").write("{}")
"""


def test_killed_workers_lose_nothing_and_do_nothing_twice(capsys):
    """Three kills; benchmark/kill_workers.py makes twenty."""
    assert kill_workers.main(kill_workers.Args(kills=3, steps=60, runs=3, seed=2)) == 0
    assert capsys.readouterr().out.startswith("3 kills")


def test_one_of_many_gets_a_run(tmp_path):
    """Also of those who all see at once that a lock is dead."""
    for dead in (False, True):
        locks = [Locks(tmp_path, 1.0) for _ in range(16)]
        if dead:
            free(os.path.join(locks[0].folder, "run.1"))
        barrier, got = threading.Barrier(16), []

        def claim(own):
            barrier.wait()
            got.append(own.claim("run"))

        threads = [threading.Thread(target=claim, args=(own,)) for own in locks]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert [os.path.basename(path) for path in got if path] == ["run.2" if dead else "run.1"]


def test_a_lock_dies_only_where_nobody_touches_it(tmp_path):
    owner, other = Locks(tmp_path, 0.4), Locks(tmp_path, 0.4)
    path = owner.claim("run")
    for _ in range(8):
        time.sleep(0.1)
        os.utime(path)
        assert other.claim("run") is None
    time.sleep(0.6)
    assert other.claim("run") is None  # one long gap says little
    for _ in range(8):
        time.sleep(0.1)
        if taken := other.claim("run"):
            break
    assert taken == path[:-1] + "2" and owner.claim("run") is None


def test_a_run_that_was_taken_over_ends(tmp_path):
    lock, script = tmp_path / "run.1", tmp_path / "sleep.py"
    script.write_text("import time\ntime.sleep(60)\n")
    lock.touch()
    words = [sys.executable, ROOT / "benchmark" / "workers.py", lock, str(os.getpid()), "0.1", "1", script]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)
    assert process.poll() is None
    (tmp_path / "run.2").touch()
    assert process.wait(10) == LOST
    assert process.stderr.read().strip() == "stopped: another worker has this run"


def test_runs_wait_for_those_they_need_and_failures_are_told(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    runs = [Run("last", "", str(script), ("first",)), Run("bad", "", str(script)), Run("first", "", str(script)),
            Run("never", "", str(script), ("bad",))]
    made = []
    assert work(str(tmp_path), runs, 2, lambda: made.append(1), QUICK) == 1
    order = (tmp_path / "order").read_text().split()
    assert sorted(order) == ["bad", "first", "last"] and order.index("first") < order.index("last")
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert errors == ["error: bad ended with exit code 2 and no results", "error: never needs bad"]
    assert made and os.listdir(tmp_path / "locks") == ["bad.1"]
    assert work(str(tmp_path), runs[:1] + runs[2:3], 1, timing=QUICK) == 0  # all is there
    assert (tmp_path / "order").read_text().split() == order


def test_what_was_saved_is_resumed_and_what_was_not_is_made_anew(tmp_path):
    folder, run = tmp_path / "run", Run("run", "--seed 1")
    folder.mkdir()
    assert command(str(tmp_path), run)[1:] == ["--seed", "1", "--runs-dir", str(tmp_path), "--run-name", "run"]
    assert not folder.exists()
    folder.mkdir()
    (folder / "checkpoint-before.pt").touch()  # killed between its two renames
    assert command(str(tmp_path), run)[1:] == ["--resume", str(folder)]
    assert folder.exists()


def test_the_benchmarks_name_each_run_once_and_those_needed_first():
    for benchmark in (ablations, adaptation, vae, world_model):
        runs = benchmark.all_runs(benchmark.Args(seeds=(1, 2)))
        names = [run.name for run in runs]
        assert len(set(names)) == len(names)
        for number, run in enumerate(runs):
            assert set(run.needs) <= set(names[:number])


def test_an_ablation_without_a_flag_is_a_copy_of_the_script_that_differs_in_one_place(tmp_path):
    original = (Path(ablations.HERE).parent / "hopplus_selfplay.py").read_text(encoding="utf-8").splitlines()
    for kind, (before, after) in ablations.EDITS.items():
        ablations.edit(kind, str(tmp_path))
        copy = Path(ablations.copy_of(kind, str(tmp_path))).read_text(encoding="utf-8").splitlines()
        changed = [pair for pair in zip(original, copy, strict=True) if pair[0] != pair[1]]
        assert len(changed) == 1 and before in changed[0][0] and after in changed[0][1]
        compile("\n".join(copy), kind, "exec")


@pytest.mark.parametrize("program", [ppo, ablations, adaptation, vae, world_model])
def test_a_number_of_workers_that_cannot_be_is_refused(program, capsys):
    assert program.main(program.Args(workers=0)) == 2
    assert capsys.readouterr().err == "error: --workers 0 must lie between 1 and 256\n"


@pytest.mark.parametrize("flag, known", [("only", "hop"), ("boards", "open")])
def test_a_name_that_stands_for_nothing_is_told_with_its_flag(flag, known, capsys):
    assert adaptation.main(adaptation.Args(**{flag: (known, "scarse")})) == 2
    assert capsys.readouterr().err.startswith(f"error: --{flag} scarse: there are ")
