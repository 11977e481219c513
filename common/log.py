"""One log line format for every process: time, level, process, request, text."""

import logging
import sys


def setup_logging(process: str, level: str = "INFO") -> None:
    """Send the root logger to stderr, each line tagged with `process` (for example `prefill-0`)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname).1s [{process}] %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class RequestLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines carry a request id and attempt: `[cmpl-3f2a #0] ...`."""

    def __init__(self, logger: logging.Logger, request_id: str, attempt: int) -> None:
        super().__init__(logger, {})
        self.prefix = f"[{request_id} #{attempt}]"

    def process(self, msg: object, kwargs: object) -> tuple[str, object]:  # type: ignore[override]
        return f"{self.prefix} {msg}", kwargs
