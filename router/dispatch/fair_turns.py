"""The place of a prompt in the queue: first come, first served for a client, and fair between clients.

Start-time fair queueing (Goyal, Vin and Cheng, "Start-Time Fair Queueing", SIGCOMM 1996) over prompt tokens, the
cost that Sheng et al. count for a client in "Fairness in Serving Large Language Models" (OSDI 2024). Time is counted
in tokens that each client with something queued has been served, as if all were served at once. A prompt's
turn is that time, or where its client's prompts before it end if that is later. So a client that sends much waits
behind itself, one that comes anew starts with the others, and what somebody did not use is not saved up.
"""

from collections import OrderedDict

MAX_CLIENTS = 10_000
"""Of whom it is remembered how far their prompts reach; beyond it who came least recently starts anew."""


class Turns:
    """Gives turns and knows what time it is."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: OrderedDict[str, float] = OrderedDict()  # where each client's prompts end

    def next(self, client: str, num_tokens: int) -> int:
        """The turn of a new prompt."""
        turn = max(self._now, self._ends.get(client, 0.0))
        self._ends[client] = turn + num_tokens
        self._ends.move_to_end(client)
        if len(self._ends) > MAX_CLIENTS:
            self._ends.popitem(last=False)
        return int(turn)

    def serve(self, num_tokens: int, num_clients: int, first_turn: int) -> None:
        """A prompt leaves for a worker, `num_clients` having something queued, the first of which has `first_turn`."""
        self._now = max(self._now, first_turn) + num_tokens / num_clients

    def forgive(self) -> None:
        """Nobody waits: nobody is ahead of others."""
        self._ends.clear()
