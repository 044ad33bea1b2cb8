"""Recording a preset: what needs no GPU of it."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import torch

from flashdig.evidence import preset_recordings
from flashdig.evidence.preset_recordings import RecordingError, Variant, keep_columns
from flashdig.findings.presets import (
    ARTICLE_PRESETS,
    RecordingsError,
    read_manifest,
    recorded_on,
)
from flashdig.readers.ncu import read_ncu

NCU = Path(__file__).parents[1] / "data" / "ncu" / "ncu_raw_h200.csv.gz"


def test_the_columns_that_are_kept_are_those_that_are_read(tmp_path) -> None:
    """Everything but one pipe that no rule asks for comes out as from the whole table."""
    table, thin = tmp_path / "raw.csv", tmp_path / "thin.csv.gz"
    table.write_bytes(gzip.decompress(NCU.read_bytes()))
    keep_columns(table, thin)
    whole, kept = read_ncu(str(NCU)), read_ncu(str(thin))
    assert thin.stat().st_size < 10_000 < NCU.stat().st_size
    assert len(kept) == len(whole) == 13
    for one, other in zip(kept, whole, strict=True):
        for field in dataclasses.fields(one):
            if field.name in ("metrics", "source"):
                continue
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            if field.name == "pipes":
                theirs = dataclasses.replace(theirs, fp64=None)
            assert mine == theirs, field.name


def test_every_counter_that_is_asked_for_exists() -> None:
    """Names as Nsight Compute itself writes them."""
    with gzip.open(NCU, "rt") as text:
        header = text.readline()
    missing = [name for name in preset_recordings._METRICS if f'"{name}"' not in header]
    assert missing == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path) -> None:
    with pytest.raises(RecordingError, match="need an NVIDIA GPU"):
        preset_recordings.record_profiling_article(tmp_path)
    with pytest.raises(RecordingError, match="need an NVIDIA GPU"):
        preset_recordings.record_archaeology(tmp_path)


def test_the_manifest_comes_back(tmp_path) -> None:
    variants = [Variant("naive", "naive.json.gz", "ok", error=0.1), Variant("fa3", None, "not run")]
    preset_recordings.write_manifest(tmp_path, "profiling-article", variants)
    found = read_manifest(tmp_path, "profiling-article")
    assert [(one["name"], one["gate"]) for one in found] == [("naive", "ok"), ("fa3", "not run")]
    environment, _ = recorded_on(tmp_path)
    assert environment["torch"]
    with pytest.raises(RecordingsError, match="is not the manifest of the preset 'archaeology'"):
        read_manifest(tmp_path, "archaeology")
    (tmp_path / "manifest.json").write_text(json.dumps({"preset": "archaeology", "variants": []}))
    with pytest.raises(RecordingsError, match="does not say on what"):
        recorded_on(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(RecordingsError, match="must hold an object"):
        read_manifest(tmp_path, "archaeology")


def test_the_recorder_and_the_preset_name_the_same_variants() -> None:
    names = (*preset_recordings.EXHIBITS, *preset_recordings.PEERS, "flashdig")
    assert names == tuple(ARTICLE_PRESETS["profiling-article"].variants)
    assert tuple(ARTICLE_PRESETS["archaeology"].variants) == preset_recordings.DUG
    article = ARTICLE_PRESETS["profiling-article"].problem
    assert preset_recordings.ARTICLE.problem.replace(mask=article.mask) == article
