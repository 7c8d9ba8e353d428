"""Kernels that start quickly: each is forked from a process that has imported PyTorch and other large modules once.

`use()` gives such kernels to the notebooks that this process executes. A kernel has its own session, folder, environment,
search path and random state, and finds none of the book's modules imported. Where a fork is not safe (another system than
Linux, a module that has started a thread), kernels start as usual.
`python _ext/preloaded.py` is the process that forks: a line of its input describes a kernel, it answers with the process ID."""
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

MODULES = ["numpy", "torch", "torch._dynamo", "numba", "pydantic", "accelerate", "safetensors.torch", "matplotlib.figure",
           "matplotlib.font_manager", "matplotlib.backends.backend_agg", "ipykernel.ipkernel", "ipykernel.kernelapp"]
LAUNCHER = ["-m", "ipykernel_launcher"]


class Kernel:
    "The process of a forked kernel, with the methods of `Popen` that Jupyter calls. Its exit status is not known."
    stdin = stdout = stderr = None

    def __init__(self, pid: int):
        self.pid = pid

    def poll(self) -> int | None:
        "None while the process runs."
        try:
            return os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0

    def wait(self) -> int:
        "Return when the process has ended."
        while self.poll() is None:
            time.sleep(.01)
        return 0

    def send_signal(self, number: int):
        "Send a signal to the process, unless it has ended."
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self):
        "End the process."
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        "Ask the process to end."
        self.send_signal(signal.SIGTERM)


class Preloaded(LocalProvisioner):
    "Starts a Python kernel by a fork, any other one as usual."
    server = None      # one for each process that executes notebooks; False where it cannot run

    async def launch_kernel(self, cmd: list[str], **options) -> dict:
        "Start the kernel of a command and return its connection info."
        if cmd[0] != sys.executable or cmd[1:3] != LAUNCHER or not (server := started()):
            return await super().launch_kernel(cmd, **options)
        request = {"arguments": cmd[3:], "folder": os.fspath(options.get("cwd") or os.getcwd()), "environment": options["env"]}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        self.process = Kernel(int(server.stdout.readline()))
        self.pid = self.pgid = self.process.pid
        self.cwd = request["folder"]
        return self.connection_info


def started() -> subprocess.Popen | None:
    "The process that forks, started on first use; None where it cannot run."
    if Preloaded.server is None:
        server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        Preloaded.server = server if server.stdout.readline() == "ready\n" else False
    return Preloaded.server or None


def use(preload: bool = True):
    "Give preloaded kernels to the notebooks that this process executes from now on, or usual ones."
    factory = KernelProvisionerFactory.instance()
    factory.provisioners["preloaded"] = EntryPoint("preloaded", f"{__name__}:Preloaded", factory.GROUP_NAME)
    factory.default_provisioner_name = "preloaded" if preload and sys.platform == "linux" else "local-provisioner"


def reap(*signal_and_frame):
    "Remove kernels that have ended from the table of processes."
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve():
    "Import the modules, then fork a kernel for each line of input."
    os.environ["JPY_PARENT_PID"] = str(os.getpid())    # ipykernel ends when this process ends; read at its import
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        return
    gc.freeze()
    signal.signal(signal.SIGCHLD, reap)
    print("ready", flush=True)
    for line in sys.stdin:
        if pid := os.fork():
            print(pid, flush=True)
        else:
            return become(**json.loads(line))


def become(arguments: list[str], folder: str, environment: dict[str, str]):
    "Be the kernel that `python -m ipykernel_launcher ARGUMENTS` would be in this folder and environment."
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment, JPY_PARENT_PID=str(os.getppid()))
    sys.path[0], sys.argv = folder, ["", *arguments]
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    runpy.run_module(LAUNCHER[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
