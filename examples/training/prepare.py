"""What some of the examples start from: tokens, a tokenizer, a dataset, a small transformers Llama. All made here.

python -m examples.training.prepare [tokens|tokenizer|dataset|llama] ...
"""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("runs/prepared")
END = "<|endoftext|>"


def texts() -> Iterator[str]:
    """Some modules of Python's standard library."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:30]:
        yield file.read_text(errors="replace")


def tokens() -> None:
    """Bytes as uint16, 256 after each document: the tokens that `data.tokenizer: bytes` would make."""
    import numpy

    (FOLDER / "tokens").mkdir(parents=True, exist_ok=True)
    documents = [[*text.encode(), 256] for text in texts()]
    for name, part in (("first", documents[:15]), ("second", documents[15:])):
        numpy.array([t for document in part for t in document], dtype="uint16").tofile(FOLDER / f"tokens/{name}.bin")


def tokenizer(folder: Path = FOLDER / "tokenizer", vocab_size: int = 1024) -> None:
    """A byte-level BPE tokenizer."""
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(texts(), vocab_size=vocab_size, special_tokens=[END], show_progress=False)
    made.save(str(folder / "tokenizer.json"))


def dataset() -> None:
    """A folder as `datasets` writes it."""
    import datasets

    datasets.Dataset.from_dict({"text": list(texts())}).save_to_disk(str(FOLDER / "dataset"))


def llama() -> None:
    """A transformers Llama with new weights and a tokenizer, as `save_pretrained` writes them."""
    import transformers

    tokenizer(FOLDER / "llama", vocab_size=512)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(FOLDER / "llama")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        {"tokens": tokens, "tokenizer": tokenizer, "dataset": dataset, "llama": llama}[name]()
