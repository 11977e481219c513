"""`python -m tests.e2e.lone`: a worker that finds its memory server, or starts it, beside the router's socket.

Others do in a directory of this user's, where a test would meet what else runs on this machine.
"""

import sys

from common.serving.worker.start import Incarnation, WorkerLoop, worker_main
from common.settings.config import Config
from common.wire.messages.worker import Role
from common.wire.transport import endpoints
from decode_worker import __main__ as decode
from prefill_worker import __main__ as prefill


def main() -> int:
    router = endpoints.socket_path(sys.argv[sys.argv.index("--net-router-endpoint") + 1])
    assert router is not None, "systems under test have unix sockets"
    endpoints.PARENT = router.parent
    if sys.argv[sys.argv.index("--worker-id") + 1].startswith("decode"):
        return worker_main(Role.DECODE, decode.DESCRIPTION, build_decode)
    return worker_main(Role.PREFILL, prefill.DESCRIPTION, build_prefill)


def build_decode(config: Config, incarnation: Incarnation) -> WorkerLoop:
    return decode.build(config, incarnation)


def build_prefill(config: Config, incarnation: Incarnation) -> WorkerLoop:
    return prefill.build(config, incarnation)


if __name__ == "__main__":
    sys.exit(main())
