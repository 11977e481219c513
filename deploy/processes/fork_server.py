"""Fork workers from a process with slow imports done; workers share the memory of imports, page by page.

    python -P -m deploy.processes.fork_server MODULE...      imports the modules; stdin is a socket (SOCK_SEQPACKET).

Each packet asks for a process, with two descriptors: a pipe for its order, written by `order`, and a pipe for output.
The answer is the pid. The process carries out the order, or ends without an order. The client adopts orphans (see
`forks`). A process in between forks the worker and ends before the answer, so the client becomes the worker's parent.
So the end of the fork server ends no worker, and the end of the client ends all.

A forked process has only done imports: no threads, open files or children are left, and no device was touched.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import shlex
import socket
import sys
import time
from pathlib import Path

from deploy.processes.exec_child import die_with
from deploy.processes.launch_plan import ProcessSpec

INPUT, OUTPUT, ERRORS = 0, 1, 2
MAX_REQUEST_BYTES = 16
THREAD_END_S = 0.1


def order(spec: ProcessSpec) -> bytes:
    """Return the order that makes a forked process the process of `spec`."""
    return json.dumps([spec.name, spec.module, list(spec.flags), dict(spec.env)]).encode()


def main() -> None:
    parent = os.getppid()
    name_process("fork-server")
    gc.disable()  # imports leave nothing to collect, and looks for cycles take a sixth of their time
    for name in (*sys.argv[1:], "setproctitle"):  # missing modules fail here, not in a worker
        importlib.import_module(name)
    if traces := traces_of_imports():
        sys.exit(f"imports left {', '.join(traces)}: no worker can be forked")
    gc.freeze()
    gc.enable()
    if serve(socket.socket(fileno=INPUT)):
        await_order(parent)


def name_process(name: str) -> None:
    """Set the name shown by `ps -e` and `top`."""
    Path("/proc/self/comm").write_text(name)


def traces_of_imports() -> list[str]:
    """Return remains of imports that a forked process would lack (threads) or share with others."""
    end_s = time.monotonic() + THREAD_END_S
    while len(threads := os.listdir("/proc/self/task")) > 1 and time.monotonic() < end_s:
        time.sleep(0.001)  # a thread that was joined may take a moment to end
    files = Path("/proc/self/fd")
    found = [] if len(threads) == 1 else [f"{len(threads)} threads"]
    for file in os.listdir(files):
        with contextlib.suppress(FileNotFoundError):  # descriptor of the listing itself
            if int(file) > ERRORS:
                found.append(f"file {os.readlink(files / file)}")
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        found.append("a child process")
    return found


def serve(control: socket.socket) -> bool:
    """Serve requests; return true in a forked process, and false in the fork server at the end of input."""
    while True:
        request, pipes, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 2)
        if not request:
            return False
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            if worker := os.fork():
                os.write(tell, str(worker).encode())
                os._exit(0)
            control.detach()  # its descriptor is reused as stdin
            take_over(*pipes)
            for descriptor in (told, tell, *pipes):
                os.close(descriptor)
            return True
        for descriptor in (tell, *pipes):
            os.close(descriptor)
        _, status = os.waitpid(between, 0)
        if status:
            sys.exit("a process that was forked could not fork")
        control.send(os.read(told, MAX_REQUEST_BYTES))
        os.close(told)


def take_over(orders: int, output: int) -> None:
    """Use the pipe `orders` as stdin, and the pipe `output` as stdout and stderr."""
    os.dup2(orders, INPUT)
    os.dup2(output, OUTPUT)
    os.dup2(output, ERRORS)


def await_order(parent: int) -> None:
    """Carry out the order, without input, in a new session that ends with the parent."""
    with open(INPUT, "rb", closefd=False) as orders:
        line = orders.read()
    if not line:  # the client does not know this process
        return
    os.setsid()
    die_with(parent)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, INPUT)
    os.close(nothing)
    from setproctitle import setproctitle  # here, because `order` is imported without worker packages, too

    name, module, flags, env = json.loads(line)
    os.environ.update(env)
    setproctitle(shlex.join(["python", "-m", module, *flags]))  # replaces the fork server's title with all modules
    name_process(name)
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
