"""Many runs, side by side on one machine and on several that share a folder: no server, only lock files.

    workers.work(folder, runs, 2, then=write_the_table)         as benchmark/ppo.py does it

A worker looks through the list of runs. One that is finished (its results.json is there) is skipped; one that
nobody has is claimed and made, or resumed where it was left. The lock of run X is the last of the files
locks/X.1, locks/X.2, ... in the folder. Whoever makes the next file has the run: a file that is there cannot be
made again, so exactly one does it, and none is made while the last one is alive.

The process that makes the run keeps its lock alive by itself, touching it every few seconds. A lock that was not
touched for two minutes is dead; whoever watches measures that by its own clock, so clocks of machines need not
agree. A process that was held up for so long ends as soon as it goes on, for another has taken its run, and before
it has put any file into its place. A worker that is told to stop (Ctrl-C, SIGTERM) lets its runs save and leave, and frees them for others to go on with; if
it is killed, its runs see that they are alone, save and leave, too.
"""

import dataclasses
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
LOST = 75  # exit code of a run that another worker has taken over
FREE = "free"  # what stands in the lock of a run that was left


@dataclasses.dataclass
class Run:
    """An ordinary run of a script, which leaves results.json in the folder of this name."""
    name: str
    flags: str
    script: str = "ppo_single_player.py"
    needs: tuple[str, ...] = ()
    """names of runs that must be finished before"""


@dataclasses.dataclass
class Timing:
    """Seconds."""
    beat: float = 5.0
    """between two touches of a lock"""
    stale: float = 120.0
    """after which a lock that nobody touches is dead; folders over a network may show a touch a minute late"""
    look: float = 5.0
    """between two looks through the list"""


class Locks:
    """The locks in a shared folder, and for how long this worker has seen each of them unchanged."""

    def __init__(self, folder, stale):
        self.folder, self.stale, self.seen = os.path.join(folder, "locks"), stale, {}
        os.makedirs(self.folder, exist_ok=True)

    def claim(self, name):
        """-> the path of the lock, if the run is now this worker's, else None"""
        numbers = (file.rpartition(".") for file in os.listdir(self.folder))
        last = max((int(number) for base, _, number in numbers if base == name), default=0)
        path = os.path.join(self.folder, name)
        if last and not self.is_dead(f"{path}.{last}"):
            return None
        path = f"{path}.{last + 1}"
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except (FileExistsError, PermissionError):  # Windows says the latter of one that is being removed
            return None
        os.write(file, f"{socket.gethostname()} {os.getpid()}".encode())
        os.close(file)
        return path

    def is_dead(self, path):
        """Whether the last lock of a run was freed, or nobody has touched it for too long."""
        try:
            with open(path, encoding="utf-8") as file:  # over a network, opening asks the server anew
                freed, touched = file.read() == FREE, os.fstat(file.fileno()).st_mtime_ns
        except OSError:  # it was removed just now
            return False
        now = time.monotonic()
        before, unchanged, looked = self.seen.get(path, (None, 0.0, now))
        # one long gap between two looks says little: perhaps the whole machine slept, or the shared folder
        unchanged = unchanged + min(now - looked, self.stale / 4) if touched == before else 0.0
        self.seen[path] = touched, unchanged, now
        return freed or unchanged > self.stale

    def remove(self, name):
        """Removes the locks of a finished run."""
        for file in os.listdir(self.folder):
            if file.rpartition(".")[0] == name:
                try:
                    os.remove(os.path.join(self.folder, file))
                except OSError:  # another worker was faster, or on Windows has it open
                    pass


def free(path):
    """Leaves a run to the next one."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(FREE)


def finished(folder, name):
    """Whether a run is done; the folder's list is read, for over a network that asks the server anew."""
    try:
        return "results.json" in os.listdir(os.path.join(folder, name))
    except OSError:
        return False


def command(folder, run):
    """The command that makes a run, or what is missing of it."""
    path, script = os.path.join(folder, run.name), os.path.join(HERE, "..", run.script)
    if any(os.path.isfile(os.path.join(path, name)) for name in ("checkpoint.pt", "checkpoint-before.pt")):
        return [script, "--resume", path]
    shutil.rmtree(path, ignore_errors=True)  # begun, but stopped before anything was saved
    return [script, *run.flags.split(), "--runs-dir", folder, "--run-name", run.name]


class Work:
    """The processes of this worker, by run: (process, lock)."""

    def __init__(self, folder, runs, workers, timing):
        self.folder, self.runs, self.workers, self.timing = folder, runs, workers, timing
        self.locks, self.going, self.failed = Locks(folder, timing.stale), {}, set()

    def start(self, run):
        """Makes a run in a process of its own, if nobody else has it. What it prints goes to a file where
        several would print at once."""
        lock = self.locks.claim(run.name)
        if lock is None:
            return
        if finished(self.folder, run.name):  # since this worker looked
            self.locks.remove(run.name)
            return
        numbers = [lock, str(os.getpid()), str(self.timing.beat), str(self.timing.stale)]
        words = [sys.executable, os.path.abspath(__file__), *numbers, *command(self.folder, run)]
        out = None
        if self.workers > 1:
            os.makedirs(os.path.join(self.folder, "logs"), exist_ok=True)
            out = open(os.path.join(self.folder, "logs", f"{run.name}.txt"), "ab")
            print(f"{run.name} begins", flush=True)
        # in a session of its own it does not get Ctrl-C as well, which would make it leave without saving
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                   start_new_session=os.name != "nt")
        if out:
            out.close()
        self.going[run.name] = process, lock

    def collect(self):
        """-> the names of those that have finished since the last look"""
        done = []
        for name, (process, lock) in list(self.going.items()):
            code = process.poll()
            if code is None:
                continue
            del self.going[name]
            if finished(self.folder, name):
                self.locks.remove(name)
                done.append(name)
            elif code != LOST:
                free(lock)
                self.fail(name, f"ended with exit code {code} and no results")
        return done

    def fail(self, name, why):
        self.failed.add(name)
        print(f"error: {name} {why}", file=sys.stderr, flush=True)

    def look(self):
        """Starts what can be started. -> whether anything is left to wait for"""
        done = {run.name for run in self.runs if finished(self.folder, run.name)}
        left = [run for run in self.runs if run.name not in done | self.failed]
        for run in left:
            if self.failed.intersection(run.needs):
                self.fail(run.name, f"needs {' '.join(self.failed.intersection(run.needs))}")
            elif len(self.going) < self.workers and run.name not in self.going and done.issuperset(run.needs):
                self.start(run)
        return bool(left)

    def stop(self):
        """Lets the runs save and leave, and frees them."""
        for process, _ in self.going.values():
            if os.name != "nt":  # Windows would kill them; there Ctrl-C has reached them
                process.terminate()
        for process, lock in self.going.values():
            process.wait()
            free(lock)


def work(folder, runs, workers=1, then=lambda: None, timing=Timing()):
    """Makes the runs, or waits until others have made them; calls `then` whenever this worker has finished
    some, and at the end. -> exit code: 1 if runs failed, which are told and not tried again"""
    own, told = Work(folder, runs, workers, timing), False
    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while own.look() or own.going:  # results come before the process ends
            if not own.going and not told:
                told = True
                print("waiting for runs that other workers make", file=sys.stderr, flush=True)
            looked = time.monotonic()
            while not (done := own.collect()) and time.monotonic() - looked < timing.look:
                time.sleep(min(0.2, timing.look / 4))
            if done:
                then()
        then()
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        own.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 1 if own.failed else 0


def leave(number, _):
    print("\nstopping: the runs save what they have; the same command goes on with them", file=sys.stderr)
    sys.exit(128 + number)


def check_workers(workers):
    """Says when a number of workers cannot be. -> whether it can"""
    if not 1 <= workers <= 256:
        print(f"error: --workers {workers} must lie between 1 and 256", file=sys.stderr)
    return 1 <= workers <= 256


# ------------------------------------------------------------- in the process that makes a run


def next_lock(lock):
    """The lock that another worker makes who takes over the run."""
    path, _, number = lock.rpartition(".")
    return f"{path}.{int(number) + 1}"


def end_if_lost(lost):
    if lost:
        os.write(2, b"\nstopped: another worker has this run\n")
        os._exit(LOST)


def keep_alive(lock, parent, beat, stale):
    """Touches the lock; ends the process where another has taken it, and lets it save and leave where the
    worker that started it is gone."""
    touched, alone, gone = time.monotonic(), False, watch_process(parent)
    while True:
        lost = os.path.exists(next_lock(lock))
        try:
            os.utime(lock)
            touched = time.monotonic()
        except FileNotFoundError:  # another worker has taken the run, finished it and removed its locks
            lost = True
        except OSError:  # perhaps it works again in time
            lost = lost or time.monotonic() - touched > stale / 2
        end_if_lost(lost)
        if gone() and not alone:
            alone = True
            signal.raise_signal(signal.SIGTERM)
        time.sleep(beat)


def guard_files(lock):
    """Lets a process that was held up replace no file of the one that has its run now: the scripts write each
    file anew and put it into its place by os.replace."""
    replace = os.replace

    def guarded(*paths, **others):
        end_if_lost(os.path.exists(next_lock(lock)) or not os.path.exists(lock))
        return replace(*paths, **others)

    os.replace = guarded


def watch_process(parent):
    """-> a function that tells whether the process that started this one has ended"""
    if os.name != "nt":
        return lambda: os.getppid() != parent
    import ctypes  # a process that ends is not replaced as a parent on Windows

    kernel = ctypes.windll.kernel32
    kernel.OpenProcess.restype = ctypes.c_void_p
    handle = kernel.OpenProcess(0x00100000, False, parent)  # SYNCHRONIZE: to wait for it
    return lambda: not handle or kernel.WaitForSingleObject(ctypes.c_void_p(handle), 0) == 0


def make(lock, parent, beat, stale, script, *flags):
    """Runs a script in this process, which keeps the lock of its run alive."""
    threading.Thread(target=keep_alive, args=(lock, int(parent), float(beat), float(stale)), daemon=True).start()
    guard_files(lock)
    sys.argv, sys.path[0] = [script, *flags], os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    make(*sys.argv[1:])
