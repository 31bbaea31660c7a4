"""Checkpoints for the tests of models: transformers' own, and a small one of ours to break."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minillm.core.model_config import ModelConfig
from minillm.models.llama import LlamaForCausalLM
from minillm.models.loader import load_model, save_model, write_json
from tests.models.checkpoints import BASE, CASES, LENGTH, Reference, redraw


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Matrices this small only lose by threads, and lose a lot where another process wants the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """name -> Reference; each is made once, when first asked for."""
    import transformers

    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            family, differs = CASES[name]
            settings = copy.deepcopy({**BASE, **differs})  # transformers adds to the rope dictionary
            config = getattr(transformers, f"{family}Config")(**settings, eos_token_id=[1, 2], bos_token_id=0)
            config._attn_implementation = "eager"
            model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            redraw(model)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder, max_shard_size="50KB" if "sharded" in name else "1GB")
            token_ids = torch.randint(config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                logits = model(token_ids[None]).logits[0]
            assert logits.std() >= 1, "logits too small for an absolute tolerance to mean much"
            made[name] = Reference(folder, token_ids, logits)
        return made[name]

    return get


@pytest.fixture
def case(request, references):
    """(our model in float32, its Reference) of the case this test is parametrised with."""
    reference = references(request.param)
    return load_model(reference.folder, "float32"), reference


@pytest.fixture
def small_config() -> dict:
    """A config.json, as a dict, of the smallest Llama with everything a loader may trip over."""
    return {"architectures": ["LlamaForCausalLM"], "dtype": "float32", **copy.deepcopy(BASE), "attention_bias": True}


@pytest.fixture
def small_folder(tmp_path, small_config) -> Path:
    """A whole checkpoint of ``small_config`` with random weights and a byte-level tokenizer."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    model = LlamaForCausalLM(ModelConfig.from_dict(small_config))
    redraw(model)
    save_model(model, folder, torch.float32)
    write_json(folder / "config.json", small_config)
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 2]})
    vocabulary = {token: i for i, token in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<end>"})
    return folder
