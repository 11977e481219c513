"""How much memory there is, whoever limits it."""

from pathlib import Path

import pytest

from common.memory.base.host_ram import available_bytes, ram_bytes

GB = 1 << 30


def machine(root: Path, files: dict[str, object]) -> Path:
    """One of 64 GiB, 40 of them available."""
    meminfo = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))
    return root


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/"},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": GB},
        {"proc/self/cgroup": "4:cpu:/a\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": GB},
    ],
)
def test_without_a_limit_it_is_the_machine_s(files: dict[str, object], tmp_path: Path) -> None:
    root = machine(tmp_path, files)
    assert (ram_bytes(root), available_bytes(root)) == (64 * GB, 40 * GB)


def test_the_least_limit_counts_and_what_files_take_can_be_had(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/slice/ours"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/ours\n",
            f"{group}/memory.max": 20 * GB,
            f"{group}/memory.current": 12 * GB,
            f"{group}/memory.stat": f"anon 1\ninactive_file {5 * GB}\n",
            "sys/fs/cgroup/slice/memory.max": 30 * GB,
            "sys/fs/cgroup/slice/memory.current": 29 * GB,
        },
    )
    assert ram_bytes(root) == 20 * GB
    assert available_bytes(root) == 1 * GB


def test_a_container_sees_its_own_limit_at_the_top(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "9:memory:/docker/abc\n",
        f"{top}/memory.limit_in_bytes": 8 * GB,
        f"{top}/memory.usage_in_bytes": 9 * GB,
    }
    root = machine(tmp_path, files)
    assert (ram_bytes(root), available_bytes(root)) == (8 * GB, 0)
