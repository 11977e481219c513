"""A GGUF file is read as the package `gguf` wrote it, and a damaged or hostile one is refused within bounded memory."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.base.errors import ConfigError
from common.checkpoint.gguf import header
from common.checkpoint.gguf.header import read_header
from common.checkpoint.gguf.model_file import read_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def file_of(entries: bytes, num_entries: int, tensors: bytes = b"", num_tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + entries + tensors


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, sides: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, kind, offset)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A file with values and tensors of many types."""
    path = tmp_path / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.u32", 7)
    writer.add_int64("a.i64", -5)
    writer.add_float32("a.f32", 1e-6)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "Ünicode 🙂")
    writer.add_array("a.texts", ["x", "", "三"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.flags", [True, False])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.arange(4, dtype=np.float16))
    blocks = gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_and_tensors_are_those_that_were_written(whole: Path) -> None:
    found = read_header(whole)
    assert {key: value for key, value in found.metadata.items() if key.startswith("a.")} == {
        "a.u32": 7, "a.i64": -5, "a.f32": np.float32(1e-6), "a.flag": True, "a.text": "Ünicode 🙂",
        "a.texts": ("x", "", "三"), "a.numbers": (1, -2, 3), "a.flags": (True, False),
    }  # fmt: skip
    reader = {each.name: each for each in gguf.GGUFReader(whole).tensors}
    assert [*found.tensors] == [*reader]
    for name, stored in found.tensors.items():
        theirs = reader[name]
        assert stored.shape == tuple(int(side) for side in reversed(theirs.shape))
        assert (stored.begin, stored.num_bytes) == (theirs.data_offset, theirs.n_bytes)
        assert whole.read_bytes()[stored.begin : stored.begin + stored.num_bytes] == theirs.data.tobytes()
    model = read_gguf(whole)
    assert model.decimal("a.f32") == 1e-6, "as config.json would have it"


def test_every_shorter_file_is_refused(whole: Path) -> None:
    content = whole.read_bytes()
    needed = max(each.begin + each.num_bytes for each in read_header(whole).tensors.values())
    for length in [*range(0, 600, 7), needed - 1]:
        whole.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"whole\.gguf"):
            read_header(whole)


@given(place=st.integers(4, 700), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_harmless(whole: Path, place: int, byte: int) -> None:
    content = bytearray(whole.read_bytes())
    content[place % len(content)] = byte
    damaged = whole.with_name("damaged.gguf")
    damaged.write_bytes(content)
    try:
        found = read_header(damaged)
    except ConfigError:
        return
    assert all(each.begin + each.num_bytes <= len(content) for each in found.tensors.values())


HUGE = 1 << 62
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "begins with b''"),
    "another kind of file": (b"PK\3\4" + bytes(40), r"begins with b'PK\\x03\\x04'"),
    "version 1": (file_of(b"", 0, version=1), "GGUF version 1, supported are 2 and 3; convert"),
    "big endian": (file_of(b"", 0, version=3 << 24), "big endian; serve a file written for little endian"),
    "entries": (file_of(b"", HUGE), "no room for"),
    "tensors": (file_of(b"", 0, num_tensors=HUGE), "no room for"),
    "a key": (file_of(struct.pack("<Q", HUGE) + bytes(9), 1), "ends after"),
    "a text": (file_of(entry("k", 8, struct.pack("<Q", HUGE)), 1), "ends after"),
    "a text of many": (file_of(entry("k", 9, struct.pack("<IQQ", 8, 1, HUGE)), 1), "ends after"),
    "numbers": (file_of(entry("k", 9, struct.pack("<IQ", 4, HUGE)), 1), "no room for"),
    "texts": (file_of(entry("k", 9, struct.pack("<IQ", 8, HUGE)), 1), "no room for"),
    "arrays inside an array": (file_of(entry("k", 9, struct.pack("<IQ", 9, 1)), 1), "unknown type 9"),
    "an unknown value": (file_of(entry("k", 13, bytes(8)), 1), "unknown type 13"),
    "a key twice": (file_of(entry("k", 0, b"\1") * 2, 2), "has 'k' twice"),
    "an alignment": (file_of(entry("general.alignment", 4, bytes(4)), 1), "general.alignment = 0"),
    "dimensions": (file_of(b"", 0, tensor("t", (1,) * 5), 1), "5 dimensions"),
    "an empty side": (file_of(b"", 0, tensor("t", (4, 0)), 1), r"'t' is \[0, 4\]"),
    "a long side": (file_of(b"", 0, tensor("t", (1 << 63,)), 1), "'t' is"),
    "sides that overflow": (file_of(b"", 0, tensor("t", (1 << 40,) * 4), 1), "'t' would end at"),
    "an offset": (file_of(b"", 0, tensor("t", (8,), offset=HUGE), 1), "'t' would end at"),
    "a common byte": (
        file_of(b"", 0, tensor("t", (3,), offset=32) + tensor("u", (9,)), 2) + bytes(99),
        "'u' and 't' have bytes in common",
    ),
    "a tensor twice": (file_of(b"", 0, tensor("t", (1,)) * 2, 2) + bytes(99), "has 't' twice"),
    "half a block": (file_of(b"", 0, tensor("t", (48,), kind=8), 1) + bytes(99), "no whole blocks of Q8_0"),
    "another type": (file_of(b"", 0, tensor("t", (256,), kind=23), 1), r"t is IQ4_XS; supported are F32, .*Q8_0"),
    "types": (
        file_of(b"", 0, tensor("t", (256,), 10) + tensor("u", (256,), 11) + tensor("v", (256,), 99), 3),
        r"t is Q2_K, u is Q3_K, v is of the unknown type 99; .*serve another file of this model, such as Q4_K_M",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_within_bounded_memory(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=message):
            read_header(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20


@pytest.mark.parametrize(
    ("limit", "message"), [("MAX_ITEMS", "more than 3 values"), ("MAX_HEADER_BYTES", "longer than 3 bytes")]
)
def test_a_header_over_a_limit_is_refused(
    limit: str, message: str, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, limit, 3)
    with pytest.raises(ConfigError, match=message):
        read_header(whole)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.gguf: No such file"):
        read_header(tmp_path / "none.gguf")
