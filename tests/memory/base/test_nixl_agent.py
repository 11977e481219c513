"""Transports of UCX on hosts with NVIDIA's GPUs, where NIXL refuses a choice without means to copy GPU memory."""

from pathlib import Path

import pytest

from common.memory.base.nixl_agent import with_copies

GPU, AUDIO, NETWORK = ("0x10de\n", "0x030200\n"), ("0x10de\n", "0x040300\n"), ("0x15b3\n", "0x020700\n")


@pytest.mark.parametrize(
    ("devices", "transports", "told"),
    [
        ((GPU,), "tcp", "tcp,cuda_copy"),
        ((NETWORK, GPU), "tcp,sm", "tcp,sm,cuda_copy"),
        ((GPU,), "rc,cuda_copy", "rc,cuda_copy"),
        ((GPU,), "rc,cuda", "rc,cuda"),
        ((NETWORK, AUDIO, ("0x10de\n", None)), "tcp", "tcp"),
        ((), "tcp", "tcp"),
    ],
)
def test_hosts_with_gpus_can_copy_their_memory(
    devices: tuple[tuple[str, str | None], ...], transports: str, told: str, tmp_path: Path
) -> None:
    for number, files in enumerate(devices):
        (tmp_path / str(number)).mkdir()
        for name, text in zip(("vendor", "class"), files, strict=True):
            if text is not None:
                (tmp_path / str(number) / name).write_text(text)
    assert with_copies(transports, tmp_path) == told


def test_a_host_without_a_list_of_devices_has_no_gpu(tmp_path: Path) -> None:
    assert with_copies("tcp", tmp_path / "missing") == "tcp"
