"""Makes what sft.toml is pointed at, where nothing can be downloaded: a folder with a small model and its tokenizer.

python examples/sft/sft.py runs/base
meshwright train examples/sft/sft.toml --set model.source=hf:$PWD/runs/base --set data.source=$PWD/runs/base/chats.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MARKS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def make(folder: Path, num_chats: int = 2000) -> None:
    """Write a Llama with random weights, a tokenizer of bytes with a chat template, and conversations about sums."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone, eos_token=MARKS[1], pad_token=MARKS[1], additional_special_tokens=list(MARKS)
    )
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    draw = random.Random(0)
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(num_chats):
            one, other = draw.randrange(50), draw.randrange(50)
            asked = {"role": "user", "content": f"What is {one} + {other}?"}
            answer = {"role": "assistant", "content": f"{one} + {other} = {one + other}"}
            file.write(json.dumps({"messages": [asked, answer]}) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
