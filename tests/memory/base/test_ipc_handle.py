"""CUDA IPC handles keep their bytes on their way between processes, whatever `cuda.bindings` calls them."""

import pytest

from common.memory.base import ipc_handle


def test_a_handle_has_the_bytes_that_it_was_made_of() -> None:
    data = bytes(range(64))
    assert ipc_handle.to_bytes(ipc_handle.from_bytes(data)) == data


@pytest.mark.parametrize("data", [b"", b"short", bytes(65)])
def test_other_lengths_are_refused_before_memory_is_touched(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"a CUDA IPC handle of {len(data)} bytes, not 64"):
        ipc_handle.from_bytes(data)
