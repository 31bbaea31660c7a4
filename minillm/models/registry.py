"""Architecture names of config.json and the classes that implement them."""

from __future__ import annotations

from torch import nn

from minillm.models.llama import LlamaForCausalLM

_CLASSES: dict[str, type[nn.Module]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
}


def model_class(architecture: str) -> type[nn.Module]:
    """The class for an architecture; ValueError lists the known ones."""
    try:
        return _CLASSES[architecture]
    except KeyError:
        raise ValueError(f"architecture {architecture!r} is unknown; known are {', '.join(_CLASSES)}") from None
