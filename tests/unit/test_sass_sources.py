"""What `flashdig sass` is asked about: ptxas's words, kernels by name, cache folders."""

import json
from pathlib import Path

import pytest

from flashdig.cli import main
from flashdig.evidence.kernel_source import (
    ArgumentType,
    parse_constants,
    parse_signature,
    split_subject,
)
from flashdig.evidence.ptxas import PtxasError, PtxasReport, read_report
from flashdig.evidence.sass_card import SassCard
from flashdig.evidence.triton_cache import read_cache
from tests.unit.test_sass import card

# as ptxas 12.9 printed it
SERIALISED = """\
ptxas info    : 11 bytes gmem, 8 bytes cmem[4]
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function 'k'
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    5712 bytes stack frame, 9548 bytes spill stores, 9532 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 5712 bytes cumulative stack size
ptxas info    : Compile time = 89.281 ms
"""


def test_what_ptxas_prints() -> None:
    found = read_report(SERIALISED)
    assert (found.registers, found.stack_bytes) == (255, 5712)
    assert (found.spill_store_bytes, found.spill_load_bytes) == (9548, 9532)
    (warning,) = found.warnings
    assert warning.startswith("(C7511) Potential Performance Loss: wgmma")
    assert found.serialises_wgmma


def test_a_warning_of_the_other_ptxas_and_a_report_without_any() -> None:
    text = SERIALISED.replace("ptxas info    : (C7511)", "ptxas-blackwell warning : ")
    assert len(read_report(text).warnings) == 1
    lines = [line for line in SERIALISED.splitlines() if "C7511" not in line]
    quiet = read_report("\n".join(lines))
    assert quiet.warnings == ()
    assert not quiet.serialises_wgmma
    with pytest.raises(PtxasError, match="no registers and no stack frame"):
        read_report("ptxas fatal   : Unresolved extern function 'f'")


def test_a_warning_is_said_and_survives_json() -> None:
    plain = card("v2_sm_90")
    values = json.loads(json.dumps({**plain.to_dict(), "ptxas": vars(read_report(SERIALISED))}))
    warned = SassCard.from_dict(values)
    assert any(s.startswith("warning of ptxas: (C7511)") for s in warned.sentences)
    assert isinstance(warned.ptxas, PtxasReport)
    for original in (plain, warned):
        assert SassCard.from_dict(json.loads(json.dumps(original.to_dict()))) == original
    with pytest.raises(KeyError):
        SassCard.from_dict({"subject": "v2"})


def test_a_signature() -> None:
    assert parse_signature("*fp16, i32:16,n=i64,*bf16:1,tensordesc<fp16[64, 64]>") == (
        ArgumentType(None, "*fp16", True),
        ArgumentType(None, "i32", True),
        ArgumentType("n", "i64", False),
        ArgumentType(None, "*bf16", False),
        ArgumentType(None, "tensordesc<fp16[64, 64]>", False),
    )
    assert parse_signature("") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("*float16", r"no type '\*float16'; nearest: "),
        ("i32:8", "only :16 and :1"),
        ("fp32:16", ":16 is for pointers and integers"),
        ("a b=i32", "'a b' is not the name of a parameter"),
    ],
)
def test_what_is_no_signature(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse_signature(text)


def test_constants_and_names() -> None:
    assert parse_constants(["BLOCK=64", "MODE = a=b"]) == {"BLOCK": "64", "MODE": "a=b"}
    for texts, message in ((["BLOCK"], "NAME=VALUE"), (["A=1", "A=2"], "A is given twice")):
        with pytest.raises(ValueError, match=message):
            parse_constants(texts)
    assert split_subject("package.module:kernel") == ("package.module", "kernel")
    assert split_subject(f"{__file__}:kernel") == (__file__, "kernel")
    for text, message in (("a:b c", "package.module:kernel or"), ("no/x.py:k", "no such file")):
        with pytest.raises(ValueError, match=message):
            split_subject(text)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["v2", "--signature", "*fp16"], 2, "--signature: only a MODULE:KERNEL takes that"),
        (["v2", "--num-warps", "4"], 2, "--num-warps: only a MODULE:KERNEL"),
        (["v2", "--match", "x"], 2, "--match: only a cache folder"),
        (["m:k", "--signature", "*fp17"], 2, "--signature: '*fp17': no type"),
        (["m:k", "--constant", "BLOCK"], 2, "--constant: a constant is NAME=VALUE"),
        (["kernels.py"], 2, "Name it as kernels.py:KERNEL"),
        (["no/folder"], 2, "no/folder: no such folder"),
    ],
)
def test_bad_arguments(arguments, code, message, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sass", *arguments])
    assert ended.value.code == code
    assert message in capsys.readouterr().err


def entry(folder: Path, name: str, arch: object = 90, **changes: object) -> Path:
    """An entry as Triton writes it, with a cubin that nobody opens here."""
    folder.mkdir(parents=True)
    metadata = {"name": f"{name}_fp16", "target": {"backend": "cuda", "arch": arch}, **changes}
    (folder / f"{name}.json").write_text(json.dumps(metadata))
    (folder / f"__grp__{name}.json").write_text("{}")
    (folder / f"{name}.ttir").write_text("")
    (folder / f"{name}.cubin").write_bytes(b"")
    return folder / f"{name}.cubin"


def test_a_cache_folder(tmp_path) -> None:
    entry(tmp_path / "AAA", "second")
    entry(tmp_path / "BBB", "first", arch=120)
    entry(tmp_path / "CCC", "first", arch=80)
    (tmp_path / "DDD").mkdir()
    (tmp_path / "DDD" / "gemm.autotune.json").write_text("{}")
    found = read_cache(tmp_path)
    assert [(one.kernel, one.arch, one.folder) for one in found.entries] == [
        ("first_fp16", "sm_80", "CCC"),
        ("first_fp16", "sm_120", "BBB"),
        ("second_fp16", "sm_90", "AAA"),
    ]
    assert found.unreadable == ()
    assert [e.arch for e in read_cache(tmp_path, name_contains="FIRST").entries] == [
        "sm_80",
        "sm_120",
    ]
    assert [e.folder for e in read_cache(tmp_path, archs=["sm_90"]).entries] == ["AAA"]


def test_entries_that_cannot_be_read_are_named(tmp_path) -> None:
    entry(tmp_path / "good", "good")
    entry(tmp_path / "torn", "torn").with_suffix(".json").write_text("{")
    entry(tmp_path / "other", "other", target={"backend": "hip", "arch": "gfx942"})
    entry(tmp_path / "old", "old", arch=52)
    entry(tmp_path / "gone", "gone").unlink()
    entry(tmp_path / "bare", "bare").with_suffix(".json").unlink()
    entry(tmp_path / "list", "list").with_suffix(".json").write_text("[]")
    found = read_cache(tmp_path)
    assert [one.kernel for one in found.entries] == ["good_fp16"]
    reasons = {path.stem: reason for path, reason in found.unreadable}
    assert reasons["torn"].startswith("not Triton's metadata: Expecting")
    assert reasons["other"] == "compiled for hip, not for an NVIDIA chip"
    assert reasons["old"].startswith("no facts about compute capability")
    assert reasons["gone"] == "gone.cubin is missing"
    assert reasons["bare"] == "no metadata (NAME.json) beside it"
    assert reasons["list"].startswith("not Triton's metadata: it names no kernel")
    assert len(reasons) == 6


def test_nothing_in_a_cache_matches(tmp_path, capsys) -> None:
    entry(tmp_path / "AAA", "gemm")
    for options, said in (
        (("--match", "flash"), "'flash' in its name for any chip"),
        (("--arch", "sm_80"), "no kernel for sm_80"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["sass", str(tmp_path), *options])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_what_is_no_cache(tmp_path) -> None:
    with pytest.raises(ValueError, match="no kernel compiled by Triton"):
        read_cache(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        read_cache(tmp_path / "nowhere")
