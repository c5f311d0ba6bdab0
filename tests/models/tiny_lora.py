"""A LoRA adapter for the tiny Llama, large enough to change what it says."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8
HIDDEN = 64


def make_tiny_lora(folder: Path, *, seed: int = 1) -> Path:
    """Write an adapter of the query projections in PEFT's form into `folder`, and return it."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
        "bias": "none",
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
