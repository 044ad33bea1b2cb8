"""`flashdig sass` from exhibit to card, with the compiler."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import triton

from flashdig.cli import main
from flashdig.evidence.kernel_source import KernelRequest, parse_constants, parse_signature
from flashdig.evidence.kernel_worker import RequestError, find_kernel, fit
from tests.compile import sample_kernels


def run(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["sass", *arguments])
    return ended.value.code or 0, capsys.readouterr().out


ROOT = Path(__file__).parents[2]
KERNELS = Path(__file__).with_name("sample_kernels.py")
DIG = ROOT / "benchmarks" / "results" / "nvidia-h200" / "dig.json"


def cards(capsys, *arguments: str) -> tuple[list, list]:
    _, out = run(capsys, *arguments, "--json")
    found = json.loads(out)
    return found["cards"], found["failures"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What `flashdig sass v2 naive` prints, and the cache folder that it filled: made once."""
    folder, printed = tmp_path_factory.mktemp("triton"), io.StringIO()
    command = ["sass", "v2", "naive", "--arch", "sm_80,sm_90", "--record", str(DIG), "--json"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        with pytest.raises(SystemExit) as ended:
            main(command)
    assert not ended.value.code
    return folder, json.loads(printed.getvalue())


def test_what_compiles_is_shown_beside_what_does_not(compiled) -> None:
    _, found = compiled
    card, hopper = found["cards"]
    assert (card["subject"], card["arch"], card["spill_bytes"]) == ("v2", "sm_80", 0)
    assert (hopper["subject"], hopper["arch"]) == ("v2", "sm_90")
    assert card["loop"]["HMMA"] == 64
    assert card["exp2_expected"] == 32 <= card["loop"]["MUFU.EX2"]
    assert card["cycles"]["tensor cores"] == 512
    assert found["failures"] == [
        {
            "subject": "naive",
            "arch": arch,
            "error": "launches no Triton kernel: there is nothing to compile",
        }
        for arch in ("sm_80", "sm_90")
    ]


@pytest.mark.newest
def test_what_the_compiler_refuses_is_a_row(capsys) -> None:
    """A tile too large for the chip; the exhibit beside it compiles."""
    options = ("--arch", "sm_75", "--head-dim", "256", "--dtype", "fp32")
    found, (failure,) = cards(capsys, "v2", "online_softmax", *options)
    assert [card["subject"] for card in found] == ["online_softmax"]
    assert re.search(r"v2, .*, for sm_75: .*out of resource: shared memory", failure["error"]), (
        failure
    )


def test_a_kernel_of_a_file_by_its_defaults(capsys) -> None:
    options = ("--arch", "sm_80,sm_90", "--signature", "*fp16,*fp16,*fp32")
    found, failures = cards(capsys, f"{KERNELS}:gemm", *options)
    assert failures == []
    assert [card["arch"] for card in found] == ["sm_80", "sm_90"]
    for card, family in zip(found, ("HMMA", "HGMMA"), strict=True):
        assert card["kernel"] == "gemm"
        assert card["threads"] == 128
        assert card["loop"][family] > 0
        assert card["gemms"] is None  # no exponential: this is no attention
        assert card["ptxas"]["registers"] == card["registers"]
        assert card["note"] == (
            "taken for granted: bias_ptr=None (its default), BLOCK_K=64 (first autotune "
            "configuration), num_warps=4 (first autotune configuration), num_stages=2 (first "
            "autotune configuration)"
        )


def test_serialised_products_are_seen(capsys) -> None:
    options = ("--arch", "sm_90", "--signature", "*fp16,*fp16,*fp32")
    large = ("--constant", "BLOCK_M=128", "--constant", "BLOCK_N=256")
    ((card,), _) = cards(capsys, f"{KERNELS}:gemm", *options, *large)
    (warning,) = card["ptxas"]["warnings"]
    assert "wgmma.mma_async instructions are serialized" in warning
    assert card["spill_bytes"] > 0
    assert f"warning of ptxas: {warning}" in card["sentences"]


@pytest.mark.newest
def test_a_module_a_word_and_gluon(capsys) -> None:
    module = "tests.compile.sample_kernels"
    options = ("--arch", "sm_90", "--signature", "*fp32,n=i32:16")
    constants = ("--constant", "BLOCK=128", "--constant", "MODE=double", "--num-warps", "2")
    ((card,), _) = cards(capsys, f"{module}:scale", *options, *constants)
    assert (card["kernel"], card["threads"], card["note"]) == ("scale", 64, "")
    layout = "layout=gl.BlockedLayout([1], [32], [4], [0])"
    options = ("--arch", "sm_90", "--signature", "*fp32,*fp32", "--constant", layout)
    ((card,), _) = cards(capsys, f"{module}:copy", *options)
    assert (card["kernel"], card["threads"]) == ("copy", 128)


@pytest.mark.parametrize(
    ("kernel", "signature", "constants", "error"),
    [
        ("gemm", "*fp16", [], "no type in --signature for b_ptr, c_ptr"),
        ("scale", "*fp32,i32", [], "scale(x_ptr, n, BLOCK, MODE): no --constant for BLOCK, MODE"),
        ("scale", "*fp32,i32,i32", ["BLOCK=8", "MODE=0"], "has 3 types in order for 2 arguments"),
        ("scale", "", ["BLOK=8"], "scale has no parameter 'BLOK'; it has x_ptr, n, BLOCK, MODE"),
        ("scale", "n=i32", ["n=8"], "n is given a type and, as a constant, a value"),
        ("scale", "*fp32,i32", ["BLOCK=x+1"], "constant BLOCK: 'x+1' has no value here"),
        ("scal", "", [], "scal: no such name in tests.compile.sample_kernels; nearest: scale"),
        ("plain_function", "", [], "plain_function: not a Triton or Gluon kernel"),
    ],
)
def test_what_is_missing_or_wrong_is_named(kernel, signature, constants, error) -> None:
    arguments, values = parse_signature(signature), parse_constants(constants)
    module = sample_kernels
    request = KernelRequest(module.__name__, kernel, arguments, values, None, None, "sm_90")
    with pytest.raises(RequestError, match=re.escape(error)):
        fit(request, *find_kernel(module, kernel), module)


def test_what_the_compiler_says_of_a_kernel_is_a_row(capsys) -> None:
    options = ("--signature", "*fp32,i32", "--constant", "BLOCK=7", "--constant", "MODE=0")
    code, out = run(capsys, f"{KERNELS}:scale", *options, "--arch", "sm_90", "--json")
    found = json.loads(out)
    (failure,) = found["failures"]
    assert (code, found["cards"]) == (1, [])  # nothing to show at all
    assert failure["error"] == "CompilationError: arange's range must be a power of 2"


def test_a_compilation_ends_in_time(capsys, tmp_path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(60)\n")
    code, out = run(capsys, f"{slow}:kernel", "--arch", "sm_90", "--timeout", "2", "--json")
    (failure,) = json.loads(out)["failures"]
    assert (code, failure["error"]) == (1, "compiling took more than 2 s")


def test_a_cache_folder_becomes_cards(capsys, compiled, tmp_path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(compiled[0], folder)
    made = compiled[1]["cards"]
    torn = next(path for path in folder.rglob("*.cubin"))
    found, failures = cards(capsys, str(folder), "--record", str(DIG))
    for one, other in zip(made, found, strict=True):
        assert other["subject"] == other["kernel"]
        assert {**one, "subject": other["subject"]} == other
    assert failures == []
    ((card,), _) = cards(capsys, str(folder), "--arch", "sm_90", "--match", "FLASH_FWD")
    assert card["arch"] == "sm_90"
    torn.write_text("torn")
    found, (failure,) = cards(capsys, str(folder))
    assert len(found) == 1
    assert failure["subject"] == str(torn)
    assert failure["error"].startswith("cuobjdump")


@pytest.mark.skipif(triton.__version__ != "3.6.0", reason="the record is Triton 3.6.0's")
def test_the_record_of_cards_is_what_is_compiled_now(compiled) -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "compiled" / "sass.json").read_text())
    assert record["triton"] == "3.6.0"
    recorded = {(card["subject"], card["arch"]): card for card in record["cards"]}
    for card in compiled[1]["cards"]:
        assert card == recorded[card["subject"], card["arch"]]
