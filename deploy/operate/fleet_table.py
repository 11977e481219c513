"""Tables of workers and memory servers for people, made from the router's GET /health."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from common.base.json_file import Json
from deploy.operate.tables import BLANK, aligned, wrapped

HEADS = {
    "prefill": ("PREFILL", "DEVICE", "STATE", "TO COMPUTE", "KV BLOCKS", "SINCE"),
    "decode": ("DECODE", "DEVICE", "STATE", "SEQUENCES", "KV BLOCKS", "SINCE"),
    "memory": ("MEMORY", "DEVICE", "WEIGHTS", "LEFT", "KV BLOCKS", "CACHED", "SINCE"),
}
DRAINING = "the router is draining: it finishes what it has, and takes nothing new"


def fleet_table(health: Mapping[str, Json]) -> str:
    """Return a line for each worker and memory server, followed by GPUs, versions, problems and recent role changes.

    Raises KeyError for a body of another program.
    """
    rows = {role: [_worker(role, each) for each in _by_name(members)] for role, members in health["workers"].items()}
    rows["memory"] = [_memory_server(each) for each in _by_name(health["memory_servers"])]
    tables = [_table(HEADS[role], of_role) for role, of_role in rows.items()]
    members = _by_name([*chain(*health["workers"].values(), health["memory_servers"])])
    router = {"id": "the router", "version": health["version"]}
    changes = [f"{_span(each['ago_s'])} ago, {each['state']}: {each['reason']}" for each in health["role_changes"]]
    below = [*_gpus(members), *_versions([router, *members]), *_problems(health), *changes]
    return "\n".join(line for part in [*tables, *map(wrapped, below)] for line in part)


def _problems(health: Mapping[str, Json]) -> list[str]:
    """Return the problems of the system, each behind its state."""
    told = [DRAINING] if health["status"] == "draining" else []
    return [*told, *(f"{health['status']}: {problem}" for problem in health["problems"])]


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [*aligned([head, *rows]), *(() if rows else ("none",)), ""]


def _by_name(members: Sequence[Mapping[str, Json]]) -> list[Mapping[str, Json]]:
    return sorted(members, key=lambda each: str(each["id"]))


def _worker(role: str, worker: Mapping[str, Json]) -> tuple[str, ...]:
    if role == "prefill":
        load = f"{worker['outstanding_prompt_tokens']:,} tokens"
    else:
        load = f"{worker['assigned_sequences']} of {worker['most_sequences']}"
    used = BLANK if worker["used_blocks"] is None else f"{worker['used_blocks']:,}"
    return worker["id"], _device(worker)[0], worker["state"], load, used, _span(worker["since_s"])


def _memory_server(server: Mapping[str, Json]) -> tuple[str, ...]:
    told = (BLANK,) * 4
    if (blocks := server["blocks"]) is not None:
        sizes = _size(server["weights_bytes"]), _size(server["free_bytes"])
        told = *sizes, f"{blocks - server['free_blocks']:,} of {blocks:,}", f"{server['cached_blocks']:,}"
    return server["id"], _device(server)[0], *told, _span(server["since_s"])


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _gpus(members: Iterable[Mapping[str, Json]]) -> list[str]:
    devices = sorted(_device(each) for each in members)
    return [f"{name}: {', '.join(ids)}" for name, ids in _listed((name, id_) for id_, name in devices if name)]


def _versions(members: Iterable[Mapping[str, Json]]) -> list[str]:
    """Return the version of all members, or versions with their members if different."""
    found = _listed((each["version"], each["id"]) for each in members)
    return [f"version {version}" + (f": {', '.join(ids)}" if len(found) > 1 else "") for version, ids in found]


def _listed(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Return the second values of each first value, each once."""
    found: dict[str, dict[str, None]] = {}
    for first, second in pairs:
        found.setdefault(first, {})[second] = None
    return [(first, [*seconds]) for first, seconds in found.items()]


def _device(member: Mapping[str, Json]) -> tuple[str, str]:
    """Return the device and the name of a GPU, without the UUID at the end."""
    device, _, rest = member["device"].partition(" ")
    return device, rest.rpartition(" ")[0]


def _span(seconds: float) -> str:
    """Format a time in its two largest units."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86_400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{seconds:.0f} s"
