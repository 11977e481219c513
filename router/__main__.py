"""`python -m router`: serve until a signal; the first drains, the second stops at once."""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop

from common import options
from common.config import ROUTER_SECTIONS, Config
from common.errors import ConfigError, RequestError
from common.log import setup_logging
from common.malloc import tame_allocator
from common.serving.settle import settle_memory
from common.wire import whereabouts
from router.app import start_server
from router.http_request import SERVICE
from router.service import Service
from router.tokenizer import encode_in_one_thread

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """The process; returns its exit status: 0, or 2 for a setting that is wrong."""
    prog, description = "python -m router", "HTTP side of Baton: takes completions and has workers compute them."
    try:
        config = options.parse(Config, ROUTER_SECTIONS, prog, description, sys.argv[1:] if argv is None else argv)
        config.model.require_directory()
        setup_logging("router", config.log.level, config.log.format)
        tame_allocator()
        encode_in_one_thread()
        uvloop.run(serve(config))
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    return 0


async def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    signals: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    runner, url = await start_server(config)
    service, port = runner.app[SERVICE], int(url.rpartition(":")[2])
    _note(port, service)
    warming, signalled = asyncio.create_task(_warm_up(service)), asyncio.create_task(signals.get())
    try:
        await asyncio.wait({warming, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if warming.done():
            warming.result()
        name = await signalled
        warming.cancel()
        logger.info("%s: draining %d completions for up to %g s; again to stop at once",
                    name, service.dispatcher.num_active, config.router.drain_s)  # fmt: skip
        drained = asyncio.create_task(service.drain(config.router.drain_s))
        impatient = asyncio.create_task(signals.get())
        await asyncio.wait({drained, impatient}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, impatient):
            task.cancel()
        if service.dispatcher.num_active:
            logger.warning("stopping with %d completions unfinished", service.dispatcher.num_active)
            message = "the server shut down before this request was finished; retry"
            service.dispatcher.fail_all(RequestError(message, code="server_draining", status=503, retry_after_s=5))
    finally:
        whereabouts.forget(port)
        await runner.cleanup()
        logger.info("stopped")


def _note(port: int, service: Service) -> None:
    """Let operators of this user find this router by its port; it serves without that, too."""
    try:
        whereabouts.note(port, service.hub.endpoint, service.config.net)
    except (ConfigError, OSError) as error:
        logger.warning("baton drain needs --net-router-endpoint %s: %s", service.hub.endpoint, error)


async def _warm_up(service: Service) -> None:
    """Get ready what the first requests of some kinds would wait for."""
    await service.grammars.warm_up()  # one after the other: each takes most while it starts
    await service.reader.warm_up()
    settle_memory()


if __name__ == "__main__":
    sys.exit(main())
