"""Preloaded kernels: a notebook sees the same in them as in a usual kernel, and none outlives what started it."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are preloaded only on Linux")

CELLS = [
    "import os, sys, signal, threading, multiprocessing\n"
    "own = {'JPY_PARENT_PID', 'KERNEL_NAME'}\n"
    "sys.path, os.getcwd(), sys.stdin.read(), __name__, [name for name in globals() if not name.startswith('_')]",
    "{name: value for name, value in os.environ.items() if name not in own}",
    "os.getsid(0) == os.getpid() == os.getpgid(0), multiprocessing.parent_process(), multiprocessing.current_process().name",
    "[str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]",
    "sorted(name for name in sys.modules if name.split('.')[0] in ('rvnnbook', 'build', 'preloaded', 'api', 'landing'))",
    "import subprocess\nprint('said'); subprocess.run([sys.executable, '-c', 'print(5); raise SystemExit(3)']).returncode",
    "import numpy, torch\nprint(torch.get_num_threads(), torch.manual_seed(0).initial_seed(), torch.rand(3))",
    "with multiprocessing.get_context('spawn').Pool(1) as pool:\n    print(pool.map(abs, [-1, -2]))",
    "import matplotlib\nimport matplotlib.pyplot as plt\nplt.plot([1, 3, 2]); plt.title('t')\n"
    "print(matplotlib.get_backend(), matplotlib.rcParams['svg.fonttype'], plt.isinteractive())",
    "layer = torch.nn.Linear(3, 1)\nlayer(torch.ones(2, 3)).sum().backward()\n"
    "torch.optim.Adam(layer.parameters()).step()\nprint(layer.weight.grad, layer.weight)",
    "1 / 0",
]
DRAWS = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())"
EXECUTE = """import json, os, sys
sys.path[:0] = [{root!r}, {root!r} + "/_ext"]
if {preloaded}:
    import preloaded
    preloaded.use()
from nbclient import NotebookClient
import nbformat
for source, target in {pairs!r}:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in json.load(open(source))])
    NotebookClient(book, kernel_name="python3", allow_errors=True, coalesce_streams=True,     # a busy kernel sends text in parts
                   resources={{"metadata": {{"path": {folder!r}}}}}).execute()
    json.dump([cell["outputs"] for cell in book.cells], open(target, "w"))
print(preloaded.Preloaded.server if {preloaded} else "usual")
"""


def execute(tmp_path, preloaded, *notebooks):
    "The outputs of the cells of notebooks that one process executes, one after the other; and what kernels it started."
    pairs = []
    for number, cells in enumerate(notebooks):
        pairs.append([str(tmp_path / f"{number}.json"), str(tmp_path / f"{number}.out.json")])
        Path(pairs[-1][0]).write_text(json.dumps(cells))
    script = EXECUTE.format(root=str(ROOT), preloaded=preloaded, pairs=pairs, folder=str(tmp_path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(target).read_text()) for _, target in pairs], done.stdout


def test_a_notebook_sees_the_same_in_both_kernels(tmp_path):
    usual, _ = execute(tmp_path, False, CELLS)
    forked, how = execute(tmp_path, True, CELLS, CELLS)
    assert "Popen" in how
    for number, (plain, *others) in enumerate(zip(*usual, *forked, strict=True)):
        for outputs in (plain, *others):
            for output in outputs:
                output.get("metadata", {}).clear()
                output.pop("traceback", None)      # it names the kernel's process
        assert plain and all(other == plain for other in others), CELLS[number]


def test_random_numbers_of_two_kernels_differ(tmp_path):
    draws = [shown[0][0]["text"].split() for shown in execute(tmp_path, True, [DRAWS], [DRAWS])[0]]
    assert len({*draws[0], *draws[1]}) == 6


def test_usual_kernels_start_where_a_module_starts_a_thread(tmp_path, monkeypatch):
    (tmp_path / "path" / "numba").mkdir(parents=True)
    (tmp_path / "path" / "numba" / "__init__.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'path'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    ((shown,),), how = execute(tmp_path, True, ["import sys\nprint('torch' in sys.modules)"])
    assert how.strip() == "False" and shown[0]["text"] == "False\n"


def running(pid):
    try:
        return os.kill(pid, 0) is None and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_interrupt_restart_and_shutdown(monkeypatch):
    from jupyter_client.manager import KernelManager
    from jupyter_client.provisioning import KernelProvisionerFactory
    monkeypatch.syspath_prepend(str(ROOT / "_ext"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")     # BLAS starts threads otherwise
    import preloaded
    factory = KernelProvisionerFactory.instance()
    monkeypatch.setattr(factory, "default_provisioner_name", factory.default_provisioner_name)
    monkeypatch.setattr(preloaded.Preloaded, "server", None)
    preloaded.use()
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    first = manager.provisioner.process.pid
    message = client.execute("print('begun')\nimport time\ntime.sleep(60)")
    while client.get_iopub_msg(timeout=60)["msg_type"] != "stream":
        pass
    manager.interrupt_kernel()
    while (reply := client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != message:
        pass
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    manager.restart_kernel(now=True)
    client.wait_for_ready(timeout=60)
    second = manager.provisioner.process.pid
    assert isinstance(manager.provisioner.process, preloaded.Kernel) and first != second and not running(first)
    client.stop_channels()
    manager.shutdown_kernel()
    assert not running(second)
    server = preloaded.Preloaded.server
    server.stdin.close()
    assert server.wait(timeout=60) == 0
    server.stdout.close()


def test_no_kernel_outlives_the_process_that_started_it(tmp_path):
    (tmp_path / "0.json").write_text(json.dumps(
        [f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}} ')\ntime.sleep(300)"]))
    script = EXECUTE.format(root=str(ROOT), preloaded=True, pairs=[[str(tmp_path / "0.json"), str(tmp_path / "none")]], folder=str(tmp_path))
    builder = subprocess.Popen([sys.executable, "-c", script])
    end = time.monotonic() + 120
    while not (tmp_path / "pid").exists() or (tmp_path / "pid").read_text()[-1:] != " ":
        assert time.monotonic() < end and builder.poll() is None
        time.sleep(.1)
    kernel, server = map(int, (tmp_path / "pid").read_text().split())
    assert running(kernel) and running(server)
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    while running(kernel) or running(server):
        assert time.monotonic() < end + 60
        time.sleep(.1)
