"""Conversations in order: each message with the results of the functions that it calls."""

from collections.abc import Iterable

from common.base.json_file import JsonObject


def with_results(messages: Iterable[JsonObject]) -> list[tuple[JsonObject, list[JsonObject]]]:
    """Return each message with the results of its calls: messages of tools behind a message of the assistant.

    Results that follow no call stay messages of their own, for the template to refuse or to write.
    """
    found: list[tuple[JsonObject, list[JsonObject]]] = []
    for message in messages:
        if message.get("role") == "tool" and found and found[-1][0].get("tool_calls"):
            found[-1][1].append(message)
        else:
            found.append((message, []))
    return found
