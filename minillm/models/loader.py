"""Hugging Face checkpoints: safetensors in, our merged parameters filled, every tensor accounted for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from minillm.core.model_config import CheckpointError, ModelConfig, read_json
from minillm.models.layers.linear import Linear
from minillm.models.registry import model_class

DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    folder: str | Path, dtype: str | None = None, device: str = "cpu", kernel_backend: str = "torch"
) -> nn.Module:
    """Build the model that ``folder``'s config.json describes and fill it. ``dtype`` None: the checkpoint's own.

    ``kernel_backend`` as in EngineConfig: only "auto" and "cpp" differ from "torch", in bfloat16 on a CPU. Raises
    CheckpointError, naming file and field or tensor, for whatever is missing, left over or of a wrong shape, and
    ValueError for an unknown ``dtype`` or a ``kernel_backend`` that can't be had.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config = ModelConfig.from_folder(folder)
    dtype = dtype or config.dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; known are {', '.join(DTYPES)}")
    model = model_class(config.architecture)(config, DTYPES[dtype], device, kernel_backend)
    fill(model, tensors(folder))
    model.process_after_loading()
    return model


def tensors(folder: Path) -> Iterator[tuple[str, Tensor, str]]:
    """(name, tensor, file) of every tensor in ``model.safetensors`` or the shards its index lists."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing; it must map tensor names to files")
        for tensor, name in weight_map.items():
            # A name with a path in it could reach outside the folder.
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{index}: weight_map[{tensor!r}] is {name!r}; it must be a file of this folder")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.exists():
            hint = f" ({index.name} lists it)" if index.exists() else "; only safetensors and GGUF are read"
            raise CheckpointError(f"{file}: no such file{hint}")
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (the handle itself cannot be iterated)
                    yield name, handle.get_tensor(name), str(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: is not a whole safetensors file ({error})") from None


def fill(model: nn.Module, items: Iterator[tuple[str, Tensor, str]]) -> None:
    """Copy every named tensor to its place; complain of the first that has none, and of all places left empty."""
    wanted = _places(model)
    missing = set(wanted)
    source = "checkpoint"
    for name, tensor, source in items:
        if name.endswith("rotary_emb.inv_freq"):
            continue  # old checkpoints store what config.json determines
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue  # a tied head may be stored twice
        place = wanted.get(name)
        if place is None:
            raise CheckpointError(f"{source}: tensor {name} has no place in {model.config.architecture}")
        if tensor.dtype not in DTYPES.values():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{source}: tensor {name} is of {kind}; known are {', '.join(DTYPES)}")
        module, parameter, shard = place
        try:
            if isinstance(module, Linear):
                module.method.load_shard(module, parameter, shard, tensor)
            else:
                target = getattr(module, parameter)
                if target.shape != tensor.shape:
                    raise ValueError(f"shape {list(tensor.shape)}, wanted {list(target.shape)}")
                target.copy_(tensor)
        except ValueError as error:
            raise CheckpointError(f"{source}: tensor {name} has {error}") from None
        missing.discard(name)
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise CheckpointError(f"{source}: {len(missing)} tensors are missing, among them {names}")


def save_model(model: nn.Module, folder: str | Path, dtype: torch.dtype) -> None:
    """Write ``model.safetensors`` with the checkpoint's names, merged parameters taken apart again.

    ValueError if a weight was packed for a CPU after loading: its plain form is gone.
    """
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.packed is not None:
            raise ValueError(f"{path}.weight was packed after loading and can't be saved; load the model in float32")
    state = {}
    for name, (module, parameter, shard) in _places(model).items():
        value = getattr(module, parameter)
        if isinstance(module, Linear):
            value = module.partition(value, shard)
        state[name] = value.detach().to(dtype).contiguous().clone()
    save_file(state, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def _places(model: nn.Module) -> dict[str, tuple[nn.Module, str, int]]:
    """Checkpoint name -> (module, parameter, partition)."""
    places = {}
    tied = model.config.tie_word_embeddings
    for path, module in model.named_modules():
        for parameter, _ in module.named_parameters(recurse=False):
            if path == "lm_head" and tied:
                continue
            parent, _, leaf = path.rpartition(".")
            names = model.packed_modules.get(leaf, (leaf,))
            for shard, name in enumerate(names):
                full = f"{parent}.{name}" if parent else name
                prefix = "" if path == "lm_head" else "model."
                places[f"{prefix}{full}.{parameter}"] = (module, parameter, shard)
    return places


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def work_folder(path: Path) -> Iterator[Path]:
    """An empty folder for something that is built in it and renamed to its place when it is whole.

    Deleted at the end, however the block ends; what a killed run left there is cleared first.
    """
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
