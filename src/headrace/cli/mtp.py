"""`headrace mtp extract` writes a prediction head as a file, `headrace mtp check` measures how often it is right."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from headrace.cli.configured import configured_text_pipeline, no_chat_model
from headrace.config import Config
from headrace.config_loading import warn_of_unknown_variables
from headrace.engine.head_check import BEFORE_NORM, HeadCheck, load_head_check
from headrace.models.built_in import built_in_folder
from headrace.models.mtp_weights import extract_head

_DEPTH = 4
_NUM_TOKENS = 32
"""Positions of each text at which the head drafts."""

_LEAST_USABLE = 0.2
"""Share of first drafts that must be right; a good head reaches 0.7 to 0.9, a misread one next to nothing."""

_UNUSABLE = 1


def run_extract(given: argparse.Namespace) -> None:
    """Writes the file and prints what is in it. Raises ConfigError and ModelError."""
    built_in = built_in_folder(given.source)
    done = extract_head(given.source if built_in is None else str(built_in), given.out.expanduser())
    print(f"{done.file}: {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB, out of {', '.join(done.shards)}")
    print("norms: zero-centred, as the file says" if done.is_centred else "norms: told by their numbers when loaded")


def run_check(config: Config) -> None:
    """Prints what was measured. Raises ModelError, and SystemExit with 1 if the head is not usable."""
    warn_of_unknown_variables()
    text = configured_text_pipeline(config)
    if text is None:
        raise no_chat_model(config)
    tokenizer = text.tokenizer
    check = load_head_check(config, [tokenizer.encode_document(each) for each in TEXTS], tokenizer.token_ids)
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


_PROSE = (
    "The harbour office opens at seven, long before the first ferry comes in. Someone has to sweep the steps, read the "
    "barometer and write the day's weather on the board beside the door. For eleven years that was Martha Quill, who "
    "knew every skipper by the sound of the engine and could tell from the gulls whether the wind would turn before "
    "noon. When she retired, the town gave her a brass clock and a small boat. She sold the clock and kept the boat, "
    "and on most mornings she can be seen rowing out past the breakwater, because, as she says, somebody still has to "
    "look at the weather. In the"
)

_LIST = """Things to bring for the walk on Saturday:

1. Water, at least two litres for each person
2. Bread, cheese and apples
3. A map of the northern hills and a compass
4. Rain jackets, because the forecast changes every day
5. A torch with fresh batteries
6. Plasters and a bandage

Things to do before we leave:

1. Feed the cat
2. Close all windows
3."""

_CODE = '''def read_table(path):
    """Rows of a comma-separated file as dictionaries, by the names in its first line."""
    rows = []
    with open(path, encoding="utf-8") as file:
        names = file.readline().strip().split(",")
        for line in file:
            values = line.strip().split(",")
            rows.append(dict(zip(names, values)))
    return rows


def write_table(path, rows):
    """Write dictionaries that have the same keys as a comma-separated file."""
    names = list(rows[0])
    with open(path, "w", encoding="utf-8") as file:
'''

TEXTS = (_PROSE, _LIST, _CODE)
"""The model continues these."""
