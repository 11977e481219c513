"""Options of prompts and streams that share a GPU."""

from dataclasses import dataclass

from common.settings.options import option


@dataclass(frozen=True, slots=True)
class SloSection:
    """Targets of a GPU that computes prompts and decodes."""

    itl_ms: float = option(
        100.0,
        "longest usual pause of streams, in milliseconds, while prompts would be late beside them; then a decode step "
        "waits for a prompt step of this length; 0: streams never wait",
        within=(0.0, 10_000.0),
    )
    ttft_ms: float = option(
        100.0,
        "milliseconds that a prompt may be later than twice its own time, before streams wait for it",
        within=(0.0, 3_600_000.0),
    )
