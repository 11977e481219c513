"""`common.grammar.follower_server` under a library in which some tokens do what no test can wait for, or provoke."""

import os
import signal
import time
from collections.abc import Sequence

from common.grammar import follower_process, follower_server
from common.grammar.records import Kind, Masks
from common.grammar.text_matcher import TextMatcher

SPIN, STOP, ABORT, BUG, DIE, DIE_ONCE = range(40, 46)


class HostileMatcher(TextMatcher):
    """Does what a token says that comes alone, as it does not on a replay behind others; DIE means it."""

    def follow(self, token_ids: Sequence[int], masks: Masks, place: int) -> tuple[Kind, str]:
        match token_ids:
            case [token_id] if token_id == SPIN:
                while True:
                    pass
            case [token_id] if token_id == STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(60)  # the signal may stop another thread first
            case [token_id] if token_id == ABORT:
                os.abort()
            case [*_, token_id] if token_id == DIE:
                os.kill(os.getpid(), signal.SIGKILL)
            case [token_id] if token_id == BUG:
                raise RuntimeError("a bug")
            case [token_id] if token_id == DIE_ONCE:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().follow(token_ids, masks, place)


if __name__ == "__main__":
    vars(follower_process)["TextMatcher"] = HostileMatcher
    follower_server.main()
