"""How a process beside the router begins: behind others in turn, and deaf to signals, as it ends with its stdin."""

import os
import signal
import sys
from collections.abc import Sequence

from common.base.log import setup_logging
from common.settings import options
from common.settings.config import Config

NICENESS = 5
"""What it does comes before a prompt step, which waits anyway; everybody's tokens should not wait for it."""


def begun(module: str, sections: Sequence[str], description: str, name: str) -> Config:
    """The settings that the router gave it as flags; logs as `name` from now on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the router drains, and needs this process until then
    config = options.parse(Config, sections, module, description, sys.argv[1:])
    setup_logging(name, config.log.level, config.log.format)
    os.nice(NICENESS)
    return config
