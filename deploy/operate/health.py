"""Reader of the router's GET /health: the workers, and the KV paths between workers.

Functions raise an error of `NOT_OURS` for a body of another program.
"""

from itertools import chain, product
from typing import TYPE_CHECKING

from common.base.json_file import JsonObject
from deploy.operate.healthcheck import SERVING

if TYPE_CHECKING:
    import aiohttp

POLL_DEADLINE_S = 2.0


def is_complete(health: JsonObject) -> bool:
    """Tell whether requests are answered and every possible KV path has been tried."""
    able = {
        role: [worker["id"] for worker in members if worker["transport"] != "none"]
        for role, members in health["workers"].items()
    }
    tried = {(path["prefill"], path["decode"]) for path in health["kv_paths"]}
    return health["status"] in SERVING and tried.issuperset(product(able["prefill"], able["decode"]))


def pids(health: JsonObject) -> set[int]:
    """Return the processes of registered workers."""
    return {worker["pid"] for worker in chain(*health["workers"].values())}


def transports(health: JsonObject) -> str:
    """Return KV transports in use with measured rates, in words."""
    rates: dict[str, list[float]] = {}
    for path in health["kv_paths"]:
        if not path["error"]:
            rates.setdefault(path["transport"], []).extend([] if path["gb_per_s"] is None else [path["gb_per_s"]])
    words = [f"{name} at {_span(values)} GB/s" if values else name for name, values in sorted(rates.items())]
    return ", ".join(words) or "none"


async def fetch_health(session: "aiohttp.ClientSession", url: str) -> JsonObject | None:
    """Poll once; None without an answer in JSON."""
    import aiohttp  # already done by who made the session

    try:
        timeout = aiohttp.ClientTimeout(total=POLL_DEADLINE_S)
        async with session.get(f"{url}/health", timeout=timeout) as response:
            body: JsonObject = await response.json()
            return body
    except (TimeoutError, aiohttp.ClientError, ValueError):
        return None


def local_url(host: str, port: int) -> str:
    """Return the URL at which a client on this machine reaches a server bound to `host`."""
    if host in ("", "0.0.0.0"):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _span(rates: list[float]) -> str:
    low, high = min(rates), max(rates)
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f}-{high:.1f}"
