"""`headrace mtp check MODEL`: how often a model's prediction head is right."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from headrace.cli.mtp_texts import TEXTS
from headrace.cli.text_pipeline import configured_text_pipeline
from headrace.config import Config, warn_of_unknown_variables
from headrace.engine.head_check import BEFORE_NORM, HeadCheck, load_head_check

_DEPTH = 4
_NUM_TOKENS = 32
"""Positions of each text at which the head drafts."""

_LEAST_USABLE = 0.2
"""Share of first drafts that must be right; a good head reaches 0.7 to 0.9, a misread one next to nothing."""

_UNUSABLE = 1


def run(config: Config) -> None:
    """Prints what was measured. Raises ModelError, and SystemExit with 1 if the head is not usable."""
    warn_of_unknown_variables()
    tokenizer = configured_text_pipeline(config).tokenizer
    check = load_head_check(config, [tokenizer.encode_document(text) for text in TEXTS], tokenizer.token_ids)
    print(f"head: {check.head.report}")
    print(f"text: {_NUM_TOKENS} tokens of the model's own after each of {len(TEXTS)} passages", flush=True)
    found = check.measure(_NUM_TOKENS, _DEPTH)
    print(f"{'draft':>8}{'right if those before are':>28}{'tokens per step':>18}")
    for depth in range(1, _DEPTH + 1):
        print(f"{depth:>8}{found.share(depth):>28.2f}{found.tokens_per_step(depth):>18.2f}")
    if found.first >= _LEAST_USABLE:
        return
    print(f"The head is not usable: {found.first:.0%} of its first drafts are right, of a good one's 70 % and more.")
    sys.stdout.flush()
    for line in _explanation(check, found.first):
        print(line, flush=True)
    raise SystemExit(_UNUSABLE)


def _explanation(check: HeadCheck, first: float) -> Iterator[str]:
    """Says what may be wrong with a head and what helps. first: the share of its first drafts that is right."""
    best, name = first, ""
    for label, share in check.other_readings():
        yield f"{label}: {share:.0%} of the first drafts are right"
        if share > best:
            best, name = share, label
    if best >= _LEAST_USABLE and name == BEFORE_NORM:
        yield f"So the head was trained on {name}, and no file of it will be read that way here."
        return
    if best >= _LEAST_USABLE:
        yield f"So its norms are stored in another form than it seems: {name}."
    elif check.weights.is_quantised:
        yield "It is quantised, like the trunk: a head in so few bits is rarely right."
    else:
        yield "No other reading of it is better: it belongs to another model, or is damaged."
    yield "`headrace mtp extract SOURCE OUT`, with the full-precision original as SOURCE and this model's folder as"
    yield "OUT, puts a head in bfloat16 beside the model, with what is known of its norms."
