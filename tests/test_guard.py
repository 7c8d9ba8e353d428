"""Runs that are watched: every way to end, in real processes, and nobody left behind."""
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from rvnnbook.lab.guard import MARK, Limits, family, processes, watched
from tests.test_rerun import COMMAND, ROOT, files, notebook
from tests.test_train import assert_same_run
from tests.training import go

ENDS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
GATE = ("from rvnnbook.lab.rerun import strict\n"
        "run = strict(globals(), {'smoke': {}, 'cpu': {}}, what=r'\\w+', steps=range(1, 10**6), minutes=(0, 60))")
ACT = """import os, signal, subprocess, sys, time
print('doing', run.what, flush=True)
if run.what == 'raise':
    raise ArithmeticError('on purpose')
if run.what == 'exit':
    os._exit(7)
if run.what == 'kill':
    os.kill(os.getpid(), signal.SIGKILL)
if run.what == 'deaf':
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
if run.what == 'linger':
    import threading
    threading.Thread(target=time.sleep, args=(600,)).start()
if run.what in ('sleep', 'deaf'):
    subprocess.Popen(['sleep', '600'], start_new_session=True)
    print('asleep', flush=True)
    time.sleep(600)"""
TRAIN = """if run.what in ('train', 'linger'):
    import os, time
    from tests.training import go
    from rvnnbook.lab.rerun import run_folder
    from rvnnbook.lab.train import classification_loss
    def loss(model, batch):
        print('step', flush=True)
        time.sleep(float(os.environ.get('SLOW', 0)))
        return classification_loss(model, batch)
    _, outcome = go(run_folder('job', run, ('minutes',)), loss=loss, steps=run.steps, save_every=1e9,
                    time_budget=60 * run.minutes or 1e9)"""
RECORD = "if run.what: print('recorded')"


@pytest.fixture
def job(tmp_path):
    "A notebook that does what it is told to, in a folder of its own."
    book = notebook("profile = 'smoke'\nwhat = 'finish'\nsteps = 25\nminutes = 0.0", GATE, ACT, TRAIN, RECORD, tags=(0,))
    for cell in book["cells"][2:]:
        cell["metadata"]["tags"] = ["run"]
    (tmp_path / "job.ipynb").write_text(json.dumps(book))
    yield tmp_path
    deadline = time.monotonic() + 60
    while left := mine(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(.1)


def mine(folder):
    "Processes that were started with this folder in their environment, by their number."
    found = {}
    for number in processes():
        try:
            if f"HOME={folder}\0".encode() in Path(f"/proc/{number}/environ").read_bytes():
                found[number] = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ")[:200]
        except OSError:
            pass
    return found


def begin(folder, *words, ignored=(), stdout=subprocess.PIPE, **environment):
    "Start `rvnnbook run`, with signals as a terminal leaves them but for those that are ignored."
    def dispositions():
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RVNNBOOK_")}
    return subprocess.Popen([COMMAND, "run", "job.ipynb", *map(str, words)], cwd=folder, stdout=stdout, stderr=subprocess.PIPE,
                            text=True, preexec_fn=dispositions,
                            env={**clean, "OMP_NUM_THREADS": "1", "HOME": str(folder), "PYTHONPATH": str(ROOT), **environment})


def told(process, word):
    "Read what a run says until the word comes; a run that never says it is killed."
    timer = threading.Timer(240, process.kill)
    timer.start()
    for line in process.stdout:
        if line.strip() == word:
            break
    else:
        raise AssertionError(f"never said {word}: {process.stderr.read()}")
    timer.cancel()


def finish(process):
    "What is left of a run's words, and its exit status."
    said, complained = process.communicate(timeout=240)
    return process.returncode, said, complained


def log_of(folder, place="runs"):
    path, = (folder / place).glob("*.log")
    return [line.split(" ", 2)[1:] for line in path.read_text().splitlines()]


def end_of(folder, place="runs"):
    word, end = log_of(folder, place)[-1]
    assert word == "end"
    return json.loads(end)["status"]


def seen(folder, word):
    "Wait until a word begins a line of the log."
    deadline = time.monotonic() + 240
    while not any(line[0] == word for path in (folder / "runs").glob("*.log") for line in
                  [line.split(" ", 2)[1:] for line in path.read_text().splitlines()]):
        assert time.monotonic() < deadline
        time.sleep(.05)


@pytest.mark.parametrize("what, status, said", [
    ("finish", 0, ""), ("raise", 1, "cell 3 raised ArithmeticError: on purpose"),
    ("exit", 3, "the process died with exit status 7 in cell 3"), ("kill", 3, "the process died of SIGKILL in cell 3")])
def test_the_exit_status_says_how_a_plain_run_ended(what, status, said, job):
    got = finish(begin(job, "--no-notebook", "-p", f"what={what}"))
    assert got == (status, got[1], f"rvnnbook: {said}\n" if said else "")
    assert got[1].startswith(f"doing {what}\n") and ("recorded\ndone\n" in got[1]) == (status == 0)
    assert end_of(job, "build/runs") == status and ("Traceback" in got[1]) == (status == 1)
    assert [name.rpartition(".")[2] for name in files(job)] == ["log", "ipynb"]              # smoke: no lock


def test_a_refused_run_leaves_no_log(job):
    status, said, complained = finish(begin(job, "--no-notebook", "-p", "what=%"))
    assert status == 2 and "out of range" in complained and not said and files(job) == ["job.ipynb"]
    for words in (["--limit", "0"], ["--silence", "nan"], ["--grace", "soon"]):
        assert finish(begin(job, *words))[0] == 2
    assert files(job) == ["job.ipynb"]


def test_a_notebook_is_kept_with_its_environment_and_its_log(job):
    status, said, complained = finish(begin(job, "--profile", "cpu"))
    assert status == 0, complained
    target = job / said.splitlines()[-1].removeprefix("done: ")
    about = json.loads(target.read_text())["metadata"]["run"]
    log = log_of(job)
    start = json.loads(log[0][1])
    assert log[0][0] == "start" and start == about and end_of(job) == 0
    assert start["parameters"] == {"profile": "cpu", "what": "finish", "steps": 25, "minutes": 0.0}
    assert {"python", "torch"} <= set(start["libraries"]) and start["variables"]["OMP_NUM_THREADS"] == "1"
    assert start["limits"] == {"silence": 3600.0, "grace": 60.0} and {"commit", "dirty", "processor", "cores"} <= set(start)
    words = [" ".join(line) for line in log]
    assert "| doing finish" in words and "| recorded" in words and sum(" took " in line for line in words) == 6


def test_a_kernel_that_is_killed_is_noticed(job):
    began = time.monotonic()
    status, said, complained = finish(begin(job, "-p", "what=kill"))
    assert status == 3 and complained == "rvnnbook: Kernel died in cell 4\n" and time.monotonic() - began < 120
    status, said, complained = finish(begin(job, "-p", "what=raise"))
    assert status == 1 and "job.ipynb: cell 4 raised ArithmeticError: on purpose (see " in complained and "doing raise" in said
    assert "Traceback" in said and complained.count("\n") == 1


def test_sleep_is_silent_and_work_is_not_even_that_of_a_grandchild():
    asleep = watched("import time; time.sleep(600)", {}, Limits(silence=2))
    assert asleep.status == 3 and "nothing said and nothing done for 2 s" in asleep.said
    work = "import time; end = time.monotonic() + 6\nwhile time.monotonic() < end: pass"
    busy = watched("import subprocess, sys\nsubprocess.run([sys.executable, '-c', work], start_new_session=True)", {"work": work},
                   Limits(silence=2))
    assert busy.status == 0
    says = watched("import time\nfor _ in range(8): time.sleep(.5); print('.')", {}, Limits(silence=2), show=lambda line: None)
    assert says.status == 0


@pytest.mark.parametrize("words, said", [
    (["--cell-limit", "1"], "cell 3 takes longer than 1 s"), (["--limit", "4"], "the limit of 4 s is reached"),
    (["--silence", "1"], "nothing said and nothing done for 1 s")])
def test_a_limit_that_saves_nothing_is_the_end(words, said, job):
    status, _, complained = finish(begin(job, "--no-notebook", "-p", "what=sleep", *words))
    assert status == 3 and complained == f"rvnnbook: {said}: stopped, and nothing was trained that could go on\n"
    assert end_of(job, "build/runs") == 3


def test_who_does_not_listen_is_killed_after_the_grace(job):
    status, _, complained = finish(begin(job, "--no-notebook", "-p", "what=deaf", "--cell-limit", "1", "--grace", "1"))
    assert status == 3 and complained == "rvnnbook: cell 3 takes longer than 1 s; did not stop within 1 s, and was killed\n"


def test_who_has_told_its_end_and_cannot_go_away_has_stopped(job):
    process = begin(job, "--no-notebook", "--profile", "cpu", "--grace", "2", "-p", "what=linger", "-p", "steps=100000")
    told(process, "step")
    process.send_signal(signal.SIGTERM)
    status, _, complained = finish(process)
    assert status == 75 and complained == "rvnnbook: SIGTERM: stopped; the same command goes on\n"


def test_a_second_signal_kills_at_once(job):
    process = begin(job, "--no-notebook", "--profile", "cpu", "-p", "what=deaf")
    told(process, "asleep")
    process.send_signal(signal.SIGTERM)
    seen(job, "asked")
    time.sleep(1)
    assert process.poll() is None and len(mine(job)) == 3
    process.send_signal(signal.SIGINT)
    status, _, complained = finish(process)
    assert status == 75 and "goes on from the last checkpoint" in complained and end_of(job) == 75


@pytest.mark.long
def test_a_training_that_is_stopped_again_and_again_ends_as_if_it_had_not(job):
    words = ["--no-notebook", "--profile", "cpu", "-p", "what=train", "-p", "steps=300"]
    for number in ENDS:
        process = begin(job, *words, SLOW=".2")
        told(process, "step")
        process.send_signal(number)
        status, said, complained = finish(process)
        assert status == 75 and "recorded" not in said, (said, complained)
        assert complained == f"rvnnbook: {number.name}: stopped; the same command goes on\n"
    for limit in (8, 16, 32, 64):                       # seconds in which it has begun to train, on this machine
        status, said, complained = finish(begin(job, *words, "--limit", limit, SLOW="1"))
        if status == 75:
            break
        assert status == 3 and "nothing was trained" in complained
    assert status == 75 and "recorded" not in said and "the limit of" in complained
    status, said, _ = finish(begin(job, *words))
    assert status == 0 and said.endswith("recorded\ndone\n")
    go(job / "whole", steps=300)
    folder, = (path for path in (job / "runs").iterdir() if path.is_dir())
    assert_same_run(job / "whole", folder)
    words = [line[0] for line in log_of(job)]
    assert words.count("start") == words.count("end") >= 5 and words.count("asked") >= 4


def test_a_training_whose_minutes_are_up_is_to_go_on(job):
    words = ["--no-notebook", "--profile", "cpu", "-p", "what=train", "-p", "steps=4", "-p"]
    assert finish(begin(job, *words, "minutes=0.0001"))[0] == 75
    assert finish(begin(job, *words, "minutes=0.0"))[0] == 0


def test_a_notebook_is_stopped_in_its_training_and_goes_on(job):
    words = ["--profile", "cpu", "-p", "what=train"]
    process = begin(job, *words, SLOW=".5")
    told(process, "step")
    process.send_signal(signal.SIGTERM)
    status, said, complained = finish(process)
    assert (status, complained) == (75, "rvnnbook: SIGTERM: stopped; the same command goes on\n") and "recorded" not in said
    assert not list((job / "runs").glob("*.ipynb"))
    assert finish(begin(job, *words))[0] == 0
    go(job / "whole")
    folder, = (path for path in (job / "runs").iterdir() if path.is_dir())
    assert_same_run(job / "whole", folder)


def test_a_notebook_is_stopped_anywhere_else(job):
    process = begin(job, "-p", "what=sleep")
    told(process, "asleep")
    process.send_signal(signal.SIGINT)
    status, said, complained = finish(process)
    assert (status, complained) == (75, "rvnnbook: SIGINT: stopped; the same command goes on\n")
    assert not list((job / "build/runs").glob("*.ipynb"))


def test_a_signal_in_the_first_moment_is_heard(job):
    process = begin(job, "--no-notebook", "--profile", "cpu")
    seen(job, "start")
    process.send_signal(signal.SIGTERM)
    status, said, _ = finish(process)
    assert status in (0, 75) and ("recorded" in said) == (status == 0)           # 0: it was quicker than the signal


@pytest.mark.parametrize("plainly", [True, False])
def test_who_kills_the_guard_kills_the_run(plainly, job):
    process = begin(job, *["--no-notebook"] * plainly, "-p", "what=sleep")
    told(process, "asleep")
    deadline = time.monotonic() + 60
    while len(mine(job)) < 3:                            # the guard, who runs the cells, and whom these have started;
        assert time.monotonic() < deadline               # a process that has just begun is not seen at once
        time.sleep(.01)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL         # the fixture waits until nobody is left


def test_one_run_at_a_time(job):
    words = ["--no-notebook", "--profile", "cpu", "-p", "what=train"]
    first = begin(job, *words, SLOW="600")
    told(first, "step")
    status, said, complained = finish(begin(job, *words))
    assert status == 75 and f"process {first.pid} is at this run already" in complained and not said
    status, said, complained = finish(begin(job, *words, "-p", "minutes=1"))     # another command, the same training
    assert status == 75 and f"process {first.pid} is at this run already" in complained
    first.kill()
    finish(first)
    while mine(job):
        time.sleep(.1)
    assert finish(begin(job, *words))[0] == 0


def test_nobody_need_read_and_a_hangup_may_be_ignored(job):
    reading, writing = os.pipe()
    os.close(reading)
    process = begin(job, "--no-notebook", "--profile", "cpu", stdout=writing, ignored=(signal.SIGHUP,))
    os.close(writing)
    seen(job, "start")
    process.send_signal(signal.SIGHUP)
    assert finish(process)[0] == 0
    assert ["|", "recorded"] in log_of(job)


def test_a_run_does_not_wait_for_input_and_may_say_much():
    shown = []
    ending = watched("import sys\nprint(repr(sys.stdin.read()))\nfor i in range(20000): print(i)\nprint(mark + '{', mark, mark + '[1]', sep='\\n')\n"
                     "print('no newline', end='')", {"mark": MARK}, Limits(), show=shown.append)
    assert ending.status == 0 and shown == ["''", *map(str, range(20000)), MARK + "{", MARK, MARK + "[1]", "no newline"]


def test_an_error_with_a_status_of_another_kind_is_a_plain_error():
    ending = watched("class Missing(OSError):\n    status = code\nraise Missing('no such page')", {"code": 404}, Limits())
    assert ending == (1, "Missing: no such page", None)
    ending = watched("class Busy(OSError):\n    status = code\nraise Busy('later')", {"code": 75}, Limits())
    assert ending == (75, "later", None)


def test_a_terminal_that_knows_few_letters_does_not_end_a_run(job):
    process = begin(job, "--no-notebook", "-p", "what=größe", PYTHONIOENCODING="ascii")
    assert finish(process) == (0, "'doing gr\\xf6\\xdfe'\nrecorded\ndone\n", "")


def test_a_family_is_found_by_birth_and_by_group():
    table = {1: (0, 1, 0.), 5: (1, 5, 0.), 6: (5, 6, 0.), 7: (6, 6, 0.), 8: (1, 6, 0.), 9: (8, 9, 0.), 10: (1, 10, 0.)}
    assert family(table, {5}) == {5, 6, 7, 8, 9}
    assert family({number: row for number, row in table.items() if number not in (5, 6)}, {5, 6}) == {7, 8, 9}
    own = processes()[os.getpid()]
    assert own[:2] == (os.getppid(), os.getpgrp()) and 0 < own[2] <= sum(os.times()[:4]) + .1
