"""`flashdig trace` from the outside: exit codes, streams, JSON, the page, recording."""

import gzip
import html.parser
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashdig.cli import main
from flashdig.readers.summary import summarize
from flashdig.readers.trace import read_kineto
from tests.nsys_files import Export
from tests.trace_files import RECORDED, host, kernel, recorded, text, write


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    capsys.readouterr()
    try:
        main(["trace", *arguments])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    answer: dict[str, object] = json.loads(out)
    return answer


def test_recorded_trace_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, recorded("attn_train_sdpa_flash"))
    assert (code, err) == (0, "")
    assert "What ran: flash in 6 calls." in out
    assert "attention backward" in out


def test_json_holds_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, recorded("attn_sdpa_flash"))
    (trace,) = answer["traces"]
    assert trace["kernels"] == 3
    (attention,) = trace["attention"]
    assert (attention["backend"], attention["pass"], attention["calls"]) == ("flash", "forward", 3)
    # batch 4 x heads 16 x visible pairs of a causal 2048 x 4 x head_dim 64
    assert attention["flops"] == 4 * 16 * (2048 * 2049 // 2) * 4 * 64
    assert "visible" in answer["flops_rule"]


def test_several_ranks_and_directories(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for rank in (1, 0):
        write(tmp_path / f"rank{rank}.json", [kernel("gemm", 0, 10 + rank)])
    answer = run_json(capsys, str(tmp_path))
    assert [(trace["rank"], trace["busy_ns"]) for trace in answer["traces"]] == [
        (0, 10_000),
        (1, 11_000),
    ]
    _, out, _ = run(capsys, str(tmp_path))
    lines = [line.split() for line in out.splitlines()]
    assert ["0", "10", "µs", "10", "µs", "0", "%", "0", "ns", "0", "ns", "n/a"] in lines


def test_nsight_systems_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    export = Export(tmp_path / "r.sqlite")
    export.kernel("void pytorch_flash::flash_fwd_kernel<T>(P)", 0, 5_000)
    export.close()
    (trace,) = run_json(capsys, str(tmp_path / "r.sqlite"))["traces"]
    assert trace["format"] == "nsight-systems"
    assert trace["attention"][0]["backend"] == "flash"
    assert trace["host"] is None


def test_a_range_around_a_call_is_not_its_host_cost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    events = [
        host("user_annotation", "ProfilerStep#0", 0, 1000),
        host("cuda_runtime", "cudaLaunchKernel", 10, 4, correlation=1),
        kernel("void pytorch_flash::flash_fwd_kernel<T>(P)", 20, 5, correlation=1),
    ]
    (trace,) = run_json(capsys, write(tmp_path / "t.json", events))["traces"]
    (attention,) = trace["attention"]
    assert attention["device_median_ns"] == 5_000
    assert attention["host_median_ns"] is None


def test_a_window_shows_everywhere_and_counts_in_the_flops(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shape = [2, 256, 4, 64]
    arguments = {
        "Input Dims": [shape, shape, shape, [], [], [], []],
        "Input type": ["c10::BFloat16"] * 3 + ["Scalar"] * 4,
        "Concrete Inputs": ["", "", "", "0.125", "False", "32", "0"],
    }
    name = "flash_attn_3::_flash_attn_forward"
    operator = host("cpu_op", name, 0, 9, **{"External id": 1}, **arguments)
    events = [
        operator,
        host("cuda_runtime", "cudaLaunchKernel", 2, 4, correlation=1),
        kernel("flash_fwd_kernel", 20, 5, correlation=1, **{"External id": 1}),
    ]
    path = write(tmp_path / "t.json", events)
    (attention,) = run_json(capsys, path)["traces"][0]["attention"]
    assert (attention["mask"], attention["window"], attention["causal"]) == (
        "window",
        [32, 0],
        True,
    )
    # rows 0 to 31 see 1 to 32 keys, the other rows 33 each
    visible = 32 * 33 // 2 + (256 - 32) * 33
    assert attention["flops"] == 2 * 4 * visible * 4 * 64
    page = tmp_path / "page.html"
    _, out, _ = run(capsys, path, "--html", str(page))
    assert "window 32 to 0" in " ".join(out.split())
    assert "window 32 to 0" in page.read_text()


def test_cpu_only_is_unknown_and_not_zero(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "cpu.json", [host("cpu_op", "aten::mm", 0, 10)])
    code, out, _ = run(capsys, path)
    assert code == 0
    assert "no device work" in out
    (trace,) = run_json(capsys, path)["traces"]
    for key in ("kernels", "copies", "busy_ns", "elapsed_ns", "mean_occupancy_percent"):
        assert trace[key] is None
    assert trace["devices"] == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.json", b"", "empty"),
        ("no_events.json", b'{"traceEvents": []}', "no events"),
        ("foreign.json", b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 1}]}', "no events"),
        ("other.json", b'{"a": 1}', "no trace"),
        ("text.txt", b"hello", "damaged at byte 0"),
        ("picture.png", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "damaged at byte"),
        ("report.ncu-rep", b"NVR\x00...", "report.ncu-rep"),
        ("some.sqlite", b"SQLite format 3\x00" + bytes(200), "SQLite"),
    ],
)
def test_wrong_files_exit_3_with_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    code, out, err = run(capsys, str(tmp_path / name))
    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    assert message in err
    assert name in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a.json", "--stacks"],
        ["a.json", "--output", "b"],
        ["--run", "a.py", "--ncu", "b.py"],
        ["--ncu", "b.py", "--html", "x.html"],
        ["--run", "absent.py"],
        ["--ncu", "absent.py"],
    ],
)
def test_wrong_usage_exits_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_missing_file_and_empty_directory_exit_3(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(capsys, str(tmp_path / "absent.json"))[0] == 3
    code, _, err = run(capsys, str(tmp_path))
    assert code == 3
    assert "holds no traces" in err


def test_cut_file_is_read_with_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    content = text([kernel("a", 0, 1), kernel("b", 2, 1)])
    (tmp_path / "cut.json").write_bytes(content[:-40])
    code, out, err = run(capsys, str(tmp_path / "cut.json"), "--json")
    assert code == 0
    assert "ends early" in err
    (trace,) = json.loads(out)["traces"]
    assert trace["incomplete"] is True
    assert trace["kernels"] == 1


def test_bad_bytes_give_one_warning(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    content = text([kernel("kXX", 1, 2), kernel("good", 5, 3)]).replace(b"kXX", b"k\x9f\x80")
    (tmp_path / "bad.json").write_bytes(content)
    code, out, err = run(capsys, str(tmp_path / "bad.json"), "--json")
    assert code == 0
    assert err.count("\n") == 1
    (trace,) = json.loads(out)["traces"]
    assert (trace["kernels"], trace["busy_ns"]) == (2, 5_000)


def test_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = gzip.compress(text([kernel("a", 0, 1)]))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    (trace,) = run_json(capsys, "-")["traces"]
    assert (trace["source"], trace["kernels"]) == ("standard input", 1)


def test_bomb_needs_allow_large(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(text([kernel("a", 0, 1)]) + b" " * 20_000_000, 9))
    assert run(capsys, str(path))[0] == 3
    assert run(capsys, str(path), "--allow-large")[0] == 0


def test_against_compares(capsys: pytest.CaptureFixture[str]) -> None:
    math, flash = recorded("attn_sdpa_math"), recorded("attn_sdpa_flash")
    code, out, _ = run(capsys, math, "--against", flash)
    assert code == 0
    assert "32.1 times faster" in out or "32.2 times faster" in out
    answer = run_json(capsys, math, "--against", flash)
    assert len(answer["traces"]) == 2
    assert answer["comparison"]["counts"][0] == {
        "name": "kernels",
        "before": 20,
        "after": 1,
        "ratio": 0.05,
    }
    code, _, err = run(capsys, math, flash, "--against", flash)
    assert code == 2
    assert "one trace with one other" in err


def test_comparison_with_a_trace_without_device(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cpu = write(tmp_path / "cpu.json", [host("cpu_op", "aten::mm", 0, 10)])
    code, out, _ = run(capsys, recorded("attn_fa3"), "--against", cpu)
    assert code == 0
    assert "cannot be compared" in out


class Page(html.parser.HTMLParser):
    """Collects what a page would fetch or run, and checks that its tags close."""

    VOID = frozenset({"meta", "br", "link", "img", "line"})

    def __init__(self, content: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: dict[str, int] = {}
        self._open: list[str] = []
        self.feed(content)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag not in self.VOID:
            self._open.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "srcset", "action"} and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.mark.parametrize("name", RECORDED)
def test_page_is_whole_and_offline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "page.html"
    assert run(capsys, recorded(name), "--html", str(path))[0] == 0
    content = path.read_text(encoding="utf-8")
    page = Page(content)
    assert page.fetched == []
    assert "script" not in page.tags
    assert not re.search(r"url\(|@import|https?://", content)
    assert page.tags["svg"] == 2
    assert "prefers-color-scheme: dark" in content
    assert list(tmp_path.iterdir()) == [path]
    calls = len(summarize(read_kineto(recorded(name))).attention_calls)
    assert f"<b>{calls}</b><span>attention calls</span>" in content


def test_page_escapes_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = write(
        tmp_path / "t.json",
        [
            kernel("<script>alert(1)</script>", 0, 10, correlation=1),
            host("user_annotation", "<img src=x onerror=alert(1)>", 0, 5),
            host("user_annotation", "<img src=x onerror=alert(1)>", 6, 9),
            host("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=1),
        ],
    )
    path = tmp_path / "page.html"
    assert run(capsys, trace, "--html", str(path))[0] == 0
    page = Page(path.read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert "img" not in page.tags


def test_page_of_a_comparison_and_of_a_cpu_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cpu = write(tmp_path / "cpu.json", [host("cpu_op", "aten::mm", 0, 10)])
    path = tmp_path / "page.html"
    code = run(capsys, recorded("attn_naive"), "--against", cpu, "--html", str(path))[0]
    assert code == 0
    content = path.read_text(encoding="utf-8")
    assert 'id="comparison"' in content
    assert "no device work" in content
    Page(content)


def test_page_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = str(tmp_path / "absent" / "page.html")
    code, _, err = run(capsys, recorded("attn_fa3"), "--html", target)
    assert code == 2
    assert "--html" in err


def test_pages_of_long_recordings_stay_small(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    events = []
    for i in range(20_000):
        events += [
            host("cuda_runtime", "cudaLaunchKernel", i * 10, 3, correlation=i),
            kernel(f"void k<{i % 400}>()", i * 10 + 5, 4, correlation=i),
        ]
    path = tmp_path / "page.html"
    assert run(capsys, write(tmp_path / "t.json", events), "--html", str(path))[0] == 0
    assert path.stat().st_size < 1_000_000


def test_run_records_and_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text("import sys, torch\ntorch.ones(int(sys.argv[2]), 4) @ torch.ones(4, 3)\n")
    output = tmp_path / "out.json.gz"
    arguments = ("--run", str(script), "--output", str(output), "--json", "--", "--rows", "5")
    code, out, err = run(capsys, *arguments)
    assert code == 0
    assert f"trace written: {output}" in err
    (trace,) = json.loads(out)["traces"]
    assert trace["source"] == str(output)
    names = [op.name for op in read_kineto(str(output)).host_ops]
    assert "aten::mm" in names


def test_run_of_a_failing_script_reads_and_exits_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "work.py"
    script.write_text("import torch\ntorch.ones(2, 4) @ torch.ones(4, 3)\nraise OSError('full')\n")
    output = tmp_path / "out.json"
    code, out, err = run(capsys, "--run", str(script), "--output", str(output))
    assert code == 1
    assert "OSError: full" in err
    assert "no device work" in out


def test_ncu_prints_its_command_where_it_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    script = tmp_path / "work.py"
    script.write_text("")
    code, out, _ = run(capsys, "--ncu", str(script))
    assert code == 0
    assert "ncu --set full" in out
    code, out, _ = run(capsys, "--ncu", str(script), "--json")
    assert json.loads(out)["path"] is None


def test_reading_needs_neither_torch_nor_triton() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "from flashdig.cli import main\n"
        f"main(['trace', {recorded('attn_naive')!r}])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0, result.stderr
    assert "eager in 3 calls" in result.stdout
