"""Whoever writes never waits, and what is lost is counted where it is missing."""

import os
from pathlib import Path

import pytest

from common.base import background_writer
from common.base.background_writer import BackgroundWriter


def _lost(num_lost: int) -> str:
    return f"({num_lost} lost)\n"


def test_lines_beyond_the_bound_are_dropped_until_somebody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_writer, "MAX_QUEUED_BYTES", 3 << 20)  # more than a pipe holds
    monkeypatch.setattr(background_writer, "FLUSH_S", 0.0)
    read, write = os.pipe()
    line = "x" * ((1 << 20) - 1) + "\n"
    with open(read, encoding="ascii") as reader:
        writer = BackgroundWriter(write, _lost)
        for _ in range(5):
            writer.write(line)
            writer.flush()
        assert reader.readline() == line
        monkeypatch.setattr(background_writer, "FLUSH_S", 60.0)
        rest = [reader.readline() for _ in range(3)]
        writer.write("read\n")
        writer.flush()
        os.close(write)
        rest += reader.readlines()
    assert sorted(rest) == sorted([line, line, "(2 lost)\n", "read\n"])


def test_a_line_cut_by_an_error_is_ended_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_left, write = 12, os.write

    def full(descriptor: int, data: bytes) -> int:
        nonlocal num_left
        if descriptor != file.fileno():
            return write(descriptor, data)
        if not num_left:
            raise OSError(28, "No space left on device")
        num_written = write(descriptor, data[:num_left])
        num_left -= num_written
        return num_written

    monkeypatch.setattr(os, "write", full)
    with (tmp_path / "log").open("wb") as file, BackgroundWriter(file.fileno(), _lost) as writer:
        for line in ("first\n", "second, which is cut\n", "third, of which nothing is there\n"):
            writer.write(line)
        writer.flush()
        num_left = 1 << 20
        writer.write("fourth\n")
        writer.flush()
        writer.write("fifth\n")
    assert (tmp_path / "log").read_text() == "first\nsecond\nfourth\n(2 lost)\nfifth\n"


def test_a_descriptor_that_does_not_block_is_waited_for() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    text = "y" * (1 << 20) + "\n"
    with open(read, encoding="ascii") as reader:
        writer = BackgroundWriter(write, _lost)
        writer.write(text)
        assert reader.readline() == text
    os.close(write)


def test_who_reads_no_longer_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with BackgroundWriter(write, _lost) as writer:
        writer.write("for nobody\n")
    os.close(write)
