"""The life of a router or front process: serve until a signal; the first signal drains, the second stops at once."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from common.base.errors import ConfigError, RequestError
from common.base.log import StartLog, setup_logging
from common.base.process import collect_rarely, freeze_and_trim, share_interpreter, tame_allocator
from common.checkpoint.files import require_model
from common.settings import options
from common.settings.config import ROUTER_SECTIONS, Config, RouterSection
from common.wire.transport import whereabouts
from common.wire.transport.port_sharing import RELIEVED_STATUS
from router.api.app import MakeService, start_server
from router.api.http_request import SERVICE
from router.api.succession import SUCCESSION, Succession
from router.http_service import HttpService
from router.text.tokenizer import encode_in_one_thread

logger = logging.getLogger(__name__)


def run(prog: str, description: str, name: str, make_service: MakeService, argv: Sequence[str]) -> int:
    """Serve HTTP with a service; return the exit status. `name` is the process's in logs."""
    start = StartLog()
    start.ended("imports")
    try:
        config = options.parse(Config, ROUTER_SECTIONS, prog, description, argv)
        require_model(Path(config.model.path))
        setup_logging(name, config.log.level, config.log.format)
        tame_allocator()
        encode_in_one_thread()
        collect_rarely()
        share_interpreter()
        return uvloop.run(serve(config, start, make_service))
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2


async def serve(config: Config, start: StartLog, make_service: MakeService) -> int:
    """Serve until SIGTERM, SIGINT, or another router takes the port, then drain; return the exit status."""
    signals: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    runner, url = await start_server(config, make_service)
    start.ended("model and sockets")
    start.report(logger)
    service, succession, port = runner.app[SERVICE], runner.app[SUCCESSION], int(url.rpartition(":")[2])
    noting = asyncio.create_task(_note(port, service, succession))
    warming = asyncio.create_task(_warm_up(service))
    try:
        is_relieved = await _until_over(signals, succession, warming)
        warming.cancel()
        noting.cancel()
        drained = asyncio.create_task(_drain(config.router, service, succession))
        impatient = asyncio.create_task(signals.get())
        await asyncio.wait({drained, impatient}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, impatient):
            task.cancel()
        if service.num_active:
            logger.warning("stopping with %d completions unfinished", service.num_active)
            message = "the server shut down before this request was finished; retry"
            service.fail_all(RequestError(message, code="server_draining", status=503, retry_after_s=5))
    finally:
        whereabouts.forget(port)
        await runner.cleanup()
        logger.info("stopped")
    return RELIEVED_STATUS if is_relieved else 0


async def _until_over(signals: "asyncio.Queue[str]", succession: Succession, warming: "asyncio.Task[None]") -> bool:
    """Wait for a signal or for another router to take the port; return True for another router."""
    signalled, relieved = asyncio.create_task(signals.get()), asyncio.create_task(succession.relieved.wait())
    ends: set[asyncio.Task[object]] = {signalled, relieved}
    await asyncio.wait({*ends, warming}, return_when=asyncio.FIRST_COMPLETED)
    if warming.done():
        warming.result()
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    return succession.relieved.is_set()


async def _drain(section: RouterSection, service: HttpService, succession: Succession) -> None:
    """Finish running completions.

    With a successor, no request is refused. The drain may take longer, because no client waits for this router's end.
    """
    is_relieved, num_active = succession.relieved.is_set(), service.num_active
    limit_s = section.request_timeout_s if is_relieved else section.drain_s
    why = "another router has the port" if is_relieved else "told to end"
    logger.info("%s: draining %d completions for up to %g s; a signal stops it at once", why, num_active, limit_s)
    if not succession.has_successor:
        await service.drain(limit_s)
        return
    await succession.leave()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await service.drain(limit_s, refuses=False)
            await succession.quiet()
            await service.drain(limit_s)


async def _note(port: int, service: HttpService, succession: Succession) -> None:
    """Record this router's port once bound, so the user's operators can find it; a failure only logs a warning."""
    await succession.has_port.wait()
    if not service.endpoint:
        return
    try:
        whereabouts.note(port, service.endpoint, service.config.net)
    except (ConfigError, OSError) as error:
        logger.warning("baton drain needs --net-router-endpoint %s: %s", service.endpoint, error)


async def _warm_up(service: HttpService) -> None:
    """Start helpers needed by the first requests of some kinds."""
    await service.grammars.warm_up()  # one by one, because each is most expensive while starting
    await service.reader.warm_up()
    freeze_and_trim()
