import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from common.serving.worker import gpu_lease
from common.serving.worker.gpu_lease import lease_gpu, placed
from common.settings.config import Config, WorkerSection
from common.settings.memory_sections import KVSection
from common.wire.messages.worker import Role

ROOT = Path(__file__).parents[3]
TAKER = """
import sys
from pathlib import Path
from common.serving.worker.gpu_lease import lease_gpu
from common.wire.messages.worker import Role
print(lease_gpu(Path(sys.argv[1]), Role.DECODE, ["a", "b"]).index, flush=True)
sys.stdin.read()
"""


def test_each_takes_the_gpu_with_the_fewest_of_its_role_and_of_those_the_idlest(tmp_path: Path) -> None:
    roles = [Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE]
    leases = [lease_gpu(tmp_path, role, ["a", "b"]) for role in roles]
    assert [each.index for each in leases] == [0, 1, 1, 0, 0, 1]
    assert [each.number for each in leases] == [1, 1, 1, 1, 2, 2]


@pytest.mark.medium
def test_a_place_is_free_when_its_process_is_over(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        assert lease_gpu(tmp_path, Role.DECODE, ["a", "b"]).index == 1
        process.kill()
        process.wait(60)
    assert lease_gpu(tmp_path, Role.DECODE, ["a", "b"]).index == 0


def test_workers_that_start_at_once_do_not_meet_on_one_gpu(tmp_path: Path) -> None:
    with ThreadPoolExecutor(12) as pool:
        leases = list(pool.map(lambda _: lease_gpu(tmp_path, Role.DECODE, ["a", "b", "c"]), range(12)))
    assert Counter(each.index for each in leases) == {0: 4, 1: 4, 2: 4}


def test_who_lets_go_of_a_place_leaves_it_to_the_next(tmp_path: Path) -> None:
    first, _ = (lease_gpu(tmp_path, Role.DECODE, ["a"]) for _ in range(2))
    os.close(first.descriptor)
    assert lease_gpu(tmp_path, Role.DECODE, ["a"]).number == 2
    assert len(list(tmp_path.glob("gpu-a.decode-*"))) == 2, "no more files than there were workers at once"


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(gpu_lease, "describe_device", lambda device: (str(device), f"uuid-{device.index}"))


def test_a_worker_that_may_choose_takes_a_gpu_and_says_where_memory_will_be_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend_gpus(monkeypatch, 2)
    config = Config(worker=WorkerSection(memory_socket=f"{tmp_path}/"), kv=KVSection(decode_sharers=1))
    assert [placed(config, Role.DECODE).worker.device for _ in range(2)] == ["cuda:0", "cuda:1"]
    assert not caplog.records
    assert placed(config, Role.DECODE).worker.device == "cuda:0"
    assert "give all workers kv.decode_sharers = 2" in caplog.text


@pytest.mark.parametrize(
    ("num_gpus", "section"),
    [(0, {}), (2, {"device": "cuda:1"}), (2, {"device": "cpu"}), (2, {"memory_socket": "/run/one.sock"})],
)
def test_who_has_no_choice_stays_where_it_is(
    num_gpus: int, section: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, num_gpus)
    config = Config(worker=WorkerSection(**{"memory_socket": f"{tmp_path}/"} | section))
    assert placed(config, Role.PREFILL) == config
    assert not list(tmp_path.iterdir())
