"""Trains the miniature's tokenizer: byte-level BPE of 4,096 entries with the family's special tokens at the end.

python -m training.tokenizer OUT_FOLDER
"""

import itertools
import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from training.chat import joined, render
from training.jobs import talk_lines
from training.mixture import samples

VOCABULARY_SIZE = 4096
NUM_SAMPLES = {"short": 24_000, "long": 600, "media": 4_000}
# The family's way of cutting text into words: contractions, letters, single digits, signs, line ends, spaces.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
PLAIN_TOKENS = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
).split()


def texts() -> itertools.chain[str]:
    """What the merges are learned from: rendered samples, with the hand-written lines counted often."""
    lines = [f"{a}\n{b}" for table in (talk_lines.ABOUT_ITSELF, talk_lines.WORLD) for a, b in table] * 20
    kinds = (
        "".join(text for text, _ in joined(render(sample)))
        for kind, count in NUM_SAMPLES.items()
        for sample in itertools.islice(samples(kind, "tokenizer"), count)
    )
    return itertools.chain(lines, kinds)


def train() -> Tokenizer:
    """The tokenizer with exactly `VOCABULARY_SIZE` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    num_added = len(SPECIAL_TOKENS) + len(PLAIN_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - num_added,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((_without_marks(text) for text in texts()), trainer)
    missing = VOCABULARY_SIZE - num_added - tokenizer.get_vocab_size()
    if missing:
        raise ValueError(f"the texts give {missing} entries too few for a vocabulary of {VOCABULARY_SIZE}")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS])
    return tokenizer


def _without_marks(text: str) -> str:
    for token in (*SPECIAL_TOKENS, *PLAIN_TOKENS):
        text = text.replace(token, "\n")
    return text


def configuration(context_length: int) -> dict[str, object]:
    """tokenizer_config.json."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": context_length,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "split_special_tokens": False,
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    train().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration(16_384), indent=2) + "\n")


if __name__ == "__main__":
    main()
