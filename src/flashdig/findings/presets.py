"""The source articles as presets: problem, variants, and the figures that they publish."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdig.findings.finding import Unit
from flashdig.problem import AttentionProblem

MANIFEST = "manifest.json"
COUNTERS = "counters.csv.gz"


@dataclass(frozen=True)
class Published:
    """A figure of an article.

    Attributes:
        variant: of the preset; "" where the figure is about two of them.
        what: key of what is looked up in the recording.
    """

    variant: str
    what: str
    value: float
    unit: Unit


@dataclass(frozen=True)
class ArticlePreset:
    """One article.

    Attributes:
        variants: name -> what is asked for (a key of `guess.ASKED`, or "sdpa").
        chip: device key of the chip that the article used.
        counters: whether Nsight Compute's counters are part of the recording.
    """

    name: str
    title: str
    problem: AttentionProblem
    variants: Mapping[str, str]
    chip: str
    published: tuple[Published, ...]
    counters: bool = False


ARTICLE_PRESETS = {
    preset.name: preset
    for preset in (
        ArticlePreset(
            name="profiling-article",
            title="Profiling attention: one causal attention by every backend",
            problem=AttentionProblem.dense(4, 16, 2048, 64, "bfloat16", causal=True),
            variants={
                "naive": "eager",
                "inplace": "eager",
                # pinned to the math backend; what the code asks for is one fused kernel
                "sdpa_math": "sdpa",
                "sdpa_efficient": "sdpa_efficient",
                "sdpa_flash": "sdpa_flash",
                "sdpa_cudnn": "sdpa_cudnn",
                "fa3": "fa3",
                "fa4": "fa4",
                "flex": "flex",
                "flashdig": "flashdig",
            },
            chip="a100-80",
            published=(
                Published("naive", "kernels", 5, "count"),
                Published("naive", "memcpys", 1, "count"),
                Published("inplace", "kernels", 5, "count"),
                Published("inplace", "memcpys", 0, "count"),
                Published("sdpa_math", "kernels", 20, "count"),
                Published("sdpa_efficient", "kernels", 1, "count"),
                Published("sdpa_flash", "kernels", 1, "count"),
                Published("sdpa_cudnn", "kernels", 1, "count"),
                Published("sdpa_flash", "transposes", 4, "count"),
                Published("sdpa_efficient", "transposes", 4, "count"),
                Published("sdpa_cudnn", "transposes", 0, "count"),
                Published("sdpa_flash", "registers", 255, "count"),
                Published("sdpa_flash", "threads", 128, "count"),
                Published("sdpa_flash", "occupancy", 12.5, "percent"),
                Published("sdpa_cudnn", "registers", 240, "count"),
                Published("sdpa_cudnn", "threads", 256, "count"),
                Published("sdpa_cudnn", "occupancy", 12.5, "percent"),
                Published("sdpa_efficient", "host time", 117_000, "ns"),
                Published("sdpa_flash", "host time", 138_000, "ns"),
                Published("sdpa_cudnn", "host time", 214_000, "ns"),
                Published("sdpa_cudnn", "host time in cuDNN itself", 26, "percent"),
                Published("sdpa_cudnn", "device time", 186_300, "ns"),
                Published("sdpa_math", "device time over naive's", 3.7, "ratio"),
            ),
        ),
        ArticlePreset(
            name="archaeology",
            title="Triton archaeology: v1, v2, v2 with K transposed beforehand",
            problem=AttentionProblem.dense(10, 64, 1024, 64, "float32"),
            variants={"v1": "v1", "v2": "v2", "v2_transposed": "v2_transposed"},
            chip="rtx-2070",
            published=(
                Published("v1", "bytes read", 11.58e9, "bytes"),
                Published("v1", "bytes written", 5.54e9, "bytes"),
                Published("v1", "occupancy", 25.0, "percent"),
                Published("v1", "device time", 166.47e6, "ns"),
                Published("v2", "bytes read", 412.18e6, "bytes"),
                Published("v2", "bank conflicts", 63.64, "percent"),
                Published("v2", "conflict slow-down", 2.75, "ratio"),
                Published("v2", "device time", 156.44e6, "ns"),
                Published("v2_transposed", "device time", 34.0e6, "ns"),
                Published("v2_transposed", "MIO throttle, cycles", 6.7, "ratio"),
                Published("v2_transposed", "tensor cores", 0.0, "percent"),
            ),
            counters=True,
        ),
    )
}


class RecordingsError(ValueError):
    """A folder does not hold the recordings of a preset; the message says what is missing."""


def read_manifest(folder: Path, preset: str) -> list[dict[str, Any]]:
    """The variants as the recorder left them, in its order.

    Raises RecordingsError.
    """
    path, content = folder / MANIFEST, _manifest(folder)
    if content.get("preset") != preset:
        raise RecordingsError(f"{path} is not the manifest of the preset {preset!r}")
    variants = content.get("variants")
    if not isinstance(variants, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in variants
    ):
        raise RecordingsError(f"{path}: variants must be a list of objects with a name")
    return variants


def recorded_on(folder: Path) -> tuple[dict[str, Any], str | None]:
    """The environment that a folder was recorded in, and the revision that recorded it.

    Raises RecordingsError where the manifest does not say.
    """
    content = _manifest(folder)
    environment, revision = content.get("environment"), content.get("revision")
    if not isinstance(environment, dict):
        raise RecordingsError(f"{folder / MANIFEST} does not say on what it was recorded")
    return environment, revision if isinstance(revision, str) else None


def environment_of(folder: Path) -> dict[str, Any]:
    """What the manifest says of the machine; empty where it says nothing."""
    environment = _manifest(folder).get("environment")
    return environment if isinstance(environment, dict) else {}


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordingsError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RecordingsError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise RecordingsError(f"{path} must hold an object")
    return content
