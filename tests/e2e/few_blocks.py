"""`python -m tests.e2e.few_blocks`: a worker to which typical texts are short, so it has states but few KV blocks."""

import sys

from common.device.engine import step_rules
from common.serving.worker.start import worker_main
from common.wire.messages.worker import Role
from decode_worker import __main__ as decode
from prefill_worker.__main__ import DESCRIPTION
from tests.e2e import slow_prefill


def main() -> int:
    step_rules.TYPICAL_TOKENS = 64
    if sys.argv[sys.argv.index("--worker-id") + 1].startswith("decode"):
        return worker_main(Role.DECODE, decode.DESCRIPTION, decode.build)
    return worker_main(Role.PREFILL, DESCRIPTION, slow_prefill.build)


if __name__ == "__main__":
    sys.exit(main())
