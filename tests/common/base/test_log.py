"""Logging goes where it is read, and holds nobody up where it is not."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.base.log import StartLog, formatter

ROOT = Path(__file__).parents[3]

FLOOD = """
import logging, sys
from common.base import background_writer
from common.base import log
background_writer.MAX_QUEUED_BYTES = 10_000
log.setup_logging("flood")
for number in range(5000):
    logging.info("line %d %s", number, "x" * 100)
sys.stdout.write("logged"); sys.stdout.flush()
logging.getLogger().handlers[0].flush()
logging.info("the last line")
"""


@pytest.mark.medium
def test_lines_that_nobody_reads_are_dropped_counted_and_hold_up_neither_the_loop_nor_the_end() -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-c", FLOOD]
    ran = subprocess.run(command, cwd=ROOT, input=b"", stdout=subprocess.PIPE, stderr=writer, timeout=100, check=True)
    os.close(writer)
    os.close(reader)
    assert ran.stdout == b"logged"


def test_the_last_lines_are_written_and_what_was_dropped_is_counted() -> None:
    patient = FLOOD.replace("log.setup", "background_writer.FLUSH_S = 20.0\nlog.setup")  # the reader may be slow, too
    command = [sys.executable, "-c", patient]
    ran = subprocess.run(command, cwd=ROOT, input=b"", capture_output=True, timeout=100, check=True)
    lines = ran.stderr.decode().splitlines()
    shown = [line for line in lines if " I [flood] " in line]
    dropped = [int(line.split("] ")[1].split()[0]) for line in lines if "lines were dropped here" in line]
    assert lines[-1].endswith("I [flood] the last line")
    assert len(shown) + sum(dropped) == 5001


def test_a_line_for_programs_is_a_json_object_whatever_stands_in_it() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError as error:
        problem = (ValueError, error, error.__traceback__)
    fields = {"fields": {"request_id": "cmpl-1", "ttft_ms": None}}
    record = logging.LogRecord("name", logging.WARNING, "path", 1, "%s\n\u2028%d", ("schön", 3), problem)
    vars(record).update(fields)
    line = formatter("prefill-0", "json").format(record)
    assert line.isascii() and "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["process"], told["message"]) == ("WARNING", "prefill-0", "schön\n\u20283")
    assert (told["request_id"], told["ttft_ms"]) == ("cmpl-1", None)
    assert told["traceback"].endswith("ValueError: no\nway") and told["time"].endswith("Z")


PARTS = """
import logging, time
from common.base.log import StartLog, setup_logging
start = StartLog()
start.ended("imports")
time.sleep(0.3)
start.ended("sleep")
setup_logging("prefill-0", form="json")
start.report(logging.getLogger())
"""


def test_the_parts_of_a_start_fill_the_time_since_the_process_was_forked() -> None:
    before_s = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", PARTS], cwd=ROOT, capture_output=True, timeout=100, check=True)
    after_s = time.monotonic()
    line = json.loads(ran.stderr)
    start, tick_s = line["start"], 0.02
    assert before_s - tick_s <= start["began_s"] <= after_s
    assert [part for part, _ in start["parts"]] == ["imports", "sleep"]
    assert start["parts"][1][1] >= 0.3
    assert 0.0 < start["cpu_s"] <= start["parts"][0][1] + 0.3, "a sleep takes none"
    assert start["began_s"] + sum(seconds for _, seconds in start["parts"]) <= after_s + tick_s
    assert line["process"] == "prefill-0" and "imports 0." in line["message"]


def test_a_process_that_was_forked_begins_at_its_fork_not_with_its_parent() -> None:
    forked_s = time.monotonic()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(StartLog().began_s).encode())
        os._exit(0)
    os.waitpid(child, 0)
    began_s = float(os.read(read, 100))
    os.close(read)
    os.close(write)
    assert forked_s - 0.02 <= began_s <= time.monotonic()
