"""A tiny Llama, made in under a second, that vLLM loads: noise for text, but real scheduling, KV cache and sampling.

Two layers, hidden size 64, byte-level BPE without merges (so a token is a byte), 320 ids, random weights of a
range wide enough that greedy decoding does not repeat one token. head_dim is 32: at 16, vLLM's CPU attention ends
the engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

VOCAB_SIZE = 320
MAX_POSITIONS = 2048
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_llama(folder: Path, *, seed: int = 0) -> Path:
    """Write config, weights and tokenizer of the model into `folder`, and return it. Needs torch and transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.convert_tokens_to_ids("<s>"),
        eos_token_id=tokenizer.convert_tokens_to_ids("</s>"),
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *letters]
    # Ids up to the model's vocabulary size, so that whatever it samples can be turned into text.
    names += [f"<extra_{i}>" for i in range(VOCAB_SIZE - len(names))]
    raw = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


if __name__ == "__main__":
    print(make_tiny_llama(Path(sys.argv[1])))
