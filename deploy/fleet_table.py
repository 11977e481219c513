"""Who serves, as a table for people: made of the router's GET /health."""

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.tables import BLANK, aligned, printable

COLUMNS = ("ROLE", "NAME", "DEVICE", "STATE", "LOAD", "KV BLOCKS", "VERSION", "SINCE")


def fleet_table(health: Mapping[str, Any]) -> str:
    """A line for each worker and memory server, below what is wrong, and who changed roles lately.

    Raises KeyError for another body.
    """
    rows = [_worker(role, each) for role, members in health["workers"].items() for each in _by_name(members)]
    rows += map(_memory_server, _by_name(health["memory_servers"]))
    failed = [path for path in health["kv_paths"] if path["error"]]
    problems = [f"KV path {path['prefill']} -> {path['decode']}: {path['error']}" for path in failed]
    changes = [f"{_span(each['ago_s'])} ago, {each['state']}: {each['reason']}" for each in health["role_changes"]]
    below = map(printable, [*health["missing"], *problems, *changes])
    return "\n".join([*aligned([COLUMNS, *rows]), *below])


def _by_name(members: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(members, key=lambda each: str(each["id"]))


def _worker(role: str, worker: Mapping[str, Any]) -> tuple[str, ...]:
    standby = worker["standby"]
    state = "leaving" if worker["draining"] else "standby" if standby and standby["in_reserve"] else "serving"
    if role == "prefill":
        load = f"{worker['outstanding_prompt_tokens']:,} tokens to compute"
    else:
        load = f"{worker['assigned_sequences']} of {worker['most_sequences']} sequences"
    used = BLANK if worker["used_blocks"] is None else f"{worker['used_blocks']:,} in use"
    return role, worker["id"], _device(worker), state, load, used, worker["version"], _span(worker["since_s"])


def _memory_server(server: Mapping[str, Any]) -> tuple[str, ...]:
    load, blocks = BLANK, BLANK
    if server["blocks"] is not None:
        load = f"{server['weights_bytes'] / 1e9:.2f} GB of weights, {server['free_bytes'] / 1e9:.1f} GB left"
        used = server["blocks"] - server["free_blocks"]
        blocks = f"{used:,} of {server['blocks']:,} in use, {server['cached_blocks']:,} cached"
    return "memory", server["id"], _device(server), "serving", load, blocks, server["version"], _span(server["since_s"])


def _device(member: Mapping[str, Any]) -> str:
    """Without the UUID of a GPU, which is its last word."""
    words = member["device"].split()
    return " ".join(words[:-1]) if len(words) > 1 else member["device"]


def _span(seconds: float) -> str:
    """The two largest units."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86_400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{seconds:.0f} s"
