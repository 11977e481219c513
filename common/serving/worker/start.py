"""Common start of worker processes: settings, logging, registration data, and the end.

Exit status: 0 drained, 2 a wrong setting or model, 1 an unexpected error or a lost memory server. A running worker
tells the router before exiting with 1. After a device fault, the worker first tells the memory server, because other
processes that map the affected memory must stop.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.base.errors import BatonError, ConfigError, MemoryLost, ModelError
from common.base.log import StartLog, setup_logging
from common.base.process import ended, freeze_and_trim, freeze_imports, raise_open_files, sharpen_sleeps, tame_allocator
from common.base.version import VERSION
from common.checkpoint.files import require_model
from common.device.engine.engine import Engine, describe_device, resolve_device
from common.device.engine.fault import device_fault
from common.device.engine.pool_budget import log_use
from common.memory.client.client import MemoryClient
from common.memory.client.starter import Starter
from common.serving.worker.drain import Drain
from common.serving.worker.gpu_lease import placed
from common.serving.worker.peer_servers import PeerServers
from common.settings.config import WORKER_SECTIONS, Config, NetSection
from common.settings.options import parse
from common.wire.messages.worker import Role, WorkerReady
from common.wire.messages.worker_id import make_epoch, make_id
from common.wire.transport.endpoints import AUTO, ROUTER_SOCKET, memory_socket, resolved
from common.wire.transport.router_link import RouterLink
from common.wire.transport.sockets import check, handoff_endpoint
from common.wire.values.fields import MAX_INT32
from common.wire.values.fingerprint import files_described, tokenizer_fingerprint

logger = logging.getLogger(__name__)


class WorkerLoop(Protocol):
    """A prefill or decode worker."""

    link: RouterLink
    peers: PeerServers  # memory servers whose memory is mapped here, except the device's own

    def run(self) -> None:
        """Work until drained."""
        ...

    def close(self) -> None:
        """Free sockets and memory."""
        ...


@dataclass(frozen=True, slots=True)
class Incarnation:
    """A start of a worker: its identity and its resources until the end."""

    worker_id: str
    epoch: int
    drain: Drain
    memory: MemoryClient  # connection to the device's memory server
    start: StartLog  # told what of the start is over


THREADS_S = 3.0
"""Longest wait for threads at the end, as those that end agents of NIXL; less than a supervisor adds to a drain."""
Build = Callable[[Config, Incarnation], WorkerLoop]
"""Makes a worker ready to run."""


def worker_main(role: Role, description: str, build: Build) -> int:
    """Run a worker process from start to end; return its exit status."""
    prog, start = f"python -m {role.label}_worker", StartLog()
    start.ended("imports")
    try:
        config = parse(Config, WORKER_SECTIONS, prog, description, sys.argv[1:])
    except BatonError as error:
        print(f"{prog}: {error}", file=sys.stderr)  # noqa: T201 - there is no log before there are settings
        return 2
    freeze_imports()
    tame_allocator()  # kernel compilers and weight readers are many threads
    worker_id = make_id(role.label, config.worker.id)
    setup_logging(worker_id, config.log.level, config.log.format)
    raise_open_files()
    drain = Drain(config.worker.drain_s)
    drain.install()
    try:
        require_model(Path(config.model.path))
        _check_net(config.net)
        config = placed(config, role)
        incarnation = _incarnation(config, role, worker_id, drain, start)
        start.ended("memory server")
        worker = _built(build, config, incarnation)
    except (ConfigError, ModelError, MemoryLost) as error:
        drain.has_failed = True
        logger.error("%s", error)
        return 1 if isinstance(error, MemoryLost) else 2
    drain.has_started = True
    freeze_and_trim()
    start.ended("registration")
    start.report(logger)
    sharpen_sleeps()
    return ended(_run(worker, incarnation.memory), THREADS_S)


def _check_net(net: NetSection) -> None:
    """Check endpoints early, before waiting for a memory server or loading weights."""
    check(net, resolved(net.router_endpoint, ROUTER_SOCKET))
    if net.handoff_endpoint != AUTO or net.advertise:
        check(net, handoff_endpoint(net, "handoff"))


def _built(build: Build, config: Config, incarnation: Incarnation) -> WorkerLoop:
    try:
        return build(config, incarnation)
    except BatonError:
        raise
    except Exception:
        _report_fault(incarnation.memory)
        raise


def _report_fault(memory: MemoryClient) -> str:
    """Tell the memory server about a device fault; return the fault, or "" without a fault."""
    problem = device_fault()
    if problem:
        try:
            memory.report_fault(problem)
        except MemoryLost as lost:
            logger.warning("%s", lost)
    return problem


def _run(worker: WorkerLoop, memory: MemoryClient) -> int:
    try:
        worker.run()
    except ConfigError as error:
        logger.error("%s", error)
        worker.close()
        return 2
    except Exception as error:
        logger.exception("unexpected error, telling the others and exiting")
        # First, because nothing else is sure to work any more.
        problem = _report_fault(memory)
        if problem:
            worker.peers.report_fault(problem)
        what = f"its device met a fault: {problem}" if problem else "it met an unexpected error"
        worker.link.farewell(f"{what}: {type(error).__name__}: {error}"[:300])
        worker.close()
        return 1
    log_use()
    logger.info("stopped")
    return 0


def _incarnation(config: Config, role: Role, worker_id: str, drain: Drain, start: StartLog) -> Incarnation:
    if role is Role.PREFILL and config.kv.transport == "none":
        raise ConfigError(
            "kv.transport = none: nobody would take a prompt's blocks; start decode workers alone, or set auto"
        )
    num_sharers = config.kv.prefill_sharers if role is Role.PREFILL else config.kv.decode_sharers
    if not num_sharers:
        option = f"kv.{role.label}_sharers"
        raise ConfigError(f"{option} = 0: this worker shares the pool, too; say how many of its kind do")
    epoch = make_epoch()
    return Incarnation(worker_id, epoch, drain, _memory(config, role, worker_id, epoch), start)


def _memory(config: Config, role: Role, worker_id: str, epoch: int) -> MemoryClient:
    """Connect to the device's memory server; start a server if none is running and no socket is configured."""
    device, is_decoding = resolve_device(config.worker.device), role is Role.DECODE
    path = memory_socket(config.worker.memory_socket, describe_device(device)[1], config.net.router_endpoint)
    if config.worker.memory_socket != AUTO:
        return MemoryClient(path, worker_id, epoch, is_decoding=is_decoding)
    starter = Starter(path, config, str(device))
    try:
        return MemoryClient(path, worker_id, epoch, is_decoding=is_decoding, summon=starter)
    except MemoryLost as lost:  # the server ended just now, idle for too long
        logger.info("%s; once more", lost)
        return MemoryClient(path, worker_id, epoch, is_decoding=is_decoding, summon=starter)


def make_ready(config: Config, engine: Engine, incarnation: Incarnation, role: Role) -> WorkerReady:
    """Build the registration, without the fields of a single role."""
    memory = incarnation.memory
    return WorkerReady(
        worker_id=incarnation.worker_id,
        epoch=incarnation.epoch,
        role=role,
        pid=os.getpid(),
        version=VERSION,
        device=" ".join(describe_device(engine.device)).strip(),
        model_name=config.model.served_name,
        model_fingerprint=engine.model_fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(Path(config.model.path)),
        kv_layout=engine.pool.layout,
        num_blocks=engine.allocator.capacity,
        max_model_len=engine.max_len,
        max_batch_tokens=0,
        max_num_seqs=0,
        transport="none" if config.kv.transport == "none" else engine.transport.name,
        handoff_endpoint="",
        standby=config.worker.standby,
        memory_server_id=memory.server_id,
        memory_server_epoch=memory.server_epoch,
        pool_id=engine.shared.pool_id,
        prefix_min_tokens=config.kv.prefix_min_tokens if config.kv.prefix_cache else MAX_INT32,
        takes_replies=False,
        short_prompt_tokens=0,
        model_files=files_described(Path(config.model.path)),
    )
