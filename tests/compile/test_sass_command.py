"""`flashdig sass` from exhibit to card, with the compiler."""

import json

import pytest

from flashdig.cli import main


def run(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["sass", *arguments])
    return ended.value.code or 0, capsys.readouterr().out


def test_what_compiles_is_shown_beside_what_does_not(capsys) -> None:
    code, out = run(capsys, "v2", "naive", "--arch", "sm_80", "--json")
    assert code == 0
    found = json.loads(out)
    (card,) = found["cards"]
    assert (card["subject"], card["arch"], card["spill_bytes"]) == ("v2", "sm_80", 0)
    assert card["loop"]["HMMA"] == 64
    assert card["exp2_expected"] == 32 <= card["loop"]["MUFU.EX2"]
    assert card["cycles"]["tensor cores"] == 512
    assert found["failures"] == [
        {
            "subject": "naive",
            "arch": "sm_80",
            "error": "launches no Triton kernel: there is nothing to compile",
        }
    ]


def test_what_the_compiler_refuses_is_a_row(capsys) -> None:
    options = ("--arch", "sm_75", "--head-dim", "256", "--dtype", "fp32", "--json")
    for exhibits, exit_code, shown in (
        (["v2"], 1, []),
        (["v2", "online_softmax"], 0, ["online_softmax"]),
    ):
        code, out = run(capsys, *exhibits, *options)
        assert code == exit_code
        found = json.loads(out)
        assert [card["subject"] for card in found["cards"]] == shown
        (failure,) = found["failures"]
        assert "out of resource: shared memory" in failure["error"]
