"""Cards of the exhibits for the problems of a record: compiled, kept beside it, and read again.

    {"schema": 1, "suite": "cards", "triton": ..., "command": ..., "compiled": [
      {"arch", "head_dim", "dtype", "tf32", "causal", "cards": [...], "failures": [...]}, ...]}

What a kernel compiles to depends on nothing else of a problem, so that one entry serves all batch
sizes and lengths. Compiling needs no GPU, but time and Triton; a page drawn from a record reads
the file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdig.evidence.offline import OfflineError, Request, compile_exhibits
from flashdig.evidence.sass_card import SassCard, card_of
from flashdig.hardware.arch import UnknownArchitectureError
from flashdig.problem import AttentionProblem

SCHEMA = 1
EXHIBITS = ("v1", "v2")
# long enough for the layouts of a real launch; the code is the same for every length
_SEQLEN = 1024


class UnreadableCardsError(ValueError):
    """A file holds no cards; the message names it and the place."""


@dataclass(frozen=True)
class Key:
    """What the code of an exhibit depends on; `arch` as "sm_90"."""

    arch: str
    head_dim: int
    dtype: str
    tf32: bool
    causal: bool

    @classmethod
    def of(cls, problem: AttentionProblem, arch: str) -> Key:
        return cls(arch, problem.head_dim, problem.dtype, problem.allow_tf32, problem.causal)

    @property
    def words(self) -> str:
        dtype = "float32 with TF32" if self.tf32 else self.dtype
        return f"{self.arch}, head_dim {self.head_dim}, {dtype}{', causal' if self.causal else ''}"


@dataclass(frozen=True)
class Cards:
    """The cards of one key, and why there are none of an exhibit.

    Attributes:
        triton: the version that compiled them; None where nobody says.
        failures: (exhibit, message).
    """

    key: Key
    triton: str | None
    cards: tuple[SassCard, ...]
    failures: tuple[tuple[str, str], ...] = ()

    def card(self, exhibit: str) -> SassCard | None:
        return next((card for card in self.cards if card.subject == exhibit), None)

    def to_dict(self) -> dict[str, Any]:
        failed = [{"subject": name, "error": message} for name, message in self.failures]
        cards = [card.to_dict() for card in self.cards]
        return {**dataclasses.asdict(self.key), "cards": cards, "failures": failed}


def compile_cards(key: Key, triton: str | None, exhibits: Sequence[str] = EXHIBITS) -> Cards:
    """Compile the exhibits in a process of its own; what does not compile becomes a failure."""
    problem = AttentionProblem.dense(
        1, 4, _SEQLEN, key.head_dim, key.dtype, causal=key.causal
    ).replace(allow_tf32=key.tf32)
    cards: list[SassCard] = []
    failures: list[tuple[str, str]] = []
    for exhibit in exhibits:  # one by one: a compiler that ends the process takes all with it
        try:
            (kernels,) = compile_exhibits([Request(exhibit, problem, key.arch)])
        except (OfflineError, UnknownArchitectureError) as error:
            failures.append((exhibit, str(error)))
        else:
            cards += [card_of(exhibit, key.arch, kernel) for kernel in kernels]
    return Cards(key, triton, tuple(cards), tuple(failures))


def cards_to_json(found: Sequence[Cards], command: str) -> str:
    """The file's text: one key a line. All must come from one Triton."""
    (triton,) = {cards.triton for cards in found}
    head = json.dumps({"schema": SCHEMA, "suite": "cards", "triton": triton, "command": command})
    lines = ",\n".join(json.dumps(cards.to_dict(), sort_keys=True) for cards in found)
    return f'{head[:-1]}, "compiled": [\n{lines}\n]}}\n'


def read_cards(path: Path) -> dict[Key, Cards]:
    """The cards in a file. Raises UnreadableCardsError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableCardsError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableCardsError(f"{path} is not JSON: {error}") from error
    try:
        return _cards_from(content)
    except (KeyError, TypeError, ValueError) as error:
        said = f"{error.args[0]!r} missing" if isinstance(error, KeyError) else str(error)
        raise UnreadableCardsError(f"{path} holds no cards: {said}") from error


def _cards_from(content: Any) -> dict[Key, Cards]:
    if not isinstance(content, dict) or content.get("suite") != "cards":
        raise ValueError('an object with "suite": "cards" is expected')
    if content["schema"] != SCHEMA:
        raise ValueError(
            f"schema {content['schema']!r} is not the one this version reads ({SCHEMA})"
        )
    triton = content["triton"]
    found = {}
    for entry in content["compiled"]:
        key = Key(**{field.name: entry[field.name] for field in dataclasses.fields(Key)})
        cards = tuple(_card_from(card) for card in entry["cards"])
        failures = tuple((str(f["subject"]), str(f["error"])) for f in entry["failures"])
        found[key] = Cards(key, None if triton is None else str(triton), cards, failures)
    return found


_COUNTS = ("registers", "stack_bytes", "spill_bytes", "instructions", "loop_instructions")
_UNKNOWN = (*_COUNTS, "shared_bytes", "threads", "exp2_expected")  # numbers, some of them None


def _card_from(values: Mapping[str, Any]) -> SassCard:
    for name in ("subject", "arch", "kernel"):
        if not isinstance(values[name], str):
            raise ValueError(f"{name} must be a string, got {values[name]!r}")
    for name in _UNKNOWN:
        _require_number(values[name], name, may_be_unknown=name not in _COUNTS)
    for name in ("whole", "loop", "cycles"):
        if not isinstance(values[name], dict):
            raise ValueError(f"{name} must be an object, got {values[name]!r}")
        for inner in values[name].values():
            _require_number(inner, name, may_be_unknown=name == "cycles")
    card = SassCard.from_dict(values)
    if not card.sentences:
        raise ValueError(f"nothing can be said of {card.subject}")
    return card


def _require_number(value: Any, name: str, *, may_be_unknown: bool) -> None:
    if value is None and may_be_unknown:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
