"""What is submitted: seeded, so that two runs do the same work."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

LINE_BYTES: Final = 600
MAX_TOKENS: Final = 64
RESULT_BYTES: Final = 944
"""About what an echo result of such a line takes, for the bare loops."""

FEED_CAP: Final = 128
FEED_MEDIAN: Final = 32.0
FEED_SIGMA: Final = 0.8

_TEXT: Final = (
    "water wheel gate channel stone river mill grain turn flow rise fall steady slow quick deep clear cold upper "
    "lower first last north south light dark old new small great open closed summary answer question table"
)
_WORDS: Final = _TEXT.split()


def write_lines(path: Path, count: int, *, seed: int = 0) -> Path:
    """A JSONL file of `count` plain lines of about 600 bytes each: a prompt and `max_tokens`."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as out:
        for i in range(count):
            text = f"Item {i}: " + " ".join(rng.choices(_WORDS, k=96))
            line = {"prompt": text, "max_tokens": MAX_TOKENS}
            line["prompt"] = text[: LINE_BYTES - (len(json.dumps(line)) - len(text)) - 1]
            out.write(json.dumps(line) + "\n")
    return path


def feed_items(count: int, *, vocabulary: int = 256, seed: int = 0) -> list[dict[str, Any]]:
    """Items for an engine: token ids, and an exact number of output tokens from a capped log-normal.

    `ignore_eos` makes each item take all of its `max_tokens`, on every engine alike.
    """
    rng = random.Random(seed)
    items: list[dict[str, Any]] = []
    for _ in range(count):
        length = max(1, min(FEED_CAP, round(FEED_MEDIAN * rng.lognormvariate(0.0, FEED_SIGMA))))
        ids = [rng.randrange(16, vocabulary) for _ in range(rng.randrange(12, 28))]
        items.append({"prompt_token_ids": ids, "max_tokens": length, "ignore_eos": True, "temperature": 0.0})
    return items
