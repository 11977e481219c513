import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.base import trace_file
from common.base.errors import ConfigError
from common.base.trace_events import Tracer
from common.base.trace_file import Process, TraceFile

WORKER = Process("decode", "a/b 1", 0x2F)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_says_whose_it_is_and_has_every_line(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "new" / "dir", WORKER, 1 << 20)
    tracer = Tracer(file.write)
    tracer.slice(1, "turn", 1.0, 1.5, {"rows": 3, "said": '"\n'})
    file.close()
    assert file.path == tmp_path / "new" / "dir" / "decode.a_b_1.2f.jsonl"
    assert file.path.stat().st_mode & 0o777 == 0o600
    header, *slices = lines(file.path)
    assert (header["role"], header["id"], header["epoch"]) == WORKER
    args = {"rows": 3, "said": '"\n'}
    assert slices == [{"track": 1, "name": "turn", "begin_ns": 10**9, "dur_ns": 5 * 10**8, "args": args}]


def test_of_a_long_trace_the_last_part_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(tmp_path, WORKER, 1 << 16)
    for number in range(20_000):
        file.write(f'{{"n":{number}}}\n')
    file.close()
    paths = sorted(tmp_path.iterdir(), key=lambda path: path.name.endswith(".older.jsonl"), reverse=True)
    assert len(paths) == 2
    assert sum(path.stat().st_size for path in paths) <= 1 << 16
    kept = [event["n"] for path in paths for event in lines(path)[1:]]
    assert kept == list(range(20_000 - len(kept), 20_000))
    assert len(kept) > 2_000, "half of it is"
    assert caplog.text.count("its older parts are dropped from now on") == 1


def test_of_a_process_that_starts_again_and_again_the_last_starts_are_kept(tmp_path: Path) -> None:
    others = [tmp_path / "decode.a_b_10.1.jsonl", tmp_path / "prefill.a_b_1.1.jsonl", tmp_path / "notes.txt"]
    for path in others:
        path.write_text("")
    for epoch in range(1, 8):
        TraceFile(tmp_path, WORKER._replace(epoch=epoch), 1 << 20).close()
        (tmp_path / f"decode.a_b_1.{epoch:x}.older.jsonl").write_text("")
        for path in tmp_path.glob(f"decode.a_b_1.{epoch:x}.*"):
            os.utime(path, (1e9 + epoch, 1e9 + epoch))
    kept = {path.name for path in tmp_path.iterdir()} - {path.name for path in others}
    assert kept == {f"decode.a_b_1.{epoch}{part}.jsonl" for epoch in (4, 5, 6, 7) for part in ("", ".older")}
    assert all(path.exists() for path in others)


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = TraceFile(tmp_path, WORKER, 1 << 20)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    file.write("{}\n")
    file.close()
    file.write("{}\n")
    assert "the trace ends here, nothing else does" in caplog.text
    assert len(lines(file.path)) == 1


def test_who_starts_on_a_full_disk_serves_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    file = TraceFile(tmp_path, WORKER, 1 << 20)
    file.write("{}\n")
    file.close()
    assert "No space left on device" in caplog.text
    assert not file.path.stat().st_size
    assert not [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and link.readlink() == file.path]


def test_a_disk_that_is_too_slow_loses_lines_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_file, "MAX_QUEUED_LINES", 10)
    monkeypatch.setattr(trace_file, "FLUSH_S", 60.0)
    file = TraceFile(tmp_path, WORKER, 1 << 20)
    for _ in range(15):
        file.write("{}\n")
    file.close()
    assert len(lines(file.path)) == 11
    assert "lacks 5 lines" in caplog.text


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_directory_that_cannot_be_had_is_a_wrong_setting(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"trace\.dir = .*{name}.*; name a directory"):
        TraceFile(tmp_path / name, WORKER, 1 << 20)


def test_nobody_s_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "decode.a_b_1.2f.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="File exists"):
        TraceFile(tmp_path, WORKER, 1 << 20)


def test_what_a_killed_process_wrote_can_be_read(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, time
from common.base.trace_file import Process, TraceFile
file = TraceFile(pathlib.Path({str(tmp_path)!r}), Process("decode", "d", 1), 1 << 20)
for _ in range(1000):
    file.write("{{}}\\n")
while file._lines:
    time.sleep(0.01)
print("queued", flush=True)
os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (-9, "queued\n")
    assert len(lines(tmp_path / "decode.d.1.jsonl")) >= 1


def test_the_log_says_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        TraceFile(tmp_path, WORKER, 1 << 20).close()
    assert f"tracing to {tmp_path}" in caplog.text
