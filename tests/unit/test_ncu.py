"""Nsight Compute files: real ones against numbers written by hand, and everything that is none."""

import csv
import gzip
import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdig.readers.ncu import NcuKernel, SharedMemory, Stalls, read_ncu
from flashdig.readers.ncu_csv import read_csv
from flashdig.readers.ncu_units import in_base_units, power_of_ten
from flashdig.readers.open_file import UnreadableFileError

DATA = Path(__file__).parent.parent / "data" / "ncu"
RAW = DATA / "ncu_raw_h200.csv.gz"
DETAILS = DATA / "ncu_details_h200.csv.gz"
RAW_TEXT = gzip.decompress(RAW.read_bytes()).decode()
DETAILS_TEXT = gzip.decompress(DETAILS.read_bytes()).decode()
# S = Q K^T of batch 4, heads 16, seqlen 2048 in two bytes: 64 matrices of 2048 x 2048
SCORES_BYTES = 64 * 2048 * 2048 * 2
# Q, K, V (and O) of head_dim 64
INPUT_BYTES = 64 * 2048 * 64 * 2


@pytest.fixture(scope="module")
def raw() -> list[NcuKernel]:
    return read_ncu(str(RAW))


@pytest.fixture(scope="module")
def details() -> list[NcuKernel]:
    return read_ncu(str(DETAILS))


def test_all_thirteen_kernels_in_both_pages(raw: list[NcuKernel], details: list[NcuKernel]) -> None:
    assert [k.number for k in raw] == [k.number for k in details] == list(range(13))
    assert [k.name for k in raw] == [k.name for k in details]
    assert [k.decoded.role for k in raw] == [
        *("elementwise",) * 5,  # inputs and the mask
        *("matmul", "elementwise", "elementwise", "softmax", "matmul"),  # the naive attention
        *("attention_forward",) * 3,
    ]
    assert [k.decoded.backend for k in raw[10:]] == ["efficient", "flash", "cudnn"]


def test_naive_score_product(raw: list[NcuKernel]) -> None:
    k = raw[5]
    assert (k.grid, k.block, k.device, k.compute_capability) == (
        (2, 66, 1),
        (384, 1, 1),
        0,
        (9, 0),
    )
    assert k.duration_ns == 160_672
    assert k.cycles == 275_035
    assert k.dram_read_bytes == 33_605_376
    assert k.dram_write_bytes == 510_333_696
    assert k.dram_bytes == 543_939_072
    assert k.dram_percent == 70.373135
    # every score leaves an SM once; the L2 keeps a part of it from the memory
    assert k.l2_write_bytes == SCORES_BYTES
    assert k.l2_bytes == 34_947_569 * 32
    assert k.l2_hit_percent == 94.226199
    assert k.registers_per_thread == 168
    assert k.shared_memory_dynamic_bytes == 213_188
    assert k.shared_memory_static_bytes == 0
    assert k.shared_memory_driver_bytes == 1024
    assert k.pipes.tensor == 23.987407
    assert k.pipes.fma == 0.471618
    assert k.pipes.xu == 0
    assert k.occupancy.achieved_percent == 14.773655
    assert k.occupancy.theoretical_percent == 18.75
    assert k.occupancy.block_limits == {
        "barriers": 21,
        "blocks": 32,
        "registers": 1,
        "shared_memory": 1,
        "warps": 5,
    }
    assert k.occupancy.limiters == ("registers", "shared_memory")
    assert k.stalls.cycles["long_scoreboard"] == 8.557893
    assert k.stalls.cycles["mio_throttle"] == 0.677663
    assert k.stalls.cycles["barrier"] == 0.549103
    assert k.stalls.latency == 14.371805
    assert k.stalls.largest() == ("long_scoreboard", 8.557893)
    assert k.stalls.share("long_scoreboard") == pytest.approx(0.595464, abs=1e-6)


def test_shared_memory_of_the_efficient_kernel(raw: list[NcuKernel]) -> None:
    shared = raw[10].shared
    assert shared.wavefronts == 30_690_339
    assert shared.bank_conflicts == 3_180_327
    assert shared.ideal_wavefronts == 27_510_012
    assert shared.slow_down == pytest.approx(1.1156, abs=1e-4)
    assert shared.load_wavefronts == 19_716_045
    assert shared.load_bank_conflicts == 123_120
    # the source page's own count: 5,418,828 wavefronts too many
    assert shared.source_wavefronts is not None
    assert shared.source_ideal_wavefronts is not None
    assert shared.source_wavefronts - shared.source_ideal_wavefronts == 5_418_828
    assert shared.source_slow_down == pytest.approx(1.1789, abs=1e-4)


def test_fused_kernels_move_little_and_low_occupancy_is_told(raw: list[NcuKernel]) -> None:
    flash = raw[11]
    assert flash.registers_per_thread == 255
    assert flash.occupancy.theoretical_percent == 12.5
    assert flash.local_spill_requests == 1_240_832
    for k in raw[10:]:
        assert k.dram_bytes is not None
        assert 3 * INPUT_BYTES < k.dram_bytes < 1.4 * 4 * INPUT_BYTES
    assert raw[12].pipes.xu == 46.544286


def test_details_page_says_the_same_in_fewer_digits(
    raw: list[NcuKernel], details: list[NcuKernel]
) -> None:
    for exact, rounded in zip(raw, details, strict=True):
        assert rounded.grid == exact.grid
        for name in (
            *("duration_ns", "cycles", "l2_hit_percent", "registers_per_thread", "waves"),
            *("shared_memory_dynamic_bytes", "local_spill_requests", "dram_percent"),
        ):
            close = pytest.approx(getattr(exact, name), rel=0.01, abs=0.01)
            assert getattr(rounded, name) == close, name
        if exact.dram_bytes and exact.dram_bytes > 1e6:
            assert rounded.dram_bytes == pytest.approx(exact.dram_bytes, rel=0.01)
        assert rounded.occupancy.block_limits == exact.occupancy.block_limits
        assert rounded.occupancy.achieved_percent == pytest.approx(
            exact.occupancy.achieved_percent, abs=0.2
        )


def test_what_a_details_page_lacks_is_none_not_zero(details: list[NcuKernel]) -> None:
    k = details[10]
    assert k.dram_read_bytes is None
    assert k.l2_bytes is None
    assert k.pipes.tensor is None
    assert k.shared.wavefronts is None
    assert k.shared.slow_down is None
    assert k.stalls.largest() is None
    assert k.stalls.share("barrier") is None
    assert k.metric("launch__no_such_metric") is None


def test_rules_of_the_details_page(details: list[NcuKernel]) -> None:
    rules = {rule.name: rule for rule in details[10].rules}
    assert rules["TheoreticalOccupancy"].kind == "OPT"
    assert rules["TheoreticalOccupancy"].speedup_percent is not None
    assert "UncoalescedSharedAccess" in rules
    assert details[6].rules[0].name == "SOLBottleneck"


def test_metrics_are_in_base_units(raw: list[NcuKernel]) -> None:
    assert raw[5].metric("dram__bytes_read.sum") == 33_605_376
    assert raw[5].metric("gpu__time_duration.sum") == pytest.approx(160.672e-6)
    assert raw[5].metric("dram__bytes_read.sum.per_second") == pytest.approx(209.155e9)
    assert raw[5].metric("lts__t_sectors.sum.per_second") == pytest.approx(217.508769e9)
    assert raw[5].metrics["launch__cluster_scheduling_policy"] == "PolicySpread"
    assert raw[5].metric("launch__cluster_scheduling_policy") is None
    assert "derived_tempMetric4" not in raw[5].metrics  # it reads "nan"


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("513.425408", "Mbyte", 513_425_408.0),
        ("1,845,667,948", "", 1_845_667_948.0),
        ("23.46", "us", 23.46e-6),
        ("23.46", "usecond", 23.46e-6),
        ("2.00", "msecond", 2e-3),
        ("3", "nsecond", 3e-9),
        ("3.385401", "Tbyte/s", 3.385401e12),
        ("785.81", "Mbyte/second", 785.81e6),
        ("1.504", "Kbyte/cycle", 1504.0),
        ("213.188", "Kbyte/block", 213_188.0),
        ("1.94", "Ghz", 1.94e9),
        ("217.5", "sector/ns", 217.5e9),
        ("70.37", "%", 70.37),
        ("168", "register/thread", 168.0),
        ("n/a", "%", None),
        ("nan", "", None),
        ("", "byte", None),
    ],
)
def test_units(text: str, unit: str, value: float | None) -> None:
    assert in_base_units(text, unit) == value


def test_units_that_are_words() -> None:
    with pytest.raises(ValueError, match="PolicySpread"):
        in_base_units("PolicySpread", "")
    with pytest.raises(ValueError, match="no number"):
        in_base_units("1,23", "")
    assert power_of_ten("warp") == 0


def test_numbers_of_the_bank_conflict_article() -> None:
    shared = SharedMemory(wavefronts=1_845_667_948, bank_conflicts=1_174_579_308)
    assert shared.ideal_wavefronts == 671_088_640
    assert shared.conflict_share == pytest.approx(0.6364, abs=1e-4)
    assert shared.slow_down == pytest.approx(2.75, abs=1e-3)
    assert SharedMemory(wavefronts=0.0, bank_conflicts=0.0).slow_down is None


def test_stalls_given_as_percent_of_the_latency() -> None:
    text = (
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","k","smsp__warp_issue_stalled_mio_throttle_per_warp_active.pct","%","43.97"\n'
    )
    (kernel,) = read_csv(io.StringIO(text), "t.csv")
    assert kernel.stalls.share("mio_throttle") == pytest.approx(0.4397)
    assert kernel.stalls.cycles == {}
    assert Stalls(cycles={"a": 1.0, "b": 3.0}).share("b") == 0.75


def test_output_of_selected_metrics_with_remarks_before_it() -> None:
    text = (
        "my program's output, with a comma\n==PROF== Connected to process 1234\n"
        '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream",'
        '"Section Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","1234","bin","h","copy(float*)","1","7","Command line profiler metrics",'
        '"dram__bytes.sum","Mbyte","2,000.00"\n'
        '"0","1234","bin","h","copy(float*)","1","7","Command line profiler metrics",'
        '"gpu__time_duration.sum","usecond","10,000.00"\n==PROF== Disconnected\n'
    )
    (kernel,) = read_csv(io.StringIO(text), "t.csv")
    assert kernel.dram_bytes == 2e9
    assert kernel.duration_ns == 1e7
    assert kernel.grid is None
    assert kernel.registers_per_thread is None


def test_columns_are_found_by_name_whatever_their_order(raw: list[NcuKernel]) -> None:
    rows = list(csv.reader(io.StringIO(RAW_TEXT)))
    order = sorted(range(len(rows[0])), key=lambda i: rows[0][i][::-1])
    out = io.StringIO()
    csv.writer(out).writerows([[row[i] for i in order] for row in rows])
    shuffled = read_csv(io.StringIO(out.getvalue()), str(RAW))
    assert [(k.name, k.dram_bytes, k.stalls.cycles, k.grid) for k in shuffled] == [
        (k.name, k.dram_bytes, k.stalls.cycles, k.grid) for k in raw
    ]


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no CSV of Nsight Compute"),
        ("a,b,c\n1,2,3\n", "no CSV of Nsight Compute"),
        ('{"traceEvents": []}', "no CSV of Nsight Compute"),
        ("".join(lines(RAW_TEXT)[:2]), "line 1: the table of Nsight Compute holds no kernel"),
        (lines(RAW_TEXT)[0] + "".join(lines(RAW_TEXT)[2:]), "line 2: the row of units is missing"),
        ("".join(lines(RAW_TEXT)[:5]) + '"9","492"\n', "line 6: 2 cells where the header"),
        (RAW_TEXT[:-5000], "cells where the header"),
        (DETAILS_TEXT + '"12","492","x"\n', "line 1271: 3 cells where the header"),
        (
            "ID,Kernel Name,Metric Name,Metric Unit,Metric Value\nx,k,Duration,us,3\n",
            "line 2: the ID 'x' is no number",
        ),
        (
            "ID,Kernel Name,Metric Name,Metric Unit,Metric Value\n0,k,a,us,3\n0,other,b,us,3\n",
            "line 3: kernel 0 has another name",
        ),
        ("ID,ID,Kernel Name\n", "line 1: the column 'ID' stands twice"),
        ('ID,"Kernel Name\n', "no CSV of Nsight Compute"),
    ],
)
def test_foreign_and_damaged_files_are_refused_with_the_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "file.csv"
    path.write_text(text)
    with pytest.raises(UnreadableFileError) as caught:
        read_ncu(str(path))
    assert message in str(caught.value)
    assert "file.csv" in str(caught.value)


def test_missing_cut_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match=r"none\.csv"):
        read_ncu(str(tmp_path / "none.csv"))
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(RAW.read_bytes()[:30_000])
    with pytest.raises(UnreadableFileError, match=r"cut.csv.gz"):
        read_ncu(str(cut))
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"ID\x00\x01\x02")
    with pytest.raises(UnreadableFileError, match="binary"):
        read_ncu(str(binary))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damage_never_gives_a_traceback(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([RAW_TEXT[:60_000], DETAILS_TEXT[:8_000]]))
    at = data.draw(st.integers(0, len(text)))
    to = data.draw(st.integers(at, min(len(text), at + 3000)))
    put = data.draw(st.text(max_size=20))
    try:
        kernels = read_csv(iter(lines(text[:at] + put + text[to:])), "x.csv")
    except UnreadableFileError as error:
        assert "x.csv" in str(error)  # noqa: PT017
    else:
        assert kernels


class Metric(SimpleNamespace):
    def has_value(self) -> bool:
        return True

    def value(self) -> object:
        return self.content

    def unit(self) -> str:
        return str(self.of)


class Action:
    def __init__(self, metrics: dict[str, tuple[object, str]]) -> None:
        self.metrics = metrics

    def metric_names(self) -> list[str]:
        return [*self.metrics, "absent"]

    def metric_by_name(self, name: str) -> Metric | None:
        if name not in self.metrics:
            return None
        content, unit = self.metrics[name]
        return Metric(content=content, of=unit)

    def name(self, base: int) -> str:
        return {1: "demangled", 0: "function"}[base]


def test_reports_go_through_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # the package's calls as its 2026.3 release has them; no report file is in this repository
    path = tmp_path / "r.ncu-rep"
    path.write_bytes(b"NVR\x00")
    library = ModuleType("ncu_report")
    metrics: dict[str, tuple[object, str]] = {
        "gpu__time_duration.sum": (160672, "nsecond"),
        "dram__bytes_read.sum": (33605376.0, "byte"),
        "dram__bytes_write.sum": (1, "byte"),
        "launch__grid_dim_x": (2, ""),
        "launch__grid_dim_y": (66, ""),
        "launch__grid_dim_z": (1, ""),
        "device__attribute_compute_capability_major": (9, ""),
        "device__attribute_compute_capability_minor": (0, ""),
        "launch__cluster_scheduling_policy": ("PolicySpread", ""),
    }
    library.load_report = lambda _: [[Action(metrics)], [Action({})]]  # type: ignore[attr-defined]
    library.IAction = SimpleNamespace(NameBase_DEMANGLED=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ncu_report", library)
    first, second = read_ncu(str(path))
    assert (first.number, first.name, first.grid) == (0, "demangled", (2, 66, 1))
    assert first.duration_ns == 160_672
    assert first.dram_bytes == 33_605_377
    assert first.compute_capability == (9, 0)
    assert first.metrics["launch__cluster_scheduling_policy"] == "PolicySpread"
    assert (second.number, second.duration_ns, second.grid) == (1, None, None)
    library.load_report = lambda _: []  # type: ignore[attr-defined]
    with pytest.raises(UnreadableFileError, match="holds no kernel"):
        read_ncu(str(path))


def test_a_report_without_the_package_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "r.bin"
    path.write_bytes(b"NVR\x00....")
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    with pytest.raises(UnreadableFileError, match=r"flashdig\[ncu\].*--page raw"):
        read_ncu(str(path))
