"""Makes the tiny checkpoints of this folder and `expected.json`: what sentence-transformers computes with them.

Run with sentence-transformers 6.2 installed, in any folder: `python make.py`. It uses nothing of Headrace. Weights are
random, tokenizers are trained on the texts below. The files around the weights have the form of most models on the
Hugging Face hub, as older versions of the library wrote them; those of `bert_dense` are as version 6.2 writes them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

HERE = Path(__file__).parent

TEXTS = [
    "The river carries snow water down to the mill.",
    "Snow water drives the mill by the river.",
    "A headrace leads water to the wheel.",
    "Quarterly revenue rose by four per cent.",
    "x",
    "The wheel turns, the stones grind, the flour falls into the bin, and the miller counts the sacks. " * 3,
]
PAIRS = [
    ["what drives the mill?", "Snow water drives the mill by the river."],
    ["what drives the mill?", "Quarterly revenue rose by four per cent."],
    ["what drives the mill?", TEXTS[5]],
    ["x", "y"],
]
QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
RERANK = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
CORPUS = [*TEXTS, *(text for pair in PAIRS for text in pair), QUERY, RERANK, INSTRUCTION] * 3
SIZE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
SPREAD = 0.25
"""Standard deviation of the weights: large enough that every token and every layer shows in the result."""


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )  # fmt: skip
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def byte_level(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*CORPUS, *["yes", "no"] * 50], trainer)
    return tokenizer


def modern() -> Tokenizer:
    tokenizer = byte_level(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def qwen(*, ends: bool) -> Tokenizer:
    """ends: with the end-of-text token after each document, as the embedding models' tokenizer adds it."""
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", pair="$A <|endoftext|> $B <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
        )
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer, names: dict[str, Any], max_length: int) -> Any:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **names)
    wrapped.save_pretrained(folder)
    return wrapped


BERT_NAMES = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
BERT_INPUTS = ["input_ids", "token_type_ids", "attention_mask"]
ROBERTA_NAMES = {
    "bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "cls_token": "<s>",
    "sep_token": "</s>", "mask_token": "<mask>",
}  # fmt: skip
QWEN_NAMES = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def spread(model: Any) -> Any:
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(0.0, SPREAD)
            elif name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.1)
    return model.eval()


def fresh(name: str) -> Path:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_modules(
    folder: Path, mode: str, max_length: int | None, prompts: dict[str, str], *, normalizes: bool
) -> None:
    """The files of sentence-transformers 2 to 4."""
    old = "sentence_transformers.models"
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalizes else [])]
    write(
        folder / "modules.json",
        [{"idx": i, "name": str(i), "path": path, "type": f"{old}.{kind}"} for i, (path, kind) in enumerate(modules)],
    )
    modes = {
        "cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "mean_sqrt": "mean_sqrt_len_tokens",
        "weighted": "weightedmean_tokens", "last": "lasttoken",
    }  # fmt: skip
    flags = {f"pooling_mode_{name}": key == mode for key, name in modes.items()}
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **flags, "include_prompt": True})
    write(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    if max_length is not None:
        write(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})


def as_lists(rows: Any) -> list[list[float]]:
    return [[round(float(x), 7) for x in row] for row in rows]


def embeddings(folder: Path, prompt_name: str | None = None) -> dict[str, Any]:
    model = SentenceTransformer(str(folder), device="cpu")
    found: dict[str, Any] = {"texts": as_lists(model.encode(TEXTS, batch_size=1))}
    if prompt_name is not None:
        found[f"with prompt {prompt_name}"] = as_lists(model.encode(TEXTS, prompt_name=prompt_name, batch_size=1))
    return found


def scores(folder: Path) -> dict[str, Any]:
    model = CrossEncoder(str(folder), device="cpu")
    return {"pairs": [round(float(x), 7) for x in model.predict(PAIRS, batch_size=1)]}


def bert_mean() -> dict[str, Any]:
    folder = fresh("bert_mean")
    tokenizer = wordpiece()
    save_tokenizer(folder, tokenizer, BERT_NAMES, 512)
    config = BertConfig(**SIZE, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=64)
    spread(BertModel(config)).save_pretrained(folder)
    write_modules(folder, "mean", 48, {"query": "query: ", "passage": "passage: "}, normalizes=True)
    return embeddings(folder, "query")


def bert_dense() -> dict[str, Any]:
    base, folder = fresh("base"), fresh("bert_dense")
    tokenizer = wordpiece()
    save_tokenizer(base, tokenizer, BERT_NAMES, 40)
    config = BertConfig(
        **SIZE, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=64, hidden_act="gelu_new"
    )
    spread(BertModel(config)).save_pretrained(base)
    dense = spread(Dense(64, 24, activation_function=torch.nn.Tanh()))
    pooling = Pooling(32, ("cls", "max"))
    model = SentenceTransformer(modules=[Transformer(str(base)), pooling, dense, Normalize()], device="cpu")
    model.save(str(folder))
    (folder / "README.md").unlink()
    shutil.rmtree(base)
    return embeddings(folder)


def bert_pairs() -> dict[str, Any]:
    folder = fresh("bert_pairs")
    tokenizer = wordpiece()
    save_tokenizer(folder, tokenizer, {**BERT_NAMES, "model_input_names": BERT_INPUTS}, 64)
    config = BertConfig(**SIZE, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=64, num_labels=1)
    config.sbert_ce_default_activation_function = "torch.nn.modules.linear.Identity"
    spread(BertForSequenceClassification(config)).save_pretrained(folder)
    return scores(folder)


def roberta_config(**more: Any) -> XLMRobertaConfig:
    return XLMRobertaConfig(
        **SIZE, vocab_size=unigram().get_vocab_size(), max_position_embeddings=130, type_vocab_size=1, pad_token_id=1,
        layer_norm_eps=1e-5, **more,
    )  # fmt: skip


def roberta_cls() -> dict[str, Any]:
    folder = fresh("roberta_cls")
    save_tokenizer(folder, unigram(), ROBERTA_NAMES, 128)
    spread(XLMRobertaModel(roberta_config(), add_pooling_layer=False)).save_pretrained(folder)
    write_modules(folder, "cls", 128, {}, normalizes=True)
    return embeddings(folder)


def roberta_pairs() -> dict[str, Any]:
    folder = fresh("roberta_pairs")
    save_tokenizer(folder, unigram(), ROBERTA_NAMES, 128)
    spread(XLMRobertaForSequenceClassification(roberta_config(num_labels=1))).save_pretrained(folder)
    return scores(folder)


def modern_config(**more: Any) -> ModernBertConfig:
    return ModernBertConfig(
        **(SIZE | {"num_hidden_layers": 4}), vocab_size=modern().get_vocab_size(), max_position_embeddings=512,
        local_attention=16, pad_token_id=0, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3, **more,
    )  # fmt: skip


def modern_cls() -> dict[str, Any]:
    folder = fresh("modern_cls")
    save_tokenizer(folder, modern(), BERT_NAMES, 512)
    spread(ModernBertModel(modern_config())).save_pretrained(folder)
    write_modules(folder, "cls", 512, {}, normalizes=False)
    return embeddings(folder)


def modern_pairs() -> dict[str, Any]:
    folder = fresh("modern_pairs")
    save_tokenizer(folder, modern(), BERT_NAMES, 512)
    config = modern_config(num_labels=1, classifier_pooling="mean")
    spread(ModernBertForSequenceClassification(config)).save_pretrained(folder)
    return scores(folder)


def qwen_config(vocab_size: int, **more: Any) -> Qwen3Config:
    return Qwen3Config(
        **SIZE, vocab_size=vocab_size, max_position_embeddings=1024, num_key_value_heads=2, head_dim=16,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=2, pad_token_id=0, **more,
    )  # fmt: skip


def qwen_embedding() -> dict[str, Any]:
    """Its tensors have no `model.` before their names, and its config names the class with a head, as Qwen's do."""
    folder = fresh("qwen_embedding")
    tokenizer = qwen(ends=True)
    save_tokenizer(folder, tokenizer, QWEN_NAMES, 1024)
    spread(Qwen3Model(qwen_config(tokenizer.get_vocab_size()))).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", config | {"architectures": ["Qwen3ForCausalLM"]})
    write_modules(folder, "last", None, {"query": QUERY, "document": ""}, normalizes=True)
    return embeddings(folder, "query")


def reranked(tokenizer: Any) -> list[Any]:
    prompts = [RERANK.format(instruction=INSTRUCTION, query=query, document=text) for query, text in PAIRS]
    return [tokenizer(prompt, return_tensors="pt") for prompt in prompts]


def qwen_reranker() -> dict[str, Any]:
    """The probability of `yes` against `no` at the last token, as the model card computes it."""
    folder = fresh("qwen_reranker")
    tokenizer = qwen(ends=False)
    wrapped = save_tokenizer(folder, tokenizer, QWEN_NAMES, 1024)
    model = spread(Qwen3ForCausalLM(qwen_config(tokenizer.get_vocab_size())))
    model.save_pretrained(folder)
    no, yes = wrapped.convert_tokens_to_ids(["no", "yes"])
    found = []
    for batch in reranked(wrapped):
        with torch.no_grad():
            logits = model(**batch).logits[0, -1]
        found.append(round(float(torch.softmax(logits[[no, yes]], 0)[1]), 7))
    return {"pairs": found}


def qwen_classifier() -> dict[str, Any]:
    folder = fresh("qwen_classifier-reranker")
    tokenizer = qwen(ends=False)
    wrapped = save_tokenizer(folder, tokenizer, QWEN_NAMES, 1024)
    model = spread(Qwen3ForSequenceClassification(qwen_config(tokenizer.get_vocab_size(), num_labels=1)))
    model.save_pretrained(folder)
    found = []
    for batch in reranked(wrapped):
        with torch.no_grad():
            found.append(round(float(torch.sigmoid(model(**batch).logits[0, 0])), 7))
    return {"pairs": found}


if __name__ == "__main__":
    made = {
        "bert_mean": bert_mean(),
        "bert_dense": bert_dense(),
        "bert_pairs": bert_pairs(),
        "roberta_cls": roberta_cls(),
        "roberta_pairs": roberta_pairs(),
        "modern_cls": modern_cls(),
        "modern_pairs": modern_pairs(),
        "qwen_embedding": qwen_embedding(),
        "qwen_reranker": qwen_reranker(),
        "qwen_classifier-reranker": qwen_classifier(),
    }
    versions = {
        "sentence-transformers": sentence_transformers.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    expected = {"versions": versions, "texts": TEXTS, "pairs": PAIRS, "models": made}
    (HERE / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")
