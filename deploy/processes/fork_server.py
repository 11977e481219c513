"""Forks workers that have imported by then what takes seconds, and share the memory of it, page by page.

    python -P -m deploy.processes.fork_server MODULE...      imports these; its input is a socket (SOCK_SEQPACKET)

Each packet there asks for one process, with two descriptors: a pipe for its order, which `order` writes, and one for
its output. The answer is its pid. It becomes what the order says; without one it ends. Who asks adopts orphans (see
`forks`) and is the parent of the process, which is forked by one that has ended when the answer comes. So the
end of the fork server ends nobody, and the end of who asks ends all.

Nothing has happened in the process but imports: no thread, file or child is left of them, and no device was touched.
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
from pathlib import Path

from deploy.processes.exec_child import die_with
from deploy.processes.launch_plan import ProcessSpec

INPUT, OUTPUT, ERRORS = 0, 1, 2
MAX_REQUEST_BYTES = 16


def order(spec: ProcessSpec) -> bytes:
    """What tells a forked process to be that one."""
    return json.dumps([spec.name, spec.module, list(spec.flags), dict(spec.env)]).encode()


def main() -> None:
    parent = os.getppid()
    name_process("fork-server")
    for name in (*sys.argv[1:], "setproctitle"):  # of which none may be missing only when a worker is forked
        importlib.import_module(name)
    if traces := traces_of_imports():
        sys.exit(f"imports left {', '.join(traces)}: no worker can be forked")
    gc.freeze()
    if serve(socket.socket(fileno=INPUT)):
        await_order(parent)


def name_process(name: str) -> None:
    """As `ps -e` and `top` show it."""
    Path("/proc/self/comm").write_text(name)


def traces_of_imports() -> list[str]:
    """What a forked process would lack (threads), or share with others."""
    threads, files = os.listdir("/proc/self/task"), Path("/proc/self/fd")
    found = [] if len(threads) == 1 else [f"{len(threads)} threads"]
    for file in os.listdir(files):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            if int(file) > ERRORS:
                found.append(f"file {os.readlink(files / file)}")
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        found.append("a child process")
    return found


def serve(control: socket.socket) -> bool:
    """Whether this is a forked process; in the fork server it returns at the end of its input."""
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
            control.detach()  # what its descriptor is now stays open
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
    """Read there, and write there."""
    os.dup2(orders, INPUT)
    os.dup2(output, OUTPUT)
    os.dup2(output, ERRORS)


def await_order(parent: int) -> None:
    """Be what is ordered, without an input, to its end: a session of its own, which ends with its parent."""
    with open(INPUT, "rb", closefd=False) as orders:
        line = orders.read()
    if not line:  # nobody knows of this process
        return
    os.setsid()
    die_with(parent)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, INPUT)
    os.close(nothing)
    from setproctitle import setproctitle  # not above, as `order` is for those, too, that install no worker

    name, module, flags, env = json.loads(line)
    os.environ.update(env)
    setproctitle(shlex.join(["python", "-m", module, *flags]))  # not that of the fork server, which names all modules
    name_process(name)
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
