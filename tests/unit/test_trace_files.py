"""What a recording is wrapped in: compression, encodings, damage, several files."""

import gzip
import io
import lzma
import sys
from pathlib import Path

import pytest

from flashdig.readers import open_file
from flashdig.readers.files import read_traces
from flashdig.readers.json_stream import JsonDamageError, JsonStream
from flashdig.readers.open_file import ByteReader, UnreadableFileError
from flashdig.readers.trace import read_kineto
from tests.trace_files import kernel, text, write

EVENTS = [kernel(f"kernel_{index}", index * 10, 3, correlation=index) for index in range(40)]
PLAIN = text(EVENTS)


def numbers(path: str) -> list[tuple[str, int, int]]:
    trace = read_kineto(path)
    assert not trace.incomplete
    return [(kernel.name, kernel.start_ns, kernel.duration_ns) for kernel in trace.kernels]


EXPECTED = [(f"kernel_{index}", index * 10_000, 3_000) for index in range(40)]


def test_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(PLAIN)
    assert numbers(str(path)) == EXPECTED


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("two_members.json.gz", gzip.compress(PLAIN[:900]) + gzip.compress(PLAIN[900:])),
        ("zero_padding.gz", gzip.compress(PLAIN) + b"\x00" * 512),
        ("gzip_named_json.json", gzip.compress(PLAIN)),
        ("plain_named_gzip.json.gz", PLAIN),
        ("xz.json.xz", lzma.compress(PLAIN)),
        ("two_streams.json.xz", lzma.compress(PLAIN[:900]) + lzma.compress(PLAIN[900:])),
        ("xz_padding.xz", lzma.compress(PLAIN) + b"\x00" * 512),
        ("byte_order_mark.json", b"\xef\xbb\xbf" + PLAIN),
        ("utf16.json", PLAIN.decode().encode("utf-16")),
        ("utf16_no_mark.json", PLAIN.decode().encode("utf-16-le")),
    ],
)
def test_wrappings_change_no_number(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert numbers(str(path)) == EXPECTED


def test_hundreds_of_members_of_one_byte(tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    path.write_bytes(b"".join(gzip.compress(PLAIN[i : i + 7]) for i in range(0, len(PLAIN), 7)))
    assert numbers(str(path)) == EXPECTED


def test_hundreds_of_streams_of_a_few_bytes(tmp_path: Path) -> None:
    path = tmp_path / "t.xz"
    path.write_bytes(b"".join(lzma.compress(PLAIN[i : i + 7]) for i in range(0, len(PLAIN), 7)))
    assert numbers(str(path)) == EXPECTED


@pytest.mark.parametrize("size", [13, 64, 1000])
@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_compressed_pieces_of_every_size_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, compress
) -> None:
    path = tmp_path / "t"
    path.write_bytes(compress(PLAIN[:900]) + compress(PLAIN[900:]))
    monkeypatch.setattr(open_file, "CHUNK_BYTES", size)
    assert numbers(str(path)) == EXPECTED


def test_damaged_cut_and_expanding_xz(tmp_path: Path) -> None:
    path = tmp_path / "t.json.xz"
    whole = lzma.compress(text(kernel(f"k{i * 7919 % 1013}", i, 1) for i in range(20000)))
    path.write_bytes(whole[:2000] + b"damage" + whole[2006:])
    with pytest.raises(UnreadableFileError, match=r"compressed data is damaged near byte"):
        read_kineto(str(path))
    path.write_bytes(whole + b"tail")
    with pytest.raises(UnreadableFileError, match=r"follows a complete xz member"):
        read_kineto(str(path))
    path.write_bytes(whole[: len(whole) * 9 // 10])
    trace = read_kineto(str(path))
    assert trace.incomplete
    assert 100 < len(trace.kernels) < 20000
    path.write_bytes(lzma.compress(b" " * (64 << 20)))
    with pytest.raises(UnreadableFileError, match=r"expands more than 1000:1"):
        read_kineto(str(path))


def test_pieces_of_every_size_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(PLAIN)
    for size in (1, 2, 3, 17, 101):
        monkeypatch.setattr(open_file, "CHUNK_BYTES", size)
        assert numbers(str(path)) == EXPECTED


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(PLAIN))))
    assert numbers("-") == EXPECTED


def test_interleaved_gzip_streams_are_refused(tmp_path: Path) -> None:
    noise = bytes(range(256)) * 200
    streams = [gzip.compress(PLAIN + noise + bytes([i]) * 9000, 1) for i in range(2)]
    blocks = [stream[i : i + 4096] for i in range(0, 16384, 4096) for stream in streams]
    path = tmp_path / "t.json.gz"
    path.write_bytes(b"".join(blocks))
    with pytest.raises(UnreadableFileError, match=r"t\.json\.gz.*damaged"):
        read_kineto(str(path))


def test_cut_gzip_keeps_what_is_whole_and_says_so(tmp_path: Path) -> None:
    whole = gzip.compress(text(kernel(f"k{i * 7919 % 1013}", i, 1) for i in range(2000)))
    path = tmp_path / "t.json.gz"
    path.write_bytes(whole[: len(whole) * 6 // 10])
    trace = read_kineto(str(path))
    assert trace.incomplete
    assert 100 < len(trace.kernels) < 2000
    assert [warning.code for warning in trace.warnings] == ["truncated"]


def test_cut_anywhere_keeps_all_whole_events(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    content = text(EVENTS[:3])
    first_event = content.index(b"[") + 1
    ends = [i + 1 for i in range(len(content) - 1) if content[i : i + 2] == b"}}"]
    for cut in range(first_event, len(content) - 1):
        path.write_bytes(content[:cut])
        trace = read_kineto(str(path))
        assert trace.incomplete
        assert len(trace.kernels) == sum(end < cut for end in ends), cut


def test_damage_in_the_middle_is_refused_with_its_byte(tmp_path: Path) -> None:
    at = PLAIN.index(b'"name": "kernel_20"')
    path = tmp_path / "t.json"
    path.write_bytes(PLAIN[:at] + b"!" + PLAIN[at + 1 :])
    with pytest.raises(UnreadableFileError, match=rf"t\.json: damaged at byte {at}\b"):
        read_kineto(str(path))
    path.write_bytes(gzip.compress(PLAIN[:at] + b"!" + PLAIN[at + 1 :]))
    with pytest.raises(UnreadableFileError, match=rf"byte {at} \(of the decompressed text\)"):
        read_kineto(str(path))


def test_offset_counts_bytes_not_characters(tmp_path: Path) -> None:
    events = text([kernel("Füße", 1, 1), kernel("next", 5, 1)]).decode()
    content = events.encode().decode("unicode_escape").encode()  # "ü" in two bytes
    at = content.index(b'"next"')
    with pytest.raises(JsonDamageError) as error:
        list(JsonStream([content[:at] + b"?" + content[at:]]).events())
    assert error.value.offset == at


def test_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    bad = (
        b'{"traceEvents":[{"ph":"X","cat":"kernel","name":"k\x9f\x80","pid":0,"tid":7,"ts":1,'
        b'"dur":2,"args":{"stream":7}},{"ph":"X","cat":"kernel","name":"good","pid":0,"tid":7,'
        b'"ts":10,"dur":3,"args":{"stream":7}}]}'
    )
    for name, content in {"t.json": bad, "t.json.gz": gzip.compress(bad)}.items():
        (tmp_path / name).write_bytes(content)
        trace = read_kineto(str(tmp_path / name))
        assert [kernel.name for kernel in trace.kernels] == ["k\ufffd\ufffd", "good"]
        assert sum(kernel.duration_ns for kernel in trace.kernels) == 5_000
        assert [warning.code for warning in trace.warnings] == ["bad_bytes"]
        assert "2 bytes" in trace.warnings[0].message


def test_lone_surrogate_escapes_in_names_can_be_printed(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(text([kernel("a\ud800b", 1, 1)]))
    assert read_kineto(str(path)).kernels[0].name == "a\ufffdb"


def test_expansion_bombs_are_refused_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(PLAIN + b" " * 30_000_000, 9))
    with pytest.raises(UnreadableFileError, match="1000:1"):
        read_kineto(str(path))
    assert len(read_kineto(str(path), allow_large=True).kernels) == 40


def test_oversized_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.json.gz"
    path.write_bytes(gzip.compress(text(kernel(f"k{i}", i, 1) for i in range(20_000))))
    monkeypatch.setattr(open_file, "MAX_MEMBER_BYTES", 2_000_000)
    with pytest.raises(UnreadableFileError, match=r"--allow-large"):
        list(ByteReader(str(path)))
    assert sum(map(len, ByteReader(str(path), allow_large=True))) > 2_000_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"   \n", "is empty|before the first event"),
        (b"hello", "starts with { or"),
        (b"{}", "no traceEvents"),
        (b'{"a": 1}', "no traceEvents"),
        (b'{"traceEvents": 3}', "no traceEvents"),
        (b'{"schemaVersion": 1, "devi', "before the first event"),
        (b'"text"', "starts with { or"),
        (PLAIN + PLAIN, "more text follows"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"\x28\xb5\x2f\xfdrest", "zstandard"),
        (gzip.compress(PLAIN) + b"not gzip", "starts no other one"),
        (b'{"traceEvents": [' + b"[" * 100_000, "nested too deeply"),
        (b'{"traceEvents": [{"ts": ' + b"1" * 5000 + b"}]}", "byte 17"),
    ],
)
def test_wrong_files_get_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "wrong"
    path.write_bytes(content)
    with pytest.raises(UnreadableFileError, match=message) as error:
        read_kineto(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match="No such file"):
        read_traces([str(tmp_path / "absent.json")])
    with pytest.raises(UnreadableFileError, match="holds no traces"):
        read_traces([str(tmp_path)])


def test_bare_array_may_lack_its_closing_bracket(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    content = PLAIN[PLAIN.index(b"[") : PLAIN.rindex(b"]") + 1]
    for variant in (content, content[:-1], content[:-1] + b",\n"):
        path.write_bytes(variant)
        assert numbers(str(path)) == EXPECTED


def test_ranks_from_file_name_and_order(tmp_path: Path) -> None:
    one = [kernel("k", 0, 10)]
    unnamed = write(tmp_path / "a.json", one)
    named = write(tmp_path / "rank3_b.json", one)
    other = write(tmp_path / "c.json.gz", one)
    assert read_traces([unnamed])[0].rank == 0
    assert read_traces([named])[0].rank == 3
    assert [trace.rank for trace in read_traces([unnamed, other])] == [0, 1]
    assert [trace.rank for trace in read_traces([str(tmp_path)])] == [0, 1, 3]
    first = write(tmp_path / "x.json", one, distributedInfo={"rank": 0, "world_size": 2})
    second = write(tmp_path / "y.json", one, distributedInfo={"rank": 0, "world_size": 2})
    traces = read_traces([first, second])
    assert [trace.rank for trace in traces] == [0, 1]
    assert traces[0].world_size == 2
    assert [warning.code for warning in traces[1].warnings] == ["duplicate_rank"]
    assert "both say rank 0" in traces[1].warnings[0].message
