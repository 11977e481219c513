"""`baton drain`: have a worker or memory server finish its requests, and end.

The request goes to the router's endpoint for workers (see `router_client`).
"""

import time
from collections.abc import Callable
from urllib.parse import urlsplit

from common.base.errors import ConfigError
from common.settings.config import NetSection, RouterSection
from common.wire.messages.operator import DrainAnswer, DrainWanted, LoadReport, LoadWanted, WorkerLoad
from common.wire.transport.endpoints import AUTO, ROUTER_SOCKET, resolved
from common.wire.transport.whereabouts import found
from deploy.operate.router_client import Operator, dialed

USUAL_PORT = RouterSection().port
LOOPBACK = ("127.0.0.1", "::1", "localhost")
ANSWER_S = 10.0
"""Seconds for a router to answer, which even a busy router does within milliseconds."""
ASK_INTERVAL_S = 0.3

Say = Callable[[str], None]


def router_of(net: NetSection, port: int | None, url: str | None = None) -> NetSection:
    """Return the endpoint to dial: as configured, or else noted by the router with this HTTP port or URL here.

    Without either the usual port counts. Raises ConfigError for a router not noted here, because another router may
    have a worker of equal name.
    """
    if net.router_endpoint != AUTO:
        return net
    named = port if url is None else _local_port(url)
    noted = found(USUAL_PORT if named is None else named)
    if noted is None and named is not None:
        option = f"--port {port}" if url is None else f"--url {url:.100}"
        raise ConfigError(
            f"{option}: no router of this user has it on this machine; name its HTTP port, or where workers "
            "dial it (--net-router-endpoint)"
        )
    return noted or net


def _local_port(url: str) -> int:
    """Return the port of a URL of this machine; 0, which no router has, for other machines' and invalid URLs."""
    try:
        parts = urlsplit(url)
        return (parts.port or 80) if parts.hostname in LOOPBACK else 0
    except ValueError:
        return 0


def drain(net: NetSection, name: str, timeout_s: float, say: Say, *, until_back: bool = False) -> int:
    """Drain a worker or memory server; return the exit status: 0, or 1 for a failure or timeout.

    Args:
        until_back: wait for a new process of this name, too.
    """
    begin_s = time.monotonic()
    with dialed(net) as operator:
        first = _ask(operator, name, 0)
        if first is None:
            endpoint = resolved(net.router_endpoint, ROUTER_SOCKET)
            say(f"no router answers at {endpoint} within {ANSWER_S:g} s: is it this user's, with that net.secret_file?")
            say("name its HTTP port (--port) or address (--url), or where workers dial it (--net-router-endpoint)")
            return 1
        if not first.incarnation:
            say(f"the router knows no worker or memory server {name!r}; baton workers lists them")
            return 1
        said = -1
        while time.monotonic() - begin_s < timeout_s:
            answer = _ask(operator, name, first.incarnation)
            if answer is None:
                continue  # a restarted router knows the worker soon
            has_left = answer.incarnation != first.incarnation
            if has_left and (answer.incarnation or not until_back):
                back = ", and another is in its place" if answer.incarnation else ""
                say(f"{name} has left after {time.monotonic() - begin_s:.1f} s{back}")
                return 0
            if not has_left and answer.num_requests != said:
                said = answer.num_requests
                say(f"{name}: {said} requests need it")
            time.sleep(ASK_INTERVAL_S)
    what = "is not back" if until_back else "has not left"
    say(f"{name} {what} after {timeout_s:g} s; it goes on leaving")
    return 1


def drain_all(net: NetSection, timeout_s: float, say: Say) -> int:
    """Drain each worker in turn, and go on once the replacement serves: a rolling restart of workers.

    Return the exit status: 0, or 1 for the first worker not back within `timeout_s`.
    """
    with dialed(net) as operator:
        report = operator.ask(LoadWanted, LoadReport, ANSWER_S)
    if report is None:
        return drain(net, "-", timeout_s, say)  # reports the dialed endpoint
    for before in sorted(report.workers, key=lambda worker: (worker.role, worker.name)):
        status = drain(net, before.name, timeout_s, say, until_back=True)
        if status == 0 and not _serves_again(net, before, timeout_s):
            say(f"{before.name} does not serve after {timeout_s:g} s; the others are left as they are")
            status = 1
        if status:
            return status
    say(f"{len(report.workers)} workers were started again")
    return 0


def _serves_again(net: NetSection, before: WorkerLoad, timeout_s: float) -> bool:
    """Wait for another incarnation that serves and has met partners as `before` did; false after the timeout."""
    until_s = time.monotonic() + timeout_s
    with dialed(net) as operator:
        while time.monotonic() < until_s:
            report = operator.ask(LoadWanted, LoadReport, ANSWER_S)
            for now in report.workers if report else ():
                is_another = now.name == before.name and now.incarnation != before.incarnation
                is_met = now.num_partners >= min(1, before.num_partners)
                if is_another and is_met and now.has_spoken and now.is_serving >= before.is_serving:
                    return True
            time.sleep(ASK_INTERVAL_S)
    return False


def _ask(operator: Operator, name: str, incarnation: int) -> DrainAnswer | None:
    """Ask the router to drain the process `name`; None without an answer."""
    return operator.ask(
        lambda operator_id, epoch: DrainWanted(operator_id, epoch, name, incarnation),
        DrainAnswer,
        ANSWER_S,
        lambda answer: answer.name == name,
    )
