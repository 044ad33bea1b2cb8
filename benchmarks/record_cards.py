"""Compile v1 and v2 for the chip of a dig's record, for every head_dim, dtype and mask in it.

    python benchmarks/record_cards.py benchmarks/results/nvidia-h200/dig.json

writes cards.json beside the record, which `flashdig dig --from` shows. It needs no GPU, and Triton
as installed here; the version stands in the file.
"""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from flashdig.bench.results import read_record
from flashdig.evidence.card_file import cards_to_json, compile_cards
from flashdig.report.dig_page_record import dig_of


def main(path: Path) -> None:
    record = read_record(path)
    digs = [dig_of(record, path.name, wanted=p.title) for p in dig_of(record, path.name).problems]
    keys = dict.fromkeys(key for dig in digs if (key := dig.card_key) is not None)
    if not keys:
        raise SystemExit(f"{path} names no chip that is known")
    found = []
    for key in keys:
        print(key.words, file=sys.stderr)
        found.append(compile_cards(key, version("triton")))
    command = shlex.join(["python", *sys.argv])
    path.with_name("cards.json").write_text(cards_to_json(found, command), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
