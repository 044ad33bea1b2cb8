"""`flashdig explain` and the findings of `flashdig trace`, from the command line."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from flashdig.bench.results import read_record
from flashdig.cli import main
from flashdig.findings.presets import ARTICLE_PRESETS
from tests.trace_files import DATA, recorded

NCU = Path(__file__).parents[1] / "data" / "ncu"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        main(list(arguments))
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_rows_findings_and_page(capsys, tmp_path) -> None:
    page = tmp_path / "page.html"
    code, out, _ = run(capsys, "explain", recorded("attn_naive"), "--html", str(page))
    assert code == 0
    assert "hidden-mask-copy" in out
    assert "scores.masked_fill_(hidden" in out
    text = page.read_text()
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert "copies and fills" in text


def test_the_guess_stands_before_the_file_is_opened(capsys, tmp_path) -> None:
    """It is printed even when the file then turns out to be unreadable."""
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    arguments = ("--problem", "batch=4,heads=16,seqlen=2048,head_dim=64,causal", "--gpu", "h200")
    code, out, err = run(capsys, "explain", str(broken), *arguments)
    assert code == 3
    assert "The guess, before anything is recorded or opened" in out
    assert "broken.json" in err


def test_json_has_everything(capsys) -> None:
    code, out, _ = run(capsys, "explain", recorded("attn_sdpa_math"), "--json")
    assert code == 0
    (section,) = json.loads(out)["sections"]
    rules = [finding["rule"] for finding in section["findings"]]
    assert rules[0] == "math-fallback"
    assert (
        section["findings"][0]["numbers"][0]["place"].split(" at ts ")[1].replace(".", "").isdigit()
    )
    assert section["explanations"][0]["rows"][0]["surprise"] is True


def test_fail_on_finding(capsys) -> None:
    code, _, err = run(capsys, "explain", recorded("attn_naive"), "--fail-on-finding")
    assert code == 1
    assert "hidden-mask-copy" in err
    code, _, _ = run(capsys, "explain", recorded("attn_sdpa_cudnn"), "--fail-on-finding")
    assert code == 0


def test_counters(capsys) -> None:
    code, out, _ = run(
        *(capsys, "explain", str(NCU / "archaeology_h200.csv.gz"), "--gpu", "h200"),
        *("--problem", "batch=10,heads=64,seqlen=1024,head_dim=64,dtype=fp32", "--asked", "v2"),
    )
    assert code == 0
    assert "bank-conflicts" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a recording"),
        (("--preset", "no"), "--preset must be profiling-article or archaeology"),
        (("--preset", "archaeology", "--read"), "--read needs --recordings"),
        (("--preset", "archaeology", "x.json"), "give it alone"),
        (("x.json", "--read"), "go with --preset"),
        (("x.json", "--problem", "seqlen=8"), "--problem needs --gpu"),
        (("x.json", "--problem", "seqlen=8", "--gpu", "h200", "--asked", "x"), "--asked"),
        (("x.json", "--problem", "seqlen=8", "--gpu", "h200", "--pass", "x"), "--pass must be"),
        (("x.json", "--gpu", "nothing"), "--gpu"),
    ],
)
def test_wrong_usage(capsys, arguments, words) -> None:
    code, _, err = run(capsys, "explain", *arguments)
    assert code == 2
    assert words in err


def test_a_preset_without_recordings_is_refused(capsys, tmp_path) -> None:
    code, _, err = run(
        capsys, "explain", "--preset", "archaeology", "--read", "--recordings", str(tmp_path)
    )
    assert code == 3
    assert "manifest.json" in err


def test_a_preset_from_its_folder(capsys, tmp_path) -> None:
    """A folder with some of the variants: the others are named, and the record is valid."""
    names = {"naive": "attn_naive", "sdpa_math": "attn_sdpa_math", "sdpa_cudnn": "attn_sdpa_cudnn"}
    variants = []
    for name, trace in names.items():
        shutil.copy(DATA / f"{trace}.json.gz", tmp_path / f"{name}.json.gz")
        variants.append({"name": name, "trace": f"{name}.json.gz", "gate": "ok", "error": 0.01})
    variants.append({"name": "fa3", "trace": None, "gate": "not run: it is not installed"})
    manifest = {"preset": "profiling-article", "variants": variants, "environment": {"gpu": "x"}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    record, page = tmp_path / "record.json", tmp_path / "page.html"
    code, out, _ = run(
        *(capsys, "explain", "--preset", "profiling-article", "--read", "--json"),
        *("--recordings", str(tmp_path), "--record", str(record), "--html", str(page)),
    )
    assert code == 0
    answer = json.loads(out)
    article = {(row["variant"], row["what"]): row for row in answer["article"]}
    assert article["naive", "memcpys"]["found"] == 1
    assert article["sdpa_math", "kernels"]["why"] == "As published."
    assert "Another kernel serves this chip" in article["sdpa_cudnn", "registers"]["why"]
    rows = read_record(record).rows
    assert [row["name"] for row in rows] == list(ARTICLE_PRESETS["profiling-article"].variants)
    by_name = {row["name"]: row for row in rows}
    assert by_name["fa3"]["gate"] == "not run: it is not installed"
    rules = {finding["rule"] for finding in by_name["sdpa_math"]["findings"]}
    assert {"math-fallback", "mask-rebuilt", "safe-softmax", "products-on-cuda-cores"} <= rules
    assert "it is not installed" in page.read_text()


def test_findings_of_trace(capsys, tmp_path) -> None:
    page = tmp_path / "page.html"
    code, out, _ = run(capsys, "trace", recorded("attn_naive"), "--html", str(page))
    assert code == 0
    assert "hidden-mask-copy" in out
    assert "hidden-mask-copy" in page.read_text()
    code, out, _ = run(capsys, "trace", recorded("attn_naive"), "--json")
    (trace,) = json.loads(out)["traces"]
    assert [finding["rule"] for finding in trace["findings"]][:1] == ["unfused-attention"]


def test_names_of_events_are_text_in_the_page(capsys, tmp_path) -> None:
    """A kernel called like a tag does not become one."""
    text = gzip.decompress((DATA / "attn_naive.json.gz").read_bytes()).decode()
    text = text.replace("Memcpy DtoD (Device -> Device)", "Memcpy DtoD <b>x</b>")
    (tmp_path / "t.json").write_text(text)
    page = tmp_path / "page.html"
    code, _, _ = run(capsys, "explain", str(tmp_path / "t.json"), "--html", str(page))
    assert code == 0
    assert "<b>x</b>" not in page.read_text()
    assert "&lt;b&gt;x" in page.read_text()
