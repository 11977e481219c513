"""What an operator does to a running system: have a worker or memory server finish what it has, and end.

The request goes where workers dial (see `operator`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from common.base.errors import ConfigError
from common.settings.config import NetSection, RouterSection
from common.wire.messages.operator import DrainAnswer, DrainWanted, LoadReport, LoadWanted, WorkerLoad
from common.wire.transport.endpoints import AUTO, ROUTER_SOCKET, resolved
from common.wire.transport.whereabouts import found
from deploy.operate.router_client import Operator, dialed

USUAL_PORT = RouterSection().port
ANSWER_S = 10.0
"""For a router to answer; one that is busy does so within milliseconds."""
ASK_INTERVAL_S = 0.3

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """Who is to leave, and what is waited for."""

    name: str
    timeout_s: float
    until_back: bool  # another under that name is there


def router_of(net: NetSection, port: int | None) -> NetSection:
    """Where to dial: as configured, or else as the router noted that has that HTTP port here, the usual one without.

    Raises ConfigError for a port that no router noted: another router may have a worker of the same name.
    """
    if net.router_endpoint != AUTO:
        return net
    noted = found(USUAL_PORT if port is None else port)
    if noted is None and port is not None:
        raise ConfigError(
            f"--port {port}: no router of this user has it on this machine; name its HTTP port, or where workers "
            "dial it (--net-router-endpoint)"
        )
    return noted or net


def drain(net: NetSection, wish: Wish, say: Say) -> int:
    """Ask until that worker or memory server has left; returns the exit status: 0, or 1 for what did not come."""
    begin_s = time.monotonic()
    with dialed(net) as operator:
        first = _ask(operator, wish.name, 0)
        if first is None:
            endpoint = resolved(net.router_endpoint, ROUTER_SOCKET)
            say(f"no router answers at {endpoint} within {ANSWER_S:g} s: is it this user's, with that net.secret_file?")
            say("name its HTTP port (--port), or where workers dial it (--net-router-endpoint)")
            return 1
        if not first.incarnation:
            say(f"the router knows no worker or memory server {wish.name!r}; baton workers lists them")
            return 1
        said = -1
        while time.monotonic() - begin_s < wish.timeout_s:
            answer = _ask(operator, wish.name, first.incarnation)
            if answer is None:
                continue  # a router that starts again knows it soon
            has_left = answer.incarnation != first.incarnation
            if has_left and (answer.incarnation or not wish.until_back):
                back = ", and another is in its place" if answer.incarnation else ""
                say(f"{wish.name} has left after {time.monotonic() - begin_s:.1f} s{back}")
                return 0
            if not has_left and answer.num_requests != said:
                said = answer.num_requests
                say(f"{wish.name}: {said} requests need it")
            time.sleep(ASK_INTERVAL_S)
    what = "is not back" if wish.until_back else "has not left"
    say(f"{wish.name} {what} after {wish.timeout_s:g} s; it goes on leaving")
    return 1


def drain_all(net: NetSection, timeout_s: float, say: Say) -> int:
    """Drain each worker in turn, and go on once another in its place serves: a rolling restart of workers.

    Returns the exit status: 0, or 1 for the first that did not come back within `timeout_s`.
    """
    with dialed(net) as operator:
        report = operator.ask(LoadWanted, LoadReport, ANSWER_S)
    if report is None:
        return drain(net, Wish("-", timeout_s, until_back=True), say)  # which says where it dialed
    for before in sorted(report.workers, key=lambda worker: (worker.role, worker.name)):
        status = drain(net, Wish(before.name, timeout_s, until_back=True), say)
        if status == 0 and not _serves_again(net, before, timeout_s):
            say(f"{before.name} does not serve after {timeout_s:g} s; the others are left as they are")
            status = 1
        if status:
            return status
    say(f"{len(report.workers)} workers were started again")
    return 0


def _serves_again(net: NetSection, before: WorkerLoad, timeout_s: float) -> bool:
    """Wait for another incarnation that gets requests, and has met its partners, as the one before did and had."""
    until_s = time.monotonic() + timeout_s
    with dialed(net) as operator:
        while time.monotonic() < until_s:
            report = operator.ask(LoadWanted, LoadReport, ANSWER_S)
            for now in report.workers if report else ():
                is_another = now.name == before.name and now.incarnation != before.incarnation
                if is_another and now.has_spoken and now.is_serving >= before.is_serving:
                    is_met = now.num_partners >= min(1, before.num_partners)
                    if is_met:
                        return True
            time.sleep(ASK_INTERVAL_S)
    return False


def _ask(operator: Operator, name: str, incarnation: int) -> DrainAnswer | None:
    """Have who has that name leave; None without an answer."""
    return operator.ask(
        lambda operator_id, epoch: DrainWanted(operator_id, epoch, name, incarnation),
        DrainAnswer,
        ANSWER_S,
        lambda answer: answer.name == name,
    )
