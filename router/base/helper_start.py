"""Start of a helper process: lower priority, and no reaction to signals, because the end of stdin ends a helper."""

import os
import signal
import sys
from collections.abc import Sequence

from common.base.log import setup_logging
from common.settings import options
from common.settings.config import Config

NICENESS = 5
"""A helper's work delays only a prompt step, and must not delay the streams of all requests."""


def start_helper(module: str, sections: Sequence[str], description: str, name: str) -> Config:
    """Return the settings given as flags.

    From now on the process logs as `name`, ignores SIGINT and SIGTERM, and runs at lower priority.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a draining router still needs this process
    config = options.parse(Config, sections, module, description, sys.argv[1:])
    setup_logging(name, config.log.level, config.log.format)
    os.nice(NICENESS)
    return config
