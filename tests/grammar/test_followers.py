"""Grammars in processes of their own: everybody gets an answer, whatever a grammar or its library does."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from common.grammar import followers as followers_module
from common.grammar import pool as pool_module
from common.grammar.follower import Follower, Outcome
from common.grammar.followers import Followers, make_followers
from common.grammar.server_process import ServerProcess
from tests.grammar.hostile_server import ABORT, BUG, DIE, DIE_ONCE, SPIN, STOP
from tests.support.guided import DEMO_MODEL

VOCAB = 2048
ANYTHING = json.dumps({"grammars": [{"lark_grammar": r"start: /(.|\n)*/"}]})
DIGITS = json.dumps({"grammars": [{"lark_grammar": "start: /[0-9]{40}/"}]})


def only(character: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{character}{{40}}/"}]})


def allowed(outcome: Outcome) -> list[int]:
    assert outcome.mask is not None, outcome
    return np.flatnonzero(np.unpackbits(outcome.mask.view(np.uint8), bitorder="little")).tolist()


def outcomes(followers: Followers[int], num: int) -> dict[int, Outcome]:
    """So many, waited for."""
    found: list[tuple[int, Outcome]] = []
    deadline_s = time.monotonic() + 60
    while len(found) < num:
        found += followers.take()
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.001)
    assert len(dict(found)) == len(found)
    return dict(found)


def processes(server: int) -> list[int]:
    """Children of the server that live."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii").split()
    return [pid for pid in map(int, children) if "Z" not in _state(pid)]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2][:1]
    except FileNotFoundError:
        return "Z"


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.001)


def shorten_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers_module, "DEADLINE_S", 0.4)
    monkeypatch.setattr(followers_module, "CHECK_S", 0.02)


class Servers:
    """Starts servers and keeps them."""

    def __init__(self) -> None:
        self.started: list[ServerProcess] = []

    def __call__(self) -> ServerProcess:
        self.started.append(ServerProcess(DEMO_MODEL, VOCAB, "tests.grammar.hostile_server"))
        return self.started[-1]


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def followers(servers: Servers) -> Iterator[Followers[int]]:
    followers = Followers[int](servers)
    yield followers
    followers.close()


def test_many_texts_are_followed_side_by_side(followers: Followers[int]) -> None:
    texts, rng = {i: Follower(DIGITS) for i in range(50)}, random.Random(5)
    lengths = dict.fromkeys(texts, 0)
    for i, follower in texts.items():
        followers.ask(i, follower, ())
    while followers.num_pending:
        for i, outcome in outcomes(followers, 1).items():
            if not outcome.is_over:
                lengths[i] += 1
                followers.ask(i, texts[i], [rng.choice(allowed(outcome))])
    assert set(lengths.values()) == {40}, "a digit is a token"


def test_a_tokenizer_that_cannot_be_read_is_a_reason_for_every_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_bytes((DEMO_MODEL / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    followers: Followers[int] = make_followers(tmp_path, 2048)
    for i in range(5):
        followers.ask(i, Follower(DIGITS), ())
    found = outcomes(followers, 5)
    assert len(found) == 5 and followers.num_pending == 0
    assert all("error loading tokenizer" in outcome.problem and outcome.is_workers for outcome in found.values())
    assert "can follow no grammars" in caplog.text
    followers.ask(6, Follower(DIGITS), ())
    assert "error loading tokenizer" in outcomes(followers, 1)[6].problem
    followers.close()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("token_id", "reason"), [(SPIN, "too much CPU time"), (ABORT, "too much memory"), (BUG, "exit status 1")]
)
def test_what_ends_its_process_ends_one_text_with_the_reason(
    followers: Followers[int], token_id: int, reason: str
) -> None:
    """Beside it are a text of the same grammar that waits behind it, another that does not, and one of another."""
    texts = {name: Follower(ANYTHING) for name in range(3)} | {3: Follower(only("x"))}
    for name, text in texts.items():
        followers.ask(name, text, ())
    begun = {name: allowed(outcome) for name, outcome in outcomes(followers, 4).items()}
    followers.ask(0, texts[0], [token_id])
    followers.ask(1, texts[1], [5])
    followers.ask(3, texts[3], [min(begun[3])])
    found = outcomes(followers, 3)
    assert reason in found[0].problem and not found[1].problem
    assert set(allowed(found[1])) and allowed(found[3])
    followers.ask(2, texts[2], [5])
    assert allowed(outcomes(followers, 1)[2]) == allowed(found[1]), "it goes on in another process"


def test_one_that_says_nothing_is_ended(
    followers: Followers[int], servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, text = Follower(ANYTHING), Follower(only("x"))
    followers.ask(0, stuck, ())
    followers.ask(1, text, ())
    found = outcomes(followers, 2)
    followers.ask(0, stuck, [STOP])
    until(lambda: any(_state(pid) == "T" for pid in processes(servers.started[0].pid)))
    shorten_deadline(monkeypatch)
    assert "said nothing" in outcomes(followers, 1)[0].problem
    monkeypatch.undo()
    followers.ask(1, text, [min(allowed(found[1]))])
    assert allowed(outcomes(followers, 1)[1])
    until(lambda: all(_state(pid) != "T" for pid in processes(servers.started[0].pid)))
    assert len(servers.started) == 1


def test_nobody_is_late_while_nobody_listens(
    followers: Followers[int], servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Follower(ANYTHING)
    followers.ask(0, text, ())
    outcomes(followers, 1)
    shorten_deadline(monkeypatch)
    paused = processes(servers.started[0].pid)
    for pid in paused:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(_state(pid) == "T" for pid in paused))
    followers.ask(0, text, [5])
    time.sleep(0.5)
    assert not followers.take()
    for pid in paused:
        os.kill(pid, signal.SIGCONT)
    assert allowed(outcomes(followers, 1)[0])
    assert {*paused} <= {*processes(servers.started[0].pid)}


def test_who_is_not_to_blame_goes_on_behind_the_outputs(followers: Followers[int]) -> None:
    """Of 40 characters some are told: of a process that began with none more could follow, or it took other ones."""
    text, num_tokens = Follower(only("[x-z]")), 0
    followers.ask(0, text, ())
    outcome = outcomes(followers, 1)[0]
    while not outcome.is_over:
        if num_tokens in (5, 11):
            for pid in processes(followers_server(followers)):
                os.kill(pid, signal.SIGKILL)
        followers.ask(0, text, [max(allowed(outcome))])
        outcome = outcomes(followers, 1)[0]
        assert not outcome.problem
        num_tokens += 1
    assert 0 < num_tokens <= 40


def test_a_text_whose_processes_are_ended_again_and_again_ends(followers: Followers[int]) -> None:
    text = Follower(ANYTHING)
    for token_ids in ((), [5], [DIE_ONCE]):
        followers.ask(0, text, token_ids)
        assert allowed(outcomes(followers, 1)[0])
    followers.ask(0, text, [DIE])
    assert "3 processes in a row ended" in outcomes(followers, 1)[0].problem


@pytest.mark.medium
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_its_server_all_goes_on_under_another(
    followers: Followers[int], servers: Servers, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {name: Follower(grammar) for name, grammar in enumerate((DIGITS, DIGITS, only("x")))}
    for name, text in texts.items():
        followers.ask(name, text, ())
    begun = outcomes(followers, 3)
    ended = processes(servers.started[0].pid)
    os.kill(servers.started[0].pid, number)
    if number == signal.SIGSTOP:  # which is noticed when it does not tell of the end of others
        shorten_deadline(monkeypatch)
        for pid in ended:
            os.kill(pid, signal.SIGKILL)
    until(lambda: all(_state(pid) == "Z" for pid in ended))
    for name in range(3):
        followers.ask(name, texts[name], [min(allowed(begun[name]))])
    assert all(allowed(outcome) for outcome in outcomes(followers, 3).values())
    assert len(servers.started) == 2


def test_a_server_that_ends_while_nobody_asks_is_no_zombie(followers: Followers[int], servers: Servers) -> None:
    text = Follower(DIGITS)
    followers.ask(0, text, ())
    [begun] = outcomes(followers, 1).values()
    ended = servers.started[0].pid
    os.kill(ended, signal.SIGKILL)
    until(lambda: not followers.take() and not Path(f"/proc/{ended}").exists())
    followers.ask(0, text, [min(allowed(begun))])
    assert allowed(outcomes(followers, 1)[0])


def test_the_end_leaves_nobody(servers: Servers) -> None:
    followers = Followers[int](servers)
    followers.ask(0, Follower(ANYTHING), ())
    outcomes(followers, 1)
    [server] = servers.started
    ended = processes(server.pid)
    assert ended
    followers.close()
    assert all(_state(pid) == "Z" for pid in [server.pid, *ended])
    followers.close()


def test_a_server_that_still_loads_ends_at_once(servers: Servers) -> None:
    followers = Followers[int](servers)
    followers.begin()
    followers.close()
    assert _state(servers.started[0].pid) == "Z"


def test_more_grammars_than_processes_take_turns(
    followers: Followers[int], servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MAX_PROCESSES", 3)
    monkeypatch.setattr(followers_module, "MAX_PLACES", 4)
    texts = {i: Follower(only(chr(ord("a") + i))) for i in range(9)}
    masks = dict[int, list[int]]()
    for _ in range(3):
        for i, text in texts.items():
            followers.ask(i, text, [masks[i][0]] if i in masks else ())
        masks = {i: allowed(outcome) for i, outcome in outcomes(followers, 9).items()}
    assert len({tuple(mask) for mask in masks.values()}) == 9
    until(lambda: len(processes(servers.started[0].pid)) <= 3)


def test_processes_whose_texts_have_ended_serve_other_grammars(followers: Followers[int], servers: Servers) -> None:
    seen = set[int]()
    for i in range(30):
        followers.ask(i, Follower(json.dumps({"grammars": [{"lark_grammar": f"start: /{i}[ab]/"}]})), ())
        assert allowed(outcomes(followers, 1)[i])
        seen |= set(processes(servers.started[0].pid))
    assert len(seen) <= pool_module.KEPT_IDLE + 3


def test_texts_of_one_grammar_share_few_processes(followers: Followers[int], servers: Servers) -> None:
    texts = {i: Follower(DIGITS) for i in range(60)}
    for i, text in texts.items():
        followers.ask(i, text, ())
    assert all(allowed(outcome) for outcome in outcomes(followers, 60).values())
    assert len(processes(servers.started[0].pid)) <= pool_module.MAX_OF_GRAMMAR + 1


def followers_server(followers: Followers[int]) -> int:
    assert followers._pool is not None
    return followers._pool.server.pid


def test_a_server_whose_worker_is_gone_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    server = ServerProcess(DEMO_MODEL, VOCAB)
    os.close(server._records)
    assert server._process.wait(60) == 0
    server._control.close()
    assert capfd.readouterr().err == ""
